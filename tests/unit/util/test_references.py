import math
import sys

import pytest

from whet.errors import ConfigError
from whet.rollout import resolve_engine
from whet.util.references import is_ref, resolve_callable, resolve_name, resolve_ref


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_a_name_without_a_colon_a_hub_name_and_a_path_are_no_references():
    assert is_ref("a.b:c.d") and is_ref("/x/y.py:f") and is_ref("f.py:f")
    assert not any(is_ref(t) for t in ("exact_match", "org/name", "C:\\data", "a:b c", ":f", "a:", "http://x:80"))


def test_a_file_is_run_once_and_its_own_imports_work(folder):
    (folder / "helper_zz.py").write_text("X = 4\n")
    (folder / "mine.py").write_text("import helper_zz\nclass A:\n    f = staticmethod(lambda: helper_zz.X)\nL = []\n")
    assert resolve_ref(f"{folder}/mine.py:A.f", "reward")() == 4
    assert resolve_ref("mine.py:L", "reward") is resolve_ref(f"{folder}/mine.py:L", "reward")


def test_a_file_hides_no_installed_module_of_its_name(folder):
    (folder / "fractions.py").write_text("Mine = 1\n")
    assert resolve_ref("fractions.py:Mine", "reward") == 1
    from fractions import Fraction

    assert Fraction(1, 2) + Fraction(1, 2) == 1


def test_a_module_in_the_working_folder_is_found(folder):
    (folder / "mod_zq.py").write_text("def f(): return 3\n")
    assert resolve_ref("mod_zq:f", "reward")() == 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rewards.py:f", "did you mean reward.py"),
        ("reward.py:scor", "has no 'scor'; did you mean score"),
        ("broken.py:f", "raised SyntaxError"),
        ("needs.py:f", "raised ModuleNotFoundError: No module named 'not_here_zz'"),
        ("json.decodr:f", "no module 'json.decodr'; did you mean decoder"),
        ("needs:f", "raised ModuleNotFoundError: No module named 'not_here_zz'"),
        ("math:sqr", "did you mean sqrt"),
        ("nothing", "write package.module:name"),
        ("", "write package.module:name"),
        (":", "write package.module:name"),
        ("a:b:c", "write package.module:name"),
        ("math.x:f", "no module 'math.x'; is it installed?"),
        ("leaves.py:f", "raised SystemExit: 3"),
        ("leaves:f", "raised SystemExit: 3"),
        ("odd.py:f", "looking up 'f' in odd.py raised ZeroDivisionError"),
        ("latin.py:f", "raised SyntaxError"),
        ("n" * 300 + ".py:f", "name too long"),
        ("~nobody_zz/x.py:f", "home directory"),
    ],
    ids=lambda word: word[:20],
)
def test_what_is_missing_is_named_with_the_nearest(folder, text, says):
    (folder / "reward.py").write_text("def score(): pass\n")
    (folder / "broken.py").write_text("def f(:\n")
    (folder / "needs.py").write_text("import not_here_zz\ndef f(): pass\n")
    (folder / "leaves.py").write_text("import sys\nsys.exit(3)\n")
    (folder / "odd.py").write_text("def __getattr__(name): 1 / 0\n")
    (folder / "latin.py").write_bytes(b"x = '\xe9'\n")
    with pytest.raises(ConfigError) as error:
        resolve_ref(text, "reward")
    assert says in str(error.value) and text[:150] in str(error.value)


@pytest.mark.parametrize("resolve", [lambda text: resolve_callable(text, "loss"), resolve_engine])
def test_what_is_to_be_called_must_be_a_function_or_a_class(folder, resolve):
    (folder / "things.py").write_text("NUMBER = 3\ndef f(): pass\n")
    assert callable(resolve("things.py:f"))
    with pytest.raises(ConfigError, match=r"'things.py:NUMBER' is 3 \(int\), and must be a function or a class"):
        resolve("things.py:NUMBER")


def test_a_name_a_reference_or_a_callable_is_resolved_and_anything_else_named():
    known = {"length": len, "square root": "math:sqrt"}
    assert [resolve_name(value, known, "reader") for value in ("length", "math:pow", max)] == [len, math.pow, max]
    assert resolve_name("square root", known, "reader") is math.sqrt
    with pytest.raises(ConfigError, match=r"'lenght'; did you mean length\? Known: length, square root, "):
        resolve_name("lenght", known, "reader")
    with pytest.raises(ConfigError, match=r"package\.module:name, file\.py:name: no\?"):
        resolve_name("x", known, "reader", hint=lambda word: ": no?")
    with pytest.raises(ConfigError, match="a reader is a callable or its name, got int 3"):
        resolve_name(3, known, "reader")
