"""The tokenizer of a GGUF file: vocabulary, merges or scores, special tokens, chat template."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from outpace.checkpoints.fields import error_line, flag, parse_value, shorten
from outpace.checkpoints.gguf.file import TOKENIZER_MODEL, GGUFFile, MetadataArray
from outpace.checkpoints.tokenizer import check_merges
from outpace.tokenizer import Tokenizer

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


TokenTypes = NDArray[np.int64]
TokenMask = NDArray[np.bool_]

LOG = logging.getLogger(__name__)
Merges = list[tuple[Any, ...]]
"""Pairs of tokens, which the tokenizers library checks."""

METADATA_PREFIX = "tokenizer.ggml."
TEMPLATE_METADATA = "tokenizer.chat_template"
SPACE_MARK = "\u2581"
"""Character for a space in SentencePiece tokens."""

MAX_TOKEN_LENGTH = 2**9
"""Limit on the characters of a token with merges; published ones have a few dozen."""


class TokenType(IntEnum):
    """Token types of llama.cpp."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


ADDED_TYPES = (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED)
"""Types of the tokens that are matched before text is split."""

TEXT_TYPES = (TokenType.NORMAL, TokenType.UNUSED)
"""Types that some files give control tokens by mistake."""


@dataclass(frozen=True)
class GGUFVocabulary:
    """The vocabulary of a file, with `kinds i64[V]`, and its metadata `tokenizer.ggml.*`."""

    tokens: Sequence[str]
    kinds: TokenTypes
    metadata: Mapping[str, Any]
    template: str

    @cached_property
    def size(self) -> int:
        """Number of tokens without the padding at the end."""
        return end_index(self.kinds != TokenType.UNUSED)

    @cached_property
    def added_ids(self) -> list[int]:
        found: list[int] = np.flatnonzero(np.isin(self.kinds, ADDED_TYPES)).tolist()
        return found

    @property
    def base_vocabulary(self) -> dict[str, int]:
        """Ids by token, without the added tokens at the end."""
        size = end_index(~np.isin(self.kinds[: self.size], ADDED_TYPES))
        return {text: number for number, text in enumerate(self.tokens[:size])}

    def added_tokens(self) -> list[AddedToken]:
        """Return the tokens that are matched before text is split, by id."""
        return [
            AddedToken(
                self.tokens[number],
                special=bool(self.kinds[number] != TokenType.USER_DEFINED),
                normalized=False,
            )
            for number in self.added_ids
        ]

    def read_flag(self, name: str, usual: bool) -> bool:
        found: bool = parse_value(f"{METADATA_PREFIX}{name}", self.metadata.get(name, usual), flag)
        return found

    def restore_control_tokens(self, path: Path, merges: Merges) -> GGUFVocabulary:
        """Return the vocabulary with the types of control tokens that are marked as text.

        These are tokens that metadata name or the chat template writes, and that no merge makes of
        text. One warning lists them.
        """
        # As text, these tokens would be split in prompts and shown in answers.
        named = {value for name, value in self.metadata.items() if name.endswith("_token_id")}
        found = {
            text: number
            for number in np.flatnonzero(np.isin(self.kinds, TEXT_TYPES)).tolist()
            if len(text := self.tokens[number]) > 1
            and (number in named or (is_mark(text) and text in self.template))
        }
        wrong = sorted(found[text] for text in found.keys() - set(map("".join, merges)))
        is_missing = "token_type" not in self.metadata
        if not wrong and not is_missing:
            return self
        LOG.warning(
            "%s: %stoken_type is %s; these are control tokens: %s",
            *(path, METADATA_PREFIX, "missing" if is_missing else "wrong"),
            shorten([self.tokens[number] for number in wrong]),
        )
        kinds = self.kinds.copy()
        kinds[wrong] = TokenType.CONTROL
        return replace(self, kinds=kinds)

    def special_token(self, name: str) -> str | None:
        number = self.metadata.get(name)
        if number is None:
            return None
        if type(number) is int and 0 <= number < self.size:
            return self.tokens[number]
        raise ValueError(
            f"{METADATA_PREFIX}{name} must be below {self.size}, got {shorten(number)}"
        )


def build_gguf_tokenizer(file: GGUFFile) -> Tokenizer | None:
    """Build the tokenizer of a file; None if it has no vocabulary.

    Raises:
        ValueError: If it is invalid or of an unsupported type.
    """
    try:
        pieces = read_vocabulary(file)
        return None if pieces is None else build_tokenizer(pieces, file.path)
    except Exception as error:  # the tokenizers library raises the base class
        raise ValueError(f"{file.path} has no valid tokenizer: {error_line(error)}") from error


def read_vocabulary(file: GGUFFile) -> GGUFVocabulary | None:
    metadata = {
        name.removeprefix(METADATA_PREFIX): value
        for name, value in file.metadata.items()
        if name.startswith(METADATA_PREFIX)
    }
    if "model" not in metadata and "tokens" in metadata:
        raise ValueError(f"{TOKENIZER_MODEL} is missing; convert the model again")
    if metadata.get("model") in (None, "none", "no_vocab"):
        return None
    template = file.metadata.get(TEMPLATE_METADATA, "")
    if not isinstance(template, str):
        raise ValueError(f"{TEMPLATE_METADATA} must be a string, got {shorten(template)}")
    tokens = read_metadata_array(metadata, "tokens", str)
    if not tokens or len(set(tokens)) != len(tokens):
        raise ValueError(
            f"{METADATA_PREFIX}tokens must be distinct, at least one, got {len(tokens)}"
        )
    kinds = read_metadata_array(metadata, "token_type", int)
    if not kinds:
        metadata.pop("token_type", None)
        kinds = [TokenType.NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise ValueError(
            f"{METADATA_PREFIX}token_type must have a type for each of the {len(tokens)} tokens, "
            f"got {len(kinds)}"
        )
    return GGUFVocabulary(tokens, np.array(kinds, np.int64), metadata, template)


def read_metadata_array(metadata: Mapping[str, Any], name: str, kind: type) -> list[Any]:
    """Read an array, empty if the file has none; raise `ValueError` for another element type."""
    array = metadata.get(name)
    if array is None:
        return []
    if not (isinstance(array, MetadataArray) and array.holds_type(kind)):
        raise ValueError(
            f"{METADATA_PREFIX}{name} must be an array of {kind.__name__}, got {shorten(array)}"
        )
    try:
        return array.read_values()
    except UnicodeDecodeError as error:
        raise ValueError(f"{METADATA_PREFIX}{name} must be UTF-8: {error}") from None


def is_mark(text: str) -> bool:
    """Return whether a text neither begins nor ends as a word does."""
    return not (text[0].isalnum() or text[-1].isalnum())


def missing_error(name: str) -> ValueError:
    return ValueError(f"{METADATA_PREFIX}{name} is missing; convert the model again")


def end_index(wanted: TokenMask) -> int:
    found = np.flatnonzero(wanted)
    return int(found[-1]) + 1 if len(found) else 0


def build_tokenizer(pieces: GGUFVocabulary, path: Path) -> Tokenizer:
    model = pieces.metadata["model"]
    if not isinstance(model, str) or model not in TOKENIZERS:
        known = ", ".join(TOKENIZERS)
        raise ValueError(f"{TOKENIZER_MODEL} {shorten(model)} is not supported; known are {known}")
    list_merges, build = TOKENIZERS[model]
    merges = list_merges(pieces)
    pieces = pieces.restore_control_tokens(path, merges)
    try:
        tokenizer, begins = build(pieces, merges)
    except Exception:  # the tokenizers library raises the base class
        check_merges(f"{METADATA_PREFIX}merges", merges, pieces.tokens)
        raise
    tokenizer.add_tokens(pieces.added_tokens())
    # The other tokens have their ids from the vocabulary.
    kept = all(
        tokenizer.token_to_id(pieces.tokens[number]) == number for number in pieces.added_ids
    )
    if not kept or tokenizer.get_vocab_size() != pieces.size:
        raise ValueError("its tokens cannot keep their ids")
    set_post_processor(tokenizer, pieces, begins)
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "mask": "mask"}
    special = {
        f"{ours}_token": token
        for ours, theirs in names.items()
        if (token := pieces.special_token(f"{theirs}_token_id")) is not None
    }
    if "eos_token" not in special:
        raise missing_error("eos_token_id")
    if "bos_token" not in special and "bos_token" in pieces.template:
        name = f"{METADATA_PREFIX}bos_token_id"
        LOG.warning("%s: %s is missing; the chat template writes no bos_token", path, name)
    return Tokenizer(tokenizer, special, pieces.template or None)


def set_post_processor(tokenizer: Backend, pieces: GGUFVocabulary, begins: bool) -> None:
    """Add the tokens that the file puts at the beginning and end of a sequence."""
    begin = None
    if pieces.read_flag("add_bos_token", begins):
        begin = pieces.special_token("bos_token_id")
        if begin is None:
            raise missing_error("bos_token_id")
    end = pieces.special_token("eos_token_id") if pieces.read_flag("add_eos_token", False) else None
    around = [token for token in (begin, end) if token is not None]
    if around:
        single = [*([begin] if begin else []), "$A", *([end] if end else [])]
        tokenizer.post_processor = TemplateProcessing(
            single=single,
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in set(around)],
        )


def read_merges(pieces: GGUFVocabulary) -> Merges:
    merges: Merges = [
        tuple(merge.split(" ")) for merge in read_metadata_array(pieces.metadata, "merges", str)
    ]
    normal = np.flatnonzero(pieces.kinds == TokenType.NORMAL).tolist()
    if not merges and any(len(pieces.tokens[number]) > 1 for number in normal):
        raise missing_error("merges")
    return merges


def build_byte_bpe(pieces: GGUFVocabulary, merges: Merges) -> tuple[Backend, bool]:
    """Build GPT-2's byte-level byte-pair encoding; also return whether sequences begin with BOS."""
    name = pieces.metadata.get("pre")
    if not isinstance(name, str) or name not in SPLIT_RULES:
        known = ", ".join(SPLIT_RULES)
        raise ValueError(
            f"{METADATA_PREFIX}pre {shorten(name)} is not supported; known are {known}"
        )
    split = SPLIT_RULES[name]
    tokenizer = Backend(BPE(pieces.base_vocabulary, merges, ignore_merges=split.ignores_merges))
    if split.composes_accents:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = split.build_pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, split.adds_bos


def build_sentencepiece(pieces: GGUFVocabulary, merges: Merges) -> tuple[Backend, bool]:
    """Build SentencePiece's byte-pair encoding; also return whether sequences begin with BOS."""
    unknown = (pieces.tokens[n] for n in np.flatnonzero(pieces.kinds == TokenType.UNKNOWN).tolist())
    model = BPE(
        pieces.base_vocabulary,
        merges,
        unk_token=next(unknown, None),
        fuse_unk=True,
        byte_fallback=TokenType.BYTE in pieces.kinds,
    )
    tokenizer, spaced = Backend(model), pieces.read_flag("add_space_prefix", True)
    steps: list[Any] = [normalizers.Prepend(SPACE_MARK)] if spaced else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE_MARK)])
    back = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*back, *([decoders.Strip(" ", 1, 0)] if spaced else [])])
    return tokenizer, True


def find_merges(pieces: GGUFVocabulary) -> Merges:
    """Derive the merges from the scores, best score first.

    For equal scores, the longest left token comes first, as in published `tokenizer.json`.
    """
    scores = read_metadata_array(pieces.metadata, "scores", float)
    if len(scores) != len(pieces.tokens):
        raise ValueError(
            f"{METADATA_PREFIX}scores must have a score for each of the {len(pieces.tokens)} "
            f"tokens, got {len(scores)}"
        )
    if "token_type" not in pieces.metadata:  # which tokens are bytes, or matched before splitting
        raise missing_error("token_type")
    every = zip(pieces.tokens, pieces.kinds.tolist(), scores, strict=True)
    known = {text: score for text, kind, score in every if kind == TokenType.NORMAL}
    if (longest := max(map(len, known), default=0)) > MAX_TOKEN_LENGTH:
        raise ValueError(
            f"a token has {longest} characters; at most {MAX_TOKEN_LENGTH} are joined by scores"
        )
    merges: Merges = []
    for _, texts in groupby(sorted(known, key=known.__getitem__, reverse=True), known.__getitem__):
        found = [
            (left, right)
            for text in texts
            for at in range(len(text) - 1, 0, -1)
            if (right := text[at:]) in known and (left := text[:at]) in known
        ]
        merges += sorted(found, key=lambda merge: len(merge[0]), reverse=True)
    return merges


TOKENIZERS = {"gpt2": (read_merges, build_byte_bpe), "llama": (find_merges, build_sentencepiece)}
"""Functions that return the merges and the tokenizer, by `tokenizer.ggml.model`."""
