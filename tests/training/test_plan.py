"""What a recipe needs is counted without weights, also of published models, by their shapes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from outpace import recipes
from outpace.checkpoints import weights
from outpace.checkpoints.load import ZOO_TOKENIZER, load_config
from outpace.training.data import PROBLEM_GENERATORS
from outpace.training.plan import ACTIVATIONS, COMMUNICATION, LOGITS, TRAINED, Plan
from outpace.training.recipe import load_recipe
from runs import plan_recipe

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
QWEN25_7B = {**DREAM, "architectures": ["Qwen2ForCausalLM"]}
QWEN3_8B = {
    **QWEN3,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "tie_word_embeddings": False,
}
LLADA = {
    "architectures": ["LLaDAModelLM"],
    "model_type": "llada",
    "block_type": "llama",
    "block_group_size": 1,
    "activation_type": "silu",
    "rope": True,
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "d_model": 4096,
    "embedding_size": 126464,
    "vocab_size": 126464,
    "n_layers": 32,
    "n_heads": 32,
    "n_kv_heads": 32,
    "mlp_hidden_size": 12288,
    "max_sequence_length": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "weight_tying": False,
    "mask_token_id": 126336,
}
PUBLISHED = {
    "Qwen/Qwen2.5-0.5B": QWEN25,
    "Qwen/Qwen2.5-0.5B-Instruct": QWEN25,
    "Qwen/Qwen2.5-Coder-0.5B-Instruct": QWEN25,
    "Qwen/Qwen2.5-7B": QWEN25_7B,
    "Qwen/Qwen3-4B": QWEN3,
    "Qwen/Qwen3-8B": QWEN3_8B,
    "Qwen/Qwen3-8B-Base": QWEN3_8B,
    "GSAI-ML/LLaDA-8B-Instruct": LLADA,
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
    "llada-8b-d2f": (33_554_432, 8_015_581_184 + 33_554_432),
    "dream-7b-d2f": (20_185_088, 7_615_616_512 + 20_185_088),
    "tiny-aux": (870_528, 870_528),
}
"""Those that are trained, and all of the model."""


LINES = [
    *("model", "parameters", "data", "step", "steps", "memory", "weights", "update", "passes"),
    *("disk", "time"),
]
"""Headings of a plan."""


def checkpoint(folder: Path, config: dict[str, Any]) -> str:
    """A folder with the shape of a model and the zoo's tokenizer, and without weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(ZOO_TOKENIZER / name, folder / name)
    return str(folder)


def stands_in(name: str, folder: Path) -> str:
    """A checkpoint of the shape that a recipe names."""
    if name in STAND_INS:
        return STAND_INS[name]
    config = PUBLISHED.get(name)
    return name if config is None else checkpoint(folder / name.replace("/", "-"), config)


def words(name: str, folder: Path) -> list[str]:
    """Overrides that replace downloads of a recipe by local stand-ins."""
    read = load_recipe(name)
    found = [
        f"model.{role}={stands_in(given, folder)}"
        for role in ("init", "target")
        if (given := getattr(read.model, role)) is not None
    ]
    path = str(read.data.path)
    if not path.startswith((*PROBLEM_GENERATORS, "(")) or "hub:" in path:
        names = read.data.fields or ("prompt", "response")
        lines = [json.dumps({names[0]: "1 + 1 = ?", names[1]: "2 " * n}) for n in range(9, 99)]
        (folder / "data.jsonl").write_text("\n".join(lines))
        found.append(f"data.path={folder / 'data.jsonl'}")
        if read.data.end is not None:
            found.append("data.end=<|im_end|>")
    return found


LARGE = {name for name in recipes.recipe_names() if not name.startswith("tiny-")} - {
    "qwen3-4b-dflash"
}
"""Recipes whose steps take seconds to rehearse."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.nightly if name in LARGE else pytest.mark.nightly)
        for name in recipes.recipe_names()
    ],
)
def test_every_recipe_has_a_plan(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "CheckpointWeights", None)
    recipe = load_recipe(name, words(name, tmp_path))
    made = plan_recipe(recipe)
    text = dict(made.describe_lines())
    assert [*text] == LINES
    assert made.device_bytes > 0 and made.total_seconds > 0 and made.rows > 0
    if name in PARAMETERS:
        assert (made.trained, made.parameters) == PARAMETERS[name]
    if "24 GB" in recipes.find_recipe(name).read_text():
        assert 1e9 < made.device_bytes < 24e9


@pytest.mark.nightly
def test_memory_is_that_of_the_weights_and_their_update(tmp_path: Path) -> None:
    size = load_config("tiny-aux").vocab
    adamw, muon = (
        plan_recipe(load_recipe("tiny-aux", [f"optimizer={name}"])) for name in ("adamw", "muon")
    )
    assert adamw.peak[TRAINED] == adamw.gradients == 4 * adamw.trained
    assert adamw.optimizer == 8 * adamw.trained
    matrices = adamw.trained - size * 128 - (2 * 4 + 1) * 128 - 4 * (128 + 2 * 64)
    assert muon.optimizer == adamw.optimizer - 4 * matrices
    assert adamw.checkpoint == 12 * adamw.trained


@pytest.mark.nightly
def activation_bytes(plan: Plan) -> float:
    """Bytes of a device that only passes use."""
    return sum(plan.peak[use] for use in (ACTIVATIONS, LOGITS, COMMUNICATION))


@pytest.mark.nightly
def test_memory_falls_with_portions_and_recomputation() -> None:
    whole, fourths, again = (
        plan_recipe(load_recipe("tiny-ar", more))
        for more in ([], ["accumulation=4"], ["recompute=true"])
    )
    assert (
        activation_bytes(fourths) < activation_bytes(whole) / 2
        and fourths.total_seconds == whole.total_seconds
    )
    assert (
        activation_bytes(again) < activation_bytes(whole) / 2
        and again.total_seconds > whole.total_seconds
    )
    assert whole.weight_bytes == again.weight_bytes


@pytest.mark.nightly
def test_processes_share_the_work() -> None:
    one, two = (plan_recipe(load_recipe("tiny-ar"), processes) for processes in (1, 2))
    assert two.total_seconds == pytest.approx(one.total_seconds / 2) and activation_bytes(
        two
    ) < activation_bytes(one)
    with pytest.raises(ValueError, match="is not divisible by 5"):
        plan_recipe(load_recipe("tiny-ar"), 5)


@pytest.mark.parametrize("begun", ["model.init=tiny-aux", None])
def test_a_target_is_for_drafts(begun: str | None) -> None:
    words = ["model.target=tiny-ar", *([begun] if begun else [])]
    with pytest.raises(
        ValueError, match="target needs a draft that reads features, got Qwen2ForCausalLM"
    ):
        plan_recipe(load_recipe("tiny-aux", words))
