"""A tokenizer shared by threads: text to token ids and back."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from reprlib import repr as brief
from threading import Lock

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from outpace.checkpoints.fields import convert_panics
from outpace.errors import ContextError, OptionError
from outpace.tokenizer import Tokenizer

TokenSpan = tuple[int, int, int]
"""A token id, and the start and end of its text in characters."""

PRIVATE_CODE_POINTS = [*range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE)]
"""Private-use code points, which templates never contain and texts rarely do."""


def unused_characters(*texts: Collection[str]) -> Iterator[str]:
    """Yield private-use characters that occur in none of the strings."""
    used = set[str]().union(*texts)
    return (character for character in map(chr, PRIVATE_CODE_POINTS) if character not in used)


def take_unused_character(free: Iterator[str]) -> str:
    """Take the next unused character; raises `OptionError` if none is left."""
    if (found := next(free, None)) is None:
        raise OptionError(
            "prompt", None, "the text uses every private-use character of Unicode; remove some"
        )
    return found


def validate_text(param: str, text: str) -> str:
    """Return the text of `param`; raises `OptionError` if it cannot be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise OptionError(
            param, text, f"character {error.start + 1} of {brief(text)} is a lone surrogate"
        ) from error
    return text


class SharedTokenizer:
    """A tokenizer that any thread may use.

    Attributes:
        context_length: Maximum number of tokens of the model, or None. Text that cannot fit is
            rejected before it is tokenized.
    """

    def __init__(self, name: str, tokenizer: Tokenizer) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.context_length: int | None = None
        self.aliased: AliasedTokenizer | None = None
        # Splitting special tokens is a setting of the tokenizer, not of a call.
        self.lock = Lock()

    @cached_property
    def longest_token(self) -> int:
        """Number of characters of the longest token."""
        return max(map(len, self.tokenizer.get_vocab()), default=1)

    def check_length(self, text: str) -> None:
        """Raise `ContextError` for text with more characters than the context can hold."""
        if self.context_length is None or len(text) <= self.context_length:
            return
        least = -(-len(text) // self.longest_token)
        if least > (limit := self.context_length):
            raise ContextError(
                "prompt",
                text,
                f"prompt is too long: at least {least} tokens > {limit} maximum context length, "
                f"the context of {self.name}",
            )

    def encode_plain(self, text: str, *, begin: bool = False) -> list[int]:
        """Encode text without special tokens.

        Args:
            text: Text in which the names of special tokens are plain text.
            begin: Whether to add the tokens that the model's sequences begin with, such as BOS.
        """
        self.check_length(text)
        with self.lock, convert_panics(self.name):
            return self.tokenizer(
                text, add_special_tokens=begin, split_special_tokens=True
            ).input_ids

    def encode_with_spans(self, text: str) -> tuple[list[int], list[TokenSpan]]:
        """Encode text with its special tokens; return the ids and the span of each."""
        self.check_length(text)
        with self.lock, convert_panics(self.name):
            ids, spans = self.tokenizer(text, add_special_tokens=False)
        return ids, [(token, begin, end) for token, (begin, end) in zip(ids, spans, strict=True)]

    def encode_selected(
        self, text: str, spans: Sequence[TokenSpan], hidden: frozenset[int]
    ) -> list[int]:
        """Encode text in which the added tokens `hidden` are tokens only at the given spans.

        All other text is encoded as by a tokenizer without the hidden tokens.

        Args:
            text: The text.
            spans: Spans of the hidden tokens to keep, in order.
            hidden: Ids of the hidden tokens.

        Raises:
            OptionError: If the tokenizer cannot separate its tokens from the text.
        """
        lead = take_unused_character(unused_characters(text))
        if (renamed := self.aliased) is None or (renamed.delimiter, renamed.hidden_ids) != (
            lead,
            hidden,
        ):
            renamed = self.aliased = AliasedTokenizer(self.tokenizer, lead, hidden)
        parts, last = [], 0
        for token, begin, end in spans:
            parts += [text[last:begin], renamed.alias_name(token)]
            last = end
        with convert_panics(self.name):
            ids = renamed.encode("".join([*parts, text[last:]]))
        if [each for each in ids if each in hidden] != [token for token, _, _ in spans]:
            raise OptionError(
                "prompt", text, f"the tokenizer of {self.name} cannot separate its tokens from text"
            )
        return ids

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Decode token ids, without special tokens unless `special`."""
        with convert_panics(self.name):
            return str(self.tokenizer.decode(list(ids), skip_special_tokens=not special))


class AliasedTokenizer:
    """A tokenizer that has some of its added tokens under aliases that occur in no text.

    The normalizer, the prefix spaces and the merges next to these tokens are unchanged, and their
    usual names are plain text. It shares the vocabulary; its only cost is a search table.
    """

    def __init__(self, tokenizer: Tokenizer, lead: str, hidden: frozenset[int]) -> None:
        self.delimiter, self.hidden_ids = lead, hidden
        backend = tokenizer.backend_tokenizer
        self.backend = Backend(backend.model)
        for part in ("normalizer", "pre_tokenizer"):
            if getattr(backend, part) is not None:
                setattr(self.backend, part, getattr(backend, part))
        added = sorted(tokenizer.added_tokens_decoder.items())
        names = {
            token: self.alias_name(token) if token in hidden else str(added_token)
            for token, added_token in added
        }
        self.backend.add_tokens(
            [alias_token(added_token, names[token]) for token, added_token in added]
        )
        self.original_ids = {self.backend.token_to_id(name): token for token, name in names.items()}

    def alias_name(self, token: int) -> str:
        return f"{self.delimiter}{token}{self.delimiter}"

    def encode(self, text: str) -> list[int]:
        """Encode text; returns ids of the original tokenizer."""
        found = self.backend.encode(text, add_special_tokens=False).ids
        return [self.original_ids.get(token, token) for token in found]


def alias_token(token: AddedToken, name: str) -> AddedToken:
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    return AddedToken(name, special=False, **{flag: getattr(token, flag) for flag in flags})
