"""A tokenizer: text to token ids and back, and its chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class EncodedText(NamedTuple):
    """Token ids of a text, and the begin and end of each in characters."""

    input_ids: list[int]
    offset_mapping: list[tuple[int, int]]


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
        """Decode token ids."""
        return self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def __len__(self) -> int:
        """Return the number of tokens, added ones included."""
        return self.backend_tokenizer.get_vocab_size()

    def get_vocab(self) -> dict[str, int]:
        """Return ids by token, added ones included."""
        return self.backend_tokenizer.get_vocab()

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]:
        """Return the names of tokens, None for missing ones."""
        return list(map(self.backend_tokenizer.id_to_token, ids))

    @property
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
