"""The optimizer of one model: fp32 masters, schedule, clipping, and its state in safetensors.

Where the module computes in fp32 its parameters are the masters. Where it computes in bf16, fp32 masters lie beside
the optimizer, gradients are added to them in fp32 as each one is made, and after a step the module's own parameters
are written in place, so that an engine which reads them has nothing to fetch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from whet.config import OptimConfig
from whet.errors import CheckpointError, ConfigError, lookup_error
from whet.train.optimizers import flat_state, make_optimizer, set_setting, settings_of, whole_state

__all__ = ["Optim"]

log = logging.getLogger("whet")

_ENDLESS = ("constant", "constant_with_warmup", "inverse_sqrt")
"""Schedules that don't ask how many updates there will be."""
_TRIAL_UPDATES = 1_000_000
"""Of a schedule that is only tried; more than any warm-up or decay that its arguments may name."""


class Optim:
    """Masters, optimizer, schedule and clipping of one module.

    Args: module: whose parameters with requires_grad are trained. config: an OptimConfig, or a factory
        `f(parameters) -> torch.optim.Optimizer`, which then has a constant rate of its own and no clipping.
        dtype: what the module is to compute in; None = as it does.
    """

    def __init__(
        self, module: nn.Module, config: OptimConfig | Callable[..., Any], *, dtype: torch.dtype | None = None
    ) -> None:
        self.params = {n: p for n, p in module.named_parameters() if p.requires_grad}
        if not self.params:
            raise ConfigError("the model has no parameter with requires_grad; unfreeze what is to be trained")
        self.masters = {n: _master(p, dtype or p.dtype) for n, p in self.params.items()}
        self._hooks: list[RemovableHandle] = []
        for name, p in self.params.items():
            if self.masters[name] is not p:
                p.data = p.data.to(dtype or p.dtype)
                self._hooks.append(p.register_post_accumulate_grad_hook(_adder(self.masters[name])))
        self.config = config if isinstance(config, OptimConfig) else None
        if self.config is not None:
            _check_schedule(self.config)
        self.optimizer = make_optimizer(self.masters, config)
        self.made = settings_of(self.optimizer)
        self.updates = 0
        self.schedule: Any = None
        self._taken_up = False
        self.total_updates: int | None = None if self.config is None else self.config.total_steps

    def close(self) -> None:
        """Takes its hooks off the parameters, which would hold the masters; frees gradients."""
        for hook in self._hooks:
            hook.remove()
        for tensor in (*self.params.values(), *self.masters.values()):
            tensor.grad = None

    def masters_by_name(self) -> dict[str, Tensor]:
        """The fp32 weights under the module's parameter names."""
        return self.masters

    def plan(self, total_updates: int | None) -> None:
        """Tells the schedule how many updates there will be; `total_steps` of the configuration comes first.

        The first time after `load`, a total other than the saved one makes the schedule anew over it, at the number of
        updates taken.
        """
        taken_up, self._taken_up = self._taken_up, False
        asked = None if self.config is None else self.config.total_steps
        fresh = self.schedule is None and self.total_updates is None
        if not (fresh or taken_up) or asked is not None or total_updates in (None, self.total_updates):
            return
        before, self.total_updates = self.total_updates, total_updates
        if self.config is None or self.schedule is None or self.config.schedule in _ENDLESS:
            return
        place = self.schedule.state_dict()
        self.schedule = self._scheduler()
        self.schedule.load_state_dict(place)
        self._set_rates()
        log.warning(
            "optim.schedule=%s now runs over %d updates, not %s as when it was saved; %d of them are taken",
            self.config.schedule,
            total_updates,
            before,
            self.updates,
        )

    def _scheduler(self) -> Any:
        """Made at the first step, when the number of updates is known."""
        if self.config is None:
            return None
        name = self.config.schedule
        if self.total_updates is None and name not in _ENDLESS:
            raise ConfigError(
                f"optim.schedule={name!r} needs the number of updates; set optim.total_steps or trainer.max_steps"
            )
        return _made_schedule(self.config, self.optimizer, self.total_updates, self.config.warmup_steps)

    @torch.no_grad()
    def step(self) -> tuple[float, float, bool]:
        """One update from the accumulated gradients, which are cleared.

        Returns: (norm of the whole gradient before clipping, learning rate used, whether the update was skipped
            because the norm was not finite). A skipped update moves neither weights, moments nor the schedule.
        """
        if self.schedule is None:
            self.schedule = self._scheduler()
        rate = float(self.optimizer.param_groups[0]["lr"])
        grads = [_gradient(m) for m in self.masters.values()]
        norm = float(nn.utils.get_total_norm(grads))
        finite = math.isfinite(norm)
        if finite:
            limit = self.config.max_grad_norm if self.config else 0.0
            if limit and norm > limit:
                torch._foreach_mul_(grads, limit / (norm + 1e-6))
            self.optimizer.step()
            if self.schedule is not None:
                self.schedule.step()
            for name, p in self.params.items():
                if self.masters[name] is not p:
                    p.copy_(self.masters[name])
            self.updates += 1
        self.optimizer.zero_grad(set_to_none=True)
        return norm, rate, not finite

    def save(self, path: Path) -> dict[str, Any]:
        """Writes the moments to a safetensors file and returns the rest as plain containers, for torch.save."""
        state = self.optimizer.state_dict()
        tensors, plain, wrapped = flat_state(state["state"])
        save_file(tensors, path)
        return {
            "kind": type(self.optimizer).__name__,
            "made": self.made,
            "groups": state["param_groups"],
            "plain": plain,
            "wrapped": wrapped,
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
            "updates": self.updates,
            "total_updates": self.total_updates,
        }

    def load(self, path: Path, rest: Mapping[str, Any]) -> None:
        """Restores what `save` wrote and returned. A setting (rate, betas, decay) that was made other than the saved
        optimizer's stays as it is here; moments, counts and the place in the schedule are the saved ones.

        Raises: CheckpointError: it doesn't fit this model or this optimizer.
        """
        needs = ("kind", "made", "groups", "plain", "wrapped", "schedule", "updates", "total_updates")
        if missing := [n for n in needs if n not in rest]:
            raise CheckpointError(f"{path.parent}/state.pt is not what this version saves: no {', '.join(missing)}")
        kind = type(self.optimizer).__name__
        if rest["kind"] != kind:
            raise CheckpointError(
                f"{path} holds the state of {rest['kind']}, this run's optimizer is {kind}; resume with the optim.name "
                "that it was saved with, or start a new run from its weights"
            )
        try:
            found = load_file(path)
        except (OSError, SafetensorError) as e:
            raise CheckpointError(f"{path} can't be read ({e}); resume from an earlier step-* folder") from e
        entries = whole_state(found, rest["plain"], rest["wrapped"])
        self._load_schedule(rest)
        try:
            self.optimizer.load_state_dict({"state": entries, "param_groups": rest["groups"]})
        except (KeyError, ValueError) as e:
            raise CheckpointError(f"{path}: the optimizer state does not fit this model ({e})") from e
        for group, now, before in zip(self.optimizer.param_groups, self.made, rest["made"], strict=True):
            for name, value in now.items():
                if name not in before or before[name] != value:
                    set_setting(group, name, value)
        self._set_rates()

    def _load_schedule(self, rest: Mapping[str, Any]) -> None:
        """The place in the schedule. Before the groups: making a schedule sets their rate to the first one."""
        self.updates, self._taken_up = rest["updates"], True
        asked = None if self.config is None else self.config.total_steps
        self.total_updates = rest["total_updates"] if asked is None else asked
        if rest["schedule"] is not None and (schedule := self._scheduler()) is not None:
            schedule.load_state_dict(rest["schedule"])
            self.schedule = schedule

    def _set_rates(self) -> None:
        """The rates that the schedule gives here and now: those that were saved, unless a setting changed."""
        if isinstance(self.schedule, torch.optim.lr_scheduler.LambdaLR):
            for group, now, factor in zip(
                self.optimizer.param_groups, self.made, self.schedule.lr_lambdas, strict=True
            ):
                set_setting(group, "initial_lr", now["lr"])
                group["lr"] = group["initial_lr"] * factor(self.schedule.last_epoch)
            self.schedule.base_lrs = [g["initial_lr"] for g in self.optimizer.param_groups]


def _master(p: nn.Parameter, compute: torch.dtype) -> Tensor:
    """The fp32 tensor that is optimised in place of p: p itself where it computes in fp32 or better."""
    if p.dtype == compute and compute in (torch.float32, torch.float64):
        return p
    return nn.Parameter(p.detach().float().clone())


def _gradient(master: Tensor) -> Tensor:
    """A master's gradient; zero where nothing was run for it, so that a step of skipped groups is the step of zero
    gradients that it stands for (moments decay, momentum moves).
    """
    if master.grad is None:
        master.grad = torch.zeros_like(master)
    return master.grad


def _adder(master: Tensor) -> Callable[[Tensor], None]:
    """A hook that adds a parameter's gradient to its master's in fp32 and drops it."""

    def add(p: Tensor) -> None:
        assert p.grad is not None
        if master.grad is None:
            master.grad = p.grad.float()
        else:
            master.grad.add_(p.grad)
        p.grad = None

    return add


def _made_schedule(c: OptimConfig, optimizer: torch.optim.Optimizer, total: int | None, warmup: int) -> Any:
    """The schedule of transformers that a configuration names."""
    from transformers import get_scheduler

    return get_scheduler(
        "constant_with_warmup" if c.schedule == "constant" and warmup else c.schedule,
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=total,
        scheduler_specific_kwargs=dict(c.schedule_kwargs),
    )


def _check_schedule(c: OptimConfig) -> None:
    """Raises ConfigError for a schedule that transformers doesn't know, or that fails at its first step.

    It is tried on an optimizer of its own, also without warm-up, during which few arguments are used.
    """
    from transformers import SchedulerType

    known = [kind.value for kind in SchedulerType]
    if c.schedule not in known:
        raise lookup_error("optim.schedule", c.schedule, known)
    for warmup in sorted({0, c.warmup_steps}):
        trial = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=c.lr)
        try:
            schedule = _made_schedule(c, trial, c.total_steps or _TRIAL_UPDATES, warmup)
            trial.step()
            schedule.step()
        except Exception as error:  # transformers checks few of its arguments: they fail where they are used
            raise ConfigError(
                f"optim.schedule={c.schedule!r} with optim.schedule_kwargs={dict(c.schedule_kwargs)!r} can't be "
                f"stepped: {type(error).__name__}: {error}; mend the arguments, or take another schedule"
            ) from error
