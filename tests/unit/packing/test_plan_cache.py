import pytest
import torch
from helpers import random_batch

from whet.packing import plan_cache as module
from whet.packing.micro_batch_planner import plan_micro_batches
from whet.packing.plan_cache import PlanCache

SHAPES = ((5, [3, 9, 1, 14]), (12, [8, 4]), (2, [7]))
LIMITS = {"max_tokens": 40, "max_sequences": 3}
INTEGERS = ("input_ids", "hidden_index", "targets", "token_index", "sequence", "position", "sequences", "units")


@pytest.fixture
def planned(monkeypatch):
    """The limits of each plan that was made."""
    made = []
    noted = lambda batch, **limits: (made.append(limits), plan_micro_batches(batch, **limits))[1]
    monkeypatch.setattr(module, "plan_micro_batches", noted)
    return made


def test_equal_sequences_under_equal_limits_are_planned_once_and_come_with_their_own_batch(planned):
    batch, cache = random_batch(*SHAPES), PlanCache()
    scored = batch.replace(old_logprobs=torch.zeros(batch.num_tokens), versions=batch.versions + 1)
    copied = batch.select(torch.arange(batch.num_sequences).flip(0)).select(torch.arange(batch.num_sequences).flip(0))
    assert copied.tokens is not batch.tokens
    first, *others = [(b, cache.get(b, **LIMITS)) for b in (batch, scored, copied)]
    assert planned == [LIMITS] and len(first[1]) > 1
    for b, micros in (first, *others):
        want = plan_micro_batches(b, **LIMITS)
        assert all(m.batch is b for m in micros) and len(micros) == len(want)
        for m, w in zip(micros, want):
            assert all(torch.equal(getattr(m, name), getattr(w, name)) for name in INTEGERS)
            assert (m.layout.lengths, m.layout.parents) == (w.layout.lengths, w.layout.parents)
    assert all(m.layout is not n.layout for m, n in zip(first[1], others[0][1]))  # what it holds is a pass's own


def test_another_token_unit_or_limit_is_another_plan(planned):
    batch, cache = random_batch(*SHAPES), PlanCache()
    tokens = batch.tokens.clone()
    run = lambda b, **limits: cache.get(b, **{**LIMITS, **limits})
    run(batch.replace(tokens=tokens))
    tokens[3] += 1  # in place: what was planned is not what is there
    found = run(batch.replace(tokens=tokens))
    assert all(torch.equal(m.targets, tokens[m.token_index]) for m in found) and len(planned) == 2
    run(batch.replace(tokens=tokens, unit_of=torch.tensor([0, 0, 1, 2, 3, 4, 5])))
    run(batch, at_end=True)
    run(batch)
    assert len(planned) == 5
    run(batch, at_end=True)
    assert len(planned) == 5  # the limits of one batch are kept side by side
    cache.clear()
    run(batch)
    assert len(planned) == 6


def test_a_batch_without_sequences_has_no_micro_batches():
    batch = random_batch(*SHAPES)
    assert PlanCache().get(batch.select(torch.arange(0)), **LIMITS) == []


def test_the_same_completions_after_other_prompts_are_another_plan():
    batch, cache = random_batch((5, [4, 4]), (5, [4, 4])), PlanCache()
    swapped = batch.replace(prefix_of=batch.prefix_of[torch.tensor([2, 1, 0, 3])])
    assert not torch.equal(swapped.prefix_of, batch.prefix_of)
    for b in (batch, swapped):
        found, want = cache.get(b, **LIMITS), plan_micro_batches(b, **LIMITS)
        assert [m.input_ids.tolist() for m in found] == [m.input_ids.tolist() for m in want]
