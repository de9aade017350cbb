"""Adaptive parallel decoding beside its authors' code, on the same random weights.

A Dream model of 512 x 8 layers (8192 tokens) and a verifier of 256 x 4 layers, prompt of 64
tokens, 128 new ones, float32, ratio 0.7, batch 1. The authors' code is imported from a clone of
danielmisrael/apd and needs the version of transformers that the clone pins; both run in one
process and take turns. Reported are CPU milliseconds per iteration (a pass of the diffusion model
and what follows it).

Random models agree on little, so the speed is measured with the number of accepted tokens set
to 5 on both sides, after all the work of deciding it. At temperature 0.2 both sides sample with
top-p 0.95 and top-k 50. The authors divide by the temperature twice, filter by top-p over the
sorted vocabulary and then by top-k, draw float64 noise for every proposal, and compare with the
arg-max of the mixed raw logits. Here top-k comes before top-p and nothing is sorted;
coupling="argmax" compares as the authors' code does, coupling="gumbel" (the default) applies
temperature, filters and noise to the mixture as well, which is more work. At temperature 0
nothing is sampled (their hidden top-k 50 still runs), and runs with free acceptance are timed
too, after asserting that both sides give the same tokens in the same number of iterations.

    python benchmarks/apd_official.py --official apd --json benchmarks/results/apd_official.json
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM

from checkpoints import SMALL_AUX, SMALL_DREAM, load, prompt, silenced, write
from harness import Bar, imported
from official import Decode, Measured, allow_loading, compare, ours, parser_for, run_comparison
from outpace.api.options import Options
from outpace.decoding import agreement
from outpace.methods import APD

RATIO, TOP_P, TOP_K = 0.7, 0.95, 50
ACCEPTED = 5
WINDOWS = ((16, 32), (16, 100), (None, None))
LIMITS = {0.2: 0.7, 0.0: 0.85}


class Official:
    """The authors' code on a target and a verifier."""

    def __init__(self, module: Any, target: Path, verifier: Path) -> None:
        allow_loading(target)
        self.module = module
        dream = importlib.import_module("dream.modeling_dream").DreamModel
        self.target = dream.from_pretrained(target, attn_implementation="sdpa").float().eval()
        self.verifier = AutoModelForCausalLM.from_pretrained(
            verifier, attn_implementation="sdpa", dtype=torch.float32
        ).eval()

    def run(self, tokens: int, temperature: float, **window: int | None) -> Decode:
        """A decode with `kv_window` and `max_lookahead`."""

        def decode(ids: list[int]) -> tuple[list[int], int]:
            torch.manual_seed(0)
            out = self.target.diffusion_generate(
                torch.tensor([ids]),
                max_new_tokens=tokens,
                temperature=temperature,
                top_p=TOP_P if temperature else None,
                top_k=TOP_K,
                alg="apd",
                verifier_model=self.verifier,
                apd_mixture_weight=RATIO,
                return_dict_in_generate=True,
                **window,
            )
            return out.sequences[0, len(ids) :].tolist(), out.profile.num_forward_evals

        return decode


def filters(temperature: float) -> Options:
    """Options of `generate` as the authors filter."""
    if not temperature:
        return Options(temperature=0.0, top_p=1.0, top_k=None)
    return Options(temperature=temperature, top_p=TOP_P, top_k=TOP_K)


@contextmanager
def forced(official: Official, accepted: int) -> Iterator[None]:
    """Let both sides accept a fixed number of tokens, whatever they decide."""
    criterion = official.module.apd_accept_criterion

    def accept(*given: Any) -> torch.Tensor:
        decided: torch.Tensor = criterion(*given)
        fixed = torch.zeros_like(decided)
        fixed[:, :accepted] = 1
        return fixed

    def agree(drafted: Sequence[int], tokens: Sequence[int]) -> int:
        agreement(drafted, tokens)
        return min(accepted - 1, len(drafted))

    with (
        patch.object(official.module, "apd_accept_criterion", accept),
        patch("outpace.methods.apd.agreement", agree),
    ):
        yield


def label(window: int | None, lookahead: int | None) -> str:
    """Name of a setting."""
    return "no W, no M" if window is None else f"W {window}, M {lookahead}"


def measure(options: argparse.Namespace, module: Any, folder: Path) -> Measured:
    """All settings with forced acceptance, then greedily with free acceptance."""
    target = write(folder / "target", SMALL_DREAM, mute=silenced(SMALL_DREAM))
    verifier = str(write(folder / "verifier", SMALL_AUX, seed=1))
    official, llm = Official(module, target, Path(verifier)), load(target, APD(verifier=verifier))
    ids = [prompt(64, llm.config.vocab)]
    speed, free, bars = [], [], []
    for (window, lookahead), (temperature, limit) in product(WINDOWS, LIMITS.items()):
        where = {"setting": label(window, lookahead), "temperature": temperature}
        limits = {"kv_window": window, "max_lookahead": lookahead}
        decodes = {"official": official.run(options.tokens, temperature, **limits)}
        for coupling in ("gumbel", "argmax") if temperature else ("gumbel",):
            method = APD(
                verifier=verifier,
                ratio=RATIO,
                window=window,
                lookahead=lookahead,
                coupling=coupling,
            )
            name = f"ours, {coupling}" if temperature else "ours"
            decodes[name] = ours(llm, method, options.tokens, options=filters(temperature))
        with forced(official, ACCEPTED):
            rows = compare(where, decodes, ids, options.rounds, "iteration")
        assert len({row["iterations"] for row in rows}) == 1, "iterations differ"
        speed += rows
        for row in rows[1:]:
            what = f"{where['setting']}, temperature {temperature}: {row['side']}"
            bars.append(Bar(what=what, value=row["CPU ratio"], limit=limit))
        if not temperature:
            rounds = max(options.rounds // 3, 1)
            free += compare(where, decodes, ids, rounds, "iteration", same=["ours"])
    return {"forced": speed, "free": free}, bars


def main() -> None:
    """Measure all settings."""
    repository = "danielmisrael/apd"
    run_comparison(
        parser_for(__doc__, repository, rounds=9),
        lambda clone: imported(clone, "dream.generation_utils", repository),
        measure,
        {
            "forced": f"{ACCEPTED} accepted tokens per iteration",
            "free": "free acceptance, same tokens",
        },
    )


if __name__ == "__main__":
    main()
