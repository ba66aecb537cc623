"""RoleWorkers: the models of a run, each behind a worker, with the trainers of those that are trained.

Reinforcement learning has a cluster (whet.cluster.RLCluster), which adds the engine and the sampling to it; supervised
training needs no more than this.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from whet.config import OptimConfig, Role, RoleConfig, TrainingConfig
from whet.config.lora import LORA_LR
from whet.data.tokenizer import check_same_ids, load_tokenizer
from whet.errors import ConfigError, format_value
from whet.models.activation_checkpointing import checkpoint_activations
from whet.models.load import check_device, load_model
from whet.models.loaded_model import LoadedModel
from whet.models.precision import compute_dtype
from whet.observe.loggers import check_loggers
from whet.observe.trace import Trace
from whet.ops import Support
from whet.packing.plan_cache import PlanCache
from whet.parallel.placement import Placement
from whet.parallel.processes import join_processes
from whet.parallel.ranks import Ranks
from whet.train.offload import OffloadPlacement
from whet.train.optimizers import check_optimizer
from whet.train.role_checkpoints import Checkpoints
from whet.train.role_trainer import RoleTrainer
from whet.train.worker import Allowed, Loss, ModelWorker
from whet.util.device import empty_cache
from whet.util.memory import release_freed_memory
from whet.util.model_paths import check_hub, model_folder

__all__ = ["ACTOR", "RoleWorkers", "check_model_exists", "model_checks"]

log = logging.getLogger("whet")

ACTOR = "actor"
"""In place of a model: the actor's own. critic=ACTOR is a score head on its trunk, reference=ACTOR its beginning."""
SLOW = 1e-5
"""Learning rate below which an adapter hardly learns: a tenth of the default."""
READ_ONLY = (Role.REFERENCE, Role.REWARD, Role.TEACHER)
"""Roles that have no optimizer, unless a run trains them."""


Given = nn.Module | str | RoleConfig
"""What a role's model is given as."""


class RoleWorkers:
    """The models of a run: `add` gives a role its worker, `add_trainer` a trainer to those that are trained.

    Args:
        config: of the loop.
        device: where models are loaded that are not given as modules; None = the GPU if there is one.
        offload_to_cpu: keep on a GPU only what the phase needs.
        module_dtype: what models that are given as modules compute in, as RoleConfig.dtype; None = their own dtype.
    """

    ENTRY: ClassVar[str] = "models"
    """Of run.pt, where `state` is kept."""

    tokenizer: Any
    checkpoints: Checkpoints

    def __init__(
        self,
        config: TrainingConfig,
        *,
        device: str | None = None,
        offload_to_cpu: bool = False,
        module_dtype: str | None = None,
    ) -> None:
        self.ranks: Ranks = join_processes(config.collective_timeout_s)
        """The processes that train together: `broadcast`, `scatter_gather`, `is_writer`."""
        self._loop, self._offload, self._module_dtype = config, offload_to_cpu, module_dtype
        self._device = None if device is None else check_device(device)
        self.trace = Trace()
        found = None if config.resume is None else Checkpoints(config.checkpoint_root, {}).find(config.resume)
        noted = None if found is None else Checkpoints.state(found, needs=(self.ENTRY,))
        self._noted_dtypes = {} if noted is None else noted[self.ENTRY]["dtypes"]
        self._plan_cache = PlanCache()
        self._workers: dict[Role, ModelWorker] = {}
        self._trainers: dict[Role, RoleTrainer] = {}

    # ---- making --------------------------------------------------------------------------------------------------

    def load(
        self,
        role: Role,
        model: nn.Module | str | RoleConfig,
        *,
        score_head: bool = False,
        trained: bool | None = None,
    ) -> LoadedModel:
        """A role's model, with its adapter. A module stays where it is.

        Args: score_head: besides a LM head. trained: None = as is usual for the role; of a model that is only read a
            saved adapter is merged.
        Raises: ConfigError: there is no such model, or its settings are for one that is trained.
        """
        given = RoleConfig(model=model) if isinstance(model, str) else model
        trained = role not in READ_ONLY if trained is None else trained
        if not isinstance(given, RoleConfig):
            return load_model(given, device=next(given.parameters()).device, role=role.value, score_head=score_head)
        if given.model is None:
            raise ConfigError(f"{role.value}.model is not set; give a hub name or a folder")
        if given.lora is not None and not trained:
            raise ConfigError(
                f"{role.value}.lora makes an adapter to train, and the {role.value} is only read; leave it out"
            )
        return load_model(
            given.model,
            dtype="float32" if given.dtype == "auto" or (trained and given.lora is None) else given.dtype,
            device=self.device(role),
            role=role.value,
            attention=given.attention,
            score_head=score_head,
            lora=given.lora,
            quantization=given.quantization,
            merge=False if trained else None,
            seed=self._loop.seed,
            trust_remote_code=given.trust_remote_code,
        )

    def load_reference(self, given: Given, actor: Given, policy: LoadedModel) -> tuple[Given, LoadedModel]:
        """The reference model, once the actor has its worker.

        Args:
            given: what to load, or ACTOR: the actor as it is now, before the first step.
            actor: what the actor was loaded from.
            policy: the actor. One with an adapter is its own reference: its base, read with the adapter off, or with a
                copy of the adapter where that was trained before. Of another one there is a second copy.
        Returns: what it comes from, for `add`, and the model.
        """
        if (given.model if isinstance(given, RoleConfig) else given) != ACTOR:
            return given, self.load(Role.REFERENCE, given)
        if policy.adapter is not None:
            log.info("reference: the actor as it is now, on the same base: no second copy")
            return policy.module, policy.snapshot_view()
        if isinstance(actor, nn.Module):
            given = copy.deepcopy(actor)
        elif isinstance(actor, RoleConfig):
            given = RoleConfig(model=actor.model, dtype=actor.dtype, trust_remote_code=actor.trust_remote_code)
        else:
            given = RoleConfig(model=actor)
        return given, self.load(Role.REFERENCE, given)

    def add(
        self,
        role: Role,
        model: nn.Module | str | RoleConfig,
        loaded: LoadedModel,
        optimizer: Any,
        *,
        max_tokens: int,
        trained: bool | None = None,
        support: Support | None = None,
        allowed: Allowed | None = None,
    ) -> ModelWorker:
        """Gives a role its worker. A module keeps its dtype, unless there is one for modules.

        Args:
            role: whose model it is.
            model: what it was loaded from.
            loaded: the model.
            optimizer: in place of the role's own `optim`; None = that.
            max_tokens: of a micro-batch.
            trained: None = as is usual for the role.
            support, allowed: the distribution that its logprobs are of; see ModelWorker.
        """
        given, dtype = (RoleConfig(model=model) if isinstance(model, str) else model), None
        placement = self._placement(loaded)
        wanted = given.dtype if isinstance(given, RoleConfig) else self._module_dtype
        if wanted is not None and not loaded.is_view:  # a view is as its owner is
            noted = None if wanted != "auto" else self._noted_dtypes.get(role.value)
            dtype = self.ranks.broadcast(compute_dtype(noted or wanted, loaded))  # processors may differ
        if isinstance(given, RoleConfig) and not loaded.is_view:
            checkpoint_activations(loaded.module, given.gradient_checkpointing)
        own = given.optim if isinstance(given, RoleConfig) else OptimConfig()
        if optimizer is not None and own != OptimConfig():
            raise ConfigError(
                f"{role.value}.optim and training_config.{role.value}_optimizer both set an optimizer (or optimizer= "
                "does); keep one"
            )
        optimizer = OptimConfig(name=optimizer) if isinstance(optimizer, str) else optimizer or own
        trained = role not in READ_ONLY if trained is None else trained
        if trained and loaded.adapter is not None and isinstance(optimizer, OptimConfig):
            optimizer = _rate_of_adapter(role, optimizer)
        self._workers[role] = worker = ModelWorker(
            loaded,
            optim=optimizer if trained else None,
            dtype=dtype,
            support=support,
            allowed=allowed,
            max_tokens=max_tokens,
            saturating_tokens=self._loop.saturating_tokens(loaded.module.device.type),
            max_sequences=self._loop.max_segments_per_packed_row,
            given=given if isinstance(given, RoleConfig) else None,
            placement=placement,
            plan_cache=None if role is Role.REWARD else self._plan_cache,  # it runs other batches
            seed=self._loop.seed,
        )
        empty_cache(worker.device)  # an engine with an allocator of its own looks at what is free
        return worker

    def add_trainer(self, role: Role, loss: Loss, *, accumulate: int = 1, plain: bool = False) -> RoleTrainer:
        """Gives a role its trainer. Args: plain: its metrics have no prefix, whatever the role."""
        trainer = RoleTrainer(self._workers[role], loss=loss, accumulate=accumulate, role=role)
        if plain:
            trainer.prefix = ""
        self._trainers[role] = trainer
        return trainer

    def tokenizer_of(self, role: Role, model: nn.Module | str | RoleConfig | None, given: Any = None) -> Any:
        """A role's own tokenizer; None = the policy's."""
        if model is None or given is not None:
            return None if given is None else load_tokenizer(given)
        trusted = trusts_remote_code(model)
        model = model.model if isinstance(model, RoleConfig) else model
        if not isinstance(model, str):
            return None
        place = Path(model_folder(model))
        if place.is_dir() and not any((place / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
            log.info("%s has no tokenizer; as %s it reads the policy's token ids", model, role.value)
            return None
        return load_tokenizer(model, trust_remote_code=trusted)

    def _placement(self, loaded: LoadedModel) -> Placement:
        """Where a role's tensors lie: sharded where there are several processes, else after offload_to_cpu."""
        device = loaded.module.device
        if self.ranks.size > 1:
            from torch.distributed.device_mesh import init_device_mesh  # imported where processes share a model

            from whet.parallel.fsdp import FSDPPlacement

            if self._offload:
                raise ConfigError(
                    f"offload_to_cpu moves whole tensors, and {self.ranks.size} processes have a shard of each; leave "
                    "it out, or use one process"
                )
            return FSDPPlacement(init_device_mesh(device.type, (self.ranks.size,)), self.ranks)
        if loaded.is_view:
            return Placement()
        if self._offload and device.type != "cpu":
            return OffloadPlacement()
        if self._offload and not self._workers:
            log.info("offload_to_cpu has nothing to do: the models lie on the CPU")
        return Placement()

    def device(self, role: Role) -> torch.device:
        """The device on which a role's model is loaded; of several processes each has its own GPU."""
        usual = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        return self._device or usual

    def check_same_ids(self, role: Role, model: Given, actor: Given) -> None:
        """Raises ConfigError where a role that is compared with the policy reads other token ids than it writes.

        Args: role: reference or teacher. model: what it was loaded from. actor: what the policy was.
        """
        loaded = self._workers[role].loaded
        places = [given.model if isinstance(given, RoleConfig) else given for given in (model, actor)]
        own = None if places[0] == ACTOR or places[0] is places[1] else self.tokenizer_of(role, places[0])
        if own is not None and places[0] != places[1]:
            check_same_ids(self.tokenizer, own, f"the {role.value} {loaded.name}")
        if loaded.num_ids < len(self.tokenizer):
            raise ConfigError(
                f"the {role.value} {loaded.name} knows {loaded.num_ids} token ids and the policy's tokenizer has "
                f"{len(self.tokenizer)}; give a model of the same tokenizer"
            )

    def raise_token_budget(self, longest: int) -> None:
        """Raises the token budget of the micro-batches to what must stay together, where the user has set none.

        Args: longest: tokens of the longest sequence, or pair, to come.
        Raises: ConfigError: max_tokens_per_microbatch is set and below that.
        """
        for worker in self._workers.values():
            budget = self._loop.token_budget(worker.device.type, longest)
            if budget > worker.max_tokens:
                log.info(
                    "trainer.max_tokens_per_microbatch raised from %d to %d to fit the data", worker.max_tokens, budget
                )
                worker.max_tokens = budget

    def finish_step(self, worker: ModelWorker) -> None:
        """Ends a step of a model that is trained: its weights have another version."""
        worker.version += 1
        self._plan_cache.clear()
        self.release_memory(worker)

    def unload(self, role: Role) -> None:
        """Takes the weights of a role that nothing reads any more out of memory; those of another's module stay."""
        worker = self.worker(role)
        if not worker.loaded.is_view:
            device = worker.device
            worker.loaded.module.to("meta")  # pyright: ignore[reportArgumentType]
            release_freed_memory()
            empty_cache(device)

    def release_memory(self, worker: ModelWorker) -> None:
        """Lets freed memory leave the process: the next phase takes its own elsewhere."""
        release_freed_memory()
        empty_cache(worker.device)

    # ---- reading -------------------------------------------------------------------------------------------------

    def worker(self, role: Role) -> ModelWorker:
        """The worker of a role. Raises ConfigError where there is none."""
        if role not in self._workers:
            raise ConfigError(f"there is no {role.value}; give {type(self).__name__}({role.value}=...)")
        return self._workers[role]

    @property
    def workers(self) -> Mapping[Role, ModelWorker]:
        """The roles that there are."""
        return self._workers

    @property
    def trainers(self) -> Mapping[Role, RoleTrainer]:
        """The roles that are trained."""
        return self._trainers

    @property
    def dtypes(self) -> dict[str, str]:
        """What each role computes in."""
        return {role.value: str(w.dtype).removeprefix("torch.") for role, w in self._workers.items()}

    def state(self) -> dict[str, Any]:
        """What a resumed run needs besides the workers: what each role computes in."""
        return {"dtypes": self.dtypes}

    def describe(self) -> dict[str, Any]:
        """What was chosen for this machine: compute dtypes, and what training runs on."""
        training = {role.value: w.backends for role, w in self._workers.items()}
        return {"compute_dtype": self.dtypes, "training": training}

    def close(self) -> None:
        """Frees the optimizers."""
        for worker in self._workers.values():
            worker.close()


def trusts_remote_code(model: Any) -> bool:
    """Whether the code beside a model's weights may run. Args: model: a RoleConfig, or anything that says nothing."""
    return isinstance(model, RoleConfig) and model.trust_remote_code


def check_model_exists(name: str) -> None:
    """Raises ConfigError where there is no folder of that name, and no such name on the hub."""
    if name != ACTOR:
        check_hub(model_folder(name))


def model_checks(config: TrainingConfig, models: Iterable[Any], optimizers: Iterable[Any]) -> list[Callable[[], Any]]:
    """What is asked before the models of a run are loaded: each call raises ConfigError where something is wrong.

    Args: config: of the loop. models: as they were given, None among them. optimizers: likewise.
    """
    for model in models:
        if not isinstance(model, nn.Module | str | RoleConfig | None):
            raise ConfigError(
                f"a model is a {type(model).__name__}, {format_value(model, 80)}; give a module, a folder or a hub "
                "name as text, or a RoleConfig"
            )
    named = [m.model if isinstance(m, RoleConfig) else m for m in models]
    optims = [m.optim for m in models if isinstance(m, RoleConfig)]
    return [
        *(partial(check_model_exists, name) for name in named if isinstance(name, str)),
        *(partial(check_optimizer, optim) for optim in (*optims, *optimizers)),
        partial(check_loggers, config.chosen_loggers, config.metrics_logging_options),
    ]


def _rate_of_adapter(role: Role, optimizer: OptimConfig) -> OptimConfig:
    """The optimizer of an adapter: with its own rate where none is given; warns of the rate of a whole model."""
    if optimizer.lr is None:
        log.info("%s: learning rate %g, the usual one of an adapter", role.section, LORA_LR)
        return dataclasses.replace(optimizer, lr=LORA_LR)
    if 0 < optimizer.lr < SLOW:
        log.warning(
            "%s.optim.lr=%g is the rate of a whole model; an adapter hardly learns below %g: about %g serves it",
            role.section,
            optimizer.lr,
            SLOW,
            LORA_LR,
        )
    return optimizer
