"""Memory tracker: bytes of live tensors during a computation, real or fake."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from outpace.training.shard import own

ACTIVATIONS, LOGITS, EXCHANGED = "activations", "logits", "exchanged"


class Allocated(TorchDispatchMode):
    """Counts the storage of every operation's outputs until it is freed.

    Temporary memory of kernels and allocator fragmentation are not counted.

    Attributes:
        now: live bytes, by use.
        peak: live bytes by use when their total was largest.
    """

    def __init__(self, vocab: int = 0) -> None:
        """Initialize; tensors with a last axis of `vocab` are logits, 1-D ones communication."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.vocab = vocab
        self.alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], str, int]] = {}
        self.flat: set[int] = set()
        self.now: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()

    def follow(self, tensors: Iterable[Tensor], use: str = "") -> None:
        """Count tensors not counted yet, under `use` or, if empty, by their shape."""
        for tensor in map(own, tensors):
            storage = tensor.untyped_storage()
            if (key := storage._cdata) not in self.alive:
                label = use or self.kind(tensor)
                self.alive[key] = self.held(storage, key), label, storage.nbytes()
                self.now[label] += storage.nbytes()
                if label == EXCHANGED:
                    self.flat.add(key)

    def rename(self, tensors: Iterable[Tensor], use: str) -> None:
        """Count tensors under another use."""
        for tensor in map(own, tensors):
            if (key := tensor.untyped_storage()._cdata) in self.alive:
                self.drop(key)
            self.follow([tensor], use)

    def held(self, storage: torch.UntypedStorage, key: int) -> weakref.ref[torch.UntypedStorage]:
        """Return a weak reference that stops counting the storage when it is freed."""
        return weakref.ref(storage, lambda _: self.drop(key))

    def drop(self, key: int) -> None:
        """Stop counting a storage."""
        _, use, size = self.alive.pop(key)
        self.now[use] -= size
        self.flat.discard(key)

    def kind(self, tensor: Tensor) -> str:
        """Return the use of a new tensor, by its shape."""
        if tensor.dim() > 1:
            return LOGITS if tensor.shape[-1] == self.vocab else ACTIVATIONS
        return EXCHANGED

    def resized(self) -> None:
        """Update the sizes of flat tensors, which FSDP resizes in place."""
        for key in list(self.flat):
            reference, use, size = self.alive[key]
            storage = reference()
            if storage is not None and storage.nbytes() != size:
                self.alive[key] = reference, use, storage.nbytes()
                self.now[use] += storage.nbytes() - size

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, and track its outputs."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local tensors are dispatched here separately
        out = func(*args, **(kwargs or {}))
        self.follow(each for each in tree_iter(out) if isinstance(each, Tensor))
        self.resized()
        if self.now.total() > self.peak.total():
            self.peak = Counter(self.now)
        return out
