"""DFlash beside its authors' loop, on the same weights and prompts.

Two pairs: a Qwen3 target of 512 x 8 layers (8192 tokens) with a draft of two layers, both random,
blocks of 16 and of 8 behind a prompt of 64 tokens, 128 new ones; and the zoo's `tiny-ar` with
`tiny-dflash` on story problems. Batch 1, float32, greedy. The authors' loop (dflash/model.py) is
imported from a clone of z-lab/dflash at 44947fb and needs transformers 4.57.1; both run in one
process and take turns. Reported are CPU milliseconds per draft-and-verify pair: all of a decode,
prefill included, over its number of pairs. Both sides must give the same tokens.

A random draft is right about nothing, so that every token takes a pair; the trained one is right
about most, so that its context grows by many rows at a time.

    python benchmarks/dflash_official.py --official dflash \
        --json benchmarks/results/dflash_official.json
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from checkpoints import SMALL_GROUPED, Config, load, prompt, qwen3, write
from harness import Bar, Row, imported
from official import Decode, Measured, compare, ours, parser_for, run_comparison
from outpace import Output
from outpace.checkpoints.checkpoint import translate_config
from outpace.checkpoints.hub import resolve_checkpoint
from outpace.checkpoints.load import load_model, save_model
from outpace.lab.run import questions_of
from outpace.methods import DFlash
from outpace.models.draft import DFlashDraft

TARGET: Config = {
    **qwen3(SMALL_GROUPED),
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
}
DRAFT: Config = {
    **TARGET,
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 2,
    "num_target_layers": 8,
    "layer_types": ["full_attention"] * 2,
    "block_size": 16,
    "dflash_config": {"mask_token_id": 8191, "target_layer_ids": [1, 5]},
}
LIMITS = {"512 x 8": 0.8, "zoo": 0.5}


def write_draft(folder: Path, target: Path) -> Path:
    """A draft of random weights."""
    torch.manual_seed(1)
    draft = DFlashDraft(translate_config(DRAFT), load_model(target)).requires_grad_(False)
    for weight in (w for w in draft.blocks.parameters() if w.dim() == 2):
        weight.mul_(2 / (weight.std() * weight.shape[1] ** 0.5))
    save_model(draft, folder, dtype=torch.float32)
    return folder


class Official:
    """The authors' loop on a target and a draft."""

    def __init__(self, module: Any, target: Path, draft: Path) -> None:
        self.module = module
        self.target, self.draft = (
            kind.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32).eval()
            for kind, folder in ((AutoModelForCausalLM, target), (module.DFlashDraftModel, draft))
        )

    def run(self, tokens: int, block: int, eos: list[int]) -> Decode:
        """A decode with blocks of a length."""

        def decode(ids: list[int]) -> tuple[list[int], int]:
            out = self.module.dflash_generate(
                self.draft,
                self.target,
                torch.tensor([ids]),
                max_new_tokens=tokens,
                stop_token_ids=eos or None,
                temperature=0.0,
                block_size=block,
                return_stats=True,
            )
            new = out.output_ids[0, len(ids) :].tolist()
            return new[:-1] if new[-1] in eos else new, len(out.acceptance_lengths)

        return decode


def pairs(output: Output) -> int:
    """Forwards of the draft, each of which has one of the target."""
    return sum(step.model == "draft" for step in output.steps)


def measure(options: argparse.Namespace, module: Any, folder: Path) -> Measured:
    """Both pairs of models."""
    rows: list[Row] = []
    target = write(folder / "target", TARGET)
    draft = write_draft(folder / "draft", target)
    ids = [prompt(64, TARGET["vocab_size"])]
    rows += pair(options, module, "512 x 8", target, draft, ids, (16, 8))
    zoo = resolve_checkpoint("tiny-ar"), resolve_checkpoint("tiny-dflash")
    problems = [question.prompt for question in questions_of("story", options.problems)]
    rows += pair(options, module, "zoo", *zoo, problems, (16,))
    bars = [
        Bar(
            what=f"{row['pair']}, block {row['block']}",
            value=row["CPU ratio"],
            limit=LIMITS[row["pair"]],
        )
        for row in rows
        if row["side"] == "ours"
    ]
    return {"pairs": rows}, bars


def pair(
    options: argparse.Namespace,
    module: Any,
    name: str,
    target: Path,
    draft: Path,
    prompts: Sequence[Any],
    blocks: Sequence[int],
) -> list[Row]:
    """One target and draft with blocks of some lengths."""
    official = Official(module, target, draft)
    llm = load(target, DFlash(draft=str(draft)))
    prompts = [llm.text.encode(each) for each in prompts]
    rows = []
    for block in blocks:
        method = DFlash(draft=str(draft), block=block, tokens=max(block - 1, 1))
        decodes = {
            "official": official.run(options.tokens, block, sorted(llm.eos)),
            "ours": ours(llm, method, options.tokens, pairs),
        }
        rows += compare(
            {"pair": name, "block": block},
            decodes,
            prompts,
            options.rounds,
            "pair",
            same=["ours"],
            shared=lambda result: result[0],
            columns=lambda result, _: {
                "tokens per pair": sum(len(ids) - 1 for ids in result[0]) / result[1]
            },
        )
    return rows


def load_clone(clone: Path) -> Any:
    """The authors' loop, whose statistics ask for a GPU's clock."""
    module = imported(clone, "dflash.model", "z-lab/dflash")
    module._cuda_time = time.perf_counter
    return module


def main() -> None:
    """Measure all settings."""
    parser = parser_for(__doc__, "z-lab/dflash", rounds=9, problems=True)
    run_comparison(parser, load_clone, measure, {"pairs": "a draft-and-verify pair"})


if __name__ == "__main__":
    main()
