"""Tokens that must fit together: where an answer is constrained as a whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from outpace.decoding.request import Request
    from outpace.decoding.sampling import Sample


class Constraint(Protocol):
    """What the answer of one request must be.

    It is a `Processor` as well, and bans in each row what no answer has there.
    """

    def __call__(self, logits: Tensor, slots: Sequence[int], text: Sequence[int]) -> None:
        """Ban tokens in `logits f32[r, V]`, row by row, as a `Processor` does."""
        ...

    @staticmethod
    def together(asked: Sequence[Fit], logits: Tensor, tokens: Tensor) -> None:
        """Change tokens so that those of several slots are part of one answer, for each read.

        `tokens [r]` were chosen apart from `logits f32[r, V]`, which bans have changed already.
        """
        ...

    def forced(self, ids: Sequence[int]) -> list[int]:
        """Tokens that must follow a text, as far as each is the only one that may.

        They need not be all there are, and have no end-of-sequence among them.
        """
        ...

    def check(self, request: Request) -> None:
        """Raise `ValueError` where what a request has committed is no beginning of an answer.

        Where it ends at the limit with a whole answer, that is why it has ended.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Joint:
    """A constraint, and the text with holes whose slots are read, from slot 0 on."""

    constraint: Constraint
    text: Sequence[int]


class Fit(NamedTuple):
    """Slots of one read, whose tokens are to fit together, and the rows that they have.

    `read.joint` is the text that they go into.
    """

    constraint: Any
    rows: Sequence[int]
    slots: Sequence[int]
    read: Sample


@dataclass(slots=True)
class Jointly:
    """A chooser whose tokens fit together in each read that has a `joint`.

    `apart` chooses each row by itself; read i of `reads` wants the slots `slots[i]`.
    """

    apart: Callable[[Tensor, slice], Tensor]
    reads: Sequence[Sample]
    slots: Sequence[Sequence[int]]

    def __call__(self, logits: Tensor, rows: slice) -> Tensor:
        """Token of each row of `logits [r, V]`, which are the rows `rows` of the group."""
        tokens = self.apart(logits, rows)
        begins = accumulate(map(len, self.slots), initial=-rows.start)
        asked: dict[type[Constraint], list[Fit]] = {}
        for read, slots, begin in zip(self.reads, self.slots, begins, strict=False):
            if read.joint is not None and len(slots) > 1 and 0 <= begin < len(tokens):
                own = range(begin, begin + len(slots))
                fit = Fit(read.joint.constraint, own, slots, read)
                asked.setdefault(type(read.joint.constraint), []).append(fit)
        for kind, fits in asked.items():  # all at once, as much of it is the same for all
            kind.together(fits, logits, tokens)
        return tokens
