"""Compare constrained answers and holes of templates with enumeration: tokens and samples."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from enumeration import EOS, HOLE, PATTERNS, SIZE, TEXTS, allowed, answers, law, random_logits
from helpers import (
    block_model,
    chi_square,
    diffusion_model,
    engine_of,
    finish,
    masked_model,
    runner,
)
from outpace.constraint import regular
from outpace.constraint.automaton import TokenAutomaton
from outpace.constraint.cloze import InfillConstraint
from outpace.constraint.compiler import HoleAutomaton, PaddedHoleAutomaton
from outpace.constraint.dfa import Dfa
from outpace.constraint.pattern import TooLargeError
from outpace.constraint.regular import RegularConstraint, TokenLanguage
from outpace.constraint.vocabulary import Vocabulary
from outpace.decoding import Request, Sampling
from outpace.decoding.processor import BANNED_LOGIT
from outpace.decoding.sampling import Joint, JointRows, Sample
from outpace.engine.engine import Engine
from outpace.engine.job import Job
from outpace.engine.pairing import Pairing
from outpace.methods import D2F, BlockDiffusion, Diffusion, FastDLLM, LeftToRight, Method, WeDLM

BEGIN = 2
LIKELY = 1e-4
AUTOMATA = {"answer": TokenAutomaton, "hole": HoleAutomaton, "padded": PaddedHoleAutomaton}
"""An answer may end before its limit, a hole is full, a padded hole has ends after its text."""

Filling = tuple[int | None, ...]


@dataclass(frozen=True)
class Case:
    """The first places of an answer or a hole with a pattern; some are unknown."""

    kind: str
    pattern: str
    canvas: tuple[int, ...]
    room: int

    @property
    def open_places(self) -> list[int]:
        return [place for place, token in enumerate(self.canvas) if token == HOLE]

    @property
    def text(self) -> list[int]:
        """A prompt, the canvas, and the text after a hole."""
        return [0] * BEGIN + [*self.canvas] + [2] * (self.kind != "answer")

    def cut(self, place: int) -> Case:
        end = place + 1 if self.kind == "answer" else self.room
        return Case(
            self.kind, self.pattern, (*self.canvas[:place], *[HOLE] * (end - place)), self.room
        )

    def completions(self) -> list[Filling]:
        """Return what the canvas can become; None where any token may follow the end."""
        found = (
            whole[: len(self.canvas)] for whole in contents(self.kind, self.pattern, self.room)
        )
        return [
            whole
            for whole in found
            if all(
                known in (HOLE, token) or token is None
                for known, token in zip(self.canvas, whole, strict=True)
            )
        ]

    def constraint(self, *, both: bool = True) -> RegularConstraint | InfillConstraint:
        """Return the constraint after a prompt of two tokens."""
        end = BEGIN + self.room
        made = language(self.kind, self.pattern).build_constraint(
            begin=BEGIN, limit=end, mask_id=HOLE, both=both
        )
        return made if self.kind == "answer" else InfillConstraint([made], {end: 2})


@cache
def language(kind: str, pattern: str) -> TokenLanguage:
    texts = [text.encode() for text in TEXTS] + [None, None]
    dfa = Dfa.from_pattern(pattern)
    return TokenLanguage(AUTOMATA[kind](dfa, Vocabulary(texts), frozenset({EOS})))


@cache
def contents(kind: str, pattern: str, room: int) -> list[Filling]:
    if kind == "answer":
        return [(*answer, *[None] * (room - len(answer))) for answer in answers(pattern, room)]
    match = re.compile(pattern).fullmatch
    return [
        (*tokens, *[EOS] * (room - count))
        for count in (range(room + 1) if kind == "padded" else [room])
        for tokens in product(range(len(TEXTS)), repeat=count)
        if match("".join(TEXTS[token] for token in tokens))
    ]


def cases(count: int, seed: int) -> list[Case]:
    """Generate this many cases of up to six places that have a completion."""
    rng, found = Random(seed), list[Case]()
    while len(found) < count:
        kind, pattern = ("answer", "hole", "padded")[len(found) % 3], rng.choice(PATTERNS)
        room = rng.randint(1, 6 if kind == "answer" else 5)
        if whole := contents(kind, pattern, room):
            answer = [rng.randrange(SIZE - 1) if t is None else t for t in rng.choice(whole)]
            canvas = [HOLE if rng.random() < 0.6 else token for token in answer]
            size = rng.randint(1, room) if kind == "answer" else room
            found.append(Case(kind, pattern, tuple(canvas[:size]), room))
    return found


def unbanned(made: Any, text: Sequence[int], slot: int) -> set[int]:
    row = torch.zeros(1, SIZE)
    made(row, [slot], text)
    return {token for token in range(SIZE) if row[0, token] > BANNED_LOGIT / 2}


def fill(case: Case, places: list[int], logits: Tensor, **sampling: Any) -> tuple[int, ...]:
    made = case.constraint()
    slots = [BEGIN + place for place in places]
    read = Sample(sampling=Sampling(**sampling), joint=Joint(made, case.text))
    reader = Sample.make_reader([read], [slots], torch.device("cpu"))
    logits = logits.clone()
    made(logits, slots, case.text)
    return tuple(reader(logits, slice(0, len(slots))).tokens.tolist())


def check_allowed(case: Case) -> None:
    """Assert that a place has the tokens of the completions."""
    found, made = case.completions(), case.constraint()
    for place in case.open_places:
        assert unbanned(made, case.text, BEGIN + place) == allowed(found, place)
    if case.kind != "answer":
        assert unbanned(made, case.text, BEGIN + case.room) == {2}


def check_greedy(case: Case) -> None:
    """Assert that greedy tokens of some places are the most probable ones."""
    places = case.open_places
    places = places[: Random(case.room).randint(1, max(1, len(places)))]
    if places:
        logits = random_logits(len(places), seed=case.room)
        best = law(case.completions(), dict(zip(places, logits, strict=True)))
        assert best[fill(case, places, logits)] == pytest.approx(max(best.values()))


@pytest.mark.parametrize("case", cases(150, seed=0), ids=str)
def test_allowed_tokens_and_the_most_probable_completion(case: Case) -> None:
    check_allowed(case)
    check_greedy(case)


@pytest.mark.parametrize("case", cases(105, seed=1), ids=str)
def test_allowed_tokens_from_left_to_right(case: Case) -> None:
    made = case.constraint(both=False)
    for place in range(len(case.canvas)):
        found = unbanned(made, case.text, BEGIN + place)
        assert found == allowed(case.cut(place).completions(), place)


@pytest.mark.parametrize("case", cases(90, seed=2), ids=str)
def test_forced_tokens_are_in_all_completions(case: Case) -> None:
    known = next(iter(case.open_places), len(case.canvas))
    if known == case.room or EOS in case.canvas[:known]:
        return
    made, front = case.constraint(both=False), list(case.canvas[:known])
    for token in [*made.forced_tokens([0] * BEGIN + front), None]:
        extended = Case(case.kind, case.pattern, (*front, HOLE), case.room)
        may = allowed(extended.cut(len(front)).completions(), len(front))
        if token is not None:
            assert may == {token} and token != EOS
            front.append(token)
    assert len(may) > 1 or may == {EOS} or len(front) >= case.room - 1


def test_cleared_sets_are_rebuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regular, "MAX_SET_BYTES", 200)
    for case in cases(30, seed=4):
        check_allowed(case)
        check_greedy(case)


DRAWN = [
    Case("answer", "(a|b)*abb", (HOLE,) * 5, 6),
    Case("hole", "(a|b)*abb", (HOLE,) * 4, 4),
    Case("answer", "(abc|bca){1,2}", (HOLE, HOLE, 2, HOLE), 6),
    Case("padded", "(ab)*c?", (HOLE,) * 4, 4),
    Case("answer", "|a|ab|abc|b", (HOLE,) * 4, 5),
    Case("answer", "(a|bb)[ab]c(b|ca)c", (HOLE, HOLE, 2, HOLE, HOLE), 5),
    Case("padded", "a{3}|b{5}", (HOLE,) * 5, 5),
    Case("hole", "[ab]{2,4}", (HOLE, 1, HOLE), 3),
]


@pytest.mark.parametrize(
    "draws", [300, pytest.param(10_000, marks=pytest.mark.nightly)], ids=["few", "many"]
)
@pytest.mark.parametrize("case", DRAWN, ids=str)
def test_samples_have_the_exact_distribution(case: Case, draws: int) -> None:
    places, temperature = case.open_places, (0.7, 1.5)[case.room % 2]
    logits = random_logits(len(places), seed=5)
    expected = law(case.completions(), dict(zip(places, logits / temperature, strict=True)))
    names = {filling: number for number, filling in enumerate(expected)}
    found = [
        names[fill(case, places, logits, temperature=temperature, seed=seed)]
        for seed in range(draws)
    ]
    assert chi_square(torch.tensor(found), torch.tensor([*expected.values()])) > LIKELY


@pytest.mark.parametrize("sampling", [{"top_p": 0.05}, {"top_k": 1}, {"min_p": 1.0}], ids=str)
def test_truncation_may_remove_all_completions(sampling: dict[str, Any]) -> None:
    logits = torch.zeros(2, SIZE)
    logits[0, 0], logits[1, 1] = 5, 5
    for pattern, expected in (("aa|bb", [(0, 0), (1, 1), (5, EOS)]), ("ab|ba", [(0, 1)])):
        case = Case("answer", pattern, (HOLE,) * 2, 2)
        for seed in range(30):
            assert fill(case, [0, 1], logits, temperature=1, seed=seed, **sampling) in expected


@dataclass(slots=True, eq=False, kw_only=True)
class Watching(RegularConstraint):
    """Compares each choice with enumeration."""

    pattern: str
    num_choices: list[int] = field(default_factory=list)

    def case(self, text: Sequence[int]) -> Case:
        canvas = [*text[self.begin : self.limit]]
        canvas += [HOLE] * (self.limit - self.begin - len(canvas))
        return Case("answer", self.pattern, tuple(canvas), len(canvas))

    def __call__(self, logits: Tensor, slots: Any, text: Any) -> None:
        """Compare the allowed tokens of each row, then ban the others."""
        RegularConstraint.__call__(self, logits, slots, text)
        case = self.case(text)
        found = case.completions()
        for row, slot in zip(logits, slots, strict=True):
            if slot - self.begin in case.open_places:
                free = {t for t in range(SIZE) if row[t] > BANNED_LOGIT / 2}
                assert free == allowed(found, slot - self.begin) - {HOLE}

    @staticmethod
    def choose_jointly(asked: Sequence[JointRows], logits: Tensor, tokens: Tensor) -> None:
        """Compare the joint choice, then make it."""
        RegularConstraint.choose_jointly(asked, logits, tokens)
        for own, rows, slots, one in asked:
            own.compare(slots, logits[list(rows)], tokens[list(rows)].tolist(), one)

    def compare(self, slots: Any, logits: Tensor, chosen: list[int], one: Sample) -> None:
        assert one.joint is not None
        rows = {
            slot - self.begin: row
            for slot, row in zip(slots, logits, strict=True)
            if slot < self.limit
        }
        taken = tuple(t for s, t in zip(slots, chosen, strict=True) if s < self.limit)
        if rows:
            best = law(self.case(one.joint.text).completions(), rows)
            assert best[taken] > 0
            if one.sampling.temperature == 0:
                assert best[taken] == pytest.approx(max(best.values()))
            self.num_choices.append(len(rows))


METHODS: list[Method] = [
    Diffusion(),
    Diffusion(steps=3),
    Diffusion(steps=6, block=2, order="random", eps=0.0),
    Diffusion(block=7, steps=6, canvas=True, order="origin"),
    FastDLLM(block=3, threshold=0.3),
    FastDLLM(block=12, cache=None, factor=1.0),
    FastDLLM(block=3, cache="prefix", canvas=True, threshold=0.01),
    D2F(block=3, confidence=0.4),
    D2F(block=1, confidence=0.4),
    D2F(block=3, add=0.3, activate=0.5, confidence=0.3, canvas=True),
    BlockDiffusion(threshold=0.3),
    BlockDiffusion(budget=1.0, part=2, steps=2, canvas=True),
    LeftToRight(tokens=1, window=2, lookahead=3),
    LeftToRight(tokens=3),
    WeDLM(window=3),
    WeDLM(window=4, eager=False, block=True, entropy=1.5),
    WeDLM(window=2, clip=True, confidence=0.3),
]
AT_TEMPERATURES = [
    pytest.param(
        method,
        temperature,
        id=f"{method}-{temperature}",
        marks=[pytest.mark.nightly] * (number % 2 != temperature),
    )
    for number, method in enumerate(METHODS)
    for temperature in (0, 1)
]
"""The short suite has one temperature per method."""


def build_pair(method: Method) -> tuple[Engine, Pairing]:
    """Return an engine with a model with random weights, in the roles of a method."""
    make = {WeDLM: masked_model, BlockDiffusion: block_model}.get(type(method), diffusion_model)
    engine = engine_of(("target", make(seed=3, vocab_size=SIZE, mask_token_id=HOLE)))
    return engine, Pairing.from_runners({"target": runner(engine, "target")})


@pytest.mark.parametrize(("method", "temperature"), AT_TEMPERATURES)
def test_every_choice_of_a_method(method: Method, temperature: float) -> None:
    engine, pairing = build_pair(method)
    jobs = []
    for seed, pattern in enumerate(PATTERNS):
        if language("answer", pattern).automaton.min_tokens <= 6:
            watching = Watching(
                language=language("answer", pattern),
                begin=3,
                limit=9,
                mask_id=HOLE,
                both=not method.is_sequential,
                pattern=pattern,
            )
            job = Job(
                method=method,
                pairing=pairing,
                prompt=[seed % 6, 1, 2],
                max_tokens=6,
                sampling=Sampling(temperature=temperature, seed=seed),
                eos=frozenset({EOS}),
                processors=(watching,),
                constraint=watching,
            )
            jobs.append((pattern, watching, engine.enqueue(engine.prepare_job(job))))
    finish(engine)
    for pattern, _, job in jobs:
        if job.error is not None:
            raise job.error
        ended = (*job.tokens, EOS)[:6]
        assert any(ended == whole[: len(ended)] for whole in contents("answer", pattern, 6))
        assert job.finish_reason == "stop" or isinstance(method, D2F)
    joint = sum(max(watching.num_choices, default=0) > 1 for _, watching, _ in jobs)
    assert joint > 2 or 1 in (getattr(method, name, 0) for name in ("block", "tokens"))


GIVEN = {6: 0, 7: 3, 8: 3, 9: 3, 10: 2, 14: 1}
HOLES = {3: 3, 11: 3, 15: 2}
"""First slots and sizes of the holes; a prompt of three tokens precedes them."""


@pytest.mark.parametrize(("method", "temperature"), AT_TEMPERATURES)
def test_every_method_keeps_the_text_and_fills_each_hole(
    method: Method, temperature: float
) -> None:
    engine, pairing = build_pair(method)
    rng, jobs = Random(4), []
    for seed in range(12):
        chosen = []
        for room in HOLES.values():
            some = [(kind, pattern) for pattern in PATTERNS for kind in ("padded", "hole")]
            chosen.append(rng.choice([each for each in some if contents(*each, room)]))
        holes = [
            language(*each).build_constraint(
                begin=begin, limit=begin + size, mask_id=HOLE, both=not method.is_sequential
            )
            for each, (begin, size) in zip(chosen, HOLES.items(), strict=True)
        ]
        made = InfillConstraint(holes, GIVEN)
        job = Job(
            method=method,
            pairing=pairing,
            prompt=[seed % 6, 1, 2],
            max_tokens=14,
            sampling=Sampling(temperature=temperature, seed=seed),
            eos=frozenset(),
            logprobs=seed % 2 == 0,
            processors=(made,),
            constraint=made,
            fixed_tokens=GIVEN,
            is_infill=True,
        )
        jobs.append((chosen, engine.enqueue(engine.prepare_job(job))))
    finish(engine)
    for chosen, job in jobs:
        if job.error is not None:
            raise job.error
        assert len(job) == 17 and job.finish_reason == "stop"
        assert {slot: job.ids[slot] for slot in GIVEN} == GIVEN
        for each, (begin, size) in zip(chosen, HOLES.items(), strict=True):
            assert tuple(job.ids[begin : begin + size]) in contents(*each, size)
        filled = {slot for step in job.trace for run in step.holes for slot in run}
        assert filled.isdisjoint(GIVEN) and job.trace[0].holes
        assert len(job.scores) == (14 if job.logprobs else 0)


def test_tokens_outside_the_template_are_not_committed() -> None:
    made = Case("hole", "a{3}", (HOLE,) * 3, 3).constraint()
    for tokens, slot in (([0, 0, 0, 5], 5), ([0, 1], 3), ([0, 0, 5, 2], 4)):
        request = Request(prompt=[0, 0], max_tokens=4, constraint=made)
        with pytest.raises(ValueError, match=f"slot {slot} "):
            request.commit(tokens)
    made = Case("hole", "a{2,3}", (HOLE,) * 2, 2).constraint()
    request = Request(
        prompt=[0, 0], max_tokens=3, constraint=made, fixed_tokens={4: 2}, logprobs=True
    )
    assert request.commit([0], [-1.0]) and request.lookahead_ids(5) == [-1, 2]
    assert not request.commit([5], [-2.0])
    assert (request.tokens, request.scores) == ([0, 5, 2], [-1.0, -2.0, 0.0])
    assert request.finish_reason == "stop"


def test_a_hole_that_is_too_long_for_its_regex_is_refused() -> None:
    with pytest.raises(TooLargeError, match="1000000000"):
        language("hole", "a*").automaton.can_finish(10**9)
