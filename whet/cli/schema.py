"""`whet schema [COMMAND]`: the JSON schema of a command's YAML file, with which editors complete and check keys.

pydantic makes it from the configuration classes. whet refuses everything that the schema refuses. It also checks ranges
and combinations, which the schema does not contain.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from whet.config.base import adapter
from whet.config.introspection import choices, field_docs

__all__ = ["schema", "schema_text"]


class _Schema(GenerateJsonSchema):
    """pydantic's generator, with the docstrings of fields, and a string for a value that is a Python object."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012  (pydantic's own name)

    def dataclass_schema(self, schema: core_schema.DataclassSchema) -> JsonSchemaValue:
        result = super().dataclass_schema(schema)
        cls = schema["cls"]
        result["description"] = (cls.__doc__ or "").strip().partition("\n")[0]
        docs = field_docs(cls)
        for name, property_schema in result.get("properties", {}).items():
            property_schema.pop("title", None)
            if name in docs:
                property_schema["description"] = " ".join(docs[name].split())
            if names := choices(cls, name):
                property_schema["examples"] = list(names)
        if any("preset" in vars(c).get("REFUSED", {}) for c in cls.__mro__):
            result["properties"]["preset"] = {
                "type": "string",
                "description": "a published method; other keys change it",
            }
        result.pop("required", None)  # a shorthand may replace a required field
        return result

    def tuple_schema(self, schema: core_schema.TupleSchema) -> JsonSchemaValue:
        result = super().tuple_schema(schema)
        return {"anyOf": [result, result["items"]]} if result.get("items") else result  # a single value is accepted too

    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> JsonSchemaValue:
        return {"type": "string"}  # a function or a class, which YAML names


def schema(kind: type, short: Mapping[str, str]) -> dict[str, Any]:
    """Returns the JSON schema of a configuration's YAML.

    Args: kind: a configuration class. short: its shorthands.

    >>> from whet.config import SHORTHANDS, RunConfig
    >>> result = schema(RunConfig, SHORTHANDS)
    >>> result["$defs"]["OptimConfig"]["properties"]["lr"]["description"][:13]
    'Learning rate'
    """
    result = adapter(kind).json_schema(schema_generator=_Schema)
    result = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": kind.__name__, **result}
    for key, target in short.items():
        *parents, name = key.split(".")
        node = result
        for part in parents:
            node = _section(result, node["properties"].setdefault(part, {"type": "object", "properties": {}}))
        existing = node["properties"].get(name)
        if existing is None:
            node["properties"][name] = {"description": f"short for {target.removeprefix('.'.join([*parents, '']))}"}
        elif target.startswith(f"{key}."):  # the name of a section is a shorthand for one of its keys
            node["properties"][name] = {
                "anyOf": [existing, {"type": "string"}],
                "description": existing.get("description", ""),
            }
    return result


def _section(root: Mapping[str, Any], node: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the definition that a property refers to, directly or in an anyOf."""
    if "$ref" in node:
        return root["$defs"][node["$ref"].rpartition("/")[2]]
    if "anyOf" in node:
        return _section(root, next(option for option in node["anyOf"] if "$ref" in option))
    return {"properties": {}}  # any keys


def schema_text(kind: type, short: Mapping[str, str]) -> str:
    """Returns the schema as JSON text."""
    return json.dumps(schema(kind, short), indent=1, ensure_ascii=False)
