"""Statements of an installed peer's source, run as they are, where they lie inside a method of 600 lines."""

import ast
import importlib.util
from pathlib import Path

import pytest


def source(package, file):
    """The syntax tree of a file of an installed package, which is not imported; the test is skipped without it."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    return ast.parse((Path(spec.origin).parent / file).read_text())


def run(statements, names):
    """The names that there are after running statements with these names."""
    found = dict(names)
    exec(compile(ast.Module(list(statements), []), "peer", "exec"), found)  # of a package that the user installed
    return found


def function(tree, name, **names):
    """A function of a file, with the names that it uses."""
    node = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == name)
    return run([node], names)[name]


def statements_from(tree, name, count):
    """So many statements, beginning with the first that assigns to a name, or is `if` with a test that contains it."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for i, statement in enumerate(body if isinstance(body, list) else ()):
            assigns = isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == name
            if assigns or (isinstance(statement, ast.If) and name in ast.unparse(statement.test)):
                return body[i : i + count]
    raise AssertionError(f"nothing assigns to {name}, or tests it")
