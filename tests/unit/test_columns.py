"""Open columns: a name that nothing in whet knows goes from a batch to the loss."""

import copy
import dataclasses
import pickle

import pytest
import torch
from helpers import random_batch, tiny_model

from whet.config import OptimConfig
from whet.errors import DataError
from whet.models.load import load_model
from whet.train.worker import ModelWorker
from whet.types import LossInputs, TokenBatch

SHAPES = ((5, [3, 9, 1, 14]), (12, [8, 4]), (2, [7]), (1, [6, 6, 6]))


def numbered(batch):
    """Every token and every sequence with its own place as a column, the tokens with a row of two numbers besides."""
    places = torch.arange(batch.num_tokens)
    batch = batch.with_token_columns(place=places, pair=torch.stack([places, -places], 1).double())
    return batch.with_sequence_columns(which=torch.arange(batch.num_sequences))


def cut(batch, sequences):
    """The naive select: the rows of a column per token, sequence by sequence."""
    spans = [(int(batch.starts[i]), int(batch.ends[i])) for i in sequences]
    return lambda column: torch.cat([column[a:b] for a, b in spans])


def test_select_and_cat_carry_columns_of_any_name():
    batch = numbered(random_batch(*SHAPES))
    chosen = [7, 0, 4, 2]
    part, naive = batch.select(torch.tensor(chosen)), cut(batch, chosen)
    assert torch.equal(part.place, naive(batch.place)) and torch.equal(part.pair, naive(batch.pair))
    assert part.which.tolist() == chosen
    again = TokenBatch.cat([part, batch.select(torch.tensor([1]))])
    assert torch.equal(again.place, torch.cat([part.place, cut(batch, [1])(batch.place)]))
    assert again.which.tolist() == [*chosen, 1]
    for other in (batch.replace(place=None), batch.replace(which=None)):
        with pytest.raises(DataError, match="is set in some"):
            TokenBatch.cat([batch, other])


@pytest.mark.parametrize("packable", [True, False])
def test_a_loss_reads_columns_of_any_name_where_its_tokens_and_sequences_are(packable):
    batch = numbered(random_batch(*SHAPES, masked=True))
    batch = batch.replace(weights=batch.mask.double(), advantages=torch.full((batch.num_tokens,), torch.nan))
    batch = batch.replace(advantages=torch.where(batch.mask, batch.place.double(), batch.advantages))
    loaded = load_model(tiny_model())
    if not packable:
        loaded.module.set_attn_implementation("sdpa")
        loaded = dataclasses.replace(loaded, packable=False)
    seen = []

    def loss(x):
        place, which = x.need("place"), x.need("which")
        assert torch.equal(x.tokens, batch.tokens[place]) and torch.equal(x.mask, batch.mask[place])
        assert torch.equal(which[x.sequence], batch.sequence[place]) and x.num_sequences == len(which)
        assert torch.equal(x.pair, torch.where(x.mask[:, None], batch.pair[place], 0.0))  # 0 where masked out
        assert torch.equal(x.advantages, torch.where(x.mask, place.double(), 0.0))  # NaN there goes nowhere
        assert x.column("ref_logprobs") is None and x.ref_logprobs is None
        seen.extend(place.tolist())
        return -x.logprobs, {}

    worker = ModelWorker(loaded, optim=OptimConfig(lr=1e-2), max_tokens=60, max_sequences=3)
    worker.forward_backward(batch, loss)
    assert sorted(seen) == list(range(batch.num_tokens))


def test_a_column_that_does_not_fit_is_refused_at_once():
    batch = random_batch((3, [2, 5]))
    for make, words in (
        (lambda: batch.replace(weights=torch.ones(6)), r"weights has shape \[6\]; its first dim.*tokens, 7"),
        (lambda: batch.with_token_columns(mine=torch.ones(2)), r"mine has shape \[2\].*tokens, 7"),
        (lambda: batch.with_sequence_columns(mine=torch.ones(7)), r"mine has shape \[7\].*sequences, 2"),
        (lambda: batch.with_sequence_columns(mine=torch.tensor(1.0)), r"mine has shape \[\]"),
        (lambda: batch.with_token_columns(mine=[0.0] * 7), "mine is a list; give a tensor"),
        (lambda: batch.with_token_columns(mine=torch.ones(7, device="meta")), r"mine is on meta.*mine\.cpu\(\)"),
        (lambda: batch.replace(unit_of=torch.zeros(3, dtype=torch.long)), "unit_of has shape"),
        (lambda: batch.replace(unit_of=torch.tensor([0, -1])), "unit_of has -1"),
        (lambda: batch.replace(unit_weights=torch.ones(7)), "unit_weights has shape.*units, 2"),
        (lambda: batch.replace(tokens=None), "the batch has no tokens"),
    ):
        with pytest.raises(DataError, match=words):
            make()


def test_a_name_that_means_something_else_is_refused():
    batch = random_batch((3, [2, 5])).with_token_columns(mine=torch.ones(7))
    for name in ("logprobs", "entropy", "scores", "lengths", "select", "prefixes", "token_columns", "need", "a b"):
        with pytest.raises(DataError, match="can't be named"):
            batch.with_token_columns(**{name: torch.ones(7)})
    for name in ("mine", "advantages", "unit"):
        with pytest.raises(DataError, match="can't be named"):
            batch.with_sequence_columns(**{name: torch.ones(2)})
    assert batch.with_token_columns(advantages=torch.zeros(7)).advantages.tolist() == [0.0] * 7


def test_an_unknown_name_is_an_error_with_the_nearest_one():
    batch = random_batch((3, [2, 5])).with_token_columns(teacher_logprobs=torch.ones(7))
    with pytest.raises(AttributeError, match="'teacher_logprob'; did you mean teacher_logprobs"):
        batch.teacher_logprob
    with pytest.raises(DataError, match=r"unknown column 'advantage'; did you mean advantages.*with_token_columns"):
        batch.replace(advantage=torch.ones(7))
    with pytest.raises(DataError, match="unknown column 'weight'; did you mean weights"):
        batch.column("weight")
    given = {"sequence": torch.tensor([0]), "mask": torch.tensor([True]), "logprobs": torch.zeros(1)}
    with pytest.raises(DataError, match="unknown column 'advantage'; did you mean advantages"):
        LossInputs(**given, advantage=torch.ones(1))
    x = LossInputs(**given, token_columns={"teacher_logprobs": torch.ones(1)})
    with pytest.raises(DataError, match="teacher, which is not a column of this batch"):
        x.need("teacher")
    with pytest.raises(DataError, match="needs scores, which this batch does not have"):
        x.need("scores")
    assert x.need("teacher_logprobs").tolist() == x.teacher_logprobs.tolist() == [1.0]


def test_batches_with_columns_are_copied_and_pickled():
    batch = numbered(random_batch((3, [2, 5])))
    for again in (copy.deepcopy(batch), pickle.loads(pickle.dumps(batch))):
        assert torch.equal(again.place, batch.place) and torch.equal(again.which, batch.which)
    assert not hasattr(batch, "nothing")
    own = {"place": batch.place}
    x = LossInputs(sequence=batch.sequence, mask=batch.mask, logprobs=torch.zeros(7), token_columns=own)
    other = dataclasses.replace(x, logprobs=torch.ones(7), advantages=torch.ones(7))
    assert torch.equal(other.place, batch.place) and other.advantages.sum() == other.logprobs.sum() == 7
    assert (x.num_sequences, x.num_units, x.unit_of.tolist()) == (2, 2, [0, 1])
