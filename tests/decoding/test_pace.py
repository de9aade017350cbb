"""How long drafts should be, on machines and drafts whose figures are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from random import Random

import pytest

from outpace.decoding.pace import Cost, Pace


@dataclass
class Machine:
    """Seconds of a pass, and the chance that a draft is kept."""

    target: Callable[[float], float] = lambda rows: 10 + 0.5 * (rows > 1) * (rows + 8)
    draft: float = 2.0
    chance: float = 0.8
    once: bool = True
    spikes: float = 0.0

    def kept(self, rng: Random, count: int) -> int:
        """Drafts that a verification keeps."""
        return next((n for n in range(count) if rng.random() > self.chance), count)

    def seconds(self, count: int) -> float:
        """What a turn with so many drafts takes."""
        passes = min(count, 1) if self.once else count
        return self.target(count + 1) + passes * self.draft

    def speed(self, count: int) -> float:
        """Tokens a second with so many drafts every time."""
        return sum(self.chance**n for n in range(count + 1)) / self.seconds(count)

    def run(self, pace: Pace, turns: int, *, most: int = 15, requests: int = 1) -> list[int]:
        """Drafts of each turn."""
        rng, counts = Random(0), []
        for _ in range(turns):
            count = pace.length(most, rows=16 if self.once else 1, once=self.once)
            if count:
                for _ in range(1 if self.once else count):
                    pace.passed("draft", requests, requests * (16 if self.once else 1), self.draft)
                pace.verified(count, self.kept(rng, count))
            slow = 10 if rng.random() < self.spikes else 1
            pace.passed("target", requests, requests * (count + 1), slow * self.target(count + 1))
            counts.append(count)
        return counts

    def loss(self, counts: list[int], most: int = 15) -> float:
        """Tokens a second of these turns, as a share of the best that any one length gives."""
        seconds = sum(self.seconds(count) for count in counts)
        tokens = sum(self.speed(count) * self.seconds(count) for count in counts)
        return 1 - tokens / seconds / max(self.speed(count) for count in range(most + 1))


MACHINES = {
    "good draft": Machine(chance=0.95),
    "fair draft": Machine(chance=0.7),
    "slow rows": Machine(chance=0.8, target=lambda rows: 5 + 3 * rows),
    "no gain": Machine(chance=0.05),
    "slow draft": Machine(chance=0.7, draft=30.0),
    "one by one": Machine(chance=0.8, draft=3.0, once=False),
    "one by one, slow": Machine(chance=0.9, draft=9.0, once=False),
    "disturbed": Machine(chance=0.9, spikes=0.05),
    "disturbed, no gain": Machine(chance=0.1, spikes=0.05),
}


@pytest.mark.parametrize("name", MACHINES)
def test_speed_is_nearly_that_of_the_best_length(name: str) -> None:
    """What finding it takes included, and never much below that of no drafts."""
    machine = MACHINES[name]
    counts = machine.run(Pace(), 1000)
    assert machine.loss(counts) < (0.08 if machine.spikes else 0.05)


def test_nothing_is_known_at_first() -> None:
    """The first turn drafts all, the second nothing: then both are timed."""
    counts = Machine(chance=0.9).run(Pace(), 40)
    assert counts[:2] == [15, 0] and min(counts[2:]) > 4


def test_a_draft_that_is_of_no_use_is_asked_less_and_less() -> None:
    """But never given up, in case that it becomes good."""
    pace, useless = Pace(), Machine(chance=0.0)
    counts = useless.run(pace, 1000)
    tries = [turn for turn in range(20, 1000) if counts[turn] and not counts[turn - 1]]
    gaps = [after - before for before, after in pairwise(tries)]
    assert len(gaps) >= 3 and all(after > 1.8 * before for before, after in pairwise(gaps))
    assert sum(map(bool, counts)) < 0.03 * len(counts)
    assert sum(map(bool, Machine(chance=1.0).run(pace, 1500)[-400:])) > 390


def test_batches_of_other_sizes_have_costs_of_their_own() -> None:
    """Sixteen at a time fill the machine, one does not."""
    pace = Pace()
    alone = Machine(chance=0.9)
    many = Machine(chance=0.9, target=lambda rows: 16 * rows, draft=20.0)
    assert min(alone.run(pace, 50)[5:]) >= 6
    assert sum(map(bool, many.run(pace, 200, requests=16))) < 20
    assert sorted(alone.run(pace, 50))[5] >= 6


def test_long_prompts_are_no_verifications() -> None:
    """A prefill says nothing of the passes that follow."""
    pace = Pace()
    pace.passed("target", 1, 100, 50.0)
    pace.passed("draft", 1, 100, 50.0)
    assert not pace.costs and pace.length(4, rows=1, once=False) == 4


def test_there_may_be_nothing_to_draft() -> None:
    """At the end of a budget."""
    pace = Pace()
    assert pace.length(0, rows=1, once=False) == 0
    Machine().run(pace, 20)
    assert pace.length(0, rows=1, once=True) == 0


def test_cost_is_a_line_that_never_falls() -> None:
    """And a constant where all passes had the same rows."""
    cost = Cost()
    for rows in (2, 4, 8, 16):
        cost.add(rows, 3 + rows)
    assert [cost.at(rows) for rows in (1, 5, 20)] == pytest.approx([4, 8, 23], rel=1e-3)
    falling, flat = Cost(), Cost()
    for rows in (2, 4):
        falling.add(rows, 10 - rows)
        flat.add(7, 5.0)
    assert falling.at(1) == pytest.approx(falling.at(9)) == pytest.approx(7, rel=0.01)
    assert flat.at(1) == pytest.approx(flat.at(99)) == pytest.approx(5)
