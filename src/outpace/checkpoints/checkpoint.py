"""`Checkpoint`: a published model and what its files describe, each read once."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from outpace.checkpoints.adapter import Adapter
from outpace.checkpoints.families import FAMILIES, Family
from outpace.checkpoints.families.a2d import omitted_fields
from outpace.checkpoints.families.family import HEAD_PREFIX
from outpace.checkpoints.fields import (
    Fields,
    convert_panics,
    count,
    index,
    indices,
    parse_value,
    read_json_object,
    shorten,
)
from outpace.checkpoints.gguf.config import gguf_config_fields, name_in_file
from outpace.checkpoints.gguf.file import open_gguf
from outpace.checkpoints.gguf.tokenizer import build_gguf_tokenizer
from outpace.checkpoints.gguf.weights import GGUFWeights
from outpace.checkpoints.hub import (
    CONFIG_FILE,
    GENERATION_FILE,
    ZOO_FOLDER,
    ZOO_TOKENIZER,
    resolve_checkpoint,
)
from outpace.checkpoints.name import head_name, is_gguf, split_head_name
from outpace.checkpoints.quantised import QUANTIZATION_FIELD, scheme_of
from outpace.checkpoints.quantised.scheme import Scheme
from outpace.checkpoints.tokenizer import TOKENIZER_CLASSES, read_tokenizer
from outpace.checkpoints.weights import CheckpointWeights
from outpace.decoding.target import DRAFT_KINDS
from outpace.errors import OptionError
from outpace.models.config import ModelConfig
from outpace.models.extending import mtp_config
from outpace.tokenizer import Tokenizer

MAX_ROTARY_ENTRIES = 2**27
"""Limit on the entries of a rotary table: cosines and sines take a GiB in float32."""


@dataclass(eq=False)
class Checkpoint:
    """A model in its published format; what its files describe is read when first used.

    Only the configuration is downloaded from the hub before weights or tokenizer are used.
    """

    name: str | Path
    """A folder, a GGUF file, a model of the zoo or the hub, or the head in one of these."""
    param: str = "model"
    """The option that errors name if there is no such model."""

    def __str__(self) -> str:
        return str(self.name)

    @cached_property
    def path(self) -> Path:
        """Folder of the configuration, or the GGUF file."""
        return resolve_checkpoint(self.name, (CONFIG_FILE, GENERATION_FILE), param=self.param)

    @cached_property
    def folder(self) -> Path:
        """Folder of all files, or the GGUF file."""
        return resolve_checkpoint(self.name, param=self.param)

    @property
    def config_path(self) -> Path:
        return self.path if is_gguf(self.path) else self.path / CONFIG_FILE

    @cached_property
    def published(self) -> Fields:
        """Fields of its `config.json`, or the equivalent ones of a GGUF file."""
        path = self.config_path
        if is_gguf(path):
            return gguf_config_fields(open_gguf(path))
        if not path.is_file():
            raise ValueError(f"{path} does not exist: a checkpoint folder needs its {CONFIG_FILE}")
        return {**omitted_fields(self.path), **read_json_object(path)}

    @cached_property
    def scheme(self) -> Scheme | None:
        """Format of quantized matrices in a folder."""
        return None if is_gguf(self.path) else scheme_of(self.published)

    @cached_property
    def generation_ends(self) -> tuple[int, ...]:
        path = self.path / GENERATION_FILE
        ids = read_json_object(path).get("eos_token_id") if path.is_file() else None
        try:
            return () if ids is None else parse_value("eos_token_id", ids, indices)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    @cached_property
    def config(self) -> ModelConfig:
        """Configuration as published."""
        return self.change_config({})

    def change_config(self, changes: Fields) -> ModelConfig:
        """Return the configuration with some published fields changed."""
        config = translate_config({**self.published, **changes}, self.config_path)
        if split_head_name(self.name)[1]:
            try:
                return mtp_config(config)
            except ValueError as error:
                raise OptionError("draft", self.name, f"{error}: give another draft") from error
        return replace(config, eos=tuple(dict.fromkeys((*config.eos, *self.generation_ends))))

    def target_config(
        self,
        *,
        max_length: int | None = None,
        mask_id: int | None = None,
        adapter: Adapter | None = None,
    ) -> ModelConfig:
        """Return the configuration of a model that is loaded with these options."""
        config = limit_positions(self.adapt_config(adapter), max_length)
        if config.kind in DRAFT_KINDS:
            raise OptionError(
                "model",
                self.name,
                f"{str(self)!r} is a draft that reads the features of a target: give the target as "
                "the model and this as its draft",
            )
        if mask_id is not None:
            mask_id = parse_value("mask_id", mask_id, index)
            try:
                config = config.with_mask(mask_id)
            except ValueError as error:
                raise OptionError("mask_id", mask_id, str(error)) from error
        return config

    def adapt_config(self, adapter: Adapter | None) -> ModelConfig:
        """Return the configuration with the changes that an adapter was trained with."""
        if adapter is None or not adapter.changes:
            return self.config
        try:
            changed = self.change_config(adapter.changes)
            if changed.shift < self.config.shift:
                raise ValueError("it removes the shift, which needs training without an adapter")
        except ValueError as error:
            message = f"model_config of {str(adapter.folder)!r}: {error}"
            raise OptionError("adapter", adapter.folder, message) from error
        return changed

    def open_head(self) -> Checkpoint:
        """Return the draft for multi-token prediction in this checkpoint."""
        head = Checkpoint(head_name(self.name), "draft")
        head.path, head.published = self.path, self.published
        return head

    def open_weights(
        self, stack: ExitStack, config: ModelConfig | None = None
    ) -> CheckpointWeights:
        """Open the tensors until the stack is closed; `config` is that of the model to fill."""
        config = config or self.config
        if is_gguf(self.folder):
            return GGUFWeights(open_gguf(self.folder), config)
        weights = CheckpointWeights(self.folder, stack, self.scheme)
        if config.is_head:
            weights.select_prefix(HEAD_PREFIX)
        return weights

    def check_weights(self) -> None:
        """Raise `ValueError` if files are missing, or end before the last layer."""
        with ExitStack() as stack:
            self.open_weights(stack).check_depth(self.config)

    def load_tokenizer(self) -> Tokenizer | None:
        """Load the tokenizer; None if there is none, so that only token ids work.

        A tokenizer whose class is remote code (Dream) is read from its vocabulary and merges as a
        Qwen2 tokenizer. Without a chat template it gets that of its family. Raises `ValueError`
        naming an invalid file.
        """
        if is_gguf(self.folder):
            with convert_panics(str(self.folder)):
                tokenizer = build_gguf_tokenizer(open_gguf(self.folder))
        else:
            tokenizer = read_tokenizer(self.tokenizer_folder)
        has_config = self.config_path.is_file()
        if tokenizer is not None and tokenizer.chat_template is None and has_config:
            tokenizer.chat_template = family_of(self.published, self.config_path).template
        return tokenizer

    @property
    def tokenizer_folder(self) -> Path:
        """Folder of the tokenizer, or the GGUF file that has it."""
        folder = self.folder
        own = is_gguf(folder) or any((folder / file).is_file() for file in TOKENIZER_CLASSES)
        in_zoo = folder.resolve().parent == ZOO_FOLDER.resolve()
        return ZOO_TOKENIZER if in_zoo and not own else folder


def load_config(name: str | Path) -> ModelConfig:
    """Load the configuration of a checkpoint; no weights are downloaded.

    Raises:
        ValueError: If there is no such checkpoint, or it is not supported.
    """
    return Checkpoint(name).config


def load_tokenizer(name: str | Path) -> Tokenizer | None:
    """Load the tokenizer of a checkpoint, see `Checkpoint.load_tokenizer`."""
    return Checkpoint(name).load_tokenizer()


def limit_positions(config: ModelConfig, max_length: int | None) -> ModelConfig:
    if max_length is not None:
        most = parse_value("max_length", max_length, count)
        config = replace(config, max_length=min(most, config.max_length))
    columns = sum(rope.width(size) for rope, size in config.ropes)
    if config.max_length * columns > MAX_ROTARY_ENTRIES:
        what = f"rotary tables of {config.max_length} positions, the length in config.json, take"
        raise OptionError(
            "max_length", config.max_length, f"{what} more than a GiB; set a smaller max_length"
        )
    return config


def translate_config(published: Fields, path: Path = Path(CONFIG_FILE)) -> ModelConfig:
    """Translate published fields into a `ModelConfig`; raise `ValueError` naming `path`."""
    family = family_of(published, path)
    try:
        scheme_of(published)
        return family.build_config(
            {name: value for name, value in published.items() if name != QUANTIZATION_FIELD}
        )
    except ValueError as error:
        if is_gguf(path) and isinstance(error, OptionError):
            error = name_in_file(open_gguf(path), error)
        raise ValueError(f"{path}: {error}") from error


def family_of(published: Mapping[str, Any], path: Path) -> Family:
    """Return the family that reads this `config.json`.

    Raises:
        ValueError: For an unknown architecture, for several, and for custom code in the checkpoint
            that may compute something else.
    """
    names = published.get("architectures") or []
    family = match_architecture(names, published, path)
    if len(names) > 1:
        raise ValueError(
            f"{path}: architectures must name one architecture, got {shorten(names)}; "
            "keep the one of this checkpoint"
        )
    try:
        family.check_remote(published)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return family


def match_architecture(names: Any, published: Mapping[str, Any], path: Path) -> Family:
    known = {name: family for family in FAMILIES.values() for name in family.architectures}
    for family in FAMILIES.values():
        for name, field in family.aliases.items():
            if names == [name] and published.get(field) is not None:
                return family
    first = str(names[0]) if isinstance(names, list) and names else ""
    if first in known:
        return known[first]
    raise ValueError(
        f"{path}: architectures {shorten(names)} is not supported; known are "
        f"{', '.join(sorted(known))}"
    )


TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


def write_tokenizer(source: Path, folder: Path) -> None:
    """Copy the tokenizer of a folder, or write that of a GGUF file, to a folder."""
    if is_gguf(source):
        if (tokenizer := load_tokenizer(source)) is not None:
            tokenizer.to_transformers().save_pretrained(folder)
        return
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
