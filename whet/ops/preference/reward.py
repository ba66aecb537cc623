"""The loss of reward models (Bradley-Terry), from the scores at the last tokens of a pair. Dim legend: u units."""

from __future__ import annotations

import torch

from whet.ops.masked import segment_sum
from whet.ops.preference.inputs import LossOutput
from whet.types import LossInputs

__all__ = ["REWARD_REDUCTIONS", "bradley_terry"]

F = torch.nn.functional

REWARD_REDUCTIONS = {"min_reward": "min", "max_reward": "max"}
"""The reductions of its metrics that are not means."""


def bradley_terry(x: LossInputs, *, center_rewards_coefficient: float | None = None) -> LossOutput:
    """The probability that the chosen answer is the better one.

    l = −log σ(s_w − s_l − m) + c (s_w + s_l)², s the score at a sequence's last token, m the pair's margin, 0 where the
    batch has no column margin
    Args:
        x: pairs with scores, the column chosen and, where there are margins, the column margin (the same for both).
        center_rewards_coefficient: c, which keeps rewards around 0; None = 0.
    Returns: (loss [u], metrics [u]): accuracy, margin, mean_reward, min_reward, max_reward.
    Raises: DataError: a column is missing.
    Source: InstructGPT (arXiv:2203.02155), margins Llama 2 (arXiv:2307.09288), c (arXiv:2312.09244); agrees with TRL's
        RewardTrainer and RL2. Its least and largest reward are of the whole step, TRL's means over micro-batches.

    >>> x = LossInputs(sequence=torch.tensor([0, 1]), mask=torch.ones(2, dtype=torch.bool), logprobs=torch.zeros(2),
    ...                scores=torch.tensor([1.0, 0.0]), unit_of=torch.tensor([0, 0]),
    ...                sequence_columns={"chosen": torch.tensor([1.0, 0.0])})
    >>> bradley_terry(x)[0]  # log(1 + exp(-1))
    tensor([0.3133])
    """
    scores, of_chosen = x.need("scores"), x.need("chosen") >= 0.5
    of_units = lambda values: segment_sum(values, x.unit_of, x.num_units)
    chosen, rejected = of_units(torch.where(of_chosen, scores, 0.0)), of_units(torch.where(of_chosen, 0.0, scores))
    apart = chosen - rejected
    wanted = apart
    if "margin" in x.sequence_columns:
        margin = x.sequence_columns["margin"].to(scores.dtype)
        wanted = apart - of_units(torch.where(of_chosen, margin, 0.0))
    loss = -F.logsigmoid(wanted)
    if center_rewards_coefficient is not None:
        loss = loss + center_rewards_coefficient * (chosen + rejected).square()
    metrics = {
        "accuracy": apart > 0,
        "margin": apart,
        "mean_reward": (chosen + rejected) / 2,
        "min_reward": torch.minimum(chosen, rejected),
        "max_reward": torch.maximum(chosen, rejected),
    }
    return loss, {name: value.detach().to(loss.dtype) for name, value in metrics.items()}
