"""Trees of sequences that begin alike, against sets of all beginnings."""

import dataclasses
from collections import Counter

import numpy as np
import pytest
import torch
from helpers import completion, examples, forest, places_seen, prompt, random_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.models.attention import SegmentLayout
from whet.packing import micro_batch_planner
from whet.packing.bin_packing import PassCost, first_fit, pack_balanced
from whet.packing.micro_batch_planner import plan_micro_batches
from whet.packing.prefix_tree import build_tree, prefix_trees
from whet.types import Group, TokenBatch

DEAR = PassCost(token=20, pair=3, target=7)


def ids(n, seed=0):
    return np.random.default_rng(seed).integers(0, 250, n).tolist()


def batch(*sequences):
    """One sequence each of (prefix, completion); equal prefixes in a row are of one group."""
    groups = []
    for row, (p, c) in enumerate(sequences):
        if groups and groups[-1].prompt.tokens.tolist() == p:
            done = (*groups[-1].completions, completion(c, len(groups[-1].completions)))
            groups[-1] = dataclasses.replace(groups[-1], completions=done)
        else:
            groups.append(Group(prompt=prompt(p, row), completions=(completion(c),)))
    return TokenBatch.from_groups(groups)


def run_of(b, i):
    return b.prefix(i).tolist() + b.tokens[int(b.starts[i]) : int(b.ends[i]) - 1].tolist()


def beginnings(runs):
    return {tuple(run[:n]) for run in runs for n in range(1, len(run) + 1)}


def check(b, micros):
    """Every completion token is a target once, at the row of the token before it, which sees its own sequence alone."""
    assert torch.cat([m.token_index for m in micros]).sort().values.tolist() == list(range(b.num_tokens))
    for m in micros:
        runs = [run_of(b, i) for i in m.sequences.tolist()]
        assert torch.equal(m.targets, b.tokens[m.token_index])
        assert torch.equal(b.sequence[m.token_index], m.sequences[m.sequence])
        prefixes = b.prefix_lengths[b.prefix_of[m.sequences]].tolist()
        for row, s, position in zip(m.hidden_index.tolist(), m.sequence.tolist(), m.position.tolist()):
            seen = places_seen(m, row)
            length = prefixes[s] + position
            assert m.input_ids[0, seen].tolist() == runs[s][:length]
            assert m.layout.position_ids[0, seen].tolist() == list(range(length))


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=8))
def test_a_tree_holds_each_beginning_once_and_parts_only_where_runs_do(runs):
    tree = build_tree([np.array(run) for run in runs])
    nodes = beginnings(runs)
    assert len(tree.ids) == len(nodes) == sum(tree.lengths)
    assert [tree.ids[places].tolist() for places in tree.places] == runs
    position_ids = SegmentLayout(tree.lengths, tree.parents).position_ids[0].numpy()
    assert all(position_ids[places].tolist() == list(range(len(run))) for places, run in zip(tree.places, runs))
    followers = Counter(node[:-1] for node in nodes)
    assert len(tree.lengths) == sum(len(node) == 1 or followers[node[:-1]] > 1 for node in nodes)


@settings(max_examples=examples(15), deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 14), st.integers(0, 300), st.sampled_from([None, 1, 3]), st.booleans())
def test_every_token_is_a_target_once_after_its_own_sequence_within_the_budget(seed, n, room, most, enough):
    b = forest(seed, n)
    budget = max(len(run_of(b, i)) for i in range(n)) + room
    micros = plan_micro_batches(
        b, max_tokens=budget, max_sequences=most, cost=DEAR, saturating_tokens=budget // 2 if enough else None
    )
    check(b, micros)
    assert all(m.num_tokens <= budget and len(m.sequences) <= (most or n) for m in micros)


@settings(max_examples=examples(15), deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 14), st.sampled_from([first_fit, pack_balanced]))
def test_a_family_fits_whole_or_in_parts_whose_tokens_and_cost_are_counted(seed, n, split):
    b = forest(seed, n)
    runs = [np.array(run_of(b, i)) for i in range(n)]
    prefix_of = b.prefix_of.numpy()
    longest = max(map(len, runs))
    for family in prefix_trees(runs, prefix_of, b.prefix_lengths.numpy()[prefix_of]):
        members = sorted(family.sequences.tolist())
        (whole,) = family.items(split, 10**6, n, DEAR)
        assert list(whole.sequences) == members and whole.tree
        assert whole.tokens == len(beginnings([runs[i].tolist() for i in members]))
        parts = family.items(split, longest, n, DEAR)
        assert sorted(i for part in parts for i in part.sequences) == members
        for part in parts:
            nodes = beginnings([runs[i].tolist() for i in part.sequences])
            assert (
                len(nodes) <= part.tokens <= longest
            )  # parts cut apart below a fork may meet again, and are not joined
            if part.tokens == len(nodes):
                targets = sum(int(b.lengths[i]) for i in part.sequences)
                assert part.cost == 20 * len(nodes) + 3 * sum(map(len, nodes)) + 7 * targets


@pytest.mark.parametrize("budget", [10_000, 150])
def test_single_turns_have_the_plan_that_they_have_without_trees(budget, monkeypatch):
    b = random_batch((60, [40, 30, 50, 20]), (100, [30, 1]), (7, [60]), (1, [3, 3, 3]), (40, [2] * 9))
    got = plan_micro_batches(b, max_tokens=budget, cost=DEAR)
    monkeypatch.setattr(micro_batch_planner, "prefix_trees", lambda *_: [])
    want = plan_micro_batches(b, max_tokens=budget, cost=DEAR)
    assert len(got) == len(want)
    for x, y in zip(got, want):
        assert (x.layout.lengths, x.layout.parents) == (y.layout.lengths, y.layout.parents)
        for name in ("input_ids", "hidden_index", "targets", "token_index", "sequence", "position", "sequences"):
            assert torch.equal(vars(x)[name], vars(y)[name])


def test_the_turns_of_a_conversation_are_one_causal_run():
    turns, whole = [], []
    for k in range(4):
        whole = whole + ids(40, 2 * k)
        answer = ids(10, 2 * k + 1)
        turns.append((whole, answer))
        whole = whole + answer
    b = batch(*reversed(turns))
    (micro,) = plan_micro_batches(b, max_tokens=1000)
    check(b, [micro])
    assert (micro.layout.lengths, micro.layout.parents) == ((199,), (-1,))
    (separate,) = plan_micro_batches(b, max_tokens=1000, shared_prefix=False)
    assert separate.num_tokens == 49 + 99 + 149 + 199 and set(separate.layout.parents) == {-1}
    assert all(m.layout is None for m in plan_micro_batches(b, max_tokens=1000, packable=False))


def test_second_turns_forked_from_a_first_share_it_and_whatever_they_repeat():
    first, answer = ids(50, 1), ids(30, 2)
    second = [first + answer + ids(8, 3), first + answer + ids(8, 4)]
    b = batch(
        (first, answer), (first, ids(30, 5)), (second[0], ids(6, 6)), (second[0], ids(6, 7)), (second[1], ids(6, 8))
    )
    (micro,) = plan_micro_batches(b, max_tokens=1000)
    check(b, [micro])
    assert sorted(micro.layout.lengths) == sorted([50, 30, 29, 8, 5, 5, 8 + 5])


def test_equal_sequences_are_run_once_and_each_has_its_targets():
    p, c = ids(40), ids(20, 1)
    b = batch((p, c), (p, c), (p, c))
    (micro,) = plan_micro_batches(b, max_tokens=1000)
    check(b, [micro])
    assert micro.num_tokens == 59 and len(micro.targets) == 60 and len(micro.layout.lengths) == 1


def test_a_sequence_that_is_the_beginning_of_another_adds_nothing():
    p, c = ids(40), ids(60, 1)
    b = batch((p, c), (p, c[:30]), (p, c[:1]), (p + c[:5], c[5:9]))
    (micro,) = plan_micro_batches(b, max_tokens=1000)
    check(b, [micro])
    assert micro.num_tokens == 99


def test_a_fork_inside_the_prompt_of_another_group():
    p = ids(80)
    b = batch((p, ids(9, 1)), (p, ids(9, 2)), (p[:50] + ids(20, 3), ids(9, 4)), (p[:50], ids(9, 5)))
    (micro,) = plan_micro_batches(b, max_tokens=1000)
    check(b, [micro])
    assert micro.layout.lengths[0] == 50 and micro.num_tokens == 50 + 30 + 8 + 8 + 20 + 8 + 8


@pytest.mark.parametrize(("common", "tokens", "joined"), [(31, 10, False), (32, 10, True), (32, 400, False)])
def test_prompts_are_joined_from_32_tokens_and_a_twentieth_of_the_work_on(common, tokens, joined):
    system = ids(common)
    b = batch((system + ids(tokens, 1), ids(9, 2)), (system + ids(tokens, 3), ids(9, 4)))
    (micro,) = plan_micro_batches(b, max_tokens=1000)
    check(b, [micro])
    assert micro.num_tokens == 2 * (common + tokens + 8) - (common if joined else 0)


def test_a_tree_that_pays_is_found_among_prompts_that_begin_alike_and_do_not():
    system = ids(40)
    crowd = [(system + ids(30, 2 * k), ids(1000, 2 * k + 1)) for k in range(1, 7)]
    first, answer = system + ids(10, 20), ids(40, 21)
    later = (first + answer + ids(10, 22), ids(20, 23))
    b = batch(*crowd[:3], (first, answer), *crowd[3:], later)
    (micro,) = plan_micro_batches(b, max_tokens=10_000)
    check(b, [micro])
    assert micro.num_tokens == 6 * (70 + 999) + 50 + 40 + 10 + 19  # the system prompt alone: 1 token in 20 at most


def test_a_tree_over_the_budget_is_cut_at_its_weakest_forks():
    system = ids(40)
    talks = [system + ids(60, k) for k in range(1, 5)]
    b = batch(*[(talk, ids(11, 10 * k + g)) for k, talk in enumerate(talks, 1) for g in range(3)])
    micros = plan_micro_batches(b, max_tokens=230)  # two talks of 60 + 3 · 10 beside the system prompt
    check(b, micros)
    assert [m.num_tokens for m in micros] == [220, 220]
    cut = plan_micro_batches(b, max_tokens=1000, max_sequences=6)
    assert [m.num_tokens for m in cut] == [220, 220]


def test_a_conversation_of_a_thousand_turns_is_cut_too():
    whole, turns = ids(40), []
    for k in range(1000):
        turns.append((whole, ids(3, 2 * k)))
        whole = whole + ids(2, 2 * k + 1)
    b = batch(*turns)
    micros = plan_micro_batches(b, max_tokens=2500, max_sequences=300)
    assert all(m.num_tokens <= 2500 and len(m.sequences) <= 300 for m in micros)
    assert torch.cat([m.token_index for m in micros]).sort().values.tolist() == list(range(3000))
