import ast
import importlib
import inspect
import pkgutil
import re
import sys
from pathlib import Path

import pytest

import whet.ops
import whet.ops.preference
from whet.ops import CORRECTIONS, POLICY_LOSSES, TOKEN_MASKS, VALUE_LOSSES, reference_kl

PARTS = [m.name for m in pkgutil.walk_packages(whet.ops.__path__, "whet.ops.")]
MODULES = ["whet.errors", "whet.types", "whet.ops", *PARTS]


@pytest.mark.parametrize("name", MODULES)
def test_public_names_are_sorted_documented_and_there(name):
    module = importlib.import_module(name)
    names = module.__all__
    # constants first, then classes, then functions: the order that ruff's RUF022 keeps
    assert names == sorted(names, key=lambda n: (not n.isupper(), not n[0].isupper(), n))
    for public in names:
        value = getattr(module, public)
        if callable(value) and not isinstance(value, dict) and value.__module__.startswith("whet"):
            assert value.__doc__, public


@pytest.mark.parametrize("name", PARTS)
def test_every_public_function_has_an_example(name):
    module = importlib.import_module(name)
    for public in module.__all__:
        value = getattr(module, public)
        if callable(value):
            assert ">>>" in value.__doc__, public


def test_a_piece_of_an_objective_states_its_mask_its_denominator_and_what_is_constant():
    pieces = {**POLICY_LOSSES, **VALUE_LOSSES, **CORRECTIONS, **TOKEN_MASKS, "the KL": reference_kl}
    for name, fn in pieces.items():
        said = " ".join((inspect.getdoc(getattr(fn, "func", fn)) or "").split())
        assert "divided by nothing" in said and ("masked out" in said or name in TOKEN_MASKS), name
        assert re.search(r"constant|without gradient|gets no gradient", said), name


def test_ops_exports_all_that_its_modules_do():
    inside = [m for m in PARTS if m.startswith("whet.ops.preference")]  # a namespace of its own: sigmoid, hinge, ...
    exported = {n for m in PARTS if m not in inside for n in importlib.import_module(m).__all__}
    assert set(whet.ops.__all__) == exported | {"LossInputs"}
    named = {*whet.ops.preference.PREFERENCE_LOSSES, *whet.ops.preference.F_DIVERGENCES}
    exported = {n for m in inside for n in importlib.import_module(m).__all__}
    assert exported - named == set(whet.ops.preference.__all__) - named


def test_ops_import_nothing_but_torch_types_and_errors():
    allowed = {"torch", "whet.types", "whet.errors"}
    for path in Path(whet.ops.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                known = name in allowed or name.startswith("whet.ops") or name.split(".")[0] in sys.stdlib_module_names
                assert known, f"{path.name} imports {name}"
