"""How text is split into words before merging, by the names that GGUF files use.

A file only names its split (`tokenizer.ggml.pre`), so the patterns are listed here, as in the
models' `tokenizer.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import Regex, pre_tokenizers

CONTRACTION, BEFORE_WORD = "(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"[^\r\n\p{L}\p{N}]?"
WORD_PATTERN = rf"{CONTRACTION}|{BEFORE_WORD}\p{{L}}+"
REST_PATTERN = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATH_PATTERN = REST_PATTERN.replace("]*", "/]*", 1)
"""The same, with slashes after punctuation."""

UPPER_CASE, LOWER_CASE = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED_PATTERNS = (
    f"{BEFORE_WORD}{UPPER_CASE}*{LOWER_CASE}+",
    f"{BEFORE_WORD}{UPPER_CASE}+{LOWER_CASE}*",
)


@dataclass(frozen=True, kw_only=True)
class SplitRule:
    """How text is split into words, which are encoded separately; by default as in GPT-2.

    With `single_digits` each digit is a word. With `ignores_merges` a word that is a token needs no
    merges. With `composes_accents` text is normalized to NFC first. `adds_bos` is the default of
    `tokenizer.ggml.add_bos_token`.
    """

    pattern: str | None = None
    single_digits: bool = False
    ignores_merges: bool = False
    composes_accents: bool = False
    adds_bos: bool = False

    def build_pre_tokenizer(self) -> Any:
        """Build the split, followed by the byte-level mapping."""
        first: list[Any] = []
        if self.single_digits:
            first.append(pre_tokenizers.Digits(individual_digits=True))
        if self.pattern is not None:
            first.append(pre_tokenizers.Split(Regex(self.pattern), "isolated"))
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.pattern is None)
        return pre_tokenizers.Sequence([*first, last])


SINGLE_DIGITS = SplitRule(pattern=rf"{WORD_PATTERN}|\p{{N}}|{REST_PATTERN}", composes_accents=True)
TRIPLE_DIGITS = SplitRule(pattern=rf"{WORD_PATTERN}|\p{{N}}{{1,3}}|{REST_PATTERN}")
LLAMA3 = replace(TRIPLE_DIGITS, ignores_merges=True, adds_bos=True)
TEKKEN = SplitRule(
    pattern=rf"{'|'.join(CASED_PATTERNS)}|\p{{N}}|{PATH_PATTERN}",
    ignores_merges=True,
    adds_bos=True,
)
GPT_4O = SplitRule(
    pattern="|".join(f"{words}{CONTRACTION}?" for words in CASED_PATTERNS)
    + rf"|\p{{N}}{{1,3}}|{PATH_PATTERN}"
)
MARKED_DIGITS = replace(
    SINGLE_DIGITS,
    pattern=rf"{CONTRACTION}|{BEFORE_WORD}[\p{{L}}\p{{M}}]+|\p{{N}}|"
    + REST_PATTERN.replace(r"\p{L}", r"\p{L}\p{M}"),
)
"""Combining marks belong to words."""

SPLIT_RULES: Mapping[str, SplitRule] = {
    "dbrx": TRIPLE_DIGITS,
    "deepseek-r1-qwen": SINGLE_DIGITS,
    "gpt-2": SplitRule(),
    "gpt-4o": GPT_4O,
    "llama-bpe": LLAMA3,
    "llama-v3": LLAMA3,
    "llama3": LLAMA3,
    "pixtral": LLAMA3,
    "qwen2": SINGLE_DIGITS,
    "qwen35": MARKED_DIGITS,
    "smaug-bpe": TRIPLE_DIGITS,
    "smollm": SplitRule(single_digits=True),
    "tekken": TEKKEN,
}
"""Split rules by their names in `tokenizer.ggml.pre`."""
