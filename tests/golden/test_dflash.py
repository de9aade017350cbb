"""DFlash's decodes, block by block, as its authors' loop makes them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import Tensor

import literal
from helpers import engine_of, enter, finish, runner, tokens
from outpace.checkpoints.load import load_draft, load_model
from outpace.decoding import Request, Sample, Sampling, Target
from outpace.decoding.sampling import GroupReader, Readout
from outpace.methods import Autoregressive, DFlash
from outpace.models.draft import DFlashDraft
from outpace.models.transformer import Transformer

GOLDEN = Path(__file__).parent / "dflash"
PAIRS = ["pair_a", "pair_b"]
Case = dict[str, Any]


def cases(file: str, kind: str) -> list[Any]:
    """What is recorded of both pairs, with a name."""
    return [
        pytest.param(pair, case, id=f"{pair}-{case.get('name', case['temperature'])}")
        for pair in PAIRS
        for case in json.loads((GOLDEN / pair / file).read_text())[kind]
        if kind == "keyed" or not case["temperature"]
    ]


@cache
def models(pair: str) -> dict[str, Transformer | DFlashDraft]:
    target = load_model(GOLDEN / pair / "target")
    return {"target": target, "draft": load_draft(GOLDEN / pair / "draft", target)}


def clipped(lengths: Sequence[int], wanted: int) -> list[int]:
    """Acceptance lengths of the authors' loop, up to the tokens that were wanted."""
    sums = [0, *accumulate(lengths)]
    return [min(end, wanted) - begin for begin, end in pairwise(sums) if begin < wanted]


@pytest.mark.filterwarnings("ignore:block")
@pytest.mark.parametrize(("pair", "case"), cases("cases.json", "cases"))
def test_greedy_decode(pair: str, case: Case) -> None:
    engine = engine_of(*models(pair).items())
    job = enter(
        engine,
        DFlash(draft="", block=case["block_size"], tokens=99),
        case["prompt"],
        runners={name: runner(engine, name) for name in models(pair)},
        max_tokens=case["max_new_tokens"],
        eos=frozenset(case["stop_token_ids"] or ()),
    )
    finish(engine)
    expected = case["output_ids"][len(case["prompt"]) :]
    stopped = expected[-1] in job.eos
    assert tokens(job) == expected[: len(expected) - stopped]
    first, *kept = [step.committed for step in job.trace if step.model == "target"]
    lengths = clipped(case["acceptance_lengths"], len(expected) - 1)
    if stopped and lengths:
        lengths[-1] -= 1  # end-of-sequence is no output here
    assert (first, sum(kept)) == (min(len(job.tokens), 1), sum(lengths))
    # The authors draft a whole block where less is wanted; here it is shortened.
    room = [case["max_new_tokens"] - 1 - before for before in accumulate([0, *lengths[:-1]])]
    whole = sum(left >= case["block_size"] for left in room)
    assert kept[:whole] == lengths[:whole] and whole >= len(lengths) - 2


@dataclass(frozen=True, kw_only=True)
class InverseLaw(Sample):
    """Tokens by the inverse of the cumulated law at a uniform number for each slot."""

    uniforms: tuple[float, ...]

    @classmethod
    def make_reader(
        cls, reads: Sequence[Self], slots: Sequence[Sequence[int]], device: torch.device
    ) -> GroupReader:
        ((own,), (wanted,)) = reads, slots
        numbers = torch.tensor([[own.uniforms[slot]] for slot in wanted], dtype=torch.float64)

        def read(logits: Tensor, rows: slice) -> Readout:
            law = (logits.double() / own.sampling.temperature).softmax(-1).cumsum(-1)
            return Readout((law / law[:, -1:] < numbers[rows]).sum(-1), {})

        return read


@dataclass(slots=True, kw_only=True)
class Keyed(Request):
    uniforms: tuple[float, ...] = ()

    def sample(self, step: int = 0, **options: Any) -> Sample:
        return InverseLaw(sampling=self.sampling, uniforms=self.uniforms)


def request(pair: str, case: Case) -> Keyed:
    draft = models(pair)["draft"].config
    return Keyed(
        prompt=case["prompt"],
        max_tokens=case["max_new_tokens"],
        sampling=Sampling(temperature=case["temperature"]),
        uniforms=tuple(case["uniforms"]),
        target=Target(mask_id=draft.mask_id, block=draft.block),
    )


@pytest.mark.parametrize(("pair", "case"), cases("sampling.json", "keyed"))
def test_sampling_with_numbers_keyed_by_position(pair: str, case: Case) -> None:
    for method in (DFlash(draft=""), Autoregressive()):
        seq = request(pair, case)
        forwards = literal.decode(method, seq, models(pair))
        assert seq.ids == case["output_ids"]
        starts = [f.start for f in forwards if f.model == "target"][1:] + [seq.limit - 1]
        kept = [after - before for before, after in pairwise(starts)]
        lengths = case["acceptance_lengths"] if method.roles else [1] * (seq.max_tokens - 1)
        assert kept == clipped(lengths, seq.max_tokens - 1)


@pytest.mark.parametrize("pair", PAIRS)
def test_drafts_of_every_block(pair: str) -> None:
    (case,) = (c.values[1] for c in cases("cases.json", "cases") if c.id == f"{pair}-len12")
    draft = models(pair)["draft"].config
    target = Target(mask_id=draft.mask_id, block=draft.block)
    seq = Request(prompt=case["prompt"], max_tokens=case["max_new_tokens"], target=target)
    forwards = literal.decode(DFlash(draft=""), seq, models(pair))
    blocks = [(f.start, list(f.ids)) for f in forwards if f.model == "target"][1:]
    expected = [(block["start"], block["verify_ids"]) for block in case["blocks"]]
    assert blocks[:-1] == expected[:-1]
    (start, ids), (theirs, whole) = blocks[-1], expected[-1]
    assert start == theirs and len(ids) == seq.limit - start - 1 <= len(whole)
