"""Hidden states of the target that a draft has still to read."""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from outpace.decoding import Forward, Prediction, Read, Request
from outpace.methods.plain import plain


class Features:
    """Hidden states from the target that the draft has not read yet.

    Nothing is stored while the controller has drafting switched off. When drafting starts again,
    the text is run again with the last token, from the first slot without stored states.

    Attributes:
        written_slots: slots of the target that hold the text.
        stored_slots: slots whose hidden states were received.
        read_slots: slots whose hidden states the draft has read.
    """

    def __init__(self, request: Request, sample: Read) -> None:
        self.request = request
        self.sample = sample
        self.fed = self.seen = self.read = 0
        self.kept: list[Tensor] = []

    @property
    def lost(self) -> int:
        """Number of slots whose hidden states were not stored."""
        return max(self.fed - self.seen, 0)

    @property
    def behind(self) -> int:
        """Number of slots before the last token that the draft has not read yet."""
        return len(self.request) - 1 - self.read

    def plain(self, *, wanted: bool = False) -> Generator[Forward, Prediction, bool]:
        """Decode one token without a draft; return whether to continue.

        `wanted` is whether the next cycle drafts, which needs the hidden states.
        """
        request, end = self.request, len(self.request)
        if wanted:
            request.dialled = 1
        keep = wanted or not (self.lost or request.settled(self.behind))
        start = min(self.fed, self.seen) if keep else self.fed
        out = yield Forward(
            ids=request.ids[start:],
            start=start,
            read=self.sample,
            features_for="draft" if keep else None,
        )
        if out.features is not None:
            self.add(out.features[self.seen - start :] if self.seen > start else out.features)
        self.fed = end
        alive = request.commit(out.tokens, out.logprobs)
        if alive and request.resting:
            alive = yield from plain(request, end, self.sample)
            self.fed = len(request) - 1
        return alive

    def add(self, states: Tensor) -> None:
        """Store hidden states `[c, f]` of the next slots."""
        self.kept.append(states)
        self.seen += len(states)

    def take(self) -> Tensor:
        """Return and remove all stored states `[c, f]`."""
        taken, self.kept, self.read = torch.cat(self.kept), [], self.seen
        return taken
