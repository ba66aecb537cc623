"""Tunix's RLCluster (RLEngine): whet's, with the workers, trainers and verbs that Tunix's programs call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from whet import cluster
from whet.config import Mode, RLTrainingConfig, Role
from whet.errors import ConfigError
from whet.ops import clipped_surrogate, clipped_value
from whet.packing.padded import check_ids, padded_batch
from whet.storage.checkpoint import step_of
from whet.train.worker import Metrics
from whet.tunix.configs import ClusterConfig, RolloutConfig, core_config
from whet.tunix.perf import perf_options
from whet.tunix.trainer import Trainer
from whet.tunix.workers import ClusterInference, InferenceWorker, RolloutWorker, own_tokenizer

__all__ = ["RLCluster", "RLEngine"]


class RLEngine(cluster.RLCluster):
    """Roles, engine and tokenizer of one run: see whet.RLCluster. perf_config may be a PerfMetricsConfig.

    What Tunix has besides: `rollout` with generate, pad_id, eos_id and get_per_token_logps; `inference_worker` with
    get_values, get_rewards and get_model; trainers with train, iter_steps and restored_global_step; eval_actor.
    """

    def __init__(
        self, *, tokenizer: Any, cluster_config: ClusterConfig, perf_config: Any = None, **options: Any
    ) -> None:
        self.tunix_config = cluster_config
        """The configuration with all of Tunix's fields; `cluster_config` has those that have an effect."""
        super().__init__(
            tokenizer=own_tokenizer(tokenizer),
            cluster_config=core_config(cluster_config),
            perf_config=perf_options(perf_config),
            **options,
        )
        self._restored: int | None = None

    def _train_roles(self, config: RLTrainingConfig) -> None:
        """Gives the roles that are trained their trainers, Tunix's."""
        size = config.mini_batch_size or 1
        accumulate = size // (config.train_micro_batch_size or size)
        for role, loss in ((Role.ACTOR, clipped_surrogate), (Role.CRITIC, clipped_value)):
            if role in self._workers:
                self._trainers[role] = Trainer(
                    self._workers[role],
                    config=config,
                    restored=lambda: self.restored_step,
                    loss=loss,
                    accumulate=accumulate,
                    role=role,
                )

    # ---- workers -------------------------------------------------------------------------------------------------

    @property
    def rollout(self) -> RolloutWorker:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The engine, with the methods of Tunix's rollout class; built when it is first asked for."""
        return RolloutWorker(self, super().rollout)

    @property
    def inference_worker(self) -> InferenceWorker:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Critic, reference and reward model."""
        return ClusterInference(self)

    @property
    def r2m(self) -> dict[Role, Any]:
        """Role -> mesh: of each that has one."""
        return dict(self.cluster_config.role_to_mesh or {})

    @property
    def restored_step(self) -> int:
        """The step of the newest checkpoint of checkpoint_root_directory, from which a learner goes on; 0 = none."""
        if self._restored is None:
            found = self.checkpoints.find("latest") if self.training_config.checkpoint_root_directory else None
            self._restored = (step_of(found) or 0) if found is not None else 0
        return self._restored

    @property
    def has_external_logger(self) -> bool:
        """Whether someone is told of the metrics of each step."""
        return self._metrics.external_logger is not None

    def next_call(self) -> int:
        """A number of its own for each call that draws without a seed."""
        self._calls += 1
        return self._calls - 1

    # ---- verbs ---------------------------------------------------------------------------------------------------

    def get_rollout_config(self, mode: Mode = Mode.TRAIN) -> RolloutConfig:  # pyright: ignore
        """The rollout configuration of a mode, with all of Tunix's fields."""
        return self.tunix_config.rollout_for(mode)  # pyright: ignore[reportReturnType]

    def train(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, role: Role, train_ds: Iterable[Any], eval_ds: Iterable[Any] | None = None, skip_jit: bool = False
    ) -> Metrics:
        """Updates the actor or the critic: see update_actor. Raises ConfigError: a role that is not trained."""
        if role not in self._trainers:
            trained = ", ".join(r.value for r in self._trainers)
            raise ConfigError(f"the role {getattr(role, 'value', role)!r} is not trained; these are: {trained}")
        update = self.update_actor if role is Role.ACTOR else self.update_critic
        return update(train_ds, eval_ds, skip_jit)

    def eval_actor(self, eval_ds: Iterable[Any] | None) -> Metrics | None:
        """The actor's loss and its metrics over TrainExamples or TokenBatches; None of None."""
        return None if eval_ds is None else self.actor_trainer.evaluate(eval_ds)

    def get_rewards(self, prompt_tokens: Any, completion_tokens: Any, pad_id: int, eos_id: Any) -> Tensor:
        """The reward model's score of each row, at its last token: [B]. It has to read the actor's token ids.

        Raises: ConfigError: the cluster has no reward model.
        """
        worker = self.worker(Role.REWARD)
        eos = [eos_id] if isinstance(eos_id, int) else list(eos_id)
        batch, _ = padded_batch(prompt_tokens, completion_tokens, pad_id, eos)
        check_ids(batch, worker.loaded.num_ids, "the reward model")
        return worker.scores(batch)


RLCluster = RLEngine
"""Tunix's earlier name."""
