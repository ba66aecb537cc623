"""RLCluster: the roles, each a worker; the rollout engine; sampling, and Tunix's verbs over both.

`sample` is what learners call: prompts in, groups of completions out, token ids on both sides. The verbs after it
(generate, get_ref_per_token_logps, update_actor ...) take and return Tunix's padded arrays; each works on its own.

Dim letters: B rows, P prompt, C completion.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from whet.config import ClusterConfig, Mode, OptimConfig, RLTrainingConfig, Role, RoleConfig, RolloutConfig
from whet.data.packing import MicroBatch
from whet.data.padded import padded_batch, unpacked
from whet.data.prompts import PromptEncoder
from whet.data.tokenizer import load_tokenizer, pad_token_id, stop_token_ids
from whet.errors import ConfigError
from whet.models.load import load_model
from whet.models.precision import compute_dtype
from whet.models.recompute import checkpoint_activations
from whet.observe.trace import Trace
from whet.ops import Support, clipped_surrogate, clipped_value
from whet.parallel.comm import require_single_process
from whet.rollout.base import RolloutEngine, Sampling, support_of
from whet.rollout.build import complete, describe_engine, grammars_of, make_engine, sampling_of
from whet.rollout.constraint import Masks
from whet.rollout.length_history import LengthHistory
from whet.rollout.rest import Rest
from whet.rollout.text import encode_texts, one_or_many, rollout_output
from whet.train.checkpoints import Checkpoints
from whet.train.offload import OffloadedWorker
from whet.train.role_trainer import RoleTrainer
from whet.train.worker import Metrics, ModelWorker
from whet.tunix.inference_worker import InferenceWorker
from whet.tunix.metrics_buffer import MetricsBuffer
from whet.types import Group, Message, Prompt, RolloutOutput, TokenBatch
from whet.util.device import empty_cache
from whet.util.memory import release_freed_memory

__all__ = ["RLCluster"]

log = logging.getLogger("whet")

_DOMAIN = {"train": 0, "eval": 1, "generate": 2}
"""Draws of training, evaluation and direct calls never share an address."""


class RLCluster:
    """Roles, engine and tokenizer of one run.

    Args: actor, critic, reference: a module, a folder, a hub name, or a RoleConfig. A reference that is the actor's
        own module is copied, so that it stays what it is. tokenizer: a tokenizer, a folder or a hub name.
        cluster_config: meshes, engine, training and rollout configuration. perf_config: PerfMetricsOptions.
    Raises: ConfigError: a model that can't be loaded, a mesh or a role that this release does not have.

    Example: RLCluster(actor="Qwen/Qwen3-0.6B", tokenizer="Qwen/Qwen3-0.6B", cluster_config=ClusterConfig(
        role_to_mesh=None, rollout_config=RolloutConfig(), training_config=RLTrainingConfig()))
    """

    def __init__(
        self,
        *,
        actor: nn.Module | str | RoleConfig,
        critic: nn.Module | str | RoleConfig | None = None,
        reference: nn.Module | str | RoleConfig | None = None,
        reward: nn.Module | str | None = None,
        tokenizer: Any,
        cluster_config: ClusterConfig,
        perf_config: Any = None,
    ) -> None:
        require_single_process()
        if reward is not None:
            raise ConfigError(
                "reward=: reward models are not part of this release; give reward functions to the learner"
            )
        self.cluster_config = cluster_config
        self.training_config: RLTrainingConfig = cluster_config.training_config
        self.perf_config = perf_config or self.training_config.perf_metrics_options
        self.trace = Trace()
        self._workers: dict[Role, ModelWorker] = {}
        config = self.training_config
        found = None if config.resume is None else Checkpoints(config.checkpoint_root, {}).find(config.resume)
        self._noted_dtypes = {} if found is None else Checkpoints.state(found, needs=("cluster",))["cluster"]["dtypes"]
        if reference is actor and isinstance(reference, nn.Module):
            reference = copy.deepcopy(reference)
        self._add(Role.ACTOR, actor, config.actor_optimizer)
        self.tokenizer = load_tokenizer(tokenizer)
        self._add(Role.REFERENCE, reference, None)
        self._add(Role.CRITIC, critic, config.critic_optimizer or config.actor_optimizer)
        self.eos_ids = stop_token_ids(self.tokenizer, self.actor.module.config, self.actor.module.generation_config)
        self._grammars = grammars_of(self.actor.loaded, self.tokenizer)
        self._masks = Masks(self._grammars)
        for mode in (Mode.TRAIN, Mode.EVAL):
            self._grammars.check(self.sampling(mode))
        for worker in self._workers.values():
            worker.support, worker.allowed = support_of(self.sampling(Mode.TRAIN)), self._allowed
        self._engine = make_engine(
            cluster_config.rollout_engine,
            self.actor.loaded,
            config=self.get_rollout_config(Mode.TRAIN),
            decode=self.decode,
            tokenizer=self.tokenizer,
            grammars=self._grammars,
            mesh=(cluster_config.role_to_mesh or {}).get(Role.ROLLOUT),
            generation_kwargs={name for mode in Mode for name in self.get_rollout_config(mode).generation_kwargs},
        )
        accumulate = (config.mini_batch_size or 1) // (config.train_micro_batch_size or config.mini_batch_size or 1)
        self._trainers = {
            role: RoleTrainer(self._workers[role], loss=loss, accumulate=accumulate, role=role)
            for role, loss in ((Role.ACTOR, clipped_surrogate), (Role.CRITIC, clipped_value))
            if role in self._workers
        }
        self.checkpoints = Checkpoints(config.checkpoint_root, self._trainers, self._workers)
        self.global_steps = 0
        self._calls = self._next_id = 0
        self._rest = Rest(self._engine, self.actor.device)
        self._lengths = LengthHistory()
        self._buffers: dict[tuple[int, str], MetricsBuffer] = {}
        self._external_logger: Callable[[MetricsBuffer], None] | None = None

    def _add(self, role: Role, model: nn.Module | str | RoleConfig | None, optimizer: Any) -> None:
        """Loads a role's model and gives it a worker. A module keeps its dtype and device."""
        if model is None:
            return
        given = RoleConfig(model=model) if isinstance(model, str) else model
        if isinstance(given, RoleConfig):
            if given.model is None:
                raise ConfigError(f"{role.value}.model is not set; give a hub name or a folder")
            loaded = load_model(given.model, device=self.device(role), role=role.value, attention=given.attention)
            noted = None if given.dtype != "auto" else self._noted_dtypes.get(role.value)
            dtype = compute_dtype(noted or given.dtype, loaded)
            checkpoint_activations(loaded.module, given.gradient_checkpointing)
        else:
            loaded, dtype = load_model(given, device=next(given.parameters()).device, role=role.value), None
        own = given.optim if isinstance(given, RoleConfig) else OptimConfig()
        if optimizer is not None and own != OptimConfig():
            raise ConfigError(f"{role.value}.optim and training_config.{role.value}_optimizer both give one; keep one")
        optimizer = OptimConfig(name=optimizer) if isinstance(optimizer, str) else optimizer or own
        usual, budget = (c.token_budget(loaded.module.device.type) for c in (self.training_config, self.cluster_config))
        if budget > usual and not self._workers:
            log.info("max_tokens_per_microbatch is %d instead of %d: the rollout's longest sequence", budget, usual)
        self._workers[role] = self._worker_class(loaded.module.device)(
            loaded,
            optim=None if role is Role.REFERENCE else optimizer,
            dtype=dtype,
            max_tokens=budget,
            enough_tokens=self.training_config.enough_tokens(loaded.module.device.type),
            max_sequences=self.training_config.max_segments_per_packed_row,
            given=given if isinstance(given, RoleConfig) else None,
        )
        empty_cache(self._workers[role].device)  # an engine with an allocator of its own looks at what is free

    def _worker_class(self, device: torch.device) -> type[ModelWorker]:
        """What works a model on a device, after offload_to_cpu."""
        if self.cluster_config.offload_to_cpu and device.type != "cpu":
            return OffloadedWorker
        if self.cluster_config.offload_to_cpu and not self._workers:
            log.info("offload_to_cpu has nothing to do: the models lie on the CPU")
        return ModelWorker

    def device(self, role: Role) -> torch.device:
        """Where a role's model is loaded: its mesh's kind of device, or the GPU if there is one."""
        mesh = (self.cluster_config.role_to_mesh or {}).get(role)
        return torch.device(mesh.device_type if mesh is not None else "cuda" if torch.cuda.is_available() else "cpu")

    # ---- roles ---------------------------------------------------------------------------------------------------

    def worker(self, role: Role) -> ModelWorker:
        """The worker of a role. Raises ConfigError where the cluster was made without it."""
        if role not in self._workers:
            raise ConfigError(f"this cluster has no {role.value}; give RLCluster({role.value}=...)")
        return self._workers[role]

    @property
    def workers(self) -> Mapping[Role, ModelWorker]:
        """The roles that this cluster has."""
        return self._workers

    @property
    def actor(self) -> ModelWorker:
        """The policy that is trained."""
        return self._workers[Role.ACTOR]

    @property
    def rollout(self) -> RolloutEngine:
        """The engine."""
        return self._engine

    @property
    def inference_worker(self) -> InferenceWorker:
        """The models that are only read, behind Tunix's verbs."""
        return InferenceWorker(self)

    @property
    def actor_trainer(self) -> RoleTrainer:
        """The actor's update: loss, hooks, metrics."""
        return self._trainers[Role.ACTOR]

    @property
    def critic_trainer(self) -> RoleTrainer:
        """The critic's update. Raises ConfigError where the cluster has no critic."""
        self.worker(Role.CRITIC)
        return self._trainers[Role.CRITIC]

    @property
    def perf(self) -> Trace:
        """Spans of the phases."""
        return self.trace

    perf_v2 = perf

    def get_rollout_config(self, mode: Mode = Mode.TRAIN) -> RolloutConfig:
        """The rollout configuration of a mode; evaluation takes training's where none was given."""
        return self.cluster_config.rollout_for(mode)

    def sampling(self, mode: Mode = Mode.TRAIN) -> Sampling:
        """The engine's sampling parameters of a mode."""
        return sampling_of(self.get_rollout_config(mode), self.eos_ids, self.tokenizer)

    @property
    def pad_id(self) -> int:
        """The padding id of Tunix's verbs: the tokenizer's, or its end id."""
        return pad_token_id(self.tokenizer, self.eos_ids)

    def _allowed(self, batch: TokenBatch, micro: MicroBatch) -> Tensor:
        """uint8 [s, W]: the tokens that the training constraint allowed where each target was drawn."""
        at = micro.index.cpu()
        tokens, sequence, versions = (x.cpu().numpy() for x in (micro.targets, micro.sequence, batch.versions[at]))
        return self._masks.of(self.sampling(Mode.TRAIN), tokens, sequence, versions >= 0)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of a whole completion, special tokens left out."""
        return str(self.tokenizer.decode([int(i) for i in ids], skip_special_tokens=True))

    def encoder(self, mode: Mode = Mode.TRAIN, **options: Any) -> PromptEncoder:
        """What turns data rows into Prompts under a mode's limits; `options` are PromptEncoder's."""
        config = self.get_rollout_config(mode)
        return PromptEncoder(
            self.tokenizer,
            chat_template_kwargs=config.chat_template_kwargs,
            max_prompt_length=config.max_prompt_length,
            on_long_prompt=config.on_long_prompt,
            **options,
        )

    # ---- sampling ------------------------------------------------------------------------------------------------

    def sample(
        self,
        prompts: Sequence[Prompt],
        *,
        num_generations: int = 1,
        step: int = 0,
        mode: Mode | str = Mode.TRAIN,
        sampling: Sampling | None = None,
        seed: int | None = None,
        at_once: int | None = None,
    ) -> list[Group]:
        """Completes prompts.

        Args: prompts: encoded. num_generations: G, completions of each. step: with the seed, the prompt's place and
            the generation, the address of every draw. mode: whose sampling parameters and draws. sampling, seed:
            instead of the mode's and the run's. at_once: prompts given to the engine at once; no draw depends on it.
        Returns: a group for each prompt, in order, completions in the order of generation.
        """
        self._rest.pause(self.actor.version)
        domain = mode.value if isinstance(mode, Mode) else mode
        own = Mode(domain) if domain in ("train", "eval") else Mode.TRAIN
        config = self.get_rollout_config(own)
        base = next(s for s in (seed, config.seed, self.training_config.seed) if s is not None)
        size = at_once or self.training_config.rollout_micro_batch_size or len(prompts) or 1
        groups: list[Group] = []
        self._masks.drop()
        expected = self._lengths.of(domain, prompts)
        for start in range(0, len(prompts), size):
            part = prompts[start : start + size]
            groups += complete(
                self._engine,
                part,
                sampling or self.sampling(own),
                num_generations=num_generations,
                address=(base * len(_DOMAIN) + _DOMAIN[domain], step, start),
                first_id=self._next_id,
                expected=expected[start : start + size],
            )
            self._next_id += len(part) * num_generations
        self._lengths.note(domain, groups)
        return groups

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

        Args: apply_chat_template: for text prompts too; chats always take it. mode: whose rollout configuration.
            micro_batch_size: prompts given to the engine at once; the draws don't depend on it. trace_tags: noted in
            the trace. max_generation_steps: instead of max_tokens_to_generate. seed: two calls with the same seed draw
            the same; without one, and with none in the configuration, each call draws anew. return_logits: as said.
        Returns: a RolloutOutput, one entry per prompt.
        Raises: DataError: no prompts, or one longer than max_prompt_length.
        """
        config, sampling = self.get_rollout_config(mode), self.sampling(mode)
        encoded = encode_texts(self.encoder(mode, apply_chat_template=apply_chat_template), one_or_many(prompts))
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

    # ---- Tunix's verbs: padded arrays in, padded arrays out ------------------------------------------------------

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

        Args: prompt_tokens: [B, P], left-padded with pad_id. completion_tokens: [B, C]; what follows the first eos_id
            is padding. micro_batch_size: rows of one forward pass; None = by token budget. temperature: of the whole
            distribution, without top-p and the like; None = the rollout's own support.
        Returns: [B, C], float32, 0 at padding.
        """
        eos = [eos_id] if isinstance(eos_id, int) else list(eos_id)
        batch, mask = padded_batch(prompt_tokens, completion_tokens, pad_id, eos)
        support = None if temperature is None else Support(temperature=temperature, full=True)
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

    def rest_engine(self) -> None:
        """Frees what an engine holds beside the weights, until it samples again: an update needs none of it."""
        if self._rest.begin():
            self._give_back()

    def _give_back(self) -> None:
        release_freed_memory()  # freed memory leaves the process: the next phase takes its own elsewhere
        empty_cache(self.actor.device)

    def sync_weights(self) -> None:
        """Gives the engine the actor's weights under a new policy version; nothing moves where they are shared."""
        self.actor.version += 1
        self._give_back()
        with self.trace.span("weight_sync"):
            self._rest.end(self.actor.version, self.actor.named_weights)

    # ---- metrics -------------------------------------------------------------------------------------------------

    def buffer_metrics(self, metrics: Mapping[str, tuple[Any, Any]], mode: Mode = Mode.TRAIN) -> None:
        """Adds metrics, name -> (value, aggregation), to the step that is under way."""
        self.buffer_metrics_async(metrics, mode, self.global_steps)

    def buffer_metrics_async(self, metrics: Mapping[str, tuple[Any, Any]], mode: Mode, step: int) -> None:
        """Adds metrics to a given step."""
        key = (step, Mode(mode).value)
        self._buffers.setdefault(key, MetricsBuffer(global_steps=step, mode=key[1])).add(metrics)

    def take_metrics(self, step: int, mode: Mode) -> dict[str, float]:
        """What was buffered for a step and all before it, as numbers; an external logger is told."""
        found: dict[str, float] = {}
        for key in sorted(k for k in self._buffers if k[0] <= step and k[1] == mode.value):
            buffer = self._buffers.pop(key)
            found |= buffer.reduced()
            if self._external_logger is not None:
                self._external_logger(buffer)
        return found

    def with_external_metrics_logger(self, logger: Callable[[MetricsBuffer], None]) -> RLCluster:
        """Sets a function that is given the MetricsBuffer of each step and mode when the step ends."""
        self._external_logger = logger
        return self

    # ---- state ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a resumed cluster needs besides its workers: counters, lengths, and what each role computes in."""
        counters = {"next_id": self._next_id, "calls": self._calls}
        return {**counters, "dtypes": self.dtypes, "lengths": self._lengths.state()}

    def restore(self, state: Mapping[str, Any], step: int) -> None:
        """Takes `state` back after the workers were loaded; the engine gets their weights."""
        self._next_id, self._calls, self.global_steps = state["next_id"], state["calls"], step
        self._lengths.restore(state.get("lengths", {}))  # those of earlier versions have none
        self._rest.end(self.actor.version, self.actor.named_weights)

    def describe(self) -> dict[str, Any]:
        """What was chosen for this machine: compute dtypes, the paths of training and those of the engine."""
        training = {role.value: w.paths for role, w in self._workers.items()}
        return {"compute_dtype": self.dtypes, "training": training, "rollout": describe_engine(self._engine)}

    @property
    def trainers(self) -> Mapping[Role, RoleTrainer]:
        """The roles that are trained."""
        return self._trainers

    @property
    def dtypes(self) -> dict[str, str]:
        """What each role computes in."""
        return {role.value: str(w.dtype).removeprefix("torch.") for role, w in self._workers.items()}

    def close(self) -> None:
        """Frees the engine and the optimizers."""
        self._engine.close()
        for worker in self._workers.values():
            worker.close()
