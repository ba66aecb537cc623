"""A function fits on a screen and a file in a head: where a budget hurts, split by concept."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "whet").rglob("*.py"))
FUNCTION, FILE = 60, 500


def functions(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def name(path):
    return str(path.relative_to(ROOT))


def test_there_is_something_to_measure():
    assert len(FILES) > 10 and any(list(functions(f)) for f in FILES)


def test_functions_have_at_most_60_lines_and_files_500():
    long = []
    for path in FILES:
        sizes = [(f.name, f.end_lineno - f.lineno + 1) for f in functions(path)]
        long += [f"{name(path)}, {of}: {n}" for of, n in sizes if n > FUNCTION]
        lines = len(path.read_text().splitlines())
        long += [f"{name(path)}: {lines}"] if lines > FILE else []
    assert long == []


def test_the_loop_of_a_learner_has_at_most_60_lines():
    loops = [f for p in (ROOT / "whet" / "learners").glob("*.py") for f in functions(p) if f.name == "train"]
    assert loops and all(f.end_lineno - f.lineno + 1 <= FUNCTION for f in loops)


def test_examples_are_short():
    for path in (ROOT / "examples").glob("*.py"):
        assert len(path.read_text().splitlines()) <= 200, path.name
