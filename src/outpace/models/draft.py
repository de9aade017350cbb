"""Drafts that read hidden states of their target: DFlash (Chen et al., 2026), DFlash 2, DSpark.

Shapes: T rows, C context rows, D draft vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from outpace.decoding.processor import BANNED_LOGIT
from outpace.models.attention import Attend
from outpace.models.config import ModelConfig
from outpace.models.packed import DenseState, build_linear, select_rows
from outpace.models.transformer import Block, Embedding, Stack, Transformer

LOG = logging.getLogger(__name__)


class Draft(Stack):
    """Layers on the fused features of a target, whose embedding and head they may borrow.

    Borrowed parts are neither trained nor saved with the draft. A separate head, or rows of the
    target's, cover the `draft_vocab` tokens listed in `d2t`; `t2d` marks these tokens. Raises
    `ValueError` if draft and target do not match.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: ModelConfig, target: Transformer) -> None:
        check_draft_pair(config, target.config)
        super().__init__()
        self.config = config
        self.lender = (target,)  # a tuple, so that the target is not registered as a submodule
        own = config.own_embedding
        self.embedding = Embedding(config.vocab, config.dim) if own else None
        self.fusion = nn.Linear(config.feature_size, config.dim, bias=False)
        self.unembedding: nn.Module | None = None
        if config.target_head:
            self.register_state_dict_post_hook(drop_head)  # type: ignore[no-untyped-call]

    def make_head(self) -> None:
        """Create the separate head, if it has one, and the tables of its vocabulary."""
        config = self.config
        if not config.draft_vocab:
            return
        if not config.target_head:
            self.unembedding = nn.Linear(config.dim, config.draft_vocab, bias=False)
        if config.draft_vocab < config.vocab:
            in_head = torch.arange(config.vocab) < config.draft_vocab
            self.register_buffer("d2t", torch.zeros(config.draft_vocab, dtype=torch.int64))
            self.register_buffer("t2d", in_head)

    def embed_tokens(self, ids: Tensor) -> Tensor:
        embedding = self.lender[0].embedding if self.embedding is None else self.embedding
        rows: Tensor = embedding(ids)
        return rows

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return logits `[..., vocab]` of states `[..., dim]`; `BANNED_LOGIT` outside the head."""
        logits = self.head_logits(hidden)
        if (tokens := self.head_tokens) is None:
            return logits if self.unembedding is None else logits.float()
        logits = logits.float()
        every = logits.new_full((*logits.shape[:-1], self.config.vocab), BANNED_LOGIT)
        return every.index_copy_(-1, tokens, logits)

    def borrow_rows(self, *, plain: bool = False) -> None:
        """Select the rows of the target's head that are the draft's; `plain` dequantizes them."""
        if not self.config.target_head or (tokens := self.head_tokens) is None:
            return
        target = self.lender[0]
        head = select_rows(target.head, tokens)
        if plain and isinstance(head, DenseState):
            head = build_linear(head.dense_weight().to(target.norm.weight.dtype))
        self.unembedding = head
        size = sum(parameter.nbytes for parameter in head.parameters()) / 1e6
        LOG.info("%d rows of the target's head, %.0f MB, are the draft's", len(tokens), size)

    @property
    def head_tokens(self) -> Tensor | None:
        """Tokens `i64[D]` of the head in its order; None if it covers the vocabulary."""
        if self.config.draft_vocab in (0, self.config.vocab):
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def set_head_tokens(self, tokens: Tensor) -> None:
        """Let the head cover the tokens `i64[D]`, in this order."""
        self.d2t = tokens - torch.arange(len(tokens))
        self.t2d = torch.zeros_like(self.t2d).index_fill_(0, tokens, True)

    def head_labels(self, tokens: Tensor) -> Tensor:
        """Return the places of tokens in the head; -1 for those that it does not cover."""
        if (covered := self.head_tokens) is None:
            return tokens
        places = tokens.new_full((self.config.vocab,), -1)
        places[covered] = torch.arange(len(covered), device=tokens.device)
        return places[tokens]

    def head_logits(self, hidden: Tensor) -> Tensor:
        """Return logits `[..., D]` of hidden states `[..., dim]`, of the head's tokens only."""
        if self.unembedding is None or self.config.target_head:
            return self.lender[0].compute_logits(hidden, self.unembedding)
        logits: Tensor = self.unembedding(hidden)
        return logits

    def check_tables(self) -> None:
        """Raise `ValueError` unless `d2t` and `t2d` list the same `draft_vocab` tokens."""
        if (tokens := self.head_tokens) is None:
            return
        vocab, wanted = self.config.vocab, self.config.draft_vocab
        if bool(((tokens < 0) | (tokens >= vocab)).any()):
            raise ValueError(f"d2t contains tokens outside the vocabulary of {vocab}")
        listed: Tensor = torch.zeros_like(self.t2d).index_fill_(0, tokens, True)
        if int(listed.sum()) != wanted:
            raise ValueError(
                f"d2t must list {wanted} tokens (draft_vocab_size), got {int(listed.sum())}"
            )
        if not torch.equal(listed, self.t2d):
            raise ValueError(
                "t2d must list the same tokens as d2t: the tables belong to two drafts"
            )


def drop_head(draft: Draft, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Leave out rows of the target's head of a draft's state."""
    state.pop(f"{prefix}unembedding.weight", None)


class BlockDraft(Draft):
    """Layers that fill blocks.

    A block is the last committed token followed by masks. The row of a mask predicts the token of
    its own slot.
    """

    block_type: type[Block] = Block

    def build_layers(self) -> None:
        config = self.config
        self.blocks = nn.ModuleList(
            self.block_type(config, layer) for layer in range(config.layers)
        )
        self.norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.make_head()
        self.initialize_weights()


class DFlashDraft(BlockDraft):
    """Layers whose keys and values also come from the fused features of a target."""

    def __init__(self, config: ModelConfig, target: Transformer) -> None:
        super().__init__(config, target)
        self.fusion_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.build_layers()

    def fuse_features(self, features: Tensor) -> Tensor:
        """Return rows `[C, dim]` for hidden states `[C, f]` of the target."""
        rows: Tensor = self.fusion_norm(self.fusion(features))
        return rows


class ChainedDraft(DFlashDraft):
    """A draft that chooses the tokens of a block one after another, after one pass."""

    def condition_logits(self, hidden: Tensor, logits: Tensor, previous: Tensor) -> Tensor:
        """Return logits `[R, V]` of the next tokens, given the tokens before them.

        Args:
            hidden: hidden states of the rows that predict them, `[R, dim]`.
            logits: logits `[R, V]` of the vocabulary or of the head's tokens, without regard to the
                tokens before.
            previous: tokens before them, `i64[R]`.
        """
        raise NotImplementedError

    def predict_acceptance(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Return the probability `f32[R]` that the target accepts the next tokens.

        Args:
            hidden: hidden states of the rows that predict them, `[R, dim]`.
            previous: tokens before them, `i64[R]`.
        """
        raise NotImplementedError


class DFlashFusedDraft(BlockDraft):
    """Layers that add the features of a target to the embeddings of their input."""

    # The tokens of the text are rows too. The rows of a block have no features yet and use zeros,
    # which add nothing. The norm has a distinct name, so that the weights of one type of draft do
    # not load as the other.

    def __init__(self, config: ModelConfig, target: Transformer) -> None:
        super().__init__(config, target)
        self.feature_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.build_layers()

    def fuse_features(self, features: Tensor) -> Tensor:
        """Return rows `[T, dim]` for hidden states `[T, f]` of the target; zeros give zeros."""
        rows: Tensor = self.feature_norm(self.fusion(features))
        return rows

    def input_rows(self, ids: Tensor, features: Sequence[Tensor]) -> Tensor:
        """Return embeddings of tokens `ids i64[T]` plus their concatenated features."""
        return self.embed_tokens(ids) + self.fuse_features(torch.cat([*features]))


def check_draft_pair(draft: ModelConfig, target: ModelConfig) -> None:
    """Raise `ValueError` with both values if a draft and its target disagree."""
    for what, ours, theirs in (
        ("hidden size", draft.dim, target.dim),
        ("vocabulary", draft.vocab, target.vocab),
        ("depth of the target", draft.target_layers or target.layers, target.layers),
    ):
        if ours != theirs:
            found = draft.target_fingerprint
            name = "another target" if found is None else f"the target of fingerprint {found}"
            raise ValueError(
                f"the draft was trained for {name}: its {what} is {ours}, the target's is {theirs}"
            )
    if bad := [layer for layer in draft.feature_layers if layer >= target.layers]:
        raise ValueError(
            f"the draft reads layer {bad[0]} of its target, which has {target.layers} layers, "
            f"0 to {target.layers - 1}"
        )


class DSparkDraft(ChainedDraft):
    """Layers that predict a block in one pass, whose tokens are then chosen one after another."""

    # The Markov head adds a bias to the logits of a token that depends on the token before it. The
    # confidence head predicts whether the target will accept the token, before it is chosen.

    def build_layers(self) -> None:
        config = self.config
        assert config.chain is not None
        rank, self.reads_previous = config.chain.rank, config.chain.reads_previous
        self.previous_embedding = nn.Embedding(config.vocab, rank) if rank else None
        tokens = config.draft_vocab or config.vocab
        self.transition = nn.Linear(rank, tokens, bias=False) if rank else None
        self.acceptance: nn.Linear | None = None
        if config.chain.predicts_acceptance:
            self.acceptance = nn.Linear(config.dim + rank * self.reads_previous, 1)
            nn.init.zeros_(self.acceptance.bias)
        super().build_layers()

    def embed_previous(self, previous: Tensor) -> Tensor:
        assert self.previous_embedding is not None
        rows: Tensor = self.previous_embedding(previous)
        return rows

    def condition_logits(self, hidden: Tensor, logits: Tensor, previous: Tensor) -> Tensor:
        """Add the bias of the tokens before, where there is a Markov head."""
        if self.transition is None:
            return logits
        bias, width = self.transition(self.embed_previous(previous)), logits.shape[1]
        tokens = self.head_tokens
        if tokens is None or width == len(tokens):
            return logits + bias[:, :width]
        inside = tokens < width
        return logits.index_add(1, tokens[inside], bias[:, inside].to(logits.dtype))

    def predict_acceptance(self, hidden: Tensor, previous: Tensor) -> Tensor:
        return self.acceptance_logits(hidden, previous).sigmoid()

    def acceptance_logits(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Return the logits `f32[R]` of the probability that the target accepts the next token."""
        assert self.acceptance is not None
        if self.reads_previous:
            hidden = torch.cat((hidden, self.embed_previous(previous)), -1)
        logits: Tensor = self.acceptance(hidden)
        return logits.squeeze(-1).float()


@runtime_checkable
class BlockPlaces(Protocol):
    """Where the blocks of a pass begin, given by the caller."""

    @property
    def offsets(self) -> Tensor:
        """Place of each row in its block, `i64[T]`."""
        ...


class GroupedConvolution(nn.Module):
    """Convolution over the rows of a block, before and after attention or MLP."""

    # A channel c of row i becomes the sum over taps t of `(base[t, c] + delta[i, t, g]) x[i - t,
    # c]`. The group g of the channel has one delta, a projection of the row before attention or
    # MLP. Rows before the block count as zero.

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.convolution is not None
        self.taps, self.group = config.convolution.taps, config.convolution.group
        kernel = torch.eye(self.taps)[:1, :, None].expand(2, self.taps, config.dim)
        self.base = nn.Parameter(kernel.clone())
        deltas = 2 * self.taps * config.dim // self.group
        self.projection = nn.Linear(config.dim, deltas, bias=False)

    def forward(self, x: Tensor, offsets: Tensor, layer: Callable[[Tensor], Tensor]) -> Tensor:
        """Run attention or MLP between the two convolutions of rows `x [T, dim]`."""
        deltas = self.projection(x).view(len(x), 2, self.taps, -1)
        before, after = (self.base + deltas.repeat_interleave(self.group, -1)).unbind(1)
        return self.mix_rows(after, layer(self.mix_rows(before, x, offsets)), offsets)

    def mix_rows(self, kernels: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
        """Return rows `x [T, dim]` mixed by kernels `[T, taps, dim]` with those before them."""
        mixed = kernels[:, 0] * x
        for tap in range(1, self.taps):
            earlier = x.roll(tap, 0).where((offsets >= tap)[:, None], 0)
            mixed = mixed + kernels[:, tap] * earlier
        return mixed


class ConvolvedBlock(Block):
    """A layer with convolutions before and after its attention and its MLP."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.attention_convolution = GroupedConvolution(config)
        self.mlp_convolution = GroupedConvolution(config)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
        wanted: Tensor | None = None,
        context: Tensor | None = None,
    ) -> Tensor:
        """Map rows `x [T, dim]` and return the `wanted` ones; see `Block`."""
        assert self.attention_norm is not None and self.mlp_norm is not None
        assert isinstance(attend, BlockPlaces)

        def attend_rows(y: Tensor) -> Tensor:
            if context is None:
                return cast(Tensor, self.attention(y, cos, sin, attend))
            rows = torch.cat((context, y))
            return cast(Tensor, self.attention(rows, cos, sin, attend, None, len(context)))

        offsets = attend.offsets
        x = x + self.attention_convolution(self.attention_norm(x), offsets, attend_rows)
        x = x + self.mlp_convolution(self.mlp_norm(x), offsets, self.mlp)
        return x if wanted is None else x[wanted]


class DFlash2Draft(ChainedDraft):
    """Layers with convolutions over a block, and a selector of one path through its candidates."""

    # The candidates of a slot are its most probable tokens. One that follows the token p gets,
    # beside its logit, the score `<A[p] * H(h), B[c]>`, of embeddings A, B and the hidden state h
    # of its slot. The path starts at the last committed token and takes one candidate after
    # another.

    block_type = ConvolvedBlock

    def build_layers(self) -> None:
        config = self.config
        assert config.chain is not None
        self.candidates = config.chain.candidates
        self.previous_embedding = nn.Embedding(config.vocab, config.chain.rank)
        self.candidate_embedding = nn.Embedding(config.vocab, config.chain.rank)
        self.selector = nn.Linear(config.dim, config.chain.rank, bias=False)
        super().build_layers()

    def condition_logits(self, hidden: Tensor, logits: Tensor, previous: Tensor) -> Tensor:
        """Add the scores of candidates after the tokens before, and ban all other tokens."""
        logits = logits.float()
        values, tokens = logits.topk(min(self.candidates, logits.shape[1]))
        edge = self.previous_embedding(previous) * self.selector(hidden)
        scores = torch.einsum("rd,rkd->rk", edge, self.candidate_embedding(tokens)).float()
        return torch.full_like(logits, BANNED_LOGIT).scatter(1, tokens, values + scores)
