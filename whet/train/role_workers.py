"""RoleWorkers: the models of a run, each behind a worker, and the trainers of the trained ones.

The cluster of reinforcement learning (whet.cluster.RLCluster) adds the engine and the sampling. Supervised training
(train/supervised_models.py) adds nothing.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from whet.config import OptimConfig, Role, RoleConfig, TrainingConfig
from whet.config.lora import LORA_LR
from whet.data.tokenizer import check_same_ids, load_tokenizer
from whet.errors import ConfigError, format_value
from whet.models.activation_checkpointing import checkpoint_activations
from whet.models.load import check_device, load_model
from whet.models.loaded_model import LoadedModel
from whet.models.precision import auto_dtype, compute_dtype
from whet.observe.loggers import check_loggers
from whet.observe.trace import Trace
from whet.ops import LogitsProcessors
from whet.packing.plan_cache import PlanCache
from whet.parallel.loading import load_sharded
from whet.parallel.placement import Placement
from whet.parallel.processes import join_processes
from whet.parallel.ranks import Ranks
from whet.parallel.torchrun_env import check_mesh
from whet.storage.model_paths import check_hub, model_folder
from whet.train.make_optimizer import check_optimizer
from whet.train.offload import OffloadPlacement
from whet.train.role_checkpoints import Checkpoints
from whet.train.role_trainer import RoleTrainer
from whet.train.worker import Allowed, Loss, ModelWorker
from whet.util.device import empty_cache
from whet.util.memory import release_freed_memory

if TYPE_CHECKING:
    from whet.parallel.mesh import ProcessMesh

__all__ = ["ACTOR", "RoleWorkers", "check_model_exists", "model_checks"]

log = logging.getLogger("whet")

ACTOR = "actor"
"""The word for the actor's model: critic=ACTOR is a score head on its backbone, reference=ACTOR the actor before the
first step."""
MIN_ADAPTER_LR = 1e-5
"""An adapter hardly learns at a lower learning rate: a tenth of the default."""
READ_ONLY = (Role.REFERENCE, Role.REWARD, Role.TEACHER)
"""Roles that have no optimizer, unless a run trains them."""


ModelSource = nn.Module | str | RoleConfig
"""A role's model, as the user gives it."""


class RoleWorkers:
    """The models of a run. `add` makes the worker of a role, `add_trainer` its trainer.

    Args:
        config: of the loop.
        device: models that are not given as modules are loaded there; None = the GPU if there is one.
        offload_to_cpu: keep only the tensors of the current phase on a GPU.
        module_dtype: the compute dtype of models that are given as modules, as RoleConfig.dtype; None = their own.
    """

    ENTRY: ClassVar[str] = "models"
    """The entry of run.pt that holds `state`."""
    usual_tokens: int | None = None
    """Tokens of a micro-batch where max_tokens_per_microbatch is not set and no row is longer; None = the device's."""

    tokenizer: Any
    checkpoints: Checkpoints
    eos_ids: tuple[int, ...]

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
        sizes = config.context_parallel_size, config.data_parallel_replicate_size, config.tensor_parallel_size
        check_mesh(self.ranks.size, *sizes)
        self._loop, self._offload, self._module_dtype = config, offload_to_cpu, module_dtype
        self._device = None if device is None else check_device(device)
        self.trace = Trace()
        self.ranks.phase = lambda: self.trace.phase
        folder = None if config.resume is None else Checkpoints(config.checkpoint_root, {}).find(config.resume)
        self._saved_dtypes: dict[str, str] = {}
        """The compute dtype of each role in the checkpoint that the run resumes."""
        if folder is not None:
            self._saved_dtypes = Checkpoints.state(folder, needs=(self.ENTRY,))[self.ENTRY]["dtypes"]
        self._plan_cache = PlanCache()
        self._workers: dict[Role, ModelWorker] = {}
        self._trainers: dict[Role, RoleTrainer] = {}

    # ---- loading --------------------------------------------------------------------------------------------------

    def load(
        self,
        role: Role,
        model: nn.Module | str | RoleConfig,
        *,
        score_head: bool = False,
        trained: bool | None = None,
    ) -> LoadedModel:
        """Loads a role's model, with its adapter. A module stays on its device.

        Of several processes only rank 0 reads it, on the CPU; the others have it without weights until `add` shards it.

        Args: score_head: add one to the LM head. trained: None = the role's default. The saved adapter of a model that
            is not trained is merged.
        Raises: ConfigError: there is no such model, or it has settings for training and is not trained.
        """
        source = RoleConfig(model=model) if isinstance(model, str) else model
        trained = role not in READ_ONLY if trained is None else trained
        if not isinstance(source, RoleConfig):
            device = next(source.parameters()).device
            if device.type == "cpu" and self.ranks.size == 1 and self.device(role).type == "cuda":
                log.warning(
                    "the %s is a module on the CPU, and runs there, though there is a GPU; give it as "
                    "module.to('cuda'), or set device='cpu'",
                    role.value,
                )
            return load_model(source, device=device, role=role.value, score_head=score_head)
        if source.model is None:
            raise ConfigError(f"{role.value}.model is not set; give a hub name or a folder")
        if source.lora is not None and not trained:
            raise ConfigError(
                f"{role.value}.lora makes an adapter to train, and the {role.value} is only read; leave it out"
            )
        several = self.ranks.size > 1
        if several and source.quantization is not None:
            raise ConfigError(
                f"{role.value}.quantization={source.quantization} does not run on {self.ranks.size} processes: FSDP "
                "shards numbers, and 4-bit weights are packed in blocks with scales; leave it out, or use one process"
            )
        load = functools.partial(
            load_model,
            source.model,
            dtype=self._dtype_read(role, source, is_frozen=not trained or source.lora is not None),
            device=self.device(role),
            on_cpu=several,
            role=role.value,
            attention=source.attention,
            score_head=score_head,
            lora=source.lora,
            quantization=source.quantization,
            merge=False if trained else None,
            seed=self._loop.seed,
            trust_remote_code=source.trust_remote_code,
        )
        if source.trust_remote_code:  # the others can't receive modules whose code they have not imported
            return load()
        return load_sharded(self.ranks, load) if several else load()

    def _dtype_read(self, role: Role, source: RoleConfig, *, is_frozen: bool) -> str:
        """Returns the dtype in which a model's weights are read. Trained ones are read in fp32 and become the masters;
        frozen ones go to a GPU in the dtype that they compute in, so that it never holds them in fp32.
        """
        if not is_frozen:
            return "float32"
        if source.dtype != "auto" or (device := self.device(role)).type == "cpu":
            return "float32" if source.dtype == "auto" else source.dtype
        return self._saved_dtypes.get(role.value) or str(auto_dtype(device, 0)).removeprefix("torch.")

    @staticmethod
    def copy_module(source: ModelSource | None, actor: ModelSource, policy: LoadedModel) -> ModelSource | None:
        """Returns the source of the reference; a copy of the actor's module if the reference is that module without an
        adapter.

        It must be copied before `add` of the actor, after which several processes share it. Args: as `load_reference`.
        """
        is_copy = isinstance(actor, nn.Module) and policy.adapter is None and isinstance(source, str | RoleConfig)
        is_copy = is_copy and (source.model if isinstance(source, RoleConfig) else source) == ACTOR
        return copy.deepcopy(actor) if is_copy else source

    def load_reference(
        self, source: ModelSource, actor: ModelSource, policy: LoadedModel
    ) -> tuple[ModelSource, LoadedModel]:
        """Loads the reference model, after the actor.

        Args:
            source: the model, or ACTOR: the actor as it is now, before the first step.
            actor: the actor's model, as the user gave it.
            policy: the loaded actor. An actor with an adapter shares its base with the reference, which is read with
                the adapter off, or with a copy of the adapter if that was trained before. Another actor is loaded a
                second time.
        Returns: the source of the model, for `add`, and the model.
        """
        if (source.model if isinstance(source, RoleConfig) else source) != ACTOR:
            return source, self.load(Role.REFERENCE, source)
        if policy.adapter is not None:
            log.info("reference: the actor as it is now, on the same base: no second copy")
            return policy.module, policy.snapshot_view()
        assert not isinstance(actor, nn.Module), "copy_module has copied it"
        if isinstance(actor, RoleConfig):
            source = RoleConfig(model=actor.model, dtype=actor.dtype, trust_remote_code=actor.trust_remote_code)
        else:
            source = RoleConfig(model=actor)
        return source, self.load(Role.REFERENCE, source)

    def add(
        self,
        role: Role,
        model: nn.Module | str | RoleConfig,
        loaded: LoadedModel,
        optimizer: Any,
        *,
        max_tokens: int,
        trained: bool | None = None,
        processors: LogitsProcessors | None = None,
        allowed: Allowed | None = None,
    ) -> ModelWorker:
        """Makes the worker of a role. A module keeps its dtype, unless module_dtype is set.

        Args:
            role: the role.
            model: the source of the model.
            loaded: the model.
            optimizer: replaces the role's own `optim`; None = that.
            max_tokens: of a micro-batch.
            trained: None = the role's default.
            processors, allowed: the distribution of its logprobs; see ModelWorker.
        """
        source, dtype = (RoleConfig(model=model) if isinstance(model, str) else model), None
        placement = self._placement(loaded)
        configured = source.dtype if isinstance(source, RoleConfig) else self._module_dtype
        if configured is not None and not loaded.is_view:  # a view has its owner's dtype
            saved = None if configured != "auto" else self._saved_dtypes.get(role.value)
            # processors may differ
            dtype = self.ranks.broadcast(compute_dtype(saved or configured, loaded, self.device_of(loaded)))
        if isinstance(source, RoleConfig) and not loaded.is_view:
            mode = source.gradient_checkpointing
            checkpoint_activations(loaded.module, "none" if mode == "auto" else mode)
        own = source.optim if isinstance(source, RoleConfig) else OptimConfig()
        if optimizer is not None and own != OptimConfig():
            raise ConfigError(
                f"{role.value}.optim and training_config.{role.value}_optimizer both set an optimizer (or optimizer= "
                "does); keep one"
            )
        optimizer = OptimConfig(name=optimizer) if isinstance(optimizer, str) else optimizer or own
        trained = role not in READ_ONLY if trained is None else trained
        if trained and loaded.adapter is not None and isinstance(optimizer, OptimConfig):
            optimizer = _check_adapter_lr(role, optimizer)
        self._workers[role] = worker = ModelWorker(
            loaded,
            optim=optimizer if trained else None,
            dtype=dtype,
            processors=processors,
            allowed=allowed,
            max_tokens=max_tokens,
            saturating_tokens=self._loop.saturating_tokens(self.device_of(loaded).type),
            max_sequences=self._loop.max_segments_per_packed_row,
            config=source if isinstance(source, RoleConfig) else None,
            placement=placement,
            plan_cache=None if role is Role.REWARD else self._plan_cache,  # it runs other batches
            seed=self._loop.seed,
        )
        worker.on_micro_batch = lambda done, total: self.trace.count(done, total, "micro-batches")
        empty_cache(worker.device)  # an engine with its own allocator takes the memory that is free
        return worker

    def add_trainer(self, role: Role, loss: Loss, *, plain: bool = False) -> RoleTrainer:
        """Makes the trainer of a role. Args: plain: its metrics have no prefix, whatever the role."""
        trainer = RoleTrainer(self._workers[role], loss=loss, role=role)
        if plain:
            trainer.prefix = ""
        self._trainers[role] = trainer
        return trainer

    def tokenizer_of(self, role: Role, model: nn.Module | str | RoleConfig | None, given: Any = None) -> Any:
        """Returns a role's own tokenizer; None = the policy's."""
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
        """Returns the placement of a role's tensors: sharded over several processes, else as offload_to_cpu says."""
        device = self.device_of(loaded)
        if self._offload and device.type == "cpu" and not self._workers:
            log.info("offload_to_cpu has nothing to do: the models lie on the CPU")
        if self.ranks.size > 1:
            from whet.parallel.context import check_heads  # imported where processes share a model
            from whet.parallel.fsdp import FSDPPlacement
            from whet.parallel.tensor import check_tensor_parallel

            context = self._loop.context_parallel_size
            if context > 1 and not loaded.packable:
                raise ConfigError(
                    f"trainer.context_parallel_size={context} divides packed rows, and {loaded.name} trains padded: "
                    f"{'; '.join(loaded.unpackable_reasons)}; set it to 1"
                )
            tensor = self._loop.tensor_parallel_size
            if tensor > 1:
                check_tensor_parallel(loaded.module, tensor, loaded.name)
            check_heads(loaded.module.config, context, loaded.name, tensor)
            return FSDPPlacement(
                self._mesh, self.ranks, sync_each_pass=self._loop.sync_each_microbatch, offloads=self._offload
            )
        if loaded.is_view:
            return Placement()
        if self._offload and device.type != "cpu":
            return OffloadPlacement()
        return Placement()

    @functools.cached_property
    def _mesh(self) -> ProcessMesh:
        from whet.parallel.mesh import make_mesh  # imported where processes share a model

        loop = self._loop
        sizes = loop.context_parallel_size, loop.data_parallel_replicate_size, loop.tensor_parallel_size
        return make_mesh(self.device(Role.ACTOR).type, self.ranks.size, *sizes)

    def share_values(self, tensor: torch.Tensor) -> None:
        """Gives a tensor the values of the first of the processes that divide matrices together, in place."""
        assert self._mesh.tensor is not None
        torch.distributed.broadcast(tensor, group=self._mesh.tensor.get_group(), group_src=0)

    def device(self, role: Role) -> torch.device:
        """Returns the device on which a role's model is loaded; of several processes each has its own GPU."""
        usual = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        return self._device or usual

    def device_of(self, loaded: LoadedModel) -> torch.device:
        """Returns the device that a model computes on; with several processes it is moved there as it is sharded."""
        return self.device(Role.ACTOR) if self.ranks.size > 1 else loaded.module.device

    def check_same_ids(self, role: Role, model: ModelSource, actor: ModelSource) -> None:
        """Raises ConfigError where a role that is compared with the policy has another tokenizer.

        Args: role: reference or teacher. model: the source of its model. actor: the source of the policy's.
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
        """Raises the token budget of the micro-batches to the longest sequence or pair, unless the user has set it.

        Args: longest: its tokens.
        Raises: ConfigError: max_tokens_per_microbatch is set and smaller.
        """
        for worker in self._workers.values():
            budget = self._loop.token_budget(worker.device.type, longest, self.usual_tokens)
            if budget > worker.max_tokens:
                log.info(
                    "trainer.max_tokens_per_microbatch raised from %d to %d to fit the data", worker.max_tokens, budget
                )
                worker.max_tokens = budget

    def finish_step(self, worker: ModelWorker) -> None:
        """Ends a step of a trained model: its weights get the next version."""
        worker.version += 1
        self.clear_plans()
        self.release_memory(worker)

    def clear_plans(self) -> None:
        """Forgets the micro-batches that were cut from the last batches."""
        self._plan_cache.clear()

    def unload(self, role: Role) -> None:
        """Frees the weights of a role that nothing reads any more, unless they belong to another role's module."""
        worker = self.worker(role)
        if not worker.loaded.is_view:
            device = worker.device
            worker.loaded.module.to("meta")  # pyright: ignore[reportArgumentType]
            release_freed_memory()
            empty_cache(device)

    def release_memory(self, worker: ModelWorker) -> None:
        """Returns freed memory to the system, since the next phase allocates elsewhere."""
        release_freed_memory()
        empty_cache(worker.device)

    # ---- reading -------------------------------------------------------------------------------------------------

    def worker(self, role: Role) -> ModelWorker:
        """Returns the worker of a role. Raises ConfigError: there is none."""
        if role not in self._workers:
            raise ConfigError(f"there is no {role.value}; give {type(self).__name__}({role.value}=...)")
        return self._workers[role]

    @property
    def workers(self) -> Mapping[Role, ModelWorker]:
        """The workers by role."""
        return self._workers

    @property
    def trainers(self) -> Mapping[Role, RoleTrainer]:
        """The trainers by role."""
        return self._trainers

    @property
    def dtypes(self) -> dict[str, str]:
        """The compute dtype of each role."""
        return {role.value: str(w.dtype).removeprefix("torch.") for role, w in self._workers.items()}

    def state(self) -> dict[str, Any]:
        """Returns the state for checkpoints besides the workers' own: the compute dtype of each role."""
        return {"dtypes": self.dtypes}

    def describe(self) -> dict[str, Any]:
        """Returns the choices that were made for this machine: compute dtypes, and the implementations that training
        runs.
        """
        training = {role.value: w.backends for role, w in self._workers.items()}
        return {"compute_dtype": self.dtypes, "training": training}

    def close(self) -> None:
        """Frees the optimizers."""
        for worker in self._workers.values():
            worker.close()


def trusts_remote_code(model: Any) -> bool:
    """Returns whether the code in a model's folder may run. Args: model: a RoleConfig; anything else = no."""
    return isinstance(model, RoleConfig) and model.trust_remote_code


def check_model_exists(name: str) -> None:
    """Raises ConfigError where neither a folder nor a model of the hub has that name."""
    if name != ACTOR:
        check_hub(model_folder(name))


def model_checks(config: TrainingConfig, models: Iterable[Any], optimizers: Iterable[Any]) -> list[Callable[[], Any]]:
    """Returns the checks before the models of a run are loaded; each raises ConfigError.

    Args: config: of the loop. models, optimizers: as the user gave them; None is allowed.
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
        *(functools.partial(check_model_exists, name) for name in named if isinstance(name, str)),
        *(functools.partial(check_optimizer, optim, config.checkpointing_options) for optim in (*optims, *optimizers)),
        functools.partial(check_loggers, config.chosen_loggers, config.metrics_logging_options),
    ]


def _check_adapter_lr(role: Role, optimizer: OptimConfig) -> OptimConfig:
    """Returns the optimizer of an adapter, with the default learning rate if it has none. Warns of a rate that is too
    low.
    """
    if optimizer.lr is None:
        log.info("%s: learning rate %g, the default of an adapter", role.section, LORA_LR)
        return dataclasses.replace(optimizer, lr=LORA_LR)
    if 0 < optimizer.lr < MIN_ADAPTER_LR:
        log.warning(
            "%s.optim.lr=%g is a rate for all weights of a model; an adapter hardly learns below %g, so set about %g",
            role.section,
            optimizer.lr,
            MIN_ADAPTER_LR,
            LORA_LR,
        )
    return optimizer
