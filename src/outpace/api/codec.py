"""A tokenizer that threads share: text to token ids and back."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from reprlib import repr as brief
from threading import Lock

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from transformers.tokenization_utils_base import PreTrainedTokenizerBase as Tokenizer

from outpace.checkpoints.fields import panics
from outpace.errors import ContextError, OptionError

Span = tuple[int, int, int]
"""A token id, and the begin and end of its text in characters."""

PRIVATE = [*range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE)]
"""Characters without a meaning, in which no template is written and hardly a text."""


def free_characters(*texts: Collection[str]) -> Iterator[str]:
    """Private characters that occur in none of the texts."""
    used = set[str]().union(*texts)
    return (character for character in map(chr, PRIVATE) if character not in used)


def next_free(free: Iterator[str]) -> str:
    """The next of free characters; `OptionError` once there are no more."""
    if (found := next(free, None)) is None:
        message = "prompt: the text holds every private character of Unicode: leave some out"
        raise OptionError("prompt", None, message)
    return found


def checked_text(param: str, text: str) -> str:
    """The text of `param`; `OptionError` where it has no UTF-8, as an argument of other bytes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"{param}: {brief(text)} is not UTF-8: character {error.start + 1} is half of one"
        raise OptionError(param, text, message) from error
    return text


class Codec:
    """Token ids of texts by one tokenizer, from any thread.

    `context` is the number of tokens that the model takes, where it is known: text that cannot fit
    is refused before it is tokenized.
    """

    def __init__(self, name: str, tokenizer: Tokenizer) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.context: int | None = None
        self.renamed: Renamed | None = None
        # Whether special tokens are split is a setting of the tokenizer, and not of a call.
        self.lock = Lock()

    @cached_property
    def longest(self) -> int:
        """Characters of the longest token."""
        return max(map(len, self.tokenizer.get_vocab()), default=1)

    def check_length(self, text: str) -> None:
        """Raise `ContextError` for text with more characters than the model's context can hold."""
        if self.context is None or len(text) <= self.context:
            return
        if len(text) > (most := self.context * self.longest):
            raise ContextError(
                "prompt",
                text,
                f"prompt: a prompt of {len(text)} characters is too long for {self.name}: its "
                f"{self.context} tokens hold at most {most}",
            )

    def plain(self, text: str, *, begin: bool = False) -> list[int]:
        """Token ids of text without special tokens; `begin` adds the model's usual beginning."""
        self.check_length(text)
        with self.lock, panics(self.name):
            return self.tokenizer(
                text, add_special_tokens=begin, split_special_tokens=True, verbose=False
            ).input_ids

    def marked(self, text: str) -> tuple[list[int], list[Span]]:
        """Token ids of text with its special tokens, and where each stands."""
        self.check_length(text)
        with self.lock, panics(self.name):
            found = self.tokenizer(
                text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
            )
        ids = list(found.input_ids)
        places = zip(ids, found.offset_mapping, strict=True)
        return ids, [(token, begin, end) for token, (begin, end) in places]

    def only(self, text: str, spans: Sequence[Span], hidden: frozenset[int]) -> list[int]:
        """Token ids of text in which the added tokens `hidden` are tokens only at some `spans`.

        The spans are in order. All else is encoded as by a tokenizer without the hidden tokens.
        """
        lead = next_free(free_characters(text))
        if (renamed := self.renamed) is None or (renamed.lead, renamed.hidden) != (lead, hidden):
            renamed = self.renamed = Renamed(self.tokenizer, lead, hidden)
        parts, last = [], 0
        for token, begin, end in spans:
            parts += [text[last:begin], renamed.alias(token)]
            last = end
        with panics(self.name):
            ids = renamed.encode("".join([*parts, text[last:]]))
        if [each for each in ids if each in hidden] != [token for token, _, _ in spans]:
            message = f"prompt: the tokenizer of {self.name} cannot tell its tokens from text"
            raise OptionError("prompt", text, message)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        with panics(self.name):
            return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


class Renamed:
    """A tokenizer that knows some of its added tokens by other names, which no text holds.

    So the normalizer, the prefix spaces and the merges around them are those of the tokenizer, and
    their usual names are text. It shares the vocabulary, and costs a search table.
    """

    def __init__(self, tokenizer: Tokenizer, lead: str, hidden: frozenset[int]) -> None:
        self.lead, self.hidden = lead, hidden
        backend = tokenizer.backend_tokenizer
        self.backend = Backend(backend.model)
        for part in ("normalizer", "pre_tokenizer"):
            if getattr(backend, part) is not None:
                setattr(self.backend, part, getattr(backend, part))
        added = sorted(tokenizer.added_tokens_decoder.items())
        names = {token: self.alias(token) if token in hidden else str(own) for token, own in added}
        self.backend.add_tokens([renamed_token(own, names[token]) for token, own in added])
        self.ids = {self.backend.token_to_id(name): token for token, name in names.items()}

    def alias(self, token: int) -> str:
        """The other name of a hidden token."""
        return f"{self.lead}{token}{self.lead}"

    def encode(self, text: str) -> list[int]:
        """Ids of the tokenizer."""
        found = self.backend.encode(text, add_special_tokens=False).ids
        return [self.ids.get(token, token) for token in found]


def renamed_token(token: AddedToken, name: str) -> AddedToken:
    """An added token with another name, found by the same rules."""
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    return AddedToken(name, special=False, **{flag: getattr(token, flag) for flag in flags})
