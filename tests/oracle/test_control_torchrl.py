"""ESS, the two divergences and the KL mask against TorchRL's own GRPOLoss, where it is installed."""

from types import SimpleNamespace

import pytest
import torch

from whet.ops import (
    PolicyObjective,
    aggregate,
    clipped_surrogate,
    effective_sample_size,
    reference_kl,
    sampler_kl_mask,
    sampling_metrics,
    token_weights,
)
from whet.types import LossInputs

llm = pytest.importorskip("torchrl.objectives.llm")
tensordict = pytest.importorskip("tensordict")
ROWS, WIDTH = 4, 6


class Given(llm.GRPOLoss):
    """TorchRL's loss on given logprobs instead of an actor's."""

    def _set_in_keys(self):
        self._in_keys = []

    def _get_cur_log_prob(self, td):
        return td["current"], SimpleNamespace(mask=td["mask"]), False


def case(seed, *, whole=False):
    """Columns [ROWS, WIDTH], float64; the mask as TorchRL has it, False at the left."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda: -torch.rand(ROWS, WIDTH, generator=g, dtype=torch.float64) * 1.5 - 0.05
    start = torch.zeros(ROWS, 1) if whole else torch.randint(0, WIDTH - 1, (ROWS, 1), generator=g)
    advantages = torch.randn(ROWS, 1, 1, generator=g, dtype=torch.float64).expand(ROWS, WIDTH, 1)
    return SimpleNamespace(
        mask=torch.arange(WIDTH) >= start,
        logprobs=draw().requires_grad_(),
        sampler=draw(),
        ref=draw(),
        advantages=advantages,
    )


def theirs(p, **options):
    td = tensordict.TensorDict(
        {
            "current": p.logprobs,
            "mask": p.mask,
            "advantage": p.advantages,
            ("tokens", "full"): torch.zeros(ROWS, WIDTH).long(),
            ("log_probs", "full"): p.sampler,
            ("next", "ref_log_probs", "full"): p.ref,
        },
        [ROWS],
    )
    return Given(None, entropy_bonus=False, device=torch.device("cpu"), **options).double()(td)


def ours(p):
    sequence = torch.arange(ROWS)[:, None].expand(ROWS, WIDTH)[p.mask]
    return LossInputs(
        sequence=sequence,
        mask=torch.ones(len(sequence), dtype=torch.bool),
        logprobs=p.logprobs[p.mask],
        old_logprobs=p.sampler[p.mask],
        sampler_logprobs=p.sampler[p.mask],
        ref_logprobs=p.ref[p.mask],
        advantages=p.advantages.squeeze(-1)[p.mask],
    )


@pytest.mark.parametrize("seed", range(3))
def test_the_effective_sample_size(seed):
    p = case(seed)
    x = ours(p)
    found = effective_sample_size(sampling_metrics(x)["sampling/weight"], x.mask)
    assert found.item() == pytest.approx(theirs(p).ESS.item(), rel=1e-6)


def test_an_empty_mask_has_a_sample_size_here_and_none_there():
    p = case(0)
    p.mask[:] = False
    none = torch.zeros(3)
    assert effective_sample_size(none, none.bool()).item() == 1.0 and theirs(p).ESS.isnan()


@pytest.mark.parametrize("seed", range(2))
def test_the_divergence_from_the_reference_in_value_and_gradient(seed):
    p = case(seed, whole=True)
    found = theirs(p, kl_to_ref_coeff=0.3)
    x = ours(p)
    kl = reference_kl(x, kl_loss_mode="k3").mean()
    assert kl.item() == pytest.approx(found.kl_to_ref.item(), rel=1e-6)
    grads = [torch.autograd.grad(loss, p.logprobs, retain_graph=True)[0] for loss in (0.3 * kl, found.loss_kl_to_ref)]
    torch.testing.assert_close(*grads, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("seed", range(2))
def test_the_divergence_from_the_sampler_and_its_sign(seed):
    p = case(seed, whole=True)
    found, logged = theirs(p, kl_to_inference_coeff=0.1), sampling_metrics(ours(p))
    assert logged["sampling/kl_to_inference"].mean().item() == pytest.approx(found.kl_to_inference.item(), rel=1e-6)
    assert logged["sampling/kl_approx"].mean().item() == pytest.approx(found.kl_approx.item(), rel=1e-6)


def test_prompts_and_padding_dilute_the_divergences_there_and_not_here():
    p = case(1)
    found, logged, share = theirs(p, kl_to_inference_coeff=0.1), sampling_metrics(ours(p)), p.mask.double().mean()
    assert share < 0.9
    here = logged["sampling/kl_to_inference"].mean()
    assert found.kl_to_inference.item() == pytest.approx((share * here).item(), rel=1e-6)


@pytest.mark.parametrize("threshold", [0.02, 0.3])
def test_the_kl_mask_leaves_out_the_same_tokens_and_another_denominator(threshold):
    p = case(2)
    x = ours(p)
    kept = sampler_kl_mask(x, kl_mask_threshold=threshold)
    assert 0 < kept.mean() < 1
    objective = PolicyObjective(surrogate=clipped_surrogate, factors=(lambda x: kept,))
    mine = aggregate(objective(x)[0], token_weights(x.mask, x.sequence, "token-mean"))
    there = theirs(p, kl_mask_threshold=threshold).loss_objective.sum()
    assert mine.item() == pytest.approx((there * kept.mean()).item(), rel=1e-6)  # masked tokens still count here
    grads = [torch.autograd.grad(loss, p.logprobs, retain_graph=True)[0] for loss in (mine, there * kept.mean())]
    torch.testing.assert_close(*grads, rtol=1e-6, atol=1e-12)
