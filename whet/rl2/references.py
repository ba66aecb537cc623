"""References in RL2's configurations, as OmegaConf has them: ${trainer.project}, ${.sibling}, ${oc.env:HOME}."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from whet.config.yaml12 import parse
from whet.errors import ConfigError

__all__ = ["resolved"]

ALIKE = (
    *("model_name", "dtype", "use_liger_kernel", "ddp_size", "tp_size", "cp_size", "sp_size"),
    *("max_length_per_device", "offload_model", "offload_optimizer"),
)
"""Ends of keys that all roles have alike by default, so that one that is not given needs no value."""
REFERENCE = re.compile(r"\$\{([^${}]*)\}")


def resolved(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A tree of keys with values in the place of the references to them, and a line for each that has none.

    A reference that is a whole value keeps its type; one inside a text is written into it. actor.rollout.* is
    rollout.*. One to a key of ALIKE that is not given leaves its own key as if it were not given either.

    >>> resolved({"a": {"b": 3}, "c": "${a.b}", "d": "x-${c}", "e": "${a}"})[0]
    {'a': {'b': 3}, 'c': 3, 'd': 'x-3', 'e': {'b': 3}}
    >>> resolved({"a": "${b.c}"})[1]
    ['a=${b.c}: b.c is not given; give it too, or write its value']
    """
    found = _Resolver(given)
    return found.node(given, ()), found.problems


class _Resolver:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root = root
        self.problems: list[str] = []

    def node(self, value: Any, place: tuple[str, ...], open_: tuple[str, ...] = ()) -> Any:
        """A value without references. Args: place: its key. open_: the references that led to it."""
        if isinstance(value, Mapping):
            return {k: self.node(v, (*place, str(k)), open_) for k, v in value.items()}
        if isinstance(value, list):
            return [self.node(v, place, open_) for v in value]
        if not isinstance(value, str) or "${" not in value:
            return value
        if whole := REFERENCE.fullmatch(value):
            return self._found(whole[1], value, place, open_)
        made = REFERENCE.sub(lambda one: str(self._found(one[1], value, place, open_)), value)
        if "${" in made and not self.problems:  # one inside another
            return self.node(made, place, open_)
        return made

    def _found(self, name: str, value: str, place: tuple[str, ...], open_: tuple[str, ...]) -> Any:
        """What one reference stands for; None, and a problem, where it stands for nothing."""
        try:
            kind, colon, rest = name.strip().partition(":")
            if colon:
                return _of_environment(kind, rest)
            key = self._key(name.strip(), place)
            if key in open_:
                raise ConfigError(f"{key} refers to itself; write its value")
            node: Any = self.root
            for part in key.split("."):
                if not isinstance(node, Mapping) or part not in node:
                    if key.rpartition(".")[2] in ALIKE and REFERENCE.fullmatch(value):
                        return None
                    raise ConfigError(f"{key} is not given; give it too, or write its value")
                node = node[part]
        except ConfigError as error:
            self.problems.append(f"{'.'.join(place)}={value}: {error}")
            return None
        return self.node(node, tuple(key.split(".")), (*open_, key))

    def _key(self, name: str, place: tuple[str, ...]) -> str:
        """The key that a reference names: from the root, or with dots before it from where it stands."""
        up = len(name) - len(name.lstrip("."))
        key = ".".join([*place[: max(0, len(place) - up)], name.lstrip(".")]) if up else name
        return key.removeprefix("actor.") if key.startswith("actor.rollout.") else key


def _of_environment(kind: str, rest: str) -> Any:
    """The value of ${oc.env:NAME} or ${oc.env:NAME,default}. Raises ConfigError: another resolver, no such variable."""
    if kind != "oc.env":
        raise ConfigError(f"the resolver {kind} is not here, oc.env alone is; write the value")
    name, comma, default = (part.strip() for part in rest.partition(","))
    if name in os.environ:
        return os.environ[name]
    if not comma:
        raise ConfigError(f"the environment has no variable {name}; set it, or write ${{oc.env:{name},default}}")
    return parse(default, name)
