"""The environment of calculator.yaml and smollm2_calculator_grpo.yaml: the model calculates with a tool that it calls.

A question asks for a sum, a difference or a product in words, `12 times 34?`. The model calls `calculate` with the
expression, and says the result. The starting model, trained by SFT, calls the tool in one of three conversations, with
the right operation in every second call; else it answers at once, with any number.
"""

from __future__ import annotations

import random
import re
from typing import Any

from whet.demo.conversations import conversation_model

OPERATIONS = {"plus": "+", "minus": "-", "times": "*"}
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}{% for call in m['tool_calls'] or [] %}"
    "<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Calls in the form of Hermes and Qwen. The tools' schemas are left out: the model has one tool, which it knows."""


class Calculator:
    """A calculator; the reward is 1 if the model's last turn is the result, else 0."""

    def reset(self, prompt: Any, answer: str) -> None:
        """Begins with a question. Args: answer: to it."""
        self.answer, self.said = answer, ""

    def calculate(self, text: str) -> int:
        """Calculates.

        Args:
            text: two numbers and an operation between them, such as 12*34.
        """
        found = re.fullmatch(r"(\d+)([-+*])(\d+)", text)
        if found is None:
            raise ValueError("write two numbers with + - or * between them")
        a, b = int(found[1]), int(found[3])
        return {"+": a + b, "-": a - b, "*": a * b}[found[2]]

    def step(self, message: dict[str, Any]) -> None:
        """Ends the episode with a turn without calls."""
        self.said = message["content"]

    def get_reward(self) -> float:
        """Returns whether the model has said the result."""
        return float(self.said == self.answer)


def _rows() -> list[dict[str, Any]]:
    """Returns 1,128 questions, drawn from the 24,300 that there are."""
    draw = random.Random(0)
    numbers = range(10, 100)
    cells = draw.sample([(a, word, b) for a in numbers for word in OPERATIONS for b in numbers], 1128)
    return [
        {
            "messages": [{"role": "user", "content": f"{a} {word} {b}?"}],
            "answer": str(Calculator().calculate(f"{a}{OPERATIONS[word]}{b}")),
        }
        for a, word, b in cells
    ]


def train_rows() -> list[dict[str, Any]]:
    """Returns 1,000 questions."""
    return _rows()[128:]


def test_rows() -> list[dict[str, Any]]:
    """Returns 128 others."""
    return _rows()[:128]


def conversations() -> list[dict[str, Any]]:
    """Returns 384 conversations, to train another starting model on."""
    draw = random.Random(0)
    return [{"messages": _conversation(draw)} for _ in range(384)]


def sft_model(folder: str, seed: int, *, steps: int = 500) -> str:
    """Trains the starting model. Args: folder: to write. seed: of the model and the conversations. steps: of SFT."""
    return conversation_model(folder, seed, _conversation, steps=steps, batch_size=32, chat_template=CHAT_TEMPLATE)


def _conversation(draw: random.Random) -> list[dict[str, Any]]:
    """Returns a question that is answered at once, or by a call whose operation is right every second time."""
    a, word, b = draw.randrange(10, 100), draw.choice(list(OPERATIONS)), draw.randrange(10, 100)
    result = str(draw.choice([draw.randrange(-89, 199), draw.randrange(100, 9802)]))  # the model learns to copy it
    asks = {"role": "user", "content": f"{a} {word} {b}?"}
    answers = {"role": "assistant", "content": result}
    if draw.random() > 1 / 3:
        return [asks, answers]
    text = f"{a}{draw.choice([OPERATIONS[word], *OPERATIONS.values()])}{b}"
    call = {"type": "function", "function": {"name": "calculate", "arguments": {"text": text}}}
    return [
        asks,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "calculate", "content": result},
        answers,
    ]
