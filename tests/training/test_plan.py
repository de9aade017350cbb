"""What a recipe needs is counted without weights, also of published models, by their shapes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from outpace import recipes
from outpace.models import weights
from outpace.models.load import VOCABULARY, load_config, load_model
from outpace.training.plan import plan, total
from outpace.training.recipe import load

QWEN25 = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
DREAM_HALF = {**QWEN25, "architectures": ["DreamModel"], "mask_token_id": 151666}
DREAM = {
    **DREAM_HALF,
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
PUBLISHED = {
    "Qwen/Qwen2.5-0.5B": QWEN25,
    "Qwen/Qwen2.5-0.5B-Instruct": QWEN25,
    "Qwen/Qwen3-4B": QWEN3,
    "Dream-org/Dream-v0-Base-7B": DREAM,
    "runs/qwen2.5-0.5b-dream/export": DREAM_HALF,
    "runs/tiny-d2f-noise/export": None,
    "runs/tiny-wedlm-wordings/export": None,
}
"""Shapes of what recipes begin with, and which are folders of the zoo."""

STAND_INS = {
    "runs/tiny-d2f-noise/export": "tiny-dream",
    "runs/tiny-wedlm-wordings/export": "tiny-wedlm",
}
PARAMETERS = {
    "qwen2.5-0.5b-dream": (494_032_768, 494_032_768),
    "qwen2.5-0.5b-wedlm": (494_032_768, 494_032_768),
    "dream-7b-d2f": (20_185_088, 7_615_616_512 + 20_185_088),
    "tiny-aux": (870_528, 870_528),
}
"""Those that are trained, and all of the model."""


def checkpoint(folder: Path, config: dict[str, Any]) -> str:
    """A folder with the shape of a model and the zoo's tokenizer, and without weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(VOCABULARY / name, folder / name)
    return str(folder)


def stands_in(name: str, folder: Path) -> str:
    """A checkpoint of the shape that a recipe names."""
    if name in STAND_INS:
        return STAND_INS[name]
    config = PUBLISHED.get(name)
    return name if config is None else checkpoint(folder / name.replace("/", "-"), config)


def words(name: str, folder: Path) -> list[str]:
    """Overrides that put stand-ins in the place of what a recipe downloads."""
    read = load(name)
    found = [
        f"model.{role}={stands_in(given, folder)}"
        for role in ("init", "target")
        if (given := getattr(read.model, role)) is not None
    ]
    if not str(read.data.path).startswith(("story:", "(")) or "hub:" in str(read.data.path):
        names = read.data.fields or ("prompt", "response")
        lines = [json.dumps({names[0]: "1 + 1 = ?", names[1]: "2 " * n}) for n in range(9, 99)]
        (folder / "data.jsonl").write_text("\n".join(lines))
        found.append(f"data.path={folder / 'data.jsonl'}")
    return found


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_has_a_plan(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No weights are opened for it, and it fits where it says so."""
    monkeypatch.setattr(weights, "Weights", None)
    recipe = load(name, words(name, tmp_path))
    made = plan(recipe)
    text = dict(made.described())
    assert {"model", "parameters", "data", "step", "steps", "memory", "disk", "time"} == set(text)
    assert made.memory > 0 and made.seconds > 0 and made.rows > 0
    if name in PARAMETERS:
        assert (made.trained, made.parameters) == PARAMETERS[name]
    if "24 GB" in recipes.find(name).read_text():
        assert 1e9 < made.memory < 24e9


def test_memory_is_that_of_the_weights_and_their_update(tmp_path: Path) -> None:
    """Four bytes each for weight and gradient, eight for AdamW's moments, four for Muon's."""
    size = load_config("tiny-aux").vocab
    adamw, muon = (plan(load("tiny-aux", [f"optimizer={name}"])) for name in ("adamw", "muon"))
    assert adamw.weights == adamw.gradients == 4 * adamw.trained
    assert adamw.optimizer == 8 * adamw.trained
    matrices = adamw.trained - size * 128 - (2 * 4 + 1) * 128 - 4 * (128 + 2 * 64)
    assert muon.optimizer == adamw.optimizer - 4 * matrices
    assert adamw.checkpoint == 12 * adamw.trained


def test_memory_falls_with_portions_and_recomputation() -> None:
    """As what is kept for the backward pass does: the time grows with the second forward pass."""
    whole, fourths, again = (
        plan(load("tiny-ar", more)) for more in ([], ["accumulation=4"], ["recompute=true"])
    )
    assert fourths.activations < whole.activations / 2 and fourths.seconds == whole.seconds
    assert again.activations < whole.activations / 2 and again.seconds > whole.seconds
    assert whole.weights == again.weights


def test_frozen_weights_count_as_they_are(tmp_path: Path) -> None:
    """A target that looks on, in the numbers that it is loaded in."""
    more = words("tiny-dflash", tmp_path)
    plain = plan(load("tiny-dflash", more))
    half = plan(load("tiny-dflash", [*more, "dtype=bfloat16", "precision=bf16"]))
    assert plain.others == total(load_model("tiny-ar").parameters())
    assert plain.weights - half.weights == 2 * plain.others
    assert plain.lines == 90 and plain.example > 9


def test_processes_share_the_work() -> None:
    """And the portion of each is smaller."""
    one, two = (plan(load("tiny-ar"), processes) for processes in (1, 2))
    assert two.seconds == pytest.approx(one.seconds / 2) and two.activations < one.activations
    with pytest.raises(ValueError, match="does not divide into 5"):
        plan(load("tiny-ar"), 5)


@pytest.mark.parametrize("name", ["tiny-ar", "tiny-dream", "tiny-wedlm-wordings"])
@pytest.mark.parametrize("more", [[], ["recompute=true"]], ids=["kept", "recomputed"])
def test_activations_are_about_what_is_kept(name: str, more: list[str], tmp_path: Path) -> None:
    """In float32, where nothing is cast: half to twice of what the backward pass finds."""
    more = [*more, "batch=8", "precision=no", f"out={tmp_path}"]
    recipe = load(name, more)
    run = recipe.trainer()
    own = {p.untyped_storage().data_ptr() for p in run.model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage  # held, so that no other takes its place
        return tensor

    (rows,), _ = run.batches(0)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run.scored(rows)
    found = sum(storage.nbytes() for storage in kept.values())
    if more[0] == "recompute=true":  # what one block and the logits' gradient need comes later
        assert found < plan(recipe).activations
    else:
        assert 0.5 < plan(recipe).activations / found < 2
