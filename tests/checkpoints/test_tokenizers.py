"""Tokenizers of checkpoints, without running remote code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import dynamic_module_utils

from helpers import diffusion_model, save_tokenizer
from outpace.checkpoints.load import load_tokenizer, save_model

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
    assert (tokenizer.eos_token_id, tokenizer.mask_token_id) == (257, 260)


def test_remote_class_splits_digits_and_keeps_specials(dream: Path) -> None:
    tokenizer = load_tokenizer(dream)
    assert tokenizer is not None
    assert len(tokenizer("12").input_ids) == 2
    assert tokenizer("he<|mask|>").input_ids == [256, 260]
    assert len(tokenizer("he<|mask|>", split_special_tokens=True).input_ids) == 1 + len("<|mask|>")


def test_dream_has_its_chat_template_when_none_is_published(dream: Path) -> None:
    tokenizer = load_tokenizer(dream)
    assert tokenizer is not None
    text = tokenizer.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    given = [{"role": "system", "content": "Be brief."}, *HELLO]
    text = tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=False)
    assert text == ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n")


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
