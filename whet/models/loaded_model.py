"""LoadedModel: a model ready to train, with its heads, its adapter and its capabilities."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from whet.errors import ConfigError
from whet.models.adapters import Adapter
from whet.models.heads import Head

__all__ = ["LoadedModel", "ParameterSnapshot"]


@dataclass(frozen=True)
class ParameterSnapshot:
    """Copies of the trained parameters of a view, from the time when the view was made."""

    tensors: tuple[tuple[nn.Parameter, Tensor], ...]
    adapter_off: bool
    """The adapter was untrained then: the view switches it off, and none of it is copied."""

    @contextmanager
    def swap_in(self) -> Iterator[None]:
        """Swaps the copies in for forward passes without a gradient."""
        held = [(p, p.data) for p, _ in self.tensors]
        try:
            for p, tensor in self.tensors:
                p.data = tensor if tensor.dtype == p.dtype else tensor.to(p.dtype)
            yield
        finally:
            for p, data in held:
                p.data = data


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to train: a trunk, and on it a LM head, a score head or both.

    An actor or a reference has a LM head; a critic and a reward model have a score head, which gives one number
    to a state. A trunk that both share is one record with both heads.

    Example: `load_model("Qwen/Qwen3-0.6B").lm_head.kind` is "identity".
    """

    module: PreTrainedModel
    """In train mode, with every dropout at 0: eval mode would turn activation checkpointing off."""
    packable: bool
    """True = it takes a layout, and its attention is whet's."""
    unpackable_reasons: tuple[str, ...]
    """Why the model is not packable; empty = it is."""
    lm_head: Head
    """The transform from the output layer to logits; of kind "none" for a critic or a reward model."""
    name: str
    attention: str = "auto"
    """The implementation of its layouts, one of models.attention.KERNELS."""
    score_head: nn.Linear | None = None
    """[1 D]: computes one number from a last hidden state. It is part of the module, which trains and saves it."""
    adapter: Adapter | None = None
    """The low-rank layers inside the module, where there are some."""
    is_view: bool = False
    """Another LoadedModel owns the module; this one only reads it, as it was when the view was made."""
    saved_dtype: torch.dtype = torch.float32
    """The dtype of its saved weights, or of the module that was passed in; the model is saved in it again."""
    snapshot: ParameterSnapshot | None = None
    """The parameters that a view swaps in; None = a view only switches the adapter off."""

    @property
    def outputs(self) -> frozenset[str]:
        """The outputs of the heads: "logprobs" of tokens, "values" of states and "scores" of last states."""
        language = {"logprobs"} if self.lm_head.kind != "none" else set()
        return frozenset(language if self.score_head is None else language | {"values", "scores"})

    @property
    def num_ids(self) -> int:
        """The rows of its embedding, padding included: the token ids that it can read."""
        return int(self.module.get_input_embeddings().weight.shape[0])  # pyright: ignore

    def base_view(self) -> LoadedModel:
        """The same module with its adapter off: a reference that needs no memory of its own.

        It is read only: a worker of a view neither freezes nor casts the module, which its owner continues to train.
        Raises: ConfigError: there is no adapter, so the view would be the trained model itself.
        """
        if self.adapter is None:
            raise ConfigError(f"{self.name} has no adapter to switch off; load the reference as a model of its own")
        return dataclasses.replace(self, is_view=True)

    def snapshot_view(self) -> LoadedModel:
        """The model as it is now, while its adapter is trained: the reference of an adapted actor.

        Where the adapter adds nothing yet it is the base with the adapter off, bit for bit; of one that was trained
        before, and of modules that are trained whole, it keeps copies: of these alone, never of the base.
        Raises: ConfigError: there is no adapter; all weights would have to be copied.
        """
        view, adapter = self.base_view(), self.adapter
        assert adapter is not None
        off, own = adapter.is_untrained(), {id(p) for p in adapter.parameters()}
        score = None if self.score_head is None else id(self.score_head.weight)
        copied = [p for p in self.module.parameters() if p.requires_grad and not (off and id(p) in own)]
        kept = tuple((p, p.detach().clone()) for p in copied if id(p) != score)
        return dataclasses.replace(view, snapshot=ParameterSnapshot(kept, adapter_off=off))

    @contextmanager
    def use_view(self) -> Iterator[None]:
        """Around forward passes: inside, a view has the weights of the time when it was made."""
        with ExitStack() as stack:
            if self.is_view and self.adapter is not None and (self.snapshot is None or self.snapshot.adapter_off):
                stack.enter_context(self.adapter.disabled())
            if self.snapshot is not None:
                stack.enter_context(self.snapshot.swap_in())
            yield
