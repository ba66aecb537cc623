"""Errors of this package that are also of the class that TorchRL raises in their place."""

from __future__ import annotations

from whet.errors import DataError

__all__ = ["GroupNameError", "HasGradientError", "MissingKeyError", "UnfinishedError"]


class MissingKeyError(DataError, KeyError):
    """A TensorDict lacks what is read from it."""

    __str__ = Exception.__str__  # KeyError would quote it


class HasGradientError(DataError, RuntimeError):
    """What was recorded when sampling has a gradient."""


class UnfinishedError(DataError, RuntimeError):
    """A trajectory does not end with done."""


class GroupNameError(DataError, TypeError):
    """What a trajectory is grouped by is neither a string nor a tensor."""
