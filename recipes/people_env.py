"""The environment of smollm2_search_grpo.yaml: the model looks a person up, and reads the answer in what it finds.

A question asks where a person lives, or for the person's job. `search` finds an entry with both by the whole name, and
nothing by a part of it. The starting model, trained by SFT, searches in every second conversation, with the whole name
in every second search, and answers with either fact of an entry; else it answers at once, with any city or job.
"""

from __future__ import annotations

import random
from typing import Any

# fmt: off
FIRST = [
    "Adam", "Alice", "Anna", "Ben", "Carl", "Clara", "David", "Diana", "Emma", "Eric", "Frank", "Grace", "Henry",
    "Irene", "Jack", "Jane", "Karen", "Kevin", "Laura", "Leo", "Maria", "Martin", "Nora", "Oscar", "Paul", "Peter",
    "Rosa", "Simon", "Tom", "Victor",
]
LAST = [
    "Baker", "Bell", "Black", "Brown", "Carter", "Clark", "Cook", "Davis", "Evans", "Fisher", "Ford", "Fox", "Gray",
    "Green", "Hall", "Hill", "Hunt", "King", "Lane", "Lee", "Moore", "Parker", "Reed", "Rose", "Scott", "Stone",
    "Turner", "Ward", "White", "Wood",
]
CITIES = [
    "Athens", "Berlin", "Boston", "Cairo", "Chicago", "Delhi", "Dublin", "Geneva", "Havana", "Lima", "Lisbon", "London",
    "Madrid", "Milan", "Moscow", "Oslo", "Paris", "Prague", "Rome", "Seattle", "Sydney", "Tokyo", "Toronto", "Vienna",
]
JOBS = [
    "barber", "carpenter", "chemist", "dancer", "dentist", "doctor", "driver", "farmer", "gardener", "judge", "lawyer",
    "miner", "nurse", "painter", "pilot", "plumber", "poet", "sailor", "singer", "soldier", "tailor", "teacher",
    "waiter", "writer",
]
# fmt: on
_DRAW = random.Random(0)
CORPUS = {
    f"{first} {last}": (_DRAW.choice(CITIES), _DRAW.choice(JOBS))
    for first, last in _DRAW.sample([(first, last) for first in FIRST for last in LAST], 628)
}
"""Name -> city and job, of 628 of the 900 people that there could be."""


class People:
    """A search over the corpus; the reward is 1 if the model's last turn is the answer, else 0."""

    def reset(self, prompt: Any, answer: str) -> None:
        """Begins with a question. Args: answer: to it."""
        self.answer, self.said = answer, ""

    def search(self, name: str) -> str:
        """Finds a person.

        Args:
            name: the whole name, such as Anna Hill.
        """
        return entry(name, *CORPUS[name]) if name in CORPUS else f"Nothing about {name}."

    def step(self, message: dict[str, Any]) -> None:
        """Ends the episode with a turn without calls."""
        self.said = message["content"]

    def get_reward(self) -> float:
        """Returns whether the model has said the answer."""
        return float(self.said == self.answer)


def entry(name: str, city: str, job: str) -> str:
    """Returns what is known about a person."""
    return f"{name} lives in {city} and works as a {job}."


def _question(name: str, fact: int) -> list[dict[str, Any]]:
    """Returns the question for a fact: 0 = the city, 1 = the job."""
    return [{"role": "user", "content": (f"Where does {name} live?", f"What is the job of {name}?")[fact]}]


def _rows(people: list[str]) -> list[dict[str, Any]]:
    """Returns a question about each, by turns for the city and the job."""
    return [{"messages": _question(name, n % 2), "answer": CORPUS[name][n % 2]} for n, name in enumerate(people)]


def train_rows() -> list[dict[str, Any]]:
    """Returns questions about 500 people."""
    return _rows(list(CORPUS)[128:])


def test_rows() -> list[dict[str, Any]]:
    """Returns questions about 128 others."""
    return _rows(list(CORPUS)[:128])


def conversations() -> list[dict[str, Any]]:
    """Returns 384 conversations about people with any city and job, to train the starting model on."""
    draw = random.Random(0)
    return [{"messages": _conversation(draw)} for _ in range(384)]


def _conversation(draw: random.Random) -> list[dict[str, Any]]:
    """Returns a question that is answered at once with any fact, or behind a search, whose words are the whole name
    every second time, with either fact that was found.
    """
    first, last, fact = draw.choice(FIRST), draw.choice(LAST), draw.randrange(2)
    asks = _question(f"{first} {last}", fact)
    facts = draw.choice(CITIES), draw.choice(JOBS)  # not those of the corpus: the model learns to read, not to remember
    guess = {"role": "assistant", "content": draw.choice((CITIES, JOBS)[fact])}
    if draw.random() < 1 / 2:
        return [*asks, guess]
    name = draw.choice([f"{first} {last}", f"{first} {last}", first, last])
    is_whole = name not in (first, last)
    call = {"type": "function", "function": {"name": "search", "arguments": {"name": name}}}
    return [
        *asks,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "search", "content": entry(name, *facts) if is_whole else f"Nothing about {name}."},
        {"role": "assistant", "content": draw.choice([facts[fact], facts[fact], *facts])} if is_whole else guess,
    ]
