"""Slots that a draft has to read before it can propose."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backlog:
    """Work before a draft can propose, and the tokens over which it can pay off.

    Attributes:
        unread: slots that the draft has not read yet.
        remaining: tokens that the request may still generate.
        lost: slots that the target has to read again, since their hidden states were not stored.
    """

    unread: int = 0
    remaining: int = 0
    lost: int = 0

    def __add__(self, other: Backlog) -> Backlog:
        return Backlog(
            self.unread + other.unread, self.remaining + other.remaining, self.lost + other.lost
        )


class BacklogSum:
    """Sum of the backlogs of all running requests, collected over a cycle."""

    def __init__(self) -> None:
        self.cycle = 0
        self.count = 0
        self.partial = Backlog()
        self.complete: Backlog | None = None

    def add_backlog(self, backlog: Backlog, cycle: int, requests: int) -> Backlog:
        """Add a request's backlog; return the last sum over all, or the partial one so far."""
        if cycle > self.cycle + 1:
            self.count, self.partial, self.complete = 0, Backlog(), None
        self.cycle = cycle
        self.partial += backlog
        self.count += 1
        if self.count >= requests:
            self.count, self.partial, self.complete = 0, Backlog(), self.partial
        return self.complete or self.partial
