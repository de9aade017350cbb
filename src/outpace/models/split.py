"""One slice of a model that several processes hold (tensor parallelism, Shoeybi et al., 2019).

Heads of attention and columns of MLPs are shared out, so that each process computes a part of every
sum; the parts are added up twice a layer. Rows of embedding and head are shared out as well.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from outpace.decoding.target import Kind
from outpace.models.config import ModelConfig
from outpace.models.experts import Experts
from outpace.models.transformer import MLP, Attention, Embedding, Stack, Transformer

Index = tuple[slice, ...]
"""What of a tensor a process holds."""


@dataclass(frozen=True, slots=True)
class Share:
    """The slice of one process: number `rank` of `size`."""

    rank: int
    size: int

    def config(self, whole: ModelConfig) -> ModelConfig:
        """The sizes of a slice; `ValueError` where those of the model do not divide."""
        if whole.sinks or whole.expert_groups or whole.dense_layers or whole.shared_mlp:
            raise ValueError(
                f"tensor_parallel: {whole.architecture} has sinks of attention, or experts in "
                "groups, which are not split; run it in one process"
            )
        if whole.kind in (Kind.ADDING, Kind.EXTENDING) or (whole.experts and whole.mlp_bias):
            raise ValueError(
                f"tensor_parallel: {whole.architecture}, a {whole.kind.value}, is not split; run "
                "it in one process"
            )
        sizes = {"heads": whole.heads, "kv_heads": whole.kv_heads, "mlp": whole.mlp}
        if any(size % self.size for size in sizes.values()):
            fits = [
                n for n in range(1, whole.kv_heads + 1) if not any(s % n for s in sizes.values())
            ]
            raise ValueError(
                f"{self.size} processes cannot share {whole.heads} heads, {whole.kv_heads} "
                f"key/value heads and an MLP of {whole.mlp}: tensor_parallel of "
                f"{whole.architecture} can be {', '.join(map(str, fits))}"
            )
        heads, kv_heads, mlp = (size // self.size for size in sizes.values())
        return replace(whole, heads=heads, kv_heads=kv_heads, mlp=mlp)

    def rows(self, vocab: int) -> int:
        """Rows of an embedding that a process holds; the last one may hold some of no token."""
        return -(-vocab // self.size)

    def index(self, whole: tuple[int, ...], own: tuple[int, ...], offset: int = 0) -> Index:
        """What of a part that begins at row `offset` of its tensor is this process's own.

        `whole` and `own` are the shapes of that part and of the slice; empty where nothing is cut.
        """
        axes = [
            axis for axis, sizes in enumerate(zip(whole, own, strict=True)) if len({*sizes}) > 1
        ]
        if not axes:
            return () if not offset else (slice(offset, offset + whole[0]),)
        (axis,) = axes
        end = min((self.rank + 1) * own[axis], whole[axis])
        begin = min(self.rank * own[axis], end)
        return (*[slice(None)] * axis, slice(offset + begin, offset + end))


class Summed(nn.Linear):
    """A linear layer of which each process has some inputs; their outputs add up."""

    def forward(self, x: Tensor) -> Tensor:
        """Map rows `x [T, in / size]` to those of the whole layer."""
        return summed(F.linear(x, self.weight, self.bias))


class SummedExperts(Experts):
    """Experts of which each process has some columns; what they map to adds up."""

    def forward(self, x: Tensor) -> Tensor:
        """Map rows `x [T, dim]`."""
        return summed(super().forward(x))


class WideNorm(nn.RMSNorm):
    """A norm over all heads, of which each process has some."""

    def forward(self, x: Tensor) -> Tensor:
        """Norm rows `x [T, dim / size]` by the mean square of them all."""
        square = summed(x.float().square().sum(-1, keepdim=True))
        mean = square / (x.shape[-1] * dist.get_world_size())
        return (x * torch.rsqrt(mean + (self.eps or 0.0))).to(x.dtype) * self.weight


class SlicedEmbedding(Embedding):
    """Some rows of an embedding, and those of a head that is tied to it."""

    def __init__(self, share: Share, vocab: int, dim: int) -> None:
        super().__init__(share.rows(vocab), dim)
        self.first, self.vocab = share.rank * share.rows(vocab), vocab

    def forward(self, ids: Tensor) -> Tensor:
        """Rows `[T, dim]` of tokens `ids i64[T]`, whoever has them."""
        places = ids - self.first
        own = (places >= 0) & (places < self.num_embeddings)
        found = F.embedding(torch.where(own, places, 0), self.weight)
        return summed(found * own[:, None])

    def head(self, hidden: Tensor) -> Tensor:
        """Logits `[r, vocab]` of hidden states `[r, dim]`, in the first process."""
        return gathered(F.linear(hidden, self.weight), self.vocab)


class SlicedHead(nn.Linear):
    """Some rows of a head."""

    def __init__(self, share: Share, dim: int, vocab: int) -> None:
        super().__init__(dim, share.rows(vocab), bias=False)
        self.vocab = vocab

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits `[r, vocab]` of hidden states `[r, dim]`, in the first process."""
        return gathered(F.linear(hidden, self.weight), self.vocab)


def summed(part: Tensor) -> Tensor:
    """The sum over all processes, in place and in each of them."""
    dist.all_reduce(part)
    return part


def gathered(logits: Tensor, vocab: int) -> Tensor:
    """The logits of all processes side by side in the first one; in others their own."""
    if dist.get_rank():
        dist.gather(logits)
        return logits
    parts = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
    dist.gather(logits, parts)
    return torch.cat(parts, -1)[:, :vocab]


def divide(model: Stack, share: Share) -> None:
    """Let a model whose configuration is that of a slice add up with the others."""
    for block in model.blocks:
        attention, mlp = block.attention, block.mlp
        assert isinstance(attention, Attention)
        attention.out.__class__ = Summed
        if attention.qk_norm and attention.wide:
            attention.q_norm.__class__ = attention.k_norm.__class__ = WideNorm
        if isinstance(mlp, Experts):
            mlp.__class__ = SummedExperts
        else:
            assert isinstance(mlp, MLP)
            mlp.down.__class__ = Summed
    if isinstance(model, Transformer):
        vocab, dim = model.config.vocab, model.config.dim
        model.embedding = SlicedEmbedding(share, vocab, dim)
        if model.unembedding is not None:
            model.unembedding = SlicedHead(share, dim, vocab)


def once(model: Stack, share: Share) -> None:
    """Keep what is added to a sum in one process only."""
    for name, parameter in model.named_parameters() if share.rank else ():
        if name.endswith((".out.bias", ".down.bias")):
            parameter.zero_()
