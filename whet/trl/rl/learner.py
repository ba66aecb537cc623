"""TRL's variant of GRPOLearner: mini-batches counted in completions, and TRL's mean of the entropy bonus."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from whet.config import Mode
from whet.data.prompts import PromptEncoder
from whet.envs.tool_calls import parse_turn
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
"""Column: the share of a token in the mean entropy, divided by the weight of its loss."""


class TRLLearner(GRPOLearner):
    """Trains as TRL's GRPOTrainer does; RLLearner describes the arguments. The trainer sets the attributes below."""

    batches: Batches
    agents: Agents
    trainer: Any
    """The trainer, which rollout_func receives."""
    make_task: Any
    """(learner) -> the RLTask of a run."""

    def new_task(self, eval_ds: Any = None) -> RLTask:
        """The task that calls the trainer's callbacks. It runs no evaluations: the trainer does."""
        return self.make_task(self)

    # ---- rollouts ------------------------------------------------------------------------------------------------

    def encoder(self, mode: Mode) -> PromptEncoder:
        """The encoder of prompts, with the schemas of the tools."""
        return self.encoder_with(mode, self.agents.schemas)

    def encoder_with(self, mode: Mode, schemas: Sequence[Any]) -> PromptEncoder:
        """The same with other tools. Args: schemas: what the template is told of them."""
        return self.cluster.encoder(mode, prompt_column="prompt", on_answered="continue", tools=schemas or None)

    def rollout(self, prompts: Sequence[Prompt], *, step: int, mode: Mode, first: int = 0) -> Sequence[Group]:
        """Completes prompts: by rollout_func, by the model's own `generate` where that was replaced, by the engine."""
        number = self.num_generations_of(mode)
        if self.agents.rollout_func is not None:
            groups = self.agents.call_rollout_func(self.trainer, prompts, number, self.cluster.eos_ids)
            return self.parse_messages(groups)
        prompts, play = self.agents.start_episodes(self, prompts, number, mode, first)
        if (own := self._own_generate()) is not None:
            return self.parse_messages(self._generated(own, prompts, number, play, (step, first), mode))
        return self.parse_messages(
            self.cluster.sample(prompts, num_generations=number, step=step, first=first, mode=mode, play=play)
        )

    def _own_generate(self) -> nn.Module | None:
        """The model whose `generate` makes completions: a user has replaced it, or asks for beams."""
        own = find_custom_generate(self.trainer.model, self.cluster.actor.module)
        return self.cluster.actor.module if own is None and beam_options(self.trainer.args) else own

    def _generated(
        self, model: nn.Module, prompts: Sequence[Prompt], number: int, play: Any, place: tuple[int, int], mode: Mode
    ) -> list[Group]:
        config, sampling = self.cluster.rollout_for(mode), self.cluster.sampling(mode)
        names = {
            "temperature": config.temperature,
            "top_p": config.top_p,
            "max_new_tokens": config.max_tokens_to_generate,
        }
        step, first = place
        if play is None:
            episodes = single_turns(prompts, sampling, num_generations=number, address=(0, step, first))
        else:
            episodes = [Episode(prompt, (0, step, first + i, g), play(sampling))
                        for i, prompt in enumerate(prompts) for g in range(number)]  # fmt: skip
        with self.trainer.attention.native():
            return generate_groups(
                model,
                episodes,
                number,
                end_ids=self.cluster.eos_ids,
                pad_id=self.cluster.pad_id,
                options={
                    **names,
                    "top_k": config.top_k or 0,
                    **config.generation_kwargs,
                    **beam_options(self.trainer.args),
                },
                version=self.cluster.actor.version,
            )

    def parse_messages(self, groups: Sequence[Group]) -> Sequence[Group]:
        """The groups, with messages parsed by the tokenizer's response template, where it has one."""
        tokenizer: Any = self.cluster.tokenizer
        if tokenizer.response_template is None:
            return groups
        read = functools.partial(parse_turn, tokenizer, tokenizer.response_template)
        made = []
        for group in groups:
            context, chat = group.prompt.tokens, not isinstance(group.prompt.source, str)
            done = [
                dataclasses.replace(c, messages=(read(c.tokens, context, self.agents.schemas),))
                if chat and c.messages is None
                else c
                for c in group.completions
            ]
            made.append(dataclasses.replace(group, completions=tuple(done)))
        return made

    def batch(self, step: Step) -> Step:
        """As RLLearner.batch; lengths of completions with tools are those of what the model said, as in TRL."""
        step = super().batch(step)
        if not self.agents.has_tools and self.agents.rollout_func is None:
            return step
        done = [c for g in step.rewards.groups for c in g.completions]
        lengths = np.array([int((c.versions >= 0).sum()) for c in done])
        stopped = np.array([c.finish_reason == "stop" for c in done])
        own = {
            **spread("completions/length", lengths, prefix=True),
            **spread("completions/terminated_length", lengths[stopped], prefix=True),
        }
        return step.replace(metrics={**step.metrics, **own})

    def score(self, step: Step) -> Step:
        """As PolicyLearner.score; what the engine has not sampled has no logprobs of its own, so the trainer's are
        taken. The off-policy mask alone goes by those that rollout_func gave: it asks how far the sampler is away.
        """
        by_function = self.agents.rollout_func is not None
        if not by_function and self._own_generate() is None:
            return super().score(step)
        batch = step.batch
        own = batch.replace(sampler_logprobs=self.cluster.actor.logprobs(batch).logprobs)
        step = super().score(step.replace(batch=own))
        if by_function and self.objective.has(off_policy_mask):
            step = step.replace(batch=step.batch.replace(sampler_logprobs=batch.sampler_logprobs))
        return step

    # ---- updates -------------------------------------------------------------------------------------------------

    def num_updates(self, num_groups: int) -> int:
        """Optimizer steps of a rollout."""
        return self.batches.updates

    def minibatches(self, step: Step) -> Iterator[TokenBatch]:
        """The completions of a rollout in their order, so many at a time, num_iterations times."""
        batch = step.batch
        for _ in range(self.batches.passes):
            for rows in torch.arange(batch.num_sequences).split(self.batches.rows):
                yield batch.select(rows)

    def with_update_columns(self, mini: TokenBatch) -> TokenBatch:
        """As PolicyLearner's, with each token's share of the mean entropy where there is a bonus."""
        mini = super().with_update_columns(mini)
        if not self.kl_controller.has_entropy_bonus:
            return mini
        mini = self.cluster.actor_trainer.add_loss_weights(mini)
        acts = mini.mask
        if self.objective.has(high_entropy_mask):
            acts = acts & (mini.need("entropy_rank") >= 1 - self.algo_config.top_entropy_quantile - 1e-6)
        weights = mini.need("weights").double()
        share = acts.double() / acts.sum().clamp(min=1) / torch.where(weights > 0, weights, 1.0)
        return mini.with_token_columns(**{_SHARE: share})

    def loss(self, x: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """The objective, its entropy bonus a mean over the tokens it acts on, whatever the aggregation: TRL's."""
        loss, metrics = super().loss(x)
        if not self.kl_controller.has_entropy_bonus:
            return loss, metrics
        assert x.entropy is not None
        bonus = self.kl_controller.loss_entropy_coef * x.entropy
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
        batch = made.batch
        found = self.cluster.actor_trainer.evaluate_batch(self.with_update_columns(batch))
        return flat({**made.metrics, **total_metrics(made.rewards), **found}), batch
