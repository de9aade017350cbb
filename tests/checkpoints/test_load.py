"""Checkpoint folders: loading, saving, and the error of each invalid one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
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
from outpace.checkpoints.name import name_of

IDS = [3, 1, 4, 1, 5, 9, 2, 6]
WEIGHTS = "model.safetensors"
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
    kept = {**load_file(folder / WEIGHTS), **tensors}
    kept.pop(drop, None)
    save_file(kept, folder / WEIGHTS)


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


def test_missing_models_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> str:
        raise OSError("offline")

    monkeypatch.setattr(load, "snapshot_download", refuse)
    for name, load_ in (("no-such-model", resolve_checkpoint), ("some/thing", load_model)):
        with pytest.raises(ValueError, match=name):
            load_(name)


def replace_weights(file: str, content: bytes) -> Callable[[Path], object]:
    def replace(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / file).write_bytes(content)

    return replace


def write_index(name: str) -> Callable[[Path], object]:
    index = json.dumps({"weight_map": {DOWN: name}})
    return lambda folder: (folder / "model.safetensors.index.json").write_text(index)


def down(value: float, columns: int = 48) -> Callable[[Path], object]:
    weight = torch.zeros(32, columns)
    weight[3, 5] = value
    return lambda folder: rewrite(folder, **{DOWN: weight})


INVALID: dict[str, tuple[str, Callable[[Path], object]]] = {
    "no JSON": ("config.json", lambda folder: (folder / "config.json").write_text("[")),
    "architecture": ("MambaF", lambda folder: change(folder, architectures=["MambaForCausalLM"])),
    "no tensor": (DOWN, lambda folder: rewrite(folder, drop=DOWN)),
    "shape": (DOWN, down(0.0, columns=40)),
    "NaN": (DOWN, down(float("nan"))),
    "infinite": (DOWN, down(float("inf"))),
    "negative infinite": (DOWN, down(-float("inf"))),
    "another tensor": ("lm_head.weight", lambda folder: change(folder, tie_word_embeddings=True)),
    "pickled": ("pytorch_model.bin", replace_weights("pytorch_model.bin", b"never read")),
    "truncated": (WEIGHTS, replace_weights(WEIGHTS, bytes(100))),
    "no shard": ("model-00002-of", write_index("model-00002-of-00002.safetensors")),
    "another folder": ("other.safetensors", write_index("../other.safetensors")),
    "absolute path": ("/etc/passwd", write_index("/etc/passwd")),
    "a folder": ("index.json", write_index(".")),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_checkpoints_are_refused(name: str, folder: Path) -> None:
    token, edit = INVALID[name]
    (folder.parent / "other.safetensors").write_bytes((folder / WEIGHTS).read_bytes())
    edit(folder)
    with pytest.raises(ValueError, match=re.escape(token)):
        load_model(folder)


def test_a_tied_head_may_be_stored_as_well(folder: Path) -> None:
    change(folder, tie_word_embeddings=True)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(folder, **{"lm_head.weight": embedding})
    assert load_model(folder).unembedding is None


def test_too_large_rotary_tables_need_a_limit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(positions, "MAX_ROTARY_ENTRIES", 1279)
    with pytest.raises(ValueError, match="max_length"):
        load_model(folder)
    assert len(load_model(folder, max_length=159).cos) == 159
    for wrong in (0, -1, 1.5, 10**30):
        with pytest.raises(ValueError, match="max_length"):
            load_model(folder, max_length=wrong)  # type: ignore[arg-type]


def test_a_model_without_all_of_its_parameters_is_not_saved(tmp_path: Path) -> None:
    model = causal_model()
    model.blocks[0].mlp.down = torch.nn.Identity()
    with pytest.raises(ValueError, match=r"blocks\.0\.mlp\.down\.weight"):
        save_model(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize(
    ("field", "eos"), [(None, ()), (7, (7,)), ([7, 9], (7, 9))], ids=["none", "one", "two"]
)
def test_end_of_sequence_is_read(field: object, eos: tuple[int, ...]) -> None:
    assert translate_config(published(eos_token_id=field)).eos == eos


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
    (tmp_path / "config.json").write_text(json.dumps(published(eos_token_id=3)))
    (tmp_path / "generation_config.json").write_text(content)
    assert load_config(tmp_path).eos == eos


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("qwen/model-q4_k_m.gguf", "model-q4_k_m"),
        ("MODEL.GGUF", "MODEL"),
        ("v1.5.gguf", "v1.5"),
        ("folder/", "folder"),
        ("folder.gguf/", "folder.gguf"),
        ("a/b/../checkpoint-100/", "checkpoint-100"),
        ("two\nlines/", "two_lines"),
        ("hub/models--Qwen--Qwen3-0.6B/snapshots/0123abc/", "Qwen/Qwen3-0.6B"),
        ("hub/models--Qwen--Qwen3--x/snapshots/0123abc/", "Qwen/Qwen3--x"),
        ("hub/models--Qwen--Qwen3-0.6B/snapshots/0123abc/q8_0.gguf", "q8_0"),
    ],
)
def test_files_and_folders_have_the_name_of_their_last_part(
    path: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / path
    (made if path.endswith("/") else made.parent).mkdir(parents=True, exist_ok=True)
    (tmp_path / "a" / "b").mkdir(parents=True, exist_ok=True)
    if not path.endswith("/"):
        made.touch()
    assert name_of(made) == name_of(str(made)) == name
    monkeypatch.chdir(tmp_path)
    assert name_of(path) == name
