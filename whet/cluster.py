"""RLCluster: the models of reinforcement learning, each behind a worker, and the engine that samples.

Learners call `sample`: prompts in, groups of completions out, token ids on both sides.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from whet.config import ClusterConfig, Mode, RLTrainingConfig, Role, RoleConfig, RolloutConfig
from whet.config.base import check_instance, check_keywords
from whet.data.prompts import PromptEncoder
from whet.data.tokenizer import load_tokenizer, pad_token_id, stop_token_ids
from whet.errors import ConfigError, raise_all
from whet.models.loaded_model import LoadedModel
from whet.models.modes import max_positions
from whet.ops import LogitsProcessors, clipped_surrogate, clipped_value
from whet.rewards.model import RewardModel
from whet.rollout import resolve_engine
from whet.rollout.auto_engine import AUTO, choose_engine
from whet.rollout.base import RolloutEngine, Sampling, sampling_processors
from whet.rollout.build import final_engine, make_engine, make_grammars, make_sampling
from whet.rollout.constrained_decoding import Masks
from whet.rollout.driver import RolloutDriver
from whet.rollout.policy_rollouts import EpisodeRunner, PolicyRollouts
from whet.train.role_checkpoints import Checkpoints
from whet.train.role_trainer import RoleTrainer
from whet.train.role_workers import ACTOR, RoleWorkers, model_checks, trusts_remote_code
from whet.train.worker import Allowed, ModelWorker
from whet.types import Group, Prompt

__all__ = ["RLCluster"]

log = logging.getLogger("whet")

_DOMAIN = {"train": 0, "eval": 1, "generate": 2}
"""Draws of training, evaluation and direct calls never share a key."""


class RLCluster(RoleWorkers):
    """Roles, engine and tokenizer of one run: what verl's ActorRolloutRefWorker and CriticWorker hold.

    Args:
        actor: a module, a folder, a hub name, or a RoleConfig, as the models of all roles. If another role is given
            the actor's own module, it gets a copy.
        critic: "actor" puts a score head on the actor's backbone and trains both together.
        reference: "actor" is the actor before training; it needs no second copy if an adapter is trained.
        reward: a sequence classifier with one label; learners call it as one more reward function.
        teacher: the language model that distillation learns from; it has the actor's tokenizer, and its vocabulary may
            be padded to another size.
        tokenizer: a tokenizer, a folder or a hub name.
        reward_tokenizer: the reward model's; None = the one in its folder, else the policy's.
        cluster_config: device, engine, training and rollout configuration.
        module_dtype: the compute dtype of models that are passed as modules: "auto", "float32" or "bfloat16", as
            RoleConfig.dtype; None = the dtype of each module.
    Raises: ConfigError: a model can't be loaded, or this machine does not have the device.

    Example: RLCluster(actor="Qwen/Qwen3-0.6B", tokenizer="Qwen/Qwen3-0.6B", cluster_config=ClusterConfig(
        rollout_config=RolloutConfig(), training_config=RLTrainingConfig()))
    """

    ENTRY = "cluster"

    @check_keywords
    def __init__(
        self,
        *,
        actor: nn.Module | str | RoleConfig,
        critic: nn.Module | str | RoleConfig | None = None,
        reference: nn.Module | str | RoleConfig | None = None,
        reward: nn.Module | str | RoleConfig | None = None,
        teacher: nn.Module | str | RoleConfig | None = None,
        tokenizer: Any,
        reward_tokenizer: Any = None,
        cluster_config: ClusterConfig,
        module_dtype: str | None = None,
    ) -> None:
        check_instance(cluster_config, ClusterConfig, "cluster_config")
        super().__init__(
            cluster_config.training_config,
            device=cluster_config.device,
            offload_to_cpu=cluster_config.offload_to_cpu,
            module_dtype=module_dtype,
        )
        if cluster_config.rollout_engine == AUTO:
            quantized = isinstance(actor, RoleConfig) and actor.quantization is not None
            options = {"num_processes": self.ranks.size, "is_quantized": quantized}
            chosen = choose_engine(cluster_config.rollout_for(Mode.TRAIN), device=self.device(Role.ACTOR), **options)
            cluster_config = dataclasses.replace(cluster_config, rollout_engine=chosen)
        self.cluster_config = cluster_config
        self.training_config: RLTrainingConfig = cluster_config.training_config
        config = self.training_config
        models = (actor, critic, reference, reward, teacher)
        named = model_checks(config, models, (config.actor_optimizer, config.critic_optimizer))
        raise_all([lambda: resolve_engine(cluster_config.rollout_engine), *named])  # pyright: ignore[reportArgumentType]
        if isinstance(actor, nn.Module):
            reference, critic, teacher = (
                copy.deepcopy(actor) if m is actor else m for m in (reference, critic, teacher)
            )
        shares_backbone, critic = _shared_critic(critic)
        policy = self.load(Role.ACTOR, actor, score_head=shares_backbone)
        reference = self.copy_module(reference, actor, policy)
        self.tokenizer = load_tokenizer(tokenizer, trust_remote_code=trusts_remote_code(actor))
        self.eos_ids = stop_token_ids(self.tokenizer, policy.module.config, policy.module.generation_config)
        self._grammars = make_grammars(policy, self.tokenizer)
        self._masks = Masks(self._grammars)
        processors, allowed = self._drawn_from(policy)
        positions = max_positions(policy.module)  # of the one that samples: no role is given longer sequences
        for role, model, optimizer in (
            (Role.ACTOR, actor, config.actor_optimizer),
            (Role.REFERENCE, reference, None),
            (Role.CRITIC, critic, config.critic_optimizer or config.actor_optimizer),
            (Role.REWARD, reward, None),
            (Role.TEACHER, teacher, None),
        ):
            if model is None:
                continue
            if role is Role.ACTOR:
                loaded = policy
            elif role is Role.REFERENCE:
                model, loaded = self.load_reference(model, actor, policy)
            else:
                loaded = self.load(role, model)
            budget, own = self._budget(loaded, positions), processors
            if role is Role.TEACHER:  # it may have fewer rows than ids are forbidden
                known = tuple(i for i in processors.forbidden_ids if i < loaded.num_ids)
                own = dataclasses.replace(processors, forbidden_ids=known)
            self.add(role, model, loaded, optimizer, max_tokens=budget, processors=own, allowed=allowed)
        self._reward_tokenizer = self.tokenizer_of(Role.REWARD, reward, reward_tokenizer)
        for role, model in ((Role.REFERENCE, reference), (Role.TEACHER, teacher)):
            if model is not None:
                self.check_same_ids(role, model, actor)
        for role, loss in ((Role.ACTOR, clipped_surrogate), (Role.CRITIC, clipped_value)):
            if role in self._workers:
                self.add_trainer(role, loss)
        self.checkpoints = Checkpoints(
            config.checkpoint_root,
            self._trainers,
            self._workers,
            options=config.checkpointing_options,
            ranks=self.ranks,
        )
        self._rollouts = PolicyRollouts(
            self._make_engine,
            self.actor,
            vocab_size=policy.module.config.vocab_size,
            ranks=self.ranks,
            trace=self.trace,
            check_every=self.rollout_for(Mode.TRAIN).sync_check_every_n_syncs,
        )

    def _drawn_from(self, policy: LoadedModel) -> tuple[LogitsProcessors, Allowed]:
        """Returns the distribution that training samples from: its logits processors, and the constraint of its tokens.

        Raises: ConfigError: stop strings or a constraint of training or evaluation are wrong, or the policy has
            dropout.
        """
        if policy.adapter is not None and policy.adapter.dropout:
            raise ConfigError(
                f"actor.lora.lora_dropout={policy.adapter.dropout} must be 0.0 in reinforcement learning: the sampler "
                "draws without dropout, so every ratio of trainer to sampler would be noise; dropout is allowed only "
                "in `whet sft`, `whet rm` and `whet dpo`"
            )
        for mode in (Mode.TRAIN, Mode.EVAL):
            self._grammars.check(self.sampling(mode))
        sampling = self.sampling(Mode.TRAIN)
        return sampling_processors(sampling), functools.partial(self._masks.of_targets, sampling)

    def _budget(self, loaded: LoadedModel, positions: int | None) -> int:
        """Returns the token budget of a role's micro-batches. Args: positions: of the model that samples."""
        device = self.device_of(loaded).type
        usual = self.training_config.token_budget(device)
        budget = self.cluster_config.token_budget(device, positions)
        if budget > usual and not self._workers:
            log.info(
                "trainer.max_tokens_per_microbatch raised from the default %d to %d to fit the longest sequence "
                "(rollout.max_prompt_length + rollout.max_tokens_to_generate, or the model's positions)",
                usual,
                budget,
            )
        return budget

    def reward_model(self, **options: Any) -> RewardModel:
        """Returns the reward model as a reward function, named after its folder. Args: options: RewardModel's.

        Raises: ConfigError: the cluster has no reward model.
        """
        worker = self.worker(Role.REWARD)
        return RewardModel(
            worker,
            name=worker.loaded.name.rstrip("/").rpartition("/")[2],
            policy_tokenizer=self.tokenizer,
            tokenizer=self._reward_tokenizer,
            **options,
        )

    def reward_weights(self) -> AbstractContextManager[Any]:
        """Returns a context in which each process may score batches of its own with the reward model, if there
        is one.
        """
        worker = self.workers.get(Role.REWARD)
        return nullcontext() if worker is None or self.ranks.size == 1 else worker.rollout_weights()

    def _make_engine(self) -> RolloutEngine:
        """Makes the engine that the configuration names, with the actor's model."""
        with self._sampling_weights():
            engine: Any = make_engine(
                self._engine_spec,
                self.actor.loaded,
                config=self.rollout_for(Mode.TRAIN),
                decode=self.decode,
                tokenizer=self.tokenizer,
                grammars=self._grammars,
                samplings=[self.sampling(mode) for mode in Mode],
            )
        if self._divides_engine:
            engine.join(self.ranks.neighbours(self.training_config.tensor_parallel_size), self.share_values)
        return engine

    @functools.cached_property
    def _engine_spec(self) -> Any:
        """The engine that is built: TensorParallelEngine in place of "embedded" where processes divide matrices."""
        samplings = [self.sampling(mode) for mode in Mode]
        spec = final_engine(self.cluster_config.rollout_engine, self.actor.loaded, samplings)
        if self.training_config.tensor_parallel_size == 1 or spec != "embedded":
            return spec
        from whet.rollout.tensor_parallel import TensorParallelEngine  # imported where processes share a model

        return TensorParallelEngine

    @property
    def _divides_engine(self) -> bool:
        """Whether the processes that divide the actor's matrices sample together."""
        return hasattr(self._engine_spec, "leading")

    def _sampling_weights(self) -> AbstractContextManager[Any]:
        """Returns a context in which the engine may read the actor's weights."""
        return self.actor.rollout_weights(parts=self._divides_engine)

    @property
    def engine_name(self) -> str:
        """The engine's name in the configuration, or the name of its class."""
        engine = self.cluster_config.rollout_engine
        return engine if isinstance(engine, str) else getattr(engine, "__name__", type(engine).__name__)

    # ---- roles ---------------------------------------------------------------------------------------------------

    @property
    def actor(self) -> ModelWorker:
        """The policy that is trained."""
        return self._workers[Role.ACTOR]

    @property
    def actor_trainer(self) -> RoleTrainer:
        """The actor's update: loss, hooks, metrics."""
        return self._trainers[Role.ACTOR]

    @property
    def critic_worker(self) -> ModelWorker:
        """The model that has the critic's score head: the critic, or the actor where they share a backbone.

        Raises: ConfigError: there is neither.
        """
        shared = Role.CRITIC not in self._workers and self.actor.loaded.score_head is not None
        return self.actor if shared else self.worker(Role.CRITIC)

    @property
    def critic_trainer(self) -> RoleTrainer:
        """The critic's update. Raises ConfigError where the cluster has no critic."""
        self.worker(Role.CRITIC)
        return self._trainers[Role.CRITIC]

    def rollout_for(self, mode: Mode = Mode.TRAIN) -> RolloutConfig:
        """Returns the rollout configuration of a mode; evaluation uses training's if it has none of its own."""
        return self.cluster_config.rollout_for(mode)

    def sampling(self, mode: Mode = Mode.TRAIN) -> Sampling:
        """Returns the engine's sampling parameters of a mode."""
        return make_sampling(self.rollout_for(mode), self.eos_ids, self.tokenizer)

    @property
    def pad_id(self) -> int:
        """The tokenizer's padding id, or an end id if it has none."""
        return pad_token_id(self.tokenizer, self.eos_ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of a whole completion, without special tokens."""
        return str(self.tokenizer.decode([int(i) for i in ids], skip_special_tokens=True))

    def encoder(self, mode: Mode = Mode.TRAIN, **options: Any) -> PromptEncoder:
        """Returns the encoder of data rows to Prompts, with the limits of a mode. Args: options: PromptEncoder's."""
        return PromptEncoder.from_config(self.tokenizer, self.rollout_for(mode), **options)

    # ---- sampling ------------------------------------------------------------------------------------------------

    @property
    def engine(self) -> RolloutEngine:
        """The engine; it is built at the first access."""
        return self._rollouts.engine

    @property
    def driver(self) -> RolloutDriver:
        """The driver that runs episodes in the engine; the engine is ready to sample."""
        self._rollouts.resume()
        return self._rollouts.driver

    def set_should_stop(self, should_stop: Callable[[], bool] | None) -> None:
        """Sets the condition in which a rollout does not wait for episodes that hang: see RolloutDriver. None =
        there is none.
        """
        self._rollouts.should_stop = should_stop

    def build_engine(self) -> None:
        """Builds the engine now, so that its errors come before the first step."""
        _ = self._rollouts.engine

    def sample(
        self,
        prompts: Sequence[Prompt],
        *,
        num_generations: int = 1,
        step: int = 0,
        first: int = 0,
        mode: Mode | str = Mode.TRAIN,
        sampling: Sampling | None = None,
        seed: int | None = None,
        at_once: int | None = None,
        greedy: bool = False,
        run_episode: EpisodeRunner | None = None,
    ) -> list[Group]:
        """Completes prompts. Of several processes each completes a share, and all have all groups.

        Args:
            prompts: encoded; the same in all processes.
            num_generations: G, completions of each.
            step: the number of the step. Every draw depends on the seed, the step, the prompt's position in the step
                and the number of the generation.
            first: the position of the first of these prompts in the step.
            mode: the mode with the sampling parameters; the draws of different modes are independent.
            sampling: instead of the mode's.
            seed: instead of the run's.
            at_once: the number of prompts that the engine gets at once; no draw depends on it.
            greedy: add a completion of each prompt at temperature 0: Group.greedy.
            run_episode: the generator function of an episode of several turns; None = one completion.
        Returns: a group for each prompt, in order, completions in the order of generation.
        """
        domain = mode.value if isinstance(mode, Mode) else mode
        sampling_mode = Mode(domain) if domain in ("train", "eval") else Mode.TRAIN
        self._masks.drop()
        with self._sampling_weights():
            return self._rollouts.sample(
                domain,
                prompts,
                sampling or self.sampling(sampling_mode),
                num_generations=num_generations,
                rng_key=(self.draw_seed(domain, seed), step, first),
                at_once=at_once or self.training_config.rollout_micro_batch_size or len(prompts) or 1,
                greedy=greedy,
                run_episode=run_episode,
            )

    def draw_seed(self, mode: Mode | str, seed: int | None = None) -> int:
        """Returns the seed in the rng_key of a mode's episodes; modes have different ones. Args: as in `sample`."""
        domain = mode.value if isinstance(mode, Mode) else mode
        config = self.rollout_for(Mode(domain) if domain in ("train", "eval") else Mode.TRAIN)
        base_seed = next(s for s in (seed, config.seed, self.training_config.seed) if s is not None)
        return base_seed * len(_DOMAIN) + _DOMAIN[domain]

    def pop_sync_gap(self) -> float | None:
        """Returns the mean difference of logprobs of engine and trainer in the last check of a sync; None = there was
        none.
        """
        gap, self._rollouts.sync_check.gap = self._rollouts.sync_check.gap, None
        return gap

    def release_engine_memory(self) -> None:
        """Frees the memory that the engine does not need while a step is scored and updated: all but the weights."""
        if self._rollouts.release():
            self.release_memory(self.actor)

    def sync_weights(self) -> None:
        """Gives the engine the actor's weights under a new policy version; shared weights are not copied.

        Other systems call it weight sync or update_weights.
        """
        self.finish_step(self.actor)
        with self.trace.span("weight_sync"):
            self._rollouts.sync()

    # ---- state ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Returns the state of a resumed cluster, besides its workers: counters, lengths and compute dtypes."""
        return {**super().state(), **self._rollouts.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores `state` after the workers were loaded; the engine gets their weights."""
        self._rollouts.restore(state)

    def describe(self) -> dict[str, Any]:
        """Returns the choices for this machine: compute dtypes, and the back ends of training and of the engine, if
        any.
        """
        engine = self._rollouts.describe()
        return {**super().describe(), **({} if engine is None else {"rollout": engine})}

    def close(self) -> None:
        """Frees the engine and the optimizers."""
        self._rollouts.close()
        super().close()


def _shared_critic(critic: Any) -> tuple[bool, Any]:
    """Returns whether the critic shares the actor's backbone (critic="actor"), and the critic if it has a model of its
    own.

    Raises: ConfigError: the shared critic has settings that only a model of its own can have.
    """
    model = critic.model if isinstance(critic, RoleConfig) else critic
    if not isinstance(model, str) or model != ACTOR:
        return False, critic
    if isinstance(critic, RoleConfig) and dataclasses.replace(critic, dtype="auto") != RoleConfig(model=ACTOR):
        raise ConfigError(
            f"critic.model={ACTOR} is a score head on the actor's backbone: it uses the actor's optimizer and "
            "settings; remove the other critic.* keys"
        )
    return True, None
