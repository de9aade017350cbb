"""Loading of models and tokenizers from folders, GGUF files, the hub and the zoo."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import huggingface_hub
import torch

from outpace.checkpoints.adapter import ADAPTER_CONFIG, Adapter, read_lora_config
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
)
from outpace.checkpoints.fill import LOAD_PROGRESS, build_stored_reader, fill_model
from outpace.checkpoints.gguf.config import gguf_config_fields, name_in_file
from outpace.checkpoints.gguf.file import is_gguf, open_gguf
from outpace.checkpoints.gguf.tokenizer import build_gguf_tokenizer
from outpace.checkpoints.gguf.weights import GGUFWeights
from outpace.checkpoints.hub import (
    REPOSITORY_NAME,
    HubName,
    describe_hub_error,
    find_model,
    pull_model,
)
from outpace.checkpoints.lookup import family_of as family_of
from outpace.checkpoints.quantised import QUANTIZATION_FIELD, scheme_of
from outpace.checkpoints.tokenizer import TOKENIZER_CLASSES, read_tokenizer
from outpace.checkpoints.weights import CheckpointWeights, sharded_parts
from outpace.checkpoints.weights import save_model as save_model
from outpace.decoding.target import DRAFT_KINDS
from outpace.errors import OptionError, prefix_error
from outpace.models.config import ModelConfig
from outpace.models.draft import Draft
from outpace.models.extending import build_draft_model, mtp_config
from outpace.models.low_bits import build_cpu_quantizer, build_quantizer, check_quantize
from outpace.models.packed import log_packed
from outpace.models.split import ModelShard, keep_one_bias, parallelize_model
from outpace.models.transformer import Stack, Transformer
from outpace.tokenizer import Tokenizer

MAX_ROTARY_ENTRIES = 2**27
"""Limit on the entries of a rotary table: cosines and sines take a GiB in float32."""


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


HEAD_SUFFIX = "#mtp"
"""End of the name of a checkpoint's head, after the name of the checkpoint."""


def head_name(target: str | Path) -> str:
    """Return the name of the head in a target's checkpoint."""
    return f"{target}{HEAD_SUFFIX}"


def split_head_name(name: str | Path) -> tuple[str | Path, bool]:
    """Return the checkpoint that a name stands for, and whether its head is meant."""
    if not str(name).endswith(HEAD_SUFFIX) or os.path.exists(name):
        return name, False
    return str(name).removesuffix(HEAD_SUFFIX), True


def head_config(target: ModelConfig, name: str | Path) -> ModelConfig:
    try:
        return mtp_config(target)
    except ValueError as error:
        raise OptionError("draft", name, f"{error}: give another draft") from error


ZOO_FOLDER = Path(__file__).parent.parent / "zoo"
ZOO_TOKENIZER = ZOO_FOLDER / "vocabulary"
"""Tokenizer shared by the models of the zoo."""
CHECKPOINT_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.jinja"]
CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"


def find_checkpoint(name: str | Path) -> Path | None:
    """Return a folder, a GGUF file, a zoo model, or a GGUF model of the hub that is here."""
    if os.path.isdir(name) or is_gguf(Path(name)):
        return Path(name)
    if os.path.isfile(ZOO_FOLDER / name / CONFIG_FILE):
        return ZOO_FOLDER / name
    hub_name = HubName.parse(name)
    return None if hub_name is None else find_model(hub_name)


def resolve_checkpoint(
    name: str | Path, patterns: Sequence[str] = CHECKPOINT_PATTERNS, *, param: str = "model"
) -> Path:
    """Return the folder of a checkpoint: a path, a zoo model, or a hub name (downloaded once).

    A GGUF file, given by its path or as `ORG/REPO:QUANT`, has no folder: its path is returned.
    Files of other hub repositories must match `patterns`. Raises `OptionError` for the option
    `param` if nothing is found.
    """
    if not isinstance(name, str | Path):
        raise OptionError(param, name, "must be a name or a path")
    name = split_head_name(name)[0]
    if (found := find_checkpoint(name)) is not None:
        return found
    if (hub_name := HubName.parse(name)) is not None:
        try:
            return pull_model(hub_name, LOAD_PROGRESS.get())
        except OptionError as error:
            raise error.with_param(param) from error
    if REPOSITORY_NAME.fullmatch(str(name)) is None:
        raise OptionError(
            param,
            name,
            f"no model {str(name)!r}: give a folder with a config.json, a GGUF file, a hub name "
            "such as 'Qwen/Qwen3-0.6B' or 'ORG/REPO:Q4_K_M', or one of "
            f"{', '.join(zoo_names()) or 'the zoo (empty)'}",
        )
    return download_snapshot(str(name), patterns, param)


def download_snapshot(name: str, patterns: Sequence[str], param: str = "model") -> Path:
    """Return the folder of a repository in the hub's cache, with the files that match `patterns`.

    A name in an existing folder is that of a missing one, unless the cache has the repository.

    Raises:
        OptionError: For the option `param`, if the hub does not give the repository.
    """
    folder = Path(name).parent
    is_path = folder.is_dir()
    try:
        return Path(
            huggingface_hub.snapshot_download(
                name, allow_patterns=[*patterns], local_files_only=is_path
            )
        )
    except Exception as error:  # the library raises those of its HTTP library too
        reason = f"{str(folder)!r} does not have it" if is_path else describe_hub_error(error)
        raise OptionError(param, name, f"no folder {name!r}: {reason}") from error


def is_local(name: str) -> bool:
    """Return whether a checkpoint is available without a download."""
    if find_checkpoint(name) is not None:
        return True
    try:
        folder = huggingface_hub.snapshot_download(
            name, allow_patterns=CHECKPOINT_PATTERNS, local_files_only=True
        )
    except Exception:  # the hub's library raises various errors for an empty cache
        return False
    return os.path.isfile(Path(folder) / CONFIG_FILE)


def zoo_names() -> list[str]:
    """Return the names of the models in the package."""
    return sorted(path.parent.name for path in ZOO_FOLDER.glob("*/config.json"))


def load_config(name: str | Path, **changes: Any) -> ModelConfig:
    """Load a configuration and its generation config, with `changes` to `config.json`.

    The name of a head (`checkpoints/load.py`) gives the configuration of this draft.
    """
    folder = resolve_checkpoint(
        name, (CONFIG_FILE, GENERATION_FILE)
    )  # download only these from the hub
    path = folder if is_gguf(folder) else folder / CONFIG_FILE
    config = translate_config({**read_published_config(path), **changes}, path)
    if split_head_name(name)[1]:
        return head_config(config, name)
    ends = dict.fromkeys((*config.eos, *generation_ends(folder)))
    return replace(config, eos=tuple(ends))


def generation_ends(folder: Path) -> tuple[int, ...]:
    path = folder / GENERATION_FILE
    ids = read_json_object(path).get("eos_token_id") if path.is_file() else None
    try:
        return () if ids is None else parse_value("eos_token_id", ids, indices)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read_published_config(path: Path) -> dict[str, Any]:
    """Read the fields of a `config.json`, or the equivalent ones of a GGUF file."""
    if is_gguf(path):
        return gguf_config_fields(open_gguf(path))
    if not path.is_file():
        raise ValueError(f"{path} does not exist: a checkpoint folder needs its config.json")
    return {**omitted_fields(path.parent), **read_json_object(path)}


def translate_config(published: Mapping[str, Any], path: Path = Path(CONFIG_FILE)) -> ModelConfig:
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


def target_config(
    name: str | Path,
    *,
    max_length: int | None = None,
    mask_id: int | None = None,
    adapter: str | Path | None = None,
) -> ModelConfig:
    """Return the configuration that `load_model` would use; raise its errors without weights."""
    config = limit_positions(load_changed_config(name, adapter), max_length)
    if config.kind in DRAFT_KINDS:
        raise OptionError(
            "model",
            name,
            f"{str(name)!r} is a draft that reads the features of a target: give the target as "
            "the model and this as its draft",
        )
    if mask_id is not None:
        mask_id = parse_value("mask_id", mask_id, index)
        try:
            config = config.with_mask(mask_id)
        except ValueError as error:
            raise OptionError("mask_id", mask_id, str(error)) from error
    return config


def load_changed_config(name: str | Path, adapter: str | Path | None) -> ModelConfig:
    """Load a configuration with the changes that an adapter was trained with."""
    config = load_config(name)
    if adapter is None or not (changes := read_changes(adapter)):
        return config
    try:
        changed = load_config(name, **changes)
        if changed.shift < config.shift:
            raise ValueError("it removes the shift, which needs training without an adapter")
    except ValueError as error:
        raise OptionError(
            "adapter", adapter, f"model_config of {str(adapter)!r}: {error}"
        ) from error
    return changed


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
    share: ModelShard | None = None,
    positions: int | None = None,
) -> Transformer:
    """Load a model in its published format, and merge an adapter if one is given.

    `max_length` limits the rotary tables, and `mask_id` overrides the mask token. `quantize` is
    `int8`, `int4`, or `native` for stored blocks of 4 to 8 bits on a CPU, or `fp8`, `int8` or
    `int4` for projections on a GPU. Other quantized weights are dequantized, except int8 on a CPU;
    `plain` dequantizes these too, as training needs. `share` is this process's shard. `positions`
    is the length of the rotary tables, if a runner extends them to that of its cache. Raises
    `ValueError` for a missing tensor or wrong shape, and for a draft, which needs its target.
    """
    folder = resolve_checkpoint(name)
    config = target_config(folder, max_length=max_length, mask_id=mask_id, adapter=adapter)
    update = None if adapter is None else load_adapter(adapter)
    return build_model(
        *(Transformer, config, folder, dtype, device, update, quantize, plain, share),
        positions=positions,
    )


def load_draft(
    name: str | Path,
    target: Transformer,
    *,
    max_length: int | None = None,
    quantize: str | None = None,
    plain: bool = False,
    share: ModelShard | None = None,
    positions: int | None = None,
) -> Draft:
    """Load a draft that reads the features of `target`, with the target's dtype and device.

    Options are those of `load_model`. Raises `ValueError` as it does, and if draft and target do
    not match.
    """
    folder = resolve_checkpoint(name)
    config = limit_positions(load_config(name), max_length)
    if config.kind not in DRAFT_KINDS:
        raise ValueError(
            f"{str(name)!r} is not a draft that reads features: its architecture is "
            f"{config.architecture}"
        )
    like = target.norm.weight
    return build_model(
        lambda sizes: build_draft_model(sizes, target),
        config,
        folder,
        like.dtype,
        like.device,
        quantize=quantize,
        plain=plain,
        share=share,
        positions=positions,
    )


StackType = TypeVar("StackType", bound=Stack)


def build_model(
    make: Callable[[ModelConfig], StackType],
    config: ModelConfig,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device | str,
    adapter: Adapter | None = None,
    quantize: str | None = None,
    plain: bool = False,
    share: ModelShard | None = None,
    positions: int | None = None,
) -> StackType:
    check_quantize(quantize, device, dtype)
    with ExitStack() as stack:
        weights = open_weights(folder, config, stack)
        weights.check_depth(config)
        wanted = None
        try:
            with torch.device("meta"):
                model = make(config)
                if share is not None:
                    whole, model = model, make(share.shard_config(config))
                    parallelize_model(model, share)
                    wanted = sharded_parts(model, whole, share)
            narrow = build_quantizer(model, quantize, device)
            rounds = build_cpu_quantizer(model, quantize, dtype) if narrow is None else None
        except ValueError as error:
            raise prefix_error(str(folder), error) from error
        keeps = not plain and share is None and torch.device(device).type == "cpu"
        read, packs = (
            build_stored_reader(weights, quantize, dtype, adapter) if keeps else (None, False)
        )
        fill_model(
            *(model, weights, dtype, device, adapter),
            read_stored=read,
            narrow=narrow or rounds,
            rounds_published=rounds is not None,
            parts_by_name=wanted,
            positions=positions,
        )
        weights.log_unpacked()
    if packs or quantize == "int4":
        log_packed(folder, model)
    if share is not None:
        keep_one_bias(model, share)
    return model


def open_weights(folder: Path, config: ModelConfig, stack: ExitStack) -> CheckpointWeights:
    """Open the tensors of a folder or GGUF file until the stack is closed."""
    if is_gguf(folder):
        return GGUFWeights(open_gguf(folder), config)
    scheme = scheme_of(read_published_config(folder / CONFIG_FILE))
    weights = CheckpointWeights(folder, stack, scheme)
    if config.is_head:
        weights.select_prefix(HEAD_PREFIX)
    return weights


def read_changes(adapter: str | Path) -> Fields:
    """Return the fields of the model's `config.json` that an adapter was trained with."""
    folder = resolve_checkpoint(adapter, (ADAPTER_CONFIG,), param="adapter")
    changes: Fields = read_lora_config(folder)["model_config"]
    return changes


def load_adapter(name: str | Path) -> Adapter:
    """Load the adapter of a folder or hub name; raise `ValueError` for an invalid one."""
    return Adapter.load(resolve_checkpoint(name, param="adapter"))


def tokenizer_folder(name: str | Path) -> Path:
    """Return the folder of a checkpoint's tokenizer, or the GGUF file that has it."""
    folder = resolve_checkpoint(name)
    own = is_gguf(folder) or any((folder / file).is_file() for file in TOKENIZER_CLASSES)
    return ZOO_TOKENIZER if not own and folder.resolve().parent == ZOO_FOLDER.resolve() else folder


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


def load_tokenizer(name: str | Path) -> Tokenizer | None:
    """Load the tokenizer of a checkpoint; None if it has none, so that only token ids work.

    A tokenizer whose class is remote code (Dream) is read from its vocabulary and merges as a
    Qwen2 tokenizer. Without a chat template it gets that of its family. Raises `ValueError` naming
    an invalid file.
    """
    folder = resolve_checkpoint(name)
    if is_gguf(folder):
        with convert_panics(str(folder)):
            tokenizer, config = build_gguf_tokenizer(open_gguf(folder)), folder
    else:
        tokenizer, config = read_tokenizer(tokenizer_folder(folder)), folder / CONFIG_FILE
    if tokenizer is not None and tokenizer.chat_template is None and config.is_file():
        tokenizer.chat_template = family_of(read_published_config(config), config).template
    return tokenizer
