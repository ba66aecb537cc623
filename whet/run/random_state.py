"""The state of the global random generators of Python, numpy and torch, which reward functions may use.

whet itself never uses them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from whet.errors import CheckpointError, format_exception

__all__ = ["random_state", "set_derived_random_state", "set_random_state"]

MT_WORDS = 624
"""The words in the state of numpy's global generator, a Mersenne Twister."""


def random_state() -> dict[str, Any]:
    """Returns the states of the generators, as plain containers and a tensor."""
    kind, keys, place, has_gauss, cached = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (str(kind), [int(k) for k in keys], int(place), int(has_gauss), float(cached)),  # pyright: ignore[reportArgumentType]
        "torch": torch.get_rng_state(),
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restores `random_state`.

    Raises: CheckpointError: `state` is not from `random_state`.
    """
    try:
        kind, keys, place, has_gauss, cached = state["numpy"]
        if not 0 <= place <= len(keys) == MT_WORDS:  # numpy would read out of bounds
            raise ValueError(f"place {place} of {len(keys)} words")
        random.setstate(state["python"])
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), place, has_gauss, cached))
        torch.set_rng_state(state["torch"])
    except (IndexError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(
            "the checkpoint's run.pt has no valid state of the random generators of Python, numpy and torch: "
            f"{format_exception(error)}; resume from another step-* folder"
        ) from error


def set_derived_random_state(state: Mapping[str, Any], rank: int) -> None:
    """Seeds the generators from another rank's `random_state`, so that no two ranks draw the same numbers.

    Args: state: of rank 0. rank: the rank of this process.
    Raises: CheckpointError: `state` is not from `random_state`.
    """
    set_random_state(state)
    words = np.random.SeedSequence([random.getrandbits(64), rank]).generate_state(4, np.uint64)
    random.seed(int(words[0]))
    np.random.seed(words[1:3].view(np.uint32))
    torch.set_rng_state(torch.Generator().manual_seed(int(words[3] >> np.uint64(1))).get_state())
