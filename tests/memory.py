"""Runs of small models whose memory is counted, for one process or for two that share.

As a program, one of several processes: argument 1 is a recipe; it prints the most bytes it held.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from helpers import published
from outpace.checkpoints.load import ZOO_TOKENIZER
from outpace.checkpoints.weights import save_model
from outpace.training import weights
from outpace.training.plan import MemoryTracker
from outpace.training.recipe import load_recipe

SIZES = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 1024,
}
TARGET = {**SIZES, "num_hidden_layers": 6}
DRAFT = {
    **SIZES,
    "num_hidden_layers": 3,
    "block_size": 8,
    "num_target_layers": 6,
    "dflash_config": {"mask_token_id": 1021, "target_layer_ids": [1, 2, 4]},
}
ADDING = {**DRAFT, "dflash_config": {**DRAFT["dflash_config"], "input_fusion": True}}
EXTENDING = {
    **SIZES,
    "num_hidden_layers": 1,
    "draft_vocab_size": 4096,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]},
}
MASK = {"mask_token_id": 1021}
MODELS = {
    "sft": ("Qwen2ForCausalLM", TARGET),
    "wedlm": ("WeDLMForCausalLM", {**TARGET, **MASK}),
    "mdlm": ("DreamModel", {**TARGET, **MASK}),
    "d2f": ("DreamModel", {**TARGET, **MASK}),
    "block_diffusion": ("SDARForCausalLM", {**TARGET, **MASK, "block_size": 8}),
    "dflash": ("DFlashDraftModel", DRAFT),
    "adding": ("DFlashDraftModel", ADDING),
    "eagle3": ("LlamaForCausalLMEagle3", EXTENDING),
}
"""What is trained with each objective; "adding" is another draft of that of "dflash"."""

STEPS = 3
"""The first one makes what the optimizer keeps."""


def toml(table: dict[str, Any]) -> str:
    """A table in one line."""
    return json.dumps(table).replace('": ', '" = ')


def recipe(folder: Path, objective: str, more: str = "") -> Path:
    """A recipe of an objective, on examples of one length; `more` goes under [train]."""
    architecture, sizes = MODELS[objective]
    given = toml(published(architecture, **sizes))
    words = f'config = {given}\ntokenizer = "{ZOO_TOKENIZER}"'
    if objective in ("dflash", "adding", "eagle3"):
        target = folder / "target"
        if not target.exists():
            config = published("Qwen3ForCausalLM", **TARGET)
            save_model(weights.random_model(config, 0), target, dtype=torch.float32)
            for name in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copyfile(ZOO_TOKENIZER / name, target / name)
        words = f'config = {given}\ntarget = "{target}"'
    options = "anchors = 24" if objective in ("dflash", "adding") else ""
    line = json.dumps({"prompt": "1 + 1 = ?" * 5, "response": "2 and 3 and " * 15})
    (folder / "data.jsonl").write_text(f"{line}\n" * 64)
    path, name = folder / f"{objective}.toml", "dflash" if objective == "adding" else objective
    path.write_text(
        f'out = "{folder / "run"}"\n[model]\n{words}\n'
        f'[objective]\nname = "{name}"\n{options}\n'
        f'[data]\npath = "{folder / "data.jsonl"}"\n[train]\nbatch = 16\n{more}\n'
    )
    return path


def allocated(path: Path) -> int:
    """Most bytes of tensors that a process held in the steps of a run behind the first."""
    trainer = load_recipe(path).build_trainer()
    memory = MemoryTracker()
    for each in (trainer.model, *trainer.loss_module.models.others.values()):
        memory.track_tensors((*each.parameters(), *each.buffers()))
    with memory:
        trainer.train_step(0, STEPS)
        memory.peak.clear()
        for step in range(1, STEPS):
            trainer.train_step(step, STEPS)
    trainer.close()
    return memory.peak.total()


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"bytes: {allocated(Path(sys.argv[1]))}", flush=True)
