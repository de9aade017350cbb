"""Checkpoint folders, hub names and embedded models to a `Transformer`, and back to a folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2TokenizerFast  # type: ignore[attr-defined]
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from outpace.models.adapter import CONFIG, Adapter
from outpace.models.config import DraftConfig, ModelConfig
from outpace.models.draft import FeatureDraft
from outpace.models.families import FAMILIES, Family
from outpace.models.families.family import part_sizes
from outpace.models.transformer import Stack, Transformer

Read = Callable[[str], tuple[Path, Tensor]]
"""From a published name to the file that has the tensor, and the tensor."""

ZOO = Path(__file__).parent.parent / "zoo"
FILES = ["*.json", "*.safetensors", "*.txt", "*.jinja"]
PICKLED = ("*.bin", "*.pt", "*.pth")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve(name: str | Path) -> Path:
    """Folder of a checkpoint: a path, a model of the zoo, or a hub name (downloaded once).

    Raises `ValueError` when there is no such folder, zoo model or hub repository.
    """
    if Path(name).is_dir():
        return Path(name)
    if (ZOO / name / "config.json").is_file():
        return ZOO / name
    if str(name).count("/") != 1 or str(name).startswith((".", "/")):
        raise ValueError(
            f"no model {str(name)!r}: give a folder with a config.json, a hub name such as "
            f"'Qwen/Qwen3-0.6B', or one of {', '.join(zoo_names()) or 'the zoo (empty)'}"
        )
    try:
        return Path(snapshot_download(str(name), allow_patterns=FILES))
    except Exception as error:
        raise ValueError(f"the hub did not give {str(name)!r}: {error}") from error


def zoo_names() -> list[str]:
    """Names of the models that ship inside the package."""
    return sorted(path.parent.name for path in ZOO.glob("*/config.json"))


def family_of(config: Mapping[str, Any], path: Path) -> Family:
    """Family that reads this `config.json`; `ValueError` for an unknown architecture."""
    names = config.get("architectures") or []
    known = {name: family for family in FAMILIES.values() for name in family.architectures}
    for name in names:
        if name in known:
            return known[name]
    raise ValueError(
        f"{path}: architectures {names} is not supported; known are {', '.join(sorted(known))}"
    )


def load_config(name: str | Path, **changes: Any) -> ModelConfig:
    """Configuration of a checkpoint, with fields of its `config.json` changed on request."""
    path = resolve(name) / "config.json"
    if not path.is_file():
        raise ValueError(f"{path} does not exist: a checkpoint folder needs its config.json")
    return translate({**read_json(path), **changes}, path)


def read_json(path: Path) -> Any:
    """Content of a JSON file; `ValueError` naming the file where it is broken."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error


def translate(published: Mapping[str, Any], path: Path = Path("config.json")) -> ModelConfig:
    """Published configuration fields as a `ModelConfig`; `path` is for the error's text."""
    try:
        return family_of(published, path).config(published)
    except KeyError as error:
        raise ValueError(f"{path}: the field {error} is missing") from error


def load_model(
    name: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    max_length: int | None = None,
    adapter: str | Path | None = None,
    mask_id: int | None = None,
) -> Transformer:
    """Load a model in its published format, with an adapter merged into it where one is named.

    `max_length` limits its rotary tables, `mask_id` is its mask token, whatever `config.json` says.
    Raises `ValueError` naming file and tensor where one is missing or has another shape, and for a
    draft, which is nothing without its target.
    """
    config = limited(load_config(name), max_length)
    if isinstance(config, DraftConfig):
        raise ValueError(
            f"{str(name)!r} is a draft that reads the features of a target: give the target as "
            "the model and this as the draft of a method"
        )
    if mask_id is not None:
        config = replace(config, mask_id=mask_id)
    with torch.device("meta"):
        model = Transformer(config)
    load_weights(model, resolve(name), dtype, device, adapter)
    return model


def load_draft(
    name: str | Path, target: Transformer, *, max_length: int | None = None
) -> FeatureDraft:
    """Load a draft that reads the features of `target`, in the target's dtype and beside it.

    Raises `ValueError` as `load_model` does, and where the two do not fit together.
    """
    config = limited(load_config(name), max_length)
    if not isinstance(config, DraftConfig):
        raise ValueError(
            f"{str(name)!r} is no draft that reads features: its architecture is "
            f"{config.architecture}"
        )
    with torch.device("meta"):
        draft = FeatureDraft(config, target)
    weight = target.embedding.weight
    load_weights(draft, resolve(name), weight.dtype, weight.device)
    return draft


Config = TypeVar("Config", bound=ModelConfig)


def limited(config: Config, max_length: int | None) -> Config:
    """A configuration for no more positions than this."""
    if max_length is None:
        return config
    return replace(config, max_length=min(max_length, config.max_length))


def load_weights(
    model: Stack,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device | str,
    adapter: str | Path | None = None,
) -> None:
    """Fill a model without memory from the safetensors files of a folder, and an adapter's."""
    with ExitStack() as stack:
        read: Read = Weights(folder, stack).read
        if adapter is not None:
            read = adapted(read, load_adapter(adapter), model)
        state = read_parameters(model, folder, read, dtype, device)
    model.load_state_dict(state, strict=True, assign=True)
    rotary = torch.float32 if model.config.rope.float32 else dtype
    model.cos, model.sin = (table.to(device, rotary) for table in model.rotary())
    model.eval().requires_grad_(False)


class Weights:
    """The tensors of a folder's safetensors files, opened lazily, by published name."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.files: dict[str, tuple[Path, Any]] = {}
        for path in shards(folder):
            try:
                opened = stack.enter_context(safe_open(path, framework="pt"))
            except SafetensorError as error:
                raise ValueError(f"{path} is not a readable safetensors file: {error}") from error
            for name in opened.keys():  # noqa: SIM118 - a safetensors file is no mapping
                self.files[name] = path, opened

    def read(self, name: str) -> tuple[Path, Tensor]:
        """One tensor and the file it came from; `KeyError` if no file has it."""
        path, opened = self.files[name]
        return path, opened.get_tensor(name)


def load_adapter(name: str | Path) -> Adapter:
    """Read an adapter from a folder or a hub name; `ValueError` for one that is none."""
    folder = resolve(name)
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder / CONFIG} does not exist: an adapter folder needs it")
    return Adapter.read(folder, read_json(folder / CONFIG))


def adapted(read: Read, adapter: Adapter, model: Stack) -> Read:
    """Reading with the adapter's updates added; `ValueError` if it is of another model."""
    family = FAMILIES[model.config.family]
    adapter.check([name for ours, _ in model.named_parameters() for name in family.published(ours)])

    def merged(name: str) -> tuple[Path, Tensor]:
        path, weight = read(name)
        return path, adapter.merge(name, weight)

    return merged


def shards(folder: Path) -> list[Path]:
    """The safetensors files of a folder; `ValueError` if there is none or one is missing."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(read_json(index)["weight_map"].values()))
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise ValueError(f"{index} names {', '.join(missing)}, which {folder} does not have")
        return [folder / name for name in names]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if pickled := sorted(path.name for kind in PICKLED for path in folder.glob(kind)):
        raise ValueError(
            f"{folder} has only pickled weights ({', '.join(pickled)}), which can run code when "
            "they are opened; convert them to model.safetensors first"
        )
    raise ValueError(f"{folder} has no model.safetensors")


def read_parameters(
    model: Stack,
    folder: Path,
    read: Read,
    dtype: torch.dtype,
    device: torch.device | str,
) -> dict[str, Tensor]:
    """Every parameter of `model`, put together from published tensors."""
    family = FAMILIES[model.config.family]
    state = {}
    for name, parameter in model.named_parameters():
        sources = family.published(name)
        sizes = part_sizes(model.config, name) if len(sources) > 1 else (parameter.shape[0],)
        parts = []
        for source, size in zip(sources, sizes, strict=True):
            try:
                path, part = read(source)
            except KeyError:
                raise ValueError(f"{folder}: no tensor {source!r} in its weights") from None
            wanted = (size, *parameter.shape[1:])
            if tuple(part.shape) != wanted:
                raise ValueError(
                    f"{path}: tensor {source!r} has shape {tuple(part.shape)}, "
                    f"but config.json means {wanted}"
                )
            parts.append(part.to(device, dtype))
        state[name] = torch.cat(parts) if len(parts) > 1 else parts[0]
    return state


def save_model(model: Stack, folder: str | Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write `config.json` and `model.safetensors` in the format of the model's family."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    family = FAMILIES[model.config.family]
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        names = family.published(name)
        sizes = part_sizes(model.config, name) if len(names) > 1 else (parameter.shape[0],)
        parts = parameter.detach().to("cpu", dtype).split(sizes)
        tensors |= {n: part.contiguous() for n, part in zip(names, parts, strict=True)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    kind = {"torch_dtype": str(dtype).removeprefix("torch.")}
    config = {**model.config.source, **kind}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerBase | None:
    """Tokenizer of a checkpoint, or None where it has none (then only token ids work).

    A tokenizer whose class is remote code (Dream) is read from its vocabulary and merges as the
    Qwen2 tokenizer that it is.
    """
    folder = resolve(name)
    # The plain classes never look for code of the repository, as AutoTokenizer would.
    if (folder / "tokenizer.json").is_file():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    elif (folder / "vocab.json").is_file():
        tokenizer = Qwen2TokenizerFast.from_pretrained(folder)
    else:
        return None
    if tokenizer.chat_template is None and (folder / "config.json").is_file():
        tokenizer.chat_template = FAMILIES[load_config(folder).family].template
    return tokenizer
