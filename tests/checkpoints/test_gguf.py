"""GGUF files compared with checkpoints of the same weights and tokenizer."""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import (
    MODEL_ARCH,
    GGMLQuantizationType,
    GGUFWriter,
    RopeScalingType,
    get_tensor_name_map,
    quants,
)
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from gguf_bytes import ARRAY, STRING, array, check_variant, variants, view, write_changed
from helpers import CHAT, needs_packed_loops, published, published_llada, random_model, whole
from outpace import LLM
from outpace.checkpoints import checkpoint
from outpace.checkpoints.checkpoint import load_tokenizer
from outpace.checkpoints.gguf import file as file_module
from outpace.checkpoints.load import load_config, load_draft, load_model, save_model
from outpace.checkpoints.name import name_of
from outpace.models.attention import rotary_frequencies
from outpace.models.config import Rope
from outpace.models.int8 import is_quantized
from outpace.models.packed import PackedEmbedding, PackedLinear
from packing import MINIMA, dequantized, random_blocks
from texts import TEXTS

FILE = "model.safetensors"
IDS = [5, 3, 1, 4]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
MIXED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "rms_norm_eps": 1e-6}
MODELS: dict[str, tuple[MODEL_ARCH, dict[str, Any]]] = {
    "qwen2": (MODEL_ARCH.QWEN2, published(**SIZES, rope_theta=1e6)),
    "qwen2 tied": (MODEL_ARCH.QWEN2, published(**SIZES, tie_word_embeddings=True)),
    "qwen3": (MODEL_ARCH.QWEN3, published("Qwen3ForCausalLM", **SIZES, head_dim=32)),
    "qwen3moe": (MODEL_ARCH.QWEN3MOE, published("Qwen3MoeForCausalLM", **SIZES, **MIXED)),
    "llama": (MODEL_ARCH.LLAMA, published("LlamaForCausalLM", **SIZES, rope_theta=5e5)),
    "llama3": (
        MODEL_ARCH.LLAMA,
        published("LlamaForCausalLM", **SIZES, rope_theta=5e5, rope_scaling=LLAMA3),
    ),
    "dream": (MODEL_ARCH.DREAM, published("DreamModel", **SIZES, mask_token_id=7)),
    "llada": (MODEL_ARCH.LLADA, published_llada(d_model=64, rope_theta=5e5)),
}
INTERLEAVED = (MODEL_ARCH.LLAMA, MODEL_ARCH.LLADA)
"""Architectures whose rotary dimensions are interleaved in pairs."""

TYPES = GGMLQuantizationType


def interleaved(rows: Tensor, size: int) -> Tensor:
    """Interleave heads of queries or keys as in llama.cpp: rows i and i + half are adjacent."""
    heads = rows.reshape(-1, size, *rows.shape[1:])
    order = [row for i in range(size // 2) for row in (i, i + size // 2)]
    return heads[:, order].reshape(rows.shape)


class Written:
    """A checkpoint as a folder, and the file that the converter would make of it."""

    def __init__(
        self, folder: Path, name: str, kind: TYPES = TYPES.F32, seed: int = 0, split: int = 0
    ) -> None:
        self.folder, self.path, self.kind = folder / "plain", folder / "model.gguf", kind
        self.arch, self.config = MODELS[name]
        model = random_model(self.config, seed=seed)
        save_model(model, self.folder, dtype=torch.float32)
        self.tensors: dict[str, Tensor] = load_file(self.folder / FILE)
        self.layers, self.head = model.config.layers, model.config.head_dim
        self.writer = GGUFWriter(self.path, self.arch.name.lower(), split_max_tensors=split)
        self.sizes(model.config)

    def sizes(self, config: Any) -> None:
        writer = self.writer
        writer.add_context_length(config.max_length)
        writer.add_embedding_length(config.dim)
        writer.add_block_count(config.layers)
        writer.add_feed_forward_length(self.config.get("intermediate_size", config.mlp))
        writer.add_head_count(config.heads)
        writer.add_head_count_kv(config.kv_heads)
        writer.add_layer_norm_rms_eps(config.norm_eps)
        writer.add_rope_freq_base(config.rope.theta)
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_file_type(1)
        if "head_dim" in self.config:
            writer.add_key_length(config.head_dim)
            writer.add_value_length(config.head_dim)
        if config.experts:
            writer.add_expert_count(config.experts)
            writer.add_expert_used_count(config.experts_per_row)
            writer.add_expert_feed_forward_length(config.mlp)
        if self.arch in INTERLEAVED:
            writer.add_vocab_size(config.vocab)
        if self.arch in (MODEL_ARCH.DREAM, MODEL_ARCH.LLADA):
            writer.add_causal_attention(False)
            writer.add_mask_token_id(config.mask_id)
        if self.arch is MODEL_ARCH.LLADA:
            writer.add_eos_token_id(1)
            writer.add_diffusion_shift_logits(False)
        if config.rope.scaling:
            usual, _ = rotary_frequencies(Rope(theta=config.rope.theta), config.head_dim)
            slow, _ = rotary_frequencies(config.rope, config.head_dim)
            writer.add_tensor("rope_freqs.weight", (usual / slow).float().numpy())

    def write(self) -> Path:
        names = get_tensor_name_map(self.arch, self.layers)
        stacks: dict[str, list[Tensor]] = {}
        plain = dict(self.tensors)
        for name, tensor in self.tensors.items():
            stem, _, end = name.rpartition(".")
            if ".experts." in name:
                before, _, rest = stem.partition(".experts.")
                stem = f"{before}.experts.{rest.partition('.')[2]}"
                stacks.setdefault(f"{names.get_name(stem)}.{end}", []).append(tensor)
                continue
            halves = self.arch in INTERLEAVED and stem.endswith(("q_proj", "k_proj"))
            own = interleaved(tensor, self.head) if halves else tensor
            back = self.add(f"{names.get_name(stem)}.{end}", own)
            if halves:
                order = interleaved(torch.arange(len(tensor)), self.head)
                back = torch.empty_like(back).index_copy_(0, order, back)
            plain[name] = back
        for name, parts in stacks.items():
            self.add(name, torch.stack(parts))
        save_file(plain, self.folder / FILE)
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()
        return self.path

    def add(self, name: str, tensor: Tensor) -> Tensor:
        if tensor.dim() == 1 or self.kind is TYPES.F32:
            self.writer.add_tensor(name, tensor.numpy())
            return tensor
        data = quants.quantize(tensor.numpy(), self.kind)
        self.writer.add_tensor(name, data, raw_dtype=self.kind)
        return torch.from_numpy(quants.dequantize(data, self.kind).copy())


@pytest.mark.parametrize("name", MODELS)
def test_a_file_equals_its_checkpoint(name: str, tmp_path: Path) -> None:
    written = Written(tmp_path, name)
    ours, theirs = load_model(written.write()), load_model(written.folder)
    assert ours.config == theirs.config
    for (known, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other), known
    found, wanted = (whole(model, IDS, causal=True) for model in (ours, theirs))
    assert torch.equal(found, wanted)


@pytest.mark.sampled
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
@pytest.mark.parametrize("name", ["qwen2 tied", "llama"])
def test_types_are_dequantized(
    name: str, kind: str, compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(file_module, "find_packed_loop", lambda: None)
    written = Written(tmp_path, name, TYPES[kind])
    path = written.write()
    ours, theirs = load_model(path), load_model(written.folder)
    for (known, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other), known
    small = [load_model(each, quantize="int8") for each in (path, written.folder)]
    assert torch.equal(*(whole(model, IDS, causal=True) for model in small))


@pytest.mark.parametrize(
    ("name", "kind", "bits"),
    [("llama", "Q4_0", None), ("llama", "Q4_0", "int8"), ("qwen3moe", "F32", None)],
)
def test_chunks_make_the_whole_matrix(
    name: str, kind: str, bits: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Written(tmp_path, name, TYPES[kind]).write()
    wanted = load_model(path, quantize=bits).state_dict()
    monkeypatch.setattr(file_module, "CHUNK_NUMBERS", 200)
    found = load_model(path, quantize=bits).state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in found)


def split_file(folder: Path, kind: TYPES = TYPES.F32) -> tuple[list[Path], Path]:
    written = Written(folder, "llama", kind, split=8)
    written.write()
    parts = sorted(folder.glob("model-*.gguf"))
    assert [path.name for path in parts] == [f"model-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    return parts, written.folder


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_parts_are_read_together(kind: str, tmp_path: Path) -> None:
    parts, folder = split_file(tmp_path, TYPES[kind])
    wanted = whole(load_model(folder), IDS, causal=True)
    for path in parts:
        assert torch.equal(whole(load_model(path), IDS, causal=True), wanted)
        assert name_of(path) == "model"
    native, plain = load_model(parts[0], quantize="native"), load_model(folder)
    state = native.state_dict()
    assert all(torch.equal(state[name], each) for name, each in plain.state_dict().items())
    size = file_module.open_gguf(parts[1]).size
    assert size == sum(path.stat().st_size for path in parts)


def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    parts, _ = split_file(tmp_path)
    contents = [path.read_bytes() for path in parts]
    parts[1].unlink()
    for path in (parts[0], parts[2]):
        with pytest.raises(ValueError, match=parts[1].name):
            load_model(path)
    twice = contents[1].replace(b"blk.1.ffn_up.w", b"blk.1.attn_q.w")
    for changed in (contents[2], contents[1][:-1], twice):
        parts[1].write_bytes(changed)
        with pytest.raises(ValueError, match=f"{parts[1].name}|'blk.1.attn_q.weight'"):
            load_model(parts[0])
    parts[1].write_bytes(contents[1])
    other = parts[2].rename(tmp_path / "last.gguf")
    with pytest.raises(ValueError, match=other.name):
        load_model(other)


QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA = QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MARKS = "नमस्ते नमस्ते, x\u0330y x\u0330y "
"""Text with marks that no composed character has."""

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>"]


def split(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


SMOLLM = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ]
)
CUTS: dict[str, tuple[Any, bool]] = {
    "qwen2": (split(QWEN), False),
    "qwen35": (split(QWEN35), False),
    "llama-bpe": (split(LLAMA), True),
    "dbrx": (split(LLAMA), False),
    "smaug-bpe": (split(LLAMA), False),
    "gpt-4o": (split(GPT_4O), False),
    "tekken": (split(TEKKEN), True),
    "smollm": (SMOLLM, False),
    "gpt-2": (pre_tokenizers.ByteLevel(add_prefix_space=False), False),
}


def trained(pre: str, size: int = 700) -> Tokenizer:
    cut, ignores = CUTS[pre]
    tokenizer = Tokenizer(BPE(ignore_merges=ignores))
    tokenizer.pre_tokenizer, tokenizer.decoder = cut, decoders.ByteLevel()
    if pre.startswith("qwen"):
        tokenizer.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*TEXTS, MARKS * 9] * 3 + [Path(__file__).read_text()], trainer)
    tokenizer.add_special_tokens(SPECIALS[:3])
    tokenizer.add_tokens(SPECIALS[3:])
    return tokenizer


def write_tokenizer(writer: GGUFWriter, tokenizer: Tokenizer, pre: str, pad: int = 3) -> None:
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    special = {
        token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()
    }
    kinds = [{True: 3, False: 4, None: 1}[special.get(text)] for text, _ in vocabulary]
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([text for text, _ in vocabulary] + [f"[PAD{n}]" for n in range(pad)])
    writer.add_token_types(kinds + [5] * pad)
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_eos_token_id(tokenizer.token_to_id(SPECIALS[2]))
    writer.add_bos_token_id(tokenizer.token_to_id(SPECIALS[0]))
    writer.add_chat_template(CHAT)


def with_tokenizer(folder: Path, pre: str) -> tuple[Path, PreTrainedTokenizerFast]:
    tokenizer = trained(pre)
    written = Written(folder, "qwen2")
    write_tokenizer(written.writer, tokenizer, pre)
    if pre in ("llama-bpe", "tekken"):
        begin = SPECIALS[0]
        tokenizer.post_processor = TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, tokenizer.token_to_id(begin))]
        )
    return written.write(), PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=SPECIALS[2],
        bos_token=SPECIALS[0],
        chat_template=CHAT,
        clean_up_tokenization_spaces=False,
    )


def check_same_tokenizer(ours: Any, theirs: Any) -> None:
    assert len(ours) == len(theirs) and ours.get_vocab() == theirs.get_vocab()
    for text in [*TEXTS, MARKS, "".join(TEXTS), Path(__file__).read_text()]:
        for options in ({}, {"split_special_tokens": True}, {"add_special_tokens": False}):
            found, wanted = (known(text, **options).input_ids for known in (ours, theirs))
            assert found == wanted, (text[:40], options)
            assert ours.decode(found) == theirs.decode(wanted)
            assert ours.decode(found, skip_special_tokens=True) == theirs.decode(
                wanted, skip_special_tokens=True
            )
    assert ours.special_tokens_map == theirs.special_tokens_map


@pytest.mark.sampled
@pytest.mark.parametrize("pre", CUTS)
def test_a_tokenizer_of_merges_equals_the_published_one(pre: str, tmp_path: Path) -> None:
    path, published_one = with_tokenizer(tmp_path, pre)
    ours = load_tokenizer(path)
    assert ours is not None and ours.chat_template == CHAT
    check_same_tokenizer(ours, published_one)
    checkpoint.write_tokenizer(path, tmp_path / "written")
    check_same_tokenizer(load_tokenizer(tmp_path / "written"), published_one)


PIECES = {"<unk>": 2, "<s>": 3, "</s>": 3, **{f"<0x{byte:02X}>": 6 for byte in range(256)}}
"""Tokens of a SentencePiece vocabulary before its own, with their kinds."""


MADE = "lo el hel hello ▁hello wo or ld wor world ▁world ▁w ▁h ▁a ▁▁ in ing ▁th ▁the he"


def scored() -> tuple[list[str], list[float], list[int]]:
    made = MADE.split()
    letters = sorted(set("▁helowrdabcing,.!tT'sné"))
    scores = [-float(rank) for rank in range(len(made))] + [-100.0 - n for n in range(len(letters))]
    tokens = [*PIECES, *made, *letters]
    kinds = [*PIECES.values(), *[1] * (len(made) + len(letters))]
    return tokens, [0.0] * len(PIECES) + scores, kinds


def by_score(text: str, scores: dict[str, float]) -> list[str]:
    """Merge as SentencePiece: neighbours whose token has the best score, leftmost first."""
    parts = list(text)
    while True:
        whole_ = [
            (-scores[left + right], place)
            for place, (left, right) in enumerate(zip(parts, parts[1:], strict=False))
            if left + right in scores
        ]
        if not whole_:
            break
        place = min(whole_)[1]
        parts[place : place + 2] = ["".join(parts[place : place + 2])]
    found = (
        [part] if part in scores else [f"<0x{b:02X}>" for b in part.encode()] for part in parts
    )
    return [token for tokens in found for token in tokens]


@pytest.mark.parametrize("spaced", [True, False])
def test_a_vocabulary_with_scores_is_merged_by_them(spaced: bool, tmp_path: Path) -> None:
    tokens, scores, kinds = scored()
    written = Written(tmp_path, "llama")
    writer = written.writer
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(spaced)
    tokenizer = load_tokenizer(written.write())
    assert tokenizer is not None and len(tokenizer) == len(tokens)
    known = {t: s for t, s, kind in zip(tokens, scores, kinds, strict=True) if kind == 1}
    for text in ("hello world", "hello, the  world!", "wording hell", "né 中", "a\nb", "</s>"):
        whole_ = ("▁" if spaced else "") + text.replace(" ", "▁")
        wanted = [tokens.index(token) for token in by_score(whole_, known)]
        found = tokenizer(text, split_special_tokens=True).input_ids
        assert found == [1, *wanted], text
        assert tokenizer.decode(found, skip_special_tokens=True) == text
    assert tokenizer("</s>", add_special_tokens=False).input_ids == [2]


def mutated(content: bytes, header: int, count: int) -> Iterator[bytes]:
    """Yield truncated files, and files with changed bits or eight changed bytes of the header."""
    draw = Random(0)
    values = [0, 1, 2**16, 2**31, 2**32, 2**40, 2**62, 2**63, 2**64 - 1]
    for number in range(count):
        changed = bytearray(content)
        match number % 3:
            case 0:
                yield content[: draw.randrange(header if draw.random() < 0.8 else len(content))]
                continue
            case 1:
                for _ in range(draw.choice((1, 1, 1, 8))):
                    changed[draw.randrange(header)] ^= 1 << draw.randrange(8)
            case _:
                place = draw.randrange(header)
                changed[place : place + 8] = draw.choice(values).to_bytes(8, "little")
        yield bytes(changed)


def memory(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(name)) << 10


@pytest.mark.parametrize("count", [90, pytest.param(6000, marks=pytest.mark.nightly)])
def test_mutated_files_are_loaded_or_refused(count: int, tmp_path: Path) -> None:
    sound, _ = with_tokenizer(tmp_path, "qwen2")
    content, path = sound.read_bytes(), tmp_path / "broken.gguf"
    header = min(entry.offset for entry in file_module.open_gguf(sound).tensors.values())
    outcomes: Counter[str] = Counter()
    load_model(sound)
    Path("/proc/self/clear_refs").write_text("5")  # the most from here on
    before = memory("VmRSS")
    for number, changed in enumerate(mutated(content, header, count)):
        path.write_bytes(changed)
        try:
            load_config(path)
            load_tokenizer(path)
            load_model(path, max_length=1024)
            outcomes["loaded"] += 1
        except ValueError as error:
            text = str(error)
            assert str(path) in text and "\n" not in text and len(text) < 1000, number
            outcomes["refused"] += 1
    assert memory("VmHWM") - before < 200 * 2**20
    assert outcomes["refused"] > 0.8 * count and outcomes["loaded"] > 0


@pytest.mark.parametrize("part", range(8))
def test_metadata_of_other_types_change_nothing_or_are_refused(part: int, tmp_path: Path) -> None:
    source, _ = with_tokenizer(tmp_path, "qwen2")
    wanted, names = view(source), [*file_module.read_header(source).metadata]
    outcomes = {
        check_variant(write_changed(tmp_path / f"{place}.gguf", source, name, value), name, wanted)
        for name in names[part::8]
        for place, value in enumerate(variants(source, name), names.index(name) * 100)
    }
    assert outcomes == {"equal", "refused"}


REQUIRED = (
    *(f"tokenizer.ggml.{name}" for name in ("merges", "eos_token_id", "pre")),
    *(f"qwen2.{name}" for name in ("rope.freq_base", "context_length")),
    "qwen2.attention.layer_norm_rms_epsilon",
)


@pytest.mark.parametrize("name", REQUIRED)
def test_metadata_that_cannot_be_inferred_are_required(name: str, tmp_path: Path) -> None:
    source, _ = with_tokenizer(tmp_path, "qwen2")
    path = write_changed(tmp_path / "less.gguf", source, name, None)
    with pytest.raises(ValueError, match=name):
        view(path)


@pytest.mark.parametrize("is_missing", [True, False])
def test_control_tokens_of_another_type_are_read_as_such(
    is_missing: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, _ = with_tokenizer(tmp_path, "qwen2")
    name, found = "tokenizer.ggml.token_type", file_module.read_header(source).metadata
    types = [1 if each == 3 else each for each in found[name].read_values()]
    value = None if is_missing else (ARRAY, array(5, types))
    path = write_changed(tmp_path / "other.gguf", source, name, value)
    wanted = view(source)
    caplog.clear()
    assert view(path) == wanted
    assert [name in message for message in caplog.messages] == [True]


@pytest.mark.parametrize("merge", ["ab", "", "a b c", "a zzz"])
def test_a_merge_that_is_not_two_tokens_is_refused(merge: str, tmp_path: Path) -> None:
    source, published_one = with_tokenizer(tmp_path, "qwen2")
    name = "tokenizer.ggml.merges"
    merges = file_module.read_header(source).metadata[name].read_values()
    merges[3] = merge
    path = write_changed(tmp_path / "other.gguf", source, name, (ARRAY, array(STRING, merges)))
    with pytest.raises(ValueError, match=rf"{name}\[3\]"):
        load_tokenizer(path)
    published_one.save_pretrained(tmp_path / "plain")
    file = tmp_path / "plain" / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["merges"] = merges
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"tokenizer.json: model.merges\[3\]"):
        load_tokenizer(tmp_path / "plain")


FOREIGN: dict[str, Callable[[Written], Any]] = {
    "parts": lambda w: w.writer.add_uint32("split.count", 2),
    "longrope": lambda w: w.writer.add_rope_scaling_type(RopeScalingType.LONGROPE),
    "shift_logits": lambda w: w.writer.add_diffusion_shift_logits(True),
    "logit_scale": lambda w: w.writer.add_logit_scale(0.5),
    "value_length": lambda w: w.writer.add_value_length(4),
    "blk.9.attn_q.weight": lambda w: w.writer.add_tensor("blk.9.attn_q.weight", ROW),
    "rope_freqs.weight": lambda w: w.writer.add_tensor("rope_freqs.weight", ROW),
    "output.bias": lambda w: w.writer.add_tensor("output.bias", ROW.astype("i4")),
    "output_norm.weight": lambda w: w.tensors.update({"model.norm.weight": torch.ones(65)}),
}
ROW = torch.rand(3).numpy()


@pytest.mark.parametrize("name", FOREIGN)
def test_metadata_and_tensors_of_other_models_are_refused(name: str, tmp_path: Path) -> None:
    written = Written(tmp_path, "qwen2")
    FOREIGN[name](written)
    with pytest.raises(ValueError, match=name):
        load_model(written.write())


@pytest.mark.parametrize(("kind", "token"), [("t5", "t5"), ("gpt2", "merges"), ("llama", "scores")])
def test_unknown_tokenizers_are_refused(kind: str, token: str, tmp_path: Path) -> None:
    written = Written(tmp_path, "qwen2")
    written.writer.add_token_list([f"t{n}" for n in range(24)])
    written.writer.add_tokenizer_model(kind)
    with pytest.raises(ValueError, match=rf"model.gguf.*{token}"):
        load_tokenizer(written.write())


def test_other_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "other.gguf"
    writer = GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match="mamba"):
        load_config(path)
    with pytest.raises(ValueError, match=r"missing.gguf"):
        load_model(tmp_path / "missing.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    path.write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"pip install '\.\[gguf\]'"):
        load_model(path)


WIDE = {"hidden_size": 256, "intermediate_size": 512, "rms_norm_eps": 1e-6}
MODELS["llama wide"] = (MODEL_ARCH.LLAMA, published("LlamaForCausalLM", **WIDE, rope_theta=5e5))
MODELS["qwen2 wide tied"] = (MODEL_ARCH.QWEN2, published(**WIDE, tie_word_embeddings=True))


class Blocked(Written):
    """A file whose matrices have the block formats of a table, by the end of their names."""

    def __init__(self, folder: Path, name: str, kinds: dict[str, str], usual: str) -> None:
        super().__init__(folder, name, TYPES[usual])
        self.kinds = kinds

    def add(self, name: str, tensor: Tensor) -> Tensor:
        kind = next((k for end, k in self.kinds.items() if end in name), self.kind.name)
        if tensor.dim() != 2 or not kind.endswith("_K"):
            self.kind, usual = TYPES[kind], self.kind
            back = super().add(name, tensor)
            self.kind = usual
            return back
        blocks = random_blocks(kind, *tensor.shape)
        if kind in MINIMA:  # scales the codes to numbers around zero
            blocks[..., 2:4] = (blocks[..., :2].copy().view("f2") * 7).view("u1")
        self.writer.add_tensor(name, blocks.reshape(len(blocks), -1), raw_dtype=TYPES[kind])
        return torch.from_numpy(dequantized(kind, blocks))


FILES: dict[str, tuple[str, str, dict[str, str]]] = {
    "tied, 4 bits": ("qwen2 tied", "Q4_0", {}),
    "heads in pairs": ("llama", "Q5_1", {}),
    "several types in a matrix": ("llama", "Q5_0", {"attn_v": "Q8_0", "ffn_up": "Q4_1"}),
    "experts": ("qwen3moe", "Q8_0", {"gate_inp": "F32"}),
    "as Q4_K_M": ("llama wide", "Q4_K", {"attn_v": "Q6_K", "ffn_down": "Q6_K", "output": "Q6_K"}),
    "tied, 5 bits": ("qwen2 wide tied", "Q5_K", {"token_embd": "Q6_K"}),
}


@needs_packed_loops
@pytest.mark.parametrize("name", FILES)
def test_matrices_keep_their_block_formats(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, usual, kinds = FILES[name]
    path = Blocked(tmp_path, model, kinds, usual).write()
    with caplog.at_level("INFO", "outpace.models.packed"):
        ours, plain = load_model(path, quantize="native"), load_model(path)
    assert len(caplog.messages) == 1 and "in blocks of 4 to 8 bits" in caplog.messages[0]
    names = {module: f"{name}.weight" for name, module in ours.named_modules()}
    layers = [module for module in names if isinstance(module, torch.nn.Linear)]
    packed = [isinstance(module, PackedLinear) for module in layers if module.out_features != 4]
    assert all(packed)  # except a router
    assert isinstance(ours.embedding, PackedEmbedding)
    found, wanted = ours.state_dict(), plain.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in found)
    assert sum(p.nbytes for p in ours.parameters()) < 0.5 * sum(
        p.nbytes for p in plain.parameters()
    )
    x = torch.randn(9, 512)
    for layer in layers:
        rows = x[:, : layer.in_features]
        bias = 0 if layer.bias is None else layer.bias
        exact = rows @ plain.state_dict()[names[layer]].T + bias
        assert (layer(rows) - exact).norm() < 0.01 * exact.norm()
    assert torch.isfinite(whole(ours, IDS, causal=True)).all()


@needs_packed_loops
def test_a_scale_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    path = Written(tmp_path, "llama", TYPES.Q8_0).write()
    entry = file_module.open_gguf(path).tensors["blk.1.attn_k.weight"]
    with path.open("r+b") as file:
        file.seek(entry.offset + entry.size // 2)
        file.write(b"\x00\x7c")
    with pytest.raises(ValueError, match=r"model.layers.1.self_attn.k_proj.weight"):
        load_model(path, quantize="native")


@needs_packed_loops
def test_a_file_keeps_its_block_formats_by_default(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    path = Written(tmp_path, "qwen2", TYPES.Q4_0).write()
    other = Written(tmp_path / "other", "qwen2").write()
    assert isinstance(LLM(path).model.blocks[0].mlp.down, PackedLinear)
    assert isinstance(LLM(path, quantize="native").model.embedding, PackedEmbedding)
    for plain in (LLM(path, dtype="float32"), LLM(other), LLM(tmp_path / "plain")):
        assert not is_quantized(plain.model)


GOLDEN = Path(__file__).parent.parent / "golden"
PAIRS = {"dflash": GOLDEN / "dflash" / "pair_b", "eagle": GOLDEN / "eagle" / "llama"}


@pytest.mark.parametrize("kind", PAIRS)
def test_a_file_equals_its_folder(kind: str) -> None:
    target = load_model(PAIRS[kind] / "target")
    folder = load_draft(PAIRS[kind] / "draft", target)
    file = load_draft(PAIRS[kind] / "draft.gguf", target)
    expected, found = folder.state_dict(), file.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    for field in ("kind", "vocab", "feature_layers", "block", "mask_id", "head_dim", "rope"):
        assert getattr(file.config, field) == getattr(folder.config, field), field


def changed(tmp_path: Path, name: str, edit: Any) -> Path:
    reader, path = gguf.GGUFReader(PAIRS["eagle"] / "draft.gguf"), tmp_path / "draft.gguf"
    writer = gguf.GGUFWriter(path, "eagle3")
    for field in reader.fields.values():
        if field.name not in ("general.architecture",) and not field.name.startswith("GGUF."):
            kind = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], kind)
    tensors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    for own, data in {**tensors, name: edit(tensors.get(name))}.items():
        writer.add_tensor(own, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("d2t", lambda ids: ids + 320),
        ("d2t", lambda ids: -ids - 1),
        ("d2t", lambda ids: ids * 0),
        ("d2t", lambda ids: ids.astype(np.float32)),
        ("markov_w1.weight", lambda _: np.ones((4, 4), np.float32)),
    ],
)
def test_invalid_tensors_are_refused(name: str, edit: Any, tmp_path: Path) -> None:
    target = load_model(PAIRS["eagle"] / "target")
    with pytest.raises(ValueError, match=name) as refusal:
        load_draft(changed(tmp_path, name, edit), target)
    assert str(tmp_path) in str(refusal.value)


def test_a_draft_needs_its_target() -> None:
    assert load_config(PAIRS["dflash"] / "draft.gguf").kind.name == "DFLASH"
    with pytest.raises(ValueError, match="draft"):
        LLM(PAIRS["dflash"] / "draft.gguf")
