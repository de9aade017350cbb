"""The tokens of several holes at once: the most probable that fit, or an exact draw.

Shapes: h holes, V tokens, C classes of tokens, S states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.constraint.dfa import Flags
from outpace.constraint.reach import HOLE, Reach
from outpace.decoding.noise import gumbel
from outpace.decoding.sampling import Cut, Sample, noise_of

Weights = NDArray[np.float64]


def completed(
    reach: Reach, places: Sequence[int], logits: Tensor, begin: int, read: Sample
) -> Tensor:
    """Tokens `[h]` of the holes at `places`, whose logits are `[h, V]`, that fit together.

    At temperature 0 the most probable ones, by dynamic programming (Suresh et al., 2025). Else a
    draw of the product of their laws given that they fit: backward sums, then a draw from left to
    right (Dang and Ermon, 2026), with the noise of a step of its own. Where what top-p, top-k and
    min-p leave has no fitting tokens, the laws are not cut. Holes among them that were not
    predicted count as uniform. `begin` is the slot of place 0.
    """
    wild = [p for p in range(reach.first, places[-1]) if p not in places and reach.kind(p) == HOLE]
    logits = torch.cat((logits, logits.new_zeros(len(wild), logits.shape[1])))
    holes = {place: row for row, place in enumerate([*places, *wild])}
    sampling, laws, noise = read.sampling, [logits], None
    if sampling.temperature:
        slots = [[begin + place for place in holes]]
        cut = Cut.of([sampling], slots, logits.device)(logits, slice(0, len(logits)))
        laws = [cut, logits / sampling.temperature]
        noise = gumbel(
            noise_of([sampling], [-1 - read.step], slots).to(logits.device), logits.shape[1]
        )
    size = len(reach.automaton.classes)
    index = torch.from_numpy(reach.automaton.classes.astype(np.int64)).to(logits.device)
    for law in laws:
        scores = Scores.of(law[:, :size], None if noise is None else noise[:, :size], index)
        kinds = path(reach, holes, places[-1] + 1, scores, drawn=noise is not None)
        if kinds is not None:
            chosen = [int(scores.tokens[holes[place], kinds[place]]) for place in places]
            return torch.tensor(chosen, device=logits.device)
    raise ValueError("what is filled has no completion")  # pragma: no cover


class Scores:
    """What the classes of tokens are worth in each hole.

    Attributes:
        sums: `[h, C]`, logarithm of the probability of each class, up to a constant of the hole;
            at temperature 0 that of its best token.
        peaks: `[h, C]`, the best noised logarithm of a token of each class.
        tokens: `[h, C]`, that token.
    """

    def __init__(self, sums: Weights, peaks: Weights, tokens: NDArray[np.int64]) -> None:
        self.sums, self.peaks, self.tokens = sums, peaks, tokens

    @classmethod
    def of(cls, law: Tensor, noise: Tensor | None, classes: Tensor) -> Scores:
        """Those of `law [h, V]`, which is logarithms, and its noise, where tokens are drawn."""
        count, index = int(classes.max()) + 1, classes.expand(len(law), -1)
        blank = law.new_full((len(law), count), -torch.inf)
        noised = law if noise is None else law + noise
        peaks = blank.scatter_reduce(1, index, noised, "amax")
        columns = torch.arange(law.shape[1], device=law.device).expand(len(law), -1)
        best = torch.where(noised == peaks.gather(1, index), columns, law.shape[1])
        none = torch.full_like(blank, law.shape[1], dtype=torch.long)
        tokens = none.scatter_reduce(1, index, best, "amin")
        sums = peaks
        if noise is not None:
            tops = blank.scatter_reduce(1, index, law, "amax")
            base = torch.where(tops.isfinite(), tops, 0)
            parts = (law - base.gather(1, index)).exp()
            sums = base + torch.zeros_like(blank).scatter_add(1, index, parts).log()
        return cls(sums.double().cpu().numpy(), peaks.double().cpu().numpy(), tokens.cpu().numpy())


def path(
    reach: Reach, holes: Mapping[int, int], end: int, scores: Scores, *, drawn: bool
) -> dict[int, int] | None:
    """The class that each hole takes, given those of the others; None where none of them fit.

    `holes` are the places in front of `end` and their rows of `scores`.
    """
    automaton = reach.automaton
    add = np.logaddexp if drawn else np.maximum
    rests = [np.where(reach.tail(end), 0.0, -np.inf)]
    for place in range(end - 1, reach.first - 1, -1):
        if (row := holes.get(place)) is not None:
            rests.append(summed(reach, reach.head(place), scores.sums[row], rests[-1], add))
            continue
        targets = automaton.table[:, reach.kind(place)]
        rests.append(np.where(targets >= 0, rests[-1][targets], -np.inf))
    rests.reverse()
    state = int(reach.head(reach.first).argmax())
    if rests[0][state] == -np.inf:
        return None
    chosen = {}
    for place, rest in enumerate(rests[1:], reach.first):
        if (row := holes.get(place)) is None:
            kind = reach.kind(place)
        else:
            targets = automaton.table[state]
            worth = scores.peaks[row] + np.where(targets >= 0, rest[targets], -np.inf)
            kind = chosen[place] = int(worth.argmax())
        state = int(automaton.table[state, kind])
    return chosen


def summed(reach: Reach, heads: Flags, weights: Weights, rest: Weights, add: np.ufunc) -> Weights:
    """What each state in front of a hole is worth, of `weights [C]` and what lies behind, `[S]`."""
    automaton = reach.automaton
    live = np.flatnonzero(heads[automaton.froms] & np.isfinite(rest)[automaton.tos])
    froms = automaton.froms[live]
    worth = weights[automaton.kinds[live]] + rest[automaton.tos[live]]
    result = np.full(len(heads), -np.inf)
    if len(live):
        begins = np.flatnonzero(np.r_[True, froms[1:] != froms[:-1]])
        result[froms[begins]] = add.reduceat(worth, begins)
    return result
