"""The divergence of distillation against TRL's own, where TRL is installed: values and gradients to rounding."""

import functools

import pytest
import torch
from helpers import rounding

from whet.models.linear_divergence import HeadStates, linear_divergence
from whet.models.projection import Projection
from whet.ops import aggregate, generalized_jsd, gkd, token_weights
from whet.types import LossInputs

trainer = pytest.importorskip("trl.experimental.gkd.gkd_trainer").GKDTrainer

ROWS, VOCAB, WIDTH = 6, 11, 5
MASK = torch.tensor([True, True, False, True, False, True])


def drawn(dtype):
    """States and heads of a student and a teacher, numbers of dtype."""
    g = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)
    return [
        make(ROWS, WIDTH).requires_grad_(),
        make(VOCAB, WIDTH).requires_grad_(),
        make(ROWS, WIDTH),
        make(VOCAB, WIDTH),
    ]


def trl_s(hidden, weight, other_hidden, other_weight, *, beta, temperature):
    """TRL's divergence and its gradients."""
    labels = torch.where(MASK, 0, -100)[None]
    logits, teacher = hidden @ weight.t(), other_hidden @ other_weight.t()
    found = trainer.generalized_jsd_loss(logits[None], teacher[None], labels, beta=beta, temperature=temperature)
    return [found, *torch.autograd.grad(found, (hidden, weight))]


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_mean_over_trained_tokens_is_trl_s_in_float64(dtype, beta, temperature):
    given = drawn(dtype)
    hidden, weight, *others = given
    wide = [x.detach().double().requires_grad_(x.requires_grad) for x in given]
    exact = functools.partial(trl_s, *wide, beta=beta, temperature=temperature)
    theirs = exact()
    # on the way: products of WIDTH, log-softmaxes of VOCAB of each model, the sum over VOCAB and ROWS, and back again
    bounds = rounding(exact, wide, roundings=2 * (WIDTH + 3 * VOCAB + ROWS), dtype=dtype)

    other = HeadStates(*others, projection=Projection(temperature))
    logits, teacher = hidden @ weight.t(), other.hidden @ other.weight.t()
    whole = generalized_jsd(
        (logits / temperature).log_softmax(-1), (teacher / temperature).log_softmax(-1), gkd_beta=beta
    )
    chunked = linear_divergence(
        HeadStates(hidden, weight, projection=Projection(temperature)), other, gkd_beta=beta, chunk_bytes=100
    )
    sequence = torch.tensor([0, 0, 0, 1, 1, 1])
    for divergence in (whole, chunked):
        x = LossInputs(sequence=sequence, mask=MASK, logprobs=torch.zeros(ROWS), divergence=divergence)
        loss = aggregate(gkd(x, gkd_beta=beta)[0], token_weights(MASK, sequence, "token-mean").to(dtype))
        ours = [loss, *torch.autograd.grad(loss, (hidden, weight), retain_graph=True)]
        for got, want, bound in zip(ours, theirs, bounds, strict=True):
            assert got.dtype == dtype and (got.double() - want).abs().max() <= bound


def test_trl_has_no_number_where_a_probability_is_0():
    z = torch.tensor([[0.0, -torch.inf]])
    assert trainer.generalized_jsd_loss(z[None], z[None], beta=1.0).isnan()
    assert generalized_jsd(z.log_softmax(-1), z.log_softmax(-1), gkd_beta=1.0).item() == 0
