"""Compare constrained holes with enumeration: allowed tokens, best tokens and samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from enumeration import (
    EOS,
    HOLE,
    PATTERNS,
    SIZE,
    allowed,
    completions,
    language,
    law,
    random_logits,
)
from helpers import (
    block_model,
    chi_square,
    diffusion_model,
    engine_of,
    finish,
    masked_model,
    runner,
)
from outpace.constraint import reach
from outpace.constraint.regular import RegularConstraint
from outpace.decoding import Sampling
from outpace.decoding.joint import Joint, JointRows
from outpace.decoding.processor import BANNED_LOGIT
from outpace.decoding.sampling import Sample
from outpace.engine.pairing import Pairing
from outpace.methods import (
    D2F,
    BlockDiffusion,
    Diffusion,
    FastDLLM,
    LeftToRight,
    Method,
    WeDLM,
)

BEGIN = 2
LIKELY = 1e-4


def constraint(pattern: str, room: int, *, both: bool = True) -> RegularConstraint:
    """Return the constraint of an answer after a prompt of two tokens."""
    made = language(pattern).build_constraint(
        begin=BEGIN, limit=BEGIN + room, mask_id=HOLE, both=both
    )
    return made


def canvases(count: int, seed: int) -> list[tuple[str, list[int], int]]:
    """Generate patterns with canvases of up to six places that have a completion."""
    rng, found = Random(seed), []
    while len(found) < count:
        pattern, room = rng.choice(PATTERNS), rng.randint(1, 6)
        whole = [*completions(pattern, [HOLE] * room, room)]
        if not whole:
            continue
        answer = [rng.randrange(SIZE - 1) if t is None else t for t in rng.choice(whole)]
        canvas = [HOLE if rng.random() < 0.6 else token for token in answer]
        found.append((pattern, canvas[: rng.randint(1, room)], room))
    return found


def holes_of(canvas: list[int]) -> list[int]:
    """Return the places of the holes."""
    return [place for place, token in enumerate(canvas) if token == HOLE]


def read(made: RegularConstraint, canvas: list[int], **sampling: Any) -> Sample:
    """Return a read of holes of a canvas after a prompt."""
    joint = Joint(made, [0] * BEGIN + canvas)
    return Sample(sampling=Sampling(**sampling), joint=joint)


def filled(
    made: RegularConstraint, canvas: list[int], places: list[int], logits: Tensor, **sampling: Any
) -> list[int]:
    """Return the joint tokens of some holes."""
    slots = [BEGIN + place for place in places]
    one = read(made, canvas, **sampling)
    reader = Sample.make_reader([one], [slots], torch.device("cpu"))
    logits = logits.clone()
    made(logits, slots, [0] * BEGIN + canvas)
    return reader(logits, slice(0, len(slots))).tokens.tolist()


@pytest.mark.parametrize(("pattern", "canvas", "room"), canvases(150, seed=0))
def test_allowed_tokens_of_a_hole(pattern: str, canvas: list[int], room: int) -> None:
    found = [*completions(pattern, canvas, room)]
    for place in holes_of(canvas):
        row = torch.zeros(1, SIZE)
        constraint(pattern, room)(row, [BEGIN + place], [0] * BEGIN + canvas)
        assert {t for t in range(SIZE) if row[0, t] == 0} == allowed(found, place)


@pytest.mark.parametrize(("pattern", "canvas", "room"), canvases(100, seed=1))
def test_allowed_tokens_from_left_to_right(pattern: str, canvas: list[int], room: int) -> None:
    for place in range(len(canvas)):
        found = [*completions(pattern, [*canvas[:place], HOLE], room)] if place < room else []
        row = torch.zeros(1, SIZE)
        made = constraint(pattern, room, both=False)
        made(row, [BEGIN + place], [0] * BEGIN + canvas)
        assert {t for t in range(SIZE) if row[0, t] == 0} == allowed(found, place)


@pytest.mark.parametrize(("pattern", "canvas", "room"), canvases(150, seed=2))
def test_greedy_holes_take_the_most_probable_completion(
    pattern: str, canvas: list[int], room: int
) -> None:
    rng = Random(len(canvas))
    holes = holes_of(canvas)
    places = holes[: rng.randint(1, len(holes))] if holes else []
    if not places:
        return
    logits = random_logits(len(places), seed=room)
    found = [*completions(pattern, canvas, room)]
    best = law(found, dict(zip(places, logits, strict=True)))
    tokens = tuple(filled(constraint(pattern, room), canvas, places, logits))
    assert best[tokens] == pytest.approx(max(best.values()))


DRAWN = [
    ("(a|b)*abb", [HOLE] * 5, 6),
    ("a{3}|b{5}", [HOLE] * 5, 5),
    ("(abc|bca){1,2}", [HOLE, HOLE, 2, HOLE], 6),
    ("(ab)*c?", [HOLE] * 4, 4),
    ("|a|ab|abc|b", [HOLE] * 4, 5),
    ("(a|bb)[ab]c(b|ca)c", [HOLE, HOLE, 2, HOLE, HOLE], 5),
]


def drawn_as_enumerated(
    pattern: str, canvas: list[int], room: int, draws: int, **sampling: Any
) -> float:
    """Return the chi-square statistic of samples against the enumerated distribution."""
    places = holes_of(canvas)
    logits = random_logits(len(places), seed=5)
    expected = law(
        [*completions(pattern, canvas, room)],
        dict(zip(places, logits / sampling["temperature"], strict=True)),
    )
    names = {filling: number for number, filling in enumerate(expected)}
    made = constraint(pattern, room)
    found = [
        names[tuple(filled(made, canvas, places, logits, seed=seed, **sampling))]
        for seed in range(draws)
    ]
    return chi_square(torch.tensor(found), torch.tensor([*expected.values()]))


@pytest.mark.parametrize(("pattern", "canvas", "room"), DRAWN)
def test_samples_have_the_exact_distribution(pattern: str, canvas: list[int], room: int) -> None:
    assert drawn_as_enumerated(pattern, canvas, room, 1500, temperature=0.9) > LIKELY


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("pattern", "canvas", "room", "temperature"),
    [(*drawn, (0.7, 1.5)[n % 2]) for n, drawn in enumerate(DRAWN)],
)
def test_many_samples_have_the_exact_distribution(
    pattern: str, canvas: list[int], room: int, temperature: float
) -> None:
    found = drawn_as_enumerated(pattern, canvas, room, 20_000, temperature=temperature)
    assert found > LIKELY


@pytest.mark.parametrize("sampling", [{"top_p": 0.05}, {"top_k": 1}, {"min_p": 1.0}])
def test_truncation_may_leave_nothing_that_fits(sampling: dict[str, Any]) -> None:
    logits = torch.zeros(2, SIZE)
    logits[0, 0], logits[1, 1] = 5, 5
    for seed in range(30):
        tokens = filled(
            constraint("aa|bb", 2), [HOLE] * 2, [0, 1], logits, temperature=1, seed=seed, **sampling
        )
        assert tokens in ([0, 0], [1, 1], [5, EOS])
        tokens = filled(
            constraint("ab|ba", 2), [HOLE] * 2, [0, 1], logits, temperature=1, seed=seed, **sampling
        )
        assert tokens == [0, 1]


@pytest.mark.parametrize(("pattern", "canvas", "room"), canvases(60, seed=3))
def test_forced_tokens_are_in_all_answers(pattern: str, canvas: list[int], room: int) -> None:
    front = canvas[: (holes_of(canvas) or [len(canvas)])[0]]
    found = constraint(pattern, room).forced_tokens([0] * BEGIN + front)
    for token in [*found, None]:
        if EOS in front or len(front) == room:
            assert token is None
            return
        may = allowed([*completions(pattern, [*front, HOLE], room)], len(front))
        if token is not None:
            assert may == {token}
            front = [*front, token]
    assert len(may) > 1 or may == {EOS} or len(front) == room - 1


def test_cleared_sets_are_rebuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "MAX_SET_BYTES", 200)
    for case in canvases(20, seed=4):
        test_allowed_tokens_of_a_hole(*case)
        test_greedy_holes_take_the_most_probable_completion(*case)


@dataclass(slots=True, eq=False, kw_only=True)
class Watching(RegularConstraint):
    """Compares each choice with enumeration."""

    pattern: str
    checked: list[int] = field(default_factory=list)

    def __call__(self, logits: Tensor, slots: Any, text: Any) -> None:
        """Compare the allowed tokens of each row, then ban the others."""
        RegularConstraint.__call__(self, logits, slots, text)
        canvas = [*text[self.begin : self.limit]]
        canvas += [HOLE] * (self.limit - self.begin - len(canvas))
        found = [*completions(self.pattern, canvas, self.limit - self.begin)]
        for row, slot in zip(logits, slots, strict=True):
            if slot < self.limit and canvas[slot - self.begin] == HOLE:
                free = {t for t in range(SIZE) if row[t] > BANNED_LOGIT / 2}
                assert free == allowed(found, slot - self.begin) - {HOLE}

    @staticmethod
    def choose_jointly(asked: Sequence[JointRows], logits: Tensor, tokens: Tensor) -> None:
        """Compare the joint choice, then make it."""
        RegularConstraint.choose_jointly(asked, logits, tokens)
        for own, rows, slots, one in asked:
            own.compare(slots, logits[list(rows)], tokens[list(rows)].tolist(), one)

    def compare(self, slots: Any, logits: Tensor, chosen: list[int], one: Sample) -> None:
        """Compare one choice with all completions."""
        assert one.joint is not None
        canvas = [*one.joint.text[self.begin : self.limit]]
        canvas += [HOLE] * (self.limit - self.begin - len(canvas))
        rows = {slot - self.begin: row for slot, row in zip(slots, logits, strict=True)}
        inside = {place: row for place, row in rows.items() if place < len(canvas)}
        taken = tuple(t for s, t in zip(slots, chosen, strict=True) if s < self.limit)
        if inside:
            best = law([*completions(self.pattern, canvas, len(canvas))], inside)
            assert best[taken] > 0
            if one.sampling.temperature == 0:
                assert best[taken] == pytest.approx(max(best.values()))
            self.checked.append(len(inside))


METHODS: list[Method] = [
    Diffusion(),
    Diffusion(steps=3),
    Diffusion(steps=6, block=2, order="random", eps=0.0),
    Diffusion(steps=4, canvas=True),
    FastDLLM(block=3, threshold=0.3),
    FastDLLM(block=6, cache=None, factor=1.0),
    FastDLLM(block=3, cache="prefix", canvas=True, threshold=0.01),
    D2F(block=2, confidence=0.4),
    D2F(block=3, add=0.3, activate=0.5, confidence=0.3, canvas=True),
    BlockDiffusion(threshold=0.3),
    BlockDiffusion(budget=1.0, part=2, steps=2, canvas=True),
    LeftToRight(tokens=3),
    WeDLM(window=3),
    WeDLM(window=4, eager=False, block=True, entropy=1.5),
    WeDLM(window=2, clip=True, confidence=0.3),
]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_every_choice_of_a_method(method: Method, temperature: float) -> None:
    make = {WeDLM: masked_model, BlockDiffusion: block_model}.get(type(method), diffusion_model)
    engine = engine_of(("target", make(seed=3, vocab_size=SIZE, mask_token_id=HOLE)))
    pairing = Pairing.from_runners({"target": runner(engine, "target")})
    jobs = []
    for seed, pattern in enumerate(PATTERNS):
        if language(pattern).automaton.min_tokens <= 6:
            watching = Watching(
                language=language(pattern),
                begin=3,
                limit=9,
                mask_id=HOLE,
                both=not method.is_sequential,
                pattern=pattern,
            )
            request = pairing.make_request(
                [seed % 6, 1, 2],
                max_tokens=6,
                sampling=Sampling(temperature=temperature, seed=seed),
                eos=frozenset({EOS}),
                processors=(watching,),
                constraint=watching,
            )
            job = engine.enqueue(engine.make_job(method, request, pairing))
            jobs.append((pattern, watching, job))
    finish(engine)
    for pattern, _, job in jobs:
        if job.error is not None:
            raise job.error
        ended = (*job.request.tokens, EOS)[:6]
        assert any(ended == whole[: len(ended)] for whole in completions(pattern, [HOLE] * 6, 6))
        assert job.request.finish_reason == "stop" or isinstance(method, D2F)
    assert sum(max(watching.checked, default=0) > 1 for _, watching, _ in jobs) > 2
