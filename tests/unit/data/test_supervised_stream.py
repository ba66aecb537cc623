"""Supervised rows from files of every format, in a stream that resumes and knows its data again."""

import csv
import json

import datasets
import pyarrow as pa
import pytest
from chat_templates import bracketed, said, tokenizer_with, user
from pyarrow import parquet

from whet.config import SupervisedDataConfig
from whet.data.checksums import compute_checksums
from whet.data.preference import PreferenceEncoder, UnpairedEncoder
from whet.data.prompt_stream import PromptStream
from whet.data.sources import load_rows
from whet.data.supervised import SFTEncoder
from whet.errors import CheckpointError, DataError

FORMATS = ["json", "jsonl", "csv", "parquet", "arrow"]
TALKS = [
    {"messages": [user(f"q{i}"), said("a" * (i + 1), tool_calls=None), *([user("x"), said("y")] if i else [])]}
    for i in range(6)
]
PAIRS = [
    {
        "prompt": f"q{i}",
        "chosen": [user(f"q{i}"), said("good")],
        "rejected": [user(f"q{i}"), said("bad")],
        "margin": 0.5,
    }
    for i in range(3)
]
LABELLED = [{"prompt": f"q{i}", "completion": "x, y\nz", "label": i % 2 == 0} for i in range(3)]


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_with("qwen")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path


def write(path, rows):
    """Rows in a file; a CSV file holds lists as JSON."""
    if path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            out = csv.DictWriter(file, list(rows[0]))
            out.writeheader()
            out.writerows({k: json.dumps(v) if isinstance(v, list) else v for k, v in row.items()} for row in rows)
    elif path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        table = pa.Table.from_pylist(rows)
        with pa.ipc.new_stream(str(path), table.schema) as out:
            out.write_table(table)
    return path


def texts(tokenizer, examples):
    return [(x.row, dict(x.columns), [bracketed(tokenizer, s) for s in x.sequences]) for x in examples]


@pytest.mark.spread(8)
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize(
    ("rows", "encoder"), [(TALKS, SFTEncoder), (PAIRS, PreferenceEncoder), (LABELLED, UnpairedEncoder)]
)
def test_every_format_gives_the_same_examples(folder, tokenizer, suffix, rows, encoder, streaming):
    path = write(folder / f"rows.{suffix}", rows)
    source = load_rows(f"train@{path}", split=None, streaming=streaming)
    stream = PromptStream(source, batch_size=3, shuffle=False, encode=encoder(tokenizer), last_batch="keep")
    assert stream.kind == ("stream" if streaming else "rows")
    made = [x for batch in stream for x in batch]
    encode = encoder(tokenizer)
    assert texts(tokenizer, made) == texts(tokenizer, [encode(row, i) for i, row in enumerate(rows)])


@pytest.mark.parametrize(
    ("source", "rows"),
    [
        ("test@data", TALKS[:1]),
        ("train@data", TALKS),
        ("train@data/all.jsonl", TALKS[1:]),  # a file is the split, whatever its name
        ("train@of.py:rows", TALKS[:2]),
        ("odd@name.jsonl", TALKS[:3]),  # a file's own name
    ],
)
def test_a_split_is_named_before_the_source(folder, source, rows):
    (folder / "data").mkdir()
    write(folder / "data" / "train.jsonl", TALKS)
    write(folder / "data" / "test.jsonl", TALKS[:1])
    write(folder / "odd@name.jsonl", TALKS[:3])
    (folder / "of.py").write_text(f"def rows():\n    return {{'train': {TALKS[:2]!r}, 'test': []}}\n")
    if source.endswith("all.jsonl"):
        write(folder / "data" / "all.jsonl", TALKS[1:])
    assert list(load_rows(source, split="other" if "@" in source[:6] else "train")) == rows


@pytest.mark.parametrize("source", ["valid@data", "train@nothing.jsonl"])
def test_a_split_or_a_source_that_is_not_there_is_named(folder, source):
    (folder / "data").mkdir()
    write(folder / "data" / "train.jsonl", TALKS)
    with pytest.raises(DataError, match=r"has no split 'valid'|no file or folder 'nothing.jsonl'"):
        load_rows(source)
    with pytest.raises(DataError, match=r"it has prompt, answer; if these are columns, pass datasets"):
        load_rows({"prompt": ["a"], "answer": ["1"]})


def stream(tokenizer, rows, **more):
    data = more.pop("data", SupervisedDataConfig())
    options = {"batch_size": 2, "seed": 3, "num_epochs": 2, "encode": SFTEncoder(tokenizer, data)}
    return PromptStream(rows, **{**options, **more})


@pytest.mark.parametrize("once", [False, True])
def test_a_resumed_stream_goes_on_with_the_same_examples(tokenizer, once):
    def source():
        return iter(TALKS) if once else TALKS

    epochs = {"num_epochs": 1} if once else {}
    whole = [texts(tokenizer, b) for b in stream(tokenizer, source(), **epochs)]
    first = stream(tokenizer, source(), **epochs)
    batches = iter(first)
    begun = [texts(tokenizer, next(batches)) for _ in range(2)]
    again = stream(tokenizer, source(), **epochs)
    again.restore(json.loads(json.dumps(first.state())))
    assert begun + [texts(tokenizer, b) for b in again] == whole and len(whole) == (3 if once else 6)


@pytest.mark.parametrize(
    ("rows", "data", "says"),
    [
        ([{"messages": [user("q0"), said("b")]}, *TALKS[1:]], {}, "a prompt was changed|the first"),
        ([*TALKS[1:], TALKS[0]], {}, "reordered"),
        (TALKS, {"train_on": "last"}, "changed or reordered"),
        (TALKS, {"chat_template_kwargs": {"enable_thinking": True}}, None),
    ],
)
def test_a_resume_over_other_examples_is_refused(tokenizer, rows, data, says):
    first = stream(tokenizer, TALKS)
    next(iter(first))
    again = stream(tokenizer, rows, data=SupervisedDataConfig(**data))
    if says is None:
        again.restore(first.state())
    else:
        with pytest.raises(CheckpointError, match=says):
            again.restore(first.state())


def test_digests_see_tokens_masks_and_columns(tokenizer):
    def of(row, encoder=PreferenceEncoder, **data):
        return compute_checksums([encoder(tokenizer, SupervisedDataConfig(**data))(row)])

    row = {"prompt": "x", "chosen": "a", "rejected": "b", "margin": 1.0}
    tokens, columns = of(row)
    assert of({**row, "margin": 2.0}) == (tokens, of({**row, "margin": 2.0})[1]) != (tokens, columns)
    assert of({**row, "chosen": "c"})[0] != tokens and of({**row, "chosen": "b", "rejected": "a"})[0] != tokens
    talk = {"messages": [user("a"), said("b"), user("c"), said("d")]}
    ids = {"assistant": of(talk, SFTEncoder), "last": of(talk, SFTEncoder, train_on="last")}
    assert ids["assistant"] != ids["last"]
    longer = {"prompt": "x", "response": "ab"}
    assert of(longer, SFTEncoder) != of({"prompt": "xa", "response": "b"}, SFTEncoder)  # the same ids, another mask


@pytest.mark.parametrize(
    "rows",
    [
        [{"messages": []}],
        [{"messages": ["a", "b"]}],
        [{"prompt": [1, 2], "chosen": "a", "rejected": "b"}],
        [{"prompt": [], "response": "x"}],
    ],
)
def test_rows_are_never_taken_for_ready_made_batches(tokenizer, rows):
    with pytest.raises(DataError, match="row 0"):
        stream(tokenizer, rows, batch_size=1)


def test_rows_that_were_left_out_do_not_count_and_long_ones_are_told_of_together(tokenizer, caplog):
    rows = [{"text": "x" * n} for n in (1, 9, 2, 9)]
    kept = stream(tokenizer, rows, data=SupervisedDataConfig(max_length=5, on_long="drop"), num_epochs=1, shuffle=False)
    assert [x.row for batch in kept for x in batch] == [0, 2]
    assert kept.describe() == "2 rows in data-set order, 1 batch of 2 per epoch"
    assert [r.message for r in caplog.records] == [kept.encode.describe_counts()]
    with pytest.raises(DataError, match=r"^2 of 4 rows are over data.max_length 5: the longest has 10 tokens"):
        stream(tokenizer, rows, data=SupervisedDataConfig(max_length=5))
    with pytest.raises(DataError, match=r"^row 1 has 10 tokens"):  # of a stream there is no last row
        list(stream(tokenizer, iter(rows), data=SupervisedDataConfig(max_length=5), num_epochs=1))
    caplog.clear()
    dropping = SupervisedDataConfig(max_length=5, on_long="drop")
    left = stream(tokenizer, iter(rows), data=dropping, num_epochs=1)
    assert [x.row for batch in left for x in batch] == [0, 2]
    assert [r.message for r in caplog.records] == [left.encode.describe_counts()]
    with pytest.raises(DataError, match=r"2 rows don't fill one batch of 3; .* or give more rows"):
        stream(tokenizer, rows, data=SupervisedDataConfig(max_length=5, on_long="drop"), batch_size=3)
