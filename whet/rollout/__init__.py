"""Rollout: engines that turn requests (token ids) into completions (token ids).

`ENGINES` names them; a class, or "package.module:Class", serves as well. vLLM and SGLang are adapters of other
packages' engines, imported when one is built; where the package is missing, the error names it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys

from whet.util.references import resolve_name

__all__ = ["ENGINES", "check_engine", "resolve_engine"]

ENGINES = {
    "embedded": "whet.rollout.engine.engine:EmbeddedEngine",
    "hf": "whet.rollout.hf:HFEngine",
    "mock": "whet.rollout.mock:MockEngine",
    "sglang": "whet.rollout.sglang:SGLangEngine",
    "vllm": "whet.rollout.vllm:VLLMEngine",
}
"""Engine names and where their classes lie; imported when asked for."""


def check_engine(name: str | type) -> None:
    """Raises ConfigError where an engine is unknown, EngineError where the package that it adapts is not installed.

    "auto" is one of those that can be used.
    """
    if name == "auto":
        return
    module = sys.modules[resolve_engine(name).__module__]
    package = {"whet.rollout.vllm": "vllm", "whet.rollout.sglang": "sglang"}.get(module.__name__)
    if package is not None and package not in sys.modules and importlib.util.find_spec(package) is None:
        module.import_package()


def resolve_engine(name: str | type) -> type:
    """Returns the class of an engine.

    Args: name: a name from ENGINES, a class (returned as it is), "package.module:Class" or "file.py:Class".
    Returns: the class; nothing is built.
    Raises: ConfigError: an unknown name, a path that can't be imported.

    >>> resolve_engine("mock").__name__
    'MockEngine'
    """
    return resolve_name(name, ENGINES, "rollout engine")
