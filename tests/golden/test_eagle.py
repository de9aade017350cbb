"""EAGLE-3's decodes, tree by tree, as its authors' loop makes them."""

import json
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from helpers import Recorded, close, engine_of, enter, finish, runner, same_weights, whole
from outpace.checkpoints.load import load_draft, load_model, save_model
from outpace.decoding import Forward, Tree
from outpace.engine.engine import Engine
from outpace.engine.job import Job
from outpace.methods import Eagle
from outpace.models.extending import EagleDraft
from outpace.models.transformer import Transformer

GOLDEN = Path(__file__).parent / "eagle"
PAIRS = ["llama", "qwen3"]
Case = dict[str, Any]
ORDERED = 1e-4
"""Margin from which on the order of nodes is theirs, and not only the tree."""


def cases(*ids: str) -> list[Any]:
    return [
        pytest.param(pair, case, id=f"{pair}-{case['id']}")
        for pair in PAIRS
        for case in json.loads((GOLDEN / pair / "cases.json").read_text())["generate"]
        if not ids or case["id"] in ids
    ]


@cache
def models(pair: str) -> tuple[Transformer, EagleDraft]:
    target = load_model(GOLDEN / pair / "target")
    draft = load_draft(GOLDEN / pair / "draft", target)
    assert isinstance(draft, EagleDraft)
    return target, draft


@cache
def expected(pair: str) -> dict[str, Tensor]:
    return load_file(GOLDEN / pair / "expected.safetensors")


@cache
def engine_of_pair(pair: str) -> Engine:
    target, draft = models(pair)
    return engine_of(("target", target), ("draft", draft))


def decoded(pair: str, case: Case, **options: Any) -> tuple[Recorded, Job]:
    """Decode a case with further tokens after it, so that its last tree is whole."""
    given, engine = case["params"], engine_of_pair(pair)
    shape = {"width": given["top_k"], "depth": given["depth"], "nodes": given["total_token"]}
    method = Recorded(method=Eagle(draft="", **shape, **options))
    job = enter(
        engine,
        method,
        case["input_ids"],
        runners={name: runner(engine, name) for name in ("target", "draft")},
        max_tokens=case["new_tokens"] + given["depth"] + 3,
        eos=frozenset([given["eos_token_id"]]),
    )
    finish(engine)
    return method, job


def hung(forward: Forward, rows: int) -> list[int]:
    if not isinstance(forward.pattern, Tree):
        return list(range(-1, rows - 1))
    return [own.bit_length() - 1 for own in forward.pattern.ancestor_masks]


def paths(tokens: Sequence[int], parents: Sequence[int]) -> set[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return set(found)


@pytest.mark.parametrize(("pair", "case"), cases())
def test_greedy_decode(pair: str, case: Case) -> None:
    method, job = decoded(pair, case)
    assert job.error is None
    output = case["output_ids"][case["prompt_length"] :]
    if (eos := case["params"]["eos_token_id"]) in output:
        output = output[: output.index(eos)]
        assert job.tokens == output and job.finish_reason == "stop"
    assert job.tokens[: len(output)] == output
    checks = [forward for forward in method.forwards if forward.model == "target"][1:]
    # Where the last root ends the text, they verify a tree behind it; here it has ended.
    ended = case["trace"][-1]["accepted"][0] == eos
    assert len(checks) == case["steps"] - ended or eos < 0
    lengths = [forward.predicted_slots()[0] for forward in checks[: case["steps"] + 1]]
    kept = [after - before - 1 for before, after in pairwise(lengths)]
    assert kept == case["accept_lengths"][: len(kept)]
    assert len(kept) == case["steps"] - (1 + ended if eos >= 0 else 0)
    for forward, step in zip(checks, case["trace"], strict=False):
        theirs = step["draft_tokens"], step["parents"]
        rows = len(theirs[0])
        ours = list(forward.ids[-rows:]), hung(forward, rows)
        assert paths(*ours) == paths(*theirs)
        assert step["order_margin"] < ORDERED or ours == theirs
        assert len(forward.predicted_slots()) == rows

    if case["params"]["top_k"] > 1:
        compare_first_draft(pair, case, method)
    if case["id"] in ("chain_d5", "tree_k10_t60_d7"):
        (_, prefill), (_, first), *_ = method.turns
        golden, name = expected(pair), case["id"]
        logits = whole(models(pair)[0], case["input_ids"], causal=True)
        close(logits, golden[f"prefill_target_logits_{name}"])
        assert prefill.features is not None and first.features is not None
        close(prefill.features, golden[f"prefill_features_{name}"])
        close(first.features, golden[f"prefill_draft_hidden_{name}"])


@pytest.mark.parametrize(
    ("pair", "case"), [each for each in cases() if each.values[1]["params"]["top_k"] == 1]
)
def test_drafts_of_the_first_chain(pair: str, case: Case) -> None:
    method, _ = decoded(pair, case, verify="rejection")
    compare_first_draft(pair, case, method)


def compare_first_draft(pair: str, case: Case, method: Recorded) -> None:
    second = [i for i, forward in enumerate(method.forwards) if forward.model == "target"][1]
    levels = [out.logits for _, out in method.turns[1:second]]
    assert len(levels) == min(case["params"]["depth"] + 1, case["params"]["total_token"] - 1)
    ours = torch.cat([level for level in levels if level is not None])
    head_tokens = models(pair)[1].head_tokens
    assert head_tokens is not None and bool((ours.sum(-1) < -1e30).all())
    close(ours[:, head_tokens], expected(pair)[f"first_draft_logits_{case['id']}"][: len(ours)])


@pytest.mark.parametrize("pair", PAIRS)
def test_saved_draft_loads_as_it_was(pair: str, tmp_path: Path) -> None:
    target, _ = models(pair)
    draft = load_draft(GOLDEN / pair / "draft", target)
    save_model(draft, tmp_path, dtype=torch.float32)
    same_weights(tmp_path, GOLDEN / pair / "draft")
    assert load_draft(tmp_path, target).config == draft.config
    assert draft.config.feature_layers == (1, 3, 4)
