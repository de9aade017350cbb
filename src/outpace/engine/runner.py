"""A model with its cache: runs the forwards of a batch and reads what was asked for."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outpace.attention.dense import DenseAttention
from outpace.decoding import Forward, Prediction
from outpace.decoding.sampling import Readout, Score
from outpace.engine.batch import Batch, pack
from outpace.engine.cache import Cache, Table
from outpace.engine.layout import lay_out
from outpace.engine.prefix import Prefix
from outpace.models.config import Sight
from outpace.models.draft import FeatureDraft
from outpace.models.transformer import Attend, Transformer

NEVER = -1e30  # finite, so that mixtures of logits stay numbers


class Runner:
    """Runs one model for all sequences that wait for it.

    `vocab` cuts rows of the embedding that stand for no token, `read_rows` bounds the rows whose
    logits are in memory at a time, `slots` is the size of the cache, `prefix_cache` says whether a
    causal model finds what it computed for prompts that began alike.
    """

    def __init__(
        self,
        name: str,
        model: Transformer | FeatureDraft,
        *,
        slots: int,
        vocab: int | None = None,
        read_rows: int = 256,
        prefix_cache: bool = True,
    ) -> None:
        self.name = name
        self.model = model
        self.config = model.config
        self.vocab = min(vocab or model.config.vocab, model.config.vocab)
        self.read_rows = read_rows
        weight = model.embedding.weight
        self.device = weight.device
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        lay_out(model)
        self.cache = Cache(model.config, slots, dtype=weight.dtype, device=self.device)
        self.prefix: Prefix | None = None
        if prefix_cache and (not self.config.bidirectional or isinstance(model, FeatureDraft)):
            share = self.device.type != "cpu"
            self.prefix = Prefix(self.cache, mask_id=self.config.mask_id, share=share)
        self.seconds = 0.0
        """Time spent in the model, its head and its reads."""

    @torch.inference_mode()
    def run(
        self,
        forwards: Sequence[Forward],
        tables: Sequence[Table],
        layers: Sequence[tuple[int, ...]] | None = None,
    ) -> list[Prediction]:
        """One ragged pass over the forwards; their predictions in the same order.

        `layers[i]` are those whose hidden states forward i wants, side by side.
        """
        batch = pack(forwards, tables, self.config.shift, self.device, self.config.sights)
        began = time.perf_counter()
        wanted = {} if layers is None else {each: None for each in layers if each}
        hidden, captured = self.forward(batch, {layer for each in wanted for layer in each})
        for forward, table in zip(forwards, tables, strict=True):
            table.written = max(table.written, forward.end)
        predictions = self.read(hidden, forwards, batch)
        if layers is not None and wanted:
            features = {each: torch.cat([captured[at] for at in each], -1) for each in wanted}
            for prediction, each, rows in zip(predictions, layers, batch.rows, strict=True):
                if each:
                    prediction.features = features[each][rows]
        self.seconds += time.perf_counter() - began
        return predictions

    def forward(
        self, batch: Batch, layers: AbstractSet[int]
    ) -> tuple[Tensor, Mapping[int, Tensor]]:
        """Hidden states `[R, dim]` of the rows that are read; what some layers put out."""
        attends = {
            sight: DenseAttention(self.cache.keys, self.cache.values, batch.write, segments)
            for sight, segments in batch.segments.items()
        }
        attend: Attend = by_layer(attends, self.config.sights)
        if isinstance(self.model, FeatureDraft):
            context = batch.context, batch.context_positions
            hidden = self.model(batch.ids, batch.positions, attend, *context)
            return (hidden if batch.predict is None else hidden[batch.predict]), {}
        return self.model.capture(batch.ids, batch.positions, attend, layers, batch.predict)

    def read(self, hidden: Tensor, forwards: Sequence[Forward], batch: Batch) -> list[Prediction]:
        """Run each type of read once over its rows, then copy all results to the host at once."""
        readouts: list[Readout] = []
        kept: dict[int, Tensor] = {}
        first = 0
        for kind, members in batch.reads:
            reads = [forwards[index].read for index in members]
            slots = [forwards[index].predicted_slots() for index in members]
            count = sum(map(len, slots))
            if count == 0:
                continue
            reader = kind.group(reads, slots, self.device)
            keep = any(read.keep for read in reads)
            logits = []
            for begin in range(0, count, self.read_rows):
                rows = slice(begin, min(begin + self.read_rows, count))
                chunk = self.logits(hidden[first + rows.start : first + rows.stop])
                readouts.append(reader(chunk, rows))
                if keep:
                    logits.append(chunk)
            if keep:
                parts = torch.cat(logits) if len(logits) > 1 else logits[0]
                kept |= zip(members, parts.split([len(s) for s in slots]), strict=True)
            first += count
        return distribute(readouts, kept, forwards, batch)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `f32[r, vocab]`; the mask is no token that a model may say."""
        logits = self.model.head(hidden)[:, : self.vocab].float()
        if self.config.mask_id is not None and self.config.mask_id < self.vocab:
            logits[:, self.config.mask_id] = NEVER
        return logits


def by_layer(attends: Mapping[Sight, Attend], sights: Sequence[Sight]) -> Attend:
    """Attention of layers that may differ in what they see."""
    if len(attends) == 1:
        return next(iter(attends.values()))

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attends[sights[layer]](layer, q, k, v)

    return attend


def distribute(
    readouts: list[Readout],
    kept: dict[int, Tensor],
    forwards: Sequence[Forward],
    batch: Batch,
) -> list[Prediction]:
    """One copy of all readouts to the host, cut into the predictions of each forward."""
    if not readouts:
        return [Prediction(tokens=[]) for _ in forwards]
    names: list[Score] = sorted({name for readout in readouts for name in readout.scores})
    if names:
        table = torch.cat([stack(readout, names) for readout in readouts], 1).cpu().numpy()
        tokens = table[0].astype(np.int64).tolist()
    else:
        joined = [readout.tokens for readout in readouts]
        tokens = (torch.cat(joined) if len(joined) > 1 else joined[0]).tolist()
    predictions: dict[int, Prediction] = {}
    begin = 0
    for _, members in batch.reads:
        for index in members:
            end = begin + len(forwards[index].predicted_slots())
            scores: dict[str, Any] = {
                name: table[1 + row, begin:end].astype(np.float32)
                for row, name in enumerate(names)
                if name in forwards[index].read.scores
            }
            logits = kept.get(index) if forwards[index].read.keep else None
            predictions[index] = Prediction(tokens=tokens[begin:end], logits=logits, **scores)
            begin = end
    return [predictions[index] for index in range(len(forwards))]


def stack(readout: Readout, names: list[Score]) -> Tensor:
    """Tokens and scores as rows of one table; float64 holds a token id exactly."""
    missing = torch.zeros_like(readout.tokens, dtype=torch.float64)
    columns = [readout.scores.get(name, missing) for name in names]
    return torch.stack([readout.tokens.double(), *(column.double() for column in columns)])
