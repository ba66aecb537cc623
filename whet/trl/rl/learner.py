"""TRL's variant of GRPOLearner: mini-batches of completions, and TRL's mean of the entropy bonus."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from whet.config import Mode
from whet.data.prompts import PromptEncoder
from whet.envs.recorded import DivergedError
from whet.envs.tool_calls import parse_turn
from whet.errors import ConfigError
from whet.learners.grpo import GRPOLearner
from whet.learners.rl_task import RLTask
from whet.learners.step import Step
from whet.learners.step_metrics import spread, total_metrics
from whet.metrics import flat
from whet.ops import high_entropy_mask, off_policy_mask
from whet.rollout.driver import Episode, single_turns
from whet.trl.agents.agents import Agents
from whet.trl.config.batches import Batches
from whet.trl.config.translate import beam_options
from whet.trl.rl.custom_generate import find_custom_generate, generate_groups
from whet.types import Group, LossInputs, Prompt, TokenBatch

__all__ = ["TRLLearner"]

_SHARE = "entropy_share"
"""Column: a token's share in the mean entropy, divided by the weight of its loss."""


class TRLLearner(GRPOLearner):
    """Trains as TRL's GRPOTrainer does; RLLearner describes the arguments. The trainer sets the attributes below."""

    batches: Batches
    agents: Agents
    trainer: Any
    """The trainer, which rollout_func receives."""
    make_task: Any
    """(learner) -> the task of a run."""

    def new_task(self, eval_ds: Any = None) -> RLTask:
        """Returns the task that calls the trainer's callbacks. It runs no evaluations: the trainer does."""
        return self.make_task(self)

    # ---- rollouts ------------------------------------------------------------------------------------------------

    def encoder(self, mode: Mode) -> PromptEncoder:
        """Returns the encoder of prompts with the tools' schemas."""
        return self.encoder_with(mode, self.agents.schemas)

    def encoder_with(self, mode: Mode, schemas: Sequence[Any]) -> PromptEncoder:
        """Returns the encoder of prompts with other tools. Args: schemas: the schemas for the chat template."""
        return self.cluster.encoder(mode, prompt_column="prompt", on_answered="continue", tools=schemas or None)

    def rollout(self, prompts: Sequence[Prompt], *, step: int, mode: Mode, first: int = 0) -> Sequence[Group]:
        """Completes prompts by rollout_func, else by the model's custom `generate`, else by the engine."""
        count = self.num_generations_of(mode)
        if self.agents.rollout_func is not None:
            return self.parse_messages(self._call_rollout_func(prompts, count))
        try:
            return self.parse_messages(self._sample(prompts, step=step, mode=mode, first=first, replays=True))
        except DivergedError:  # the model says something else than in the recorded run
            return self.parse_messages(self._sample(prompts, step=step, mode=mode, first=first, replays=False))

    def _sample(
        self, prompts: Sequence[Prompt], *, step: int, mode: Mode, first: int, replays: bool
    ) -> Sequence[Group]:
        """Completes prompts. Args: replays: recorded answers are taken."""
        count, key = self.num_generations_of(mode), (self.cluster.draw_seed(mode), step, first)
        prompts, run_episode = self.agents.start_episodes(self, prompts, count, mode, key, replays=replays)
        if (model := self._custom_generate_model()) is None:
            return self.cluster.sample(
                prompts, num_generations=count, step=step, first=first, mode=mode, run_episode=run_episode
            )
        if (size := self.cluster.ranks.size) > 1:
            raise ConfigError(
                f"WORLD_SIZE is {size}, and a custom generate or beam search samples in one process in this release; "
                "start one process, or give rollout_func, which each process calls with its own prompts"
            )
        config, sampling = self.cluster.rollout_for(mode), self.cluster.sampling(mode)
        if run_episode is None:
            episodes = single_turns(prompts, sampling, num_generations=count, rng_key=(0, step, first))
        else:
            run = lambda episode: run_episode(episode, sampling)
            episodes = [Episode(prompt, (0, step, first + i, g), run)
                        for i, prompt in enumerate(prompts) for g in range(count)]  # fmt: skip
        with self.trainer.attention.native():
            groups = generate_groups(
                model,
                episodes,
                count,
                end_ids=self.cluster.eos_ids,
                pad_id=self.cluster.pad_id,
                options={
                    "temperature": config.temperature,
                    "top_p": config.top_p,
                    "top_k": config.top_k or 0,
                    "max_new_tokens": config.max_tokens_to_generate,
                    **config.generation_kwargs,
                    **beam_options(self.trainer.args),
                },
                version=self.cluster.actor.version,
            )
        return groups

    def _call_rollout_func(self, prompts: Sequence[Prompt], count: int) -> list[Group]:
        """Completes prompts by rollout_func; of several processes each completes a share."""
        with self.cluster.actor.rollout_weights():
            shares = self.cluster.ranks.scatter_gather(
                lambda own: self.agents.call_rollout_func(self.trainer, own, count, self.cluster.eos_ids), prompts
            )
        return [group for share in shares for group in share]

    def _custom_generate_model(self) -> nn.Module | None:
        """Returns the model with a custom `generate`, or the model if the arguments ask for beam search; None = the
        engine.
        """
        model = find_custom_generate(self.trainer.model, self.cluster.actor.module)
        return self.cluster.actor.module if model is None and beam_options(self.trainer.args) else model

    def parse_messages(self, groups: Sequence[Group]) -> Sequence[Group]:
        """Adds messages to the completions, parsed by the tokenizer's response template if it has one."""
        tokenizer: Any = self.cluster.tokenizer
        if tokenizer.response_template is None:
            return groups
        parse = partial(parse_turn, tokenizer, tokenizer.response_template)
        parsed = []
        for group in groups:
            context, is_chat = group.prompt.tokens, not isinstance(group.prompt.source, str)
            completions = [
                dataclasses.replace(c, messages=(parse(c.tokens, context, self.agents.schemas),))
                if is_chat and c.messages is None
                else c
                for c in group.completions
            ]
            parsed.append(dataclasses.replace(group, completions=tuple(completions)))
        return parsed

    def batch(self, step: Step) -> Step:
        """Packs the step as RLLearner does. With tools or rollout_func, lengths count the model's tokens, as in TRL."""
        step = super().batch(step)
        if not self.agents.has_tools and self.agents.rollout_func is None:
            return step
        completions = [c for g in step.rewards.groups for c in g.completions]
        lengths = np.array([int((c.versions >= 0).sum()) for c in completions])
        stopped = np.array([c.finish_reason == "stop" for c in completions])
        metrics = {
            **step.metrics,
            **spread("completions/length", lengths, prefix=True),
            **spread("completions/terminated_length", lengths[stopped], prefix=True),
        }
        return step.replace(metrics=metrics)

    def score(self, step: Step) -> Step:
        """Computes logprobs as PolicyLearner does. Without the engine, the trainer's logprobs count as the sampler's.

        Only the off-policy mask reads rollout_func's logprobs: it measures the distance of the sampler's policy.
        """
        if self._uses_engine():
            return super().score(step)
        batch = step.batch
        rescored = batch.replace(sampler_logprobs=self.cluster.actor.logprobs(batch).logprobs)
        step = super().score(step.replace(batch=rescored))
        if self.records_sampler:
            step = step.replace(batch=step.batch.replace(sampler_logprobs=batch.sampler_logprobs))
        return step

    @property
    def records_sampler(self) -> bool:
        """Whether batch.sampler_logprobs are of the policy that sampled; the trainer's may stand in for them."""
        reads_own = self.agents.rollout_func is not None and self.objective.has(off_policy_mask)
        return super().records_sampler if self._uses_engine() else reads_own

    def _uses_engine(self) -> bool:
        return self.agents.rollout_func is None and self._custom_generate_model() is None

    # ---- updates -------------------------------------------------------------------------------------------------

    def num_updates(self, num_groups: int) -> int:
        """Returns the optimizer steps of a rollout."""
        return self.batches.updates

    def minibatches(self, step: Step) -> Iterator[TokenBatch]:
        """Yields a rollout's completions in order, `batches.rows` at a time, num_iterations times over."""
        batch = step.batch
        for _ in range(self.batches.passes):
            for rows in torch.arange(batch.num_sequences).split(self.batches.rows):
                yield batch.select(rows)

    def with_update_columns(self, mini: TokenBatch) -> TokenBatch:
        """Adds each token's share of the mean entropy if there is an entropy bonus."""
        mini = super().with_update_columns(mini)
        if not self.kl_controller.has_entropy_bonus:
            return mini
        mini = self.cluster.actor_trainer.add_loss_weights(mini)
        mask = mini.mask
        if self.objective.has(high_entropy_mask):
            mask = mask & (mini.need("entropy_rank") >= 1 - self.algo_config.top_entropy_quantile - 1e-6)
        weights = mini.need("weights").double()
        share = mask.double() / mask.sum().clamp(min=1) / torch.where(weights > 0, weights, 1.0)
        return mini.with_token_columns(**{_SHARE: share})

    def loss(self, x: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the objective. As in TRL, the entropy bonus is a mean over its tokens, whatever the loss
        aggregation.
        """
        loss, metrics = super().loss(x)
        if not self.kl_controller.has_entropy_bonus:
            return loss, metrics
        assert x.entropy is not None
        bonus = self.kl_controller.loss_entropy_coef * x.entropy
        metrics["policy_loss"] = (loss + bonus).detach()
        return loss + bonus * (1 - x.need(_SHARE).to(loss.dtype)), metrics

    # ---- evaluation ----------------------------------------------------------------------------------------------

    def measure(self, prompts: Sequence[Prompt], step: int) -> tuple[dict[str, float], TokenBatch]:
        """Samples completions for evaluation prompts, and computes their rewards and loss.

        Args: step: the step's index, for the random draws.
        Returns: the metrics, and the batch of completions.
        """
        groups = self.rollout(prompts, step=step, mode=Mode.EVAL)
        record = self.reward(Step(index=step, prompts=prompts, mode=Mode.EVAL, groups=groups))
        record = self.assign_advantages(self.score(self.batch(record)))
        losses = self.cluster.actor_trainer.evaluate_batch(self.with_update_columns(record.batch))
        return flat({**record.metrics, **total_metrics(record.rewards), **losses}), record.batch
