"""Checkpoint folders, hub names and embedded models to a `Transformer` and a tokenizer."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub import snapshot_download
from transformers import PreTrainedTokenizerFast, Qwen2TokenizerFast  # type: ignore[attr-defined]
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from outpace.checkpoints.adapter import Adapter
from outpace.checkpoints.fields import (
    brief,
    checked,
    count,
    index,
    indices,
    line,
    panics,
    read_json,
)
from outpace.checkpoints.fill import fill
from outpace.checkpoints.gguf.config import fields_of
from outpace.checkpoints.gguf.file import is_gguf, opened
from outpace.checkpoints.gguf.tokenizer import tokenizer_of
from outpace.checkpoints.gguf.weights import GGUFWeights
from outpace.checkpoints.lookup import family_of as family_of
from outpace.checkpoints.piece import slices
from outpace.checkpoints.quantised import FIELD, scheme_of
from outpace.checkpoints.save import save_model as save_model
from outpace.checkpoints.tokenizer_files import check_fields, try_tokenizer
from outpace.checkpoints.weights import Weights
from outpace.decoding.target import DRAFT_KINDS
from outpace.errors import OptionError, prefixed
from outpace.models.config import ModelConfig
from outpace.models.draft import Draft
from outpace.models.extending import draft_of
from outpace.models.int8 import exact
from outpace.models.low_bits import NATIVE, check, narrowing
from outpace.models.packed import has_packed_products, report_packed
from outpace.models.split import Share, divide, once
from outpace.models.transformer import Stack, Transformer

ZOO = Path(__file__).parent.parent / "zoo"
VOCABULARY = ZOO / "vocabulary"
"""Tokenizer of every model of the zoo."""
FILES = ["*.json", "*.safetensors", "*.txt", "*.jinja"]
CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZERS = {"tokenizer.json": PreTrainedTokenizerFast, "vocab.json": Qwen2TokenizerFast}
PARTS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
TABLES = 2**27
"""Most entries of a rotary table: with its twin, a GiB in float32."""


def resolve(name: str | Path, patterns: Sequence[str] = FILES, *, param: str = "model") -> Path:
    """Folder of a checkpoint: a path, a model of the zoo, or a hub name (downloaded once).

    The path of a GGUF file is that file.

    Of a hub repository the files come that `patterns` name. `param` is the option that names it.

    Raises `OptionError` when there is no such folder, zoo model or hub repository.
    """
    if not isinstance(name, str | Path):
        message = f"{param}: {brief(name)} names no model: give a text or a path"
        raise OptionError(param, name, message)
    if os.path.isdir(name) or is_gguf(Path(name)):
        return Path(name)
    if os.path.isfile(ZOO / name / CONFIG):
        return ZOO / name
    if str(name).count("/") != 1 or str(name).startswith((".", "/")):
        raise OptionError(
            param,
            name,
            f"{param}: no model {str(name)!r}: give a folder with a config.json, a GGUF file, a "
            "hub name such as 'Qwen/Qwen3-0.6B', or one of "
            f"{', '.join(zoo_names()) or 'the zoo (empty)'}",
        )
    try:
        return Path(snapshot_download(str(name), allow_patterns=[*patterns]))
    except Exception as error:
        message = f"{param}: the hub did not give {str(name)!r}: {line(error)}"
        raise OptionError(param, name, message) from error


def here(name: str) -> bool:
    """Whether a checkpoint can be had without a download."""
    if os.path.isdir(name) or os.path.isfile(ZOO / name / CONFIG):
        return True
    try:
        folder = snapshot_download(name, allow_patterns=FILES, local_files_only=True)
    except Exception:  # what the hub's library raises where nothing lies in its cache
        return False
    return os.path.isfile(Path(folder) / CONFIG)


def zoo_names() -> list[str]:
    """Names of the models that ship inside the package."""
    return sorted(path.parent.name for path in ZOO.glob("*/config.json"))


def load_config(name: str | Path, **changes: Any) -> ModelConfig:
    """Configuration of a checkpoint, with fields of its `config.json` changed on request.

    What ends an answer stands in `generation_config.json` as well.
    """
    folder = resolve(name, (CONFIG, GENERATION))  # of the hub no more than is read here
    path = folder if is_gguf(folder) else folder / CONFIG
    config = translate({**published(path), **changes}, path)
    ends = dict.fromkeys((*config.eos, *generation_ends(folder)))
    return replace(config, eos=tuple(ends))


def generation_ends(folder: Path) -> tuple[int, ...]:
    """Tokens that end an answer where a checkpoint's `generation_config.json` names some."""
    path = folder / GENERATION
    given = read_json(path).get("eos_token_id") if path.is_file() else None
    try:
        return () if given is None else checked("eos_token_id", given, indices)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def published(path: Path) -> dict[str, Any]:
    """Fields of a checkpoint's `config.json`, or those that a GGUF file means."""
    if is_gguf(path):
        return fields_of(opened(path))
    if not path.is_file():
        raise ValueError(f"{path} does not exist: a checkpoint folder needs its config.json")
    return read_json(path)


def translate(published: Mapping[str, Any], path: Path = Path(CONFIG)) -> ModelConfig:
    """Published configuration fields as a `ModelConfig`; `path` is for the error's text.

    It is that of the plain model, however its weights are stored.
    """
    family = family_of(published, path)
    try:
        scheme_of(published)
        return family.config({name: value for name, value in published.items() if name != FIELD})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def target_config(
    name: str | Path, *, max_length: int | None = None, mask_id: int | None = None
) -> ModelConfig:
    """Configuration of the model that `load_model` would load; raises as that does.

    It costs a fraction of a second, so what does not fit is refused by it before weights are read.
    """
    config = limited(load_config(name), max_length)
    if config.kind in DRAFT_KINDS:
        message = f"model: {str(name)!r} is a draft that reads the features of a target: give the"
        raise OptionError("model", name, f"{message} target as the model and this as its draft")
    if mask_id is not None:
        mask_id = checked("mask_id", mask_id, index)
        try:
            config = config.with_mask(mask_id)
        except ValueError as error:
            raise OptionError("mask_id", mask_id, f"mask_id: {error}") from error
    return config


def load_model(
    name: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    max_length: int | None = None,
    adapter: str | Path | None = None,
    mask_id: int | None = None,
    quantize: str | None = None,
    plain: bool = False,
    share: Share | None = None,
) -> Transformer:
    """Load a model in its published format, with an adapter merged into it where one is named.

    `max_length` limits its rotary tables, `mask_id` is its mask token, whatever `config.json` says;
    `quantize` keeps its matrices in `int8` on a CPU that multiplies them, those of a GGUF file in
    its own bits (`native`), or its projections in `fp8`, `int8` or `int4` on a GPU. Other weights
    that are quantised already become plain, but for those of 8 bits on such a CPU; `plain` makes
    these plain too, as training needs them. Of a model that several processes hold, only the
    `share` of this one is read. Raises `ValueError` naming file and tensor where one is missing or
    has another shape, and for a draft, which is nothing without its target.
    """
    folder = resolve(name)
    config = target_config(folder, max_length=max_length, mask_id=mask_id)
    update = None if adapter is None else load_adapter(adapter)
    return filled(Transformer, config, folder, dtype, device, update, quantize, plain, share)


def load_draft(
    name: str | Path,
    target: Transformer,
    *,
    max_length: int | None = None,
    quantize: str | None = None,
    plain: bool = False,
    share: Share | None = None,
) -> Draft:
    """Load a draft that reads the features of `target`, in the target's dtype and beside it.

    Raises `ValueError` as `load_model` does, and where the two do not fit together.
    """
    folder = resolve(name)
    config = limited(load_config(folder), max_length)
    if config.kind not in DRAFT_KINDS:
        raise ValueError(
            f"{str(name)!r} is no draft that reads features: its architecture is "
            f"{config.architecture}"
        )
    like = target.norm.weight
    return filled(
        lambda sizes: draft_of(sizes, target),
        config,
        folder,
        like.dtype,
        like.device,
        quantize=quantize,
        plain=plain,
        share=share,
    )


def limited(config: ModelConfig, max_length: int | None) -> ModelConfig:
    """A configuration for no more positions than this; `ValueError` for too many to tabulate."""
    if max_length is not None:
        most = checked("max_length", max_length, count)
        config = replace(config, max_length=min(most, config.max_length))
    if config.max_length * config.head_dim * len(config.ropes) > TABLES:
        what = f"rotary tables of {config.max_length} positions, as config.json wants them, take"
        message = f"max_length: {what} more than a GiB; give a max_length that suffices"
        raise OptionError("max_length", config.max_length, message)
    return config


Model = TypeVar("Model", bound=Stack)


def filled(
    make: Callable[[ModelConfig], Model],
    config: ModelConfig,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device | str,
    adapter: Adapter | None = None,
    quantize: str | None = None,
    plain: bool = False,
    share: Share | None = None,
) -> Model:
    """A model of a configuration with the weights of a folder, or this process's share of it."""
    check(quantize, device, dtype)
    with ExitStack() as stack:
        weights = weights_of(folder, config, stack)
        weights.check_depth(config)
        wanted = None
        try:
            with torch.device("meta"):
                model = make(config)
                if share is not None:
                    whole, model = model, make(share.config(config))
                    divide(model, share)
                    wanted = slices(model, whole, share)
            narrow = narrowing(model, quantize, device)
        except ValueError as error:
            raise prefixed(str(folder), error) from error
        small = quantize == "int8" and narrow is None and exact()
        keeps = not plain and share is None and torch.device(device).type == "cpu"
        native = quantize == NATIVE and is_gguf(folder) and has_packed_products()
        fill(
            *(model, weights, dtype, device, adapter),
            quantize=small,
            keeps=keeps,
            native=native,
            narrow=narrow,
            wanted=wanted,
        )
    if native:
        report_packed(folder, model)
    if share is not None:
        once(model, share)
    return model


def weights_of(folder: Path, config: ModelConfig, stack: ExitStack) -> Weights:
    """The tensors of a folder, or of a GGUF file, until the stack is closed."""
    if is_gguf(folder):
        return GGUFWeights(opened(folder), config)
    return Weights(folder, stack, scheme_of(published(folder / CONFIG)))


def load_adapter(name: str | Path) -> Adapter:
    """Adapter of a folder or a hub name; `ValueError` for one that is none."""
    return Adapter.load(resolve(name, param="adapter"))


def tokenizer_folder(name: str | Path) -> Path:
    """Folder of a checkpoint's tokenizer: its own, or the one that all models of the zoo share."""
    folder = resolve(name)
    if is_gguf(folder):
        raise ValueError(
            f"{folder} is a GGUF file, which has no folder of a tokenizer: name one that has "
            "(model.tokenizer), such as what outpace quantize writes of this file"
        )
    own = any((folder / file).is_file() for file in TOKENIZERS)
    return VOCABULARY if not own and folder.resolve().parent == ZOO.resolve() else folder


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerBase | None:
    """Tokenizer of a checkpoint, or None where it has none (then only token ids work).

    A tokenizer whose class is remote code (Dream) is read from its vocabulary and merges as the
    Qwen2 tokenizer that it is. Raises `ValueError` naming the file that is broken.
    """
    folder = resolve(name)
    if is_gguf(folder):
        with panics(str(folder)):
            return with_template(tokenizer_of(opened(folder)), folder)
    home = tokenizer_folder(folder)
    # The plain classes never look for code of the repository, as AutoTokenizer would.
    here = [home / name for name in TOKENIZERS if (home / name).is_file()]
    if not here:
        return None
    for path in (here[0], *(home / name for name in PARTS if (home / name).is_file())):
        check_fields(read_json(path), path)
    try:
        with panics(str(here[0])):
            tokenizer = TOKENIZERS[here[0].name].from_pretrained(home)
    except Exception as error:  # the base class is what the tokenizers library raises
        raise ValueError(f"{here[0]} is no readable tokenizer: {line(error)}") from error
    try_tokenizer(tokenizer, here[0])
    return with_template(tokenizer, folder / CONFIG)


def with_template(
    tokenizer: PreTrainedTokenizerBase | None, path: Path
) -> PreTrainedTokenizerBase | None:
    """A tokenizer with its family's chat template where it has none of its own."""
    if tokenizer is not None and tokenizer.chat_template is None and path.is_file():
        tokenizer.chat_template = family_of(published(path), path).template
    return tokenizer
