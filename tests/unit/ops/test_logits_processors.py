import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor
from transformers import generation as hf

from whet.errors import ConfigError
from whet.ops.logits_processors import LogitsProcessors, draw, greedy, process_logits
from whet.ops.logprobs import selective_log_softmax

INF = torch.inf
LAST = 1 - 2**-53


def at(n: int, position: int = 0) -> torch.Tensor:
    return torch.full((n,), position)


def transformers_scores(
    logits: torch.Tensor, prompt: torch.Tensor, new: int, processors: LogitsProcessors
) -> torch.Tensor:
    """The scores that generate() would sample from after `new` completion tokens, with transformers' processors."""
    steps = []
    if processors.repetition_penalty != 1:
        steps.append(hf.RepetitionPenaltyLogitsProcessor(processors.repetition_penalty))
    if processors.min_tokens:
        steps.append(
            hf.MinNewTokensLengthLogitsProcessor(
                prompt.shape[1] - new, processors.min_tokens, list(processors.stop_ids)
            )
        )
    if processors.forbidden_ids:
        steps.append(hf.SuppressTokensLogitsProcessor(list(processors.forbidden_ids)))
    steps.append(hf.TemperatureLogitsWarper(processors.temperature))
    if processors.top_k:
        steps.append(hf.TopKLogitsWarper(processors.top_k))
    if processors.top_p < 1:
        steps.append(hf.TopPLogitsWarper(processors.top_p))
    if processors.min_p:
        steps.append(hf.MinPLogitsWarper(processors.min_p))
    return hf.LogitsProcessorList(steps)(prompt, logits)


supports = st.builds(
    LogitsProcessors,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.5]),
    top_k=st.sampled_from([0, 1, 5, 17, 500]),
    top_p=st.sampled_from([1.0, 0.99, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    forbidden_ids=st.sampled_from([(), (3,), (0, 36)]),
    min_tokens=st.sampled_from([0, 2, 3]),
    stop_ids=st.sampled_from([(7,), (1, 9)]),
)


@settings(derandomize=True, deadline=None, max_examples=30)
@given(processors=supports, seed=st.integers(0, 1000), new=st.integers(0, 4))
def test_same_distribution_as_transformers(processors, seed, new):
    g = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(4, 37, generator=g)
    prompt = torch.randint(37, (4, 6), generator=g)
    seen = torch.zeros(4, 37, dtype=torch.bool).scatter(1, prompt, True)
    got = process_logits(logits, processors, seen=seen, position=at(4, new))
    expected = transformers_scores(logits, prompt, new, processors)
    assert (got.isinf() == expected.isinf()).all()
    torch.testing.assert_close(got, expected)


def test_top_p_keeps_the_token_that_crosses_p():
    # probabilities .5 .3 .2: p = .6 needs the second token to get past .5
    logits = tensor([[math.log(0.5), math.log(0.3), math.log(0.2)]])
    got = process_logits(logits, LogitsProcessors(top_p=0.6), position=at(1))
    assert got.isinf().tolist() == [[False, False, True]]
    assert process_logits(logits, LogitsProcessors(top_p=0.01), position=at(1)).isinf().tolist() == [
        [False, True, True]
    ]


def test_the_likeliest_token_stays_however_small_p_is():
    # in fp32 1 - 1e-9 is 1, which the whole mass does not pass
    got = process_logits(tensor([[0.0, 2.0, 1.0]]), LogitsProcessors(top_p=1e-9), position=at(1))
    assert got.isinf().tolist() == [[True, False, True]]


def test_ties_are_cut_the_same_way_every_time():
    logits = torch.zeros(1, 5)
    # mass .2 each, ascending order is the order of ids: .2 and .4 fall to the 1 - .5 that is cut, .6 does not
    assert process_logits(logits, LogitsProcessors(top_p=0.5), position=at(1)).isinf().tolist() == [
        [True, True, False, False, False]
    ]
    assert not process_logits(logits, LogitsProcessors(top_k=2), position=at(1)).isinf().any()


def test_repetition_penalty_divides_positive_and_multiplies_negative():
    got = process_logits(
        tensor([[2.0, -2.0, 2.0]]),
        LogitsProcessors(repetition_penalty=2.0),
        seen=tensor([[True, True, False]]),
        position=at(1),
    )
    assert got.tolist() == [[1.0, -4.0, 2.0]]
    with pytest.raises(ConfigError, match=r"repetition_penalty 2\.0 needs `seen`"):
        process_logits(torch.zeros(1, 3), LogitsProcessors(repetition_penalty=2.0), position=at(1))


def test_stop_tokens_wait_for_min_tokens_row_by_row():
    processors = LogitsProcessors(min_tokens=2, stop_ids=(1,))
    got = process_logits(torch.zeros(3, 3), processors, position=tensor([0, 1, 2]))
    assert got[:, 1].tolist() == [-INF, -INF, 0.0]


def test_the_kept_token_stays_inside_with_its_own_logit():
    logits = tensor([[4.0, 2.0, 1.0], [4.0, 2.0, 1.0]])
    processors = LogitsProcessors(temperature=2.0, top_k=1, forbidden_ids=(2,))
    got = process_logits(logits, processors, position=at(2), keep=tensor([1, 2]))
    assert got.tolist() == [[2.0, 1.0, -INF], [2.0, -INF, 0.5]]


def test_logprob_under_the_support_by_hand_and_its_gradient():
    # top-2 of ln 5, ln 2, ln 1: 5/7 and 2/7; d log p_1 = onehot - (5/7, 2/7, 0)
    logits = tensor([[math.log(5), math.log(2), 0.0]], requires_grad=True)
    logp = selective_log_softmax(process_logits(logits, LogitsProcessors(top_k=2), position=at(1)), tensor([1]))
    logp.backward()
    assert logp.item() == pytest.approx(math.log(2 / 7))
    assert logits.grad is not None and logits.grad[0].tolist() == pytest.approx([-5 / 7, 5 / 7, 0.0])


def test_full_is_temperature_alone():
    processors = LogitsProcessors(
        temperature=2.0, top_k=1, min_p=0.9, forbidden_ids=(0,), repetition_penalty=2.0, full=True
    )
    assert processors.plain
    assert process_logits(tensor([[4.0, 2.0]]), processors, position=at(1)).tolist() == [[2.0, 1.0]]


def test_temperature_zero_divides_by_one_and_cuts_nothing_but_what_is_forbidden():
    processors = LogitsProcessors(temperature=0.0, top_k=1, top_p=0.1, forbidden_ids=(0,))
    got = process_logits(tensor([[4.0, 2.0, 3.0]]), processors, position=at(1))
    assert got.tolist() == [[-INF, 2.0, 3.0]] and greedy(got).tolist() == [2]
    assert LogitsProcessors(temperature=0.0, top_k=1).plain


def test_plain_says_when_only_temperature_matters():
    assert LogitsProcessors(temperature=0.3, min_tokens=3).plain and LogitsProcessors(stop_ids=(1,)).plain
    for changed in ({"top_k": 1}, {"top_p": 0.9}, {"min_p": 0.1}, {"repetition_penalty": 1.1}, {"forbidden_ids": (1,)}):
        assert not LogitsProcessors(**changed).plain
    assert not LogitsProcessors(min_tokens=1, stop_ids=(1,)).plain


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"min_tokens": -2},
    ],
)
def test_a_field_out_of_range_is_refused_with_its_name_and_value(bad):
    (name, value), *_ = bad.items()
    with pytest.raises(ConfigError, match=f"{name} {value!r} must be"):
        LogitsProcessors(**bad)


def test_draws_follow_the_cumulative_distribution():
    # probabilities .5 .3 .2: boundaries at .5 and .8
    logits = tensor([[math.log(0.5), math.log(0.3), math.log(0.2)]]).expand(6, 3)
    u = tensor([0.0, 0.499, 0.501, 0.799, 0.801, LAST], dtype=torch.float64)
    assert draw(logits, u).tolist() == [0, 0, 1, 1, 2, 2]


def test_a_token_of_probability_zero_is_never_drawn():
    logits = tensor([[-INF, 0.0, -INF, 0.0, -INF], [-INF, -INF, 2.0, -INF, -INF], [0.0, -200.0, -INF, -INF, -INF]])
    for u in (0.0, 2**-53, 0.5 - 2**-54, 0.5, 0.5 + 2**-53, LAST):
        drawn = draw(logits, torch.full((3,), u, dtype=torch.float64))
        assert drawn.tolist() == [1 if u < 0.5 else 3, 2, 0]


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.integers(0, 10_000), st.integers(1, 300), st.sampled_from([0.0, 2**-53, 0.3, LAST]))
def test_drawn_tokens_have_positive_probability_in_any_vocabulary(seed, vocabulary, u):
    g = torch.Generator().manual_seed(seed)
    logits = 5 * torch.randn(8, vocabulary, generator=g)
    logits[:, 1:][torch.rand(8, vocabulary - 1, generator=g) < 0.5] = -INF
    drawn = draw(logits, torch.full((8,), u, dtype=torch.float64))
    assert logits.gather(1, drawn[:, None]).isfinite().all()


def test_drawn_frequencies_are_the_probabilities():
    p = tensor([0.05, 0.0, 0.6, 0.1, 0.25])
    u = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    counts = torch.bincount(draw(p.log().expand(1000, 5), u), minlength=5)
    assert (counts - p * 1000).abs().max() <= 1


def test_each_row_is_drawn_on_its_own():
    logits = torch.randn(9, 50, generator=torch.Generator().manual_seed(1))
    u = (torch.arange(9).double() + 0.5) / 9
    alone = [draw(logits[i : i + 1], u[i : i + 1]).item() for i in range(9)]
    assert draw(logits, u).tolist() == alone


def test_greedy_takes_the_lowest_of_equal_ids():
    assert greedy(tensor([[0.0, 5.0, 5.0], [1.0, -INF, 0.0]])).tolist() == [1, 0]


@pytest.mark.parametrize("how", ["forbidden", "held back", "constrained"])
def test_min_p_is_a_share_of_the_likeliest_token_that_may_come(how):
    # probabilities .9 .08 .02; token 0 may not come, and .02 is a quarter of .08
    logits = tensor([[math.log(0.9), math.log(0.08), math.log(0.02)]])
    processors, more = {
        "forbidden": (LogitsProcessors(min_p=0.2, forbidden_ids=(0,)), {}),
        "held back": (LogitsProcessors(min_p=0.2, min_tokens=1, stop_ids=(0,)), {}),
        "constrained": (
            LogitsProcessors(min_p=0.2, constrained=True),
            {"allowed": tensor([[0b110]], dtype=torch.uint8)},
        ),
    }[how]
    got = process_logits(logits, processors, position=tensor([0]), **more)
    assert got.isinf().tolist() == [[True, False, False]]
