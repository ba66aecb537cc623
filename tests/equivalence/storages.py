"""Counts the bytes of the tensors that live at once."""

import weakref

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StoragePeak(TorchDispatchMode):
    """The most bytes of tensors at one time, of those that operations have made within the context."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._known = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {id(self._storage(x)) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(out):
            storage = self._storage(x) if isinstance(x, Tensor) else None
            if storage is None or id(storage) in known or storage in self._known:
                continue
            self._known.add(storage)
            self.now += storage.nbytes()
            weakref.finalize(storage, self._free, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out

    @staticmethod
    def _storage(x):
        return getattr(x, "_local_tensor", x).untyped_storage()

    def _free(self, count):
        self.now -= count
