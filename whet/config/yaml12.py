"""YAML by the core rules of YAML 1.2: 1e-6 is a number, `yes` and `12:30` are strings.

Some things that YAML allows are errors here: a key given twice, an alias inside its own anchor, aliases that expand to
very many values, very deep nesting, tags, and encodings other than UTF-8.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import yaml

from whet.errors import ConfigError

__all__ = ["Dumper", "parse", "read_text"]

MAX_DEPTH = 100
"""Largest nesting depth."""
MAX_REPEATED = 100_000
"""Most values that all aliases of a text may expand to together."""
_TAG = "tag:yaml.org,2002:"
_SCALARS = {
    "null": (re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    "bool": (re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    "int": (re.compile(r"^[-+]?(?:0|[1-9][0-9_]*)$"), list("-+0123456789")),
    "float": (
        re.compile(
            r"^[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|nan)$",
        ),
        list("-+.0123456789"),
    ),
}
"""Tag -> its pattern, and its possible first characters."""


_FIXES = {
    "cannot start any token": "; indent with blanks, not with tabs",
    "mapping values are not allowed here": "; is a blank missing behind a colon above, or an indent wrong?",
}
"""Part of the library's message -> the fix."""


class _Loader(yaml.SafeLoader):
    """YAML 1.2's scalars, within limits. An error names the text and, where it is a file, the line."""

    def __init__(self, text: str, where: str, lines: bool) -> None:
        super().__init__(text)
        self.where, self.lines = where, lines
        self.depth = self.values = self.repeated = 0
        self.open_anchors: set[str] = set()
        self.sizes: dict[str, int] = {}

    def refuse(self, mark: Any, message: str) -> ConfigError:
        place = f"{self.where}, line {mark.line + 1}" if self.lines else self.where
        return ConfigError(f"{place}: {message}")

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Composes a node, and counts its depth and its values with every alias expanded."""
        event: Any = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            if event.anchor in self.open_anchors:
                raise self.refuse(event.start_mark, f"*{event.anchor} lies inside &{event.anchor}; write the values")
            size = self.sizes.get(event.anchor, 0)
            self.values, self.repeated = self.values + size, self.repeated + size
            if self.repeated > MAX_REPEATED:
                raise self.refuse(event.start_mark, f"the aliases stand for more than {MAX_REPEATED} values")
            return super().compose_node(parent, index)
        if self.depth == MAX_DEPTH:
            raise self.refuse(event.start_mark, f"nested more than {MAX_DEPTH} deep")
        before, anchor = self.values, event.anchor
        self.depth, self.values = self.depth + 1, self.values + 1
        self.open_anchors |= {anchor}
        node = super().compose_node(parent, index)
        self.open_anchors -= {anchor}
        self.depth -= 1
        self.sizes[anchor] = self.values - before
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        """Composes a mapping. Raises ConfigError: a key is given twice."""
        node = super().compose_mapping_node(anchor)
        first: dict[tuple[str, str], Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if node.flow_style and _has_swallowed(key, value):
                raise self.refuse(key.start_mark, _without_blank(node.value, None if self.lines else self.where))
            if (key.tag, key.value) in first:
                line = first[key.tag, key.value].start_mark.line + 1
                also = f" (first on line {line})" if self.lines else ""
                raise self.refuse(key.start_mark, f"key {key.value!r} is given twice{also}; keep one")
            first[key.tag, key.value] = key
        return node

    def scalar(self, node: Any) -> Any:
        """Returns a null, bool, int or float, by its tag."""
        text, kind = self.construct_scalar(node), node.tag.removeprefix(_TAG)
        if not _SCALARS[kind][0].match(text):
            raise self.refuse(node.start_mark, f"{text[:40]!r} is not a valid {kind}; leave the tag out")
        if kind == "null":
            return None
        if kind == "bool":
            return text.lower() == "true"
        digits = text.replace("_", "").lower()
        if kind == "int":
            try:
                return int(digits)
            except ValueError:  # Python reads so many digits and no more
                raise self.refuse(node.start_mark, f"{text[:12]}... is a number of {len(digits)} digits") from None
        number = float(digits.replace(".inf", "inf").replace(".nan", "nan"))
        if math.isinf(number) and "inf" not in digits:
            raise self.refuse(node.start_mark, f"{text[:40]} is beyond every floating-point number")
        return number

    def unknown(self, node: Any) -> Any:
        """Raises ConfigError for a tag."""
        tag = node.tag.replace(_TAG, "!!")
        raise self.refuse(node.start_mark, f"tag {tag} is not read; write plain values")


_Base = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # libyaml's dumper is five times as fast, but optional


class Dumper(_Base):  # pyright: ignore[reportGeneralTypeIssues]
    """Quotes what YAML 1.1 or 1.2 would read as something else, and escapes every end of a line but the usual one."""

    def text(self, value: str) -> Any:
        """Returns a string's node."""
        style = '"' if any(end in value for end in "\r\x85\u2028\u2029") else None
        return self.represent_scalar(f"{_TAG}str", value, style)


_REPLACED = {_TAG + name for name in (*_SCALARS, "timestamp", "value")}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if tag not in _REPLACED]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.yaml_constructors = {
    **{_TAG + kind: yaml.SafeLoader.yaml_constructors[_TAG + kind] for kind in ("map", "seq", "str")},
    **{_TAG + kind: _Loader.scalar for kind in _SCALARS},
    _TAG + "merge": yaml.SafeLoader.construct_yaml_str,
    None: _Loader.unknown,
}
Dumper.add_representer(str, Dumper.text)
for _kind, (_pattern, _first) in _SCALARS.items():
    _Loader.add_implicit_resolver(_TAG + _kind, _pattern, _first)
    Dumper.add_implicit_resolver(_TAG + _kind, _pattern, _first)


def parse(text: str, where: str, *, lines: bool = False) -> Any:
    """Returns the value of a YAML text.

    Args: text: one document. where: the file or key that it comes from, for messages. lines: messages show the line.
    Raises: ConfigError: the text is not YAML, or is one of the errors above.

    >>> parse("[1e-6, yes, 12:30]", "k")
    [1e-06, 'yes', '12:30']
    """
    try:
        loader = _Loader(text, where, lines)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        message = " ".join(str(error).split())
        fix = next((fix for words, fix in _FIXES.items() if words in message), "")
        raise ConfigError(f"{where}: not YAML: {message}{fix}") from None


def _has_swallowed(key: Any, value: Any) -> bool:
    """Returns whether a key of a mapping in braces contains its value, because there is no blank between them."""
    plain = isinstance(value, yaml.ScalarNode) and (value.value, value.style) == ("", None)
    return plain and key.style is None and ":" in key.value


def _without_blank(pairs: list[tuple[Any, Any]], where: str | None) -> str:
    """Returns the message about keys that contain their values. Args: where: the key on a command line; None = in a
    file.
    """
    keys = [key.value for key, value in pairs if isinstance(key, yaml.ScalarNode) and _has_swallowed(key, value)]
    parts = [key.rpartition(":") for key in keys]
    right = ", ".join(
        f"{key}: VALUE" if name.endswith(".py") else f"{name}: {value}" for key, (name, _, value) in zip(keys, parts)
    )
    fix = f"{{{right}}}" if where is None else f"'{where}={{{right}}}', in quotes"
    return f"{keys[0]!r} has no value: a colon that ends a key has a blank behind it; write {fix}"


def read_text(path: str | Path) -> str:
    """Returns the text of a file of YAML.

    Raises: ConfigError: it can't be read, or is not UTF-8.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; --config takes a YAML file") from None
    if data.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in data[:1000]:
        raise ConfigError(f"{path} looks like UTF-16, or is not text; save it as UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        byte = f"byte {data[error.start]:#x}"
        raise ConfigError(f"{path}, line {line}: {byte} is not UTF-8; save the file as UTF-8") from None
