"""Parses a command of RL2's to keys and values, and recognises the generation of RL2 that it is written for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from whet.compat.field import Field, Table
from whet.config import DPORunConfig, PPORunConfig, RMRunConfig, SFTRunConfig
from whet.config.loader import merge, parse_config_args, takes_text
from whet.errors import ConfigError, format_value, lookup_error, nearest
from whet.rl2.keys import KEYS
from whet.rl2.references import resolve

__all__ = ["CONFIGS", "ParsedArgs", "copied_values", "find_field", "flatten_known", "parse_args"]

OWN = "whet"
"""The prefix of keys of whet's own."""
CONFIGS = {"ppo": PPORunConfig, "sft": SFTRunConfig, "rm": RMRunConfig, "dpo": DPORunConfig}
"""Trainer of RL2's -> the configuration of whet's that has all of its keys."""
TEXTS = ("data.path", "data.eval_path", "tokenizer", "trainer.run_dir")
"""Keys of whet's that take text and are computed from a key of RL2's, not copied."""
GROUPS = {"actor": ("fsdp",), "ref_actor": ("fsdp",), "critic": ("fsdp",)}
"""Hydra's configuration groups and the supported choices of each."""
PREFIXES_SEPTEMBER_2025 = ("train_data.", "test_data.")
"""Prefixes of keys that only the release of September 2025 has."""
SUFFIXES_SEPTEMBER_2025 = (".use_wandb", ".ddp_size", ".scheduler")
"""Suffixes of keys that September 2025 has and July 2025 lacks."""
PREFIXES_2026 = ("rollout.train.", "rollout.test.", "rollout.server_args.", "data.train.", "data.test.")
"""Prefixes of keys that 2026 has and July 2025 lacks."""
SUFFIXES_2026 = (
    ".scheduler.name",
    ".scheduler.min_lr",
    ".scheduler.warmup_ratio",
    ".optimizer.lr",
    ".enable_gradient_checkpointing",
    ".cp_size",
    ".total_steps",
)
"""Suffixes of keys that 2026 has and July 2025 lacks."""


class ParsedArgs:
    """The keys of a command, and the problems found so far.

    Args: trainer: RL2's. values: key -> value. whet_keys: a tree of whet's own keys, which override the translation.

    >>> parse_args("ppo", ["actor.rollout.max_turns=4", "whet.trainer.seed=3"]).values
    {'rollout.max_turns': 4}
    """

    def __init__(self, trainer: str, values: Mapping[str, Any], whet_keys: Mapping[str, Any]) -> None:
        self.trainer, self.values, self.whet_keys = trainer, dict(values), dict(whet_keys)
        self.problems: list[str] = []

    @property
    def is_september_2025(self) -> bool:
        """Whether it is written for the release of September 2025, which PyPI has."""
        if self.is_2026 or self.trainer == "ppo":
            return not self.is_2026 and any(k.startswith(PREFIXES_SEPTEMBER_2025) for k in self.values)
        return any(k.endswith(SUFFIXES_SEPTEMBER_2025) for k in self.values)

    @property
    def is_2026(self) -> bool:
        """Whether it is written for the configuration of 2026."""
        return any(k.startswith(PREFIXES_2026) or k.endswith(SUFFIXES_2026) for k in self.values)

    @property
    def is_july_2025(self) -> bool:
        """Whether no key belongs to another generation than July 2025."""
        return not (self.is_september_2025 or self.is_2026)

    def get(self, *keys: str, default: Any = None) -> Any:
        """Returns the value of a key that has several names; two different values are a problem."""
        values = {k: self.values[k] for k in keys if self.values.get(k) is not None}
        if len({repr(v) for v in values.values()}) > 1:
            self.problems.append(
                f"{' and '.join(f'{k}={v!r}' for k, v in values.items())}: these are one key here; give one of them"
            )
        return next(iter(values.values()), default)

    def get_count(self, *keys: str, default: int = 1) -> int:
        """Returns a positive whole number, or the default; another value is a problem."""
        value = self.get(*keys, default=default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.problems.append(
                f"{' or '.join(k for k in keys if k in self.values)}: expected a whole number above 0, got {value!r}"
            )
            return default
        return value

    def require(self, what: str, *keys: str) -> Any:
        """Returns a value without a default; a missing one is a problem. Args: what: its meaning, for the message."""
        value = self.get(*keys)
        if value is None:
            self.problems.append(f"{what} is not given; write {keys[0]}=...")
        return value

    def require_choice(self, key: str, value: Any, known: Sequence[str]) -> Any:
        """Returns the value; one that is not known is a problem."""
        if value not in known:
            self.problems.append(str(lookup_error(key, value, known)))
        return value

    def require_equal(self, expected: Any, *keys: str) -> None:
        """Notes keys with another value than the expected one."""
        for key in keys:
            value = self.values.get(key)
            if value is not None and value != expected:
                self.problems.append(f"{key}={value!r} is refused: it is {expected!r} for the others; leave it out")

    def section(self, prefix: str) -> dict[str, Any]:
        """Returns the values below a prefix, by the rest of their keys."""
        return {k.removeprefix(f"{prefix}."): v for k, v in self.values.items() if k.startswith(f"{prefix}.")}

    def collect_refused(self) -> None:
        """Notes every key with a refused value."""
        for key, value in self.values.items():
            row = find_field(key, KEYS[self.trainer])
            if row is not None and row.refuses(value):
                self.problems.append(f"{key}={format_value(value, 60)} is refused: {row.note}")

    def raise_problems(self) -> None:
        """Raises ConfigError with every problem so far, a line each."""
        if self.problems:
            raise ConfigError("\n".join(dict.fromkeys(self.problems)))


def parse_args(trainer: str, words: Sequence[str]) -> ParsedArgs:
    """Parses a command.

    Args: trainer: a key of KEYS. words: key=value as hydra takes them (a + before a key is dropped), and --config FILE.
    Returns: the keys; unknown keys are among the problems.
    Raises: ConfigError: a word of another form.
    """
    plain = []
    for word in words:
        key, equals, value = word.partition("=")
        if key in GROUPS and equals:
            if value not in GROUPS[key]:
                raise ConfigError(
                    f"{word}: {', '.join(GROUPS[key])} is the only choice; {KEYS['ppo']['actor.tf_config.*'].note}"
                )
            continue
        if key.startswith(("~", "hydra.", "--config-")):
            raise ConfigError(f"{word}: hydra's own options are not here; write key=value, or --config FILE")
        plain.append(word.lstrip("+"))
    nested = parse_config_args(plain, texts=partial(_is_text, trainer))
    nested.pop("defaults", None)  # hydra's list of base configurations
    actor = nested.get("actor")
    if isinstance(actor, dict) and "rollout" in actor:
        actor = dict(actor)
        nested = merge(nested, {"rollout": actor.pop("rollout")}) | {"actor": actor}
    nested, problems = resolve(nested)
    whet_keys = nested.pop(OWN, None) or {}
    if not isinstance(whet_keys, Mapping):
        raise ConfigError(f"{OWN}={whet_keys!r}: write {OWN}.<key of whet's>=value")
    args = ParsedArgs(trainer, dict(flatten_known(nested, KEYS[trainer])), whet_keys)
    args.problems += [*problems, *(text for key in args.values if (text := _unknown(key, KEYS[trainer])))]
    return args


def _is_text(trainer: str, names: Sequence[str], text: str) -> bool:
    """Returns whether the value of a key is text, as it was typed, because whet's key takes text.

    As in hydra, a quoted word loses its quotes, and null is None.
    """
    if names[0] == OWN:
        return names[1:] != [] and takes_text(CONFIGS[trainer], names[1:], text)
    if names[:2] == ["actor", "rollout"]:
        names = names[1:]
    row = find_field(".".join(names), KEYS[trainer])
    target = "" if row is None else row.key.partition(",")[0]
    if row is None or not (row.state == "works" or target in TEXTS or target.endswith("_column")):
        return False
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
    return text != "null" and not quoted and takes_text(CONFIGS[trainer], target.split("."), text)


def find_field(key: str, known: Table) -> Field | None:
    """Returns the row of a key, or the row with a * that covers it; None = there is none."""
    parts = key.split(".")
    starred = [".".join([*parts[:n], "*"]) for n in range(len(parts) - 1, 0, -1)]
    return next((known[name] for name in (key, *starred) if name in known), None)


def flatten_known(node: Mapping[str, Any], known: Table, prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Dotted keys with their values; a mapping is a value where a key of that name is known, and none below it."""
    for name, value in node.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and (key not in known or any(k.startswith(f"{key}.") for k in known)):
            yield from flatten_known(value, known, f"{key}.")
        else:
            yield key, value


def _unknown(key: str, known: Table) -> str | None:
    """Returns the message for a key that RL2 lacks; None = RL2 has it."""
    if find_field(key, known) is not None:
        return None
    keys = [k.removesuffix(".*") for k in known]
    same = [k for k in keys if k.rpartition(".")[2] == key.rpartition(".")[2]]
    near = nearest(key, keys) or (f"; did you mean {' or '.join(same[:3])}?" if same else "")
    other = "; docs/from-rl2.md lists them; whet.<key> is a key of whet"
    return f"unknown key {format_value(key, 60)[1:-1]}{near or other}"


def copied_values(args: ParsedArgs) -> dict[str, Any]:
    """Returns the values that are copied, by whet's keys."""
    flat: dict[str, Any] = {}
    for key, value in args.values.items():
        row = find_field(key, KEYS[args.trainer])
        if row is None or row.state != "works" or value is None:
            continue
        if row.key in flat and flat[row.key] != value:
            args.problems.append(f"{key}={value!r}: {row.key} is {flat[row.key]!r} by another key; give one of them")
        flat[row.key] = value
    return flat
