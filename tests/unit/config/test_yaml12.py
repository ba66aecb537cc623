import pytest

from whet.config import RolloutConfig, config_from_dict, dump, load_run, read_yaml
from whet.config.yaml12 import parse
from whet.errors import ConfigError

LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 40))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("actor:\n  lr: 1\n  model: m\n  lr: 2\n", r"run.yaml, line 4: key 'lr' is given twice \(first on line 2\)"),
        ("algo: {}\ndata: {}\nalgo: {}\n", r"run.yaml, line 3: key 'algo' is given twice \(first on line 1\)"),
        ("a: &a [*a]", r"run.yaml, line 1: \*a lies inside &a; write the values"),
        ("a: &a\n  b: {c: *a}", r"run.yaml, line 2: \*a lies inside &a"),
        (LAUGHS, r"run.yaml, line 6: the aliases stand for more than 100000 values"),
        ("a: " + "[" * 1000, r"run.yaml, line 1: nested more than 100 deep"),
        ("\n".join(" " * i + "a:" for i in range(300)), r"run.yaml, line 100: nested more than 100 deep"),
        ("a: " + "1" * 5000, r"run.yaml, line 1: 111111111111... is a number of 5000 digits"),
        ("a: !!str 5\nb: !!null x", r"run.yaml, line 2: 'x' is not a valid null"),
        ("\na: 1e400", r"run.yaml, line 2: 1e400 is beyond every floating-point number"),
        ("a: !!python/object/apply:os.system [ls]", r"line 1: tag !!python/object/apply:os.system is not read; write"),
        ("a: !!timestamp x", r"tag !!timestamp is not read"),
        ("a: !mine x", r"tag !mine is not read"),
        ("a: !!int x", r"line 1: 'x' is not a valid int; leave the tag out"),
        ("a: !!int ''", r"'' is not a valid int"),
        ("a: !!bool yes", r"'yes' is not a valid bool"),
        ("a: !!float 1:30", r"'1:30' is not a valid float"),
        ("a: 1\n---\nb: 2", r"run.yaml: not YAML: .*another document"),
        ("a:\n\t- b", r"run.yaml: not YAML: .*'\\t'"),
        ("a: \0", r"run.yaml looks like UTF-16, or is not text; save it as UTF-8"),
        ("a: \x01", r"run.yaml: not YAML: .*special characters"),
        ("a: [", r"run.yaml: not YAML"),
        ("*a", r"run.yaml: not YAML: .*undefined alias"),
        ("? [a]\n: b", r"run.yaml: not YAML: .*unhashable key"),
        ("- 1", r"a configuration is a mapping of keys, got list"),
        ("text", r"a configuration is a mapping of keys, got str"),
        ("3", r"a configuration is a mapping of keys, got int"),
    ],
)
def test_what_a_file_may_not_hold_is_named_with_its_line(tmp_path, text, says):
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=says):
        load_run(["--config", str(path)])


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("a: x\nb: é\n".encode("latin-1"), r"run.yaml, line 2: byte 0xe9 is not UTF-8; save the file as UTF-8"),
        ("a: é".encode("utf-16"), r"run.yaml looks like UTF-16"),
        ("a: é".encode("utf-16-le"), r"run.yaml looks like UTF-16"),
    ],
)
def test_another_encoding_than_utf8_is_named(tmp_path, data, says):
    (tmp_path / "run.yaml").write_bytes(data)
    with pytest.raises(ConfigError, match=says):
        read_yaml(tmp_path / "run.yaml")


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "null", "\ufeff"])
def test_a_file_without_a_value_is_an_empty_mapping(tmp_path, text):
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    assert read_yaml(tmp_path / "run.yaml") == {}


def test_anchors_and_merges_that_end_are_read(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("\ufeffbase: &b {x: 1, y: 2}\nmore: {<<: *b, y: 3}\nmost: [*b, *b]\n", encoding="utf-8")
    base = {"x": 1, "y": 2}
    assert read_yaml(path) == {"base": base, "more": {"x": 1, "y": 3}, "most": [base, base]}


def test_a_word_names_its_key_and_no_line():
    for word, says in (
        ("rollout.eval={a: 1, a: 2}", "^rollout.eval: key 'a' is given twice; keep one"),
        ("rollout.eval=" + "[" * 200, "^rollout.eval: nested more than 100 deep"),
        ("a..b=1", r"^'a..b=1': expected key=value, where a key is names joined by single dots"),
        (".".join("a" * 5000) + "=1", "expected key=value, where"),
        ("=1", "expected key=value, where"),
    ):
        with pytest.raises(ConfigError, match=says):
            load_run([word])


@pytest.mark.parametrize(("text", "value"), [("=", "="), ("[=, <<]", ["=", "<<"]), ("!!str 5", "5"), ("~", None)])
def test_signs_that_yaml_has_other_plans_for_are_texts(text, value):
    assert parse(text, "k") == value


def test_texts_of_every_kind_come_back_from_a_file(tmp_path):
    odd = [
        *("= << ~ null no 0o7 0x1f 1_000 1e3 .inf 12:30 2001-01-01 # % --- ... '\"\\ \U0001f600 - ?".split()),
        *(" a", "a ", "a: b", "- a", "\t", "\n", "a\r\nb\n\n", "\r", "\x07", "a\x85b", "\u2028", "a\u2029", "\ufeff"),
    ]
    made = RolloutConfig(stop=odd, generation_kwargs={text: text for text in odd})
    (tmp_path / "run.yaml").write_text(dump(made), encoding="utf-8")
    assert config_from_dict(RolloutConfig, read_yaml(tmp_path / "run.yaml")) == made
