"""Rollout: engines that turn requests (token ids) into completions (token ids).

`ENGINES` names them; a class, or "package.module:Class", serves as well. Left out on purpose: engines that live in
other packages (vLLM, SGLang): asking for one is a ConfigError that names what there is.
"""

from __future__ import annotations

import importlib

from whet.errors import ConfigError, lookup_error

__all__ = ["ENGINES", "resolve_engine"]

ENGINES = {
    "hf": "whet.rollout.hf:HFEngine",
    "mock": "whet.rollout.mock:MockEngine",
    "vanilla": "whet.rollout.engine.engine:EmbeddedEngine",
}
"""Engine names and where their classes lie; imported when asked for."""

LATER = ("sglang", "sglang_jax", "vllm")
"""Names that peers know and that have no adapter yet."""


def resolve_engine(name: str | type) -> type:
    """The class of an engine.

    Args: name: a name from ENGINES, a class (returned as it is), or "package.module:Class".
    Returns: the class; nothing is built.
    Raises: ConfigError: an unknown name, an engine without an adapter, a path that can't be imported.

    >>> resolve_engine("mock").__name__
    'MockEngine'
    """
    if not isinstance(name, str):
        return name
    if name in LATER:
        raise ConfigError(
            f"rollout engine {name!r}: its adapter is not part of this release yet; use {', '.join(sorted(ENGINES))}"
        )
    path = ENGINES.get(name, name)
    module, colon, attribute = path.partition(":")
    if not colon:
        raise lookup_error("rollout engine", name, [*ENGINES, *LATER])
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"rollout engine {name!r} can't be imported: {error}; give 'package.module:Class'") from error
