"""Computes rollouts and updates from TRL's batch sizes, by TRL's rules.

    micro-step     per_device_train_batch_size completions in each process
    update         gradient_accumulation_steps micro-steps: an optimizer step
    generation     the completions of steps_per_generation micro-steps, used num_iterations times

A step of whet is one rollout and the updates on it. If an update takes several generations, they are one rollout,
because the policy does not change between them.
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
"""The fields that are varied to suggest settings that work."""
_SUGGESTIONS = 3
"""The number of suggestions in an error."""


@dataclass(frozen=True, kw_only=True)
class Batches:
    """The sizes of a step's rollout and updates."""

    prompts: int
    """The prompts of a rollout."""
    generations: int
    """The completions of a prompt."""
    rows: int
    """The completions of an update."""
    updates: int
    """The optimizer steps of a rollout."""
    passes: int
    """How many times a rollout's completions are used."""
    steps_per_generation: int
    generation_batch_size: int
    accumulated: int
    """The micro-steps of an update: gradient_accumulation_steps, or the nearest value that mixes no two rollouts."""

    def __str__(self) -> str:
        """Describes the step."""
        updates = "1 update" if self.updates == 1 else f"{self.updates} updates"
        prompts = "1 prompt" if self.prompts == 1 else f"{self.prompts} prompts"
        return f"{prompts} x {self.generations} completions a rollout, {updates} of {self.rows}"


def compute_batches(fields: Mapping[str, Any], *, method: str = "GRPO") -> Batches:
    """Computes the batches of a configuration by TRL's rules.

    Args: fields: num_generations, per_device_train_batch_size, gradient_accumulation_steps, num_iterations,
        generation_batch_size and steps_per_generation (None = not set); world_size, the number of processes (left
        out = 1). method: the method's name in the message.
    Raises: ConfigError: sizes that break a rule; the message has the nearest settings that work, with their steps.

    >>> sizes = dict(num_generations=8, per_device_train_batch_size=8, gradient_accumulation_steps=4, num_iterations=1)
    >>> sizes |= dict(generation_batch_size=None, steps_per_generation=None)
    >>> str(compute_batches(sizes)), str(compute_batches({**sizes, "world_size": 2}))
    ('4 prompts x 8 completions a rollout, 1 update of 32', '8 prompts x 8 completions a rollout, 1 update of 64')
    """
    batches = _batches_or_error(fields)
    if isinstance(batches, Batches):
        return batches
    error = batches.replace("GRPO", method)
    suggestions = [f"{name}={value} ({step})" for name, value, step in _nearest_settings(fields)]
    raise ConfigError(f"{error} Nearest that work: {'; '.join(suggestions)}" if suggestions else error)


def _batches_or_error(fields: Mapping[str, Any]) -> Batches | str:
    """Returns the batches, or a message on the rule that the sizes break."""
    group, micro, accumulate, iterations = (
        fields[n]
        for n in ("num_generations", "per_device_train_batch_size", "gradient_accumulation_steps", "num_iterations")
    )
    size, steps = fields["generation_batch_size"], fields["steps_per_generation"]
    if min(micro, accumulate, iterations, size or 1, steps or 1) < 1:
        return "batch sizes must be positive."
    micro *= fields.get("world_size", 1)
    if size is not None and steps is not None and size != micro * steps:
        return "'generation_batch_size' and 'steps_per_generation' can not be both configured at the same time."
    if size is not None and size % micro:
        return f"generation_batch_size ({size}) must be divisible by the global batch size ({micro})."
    steps = steps or (accumulate if size is None else size // micro)
    size = micro * steps
    if group < 2:
        return (
            "GRPO requires at least 2 generations per prompt to calculate the advantages. You provided "
            f"{group}, which is less than the minimum required."
        )
    if size % group:
        return f"generation_batch_size ({size}) must be divisible by num_generations ({group})."
    accumulated = _nearest_accumulation(micro, accumulate, steps, iterations)
    rows, updates, passes = _divide_rollout(micro, accumulated, steps, iterations)
    sampled = rows if updates == 1 else size
    return Batches(
        prompts=sampled // group,
        generations=group,
        rows=rows,
        updates=updates,
        passes=passes,
        steps_per_generation=steps,
        generation_batch_size=size,
        accumulated=accumulated,
    )


def _nearest_accumulation(micro: int, accumulate: int, steps: int, iterations: int) -> int:
    """Returns the nearest number of micro-steps for which no update mixes two rollouts.

    >>> _nearest_accumulation(6, 3, 4, 2)
    4
    """
    cycle = steps * iterations
    valid = [n for n in range(1, accumulate + cycle + 1) if _divide_rollout(micro, n, steps, iterations)[0]]
    return min(valid, key=lambda n: abs(math.log(n / accumulate)))


def _divide_rollout(micro: int, accumulate: int, steps: int, iterations: int) -> tuple[int, int, int]:
    """(completions of an update, updates of a rollout, passes); (0, 0, 0) if an update would mix rollouts."""
    cycle = steps * iterations
    if accumulate % cycle == 0:  # an update repeats whole generations num_iterations times: once is equivalent
        return micro * accumulate // iterations, 1, 1
    if cycle % accumulate:
        return 0, 0, 0
    if steps % accumulate == 0:
        return micro * accumulate, cycle // accumulate, iterations
    if accumulate % steps == 0:  # an update repeats the same completions: once is equivalent
        return micro * steps, cycle // accumulate, cycle // accumulate
    return 0, 0, 0


def _nearest_settings(fields: Mapping[str, Any]) -> Iterator[tuple[str, int, Batches]]:
    """Yields the nearest settings that work and differ in one field: (field, value, batches)."""
    candidates = []
    for name in _VARIED:
        current = fields[name]
        if current is None:
            continue
        for value in range(1, 4 * max(current, 2) + 1):
            batches = _batches_or_error({**fields, name: value}) if value != current else ""
            if isinstance(batches, Batches):
                candidates.append((abs(math.log(value / max(current, 1))), name, value, batches))
    for _, name, value, batches in sorted(candidates, key=lambda x: x[:3])[:_SUGGESTIONS]:
        yield name, value, batches
