"""Micro-batches of like cost, against plain first fit and every possible cut of small cases."""

import pytest
import torch
from helpers import examples, forest, random_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from whet.packing import micro_batch_planner
from whet.packing.bin_packing import PackItem, PassCost, first_fit, model_cost, pack_balanced, pack_padded_rows
from whet.packing.micro_batch_planner import plan_micro_batches

DEAR = PassCost(token=20, pair=3, target=7)


def cuts(items):
    """Every way to cut a list into bins."""
    if not items:
        yield []
        return
    for bins in cuts(items[1:]):
        yield [[items[0]], *bins]
        for i, b in enumerate(bins):
            yield [*bins[:i], [items[0], *b], *bins[i + 1 :]]


def plain_first_fit(sizes, budget, most):
    """First fit decreasing over (tokens, sequences, thing), written out."""
    bins = []
    for size in sorted(sizes, key=lambda s: -s[0]):
        for b in bins:
            if sum(s[0] for s in b) + size[0] <= budget and sum(s[1] for s in b) + size[1] <= most:
                b.append(size)
                break
        else:
            bins.append([size])
    return bins


def counted(micro, cost=DEAR):
    """The cost of a packed micro-batch, its pairs counted token by token: one sees itself and all before it."""
    pairs = int((micro.layout.position_ids + 1).sum())
    return cost.token * micro.num_tokens + cost.pair * pairs + cost.target * len(micro.targets)


sizes = st.lists(st.integers(1, 30), min_size=1, max_size=7)


@settings(max_examples=examples(20), deadline=None)
@given(sizes, st.integers(0, 60))
def test_packed_bins_are_as_few_as_first_fits_and_near_the_best_of_all_cuts(tokens, room):
    units, budget = [PackItem((i,), n, n) for i, n in enumerate(tokens)], max(tokens) + room
    bins = pack_balanced(units, budget, len(units))
    assert sorted(u.sequences for b in bins for u in b) == [u.sequences for u in units]
    loads = [sum(u.tokens for u in b) for b in bins]
    assert max(loads) <= budget and loads == sorted(loads, reverse=True)
    first = plain_first_fit([(n, 1, n) for n in tokens], budget, 99)
    assert len(bins) < len(first) or max(loads) <= max(sum(s[0] for s in b) for b in first)
    best = min(max(map(sum, cut)) for cut in cuts(tokens) if len(cut) <= len(bins))
    assert len(bins) <= len(first) and best <= max(loads) <= 13 / 11 * best + 1  # MULTIFIT's bound, and a rounding


@settings(max_examples=examples(20), deadline=None)
@given(sizes, st.integers(0, 60), st.integers(1, 4))
def test_padded_bins_are_the_best_of_all_cuts(tokens, room, most):
    square = lambda n: n * n + 5 * n
    units, budget = [PackItem((i,), n, square(n)) for i, n in enumerate(tokens)], max(tokens) + room
    bins = pack_padded_rows(units, budget, most)
    assert sorted(u.sequences for b in bins for u in b) == [u.sequences for u in units]
    assert all(len(b) <= most and len(b) * max(u.tokens for u in b) <= budget for b in bins)
    fits = [cut for cut in cuts(tokens) if all(len(b) <= most and len(b) * max(b) <= budget for b in cut)]
    fewest = min(map(len, fits))
    best = min(max(len(b) * square(max(b)) for b in cut) for cut in fits if len(cut) == fewest)
    assert len(bins) == fewest and max(len(b) * square(b[0].tokens) for b in bins) <= best * 1.001 + 1


shapes = st.lists(
    st.tuples(st.integers(1, 20), st.lists(st.integers(1, 15), min_size=1, max_size=6)), min_size=1, max_size=6
)


@settings(max_examples=examples(20), deadline=None)
@given(shapes, st.integers(0, 60), st.sampled_from([99, 3]))
def test_a_plan_is_never_longer_nor_dearer_than_first_fits_and_tears_no_group_that_fits(groups, room, most):
    budget = max(p + max(lengths) for p, lengths in groups) - 1 + room
    b = random_batch(*groups)
    micros = plan_micro_batches(b, max_tokens=budget, max_sequences=most, cost=DEAR)
    assert torch.cat([m.token_index for m in micros]).sort().values.tolist() == list(range(b.num_tokens))
    costs = [counted(m) for m in micros]
    places = [m.num_tokens for m in micros]
    assert places == sorted(places, reverse=True) and max(places) <= budget  # later passes fit where the first lay
    units, copies = [], {}
    for k, (p, lengths) in enumerate(groups):
        parts = plain_first_fit([(c - 1, 1, c - 1) for c in lengths], budget - p, most)
        copies[k] = len(parts)
        for part in parts:
            cost = DEAR.estimate(p) + sum(DEAR.estimate(c, above=p, targets=c + 1) for _, _, c in part)
            units.append((p + sum(c for _, _, c in part), len(part), cost))
    first = plain_first_fit(units, budget, most)
    assert len(micros) <= len(first)
    assert len(micros) < len(first) or max(costs) <= max(sum(u[2] for u in cut) for cut in first)
    for k, most_copies in copies.items():
        first = [(m.position == 0) & (b.prefix_of[m.sequences][m.sequence] == k) for m in micros]
        held = sum(len(m.hidden_index[here].unique()) for m, here in zip(micros, first))
        assert held <= most_copies


def test_long_sequences_count_for_their_pairs():
    # by tokens alone the long one has room for others beside it; by pairs it weighs more than all of them
    b = random_batch((1, [100]), *[(1, [10])] * 20)
    sequences = lambda cost: [len(m.sequences) for m in plan_micro_batches(b, max_tokens=200, cost=cost)]
    assert sequences(PassCost()) == [6, 15] and sequences(PassCost(token=1, pair=1)) == [20, 1]


def test_a_group_over_the_budget_is_cut_into_like_parts():
    b = random_batch((10, [11] * 5))  # four completions of 10 fit beside the prefix; 4 + 1 would be first fit
    assert [m.num_tokens for m in plan_micro_batches(b, max_tokens=50)] == [40, 30]


def test_full_parts_are_kept_where_the_small_one_fills_a_gap():
    # parts of 50 and 20, beside a sequence of 30: two passes; parts of 40 and 30: three
    b = random_batch((10, [11] * 5), (5, [26]))
    assert sorted(m.num_tokens for m in plan_micro_batches(b, max_tokens=50)) == [50, 50]


def test_no_sequences_are_no_micro_batches():
    b = random_batch((3, [4]), (2, [5])).select(torch.zeros(0, dtype=torch.long))
    assert [plan_micro_batches(b, max_tokens=9, packable=p) for p in (True, False)] == [[], []]


SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    "model",
    [
        lambda: LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2)),
        lambda: LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=12, tie_word_embeddings=True)),
        lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **MOE)),
    ],
    ids=["grouped", "tied", "experts"],
)
def test_the_cost_of_a_model_is_what_its_products_take(model):
    model = model().eval()
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")  # grouped products are not counted
    cost, tokens = model_cost(model), 6
    with FlopCounterMode(display=False) as flops, torch.no_grad():
        model(torch.arange(tokens)[None], use_cache=False)
    whole_square = cost.token * tokens + cost.pair * tokens**2 + cost.target * tokens
    angles = flops.get_total_flops() - 2 * whole_square  # the rotary angles alone: an outer product
    assert 0 <= angles <= 2 * tokens * 16


def test_models_without_the_usual_heads_have_a_cost():
    assert model_cost(MambaForCausalLM(MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1))).pair == 0
    bloom = BloomForCausalLM(BloomConfig(vocab_size=40, hidden_size=16, n_layer=3, n_head=4))
    assert model_cost(bloom).pair == 2 * 3 * 16 and model_cost(bloom).target == 40 * 16


def sizes_of(shapes, **options):
    return [m.num_tokens for m in plan_micro_batches(random_batch(*shapes), **options)]


def test_passes_are_no_larger_than_is_enough_where_no_prefix_is_repeated_for_it():
    groups = [(3, [9, 10, 12, 8]) for _ in range(12)]  # 38 places each
    assert len(sizes_of(groups, max_tokens=240)) == 2
    sizes = sizes_of(groups, max_tokens=240, saturating_tokens=80)
    assert sizes == [76] * 6
    assert sizes_of(groups, max_tokens=240, saturating_tokens=240) == sizes_of(groups, max_tokens=240)
    assert sizes_of(groups, max_tokens=60, saturating_tokens=240) == sizes_of(groups, max_tokens=60)


def test_groups_with_a_long_prefix_stay_whole_up_to_the_token_budget():
    groups = [(384, [96] * 8) for _ in range(4)]
    whole = [384 + 8 * 95] * 4  # and not halves with 384 more each
    assert sizes_of(groups, max_tokens=2048, saturating_tokens=1024) == whole
    assert len(sizes_of(groups, max_tokens=1024, saturating_tokens=1024)) > 4


def test_a_short_prefix_is_repeated_where_that_costs_less_than_a_hundredth():
    assert sizes_of([(1, [41] * 8)], max_tokens=400, saturating_tokens=200) == [161, 161]
    assert sizes_of([(40, [41] * 8)], max_tokens=400, saturating_tokens=200) == [360]


def test_enough_below_the_longest_sequence_gives_it_the_room_it_needs():
    sizes = sizes_of([(2, [59]), (2, [9]), (2, [9]), (2, [9])], max_tokens=100, saturating_tokens=16)
    assert sizes[0] == 60 and max(sizes[1:]) <= 60


@pytest.mark.parametrize("batch", [random_batch((40, [41] * 8), (3, [9, 70])), forest(3, 12)], ids=["groups", "trees"])
@pytest.mark.parametrize("most", [10**30, 3])
def test_a_budget_that_a_batch_does_not_reach_costs_nothing_and_changes_nothing(batch, most, monkeypatch):
    asked = []

    def counted_fit(*how):
        asked.append(how)
        assert len(asked) < 2000, "candidates follow the limit"
        return first_fit(*how)

    def planned(max_tokens):
        asked.clear()
        plans = plan_micro_batches(batch, max_tokens=max_tokens, max_sequences=most, saturating_tokens=90, cost=DEAR)
        return [(m.input_ids.tolist(), m.sequences.tolist()) for m in plans], len(asked)

    monkeypatch.setattr(micro_batch_planner, "first_fit", counted_fit)
    assert planned(2000) == planned(10**7) == planned(10**30)
