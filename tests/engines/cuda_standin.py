"""CUDA graphs on a machine without CUDA, with the rules of torch's that programs break.

`Machine.install` puts stand-ins into torch.cuda for what engine/cuda_graph.py calls. A capture runs nothing: it notes
the operations and the very tensors that they read, and a replay runs them again, into the same memory. So whatever a
replay should not depend on shows as a wrong number. The rules:

- a pool dies with its last graph, and no capture may begin in a dead one;
- a graph's memory holds NaN before a replay has filled it, and for ever once the graph is destroyed;
- a capture begins on the stream's own device, one at a time in the process, and may not read numbers back;
- destroying a graph clears the workspaces of its stream: others captured on that stream are broken;
- in the mode "global" an allocation by any thread spoils a capture;
- a capture that fails raises a second error when it ends, and leaves its stream the current one.
"""

from __future__ import annotations

import itertools
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from whet.rollout.engine.growing_memory import GrowingMemory


class RuleError(BaseException):
    """A rule was broken: nothing may catch it, as nothing could catch what a GPU would do."""


READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}


def _rule(kept, what):
    if not kept:
        raise RuleError(what)


def _tensors(tree):
    return [x for x in tree_iter(tree) if isinstance(x, torch.Tensor)]


def _place(tensor):
    return tensor.untyped_storage()._cdata


@torch.inference_mode()
def _spoil(tensors):
    """What memory holds that somebody else may have written to."""
    for x in tensors:
        if x.dtype.is_floating_point:
            x.fill_(torch.nan)
        elif x.dtype != torch.bool:
            x.fill_(torch.iinfo(x.dtype).min // 2)


class FixedMemory(GrowingMemory):
    """Mapped memory: it has one address, and nothing may depend on what it holds when it comes back."""

    def __init__(self, limit, device):
        super().__init__(limit, device)
        self.bytes, self._size = torch.empty(limit, dtype=torch.uint8, device=device), 0
        self.resize(0)

    @property
    def held(self):
        return self._size

    @torch.inference_mode()
    def resize(self, size):
        self.bytes[min(size, self._size) :] = 255  # NaN
        self._size = size


class Recorder(TorchDispatchMode):
    """Notes operations; what lies outside of the capture is not written to."""

    def __init__(self, machine):
        super().__init__()
        self.machine, self.operations, self.made, self.places = machine, [], [], set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.machine.operation(function)
        names = zip(function._schema.arguments, args)
        given = [*names, *((a, kwargs[a.name]) for a in function._schema.arguments if a.name in kwargs)]
        written = [x for a, v in given if a.alias_info is not None and a.alias_info.is_write for x in _tensors(v)]
        if written and not all(_place(x) in self.places for x in written):
            self.operations.append((function, args, kwargs, []))
            return written[0]
        before = {_place(x) for x in _tensors((args, kwargs))}
        out = function(*args, **kwargs)
        fresh = [(i, x) for i, x in enumerate(_tensors(out)) if _place(x) not in before]
        self.made += [x for _, x in fresh]
        self.places |= {_place(x) for _, x in fresh}
        if fresh or written:  # what remains are views
            self.operations.append((function, args, kwargs, fresh))
        return out


class Machine:
    """Devices, streams, pools and graphs, and counts of what was done with them."""

    def __init__(self):
        self.device, self.stream, self.shared_stream = 0, None, Stream()
        self.users: dict[int, int] = {}
        """Graphs alive, by pool."""
        self.live = weakref.WeakSet()
        self.captured = self.replayed = self.destroyed = 0
        self.capturing = None
        self.faults: list[BaseException] = []
        """Raised by the coming operations of captures, one each."""
        self.numbers = itertools.count(1)

    def install(self, monkeypatch):
        """Puts the stand-ins into torch.cuda."""
        stands = {
            "device": lambda device: _Device(self, device),
            "stream": lambda stream: _Current(self, stream),
            "current_stream": lambda device=None: self.stream,
            "current_device": lambda: self.device,
            "Stream": lambda device=None: Stream(self.device if device is None else torch.device(device).index),
            "graph_pool_handle": lambda: next(self.numbers),
            "CUDAGraph": lambda: Graph(self),
            "graph": lambda *args, **options: _Capture(self, *args, **options),
            "synchronize": lambda device=None: None,
        }
        for name, stand in stands.items():
            monkeypatch.setattr(torch.cuda, name, stand)
        return self

    def operation(self, function):
        """One operation of a capture."""
        if self.faults:
            raise self.faults.pop()
        if function in READS:
            raise RuntimeError(f"{function}: operation not permitted when stream is capturing")

    def allocate(self):
        """Somebody asks the driver for memory, in another thread."""
        if self.capturing is not None and self.capturing.mode == "global":
            self.faults.append(RuntimeError("operation would make the legacy stream depend on a capturing stream"))

    def destroy(self, pool, stream, made):
        """A graph has gone."""
        self.destroyed += 1
        self.users[pool] -= 1
        _spoil(made)
        for graph in self.live:
            graph.broken |= graph.stream is stream

    @property
    def pools(self):
        """Those that are alive."""
        return sum(users > 0 for users in self.users.values())


class Stream:
    """torch.cuda.Stream."""

    def __init__(self, device=0):
        self.device = device


class Graph:
    """torch.cuda.CUDAGraph."""

    def __init__(self, machine):
        self.machine, self.recorder, self.stream, self.broken = machine, None, None, False

    def replay(self):
        """Runs the operations again."""
        _rule(not self.broken, "illegal memory access: the workspace of this graph is freed")
        _rule(self.recorder is not None, "no graph was captured")
        self.machine.replayed += 1
        _spoil(self.recorder.made)
        for function, args, kwargs, fresh in self.recorder.operations:
            new = _tensors(function(*args, **kwargs))
            for i, x in fresh:
                x.copy_(new[i])


class _Capture:
    """torch.cuda.graph."""

    def __init__(self, machine, graph, pool=None, stream=None, capture_error_mode="global"):
        self.machine, self.graph, self.mode = machine, graph, capture_error_mode
        self.pool = next(machine.numbers) if pool is None else pool
        self.stream = machine.shared_stream if stream is None else stream
        self.recorder = Recorder(machine)

    def __enter__(self):
        machine = self.machine
        _rule(machine.capturing is None, "a capture is under way")
        _rule(machine.device == self.stream.device, f"device {machine.device} is current, not the stream's")
        _rule(machine.users.get(self.pool, 1) > 0, "it->second->use_count > 0 INTERNAL ASSERT FAILED")
        machine.users[self.pool] = machine.users.get(self.pool, 0) + 1
        self.before, machine.stream, machine.capturing = machine.stream, self.stream, self
        weakref.finalize(self.graph, machine.destroy, self.pool, self.stream, self.recorder.made)
        self.recorder.__enter__()

    def __exit__(self, kind, error, trace):
        self.recorder.__exit__(kind, error, trace)
        self.machine.capturing = None
        if error is not None:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self.machine.stream = self.before
        self.graph.recorder, self.graph.stream = self.recorder, self.stream
        _spoil(self.recorder.made)
        self.machine.live.add(self.graph)
        self.machine.captured += 1


class _Device:
    """torch.cuda.device."""

    def __init__(self, machine, device):
        self.machine, self.device = machine, torch.device(device).index

    def __enter__(self):
        self.before, self.machine.device = self.machine.device, self.device

    def __exit__(self, *error):
        self.machine.device = self.before


class _Current:
    """torch.cuda.stream: on the way out the stream before is the current one again, whatever happened inside."""

    def __init__(self, machine, stream):
        self.machine, self.stream = machine, stream

    def __enter__(self):
        self.before, self.machine.stream = self.machine.stream, self.stream

    def __exit__(self, *error):
        self.machine.stream = self.before
