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
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM

from checkpoints import SMALL_AUX, SMALL_DREAM, load, prompt, silenced, write
from harness import Bar, Row, alternate, arguments, costs, finish, imported, prepare, show
from outpace import LLM
from outpace.decoding import agreement
from outpace.methods import APD

RATIO, TOP_P, TOP_K = 0.7, 0.95, 50
ACCEPTED = 5
WINDOWS = ((16, 32), (16, 100), (None, None))
LIMITS = {0.2: 0.7, 0.0: 0.85}

Run = Callable[[], tuple[list[int], int]]
"""New tokens and number of iterations of a decode."""


class Official:
    """The authors' code on a target and a verifier."""

    def __init__(self, module: Any, target: Path, verifier: Path) -> None:
        (target / "generation_config.json").write_text("{}")  # their loading asks for one
        self.module = module
        dream = importlib.import_module("dream.modeling_dream").DreamModel
        self.target = dream.from_pretrained(target, attn_implementation="sdpa").float().eval()
        self.verifier = AutoModelForCausalLM.from_pretrained(
            verifier, attn_implementation="sdpa", dtype=torch.float32
        ).eval()

    def run(self, ids: list[int], tokens: int, temperature: float, **window: int | None) -> Run:
        """A decode with `kv_window` and `max_lookahead`."""

        def decode() -> tuple[list[int], int]:
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


def ours(llm: LLM, method: APD, ids: list[int], tokens: int, temperature: float) -> Run:
    """The same decode here."""

    def decode() -> tuple[list[int], int]:
        output = llm.generate(
            ids,
            method=method,
            max_tokens=tokens,
            temperature=temperature,
            top_p=TOP_P if temperature else 1.0,
            top_k=TOP_K if temperature else None,
        )[0]
        return output.ids, output.forwards

    return decode


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


def compare(sides: dict[str, Run], rounds: int) -> list[Row]:
    """Milliseconds per iteration of each side, and its ratio to the first one."""
    iterations = {name: run()[1] for name, run in sides.items()}
    sums = costs(alternate(sides, rounds), iterations, "iteration")
    return [{"side": name, **row} for name, row in sums.items()]


def label(window: int | None, lookahead: int | None) -> str:
    """Name of a setting."""
    return "no W, no M" if window is None else f"W {window}, M {lookahead}"


def measure(
    official: Official, llm: LLM, verifier: str, options: argparse.Namespace
) -> tuple[dict[str, list[Row]], list[Bar]]:
    """All settings with forced acceptance, then greedily with free acceptance."""
    ids = prompt(64, llm.config.vocab)
    speed, free, bars = [], [], []
    for window, lookahead in WINDOWS:
        for temperature, limit in LIMITS.items():
            where = {"setting": label(window, lookahead), "temperature": temperature}
            sides = {
                "official": official.run(
                    ids, options.tokens, temperature, kv_window=window, max_lookahead=lookahead
                )
            }
            for coupling in ("gumbel", "argmax") if temperature else ("gumbel",):
                method = APD(
                    verifier=verifier,
                    ratio=RATIO,
                    window=window,
                    lookahead=lookahead,
                    coupling=coupling,
                )
                name = f"ours, {coupling}" if temperature else "ours"
                sides[name] = ours(llm, method, ids, options.tokens, temperature)
            with forced(official, ACCEPTED):
                rows = compare(sides, options.rounds)
            assert len({row["iterations"] for row in rows}) == 1, "iterations differ"
            speed += [where | row for row in rows]
            for row in rows[1:]:
                what = f"{where['setting']}, temperature {temperature}: {row['side']}"
                bars.append(Bar(what=what, value=row["CPU ratio"], limit=limit))
            if not temperature:
                assert sides["official"]() == sides["ours"](), f"{where}: the outputs differ"
                free += [where | row for row in compare(sides, max(options.rounds // 3, 1))]
    return {"forced": speed, "free": free}, bars


def main() -> None:
    """Measure all settings."""
    parser = arguments(__doc__, rounds=9)
    parser.add_argument("--official", type=Path, required=True, help="clone of danielmisrael/apd")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens (128)")
    options = parser.parse_args()
    prepare(options)
    module = imported(options.official, "dream.generation_utils", "danielmisrael/apd")
    with tempfile.TemporaryDirectory() as folder:
        target = write(Path(folder) / "target", SMALL_DREAM, mute=silenced(SMALL_DREAM))
        verifier = write(Path(folder) / "verifier", SMALL_AUX, seed=1)
        official = Official(module, target, verifier)
        llm = load(target, APD(verifier=str(verifier)))
        tables, bars = measure(official, llm, str(verifier), options)
    show(f"{ACCEPTED} accepted tokens per iteration", tables["forced"])
    show("free acceptance, same tokens", tables["free"])
    finish(options, tables, bars)


if __name__ == "__main__":
    main()
