"""int8 checkpoints: equal to quantizing while loading, and written atomically."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from helpers import (
    VOCAB,
    causal_model,
    extending_draft,
    feature_draft,
    published,
    random_model,
    save_tokenizer,
    whole,
)
from outpace import LLM
from outpace.checkpoints import compress as module
from outpace.checkpoints import fill
from outpace.checkpoints.adapter import LowRank, save_adapter
from outpace.checkpoints.compress import compress_checkpoint
from outpace.checkpoints.load import (
    CONFIG_FILE,
    load_config,
    load_draft,
    load_model,
    save_model,
)
from outpace.checkpoints.partial import lock_partial_folder
from outpace.checkpoints.quantised import QUANTIZATION_FIELD
from outpace.errors import OptionError
from outpace.models import int8
from outpace.models.draft import Draft
from outpace.models.int8 import Int8Linear, has_int8_products, is_quantized
from outpace.models.transformer import Transformer
from prepared import prepared

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
DOWN = "model.layers.1.mlp.down_proj.weight"
IDS = [1, 2, 3, 4]
needs_products = pytest.mark.skipif(
    not has_int8_products(), reason="this machine has no products of 8 bits"
)


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def plain(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Write a checkpoint with a tokenizer."""
    model = random_model(published(tie_word_embeddings=request.param, vocab_size=260))
    save_model(model, tmp_path / "plain")
    save_tokenizer(tmp_path / "plain")
    return tmp_path / "plain"


def logits(model: Transformer) -> torch.Tensor:
    """Compute the logits of some rows."""
    return whole(model, IDS, causal=True)


@needs_products
def test_a_written_model_equals_one_quantized_on_load(plain: Path) -> None:
    folder = compress_checkpoint(plain, plain.parent / "small")
    direct = load_model(plain, quantize="int8")
    for quantize in (None, "int8"):
        again = load_model(folder, quantize=quantize)
        assert is_quantized(again) and torch.equal(logits(again), logits(direct))
    prompts, options = ["hello", "you there"], {"max_tokens": 12, "raw": True}
    outputs = [
        llm.generate(prompts, **options) for llm in (LLM(folder), LLM(plain, quantize="int8"))
    ]
    assert [output.ids for output in outputs[0]] == [output.ids for output in outputs[1]]
    assert load_config(folder) == load_config(plain)


def test_a_written_model_has_the_published_format(plain: Path) -> None:
    folder = compress_checkpoint(plain, plain.parent / "small")
    tensors, before = load_file(folder / FILE), load_file(plain / FILE)
    matrices = {name for name, tensor in before.items() if tensor.dim() == 2}
    assert {name for name, tensor in tensors.items() if tensor.dtype == torch.int8} == matrices
    assert tensors.keys() == before.keys() | {f"{name}_scale" for name in matrices}
    assert tensors[f"{DOWN}_scale"].shape == (32, 1)
    codes, scale = tensors[DOWN].float(), tensors[f"{DOWN}_scale"]
    assert ((codes * scale - before[DOWN].float()).abs() <= scale * 0.501).all()
    config = json.loads((folder / CONFIG_FILE).read_text())
    assert config[QUANTIZATION_FIELD]["format"] == "int-quantized"
    assert config[QUANTIZATION_FIELD]["ignore"] == (
        ["lm_head"] if config["tie_word_embeddings"] else []
    )
    assert (folder / "tokenizer.json").read_bytes() == (plain / "tokenizer.json").read_bytes()
    assert not list(plain.parent.glob(".*"))


@needs_products
@pytest.mark.parametrize("kind", ["dflash", "eagle3"])
def test_a_written_draft_equals_one_quantized_on_load(kind: str, tmp_path: Path) -> None:
    target = causal_model()
    save_model(target, tmp_path / "target", dtype=torch.float32)
    if kind == "eagle3":
        own: Draft = extending_draft(target, vocab_size=VOCAB, draft_vocab_size=10)
        own.set_head_tokens(torch.arange(3, 23, 2))
    else:
        own = feature_draft(target)
    plain, small = tmp_path / "plain", tmp_path / "small"
    save_model(own, plain, dtype=torch.float32)
    copy = {"embed_tokens.weight": target.embedding.weight.clone()}
    save_file({**load_file(plain / FILE), **copy}, plain / FILE)
    compress_checkpoint(plain, small, target=tmp_path / "target")
    assert "embed_tokens.weight" not in load_file(small / FILE)
    found, wanted = load_draft(small, target), load_draft(plain, target, quantize="int8")
    assert isinstance(found.fusion, Int8Linear)
    ours, theirs = found.state_dict(), wanted.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_draft_needs_its_target_and_only_a_draft(plain: Path) -> None:
    small = plain.parent / "small"
    with pytest.raises(OptionError, match="'tiny-dflash' is a draft: give its target too"):
        compress_checkpoint("tiny-dflash", small)
    with pytest.raises(OptionError, match="target is only for drafts, and 'tiny-ar' is not one"):
        compress_checkpoint("tiny-ar", small, target="tiny-ar")
    with pytest.raises(ValueError, match="the draft was trained for another target"):
        compress_checkpoint("tiny-dflash", small, target=plain)
    for wrong, message in (("tiny-eagle", "'tiny-eagle' is a draft that"), ("x", "no model 'x'")):
        with pytest.raises(OptionError, match=f"^target: {message}") as caught:
            compress_checkpoint("tiny-dflash", small, target=wrong)
        assert caught.value.param == "target"
    assert not small.exists()


@needs_products
def test_stored_codes_are_kept(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = compress_checkpoint(plain, plain.parent / "small")
    change = {f"{DOWN}_scale": load_file(folder / FILE)[f"{DOWN}_scale"] * 1.01}
    save_file({**load_file(folder / FILE), **change}, folder / FILE)

    def refuse(*args: object) -> None:
        raise AssertionError("quantised once more")

    monkeypatch.setattr(int8, "quantize_weight", refuse)
    layer = load_model(folder, quantize="int8").blocks[1].mlp.down
    assert isinstance(layer, Int8Linear)
    assert torch.equal(layer.scale, change[f"{DOWN}_scale"].flatten())


@needs_products
def test_rows_are_rounded_if_the_file_requests_it(plain: Path) -> None:
    folder = compress_checkpoint(plain, plain.parent / "small")
    config = json.loads((folder / CONFIG_FILE).read_text())
    config[QUANTIZATION_FIELD]["config_groups"]["group_0"]["input_activations"] = None
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    assert not is_quantized(load_model(folder))
    assert is_quantized(load_model(folder, quantize="int8"))


@needs_products
def test_an_update_is_added_to_dequantized_matrices(plain: Path) -> None:
    folder = compress_checkpoint(plain, plain.parent / "small")
    update = {DOWN: LowRank(torch.ones(1, 48), torch.ones(32, 1), 1.0)}
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["down_proj"]}
    save_adapter(plain.parent / "lora", update, config)
    model = load_model(folder, adapter=plain.parent / "lora")
    before = load_model(folder, plain=True)
    assert not isinstance(model.blocks[1].mlp.down, Int8Linear)
    assert isinstance(model.blocks[0].mlp.down, Int8Linear)
    torch.testing.assert_close(
        model.blocks[1].mlp.down.weight, before.blocks[1].mlp.down.weight + 1
    )


def test_without_products_or_for_training_it_is_dequantized(
    plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = compress_checkpoint(plain, plain.parent / "small")
    tensors = load_file(folder / FILE)
    wanted = tensors[DOWN].float() * tensors[f"{DOWN}_scale"]
    assert torch.equal(load_model(folder, plain=True).blocks[1].mlp.down.weight, wanted)
    monkeypatch.setattr(fill, "has_int8_products", lambda: False)
    model = load_model(folder, dtype=torch.bfloat16)
    assert torch.equal(model.blocks[1].mlp.down.weight, wanted.bfloat16())


def test_shards_stay_shards(plain: Path) -> None:
    tensors = load_file(plain / FILE)
    names = sorted(tensors)
    files = {f"part-{n}.safetensors": names[n::2] for n in range(2)}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, plain / file)
    where = {name: file for file, part in files.items() for name in part}
    (plain / INDEX).write_text(json.dumps({"weight_map": where}))
    (plain / FILE).unlink()
    seen: list[tuple[int, int]] = []
    folder = compress_checkpoint(
        plain, plain.parent / "small", progress=lambda *done: seen.append(done)
    )
    assert {path.name for path in folder.glob("*.safetensors")} == set(files)
    assert seen == [(n, len(names)) for n in range(1, len(names) + 1)]
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    assert index[f"{DOWN}_scale"] == index[DOWN] == where[DOWN]
    load_model(folder)


def test_quantized_models_and_existing_folders_are_refused(plain: Path, tmp_path: Path) -> None:
    folder = compress_checkpoint(plain, tmp_path / "small")
    with pytest.raises(ValueError, match="small' is already quantized: give the original"):
        compress_checkpoint(folder, tmp_path / "third")
    with pytest.raises(ValueError, match="small exists: name a new folder"):
        compress_checkpoint(plain, folder)
    with pytest.raises(ValueError, match="unknown format 'int3' to quantize to; known are int8"):
        compress_checkpoint(plain, tmp_path / "third", to="int3")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file exists"):
        compress_checkpoint(plain, tmp_path / "file")
    with pytest.raises(ValueError, match="cannot be written: .*(exists|Not a directory)"):
        compress_checkpoint(plain, tmp_path / "file" / "in it")
    (tmp_path / "empty").mkdir()
    load_model(compress_checkpoint(plain, tmp_path / "empty"))


@pytest.mark.parametrize("error", [OSError(28, "No space left"), SafetensorError("no space")])
def test_a_full_disk_leaves_nothing(
    error: Exception, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(module, "save_file", fail)
    with pytest.raises(ValueError, match="small cannot be written: "):
        compress_checkpoint(plain, plain.parent / "small")
    assert [path.name for path in plain.parent.iterdir()] == ["plain"]


def test_ctrl_c_leaves_nothing(plain: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if done == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compress_checkpoint(plain, plain.parent / "small", progress=interrupt)
    assert [path.name for path in plain.parent.iterdir()] == ["plain"]


def test_folders_of_killed_processes_are_removed(plain: Path) -> None:
    home = plain.parent
    kept = [home / name for name in (".small.7.partial", ".other.8.partial", ".small.partial")]
    for folder in [*kept, home / ".small.9.partial"]:
        folder.mkdir()
        (folder / FILE).write_text("half")
    with lock_partial_folder(kept[0]):
        compress_checkpoint(plain, home / "small")
    assert sorted(home.iterdir()) == sorted([*kept, plain, home / "small"])
    shutil.rmtree(home / "small")
    compress_checkpoint(plain, home / "small")
    assert sorted(home.iterdir()) == sorted([*kept[1:], plain, home / "small"])


SLOWLY = """
import time
from outpace.cli.main import main
from outpace.checkpoints import compress

def wait(tensors, path, **more):
    path.write_text("half")
    print("writing", flush=True)
    time.sleep(60)

compress.save_file = wait
main(["quantize", "plain", "--output", "small"])
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("number", "status", "left"),
    [
        (signal.SIGTERM, 143, []),
        (signal.SIGINT, 130, []),
        (signal.SIGKILL, -9, [r"\.small\.\d+\.partial"]),
    ],
)
def test_signals_that_end_the_command(
    number: signal.Signals, status: int, left: list[str], plain: Path
) -> None:
    home, pipe = plain.parent, subprocess.PIPE
    command = [sys.executable, "-c", SLOWLY]
    with subprocess.Popen(command, cwd=home, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "writing\n"
        process.send_signal(number)
        _, errors = process.communicate()
    assert process.returncode == status
    assert errors.startswith("outpace: ") is (status > 0) and errors.count("\n") == (status > 0)
    found = sorted(path.name for path in home.iterdir())
    assert [*map(re.fullmatch, [*left, "plain"], found)].count(None) == 0
    compress_checkpoint(plain, home / "small")
    assert sorted(path.name for path in home.iterdir()) == ["plain", "small"]


@pytest.mark.nightly
def test_the_command_on_a_full_disk(tmp_path: Path) -> None:
    save_model(random_model(published(hidden_size=256)), tmp_path / "plain")
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))"
    command = prepared(limit, "-m", "outpace", "quantize", "plain", "--output", "small")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and last.startswith("outpace: small cannot be written: ")
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]


def test_weights_that_are_not_finite_are_refused(plain: Path) -> None:
    tensors: dict[str, Any] = load_file(plain / FILE)
    tensors[DOWN][0, 0] = float("nan")
    save_file(tensors, plain / FILE)
    with pytest.raises(ValueError, match=f"{DOWN}' has NaN or infinite values"):
        compress_checkpoint(plain, plain.parent / "small")


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_transformers_reads_it(plain: Path) -> None:
    from transformers import CompressedTensorsConfig, Qwen2ForCausalLM

    folder = compress_checkpoint(plain, plain.parent / "small")
    theirs = Qwen2ForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    save_model(load_model(folder, plain=True), plain.parent / "dense", dtype=torch.float32)
    ours = load_file(plain.parent / "dense" / FILE)
    found = {name: tensor for name, tensor in theirs.state_dict().items() if name in ours}
    assert found.keys() == ours.keys()
    for name, tensor in ours.items():
        assert torch.equal(found[name], tensor), name
