"""The engine's draw against whet.ops.logits_processors.draw."""

import pytest
import torch

from whet.ops.logits_processors import draw
from whet.ops.logprobs import selective_log_softmax
from whet.rollout.engine.sampling import BLOCK, _draw


@pytest.mark.parametrize("vocabulary", [1, 2, 500, 16 * BLOCK, 16 * BLOCK + 1, 20 * BLOCK, 9999])
def test_the_draw_equals_the_oracles_and_its_logprob_the_softmaxs(vocabulary):
    generator = torch.Generator().manual_seed(vocabulary)
    scores = torch.randn(200, vocabulary, generator=generator) * 4
    scores[:, 1::3] = -torch.inf
    u = torch.rand(200, dtype=torch.float64, generator=generator)
    u[:2] = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    tokens, logprobs = _draw(scores, u)
    assert torch.equal(tokens, draw(scores, u))
    torch.testing.assert_close(logprobs, selective_log_softmax(scores, tokens), atol=3e-6, rtol=1e-6)
    assert torch.isfinite(logprobs).all()


@pytest.mark.parametrize("vocabulary", [40, 18 * BLOCK])
@pytest.mark.parametrize("place", [0, 1, -1])
def test_a_single_possible_token_is_drawn_whatever_the_number(vocabulary, place):
    scores = torch.full((3, vocabulary), -torch.inf)
    scores[:, place] = -5.0
    tokens, logprobs = _draw(scores, torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64))
    assert tokens.tolist() == [place % vocabulary] * 3
    assert logprobs.tolist() == [0.0] * 3


@pytest.mark.parametrize("vocabulary", [40, 18 * BLOCK])
def test_a_number_of_one_falls_back_to_the_likeliest_and_never_to_an_impossible_token(vocabulary):
    scores = torch.zeros(1, vocabulary)
    scores[0, 3], scores[0, -5:] = 1.0, -torch.inf
    assert _draw(scores, torch.ones(1, dtype=torch.float64))[0].item() == 3
