"""Checks of a tokenizer's files and of the loaded tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase as Tokenizer

from outpace.checkpoints.fields import (
    Fields,
    ValueParser,
    convert_panics,
    error_line,
    flag,
    parse_value,
)

TOKENIZER_CLASSES = {
    "tokenizer.json": "PreTrainedTokenizerFast",
    "vocab.json": "Qwen2TokenizerFast",
}
"""Classes of `transformers` by file; it imports a class when it is first used."""
TOKENIZER_CONFIGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def parse_length(value: Any) -> float:
    """Parse a number of tokens; published tokenizers write 1e30 for no limit."""
    if type(value) in (int, float) and value > 0:
        return float(value)
    raise ValueError("a positive number")


def parse_names(value: Any) -> tuple[str, ...]:
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return tuple(value)
    raise ValueError("a list of texts")


def parse_templates(value: Any) -> Any:
    if isinstance(value, str):
        return value
    entries = value.items() if isinstance(value, dict) else template_pairs(value)
    if entries and all(isinstance(each, str) for pair in entries for each in pair):
        return value
    raise ValueError("text, or a list of {name, template}")


def template_pairs(value: Any) -> list[tuple[Any, Any]]:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        return []
    return [(each.get("name"), each.get("template")) for each in value]


BOOLEAN_FIELDS = (
    *("add_bos_token", "add_eos_token", "add_prefix_space", "clean_up_tokenization_spaces"),
    *("legacy", "split_special_tokens"),
)
TOKENIZER_FIELDS: Mapping[str, ValueParser] = {
    **dict.fromkeys(BOOLEAN_FIELDS, flag),
    "model_max_length": parse_length,
    "model_input_names": parse_names,
    "chat_template": parse_templates,
}
"""Fields that change how text is encoded; transformers checks the others while loading."""


def check_tokenizer_fields(config: Fields, path: Path) -> None:
    """Raise `ValueError` naming the file for a field of the wrong type."""
    for name, check in TOKENIZER_FIELDS.items():
        if config.get(name) is not None:
            try:
                parse_value(name, config[name], check)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from None


def try_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    """Encode and decode a string.

    Raises:
        ValueError: If that fails; the message names the file.
    """
    try:
        with convert_panics(str(path)):
            ids = tokenizer("a", verbose=False).input_ids
            tokenizer.decode(ids, skip_special_tokens=True)
    except Exception as error:  # wrong types fail wherever the library first uses them
        raise ValueError(f"{path} is not a working tokenizer: {error_line(error)}") from error
