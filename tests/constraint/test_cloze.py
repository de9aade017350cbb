"""Compare the holes of a template with enumeration: allowed tokens, best tokens and samples."""

from __future__ import annotations

import re
from functools import cache
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from enumeration import EOS, HOLE, PATTERNS, SIZE, TEXTS, allowed, law, random_logits
from helpers import (
    block_model,
    chi_square,
    diffusion_model,
    engine_of,
    finish,
    masked_model,
    runner,
)
from outpace.constraint.automaton import TokenAutomaton
from outpace.constraint.cloze import InfillConstraint
from outpace.constraint.dfa import Dfa
from outpace.constraint.pattern import TooLargeError
from outpace.constraint.regular import TokenLanguage
from outpace.constraint.vocabulary import Vocabulary
from outpace.constraint.whole import HoleAutomaton, PaddedHoleAutomaton
from outpace.decoding import Request, Sampling
from outpace.decoding.joint import Joint
from outpace.decoding.processor import BANNED_LOGIT
from outpace.decoding.sampling import Sample
from outpace.engine.job import Job
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
Case = tuple[str, bool, list[int]]
"""A pattern, whether the remaining slots are padded, and the slots of the hole."""


@cache
def language(pattern: str, padded: bool) -> TokenLanguage:
    """Return the language of a hole, over the tokens of the enumeration."""
    texts = [text.encode() for text in TEXTS] + [None, None]
    kind: type[TokenAutomaton] = PaddedHoleAutomaton if padded else HoleAutomaton
    return TokenLanguage(kind(Dfa.from_pattern(pattern), Vocabulary(texts), frozenset({EOS})))


@cache
def contents(pattern: str, padded: bool, room: int) -> list[tuple[int, ...]]:
    """Return all contents of a hole of this many slots."""
    match = re.compile(pattern).fullmatch
    return [
        (*tokens, *[EOS] * (room - count))
        for count in (range(room + 1) if padded else [room])
        for tokens in product(range(len(TEXTS)), repeat=count)
        if match("".join(TEXTS[token] for token in tokens))
    ]


def completions(case: Case) -> list[tuple[int, ...]]:
    """Return the completions of a partly filled hole."""
    pattern, padded, canvas = case
    return [
        whole
        for whole in contents(pattern, padded, len(canvas))
        if all(known in (HOLE, token) for known, token in zip(canvas, whole, strict=True))
    ]


def cloze(case: Case, *, both: bool = True) -> InfillConstraint:
    """Return one hole after two tokens and before another one."""
    pattern, padded, canvas = case
    end = BEGIN + len(canvas)
    hole = language(pattern, padded).build_constraint(
        begin=BEGIN, limit=end, mask_id=HOLE, both=both
    )
    return InfillConstraint([hole], {end: 2})


def cases(count: int, seed: int) -> list[Case]:
    """Generate holes of up to five slots, some of them filled."""
    rng, found = Random(seed), list[Case]()
    while len(found) < count:
        pattern, padded, room = rng.choice(PATTERNS), rng.random() < 0.5, rng.randint(1, 5)
        if whole := contents(pattern, padded, room):
            canvas = [HOLE if rng.random() < 0.6 else token for token in rng.choice(whole)]
            found.append((pattern, padded, canvas))
    return found


def places_of(case: Case) -> list[int]:
    """Return the places of unfilled slots."""
    return [place for place, token in enumerate(case[2]) if token == HOLE]


def free(made: InfillConstraint, text: list[int], slot: int) -> set[int]:
    """Return the tokens that are not banned in a slot."""
    row = torch.zeros(1, SIZE)
    made(row, [slot], text)
    return {token for token in range(SIZE) if row[0, token] > BANNED_LOGIT / 2}


@pytest.mark.parametrize("case", cases(120, seed=0), ids=str)
def test_allowed_tokens_of_a_slot(case: Case) -> None:
    text = [0] * BEGIN + case[2] + [2]
    for place in places_of(case):
        assert free(cloze(case), text, BEGIN + place) == allowed(completions(case), place)
    assert free(cloze(case), text, BEGIN + len(case[2])) == {2}


@pytest.mark.parametrize("case", cases(80, seed=1), ids=str)
def test_allowed_tokens_from_left_to_right(case: Case) -> None:
    pattern, padded, canvas = case
    text = [0] * BEGIN + canvas + [2]
    for place in range(len(canvas)):
        front = (pattern, padded, [*canvas[:place], *[HOLE] * (len(canvas) - place)])
        found = free(cloze(case, both=False), text, BEGIN + place)
        assert found == allowed(completions(front), place)


def filled(case: Case, places: list[int], logits: Tensor, **sampling: Any) -> tuple[int, ...]:
    """Return the joint tokens of some slots of a hole."""
    made, text = cloze(case), [0] * BEGIN + case[2] + [2]
    slots = [BEGIN + place for place in places]
    read = Sample(sampling=Sampling(**sampling), joint=Joint(made, text))
    reader = Sample.make_reader([read], [slots], torch.device("cpu"))
    logits = logits.clone()
    made(logits, slots, text)
    return tuple(reader(logits, slice(0, len(slots))).tokens.tolist())


@pytest.mark.parametrize("case", cases(120, seed=2), ids=str)
def test_greedy_slots_take_the_most_probable_contents(case: Case) -> None:
    rng = Random(len(case[2]))
    holes = places_of(case)
    if not holes:
        return
    places = holes[: rng.randint(1, len(holes))]
    logits = random_logits(len(places), seed=len(case[0]))
    best = law(completions(case), dict(zip(places, logits, strict=True)))
    assert best[filled(case, places, logits)] == pytest.approx(max(best.values()))


DRAWN: list[Case] = [
    ("(a|b)*abb", False, [HOLE] * 4),
    ("(ab)*c?", True, [HOLE] * 4),
    ("a{3}|b{5}", True, [HOLE] * 5),
    ("[ab]{2,4}", False, [HOLE, 1, HOLE]),
]


@pytest.mark.parametrize("case", DRAWN, ids=str)
def test_samples_have_the_exact_distribution(case: Case) -> None:
    places = places_of(case)
    logits = random_logits(len(places), seed=5)
    expected = law(completions(case), dict(zip(places, logits / 0.9, strict=True)))
    names = {filling: number for number, filling in enumerate(expected)}
    found = [names[filled(case, places, logits, temperature=0.9, seed=n)] for n in range(1500)]
    drawn = chi_square(torch.tensor(found), torch.tensor([*expected.values()]))
    assert drawn > LIKELY


METHODS: list[Method] = [
    Diffusion(),
    Diffusion(steps=3),
    Diffusion(steps=10, block=3, order="random", eps=0.0),
    Diffusion(block=7, steps=6, canvas=True, order="origin"),
    FastDLLM(block=4, threshold=0.3),
    FastDLLM(block=12, cache=None, factor=1.0),
    FastDLLM(block=5, cache="prefix", threshold=0.01),
    D2F(block=3, confidence=0.4),
    D2F(block=1, confidence=0.4),
    D2F(block=2, add=0.0, activate=0.5, confidence=0.3),
    BlockDiffusion(threshold=0.3),
    BlockDiffusion(budget=1.0, part=2, steps=2, canvas=True),
    LeftToRight(tokens=1, window=2, lookahead=3),
    LeftToRight(tokens=4),
    WeDLM(window=3),
    WeDLM(window=2, eager=False, block=True, entropy=1.5),
    WeDLM(window=4, clip=True, confidence=0.3),
]
GIVEN = {6: 0, 7: 3, 8: 3, 9: 3, 10: 2, 14: 1}
HOLES = {3: 3, 11: 3, 15: 2}
"""First slots and sizes of the holes; a prompt of three tokens precedes them."""


def jobs_of(method: Method, temperature: float) -> list[tuple[tuple[Case, ...], Job]]:
    """Decode templates of three holes together, by a model with random weights."""
    make = {WeDLM: masked_model, BlockDiffusion: block_model}.get(type(method), diffusion_model)
    engine = engine_of(("target", make(seed=3, vocab_size=SIZE, mask_token_id=HOLE)))
    pairing = Pairing.from_runners({"target": runner(engine, "target")})
    rng, jobs = Random(4), []
    for seed in range(12):
        chosen: list[Case] = []
        for room in HOLES.values():
            some = [(p, padded) for p in PATTERNS for padded in (True, False)]
            pattern, padded = rng.choice([each for each in some if contents(*each, room)])
            chosen.append((pattern, padded, [HOLE] * room))
        holes = [
            language(case[0], case[1]).build_constraint(
                begin=begin, limit=begin + size, mask_id=HOLE, both=not method.is_sequential
            )
            for case, (begin, size) in zip(chosen, HOLES.items(), strict=True)
        ]
        made = InfillConstraint(holes, GIVEN)
        request = pairing.make_request(
            [seed % 6, 1, 2],
            max_tokens=14,
            sampling=Sampling(temperature=temperature, seed=seed),
            eos=frozenset(),
            logprobs=seed % 2 == 0,
            processors=(made,),
            constraint=made,
            fixed_tokens=GIVEN,
        )
        jobs.append((tuple(chosen), engine.enqueue(engine.make_job(method, request, pairing))))
    finish(engine)
    return jobs


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_every_method_keeps_the_text_and_fills_each_hole(
    method: Method, temperature: float
) -> None:
    for chosen, job in jobs_of(method, temperature):
        if job.error is not None:
            raise job.error
        request = job.request
        assert len(request) == 17 and request.finish_reason == "stop"
        assert {slot: request.ids[slot] for slot in GIVEN} == GIVEN
        for case, (begin, size) in zip(chosen, HOLES.items(), strict=True):
            assert tuple(request.ids[begin : begin + size]) in contents(case[0], case[1], size)
        shown = {slot for step in request.trace for run in step.holes for slot in run}
        assert shown.isdisjoint(GIVEN) and request.trace[0].holes
        assert len(request.scores) == (14 if request.logprobs else 0)


def test_tokens_outside_the_template_are_not_committed() -> None:
    for tokens, slot in (([0, 0, 0, 5], 5), ([0, 1], 3), ([0, 0, 5, 2], 4)):
        made = cloze(("a{3}", False, [HOLE] * 3))
        request = Request(prompt=[0, 0], max_tokens=4, constraint=made)
        with pytest.raises(ValueError, match=f"at slot {slot} violates the infill template"):
            request.commit(tokens)
    made = cloze(("a{2,3}", False, [HOLE] * 2))
    request = Request(
        prompt=[0, 0], max_tokens=3, constraint=made, fixed_tokens={4: 2}, logprobs=True
    )
    assert request.commit([0], [-1.0]) and request.lookahead_ids(5) == [-1, 2]
    assert not request.commit([5], [-2.0])
    assert (request.tokens, request.scores) == ([0, 5, 2], [-1.0, -2.0, 0.0])
    assert request.finish_reason == "stop"


@pytest.mark.parametrize("case", cases(80, seed=6), ids=str)
def test_forced_tokens_are_in_all_contents_of_the_hole(case: Case) -> None:
    pattern, padded, canvas = case
    made = cloze((pattern, padded, [HOLE] * len(canvas)), both=False)
    whole = contents(pattern, padded, len(canvas))
    for filling in whole[:3]:
        for known in range(len(canvas)):
            behind = {each[known:] for each in whole if each[:known] == filling[:known]}
            forced = tuple(made.forced_tokens([0] * BEGIN + list(filling[:known])))
            assert all(each[: len(forced)] == forced for each in behind) and EOS not in forced
            alone = {each[0] for each in behind}
            assert forced or len(alone) > 1 or alone == {EOS} or known == len(canvas) - 1
    assert made.forced_tokens([0] * (BEGIN + len(canvas) + 1)) == []


def test_a_hole_that_is_too_long_for_its_regex_is_refused() -> None:
    with pytest.raises(TooLargeError, match="too large for 1000000000 tokens"):
        language("a*", False).automaton.can_finish(10**9)
