"""One shard of a model in several processes (tensor parallelism, Shoeybi et al., 2019).

Heads of attention and columns of MLPs are sharded: each process computes a part of every sum, and
the parts are added twice per layer. Rows of embedding and head are sharded too.
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
"""Part of a tensor that a process holds."""


@dataclass(frozen=True, slots=True)
class Share:
    """The shard of one process: number `rank` of `size`."""

    rank: int
    size: int

    def config(self, whole: ModelConfig) -> ModelConfig:
        """Return the configuration of a shard.

        Raises:
            ValueError: if the model cannot be sharded, or its sizes are no multiples of `size`.
        """
        if whole.sinks or whole.expert_groups or whole.dense_layers or whole.shared_mlp:
            raise ValueError(
                f"tensor_parallel: {whole.architecture} has attention sinks or expert groups, "
                "which cannot be sharded; run it in one process"
            )
        if whole.kind in (Kind.ADDING, Kind.EXTENDING) or (whole.experts and whole.mlp_bias):
            raise ValueError(
                f"tensor_parallel: {whole.architecture}, a {whole.kind.value}, cannot be sharded; "
                "run it in one process"
            )
        sizes = {"heads": whole.heads, "kv_heads": whole.kv_heads, "mlp": whole.mlp}
        if any(size % self.size for size in sizes.values()):
            fits = [
                n for n in range(1, whole.kv_heads + 1) if not any(s % n for s in sizes.values())
            ]
            raise ValueError(
                f"tensor_parallel must be one of {', '.join(map(str, fits))} for "
                f"{whole.architecture}, got {self.size}: it has {whole.heads} heads, "
                f"{whole.kv_heads} key/value heads and an MLP of {whole.mlp}"
            )
        heads, kv_heads, mlp = (size // self.size for size in sizes.values())
        return replace(whole, heads=heads, kv_heads=kv_heads, mlp=mlp)

    def rows(self, vocab: int) -> int:
        """Return the rows of an embedding per process; the last process may have padding."""
        return -(-vocab // self.size)

    def index(self, whole: tuple[int, ...], own: tuple[int, ...], offset: int = 0) -> Index:
        """Return the index of this shard in a part that begins at row `offset` of its tensor.

        `whole` and `own` are the shapes of that part and of the shard. The index is empty if
        nothing is sharded.
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
    """A linear layer whose inputs are sharded; the outputs are summed over all processes."""

    def forward(self, x: Tensor) -> Tensor:
        """Map rows `x [T, in / size]` to the output of the whole layer."""
        return summed(F.linear(x, self.weight, self.bias))


class SummedExperts(Experts):
    """Experts whose columns are sharded; the outputs are summed over all processes."""

    def forward(self, x: Tensor) -> Tensor:
        """Map rows `x [T, dim]`."""
        return summed(super().forward(x))


class WideNorm(nn.RMSNorm):
    """A norm over all heads, which are sharded."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise rows `x [T, dim / size]` by their mean square over all processes."""
        square = summed(x.float().square().sum(-1, keepdim=True))
        mean = square / (x.shape[-1] * dist.get_world_size())
        return (x * torch.rsqrt(mean + (self.eps or 0.0))).to(x.dtype) * self.weight


class SlicedEmbedding(Embedding):
    """An embedding whose rows are sharded, and the head tied to it."""

    def __init__(self, share: Share, vocab: int, dim: int) -> None:
        super().__init__(share.rows(vocab), dim)
        self.first, self.vocab = share.rank * share.rows(vocab), vocab

    def forward(self, ids: Tensor) -> Tensor:
        """Return embeddings `[T, dim]` of tokens `ids i64[T]`."""
        places = ids - self.first
        own = (places >= 0) & (places < self.num_embeddings)
        found = F.embedding(torch.where(own, places, 0), self.weight)
        return summed(found * own[:, None])

    def head(self, hidden: Tensor) -> Tensor:
        """Return logits `[r, vocab]` of hidden states `[r, dim]` in process 0."""
        return gathered(F.linear(hidden, self.weight), self.vocab)


class SlicedHead(nn.Linear):
    """A head whose rows are sharded."""

    def __init__(self, share: Share, dim: int, vocab: int) -> None:
        super().__init__(dim, share.rows(vocab), bias=False)
        self.vocab = vocab

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits `[r, vocab]` of hidden states `[r, dim]` in process 0."""
        return gathered(F.linear(hidden, self.weight), self.vocab)


def summed(part: Tensor) -> Tensor:
    """Sum a tensor over all processes in place."""
    dist.all_reduce(part)
    return part


def gathered(logits: Tensor, vocab: int) -> Tensor:
    """Concatenate the logits of all processes in process 0; other processes return their own."""
    if dist.get_rank():
        dist.gather(logits)
        return logits
    parts = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
    dist.gather(logits, parts)
    return torch.cat(parts, -1)[:, :vocab]


def divide(model: Stack, share: Share) -> None:
    """Give the layers of a sharded model their parallel classes."""
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
    """Zero the biases of summed layers in all processes except process 0."""
    for name, parameter in model.named_parameters() if share.rank else ():
        if name.endswith((".out.bias", ".down.bias")):
            parameter.zero_()
