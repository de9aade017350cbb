"""How many tokens to propose, on machines and drafts whose figures are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from random import Random

import pytest

from outpace.decoding import Request
from outpace.decoding.dial import Dial, halved
from outpace.pacing.controller import SHOWN, TRIAL, WARM, PaceController

MOST, BURST = 16, 2 * WARM


@dataclass
class Machine:
    """Seconds of a pass by its rows, and the chance that a draft is kept."""

    target: Callable[[float], float] = lambda rows: 10 + 0.5 * (rows > 1) * (rows + 8)
    draft: float = 2.0
    chance: float = 0.8
    once: bool = True
    spikes: float = 0.0

    def pace(self, most: int = MOST) -> PaceController:
        """One that drafts a block at once, or token by token."""
        return PaceController(
            Dial(
                values=range(1, most + 1),
                passes=lambda value, _: [
                    ("draft", MOST, min(value - 1, 1) if self.once else value - 1),
                    ("target", value, 1),
                ],
            )
        )

    def kept(self, rng: Random, count: int) -> int:
        """Drafts that a verification keeps."""
        return next((n for n in range(count) if rng.random() > self.chance), count)

    def seconds(self, value: int) -> float:
        """What a cycle that proposes so many tokens takes."""
        passes = min(value - 1, 1) if self.once else value - 1
        return self.target(value) + passes * self.draft

    def speed(self, value: int) -> float:
        """Tokens a second where every cycle proposes so many."""
        return sum(self.chance**n for n in range(value)) / self.seconds(value)

    def run(self, pace: PaceController, cycles: int, *, requests: int = 1) -> list[int]:
        """Tokens proposed in each cycle."""
        rng, values = Random(0), []
        pace.run(requests)
        for _ in range(cycles):
            value = pace.value()
            for _ in range(min(value - 1, 1) if self.once else value - 1):
                pace.passed("draft", requests * MOST, self.draft)
            slow = 10 if rng.random() < self.spikes else 1
            pace.passed("target", requests * value, slow * self.target(value))
            pace.brought(value, 1 + self.kept(rng, value - 1))
            values.append(value)
        return values

    def loss(self, values: list[int]) -> float:
        """Tokens a second of these cycles, as a share of the best that any one number gives."""
        seconds = sum(self.seconds(value) for value in values)
        tokens = sum(self.speed(value) * self.seconds(value) for value in values)
        return 1 - tokens / seconds / max(self.speed(value) for value in range(1, MOST + 1))


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
def test_speed_is_nearly_that_of_the_best_number(name: str) -> None:
    """What finding it takes included, and never much below that of plain decoding."""
    machine = MACHINES[name]
    values = machine.run(machine.pace(), 1000)
    assert machine.loss(values) < (0.08 if machine.spikes else 0.06)


def test_nothing_is_known_at_first() -> None:
    """Two cycles propose all, since what runs first is slow, the next one token: both are timed.

    The one token soon again, since one alone says little.
    """
    machine = Machine(chance=0.9)
    values = machine.run(machine.pace(), 40)
    assert values[:3] == [MOST, MOST, 1]
    again = values.index(1, 3)
    assert values[again : again + BURST] == [1] * BURST and again < 30
    assert min(values[3:again] + values[again + BURST :]) > 5


def test_what_plain_cycles_took_long_ago_is_soon_forgotten() -> None:
    """They were dear, so that a poor draft paid; now only drafts would be."""
    dear = Machine(chance=0.5, target=lambda rows: 40.0)
    machine = Machine(chance=0.5, target=lambda rows: 10.0 if rows == 1 else 40.0)
    pace = dear.pace()
    dear.run(pace, 10)
    for _ in range(100):
        pace.passed("target", 1, 40.0)
    assert dear.run(pace, 100).count(1) < 40
    assert machine.run(pace, 300)[150:].count(1) > 140


def test_plain_cycles_are_timed_in_a_row_and_less_and_less() -> None:
    """The first ones behind others count for nothing."""
    machine = Machine(chance=0.9)
    pace = machine.pace()
    values = machine.run(pace, 2000)
    begins = [at for at in range(3, 2000) if values[at] == 1 and values[at - 1] > 1]
    gaps = [after - before for before, after in pairwise(begins)]
    assert gaps[:4] == sorted(gaps[:4]) and gaps[0] < 60 and min(gaps[4:]) > 240
    assert all(values[at : at + BURST] == [1] * BURST for at in begins)
    known = pace.load.costs["target"].at(1)
    assert machine.run(pace, 1) != [1]
    for _ in range(WARM):
        pace.passed("target", 1, 100.0)
    assert pace.load.costs["target"].at(1) == known
    pace.passed("target", 1, 100.0)
    assert pace.load.costs["target"].at(1) > known


def test_plain_cycles_are_known_by_their_rows() -> None:
    """Which may be more than one each, where what was said is fed again."""
    pace = PaceController(Dial(values=[1, 8], passes=lambda value, _: [("target", value + 2, 1)]))
    pace.run(4)
    values = []
    for _ in range(400):
        values.append(value := pace.value())
        pace.passed("target", 4 * (value + 2), 10.0)
        pace.brought(value, value)
    begins = [at for at in range(3, 400) if values[at] == 1 and values[at - 1] > 1]
    assert len(begins) > 3 and all(values[at + BURST] == 8 for at in begins[:-1])


def test_plain_cycles_that_are_interrupted_go_on_until_enough_ran_in_a_row() -> None:
    """A prompt that comes in between makes those behind it slow as well."""
    machine = Machine(chance=0.9)
    pace = machine.pace()
    values = machine.run(pace, 8)
    while values[-1] > 1:
        values += machine.run(pace, 1)
    machine.run(pace, BURST - 3)
    pace.passed("target", 100, 100.0)
    values = machine.run(pace, 40)
    assert values[:BURST] == [1] * BURST and values[BURST] > 1


def test_cheap_rows_and_good_drafts_give_long_drafts_and_dear_ones_none() -> None:
    """The two ends."""
    cheap = Machine(chance=0.95, target=lambda rows: 10.0, draft=0.1)
    dear = Machine(chance=0.3, target=lambda rows: 10.0 * rows)
    found = cheap.run(cheap.pace(), 100)[20:]
    assert set(found) == {1, MOST} and found.count(1) <= 2 * BURST
    values = dear.run(dear.pace(), 400)[20:]
    assert values.count(1) > 0.95 * len(values)


def test_a_draft_that_is_of_no_use_is_asked_less_and_less() -> None:
    """But never given up, in case that it becomes good."""
    useless = Machine(chance=0.0)
    pace = useless.pace()
    values = useless.run(pace, 5000)
    tries = [at for at in range(20, 5000) if values[at] > 1 and values[at - 1] == 1]
    gaps = [after - before for before, after in pairwise(tries)]
    assert len(gaps) >= 3 and all(after > 1.8 * before for before, after in pairwise(gaps))
    assert sum(value > 1 for value in values) < 0.03 * len(values)
    assert sum(value > 1 for value in Machine(chance=1.0).run(pace, 3500)[-400:]) > 380


def test_what_pays_depends_on_the_load_and_comes_back_when_it_falls() -> None:
    """Sixteen at a time fill the machine, one does not."""
    alone = Machine(chance=0.9)
    many = Machine(chance=0.9, target=lambda rows: 16 * rows, draft=20.0)
    pace = alone.pace()
    assert sum(value < 6 for value in alone.run(pace, 50)[5:]) <= BURST
    assert sum(value > 1 for value in many.run(pace, 200, requests=16)) < 20
    assert sum(value < 6 for value in alone.run(pace, 50)) <= BURST


def test_a_load_that_was_never_met_is_tried_out_at_once() -> None:
    """Though drafting did not pay under the last one, and would not be tried there for long."""
    alone = Machine(chance=0.9)
    many = Machine(chance=0.9, target=lambda rows: 16 * rows, draft=20.0)
    pace = alone.pace()
    many.run(pace, 500, requests=64)
    assert sum(value < 6 for value in alone.run(pace, 50)[5:]) <= BURST
    assert set(pace.loads) == {0, 6}


def test_numbers_of_requests_that_are_alike_share_what_is_known() -> None:
    """By a factor of the square root of two above or below a power of two."""
    machine = Machine()
    pace = machine.pace()
    for requests in (1, 2, 3, 5, 6, 46, 64, 90):
        machine.run(pace, 1, requests=requests)
    assert set(pace.loads) == {0, 1, 2, 3, 6}


def test_windows_are_judged_by_what_they_brought_themselves() -> None:
    """A small window does not bring the beginning of what a large one does."""
    pace = PaceController(
        Dial(values=[1, 5, 9], passes=lambda value, _: [("target", value, 1)], nested=False)
    )
    brings = {1: 1, 5: 2, 9: 9}
    values = []
    for _ in range(300):
        values.append(value := pace.value())
        pace.passed("target", value, 10 + value)
        pace.brought(value, brings[value])
    assert values.count(9) > 260 and values.count(1) >= 4
    assert pace.tokens(9) == pytest.approx(9, rel=0.05)


def test_what_was_never_tried_is_judged_by_longer_cycles() -> None:
    """Even where a shorter one is nearer, whose guesses of more are only hope."""
    pace = PaceController(
        Dial(values=[1, 8, 16], passes=lambda value, _: [("target", value, 1)], nested=False)
    )
    for _ in range(64):
        pace.brought(16, 10)
        pace.brought(1, 1)
    assert pace.tokens(8) == pytest.approx(8, rel=0.05) and pace.tokens(16) > 9.5


def near(brings: dict[int, int], cycles: int) -> list[int]:
    """Windows of so many cycles that bring so much, where one row more always takes a bit more."""
    pace, values = PaceController(Dial(values=list(brings), passes=alone, nested=False)), []
    for _ in range(cycles):
        values.append(value := pace.value())
        pace.passed("target", value, 10 + value / 4)
        pace.brought(value, brings[value])
    return values


def alone(value: int, _: float) -> list[tuple[str, float, int]]:
    """A cycle of one pass."""
    return [("target", value, 1)]


def test_a_window_that_promises_nearly_as_much_is_tried() -> None:
    """It may bring more than the beginning of what a larger one does, which nobody could know."""
    values = near({1: 1, 4: 4, 8: 8, 16: 9}, 500)
    assert values.count(8) > 450
    values = near({1: 1, 4: 3, 8: 7, 16: 9}, 2000)
    tried = [at for at in range(2000) if values[at] == 8 and values[at - 1] != 8]
    assert set(values[200:]) >= {8, 16} and values.count(16) > 1700
    assert all(after - before >= 2 * SHOWN for before, after in pairwise(tried[1:]))


def test_of_two_windows_that_are_as_good_the_smaller_one_is_taken() -> None:
    """By less than chance makes of them; not where the larger one is better by more."""
    for small, large, best in ((8, 9, 8), (6, 7, 12)):
        assert near({1: 1, 8: small, 12: large}, 1000).count(best) > 600


def test_a_window_that_promises_far_less_is_never_tried() -> None:
    """Nor is one where the numbers tell of each other."""
    assert not {2, 4} & set(near({1: 1, 2: 2, 4: 4, 16: 16}, 500))
    pace = PaceController(Dial(values=[1, 14, 15, 16], passes=alone))
    assert not {14, 15} & set(Machine(chance=1.0, once=False).run(pace, 500))


def test_cycles_may_bring_nothing() -> None:
    """As of a window whose first hole stays open."""
    pace = Machine().pace(4)
    for _ in range(100):
        pace.brought(4, 0)
    assert pace.tokens(4) < 0.1


def test_long_prompts_say_little_of_short_passes() -> None:
    """They count among passes of their own length."""
    plain, read = Machine().pace(), Machine().pace()
    for pace in (plain, read):
        Machine().run(pace, 50)
    read.passed("target", 3000, 900.0)
    read.passed("draft", 3000, 400.0)
    known = [plain.seconds(value) for value in (1, 16)]
    assert [read.seconds(value) for value in (1, 16)] == pytest.approx(known, rel=0.05)


def test_one_request_tries_for_all() -> None:
    """Where the least seems best, of eight one drafts now and then, and for a few cycles."""
    machine, pace = Machine(chance=0.0), Machine(chance=0.0).pace()
    machine.run(pace, 20, requests=8)
    askers, tries = [object() for _ in range(8)], []
    for _ in range(600):
        values = [pace.value(asker) for asker in askers]
        tries += [at for at, value in enumerate(values) if value > 1]
        for value in values:
            pace.brought(value, 1)
        pace.passed("target", sum(values), machine.target(sum(values) / 8))
    assert 0 < len(tries) <= 2 * TRIAL and set(tries) == {0}


def test_what_is_about_as_good_as_the_least_stays_what_it_is() -> None:
    """Drafts that save a twentieth: where there are none they do not begin, else they go on."""
    good, fair, poor = (
        Machine(chance=1.0, target=lambda rows, two=two: 10.0 if rows == 1 else two)
        for two in (10.0, 17.1, 40.0)
    )
    assert 1.02 < fair.speed(2) / fair.speed(1) < 1.07
    drafting, plain = good.pace(2), poor.pace(2)
    good.run(drafting, 40)
    poor.run(plain, 40)
    assert fair.run(drafting, 1000)[100:].count(2) > 850
    assert fair.run(plain, 1000)[100:].count(2) == TRIAL + SHOWN


@pytest.mark.parametrize(("chance", "cycles"), [(0.1, SHOWN), (0.01, TRIAL)])
def test_a_trial_is_as_long_as_it_may_change_something(chance: float, cycles: int) -> None:
    """Drafts that are nearly worth it have time to get warm, at one request; others have not."""
    slow = 10.0 if cycles == SHOWN else 20.0
    machine = Machine(chance=chance, target=lambda rows: 10.0 if rows == 1 else slow)
    values = machine.run(machine.pace(), 1500)[100:]
    begin = next(at for at, value in enumerate(values) if value > 1)
    assert min(values[begin : begin + cycles]) > 1 and values[begin + cycles] == 1


def test_a_draft_that_lies_behind_has_to_pay_for_what_it_reads() -> None:
    """A request that is about to end, or begins with a long prompt, decodes plainly."""
    machine = Machine(chance=0.95, target=lambda rows: 10.0)
    pace = machine.pace()
    machine.run(pace, 50)
    assert pace.value(None, 0, 1) == pace.value(None, 10, 100) == MOST
    assert pace.value(None, 100, 1) == pace.value(None, 10**6, 100) == 1
    assert pace.value(None, 10, 100, 5) == MOST and pace.value(None, 10, 100, 10**6) == 1


def test_it_settles_on_no_drafts_until_a_trial_is_due() -> None:
    """Not at once, and not where drafts pay; another load is another question."""
    machine, good = Machine(chance=0.0), Machine(chance=0.95, target=lambda rows: 10.0)
    pace, other = machine.pace(), good.pace()
    settled = []
    for _ in range(200):
        machine.run(pace, 1, requests=8)
        settled.append(pace.settled(0, 100))
    first = settled.index(True)
    assert 56 < first < 100 and all(settled[first:])
    while pace.settled(0, 100):
        machine.run(pace, 1, requests=8)
    assert max(machine.run(pace, TRIAL, requests=8)) > 1
    pace.run(1)
    assert not pace.settled(0, 100)
    good.run(other, 300)
    assert not other.settled(0, 1) and other.settled(100, 1)


def test_all_propose_or_none_does() -> None:
    """A cycle is as long for those who wait: what some owe is set against what all have left."""
    machine = Machine(chance=0.95, target=lambda rows: 10.0)
    short, long = (0, 60, 0), (5000, 60, 0)  # what they have to read, to say, and to feed again

    def said(*debts: tuple[int, int, int]) -> list[int]:
        pace = machine.pace()
        machine.run(pace, 50, requests=8)
        gain, stay, owed = 60 * pace.load.gain, 60 * pace.load.stay, 5000 * pace.load.price
        assert owed / 2 < gain < owed < stay
        for _ in range(3):
            pace.passed("target", 8, 10.0)
            values = [pace.value(None, *debt) for debt in debts]
        return values

    assert set(said(*[long] * 8)) == {1}
    assert set(said(*[short, long] * 4)) == {MOST}
    assert set(said(short, *[long] * 7)) == {1}


def test_one_who_owes_far_more_than_all_others_lets_them_propose_alone() -> None:
    """It waits for them in any case, but what it would have to read is too much."""
    machine = Machine(chance=0.95, target=lambda rows: 10.0)
    pace = machine.pace()
    machine.run(pace, 50, requests=8)
    pace.value(None, 10**4, 10**6, 0)
    assert [pace.value(None, 0, 10**6) for _ in range(7)] == [MOST] * 7
    assert pace.value(None, 10**4, 5) == 1
    assert [pace.value(None, 0, 10**6) for _ in range(7)] == [MOST] * 7


def test_a_load_begins_with_what_passes_took_at_the_next_one() -> None:
    """Its own count from then on, and those of the other stay as they were."""
    machine = Machine(chance=0.95, target=lambda rows: 10.0)
    pace = machine.pace()
    machine.run(pace, 50, requests=4)
    known = pace.load.costs["target"].at(4 * MOST)
    pace.run(8)
    assert pace.load.costs["target"].at(4 * MOST) == known and not pace.known(MOST)
    Machine(chance=0.95, target=lambda rows: 30.0).run(pace, 50, requests=8)
    assert pace.known(MOST) and pace.load.costs["target"].at(8 * MOST) == pytest.approx(30)
    pace.run(4)
    assert pace.load.costs["target"].at(4 * MOST) == known


def test_who_proposes_nothing_need_not_ask_again_for_a_while() -> None:
    """Until the next decision or trial, or until another load; one that is new asks."""

    class Asked(PaceController):
        times = 0

        def value(self, *args: object) -> int:
            type(self).times += 1
            return super().value(*args)  # type: ignore[arg-type]

    machine = Machine(chance=0.0)
    pace = Asked(machine.pace().dial)
    machine.run(pace, 100)
    old, new = (Request(prompt=[1], max_tokens=10**4, pace=pace) for _ in range(2))

    def cycles(request: Request, count: int) -> int:
        before = Asked.times
        for _ in range(count):
            assert request.dial(MOST) == 1
            pace.passed("target", 1, machine.target(1))
        return Asked.times - before

    assert cycles(old, 100) <= 4
    assert cycles(new, 1) == 1
    pace.run(2)
    assert cycles(old, 1) == 1
    values = set()
    for _ in range(600):  # until a trial
        values.add(old.dial(MOST))
        old.ids.append(1)
        pace.passed("target", 2, machine.target(1))
    assert max(values) > 1


def test_a_dial_of_one_value_stays() -> None:
    """Whatever passes take."""
    machine = Machine()
    assert set(machine.run(machine.pace(1), 100)) == {1}


def test_bounds_are_kept() -> None:
    """No other number is ever said, however good it were."""
    for least, most in ((3, 7), (1, 2), (5, 5), (4, 60)):
        machine = Machine(chance=0.99)
        values = halved(least, most)
        pace = PaceController(Dial(values=values, passes=lambda value, _: [("target", value, 1)]))
        said = machine.run(pace, 300)
        assert set(said) <= set(values) and (values[0], values[-1]) == (least, most)


@pytest.mark.parametrize(("tokens", "kept"), [([4, 5, 9], 3), ([4, 5, 6, 7, 8], 4)])
def test_the_last_cycle_counts_too(tokens: list[int], kept: int) -> None:
    """One that ends a request tells what it brought: end-of-sequence was kept, and no more."""
    told: list[tuple[int, int]] = []

    class Heard(PaceController):
        def brought(self, value: int, tokens: int) -> None:
            told.append((value, tokens))

    pace = Heard(Dial(values=range(1, 9), passes=lambda value, _: [("target", value, 1)]))
    request = Request(prompt=[1], max_tokens=5, eos=frozenset([9]), pace=pace)
    request.dial(8)
    request.commit([3])
    assert not told
    request.dial(8)
    assert not request.commit(tokens)
    assert told == [(8, 1), (8, kept)]


def test_halved_numbers_rise() -> None:
    """From the least to the most, the second at least twice as large or the next."""
    assert halved(4, 16) == [4, 8, 16] and halved(1, 16) == [1, 2, 4, 8, 16]
    assert halved(3, 16) == [3, 4, 8, 16] and halved(7, 7) == [7] and halved(6, 7) == [6, 7]
    assert halved(16, 10**400) == [16, 32, 64] and halved(100, 10**400) == [100]
