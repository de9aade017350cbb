"""Discrete diffusion forcing beside its authors' code, on the same weights.

Two models in Dream's format, float32, batch 1, 128 new tokens, the thresholds of the paper (add
0.1, activate 0.95, confidence 0.9): one of 512 x 8 layers and 8192 tokens with random weights, a
prompt of 64 tokens and blocks of 32; and one of the zoo on story problems, with blocks of 16. The
sides run in one process and take turns, and give the same text, which is asserted. Reported are
CPU milliseconds per forward, and the ratios of whole decodes.

The authors' decoder is imported from a clone of zhijie-group/Discrete-Diffusion-Forcing
(`D2F-eval/eval_dream.py`), with empty stand-ins for those packages that this file imports for other
purposes (accelerate, datasets, lm_eval, peft) and that are not installed; it needs transformers
4.54. No adapter is attached, which would make the
authors' side slower, as theirs stays unmerged. `D2F(canvas=True)` fills everything as
their code does, in the same number of forwards, which is asserted too; without `canvas` the decode
ends with the text.

    python benchmarks/d2f_official.py --official Discrete-Diffusion-Forcing \
        --json benchmarks/results/d2f_official.json
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch

from checkpoints import SMALL_DREAM, load, prompt, silenced, write
from harness import Bar, imported
from official import Measured, Result, allow_loading, compare, ours, parser_for, run_comparison
from outpace import LLM
from outpace.api.options import Options
from outpace.checkpoints.checkpoint import Checkpoint
from outpace.checkpoints.hub import resolve_checkpoint
from outpace.lab.run import questions_of
from outpace.methods import D2F

REPOSITORY = "zhijie-group/Discrete-Diffusion-Forcing"
UNUSED = (
    *("accelerate", "datasets", "lm_eval", "lm_eval.__main__", "lm_eval.api.instance"),
    *("lm_eval.api.model", "lm_eval.api.registry", "lm_eval.models.utils", "peft"),
)
PEAK = 13.0
"""Factor of the random head, with which about four tokens per forward are sure enough."""


def load_clone(clone: Path) -> Any:
    """The authors' evaluation file; the stand-ins are there only while it is imported."""
    stand_ins = {name: MagicMock() for name in UNUSED if find_spec(name.split(".")[0]) is None}
    if "lm_eval" in stand_ins:
        stand_ins["lm_eval.api.model"].LM = object
        stand_ins["lm_eval.api.registry"].register_model = lambda name: lambda kind: kind
    sys.modules |= stand_ins
    try:
        return imported(clone / "D2F-eval", "eval_dream", REPOSITORY)
    finally:
        for name in stand_ins:
            del sys.modules[name]


class Official:
    """The authors' decoder on a checkpoint."""

    eos_token = ""

    def __init__(self, module: Any, folder: Path, method: D2F, tokens: int) -> None:
        dream = importlib.import_module("model_cache.dream.model_dream").DreamModel
        model = dream.from_pretrained(folder, attn_implementation="sdpa").float().eval()
        self.decoder = module.DreamLoRA.__new__(module.DreamLoRA)
        self.output: list[int] = []
        self.forwards = 0
        self.eos_token_id = model.config.eos_token_id
        model.register_forward_hook(self.count)
        vars(self.decoder).update(
            model=model,
            tokenizer=self,
            _device=torch.device("cpu"),
            target_dtype=torch.float32,
            mask_token_id=model.config.mask_token_id,
            max_length=2048,
            max_new_tokens=tokens,
            block_size=method.block,
            block_add_threshold=method.add,
            decoded_token_threshold=method.activate,
            skip_threshold=method.confidence,
            temperature=0.0,
            top_p=None,
            top_k=None,
            sampling_strategy="default",
        )

    def count(self, *_: object) -> None:
        """Called after every forward."""
        self.forwards += 1

    def decode(self, output: Sequence[int]) -> Official:
        """What the authors' decoder calls its tokenizer for: the output, which is kept."""
        self.output = list(output)
        return self

    def split(self, _: str) -> list[str]:
        """Its text, which nobody needs."""
        return [""]

    def run(self, ids: list[int]) -> tuple[list[int], int]:
        """A decode."""
        self.forwards = 0
        self.decoder._generate_block_single(torch.tensor([ids]))
        return self.output, self.forwards


def visible(result: Result, eos: frozenset[int]) -> list[list[int]]:
    """Outputs up to their end-of-sequence."""
    ends = [[place for place, token in enumerate(ids) if token in eos] for ids in result[0]]
    return [ids[: end[0]] if end else ids for ids, end in zip(result[0], ends, strict=True)]


def settings(folder: Path, options: argparse.Namespace) -> list[tuple[str, Path, int, float]]:
    """Name, checkpoint, block and bar of both models."""
    random = write(folder / "random", SMALL_DREAM, mute=silenced(SMALL_DREAM), peak=PEAK)
    tiny = Path(shutil.copytree(resolve_checkpoint(options.model), folder / "zoo"))
    shutil.copytree(Checkpoint(options.model).tokenizer_folder, tiny, dirs_exist_ok=True)
    for path in (random, tiny):
        allow_loading(path)
    return [("512 x 8", random, 32, 0.85), (options.model, tiny, 16, 0.5)]


def prompts_for(llm: LLM, options: argparse.Namespace) -> list[list[int]]:
    """Story problems, or random ids for a model without a tokenizer."""
    if llm.text.tokenizer is None:
        return [prompt(64, llm.config.vocab)]
    return [llm.text.encode(each.prompt) for each in questions_of("story", options.problems)]


def measure(options: argparse.Namespace, module: Any, folder: Path) -> Measured:
    """Milliseconds per forward, of both sizes."""
    rows, bars = [], []
    for name, path, block, limit in settings(folder, options):
        llm, method = load(path), D2F(block=block)
        filled = replace(method, canvas=True)
        greedy = Options(temperature=0.0, top_p=1.0)
        decodes = {
            "official": Official(module, path, method, options.tokens).run,
            "ours": ours(llm, filled, options.tokens, options=greedy),
            "ours, without canvas": ours(llm, method, options.tokens, options=greedy),
        }

        def text(result: Result, eos: frozenset[int] = llm.eos) -> list[list[int]]:
            return visible(result, eos)

        part = compare(
            {"model": name, "block": block},
            decodes,
            prompts_for(llm, options),
            options.rounds,
            "forward",
            same=list(decodes),
            shared=text,
            columns=lambda result, _: {"tokens": sum(map(len, text(result)))},
        )
        assert part[0]["forwards"] == part[1]["forwards"], f"forwards differ: {part}"
        rows += part
        bars.append(Bar(what=f"CPU per forward, {name}", value=part[1]["CPU ratio"], limit=limit))
    return {"forwards": rows}, bars


def main() -> None:
    """Measure both sizes."""
    parser = parser_for(__doc__, REPOSITORY, rounds=7, problems=True)
    parser.add_argument("--model", default="tiny-d2f", help="model of the zoo (tiny-d2f)")
    titles = {"forwards": "a forward of both sides, same tokens"}
    run_comparison(parser, load_clone, measure, titles)


if __name__ == "__main__":
    main()
