"""Further models of a target's methods: checks of tokenizers and of heads, and loading."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from outpace.api.text import TextCodec
from outpace.checkpoints.load import (
    load_config,
    load_draft,
    load_model,
    load_tokenizer,
    open_weights,
    resolve_checkpoint,
)
from outpace.decoding import DRAFT_KINDS
from outpace.errors import OptionError
from outpace.models.config import ModelConfig
from outpace.models.transformer import Stack

if TYPE_CHECKING:
    from outpace.api.llm import LLM


def check_further(llm: LLM, further: Mapping[str, ModelConfig]) -> None:
    """Raise `OptionError` for another tokenizer, or a head that the checkpoint does not have."""
    for name, config in further.items():
        if config.is_draft and config.mtp is not None:
            check_head(name, config)
        if config.kind not in DRAFT_KINDS and name not in {*llm.vocab_sizes, llm.name}:
            text = TextCodec(name, load_tokenizer(name))
            llm.text.check_same_tokens(text, llm.config.vocab, config.vocab)
            llm.vocab_sizes[name] = text.vocab_size


def check_head(name: str, config: ModelConfig) -> None:
    """Raise `OptionError` if a checkpoint lacks the head that its configuration implies."""
    folder = resolve_checkpoint(name, param="draft")
    try:
        with ExitStack() as stack:
            open_weights(folder, config, stack).check_depth(config)
    except ValueError as error:
        message = f"draft: {error}: it has no head for multi-token prediction; give another draft"
        raise OptionError("draft", name, message) from error


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
