"""Prompts of causal models that fill in the middle, by tokens of the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

from transformers.tokenization_utils_base import PreTrainedTokenizerBase as Tokenizer

from outpace.api.codec import SharedTokenizer


@dataclass(frozen=True, kw_only=True)
class MiddleFormat:
    """Tokens around the texts of a prompt: `prefix text suffix text middle`.

    Attributes:
        prefix: Token before the text that precedes the answer.
        suffix: Token before the text that follows the answer.
        middle: Token before the answer.
        ends: Further tokens that end an answer, where the vocabulary has them.
    """

    prefix: str
    suffix: str
    middle: str
    ends: tuple[str, ...]


MIDDLE_FORMATS = (
    MiddleFormat(
        prefix="<|fim_prefix|>",
        suffix="<|fim_suffix|>",
        middle="<|fim_middle|>",
        ends=(
            *("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
            "<|file_separator|>",
        ),
    ),
    MiddleFormat(
        prefix="<fim_prefix>",
        suffix="<fim_suffix>",
        middle="<fim_middle>",
        ends=("<|endoftext|>", "<fim_pad>", "<repo_name>", "<file_sep>"),
    ),
    MiddleFormat(
        prefix="<｜fim▁begin｜>",
        suffix="<｜fim▁hole｜>",
        middle="<｜fim▁end｜>",
        ends=("<｜end▁of▁sentence｜>", "<|EOT|>"),
    ),
    MiddleFormat(prefix="▁<PRE>", suffix="▁<SUF>", middle="▁<MID>", ends=("▁<EOT>",)),
)
"""Formats of Qwen2.5-Coder and CodeGemma; of StarCoder and Granite; of DeepSeek-Coder; of CodeLlama
(the order of all four is prefix, suffix, middle)."""

ANCHOR = "☺"
"""Text before a suffix, where a tokenizer adds a space to the beginning of a text."""


@dataclass(frozen=True)
class MiddleTokens:
    """Token ids by which a model fills in the middle.

    Attributes:
        marks: Those before the prefix, the suffix and the answer.
        ends: Those that end an answer.
    """

    marks: tuple[int, int, int]
    ends: frozenset[int]

    def encode(self, codec: SharedTokenizer, prefix: str, suffix: str) -> list[int]:
        """Return the prompt of the text between two texts."""
        before, after, answer = self.marks
        ids = [*codec.encode_plain("", begin=True), before, *codec.encode_plain(prefix)]
        return [*ids, after, *encode_inner(codec, suffix), answer]


def find_middle_tokens(tokenizer: Tokenizer) -> MiddleTokens | None:
    """Return the tokens of the first format that a vocabulary has, or None."""
    ids = tokenizer.get_vocab()
    for form in MIDDLE_FORMATS:
        if all(mark in ids for mark in (form.prefix, form.suffix, form.middle)):
            marks = ids[form.prefix], ids[form.suffix], ids[form.middle]
            return MiddleTokens(
                marks, frozenset({ids[e] for e in form.ends if e in ids} | {*marks})
            )
    return None


def encode_inner(codec: SharedTokenizer, text: str) -> list[int]:
    """Encode text that does not begin a sequence, so without a space before it."""
    lead = codec.encode_plain(ANCHOR)
    if not str(codec.tokenizer.convert_ids_to_tokens(lead[0])).startswith("▁"):
        return codec.encode_plain(text)
    return codec.encode_plain(ANCHOR + text)[len(lead) :]
