"""Public names of a package that are imported when they are first used, listed once: in its stub, `__init__.pyi`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from whet.util.garbage import pause_collector

__all__ = ["lazy_names"]

_IMPORT = re.compile(r"^from (\S+) import (\w+) as \2$", re.MULTILINE)
_ALIAS = re.compile(r"^(\w+) = (\w+)$", re.MULTILINE)


def lazy_names(
    package: str, file: str, missing: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns a package's `__getattr__`, `__dir__` and `__all__` from its stub, which type checkers and editors read.

    The stub has a line `from module import Name as Name` for each name, and may have others, `Other = Name`.

    Args: package, file: its __name__ and __file__. missing: names that it lacks and other libraries have -> what to use
        instead, which is the message of an ImportError.

    Example: __getattr__, __dir__, __all__ = lazy_names(__name__, __file__).
    """
    stub = Path(file).with_suffix(".pyi").read_text("utf-8")
    modules = {name: module for module, name in _IMPORT.findall(stub)}
    aliases, missing = dict(_ALIAS.findall(stub)), missing or {}

    def find(name: str) -> Any:
        if name in missing:
            raise ImportError(f"{package} has no {name}: {missing[name]}")
        if name in aliases:
            return find(aliases[name])
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with pause_collector():
            if modules[name] == package:  # a submodule
                return import_module(f"{package}.{name}")
            value = getattr(import_module(modules[name]), name)
        setattr(import_module(package), name, value)
        return value

    names = sorted({*modules, *aliases})
    return find, names.copy, names
