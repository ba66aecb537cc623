"""Decode steps of fixed shape, captured as CUDA graphs and replayed, so that launches cost nothing.

A step is captured for 1, 2, 4, ... MAX_ROWS rows; rows beyond the live ones are padding, and nothing reads what they
compute. Everything that a step reads lies at a fixed address, over updates and rollouts. Where an address changes all
the same (weights that another part has moved), the old graphs are dropped and new ones captured. On a CPU the same
steps run one by one, without capture.

The graphs of one StepGraphs share a pool of memory and the stream of their capture; nothing else uses either. The pool
lives from the first capture until the graphs are dropped, all at once: a pool without graphs is dead, and destroying a
single graph may free what others of its stream still use.
Left out on purpose: capture of the head and of the draws, which differ with the sampling. They run while the host is
ahead of the device.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whet.errors import format_exception
from whet.util.device import on_device
from whet.util.experimental import warn_experimental

__all__ = ["MAX_ROWS", "StepGraphs", "padded_rows"]

log = logging.getLogger("whet")

MAX_ROWS = 256
"""The most rows of a captured step: with more the work takes longer than the launches."""
PACKAGE = Path(__file__).parents[2]
"""The folder of whet: a failed capture is reported at a line of its files."""
ONE_CAPTURE = threading.Lock()
"""Held while something is captured: torch allows one capture at a time in a process."""


def padded_rows(count: int) -> int:
    """Returns rows of a captured step with `count` live rows: a power of two.

    >>> padded_rows(1), padded_rows(3), padded_rows(256)
    (1, 4, 256)
    """
    return 1 << (count - 1).bit_length()


class StepGraphs:
    """Runs steps by key: the first of a key runs eagerly to warm up, the second is captured, the others are replayed.

    After a capture that fails, which is logged, every step runs eagerly.
    Args: device: CUDA; on any other every step runs eagerly.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.failure: str | None = None
        """Why nothing is captured any more; None = no capture has failed."""
        self._captures = device.type == "cuda"
        if self._captures:
            warn_experimental("a rollout on a GPU, whose decode steps are captured as CUDA graphs,")
        self._epoch: Hashable = None
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]] | None] = {}
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    @property
    def path(self) -> str:
        """How steps run, and why, for `backends`."""
        if self.failure:
            return f"eager ({self.failure})"
        mark = ", experimental" if self.device.type == "cuda" else ""
        return f"varlen_attn, graphs on {self.device.type}{mark}"

    def step(self, key: Hashable, epoch: Hashable, body: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Runs a step.

        Args:
            key: of its shapes and choices.
            epoch: of the addresses it reads; a new one drops all graphs.
            body: the step; it must do the same work at the same addresses whenever key and epoch are the same.
        Returns: what the body returned; overwritten by the next replay of this key, so take a copy.
        """
        if not self._captures:
            return body()
        if epoch != self._epoch:
            self.clear()
            self._epoch = epoch
        if key not in self._graphs:
            self._graphs[key] = None
            return body()
        captured = self._graphs[key]
        if captured is None:
            handled = sys.exception()
            try:
                captured = self._capture(body)
            except Exception as error:
                self._give_up(_first(error, handled))
                return body()  # a capture runs nothing, so the step is still to be done
            self._graphs[key] = captured
        captured[0].replay()
        return captured[1]

    def _capture(self, body: Callable[[], tuple[Tensor, ...]]) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
        """Captures a step without running it."""
        graph = torch.cuda.CUDAGraph()
        # The outer stream is the current one already: torch leaves its own behind where a capture fails.
        with ONE_CAPTURE, on_device(self.device), torch.cuda.stream(torch.cuda.current_stream(self.device)):
            if self._stream is None:
                self._stream = torch.cuda.Stream(self.device)
            pool = torch.cuda.graph_pool_handle() if self._pool is None else self._pool
            # "thread_local": memory that another thread asks for (a reward model) does not spoil the capture
            with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                out = body()
        self._pool = pool
        return graph, out

    def _give_up(self, error: BaseException) -> None:
        """Logs why nothing is captured any more. Raises: an error that is not the capture's own: Ctrl-C."""
        if not isinstance(error, Exception):
            raise error
        reason = format_exception(error)
        frames = traceback.extract_tb(error.__traceback__)
        if package_frames := [f for f in frames if Path(f.filename).is_relative_to(PACKAGE)] or frames:
            reason += (
                f" ({Path(package_frames[-1].filename).name}:{package_frames[-1].lineno}: {package_frames[-1].line})"
            )
        self.failure, self._captures = f"a capture failed: {reason}", False
        self.clear()
        log.warning("decode steps are no longer captured, which makes a rollout several times slower: %s", reason)

    def clear(self) -> None:
        """Drops all graphs; their memory is free as soon as nothing holds what they returned."""
        if self.device.type == "cuda" and any(self._graphs.values()):
            torch.cuda.synchronize(self.device)  # after an interrupt a replay may still run
        self._graphs.clear()
        self._pool = None


def _first(error: BaseException, handled: BaseException | None) -> BaseException:
    """Returns the first error behind this one, raised by torch when a capture ends. Args: handled: before, by a
    caller.
    """
    while error.__context__ is not None and error.__context__ is not handled:
        error = error.__context__
    return error
