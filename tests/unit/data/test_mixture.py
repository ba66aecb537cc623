import numpy as np
import pytest

from whet.config import DataConfig
from whet.data.mixture import MixedRows, MixedStream
from whet.data.prompt_stream import PromptStream, hold_out
from whet.errors import CheckpointError, ConfigError, DataError

A, B = [f"a{n}" for n in range(10)], ["b0", "b1", "b2"]


def test_an_epoch_of_a_mixture_has_the_shares_of_its_weights():
    rows = MixedRows([A, B], [3.0, 1.0])
    for epoch in range(4):
        drawn = [rows[place] for place in rows.order(seed=5, epoch=epoch, shuffle=True)]
        assert len(drawn) == 13 and sum(row in A for row in drawn) == 10
    other = rows.order(seed=6, epoch=0, shuffle=True).tolist()
    assert rows.order(seed=5, epoch=0, shuffle=True).tolist() != other


def test_over_epochs_a_mixture_uses_the_rows_of_each_data_set_equally_often():
    rows = MixedRows([A, B], [1.0, 2.0])
    drawn = np.concatenate([rows.order(seed=0, epoch=epoch, shuffle=True) for epoch in range(30)])
    uses = np.bincount(drawn, minlength=13)
    assert uses.sum() == 390
    assert np.ptp(uses[:10]) <= 1 and np.ptp(uses[10:]) <= 1


def test_an_ordered_mixture_is_spread_evenly():
    rows = MixedRows([A, B], [2.0, 1.0])
    drawn = [rows[place] for place in rows.order(seed=0, epoch=0, shuffle=False)]
    assert drawn[:6] == ["a0", "b0", "a1", "a2", "b1", "a3"]
    assert next(iter(MixedStream([A, B], [1.0, 3.0]))) == "b0"  # after one row the larger share is nearer to its own


def test_a_mixture_without_weights_is_every_row_once():
    rows = MixedRows([A, B])
    assert list(rows) == [*A, *B] == rows[:] and rows[-1] == "b2"
    stream = PromptStream([{"prompt": row} for row in rows], batch_size=13)
    mixed = PromptStream(MixedRows([[{"prompt": r} for r in A], [{"prompt": r} for r in B]]), batch_size=13)
    assert list(stream) == list(mixed)


def rows_of(names):
    return [{"prompt": name} for name in names]


def test_rows_that_are_dropped_when_encoded_leave_the_shares_as_they_are():
    mixed = MixedRows([rows_of(A), rows_of(B)], [1.0, 1.0])
    encode = lambda row, place: None if row["prompt"] in A[:6] else (row["prompt"], place)
    (batch,) = PromptStream(mixed, batch_size=6, encode=encode)
    assert sum(name.startswith("b") for name, _ in batch) == 3
    assert {place for name, place in batch if name == "b0"} == {10}


def test_a_mixture_resumes_in_the_middle_of_an_epoch_and_knows_its_weights_again():
    make = lambda weights: PromptStream(
        MixedRows([rows_of(A), rows_of(B)], weights), batch_size=2, num_epochs=3, seed=1
    )
    whole, again = iter(stream := make([1.0, 1.0])), make([1.0, 1.0])
    for _ in range(8):
        next(whole)
    again.restore(stream.state())
    assert list(again) == list(whole)
    with pytest.raises(CheckpointError, match="the mixture is not that of the checkpoint"):
        make([1.0, 2.0]).restore(stream.state())


def test_a_held_out_part_is_taken_from_every_data_set():
    train, held = hold_out(MixedRows([A, B], [1.0, 1.0]), 0.3, seed=0)
    assert [len(part) for part in train.parts] == [7, 2] and train.weights == (1.0, 1.0)
    assert sorted([*held, *train]) == [*A, *B]


def test_streams_are_mixed_to_within_a_row_until_one_ends():
    mixed = MixedStream([A, B], [3.0, 1.0])
    drawn = list(mixed)
    assert drawn == list(mixed)
    counts = np.cumsum([row in A for row in drawn])
    assert np.all(np.abs(counts - 0.75 * np.arange(1, len(drawn) + 1)) <= 1)
    assert not hasattr(mixed, "state_dict")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ([], "expected the name of a data set, or a list"),
        ({"0": {"limit": 4}}, "an item of the list can't be set alone; give the whole list"),
        ([{"weight": 1}], "each data set of a list is a name, or has a path"),
        ([{"path": "a", "wieght": 1}], r"unknown key 'wieght' \(its keys are .*\); did you mean weight"),
        ([{"path": "a", "weight": 1}, "b"], "data set 'b' has weight None; give each of the list a weight above 0"),
        ([{"path": "a", "weight": 0}], "data set 'a' has weight 0"),
    ],
)
def test_a_list_that_says_too_little_is_refused(path, message):
    with pytest.raises(ConfigError, match=message):
        DataConfig(path=path)


def test_an_empty_data_set_of_a_list_and_weights_of_an_evaluation_are_refused():
    with pytest.raises(DataError, match="data set 2 of 2 has no rows"):
        MixedRows([A, []])
    with pytest.raises(ConfigError, match="eval_path takes no weights"):
        DataConfig(path="a", eval_path=[{"path": "b", "weight": 1}])
