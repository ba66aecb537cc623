"""The second reward of gsm8k_qwen3_0.6b.yaml, as an example of a reward file."""

from typing import Any

from whet.rewards.text import text_of


def boxed_once(completions: list[Any], **columns: Any) -> list[float]:
    r"""1 if the completion has exactly one \boxed{}, right or wrong; else 0."""
    return [float(text_of(c).count(r"\boxed{") == 1) for c in completions]
