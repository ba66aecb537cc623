"""Errors that inherit from the class that TorchRL raises in the same case."""

from __future__ import annotations

from whet.errors import DataError

__all__ = ["GroupNameError", "HasGradientError", "MissingKeyError", "UnfinishedError"]


class MissingKeyError(DataError, KeyError):
    """A TensorDict lacks a key."""

    __str__ = Exception.__str__  # KeyError would quote it


class HasGradientError(DataError, RuntimeError):
    """A recorded tensor has a gradient."""


class UnfinishedError(DataError, RuntimeError):
    """A trajectory does not end with done."""


class GroupNameError(DataError, TypeError):
    """The group name of a trajectory is neither a string nor a tensor."""
