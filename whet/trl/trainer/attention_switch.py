"""Whose attention a model has: whet's while the trainer works, transformers' own wherever a user may call the model.

`trainer.model.generate(...)` before and after training, in a callback and in a rollout_func is what scripts do. Whet's
attention wants a layout of packed rows, which transformers' `generate` does not give.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from whet.models.modes import native_attention

__all__ = ["Lending"]


class Lending:
    """A model that is lent to its user, and taken back for work. Args: module: the model, ready to work."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._lent: ExitStack | None = None

    @contextmanager
    def working(self) -> Iterator[None]:
        """The model is whet's for a while."""
        with self._as(lent=False):
            yield

    @contextmanager
    def lent(self) -> Iterator[None]:
        """The model is the user's for a while."""
        with self._as(lent=True):
            yield

    def lend(self) -> None:
        """Gives the model to its user until the next work."""
        if self._lent is None:
            self._lent = ExitStack()
            self._lent.enter_context(native_attention(self._module))

    def _take_back(self) -> None:
        if self._lent is not None:
            held, self._lent = self._lent, None
            held.close()

    @contextmanager
    def _as(self, *, lent: bool) -> Iterator[None]:
        before = self._lent is not None
        (self.lend if lent else self._take_back)()
        try:
            yield
        finally:
            (self.lend if before else self._take_back)()
