"""Joint choice of several tokens under a constraint on the whole answer."""

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
    """Constraint on the answer of one request.

    It is also a `Processor`, which bans in each row the tokens that no valid answer has there.
    """

    def __call__(self, logits: Tensor, slots: Sequence[int], text: Sequence[int]) -> None:
        """Ban tokens in `logits f32[r, V]`, row by row, as a `Processor` does."""
        ...

    @staticmethod
    def choose_jointly(asked: Sequence[JointRows], logits: Tensor, tokens: Tensor) -> None:
        """Change `tokens [r]` so that those of each read are part of one valid answer.

        They were chosen row by row from `logits f32[r, V]`, to which bans are already applied.
        """
        ...

    def forced_tokens(self, ids: Sequence[int]) -> list[int]:
        """Return the tokens that must follow a prefix, while there is only one candidate.

        The list may be incomplete, and never has an end-of-sequence.
        """
        ...

    def check(self, request: Request) -> None:
        """Raise `ValueError` where the committed text is not a prefix of a valid answer.

        At the limit, a complete answer sets the finish reason "stop".
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Joint:
    """A constraint, and the text with holes from slot 0 on."""

    constraint: Constraint
    text: Sequence[int]


class JointRows(NamedTuple):
    """Slots of one read whose tokens must fit together, and their rows.

    `read.joint` is the text that they complete.
    """

    constraint: Any
    rows: Sequence[int]
    slots: Sequence[int]
    read: Sample


@dataclass(slots=True)
class JointChooser:
    """Token chooser with a joint choice for each read that has `joint`.

    `choose_rows` chooses each row independently; read i of `reads` wants the slots `slots[i]`.
    """

    choose_rows: Callable[[Tensor, slice], Tensor]
    reads: Sequence[Sample]
    slots: Sequence[Sequence[int]]

    def __call__(self, logits: Tensor, rows: slice) -> Tensor:
        """Return the token of each row of `logits [r, V]`, the rows `rows` of the group."""
        tokens = self.choose_rows(logits, rows)
        begins = accumulate(map(len, self.slots), initial=-rows.start)
        joint_reads: dict[type[Constraint], list[JointRows]] = {}
        for read, slots, begin in zip(self.reads, self.slots, begins, strict=False):
            if read.joint is not None and len(slots) > 1 and 0 <= begin < len(tokens):
                own_rows = range(begin, begin + len(slots))
                fit = JointRows(read.joint.constraint, own_rows, slots, read)
                joint_reads.setdefault(type(read.joint.constraint), []).append(fit)
        for kind, fits in joint_reads.items():  # in one call, since they share work
            kind.choose_jointly(fits, logits, tokens)
        return tokens
