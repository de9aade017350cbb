"""Predictions on the host, from the tokens and scores that reads left on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outpace.attention.batch import RowSpan
from outpace.decoding import Prediction, Read
from outpace.decoding.sampling import Readout, Score
from outpace.engine.pack import ReadGroup, ScheduledForward
from outpace.models.attention import Attend
from outpace.models.draft import ChainedDraft


class ReadChunk(NamedTuple):
    """Readout of a chunk of rows, the logits of the chosen tokens, kept logits, and top tokens."""

    readout: Readout
    chosen: Tensor
    logits: Tensor | None
    top: Tensor | None = None

    @classmethod
    def from_readout(
        cls, readout: Readout, logits: Tensor, *, keep: bool, top: Tensor | None = None
    ) -> ReadChunk:
        """Add the logits of the chosen tokens to a readout of `logits [r, V]`.

        They show whether a row is finite: arg-max chooses NaN over any number.
        """
        chosen = logits.gather(-1, readout.tokens[:, None]).squeeze(-1)
        return cls(readout, chosen, logits if keep else None, top)


NO_TOKENS, NO_SCORES = torch.empty(0, dtype=torch.int64), np.empty((0, 0))
"""Placeholders where nothing was read, or no score."""


class HostTransfer:
    """Tokens and scores on their way to the host, in one copy.

    A GPU copies into pinned memory, in stream order, while the host continues.
    """

    def __init__(self, parts: Sequence[ReadChunk]) -> None:
        self.score_names: list[Score] = sorted(
            {name for part in parts for name in part.readout.scores}
        )
        table = stack_results(parts, self.score_names) if parts else NO_TOKENS
        self.copy_done: torch.cuda.Event | None = None
        if table.is_cuda:
            self.table = torch.empty(table.shape, dtype=table.dtype, pin_memory=True)
            self.table.copy_(table, non_blocking=True)
            self.copy_done = torch.cuda.Event()
            self.copy_done.record(torch.cuda.current_stream(table.device))
        else:
            self.table = table

    def wait(self) -> tuple[list[int], np.ndarray[tuple[int, int], np.dtype[np.float64]]]:
        """Wait for the copy; return the tokens, and a row of scores for each of the `names`.

        The last rows are the ids and log-probabilities of the most probable tokens, if wanted.
        The token of a row whose logits are not finite is -1.
        """
        if self.copy_done is not None:
            self.copy_done.synchronize()
        if self.table.ndim == 1:
            return self.table.tolist(), NO_SCORES
        table = self.table.cpu().numpy()
        return table[0].astype(np.int64).tolist(), table[1:]


def stack_results(parts: Sequence[ReadChunk], names: Sequence[Score]) -> Tensor:
    """Stack tokens and one row per score; float64 holds a token id exactly."""
    chosen = concatenate([part.chosen for part in parts])
    # A token of -1 marks logits that are not finite, without another copy to the host.
    tokens = torch.where(
        chosen.isfinite(), concatenate([part.readout.tokens for part in parts]), -1
    )
    num_top = max(0 if part.top is None else part.top.shape[1] for part in parts)
    if not names and not num_top:
        return tokens
    missing = [torch.zeros_like(part.chosen) for part in parts]
    columns = [
        concatenate(
            [
                part.readout.scores.get(name, zeros)
                for part, zeros in zip(parts, missing, strict=True)
            ]
        )
        for name in names
    ]
    table = torch.stack([column.double() for column in (tokens, *columns)])
    if not num_top:
        return table
    top = [pad_top_tokens(part, num_top) for part in parts]
    return torch.cat([table, torch.cat(top, -1)])


def pad_top_tokens(part: ReadChunk, count: int) -> Tensor:
    """Return ids and log-probabilities of top tokens, `f64[2 * count, r]`; zeros where unwanted."""
    table = part.chosen.new_zeros((2, count, len(part.chosen)), dtype=torch.float64)
    if part.top is not None:
        table[:, : part.top.shape[1]] = part.top
    return table.flatten(0, 1)


@dataclass(frozen=True, slots=True)
class LaunchedPass:
    """A pass that runs on a device, and its results.

    Attributes:
        forwards: its forwards.
        groups: the forwards with wanted logits, by type of read.
        parts: readouts, on the device.
        sent: tokens and scores on their way to the host.
        features: hidden states of the forwards that want them.
        began: reading of `time.perf_counter` at its start.
    """

    forwards: Sequence[ScheduledForward]
    groups: Sequence[ReadGroup]
    parts: Sequence[ReadChunk]
    sent: HostTransfer
    features: Mapping[int, Tensor]
    began: float

    def collect_predictions(self) -> list[Prediction]:
        """Wait for the device and return the predictions of all forwards.

        Raises:
            ArithmeticError: logits are not finite.
        """
        predictions = [
            Prediction(tokens=[], features=self.features.get(index))
            for index in range(len(self.forwards))
        ]
        if not self.parts:
            return predictions
        tokens, table = self.sent.wait()
        if -1 in tokens:
            raise ArithmeticError("the model's logits are not finite numbers")
        begin = 0
        for group in self.groups:
            for index in group.members:
                forward, prediction = self.forwards[index], predictions[index]
                end = begin + len(forward.slots)
                prediction.tokens = tokens[begin:end]
                if forward.read.scores:
                    prediction.scores = {
                        name: table[row, begin:end].astype(np.float32)
                        for row, name in enumerate(self.sent.score_names)
                        if name in forward.read.scores
                    }
                if forward.top_logprobs:
                    rows = table[len(self.sent.score_names) :, begin:end]
                    top = rows.reshape(2, len(rows) // 2, end - begin)
                    prediction.top = top[:, : forward.top_logprobs]
                begin = end
        if any(group.keep for group in self.groups):
            attach_logits(self.parts, self.forwards, self.groups, predictions)
        return predictions


def attach_logits(
    parts: Sequence[ReadChunk],
    forwards: Sequence[ScheduledForward],
    groups: Sequence[ReadGroup],
    predictions: Sequence[Prediction],
) -> None:
    """Attach the raw logits, on the device, to the predictions whose reads keep them."""
    kept = iter(part.logits for part in parts if part.logits is not None)
    for group in groups:
        if not group.keep:
            continue
        sizes = list(map(len, group.slots))
        rows: list[Tensor] = []
        while sum(map(len, rows)) < sum(sizes):
            rows.append(next(kept))
        for index, logits in zip(group.members, concatenate(rows).split(sizes), strict=True):
            if forwards[index].read.keep:
                predictions[index].logits = logits


def concatenate(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate parts; a single one is returned unchanged."""
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


def apply_processors(logits: Tensor, rows: slice, forwards: Sequence[ScheduledForward]) -> None:
    """Apply the processors of each forward to its rows in a chunk of a read group."""
    begin = 0
    for forward in forwards:
        end = begin + len(forward.slots)
        chunk_begin, chunk_end = max(begin, rows.start), min(end, rows.stop)
        if forward.processors and chunk_begin < chunk_end:
            rows_of_forward = logits[chunk_begin - rows.start : chunk_end - rows.start]
            for part, slots, text in processor_inputs(
                rows_of_forward, forward, slice(chunk_begin - begin, chunk_end - begin)
            ):
                for processor in forward.processors:
                    processor(part, slots, text)
        begin = end


def processor_inputs(
    logits: Tensor, forward: ScheduledForward, rows: slice
) -> Iterator[tuple[Tensor, Sequence[int], Sequence[int]]]:
    """Yield the wanted `rows` of a forward with their text: all together, or per branch."""
    slots = forward.slots[rows]
    if forward.branches is None:
        yield logits, slots, forward.text
        return
    for row, (slot, branch) in enumerate(zip(slots, forward.branches[rows], strict=True)):
        yield logits[row : row + 1], [slot], [*forward.text, *branch]


ChunkReader = Callable[[Tensor, Tensor, slice], ReadChunk]
"""Reads a slice of a group's rows from their hidden states `[r, dim]` and logits `[r, V]`."""


class BlockPass:
    """Attention of a pass over a draft whose rows also see places in their block."""

    def __init__(self, attend: Attend, spans: Sequence[RowSpan], device: torch.device) -> None:
        self.attend = attend
        places = [torch.arange(len(span), device=device) for span in spans]
        self.offsets = torch.cat(places)

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        return self.attend(layer, q, k, v, sinks)


@dataclass(slots=True)
class Chain:
    """One sequence's wanted rows in a chunk: its forward, their first row and the text so far."""

    forward: ScheduledForward
    read: Read
    begin: int
    text: list[int]

    @classmethod
    def from_forward(cls, forward: ScheduledForward, begin: int) -> Chain:
        """Start the chain of a forward whose wanted rows begin at row `begin` of a chunk."""
        scores = tuple(score for score in forward.read.scores if score != "acceptance")
        return cls(forward, replace(forward.read, scores=scores), begin, list(forward.text))

    @property
    def previous(self) -> int:
        """Token in the slot before the first wanted one."""
        return self.forward.ids[self.forward.slots[0] - 1 - self.forward.start]

    def append_token(self, step: int, token: int) -> None:
        """Add the token of a step to the text."""
        self.text[(slot := self.forward.slots[step]) : slot + 1] = [token]


def chain_reader(
    draft: ChainedDraft, group: ReadGroup, forwards: Sequence[ScheduledForward]
) -> ChunkReader:
    """Return how whole sequences of a read group are read, step by step."""

    def read_chains(hidden: Tensor, logits: Tensor, rows: slice) -> ReadChunk:
        chains = split_chains(group, forwards, rows)
        previous = torch.tensor([chain.previous for chain in chains], device=logits.device)
        parts: list[ReadChunk] = []
        order: list[int] = []
        for step in range(max(len(chain.forward.slots) for chain in chains)):
            going = [at for at, each in enumerate(chains) if len(each.forward.slots) > step]
            chains, previous = [chains[at] for at in going], previous[going]
            own = [chain.begin + step for chain in chains]
            part = read_step(draft, group, chains, step, (hidden[own], logits[own], previous))
            previous = part.readout.tokens
            if group.has_processors:
                for chain, token in zip(chains, previous.tolist(), strict=True):
                    chain.append_token(step, token)
            parts.append(part)
            order += own
        return join_steps(parts, torch.tensor(order).argsort().to(logits.device))

    return read_chains


def split_chains(
    group: ReadGroup, forwards: Sequence[ScheduledForward], rows: slice
) -> list[Chain]:
    """Return the sequences of a read group whose wanted rows are its rows `rows`."""
    chains, begin = [], 0
    for index, slots in zip(group.members, group.slots, strict=True):
        if rows.start <= begin < rows.stop:
            chains.append(Chain.from_forward(forwards[index], begin - rows.start))
        begin += len(slots)
    return chains


def read_step(
    draft: ChainedDraft,
    group: ReadGroup,
    chains: Sequence[Chain],
    step: int,
    inputs: tuple[Tensor, Tensor, Tensor],
) -> ReadChunk:
    """Read one slot of each sequence, from hidden states, logits and the tokens before."""
    hidden, logits, previous = inputs
    logits = draft.condition_logits(hidden, logits, previous)
    if group.has_processors:
        for row, chain in enumerate(chains):
            for processor in chain.forward.processors:
                processor(logits[row : row + 1], [chain.forward.slots[step]], chain.text)
    slots = [[chain.forward.slots[step]] for chain in chains]
    reader = group.kind.make_reader([chain.read for chain in chains], slots, logits.device)
    readout = reader(logits, slice(0, len(chains)))
    if any("acceptance" in chain.forward.read.scores for chain in chains):
        readout.scores["acceptance"] = draft.predict_acceptance(hidden, previous)
    return ReadChunk.from_readout(readout, logits, keep=group.keep)


def join_steps(parts: Sequence[ReadChunk], order: Tensor) -> ReadChunk:
    """Concatenate the results of all steps, in the order of the rows of the chunk."""
    tokens = torch.cat([part.readout.tokens for part in parts])[order]
    scores: dict[Score, Tensor] = {}
    for name in {name for part in parts for name in part.readout.scores}:
        columns = [part.readout.scores.get(name, torch.zeros_like(part.chosen)) for part in parts]
        scores[name] = torch.cat(columns)[order]
    chosen = torch.cat([part.chosen for part in parts])[order]
    kept = [part.logits for part in parts if part.logits is not None]
    return ReadChunk(Readout(tokens, scores), chosen, torch.cat(kept)[order] if kept else None)
