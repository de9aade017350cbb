"""Checkpoint folders: weights, tokenizers and drafts, and the error of each invalid one."""

import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast, dynamic_module_utils

from adapting import write_adapter
from helpers import causal_model, diffusion_model, loaded_models, published, save_tokenizer, whole
from outpace import LLM
from outpace.api.rendering import render_chat
from outpace.checkpoints import checkpoint, hub
from outpace.checkpoints.checkpoint import load_tokenizer, translate_config
from outpace.checkpoints.gguf import file
from outpace.checkpoints.hub import ZOO_TOKENIZER, resolve_checkpoint
from outpace.checkpoints.load import load_config, load_model, save_model
from outpace.checkpoints.name import name_of
from outpace.methods import DFlash, Speculative
from refusal import refuses

IDS = [3, 1, 4, 1, 5, 9, 2, 6]
WEIGHTS = "model.safetensors"
PAIR = Path(__file__).parent.parent / "golden" / "dflash" / "pair_b"
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

    monkeypatch.setattr(hub.huggingface_hub, "snapshot_download", refuse)
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
    monkeypatch.setattr(checkpoint, "MAX_ROTARY_ENTRIES", 1279)
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
        ('{"eos_token_id": 7}', (3, 5, 7)),
        ('{"eos_token_id": [7, 3, 9]}', (3, 5, 7, 9)),
        ('{"eos_token_id": null, "temperature": 0.6}', (3, 5)),
        ("{}", (3, 5)),
    ],
)
def test_end_tokens_of_the_generation_config_end_an_answer(
    tmp_path: Path, content: str, eos: tuple[int, ...]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published(eos_token_id=[3, 5])))
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


def test_a_draft_of_the_zoo_is_selected() -> None:
    llm = LLM("tiny-ar", DFlash(draft="auto"), cache_gib=0.05)
    texts = [
        llm.generate("Tom has 5 coins.", method=method, max_tokens=12, seed=1)[0]
        for method in (None, DFlash(draft="tiny-dflash"), Speculative(draft="auto"))
    ]
    assert {text.text for text in texts} == {texts[0].text}
    assert texts[0].forwards == texts[1].forwards
    assert set(loaded_models(llm)) == {"tiny-ar", "tiny-dflash", "tiny-aux"}


@pytest.mark.parametrize("draft", ["draft", "draft.gguf"])
def test_each_configuration_is_read_once(
    draft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = shutil.copytree(PAIR, tmp_path / "pair")
    adapter = write_adapter(tmp_path / "adapter", load_config(pair / "target"), size=0.05)
    opened: list[str] = []

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def note(path: Any, *rest: Any, **options: Any) -> Any:
            if function is read_header or str(path).endswith("config.json"):
                opened.append(str(path))
            return function(path, *rest, **options)

        return note

    read_header = file.read_header
    monkeypatch.setattr(file, "read_header", noting(read_header))
    monkeypatch.setattr(io, "open", noting(io.open))
    LLM(pair / "target", DFlash(draft=str(pair / draft)), adapter=adapter, cache_gib=0.05)
    config = pair / draft if draft.endswith(".gguf") else pair / draft / "config.json"
    paths = (pair / "target" / "config.json", adapter / "adapter_config.json", config)
    assert sorted(opened) == sorted(map(str, paths))


def test_a_missing_draft_is_named_and_not_downloaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    requests = []

    def snapshot(name: str, *, local_files_only: bool = False, **others: object) -> str:
        requests.append((name, local_files_only))
        raise FileNotFoundError

    monkeypatch.setattr(hub.huggingface_hub, "snapshot_download", snapshot)
    shutil.copytree(hub.ZOO_FOLDER / "tiny-ar", tmp_path / "Qwen3-8B")
    with pytest.raises(ValueError, match="z-lab/Qwen3-8B-DFlash-b16"):
        LLM(tmp_path / "Qwen3-8B", DFlash(draft="auto"), cache_gib=0.05)
    drafts = ("z-lab/Qwen3-8B-DFlash-b16", "deepseek-ai/dspark_qwen3_8b_block7")
    assert requests == [(draft, True) for draft in drafts]
    shutil.copytree(hub.ZOO_FOLDER / "tiny-ar", tmp_path / "mine")
    with refuses("draft"):
        LLM(tmp_path / "mine", Speculative(draft="auto"), cache_gib=0.05)


def test_a_draft_in_the_hub_cache_is_selected(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        hub.huggingface_hub, "snapshot_download", lambda name, **others: str(tmp_path)
    )
    assert not hub.is_local("z-lab/Qwen3-8B-DFlash-b16")
    (tmp_path / "config.json").write_text("{}")
    assert hub.is_local("z-lab/Qwen3-8B-DFlash-b16")


MARKS = {257: "<|endoftext|>", 258: "<|im_start|>", 259: "<|im_end|>", 260: "<|mask|>"}
HELLO = [{"role": "user", "content": "hello"}]


def mark(content: str) -> dict[str, object]:
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    return {"content": content, **flags, "special": True}


@pytest.fixture
def dream(tmp_path: Path) -> Path:
    save_model(diffusion_model(vocab_size=261, mask_token_id=260), tmp_path, dtype=torch.float32)
    vocab = {byte: index for index, byte in enumerate(sorted(ByteLevel.alphabet()))}
    (tmp_path / "vocab.json").write_text(json.dumps({**vocab, "he": 256}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh e\n")
    config = {
        "tokenizer_class": "DreamTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
        "added_tokens_decoder": {str(index): mark(content) for index, content in MARKS.items()},
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
        "mask_token": "<|mask|>",
        "model_max_length": 131072,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "tokenization_dream.py").write_text("raise SystemExit('remote code was run')")
    return tmp_path


def test_remote_class_is_read_without_its_code(
    dream: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("remote code was asked for")

    for name in ("get_class_from_dynamic_module", "resolve_trust_remote_code"):
        monkeypatch.setattr(dynamic_module_utils, name, refuse)
    monkeypatch.setattr("builtins.input", refuse)
    tokenizer = load_tokenizer(dream)
    assert tokenizer is not None
    ids = tokenizer("hehello").input_ids
    assert ids[:2] == [256, 256] and len(ids) == 5
    assert tokenizer.decode(ids) == "hehello"
    assert (tokenizer.eos_token_id, tokenizer("<|mask|>").input_ids) == (257, [260])


def test_remote_class_splits_digits_and_keeps_specials(dream: Path) -> None:
    tokenizer = load_tokenizer(dream)
    assert tokenizer is not None
    assert len(tokenizer("12").input_ids) == 2
    assert tokenizer("he<|mask|>").input_ids == [256, 260]
    assert len(tokenizer("he<|mask|>", split_special_tokens=True).input_ids) == 1 + len("<|mask|>")


def test_dream_has_its_chat_template_when_none_is_published(dream: Path) -> None:
    tokenizer = load_tokenizer(dream)
    assert tokenizer is not None
    text = render_chat(tokenizer, HELLO)
    assert text == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    given = [{"role": "system", "content": "Be brief."}, *HELLO]
    text = render_chat(tokenizer, given, add_generation_prompt=False)
    assert text == ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n")


PLAIN = {"content": "x", **dict.fromkeys(("lstrip", "normalized", "rstrip"), False)}
DEFAULT = {"name": "default", "template": "{{ messages[0].content }}"}


@pytest.mark.parametrize(
    ("changes", "files"),
    [
        ({}, {}),
        ({"added_tokens_decoder": {"1024": mark("<x>"), "1025": PLAIN}, "sep_token": "x"}, {}),
        ({"eos_token": {"__type": "AddedToken", **mark("<|im_end|>")}}, {}),
        (
            {
                "chat_template": [DEFAULT, {**DEFAULT, "name": "tool_use"}],
                "image_token": "<|mask|>",
            },
            {},
        ),
        ({"additional_special_tokens": ["<x>"]}, {"chat_template.jinja": "{{ eos_token }}\n\n"}),
        ({}, {"special_tokens_map.json": '{"eos_token": "<|im_end|>"}'}),
        ({}, {"added_tokens.json": '{"<x>": 1024}'}),
    ],
)
def test_a_tokenizer_is_read_as_by_transformers(
    changes: dict[str, Any], files: dict[str, str], tmp_path: Path
) -> None:
    shutil.copytree(ZOO_TOKENIZER, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text()) | changes
    for name, content in {"tokenizer_config.json": json.dumps(config), **files}.items():
        (tmp_path / name).write_text(content)
    ours, theirs = load_tokenizer(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert ours is not None and ours.special_tokens_map == theirs.special_tokens_map
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    wanted = theirs.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)
    assert render_chat(ours, HELLO) == wanted


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", "[]"),
        ("tokenizer.json", '{"model"'),
        ("tokenizer.json", '{"model": {"type": "BPE"}}'),
        ("tokenizer_config.json", "null"),
    ],
)
def test_broken_tokenizer_is_named(tmp_path: Path, file: str, content: str) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / file).write_text(content)
    with pytest.raises(ValueError, match=file):
        load_tokenizer(tmp_path)
