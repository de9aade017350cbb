"""GGUF files beside checkpoints with the same weights and the same tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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

from helpers import CHAT, published, random_model, whole
from outpace.models.config import Rope
from outpace.models.load import load_config, load_model, load_tokenizer, save_model
from outpace.models.rope import frequencies

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
}
TYPES = GGMLQuantizationType


def paired(rows: Tensor, size: int) -> Tensor:
    """Heads of queries or keys as llama.cpp wants them of a Llama: i and i + half side by side."""
    heads = rows.reshape(-1, size, *rows.shape[1:])
    order = [row for i in range(size // 2) for row in (i, i + size // 2)]
    return heads[:, order].reshape(rows.shape)


class Written:
    """A checkpoint as a folder, and the file that the converter would make of it."""

    def __init__(self, folder: Path, name: str, kind: TYPES = TYPES.F32, seed: int = 0) -> None:
        self.folder, self.path, self.kind = folder / "plain", folder / "model.gguf", kind
        self.arch, self.config = MODELS[name]
        model = random_model(self.config, seed=seed)
        save_model(model, self.folder, dtype=torch.float32)
        self.tensors: dict[str, Tensor] = load_file(self.folder / FILE)
        self.head = model.config.head_dim
        self.writer = GGUFWriter(self.path, self.arch.name.lower())
        self.sizes(model.config)

    def sizes(self, config: Any) -> None:
        """Metadata of the model."""
        writer = self.writer
        writer.add_context_length(config.max_length)
        writer.add_embedding_length(config.dim)
        writer.add_block_count(config.layers)
        writer.add_feed_forward_length(self.config["intermediate_size"])
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
        if self.arch is MODEL_ARCH.LLAMA:
            writer.add_vocab_size(config.vocab)
        if self.arch is MODEL_ARCH.DREAM:
            writer.add_causal_attention(False)
            writer.add_mask_token_id(config.mask_id)
        if config.rope.scaling:
            usual, _ = frequencies(Rope(theta=config.rope.theta), config.head_dim)
            slow, _ = frequencies(config.rope, config.head_dim)
            writer.add_tensor("rope_freqs.weight", (usual / slow).float().numpy())

    def write(self) -> Path:
        """Weights, and the file."""
        names = get_tensor_name_map(self.arch, self.config["num_hidden_layers"])
        stacks: dict[str, list[Tensor]] = {}
        plain = dict(self.tensors)
        for name, tensor in self.tensors.items():
            stem, _, end = name.rpartition(".")
            if ".experts." in name:
                before, _, behind = stem.partition(".experts.")
                stem = f"{before}.experts.{behind.partition('.')[2]}"
                stacks.setdefault(f"{names.get_name(stem)}.{end}", []).append(tensor)
                continue
            halves = self.arch is MODEL_ARCH.LLAMA and stem.endswith(("q_proj", "k_proj"))
            own = paired(tensor, self.head) if halves else tensor
            back = self.add(f"{names.get_name(stem)}.{end}", own)
            if halves:
                order = paired(torch.arange(len(tensor)), self.head)
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
        """Write a tensor in the type of the file; what becomes of it."""
        if tensor.dim() == 1 or self.kind is TYPES.F32:
            self.writer.add_tensor(name, tensor.numpy())
            return tensor
        data = quants.quantize(tensor.numpy(), self.kind)
        self.writer.add_tensor(name, data, raw_dtype=self.kind)
        return torch.from_numpy(quants.dequantize(data, self.kind).copy())


@pytest.mark.parametrize("name", MODELS)
def test_a_file_is_the_checkpoint_that_it_was_made_of(name: str, tmp_path: Path) -> None:
    """Configuration, every parameter, and logits, to the bit."""
    written = Written(tmp_path, name)
    ours, theirs = load_model(written.write()), load_model(written.folder)
    assert ours.config == theirs.config
    for (known, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other), known
    found, wanted = (whole(model, IDS, causal=True) for model in (ours, theirs))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
@pytest.mark.parametrize("name", ["qwen2 tied", "llama"])
def test_types_are_dequantised(name: str, kind: str, tmp_path: Path) -> None:
    """To what the library makes of them; they load in 8 bits too."""
    written = Written(tmp_path, name, TYPES[kind])
    path = written.write()
    ours, theirs = load_model(path), load_model(written.folder)
    for (known, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other), known
    small = [load_model(each, quantize="int8") for each in (path, written.folder)]
    assert torch.equal(*(whole(model, IDS, causal=True) for model in small))


def test_linear_scaling_is_read(tmp_path: Path) -> None:
    """By the names that llama.cpp has for it."""
    written = Written(tmp_path, "qwen2")
    written.writer.add_rope_scaling_type(RopeScalingType.LINEAR)
    written.writer.add_rope_scaling_factor(4.0)
    scaling = load_config(written.write()).rope.scaling
    assert scaling == {"rope_type": "linear", "factor": 4.0}


TEXTS = [
    "hello, world! It's 1234.5 o'clock;  don't   WAIT\n\n  for\tit\r\n",
    "Café cafe\u0301 naïve Ünïcödé 中文字符 日本語テキスト 😀👩‍👩‍👧 ½ ٣٤٥ ⅷ",
    "def f(x):\n    return x**2  # comment\n\n\n",
    "  leading and trailing  ",
    "<|im_start|>user\nhi<|im_end|>",
    "",
    " ",
    "\u0000\u200b\ufeff",
    "aaaa'LL 'Tis IT'S we'Re /path//to\n/x",
]
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA = QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>"]


def split(pattern: str) -> Any:
    """Cut by a pattern, as `tokenizer.json` of published models says."""
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
    "llama-bpe": (split(LLAMA), True),
    "tekken": (split(TEKKEN), True),
    "smollm": (SMOLLM, False),
    "gpt-2": (pre_tokenizers.ByteLevel(add_prefix_space=False), False),
}


def trained(pre: str, size: int = 700) -> Tokenizer:
    """A tokenizer as published for a model, trained on a little text."""
    cut, ignores = CUTS[pre]
    tokenizer = Tokenizer(BPE(ignore_merges=ignores))
    tokenizer.pre_tokenizer, tokenizer.decoder = cut, decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 3 + [Path(__file__).read_text()], trainer)
    tokenizer.add_special_tokens(SPECIALS[:3])
    tokenizer.add_tokens(SPECIALS[3:])
    return tokenizer


def put(writer: GGUFWriter, tokenizer: Tokenizer, pre: str, pad: int = 3) -> None:
    """A tokenizer into a file, as the converter does; `pad` tokens stand for nothing."""
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


def with_tokenizer(folder: Path, pre: str, **said: Any) -> tuple[Path, PreTrainedTokenizerFast]:
    """A file with a tokenizer, and the published form of that."""
    tokenizer = trained(pre)
    written = Written(folder, "qwen2")
    put(written.writer, tokenizer, pre)
    for name, value in said.items():
        getattr(written.writer, name)(value)
    if said.get("add_add_bos_token", pre in ("llama-bpe", "tekken")):
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


def same(ours: Any, theirs: Any) -> None:
    """Two tokenizers agree on texts, with special tokens and without, and on the way back."""
    assert len(ours) == len(theirs) and ours.get_vocab() == theirs.get_vocab()
    for text in [*TEXTS, "".join(TEXTS), Path(__file__).read_text()]:
        for options in ({}, {"split_special_tokens": True}, {"add_special_tokens": False}):
            found, wanted = (known(text, **options).input_ids for known in (ours, theirs))
            assert found == wanted, (text[:40], options)
            assert ours.decode(found) == theirs.decode(wanted)
            assert ours.decode(found, skip_special_tokens=True) == theirs.decode(
                wanted, skip_special_tokens=True
            )
    assert (ours.eos_token_id, ours.bos_token_id) == (theirs.eos_token_id, theirs.bos_token_id)


@pytest.mark.parametrize("pre", CUTS)
def test_a_tokenizer_of_merges_is_the_published_one(pre: str, tmp_path: Path) -> None:
    """Token by token on texts of many scripts, with all its special tokens and its template."""
    path, published_one = with_tokenizer(tmp_path, pre)
    ours = load_tokenizer(path)
    assert ours is not None and ours.chat_template == CHAT
    same(ours, published_one)


def test_the_file_says_whether_a_text_has_a_beginning(tmp_path: Path) -> None:
    """Against what is usual."""
    for pre, begins in (("qwen2", True), ("llama-bpe", False)):
        (tmp_path / pre).mkdir()
        same(*(with_tokenizer_pair(tmp_path / pre, pre, begins)))


def with_tokenizer_pair(folder: Path, pre: str, begins: bool) -> tuple[Any, Any]:
    """Ours and the published one, of a file that says how texts begin."""
    path, theirs = with_tokenizer(folder, pre, add_add_bos_token=begins)
    return load_tokenizer(path), theirs
