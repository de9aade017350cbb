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
    """Write a small checkpoint."""
    save_model(causal_model(), tmp_path, dtype=torch.float32)
    return tmp_path


def change(folder: Path, **fields: object) -> None:
    """Change fields of a `config.json`; None removes one."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def rewrite(folder: Path, drop: str = "", **tensors: torch.Tensor) -> None:
    """Change tensors of a `model.safetensors`."""
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


def test_weights_are_written_as_bfloat16_by_default(tmp_path: Path) -> None:
    save_model(causal_model(), tmp_path)
    kinds = {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()}
    assert kinds == {torch.bfloat16}
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_loaded_parameters_have_no_gradients_and_the_dtype(folder: Path) -> None:
    model = load_model(folder, dtype=torch.bfloat16)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.cos.dtype == torch.bfloat16


def test_max_length_limits_the_rotary_tables(folder: Path) -> None:
    model = load_model(folder, max_length=len(IDS))
    assert model.config.max_length == len(model.cos) == len(IDS)
    assert torch.equal(whole(model, IDS, causal=True), whole(load_model(folder), IDS, causal=True))


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


def test_shorter_length_is_not_written_back(folder: Path, tmp_path: Path) -> None:
    model = load_model(folder, max_length=16)
    assert model.config.max_length == len(model.cos) == 16
    save_model(model, tmp_path / "again")
    assert load_config(tmp_path / "again").max_length > 16


def test_missing_config_names_the_file(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        load_model(folder)


def test_unknown_architecture_names_it_and_the_known_ones(folder: Path) -> None:
    change(folder, architectures=["MambaForCausalLM"])
    with pytest.raises(ValueError, match=r"config\.json: .*MambaForCausalLM.*Qwen2ForCausalLM"):
        load_model(folder)


def test_missing_field_names_it(folder: Path) -> None:
    change(folder, hidden_size=None)
    with pytest.raises(ValueError, match=r"config\.json: field 'hidden_size' is missing"):
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


def test_wrong_number_of_rows_in_a_stacked_tensor_is_refused(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    key, value = (f"model.layers.0.self_attn.{kind}_proj.weight" for kind in "kv")
    rewrite(
        folder, **{key: weights[key][:-1], value: torch.cat((weights[value], weights[key][:1]))}
    )
    with pytest.raises(ValueError, match=r"k_proj\.weight' has shape \(15, 32\)"):
        load_model(folder)


def test_pickled_weights_alone_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"never read")
    with pytest.raises(ValueError, match=r"only pickled weights \(pytorch_model\.bin\)"):
        load_model(folder)


def test_missing_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no model\.safetensors"):
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


def test_values_too_large_for_a_dtype_are_refused(folder: Path) -> None:
    rewrite(folder, **{DOWN: torch.full((32, 48), 3e38)})
    load_model(folder)
    load_model(folder, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=rf"'{DOWN}' has NaN .* in torch\.float16; choose a wider"):
        load_model(folder, dtype=torch.float16)


def test_unused_tensors_are_refused(folder: Path) -> None:
    change(folder, num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"12 tensors .* such as 'model\.layers\.1\..*supported"):
        load_model(folder)
    change(folder, num_hidden_layers=2)
    for name in ("model.layers.0.self_attn.o_proj.bias", "model.layers.0.mlp.weight_scale_inv"):
        rewrite(folder, **{name: torch.ones(32)})
        with pytest.raises(ValueError, match=f"1 tensors .* such as '{name}'; supported: Qwen2"):
            load_model(folder)
        rewrite(folder, drop=name)
    rewrite(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    load_model(folder)


def test_a_tied_head_may_be_stored_as_well(folder: Path) -> None:
    change(folder, tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"1 tensors .* such as 'lm_head\.weight'"):
        load_model(folder)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(folder, **{"lm_head.weight": embedding})
    assert load_model(folder).unembedding is None


def test_missing_layers_are_refused_before_allocation(folder: Path) -> None:
    change(folder, num_hidden_layers=4096)
    with pytest.raises(ValueError, match=r"no tensor 'model\.layers\.4095\."):
        load_model(folder)
    change(folder, num_hidden_layers=4097)
    with pytest.raises(ValueError, match=r"num_hidden_layers must be .* to 4096.*got 4097"):
        load_model(folder)


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


def test_a_hub_name_is_looked_up_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = []

    def download(name: str, **options: object) -> str:
        requests.append(name)
        return str(folder)

    monkeypatch.setattr(load, "snapshot_download", download)
    load_model("someone/something", adapter=None)
    assert requests == ["someone/something"]
    load.load_tokenizer("someone/something")
    assert requests == ["someone/something"] * 2


def test_a_model_without_all_of_its_parameters_is_not_saved(tmp_path: Path) -> None:
    model = causal_model()
    model.blocks[0].mlp.down = torch.nn.Identity()
    with pytest.raises(
        ValueError, match=r"'blocks\.0\.mlp\.down\.weight' is missing, unexpected or of"
    ):
        save_model(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN's layouts")
def test_packed_parameters_are_written_row_major(tmp_path: Path) -> None:
    model, plain = causal_model(), causal_model()
    linear = model.blocks[0].mlp.down
    linear.weight = torch.nn.Parameter(linear.weight.detach().to_mkldnn(), requires_grad=False)
    save_model(model, tmp_path, dtype=torch.float32)
    assert torch.equal(
        whole(load_model(tmp_path), IDS, causal=True), whole(plain, IDS, causal=True)
    )


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=f"{tmp_path}/file/model cannot be written"):
        save_model(causal_model(), tmp_path / "file" / "model")


def test_sliding_window_is_refused(folder: Path) -> None:
    change(folder, use_sliding_window=True)
    with pytest.raises(ValueError, match="use_sliding_window"):
        load_config(folder)


def test_diffusion_model_without_mask_is_refused() -> None:
    with pytest.raises(ValueError, match="mask_token_id"):
        translate_config(published("DreamModel"))


def test_mask_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="mask_id 24 is outside the vocabulary of 24"):
        translate_config(published("DreamModel", mask_token_id=24))


def test_heads_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 3 key.value heads, got 4"):
        translate_config(published(num_key_value_heads=3))


def test_unknown_rotary_scaling_is_refused(folder: Path) -> None:
    change(folder, rope_scaling={"type": "longrope", "factor": 2.0})
    with pytest.raises(ValueError, match="'longrope' is not supported"):
        load_model(folder)


@pytest.mark.parametrize(
    ("field", "eos"), [(None, ()), (7, (7,)), ([7, 9], (7, 9))], ids=["none", "one", "two"]
)
def test_end_of_sequence_is_read(field: object, eos: tuple[int, ...]) -> None:
    assert translate_config(published(eos_token_id=field)).eos == eos


def generates(folder: Path, content: str) -> Path:
    """Write a checkpoint with a `generation_config.json`."""
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


@pytest.mark.parametrize("content", ['{"eos_token_id": "x"}', '{"eos_token_id": -1}', "{", "[]"])
def test_a_broken_generation_config_is_named(tmp_path: Path, content: str) -> None:
    with pytest.raises(ValueError, match="generation_config.json"):
        load_config(generates(tmp_path / "model", content))
