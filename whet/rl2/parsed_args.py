"""What a command of RL2's says: its words, as RL2's keys with values, and the defaults of its generation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from whet.config import DPORunConfig, PPORunConfig, RMRunConfig, SFTRunConfig
from whet.config.loader import merge, parse_args, takes_text
from whet.errors import ConfigError, format_value, lookup_error, nearest
from whet.rl2.keys import KEYS, Key
from whet.rl2.references import resolved

__all__ = ["Given", "copied", "key_of", "read"]

OWN = "whet"
"""What stands before keys of whet's own."""
KINDS = {"ppo": PPORunConfig, "sft": SFTRunConfig, "rm": RMRunConfig, "dpo": DPORunConfig}
"""The configuration of whet's with all keys of a trainer of RL2's."""
TEXTS = ("data.path", "data.eval_path", "tokenizer", "trainer.run_dir")
"""Keys of whet's that take text, of RL2's that are more than another name for them."""
GROUPS = {"actor": ("fsdp",), "ref_actor": ("fsdp",), "critic": ("fsdp",)}
"""Groups of hydra's, and what of them is here."""
SEPTEMBER = ("train_data.", "test_data.")
"""Beginnings of keys that September 2025 alone has."""
SEPTEMBER_ENDS = (".use_wandb", ".ddp_size", ".scheduler")
"""Ends of keys that September 2025 has and July has not."""
LATER = ("rollout.train.", "rollout.test.", "rollout.server_args.", "data.train.", "data.test.")
"""Beginnings of keys that the later generations have and July 2025 has not."""
LATER_ENDS = (
    ".scheduler.name",
    ".scheduler.min_lr",
    ".scheduler.warmup_ratio",
    ".optimizer.lr",
    ".enable_gradient_checkpointing",
    ".cp_size",
    ".total_steps",
)


class Given:
    """The keys of a command.

    Args: verb: RL2's trainer. values: key -> value. own: whet's keys as a tree, which stand over the translation.

    >>> read("ppo", ["actor.rollout.max_turns=4", "whet.trainer.seed=3"]).values
    {'rollout.max_turns': 4}
    """

    def __init__(self, verb: str, values: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        self.verb, self.values, self.own = verb, dict(values), dict(own)
        self.problems: list[str] = []

    @property
    def is_september(self) -> bool:
        """Whether it is written for the release of September 2025, which PyPI has."""
        if self.is_later or self.verb == "ppo":
            return not self.is_later and any(k.startswith(SEPTEMBER) for k in self.values)
        return any(k.endswith(SEPTEMBER_ENDS) for k in self.values)

    @property
    def is_later(self) -> bool:
        """Whether it is written for a generation after that of July 2025."""
        return any(k.startswith(LATER) or k.endswith(LATER_ENDS) for k in self.values)

    @property
    def is_july(self) -> bool:
        """Whether nothing says that it is written for another generation than that of July 2025."""
        return not (self.is_september or self.is_later)

    def get(self, *keys: str, default: Any = None) -> Any:
        """The value of a key that several generations name differently; two that differ are a problem."""
        found = {k: self.values[k] for k in keys if self.values.get(k) is not None}
        if len({repr(v) for v in found.values()}) > 1:
            self.problems.append(
                f"{' and '.join(f'{k}={v!r}' for k, v in found.items())}: these are one key here; give one of them"
            )
        return next(iter(found.values()), default)

    def count(self, *keys: str, default: int = 1) -> int:
        """A whole number above 0, or the default; another value is a problem."""
        value = self.get(*keys, default=default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.problems.append(
                f"{' or '.join(k for k in keys if k in self.values)}: expected a whole number above 0, got {value!r}"
            )
            return default
        return value

    def need(self, what: str, *keys: str) -> Any:
        """A value that has no default; without it there is a problem. Args: what: it is."""
        value = self.get(*keys)
        if value is None:
            self.problems.append(f"{what} is not given; write {keys[0]}=...")
        return value

    def one_of(self, key: str, value: Any, known: Sequence[str]) -> Any:
        """The value; another than the known ones is a problem."""
        if value not in known:
            self.problems.append(str(lookup_error(key, value, known)))
        return value

    def same(self, what: Any, *keys: str) -> None:
        """Notes keys that say something else than what they must repeat."""
        for key in keys:
            value = self.values.get(key)
            if value is not None and value != what:
                self.problems.append(f"{key}={value!r} is refused: it is {what!r} for the others; leave it out")

    def below(self, prefix: str) -> dict[str, Any]:
        """The values below a key, by the rest of their keys."""
        return {k.removeprefix(f"{prefix}."): v for k, v in self.values.items() if k.startswith(f"{prefix}.")}

    def refuse(self) -> None:
        """Notes every key whose value can't be carried out."""
        for key, value in self.values.items():
            row = key_of(key, KEYS[self.verb])
            if row is not None and row.how in ("one", "refused") and not _harmless(value, row):
                self.problems.append(f"{key}={format_value(value, 60)} is refused: {row.note}")

    def check(self) -> None:
        """Raises ConfigError: every problem so far, a line each."""
        if self.problems:
            raise ConfigError("\n".join(dict.fromkeys(self.problems)))


def read(verb: str, words: Sequence[str]) -> Given:
    """The keys of a command.

    Args: verb: of VERBS. words: key=value as hydra takes them (a + before a key is dropped), and --config FILE.
    Raises: ConfigError: what is not written so. Unknown keys are among the problems.
    """
    plain = []
    for word in words:
        key, equals, value = word.partition("=")
        if key in GROUPS and equals:
            if value not in GROUPS[key]:
                raise ConfigError(
                    f"{word}: {', '.join(GROUPS[key])} alone is here; {KEYS['ppo']['actor.tf_config.*'].note}"
                )
            continue
        if key.startswith(("~", "hydra.", "--config-")):
            raise ConfigError(f"{word}: hydra's own options are not here; write key=value, or --config FILE")
        plain.append(word.lstrip("+"))
    nested = parse_args(plain, texts=partial(_is_text, verb))
    nested.pop("defaults", None)  # of hydra: what a configuration of RL2's builds on
    actor = nested.get("actor")
    if isinstance(actor, dict) and "rollout" in actor:
        actor = dict(actor)
        nested = merge(nested, {"rollout": actor.pop("rollout")}) | {"actor": actor}
    nested, problems = resolved(nested)
    own = nested.pop(OWN, None) or {}
    if not isinstance(own, Mapping):
        raise ConfigError(f"{OWN}={own!r}: write {OWN}.<key of whet's>=value")
    made = Given(verb, dict(_flat(nested, KEYS[verb])), own)
    made.problems += [*problems, *(text for key in made.values if (text := _unknown(key, KEYS[verb])))]
    return made


def _is_text(verb: str, names: Sequence[str], text: str) -> bool:
    """Whether a word is text, taken as it was typed: where whet's key takes that.

    As hydra has it, a quoted word is without its quotes, and null is nothing.
    """
    if names[0] == OWN:
        return names[1:] != [] and takes_text(KINDS[verb], names[1:], text)
    if names[:2] == ["actor", "rollout"]:
        names = names[1:]
    row = key_of(".".join(names), KEYS[verb])
    target = "" if row is None else row.to.partition(",")[0]
    if row is None or not (row.how == "same" or target in TEXTS or target.endswith("_column")):
        return False
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
    return text != "null" and not quoted and takes_text(KINDS[verb], target.split("."), text)


def key_of(key: str, known: Mapping[str, Key]) -> Key | None:
    """The row of a key: its own, or that of all that begin like it; None = there is none."""
    parts = key.split(".")
    starred = [".".join([*parts[:n], "*"]) for n in range(len(parts) - 1, 0, -1)]
    return next((known[name] for name in (key, *starred) if name in known), None)


def _flat(node: Mapping[str, Any], known: Mapping[str, Key], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Dotted keys with their values; a mapping is a value where a key of that name is known, and none below it."""
    for name, value in node.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and (key not in known or any(k.startswith(f"{key}.") for k in known)):
            yield from _flat(value, known, f"{key}.")
        else:
            yield key, value


def _unknown(key: str, known: Mapping[str, Key]) -> str | None:
    """What to say of a key that RL2 has not; None = it has it."""
    if key_of(key, known) is not None:
        return None
    keys = [k.removesuffix(".*") for k in known]
    same = [k for k in keys if k.rpartition(".")[2] == key.rpartition(".")[2]]
    near = nearest(key, keys) or (f"; did you mean {' or '.join(same[:3])}?" if same else "")
    other = "; docs/from-rl2.md lists them; whet.<key> is a key of whet"
    return f"unknown key {format_value(key, 60)[1:-1]}{near or other}"


def copied(given: Given) -> dict[str, Any]:
    """The values of keys that are a key of whet's under another name, by that."""
    flat: dict[str, Any] = {}
    for key, value in given.values.items():
        row = key_of(key, KEYS[given.verb])
        if row is None or row.how != "same" or value is None:
            continue
        if row.to in flat and flat[row.to] != value:
            given.problems.append(f"{key}={value!r}: {row.to} is {flat[row.to]!r} by another key; give one of them")
        flat[row.to] = value
    return flat


def _harmless(value: Any, row: Key) -> bool:
    return any(type(value) is type(other) and value == other for other in row.harmless)
