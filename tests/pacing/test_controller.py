"""Draft lengths on simulated machines, compared with the best fixed length."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

import pytest

from outpace.decoding import Request
from outpace.decoding.draft_length import LengthRange, halving_values
from outpace.pacing.controller import PaceController

MOST = 16


@dataclass(frozen=True)
class Machine:
    """Seconds of a pass by its rows, the acceptance rate of a draft, and the share of slow passes.

    A draft takes one pass, or with `once=False` one pass per token.
    """

    target: Callable[[float], float] = lambda rows: 10 + 0.5 * (rows > 1) * (rows + 8)
    draft: float = 2.0
    chance: float = 0.8
    once: bool = True
    spikes: float = 0.0
    context: int = 100

    def new_controller(self, values: Sequence[int] = range(1, MOST + 1)) -> PaceController:
        return PaceController(
            LengthRange(
                values=values,
                passes=lambda value, _: [("draft", MOST, self.drafts(value)), ("target", value, 1)],
            )
        )

    def drafts(self, value: int) -> int:
        return min(value - 1, 1) if self.once else value - 1

    def seconds(self, value: int) -> float:
        return self.target(value) + self.drafts(value) * self.draft

    def tokens(self, value: int) -> float:
        return sum(self.chance**n for n in range(value))

    def draw_tokens(self, value: int, rng: Random) -> int:
        """Return the tokens of a cycle: those accepted, and the target's own."""
        return next((1 + n for n in range(value - 1) if rng.random() > self.chance), value)

    def run(self, pace: PaceController, cycles: int, requests: int = 1) -> list[int]:
        """Return the tokens proposed in each cycle, where all requests do the same."""
        rng, values = Random(0), []
        pace.set_load(requests, self.context)
        for _ in range(cycles):
            value = pace.choose_length()
            for _ in range(self.drafts(value)):
                pace.record_pass("draft", requests * MOST, self.draft)
            slow = 10 if rng.random() < self.spikes else 1
            pace.record_pass("target", requests * value, slow * self.target(value))
            pace.record_cycle(value, self.draw_tokens(value, rng))
            values.append(value)
        return values

    def share(self, values: list[int]) -> float:
        """Return the speed of these cycles relative to that of the best fixed length."""
        best = max(self.tokens(value) / self.seconds(value) for value in range(1, MOST + 1))
        return sum(map(self.tokens, values)) / sum(map(self.seconds, values)) / best


Phase = tuple[Machine, int, int, float]
"""A machine, requests, cycles, and the least share of the best speed in the second half of them."""

BAD, GOOD = Machine(chance=0.0), Machine(chance=1.0)
EQUAL = Machine(chance=0.5, target=lambda rows: 40.0)
PLAIN_CHEAPER = replace(EQUAL, target=lambda rows: 10.0 if rows == 1 else 40.0)
SLOW_DRAFT = Machine(chance=0.87, draft=33.0, once=False, target=lambda rows: 98 + 5 * rows)
ALONE = Machine(chance=0.9)
LONG = Machine(chance=0.3, target=lambda rows: 10 + 8 * rows, context=20_000)
BUSY = replace(ALONE, target=lambda rows: 10.0 if rows == 1 else 70.0)
MANY = replace(ALONE, target=lambda rows: 16 * rows, draft=20.0)
MACHINES = {
    "good draft": Machine(chance=0.95),
    "fair draft": Machine(chance=0.7),
    "free draft": Machine(chance=0.95, target=lambda rows: 10.0, draft=0.1),
    "slow rows": Machine(chance=0.8, target=lambda rows: 5 + 3 * rows),
    "no gain": Machine(chance=0.05),
    "one by one": Machine(chance=0.8, draft=3.0, once=False),
    "one by one, slow": Machine(chance=0.9, draft=9.0, once=False),
    "slow draft": SLOW_DRAFT,
    "slow and bad draft": replace(SLOW_DRAFT, chance=0.1),
    "disturbed": Machine(chance=0.9, spikes=0.05),
    "disturbed, no gain": Machine(chance=0.1, spikes=0.05),
}
LOADS: dict[str, list[Phase]] = {
    "very slow rows": [(Machine(chance=0.3, target=lambda rows: 10.0 * rows), 1, 80, 0.99)],
    "a draft becomes good, then bad": [
        (BAD, 1, 500, 0.95),
        (GOOD, 1, 2200, 0.95),
        (BAD, 1, 600, 0.95),
    ],
    "plain passes become cheaper": [(EQUAL, 1, 200, 0.95), (PLAIN_CHEAPER, 1, 1400, 0.95)],
    "more requests and fewer": [(ALONE, 1, 50, 0.9), (MANY, 16, 200, 0.9), (ALONE, 1, 50, 0.9)],
    "a long context": [
        (ALONE, 1, 100, 0.9),
        (replace(ALONE, context=8000), 1, 60, 0.9),
        (LONG, 1, 200, 0.95),
        (ALONE, 1, 30, 0.95),
        (replace(LONG, chance=1.0), 1, 1000, 0.95),
    ],
    "a new load": [(MANY, 64, 500, 0.9), (ALONE, 1, 50, 0.9)],
}


@pytest.mark.parametrize("name", MACHINES)
def test_speed_is_close_to_the_best_fixed_length(name: str) -> None:
    machine = MACHINES[name]
    pace = machine.new_controller()
    first, rest = machine.run(pace, 300), machine.run(pace, 2000)
    assert machine.share(first) > 0.88 and machine.share(rest) > 0.97


@pytest.mark.parametrize("chance", [0.2, 0.35, 0.45, 0.55, 0.7, 0.8, 0.95])
def test_the_last_number_before_a_step_of_the_cost_is_found(chance: float) -> None:
    seconds = {1: 48.3, 2: 53.0, 4: 57.8, 8: 116.6}  # of 0.5 B parameters: rows are padded
    machine = Machine(
        chance=chance, draft=6.0, target=lambda n: seconds[min(1 << (int(n) - 1).bit_length(), 8)]
    )
    pace = machine.new_controller(range(1, 9))
    first, rest = machine.run(pace, 60), machine.run(pace, 400)
    best = max(range(1, 9), key=lambda value: machine.tokens(value) / machine.seconds(value))
    share = machine.share([best])
    assert machine.share(first) > 0.8 * share and machine.share(rest) > 0.93 * share


@pytest.mark.parametrize("name", LOADS)
def test_speed_follows_a_change(name: str) -> None:
    pace = LOADS[name][0][0].new_controller()
    for machine, requests, cycles, least in LOADS[name]:
        values = machine.run(pace, cycles, requests)
        assert machine.share(values[cycles // 2 :]) > least


@pytest.mark.parametrize(
    ("past", "now", "at_once"),
    [
        (EQUAL, PLAIN_CHEAPER, 0.0),
        (PLAIN_CHEAPER, EQUAL, 0.0),
        (EQUAL, EQUAL, 0.95),
        (EQUAL, replace(EQUAL, target=lambda rows: 120.0, draft=6.0), 0.95),  # in proportion
        (BUSY, ALONE, 0.0),
    ],
)
def test_stored_costs_are_used_and_corrected(past: Machine, now: Machine, at_once: float) -> None:
    before = past.new_controller()
    past.run(before, 200)
    pace = PaceController(before.lengths, before.measured_ratios)
    values = now.run(pace, 400)
    assert now.share(values[-100:]) > 0.95 and now.share(values[:40]) > at_once
    assert past is not BUSY or not pace.load.costs["target"].prior


@pytest.mark.parametrize(
    "tokens",
    [
        {1: 1, 5: 2, 9: 9},
        {1: 1, 2: 2, 4: 4, 16: 16},
        {1: 1, 4: 4, 8: 8, 16: 9},
        {1: 1, 4: 3, 8: 7, 16: 9},
    ],
    ids=str,
)
def test_windows_are_judged_by_their_own_tokens(tokens: dict[int, int]) -> None:
    pace, values = (
        PaceController(LengthRange(values=list(tokens), passes=one_pass, nested=False)),
        [],
    )
    seconds = {value: 10 + value / 4 for value in tokens}
    for _ in range(2000):
        values.append(value := pace.choose_length())
        pace.record_pass("target", value, seconds[value])
        pace.record_cycle(value, tokens[value])
    speed = sum(map(tokens.__getitem__, values)) / sum(map(seconds.__getitem__, values))
    assert speed > 0.97 * max(tokens[value] / seconds[value] for value in tokens)


def one_pass(value: int, _: float) -> list[tuple[str, float, int]]:
    return [("target", value, 1)]


def test_long_prefills_do_not_affect_short_passes() -> None:
    pace = ALONE.new_controller()
    ALONE.run(pace, 50)
    pace.record_pass("target", 3000, 900.0)
    pace.record_pass("draft", 3000, 400.0)
    assert ALONE.share(ALONE.run(pace, 40)) > 0.95


def test_copies_do_not_prolong_a_trial() -> None:
    """A trial of plain decoding ends where every third pass verifies a copy of the text."""
    machine, pace, plain = Machine(chance=0.95), Machine(chance=0.95).new_controller(), 0
    for cycle in range(100):
        value = pace.choose_length()
        plain += value == 1
        if value > 1:
            pace.record_pass("draft", MOST, machine.draft)
        rows = 8 if value == 1 and cycle % 3 == 0 else value
        pace.record_pass("target", rows, machine.target(rows))
        pace.record_cycle(value, value)
    assert plain < 25


@pytest.mark.parametrize(("lost", "trier"), [(0, 0), (10**4, 1)])
def test_one_request_tries_for_all(lost: int, trier: int) -> None:
    machine, pace = BAD, BAD.new_controller()
    machine.run(pace, 20, requests=8)
    requests, tries = [object() for _ in range(8)], []
    for _ in range(600):
        first = pace.choose_length(requests[0], lost=lost)
        values = [first, *(pace.choose_length(request) for request in requests[1:])]
        tries += [at for at, value in enumerate(values) if value > 1]
        for value in values:
            pace.record_cycle(value, 1)
        pace.record_pass("target", sum(values), machine.target(sum(values) / 8))
    assert set(tries) == {trier} and len(tries) < 60


def test_many_requests_share_passes() -> None:
    """64 requests, 512 rows of a pass at most; hidden states that are stored take time, too."""
    machine, requests, most_rows = Machine(chance=0.92), 64, 512
    pace, rng, tokens, seconds = machine.new_controller(), Random(0), 0, 0.0

    def run_passes(model: str, rows: int, fixed: float, per_row: float) -> float:
        parts = [min(most_rows, rows - at) for at in range(0, rows, most_rows)]
        for part in parts:
            pace.record_pass(model, part, fixed + per_row * part)
        return len(parts) * fixed + rows * per_row

    pace.set_load(requests, 100)
    for cycle in range(2000):
        value = pace.choose_length()
        taken = run_passes("draft", 27 * requests, 2.0, 0.03) if value > 1 else 0.0
        stores = value > 1 or not pace.skips_drafting(unread=value, remaining=50)
        taken += run_passes("target", value * requests, 16.0 if stores else 10.0, 0.1)
        kept = [machine.draw_tokens(value, rng) for _ in range(requests)]
        for each in kept:
            pace.record_cycle(value, each)
        if cycle >= 200:
            tokens, seconds = tokens + sum(kept), seconds + taken
    assert tokens / seconds > 0.98 * requests / (10 + requests / 10)


FREE_ROWS = Machine(chance=0.95, target=lambda rows: 10.0)


def test_backlog_must_pay_off() -> None:
    pace = FREE_ROWS.new_controller()
    FREE_ROWS.run(pace, 50)
    backlogs = [(0, 1), (10, 100), (100, 1), (10**6, 100), (10, 100, 5), (10, 100, 10**6)]
    lengths = [pace.choose_length(None, *backlog) for backlog in backlogs]
    assert lengths == [MOST, MOST, 1, 1, MOST, 1]


def test_all_propose_or_none_does() -> None:
    short, long = (0, 60, 0), (5000, 60, 0)  # unread slots, remaining tokens, lost slots
    for backlogs, length in (([long] * 8, 1), ([short, long] * 4, MOST), ([short, *[long] * 7], 1)):
        pace = FREE_ROWS.new_controller()
        FREE_ROWS.run(pace, 50, requests=8)
        for _ in range(3):
            pace.record_pass("target", 8, 10.0)
            values = [pace.choose_length(None, *backlog) for backlog in backlogs]
        assert set(values) == {length}


def test_request_with_large_backlog_decodes_plainly() -> None:
    pace = FREE_ROWS.new_controller()
    FREE_ROWS.run(pace, 50, requests=8)
    pace.choose_length(None, 10**4, 10**6, 0)
    assert [pace.choose_length(None, 0, 10**6) for _ in range(7)] == [MOST] * 7
    assert pace.choose_length(None, 10**4, 5) == 1
    assert [pace.choose_length(None, 0, 10**6) for _ in range(7)] == [MOST] * 7


@pytest.mark.parametrize(("least", "most"), [(1, 1), (3, 7), (1, 2), (5, 5), (4, 60)])
def test_bounds_are_respected(least: int, most: int) -> None:
    machine, values = Machine(chance=0.99), halving_values(least, most)
    chosen = machine.run(machine.new_controller(values), 300)
    assert set(chosen) <= set(values) and (values[0], values[-1]) == (least, most)


@pytest.mark.parametrize(("tokens", "kept"), [([4, 5, 9], 3), ([4, 5, 6, 7, 8], 4)])
def test_the_last_cycle_counts_too(tokens: list[int], kept: int) -> None:
    reports: list[tuple[int, int]] = []

    class Recorded(PaceController):
        def record_cycle(self, value: int, tokens: int) -> None:
            reports.append((value, tokens))

    pace = Recorded(LengthRange(values=range(1, 9), passes=one_pass))
    request = Request(prompt=[1], max_tokens=5, eos=frozenset([9]), pace=pace)
    request.choose_length(8)
    request.commit([3])
    assert not reports
    request.choose_length(8)
    assert not request.commit(tokens)
    assert reports == [(8, 1), (8, kept)]
