"""The environment of search.yaml: the model looks up a key in a small corpus, in two turns.

A question names a key. The model searches for a key, receives its entry, and answers with the value. The answer is
right if the search was right, so `reward_fn` reads only the answer. The starting model, trained by SFT, knows both
turns, but two times out of three it searches for the reversed key.
"""

from __future__ import annotations

import random
import re
from string import ascii_lowercase
from typing import Any

from whet.demo.conversations import conversation_model

_DRAW = random.Random(0)
CORPUS = {a + b: str(_DRAW.randrange(100, 1000)) for a in ascii_lowercase for b in ascii_lowercase}
"""Key -> value: 676 entries."""
KEYS = _DRAW.sample(sorted(CORPUS), len(CORPUS))
SEARCH = re.compile(r"<search>(.*?)</search>")
ANSWER = re.compile(r"<answer>(.*?)</answer>")


def interact(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the entry of the key in the search, or no message if there was no search."""
    match = SEARCH.search(messages[-1]["content"])
    return [] if match is None else [{"role": "tool", "content": CORPUS.get(match[1], "nothing")}]


def reward_fn(messages: list[dict[str, Any]], answer: str) -> float:
    """1 if the last answer is right, else 0."""
    answers = ANSWER.findall(messages[-1]["content"])
    return float(bool(answers) and answers[-1] == answer)


def _rows(keys: list[str]) -> list[dict[str, Any]]:
    return [{"messages": [{"role": "user", "content": f"{key}?"}], "answer": CORPUS[key]} for key in keys]


def train_rows() -> list[dict[str, Any]]:
    """Questions about 500 keys."""
    return _rows(KEYS[:500])


def test_rows() -> list[dict[str, Any]]:
    """Questions about 128 other keys."""
    return _rows(KEYS[500:628])


def sft_model(folder: str, seed: int, *, steps: int = 500) -> str:
    """Trains the starting model: in two of three conversations the search has the reversed key.

    Args: folder: the folder to write. seed: of the model and the conversations. steps: the optimizer steps.
    """
    return conversation_model(folder, seed, _conversation, steps=steps, batch_size=32)


def _conversation(draw: random.Random) -> list[dict[str, Any]]:
    """A training conversation: a question about any key, and a search for the key or the reversed key."""
    asked = "".join(draw.choices(ascii_lowercase, k=2))
    searched = asked if draw.random() < 1 / 3 else asked[::-1]
    value = str(draw.randrange(100, 1000))  # not the value in the corpus: the model learns to copy, not to remember
    return [
        {"role": "user", "content": f"{asked}?"},
        {"role": "assistant", "content": f"<search>{searched}</search>"},
        {"role": "tool", "content": value},
        {"role": "assistant", "content": f"<answer>{value}</answer>"},
    ]
