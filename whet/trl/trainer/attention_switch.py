"""Switches a model between whet's attention and transformers' native attention.

Whet's attention needs the layout of packed rows, which transformers' `generate` does not pass. So the model has whet's
attention while the trainer works, and native attention wherever a script may call it: `trainer.model.generate(...)`
before and after training, in a callback, or in a rollout_func.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from whet.models.modes import transformers_attention

__all__ = ["AttentionSwitch"]


class AttentionSwitch:
    """The attention of one model. Args: module: the model, with whet's attention."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._native: ExitStack | None = None

    @contextmanager
    def whet(self) -> Iterator[None]:
        """Uses whet's attention inside the block."""
        with self._using(native=False):
            yield

    @contextmanager
    def native(self) -> Iterator[None]:
        """Uses native attention inside the block."""
        with self._using(native=True):
            yield

    def use_native(self) -> None:
        """Uses native attention from now on."""
        if self._native is None:
            self._native = ExitStack()
            self._native.enter_context(transformers_attention(self._module))

    def _use_whet(self) -> None:
        if self._native is not None:
            stack, self._native = self._native, None
            stack.close()

    @contextmanager
    def _using(self, *, native: bool) -> Iterator[None]:
        before = self._native is not None
        (self.use_native if native else self._use_whet)()
        try:
            yield
        finally:
            (self.use_native if before else self._use_whet)()
