"""FSDPPlacement: a model sharded over several processes by torch's fully_shard.

    parameters, moments               each rank holds its shard of every tensor; a decoder layer is whole while it runs
    bf16                              trained parameters are fp32 shards, which the optimizer updates, and are gathered
                                      in bf16; gradients are added in fp32, over the passes and over the ranks
    forward passes                    every rank makes the same list; of n data ranks each runs every n-th pass of it
    tokens of a pass                  with context parallelism, several ranks run a pass together, each on some tokens
    matrices of a layer               with tensor parallelism, several ranks run a pass together, each with some rows or
                                      columns of them, and of the logits (parallel/tensor.py)
    gradients                         are whole until the last pass, in which they are added over the ranks and become
                                      shards; with sync_each_pass they do so in every pass, one layer at a time. They
                                      are never averaged: the token weights were computed from the whole batch, so
                                      nothing else divides
    offload_to_cpu                    shards of parameters, gradients and moments lie on the host, where the optimizer
                                      steps; those of a layer are copied to the device as it is gathered, gradients back
                                      as they become shards
    collectives                       of a pass: one gather of each layer forward and one backward; of an update: one
                                      reduce-scatter of each layer. None is of a token or of one parameter
    rollout                           every rank has the whole model while it samples, or, of the embedded engine with
                                      tensor parallelism, its part of the matrices and of the KV cache

    checkpoints, exports      every rank gathers each tensor in turn, and rank 0 writes it

A model without weights (parallel/loading.py) is read from its files or sent by rank 0, and sharded, layer by layer.

Experimental.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from whet.errors import ConfigError, OtherRankError
from whet.models.fast_layers import FastLayers
from whet.models.weight_files import without_weights
from whet.packing.micro_batch import MicroBatch
from whet.parallel.context import gather_stats, take_share
from whet.parallel.loading import receive
from whet.parallel.mesh import ProcessMesh
from whet.parallel.placement import Phase, Placement
from whet.parallel.ranks import Ranks
from whet.parallel.tensor import EngineWeights, divide_layer, divide_vocabulary, sum_gradients
from whet.types import TokenStats
from whet.util.memory import release_freed_memory
from whet.util.tensor_subclasses import gather_full_tensor, local_part

__all__ = ["FSDPPlacement"]

Result = TypeVar("Result")
CALL = "whet_call"
"""The method of the root module that runs a function within FSDP's hooks. They gather parameters of no layer."""


class FSDPPlacement(Placement):
    """A model sharded over processes.

    Args: mesh: their grid. ranks: the same processes, for what they agree on. sync_each_pass: add gradients over the
        ranks in every pass, so that no rank has the whole gradient between passes. offloads: keep shards on the host.
    Raises: ConfigError: a dtype other than float32 and bfloat16.

    Example: `ModelWorker(loaded, optim=OptimConfig(), placement=FSDPPlacement(make_mesh("cpu", 2, 1, 1), ranks))`.
    """

    repeats_passes = False

    def __init__(
        self, mesh: ProcessMesh, ranks: Ranks, *, sync_each_pass: bool = False, offloads: bool = False
    ) -> None:
        super().__init__()
        self.mesh, self.ranks, self.sync_each_pass, self.offloads = mesh, ranks, sync_each_pass, offloads
        self._serves_engine = False
        """Whether engines read this rank's weights now, so that it runs passes without the others."""
        self._engine_weights = EngineWeights()
        self._partial: set[str] = set()
        """The parameters whose gradients are to be summed over the ranks that divide matrices."""

    @property
    def device(self) -> torch.device:
        """See Placement; also while the shards lie on the host."""
        return self.mesh.device

    @property
    def dtype(self) -> torch.dtype:
        """See Placement: trained parameters are fp32 shards, and are gathered in this dtype."""
        return self.module.whet_dtype  # pyright: ignore[reportReturnType]

    def prepare(self, module: nn.Module, dtype: torch.dtype | None) -> torch.dtype | None:
        """Shards every decoder layer, and the rest of the model (embedding, last norm, head) as one more part.

        Each part is sharded as soon as it is whole. Trained parameters become fp32, so they are the optimizer's
        masters; the others are cast to the dtype. A view's module is sharded already, by the placement of its owner.
        """
        if isinstance(module, FSDPModule):
            return
        dtypes = {p.dtype for p in module.parameters() if dtype is None or not p.is_floating_point()} or {dtype}
        if not dtypes <= {torch.float32, torch.bfloat16} or len(dtypes) > 1:
            raise ConfigError(
                f"several processes compute in float32 or in bfloat16, not in {', '.join(sorted(map(str, dtypes)))}; "
                "set actor.dtype=bfloat16 or float32 (module_dtype of a module), and leave out quantization"
            )
        compute: Any = dtypes.pop()
        for p in module.parameters():
            p.data = p.data.to(torch.float32 if p.requires_grad else compute)
        options: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(compute, torch.float32, cast_forward_inputs=False)}
        if self.offloads:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        self._skeleton = without_weights(module, module)  # since fully_shard changes the classes of the modules
        without_values = any(self.ranks.all_gather(next(module.parameters()).is_meta))
        backbone: Any = module.get_decoder()  # pyright: ignore[reportCallIssue]
        names = {part: name for name, part in module.named_modules()}
        for part in (*backbone.layers, module):
            if without_values:
                whole = (p for p in part.parameters() if not isinstance(p, DTensor))  # layers are sharded by then
                receive(whole, self.device, self.ranks, self.mesh.row_share)
            if self.mesh.tensor is not None and part is module:
                divide_vocabulary(module, self.mesh.tensor)
            elif self.mesh.tensor is not None:
                partial = divide_layer(backbone, part, self.mesh.tensor)
                self._partial.update(f"{names[part]}.{name}" for name in partial)
            fully_shard(part, mesh=self.mesh.fsdp, **options)
        for part in _parts(module):  # both calls: gloo can't do the first alone, and the second alone is a mean
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
        module.whet_dtype = compute
        module.whet_call = MethodType(_call, module)  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
        register_fsdp_forward_method(module, CALL)
        module.save_pretrained = _refuse_to_save  # pyright: ignore[reportArgumentType]

    def find_fast_layers(self, module: nn.Module) -> FastLayers:
        """See Placement. A layer is compared while its part is gathered, in the dtype that it computes in; one whose
        matrices are divided keeps its own forward.
        """
        module.whet_call(lambda: ())  # pyright: ignore[reportCallIssue] # the root runs before a part is gathered
        fast = FastLayers(module, _gathered(_parts(module)))
        fast.agree(self.ranks.all_gather)
        return fast

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """See Placement. After a pass without gradient the root would keep plain parameters, not the optimizer's."""
        if phase == "step" and self.mesh.tensor is not None and self._optim is not None:
            grads = {name: m.grad for name, m in self._optim.masters.items() if m.grad is not None}
            sum_gradients([g for name, g in grads.items() if name in self._partial], self.mesh.tensor)
        try:
            yield
        finally:
            self.reshard()

    @contextmanager
    def weights(self, *, parts: bool = False) -> Iterator[nn.Module]:
        """See Placement: every rank gathers the model once, and then no weights are sent."""
        if self._serves_engine:  # an engine is built at its first use
            yield self.module
            return
        shards = _parts(self.module)
        self.forward(lambda: ())  # the root must run once before a layer runs on its own
        for part in shards:
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()
        if self.mesh.tensor is not None:
            self._engine_weights.put(self.module, parts=parts)
        self._serves_engine = True
        try:
            yield self.module
        finally:
            self._serves_engine = False
            self.reshard()
            self._engine_weights.free()
            for part in shards:
                part.set_reshard_after_forward(part is not self.module, recurse=False)

    @contextmanager
    def whole_module(self) -> Iterator[nn.Module]:
        """See Placement: each tensor is gathered in turn, and rank 0 keeps it on the CPU."""
        try:
            self.ranks.all_gather(None)  # where a program saves in one process alone, this says so
        except OtherRankError as error:
            raise OtherRankError(f"{error}; all processes must save a model together, rank 0 writes it") from error
        self.reshard()
        masters = {} if self._optim is None else self._optim.masters
        gathered: dict[int, Any] = {}
        skeleton = dict(self._skeleton.named_parameters())
        for name, p in self.module.named_parameters():
            whole = gather_full_tensor(masters.get(name, p).detach())
            if self.ranks.is_writer:
                gathered[id(skeleton[name])] = nn.Parameter(whole.cpu(), p.requires_grad)
        yield copy.deepcopy(self._skeleton, gathered) if self.ranks.is_writer else self._skeleton

    def call_on_writer(self, fn: Callable[[], Result]) -> Result:
        """See Placement."""
        return self.ranks.call_on_writer(fn)

    def reshard(self) -> None:
        """See Placement; not while engines read the weights."""
        if self._serves_engine:
            return
        for part in _parts(self.module):
            part.reshard()

    # ---- several processes ---------------------------------------------------------------------------------------

    def forward(self, fn: Callable[[], Result]) -> Result:
        """See Placement."""
        return self.module.whet_call(fn)  # pyright: ignore[reportCallIssue]

    def split_passes(self, passes: Sequence[Result]) -> list[tuple[Result, bool]]:
        """See Placement; passes have similar costs, so they are dealt in turn. All ranks must run as many passes."""
        if self._serves_engine:
            return super().split_passes(passes)
        size = self.data_size
        own = [(x, True) for x in passes[self.ranks.rank // self.pass_size :: size]]
        missing = -(-len(passes) // size) - len(own)
        return own + [(x, False) for x in passes[-1:]] * missing  # no passes where every advantage is 0

    @property
    def data_size(self) -> int:
        """See Placement."""
        return self.ranks.size // self.mesh.pass_size if not self._serves_engine else 1

    @property
    def pass_size(self) -> int:
        """See Placement."""
        return 1 if self._serves_engine else self.mesh.pass_size

    def split_tokens(self, micro: MicroBatch) -> MicroBatch:
        """See Placement."""
        if self._serves_engine or self.mesh.context_size == 1:
            return micro
        return take_share(micro, self.mesh.context_group)

    def gather_tokens(self, stats: TokenStats, micro: MicroBatch) -> TokenStats:
        """See Placement."""
        return stats if micro.share is None else gather_stats(stats, micro.share, self.mesh.context_group)

    def check_same_passes(self, facts: Mapping[str, Any]) -> None:
        """See Placement."""
        if not self._serves_engine:
            self.ranks.check_same("batch", facts)

    def set_gradient_sync(self, last: bool) -> None:
        """See Placement."""
        for part in _parts(self.module):
            part.set_requires_gradient_sync(last or self.sync_each_pass, recurse=False)

    def gather_columns(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See Placement."""
        for column in columns.values() if not self._serves_engine else ():
            dist.all_reduce(column, group=self.mesh.data_group)
        return dict(columns)

    def gather_results(self, results: list[Result]) -> list[Result]:
        """See Placement."""
        everywhere = self.ranks.all_gather(results)[:: self.mesh.pass_size]
        size, total = self.ranks.size // self.mesh.pass_size, sum(map(len, everywhere))
        return [everywhere[i % size][i // size] for i in range(total)]

    def grad_norm(self, grads: Sequence[Tensor], local: Callable[[Sequence[Tensor]], float]) -> float:
        """See Placement: the norm of the norms of the shards; other ranks may have copies of them.

        Of the ranks that divide matrices, the first counts what all of them have: the norms in the layers.
        """
        tensor = self.mesh.tensor
        if tensor is not None and tensor.get_local_rank() > 0:
            grads = [g for g in grads if _is_divided(g)]
        own = local([local_part(g) for g in grads])
        norms = self.ranks.all_gather(own)[: self.mesh.num_shards]
        return float(torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64)))


def _parts(module: nn.Module) -> list[FSDPModule]:
    return [x for x in module.modules() if isinstance(x, FSDPModule)]


def _gathered(parts: Sequence[FSDPModule]) -> Iterator[nn.Module]:
    """Yields parts of a model in turn, each with plain parameters while it is the current one."""
    for part in parts:
        part.reshard()
    for part in parts:
        part.unshard()
        yield part  # pyright: ignore[reportReturnType]
        part.reshard()
        release_freed_memory()  # or the holes that it leaves would take as much as the shards


def _is_divided(grad: Tensor) -> bool:
    """Returns whether the ranks that divide matrices have different parts. Their axis is the last one of the mesh."""
    named = grad.device_mesh.mesh_dim_names if isinstance(grad, DTensor) else None
    return bool(named) and named[-1] == "tensor" and grad.placements[-1].is_shard()  # pyright: ignore


def _refuse_to_save(*args: Any, **options: Any) -> NoReturn:
    """Replaces save_pretrained of transformers, which can't write shards."""
    raise ConfigError(
        "save_pretrained would write this process's shards of the weights; call trainer.save_model(folder), or "
        "cluster.actor.export(folder, tokenizer), in all processes"
    )


def _call(self: nn.Module, fn: Callable[[], Any]) -> Any:
    """Runs a function as the root's forward pass. The function takes no arguments, which FSDP would copy and cast."""
    return fn()
