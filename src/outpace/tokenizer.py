"""A tokenizer: text to token ids and back, and its chat template."""

from __future__ import annotations

import json
import re
from codecs import getincrementaldecoder
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def overlap_length(text: str, mark: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `mark`."""
    return next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)


class EncodedText(NamedTuple):
    """Token ids of a text, and the begin and end of each in characters."""

    input_ids: list[int]
    offset_mapping: list[tuple[int, int]]


BYTE_NAME = re.compile("<0x([0-9A-Fa-f]{2})>")
"""Name of a token that is one byte, where a vocabulary falls back to bytes."""


CONTEXTUAL_DECODERS = frozenset({"BPEDecoder", "CTC"})
"""Decoders by which the bytes of a token depend on which token precedes it."""


@cache
def byte_alphabet() -> dict[str, int]:
    """Return the characters that stand for bytes in byte-level vocabularies.

    See Radford et al., 2019.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other = [byte for byte in range(256) if byte not in plain]
    shown = {chr(byte): byte for byte in plain}
    return shown | {chr(256 + place): byte for place, byte in enumerate(other)}


def decoder_steps(decoder: Any) -> Iterator[str]:
    """Yield the types of a decoder, if there is one, and of those within it."""
    if decoder is not None:
        yield decoder["type"]
        for part in decoder.get("decoders", ()):
            yield from decoder_steps(part)


@dataclass(eq=False)
class Tokenizer:
    """A tokenizer of the tokenizers library, with the names that transformers uses.

    Importing transformers takes as long as loading a small model.

    Attributes:
        backend_tokenizer: Vocabulary and rules.
        special_tokens_map: Special tokens by their names in chat templates, such as `eos_token`.
        chat_template: Jinja template, several by name, or None.
    """

    backend_tokenizer: Backend
    special_tokens_map: Mapping[str, str]
    chat_template: str | dict[str, str] | None = None

    def __post_init__(self) -> None:
        backend = self.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        if backend.post_processor is None:  # as in transformers, so that digests stay the same
            backend.post_processor = TemplateProcessing(
                single="$A:0", pair="$A:0 $B:1", special_tokens=[]
            )

    def __call__(
        self, text: str, *, add_special_tokens: bool = True, split_special_tokens: bool = False
    ) -> EncodedText:
        """Encode text.

        Args:
            text: The text.
            add_special_tokens: Whether to add those that every text begins and ends with.
            split_special_tokens: Whether special tokens in the text are plain text.
        """
        self.backend_tokenizer.encode_special_tokens = split_special_tokens
        found = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return EncodedText(found.ids, found.offsets)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Decode token ids; each incomplete character becomes U+FFFD."""
        decoder, added = TextDecoder(self), self.added_tokens_decoder
        text = [
            decoder.push(token)
            for token in ids
            if not (skip_special_tokens and token in added and added[token].special)
        ]
        return "".join([*text, decoder.finish()])

    def token_bytes(self, token: int, previous: int | None) -> bytes | None:
        """Return the bytes that a token adds to a text, which may hold part of a character.

        Args:
            token: The token.
            previous: Token before it; None at the beginning of a text, where spaces may be removed.

        Returns:
            None for an id without a token.
        """
        if previous is None or not self.decoder_types.isdisjoint(CONTEXTUAL_DECODERS):
            return self.compute_bytes(token, previous)
        if token not in self.inner_bytes:
            self.inner_bytes[token] = self.compute_bytes(token, token)
        return self.inner_bytes[token]

    @cached_property
    def inner_bytes(self) -> dict[int, bytes | None]:
        """Bytes of the tokens that were decoded within a text, by id."""
        return {}

    def compute_bytes(self, token: int, previous: int | None) -> bytes | None:
        # Decoders of the tokenizers library replace every byte of a run that is not UTF-8.
        if (name := self.backend_tokenizer.id_to_token(token)) is None:
            return None
        if "ByteLevel" in self.decoder_types:
            alphabet = byte_alphabet()
            is_text = token in self.added_tokens_decoder or any(c not in alphabet for c in name)
            return name.encode() if is_text else bytes(alphabet[each] for each in name)
        if "ByteFallback" in self.decoder_types and (found := BYTE_NAME.fullmatch(name)):
            data = bytes.fromhex(found[1])
            if previous is not None or data != b" ":
                return data
        decode = self.backend_tokenizer.decode
        before = [] if previous is None else [previous]
        begin = len(decode(before, skip_special_tokens=False))
        return decode([*before, token], skip_special_tokens=False)[begin:].encode()

    @cached_property
    def decoder_types(self) -> frozenset[str]:
        """Types of the decoders of the tokenizers library that its tokens pass through."""
        decoder: Any = self.backend_tokenizer.decoder
        state = None if decoder is None else json.loads(decoder.__getstate__())
        return frozenset(decoder_steps(state))

    def __len__(self) -> int:
        """Return the number of tokens, added ones included."""
        return self.backend_tokenizer.get_vocab_size()

    def get_vocab(self) -> dict[str, int]:
        """Return ids by token, added ones included."""
        return self.backend_tokenizer.get_vocab()

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]:
        """Return the names of tokens, None for missing ones."""
        return list(map(self.backend_tokenizer.id_to_token, ids))

    @cached_property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Tokens that are matched before text is split, by id."""
        return self.backend_tokenizer.get_added_tokens_decoder()

    @property
    def eos_token_id(self) -> int | None:
        """End-of-sequence id."""
        token = self.special_tokens_map.get("eos_token")
        return None if token is None else self.backend_tokenizer.token_to_id(token)

    def to_transformers(self) -> PreTrainedTokenizerFast:
        """Return the same tokenizer as an object of transformers."""
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(
            tokenizer_object=self.backend_tokenizer,
            chat_template=self.chat_template,
            clean_up_tokenization_spaces=False,
            **self.special_tokens_map,
        )


class TextDecoder:
    """Decodes tokens one after another; an incomplete character waits for the next token.

    Without a tokenizer there is no text.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self.previous: int | None = None
        self.characters = getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Return the text that is complete with a token."""
        data = None
        if self.tokenizer is not None:
            data = self.tokenizer.token_bytes(token, self.previous)
        if data is None:  # an id without a token
            return ""
        self.previous = token
        return self.characters.decode(data)

    @property
    def is_incomplete(self) -> bool:
        """Whether the last tokens hold part of a character."""
        return bool(self.characters.getstate()[0])

    def finish(self) -> str:
        """Return U+FFFD for an incomplete character, which no later token completes."""
        return self.characters.decode(b"", final=True)
