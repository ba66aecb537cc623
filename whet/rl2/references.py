"""References in RL2's configurations, as OmegaConf has them: ${trainer.project}, ${.sibling}, ${oc.env:HOME}."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from whet.config.yaml12 import parse
from whet.errors import ConfigError

__all__ = ["resolve"]

ALIKE = (
    *("model_name", "dtype", "use_liger_kernel", "ddp_size", "tp_size", "cp_size", "sp_size"),
    *("max_length_per_device", "offload_model", "offload_optimizer"),
)
"""Suffixes of keys with the same default in all roles: a reference to such a key needs no value for it."""
REFERENCE = re.compile(r"\$\{([^${}]*)\}")


def resolve(tree: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Replaces references by the values that they name. Returns the tree, and a line for each problem.

    A reference that is the whole value keeps the type; one inside a text is written into it. actor.rollout.* is
    rollout.*. A reference to a key of ALIKE that is not given leaves its own key unset too.

    >>> resolve({"a": {"b": 3}, "c": "${a.b}", "d": "x-${c}", "e": "${a}"})[0]
    {'a': {'b': 3}, 'c': 3, 'd': 'x-3', 'e': {'b': 3}}
    >>> resolve({"a": "${b.c}"})[1]
    ['a=${b.c}: b.c is not given; give it too, or write its value']
    """
    resolver = _Resolver(tree)
    return resolver.node(tree, ()), resolver.problems


class _Resolver:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root = root
        self.problems: list[str] = []

    def node(self, value: Any, place: tuple[str, ...], seen: tuple[str, ...] = ()) -> Any:
        """Returns a value without references. Args: place: its key. seen: the references on the way to it."""
        if isinstance(value, Mapping):
            return {k: self.node(v, (*place, str(k)), seen) for k, v in value.items()}
        if isinstance(value, list):
            return [self.node(v, place, seen) for v in value]
        if not isinstance(value, str) or "${" not in value:
            return value
        if whole := REFERENCE.fullmatch(value):
            return self._value(whole[1], value, place, seen)
        text = REFERENCE.sub(lambda one: str(self._value(one[1], value, place, seen)), value)
        if "${" in text and not self.problems:  # one inside another
            return self.node(text, place, seen)
        return text

    def _value(self, name: str, value: str, place: tuple[str, ...], seen: tuple[str, ...]) -> Any:
        """Returns the value of one reference; None, with a problem, if it has none."""
        try:
            kind, colon, rest = name.strip().partition(":")
            if colon:
                return _of_environment(kind, rest)
            key = self._key(name.strip(), place)
            if key in seen:
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
        return self.node(node, tuple(key.split(".")), (*seen, key))

    def _key(self, name: str, place: tuple[str, ...]) -> str:
        """Returns the key that a reference names: from the root, or with leading dots relative to its own place."""
        up = len(name) - len(name.lstrip("."))
        key = ".".join([*place[: max(0, len(place) - up)], name.lstrip(".")]) if up else name
        return key.removeprefix("actor.") if key.startswith("actor.rollout.") else key


def _of_environment(kind: str, rest: str) -> Any:
    """Returns the value of ${oc.env:NAME} or ${oc.env:NAME,default}. Raises ConfigError: another resolver, no such
    variable.
    """
    if kind != "oc.env":
        raise ConfigError(f"the resolver {kind} is not supported, only oc.env; write the value")
    name, comma, default = (part.strip() for part in rest.partition(","))
    if name in os.environ:
        return os.environ[name]
    if not comma:
        raise ConfigError(f"the environment has no variable {name}; set it, or write ${{oc.env:{name},default}}")
    return parse(default, name)
