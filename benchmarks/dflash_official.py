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
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from checkpoints import SMALL_GROUPED, Config, load, prompt, qwen3, write
from harness import Bar, Row, alternate, arguments, costs, finish, imported, prepare, show
from outpace import LLM
from outpace.checkpoints.load import load_model, resolve, save_model, translate
from outpace.evaluation.run import questions_of
from outpace.methods import DFlash
from outpace.models.draft import FeatureDraft

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

Run = Callable[[], tuple[list[list[int]], int]]
"""New tokens of each prompt, and the number of pairs that they took."""


def write_draft(folder: Path, target: Path) -> Path:
    """A draft of random weights."""
    torch.manual_seed(1)
    draft = FeatureDraft(translate(DRAFT), load_model(target)).requires_grad_(False)
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
            for kind, folder in (
                (AutoModelForCausalLM, target),
                (module.DFlashDraftModel, draft),
            )
        )

    def run(self, prompts: Sequence[list[int]], tokens: int, block: int, eos: list[int]) -> Run:
        """Decodes of all prompts, one after another."""

        def decode() -> tuple[list[list[int]], int]:
            outputs, pairs = [], 0
            for ids in prompts:
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
                outputs.append(new[:-1] if new[-1] in eos else new)
                pairs += len(out.acceptance_lengths)
            return outputs, pairs

        return decode


def ours(llm: LLM, method: DFlash, prompts: Sequence[list[int]], tokens: int) -> Run:
    """The same decodes here."""

    def decode() -> tuple[list[list[int]], int]:
        outputs, pairs = [], 0
        for ids in prompts:
            (output,) = llm.generate(ids, method=method, max_tokens=tokens)
            outputs.append(output.ids)
            pairs += sum(step.model == "draft" for step in output.steps)
        return outputs, pairs

    return decode


def compare(where: Row, official: Run, own: Run, rounds: int) -> list[Row]:
    """Milliseconds per pair of each side, after asserting that both give the same tokens."""
    sides = {"official": official, "ours": own}
    results = {side: run() for side, run in sides.items()}
    tokens = results["ours"][0]
    assert tokens == results["official"][0], f"{where}: the outputs differ"
    pairs = {side: count for side, (_, count) in results.items()}
    sums = costs(alternate(sides, rounds), pairs, "pair")
    new = sum(len(ids) - 1 for ids in tokens)
    return [
        {**where, "side": side, "tokens per pair": new / pairs[side], **row}
        for side, row in sums.items()
    ]


def measure(options: argparse.Namespace, module: Any, folder: Path) -> list[Row]:
    """Both pairs."""
    rows = []
    target = write(folder / "target", TARGET)
    draft = write_draft(folder / "draft", target)
    ids = [prompt(64, TARGET["vocab_size"])]
    rows += pair(options, module, "512 x 8", target, draft, ids, (16, 8))
    zoo = resolve("tiny-ar"), resolve("tiny-dflash")
    problems = [question.prompt for question in questions_of("story", options.problems)]
    return rows + pair(options, module, "zoo", *zoo, problems, (16,))


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
        theirs = official.run(prompts, options.tokens, block, sorted(llm.eos))
        own = ours(llm, method, prompts, options.tokens)
        rows += compare({"pair": name, "block": block}, theirs, own, options.rounds)
    return rows


def main() -> None:
    """Measure all settings."""
    parser = arguments(__doc__, rounds=9)
    parser.add_argument("--official", type=Path, required=True, help="clone of z-lab/dflash")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens (128)")
    parser.add_argument("--problems", type=int, default=8, help="story problems (8)")
    options = parser.parse_args()
    prepare(options)
    module = imported(options.official, "dflash.model", "z-lab/dflash")
    module._cuda_time = time.perf_counter  # the statistics ask for a GPU's clock
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(options, module, Path(folder))
    show("a draft-and-verify pair", rows)
    bars = [
        Bar(
            what=f"{row['pair']}, block {row['block']}",
            value=row["CPU ratio"],
            limit=LIMITS[row["pair"]],
        )
        for row in rows
        if row["side"] == "ours"
    ]
    finish(options, {"pairs": rows}, bars)


if __name__ == "__main__":
    main()
