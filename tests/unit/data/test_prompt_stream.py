import json
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import csv, parquet

from whet.data import prompt_stream
from whet.data.files import stream_files
from whet.data.prompt_stream import PromptStream, batch_to_rows, epoch_order, hold_out
from whet.data.prompts import PromptEncoder
from whet.data.sources import load_rows
from whet.data.tokenizer import byte_tokenizer
from whet.errors import CheckpointError, ConfigError, DataError

GOLDEN = [0, 3, 7, 5, 1, 2, 6, 4]  # epoch_order(8, 0, 0) under numpy 2.4; other versions must agree, or resumes break


def rows(n):
    return [{"prompt": str(i), "answer": i} for i in range(n)]


def ids(batches):
    return [[row["answer"] for row in batch] for batch in batches]


def take(stream, n):
    batches = iter(stream)
    return [next(batches) for _ in range(n)]


class Stream:
    """Rows without a length that can be read again."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(rows(self.n))


class Batches:
    """Tunix's form, without a length."""

    def __init__(self, sizes):
        self.sizes = sizes

    def __iter__(self):
        start = 0
        for size in self.sizes:
            places = range(start, start + size)
            yield {"prompts": [str(i) for i in places], "answer": np.array(list(places))}
            start += size


SOURCES = {"rows": lambda: rows(11), "stream": lambda: Stream(11), "batches": lambda: Batches([4, 4, 3])}


def test_an_epoch_holds_each_row_once_in_an_order_of_its_own():
    stream = PromptStream(rows(12), batch_size=4, num_epochs=2)
    seen = ids(stream)
    first, second = [i for batch in seen[:3] for i in batch], [i for batch in seen[3:] for i in batch]
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second != list(range(12)) != first


def test_the_order_is_a_function_of_seed_and_epoch_alone():
    assert epoch_order(8, 0, 0).tolist() == epoch_order(8, 0, 0).tolist() == GOLDEN
    assert epoch_order(8, 0, 0).tolist() != epoch_order(8, 1, 0).tolist()
    assert ids(PromptStream(rows(8), batch_size=8)) == [epoch_order(8, 0, 0).tolist()]


def test_unshuffled_rows_keep_their_order():
    assert ids(PromptStream(rows(4), batch_size=2, shuffle=False)) == [[0, 1], [2, 3]]
    dataset = datasets.Dataset.from_list(rows(4))
    assert ids(PromptStream(dataset, batch_size=2, shuffle=False)) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("last_batch", ["drop", "keep"])
@pytest.mark.parametrize("kind", SOURCES)
def test_resume_anywhere_equals_the_uninterrupted_run(kind, last_batch):
    def fresh():
        size = None if kind == "batches" else 4
        return PromptStream(SOURCES[kind](), batch_size=size, seed=5, num_epochs=3, last_batch=last_batch)

    whole_stream = fresh()
    whole = ids(whole_stream)
    assert len(whole) == 3 * (2 if last_batch == "drop" else 3)
    for stop in range(len(whole) + 1):  # mid-epoch, at the end of an epoch, at the end of the run
        stream = fresh()
        before = ids(take(stream, stop))
        state = stream.state()
        assert all(type(value) is int for value in state.values())
        again = fresh()
        again.restore(state)
        assert before + ids(again) == whole, stop
        assert again.dropped_rows == whole_stream.dropped_rows


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 20),
    size=st.integers(1, 7),
    stop=st.integers(0, 12),
    seed=st.integers(0, 2**64 - 1),
    keep=st.booleans(),
)
def test_resume_without_end_equals_the_uninterrupted_run(n, size, stop, seed, keep):
    if n < size and not keep:
        return

    def fresh():
        return PromptStream(rows(n), batch_size=size, seed=seed, num_epochs=None, last_batch="keep" if keep else "drop")

    whole = ids(take(fresh(), stop + 5))
    stream, again = fresh(), fresh()
    take(stream, stop)
    again.restore(stream.state())
    assert ids(take(again, 5)) == whole[stop:]


def test_a_one_shot_iterator_resumes_by_skipping_and_loses_no_row():
    assert ids(PromptStream(iter(rows(5)), batch_size=2, last_batch="keep")) == [[0, 1], [2, 3], [4]]
    stream = PromptStream(iter(rows(6)), batch_size=2, num_epochs=None)
    take(stream, 1)
    again = PromptStream(iter(rows(6)), batch_size=2, num_epochs=None)
    again.restore(stream.state())
    assert ids(again) == [[2, 3], [4, 5]]


def test_partial_batches_are_dropped_and_counted_or_kept():
    for source in (rows(11), Stream(11)):
        stream = PromptStream(source, batch_size=4, shuffle=False, num_epochs=2)
        assert ids(stream) == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2
        assert stream.dropped_rows == 6
        kept = PromptStream(source, batch_size=4, shuffle=False, last_batch="keep")
        assert ids(kept)[-1] == [8, 9, 10] and kept.dropped_rows == 0
    stream = PromptStream(Batches([3, 3, 2]))
    assert ids(stream) == [[0, 1, 2], [3, 4, 5]] and stream.dropped_rows == 2
    assert ids(PromptStream(Batches([3, 3, 2]), last_batch="keep"))[-1] == [6, 7]


def test_ready_made_batches_tell_the_batch_size_and_keep_inner_dims():
    batch = {"prompts": np.array(["a", "b"]), "grid": np.arange(12).reshape(2, 2, 3), "answer": (1, 2)}
    stream = PromptStream([batch] * 3)
    assert (stream.kind, stream.batch_size, stream.batches_per_epoch) == ("batches", 2, 3)
    first = next(iter(stream))
    assert [row["prompts"] for row in first] == ["a", "b"]
    assert first[1]["grid"].tolist() == [[6, 7, 8], [9, 10, 11]]


def test_a_list_of_conversations_is_a_batch_and_one_conversation_is_a_row():
    chat = [{"role": "user", "content": "a"}]
    assert PromptStream([{"prompts": [chat, chat]}]).kind == "batches"
    assert PromptStream([{"prompts": chat}], batch_size=1).kind == "rows"


def test_row_numbers_of_prompts_are_places_in_the_data_set():
    encode = PromptEncoder(byte_tokenizer(), max_prompt_length=1, on_long_prompt="drop")
    data = [{"prompt": p, "answer": i} for i, p in enumerate(["a", "bb", "c", "d", "ee", "f"])]
    for source in (data, iter(data)):
        stream = PromptStream(source, batch_size=2, shuffle=False, encode=encode)
        assert [[p.row for p in batch] for batch in stream] == [[0, 2], [3, 5]]
    made = PromptStream(Batches([2, 2]), encode=PromptEncoder(byte_tokenizer()))
    assert [[p.row for p in batch] for batch in made] == [[0, 1], [2, 3]]


def test_streams_with_dropped_rows_resume_where_they_were():
    def fresh():
        encode = PromptEncoder(byte_tokenizer(), max_prompt_length=1, on_long_prompt="drop")
        return PromptStream(iter([{"prompt": p} for p in "a bb c d ee f g hh i".split()]), batch_size=2, encode=encode)

    whole = [[p.row for p in batch] for batch in fresh()]
    assert whole == [[0, 2], [3, 5], [6, 8]]
    stream, again = fresh(), fresh()
    take(stream, 1)
    again.restore(stream.state())
    assert [[p.row for p in batch] for batch in again] == whole[1:]


def test_rows_of_a_dropped_prompt_leave_no_ready_made_batch():
    encode = PromptEncoder(byte_tokenizer(), max_prompt_length=1, on_long_prompt="drop")
    with pytest.raises(DataError, match="can't be dropped from a ready-made batch"):
        list(PromptStream([{"prompts": ["a", "bb"]}], encode=encode))


def test_fewer_prompts_than_a_batch_never_train_nothing():
    with pytest.raises(DataError, match=r"3 prompts don't fill one batch of 4; set data.batch_size to 3 or less"):
        PromptStream(rows(3), batch_size=4)
    assert len(list(PromptStream(rows(3), batch_size=4, last_batch="keep"))) == 1
    with pytest.raises(DataError, match="epoch 0 gave no batch of 4"):
        list(PromptStream(Stream(3), batch_size=4))
    with pytest.raises(DataError, match="no rows"):
        PromptStream([], batch_size=1)


def test_a_state_of_rows_that_were_edited_or_moved_is_refused():
    def stream(texts):
        return PromptStream([{"prompt": t} for t in texts], batch_size=2, encode=PromptEncoder(byte_tokenizer()))

    state = stream(["ab", "c", "d"]).state()
    stream(["ab", "c", "d"]).restore(state)
    for other in (["ab", "d", "c"], ["a", "bc", "d"], ["ab", "c", "e"]):
        with pytest.raises(CheckpointError, match="the rows are not those of the checkpoint"):
            stream(other).restore(state)


def stream_of(*answers, prompt="p"):
    source = [{"prompt": prompt, "answer": a, "also": {"b": 1, "a": [None]}} for a in answers]
    return PromptStream(source, batch_size=1, encode=PromptEncoder(byte_tokenizer()))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (["a", "b"], ["a", "c"]),
        (["a", "b"], ["b", "a"]),
        ([1, 2], [1, 2.5]),
        ([["x", "yz"]], [["xy", "z"]]),
        ([np.int64(3)], [np.int64(4)]),
        ([np.array([1, 2])], [np.array([1, 3])]),
        ([object()], [None]),
    ],
)
def test_a_state_of_rows_whose_other_columns_were_edited_is_refused(before, after):
    state = stream_of(*before).state()
    assert all(type(value) is int for value in state.values())
    stream_of(*before).restore(state)
    with pytest.raises(CheckpointError, match=r"same prompts, but another column \(an answer, say\) was changed"):
        stream_of(*after).restore(state)
    with pytest.raises(CheckpointError, match="same number of rows, but a prompt was changed or reordered"):
        stream_of(*before, prompt="q").restore(state)


def test_columns_that_json_does_not_know_are_no_reason_to_refuse_a_resume():
    itself = []
    itself.append(itself)
    odd = [{1: "a", "b": "c"}, itself, {(1, 2): 3}, object(), {1, 2}, np.longdouble(1), np.array([object()]), "\ud800"]
    again = [{"x": 1, 2: 3}, itself, {(4, 5): 6}, object(), {3}, np.longdouble(2), np.array([object()]), "\ud800"]
    stream_of(*again).restore(stream_of(*odd).state())


def test_a_state_of_other_data_or_settings_is_refused():
    state = PromptStream(rows(8), batch_size=2).state()
    for other, word in (
        (PromptStream(rows(9), batch_size=2), "rows 8, these have 9"),
        (PromptStream(rows(8), batch_size=4), "batch_size"),
        (PromptStream(rows(8), batch_size=2, seed=1), "seed"),
        (PromptStream(rows(8), batch_size=2, shuffle=False), "shuffle"),
        (PromptStream(Stream(8), batch_size=2), "rows 8, these have -1"),
    ):
        with pytest.raises(CheckpointError, match=word):
            other.restore(state)


def test_a_state_that_another_version_wrote_is_refused_by_what_it_lacks():
    state = PromptStream(rows(8), batch_size=2).state()
    del state["digest"]
    with pytest.raises(CheckpointError, match="has no digest: another version of whet wrote it"):
        PromptStream(rows(8), batch_size=2).restore(state)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"answer": 1}, {"answer": 2}),
        ({"prompt": b"a"}, {"prompt": b"b"}),
        ({"answer": np.array([1.0])}, {"answer": np.array([2.0])}),
        ({"answer": [np.float16(1), "x"]}, {"answer": [np.float16(2), "x"]}),
        ({"answer": 1}, {"other": 1}),
    ],
)
def test_a_row_that_was_read_and_changed_is_seen_and_one_to_come_is_not(before, after):
    def stream(*changed):
        return PromptStream(iter([{"prompt": "a", **row} for row in changed]), batch_size=2)

    saved = stream(before, before, before, before)
    take(saved, 1)
    assert all(type(value) is int for value in saved.state().values())
    for same in ([before] * 4, [before, before, after, after]):
        again = stream(*same)
        again.restore(saved.state())
        assert len(take(again, 1)[0]) == 2 and again.state()["used"] == 4
    for other in ([after, before], [before, after]):
        with pytest.raises(CheckpointError, match="first 2 rows are not those that the run had read before"):
            stream(*other, before, before).restore(saved.state())
    with pytest.raises(CheckpointError, match="the data end after 1 rows, and the checkpoint had read 2"):
        stream(before).restore(saved.state())


def test_what_was_read_counts_from_the_beginning_of_each_epoch():
    stream = PromptStream(Stream(5), batch_size=2, num_epochs=3)
    found = [stream.state()["read_digest"] for _ in stream]
    assert found[:2] == found[2:4] == found[4:] and len(set(found)) == 2


def test_ready_made_batches_keep_their_number():
    batches = [{"prompts": ["a", "b"]}] * 3
    stream = PromptStream(batches)
    take(stream, 1)
    PromptStream(list(batches)).restore(stream.state())
    with pytest.raises(CheckpointError, match="have length 3, these have 4"):
        PromptStream([*batches, batches[0]]).restore(stream.state())
    other = [{"prompts": ["a", "c"]}, *batches[1:]]
    with pytest.raises(CheckpointError, match="the first 1 batches are not those"):
        PromptStream(other).restore(stream.state())


def test_skipping_that_takes_long_says_how_far_it_is(monkeypatch, caplog):
    monkeypatch.setattr(prompt_stream, "LOG_INTERVAL_S", -1.0)
    stream = PromptStream(Stream(5), batch_size=2)
    take(stream, 1)
    with caplog.at_level("INFO", logger="whet"):
        PromptStream(Stream(5), batch_size=2).restore(stream.state())
    assert [r.getMessage() for r in caplog.records] == [
        f"read {n} of the 2 rows that the checkpoint had used" for n in (1, 2)
    ]


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize(
    "crafted",
    [
        {"epoch": -1},
        {"epoch": 2**63},
        {"epoch": True},
        {"batch": -1},
        {"batch": 3},
        {"used": -4},
        {"used": 2**80},
        {"used": 4.0},
        {"dropped_rows": -1},
        {"dropped_rows": None},
    ],
)
def test_a_place_that_no_run_comes_to_is_refused(kind, crafted):
    def fresh():
        return PromptStream(SOURCES[kind](), batch_size=None if kind == "batches" else 4)

    stream = fresh()
    take(stream, 1)
    if kind == "stream" and crafted == {"batch": 3}:
        crafted = {"batch": 5}  # with prompts dropped, 3 batches of 4 rows that were read can't be told from 1
    with pytest.raises(CheckpointError, match="data position is invalid: epoch "):
        fresh().restore({**stream.state(), **crafted})


@pytest.mark.parametrize(
    ("source", "options", "error", "says"),
    [
        (Stream(4), {"batch_size": 2, "shuffle": True}, ConfigError, "the data are a stream; set shuffle=False"),
        (Batches([2]), {"shuffle": True}, ConfigError, "ready-made batches; set shuffle=False"),
        (rows(4), {}, ConfigError, "batch_size is needed"),
        (rows(4), {"batch_size": 0}, ConfigError, "batch_size 0"),
        (rows(4), {"batch_size": 2, "seed": -1}, ConfigError, "seed -1"),
        (rows(4), {"batch_size": 2, "last_batch": "keeep"}, ConfigError, "did you mean keep"),
        (iter(rows(4)), {"batch_size": 2, "num_epochs": 2}, ConfigError, "read once"),
        ({"prompts": ["a"]}, {"batch_size": 1}, DataError, "type dict; give a list of rows"),
    ],
)
def test_what_cannot_be_carried_out_is_refused_at_once(source, options, error, says):
    with pytest.raises(error, match=says):
        PromptStream(source, **options)


def test_batches_that_do_not_fit_are_named():
    with pytest.raises(DataError, match="batch 1 has 3 prompts, and the first had 2"):
        list(PromptStream(Batches([2, 3])))
    for column in ("abc", ["x"], 7):
        with pytest.raises(DataError, match="column 'answer' of a batch of 2"):
            batch_to_rows({"prompts": ["a", "b"], "answer": column})


def test_the_log_line_tells_order_size_and_what_a_resume_does():
    assert PromptStream(rows(11), batch_size=4, seed=3).describe() == (
        "11 prompts shuffled with seed 3, 2 batches of 4 per epoch; 3 rows per epoch dropped"
    )
    assert "a resume reads and skips" in PromptStream(Stream(4), batch_size=2).describe()
    assert "ready-made batches of 2" in PromptStream(Batches([2])).describe()


def test_held_out_rows_are_a_draw_from_the_seed_and_in_neither_part_twice():
    train, held = hold_out(rows(20), 0.25, seed=3)
    assert (len(train), len(held)) == (15, 5)
    assert sorted(r["answer"] for r in train + held) == list(range(20))
    assert ids([train]) == [sorted(ids([train])[0])] and held == hold_out(rows(20), 0.25, seed=3)[1]
    assert held != hold_out(rows(20), 0.25, seed=4)[1]
    assert len(hold_out(rows(20), 0.01, seed=0)[1]) == 1
    with pytest.raises(DataError, match="holding 1 of 1 rows out leaves no training rows"):
        hold_out(rows(1), 0.5, seed=0)
    with pytest.raises(ConfigError, match=r"data.eval_fraction=1\.5 must"):
        hold_out(rows(4), 1.5, seed=0)
    with pytest.raises(ConfigError, match="hold out rows of a stream"):
        hold_out(Stream(4), 0.5, seed=0)


def test_held_out_rows_are_not_those_that_an_epoch_would_have_begun_with():
    for seed in range(3):
        held = {r["answer"] for r in hold_out(rows(20), 0.5, seed=seed)[1]}
        assert all(held != set(epoch_order(20, seed, epoch)[:10].tolist()) for epoch in range(3))


def test_encoding_that_takes_long_says_how_far_it_is(monkeypatch, caplog):
    monkeypatch.setattr(prompt_stream, "LOG_INTERVAL_S", -1.0)
    with caplog.at_level("INFO", logger="whet"):
        PromptStream(rows(4), batch_size=2, encode=lambda row, place: None if place == 1 else row)
    assert [r.getMessage() for r in caplog.records] == [f"encoded {n} of 4 prompts" for n in (1, 2, 3, 4)]


def lines(folder, *names):
    """Files of ten rows each."""
    for number, name in enumerate(names):
        answers = range(10 * number, 10 * number + 10)
        (folder / name).write_text("".join(json.dumps({"prompt": str(n), "answer": n}) + "\n" for n in answers))
    return [str(folder / name) for name in names]


@pytest.mark.parametrize("buffer", [0, 4, 7])
def test_a_stream_of_files_goes_on_at_its_place_without_reading_what_it_had_used(tmp_path, buffer):
    paths = lines(tmp_path, "a.jsonl", "b.jsonl")
    make = lambda: PromptStream(
        stream_files([*map(Path, paths)]),
        batch_size=3,
        num_epochs=2,
        shuffle_buffer=buffer,
        shuffle=None if buffer else False,
    )
    whole = ids(make())
    for done in (0, 1, 5, 6, 8):
        stream = make()
        assert ids(take(stream, done)) == whole[:done]
        again = make()
        again.restore(stream.state())
        assert again.state() == stream.state()
        assert ids(again) == whole[done:]
    stream = make()
    take(stream, 5)
    again = make()
    again.restore(stream.state())
    (tmp_path / "a.jsonl").write_text('{"prompt": "0", "answer": 0}\nno row that a reader could take\n')
    assert ids(take(again, 1)) == whole[5:6]  # used rows are not looked at


@pytest.mark.parametrize("buffer", [0, 4, 7])
def test_a_stream_that_has_ended_goes_on_with_another_epoch(tmp_path, buffer):
    paths = [*map(Path, lines(tmp_path, "a.jsonl", "b.jsonl"))]
    make = lambda epochs: PromptStream(
        stream_files(paths), batch_size=3, num_epochs=epochs, shuffle_buffer=buffer, shuffle=None if buffer else False
    )
    ended, longer = make(1), make(2)
    first = ids(ended)
    longer.restore(ended.state())
    assert first + ids(longer) == ids(make(2))


@pytest.mark.parametrize("suffix", ["csv", "parquet", "arrow", "jsonl.gz"])
def test_streams_of_other_files_resume_too(tmp_path, suffix):
    table, path = pa.Table.from_pylist(rows(25)), tmp_path / f"rows.{suffix}"
    if suffix == "csv":
        csv.write_csv(table, path)
    elif suffix == "parquet":
        parquet.write_table(table, path, row_group_size=4)
    elif suffix == "arrow":
        with pa.ipc.new_file(str(path), table.schema) as out:
            out.write_table(table, max_chunksize=4)
    else:
        with pa.output_stream(str(path), compression="gzip") as out:
            out.write("".join(json.dumps(row) + "\n" for row in rows(25)).encode())
    make = lambda: PromptStream(load_rows(path, streaming=True), batch_size=3, shuffle=False)
    whole = ids(make())
    for done in (1, 4, 8):
        stream, again = make(), make()
        take(stream, done)
        again.restore(stream.state())
        assert ids(again) == whole[done:]


def test_a_stream_of_datasets_goes_on_by_its_own_state():
    shards = lambda: datasets.Dataset.from_list(rows(20)).to_iterable_dataset(num_shards=3)
    make = lambda: PromptStream(shards(), batch_size=3, num_epochs=2, shuffle=False)
    whole = ids(make())
    for done in (2, 6, 9):
        stream, again = make(), make()
        take(stream, done)
        again.restore(stream.state())
        assert ids(again) == whole[done:]


def test_a_shuffled_stream_is_shuffled_within_its_buffer_anew_in_each_epoch():
    stream = PromptStream(Stream(12), batch_size=4, num_epochs=2, shuffle_buffer=4)
    seen = ids(stream)
    assert [sorted(batch) for batch in seen] == 2 * [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert seen[:3] != [sorted(batch) for batch in seen[:3]] and seen[:3] != seen[3:]


def test_a_shuffle_buffer_of_rows_with_a_length_is_refused():
    with pytest.raises(ConfigError, match="shuffle_buffer=4 is for a stream"):
        PromptStream(rows(8), batch_size=2, shuffle_buffer=4)


def test_a_stream_whose_first_row_changed_does_not_go_on(tmp_path):
    paths = lines(tmp_path, "a.jsonl")
    stream = PromptStream(load_rows(paths[0], streaming=True), batch_size=3, shuffle=False)
    take(stream, 2)
    (tmp_path / "a.jsonl").write_text((tmp_path / "a.jsonl").read_text().replace('"0"', '"o"', 1))
    with pytest.raises(CheckpointError, match="the first row is not that of the checkpoint's data"):
        PromptStream(load_rows(paths[0], streaming=True), batch_size=3, shuffle=False).restore(stream.state())
