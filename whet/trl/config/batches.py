"""TRL's rules of batches: from completions per device and accumulation to rollouts and updates.

    micro-step     per_device_train_batch_size completions
    update         gradient_accumulation_steps micro-steps: an optimizer step
    generation     steps_per_generation micro-steps' completions, used num_iterations times

A step here is one rollout and the updates on it. Where an update takes several generations, the rollout is all of
them, since the policy does not move in between.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from whet.errors import ConfigError

__all__ = ["Batches", "compute_batches"]

_VARIED = (
    "num_generations",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "generation_batch_size",
    "steps_per_generation",
)
"""The fields for which other values are tried if a setting does not work."""
_NEAREST = 3


@dataclass(frozen=True, kw_only=True)
class Batches:
    """What a step is made of."""

    prompts: int
    """Of a rollout."""
    generations: int
    """Completions of each."""
    rows: int
    """Completions of an update."""
    updates: int
    """Optimizer steps of a rollout."""
    passes: int
    """Times that the completions of a rollout are used."""
    steps_per_generation: int
    generation_batch_size: int
    accumulated: int
    """Micro-steps of an update: gradient_accumulation_steps, or the nearest that mixes no two rollouts."""

    def __str__(self) -> str:
        """What it does to the step."""
        updates = "1 update" if self.updates == 1 else f"{self.updates} updates"
        prompts = "1 prompt" if self.prompts == 1 else f"{self.prompts} prompts"
        return f"{prompts} x {self.generations} completions a rollout, {updates} of {self.rows}"


def compute_batches(fields: Mapping[str, Any], *, method: str = "GRPO") -> Batches:
    """The batches of a configuration, by TRL's rules.

    Args: fields: num_generations, per_device_train_batch_size, gradient_accumulation_steps, num_iterations,
        generation_batch_size and steps_per_generation (None = not given). method: for the message.
    Raises: ConfigError: a rule is broken; with the nearest settings that work and what each makes of a step.

    >>> given = dict(num_generations=8, per_device_train_batch_size=8, gradient_accumulation_steps=4, num_iterations=1)
    >>> str(compute_batches({**given, "generation_batch_size": None, "steps_per_generation": None}))
    '4 prompts x 8 completions a rollout, 1 update of 32'
    """
    found = _batches(fields)
    if isinstance(found, Batches):
        return found
    found = found.replace("GRPO", method)
    near = [f"{name}={value} ({made})" for name, value, made in _others(fields)]
    raise ConfigError(f"{found} Nearest that work: {'; '.join(near)}" if near else found)


def _batches(fields: Mapping[str, Any]) -> Batches | str:
    """The batches, or which rule is broken."""
    group, micro, accumulate, iterations = (
        fields[n]
        for n in ("num_generations", "per_device_train_batch_size", "gradient_accumulation_steps", "num_iterations")
    )
    whole, steps = fields["generation_batch_size"], fields["steps_per_generation"]
    if min(micro, accumulate, iterations, whole or 1, steps or 1) < 1:
        return "sizes of batches must be positive."
    if whole is not None and steps is not None and whole != micro * steps:
        return "'generation_batch_size' and 'steps_per_generation' can not be both configured at the same time."
    if whole is not None and whole % micro:
        return f"generation_batch_size ({whole}) must be divisible by the global batch size ({micro})."
    steps = steps or (accumulate if whole is None else whole // micro)
    whole = micro * steps
    if group < 2:
        return (
            "GRPO requires at least 2 generations per prompt to calculate the advantages. You provided "
            f"{group}, which is less than the minimum required."
        )
    if whole % group:
        return f"generation_batch_size ({whole}) must be divisible by num_generations ({group})."
    taken = _nearest_accumulation(micro, accumulate, steps, iterations)
    rows, updates, passes = _used(micro, taken, steps, iterations)
    sampled = rows if updates == 1 else whole
    return Batches(
        prompts=sampled // group,
        generations=group,
        rows=rows,
        updates=updates,
        passes=passes,
        steps_per_generation=steps,
        generation_batch_size=whole,
        accumulated=taken,
    )


def _nearest_accumulation(micro: int, accumulate: int, steps: int, iterations: int) -> int:
    """The nearest number of micro-steps for which an update takes whole parts of one rollout.

    >>> _nearest_accumulation(6, 3, 4, 2)
    4
    """
    cycle = steps * iterations
    works = [n for n in range(1, accumulate + cycle + 1) if _used(micro, n, steps, iterations)[0]]
    return min(works, key=lambda n: abs(math.log(n / accumulate)))


def _used(micro: int, accumulate: int, steps: int, iterations: int) -> tuple[int, int, int]:
    """(completions of an update, updates of a rollout, passes); (0, 0, 0) where an update would mix rollouts."""
    cycle = steps * iterations
    if accumulate % cycle == 0:  # an update takes whole generations, each num_iterations times: once is the same
        return micro * accumulate // iterations, 1, 1
    if cycle % accumulate:
        return 0, 0, 0
    if steps % accumulate == 0:
        return micro * accumulate, cycle // accumulate, iterations
    if accumulate % steps == 0:  # the same completions several times in an update: once is the same
        return micro * steps, cycle // accumulate, cycle // accumulate
    return 0, 0, 0


def _others(fields: Mapping[str, Any]) -> Iterator[tuple[str, int, Batches]]:
    """The nearest settings that differ in one field and work."""
    found = []
    for name in _VARIED:
        now = fields[name]
        if now is None:
            continue
        for value in range(1, 4 * max(now, 2) + 1):
            made = _batches({**fields, name: value}) if value != now else ""
            if isinstance(made, Batches):
                found.append((abs(math.log(value / max(now, 1))), name, value, made))
    for _, name, value, made in sorted(found, key=lambda x: x[:3])[:_NEAREST]:
        yield name, value, made
