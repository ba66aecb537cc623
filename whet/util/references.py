"""Resolves names of built-in objects, and references to user code: "package.module:name" and "folder/file.py:name"."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import sys
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from whet.errors import ConfigError, format_exception, format_value, lookup_error, nearest

__all__ = ["check_access", "is_ref", "resolve_callable", "resolve_module", "resolve_name", "resolve_ref"]


def check_access(path: Path) -> None:
    """Raises OSError for a file that only seems missing: a folder above it may not be entered, its name is too long.

    Path.is_file and Path.exists raise these before Python 3.14; since then they return False.

    >>> check_access(Path("no/such.file"))
    """
    with suppress(FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a null character
        path.stat()


def is_ref(text: str) -> bool:
    """Returns whether a text has the form of a reference: "package.module:name" or "file.py:name".

    >>> is_ref("rewards.py:score"), is_ref("my.rewards:score"), is_ref("openai/gsm8k"), is_ref("exact_match")
    (True, True, False, False)
    """
    place, colon, name = text.rpartition(":")
    if not colon or not all(part.isidentifier() for part in name.split(".")):
        return False
    return place.endswith(".py") or all(part.isidentifier() for part in place.split("."))


def resolve_ref(text: str, kind: str) -> Any:
    """Returns the object of a reference.

    The working folder (for a file: the file's folder) is appended to sys.path, so its modules are found, and the user's
    own imports work. A file is run only once.

    Args: text: "package.module:name" or "file.py:name"; the name may have dots. kind: what is looked for, for messages.
    Returns: the object.
    Raises: ConfigError: not a reference, no such file, module or name (with the nearest), or the user's code raised.

    >>> resolve_ref("math:sqrt", "reward")(9.0)
    3.0
    """
    if not is_ref(text):
        raise ConfigError(
            f"{kind} {format_value(text)} is not a reference; write package.module:name or path/to/file.py:name"
        )
    module_name, _, name = text.rpartition(":")
    value: Any = _import(module_name, text, kind)
    for part in name.split("."):
        try:
            value = getattr(value, part)
        except AttributeError as error:
            names = [word for word, _ in inspect.getmembers_static(value) if not word.startswith("_")]
            hint = nearest(part, names) or "; check the name"
            raise ConfigError(f"{kind} {text!r}: {module_name} has no {part!r}{hint}") from error
        except Exception as error:  # a module's own __getattr__, a property
            raise _import_error(text, kind, f"looking up {part!r} in {module_name}", error) from error
    return value


def resolve_name(value: Any, known: Mapping[str, Any], kind: str, hint: Callable[[str], str] | None = None) -> Any:
    """Returns the function or class of a name or a reference; a callable is returned unchanged.

    Args:
        value: a name in known, "package.module:name", "file.py:name", or a callable.
        known: name -> a callable, or its location in whet ("package.module:name"), which is imported here.
        kind: what is looked for, for messages.
        hint: gives the end of the error message for an unknown name.
    Raises: ConfigError: an unknown name (with the nearest), or what it refers to can't be found or called.

    >>> resolve_name("last", {"last": len}, "reader")
    <built-in function len>
    """
    if isinstance(value, str):
        if value not in known:
            if ":" in value:
                return resolve_callable(value, kind)
            unknown = lookup_error(kind, value, known)
            raise ConfigError(f"{unknown}, package.module:name, file.py:name{hint(value) if hint else ''}")
        target = known[value]
        if isinstance(target, str):
            module, _, name = target.partition(":")
            try:
                return getattr(importlib.import_module(module), name)
            except ImportError as error:
                raise _import_error(value, kind, f"importing {module}", error) from error
        return target
    if not callable(value):
        raise ConfigError(f"a {kind} is a callable or its name, got {type(value).__name__} {format_value(value)}")
    return value


def resolve_module(location: str, kind: str) -> ModuleType:
    """Returns the module of a file ("folder/file.py") or of a name ("package.module"), found as resolve_ref finds it.

    Args: location: the file or the name. kind: what is looked for, for messages.
    Raises: ConfigError: no such file or module (with the nearest), or the user's code raised.

    >>> resolve_module("math", "environment").__name__
    'math'
    """
    if not location.endswith(".py") and not all(part.isidentifier() for part in location.split(".")):
        raise ConfigError(f"{kind} {format_value(location)} is not a module; write path/to/file.py or package.module")
    return _import(location, location, kind)


def _import(location: str, text: str, kind: str) -> ModuleType:
    """Returns the module of a file or of a dotted name. Args: text: the reference, for messages."""
    return _import_file(Path(location), text, kind) if location.endswith(".py") else _import_name(location, text, kind)


def resolve_callable(text: str, kind: str) -> Any:
    """Returns the function or class of a reference.

    Args: as in resolve_ref. Raises: ConfigError: as resolve_ref, or the object can't be called.

    >>> resolve_callable("sys:maxunicode", "reward")
    Traceback (most recent call last):
    whet.errors.ConfigError: reward 'sys:maxunicode' is 1114111 (int), and must be a function or a class; check the name
    """
    target = resolve_ref(text, kind)
    if not callable(target):
        value = f"{format_value(target, limit=80)} ({type(target).__name__})"
        raise ConfigError(f"{kind} {text!r} is {value}, and must be a function or a class; check the name")
    return target


def _import_file(path: Path, text: str, kind: str) -> ModuleType:
    """Returns the module of a file, which is run on first use."""
    try:
        path = path.expanduser()
        check_access(path)
        exists = path.is_file()
        siblings = [p.name for p in path.parent.glob("*.py")] if not exists and path.parent.is_dir() else []
    except (OSError, RuntimeError) as error:  # a name too long, a folder that may not be read, no such user
        reason = format_value(str(error))
        raise ConfigError(
            f"{kind} {format_value(text)}: can't look for {format_value(str(path))}: {reason}; check the path"
        ) from error
    if not exists:
        raise ConfigError(f"{kind} {text!r}: no file {path}{nearest(path.name, siblings) or '; check the path'}")
    path = path.resolve()
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and vars(module).get("__file__") == str(path):
            return module
    name = f"whet_file_{path.stem}_{zlib.crc32(str(path).encode()):08x}"  # does not shadow an installed module
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{kind} {text!r}: {path} can't be imported as Python")
    _make_importable(path.parent)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses and pickle look their module up by name
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # sys.exit in a script must not end the run
        del sys.modules[name]
        raise _import_error(text, kind, f"importing {path}", error) from error
    return module


def _import_name(module: str, text: str, kind: str) -> ModuleType:
    """Returns the module of a dotted name."""
    _make_importable(Path.cwd())
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing != module and not module.startswith(missing + "."):
            raise _import_error(text, kind, f"importing {module}", error) from error  # one of its imports is missing
        parent, _, last = missing.rpartition(".")
        folders = vars(sys.modules[parent]).get("__path__", []) if parent else None  # a module has none
        siblings = [info.name for info in pkgutil.iter_modules(folders)]
        hint = nearest(last, siblings) or "; is it installed?"
        raise ConfigError(f"{kind} {text!r}: no module {missing!r}{hint}") from error
    except (Exception, SystemExit) as error:
        raise _import_error(text, kind, f"importing {module}", error) from error


def _make_importable(folder: Path) -> None:
    """Appends a folder to sys.path."""
    folder = folder.resolve()
    if folder not in (Path(entry).resolve() for entry in sys.path):
        sys.path.append(str(folder))


def _import_error(text: str, kind: str, what: str, error: BaseException) -> ConfigError:
    return ConfigError(f"{kind} {text!r}: {what} raised {format_exception(error)}; fix that first")
