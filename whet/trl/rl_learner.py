"""GRPOLearner as the front runs it: mini-batches counted in completions, and TRL's mean of the entropy bonus."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from whet.config import Mode
from whet.learners.grpo import GRPOLearner
from whet.learners.report import total_metrics
from whet.learners.step import Step
from whet.metrics import flat
from whet.ops import high_entropy_mask
from whet.run.run import Run
from whet.trl.batches import Batches
from whet.trl.replaced import generated, is_replaced
from whet.types import Group, LossInputs, Prompt, TokenBatch

__all__ = ["TRLLearner"]

_SHARE = "entropy_share"
"""Column: what the entropy of a token counts in its mean, over the weight that the loss of the token has."""


class TRLLearner(GRPOLearner):
    """Trains as TRL's GRPOTrainer does: see RLLearner for the arguments. `batches` and `task` are set by the front."""

    batches: Batches
    make_task: Any
    """(learner) -> the RLTask of a run."""

    def new_run(self, train_ds: Any, eval_ds: Any = None) -> Run:
        """As RLLearner.new_run, with the front's task."""
        super().new_run(None)  # its checks
        task = self.make_task(self)
        stream = task.stream(train_ds)
        return Run(task, stream, self.cluster, self.config, observers=self.observers)

    def rollout(self, prompts: Sequence[Prompt], *, step: int, mode: Mode, first: int = 0) -> Sequence[Group]:
        """Completes prompts; by the model's own `generate` where that was replaced on the instance."""
        module = self.cluster.actor.module
        if not is_replaced(module):
            return super().rollout(prompts, step=step, mode=mode, first=first)
        config = self.cluster.rollout_for(mode)
        names = {
            "temperature": config.temperature,
            "top_p": config.top_p,
            "max_new_tokens": config.max_tokens_to_generate,
        }
        return generated(
            module,
            prompts,
            self.num_generations_of(mode),
            end_ids=self.cluster.eos_ids,
            pad_id=self.cluster.pad_id,
            options={**names, "top_k": config.top_k or 0, **config.generation_kwargs},
            version=self.cluster.actor.version,
        )

    def score(self, step: Step) -> Step:
        """As PolicyLearner.score; a replaced `generate` reports no logprobs, so the trainer's are taken."""
        if is_replaced(self.cluster.actor.module):
            batch = step.need_batch()
            step = step.replace(batch=batch.replace(sampler_logprobs=self.cluster.actor.logprobs(batch).logprobs))
        return super().score(step)

    # ---- updates -------------------------------------------------------------------------------------------------

    def num_updates(self, num_groups: int) -> int:
        """Optimizer steps of a rollout."""
        return self.batches.updates

    def minibatches(self, step: Step) -> Iterator[TokenBatch]:
        """The completions of a rollout in their order, so many at a time, num_iterations times."""
        batch = step.need_batch()
        for _ in range(self.batches.passes):
            for rows in torch.arange(batch.num_sequences).split(self.batches.rows):
                yield batch.select(rows)

    def _ranked(self, mini: TokenBatch) -> TokenBatch:
        """As PolicyLearner's, and with each token's share of the mean entropy where there is a bonus."""
        mini = super()._ranked(mini)
        if not self.control.has_entropy_bonus:
            return mini
        mini = self.cluster.actor_trainer.weighted(mini)
        acts = mini.mask
        if self.objective.has(high_entropy_mask):
            acts = acts & (mini.need("entropy_rank") >= 1 - self.algo_config.top_entropy_quantile - 1e-6)
        weights = mini.need("weights").double()
        share = acts.double() / acts.sum().clamp(min=1) / torch.where(weights > 0, weights, 1.0)
        return mini.with_token_columns(**{_SHARE: share})

    def loss(self, x: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """The objective, its entropy bonus a mean over the tokens it acts on, whatever the aggregation: TRL's."""
        loss, metrics = super().loss(x)
        if not self.control.has_entropy_bonus:
            return loss, metrics
        assert x.entropy is not None
        bonus = self.control.loss_entropy_coef * x.entropy
        metrics["policy_loss"] = (loss + bonus).detach()
        return loss + bonus * (1 - x.need(_SHARE).to(loss.dtype)), metrics

    # ---- evaluation ----------------------------------------------------------------------------------------------

    def measure(self, prompts: Sequence[Prompt], step: int) -> tuple[dict[str, float], TokenBatch]:
        """Rewards, completions and the loss on prompts, as an evaluation samples them, and what they were measured on.

        Args: step: of the draws.
        """
        made = self.reward(Step(index=step, prompts=prompts, mode=Mode.EVAL,
                                groups=self.rollout(prompts, step=step, mode=Mode.EVAL)))  # fmt: skip
        made = self.assign_advantages(self.score(self.batch(made)))
        batch = made.need_batch()
        found = self.cluster.actor_trainer.measure(self._ranked(batch))
        return flat({**made.metrics, **total_metrics(batch), **found}), batch
