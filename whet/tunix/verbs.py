"""Tunix's methods of RLCluster: text or padded arrays in, padded arrays out; each works on its own.

A mixin below the cluster, so that the cluster itself deals with prompts, groups and batches only.

Dim letters: B rows, P prompt, C completion.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor

from whet.config import Mode, Role, RolloutConfig
from whet.config.length_aliases import accepts_length_aliases
from whet.data.prompts import PromptEncoder
from whet.observe.trace import Trace
from whet.ops import Support
from whet.packing.padded import check_ids, padded_batch, unpacked
from whet.rollout.base import Sampling
from whet.rollout.text import encode_texts, one_or_many, rollout_output
from whet.train.role_trainer import RoleTrainer
from whet.train.worker import Metrics, ModelWorker
from whet.tunix.metrics_buffer import MetricsBuffer, MetricsBuffers
from whet.types import Group, Message, RolloutOutput

__all__ = ["InferenceWorker", "TunixVerbs"]


class InferenceWorker:
    """Tunix's name for the models that are only read.

    Args: cluster: whose reference and critic they are.
    """

    def __init__(self, cluster: TunixVerbs) -> None:
        self.get_ref_per_token_logps = cluster.get_ref_per_token_logps
        self.get_values = cluster.get_values


class TunixVerbs:
    """What RLCluster does under Tunix's names, by what it has under its own."""

    trace: Trace
    global_steps: int

    if TYPE_CHECKING:  # what the cluster has

        def worker(self, role: Role) -> ModelWorker:
            """The worker of a role."""
            ...

        def sampling(self, mode: Mode = Mode.TRAIN) -> Sampling:
            """The sampling parameters of a mode."""
            ...

        def sample(self, prompts: Any, **options: Any) -> list[Group]:
            """Completes prompts."""
            ...

        def rollout_for(self, mode: Mode = Mode.TRAIN) -> RolloutConfig:
            """The rollout configuration of a mode."""
            ...

        def encoder(self, mode: Mode = Mode.TRAIN, **options: Any) -> PromptEncoder:
            """What turns rows into prompts."""
            ...

        def decode(self, ids: Iterable[int]) -> str:
            """The text of a completion."""
            ...

        @property
        def pad_id(self) -> int:
            """The padding id."""
            ...

        @property
        def actor_trainer(self) -> RoleTrainer:
            """The actor's update."""
            ...

        @property
        def critic_trainer(self) -> RoleTrainer:
            """The critic's update."""
            ...

    def __init__(self) -> None:
        self._calls = 0  # of generate, so that each draws for itself
        self._metrics = MetricsBuffers()

    @property
    def perf(self) -> Trace:
        """Spans of the phases."""
        return self.trace

    perf_v2 = perf

    @property
    def inference_worker(self) -> InferenceWorker:
        """The models that are only read, behind Tunix's verbs."""
        return InferenceWorker(self)

    # ---- sampling ------------------------------------------------------------------------------------------------

    def get_rollout_config(self, mode: Mode = Mode.TRAIN) -> RolloutConfig:
        """The rollout configuration of a mode: `rollout_for`."""
        return self.rollout_for(mode)

    @accepts_length_aliases("max_generation_steps")
    def generate(
        self,
        prompts: Sequence[str] | Sequence[list[Message]],
        apply_chat_template: bool = False,
        mode: Mode = Mode.TRAIN,
        micro_batch_size: int | None = None,
        trace_tags: Mapping[str, Any] | None = None,
        max_generation_steps: int | None = None,
        *,
        seed: int | None = None,
        return_logits: bool = False,
    ) -> RolloutOutput:
        """Completes text prompts or chats, one completion each.

        Args:
            apply_chat_template: for text prompts too; chats always take it.
            mode: whose rollout configuration.
            micro_batch_size: prompts given to the engine at once; the draws don't depend on it.
            trace_tags: noted in the trace.
            max_generation_steps: instead of max_tokens_to_generate, and by that name too.
            seed: two calls with the same seed draw the same; without one, and with none in the configuration, each call
                draws for itself.
            return_logits: give the logits of each token.
        Returns: a RolloutOutput, one entry per prompt.
        Raises: DataError: no prompts, or one longer than max_prompt_length.
        """
        config, sampling = self.rollout_for(mode), self.sampling(mode)
        encoder = self.encoder(
            mode, apply_chat_template=apply_chat_template, on_template_change="accept", on_answered="continue"
        )
        encoded = encode_texts(encoder, one_or_many(prompts))
        longest = sampling.max_tokens if max_generation_steps is None else max_generation_steps
        sampling = dataclasses.replace(sampling, max_tokens=longest, return_logits=return_logits)
        seed = seed if seed is not None else config.seed
        step = self._calls if seed is None else 0
        self._calls += 1
        with self.trace.span("rollout", **dict(trace_tags or {})):
            groups = self.sample(
                encoded, step=step, mode="generate", sampling=sampling, seed=seed, at_once=micro_batch_size
            )
        return rollout_output(groups, self.decode, self.pad_id, logprobs=config.return_logprobs, logits=return_logits)

    # ---- scoring and updates -------------------------------------------------------------------------------------

    def per_token_logps(
        self,
        role: Role,
        prompt_tokens: Any,
        completion_tokens: Any,
        pad_id: int,
        eos_id: int | Sequence[int],
        micro_batch_size: int | None = None,
        temperature: float | None = None,
    ) -> Tensor:
        """Log-probabilities under a role's model.

        Args:
            prompt_tokens: [B, P], left-padded with pad_id.
            completion_tokens: [B, C]; what follows the first eos_id is padding.
            micro_batch_size: rows of one forward pass; None = by token budget.
            temperature: of the whole distribution, without top-p and the like; None = the rollout's own support.
        Returns: [B, C], float32, 0 at padding.
        """
        eos = [eos_id] if isinstance(eos_id, int) else list(eos_id)
        batch, mask = padded_batch(prompt_tokens, completion_tokens, pad_id, eos)
        support = None if temperature is None else Support(temperature=temperature, full=True)
        check_ids(batch, self.worker(role).loaded.num_ids, f"the {role.value}")
        stats = self.worker(role).logprobs(batch, support=support, max_sequences=micro_batch_size)
        assert stats.logprobs is not None
        return unpacked(stats.logprobs, mask)

    def get_ref_per_token_logps(
        self,
        prompt_tokens: Any,
        completion_tokens: Any,
        pad_id: int,
        eos_id: int | Sequence[int],
        micro_batch_size: int | None = None,
    ) -> Tensor:
        """Log-probabilities under the reference: see `per_token_logps`."""
        return self.per_token_logps(Role.REFERENCE, prompt_tokens, completion_tokens, pad_id, eos_id, micro_batch_size)

    def get_actor_per_token_logps(
        self,
        prompt_tokens: Any,
        completion_tokens: Any,
        pad_id: int,
        eos_id: int | Sequence[int],
        micro_batch_size: int | None = None,
        temperature: float | None = None,
    ) -> Tensor:
        """Log-probabilities under the actor as it is now: see `per_token_logps`."""
        return self.per_token_logps(
            Role.ACTOR, prompt_tokens, completion_tokens, pad_id, eos_id, micro_batch_size, temperature
        )

    def get_old_per_token_logps(
        self, prompt_tokens: Any, completion_tokens: Any, micro_batch_size: int | None = None
    ) -> Tensor:
        """Log-probabilities under the policy that rolls out, with the cluster's own pad id, and training's stop ids."""
        stops = self.sampling().stop_ids
        return self.per_token_logps(Role.ACTOR, prompt_tokens, completion_tokens, self.pad_id, stops, micro_batch_size)

    def get_values(
        self, prompt_tokens: Any, completion_tokens: Any, pad_id: int, eos_id: int | Sequence[int]
    ) -> Tensor:
        """The critic's values of the states before each completion token: [B, C], 0 at padding."""
        eos = [eos_id] if isinstance(eos_id, int) else list(eos_id)
        batch, mask = padded_batch(prompt_tokens, completion_tokens, pad_id, eos)
        check_ids(batch, self.worker(Role.CRITIC).loaded.num_ids, "the critic")
        return unpacked(self.worker(Role.CRITIC).values(batch), mask)

    def update_actor(
        self, train_ds: Iterable[Any], eval_ds: Iterable[Any] | None = None, skip_jit: bool = False
    ) -> Metrics:
        """Updates the actor: an optimizer step for each batch, or with train_micro_batch_size for each mini-batch.

        Args: train_ds: TrainExamples or TokenBatches. eval_ds: the loss over these is reported as eval/<name>.
            skip_jit: no torch.compile; nothing is compiled in this release, so both values do the same.
        Returns: the metrics over all of it. The loss is set with `actor_trainer.with_loss_fn`; it is the clipped
            surrogate with token-mean aggregation until then.
        """
        return self._update(self.actor_trainer, train_ds, eval_ds)

    def update_critic(
        self, train_ds: Iterable[Any], eval_ds: Iterable[Any] | None = None, skip_jit: bool = False
    ) -> Metrics:
        """Updates the critic: see `update_actor`. The loss is the clipped value loss until another is set."""
        return self._update(self.critic_trainer, train_ds, eval_ds)

    def _update(self, trainer: RoleTrainer, train_ds: Iterable[Any], eval_ds: Iterable[Any] | None) -> Metrics:
        with self.trace.span("update"):
            metrics = trainer.update_all(train_ds)
        if eval_ds is not None:
            metrics = {**metrics, **{f"eval/{n}": m for n, m in trainer.evaluate(eval_ds).items()}}
        return metrics

    # ---- metrics -------------------------------------------------------------------------------------------------

    def buffer_metrics(self, metrics: Mapping[str, tuple[Any, Any]], mode: Mode = Mode.TRAIN) -> None:
        """Adds metrics, name -> (value, aggregation), to the current step."""
        self._metrics.add(metrics, mode, self.global_steps)

    def buffer_metrics_async(self, metrics: Mapping[str, tuple[Any, Any]], mode: Mode, step: int) -> None:
        """Adds metrics to a given step."""
        self._metrics.add(metrics, mode, step)

    def take_metrics(self, step: int, mode: Mode) -> dict[str, float]:
        """What was buffered for a step and all before it, as numbers; an external logger is told."""
        return self._metrics.take(step, mode)

    def with_external_metrics_logger(self, logger: Callable[[MetricsBuffer], None]) -> Self:
        """Sets a function that is given the MetricsBuffer of each step and mode when the step ends."""
        self._metrics.external_logger = logger
        return self
