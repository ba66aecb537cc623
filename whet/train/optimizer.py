"""Optim, the optimizer of one model: fp32 masters, schedule, clipping, and its state in safetensors.

If the module computes in fp32, its parameters are the masters. If it computes in bf16, the optimizer keeps fp32 masters
in addition. Each gradient is added to its master in fp32 as soon as it is computed. After a step the module's own
parameters are overwritten in place, so an engine that reads them needs no weight transfer.
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
from whet.errors import CheckpointError, ConfigError
from whet.storage.checkpoint import CHECKPOINT_FORMAT
from whet.train.lr_schedule import check_schedule, is_endless, make_schedule
from whet.train.make_optimizer import group_settings, make_optimizer, set_setting
from whet.train.optimizer_state import FORMAT_KEY, check_moment_shapes, flatten_state, load_optimizer_state
from whet.util.tensor_subclasses import gather_full_tensor, is_sharded, is_wrapper_subclass, local_part, shard_like

__all__ = ["Optim"]

log = logging.getLogger("whet")

MAX_UNCLIPPED = math.sqrt(torch.finfo(torch.float32).max)
"""The largest norm of a gradient that is not clipped. The squares of a larger one would make moments infinite."""
_SCALE_ALL: Callable[[list[Tensor], float], object] | None = getattr(torch, "_foreach_mul_", None)
"""A private function of torch that scales many tensors in one call."""


class Optim:
    """Masters, optimizer, schedule and clipping of one module.

    Args:
        module: its parameters with requires_grad are trained.
        config: an OptimConfig, or a factory `f(parameters) -> torch.optim.Optimizer`. A factory's optimizer has its own
            constant rate and no clipping.
        dtype: the dtype that the module computes in; None = its current one.
        norm: a function that computes the norm of all gradients; None = `total_norm`.
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
        self._loaded = False
        self.total_updates: int | None = None if self.config is None else self.config.total_steps

    def restart(self, config: OptimConfig) -> None:
        """Prepares for another run on these weights, with the schedule at its start.

        The moments are kept if the settings differ only in the number of updates; otherwise they are 0.

        Args: config: the new run's settings.
        Raises: ConfigError: the optimizer came from a factory, or the schedule fails at its first step.
        """
        if self.config is None:
            raise ConfigError(
                "the optimizer came from a factory, so whet can't restart its schedule; give an OptimConfig"
            )
        check_schedule(config)
        same = dataclasses.replace(config, total_steps=self.config.total_steps) == self.config
        self.config, self.total_updates = config, config.total_steps
        self.schedule, self._loaded, self.updates = None, False, 0
        if not same:
            self.optimizer = make_optimizer(self.masters, config)
            self.initial_settings = group_settings(self.optimizer)
        for group, initial in zip(self.optimizer.param_groups, self.initial_settings, strict=True):
            set_setting(group, "lr", initial["lr"])

    def set_default_lr(self, lr: float) -> bool:
        """Sets the rate, before the first update, if the configuration has none. Returns: whether it was set."""
        if self.config is None or self.config.lr is not None:
            return False
        self.config = dataclasses.replace(self.config, lr=lr)
        self.optimizer = make_optimizer(self.masters, self.config)
        self.initial_settings = group_settings(self.optimizer)
        return True

    def close(self) -> None:
        """Removes the hooks from the parameters, since they hold the masters, and frees the gradients."""
        for hook in self._hooks:
            hook.remove()
        for tensor in (*self.params.values(), *self.masters.values()):
            tensor.grad = None

    def masters_by_name(self) -> dict[str, Tensor]:
        """Returns the fp32 weights under the module's parameter names."""
        return self.masters

    def plan(self, total_updates: int | None) -> None:
        """Sets the number of updates for the schedule, unless the configuration has `total_steps`.

        On the first call after `load`, a number other than the saved one rebuilds the schedule; the number of updates
        so far is kept.
        """
        loaded, self._loaded = self._loaded, False
        configured = None if self.config is None else self.config.total_steps
        fresh = self.schedule is None and self.total_updates is None
        if not (fresh or loaded) or configured is not None or total_updates in (None, self.total_updates):
            return
        before, self.total_updates = self.total_updates, total_updates
        if self.config is None or self.schedule is None or is_endless(self.config):
            return
        place = self.schedule.state_dict()
        self.schedule = self._scheduler()
        self.schedule.load_state_dict(place)
        self._set_rates()
        log.warning(
            "optim.schedule=%s now runs over %d updates; it was saved with %s, and %d updates are done",
            self.config.schedule,
            total_updates,
            before,
            self.updates,
        )

    def _scheduler(self) -> Any:
        """Makes the schedule. It is called at the first step, when the number of updates is known."""
        if self.config is None:
            return None
        c, total = self.config, self.total_updates
        if total is None and not is_endless(c):
            needs = f"optim.warmup_ratio={c.warmup_ratio}" if c.warmup_ratio else f"optim.schedule={c.schedule!r}"
            raise ConfigError(f"{needs} needs the number of updates; set optim.total_steps or trainer.max_steps")
        warmup = int(c.warmup_ratio * total) if c.warmup_ratio and total else c.warmup_steps
        return make_schedule(c, self.optimizer, total, warmup)

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient has been added since the last step."""
        return any(x.grad is not None for x in (*self.masters.values(), *self.params.values()))

    def clear_gradients(self) -> None:
        """Drops what has been added since the last step."""
        for x in (*self.masters.values(), *self.params.values()):
            x.grad = None

    @torch.no_grad()
    def step(self) -> tuple[float, float, bool]:
        """Makes one update from the accumulated gradients, and clears them.

        Returns: (norm of the gradient before clipping, learning rate, whether the update was skipped). An update is
            skipped if the norm is not finite, or if clipping is off and the norm exceeds MAX_UNCLIPPED. A skipped
            update changes neither the weights nor the moments nor the schedule.
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
        """Returns the parameter names of each of the optimizer's groups.

        Raises: CheckpointError: a parameter is not one of the model's.
        """
        name_of = {id(m): name for name, m in self.masters.items()}
        try:
            return [[name_of[id(p)] for p in group["params"]] for group in self.optimizer.param_groups]
        except KeyError:
            raise CheckpointError(
                f"{type(self.optimizer).__name__} holds a parameter that is not one of the model's parameters, so its "
                "state can't be saved by name; save no checkpoints, or build it from the parameters its factory gets"
            ) from None

    def save(self, path: Path | None) -> dict[str, Any]:
        """Writes the moments to a safetensors file and returns the rest as plain containers, for torch.save.

        Both use the model's parameter names, so their order doesn't matter. Args: path: None = another rank writes, and
            this one gives it its shards, keeps no whole tensor, and returns {}.
        """
        if path is None:
            for value in (value for entry in self.optimizer.state_dict()["state"].values() for value in entry.values()):
                gather_full_tensor(value)  # and keeps none: the whole state is on the host of the rank that writes
            return {}
        tensors, rest = self.state(sharded=False)
        save_file(
            tensors, path, metadata={FORMAT_KEY: str(CHECKPOINT_FORMAT)}
        )  # one key: safetensors writes several in no fixed order
        return rest

    def state(self, *, sharded: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Returns the moments by "<parameter>.<key>", and the rest as plain containers. Args: sharded: see
        flatten_state.
        """
        groups = self._names()
        flat = [name for names in groups for name in names]
        state = self.optimizer.state_dict()
        entries = {flat[i]: entry for i, entry in state["state"].items()}
        tensors, plain, wrapped = flatten_state(entries, sharded=sharded)
        return tensors, {
            "kind": type(self.optimizer).__name__,
            "initial_settings": self.initial_settings,
            "groups": [g | {"params": names} for g, names in zip(state["param_groups"], groups, strict=True)],
            "plain": plain,
            "wrapped": wrapped,
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
            "updates": self.updates,
            "total_updates": self.total_updates,
        }

    def load(self, path: Path, rest: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
        """Restores what `save` wrote and returned: moments, counts and the position in the schedule.

        A setting (rate, betas, decay) that the configuration changed since the save keeps its new value. Args: tensors:
            the moments, which are then not read from the file; each rank's shards may be among them.

        Raises: CheckpointError: the state doesn't fit this model or this optimizer, or has an unknown format.
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
        saved, before, entries = load_optimizer_state(path, rest, groups, tensors)
        check_moment_shapes(path, entries, self.masters)
        # the schedule before the groups: a new schedule sets their rate to its first one
        self.updates, self._loaded = rest["updates"], True
        configured = None if self.config is None else self.config.total_steps
        self.total_updates = rest["total_updates"] if configured is None else configured
        if rest["schedule"] is not None and (schedule := self._scheduler()) is not None:
            schedule.load_state_dict(rest["schedule"])
            self.schedule = schedule
        current = self.optimizer.state_dict()["param_groups"]
        param_groups = [g | {"params": now["params"]} for g, now in zip(saved, current, strict=True)]
        try:
            state = {i: self._placed(name, entries[name]) for i, name in enumerate(flat) if name in entries}
            self.optimizer.load_state_dict({"state": state, "param_groups": param_groups})
        except (KeyError, ValueError) as e:
            raise CheckpointError(f"{path}: the optimizer state does not fit this model ({e})") from e
        for group, new, old in zip(self.optimizer.param_groups, self.initial_settings, before, strict=True):
            for name, value in new.items():
                if name not in old or old[name] != value:
                    set_setting(group, name, value)
        self._set_rates()

    def empty_moment(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Returns a tensor for an entry "<parameter>.<key>" of the state, sharded as its parameter is.

        Args: shape: of the whole tensor. dtype: of the saved one.
        """
        master = next((m for n, m in self.masters.items() if name.startswith(f"{n}.") and m.shape == shape), None)
        return torch.zeros(shape, dtype=dtype) if master is None else torch.zeros_like(master, dtype=dtype).detach()

    @torch.no_grad()
    def _placed(self, name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the state of a parameter with its moments sharded as the parameter is, and quantised as the optimizer
        quantises them (torchao's does), unless they were read so.
        """
        master, new = self.masters[name], getattr(self.optimizer, "_new_buffer", None)
        placed: dict[str, Any] = dict(entry)
        for key, value in entry.items():
            if not isinstance(value, Tensor) or value.shape != master.shape or is_sharded(value):
                continue
            if is_wrapper_subclass(value):
                if not is_sharded(master):
                    continue
                value = value.dequantize()
            placed[key] = shard_like(master, value)
            if new is not None:
                moment, buffer = placed[key], new(master, key == "exp_avg")  # which has a sign
                local_part(buffer).copy_(local_part(moment))
                placed[key] = buffer
        return placed

    def _set_rates(self) -> None:
        """Sets the rates that the schedule has now: the saved ones, unless a setting changed."""
        if isinstance(self.schedule, torch.optim.lr_scheduler.LambdaLR):
            for group, now, factor in zip(
                self.optimizer.param_groups, self.initial_settings, self.schedule.lr_lambdas, strict=True
            ):
                set_setting(group, "initial_lr", now["lr"])
                group["lr"] = group["initial_lr"] * factor(self.schedule.last_epoch)
            self.schedule.base_lrs = [g["initial_lr"] for g in self.optimizer.param_groups]


def _master(p: nn.Parameter, compute: torch.dtype) -> Tensor:
    """Returns the tensor that is optimized for p: p itself if it computes in fp32 or fp64, else its values in fp32.

    The values of a p in fp32 are taken, not copied: p gets a copy in the dtype that it computes in.
    """
    if p.dtype == compute and compute in (torch.float32, torch.float64):
        return p
    return nn.Parameter(p.detach().float())


def total_norm(grads: Sequence[Tensor]) -> float:
    """sqrt(Σ g²) over all elements of all gradients; summed in float64 if float32 overflows.

    >>> round(total_norm([torch.tensor([3e30]), torch.tensor([4e30])]) / 1e30, 6)
    5.0
    """
    norm = float(nn.utils.get_total_norm(grads))
    if math.isfinite(norm):
        return norm
    return math.hypot(*(float(torch.linalg.vector_norm(g, dtype=torch.float64)) for g in grads))


def _scale(grads: list[Tensor], factor: float) -> None:
    """Multiplies gradients in place, in two steps if the factor is too small for a normal float32."""
    tiny = factor < torch.finfo(torch.float32).tiny
    for _ in range(2 if tiny else 1):
        by = math.sqrt(factor) if tiny else factor
        if _SCALE_ALL is not None:
            _SCALE_ALL(grads, by)
        else:
            for grad in grads:
                grad.mul_(by)


def _gradient(master: Tensor) -> Tensor:
    """Returns a master's gradient; zeros if it has none.

    So a step whose groups were all skipped is a step with zero gradients: moments decay, momentum moves.
    """
    if master.grad is None:
        master.grad = torch.zeros_like(master)
    return master.grad


def _adder(master: Tensor) -> Callable[[Tensor], None]:
    """Returns a hook that adds a parameter's gradient to its master's in fp32 and drops it."""

    def add(p: Tensor) -> None:
        assert p.grad is not None
        if master.grad is None:
            master.grad = p.grad.float()
        else:
            master.grad.add_(p.grad)
        p.grad = None

    return add
