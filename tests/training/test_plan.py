"""Tests of plans: memory, time and devices of a run, computed without weights."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outpace import recipes
from outpace.checkpoints import weights
from outpace.checkpoints.load import ZOO_TOKENIZER, load_model
from outpace.training.data import PROBLEM_GENERATORS
from outpace.training.plan import Plan, plan_recipe
from outpace.training.recipe import Recipe, load_recipe
from runs import RECIPE, PeakMemory, write_lines
from training.test_drafts import RECIPE as DRAFT_RECIPE


def published_config(
    architecture: str, width: int, mlp: int, layers: int, heads: int, kv_heads: int, **more: Any
) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "vocab_size": 151936,
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        **more,
    }


MASK = {"mask_token_id": 151666}
LARGE_TABLES = {"vocab_size": 152064, "tie_word_embeddings": False}
QWEN25 = published_config("Qwen2ForCausalLM", 896, 4864, 24, 14, 2)
QWEN25_7B = published_config("Qwen2ForCausalLM", 3584, 18944, 28, 28, 4, **LARGE_TABLES)
QWEN3 = published_config("Qwen3ForCausalLM", 2560, 9728, 36, 32, 8, head_dim=128)
QWEN3_8B = {**QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False}
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
    "HuggingFaceTB/SmolLM2-135M-Instruct": published_config(
        "LlamaForCausalLM", 576, 1536, 30, 9, 3, vocab_size=49152
    ),
    "Dream-org/Dream-v0-Base-7B": {**QWEN25_7B, "architectures": ["DreamModel"], **MASK},
    "runs/qwen2.5-0.5b-dream/export": {**QWEN25, "architectures": ["DreamModel"], **MASK},
}
"""Configurations of the models that recipes name."""

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


def find_stand_in(name: str, folder: Path) -> str:
    """Return a checkpoint with the configuration that a name has, without weights."""
    if name not in PUBLISHED:
        return STAND_INS.get(name, name)
    folder /= name.replace("/", "-")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(PUBLISHED[name]))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(ZOO_TOKENIZER / file, folder / file)
    return str(folder)


def overrides(name: str, folder: Path) -> list[str]:
    """Overrides that replace downloads of a recipe by local stand-ins."""
    read = load_recipe(name)
    found = [
        f"model.{role}={find_stand_in(given, folder)}"
        for role in ("init", "target")
        if (given := getattr(read.model, role)) is not None
    ]
    path = str(read.data.path)
    if not path.startswith((*PROBLEM_GENERATORS, "(")) or "hub:" in path:
        names = read.data.fields or ("prompt", "response")
        records = [{names[0]: "1 + 1 = ?", names[1]: "2 " * n} for n in range(9, 99)]
        found.append(f"data.path={write_lines(folder / 'data.jsonl', *records)}")
        if read.data.end is not None:
            found.append("data.end=<|im_end|>")
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("name", recipes.recipe_names())
def test_every_recipe_has_a_plan(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "CheckpointWeights", None)
    plan = plan_recipe(load_recipe(name, overrides(name, tmp_path)))
    assert all(text for _, text in plan.describe_lines())
    assert plan.device_bytes > 0 and plan.total_seconds > 0 and plan.rows > 0
    if name in PARAMETERS:
        assert (plan.trained, plan.parameters) == PARAMETERS[name]
    if "24 GB" in recipes.find_recipe(name).read_text():
        assert 1e9 < plan.device_bytes < 24e9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe of a tiny model and one of a draft, on lines of one length."""
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "whole.toml").write_text(RECIPE)
    (folder / "draft.toml").write_text(DRAFT_RECIPE)
    line = {"prompt": "1 + 1 = ?" * 3, "response": "2 and 3 and " * 8}
    write_lines(folder / "data.jsonl", *[line] * 64)
    return folder


def tiny(folder: Path, *changes: str, name: str = "whole") -> Recipe:
    more = [f"data.path={folder / 'data.jsonl'}", f"out={folder / 'run'}", *changes]
    return load_recipe(folder / f"{name}.toml", more)


@pytest.fixture(scope="module")
def whole(folder: Path) -> Plan:
    return plan_recipe(tiny(folder, "optimizer=adamw"))


def test_memory_of_weights_and_update(whole: Plan, folder: Path) -> None:
    blocks = 2 * (32 * (32 + 2 * 16) + 32 * 32 + 3 * 32 * 48)
    norms, biases = (2 * 2 + 1) * 32, 2 * (32 + 2 * 16)
    assert whole.trained == whole.parameters == 2 * 1024 * 32 + blocks + norms + biases
    assert whole.weights == 4 * whole.trained and whole.optimizer == 2 * whole.weights
    assert whole.checkpoint == whole.weights + whole.optimizer
    muon = plan_recipe(tiny(folder, "optimizer=muon"))
    assert muon.optimizer == whole.optimizer - 4 * blocks


def test_processes_share_work_and_weights(whole: Plan, folder: Path) -> None:
    recipe = tiny(folder, "optimizer=adamw")
    beside = plan_recipe(recipe, 4)
    assert beside.total_seconds == pytest.approx(whole.total_seconds / 4)
    assert beside.activations < whole.activations and beside.weights == whole.weights
    shared = plan_recipe(tiny(folder, "optimizer=adamw", "shard=true"), 4)
    assert (shared.weights, shared.optimizer) == (whole.weights / 4, whole.optimizer / 4)
    assert shared.checkpoint == whole.checkpoint and shared.copies > 0
    with pytest.raises(ValueError, match="batch"):
        plan_recipe(recipe, 3)


def test_steps_of_tokens_are_planned(folder: Path) -> None:
    plan = plan_recipe(tiny(folder, "tokens=4096", "balance=true", "accumulation=4"))
    assert plan.train.batch % 4 == 0
    assert plan.train.batch * plan.example == pytest.approx(4096, rel=0.1)


def test_smallest_card(whole: Plan) -> None:
    for size, card in {20e9: 24, 23e9: 80, 73e9: 80, 75e9: 141, 140e9: None}.items():
        assert replace(whole, activations=size).smallest_card == card


def test_target_of_a_draft_is_frozen(folder: Path) -> None:
    def plan(*changes: str) -> Plan:
        return plan_recipe(tiny(folder, "steps=100", *changes, name="draft"))

    features = f"data.features={folder / 'features'}"
    plain, half = plan(), plan("dtype=bfloat16", "precision=bf16", features)
    parameters = load_model("tiny-aux").parameters()
    assert plain.others == sum(parameter.numel() for parameter in parameters)
    assert plain.frozen == 2 * half.frozen == 4 * plain.others
    assert plain.features == 0 and plain.work > half.work
    assert half.features == pytest.approx(64 * half.example * 2 * 128 * 2)


@pytest.mark.nightly
def test_quantized_target_takes_less_memory(folder: Path) -> None:
    plain, small = (
        plan_recipe(tiny(folder, f"model.quantize={form}", name="draft"))
        for form in ("none", "int8")
    )
    assert 2 * plain.others < plain.frozen - small.frozen < 3 * plain.others
    assert small.others == plain.others


@pytest.mark.parametrize("begun", ["model.init=tiny-aux", None])
def test_only_drafts_have_a_target(begun: str | None) -> None:
    words = ["model.target=tiny-ar", *([begun] if begun else [])]
    with pytest.raises(ValueError, match="target .*Qwen2ForCausalLM"):
        plan_recipe(load_recipe("tiny-aux", words))


LARGE = ("batch=16", "model.config.hidden_size=128", "model.config.intermediate_size=384")
"""Changes after which small tensors do not count."""

DREAM = ('model.config.architectures=["DreamModel"]', "model.config.mask_token_id=1021")


@pytest.mark.parametrize(
    ("name", "changes", "least", "most"),
    [
        ("whole", (), 0.9, 1.1),
        ("whole", ("recompute=true",), 0.9, 1.1),
        ("whole", ("accumulation=4",), 0.9, 1.1),
        ("whole", (*DREAM, "objective.name=d2f"), 0.9, 1.1),
        ("whole", ("adapter.rank=4",), 1, 1.5),
        pytest.param("draft", (), 1, 1.5, marks=pytest.mark.nightly),
    ],
)
def test_planned_memory_is_that_of_a_run(
    name: str, changes: tuple[str, ...], least: float, most: float, folder: Path
) -> None:
    recipe = tiny(folder, "optimizer=adamw", *LARGE, *changes, name=name)
    trainer = recipe.build_trainer()
    memory = PeakMemory(trainer.model, *trainer.loss_module.models.others.values())
    with memory:
        trainer.train_step(0, 3)  # allocates the state of the optimizer
        memory.peak = 0
        trainer.train_step(1, 3)
    trainer.close()
    assert least <= plan_recipe(recipe).device_bytes / memory.peak <= most
