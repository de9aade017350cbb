"""A forward on its way into a pass: checked and counted once, and cut where it is too long."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from operator import index

from outpace.attention.batch import Span
from outpace.decoding import CAUSAL, Forward, Processor, Tree
from outpace.decoding.forward import Pattern, moved
from outpace.engine.cache import Table
from outpace.models.config import ModelConfig


@dataclass(slots=True, kw_only=True)
class Feed(Forward):
    """What one sequence feeds one model in one pass, safe from what its method does next.

    Attributes:
        table: memory of the sequence.
        rows: rows whose logits are wanted.
        slots: the slots that they predict.
        layers: layers whose hidden states are wanted, side by side.
        processors: what changes the wanted logits before they are read.
        text: what they know of the text, from slot 0 on.
        missing: rows in front of these that were found filled, whose hidden states are wanted and
            nobody has computed.
        first, end, seen, size: its first slot, the slot after its last row, the number of slots
            that its last row sees, and its rows in a pass, those of its context included.
    """

    table: Table
    rows: Sequence[int]
    slots: Sequence[int]
    layers: tuple[int, ...] = ()
    processors: tuple[Processor, ...] = ()
    text: Sequence[int] = ()
    missing: int = 0
    first: int = field(init=False)
    end: int = field(init=False)
    seen: int = field(init=False)
    size: int = field(init=False)

    def __post_init__(self) -> None:
        count = len(self.ids)
        features = 0 if self.context is None else self.context.shape[0]
        self.first, self.end = self.start - features, self.start + count
        self.size = count + features
        self.seen = self.end if self.reach is None or self.pattern == CAUSAL else self.reach

    @classmethod
    def of(
        cls,
        forward: Forward,
        table: Table,
        config: ModelConfig,
        *,
        layers: tuple[int, ...] = (),
        processors: tuple[Processor, ...] = (),
        text: Sequence[int] = (),
    ) -> Feed:
        """A forward for a model; `ValueError` or `TypeError` where it cannot run it."""
        forward.check(
            vocab=config.vocab,
            length=config.max_length,
            slots=table.size,
            written=table.written,
            feature_size=0 if config.widths else config.feature_size,
            widths=config.widths,
        )
        return cls(
            ids=whole(forward.ids),
            start=forward.start,
            pattern=forward.pattern,
            positions=None if forward.positions is None else whole(forward.positions),
            reach=forward.reach,
            read=forward.read,
            model=forward.model,
            context=forward.context,
            features=forward.features,
            features_for=forward.features_for,
            branches=forward.branches,
            table=table,
            rows=whole(forward.predicted_rows(config.shift)),
            slots=forward.predicted_slots(),
            layers=layers,
            processors=processors,
            text=text,
        )

    @property
    def ahead(self) -> int:
        """How many of the first rows nobody reads, of a forward that is causal or in blocks."""
        parted = self.pattern == CAUSAL or isinstance(self.pattern, tuple)
        if not parted or self.context is not None:
            return 0
        return min(self.rows) if self.rows else len(self.ids) - 1

    def apart(self, most: int) -> int:
        """How many of these, `most` at most, may run ahead of the rest, which they do not see."""
        most = min(most, self.ahead)
        if not isinstance(self.pattern, tuple):
            return most
        ends = list(accumulate(self.pattern, initial=0))
        return ends[bisect_right(ends, most) - 1]

    def holes(self, mask_id: int, first: int) -> tuple[range, ...]:
        """Runs of slots, from slot `first` on, that are fed as masks, wherever their rows lie."""
        if mask_id not in self.ids:
            return ()
        if self.positions is None:
            row, count = self.ids.index(mask_id), self.ids.count(mask_id)
            begin = self.start + row
            if begin >= first and self.ids[row : row + count].count(mask_id) == count:
                return (range(begin, begin + count),)  # one run, as most methods have it
        places = range(self.start, self.end) if self.positions is None else self.positions
        rows = zip(places, self.ids, strict=True)
        slots = sorted({place for place, token in rows if token == mask_id and place >= first})
        runs: list[range] = []
        for slot in slots:
            if runs and slot == runs[-1].stop:
                runs[-1] = range(runs[-1].start, slot + 1)
            else:
                runs.append(range(slot, slot + 1))
        return tuple(runs)

    def span(self, begin: int) -> Span:
        """Its rows, of which the first is row `begin` of the pass, and what they see."""
        ends = None if self.pattern == CAUSAL else self.stops()
        rows = slice(begin, begin + len(self.ids))
        tree = self.pattern if isinstance(self.pattern, Tree) else None
        return Span(rows, self.start, self.seen, ends, self.table, tree)

    def cut(self, count: int) -> tuple[Feed, Feed]:
        """The first `count` rows, which nobody reads, and the rest."""
        places, features = self.positions, self.features
        before, behind = split(self.pattern, count)
        head = replace(
            self,
            ids=self.ids[:count],
            pattern=before,
            reach=None,
            features=None if features is None else features[:count],
            branches=None,
            positions=None if places is None else places[:count],
            rows=[],
            slots=(),
        )
        tail = replace(
            self,
            ids=self.ids[count:],
            pattern=behind,
            features=None if features is None else features[count:],
            start=self.start + count,
            positions=None if places is None else places[count:],
            rows=moved(self.rows, -count),
            missing=0,
        )
        return head, tail


def split(pattern: Pattern, count: int) -> tuple[Pattern, Pattern]:
    """The pattern of the first `count` rows, and of the rest, whose rows see what they saw."""
    if not isinstance(pattern, tuple):
        return pattern, pattern
    ends = list(accumulate(pattern, initial=0))
    before = [*ends[: bisect_left(ends, count)], count]
    behind = [count, *ends[bisect_right(ends, count) :]]
    head, tail = (tuple(end - begin for begin, end in pairwise(e)) for e in (before, behind))
    return head, tail


def whole(numbers: Sequence[int]) -> Sequence[int]:
    """A copy; `TypeError` for what are no whole numbers."""
    if isinstance(numbers, range) and numbers.step == 1:
        return numbers
    copy = list(numbers)
    # The sum of numbers is whole where all of them are.
    return copy if type(sum(copy)) is int else list(map(index, copy))
