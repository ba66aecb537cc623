"""From a command of RL2's to the configuration of whet's that does the same.

Values that have a place go there as they are; ppo.py and supervised.py make what several keys say together.
What RL2 does by default is set there too, as July 2025 has it, or 2026 where a command is written so.
docs/from-rl2.md is the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from whet.config.base import config_from_dict
from whet.config.loader import merge
from whet.rl2 import ppo, supervised
from whet.rl2.common import Part
from whet.rl2.parsed_args import Given, copied, read

__all__ = ["RULES", "of_given", "translated", "tree_of"]


def translated(verb: str, words: Sequence[str]) -> Any:
    """The checked configuration of a command.

    Args: verb: of RULES. words: as RL2 takes them; whet.<key> is a key of whet's own, over the translation.
    Raises: ConfigError: all problems at once, a line each.

    >>> made = translated("ppo", ["actor.model_name=m", "data.path=d.jsonl", "data.prompts_per_rollout=8",
    ...     "rollout.env_path=env.py", "rollout.train_sampling_params.max_new_tokens=16"])
    >>> made.algo.advantage_estimator, made.rollout.eval["temperature"], made.reward_names
    ('reinforce', 0.0, ('env.py:reward_fn',))
    """
    return of_given(read(verb, words))


def of_given(given: Given) -> Any:
    """The checked configuration of a command that is read. Raises ConfigError: as `translated` does."""
    kind, found = tree_of(given)
    return config_from_dict(kind, merge(found, given.own))


def tree_of(given: Given) -> tuple[type, dict[str, Any]]:
    """The class of the configuration, and its tree, without keys of whet's own."""
    given.refuse()
    given.check()
    flat = copied(given)
    rules, kind = RULES[given.verb]
    for rule in rules:
        flat |= rule(given)
    given.check()
    found: dict[str, Any] = {}
    for key, value in flat.items():
        node: Any = value
        for part in reversed(key.split(".")):
            node = {part: node}
        found = merge(found, node)
    return kind(given), found


Rule = Callable[[Given], Part]
RULES: Mapping[str, tuple[Sequence[Rule], Callable[[Given], type]]] = {
    "ppo": (ppo.RULES, ppo.kind),
    "sft": supervised.SFT,
    "rm": supervised.RM,
    "dpo": supervised.DPO,
}
"""Trainer -> what makes its configuration, and the class of it."""
