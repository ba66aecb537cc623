"""What an update, or a scoring pass, does when it runs out of GPU memory: it starts again with smaller micro-batches.

No gradient changes, since the weights of a loss are made once for the whole batch. Several processes can't start
again: the others wait in a collective in the middle of a pass. The one whose update ran out of memory writes a token
budget next to the checkpoints, with which all of them continue after a restart. Left out on purpose: the rollout.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from whet.errors import DataError
from whet.packing.micro_batch import MicroBatch
from whet.storage.files import read_json, to_json, write_atomic

__all__ = ["log_smaller_budget", "out_of_memory_note", "read_budgets", "smaller_budget", "write_budgets"]

log = logging.getLogger("whet")

BUDGETS = "micro_batch_tokens.json"
"""The file next to the checkpoints: {"actor": tokens}."""


def smaller_budget(plan: Callable[[int], Sequence[MicroBatch]], budget: int) -> int | None:
    """Half of the largest micro-batch's tokens, or more where a sequence or a unit is longer.

    Args: plan: the micro-batches within a token budget; DataError = a sequence or a unit does not fit. budget: the
        one that was too large.
    Returns: a token budget; None = the largest micro-batch is one sequence or unit, which can't be divided.
    """

    def is_possible(tokens: int) -> bool:
        try:
            plan(tokens)
        except DataError:
            return False
        return True

    largest = max(micro.num_tokens for micro in plan(budget))
    low, high = largest // 2, largest - 1
    if high < 1 or not is_possible(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_possible(middle) else (middle + 1, high)
    return high


def log_smaller_budget(before: int, after: int, trained: bool) -> None:
    """Logs that an update, or a scoring pass, starts again with another token budget."""
    log.warning(
        "%s ran out of memory with %d tokens in a micro-batch; it starts again, and goes on, with at most %d, which "
        "changes no %s. Set trainer.max_tokens_per_microbatch=%d in the next run",
        "an update" if trained else "scoring", before, after, "gradient" if trained else "result", after,
    )  # fmt: skip


def write_budgets(root: Path, budgets: Mapping[str, int]) -> None:
    """Notes token budgets for the next start. Args: root: of the checkpoints. budgets: role -> tokens."""
    before = read_budgets(root)
    smallest = {role: min(tokens, before.get(role, tokens)) for role, tokens in budgets.items()}
    write_atomic(root / BUDGETS, to_json({**before, **smallest}).encode())
    log.warning("after a restart with trainer.resume=latest, micro-batches have at most %s tokens", smallest)


def read_budgets(root: Path) -> dict[str, int]:
    """Returns the token budgets that `write_budgets` noted; {} = none."""
    try:
        content = read_json(root / BUDGETS)
    except (OSError, ValueError):
        return {}
    pairs = content.items() if isinstance(content, dict) else ()
    return {role: tokens for role, tokens in pairs if type(tokens) is int and tokens > 0}


def out_of_memory_note(
    configured: int, last: int, *, is_repeatable: bool, after_restart: int | None = None, trained: bool = True
) -> str:
    """Returns what helps after an update, or a scoring pass, that ran out of memory.

    Args: configured: the configured token budget. last: the budget of the last try. is_repeatable: whether smaller
        micro-batches were tried. after_restart: the budget of several processes after a restart. trained: an update.
    """
    if after_restart is not None:
        return (
            f"The update ran out of memory with {last} tokens in a micro-batch. Several processes can't repeat it; "
            "start the run again with trainer.resume=latest, as torchrun --max-restarts does: it continues with at "
            f"most {after_restart} tokens, which changes no gradient"
        )
    resume = "continue from the last checkpoint with trainer.resume=latest trainer.allow_config_change=true"
    if not trained:
        what = f"one sequence alone does not fit, at a budget of {last}: set" if is_repeatable else "set a smaller"
        less = "" if is_repeatable else " trainer.max_tokens_per_microbatch or"
        return (
            f"Scoring ran out of memory with {configured} tokens in a micro-batch; {what}{less} a smaller "
            "rollout.max_tokens_to_generate or data.max_length, "
            f"actor.lora.r=16 or actor.optim.name=adamw8bit, and {resume}"
        )
    if not is_repeatable:
        return (
            f"The update ran out of memory with {last} tokens in a micro-batch. Set a smaller "
            "trainer.max_tokens_per_microbatch (no gradient changes) or actor.gradient_checkpointing=full, and "
            f"{resume}"
        )
    return (
        f"The update ran out of memory with {configured} tokens in a micro-batch, and one sequence (or unit) alone "
        f"does not fit, at a budget of {last}: no smaller trainer.max_tokens_per_microbatch helps. Set "
        "actor.gradient_checkpointing=full, actor.optim.name=adamw8bit, actor.lora.r=16 or "
        "a smaller rollout.max_tokens_to_generate or data.max_length, and "
        f"{resume}"
    )
