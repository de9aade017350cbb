"""The tensors of a checkpoint folder, and a model's parameters from them and back."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from outpace.models.adapter import Adapter
from outpace.models.config import ModelConfig
from outpace.models.draft import Draft
from outpace.models.extending import ExtendingDraft, draft_of
from outpace.models.families import FAMILIES
from outpace.models.families.family import part_sizes
from outpace.models.fields import line, read_json
from outpace.models.int8 import quantise
from outpace.models.mxfp4 import BLOCK, dequantised
from outpace.models.stacks import PACKED, Entry, sizes, stacked
from outpace.models.transformer import Stack, Transformer

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PICKLED = ("*.bin", "*.pt", "*.pth")
FLOATS = ("BF16", "F16", "F32", "F64")
TABLES = {"d2t": "I64", "t2d": "BOOL"}
"""Tables of a draft's vocabulary, and their dtypes."""
COMPUTED = "rotary_emb.inv_freq"
"""End of the name of a tensor that follows from the configuration."""


class Weights:
    """The tensors of a folder's safetensors files, opened lazily, by published name."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.files: dict[str, tuple[Path, Any]] = {}
        self.stacks: dict[str, int] = {}
        for path in shards(folder):
            try:
                opened = stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ValueError(
                    f"{path} is not a readable safetensors file: {line(error)}"
                ) from error
            for name in opened.keys():  # noqa: SIM118 - a safetensors file is no mapping
                self.files[name] = path, opened

    def held(self, name: str) -> tuple[str, ...]:
        """Names of what the files have in place of a tensor: itself, or what it is an entry of."""
        entry = Entry.of(name)
        stack = name if entry is None else entry.stack
        packed = tuple(stack + part for part in PACKED)
        return packed if entry and stack not in self.files and packed[0] in self.files else (stack,)

    def find(self, name: str) -> tuple[Path, Any]:
        """File that has a tensor; `ValueError` if there is none."""
        if (held := self.held(name)[0]) not in self.files:
            raise ValueError(f"{self.folder}: no tensor {held!r} in its weights")
        return self.files[held]

    def tensor(self, name: str, shape: tuple[int, ...], kinds: Collection[str] = FLOATS) -> Tensor:
        """One tensor; `ValueError` if it has another shape or other numbers."""
        if (entry := Entry.of(name)) is None:
            return self.read(name, shape, kinds)
        if len(self.held(name)) == 1:
            own = self.read(entry.stack, shape[::-1] if entry.turned else shape, FLOATS, entry)
            return own.T.contiguous() if entry.turned else own
        rows, columns = shape
        blocks, scales = self.held(name)
        return dequantised(
            self.read(blocks, (rows, columns // BLOCK, BLOCK // 2), ("U8",), entry),
            self.read(scales, (rows, columns // BLOCK), ("U8",), entry),
        )

    def read(
        self, name: str, shape: tuple[int, ...], kinds: Collection[str], entry: Entry | None = None
    ) -> Tensor:
        """One tensor of the files, or an entry of it."""
        path, opened = self.find(name)
        header = opened.get_slice(name)
        if header.get_dtype() not in kinds:
            raise ValueError(
                f"{path}: tensor {name!r} holds {header.get_dtype()}; what loads is unquantised, "
                f"in {', '.join(kinds)}"
            )
        wanted = shape if entry is None else (self.stacks.get(entry.stack, 0), *shape)
        if (found := tuple(header.get_shape())) != wanted:
            raise ValueError(
                f"{path}: tensor {name!r} has shape {found}, but config.json means {wanted}"
            )
        # Pages of the file that were read stay in memory for as long as it is open.
        with safe_open(path, framework="pt") as again:
            tensor: Tensor = (
                again.get_tensor(name) if entry is None else again.get_slice(name)[entry.number]
            )
        return tensor

    def check_depth(self, config: ModelConfig) -> None:
        """Raise `ValueError` if the last layer is missing, before a model is made of them all."""
        last = f"blocks.{config.layers - 1}.attention.out.weight"
        self.find(*FAMILIES[config.family].published(last))

    def check_names(self, config: ModelConfig, wanted: Collection[str]) -> None:
        """Raise `ValueError` for tensors that the model has no use for."""
        self.stacks = sizes(wanted)
        known = {held for name in wanted for held in self.held(name)}
        left = {name for name in self.files if name not in known and not name.endswith(COMPUTED)}
        if config.tied:
            left -= self.copies(config)
        if left:
            names = ", ".join(repr(name) for name in sorted(left)[:3])
            raise ValueError(
                f"{self.folder}: {len(left)} tensors of its weights are not of the model that "
                f"config.json means, such as {names}; what loads is "
                f"{FAMILIES[config.family].about}, unquantised and whole"
            )

    def copies(self, config: ModelConfig) -> set[str]:
        """The head of a tied model, where a file has the embedding twice."""
        family, shape = FAMILIES[config.family], (config.vocab, config.dim)
        (head,), (embedding,) = map(family.published, ("unembedding.weight", "embedding.weight"))
        if head not in self.files or not torch.equal(
            self.tensor(head, shape), self.tensor(embedding, shape)
        ):
            return set()
        return {head}


def shards(folder: Path) -> list[Path]:
    """The safetensors files of a folder; `ValueError` if there is none or one is missing."""
    index = folder / INDEX
    if index.is_file():
        return indexed(folder, index)
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if pickled := sorted(path.name for kind in PICKLED for path in folder.glob(kind)):
        raise ValueError(
            f"{folder} has only pickled weights ({', '.join(pickled)}), which can run code when "
            f"they are opened; convert them to {SINGLE} first"
        )
    raise ValueError(f"{folder} has no {SINGLE}")


def indexed(folder: Path, index: Path) -> list[Path]:
    """The files that an index names; `ValueError` for one that is not in the folder."""
    named = read_json(index).get("weight_map")
    if not isinstance(named, dict) or not named:
        raise ValueError(f"{index}: weight_map must name the file of each tensor")
    here = {path.name for path in folder.iterdir() if path.is_file()}
    # Names are compared, not followed: one with a path in it is in no folder.
    if missing := sorted({str(name) for name in named.values()} - here):
        raise ValueError(f"{index} names {', '.join(missing[:3])}, which {folder} does not have")
    return [folder / name for name in sorted(set(named.values()))]


def sources(config: ModelConfig, name: str, rows: int) -> list[tuple[str, int]]:
    """Published tensors that make our parameter `name`, and how many of its rows each has."""
    names = FAMILIES[config.family].published(name)
    sizes = part_sizes(config, name) if len(names) > 1 else (rows,)
    return list(zip(names, sizes, strict=True))


def fill(
    model: Stack,
    weights: Weights,
    dtype: torch.dtype,
    device: torch.device | str,
    adapter: Adapter | None = None,
    *,
    quantize: bool = False,
) -> None:
    """Give a model without memory its parameters, with an adapter's updates added.

    To `quantize` is done matrix by matrix, so that no two are in memory in full.
    """
    wanted = {
        name: sources(model.config, name, parameter.shape[0])
        for name, parameter in model.named_parameters()
    }
    names = {source for parts in wanted.values() for source, _ in parts}
    weights.check_names(model.config, names | fill_tables(model, weights, device))
    if adapter is not None:
        adapter.check(names)
    for prefix, module in list(model.named_modules()):
        for name, parameter in list(module.named_parameters(prefix, recurse=False)):
            kept = None if quantize and parameter.dim() == 2 else dtype
            row = tuple(parameter.shape[1:])
            parts = [
                part(weights, source, (size, *row), kept, device, adapter)
                for source, size in wanted[name]
            ]
            whole = torch.cat(parts) if len(parts) > 1 else parts[0]
            own = nn.Parameter(whole, requires_grad=False)
            module.register_parameter(name.rpartition(".")[2], own)
        if quantize:
            quantise(module, dtype)
    rotary = torch.float32 if model.config.rope.float32 else dtype
    model.cos, model.sin = (table.to(device, rotary) for table in model.rotary())
    model.eval()


def fill_tables(model: Stack, weights: Weights, device: torch.device | str) -> set[str]:
    """Give a draft the tables of its vocabulary; their published names."""
    if not isinstance(model, ExtendingDraft) or model.says is None:
        return set()
    for name, kind in TABLES.items():
        table = weights.tensor(name, tuple(getattr(model, name).shape), (kind,))
        model.register_buffer(name, table.to(device))
    try:
        model.check_tables()
    except ValueError as error:
        raise ValueError(f"{weights.folder}: {error}") from error
    return {*TABLES}


def part(
    weights: Weights,
    source: str,
    shape: tuple[int, ...],
    dtype: torch.dtype | None,
    device: torch.device | str,
    adapter: Adapter | None,
) -> Tensor:
    """One published tensor in a dtype, by default its own as far as it is no wider than float32."""
    found = weights.tensor(source, shape)
    if adapter is not None:
        found = adapter.merge(source, found)
    if dtype is None:
        dtype = torch.float32 if found.dtype == torch.float64 else found.dtype
    found = found.to(device, dtype)
    if not finite(found):
        raise ValueError(
            f"{weights.find(source)[0]}: tensor {source!r} has NaN or infinite values in "
            f"{dtype}; choose a wider dtype or a whole checkpoint"
        )
    return found


def finite(tensor: Tensor) -> bool:
    """Whether all values are numbers; the extremes of any others are none either."""
    low, high = torch.aminmax(tensor)
    return bool(low.isfinite() & high.isfinite())


def save_model(model: Stack, folder: str | Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write `config.json` and `model.safetensors` in the format of the model's family.

    Raises `ValueError` for a model whose parameters are not those of its configuration, which no
    program could load, and where the files cannot be written.
    """
    folder = Path(folder)
    given = model.state_dict()
    check_whole(model, given)
    tensors: dict[str, Tensor] = {}
    for name, parameter in given.items():
        kind = dtype if parameter.is_floating_point() else parameter.dtype
        dense = (parameter.to_dense() if parameter.is_mkldnn else parameter).to("cpu", kind)
        names, sizes = zip(*sources(model.config, name, dense.shape[0]), strict=True)
        parts = zip(names, dense.split(sizes), strict=True)
        tensors |= {source: part.contiguous() for source, part in parts}
    config = {**model.config.source, "torch_dtype": str(dtype).removeprefix("torch.")}
    config.pop("quantization_config", None)  # what is written has its full bits
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(stacked(tensors), folder / SINGLE, metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{folder} cannot be written: {error}") from error


def check_whole(model: Stack, given: Mapping[str, Tensor]) -> None:
    """Raise `ValueError` naming a parameter that a model of this configuration does not share."""
    with torch.device("meta"):
        fresh = (
            draft_of(model.config, *model.lender)
            if isinstance(model, Draft)
            else Transformer(model.config)
        )
    wanted = {name: parameter.shape for name, parameter in fresh.state_dict().items()}
    found = {name: parameter.shape for name, parameter in given.items()}
    if differing := sorted(dict(wanted.items() ^ found.items())):
        raise ValueError(
            f"{differing[0]!r} is missing, new or of another shape ({len(differing)} parameters "
            f"are): a saved model must have the modules of {model.config.architecture}"
        )
