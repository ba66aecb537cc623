"""`whet schema [COMMAND]`: the JSON schema of a command's YAML file, by which editors complete and check keys.

It is written by pydantic from the classes that check a configuration. What whet checks besides, ranges and what fits
together, the schema does not know: whatever it refuses is refused by whet, but not the other way round.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from whet.config.base import adapter, choices, field_docs

__all__ = ["schema", "schema_text"]


class _Schema(GenerateJsonSchema):
    """pydantic's, with the docstrings of fields, and anything where only Python can say what fits."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012  (pydantic's own name)

    def dataclass_schema(self, schema: core_schema.DataclassSchema) -> JsonSchemaValue:
        result = super().dataclass_schema(schema)
        cls = schema["cls"]
        result["description"] = (cls.__doc__ or "").strip().partition("\n")[0]
        docs = field_docs(cls)
        for name, found in result.get("properties", {}).items():
            found.pop("title", None)
            if name in docs:
                found["description"] = " ".join(docs[name].split())
            if named := choices(cls, name):
                found["examples"] = list(named)
        if any("preset" in vars(c).get("REFUSED", {}) for c in cls.__mro__):
            result["properties"]["preset"] = {
                "type": "string",
                "description": "a published method; other keys change it",
            }
        result.pop("required", None)  # a shorthand may stand for it
        return result

    def tuple_schema(self, schema: core_schema.TupleSchema) -> JsonSchemaValue:
        result = super().tuple_schema(schema)
        return {"anyOf": [result, result["items"]]} if result.get("items") else result  # a lone value counts as one

    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> JsonSchemaValue:
        return {"type": "string"}  # a function or a class: YAML names it


def schema(kind: type, short: Mapping[str, str]) -> dict[str, Any]:
    """The JSON schema of a configuration's YAML.

    Args: kind: a configuration class. short: its shorthands.

    >>> from whet.config import SHORTHANDS, RunConfig
    >>> found = schema(RunConfig, SHORTHANDS)
    >>> found["$defs"]["OptimConfig"]["properties"]["lr"]["description"][:13]
    'Learning rate'
    """
    found = adapter(kind).json_schema(schema_generator=_Schema)
    found = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": kind.__name__, **found}
    for key, target in short.items():
        *parents, name = key.split(".")
        node = found
        for part in parents:
            node = _section(found, node["properties"].setdefault(part, {"type": "object", "properties": {}}))
        there = node["properties"].get(name)
        if there is None:
            node["properties"][name] = {"description": f"short for {target.removeprefix('.'.join([*parents, '']))}"}
        elif target.startswith(f"{key}."):  # a section, and short for one of its keys where the value is a plain one
            node["properties"][name] = {
                "anyOf": [there, {"type": "string"}],
                "description": there.get("description", ""),
            }
    return found


def _section(whole: Mapping[str, Any], node: Mapping[str, Any]) -> dict[str, Any]:
    """The definition that a property refers to, alone, or beside null or a text."""
    if "$ref" in node:
        return whole["$defs"][node["$ref"].rpartition("/")[2]]
    if "anyOf" in node:
        return _section(whole, next(one for one in node["anyOf"] if "$ref" in one))
    return {"properties": {}}  # any keys


def schema_text(kind: type, short: Mapping[str, str]) -> str:
    """The same as JSON."""
    return json.dumps(schema(kind, short), indent=1, ensure_ascii=False)
