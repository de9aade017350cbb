"""Reads of drafts that choose the tokens of a block one after another.

A head of the draft changes the logits of a slot by the token chosen for the slot before it. Step k
reads the k-th wanted slot of all sequences together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outpace.attention.batch import RowSpan
from outpace.decoding import Read
from outpace.decoding.sampling import Readout, Score
from outpace.engine.pack import ReadGroup
from outpace.engine.readout import ReadChunk
from outpace.engine.scheduled_forward import ScheduledForward
from outpace.models.attention import Attend
from outpace.models.draft import ChainedDraft

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
        """Attend as without them."""
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
