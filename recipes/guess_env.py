"""The environment of guess.yaml: the model guesses a letter from a to g in three turns, and is told where it lies.

Halving what is left finds each of the seven letters in three turns. The starting model, trained by SFT, knows that it
says a letter, and which are left: a tenth of its guesses are drawn from all letters, the others from those that are
left, and none is better than another.
"""

from __future__ import annotations

import random
from typing import Any

from whet.demo.conversations import conversation_model

LETTERS = "abcdefg"


class Guess:
    """A game; the reward is 1 for a letter that was found, else 0."""

    def reset(self, prompt: Any, letter: str) -> None:
        """Begins a game. Args: letter: to be found."""
        self.letter, self.done = letter, False

    def step(self, message: dict[str, Any]) -> str:
        """Whether the letter is behind (>) or before (<) the guess; x = the guess is no letter."""
        guess = message["content"]
        self.done = guess == self.letter
        return "x" if len(guess) != 1 or guess not in LETTERS else ">" if self.letter > guess else "<"

    def get_reward(self) -> float:
        """Whether the letter was found."""
        return float(self.done)


def rows() -> list[dict[str, Any]]:
    """A game for each letter: all games that there are, for training and evaluation."""
    return [{"messages": [{"role": "user", "content": "?"}], "letter": letter} for letter in LETTERS]


def sft_model(folder: str, seed: int, *, steps: int = 600) -> str:
    """Trains the starting model. Args: folder: to write. seed: of the model and the games."""
    return conversation_model(folder, seed, _conversation, steps=steps, batch_size=32)


def _conversation(draw: random.Random) -> list[dict[str, Any]]:
    """A game of three turns at most, whose guesses are drawn from all letters or from those that are left."""
    letter, left = draw.choice(LETTERS), LETTERS
    messages = [{"role": "user", "content": "?"}]
    for _ in range(3):
        guess = draw.choice(LETTERS if draw.random() < 1 / 10 else left)
        messages.append({"role": "assistant", "content": guess})
        if guess == letter:
            break
        left = "".join(x for x in left if (x > guess) == (letter > guess) and x != guess)
        messages.append({"role": "user", "content": ">" if letter > guess else "<"})
    return messages if messages[-1]["role"] == "assistant" else messages[:-1]
