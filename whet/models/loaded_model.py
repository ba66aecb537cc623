"""LoadedModel: a model ready to train, with its heads, its adapter and its capabilities."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from whet.errors import ConfigError
from whet.models.heads import Head
from whet.models.lora_layers import Adapter
from whet.models.modes import num_ids
from whet.util.tensor_subclasses import is_sharded

__all__ = ["LoadedModel", "ParameterSnapshot"]


@dataclass(frozen=True)
class ParameterSnapshot:
    """Copies of the trained parameters, from the time when a view was made."""

    tensors: tuple[tuple[nn.Parameter, Tensor], ...]
    adapter_off: bool
    """The adapter was untrained at that time: the view switches it off, and does not copy it."""

    @contextmanager
    def swap_in(self) -> Iterator[None]:
        """Swaps the copies in for forward passes without a gradient; of sharded parameters while they are shards."""
        originals = [(p, p.detach().clone() if is_sharded(p) else p.data) for p, _ in self.tensors]
        try:
            self._put(self.tensors)
            yield
        finally:
            self._put(originals)

    @torch.no_grad()
    def _put(self, values: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
        """Gives parameters other values. FSDP gathers from a shard's memory, and would not see another tensor."""
        for p, tensor in values:
            if is_sharded(p):
                p.copy_(tensor)
            else:
                p.data = tensor if tensor.dtype == p.dtype else tensor.to(p.dtype)


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to train: a backbone with an LM head, a score head or both.

    An actor or a reference has an LM head. A critic or a reward model has a score head, which computes one number for a
    state. An actor and a critic that share a backbone are one LoadedModel with both heads.

    Example: `load_model("Qwen/Qwen3-0.6B").lm_head.kind` is "identity".
    """

    module: PreTrainedModel
    """In train mode, with every dropout at 0: eval mode would turn activation checkpointing off."""
    packable: bool
    """It supports layouts, and uses whet's attention."""
    unpackable_reasons: tuple[str, ...]
    """Why the model is not packable; empty = it is packable."""
    lm_head: Head
    """The transform from the output layer to the logits; of kind "none" for a critic or a reward model."""
    name: str
    attention: str = "auto"
    """The implementation of attention over packed rows, one of models.attention.KERNELS."""
    score_head: nn.Linear | None = None
    """[1 D]: computes one number from the last hidden state. It is a part of the module."""
    adapter: Adapter | None = None
    """The adapter layers of the module; None = there are none."""
    is_view: bool = False
    """Another LoadedModel owns and trains the module; this one reads it, as it was when the view was made."""
    saved_dtype: torch.dtype = torch.float32
    """The dtype of the weights that were read, or of the module that was passed in. The model is saved in it."""
    snapshot: ParameterSnapshot | None = None
    """The parameters that a view swaps in; None = the view only switches the adapter off."""

    @property
    def outputs(self) -> frozenset[str]:
        """The outputs of the heads: "logprobs" of tokens, "values" of states and "scores" of last states."""
        outputs = {"logprobs"} if self.lm_head.kind != "none" else set()
        return frozenset(outputs if self.score_head is None else outputs | {"values", "scores"})

    @property
    def num_ids(self) -> int:
        """The number of token ids that the model can read: the rows of its embedding, padding included."""
        return num_ids(self.module)

    def base_view(self) -> LoadedModel:
        """Returns the same module with its adapter off: a reference that needs no memory of its own.

        The view is read-only: its worker neither freezes nor casts the module, which its owner continues to train.
        Raises: ConfigError: there is no adapter, so the view would be the trained model itself.
        """
        if self.adapter is None:
            raise ConfigError(f"{self.name} has no adapter to switch off; load the reference separately")
        return dataclasses.replace(self, is_view=True)

    def snapshot_view(self) -> LoadedModel:
        """Returns the model as it is now, for as long as the owner trains the adapter: the reference of an actor with
        LoRA.

        If the adapter is untrained, the view is the base with the adapter off, bit for bit. Otherwise it copies the
        adapter. It also copies modules that are trained in full, but never the frozen base.
        Raises: ConfigError: there is no adapter, so all weights would have to be copied.
        """
        view, adapter = self.base_view(), self.adapter
        assert adapter is not None
        untrained, adapter_ids = adapter.is_untrained(), {id(p) for p in adapter.parameters()}
        score = None if self.score_head is None else id(self.score_head.weight)
        parameters = [
            p for p in self.module.parameters() if p.requires_grad and not (untrained and id(p) in adapter_ids)
        ]
        copies = tuple((p, p.detach().clone()) for p in parameters if id(p) != score)
        return dataclasses.replace(view, snapshot=ParameterSnapshot(copies, adapter_off=untrained))

    @contextmanager
    def use_view(self) -> Iterator[None]:
        """Context for forward passes: inside, a view has the weights of the time when it was made."""
        with ExitStack() as stack:
            if self.is_view and self.adapter is not None and (self.snapshot is None or self.snapshot.adapter_off):
                stack.enter_context(self.adapter.disabled())
            if self.snapshot is not None:
                stack.enter_context(self.snapshot.swap_in())
            yield
