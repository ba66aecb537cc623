"""Losses of pairs against a reference: each a function of the two sides' log-ratios, pair by pair.

    r_w = log π(y_w|x) − log π_ref(y_w|x), r_l the same of the rejected side; δ = s_w − s_l, the difference of the
    scores, which are r_w and r_l under the reverse KL and f'(exp r) of another f-divergence. σ the logistic function.

Dim legend: u units.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from whet.ops.preference.f_divergences import bounded
from whet.ops.preference.inputs import PreferenceInputs, StepColumns, StepInputs, needs

__all__ = [
    "apo_down",
    "apo_zero",
    "bco",
    "bco_pair",
    "discopop",
    "exo_pair",
    "hinge",
    "ipo",
    "nca_pair",
    "robust",
    "sigmoid",
    "sigmoid_norm",
    "smoothed_logsigmoid",
    "sppo_hard",
]

F = torch.nn.functional


def smoothed_logsigmoid(z: Tensor, label_smoothing: float) -> Tensor:
    """−(1 − ε) log σ(z) − ε log σ(−z): the cross-entropy of a preference that is the other way with probability ε.

    >>> smoothed_logsigmoid(torch.tensor([0.0]), 0.1)  # log 2
    tensor([0.6931])
    """
    loss = -F.logsigmoid(z)
    return loss if label_smoothing == 0 else (1 - label_smoothing) * loss - label_smoothing * F.logsigmoid(-z)


def _difference(p: PreferenceInputs) -> Tensor:
    return p.chosen.score - p.rejected.score


def _mean_difference(p: PreferenceInputs) -> Tensor:
    return p.chosen.per_token(p.chosen.score) - p.rejected.per_token(p.rejected.score)


@needs(difference=True)
def sigmoid(p: PreferenceInputs, *, beta: float = 0.1, label_smoothing: float = 0.0) -> Tensor:
    """DPO: the preference model of Bradley and Terry, with β times the log-ratio as the reward.

    l = −(1 − ε) log σ(β δ) − ε log σ(−β δ)
    Args: p: pairs. beta: β. label_smoothing: ε, the share of preferences that are the wrong way round.
    Returns: [u].
    Source: DPO (arXiv:2305.18290), ε its conservative form (cDPO); agrees with RL2, with TRL's CPOTrainer at any ε and
        with its DPOTrainer at ε = 0, which reads no label_smoothing here.

    >>> from whet.ops.preference import make_pair
    >>> sigmoid(make_pair((-3.0, -3.0), (-4.0, -2.0), (2, 1)), beta=0.5)
    tensor([0.3133])
    """
    return smoothed_logsigmoid(beta * _difference(p), label_smoothing)


@needs(difference=True)
def sigmoid_norm(p: PreferenceInputs, *, beta: float = 0.1) -> Tensor:
    """DPO of the log-ratio per token, so that a longer answer has no larger reward.

    l = −log σ(β (s_w / |y_w| − s_l / |y_l|)), |y| the trained tokens of a side
    Args: p: pairs. beta: β.
    Returns: [u].
    Source: agrees with TRL's DPOTrainer; the length-normalised DPO of Tülu 3 (arXiv:2411.15124).

    >>> from whet.ops.preference import make_pair
    >>> sigmoid_norm(make_pair((-3.0, -3.0), (-4.0, -2.0), (2, 1)), beta=0.5)
    tensor([0.3869])
    """
    return -F.logsigmoid(beta * _mean_difference(p))


@needs(difference=True)
def hinge(p: PreferenceInputs, *, beta: float = 0.1) -> Tensor:
    """A margin: pairs with rewards that are 1 apart have no gradient.

    l = max(0, 1 − β δ)
    Args: p: pairs. beta: β, the inverse of the margin.
    Returns: [u].
    Source: SLiC (arXiv:2309.06657); agrees with TRL.

    >>> from whet.ops.preference import make_pair
    >>> hinge(make_pair((-3.0, -3.0), (-4.0, -2.0), (2, 1)), beta=0.5)
    tensor([0.])
    """
    return torch.relu(1 - beta * _difference(p))


@needs(difference=True)
def ipo(p: PreferenceInputs, *, beta: float = 0.1) -> Tensor:
    """A squared error with a target, so that certain preferences do not drive the log-ratio to infinity.

    l = (s_w / |y_w| − s_l / |y_l| − 1 / (2β))², |y| the trained tokens of a side
    Args: p: pairs. beta: β, the paper's τ.
    Returns: [u].
    Source: IPO (arXiv:2310.12036), per token as TRL has it after its authors; agrees with TRL.

    >>> from whet.ops.preference import make_pair
    >>> ipo(make_pair((-3.0, -3.0), (-4.0, -2.0), (2, 1)), beta=0.5)
    tensor([0.2500])
    """
    return (_mean_difference(p) - 1 / (2 * beta)).square()


@needs(difference=True)
def robust(p: PreferenceInputs, *, beta: float = 0.1, label_smoothing: float = 0.0) -> Tensor:
    """DPO without bias where preferences are flipped at random with a known probability.

    l = (−(1 − ε) log σ(β δ) + ε log σ(−β δ)) / (1 − 2ε)
    Args: p: pairs. beta: β. label_smoothing: ε in [0, 0.5), the probability of a flip.
    Returns: [u].
    Source: robust DPO (arXiv:2403.00409); agrees with TRL.

    >>> from whet.ops.preference import make_pair
    >>> robust(make_pair((-3.0, -3.0), (-4.0, -2.0), (2, 1)), beta=0.5, label_smoothing=0.1)
    tensor([0.1883])
    """
    z = beta * _difference(p)
    right, flipped = -(1 - label_smoothing) * F.logsigmoid(z), -label_smoothing * F.logsigmoid(-z)
    return (right - flipped) / (1 - 2 * label_smoothing)


@needs(difference=True)
def exo_pair(p: PreferenceInputs, *, beta: float = 0.1, label_smoothing: float = 0.0) -> Tensor:
    """The reverse KL to a smoothed preference, where DPO has the forward one: it seeks the better answer's mode.

    l = σ(β δ) (log σ(β δ) − log(1 − ε)) + σ(−β δ) (log σ(−β δ) − log ε)
    Args: p: pairs. beta: β. label_smoothing: ε > 0; the paper has 1e-3.
    Returns: [u].
    Source: EXO (arXiv:2402.00856), equation 16; agrees with TRL.

    >>> from whet.ops.preference import make_pair
    >>> exo_pair(make_pair((-3.0, -3.0), (-4.0, -2.0), (2, 1)), beta=0.5, label_smoothing=0.001)
    tensor([1.2763])
    """
    z, epsilon = beta * _difference(p), label_smoothing
    right = z.sigmoid() * (F.logsigmoid(z) - math.log1p(-epsilon))
    return right + (-z).sigmoid() * (F.logsigmoid(-z) - math.log(epsilon))


def nca_pair(p: PreferenceInputs, *, beta: float = 0.1) -> Tensor:
    """Noise contrast: it raises the chosen answer's own likelihood too, which DPO may lower with the rejected one's.

    l = −log σ(β r_w) − ½ log σ(−β r_w) − ½ log σ(−β r_l)
    Args: p: pairs. beta: β.
    Returns: [u].
    Source: NCA (arXiv:2402.05369); agrees with TRL.

    >>> from whet.ops.preference import make_pair
    >>> nca_pair(make_pair((-3.0, -3.0), (-4.0, -2.0), (2, 1)), beta=0.5)
    tensor([1.1982])
    """
    chosen, rejected = beta * p.chosen.logratio, beta * p.rejected.logratio
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def bco_pair(p: PreferenceInputs, *, beta: float = 0.1) -> Tensor:
    """A classifier of chosen and rejected answers, each on its own.

    l = −log σ(β r_w) − log σ(−β r_l)
    Args: p: pairs. beta: β.
    Returns: [u].
    Source: BCO (arXiv:2404.04656) without its shift; agrees with TRL.

    >>> from whet.ops.preference import make_pair
    >>> bco_pair(make_pair((-3.0, -3.0), (-4.0, -2.0), (2, 1)), beta=0.5)
    tensor([0.9482])
    """
    return -F.logsigmoid(beta * p.chosen.logratio) - F.logsigmoid(-beta * p.rejected.logratio)


def _shift(step: StepInputs, *, beta: float = 0.1) -> StepColumns:
    """δ of BCO, with this step's rewards in its mean; in evaluation as it is."""
    mean, count = step.running.get("bco_mean", 0.0), step.running.get("bco_rewards", 0.0)
    if step.learning:
        rewards = beta * torch.stack([step.rows.chosen.logratio, step.rows.rejected.logratio])[:, step.counted].double()
        mean = (mean * count + float(rewards.sum())) / max(count + rewards.numel(), 1.0)
        count += rewards.numel()
    running = {"bco_mean": mean, "bco_rewards": count}
    return StepColumns(columns={"bco_shift": torch.tensor(mean, dtype=torch.float64)}, running=running)


@needs(policy_pass=True, running=True, step=_shift)
def bco(p: PreferenceInputs, *, beta: float = 0.1) -> Tensor:
    """bco_pair with rewards relative to their running mean, so that the classifier need not shift all of them first.

    l = −log σ(β r_w − δ) − log σ(−(β r_l − δ)), δ the mean of the rewards β r of both sides over all steps so far, this
    one's before its update included
    Args: p: pairs, with the step column bco_shift, δ. beta: β.
    Returns: [u].
    Source: BCO (arXiv:2404.04656); TRL's bco_pair had it in older releases and has no shift in 1.16. δ is of
        whole optimizer steps, is saved with the run, and stands still in evaluation.

    >>> from whet.ops.preference import make_pair
    >>> bco(make_pair((-3.0, -3.0), (-4.0, -2.0), (2, 1), bco_shift=0.25), beta=0.5)
    tensor([0.9628])
    """
    shift = p.step_column("bco_shift").to(p.chosen.logps.dtype)
    return -F.logsigmoid(beta * p.chosen.logratio - shift) - F.logsigmoid(shift - beta * p.rejected.logratio)


def sppo_hard(p: PreferenceInputs, *, beta: float = 0.1) -> Tensor:
    """Self-play: both log-ratios have a target, a win or a loss with certainty.

    l = (r_w − 1 / (2β))² + (r_l + 1 / (2β))²
    Args: p: pairs. beta: β.
    Returns: [u].
    Source: SPPO (arXiv:2405.00675), equation 4.7 with probabilities 1 and 0; agrees with TRL.

    >>> from whet.ops.preference import make_pair
    >>> sppo_hard(make_pair((-3.0, -3.0), (-4.0, -2.0), (2, 1)), beta=0.5)
    tensor([0.])
    """
    return (p.chosen.logratio - 0.5 / beta).square() + (p.rejected.logratio + 0.5 / beta).square()


def apo_zero(p: PreferenceInputs, *, beta: float = 0.1) -> Tensor:
    """Raises the chosen answer and lowers the rejected one: for chosen answers better than the model's own.

    l = 1 − σ(β r_w) + σ(β r_l)
    Args: p: pairs. beta: β.
    Returns: [u].
    Source: APO (arXiv:2408.06266), equation 7; agrees with TRL.

    >>> from whet.ops.preference import make_pair
    >>> apo_zero(make_pair((-3.0, -3.0), (-4.0, -2.0), (2, 1)), beta=0.5)
    tensor([0.7551])
    """
    return (-beta * p.chosen.logratio).sigmoid() + (beta * p.rejected.logratio).sigmoid()


def apo_down(p: PreferenceInputs, *, beta: float = 0.1) -> Tensor:
    """Lowers both, the rejected one more: for chosen answers worse than the model's own.

    l = σ(β r_w) + 1 − σ(β (r_w − r_l))
    Args: p: pairs. beta: β.
    Returns: [u].
    Source: APO (arXiv:2408.06266), equation 8; agrees with TRL.

    >>> from whet.ops.preference import make_pair
    >>> apo_down(make_pair((-3.0, -3.0), (-4.0, -2.0), (2, 1)), beta=0.5)
    tensor([0.8914])
    """
    margin = p.chosen.logratio - p.rejected.logratio
    return (beta * p.chosen.logratio).sigmoid() + (-beta * margin).sigmoid()


@needs(difference=True)
def discopop(p: PreferenceInputs, *, beta: float = 0.1, discopop_tau: float = 0.05) -> Tensor:
    """A loss that was found by search: logistic for pairs the wrong way round, exponential for the others.

    l = −(1 − m) log σ(β δ) + m exp(−β δ), m = σ(β δ / τ)
    Args: p: pairs. beta: β. discopop_tau: τ.
    Returns: [u].
    Source: DiscoPOP (arXiv:2406.08414), equation 5; agrees with TRL.

    >>> from whet.ops.preference import make_pair
    >>> discopop(make_pair((-3.0, -3.0), (-4.0, -2.0), (2, 1)), beta=0.5)
    tensor([0.3679])
    """
    z = beta * _difference(p)
    gate = z / discopop_tau
    # m exp(−z) as one exponential: apart, a pair far the wrong way round is 0 · ∞
    return -F.logsigmoid(z) * (-gate).sigmoid() + bounded(torch.exp, F.logsigmoid(gate) - z)
