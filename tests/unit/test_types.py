import pytest
import torch
from helpers import completion, prompt, random_batch

from whet.errors import DataError
from whet.types import Group, LossInputs, TokenBatch


def group(p, *completions, row=0):
    return Group(prompt=prompt(p, row), completions=completions)


def assert_same(got, want):
    for name, value in vars(want).items():
        ours = vars(got)[name]
        if isinstance(value, dict):
            assert ours.keys() == value.keys() and all(torch.equal(ours[n], c) for n, c in value.items()), name
        else:
            assert ours is value is None or torch.equal(ours, value), name


# ---- from_groups ---------------------------------------------------------------------------------------------------


def test_groups_are_laid_end_to_end_with_each_prefix_once():
    batch = TokenBatch.from_groups(
        [group([5, 6], completion([7, 2]), completion([8, 2], 1)), group([9], completion([3], version=4))],
        [1.0, 0.0, 2.0],
    )
    assert batch.prefixes.tolist() == [5, 6, 9]  # not 5 6 5 6 9
    assert batch.prefix_ends.tolist() == [2, 3]
    assert batch.prefix_of.tolist() == [0, 0, 1]
    assert batch.tokens.tolist() == [7, 2, 8, 2, 3]
    assert batch.ends.tolist() == [2, 4, 5]
    assert batch.trajectory_of.tolist() == [0, 1, 2]
    assert batch.group_of.tolist() == [0, 0, 1]
    assert batch.rewards.tolist() == [1.0, 0.0, 2.0]
    assert batch.versions.tolist() == [0, 0, 0, 0, 4]
    assert batch.mask.all()
    assert [batch.prefix(i).tolist() for i in range(3)] == [[5, 6], [5, 6], [9]]
    assert batch.sequence.tolist() == [0, 0, 1, 1, 2]
    assert (batch.num_sequences, batch.num_tokens) == (3, 5)


def test_tokens_that_were_not_sampled_are_not_trained():
    batch = TokenBatch.from_groups([group([5], completion([7, 8, 9], version=[2, -1, 2]))], [0.0])
    assert batch.mask.tolist() == [True, False, True]


def test_forks_share_their_trajectory_and_bring_their_own_prefix():
    a = group([5, 6], completion([7, 2]), completion([1], prefix=[5, 6, 7, 9]), completion([8], 1))
    batch = TokenBatch.from_groups([a, group([4], completion([3], 0))], [0.5, 1.0, 2.0])  # 3 rewards for 4 sequences
    assert batch.trajectory_of.tolist() == [0, 0, 1, 2]
    assert batch.group_of.tolist() == [0, 0, 1]
    assert [batch.prefix(i).tolist() for i in range(4)] == [[5, 6], [5, 6, 7, 9], [5, 6], [4]]
    assert batch.prefix_of.tolist()[0] == batch.prefix_of.tolist()[2]
    assert batch.trajectory.tolist() == [0, 0, 0, 1, 2]


def test_a_fork_that_comes_first_does_not_give_its_prefix_to_the_others():
    batch = TokenBatch.from_groups([group([5], completion([7], prefix=[5, 1]), completion([8], 1))], [0.0, 0.0])
    assert [batch.prefix(i).tolist() for i in range(2)] == [[5, 1], [5]]


@pytest.mark.parametrize(
    ("groups", "rewards", "words"),
    [
        ([], [], "at least one completion"),
        ([group([5])], [], "at least one completion"),
        ([group([5], completion([]))], [0.0], "completion 0 has no tokens"),
        ([group([5], completion([1]))], [0.0, 1.0], "2 rewards for 1 trajectories"),
    ],
)
def test_what_is_no_batch_is_refused_with_the_reason(groups, rewards, words):
    with pytest.raises(DataError, match=words):
        TokenBatch.from_groups(groups, rewards)


# ---- select --------------------------------------------------------------------------------------------------------


def test_select_renumbers_prefixes_trajectories_and_groups_and_leaves_columns_alone():
    batch = TokenBatch.from_groups(
        [
            group([1], completion([10, 11]), completion([12], 1)),
            group([2, 2], completion([13]), completion([14, 15, 16], 0, prefix=[2, 3]), completion([17], 1)),
            group([4], completion([18]), completion([19], 1)),
        ],
        range(6),
    )
    batch = batch.replace(weights=torch.arange(10.0), advantages=-torch.arange(10.0))
    part = batch.select(torch.tensor([5, 3, 4]))
    assert part.tokens.tolist() == [18, 14, 15, 16, 17]
    assert part.ends.tolist() == [1, 4, 5]
    assert part.weights.tolist() == [8.0, 4.0, 5.0, 6.0, 7.0]  # as they were, not made anew
    assert part.advantages.tolist() == [-8.0, -4.0, -5.0, -6.0, -7.0]
    assert [part.prefix(i).tolist() for i in range(3)] == [[4], [2, 3], [2, 2]]
    assert len(part.prefix_ends) == 3  # the prefix of the first group is gone
    assert part.rewards.tolist() == [2.0, 3.0, 4.0]  # trajectories keep their order
    assert part.trajectory_of.tolist() == [2, 0, 1]
    assert part.group_of.tolist() == [0, 0, 1]
    assert part.old_logprobs is None


def test_select_of_everything_changes_nothing_and_of_nothing_is_empty():
    batch = random_batch((3, [2, 5]), (1, [1, 1, 4]), masked=True)
    again = batch.select(torch.arange(batch.num_sequences))
    assert_same(again, batch)
    none = batch.select(torch.zeros(0, dtype=torch.long))
    assert (none.num_sequences, none.num_tokens, len(none.prefixes), len(none.rewards)) == (0, 0, 0, 0)


# ---- cat -----------------------------------------------------------------------------------------------------------


def test_cat_of_the_parts_of_a_batch_is_the_batch():
    batch = random_batch((3, [2, 5]), (1, [1, 1, 4]), (6, [2]))
    parts = [batch.select(torch.tensor(i)) for i in ([0, 1], [2, 3, 4], [5])]
    again = TokenBatch.cat(parts)
    assert_same(again, batch)
    assert TokenBatch.cat(parts[:1]) is parts[0]


def test_cat_keeps_equal_prompts_apart():
    batch = random_batch((3, [2, 5]))
    twice = TokenBatch.cat([batch, batch])
    assert twice.group_of.tolist() == [0, 0, 1, 1]
    assert twice.prefix_of.tolist() == [0, 0, 1, 1]


def test_cat_refuses_a_column_that_only_some_have():
    batch = random_batch((3, [2, 5]))
    with pytest.raises(DataError, match="column weights is set in some"):
        TokenBatch.cat([batch, batch.replace(weights=torch.ones(7))])


# ---- padded arrays -------------------------------------------------------------------------------------------------


# ---- the rest ------------------------------------------------------------------------------------------------------


def test_a_batch_is_frozen_and_replace_makes_another():
    batch = random_batch((3, [2]))
    with pytest.raises(AttributeError):
        batch.weights = torch.ones(2)
    other = batch.replace(weights=torch.ones(2))
    assert batch.weights is None and other.weights is not None and other.tokens is batch.tokens


def test_a_loss_that_needs_a_missing_column_names_it():
    x = LossInputs(sequence=torch.tensor([0]), mask=torch.tensor([True]), logprobs=torch.tensor([0.0]))
    with pytest.raises(DataError, match="needs ref_logprobs"):
        x.need("ref_logprobs")
    assert x.need("logprobs") is x.logprobs
