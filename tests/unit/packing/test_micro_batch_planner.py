import numpy as np
import pytest
import torch
from helpers import examples, seen
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.errors import ConfigError, DataError
from whet.packing.bin_packing import PassCost
from whet.packing.micro_batch_planner import plan_micro_batches
from whet.types import Completion, Group, Prompt, TokenBatch

DEAR = PassCost(token=20, pair=3, target=7)


def batch(*shapes):
    """Groups of (prompt length, completion lengths); every token has an id of its own."""
    ids = iter(range(100_000))
    take = lambda n: np.array([next(ids) for _ in range(n)], dtype=np.int64)
    groups = []
    for p, lengths in shapes:
        made = [
            Completion(tokens=take(n), logprobs=np.zeros(n), versions=np.zeros(n), finish_reason="stop", generation=g)
            for g, n in enumerate(lengths)
        ]
        groups.append(Group(prompt=Prompt(tokens=take(p), source=""), completions=tuple(made)))
    return TokenBatch.from_groups(groups)


def test_the_example_of_the_docs():
    completions = tuple(
        Completion(tokens=np.array(t), logprobs=np.zeros(2), versions=np.zeros(2), finish_reason="stop", generation=g)
        for g, t in enumerate([[7, 2], [8, 2]])
    )
    group = Group(prompt=Prompt(tokens=np.array([5, 6]), source=""), completions=completions)
    (micro,) = plan_micro_batches(TokenBatch.from_groups([group]), max_tokens=100)
    assert micro.input_ids.tolist() == [[5, 6, 7, 8]]
    assert (micro.layout.lengths, micro.layout.parents) == ((2, 1, 1), (-1, 0, 0))
    assert micro.hidden_index.tolist() == [1, 2, 1, 3] and micro.targets.tolist() == [7, 2, 8, 2]
    assert micro.token_index.tolist() == [0, 1, 2, 3] and micro.position.tolist() == [0, 1, 0, 1]
    assert micro.sequence.tolist() == [0, 0, 1, 1] and micro.sequences.tolist() == [0, 1]
    assert [seen(micro, k) for k in range(4)] == [[5, 6], [5, 6, 7], [5, 6], [5, 6, 8]]
    assert (micro.units.tolist(), micro.unit_of.tolist(), micro.last_index) == ([0, 1], [0, 1], None)


def prefix_sizes(b, m):
    """[n]: prefix tokens of the sequences of a micro-batch."""
    return b.prefix_lengths[b.prefix_of[m.sequences]]


def check(b, micros):
    """Every completion token is a target exactly once, predicted by the token before it, after its own prefix."""
    index = torch.cat([m.token_index for m in micros])
    assert index.sort().values.tolist() == list(range(b.num_tokens))
    for m in micros:
        assert torch.equal(m.targets, b.tokens[m.token_index])
        assert torch.equal(b.sequence[m.token_index], m.sequences[m.sequence])
        flat = m.input_ids.flatten()
        for k, (s, place) in enumerate(zip(m.sequence.tolist(), m.position.tolist())):
            i = int(m.sequences[s])
            own = b.tokens[int(b.starts[i]) : int(b.starts[i]) + place].tolist()
            assert seen(m, k) == b.prefix(i).tolist() + own
        before = torch.where(
            m.position == 0,
            torch.stack([b.prefix(s)[-1] for s in m.sequences.tolist()])[m.sequence],
            b.tokens[(m.token_index - 1).clamp(min=0)],
        )
        assert torch.equal(flat[m.hidden_index], before)
        if m.layout is not None:  # the predicting token stands at the place that it has in its own sequence
            prefix = prefix_sizes(b, m)[m.sequence]
            assert torch.equal(m.layout.position_ids[0, m.hidden_index], prefix + m.position - 1)
            assert m.input_ids.shape == m.layout.position_ids.shape and m.attention_mask is None
        else:
            assert torch.equal(m.attention_mask.sum(1), prefix_sizes(b, m) + b.lengths[m.sequences] - 1)


shapes = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(1, 12), min_size=1, max_size=5)), min_size=1, max_size=5
)


@settings(max_examples=examples(15), deadline=None)
@given(
    shapes,
    st.integers(0, 40),
    st.sampled_from([None, 1, 3]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 1, 30]),
    st.integers(1, 4),
)
def test_every_token_is_a_target_once_within_budget(groups, room, max_sequences, packable, shared, enough, ranks):
    b = batch(*groups)
    longest = max(p + max(lengths) for p, lengths in groups) - 1
    micros = plan_micro_batches(
        b,
        max_tokens=longest + room,
        max_sequences=max_sequences,
        packable=packable,
        shared_prefix=shared,
        cost=DEAR,
        saturating_tokens=enough,
        num_ranks=ranks,
    )
    check(b, micros)
    for m in micros:
        assert m.num_tokens <= longest + room
        assert max_sequences is None or len(m.sequences) <= max_sequences


def test_a_group_holds_its_prefix_once():
    b = batch((10, [3, 4, 5]), (6, [2, 2]))
    (shared,) = plan_micro_batches(b, max_tokens=1000)
    assert shared.num_tokens == 10 + 9 + 6 + 2  # every completion but for its last token
    (separate,) = plan_micro_batches(b, max_tokens=1000, shared_prefix=False)
    assert separate.num_tokens == 3 * 10 + 9 + 2 * 6 + 2 and set(separate.layout.parents) == {-1}


def test_a_group_over_the_budget_splits_and_each_part_repeats_the_prefix():
    b = batch((10, [5, 5, 5, 5]))
    micros = plan_micro_batches(b, max_tokens=18)
    check(b, micros)
    assert [m.num_tokens for m in micros] == [18, 18]


@pytest.mark.parametrize("packable", [True, False])
def test_a_sequence_over_the_budget_is_an_error_that_says_what_to_set(packable):
    b = batch((4, [9]), (10, [50, 3, 51]))
    fits = plan_micro_batches(b, max_tokens=60, packable=packable)  # the last of 61 tokens is no input
    check(b, fits)
    with pytest.raises(DataError) as error:
        plan_micro_batches(b, max_tokens=59, packable=packable)
    said = str(error.value)
    assert "sequence 3 has 10 + 51 = 61 tokens" in said and "max_tokens_per_microbatch=59" in said  # the longest
    assert "set trainer.max_tokens_per_microbatch=61 or more" in said


def test_small_groups_fill_a_micro_batch():
    # 12 groups of 3 + 4 + 3 = 10 tokens that are run, in bins of 40: three bins, none wasted
    b = batch(*[(3, [5, 4])] * 12)
    assert [m.num_tokens for m in plan_micro_batches(b, max_tokens=40)] == [40, 40, 40]


@pytest.mark.parametrize("groups, budget, packable, sizes", [
    ([(3, [5, 4])] * 12, 1000, True, [40, 40, 40]),  # one micro-batch in one process, as many as ranks in three
    ([(3, [5, 4])] * 12, 40, True, [40, 40, 40]),
    ([(3, [5, 4])] * 12, 30, True, [20] * 6),  # four in one process, where two ranks would wait in the second round
    ([(4, [101] * 6)], 1000, True, [204, 204, 204]),  # a prompt alone: its completions are divided
    ([(400, [2] * 6)], 1000, True, [406]),  # each part would repeat the long prompt, and nobody would wait less
    ([(4, [9] * 6)], 1000, False, [24, 24, 24]),
])  # fmt: skip
def test_there_are_as_many_micro_batches_as_three_ranks_run_at_once(groups, budget, packable, sizes):
    b = batch(*groups)
    micros = plan_micro_batches(b, max_tokens=budget, num_ranks=3, packable=packable)
    check(b, micros)
    assert [m.input_ids.numel() for m in micros] == sizes


def test_padded_rows_are_of_like_length():
    b = batch((4, [30, 2, 29, 3]), (4, [28, 1]))
    micros = plan_micro_batches(b, max_tokens=102, packable=False)
    check(b, micros)
    assert [sorted((b.lengths[m.sequences] - 1).tolist()) for m in micros] == [[27, 28, 29], [0, 1, 2]]


def test_padded_rows_may_fill_the_budget_to_the_last_place():
    b = batch((3, [4, 4]), (5, [2, 2]))  # four rows of 6 places: the last token is no input
    rows = lambda budget: [len(m.input_ids) for m in plan_micro_batches(b, max_tokens=budget, packable=False)]
    assert rows(24) == [4] and rows(23) == [2, 2] and rows(12) == [2, 2] and rows(11) == [1] * 4


def test_units_under_one_prompt_are_parted_where_they_are_too_many_sequences():
    b = batch((5, [3, 4, 3, 4])).replace(unit_of=torch.tensor([0, 1, 0, 1]))
    micros = plan_micro_batches(b, max_tokens=100, max_sequences=3)
    assert sorted(sorted(m.sequences.tolist()) for m in micros) == [[0, 2], [1, 3]]


def test_the_plan_is_the_same_every_time():
    b = batch((3, [4, 3]), (9, [1, 8, 2]), (3, [4, 3]))
    plans = [[m.sequences.tolist() for m in plan_micro_batches(b, max_tokens=18)] for _ in range(3)]
    assert plans[0] == plans[1] == plans[2] and len(plans[0]) > 1


def test_forks_keep_their_own_prefix():
    make = lambda tokens, prefix=None: Completion(
        tokens=np.array(tokens),
        logprobs=np.zeros(len(tokens)),
        versions=np.zeros(len(tokens)),
        finish_reason="stop",
        generation=0,
        prefix=None if prefix is None else np.array(prefix),
    )
    group = Group(prompt=Prompt(tokens=np.array([1, 2]), source=""), completions=(make([3]), make([6], [1, 2, 3, 4])))
    b = TokenBatch.from_groups([group])
    check(b, plan_micro_batches(b, max_tokens=100))


def test_bad_budgets_and_empty_prompts_are_refused():
    with pytest.raises(ConfigError, match="max_tokens 0"):
        plan_micro_batches(batch((1, [1])), max_tokens=0)
    with pytest.raises(ConfigError, match="max_sequences 0"):
        plan_micro_batches(batch((1, [1])), max_tokens=9, max_sequences=0)
    with pytest.raises(DataError, match="sequence 1 has an empty prefix"):
        plan_micro_batches(batch((1, [1]), (0, [1])), max_tokens=9)
