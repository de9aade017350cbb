"""Trainings of every objective, for one process or for two that share out what is trained.

As a program, one of several processes: argument 1 is the folder of the runs.
"""

import json
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch

from helpers import causal_model, published, published_eagle
from outpace.checkpoints.hub import ZOO_FOLDER
from outpace.training import Data, Trainer, weights
from outpace.training.held_out import HeldOut
from outpace.training.lora import LoRA
from outpace.training.objectives import D2F, MDLM, SFT, BlockDiffusion, DFlash, Eagle3, WeDLM

STEPS, LATER = 2, 3
"""Steps of a run, and those that another number of processes brings it to."""

BEGUN = ("sft", "muon")
"""Those that one process begins and two go on with."""

MASK = {"mask_token_id": 1021}
DRAFT = {
    **published("DFlashDraftModel", vocab_size=1024, num_hidden_layers=1, head_dim=8),
    "block_size": 6,
    "num_target_layers": 2,
    "dflash_config": {**MASK, "target_layer_ids": [0, 1]},
}
SPARK = {
    **published("Qwen3DSparkModel", vocab_size=1024, num_hidden_layers=1, head_dim=8),
    **MASK,
    "block_size": 5,
    "target_layer_ids": [0, 1],
    "markov_rank": 6,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
FUSED = {**DRAFT, "dflash_config": {**DRAFT["dflash_config"], "input_fusion": True}}
HELD_OUT = HeldOut(path="story:test", every=1, examples=3, decode=1, max_tokens=4)
"""So many that one process has more of them."""

COMMON = {
    "data": "story:train",
    "lr": 1e-3,
    "warmup": 2,
    "decay": 0,
    "batch": 4,
    "save_every": 1,
    "log_every": 1,
}


def fresh(architecture: str, **more: Any) -> Any:
    """A tiny model, whose vocabulary does not divide by the processes."""
    return weights.random_model(published(architecture, vocab_size=1025, **more), 0)


def trainers(
    folder: Path, *, only: Collection[str] = (), **options: Any
) -> Iterator[tuple[str, Trainer]]:
    target, other, third, fourth, fifth = (
        causal_model(vocab_size=1024) for _ in range(5)
    )  # all are shared out
    lines = folder.parent / "lines.jsonl"
    if not lines.exists():  # one process makes them, before there are two
        records = [{"prompt": f"{n} + 1 = ?", "response": f"{n} " * (n % 7 + 3)} for n in range(70)]
        lines.parent.mkdir(parents=True, exist_ok=True)
        lines.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    stored = Data(path=str(lines), features=str(folder / "features"))
    cases: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "sft": (fresh("Qwen2ForCausalLM"), SFT(), {"accumulation": 2, "held_out": HELD_OUT}),
        "bf16": (fresh("Qwen2ForCausalLM"), SFT(), {"precision": "bf16"}),
        "muon": (fresh("Qwen2ForCausalLM"), SFT(), {"optimizer": "muon"}),
        "tied": (fresh("Qwen2ForCausalLM", tie_word_embeddings=True), SFT(), {"recompute": True}),
        "mdlm": (fresh("DreamModel", **MASK), MDLM(suffix=0.3, anchored=0.3), {}),
        "d2f": (fresh("DreamModel", **MASK), D2F(block=8), {}),
        "lora": (fresh("DreamModel", **MASK), D2F(block=8), {"adapter": LoRA(rank=2, alpha=4)}),
        "wedlm": (fresh("WeDLMForCausalLM", **MASK), WeDLM(), {}),
        "dflash": (
            weights.build_draft(DRAFT, target, 0),
            DFlash(anchors=4),
            {"others": {"target": target}},
        ),
        "adding": (
            weights.build_draft(FUSED, fourth, 0),
            DFlash(anchors=4),
            {"others": {"target": fourth}},
        ),
        "dspark": (
            weights.build_draft(SPARK, fifth, 0),
            DFlash(anchors=4),
            {"others": {"target": fifth}},
        ),
        "block_diffusion": (
            fresh("SDARForCausalLM", block_size=4, head_dim=8, **MASK),
            BlockDiffusion(),
            {},
        ),
        "eagle3": (
            weights.build_draft(published_eagle(vocab_size=1024), third, 0),
            Eagle3(tokens=3),
            {"others": {"target": third}},
        ),
        "stored": (
            weights.build_draft(DRAFT, other, 0),
            DFlash(anchors=4, divergence=True),
            {"others": {"target": other}, "data": stored},
        ),
        "tokens": (
            fresh("Qwen2ForCausalLM"),
            SFT(),
            {"tokens": 700, "balance": True, "accumulation": 2},
        ),
    }
    for name, (model, objective, own) in cases.items():
        if only and name not in only:
            continue
        yield (
            name,
            Trainer(
                model,
                objective,
                out=folder / name,
                tokenizer=ZOO_FOLDER / "vocabulary",
                shard=True,
                **{**COMMON, **own, **options},
            ),
        )


def main() -> None:
    """Train, export, and go on with what one process has begun."""
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    for _, trainer in trainers(folder / "pair", steps=STEPS):
        assert trainer.is_sharded
        trainer.fit()
        trainer.export(trainer.out / "export")
    for _, trainer in trainers(folder / "begun", steps=LATER, only=BEGUN):
        trainer.fit()
    trainer.close()


if __name__ == "__main__":
    main()
