"""The tokenizer of a folder."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from outpace.checkpoints.fields import (
    Fields,
    ValueParser,
    convert_panics,
    error_line,
    flag,
    parse_value,
    read_json_object,
    shorten,
)
from outpace.tokenizer import Tokenizer

TOKENIZER_CLASSES = {
    "tokenizer.json": "PreTrainedTokenizerFast",
    "vocab.json": "Qwen2TokenizerFast",
}
"""Classes of `transformers` by file."""
TOKENIZER_CONFIG = "tokenizer_config.json"
OLD_CONFIGS = ("special_tokens_map.json", "added_tokens.json")
"""Files that transformers reads if `tokenizer_config.json` does not list the added tokens."""


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
    """Parse a chat template, or several by name."""
    if isinstance(value, str):
        return value
    entries = value.items() if isinstance(value, dict) else template_pairs(value)
    if entries and all(isinstance(each, str) for pair in entries for each in pair):
        return value
    raise ValueError("text, or a list of {name, template}")


def template_pairs(value: Any) -> list[tuple[Any, Any]]:
    """Return names and templates of a list; empty for any other value."""
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


def read_tokenizer(home: Path) -> Tokenizer | None:
    """Read the tokenizer of a folder; None if it has none."""
    # These classes never load code of the repository, as AutoTokenizer would.
    path = next((home / name for name in TOKENIZER_CLASSES if (home / name).is_file()), None)
    if path is None:
        return None
    configs = {
        name: read_json_object(home / name)
        for name in (TOKENIZER_CONFIG, *OLD_CONFIGS)
        if (home / name).is_file()
    }
    for name, config in configs.items():
        check_tokenizer_fields(config, home / name)
    try:
        with convert_panics(str(path)):
            tokenizer = read_plain_tokenizer(path, configs) or read_by_transformers(path)
            tokenizer.decode(tokenizer("a").input_ids, skip_special_tokens=True)
    except Exception as error:  # the tokenizers library raises the base class
        if path.name == "tokenizer.json":
            check_json_merges(read_json_object(path).get("model"), path)
        raise ValueError(f"{path} is not a readable tokenizer: {error_line(error)}") from error
    return tokenizer


def check_json_merges(model: Any, path: Path) -> None:
    """Raise `ValueError` for an invalid merge of the model in a `tokenizer.json`."""
    match model:
        case {"continuing_subword_prefix": str(prefix)} if prefix:
            return  # merged tokens lack it
        case {"vocab": dict(vocabulary), "merges": list(merges)}:
            parts = [each.split(" ") if isinstance(each, str) else each for each in merges]
            check_merges(f"{path}: model.merges", parts, vocabulary)


def check_merges(name: str, merges: Sequence[Any], vocabulary: Collection[str]) -> None:
    """Raise `ValueError` for a merge that is not two tokens which make a third."""
    known = frozenset(vocabulary)
    for number, merge in enumerate(merges):
        match merge:
            case [str(left), str(right)] if {left, right, left + right} <= known:
                continue
        raise ValueError(
            f"{name}[{number}] must be two tokens that make another one, with a space between them "
            f"in text, got {shorten(merge)}; convert the model again"
        )


def read_by_transformers(path: Path) -> Tokenizer:
    """Read a tokenizer by transformers, which supports older formats too."""
    import transformers

    loaded = getattr(transformers, TOKENIZER_CLASSES[path.name]).from_pretrained(path.parent)
    return Tokenizer(loaded.backend_tokenizer, loaded.special_tokens_map, loaded.chat_template)


UNUSUAL_FIELDS = ("fix_mistral_regex", "model_specific_special_tokens", "split_special_tokens")
"""Fields of `tokenizer_config.json` that transformers interprets."""


def read_plain_tokenizer(path: Path, configs: Mapping[str, Fields]) -> Tokenizer | None:
    """Read a tokenizer as transformers does, if all its tokens are listed; None for any other."""
    config = configs.get(TOKENIZER_CONFIG, {})
    listed = config.get("added_tokens_decoder")
    further = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    # In these cases transformers does more than read the file.
    if (
        path.name != "tokenizer.json"
        or (listed is None and not configs.keys().isdisjoint(OLD_CONFIGS))
        or any(config.get(name) for name in UNUSUAL_FIELDS)
        or not isinstance(further, list)
        or (path.parent / "additional_chat_templates").is_dir()
    ):
        return None
    backend = Backend.from_file(str(path))
    special = {name: token_text(value) for name, value in config.items() if is_token(name, value)}
    added = (
        backend.get_added_tokens_decoder()
        if listed is None
        else {int(number): AddedToken(**fields) for number, fields in listed.items()}
    )
    for token in added.values():
        token.special |= str(token) in special.values()
    backend.add_tokens([token for _, token in sorted(added.items())])
    known = {str(token) for token in backend.get_added_tokens_decoder().values()}
    if backend.padding is not None or not known.issuperset(
        [*special.values(), *map(token_text, further)]
    ):
        return None
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {each["name"]: each["template"] for each in template}
    # As in transformers, the file takes precedence.
    if (file := path.parent / "chat_template.jinja").is_file():
        template = file.read_text("utf-8")
    return Tokenizer(backend, special, template)


def is_token(name: str, value: Any) -> bool:
    """Return whether a field names a special token."""
    return name.endswith("_token") and value is not None and type(value) is not bool


def token_text(value: Any) -> str:
    """Return the text of a token, which may be an object with further fields."""
    return value if isinstance(value, str) else str(value["content"])
