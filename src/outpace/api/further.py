"""Further models of a target's methods: a check of their tokenizers, and loading."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from outpace.api.text import TextCodec
from outpace.checkpoints.load import load_config, load_draft, load_model, load_tokenizer
from outpace.decoding import DRAFT_KINDS
from outpace.errors import OptionError
from outpace.models.config import ModelConfig
from outpace.models.transformer import Stack

if TYPE_CHECKING:
    from outpace.api.llm import LLM


def check_tokenizers(llm: LLM, further: Mapping[str, ModelConfig]) -> None:
    """Raise `OptionError` for a further model that does not share the tokenizer."""
    for name, config in further.items():
        if config.kind not in DRAFT_KINDS and name not in {*llm.vocab_sizes, llm.name}:
            text = TextCodec(name, load_tokenizer(name))
            llm.text.check_same_tokens(text, llm.config.vocab, config.vocab)
            llm.vocab_sizes[name] = text.vocab_size


def load_further(llm: LLM, name: str) -> Stack:
    """Load a further model of a method: an independent model, or a draft for the target."""
    limits = {"max_length": llm.max_length, "quantize": llm.quantize}
    more: dict[str, Any] = {**limits, "share": llm.group.share}
    if load_config(name).kind not in DRAFT_KINDS:
        return load_model(name, dtype=llm.dtype, device=llm.device, **more)
    try:
        return load_draft(name, llm.model, **more)
    except ValueError as error:
        message = f"draft: {name} cannot draft for {llm.name}: {error}"
        raise OptionError("draft", name, message) from error
