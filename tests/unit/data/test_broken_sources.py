"""Whatever is wrong with a source is a DataError that says where: in memory and streamed, from disk and from Python."""

import json
import logging
import shutil
import sys
import threading

import datasets
import pyarrow as pa
import pytest
from huggingface_hub import HfApi, constants
from pyarrow import parquet

from whet.data import sources
from whet.data.prompt_stream import PromptStream
from whet.data.prompts import PromptEncoder, find_prompt_column
from whet.data.sources import load_rows
from whet.data.tokenizer import byte_tokenizer
from whet.errors import DataError

LINES = '{"prompt": "a"}\n{"prompt": "b"}\n'
NOT_TEXT = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xe9")])


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path


def parquet_of(**columns):
    sink = pa.BufferOutputStream()
    parquet.write_table(pa.table(columns), sink)
    return sink.getvalue().to_pybytes()


def arrow_of(**columns):
    sink = pa.BufferOutputStream()
    table = pa.table(columns)
    with pa.ipc.new_stream(sink, table.schema) as out:
        out.write_table(table)
    return sink.getvalue().to_pybytes()


def refused(source, says, **options):
    """Asserts that the source is refused so, in memory and streamed."""
    for streaming in (False, True):
        with pytest.raises(DataError, match=says):
            list(load_rows(source, streaming=streaming, **options))


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("a.jsonl", LINES + '{"prompt": \n', r"a.jsonl, line 3: not JSON: .* at column 12: '{\"prompt\": '"),
        ("a.jsonl", LINES + "\n3\n", r"a.jsonl, line 4: int; a row is an object"),
        ("a.jsonl", LINES + "[" * 200_000, r"a.jsonl, line 3: nested too deeply to be read; flatten it"),
        ("a.jsonl", LINES + '{"a": ' + "1" * 5000 + "}", r"a.jsonl, line 3: .*digits.*; write the number as a string"),
        ("a.json", LINES + '{"prompt": \n', r"a.json, line 3: not JSON"),
        ("a.json", '[{"prompt": "a"},\n{]', r"a.json, line 2: not JSON"),
        ("a.json", '[{"prompt": "a"}, 3]', r"a.json, element 1: int; a row is an object"),
        ("a.json", '{"prompt": "a"}', r"a.json holds one object with keys prompt; expected a list of objects"),
        ("a.json", "[" * 200_000, r"a.json: nested too deeply to be read"),
        ("a.json", '{"a":' * 200_000, r"a.json: nested too deeply to be read"),
        ("a.json", "[" + "1" * 5000 + "]", r"a.json: .*digits.*; write the number as a string"),
        ("a.json", "[1]\n[2]", r"a.json, line 2: not JSON: Extra data"),
        ("a.json", "prompt\na\n", r"a.json, line 1: not JSON"),
        ("a.csv", "prompt,n\na,1\nb,2,3\n", r"a.csv can't be read as csv: ArrowInvalid: .*Row #3: .*; repair the file"),
        ("a.csv", "prompt,n\na," + "1" * 5000 + "\n", r"a.csv, row 0: column 'n' holds a number beyond floating point"),
        ("a.csv", "prompt,n,n\na,1,2\n", r"a.csv has 2 columns 'n'; rename all but one"),
        ("a.csv", "", r"a.csv can't be read as csv: ArrowInvalid: Empty CSV"),
        ("a.csv", "prompt,n\n", r"a.csv'? has no rows"),
        ("a.jsonl", "\n", r"a.jsonl'? has no rows"),
        ("a.json", "", r"a.json'? has no rows"),
        ("a.json", "[]", r"a.json'? has no rows"),
        ("a.parquet", b"", r"a.parquet can't be read as parquet: .*; repair the file"),
        ("a.parquet", parquet_of(prompt=["a"])[:-9], r"a.parquet can't be read as parquet"),
        ("a.parquet", parquet_of(prompt=NOT_TEXT), r"a.parquet can't be read as parquet: .*UTF8"),
        ("a.parquet", parquet_of(prompt=pa.array([], pa.string())), r"a.parquet'? has no rows"),
        ("a.arrow", b"", r"a.arrow can't be read as arrow: .*; repair the file"),
        ("a.arrow", arrow_of(prompt=["a" * 999])[:-300], r"a.arrow can't be read as arrow"),
        ("a.arrow", arrow_of(prompt=NOT_TEXT), r"a.arrow can't be read as arrow: .*UTF8"),
    ],
)
def test_a_broken_file_is_named_with_the_place(folder, name, data, says):
    (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    refused(name, says)


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.jsonl", LINES + '{"prompt": "é"}\n'), ("a.json", '[\n\n{"prompt": "é"}]'), ("a.csv", "prompt,n\na,1\né,2\n")],
)
def test_another_encoding_than_utf8_is_named_with_its_line(folder, name, text):
    (folder / name).write_bytes(text.encode("latin-1"))
    refused(name, rf"{name} can't be read as .*: line 3 is not UTF-8: byte 0xe9 at column \d+; convert it to UTF-8")
    for encoding in ("utf-16", "utf-16-le"):
        (folder / name).write_bytes(text.encode(encoding))
        refused(name, rf"{name} is not UTF-8: it looks like UTF-16, or is not text; convert it")


def test_a_header_in_another_encoding_is_named_too(folder):
    (folder / "a.csv").write_bytes("prompt,é\na,1\n".encode("latin-1"))
    refused("a.csv", "line 1 is not UTF-8")


def test_streams_of_every_way_to_write_json_give_what_reading_gives(folder):
    rows = [{"prompt": "é", "n": 1}, {"prompt": "b"}]
    text = json.dumps(rows[0]) + "\n\n" + json.dumps(rows[1])
    for name, written in (
        ("a.json", json.dumps(rows, indent=1)),
        ("b.json", "\ufeff" + json.dumps({"version": 1, "data": rows})),
        ("c.json", "\ufeff\n" + text),
        ("d.jsonl", "\ufeff" + text),
    ):
        (folder / name).write_text(written, encoding="utf-8")
        assert load_rows(name) == list(load_rows(name, streaming=True)) == rows, name


def test_a_table_of_several_parts_streams_all_of_them_with_its_features(folder):
    kinds = datasets.Features({"prompt": datasets.Value("string"), "kind": datasets.ClassLabel(names=["x", "y"])})
    made = datasets.Dataset.from_dict({"prompt": [str(i) for i in range(2500)], "kind": [1] * 2500}, features=kinds)
    made.to_parquet("a.parquet")
    made.to_csv("a.csv")
    with pa.ipc.new_file("a.arrow", made.data.schema) as out:
        out.write_table(made.data.table, max_chunksize=700)
    for name in ("a.parquet", "a.csv", "a.arrow"):
        assert list(load_rows(name, streaming=True)) == list(load_rows(name)), name
        assert len(list(load_rows(name, streaming=True))) == 2500


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "csv"])
def test_files_whose_columns_have_unequal_types_are_named(folder, suffix):
    write = {"parquet": parquet_of, "arrow": arrow_of, "csv": lambda n: f"n\n{n[0]}\n".encode()}[suffix]
    (folder / "set").mkdir()
    (folder / "set" / f"1.{suffix}").write_bytes(write(n=[3]))
    (folder / "set" / f"2.{suffix}").write_bytes(write(n=["x"]))
    refused("set", rf"column 'n' is int64 in set/1.{suffix} and string in set/2.{suffix}; write the")


def test_a_column_that_one_file_lacks_or_leaves_empty_is_no_error(folder):
    (folder / "set").mkdir()
    (folder / "set" / "1.parquet").write_bytes(parquet_of(prompt=["a"], n=pa.nulls(1)))
    (folder / "set" / "2.parquet").write_bytes(parquet_of(prompt=["b"], n=[3]))
    (folder / "set" / "3.parquet").write_bytes(parquet_of(prompt=["c"]))
    assert [row["n"] for row in load_rows("set")] == [None, 3, None]
    assert [row.get("n") for row in load_rows("set", streaming=True)] == [None, 3, None]


@pytest.mark.parametrize("broken", ["missing", "half", "empty", "state.json", "dataset_info.json", "texts"])
def test_a_saved_data_set_that_is_broken_is_named(folder, broken):
    datasets.Dataset.from_dict({"prompt": ["a" * 99] * 99}).save_to_disk("set")
    arrow = next((folder / "set").glob("*.arrow"))
    if broken == "missing":
        arrow.unlink()
    elif broken == "half":
        arrow.write_bytes(arrow.read_bytes()[:5000])
    elif broken == "texts":
        arrow.write_bytes(arrow.read_bytes().replace(b"a" * 99, b"\xe9" * 99))
    else:
        (arrow if broken == "empty" else folder / "set" / broken).write_text("" if broken == "empty" else "[]")
    refused("set", r"^set, which save_to_disk wrote, can't be read: .*; save the data set again$")


def test_a_split_of_a_saved_set_that_is_broken_is_named(folder):
    one = datasets.Dataset.from_dict({"prompt": ["a"]})
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk("both")
    shutil.rmtree(folder / "both" / "test")
    refused("both", "^both, which save_to_disk wrote, can't be read")


def numbers(count):
    for i in range(count):
        yield {"prompt": str(i)}
    raise KeyError("gone")


class Again:
    """Rows that can be read again and again, up to one that can't."""

    def __iter__(self):
        return numbers(3)


class Places(list):
    """Rows with a length, of which one can't be read."""

    def __iter__(self):
        return numbers(3)


class Closed:
    """Rows that can't even be begun."""

    def __iter__(self):
        raise OSError("closed")


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (numbers(3), r"^the data can't be read from row 3 on: KeyError: 'gone'; fix the source of the rows$"),
        (numbers(0), r"from row 0 on: KeyError: 'gone'"),
        (Again(), r"from row 3 on: KeyError: 'gone'"),
        (Places([{"prompt": "a"}] * 4), r"from row 3 on: KeyError: 'gone'"),
        (Closed(), r"^the data can't be read: OSError: closed"),
    ],
)
def test_rows_that_raise_name_the_row(rows, says):
    with pytest.raises(DataError, match=says) as error:
        list(PromptStream(load_rows(rows), batch_size=2, encode=lambda row, number: row))
    assert isinstance(error.value.__cause__, KeyError | OSError)


def test_functions_that_raise_are_named(folder):
    (folder / "mine.py").write_text("def rows():\n    raise KeyError('x')\ndef needs(a):\n    return []\n")
    refused("mine.py:rows", r"^data set 'mine.py:rows' can't be read: KeyError: 'x'; fix the function")
    refused("mine.py:needs", r"^data set 'mine.py:needs' can't be read: TypeError: .*without arguments")


def test_a_function_that_exits_is_named_and_does_not_end_the_program(folder):
    (folder / "ends.py").write_text("import sys\ndef rows():\n    sys.exit(0)\n")
    refused("ends.py:rows", r"^data set 'ends.py:rows' can't be read: SystemExit: 0; fix the function")


@pytest.mark.parametrize("name", ["x" * 5000, "a/" * 3000 + "b.jsonl", "a\0b.jsonl"])
def test_a_name_that_no_file_can_have_is_a_short_error(name):
    with pytest.raises(DataError) as error:
        load_rows(name)
    assert len(str(error.value)) < 1000


def test_values_that_cannot_be_written_down_are_refused_all_the_same():
    encode = PromptEncoder(byte_tokenizer())
    for value in (10**5000, [10**5000], [{"role": 10**5000, "content": "x"}], [{"role": "user", "content": 10**5000}]):
        with pytest.raises(DataError, match="row 4"):
            encode({"prompt": value}, 4)
    with pytest.raises(DataError, match=r"among the columns 1, None; name it"):
        find_prompt_column([1, None])
    with pytest.raises(DataError, match=r"no split 'train'; it has 1, 2"):
        load_rows({1: [], 2: []})


# ---- the hub ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def online(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("asked for long"))


def test_a_hub_that_nobody_reaches_is_asked_once_and_said_at_once(online, monkeypatch, caplog):
    asked = []

    def nobody(self, name, timeout):
        asked.append((name, timeout))
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(HfApi, "dataset_info", nobody)
    caplog.set_level(logging.INFO, "whet")
    with pytest.raises(DataError) as error:
        load_rows("some/set")
    assert str(error.value) == (
        "'some/set' is not a file or folder here; no folder some, and the hub can't be reached (no route); check the "
        "name and the network; HF_HUB_OFFLINE=1 uses only the cache"
    )
    assert asked == [("some/set", 10)]
    assert "asking the hub for a data set of that name" in caplog.text


@pytest.mark.parametrize("kept", ["cache/some___set", "hub/datasets--some--set"])
def test_what_was_downloaded_before_is_taken_without_asking_first(online, monkeypatch, tmp_path, kept):
    (tmp_path / kept).mkdir(parents=True)
    monkeypatch.setattr(HfApi, "dataset_info", lambda *_, **__: pytest.fail("asked"))
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_dict({"prompt": ["a"]}))
    assert list(load_rows("some/set")) == [{"prompt": "a"}]


def test_a_hub_that_answers_is_left_to_datasets_whatever_it_raises(online, monkeypatch):
    def refuses(*_, **__):
        raise RuntimeError("gated")

    monkeypatch.setattr(HfApi, "dataset_info", refuses)
    monkeypatch.setattr(datasets, "load_dataset", refuses)
    said = r"'some/set' is not a file .*split 'train': RuntimeError: gated; check the name"
    with pytest.raises(DataError, match=said):
        load_rows("some/set")


def test_waiting_for_the_hub_is_said(online, monkeypatch):
    told, lines = threading.Event(), []
    monkeypatch.setattr(sources, "LOG_AFTER_S", 0.0)
    monkeypatch.setattr(sources.log, "warning", lambda text, *values: (lines.append(text % values), told.set()))
    monkeypatch.setattr(HfApi, "dataset_info", lambda *_, **__: told.wait(30))
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_dict({"prompt": ["a"]}))
    load_rows("some/set")
    assert lines[0] == "waiting for the hub, which is asked for the data set 'some/set'"
