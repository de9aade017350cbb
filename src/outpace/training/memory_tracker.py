"""Memory tracker: bytes of live tensors during a computation, real or fake."""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from outpace.training.shard import local_rows

ACTIVATIONS, LOGITS, COMMUNICATION = "activations", "logits", "exchanged"


class MemoryTracker(TorchDispatchMode):
    """Counts the storage of every operation's outputs until it is freed.

    Temporary memory of kernels and allocator fragmentation are not counted. Any thread may free a
    storage, such as those of torch.distributed, but only the computation's own thread counts.

    Attributes:
        now: live bytes, by use.
        peak: live bytes by use when their total was largest.
    """

    def __init__(self, vocab: int = 0) -> None:
        """Initialize; tensors with a last axis of `vocab` are logits, 1-D ones communication."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.vocab = vocab
        self.storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], str, int]] = {}
        self.flat_keys: set[int] = set()
        self.freed_keys: deque[int] = deque()
        self.now: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()

    def track_tensors(self, tensors: Iterable[Tensor], use: str = "") -> None:
        """Count tensors not counted yet, under `use` or, if empty, by their shape."""
        for tensor in map(local_rows, tensors):
            storage = tensor.untyped_storage()
            self.forget_freed_storages()  # a new storage may have the address of a freed one
            if (key := storage._cdata) not in self.storages:
                label = use or self.classify_tensor(tensor)
                self.storages[key] = self.reference_storage(storage, key), label, storage.nbytes()
                self.now[label] += storage.nbytes()
                if label == COMMUNICATION:
                    self.flat_keys.add(key)

    def relabel_tensors(self, tensors: Iterable[Tensor], use: str) -> None:
        """Count tensors under another use."""
        for tensor in map(local_rows, tensors):
            self.forget_freed_storages()
            if (key := tensor.untyped_storage()._cdata) in self.storages:
                self.forget_storage(key)
            self.track_tensors([tensor], use)

    def reference_storage(
        self, storage: torch.UntypedStorage, key: int
    ) -> weakref.ref[torch.UntypedStorage]:
        """Return a weak reference that records when the storage is freed."""
        return weakref.ref(storage, lambda _: self.freed_keys.append(key))

    def forget_freed_storages(self) -> None:
        """Stop counting the storages freed since the last call."""
        while self.freed_keys:
            self.forget_storage(self.freed_keys.popleft())

    def forget_storage(self, key: int) -> None:
        """Stop counting a storage."""
        _, use, size = self.storages.pop(key)
        self.now[use] -= size
        self.flat_keys.discard(key)

    def classify_tensor(self, tensor: Tensor) -> str:
        """Return the use of a new tensor, by its shape."""
        if tensor.dim() > 1:
            return LOGITS if tensor.shape[-1] == self.vocab else ACTIVATIONS
        return COMMUNICATION

    def update_sizes(self) -> None:
        """Update the sizes of flat tensors, which FSDP resizes in place."""
        for key in self.flat_keys:
            reference, use, size = self.storages[key]
            storage = reference()
            if storage is not None and storage.nbytes() != size:
                self.storages[key] = reference, use, storage.nbytes()
                self.now[use] += storage.nbytes() - size

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, and track its outputs."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local tensors are dispatched here separately
        out = func(*args, **(kwargs or {}))
        self.track_tensors(each for each in tree_iter(out) if isinstance(each, Tensor))
        self.forget_freed_storages()
        self.update_sizes()
        if self.now.total() > self.peak.total():
            self.peak = Counter(self.now)
        return out
