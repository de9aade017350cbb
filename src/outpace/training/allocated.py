"""Bytes of the tensors that are alive while something runs, with or without memory behind them."""

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
    """Counts every storage that an operation puts out, until nobody holds it any more.

    What a kernel needs for itself is not counted, nor what an allocator leaves empty.

    Attributes:
        now: bytes that are alive, by what they are for.
        peak: those of the moment with the most of them.
    """

    def __init__(self, vocab: int = 0) -> None:
        """Tensors whose last axis is a `vocab` are logits, flat ones what processes exchange."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.vocab = vocab
        self.alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], str, int]] = {}
        self.flat: set[int] = set()
        self.now: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()

    def follow(self, tensors: Iterable[Tensor], use: str = "") -> None:
        """Count tensors that are not yet counted, as what they are for where that is said."""
        for tensor in map(own, tensors):
            storage = tensor.untyped_storage()
            if (key := storage._cdata) not in self.alive:
                named = use or self.kind(tensor)
                self.alive[key] = self.held(storage, key), named, storage.nbytes()
                self.now[named] += storage.nbytes()
                if named == EXCHANGED:
                    self.flat.add(key)

    def rename(self, tensors: Iterable[Tensor], use: str) -> None:
        """Count tensors as something else."""
        for tensor in map(own, tensors):
            if (key := tensor.untyped_storage()._cdata) in self.alive:
                self.drop(key)
            self.follow([tensor], use)

    def held(self, storage: torch.UntypedStorage, key: int) -> weakref.ref[torch.UntypedStorage]:
        """A reference that ends the count with the storage."""
        return weakref.ref(storage, lambda _: self.drop(key))

    def drop(self, key: int) -> None:
        """Count a storage no more."""
        _, use, size = self.alive.pop(key)
        self.now[use] -= size
        self.flat.discard(key)

    def kind(self, tensor: Tensor) -> str:
        """What a new tensor is for, by its shape."""
        if tensor.dim() > 1:
            return LOGITS if tensor.shape[-1] == self.vocab else ACTIVATIONS
        return EXCHANGED

    def resized(self) -> None:
        """Count anew what is gathered and given up in place, as flat tensors are."""
        for key in list(self.flat):
            reference, use, size = self.alive[key]
            storage = reference()
            if storage is not None and storage.nbytes() != size:
                self.alive[key] = reference, use, storage.nbytes()
                self.now[use] += storage.nbytes() - size

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, and look what is alive behind it."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its parts come by here themselves
        out = func(*args, **(kwargs or {}))
        self.follow(each for each in tree_iter(out) if isinstance(each, Tensor))
        self.resized()
        if self.now.total() > self.peak.total():
            self.peak = Counter(self.now)
        return out
