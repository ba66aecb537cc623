"""Whet's errors and log lines in RL2's words: the keys of a command in place of whet's configuration keys."""

from __future__ import annotations

from whet.compat.messages import Vocabulary
from whet.config.introspection import leaves
from whet.rl2.keys import KEYS
from whet.rl2.parsed_args import CONFIGS, ParsedArgs, flatten_known

__all__ = ["vocabulary"]


def vocabulary(args: ParsedArgs) -> Vocabulary:
    """Returns the vocabulary of a command: RL2's key for each key of whet's, else whet.<key>.

    A key that the command sets as whet.<key> keeps that name. Where RL2 has several keys for one of whet's, it is the
    one that the command has, else the one of the same name, else the first.

    >>> from whet.rl2.parsed_args import parse_args
    >>> words = vocabulary(parse_args("ppo", ["actor.optimizer.lr=1e-3"]))
    >>> words.translate("actor.optim.lr=1 is above trainer.warn_when; lower algo.clip_range_ratio")
    'actor.optimizer.lr=1 is above whet.trainer.warn_when; lower algo.clip_range_ratio'
    """
    table = KEYS[args.trainer]
    names = {key: f"whet.{key}" for key, _ in flatten_known(args.whet_keys, {}) if "." in key}
    for key, *_ in leaves(CONFIGS[args.trainer], True):
        if key in names or ("." not in key and "_" not in key):  # a plain word: tokenizer, reward
            continue
        candidates = [name for name, field in table.items() if field.key == key and not name.endswith("*")]
        typed = [name for name in candidates if not isinstance(args.values.get(name, True), bool)]
        copied = [name for name in candidates if table[name].state == "works"]
        same = [key] if key in table else []
        names[key] = next(iter([*typed, *same, *copied, f"whet.{key}"]))
    return Vocabulary(names, {})
