"""Whatever a field is given, from Python, a file or the command line: a valid configuration, or ConfigError by name."""

import dataclasses
import re
import typing

import pytest
from helpers import examples

from whet.config import ClusterConfig, RunConfig, config_from_dict, dump, load_run
from whet.config.evaluate import EvalDataConfig, EvalRunConfig
from whet.config.fields import Name
from whet.config.generate import ChatConfig, GenerateConfig
from whet.config.introspection import field_docs, leaves, section_at, type_text
from whet.config.push import PushConfig
from whet.config.yaml12 import parse
from whet.errors import ConfigError

ITSELF: list = []
ITSELF.append(ITSELF)
DEEP: list = []
for _ in range(10_000):
    DEEP = [DEEP]

VALUES = {
    "none": None, "true": True, "empty": "", "word": "x", "blank": " ", "list": [], "mapping": {}, "nan": float("nan"),
    "inf": float("inf"), "-inf": float("-inf"), "-1": -1, "0": 0, "1": 1, "0.5": 0.5, "2**63": 2**63, "1e300": 1e300,
    "-1e300": -1e300, "1e-300": 1e-300, "10**400": 10**400, "10**5000": 10**5000, "10**9": 10**9, "deep": DEEP,
    "itself": ITSELF, "nested": [[1]], "deep mapping": {"a": DEEP}, "number key": {1: {2.5: None}},
    "huge inside": {"a": [10**5000]}, "nan inside": {"a": float("nan")}, "short": [0.9], "long": [0.9, 0.9, 0.9],
    "surrogate": "\ud800", "nul": "a\0b",
    "object": object(), "bytes": b"x", "set": {1}, "complex": 1j,
}  # fmt: skip
WORDS = [
    "null", "true", "", "x", "' '", "[]", "{}", ".nan", ".inf", "-.inf", "-1", "0", "1e300", "1e400", "1" + "0" * 400,
    "9223372036854775808", "[[1]]", "{a: [1]}", "{1: 2}", "[0.9]", "&a [*a]",
    "!!python/object:os.system x", "{a: 1, a: 2}", "a: b: c", "\t- x", "--- 1\n--- 2", '"\\ud800"', '"a\\0b"',
]  # fmt: skip
SECTIONS = sorted({owner for _, _, owner in leaves(RunConfig, True)}, key=lambda c: c.__name__)
OTHERS = [RunConfig, ClusterConfig, GenerateConfig, ChatConfig, EvalRunConfig, EvalDataConfig, PushConfig]


def some(values, i):
    """Every third value, from another one on for each i; all of them in `make check-full`."""
    return values if examples(1) > 1 else values[i % 3 :: 3]


def outcome(make, name, what):
    """What was made; None where a ConfigError names the field."""
    try:
        return make()
    except ConfigError as error:
        whole = name.rpartition(".")[0] if re.search("constraint|_optimizer", name) else ""  # refused as a whole
        assert name in str(error) or (whole and whole in str(error)), f"{name} given {what}: {error}"
        assert len(str(error)) < 2000, f"{name} given {what}: a message of {len(str(error))} characters"
    except Exception as error:
        pytest.fail(f"{name} given {what}: {type(error).__name__}: {str(error)[:200]}")


@pytest.mark.parametrize("cls", list(dict.fromkeys([*SECTIONS, *OTHERS])), ids=lambda c: c.__name__)
def test_any_value_of_any_field_makes_a_configuration_or_a_config_error_that_names_it(cls):
    for i, field in enumerate(dataclasses.fields(cls)):
        for what, value in some(list(VALUES.items()), i):
            given = {field.name: value}
            made = outcome(lambda given=given: config_from_dict(cls, given), field.name, what)
            assert outcome(lambda given=given: cls(**given), field.name, what) == made, (field.name, what)
            if made is None or cls is ClusterConfig or what in ("object", "bytes", "set", "complex"):
                continue  # objects are for Python alone
            again = parse(dump({field.name: vars(made)[field.name]}), "dump")
            assert config_from_dict(cls, again) == made, f"{field.name} given {what} changes in a file"


def test_any_word_for_any_key_makes_a_configuration_or_a_config_error_that_names_it():
    again = ("critic.", "reference.", "reward_model.", "trainer.critic_optimizer.")  # the actor's keys once more
    for i, key in enumerate(key for key, *_ in leaves(RunConfig, True) if not key.startswith(again)):
        for text in some(WORDS, i):
            outcome(lambda key=key, text=text: load_run([f"{key}={text}"]), key, text[:40])


def fields_of(kind):
    """(class, field) of every field whose type holds a type."""
    for cls in (*SECTIONS, *OTHERS):
        for field in dataclasses.fields(cls):
            if section_at(cls, (field.name,)) is None and kind in type_text(cls, field.name).split(" | "):
                yield cls, field


def test_an_empty_text_is_refused_unless_the_field_says_what_it_means():
    seen = 0
    for cls, field in fields_of("str"):
        if "constraint" in cls.__name__.lower():
            continue  # an empty language is one
        if outcome(lambda cls=cls, field=field: cls(**{field.name: ""}), field.name, "") is not None:
            assert '""' in field_docs(cls)[field.name], f"{cls.__name__}.{field.name}"
        seen += 1
    assert seen > 40 and typing.get_args(Name)[0] is str


def test_every_number_has_limits():
    seen = 0
    for kind in ("int", "positive int", "float"):
        for cls, field in fields_of(kind):
            for value in (2**63, -(2**63) - 1) if "int" in kind else (1e39, -1e39):
                says = rf"{field.name} must (be|not be) .*[gG]ot:? {re.escape(str(value))}$"
                with pytest.raises(ConfigError, match=says):
                    cls(**{field.name: value})
            seen += 1
    assert seen > 80
