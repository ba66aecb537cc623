"""The optimizer of one model: fp32 masters, schedule, clipping, and its state in safetensors.

Where the module computes in fp32 its parameters are the masters. Where it computes in bf16, fp32 masters lie next to
the optimizer, gradients are added to them in fp32 as each one is made, and after a step the module's own parameters
are written in place, so that an engine which reads them has nothing to fetch.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from whet.config import OptimConfig
from whet.errors import CheckpointError, ConfigError, format_exception, lookup_error
from whet.storage.checkpoint import CHECKPOINT_FORMAT
from whet.storage.optimizer_state import FORMAT_KEY, check_moment_shapes, flatten_state, load_optimizer_state
from whet.train.optimizers import group_settings, make_optimizer, set_setting

__all__ = ["Optim"]

log = logging.getLogger("whet")

MAX_UNCLIPPED = math.sqrt(torch.finfo(torch.float32).max)
"""Of the norm of a gradient that nothing clips: the squares of a larger one would make moments infinite for ever."""
_ENDLESS = ("constant", "constant_with_warmup", "inverse_sqrt")
"""Schedules that don't ask how many updates there will be."""
_SCALE_ALL: Callable[[list[Tensor], float], object] | None = getattr(torch, "_foreach_mul_", None)
"""Private to torch: many tensors in one call."""
_TRIAL_UPDATES = 1_000_000
"""Of a schedule that is only tried; more than any warm-up or decay that its arguments may name."""


class Optim:
    """Masters, optimizer, schedule and clipping of one module.

    Args:
        module: whose parameters with requires_grad are trained.
        config: an OptimConfig, or a factory `f(parameters) -> torch.optim.Optimizer`, which then has a constant rate of
            its own and no clipping.
        dtype: what the module is to compute in; None = as it does.
        norm: of all gradients together, as a placement knows them.
    """

    def __init__(
        self,
        module: nn.Module,
        config: OptimConfig | Callable[..., Any],
        *,
        dtype: torch.dtype | None = None,
        norm: Callable[[Sequence[Tensor]], float] | None = None,
    ) -> None:
        self._norm = norm or total_norm
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
            check_schedule(self.config)
        self.optimizer = make_optimizer(self.masters, config)
        self.initial_settings = group_settings(self.optimizer)
        self.updates = 0
        self.schedule: Any = None
        self._taken_up = False
        self.total_updates: int | None = None if self.config is None else self.config.total_steps

    def restart(self, config: OptimConfig) -> None:
        """Another run on these weights: the schedule begins at its beginning. The moments are kept where the settings
        are the same but for the number of updates, and are 0 otherwise.

        Args: config: of the new run.
        Raises: ConfigError: a factory has made the optimizer; a schedule that can't be stepped.
        """
        if self.config is None:
            raise ConfigError("the optimizer is a user's own, whose schedule whet can't begin again")
        check_schedule(config)
        same = dataclasses.replace(config, total_steps=self.config.total_steps) == self.config
        self.config, self.total_updates = config, config.total_steps
        self.schedule, self._taken_up, self.updates = None, False, 0
        if not same:
            self.optimizer = make_optimizer(self.masters, config)
            self.initial_settings = group_settings(self.optimizer)
        for group, made in zip(self.optimizer.param_groups, self.initial_settings, strict=True):
            set_setting(group, "lr", made["lr"])

    def set_default_lr(self, lr: float) -> bool:
        """Takes a learning rate where the configuration gives none, before the first update. Returns: if it did."""
        if self.config is None or self.config.lr is not None:
            return False
        self.config = dataclasses.replace(self.config, lr=lr)
        self.optimizer = make_optimizer(self.masters, self.config)
        self.initial_settings = group_settings(self.optimizer)
        return True

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

        The first time after `load`, a total other than the saved one rebuilds the schedule for it, at the number of
        updates taken.
        """
        taken_up, self._taken_up = self._taken_up, False
        asked = None if self.config is None else self.config.total_steps
        fresh = self.schedule is None and self.total_updates is None
        if not (fresh or taken_up) or asked is not None or total_updates in (None, self.total_updates):
            return
        before, self.total_updates = self.total_updates, total_updates
        if self.config is None or self.schedule is None or _is_endless(self.config):
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
        c, total = self.config, self.total_updates
        if total is None and not _is_endless(c):
            asks = f"optim.warmup_ratio={c.warmup_ratio}" if c.warmup_ratio else f"optim.schedule={c.schedule!r}"
            raise ConfigError(f"{asks} needs the number of updates; set optim.total_steps or trainer.max_steps")
        warmup = int(c.warmup_ratio * total) if c.warmup_ratio and total else c.warmup_steps
        return _make_schedule(c, self.optimizer, total, warmup)

    @torch.no_grad()
    def step(self) -> tuple[float, float, bool]:
        """One update from the accumulated gradients, which are cleared.

        Returns: (norm of the whole gradient before clipping, learning rate used, whether the update was skipped
            because the norm was not finite, or, where nothing clips it, beyond float32). A skipped update moves neither
            weights, moments nor the schedule.
        """
        if self.schedule is None:
            self.schedule = self._scheduler()
        rate = float(self.optimizer.param_groups[0]["lr"])
        grads = [_gradient(m) for m in self.masters.values()]
        limit = self.config.max_grad_norm if self.config else 0.0
        norm = self._norm(grads)
        finite = norm <= (MAX_UNCLIPPED if not limit else sys.float_info.max)  # NaN is neither
        if finite:
            if limit and norm > limit:
                _scale(grads, limit / (norm + 1e-6))
            self.optimizer.step()
            if self.schedule is not None:
                self.schedule.step()
            for name, p in self.params.items():
                if self.masters[name] is not p:
                    p.copy_(self.masters[name])
            self.updates += 1
        self.optimizer.zero_grad(set_to_none=True)
        return norm, rate, not finite

    def _names(self) -> list[list[str]]:
        """The parameters of each of the optimizer's groups, by name.

        Raises: CheckpointError: one is not the model's.
        """
        name_of = {id(m): name for name, m in self.masters.items()}
        try:
            return [[name_of[id(p)] for p in group["params"]] for group in self.optimizer.param_groups]
        except KeyError:
            raise CheckpointError(
                f"{type(self.optimizer).__name__} holds a parameter that is not one of the model's parameters, so its "
                "state can't be saved by name; save no checkpoints, or build it from the parameters its factory gets"
            ) from None

    def save(self, path: Path) -> dict[str, Any]:
        """Writes the moments to a safetensors file and returns the rest as plain containers, for torch.save.

        Both name the parameters as the model does: who reads them needs no order.
        """
        groups = self._names()
        flat = [name for names in groups for name in names]
        state = self.optimizer.state_dict()
        tensors, plain, wrapped = flatten_state({flat[i]: entry for i, entry in state["state"].items()})
        save_file(tensors, path, metadata={FORMAT_KEY: str(CHECKPOINT_FORMAT)})  # one key: more have no order
        return {
            "kind": type(self.optimizer).__name__,
            "initial_settings": self.initial_settings,
            "groups": [g | {"params": names} for g, names in zip(state["param_groups"], groups, strict=True)],
            "plain": plain,
            "wrapped": wrapped,
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
            "updates": self.updates,
            "total_updates": self.total_updates,
        }

    def load(self, path: Path, rest: Mapping[str, Any]) -> None:
        """Restores what `save` wrote and returned. A setting (rate, betas, decay) that was made other than the saved
        optimizer's stays as it is here; moments, counts and the place in the schedule are the saved ones.

        Raises: CheckpointError: it doesn't fit this model or this optimizer, or is of a format not known here.
        """
        needs = ("kind", "initial_settings", "groups", "plain", "wrapped", "schedule", "updates", "total_updates")
        if missing := [n for n in needs if n not in rest]:
            raise CheckpointError(
                f"{path.parent}/state.pt has an unexpected format: no {', '.join(missing)}; resume from another step-* "
                "folder"
            )
        kind = type(self.optimizer).__name__
        if rest["kind"] != kind:
            raise CheckpointError(
                f"{path} holds the state of {rest['kind']}, this run's optimizer is {kind}; resume with the optim.name "
                "that it was saved with, or start a new run from its weights"
            )
        groups = self._names()
        flat = [name for names in groups for name in names]
        saved, made, entries = load_optimizer_state(path, rest, groups)
        check_moment_shapes(path, entries, self.masters)
        self._load_schedule(rest)
        whole = self.optimizer.state_dict()["param_groups"]
        found = [g | {"params": now["params"]} for g, now in zip(saved, whole, strict=True)]
        try:
            state = {i: entries[name] for i, name in enumerate(flat) if name in entries}
            self.optimizer.load_state_dict({"state": state, "param_groups": found})
        except (KeyError, ValueError) as e:
            raise CheckpointError(f"{path}: the optimizer state does not fit this model ({e})") from e
        for group, now, before in zip(self.optimizer.param_groups, self.initial_settings, made, strict=True):
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
                self.optimizer.param_groups, self.initial_settings, self.schedule.lr_lambdas, strict=True
            ):
                set_setting(group, "initial_lr", now["lr"])
                group["lr"] = group["initial_lr"] * factor(self.schedule.last_epoch)
            self.schedule.base_lrs = [g["initial_lr"] for g in self.optimizer.param_groups]


def _master(p: nn.Parameter, compute: torch.dtype) -> Tensor:
    """The fp32 tensor that is optimised in place of p: p itself where it computes in fp32 or better."""
    if p.dtype == compute and compute in (torch.float32, torch.float64):
        return p
    return nn.Parameter(p.detach().float().clone())


def total_norm(grads: Sequence[Tensor]) -> float:
    """sqrt(Σ g²) over all numbers of all gradients; summed in float64 where float32 overflows.

    >>> round(total_norm([torch.tensor([3e30]), torch.tensor([4e30])]) / 1e30, 6)
    5.0
    """
    norm = float(nn.utils.get_total_norm(grads))
    if math.isfinite(norm):
        return norm
    return math.hypot(*(float(torch.linalg.vector_norm(g, dtype=torch.float64)) for g in grads))


def _scale(grads: list[Tensor], factor: float) -> None:
    """Multiplies gradients in place; in two steps where the factor would lose digits, or vanish, as a float32."""
    tiny = factor < torch.finfo(torch.float32).tiny
    for _ in range(2 if tiny else 1):
        by = math.sqrt(factor) if tiny else factor
        if _SCALE_ALL is not None:
            _SCALE_ALL(grads, by)
        else:
            for grad in grads:
                grad.mul_(by)


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


def _is_endless(c: OptimConfig) -> bool:
    """Whether a schedule does not depend on the number of updates."""
    return c.schedule in _ENDLESS and not c.warmup_ratio


def _make_schedule(c: OptimConfig, optimizer: torch.optim.Optimizer, total: int | None, warmup: int) -> Any:
    """The schedule of transformers that a configuration names."""
    from transformers import get_scheduler

    return get_scheduler(
        "constant_with_warmup" if c.schedule == "constant" and warmup else c.schedule,
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=total,
        scheduler_specific_kwargs=dict(c.schedule_kwargs),
    )


def check_schedule(c: OptimConfig) -> None:
    """Raises ConfigError for a schedule that transformers doesn't know, or that fails at its first step.

    It is tried on an optimizer of its own, also without warm-up, during which few arguments are used.
    """
    from transformers import SchedulerType

    known = [kind.value for kind in SchedulerType]
    if c.schedule not in known:
        raise lookup_error("optim.schedule", c.schedule, known)
    for warmup in sorted({0, c.warmup_steps or int(c.warmup_ratio > 0)}):
        trial = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=c.rate)
        try:
            schedule = _make_schedule(c, trial, c.total_steps or _TRIAL_UPDATES, warmup)
            trial.step()
            schedule.step()
        except Exception as error:  # transformers checks few of its arguments: they fail where they are used
            raise ConfigError(
                f"optim.schedule={c.schedule!r} with optim.schedule_kwargs={dict(c.schedule_kwargs)!r} can't be "
                f"stepped: {format_exception(error)}; fix the arguments, or use another schedule"
            ) from error
