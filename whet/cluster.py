"""RLCluster: the models of reinforcement learning, each behind a worker, and the engine that samples.

Learners call `sample`: prompts in, groups of completions out, token ids on both sides.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from whet.config import ClusterConfig, Mode, RLTrainingConfig, Role, RoleConfig, RolloutConfig
from whet.config.base import check_instance
from whet.data.prompts import PromptEncoder
from whet.data.tokenizer import load_tokenizer, pad_token_id, stop_token_ids
from whet.errors import ConfigError, raise_all
from whet.models.loaded_model import LoadedModel
from whet.models.modes import max_positions
from whet.ops import Support, clipped_surrogate, clipped_value
from whet.rewards.model import RewardModel
from whet.rollout import resolve_engine
from whet.rollout.base import RolloutEngine, Sampling, sampling_support
from whet.rollout.build import make_engine, make_grammars, make_sampling
from whet.rollout.constrained_decoding import Masks
from whet.rollout.driver import Rollouts
from whet.rollout.policy_rollouts import Play, PolicyRollouts
from whet.train.role_checkpoints import Checkpoints
from whet.train.role_trainer import RoleTrainer
from whet.train.role_workers import ACTOR, ModelSource, RoleWorkers, model_checks, trusts_remote_code
from whet.train.worker import Allowed, ModelWorker
from whet.types import Group, Prompt

__all__ = ["RLCluster"]

log = logging.getLogger("whet")

_DOMAIN = {"train": 0, "eval": 1, "generate": 2}
"""Draws of training, evaluation and direct calls never share an address."""


class RLCluster(RoleWorkers):
    """Roles, engine and tokenizer of one run.

    Args:
        actor, critic, reference, reward, teacher: a module, a folder, a hub name, or a RoleConfig. One that is the
            actor's own module is copied, so that it stays what it is, or has its own trunk; critic="actor" is a score
            head on the actor's trunk, trained with it; reference="actor" is the actor as it begins, which needs no
            second copy where an adapter is trained. The reward model is a sequence classifier of one label;
            learners call it as one more reward function. The teacher is what distillation learns from, a language
            model of the actor's tokenizer; the padding of its vocabulary may be another.
        tokenizer: a tokenizer, a folder or a hub name.
        reward_tokenizer: the reward model's; None = what lies in its folder, else the policy's.
        cluster_config: device, engine, training and rollout configuration.
        module_dtype: what models that are given as modules compute in: "auto", "float32" or "bfloat16", as
            RoleConfig.dtype; None = the dtype that each has.
    Raises: ConfigError: a model can't be loaded, or this machine does not have the device.

    Example: RLCluster(actor="Qwen/Qwen3-0.6B", tokenizer="Qwen/Qwen3-0.6B", cluster_config=ClusterConfig(
        rollout_config=RolloutConfig(), training_config=RLTrainingConfig()))
    """

    ENTRY = "cluster"

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
        _check_given(cluster_config, (actor, critic, reference, reward, teacher))
        self.cluster_config = cluster_config
        self.training_config: RLTrainingConfig = cluster_config.training_config
        config = self.training_config
        if isinstance(actor, nn.Module):
            reference, critic, teacher = (
                copy.deepcopy(actor) if m is actor else m for m in (reference, critic, teacher)
            )
        shares_trunk, critic = _shared_critic(critic)
        policy = self.load(Role.ACTOR, actor, score_head=shares_trunk)
        self.tokenizer = load_tokenizer(tokenizer, trust_remote_code=trusts_remote_code(actor))
        self.eos_ids = stop_token_ids(self.tokenizer, policy.module.config, policy.module.generation_config)
        self._grammars = make_grammars(policy, self.tokenizer)
        self._masks = Masks(self._grammars)
        support, allowed = self._drawn_from(policy)
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
            model, loaded = (model, policy) if role is Role.ACTOR else self._load(role, model, actor, policy)
            budget, own = self._budget(loaded, positions), support
            if role is Role.TEACHER:  # it may have fewer rows than ids are forbidden
                known = tuple(i for i in support.forbidden_ids if i < loaded.num_ids)
                own = dataclasses.replace(support, forbidden_ids=known)
            self.add(role, model, loaded, optimizer, max_tokens=budget, support=own, allowed=allowed)
        self._reward_tokenizer = self.tokenizer_of(Role.REWARD, reward, reward_tokenizer)
        for role, model in ((Role.REFERENCE, reference), (Role.TEACHER, teacher)):
            if model is not None:
                self.check_same_ids(role, model, actor)
        self._train_roles(config)
        self.checkpoints = Checkpoints(config.checkpoint_root, self._trainers, self._workers, ranks=self.ranks)
        self._rollouts = PolicyRollouts(
            self._make_engine, self.actor, vocab_size=policy.module.config.vocab_size, ranks=self.ranks
        )

    def _train_roles(self, config: RLTrainingConfig) -> None:
        """Gives the roles that are trained their trainers."""
        accumulate = (config.mini_batch_size or 1) // (config.train_micro_batch_size or config.mini_batch_size or 1)
        for role, loss in ((Role.ACTOR, clipped_surrogate), (Role.CRITIC, clipped_value)):
            if role in self._workers:
                self.add_trainer(role, loss, accumulate=accumulate)

    def _load(
        self, role: Role, model: ModelSource, actor: ModelSource, policy: LoadedModel
    ) -> tuple[ModelSource, LoadedModel]:
        """A role's model beside the actor, and what it comes from."""
        if role is Role.REFERENCE:
            return self.load_reference(model, actor, policy)
        return model, self.load(role, model)

    def _drawn_from(self, policy: LoadedModel) -> tuple[Support, Allowed]:
        """The distribution that training samples from, as the trainer has to know it: support and constraint.

        Raises: ConfigError: stop strings or a constraint of training or evaluation are wrong, or the
            policy is trained with dropout.
        """
        _check_dropout(policy)
        for mode in (Mode.TRAIN, Mode.EVAL):
            self._grammars.check(self.sampling(mode))
        sampling = self.sampling(Mode.TRAIN)
        return sampling_support(sampling), functools.partial(self._masks.of_targets, sampling)

    def _budget(self, loaded: LoadedModel, positions: int | None) -> int:
        """Tokens of a micro-batch of a role's model. Args: positions: of the model that samples."""
        device = loaded.module.device.type
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
        """The reward model as a reward function, named after its folder; `options` are RewardModel's.

        Raises: ConfigError: the cluster was made without one.
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
        """A context in which each process may score batches of its own with the reward model, if there is one."""
        worker = self.workers.get(Role.REWARD)
        return nullcontext() if worker is None or self.ranks.size == 1 else worker.rollout_weights()

    def _make_engine(self) -> RolloutEngine:
        """The engine that the configuration names, over the actor's model."""
        config = self.cluster_config
        with self.actor.rollout_weights():
            return make_engine(
                config.rollout_engine,
                self.actor.loaded,
                config=self.rollout_for(Mode.TRAIN),
                decode=self.decode,
                tokenizer=self.tokenizer,
                grammars=self._grammars,
                samplings=[self.sampling(mode) for mode in Mode],
            )

    @property
    def engine_name(self) -> str:
        """The engine's name in the configuration, or the name of its class."""
        given = self.cluster_config.rollout_engine
        return given if isinstance(given, str) else getattr(given, "__name__", type(given).__name__)

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
        """The model that has the critic's score head: the critic, or the actor where they share a trunk.

        Raises ConfigError: there is neither.
        """
        shared = Role.CRITIC not in self._workers and self.actor.loaded.score_head is not None
        return self.actor if shared else self.worker(Role.CRITIC)

    @property
    def critic_trainer(self) -> RoleTrainer:
        """The critic's update. Raises ConfigError where the cluster has no critic."""
        self.worker(Role.CRITIC)
        return self._trainers[Role.CRITIC]

    def rollout_for(self, mode: Mode = Mode.TRAIN) -> RolloutConfig:
        """The rollout configuration of a mode; evaluation takes training's where none was given."""
        return self.cluster_config.rollout_for(mode)

    def sampling(self, mode: Mode = Mode.TRAIN) -> Sampling:
        """The engine's sampling parameters of a mode."""
        return make_sampling(self.rollout_for(mode), self.eos_ids, self.tokenizer)

    @property
    def pad_id(self) -> int:
        """The tokenizer's padding id, or the end id."""
        return pad_token_id(self.tokenizer, self.eos_ids)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of a whole completion, special tokens left out."""
        return str(self.tokenizer.decode([int(i) for i in ids], skip_special_tokens=True))

    def encoder(self, mode: Mode = Mode.TRAIN, **options: Any) -> PromptEncoder:
        """What turns data rows into Prompts under a mode's limits; `options` are PromptEncoder's."""
        return PromptEncoder.from_config(self.tokenizer, self.rollout_for(mode), **options)

    # ---- sampling ------------------------------------------------------------------------------------------------

    @property
    def rollout(self) -> RolloutEngine:
        """The engine; built when it is first asked for."""
        return self._rollouts.engine

    @property
    def rollouts(self) -> Rollouts:
        """What plays episodes in the engine, awake."""
        self._rollouts.resume()
        return self._rollouts.driver

    def build_engine(self) -> None:
        """Builds the engine now, so that what it refuses is said before the first step."""
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
        play: Play | None = None,
    ) -> list[Group]:
        """Completes prompts. Of several processes each completes a share, and all have all groups.

        Args:
            prompts: encoded; the same in all processes.
            num_generations: G, completions of each.
            step: with the seed, the prompt's place and the generation, the address of every draw.
            first: place of the first of these prompts in the step, where they are not its first ones.
            mode: whose sampling parameters and draws.
            sampling, seed: instead of the mode's and the run's.
            at_once: prompts given to the engine at once; no draw depends on it.
            greedy: one completion of each prompt more, at temperature 0: Group.greedy.
            play: episodes with turns: what one plays under its sampling parameters; None = one completion.
        Returns: a group for each prompt, in order, completions in the order of generation.
        """
        domain = mode.value if isinstance(mode, Mode) else mode
        own = Mode(domain) if domain in ("train", "eval") else Mode.TRAIN
        config = self.rollout_for(own)
        base = next(s for s in (seed, config.seed, self.training_config.seed) if s is not None)
        self._masks.drop()
        with self.actor.rollout_weights():
            return self._rollouts.sample(
                domain,
                prompts,
                sampling or self.sampling(own),
                num_generations=num_generations,
                address=(base * len(_DOMAIN) + _DOMAIN[domain], step, first),
                at_once=at_once or self.training_config.rollout_micro_batch_size or len(prompts) or 1,
                greedy=greedy,
                play=play,
            )

    def release_engine_memory(self) -> None:
        """Frees what an engine holds besides the weights, until it samples again: an update needs none of it."""
        if self._rollouts.release():
            self.release_memory(self.actor)

    def sync_weights(self) -> None:
        """Gives the engine the actor's weights under a new policy version; nothing moves where they are shared."""
        self.finish_step(self.actor)
        with self.trace.span("weight_sync"):
            self._rollouts.sync()

    # ---- state ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a resumed cluster needs besides its workers: counters, lengths, and what each role computes in."""
        return {**super().state(), **self._rollouts.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores `state` after the workers were loaded; the engine gets their weights."""
        self._rollouts.restore(state)

    def describe(self) -> dict[str, Any]:
        """What was chosen for this machine: compute dtypes, what training runs on, and what the engine does, if any."""
        engine = self._rollouts.describe()
        return {**super().describe(), **({} if engine is None else {"rollout": engine})}

    def close(self) -> None:
        """Frees the engine and the optimizers."""
        self._rollouts.close()
        super().close()


def _shared_critic(critic: Any) -> tuple[bool, Any]:
    """Whether the critic is the actor's own trunk, critic="actor", and the critic that has a model of its own, if any.

    Raises ConfigError: settings of a model of its own that a shared one has not.
    """
    given = critic.model if isinstance(critic, RoleConfig) else critic
    if not isinstance(given, str) or given != ACTOR:
        return False, critic
    if isinstance(critic, RoleConfig) and dataclasses.replace(critic, dtype="auto") != RoleConfig(model=ACTOR):
        raise ConfigError(
            f"critic.model={ACTOR} is a score head on the actor's trunk: the actor's optimizer and settings are its "
            "own; leave out the critic's other keys"
        )
    return True, None


def _check_given(config: ClusterConfig, models: Iterable[Any]) -> None:
    """Raises ConfigError, all at once, for names that nothing has: engine, models, optimizers, loggers."""
    loop = config.training_config
    named = model_checks(loop, models, (loop.actor_optimizer, loop.critic_optimizer))
    raise_all([lambda: resolve_engine(config.rollout_engine), *named])  # pyright: ignore[reportArgumentType]


def _check_dropout(policy: LoadedModel) -> None:
    """Raises ConfigError for an adapter's dropout: the policy that samples would not be the one that is trained."""
    if policy.adapter is not None and policy.adapter.dropout:
        raise ConfigError(
            f"actor.lora.lora_dropout={policy.adapter.dropout} must be 0.0 in reinforcement learning: the sampler "
            "draws without dropout, so every ratio of trainer to sampler would be noise; SFT, reward models and DPO "
            "take it"
        )
