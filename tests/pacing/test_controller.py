"""Draft lengths on simulated machines and drafts with a known best length."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from random import Random

import pytest

from outpace.decoding import Request
from outpace.decoding.dial import Dial, halving_values
from outpace.pacing.controller import (
    TRIAL_CYCLES,
    PaceController,
)
from outpace.pacing.load import MAX_PATIENCE

MOST = 16


@dataclass
class Machine:
    """Seconds of a pass by its rows, the acceptance rate of a draft, and the share of slow passes.

    A draft takes one pass, or with `once=False` one pass per token.
    """

    target: Callable[[float], float] = lambda rows: 10 + 0.5 * (rows > 1) * (rows + 8)
    draft: float = 2.0
    chance: float = 0.8
    once: bool = True
    spikes: float = 0.0

    def pace(self, most: int = MOST) -> PaceController:
        """Return a controller of drafts on this machine."""
        return PaceController(
            Dial(
                values=range(1, most + 1),
                passes=lambda value, _: [("draft", MOST, self.drafts(value)), ("target", value, 1)],
            )
        )

    def drafts(self, value: int) -> int:
        """Return the draft's passes in a cycle."""
        return min(value - 1, 1) if self.once else value - 1

    def seconds(self, value: int) -> float:
        """Return the seconds of a cycle."""
        return self.target(value) + self.drafts(value) * self.draft

    def speed(self, value: int) -> float:
        """Return the expected tokens per second at a fixed draft length."""
        return sum(self.chance**n for n in range(value)) / self.seconds(value)

    def run(self, pace: PaceController, cycles: int, *, requests: int = 1) -> list[int]:
        """Return the tokens proposed in each cycle, where all requests do the same."""
        rng, values = Random(0), []
        pace.set_requests(requests)
        for _ in range(cycles):
            value = pace.choose_length()
            for _ in range(self.drafts(value)):
                pace.record_pass("draft", requests * MOST, self.draft)
            slow = 10 if rng.random() < self.spikes else 1
            pace.record_pass("target", requests * value, slow * self.target(value))
            accepted = next((n for n in range(value - 1) if rng.random() > self.chance), value - 1)
            pace.record_cycle(value, 1 + accepted)
            values.append(value)
        return values

    def share(self, values: list[int], best: int | None = None) -> float:
        """Return the speed of these cycles relative to the best fixed length."""
        tokens = sum(self.speed(value) * self.seconds(value) for value in values)
        speeds = [self.speed(value) for value in range(1, MOST + 1)]
        return tokens / sum(map(self.seconds, values)) / (self.speed(best) if best else max(speeds))


MACHINES = {
    "good draft": Machine(chance=0.95),
    "fair draft": Machine(chance=0.7),
    "slow rows": Machine(chance=0.8, target=lambda rows: 5 + 3 * rows),
    "no gain": Machine(chance=0.05),
    "one by one": Machine(chance=0.8, draft=3.0, once=False),
    "one by one, slow": Machine(chance=0.9, draft=9.0, once=False),
    "0.5B drafts for 1.5B": Machine(
        chance=0.87, draft=33.0, once=False, target=lambda rows: 98 + 5 * rows
    ),
    "disturbed": Machine(chance=0.9, spikes=0.05),
    "disturbed, no gain": Machine(chance=0.1, spikes=0.05),
}


@pytest.mark.parametrize("name", MACHINES)
def test_speed_is_close_to_the_best_fixed_length(name: str) -> None:
    machine = MACHINES[name]
    pace = machine.pace()
    first, rest = machine.run(pace, 300), machine.run(pace, 2000)
    assert machine.share(first) > 0.88 and machine.share(rest) > 0.97


@pytest.mark.parametrize("chance", [0.0, 0.1, 0.3])
def test_a_bad_draft_costs_at_most_three_percent(chance: float) -> None:
    machine = Machine(chance=chance, draft=33.0, once=False, target=lambda rows: 98 + 5 * rows)
    values = machine.run(machine.pace(9), 960)
    assert machine.share(values, best=1) > 0.97


def test_draft_length_follows_cost_and_quality() -> None:
    cheap = Machine(chance=0.95, target=lambda rows: 10.0, draft=0.1)
    dear = Machine(chance=0.3, target=lambda rows: 10.0 * rows)
    assert set(cheap.run(cheap.pace(), 60)[20:]) == {MOST}
    assert set(dear.run(dear.pace(), 60)[20:]) == {1}


def starts(values: list[int], plain: bool) -> list[int]:
    """Return the cycles at which plain decoding, or drafting, begins."""
    return [at for at, (a, b) in enumerate(pairwise(values), 1) if (a == 1) != plain == (b == 1)]


def test_stored_costs_of_another_day_are_corrected() -> None:
    slow = Machine(chance=0.6, target=lambda rows: 40.0)
    quick = Machine(chance=0.6, target=lambda rows: 10.0 if rows == 1 else 40.0)
    for past, now, is_plain in ((slow, quick, True), (quick, slow, False)):
        before = past.pace()
        past.run(before, 200)
        values = now.run(PaceController(before.dial, before.measured_costs), 400)
        assert (values[-100:].count(1) > 80) == is_plain


def test_a_draft_that_becomes_good_is_found_and_one_that_becomes_bad_is_left() -> None:
    good, bad = Machine(chance=1.0), Machine(chance=0.0)
    pace = bad.pace()
    assert bad.run(pace, 500)[-1] == 1
    assert min(good.run(pace, MAX_PATIENCE + 50)[-20:]) > 1
    assert bad.run(pace, 300)[-80:].count(1) >= 80 - TRIAL_CYCLES


def test_plain_passes_that_become_cheaper_are_noticed() -> None:
    dear = Machine(chance=0.5, target=lambda rows: 40.0)
    cheap = Machine(chance=0.5, target=lambda rows: 10.0 if rows == 1 else 40.0)
    pace = dear.pace()
    assert dear.run(pace, 100)[20:].count(1) <= TRIAL_CYCLES
    assert cheap.run(pace, 600)[-100:].count(1) >= 100 - TRIAL_CYCLES


def test_choice_is_stable_under_noise() -> None:
    machine = Machine(chance=0.9, spikes=0.05)
    assert len(starts(machine.run(machine.pace(), 2000), plain=True)) <= 6
    machine = Machine(chance=0.1, spikes=0.05)
    assert len(starts(machine.run(machine.pace(), 2000), plain=False)) <= 6


def test_choice_depends_on_the_load() -> None:
    alone = Machine(chance=0.9)
    many = Machine(chance=0.9, target=lambda rows: 16 * rows, draft=20.0)
    pace = alone.pace()
    assert min(alone.run(pace, 50)[20:]) > 5
    assert sum(value > 1 for value in many.run(pace, 200, requests=16)) < 25
    assert sum(value < 5 for value in alone.run(pace, 50)) <= TRIAL_CYCLES


def test_new_load_is_tried_immediately() -> None:
    alone = Machine(chance=0.9)
    many = Machine(chance=0.9, target=lambda rows: 16 * rows, draft=20.0)
    pace = alone.pace()
    many.run(pace, 500, requests=64)
    assert sum(value > 5 for value in alone.run(pace, 50)) > 30
    assert set(pace.loads) == {0, 6}


def windows(tokens: dict[int, int], cycles: int) -> list[int]:
    """Return the windows chosen where each commits this many tokens, with slightly dearer rows."""
    pace, values = PaceController(Dial(values=list(tokens), passes=one_pass, nested=False)), []
    for _ in range(cycles):
        values.append(value := pace.choose_length())
        pace.record_pass("target", value, 10 + value / 4)
        pace.record_cycle(value, tokens[value])
    return values


def one_pass(value: int, _: float) -> list[tuple[str, float, int]]:
    """Return a cycle of one pass of the target."""
    return [("target", value, 1)]


def test_windows_are_judged_by_their_own_tokens() -> None:
    assert windows({1: 1, 5: 2, 9: 9}, 300).count(9) > 260
    values = windows({1: 1, 4: 4, 8: 8, 16: 9}, 500)
    assert values[200:].count(8) > 250
    values = windows({1: 1, 4: 3, 8: 7, 16: 9}, 2000)
    assert 8 in values and values.count(16) > 1700


def test_a_window_that_promises_far_less_is_never_tried() -> None:
    assert not {2, 4} & set(windows({1: 1, 2: 2, 4: 4, 16: 16}, 500))
    machine = Machine(chance=1.0, target=lambda rows: 10.0)
    assert set(machine.run(machine.pace(), 500)) == {1, MOST}


def test_long_prefills_do_not_affect_short_passes() -> None:
    plain, read = Machine().pace(), Machine().pace()
    for pace in (plain, read):
        Machine().run(pace, 50)
    read.record_pass("target", 3000, 900.0)
    read.record_pass("draft", 3000, 400.0)
    known = [plain.load.expected_seconds(plain.expected_passes(value)) for value in (1, 16)]
    found = [read.load.expected_seconds(read.expected_passes(value)) for value in (1, 16)]
    assert found == pytest.approx(known, rel=0.05)


def test_one_request_tries_for_all() -> None:
    machine, pace = Machine(chance=0.0), Machine(chance=0.0).pace()
    machine.run(pace, 20, requests=8)
    askers, tries = [object() for _ in range(8)], []
    for _ in range(600):
        values = [pace.choose_length(asker) for asker in askers]
        tries += [at for at, value in enumerate(values) if value > 1]
        for value in values:
            pace.record_cycle(value, 1)
        pace.record_pass("target", sum(values), machine.target(sum(values) / 8))
    assert TRIAL_CYCLES <= len(tries) <= 4 * TRIAL_CYCLES and set(tries) == {0}


def test_backlog_must_pay_off() -> None:
    machine = Machine(chance=0.95, target=lambda rows: 10.0)
    pace = machine.pace()
    machine.run(pace, 50)
    assert pace.choose_length(None, 0, 1) == pace.choose_length(None, 10, 100) == MOST
    assert pace.choose_length(None, 100, 1) == pace.choose_length(None, 10**6, 100) == 1
    assert (
        pace.choose_length(None, 10, 100, 5) == MOST
        and pace.choose_length(None, 10, 100, 10**6) == 1
    )


def test_all_propose_or_none_does() -> None:
    machine = Machine(chance=0.95, target=lambda rows: 10.0)
    short, long = (0, 60, 0), (5000, 60, 0)  # unread slots, remaining tokens, lost slots

    def decided(*backlogs: tuple[int, int, int]) -> list[int]:
        pace = machine.pace()
        machine.run(pace, 50, requests=8)
        gain, wait_gain = 60 * pace.load.gain, 60 * pace.load.wait_gain
        assert 5000 * pace.load.read / 2 < gain < 5000 * pace.load.read < wait_gain
        for _ in range(3):
            pace.record_pass("target", 8, 10.0)
            values = [pace.choose_length(None, *backlog) for backlog in backlogs]
        return values

    assert set(decided(*[long] * 8)) == {1}
    assert set(decided(*[short, long] * 4)) == {MOST}
    assert set(decided(short, *[long] * 7)) == {1}


def test_request_with_large_backlog_decodes_plainly() -> None:
    machine = Machine(chance=0.95, target=lambda rows: 10.0)
    pace = machine.pace()
    machine.run(pace, 50, requests=8)
    pace.choose_length(None, 10**4, 10**6, 0)
    assert [pace.choose_length(None, 0, 10**6) for _ in range(7)] == [MOST] * 7
    assert pace.choose_length(None, 10**4, 5) == 1
    assert [pace.choose_length(None, 0, 10**6) for _ in range(7)] == [MOST] * 7


def test_a_single_value_stays() -> None:
    machine = Machine()
    assert set(machine.run(machine.pace(1), 100)) == {1}


def test_bounds_are_respected() -> None:
    for least, most in ((3, 7), (1, 2), (5, 5), (4, 60)):
        machine = Machine(chance=0.99)
        values = halving_values(least, most)
        pace = PaceController(Dial(values=values, passes=one_pass))
        chosen = machine.run(pace, 300)
        assert set(chosen) <= set(values) and (values[0], values[-1]) == (least, most)


@pytest.mark.parametrize(("tokens", "kept"), [([4, 5, 9], 3), ([4, 5, 6, 7, 8], 4)])
def test_the_last_cycle_counts_too(tokens: list[int], kept: int) -> None:
    reports: list[tuple[int, int]] = []

    class Recorded(PaceController):
        def record_cycle(self, value: int, tokens: int) -> None:
            reports.append((value, tokens))

    pace = Recorded(Dial(values=range(1, 9), passes=one_pass))
    request = Request(prompt=[1], max_tokens=5, eos=frozenset([9]), pace=pace)
    request.choose_length(8)
    request.commit([3])
    assert not reports
    request.choose_length(8)
    assert not request.commit(tokens)
    assert reports == [(8, 1), (8, kept)]
