"""Losses of pairs without a reference, and the likelihood of the chosen answer that they are mixed with.

    h_w = log π(y_w|x), h_l of the rejected side, sums over trained tokens; |y| their number. NLL is the mean over all
    trained tokens of the chosen sides of an optimizer step, to which a pair contributes −h_w · U / Σ|y_w|, U the pairs:
    the step column tokens_per_pair is Σ|y_w| / U. It needs no pass.

Dim legend: u units; U units of a whole optimizer step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from whet.ops.preference.f_divergences import bounded
from whet.ops.preference.inputs import LossOutput, PreferenceInputs, StepColumns, StepInputs, needs
from whet.ops.preference.pairs import smoothed_logsigmoid

__all__ = ["alpha_reward", "cpo", "cpo_hinge", "cpo_ipo", "log_odds", "orpo", "sft", "simpo"]

F = torch.nn.functional


def _tokens_per_pair(step: StepInputs) -> StepColumns:
    tokens, pairs = step.rows.chosen.length.sum().double(), step.counted.sum()
    return StepColumns(columns={"tokens_per_pair": tokens.clamp(min=1) / pairs.clamp(min=1)})


def _nll(p: PreferenceInputs) -> Tensor:
    """[u]: the contribution of each pair to the mean over the chosen tokens of the step."""
    return p.chosen.nll / p.step_column("tokens_per_pair").to(p.chosen.nll.dtype)


@needs(reference=False, difference=True, step=_tokens_per_pair)
def sft(p: PreferenceInputs) -> Tensor:
    """The likelihood of the chosen answers, every token alike: in a mix, what keeps them likely.

    l = NLL
    Args: p: pairs, with the step column tokens_per_pair.
    Returns: [u].
    Source: the third term of MPO (arXiv:2411.10442); agrees with TRL, where it fails with
        use_weighting; here each pair's own part is weighed.

    >>> from whet.ops.preference import make_pair
    >>> sft(make_pair((-3.0, -3.0), (-4.0, -2.0), (2, 1), tokens_per_pair=2.0))
    tensor([1.5000])
    """
    return _nll(p)


def alpha_reward(h: Tensor, alpha: float) -> Tensor:
    """The reward of AlphaPO: (1 − p^(−α)) / α of p = exp h; h itself at α = 0.

    >>> alpha_reward(torch.tensor([-1.0]), 1.0)  # 1 - e
    tensor([-1.7183])
    """
    return h if alpha == 0 else -bounded(torch.expm1, -alpha * h) / alpha


def _rewards(beta: float, chosen: Tensor, rejected: Tensor, logps: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """The metrics of a loss with rewards that are not log-ratios."""
    return {
        "rewards/chosen": beta * chosen,
        "rewards/rejected": beta * rejected,
        "logps/chosen": logps[0],
        "logps/rejected": logps[1],
    }


def _with_nll(p: PreferenceInputs, loss: Tensor, cpo_alpha: float, metrics: dict[str, Tensor]) -> LossOutput:
    if cpo_alpha == 0:
        return loss, metrics
    nll = _nll(p)
    return loss + cpo_alpha * nll, {**metrics, "nll_loss": nll}


def _contrast(p: PreferenceInputs, mean: bool, alpha: float) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """The rewards of both sides before β, and their log-probabilities."""
    h = [side.per_token(side.logps) if mean else side.logps for side in (p.chosen, p.rejected)]
    return alpha_reward(h[0], alpha), alpha_reward(h[1], alpha), (h[0], h[1])


@needs(reference=False, step=_tokens_per_pair)
def cpo(
    p: PreferenceInputs, *, beta: float = 0.1, label_smoothing: float = 0.0, cpo_alpha: float = 1.0, alpha: float = 0.0
) -> LossOutput:
    """DPO without a reference, and the likelihood of the chosen answer in its place.

    l = −(1 − ε) log σ(β (h_w − h_l)) − ε log σ(−β (h_w − h_l)) + λ NLL
    Args: p: pairs, with the step column tokens_per_pair. beta: β. label_smoothing: ε. cpo_alpha: λ. alpha: of AlphaPO's
        reward (1 − exp(−α h)) / α in place of h; 0 = h.
    Returns: ([u], metrics).
    Source: CPO (arXiv:2401.08417); agrees with TRL's CPOTrainer, loss_type="sigmoid". At α ≠ 0 TRL takes the power of
        exp(h), which is no number for a long answer in fp32.

    >>> from whet.ops.preference import make_pair
    >>> cpo(make_pair((-3.0, -3.0), (-4.0, -2.0), (2, 1), tokens_per_pair=2.0), beta=0.5)[0]
    tensor([2.1931])
    """
    chosen, rejected, logps = _contrast(p, False, alpha)
    loss = smoothed_logsigmoid(beta * (chosen - rejected), label_smoothing)
    return _with_nll(p, loss, cpo_alpha, _rewards(beta, chosen, rejected, logps))


@needs(reference=False, step=_tokens_per_pair)
def cpo_hinge(p: PreferenceInputs, *, beta: float = 0.1, cpo_alpha: float = 1.0, alpha: float = 0.0) -> LossOutput:
    """CPO with a margin: pairs that are 1 apart have only the gradient of the likelihood.

    l = max(0, 1 − β (h_w − h_l)) + λ NLL
    Args: as cpo.
    Returns: ([u], metrics).
    Source: agrees with TRL's CPOTrainer, loss_type="hinge".

    >>> from whet.ops.preference import make_pair
    >>> cpo_hinge(make_pair((-3.0, -3.0), (-4.0, -2.0), (2, 1), tokens_per_pair=2.0), beta=0.5)[0]
    tensor([2.5000])
    """
    chosen, rejected, logps = _contrast(p, False, alpha)
    loss = torch.relu(1 - beta * (chosen - rejected))
    return _with_nll(p, loss, cpo_alpha, _rewards(beta, chosen, rejected, logps))


@needs(reference=False, step=_tokens_per_pair)
def cpo_ipo(p: PreferenceInputs, *, beta: float = 0.1, cpo_alpha: float = 1.0, alpha: float = 0.0) -> LossOutput:
    """CPO with a target for the difference per token.

    l = (h_w / |y_w| − h_l / |y_l| − 1 / (2β))² + λ NLL
    Args: as cpo.
    Returns: ([u], metrics).
    Source: agrees with TRL's CPOTrainer, loss_type="ipo".

    >>> from whet.ops.preference import make_pair
    >>> cpo_ipo(make_pair((-3.0, -3.0), (-4.0, -2.0), (2, 1), tokens_per_pair=2.0), beta=0.5)[0]
    tensor([1.7500])
    """
    chosen, rejected, logps = _contrast(p, True, alpha)
    loss = (chosen - rejected - 1 / (2 * beta)).square()
    return _with_nll(p, loss, cpo_alpha, _rewards(beta, chosen, rejected, logps))


@needs(reference=False, step=_tokens_per_pair)
def simpo(
    p: PreferenceInputs,
    *,
    beta: float = 0.1,
    simpo_gamma: float = 0.5,
    label_smoothing: float = 0.0,
    cpo_alpha: float = 1.0,
    alpha: float = 0.0,
) -> LossOutput:
    """The mean log-probability as the reward, with a margin: training and generation rank answers by the same number.

    l = −(1 − ε) log σ(z) − ε log σ(−z) + λ NLL, z = β (h_w / |y_w| − h_l / |y_l|) − γ
    Args: p: pairs, with the step column tokens_per_pair. beta: β; the paper has 2.0 to 2.5. simpo_gamma: γ.
        label_smoothing: ε. cpo_alpha: λ; 0 = SimPO as its paper has it. alpha: of AlphaPO's reward
        (1 − exp(−α h)) / α of the mean h; 0 = h.
    Returns: ([u], metrics).
    Source: SimPO (arXiv:2405.14734), AlphaPO (arXiv:2501.03884); agrees with TRL's CPOTrainer, loss_type="simpo".

    >>> from whet.ops.preference import make_pair
    >>> simpo(make_pair((-3.0, -3.0), (-4.0, -2.0), (2, 1), tokens_per_pair=2.0), beta=2.0, cpo_alpha=0.0)[0]
    tensor([0.0789])
    """
    chosen, rejected, logps = _contrast(p, True, alpha)
    loss = smoothed_logsigmoid(beta * (chosen - rejected) - simpo_gamma, label_smoothing)
    return _with_nll(p, loss, cpo_alpha, _rewards(beta, chosen, rejected, logps))


def log_odds(h: Tensor) -> Tensor:
    """log(p / (1 − p)) of p = exp h, h ≤ 0, without cancellation near 0.

    >>> log_odds(torch.tensor([0.5]).log()).abs() < 1e-6
    tensor([True])
    """
    h = h.clamp(max=-torch.finfo(h.dtype).eps)  # p = 1, to rounding, has no odds
    near = h > -math.log(2)
    close = torch.where(near, h, -1.0).expm1().neg().log()
    return h - torch.where(near, close, torch.log1p(-torch.where(near, -1.0, h).exp()))


@needs(reference=False, step=_tokens_per_pair)
def orpo(p: PreferenceInputs, *, beta: float = 0.1) -> LossOutput:
    """SFT on the chosen answers with a term that lowers the odds of the rejected ones; one model, one stage.

    l = NLL − β log σ(log odds(h_w / |y_w|) − log odds(h_l / |y_l|)), log odds(h) = h − log(1 − exp h)
    Args: p: pairs, with the step column tokens_per_pair. beta: β, the paper's λ.
    Returns: ([u], metrics).
    Source: ORPO (arXiv:2403.07691); agrees with TRL's ORPOTrainer but for the NLL, which is of the trained tokens here
        and of prompt and answer there: the same for a prompt of one token.

    >>> from whet.ops.preference import make_pair
    >>> orpo(make_pair((-3.0, -3.0), (-4.0, -2.0), (2, 1), tokens_per_pair=2.0))[0]
    tensor([1.5168])
    """
    chosen, rejected, logps = _contrast(p, True, 0.0)
    odds = log_odds(chosen) - log_odds(rejected)
    ratio, nll = F.logsigmoid(odds), _nll(p)
    metrics = {"nll_loss": nll, "log_odds_ratio": ratio, "log_odds_chosen": odds}
    return nll - beta * ratio, {**_rewards(beta, chosen, rejected, logps), **metrics}
