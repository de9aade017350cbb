"""Hidden states of a text on their way to a draft, kept for as long as one may come."""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from outpace.decoding import Forward, Prediction, Read, Request
from outpace.methods.plain import plain


class Features:
    """What the target put out of a text and the draft has not read yet.

    Nothing is kept while its pace has settled on no drafts. Once one is wanted, the text is fed
    again with the last token, from the first slot of which nothing was kept.

    Attributes:
        fed: slots of the target that hold the text.
        seen: slots whose hidden states came.
        read: slots whose hidden states the draft has read.
    """

    def __init__(self, request: Request, sample: Read) -> None:
        self.request = request
        self.sample = sample
        self.fed = self.seen = self.read = 0
        self.kept: list[Tensor] = []

    @property
    def lost(self) -> int:
        """Slots that were fed and whose hidden states nobody kept."""
        return max(self.fed - self.seen, 0)

    @property
    def behind(self) -> int:
        """Slots in front of the last token that the draft has still to read."""
        return len(self.request) - 1 - self.read

    def plain(self, *, wanted: bool = False) -> Generator[Forward, Prediction, bool]:
        """A cycle that proposes nothing, even where a draft is `wanted`; whether to go on."""
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
        """Hidden states `[c, f]` of the slots behind those that came so far."""
        self.kept.append(states)
        self.seen += len(states)

    def take(self) -> Tensor:
        """All `[c, f]` that came since the last call."""
        states, self.kept, self.read = torch.cat(self.kept), [], self.seen
        return states
