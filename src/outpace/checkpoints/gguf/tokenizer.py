"""The tokenizer of a GGUF file: vocabulary, merges or scores, special tokens, chat template.

Tokens depend on how text is split before merging. A file only names the split
(`tokenizer.ggml.pre`), so the patterns are listed here, as in the models' `tokenizer.json`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from outpace.checkpoints.fields import brief, checked, flag, line
from outpace.checkpoints.gguf.file import File
from outpace.checkpoints.gguf.header import Array

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

PREFIX = "tokenizer.ggml."
TEMPLATE = "tokenizer.chat_template"
SPACE = "\u2581"
"""Character for a space in SentencePiece tokens."""

LONGEST = 2**9
"""Limit on the characters of a token with merges; published ones have a few dozen."""

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
BEFORE = r"[^\r\n\p{L}\p{N}]?"
CASED = f"{BEFORE}{UPPER}*{LOWER}+|{BEFORE}{UPPER}+{LOWER}*"


class Kind(IntEnum):
    """Token types of llama.cpp."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


ADDED = (Kind.UNKNOWN, Kind.CONTROL, Kind.USER_DEFINED)
"""Types of the tokens that are matched before text is split."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """How text is split into words, which are encoded separately; by default as in GPT-2.

    With `single_digits` each digit is a word. With `ignores_merges` a word that is a token needs no
    merges. With `composes_accents` text is normalized to NFC first. `adds_bos` is the default of
    `tokenizer.ggml.add_bos_token`.
    """

    pattern: str | None = None
    digits: bool = False
    whole: bool = False
    composed: bool = False
    begins: bool = False

    def pre_tokenizer(self) -> Any:
        """Build the split, followed by the byte-level mapping."""
        first: list[Any] = []
        if self.digits:
            first.append(pre_tokenizers.Digits(individual_digits=True))
        if self.pattern is not None:
            first.append(pre_tokenizers.Split(Regex(self.pattern), "isolated"))
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.pattern is None)
        return pre_tokenizers.Sequence([*first, last])


SINGLE = Split(pattern=rf"{WORDS}|\p{{N}}|{REST}", composed=True)
TRIPLE = Split(pattern=rf"{WORDS}|\p{{N}}{{1,3}}|{REST}", whole=True, begins=True)
TEKKEN = Split(pattern=rf"{CASED}|\p{{N}}|{REST.replace(']*', '/]*', 1)}", whole=True, begins=True)
SPLITS: Mapping[str, Split] = {
    "deepseek-r1-qwen": SINGLE,
    "gpt-2": Split(),
    "llama-bpe": TRIPLE,
    "llama-v3": TRIPLE,
    "llama3": TRIPLE,
    "qwen2": SINGLE,
    "smollm": Split(digits=True),
    "tekken": TEKKEN,
}
"""Split rules by their names in `tokenizer.ggml.pre`."""


@dataclass(frozen=True)
class Handed:
    """A tokenizer that a deep copy returns unchanged.

    transformers copies its `tokenizer_object`, which takes half a second for 150,000 tokens.
    """

    tokenizer: Tokenizer

    def __deepcopy__(self, memo: object) -> Tokenizer:
        return self.tokenizer


@dataclass(frozen=True)
class Pieces:
    """The vocabulary of a file, with `kinds i64[V]`, and its metadata `tokenizer.ggml.*`."""

    tokens: Sequence[str]
    kinds: IntArray
    said: Mapping[str, Any]

    @cached_property
    def size(self) -> int:
        """Number of tokens without the padding at the end."""
        return end_of(self.kinds != Kind.UNUSED)

    @cached_property
    def added(self) -> list[int]:
        """Ids of the tokens that are matched before text is split."""
        found: list[int] = np.flatnonzero(np.isin(self.kinds, ADDED)).tolist()
        return found

    @property
    def vocabulary(self) -> dict[str, int]:
        """Ids by token, without the added tokens at the end."""
        size = end_of(~np.isin(self.kinds[: self.size], ADDED))
        return {text: number for number, text in enumerate(self.tokens[:size])}

    def added_tokens(self) -> list[AddedToken]:
        """Return the tokens that are matched before text is split, by id."""
        return [
            AddedToken(
                self.tokens[number],
                special=bool(self.kinds[number] != Kind.USER_DEFINED),
                normalized=False,
            )
            for number in self.added
        ]

    def flag(self, name: str, usual: bool) -> bool:
        """Read a boolean field."""
        found: bool = checked(f"{PREFIX}{name}", self.said.get(name, usual), flag)
        return found

    def named(self, name: str) -> str | None:
        """Return the token whose id a field has, if any."""
        number = self.said.get(name)
        if number is None:
            return None
        if type(number) is int and 0 <= number < self.size:
            return self.tokens[number]
        raise ValueError(f"{PREFIX}{name} must be below {self.size}, got {brief(number)}")


def tokenizer_of(file: File) -> PreTrainedTokenizerFast | None:
    """Build the tokenizer of a file; None if it has no vocabulary.

    Raises:
        ValueError: If it is invalid or of an unsupported type.
    """
    try:
        pieces = pieces_of(file)
        return None if pieces is None else whole(pieces, file.metadata.get(TEMPLATE))
    except Exception as error:  # the tokenizers library raises the base class
        raise ValueError(f"{file.path} has no valid tokenizer: {line(error)}") from error


def pieces_of(file: File) -> Pieces | None:
    """Read the vocabulary of a file; None if it has none."""
    metadata = {
        name.removeprefix(PREFIX): value
        for name, value in file.metadata.items()
        if name.startswith(PREFIX)
    }
    if metadata.get("model") in (None, "none", "no_vocab"):
        return None
    tokens = listed(metadata, "tokens", str)
    kinds = listed(metadata, "token_type", int) or [Kind.NORMAL] * len(tokens)
    if not tokens or len(kinds) != len(tokens) or len(set(tokens)) != len(tokens):
        raise ValueError(
            f"its {len(tokens)} tokens must be distinct, with one type each, got {len(kinds)}"
        )
    return Pieces(tokens, np.array(kinds, np.int64), metadata)


def listed(metadata: Mapping[str, Any], name: str, kind: type) -> list[Any]:
    """Read an array, empty if the file has none; raise `ValueError` for another element type."""
    array = metadata.get(name)
    if array is None:
        return []
    if not (isinstance(array, Array) and array.holds(kind)):
        raise ValueError(f"{PREFIX}{name} must be an array of {kind.__name__}, got {brief(array)}")
    return array.values()


def end_of(wanted: BoolArray) -> int:
    """Return the index after the last selected token."""
    found = np.flatnonzero(wanted)
    return int(found[-1]) + 1 if len(found) else 0


def whole(pieces: Pieces, template: Any) -> PreTrainedTokenizerFast:
    """Build the tokenizer, with each token under its id in the file."""
    if not isinstance(template, str | None):
        raise ValueError(f"{TEMPLATE} must be a string, got {brief(template)}")
    model = pieces.said["model"]
    if not isinstance(model, str) or model not in MODELS:
        known = ", ".join(MODELS)
        raise ValueError(f"{PREFIX}model {brief(model)} is not supported; known are {known}")
    tokenizer, begins = MODELS[model](pieces)
    tokenizer.add_tokens(pieces.added_tokens())
    # The other tokens have their ids from the vocabulary.
    kept = all(tokenizer.token_to_id(pieces.tokens[number]) == number for number in pieces.added)
    if not kept or tokenizer.get_vocab_size() != pieces.size:
        raise ValueError("its tokens cannot keep their ids")
    frame(tokenizer, pieces, begins)
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "mask": "mask"}
    special = {
        f"{ours}_token": token
        for ours, theirs in names.items()
        if (token := pieces.named(f"{theirs}_token_id")) is not None
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=Handed(tokenizer),
        chat_template=template,
        clean_up_tokenization_spaces=False,
        **special,
    )


def frame(tokenizer: Tokenizer, pieces: Pieces, begins: bool) -> None:
    """Add the tokens that the file puts at the begin and end of a text."""
    begin = pieces.named("bos_token_id") if pieces.flag("add_bos_token", begins) else None
    end = pieces.named("eos_token_id") if pieces.flag("add_eos_token", False) else None
    around = [token for token in (begin, end) if token is not None]
    if around:
        single = [*([begin] if begin else []), "$A", *([end] if end else [])]
        tokenizer.post_processor = TemplateProcessing(
            single=single,
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in set(around)],
        )


def bytes_by_merges(pieces: Pieces) -> tuple[Tokenizer, bool]:
    """Build GPT-2's byte-level byte-pair encoding; also return whether texts begin with BOS."""
    name = pieces.said.get("pre")
    if not isinstance(name, str) or name not in SPLITS:
        known = ", ".join(SPLITS)
        raise ValueError(f"{PREFIX}pre {brief(name)} is not supported; known are {known}")
    split = SPLITS[name]
    merges = [tuple(merge.split(" ")) for merge in listed(pieces.said, "merges", str)]
    tokenizer = Tokenizer(BPE(pieces.vocabulary, merges, ignore_merges=split.whole))
    if split.composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = split.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, split.begins


def pieces_by_scores(pieces: Pieces) -> tuple[Tokenizer, bool]:
    """Build SentencePiece's byte-pair encoding; also return whether texts begin with BOS."""
    scores = listed(pieces.said, "scores", float)
    if len(scores) != len(pieces.tokens):
        raise ValueError(f"{len(pieces.tokens)} tokens have {len(scores)} scores")
    model = BPE(
        pieces.vocabulary,
        merges_of(pieces, scores),
        unk_token=next(iter(unknown(pieces)), None),
        fuse_unk=True,
        byte_fallback=Kind.BYTE in pieces.kinds,
    )
    tokenizer, spaced = Tokenizer(model), pieces.flag("add_space_prefix", True)
    steps: list[Any] = [normalizers.Prepend(SPACE)] if spaced else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    back = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*back, *([decoders.Strip(" ", 1, 0)] if spaced else [])])
    return tokenizer, True


def unknown(pieces: Pieces) -> list[str]:
    """Return the tokens of type unknown."""
    numbers: list[int] = np.flatnonzero(pieces.kinds == Kind.UNKNOWN).tolist()
    return [pieces.tokens[number] for number in numbers]


def merges_of(pieces: Pieces, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Derive the merges from the scores, best score first.

    For equal scores, the longest left token comes first, as in published `tokenizer.json`.
    """
    every = zip(pieces.tokens, pieces.kinds.tolist(), scores, strict=True)
    known = {text: score for text, kind, score in every if kind == Kind.NORMAL}
    if (longest := max(map(len, known), default=0)) > LONGEST:
        raise ValueError(
            f"a token has {longest} characters; at most {LONGEST} are joined by scores"
        )
    found = [
        (score, at, text[:at], text[at:])
        for text, score in known.items()
        for at in range(1, len(text))
        if text[:at] in known and text[at:] in known
    ]
    found.sort(key=lambda merge: (-merge[0], -merge[1]))
    return [(left, right) for _, _, left, right in found]


MODELS = {"gpt2": bytes_by_merges, "llama": pieces_by_scores}
"""Builders by `tokenizer.ggml.model`."""
