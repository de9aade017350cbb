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
from outpace.models.attention import Attention
from outpace.models.config import ModelConfig
from outpace.models.experts import Experts
from outpace.models.transformer import MLP, Embedding, Stack, Transformer

ShardIndex = tuple[slice, ...]
"""Part of a tensor that a process holds."""


def find_unsharded_part(whole: ModelConfig) -> str | None:
    """Return the first part of a model that cannot be sharded, or None."""
    alone = whole.kind in (Kind.DFLASH_FUSED, Kind.EAGLE) or whole.chain is not None
    parts = {
        "gated delta layers": whole.delta,
        "layers of different sizes": whole.is_uneven,
        "attention sinks": whole.sinks,
        "expert groups": whole.expert_groups,
        "dense layers beside experts": whole.dense_layers,
        "a shared MLP": whole.shared_mlp,
        "experts with biases": whole.experts and whole.mlp_bias,
        "rows of its target's head": whole.target_head and whole.draft_vocab < whole.vocab,
        f"the layers of a {whole.kind.value}": alone,
    }
    return next((name for name, part in parts.items() if part), None)


@dataclass(frozen=True, slots=True)
class ModelShard:
    """The shard of one process: number `rank` of `size`."""

    rank: int
    size: int

    def shard_config(self, whole: ModelConfig) -> ModelConfig:
        """Return the configuration of a shard."""
        if found := find_unsharded_part(whole):
            raise ValueError(
                f"tensor_parallel: {whole.architecture} has {found}, which cannot be sharded; run "
                "it in one process"
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

    def vocabulary_rows(self, vocab: int) -> int:
        """Return the number of embedding rows per process; the last one may have padding."""
        return -(-vocab // self.size)

    def shard_index(
        self, whole: tuple[int, ...], own: tuple[int, ...], offset: int = 0
    ) -> ShardIndex:
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


class RowParallelLinear(nn.Linear):
    """A linear layer whose inputs are sharded; the outputs are summed over all processes."""

    def forward(self, x: Tensor) -> Tensor:
        return all_reduce_sum(F.linear(x, self.weight, self.bias))


class ParallelExperts(Experts):
    """Experts whose columns are sharded; the outputs are summed over all processes."""

    def forward(self, x: Tensor, scored: Tensor | None = None) -> Tensor:
        return all_reduce_sum(super().forward(x, scored))


class ParallelNorm(nn.RMSNorm):
    """A norm over all heads, which are sharded."""

    def forward(self, x: Tensor) -> Tensor:
        square = all_reduce_sum(x.float().square().sum(-1, keepdim=True))
        mean = square / (x.shape[-1] * dist.get_world_size())
        return (x * torch.rsqrt(mean + (self.eps or 0.0))).to(x.dtype) * self.weight


class VocabParallelEmbedding(Embedding):
    """An embedding whose rows are sharded, and the head tied to it."""

    def __init__(self, share: ModelShard, vocab: int, dim: int) -> None:
        super().__init__(share.vocabulary_rows(vocab), dim)
        self.first, self.vocab = share.rank * share.vocabulary_rows(vocab), vocab

    def forward(self, ids: Tensor) -> Tensor:
        """Return embeddings `[T, dim]` of tokens `ids i64[T]`."""
        places = ids - self.first
        own = (places >= 0) & (places < self.num_embeddings)
        found = F.embedding(torch.where(own, places, 0), self.weight)
        return all_reduce_sum(found * own[:, None])

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return gather_logits(F.linear(hidden, self.weight), self.vocab)


class ParallelHead(nn.Linear):
    """A head whose rows are sharded."""

    def __init__(self, share: ModelShard, dim: int, vocab: int) -> None:
        super().__init__(dim, share.vocabulary_rows(vocab), bias=False)
        self.vocab = vocab

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits `[r, vocab]` of hidden states `[r, dim]` in process 0."""
        return gather_logits(F.linear(hidden, self.weight), self.vocab)


def all_reduce_sum(part: Tensor) -> Tensor:
    dist.all_reduce(part)
    return part


def gather_logits(logits: Tensor, vocab: int) -> Tensor:
    """Concatenate the logits of all processes in process 0; other processes return their own."""
    if dist.get_rank():
        dist.gather(logits)
        return logits
    parts = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
    dist.gather(logits, parts)
    return torch.cat(parts, -1)[:, :vocab]


def row_parallel_linear(layer: nn.Linear) -> RowParallelLinear:
    return RowParallelLinear(layer.in_features, layer.out_features, bias=layer.bias is not None)


def parallelize_model(model: Stack, share: ModelShard) -> None:
    """Replace the layers of a sharded model without weights by parallel ones."""
    for block in model.blocks:
        attention, mlp = block.attention, block.mlp
        assert isinstance(attention, Attention)
        attention.out = row_parallel_linear(attention.out)
        if attention.qk_norm and attention.wide_qk_norm:
            attention.q_norm, attention.k_norm = (
                ParallelNorm(norm.normalized_shape, norm.eps)
                for norm in (attention.q_norm, attention.k_norm)
            )
        if isinstance(mlp, Experts):
            block.mlp = ParallelExperts(model.config, MLP)
        else:
            assert isinstance(mlp, MLP)
            mlp.down = row_parallel_linear(mlp.down)
    if isinstance(model, Transformer):
        vocab, dim = model.config.vocab, model.config.dim
        model.embedding = VocabParallelEmbedding(share, vocab, dim)
        if model.unembedding is not None:
            model.unembedding = ParallelHead(share, dim, vocab)


def keep_one_bias(model: Stack, share: ModelShard) -> None:
    """Zero the biases of summed layers in all processes except process 0."""
    for name, parameter in model.named_parameters() if share.rank else ():
        if name.endswith((".out.bias", ".down.bias")):
            parameter.zero_()
