"""`whet plan`: the memory of a run on each of its GPUs, before anything is loaded."""

from __future__ import annotations

from whet.cli.output import print_text
from whet.config import PPORunConfig, RunConfig
from whet.errors import ConfigError
from whet.parallel.torchrun_env import check_mesh
from whet.train.memory_plan import (
    GB,
    MemoryPlan,
    ModelSizes,
    measure_model,
    plan_memory,
    ways_to_fit,
    with_lengths,
    with_settings,
)

__all__ = ["SIZES", "plan", "plan_text"]

SIZES = (24.0, 40.0, 80.0)
"""Gigabytes of usual GPUs, for a plan without memory_gb."""


def plan(config: RunConfig, memory_gb: float | None, num_processes: int = 1) -> list[MemoryPlan]:
    """Prints what a run of this configuration takes on each of its GPUs, and the settings with which it fits.

    Args: config: of `whet grpo` or `whet ppo`; only its model is needed. memory_gb: of the GPU, in gigabytes of 1e9
        bytes; None = those of SIZES. num_processes: of torchrun, each with a GPU.
    Returns: a plan for each size.
    Raises: ConfigError: the model's config can't be read; the processes can't be the mesh of the configuration.
    """
    trainer = config.trainer
    check_mesh(
        num_processes,
        trainer.context_parallel_size,
        trainer.data_parallel_replicate_size,
        trainer.tensor_parallel_size,
    )
    if num_processes > 1 and config.actor.quantization is not None:
        raise ConfigError(
            f"actor.quantization={config.actor.quantization} does not run on {num_processes} processes: FSDP shards "
            "numbers, and 4-bit weights are packed in blocks with scales; leave it out, or plan for one process"
        )
    sizes = measure_model(config.actor, trained=True)
    memories = SIZES if memory_gb is None else (memory_gb,)
    plans = [plan_memory(config, sizes, memory=memory * GB, num_processes=num_processes) for memory in memories]
    texts = [plan_text(config, sizes, x, memory, num_processes) for x, memory in zip(plans, memories, strict=True)]
    print_text("\n".join(texts))
    return plans


def plan_text(config: RunConfig, sizes: ModelSizes, plan: MemoryPlan, memory_gb: float, num_processes: int = 1) -> str:
    """A plan as a table: a row for each part, in GB, and the settings to add."""
    what = f"trains {sizes.trained / 1e6:,.1f} M of {sizes.parameters / 1e6:,.0f} M parameters"
    kind = "PPO" if isinstance(config, PPORunConfig) else "GRPO"
    dtype = "bfloat16" if sizes.dtype_bytes == 2 else "float32"
    rollout = with_lengths(config).rollout
    lengths = f"  prompts of {rollout.max_prompt_length:,} tokens, completions of {rollout.max_tokens_to_generate:,}"
    lines = [f"{memory_gb:g} GB: {kind}, {dtype}, {what}", lengths]
    if num_processes > 1:
        trainer = config.trainer
        together = trainer.context_parallel_size * trainer.tensor_parallel_size
        shards = num_processes // trainer.data_parallel_replicate_size
        run = "its own passes" if together == 1 else f"a pass with {together - 1} other"
        lines.append(f"  each of {num_processes} processes: a shard of {shards}, {run}")
    lines.append(f"  {'GB':40}{'rollout':>9}{'update':>9}")
    lines += [f"  {p.name:40}{p.rollout / GB:9.1f}{p.update / GB:9.1f}" for p in plan.parts]
    lines.append(f"  {'sum':40}{plan.rollout / GB:9.1f}{plan.update / GB:9.1f}")
    words = with_settings(config, plan)
    if plan.peak <= memory_gb * GB:
        lines += [f"  fits with {' '.join(words)}" if words else "  fits as it is", ""]
        return "\n".join(lines)
    excess = plan.peak / GB - memory_gb
    return "\n".join(
        [*lines, f"  does not fit, by {excess:.1f} GB; try {ways_to_fit(config, None, num_processes)}", ""]
    )
