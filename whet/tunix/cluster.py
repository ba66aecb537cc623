"""Tunix's RLCluster (RLEngine): whet's cluster with the methods, workers and trainers that Tunix's programs call.

Its methods take text or padded arrays and return padded arrays, where whet's own cluster takes prompts and batches.

Dim legend: B rows, P prompt, C completion.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self, cast

import torch
from torch import Tensor

from whet import cluster
from whet.config import Mode, Role
from whet.config.base import check_instance
from whet.errors import ConfigError
from whet.observe.trace import Trace
from whet.ops import LogitsProcessors
from whet.rollout import resolve_engine
from whet.rollout.base import RolloutEngine
from whet.rollout.text import as_batch, encode_prompts
from whet.storage.checkpoint import step_number
from whet.train.metric_reduction import Metrics
from whet.train.role_trainer import RoleTrainer, check_token_ids
from whet.train.worker import Loss
from whet.tunix import roles
from whet.tunix.base_rollout import BaseRolloutAdapter, is_rollout_class
from whet.tunix.configs import ClusterConfig, RolloutConfig, core_config
from whet.tunix.length_aliases import accepts_length_aliases
from whet.tunix.metrics_buffer import MetricsBuffer, MetricsBuffers
from whet.tunix.padded import RolloutOutput, pad_column, padded_batch, rollout_output
from whet.tunix.perf import perf_options
from whet.tunix.trainer import Trainer
from whet.tunix.workers import ClusterInference, InferenceWorker, RolloutWorker, inner_tokenizer
from whet.types import Message

__all__ = ["RLCluster", "RLEngine"]


class RLEngine(cluster.RLCluster):
    """Roles, engine and tokenizer of one run.

    Args:
        tokenizer: a tokenizer, a TokenizerAdapter, a folder or a hub name.
        cluster_config: meshes, engine, training and rollout configuration.
        perf_config: a PerfMetricsConfig, or the PerfMetricsOptions of the training configuration.
        models: the other arguments of whet.RLCluster: actor, critic, reference, reward, teacher ...
    Raises: ConfigError: see whet.RLCluster.
    """

    def __init__(
        self, *, tokenizer: Any, cluster_config: ClusterConfig, perf_config: Any = None, **models: Any
    ) -> None:
        self.tunix_config = check_instance(cluster_config, cluster.ClusterConfig, "cluster_config")
        """The configuration with all of Tunix's fields; `cluster_config` has those that have an effect."""
        core: Any = core_config(cluster_config)
        if (options := perf_options(perf_config)) is not None:
            training = dataclasses.replace(core.training_config, perf_metrics_options=core_config(options))
            core = dataclasses.replace(core, training_config=training)
        self.global_steps = 0
        """The number of the last step that began."""
        self._calls = 0  # of generate without a seed: each call draws for itself
        self._metrics = MetricsBuffers()
        self._restored: int | None = None
        super().__init__(tokenizer=inner_tokenizer(tokenizer), cluster_config=core, **models)

    def add_trainer(self, role: Role, loss: Loss, *, plain: bool = False) -> RoleTrainer:
        """Gives a role a trainer with Tunix's methods. Args: plain: no effect: metrics have the prefix of the role."""
        c = self.training_config
        self._trainers[role] = trainer = Trainer(
            self._workers[role],
            accumulate=(c.mini_batch_size or 1) // (c.train_micro_batch_size or c.mini_batch_size or 1),
            config=c,
            restored=lambda: self.restored_step,
            loss=loss,
            role=role,
        )
        return trainer

    def _make_engine(self) -> RolloutEngine:
        """Builds the engine that the configuration names, or makes one of a class with Tunix's rollout methods."""
        rollout = resolve_engine(self.cluster_config.rollout_engine)  # pyright: ignore[reportArgumentType]
        if not is_rollout_class(rollout):
            return super()._make_engine()
        with self.actor.rollout_weights():
            return BaseRolloutAdapter.of_class(
                rollout,
                self.actor.loaded.module,
                tokenizer=self.tokenizer,
                mesh=self.r2m.get(roles.Role.ROLLOUT),
                rollout_config=self.get_rollout_config(),
            )

    @property
    def actor_trainer(self) -> Trainer:
        """The actor's update, with Tunix's methods."""
        return cast(Trainer, super().actor_trainer)

    @property
    def critic_trainer(self) -> Trainer:
        """The critic's. Raises ConfigError where the cluster has no critic."""
        return cast(Trainer, super().critic_trainer)

    # ---- workers -------------------------------------------------------------------------------------------------

    @property
    def rollout(self) -> RolloutWorker:
        """The engine, with the methods of Tunix's rollout class; built when it is first asked for."""
        return RolloutWorker(self, self.engine)

    @property
    def inference_worker(self) -> InferenceWorker:
        """Critic, reference and reward model."""
        return ClusterInference(self)

    @property
    def r2m(self) -> dict[roles.Role, Any]:
        """The mesh of each role that has one."""
        return dict(getattr(self.tunix_config, "role_to_mesh", None) or {})

    def device(self, role: Role) -> torch.device:
        """Returns the device on which a role's model is loaded: the kind of its mesh, or the GPU if there is one."""
        mesh = self.r2m.get(roles.Role(role))
        kind = getattr(mesh, "device_type", None)  # torch's mesh has one
        return super().device(role) if kind is None else torch.device(kind)

    @property
    def restored_step(self) -> int:
        """The step of the newest checkpoint of checkpoint_root_directory, from which a learner goes on; 0 = none."""
        if self._restored is None:
            checkpoint = self.checkpoints.find("latest") if self.training_config.checkpoint_root_directory else None
            self._restored = (step_number(checkpoint) or 0) if checkpoint is not None else 0
        return self._restored

    @property
    def perf(self) -> Trace:
        """The spans of the phases."""
        return self.trace

    perf_v2 = perf

    @property
    def perf_config(self) -> Any:
        """The performance options of the run; None = the defaults."""
        return self.training_config.perf_metrics_options

    # ---- sampling ------------------------------------------------------------------------------------------------

    def get_rollout_config(self, mode: Mode = Mode.TRAIN) -> RolloutConfig:
        """Returns the rollout configuration of a mode, with all of Tunix's fields."""
        return self.tunix_config.rollout_for(mode)  # pyright: ignore[reportReturnType]

    def next_call(self) -> int:
        """Returns a number of its own for each call that draws without a seed."""
        self._calls += 1
        return self._calls - 1

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
            micro_batch_size: prompts that the engine gets at once; the draws don't depend on it.
            trace_tags: noted in the trace.
            max_generation_steps: in place of max_tokens_to_generate.
            seed: two calls with the same seed draw the same. Without a seed here and in the configuration each call
                draws for itself.
            return_logits: return the logits of each token.
        Returns: a RolloutOutput, one entry per prompt.
        Raises: DataError: no prompts, or one longer than max_prompt_length.
        """
        config, sampling = self.get_rollout_config(mode), self.sampling(mode)
        encoder = self.encoder(
            mode, apply_chat_template=apply_chat_template, on_template_change="accept", on_answered="continue"
        )
        encoded = encode_prompts(encoder, as_batch(prompts))
        longest = sampling.max_tokens if max_generation_steps is None else max_generation_steps
        sampling = dataclasses.replace(sampling, max_tokens=longest, return_logits=return_logits)
        seed = seed if seed is not None else config.seed
        call = self.next_call()
        with self.trace.span("rollout", **dict(trace_tags or {})):
            groups = self.sample(
                encoded,
                step=call if seed is None else 0,
                mode="generate",
                sampling=sampling,
                seed=seed,
                at_once=micro_batch_size,
            )
        logprobs = getattr(config, "return_logprobs", False)
        return rollout_output(groups, self.decode, self.pad_id, logprobs=logprobs, logits=return_logits)

    # ---- scoring -------------------------------------------------------------------------------------------------

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
        """Returns log-probabilities under a role's model.

        Args:
            prompt_tokens: [B, P], left-padded with pad_id.
            completion_tokens: [B, C]; what follows the first eos_id is padding.
            micro_batch_size: rows of one forward pass; None = by token budget.
            temperature: of the whole distribution, without top-p and the like; None = the distribution that the rollout
                draws from.
        Returns: [B, C], float32, 0 at padding.
        """
        eos = [eos_id] if isinstance(eos_id, int) else list(eos_id)
        batch, mask = padded_batch(prompt_tokens, completion_tokens, pad_id, eos)
        processors = None if temperature is None else LogitsProcessors(temperature=temperature, full=True)
        check_token_ids(batch, self.worker(role).loaded.num_ids, f"the {role.value}")
        stats = self.worker(role).logprobs(batch, processors=processors, max_sequences=micro_batch_size)
        assert stats.logprobs is not None
        return pad_column(stats.logprobs, mask)

    def get_ref_per_token_logps(
        self,
        prompt_tokens: Any,
        completion_tokens: Any,
        pad_id: int,
        eos_id: int | Sequence[int],
        micro_batch_size: int | None = None,
    ) -> Tensor:
        """Returns log-probabilities under the reference: see `per_token_logps`."""
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
        """Returns log-probabilities under the actor as it is now: see `per_token_logps`."""
        return self.per_token_logps(
            Role.ACTOR, prompt_tokens, completion_tokens, pad_id, eos_id, micro_batch_size, temperature
        )

    def get_old_per_token_logps(
        self, prompt_tokens: Any, completion_tokens: Any, micro_batch_size: int | None = None
    ) -> Tensor:
        """Returns log-probabilities under the policy that rolls out, with the cluster's own pad id and training's stop
        ids.
        """
        stops = self.sampling().stop_ids
        return self.per_token_logps(Role.ACTOR, prompt_tokens, completion_tokens, self.pad_id, stops, micro_batch_size)

    def get_values(
        self, prompt_tokens: Any, completion_tokens: Any, pad_id: int, eos_id: int | Sequence[int]
    ) -> Tensor:
        """Returns the critic's values of the states before each completion token: [B, C], 0 at padding."""
        eos = [eos_id] if isinstance(eos_id, int) else list(eos_id)
        batch, mask = padded_batch(prompt_tokens, completion_tokens, pad_id, eos)
        check_token_ids(batch, self.worker(Role.CRITIC).loaded.num_ids, "the critic")
        return pad_column(self.worker(Role.CRITIC).values(batch), mask)

    def get_rewards(
        self, prompt_tokens: Any, completion_tokens: Any, pad_id: int, eos_id: int | Sequence[int]
    ) -> Tensor:
        """Returns the reward model's score of each row, at its last token: [B]. It has to read the actor's token ids.

        Raises: ConfigError: the cluster has no reward model.
        """
        worker = self.worker(Role.REWARD)
        eos = [eos_id] if isinstance(eos_id, int) else list(eos_id)
        batch, _ = padded_batch(prompt_tokens, completion_tokens, pad_id, eos)
        check_token_ids(batch, worker.loaded.num_ids, "the reward model")
        return worker.scores(batch)

    # ---- updates -------------------------------------------------------------------------------------------------

    def update_actor(
        self, train_ds: Iterable[Any], eval_ds: Iterable[Any] | None = None, skip_jit: bool = False
    ) -> Metrics:
        """Updates the actor: an optimizer step for each batch, or with train_micro_batch_size for each mini-batch.

        Args:
            train_ds: TrainExamples or TokenBatches.
            eval_ds: the loss over these is reported as eval/<name>.
            skip_jit: no effect: nothing is compiled in this release.
        Returns: the metrics over all of it. The loss is set with `actor_trainer.with_loss_fn`; until then it is the
            clipped surrogate with token-mean aggregation.
        """
        return self._update(self.actor_trainer, train_ds, eval_ds)

    def update_critic(
        self, train_ds: Iterable[Any], eval_ds: Iterable[Any] | None = None, skip_jit: bool = False
    ) -> Metrics:
        """Updates the critic: see `update_actor`. The loss is the clipped value loss until another is set."""
        return self._update(self.critic_trainer, train_ds, eval_ds)

    def _update(self, trainer: Trainer, train_ds: Iterable[Any], eval_ds: Iterable[Any] | None) -> Metrics:
        with self.trace.span("update"):
            metrics = trainer.update_all(train_ds)
        if eval_ds is not None:
            metrics = {**metrics, **{f"eval/{n}": m for n, m in trainer.evaluate(eval_ds).items()}}
        return metrics

    def train(
        self, role: Role, train_ds: Iterable[Any], eval_ds: Iterable[Any] | None = None, skip_jit: bool = False
    ) -> Metrics:
        """Updates the actor or the critic: see update_actor. Raises ConfigError: a role that is not trained."""
        if role not in self._trainers:
            trained = ", ".join(r.value for r in self._trainers)
            raise ConfigError(f"the role {getattr(role, 'value', role)!r} is not trained; these are: {trained}")
        update = self.update_actor if role == Role.ACTOR else self.update_critic
        return update(train_ds, eval_ds, skip_jit)

    def eval_actor(self, eval_ds: Iterable[Any] | None) -> Metrics | None:
        """Returns the actor's loss and its metrics over TrainExamples or TokenBatches; None of None."""
        return None if eval_ds is None else self.actor_trainer.evaluate(eval_ds)

    # ---- metrics -------------------------------------------------------------------------------------------------

    def buffer_metrics(self, metrics: Mapping[str, tuple[Any, Any]], mode: Mode = Mode.TRAIN) -> None:
        """Adds metrics, name -> (value, aggregation), to the current step."""
        self._metrics.add(metrics, mode, self.global_steps)

    def buffer_metrics_async(self, metrics: Mapping[str, tuple[Any, Any]], mode: Mode, step: int) -> None:
        """Adds metrics to a given step."""
        self._metrics.add(metrics, mode, step)

    def take_metrics(self, step: int, mode: Mode) -> dict[str, float]:
        """Takes what was buffered for a step and all before it, as numbers, and gives it to the external logger."""
        return self._metrics.take(step, mode)

    def with_external_metrics_logger(self, logger: Callable[[MetricsBuffer], None]) -> Self:
        """Sets a function that is given the MetricsBuffer of each step and mode when the step ends."""
        self._metrics.external_logger = logger
        return self

    @property
    def has_external_logger(self) -> bool:
        """Whether a function is given the metrics of each step."""
        return self._metrics.external_logger is not None

    # ---- state ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Returns the state of whet's cluster, and the number of calls that drew without a seed."""
        return {**super().state(), "calls": self._calls}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores `state`. A run of `whet grpo` has counted no calls."""
        self._calls = state.get("calls", 0)
        super().restore(state)


RLCluster = RLEngine
