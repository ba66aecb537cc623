import http.server
import json
import sys
import threading

import datasets
import pyarrow as pa
import pyarrow.feather
import pytest
from pyarrow import csv, parquet

from whet.data.prompts import PromptEncoder
from whet.data.sources import load_rows
from whet.data.tokenizer import byte_tokenizer
from whet.errors import ConfigError, DataError

ROWS = [{"prompt": "a, b", "answer": 1}, {"prompt": "c\nd", "answer": 2}, {"prompt": "é", "answer": 3}]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path


def write(path, rows=ROWS):
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(rows)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    elif path.suffix == ".csv":
        csv.write_csv(table, path)
    elif path.suffix == ".parquet":
        parquet.write_table(table, path)
    else:
        with pa.ipc.new_stream(str(path), table.schema) as out:
            out.write_table(table)
    return path


@pytest.mark.parametrize("suffix", ["json", "jsonl", "csv", "parquet", "arrow"])
def test_every_format_gives_the_same_rows(folder, suffix):
    path = write(folder / f"some.{suffix}")
    assert list(load_rows(path)) == list(load_rows(str(path))) == list(load_rows(f"some.{suffix}")) == ROWS
    assert list(load_rows(path, limit=2)) == ROWS[:2]
    assert list(load_rows(path, limit=9)) == ROWS


def test_other_ways_to_write_json_and_arrow(folder):
    (folder / "lines.json").write_text("\ufeff" + "\r\n".join(map(json.dumps, ROWS)), encoding="utf-8")
    (folder / "keyed.json").write_text(json.dumps({"version": "1", "data": ROWS}))
    pyarrow.feather.write_feather(pa.Table.from_pylist(ROWS), folder / "f.arrow", compression="uncompressed")
    for name in ("lines.json", "keyed.json", "f.arrow"):
        assert list(load_rows(name)) == ROWS, name


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_streams_give_the_same_rows_again_and_again(folder, suffix):
    rows = load_rows(write(folder / f"some.{suffix}"), streaming=True)
    assert not hasattr(rows, "__len__")
    assert list(rows) == list(rows) == ROWS
    first = load_rows(write(folder / f"some.{suffix}"), streaming=True, limit=2)
    assert list(first) == list(first) == ROWS[:2]


def test_a_folder_gives_the_files_named_for_the_split(folder):
    for name in ("train-00000-of-00002.parquet", "train-00001-of-00002.parquet", "test-00000-of-00001.parquet"):
        write(folder / "set" / "data" / name)
    assert list(load_rows("set")) == ROWS * 2
    assert list(load_rows("set", split="test")) == ROWS
    with pytest.raises(DataError, match=r"no split 'tset'.*did you mean test"):
        load_rows("set", split="tset")


def test_a_folder_without_split_names_is_all_train(folder):
    write(folder / "set" / "b.jsonl", ROWS[1:])
    write(folder / "set" / "a.jsonl", ROWS[:1])
    assert load_rows("set") == ROWS
    with pytest.raises(DataError, match="no split 'test'"):
        load_rows("set", split="test")
    write(folder / "set" / "c.csv")
    with pytest.raises(DataError, match="mixes formats"):
        load_rows("set")


def test_folders_saved_by_datasets(folder):
    one = datasets.Dataset.from_list(ROWS)
    one.save_to_disk("one")
    datasets.DatasetDict({"train": one, "test": one.select([2])}).save_to_disk("both")
    assert list(load_rows("one")) == list(load_rows("both")) == ROWS
    assert list(load_rows("both", split="test")) == ROWS[2:]
    assert list(load_rows("both", split="test", streaming=True)) == ROWS[2:]
    with pytest.raises(DataError, match=r"no split 'dev'.*it has train, test"):
        load_rows("both", split="dev")


def test_functions_are_called_and_their_rows_taken(folder):
    (folder / "rows_of_mine.py").write_text("def rows():\n    return [{'prompt': str(i)} for i in range(3)]\n")
    assert load_rows("rows_of_mine.py:rows", limit=2) == [{"prompt": "0"}, {"prompt": "1"}]
    assert len(load_rows("rows_of_mine:rows")) == 3
    with pytest.raises(ConfigError, match="did you mean rows"):
        load_rows("rows_of_mine.py:row")


def test_rows_given_directly_are_passed_through():
    dataset = datasets.Dataset.from_list(ROWS)
    batches = iter([{"prompts": ["a"]}])
    assert load_rows(ROWS) is ROWS and load_rows(dataset) is dataset and load_rows(batches) is batches
    assert list(load_rows(datasets.DatasetDict(train=dataset))) == ROWS
    assert list(load_rows((row for row in ROWS), limit=1)) == ROWS[:1]


def test_an_unreadable_line_is_named(folder):
    (folder / "bad.jsonl").write_text('{"prompt": "a"}\n\n{"prompt": \n')
    with pytest.raises(DataError, match=r"bad.jsonl, line 3: not JSON"):
        load_rows("bad.jsonl")
    (folder / "bad.jsonl").write_text('{"prompt": "a"}\n"b"\n')
    with pytest.raises(DataError, match=r"line 2: str; a row is an object"):
        load_rows("bad.jsonl")
    (folder / "bad.json").write_text('[\n{"prompt": "a"},\n{"prompt" "b"}]')
    with pytest.raises(DataError, match=r"bad.json, line 3"):
        load_rows("bad.json")
    (folder / "bad.csv").write_text("prompt,answer\na,1\nb,2,3\n")
    with pytest.raises(DataError, match=r"bad.csv can't be read as csv: .*#3"):
        load_rows("bad.csv")
    (folder / "bad.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"bad.parquet can't be read as parquet"):
        load_rows("bad.parquet")
    (folder / "latin.jsonl").write_bytes('{"prompt": "é"}'.encode("latin-1"))
    with pytest.raises(DataError, match="not UTF-8"):
        load_rows("latin.jsonl")


def test_a_csv_that_is_not_utf8_is_named(tmp_path):
    path = tmp_path / "latin.csv"
    path.write_bytes("prompt,café\ncafé,1\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"latin\.csv can't be read as csv"):
        load_rows(str(path))[0]
    path.write_bytes("prompt,answer\ncafé,1\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"row 0, column 'prompt'|can't be read as csv"):
        PromptEncoder(byte_tokenizer())(load_rows(str(path))[0], 0)


def test_what_is_missing_is_named_with_the_nearest(folder, monkeypatch):
    write(folder / "train.jsonl")
    with pytest.raises(DataError, match=r"no file or folder 'trian.jsonl'; did you mean train.jsonl"):
        load_rows("trian.jsonl")
    with pytest.raises(DataError, match="no folder"):
        load_rows("/not/here/at/all")
    (folder / "empty").mkdir()
    with pytest.raises(DataError, match="holds no data"):
        load_rows("empty")
    (folder / "notes.txt").write_text("x")
    with pytest.raises(DataError, match=r"unknown format '.txt'"):
        load_rows("notes.txt")

    def offline(*_, **__):
        raise ConnectionError("couldn't reach the hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(DataError, match=r"'org/name' is not a file or folder here.*ConnectionError: couldn't reach"):
        load_rows("org/name")


def test_hub_names_take_split_and_subset(monkeypatch):
    asked = []
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *a, **k: asked.append((a, k)) or datasets.Dataset.from_list(ROWS)
    )
    assert list(load_rows("openai/gsm8k", split="test", subset="main", limit=1)) == ROWS[:1]
    assert asked == [(("openai/gsm8k", "main"), {"split": "test", "streaming": False})]


SPLIT = datasets.Dataset.from_list(ROWS)


def places(tmp_path, names):
    """The same splits as a DatasetDict, as a plain mapping, saved, and as files; the first row says which it is."""
    parts = {name: [{**ROWS[0], "prompt": name}, *ROWS] for name in names}
    made = datasets.DatasetDict({name: datasets.Dataset.from_list(part) for name, part in parts.items()})
    made.save_to_disk(str(tmp_path / "saved"))
    for name, part in parts.items():
        write(tmp_path / "files" / f"{name}-00000-of-00001.parquet", part)
    return [made, parts, "saved", tmp_path / "files"]


@pytest.mark.parametrize(
    ("names", "taken"),
    [(["train", "test"], "test"), (["dev", "train"], "dev"), (["train"], "train"), (["validation"], "validation")],
)
def test_evaluation_takes_the_only_split_that_is_for_it(tmp_path, names, taken):
    for source in places(tmp_path, names):
        assert load_rows(source, split=None)[0]["prompt"] == taken


@pytest.mark.parametrize("names", [["train", "validation", "test"], ["train", "training"]])
def test_evaluation_never_guesses_between_splits(tmp_path, names):
    for source in places(tmp_path, names):
        with pytest.raises(DataError, match=r"has .*train.* named for evaluation; say which: set data\.eval_split"):
            load_rows(source, split=None)
        assert load_rows(source, split=names[1])[0]["prompt"] == names[1]


def test_evaluation_takes_what_has_no_splits_as_it_is(folder):
    write(folder / "train.jsonl")
    assert load_rows("train.jsonl", split=None) == load_rows(ROWS, split=None) == ROWS
    write(folder / "set" / "some.jsonl")
    assert load_rows("set", split=None) == ROWS
    write(folder / "set" / "train.jsonl")
    with pytest.raises(DataError, match=r"has train, some\.jsonl, and 0 of them"):
        load_rows("set", split=None)


def test_evaluation_asks_the_hub_for_the_splits_of_a_subset(monkeypatch):
    asked = []
    found = ["train", "test"]
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda *a: asked.append(a) or found)
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: asked.append((a, k["split"])) or SPLIT)
    assert list(load_rows("openai/gsm8k", split=None, subset="main")) == ROWS
    assert asked == [("openai/gsm8k", "main"), (("openai/gsm8k", "main"), "test")]
    found[:] = ["train", "test", "validation"]
    with pytest.raises(DataError, match=r"^'openai/gsm8k' has train, test, validation, and 2 of them"):
        load_rows("openai/gsm8k", split=None)


def test_no_rows_are_an_error(folder):
    (folder / "empty.jsonl").write_text("\n")
    for source in ("empty.jsonl", [], datasets.Dataset.from_list([])):
        with pytest.raises(DataError, match="has no rows"):
            load_rows(source)
    with pytest.raises(DataError, match="gave int"):
        load_rows(3)
    with pytest.raises(ConfigError, match="limit 0"):
        load_rows(ROWS, limit=0)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.bz2", "a.csv.zst", "a.jsonl.lz4"])
def test_compressed_files_give_the_rows_of_the_plain_one(folder, name):
    plain = write(folder / name.rpartition(".")[0])
    with pa.output_stream(str(folder / name), compression="detect") as out:
        out.write(plain.read_bytes())
    plain.unlink()
    assert list(load_rows(name)) == list(load_rows(name, streaming=True)) == ROWS


def test_a_glob_gives_the_rows_of_its_files_in_the_order_of_their_names(folder):
    for name in ("x/b.jsonl", "x/deep/a.jsonl", "x/c.csv"):
        write(folder / name, [{"prompt": name, "answer": 1}])
    assert [row["prompt"] for row in load_rows("x/**/*.jsonl")] == ["x/b.jsonl", "x/deep/a.jsonl"]
    with pytest.raises(DataError, match=r"mixes formats: b.jsonl, c.csv"):
        load_rows("x/*.*")
    with pytest.raises(DataError, match=r"no file matches 'x/\*.parquet'"):
        load_rows("x/*.parquet")


def test_a_list_gives_the_rows_of_every_source_with_the_options_of_its_own(folder):
    write(folder / "a.jsonl"), write(folder / "set" / "test.csv", [{"prompt": "t", "answer": 7}])
    rows = load_rows([{"path": "a.jsonl", "limit": 2}, {"path": "set", "split": "test"}])
    assert len(rows) == 3
    assert list(rows) == [rows[n] for n in range(3)] == [*ROWS[:2], {"prompt": "t", "answer": 7}]
    assert list(load_rows(["a.jsonl", "a.jsonl"], streaming=True)) == [row for row in ROWS for _ in (1, 2)]
    with pytest.raises(ConfigError, match="applies to one data set; set it for each of the list"):
        load_rows(["a.jsonl", "a.jsonl"], limit=2)


def test_a_url_is_read_by_its_format(folder, monkeypatch):
    write(folder / "a.jsonl")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    try:
        address = f"http://127.0.0.1:{server.server_port}"
        assert list(load_rows(f"{address}/a.jsonl")) == list(load_rows(f"{address}/a.jsonl", streaming=True)) == ROWS
        with pytest.raises(DataError, match=r"b.jsonl can't be read: .*; check the address and the network"):
            load_rows(f"{address}/b.jsonl")
        write(folder / "a b.jsonl")
        assert list(load_rows(f"{address}/a b.jsonl")) == ROWS
        monkeypatch.setattr(http.server.SimpleHTTPRequestHandler, "copyfile", lambda _, source, out: out.write(b"{"))
        with pytest.raises(DataError, match=r"can't be read: OSError: the connection ended after 1 of \d+ bytes"):
            load_rows(f"{address}/a.jsonl")
    finally:
        server.shutdown()
    with pytest.raises(DataError, match=r"unknown format '\.txt'"):
        load_rows("https://a.example/b.txt")


def test_a_revision_of_a_hub_name_is_asked_for(monkeypatch):
    asked = []
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: asked.append((a, k)) or SPLIT)
    for source in ("my/data@v1.0", "test@my/data@v1.0", "my/data"):
        load_rows(source)
    (one, first), (two, second), (_, third) = asked
    assert one[0] == two[0] == "my/data" and first["revision"] == second["revision"] == "v1.0"
    assert (first["split"], second["split"]) == ("train", "test") and "revision" not in third
