"""SupervisedModels: the model that supervised training trains, and its reference, if any."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn

from whet.config import OptimConfig, Role, RoleConfig, SupervisedTrainingConfig
from whet.config.base import check_instance, check_keywords
from whet.data.tokenizer import load_tokenizer, stop_token_ids
from whet.errors import ConfigError, raise_all
from whet.models.modes import max_positions
from whet.ops import nll
from whet.train.role_checkpoints import Checkpoints
from whet.train.role_trainer import RoleTrainer
from whet.train.role_workers import RoleWorkers, model_checks, trusts_remote_code
from whet.train.worker import ModelWorker

__all__ = ["SupervisedModels"]


class SupervisedModels(RoleWorkers):
    """The model that is trained on rows, and a reference, if any.

    Args:
        actor: a language model: a module, a folder, a hub name, or a RoleConfig.
        reward_model: instead of an actor, a model that learns to give scores; a score head is added if it has none.
        reference: the model that preference losses compare with. If it is the actor's module, that is copied. "actor"
            is the actor before the first step, which needs no second copy if an adapter is trained.
        tokenizer: a tokenizer, a folder or a hub name.
        config: of the loop.
        device: models that are not given as modules are loaded there; None = the GPU if there is one.
        module_dtype: the compute dtype of models that are given as modules, as RoleConfig.dtype; None = their own.
        optimizer: replaces the optimizer of the trained model's RoleConfig: an OptimConfig, a name or a factory.
        offload_to_cpu: keep only the tensors of the current phase on a GPU.
        usual_tokens: of a micro-batch, where config does not set them and no row is longer; None = the device's.
    Raises: ConfigError: neither an actor nor a reward model, or both; a model that can't be loaded.

    Example: SupervisedModels(actor="Qwen/Qwen3-0.6B", tokenizer="Qwen/Qwen3-0.6B").
    """

    @check_keywords
    def __init__(
        self,
        *,
        actor: nn.Module | str | RoleConfig | None = None,
        reward_model: nn.Module | str | RoleConfig | None = None,
        reference: nn.Module | str | RoleConfig | None = None,
        tokenizer: Any,
        config: SupervisedTrainingConfig | None = None,
        optimizer: OptimConfig | str | Callable[..., Any] | None = None,
        device: str | None = None,
        module_dtype: str | None = None,
        offload_to_cpu: bool = False,
        usual_tokens: int | None = None,
    ) -> None:
        self.config = check_instance(config or SupervisedTrainingConfig(), SupervisedTrainingConfig, "config")
        super().__init__(self.config, device=device, offload_to_cpu=offload_to_cpu, module_dtype=module_dtype)
        if (actor is None) == (reward_model is None):
            raise ConfigError("supervised training trains one model; give SupervisedModels actor= or reward_model=")
        raise_all(model_checks(self.config, (actor, reward_model, reference), (optimizer,)))
        self.optimizer, self.usual_tokens = optimizer, usual_tokens
        self.role = Role.REWARD if actor is None else Role.ACTOR
        trained = actor if actor is not None else reward_model
        assert trained is not None
        if reference is trained and isinstance(trained, nn.Module):
            reference = copy.deepcopy(trained)
        loaded = self.load(Role.CRITIC if actor is None else Role.ACTOR, trained)
        reference = self.copy_module(reference, trained, loaded)
        self.tokenizer = load_tokenizer(tokenizer, trust_remote_code=trusts_remote_code(trained))
        generates = loaded.module.generation_config if "logprobs" in loaded.outputs else None
        self.eos_ids = stop_token_ids(self.tokenizer, loaded.module.config, generates)
        self.positions = max_positions(loaded.module)
        """The longest sequence that the model can read, in tokens; None = no limit is known."""
        for role, model, own in ((self.role, trained, loaded), (Role.REFERENCE, reference, None)):
            if model is None:
                continue
            source, role_model = (model, own) if own is not None else self.load_reference(model, trained, loaded)
            budget = self.config.token_budget(self.device_of(role_model).type, usual=usual_tokens)
            role_optimizer = optimizer if role is self.role else None
            self.add(role, source, role_model, role_optimizer, max_tokens=budget, trained=role is self.role)
        if reference is not None:
            self.check_same_ids(Role.REFERENCE, reference, trained)
        self.add_trainer(self.role, nll, plain=True)
        self.checkpoints = Checkpoints(
            self.config.checkpoint_root,
            self._trainers,
            self._workers,
            options=self.config.checkpointing_options,
            ranks=self.ranks,
        )

    @property
    def trainer(self) -> RoleTrainer:
        """The trainer of the trained model."""
        return self._trainers[self.role]

    @property
    def trained(self) -> ModelWorker:
        """The worker of the trained model."""
        return self._workers[self.role]
