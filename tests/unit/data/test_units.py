"""Units stay whole in every plan, and the state at a sequence's end is found in every layout."""

import numpy as np
import pytest
import torch
from helpers import examples, forest, places_seen, random_batch, seen
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.errors import DataError
from whet.packing.bin_packing import PassCost
from whet.packing.micro_batch_planner import plan_micro_batches

DEAR = PassCost(token=20, pair=3, target=7)


def with_units(batch, seed, most):
    """Sequences drawn at random into units of `most` at most, whether or not they begin alike."""
    rng = np.random.default_rng(seed)
    order, units, k = rng.permutation(batch.num_sequences), np.zeros(batch.num_sequences, dtype=np.int64), 0
    while len(order):
        count = int(rng.integers(1, most + 1))
        units[order[:count]], order, k = k, order[count:], k + 1
    return batch.replace(unit_of=torch.from_numpy(units))


def check(b, micros, *, at_end=False):
    """Every target once, after its own sequence alone; each unit in one micro-batch; the last states in place."""
    assert torch.cat([m.token_index for m in micros]).sort().values.tolist() == list(range(b.num_tokens))
    units = torch.cat([m.units for m in micros]).tolist()
    assert sorted(units) == sorted(set(b.unit_of.tolist()))  # none in two micro-batches
    for m in micros:
        assert torch.equal(m.units[m.unit_of], b.unit_of[m.sequences])
        assert m.unit_of.unique(sorted=False).tolist() and m.unit_of[0] == 0
        new = [u for k, u in enumerate(m.unit_of.tolist()) if u not in m.unit_of[:k].tolist()]
        assert new == list(range(len(m.units)))  # in the order in which they come
        whole = [b.prefix(i).tolist() + b.tokens[int(b.starts[i]) : int(b.ends[i])].tolist() for i in m.sequences]
        prefixes = b.prefix_lengths[b.prefix_of[m.sequences]].tolist()
        for k, (s, position) in enumerate(zip(m.sequence.tolist(), m.position.tolist())):
            assert seen(m, k) == whole[s][: prefixes[s] + position] and m.targets[k] == whole[s][prefixes[s] + position]
        if not at_end:
            assert m.last_index is None
            continue
        flat = m.input_ids.flatten()
        assert [flat[places_seen(m, place)].tolist() for place in m.last_index.tolist()] == whole


shapes = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(1, 12), min_size=1, max_size=5)), min_size=1, max_size=4
)


@settings(max_examples=examples(12), deadline=None)
@given(
    st.one_of(
        st.builds(lambda s: random_batch(*s), shapes), st.builds(forest, st.integers(0, 10**6), st.integers(1, 9))
    ),
    st.integers(0, 10**6),
    st.integers(1, 4),
    st.integers(0, 80),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_units_stay_whole_within_the_budget(b, seed, most, room, packable, shared, at_end, saturated):
    b = with_units(b, seed, most)
    longest = int((b.prefix_lengths[b.prefix_of] + b.lengths).max())
    budget = longest * most + room
    micros = plan_micro_batches(
        b,
        max_tokens=budget,
        max_sequences=most + 1,
        packable=packable,
        shared_prefix=shared,
        at_end=at_end,
        cost=DEAR,
        saturating_tokens=budget // 2 if saturated else None,
    )
    check(b, micros, at_end=at_end)
    assert all(m.num_tokens <= budget and len(m.sequences) <= most + 1 for m in micros)


@settings(max_examples=examples(6), deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(0, 100), st.booleans(), st.booleans())
def test_the_last_states_are_found_in_trees_and_rows(seed, n, room, packable, shared):
    b = forest(seed, n)
    longest = int((b.prefix_lengths[b.prefix_of] + b.lengths).max())
    options = {"max_tokens": longest + room, "packable": packable, "shared_prefix": shared}
    check(b, plan_micro_batches(b, at_end=True, **options), at_end=True)


def test_a_pair_under_one_prompt_shares_it_and_pairs_share_with_pairs():
    b = random_batch((10, [5, 6, 3, 4]), (8, [2, 7]))
    b = b.replace(unit_of=torch.tensor([0, 1, 1, 0, 2, 2]))
    (micro,) = plan_micro_batches(b, max_tokens=1000)
    check(b, [micro])
    assert micro.num_tokens == 10 + 4 + 5 + 2 + 3 + 8 + 1 + 6  # each prompt once
    micros = plan_micro_batches(b, max_tokens=20)  # the two pairs of the first prompt part, and each repeats it
    check(b, micros)
    assert [m.num_tokens for m in micros] == [10 + 4 + 3, 10 + 5 + 2, 8 + 1 + 6]


def test_the_chosen_and_the_rejected_of_different_prompts_stay_together():
    b = random_batch((4, [5]), (6, [5]), (4, [5]), (6, [5])).replace(unit_of=torch.tensor([0, 1, 1, 0]))
    micros = plan_micro_batches(b, max_tokens=18)
    check(b, micros)
    assert [sorted(m.sequences.tolist()) for m in micros] == [[0, 3], [1, 2]]


@pytest.mark.parametrize("packable", [True, False])
def test_a_unit_over_the_limits_is_an_error_that_says_what_to_set(packable):
    b = random_batch((4, [5, 5]), (4, [2])).replace(unit_of=torch.tensor([0, 0, 1]))
    tokens = 4 + 4 + 4 if packable else 2 * 8
    check(b, plan_micro_batches(b, max_tokens=tokens, packable=packable))
    with pytest.raises(
        DataError, match=rf"unit 0 has 2 sequences \(0, 1\) that take {tokens} tokens.*limit of {tokens - 1}"
    ):
        plan_micro_batches(b, max_tokens=tokens - 1, packable=packable)
    with pytest.raises(DataError, match="and 1 sequences; set"):
        plan_micro_batches(b, max_tokens=100, max_sequences=1, packable=packable)


def test_units_of_one_sequence_each_change_no_plan():
    b = forest(5, 9)
    other = b.replace(unit_of=torch.arange(b.num_sequences).flip(0))  # named otherwise
    for options in ({"max_tokens": 200}, {"max_tokens": 200, "packable": False}):
        plans = [[m.sequences.tolist() for m in plan_micro_batches(x, **options)] for x in (b, other)]
        assert plans[0] == plans[1]


def test_units_travel_through_select_and_cat():
    b = random_batch((3, [2, 5, 4]), (1, [1, 1])).replace(unit_of=torch.tensor([0, 2, 0, 1, 1]))
    b = b.replace(unit_weights=torch.tensor([0.5, 0.25, 0.125]))
    part = b.select(torch.tensor([1, 0, 2]))
    assert part.unit_of.tolist() == [1, 0, 0] and part.unit_weights.tolist() == [0.5, 0.125]
    assert part.unit.tolist() == [1] * 5 + [0] * 6 and part.num_units == 2
    whole = type(b).cat([part, b])
    assert whole.unit_of.tolist() == [1, 0, 0, 2, 4, 2, 3, 3]
    assert whole.unit_weights.tolist() == [0.5, 0.125, 0.5, 0.25, 0.125]
    with pytest.raises(DataError, match="unit_weights is set in some"):
        type(b).cat([part, b.replace(unit_weights=None)])
