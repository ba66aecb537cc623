"""`whet plan`: the memory of a run on each of its GPUs, before anything is loaded."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from whet.cli.output import print_text
from whet.cli.supervised import separate_reference
from whet.config import RMRunConfig, RoleConfig, RunConfig, SupervisedRunConfig
from whet.errors import ConfigError
from whet.models.config_sizes import read_positions
from whet.parallel.torchrun_env import check_mesh
from whet.rollout.engine.scheduler import row_places
from whet.train.memory_plan import (
    GB,
    LENGTH,
    MemoryPlan,
    ModelSizes,
    Part,
    longest_row,
    measure_model,
    plan_memory,
    ways_to_fit,
    with_assumed_lengths,
    with_settings,
)

__all__ = ["SIZES", "plan", "plan_text"]

C = TypeVar("C", bound=RunConfig | SupervisedRunConfig)

SIZES = (24.0, 40.0, 80.0)
"""Gigabytes of usual GPUs, for a plan without memory_gb."""


def plan(config: RunConfig | SupervisedRunConfig, memory_gb: float | None, num_processes: int = 1) -> list[MemoryPlan]:
    """Prints what a run of this configuration takes on each of its GPUs, and the settings with which it fits.

    Args: config: of a training command; only its model is needed. memory_gb: of the GPU, in gigabytes of 1e9
        bytes; None = those of SIZES. num_processes: of torchrun, each with a GPU.
    Returns: a plan for each size.
    Raises: ConfigError: the model's config can't be read, or a completion fills its positions; the processes can't be
        the mesh of the configuration.
    """
    trainer = config.trainer
    check_mesh(
        num_processes,
        trainer.context_parallel_size,
        trainer.data_parallel_replicate_size,
        trainer.tensor_parallel_size,
    )
    role: RoleConfig = getattr(config, config.TRAINED)
    if num_processes > 1 and role.quantization is not None:
        raise ConfigError(
            f"{config.TRAINED}.quantization={role.quantization} does not run on {num_processes} processes: FSDP shards "
            "numbers, and 4-bit weights are packed in blocks with scales; leave it out, or plan for one process"
        )
    scores, reference = isinstance(config, RMRunConfig), None
    sizes = measure_model(role, trained=True, scores=scores)
    positions = None if role.model is None else read_positions(role.model, role.trust_remote_code)
    given, config = config, _within_positions(config, positions)
    if isinstance(config, SupervisedRunConfig):
        own = separate_reference(config)
        reference = 0.0 if own is None else float(measure_model(own, trained=False).weight_bytes)
    memories = SIZES if memory_gb is None else (memory_gb,)
    options = {"num_processes": num_processes, "reference": reference}
    plans = [plan_memory(config, sizes, memory=memory * GB, **options) for memory in memories]
    texts = [plan_text(config, sizes, x, memory, num_processes) for x, memory in zip(plans, memories, strict=True)]
    if config is not given:
        texts.insert(0, f"the model has {positions:,} positions (max_position_embeddings), so lengths end there")
    print_text("\n".join(texts))
    return plans


def _within_positions(config: C, positions: int | None) -> C:
    """Returns a configuration with the lengths that a run can have: no sequence has more tokens than the model has
    positions.

    Raises: ConfigError: a completion leaves no room for a prompt.
    """
    if positions is None:
        return config
    if not isinstance(config, RunConfig):
        if (config.data.max_length or 2 * LENGTH) <= positions:
            return config
        return dataclasses.replace(config, data=dataclasses.replace(config.data, max_length=positions))
    rollout = with_assumed_lengths(config).rollout
    prompt, new = rollout.max_prompt_length or LENGTH, rollout.max_tokens_to_generate or LENGTH
    if prompt + rollout.most_tokens <= positions:
        return config
    if "max_tokens_to_generate" in config.rollout.open_lengths:
        new = max(1, min(new, positions // 2))
    if new >= positions:
        raise ConfigError(f"rollout.max_tokens_to_generate={new} leaves no room in {positions} positions; lower it")
    prompt = min(prompt, positions - new)
    lengths = {"max_prompt_length": prompt, "max_tokens_to_generate": new}
    if rollout.max_turns > 1 or rollout.agent is not None:
        lengths["max_episode_tokens"] = positions - prompt
    return dataclasses.replace(config, rollout=dataclasses.replace(rollout, **lengths))


def plan_text(
    config: RunConfig | SupervisedRunConfig,
    sizes: ModelSizes,
    plan: MemoryPlan,
    memory_gb: float,
    num_processes: int = 1,
) -> str:
    """Returns a plan as a table: a row for each part, in GB, and the settings to add."""
    total = f"{sizes.parameters / 1e6:,.{1 if sizes.parameters < 1e7 else 0}f}"
    what = f"trains {sizes.trained / 1e6:,.1f} M of {total} M parameters"
    kind = "reward model" if isinstance(config, RMRunConfig) else config.COMMAND.upper()
    dtype = "bfloat16" if sizes.dtype_bytes == 2 else "float32"
    lengths = f"  rows of {longest_row(config):,} tokens"
    if samples := isinstance(config, RunConfig):
        rollout = with_assumed_lengths(config).rollout
        lengths = (
            f"  prompts of {rollout.max_prompt_length:,} tokens, completions of {rollout.max_tokens_to_generate:,}"
        )
    lines = [f"{memory_gb:g} GB: {kind}, {dtype}, {what}", lengths]
    if num_processes > 1:
        trainer = config.trainer
        together = trainer.context_parallel_size * trainer.tensor_parallel_size
        shards = num_processes // trainer.data_parallel_replicate_size
        run = "its own passes" if together == 1 else f"a pass with {together - 1} other"
        lines.append(f"  each of {num_processes} processes: a shard of {shards}, {run}")
    if samples and config.rollout_engine in ("auto", "embedded"):
        first, full = _at_once(config, plan)
        lines.append(f"  at most {first} completions at once, {full} if all have their full length")
    row = lambda name, rollout, update: f"  {name:40}" + (f"{rollout:>9}" if samples else "") + f"{update:>9}"
    lines.append(row("GB", "rollout", "update"))
    sums = Part("sum", plan.rollout, plan.update)
    on_device = [p for p in plan.parts if p.rollout or p.update]
    lines += [row(p.name, f"{p.rollout / GB:.1f}", f"{p.update / GB:.1f}") for p in (*on_device, sums)]
    if plan.host:
        of_each = ", ".join(f"{p.name} {p.host / GB:.1f}" for p in plan.parts if p.host)
        lines.append(f"  {plan.host / GB:.1f} GB of each process in the memory of its host: {of_each}")
    words = with_settings(config, plan)
    if plan.peak <= memory_gb * GB:
        lines += [f"  fits with {' '.join(words)}" if words else "  fits as it is", ""]
        return "\n".join(lines)
    excess = plan.peak / GB - memory_gb
    return "\n".join(
        [*lines, f"  does not fit, by {excess:.1f} GB; try {ways_to_fit(config, None, num_processes)}", ""]
    )


def _at_once(config: RunConfig, plan: MemoryPlan) -> list[int]:
    """Returns how many completions the embedded engine decodes at once: those that have begun, and of full length."""
    rollout, count, counts = with_assumed_lengths(config).rollout, config.algo.num_generations, []
    prompt, longest = rollout.max_prompt_length or LENGTH, rollout.max_tokens_to_generate or LENGTH
    for places in (row_places(longest, 1), longest):
        groups, rest = divmod(plan.kv_tokens, prompt + count * places)
        counts.append(min(rollout.max_batch_size, groups * count + max(0, (rest - prompt) // places)))
    return counts
