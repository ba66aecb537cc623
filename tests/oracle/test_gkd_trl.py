"""The divergence of distillation against TRL's own, where TRL is installed: values and gradients to 1e-6."""

import pytest
import torch

from whet.models.linear_divergence import HeadStates, linear_divergence
from whet.models.projection import Projection
from whet.ops import aggregate, generalized_jsd, gkd, token_weights
from whet.types import LossInputs

trainer = pytest.importorskip("trl.experimental.gkd.gkd_trainer").GKDTrainer

ROWS, VOCAB, WIDTH = 6, 11, 5


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_mean_over_trained_tokens_is_trl_s(beta, temperature, dtype):
    g = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)
    hidden, weight = make(ROWS, WIDTH).requires_grad_(), make(VOCAB, WIDTH).requires_grad_()
    other = HeadStates(make(ROWS, WIDTH), make(VOCAB, WIDTH), projection=Projection(temperature))
    mask = torch.tensor([True, True, False, True, False, True])
    logits, teacher = hidden @ weight.t(), other.hidden @ other.weight.t()
    labels = torch.where(mask, 0, -100)[None]
    theirs = trainer.generalized_jsd_loss(logits[None], teacher[None], labels, beta=beta, temperature=temperature)
    wanted = torch.autograd.grad(theirs, (hidden, weight), retain_graph=True)

    whole = generalized_jsd(
        (logits / temperature).log_softmax(-1), (teacher / temperature).log_softmax(-1), gkd_beta=beta
    )
    chunked = linear_divergence(
        HeadStates(hidden, weight, projection=Projection(temperature)), other, gkd_beta=beta, chunk_bytes=100
    )
    sequence = torch.tensor([0, 0, 0, 1, 1, 1])
    for divergence in (whole, chunked):
        x = LossInputs(sequence=sequence, mask=mask, logprobs=torch.zeros(ROWS), divergence=divergence)
        ours = aggregate(gkd(x, gkd_beta=beta)[0], token_weights(mask, sequence, "token-mean").to(dtype))
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7 if dtype == torch.float32 else 0)
        for got, want in zip(torch.autograd.grad(ours, (hidden, weight), retain_graph=True), wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6 if dtype == torch.float32 else 1e-12)


def test_trl_has_no_number_where_a_probability_is_0():
    z = torch.tensor([[0.0, -torch.inf]])
    assert trainer.generalized_jsd_loss(z[None], z[None], beta=1.0).isnan()
    assert generalized_jsd(z.log_softmax(-1), z.log_softmax(-1), gkd_beta=1.0).item() == 0
