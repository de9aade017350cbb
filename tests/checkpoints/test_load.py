"""Checkpoint folders: loading, saving, and the error of each invalid one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import causal_model, diffusion_model, published, whole
from outpace.checkpoints import load, positions
from outpace.checkpoints.load import (
    load_config,
    load_model,
    resolve_checkpoint,
    save_model,
    translate_config,
)

IDS = [3, 1, 4, 1, 5, 9, 2, 6]
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(causal_model(), tmp_path, dtype=torch.float32)
    return tmp_path


def change(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def rewrite(folder: Path, drop: str = "", **tensors: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    kept = {**load_file(path), **tensors}
    kept.pop(drop, None)
    save_file(kept, path)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("make", [causal_model, diffusion_model])
def test_saved_model_loads_unchanged(make, tied: bool, tmp_path: Path) -> None:
    model = make(tie_word_embeddings=tied)
    save_model(model, tmp_path, dtype=torch.float32)
    loaded = load_model(tmp_path)
    assert loaded.config == model.config
    assert torch.equal(whole(loaded, IDS, causal=True), whole(model, IDS, causal=True))
    names = load_file(tmp_path / "model.safetensors").keys()
    assert "model.layers.0.self_attn.q_proj.bias" in names
    assert ("lm_head.weight" in names) is not tied


def test_missing_folder_names_the_options() -> None:
    with pytest.raises(ValueError, match="no model 'no-such-model': give a folder"):
        resolve_checkpoint("no-such-model")


def test_hub_failure_names_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> str:
        raise OSError("offline")

    monkeypatch.setattr(load, "snapshot_download", refuse)
    with pytest.raises(
        ValueError, match="cannot download 'someone/something' from the hub: offline"
    ):
        load_model("someone/something")


def test_broken_config_names_the_file(folder: Path) -> None:
    (folder / "config.json").write_text('{"architectures": [')
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        load_model(folder)


def test_unknown_architecture_names_it_and_the_known_ones(folder: Path) -> None:
    change(folder, architectures=["MambaForCausalLM"])
    with pytest.raises(ValueError, match=r"config\.json: .*MambaForCausalLM.*Qwen2ForCausalLM"):
        load_model(folder)


def test_missing_tensor_names_it(folder: Path) -> None:
    rewrite(folder, drop=DOWN)
    with pytest.raises(ValueError, match=f"{folder}.*no tensor '{DOWN}'"):
        load_model(folder)


def test_wrong_shape_names_tensor_file_and_both_shapes(folder: Path) -> None:
    rewrite(folder, **{DOWN: torch.zeros(32, 40)})
    wanted = rf"model\.safetensors: tensor '{DOWN}' has shape \(32, 40\).*\(32, 48\)"
    with pytest.raises(ValueError, match=wanted):
        load_model(folder)


def test_pickled_weights_alone_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"never read")
    with pytest.raises(ValueError, match=r"only pickled weights \(pytorch_model\.bin\)"):
        load_model(folder)


def test_missing_shard_is_named(folder: Path) -> None:
    index = {"weight_map": {DOWN: "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"names model-00002-of-00002\.safetensors, which"):
        load_model(folder)


def test_unreadable_weights_are_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a readable safetensors"):
        load_model(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_refused(folder: Path, value: float) -> None:
    weight = torch.zeros(32, 48)
    weight[3, 5] = value
    rewrite(folder, **{DOWN: weight})
    with pytest.raises(ValueError, match=rf"safetensors: tensor '{DOWN}' has NaN or infinite"):
        load_model(folder)


def test_a_tied_head_may_be_stored_as_well(folder: Path) -> None:
    change(folder, tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"1 tensors .* such as 'lm_head\.weight'"):
        load_model(folder)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(folder, **{"lm_head.weight": embedding})
    assert load_model(folder).unembedding is None


def test_too_large_rotary_tables_need_a_limit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(positions, "MAX_ROTARY_ENTRIES", 1279)
    with pytest.raises(ValueError, match=r"tables of 160 positions.*set a smaller max_length"):
        load_model(folder)
    assert len(load_model(folder, max_length=159).cos) == 159
    for wrong in (0, -1, 1.5, 10**30):
        with pytest.raises(ValueError, match="max_length must be a whole number.*got .*"):
            load_model(folder, max_length=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("index", ["../other.safetensors", "/etc/passwd", "."])
def test_an_index_names_files_of_its_own_folder(folder: Path, index: str) -> None:
    (folder.parent / "other.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": index}}))
    with pytest.raises(ValueError, match=rf"index\.json names {index}, which .* does not have"):
        load_model(folder)


def test_a_model_without_all_of_its_parameters_is_not_saved(tmp_path: Path) -> None:
    model = causal_model()
    model.blocks[0].mlp.down = torch.nn.Identity()
    with pytest.raises(
        ValueError, match=r"'blocks\.0\.mlp\.down\.weight' is missing, unexpected or of"
    ):
        save_model(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize(
    ("field", "eos"), [(None, ()), (7, (7,)), ([7, 9], (7, 9))], ids=["none", "one", "two"]
)
def test_end_of_sequence_is_read(field: object, eos: tuple[int, ...]) -> None:
    assert translate_config(published(eos_token_id=field)).eos == eos


def generates(folder: Path, content: str) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(published(eos_token_id=3)))
    (folder / "generation_config.json").write_text(content)
    return folder


@pytest.mark.parametrize(
    ("content", "eos"),
    [
        ('{"eos_token_id": 7}', (3, 7)),
        ('{"eos_token_id": [7, 3, 9]}', (3, 7, 9)),
        ('{"eos_token_id": null, "temperature": 0.6}', (3,)),
        ("{}", (3,)),
    ],
)
def test_end_tokens_of_the_generation_config_end_an_answer(
    tmp_path: Path, content: str, eos: tuple[int, ...]
) -> None:
    assert load_config(generates(tmp_path / "model", content)).eos == eos
