"""The tensors of a checkpoint folder, and a model's parameters from them and back."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from outpace.models.adapter import Adapter
from outpace.models.config import ModelConfig
from outpace.models.draft import FeatureDraft
from outpace.models.families import FAMILIES
from outpace.models.families.family import part_sizes
from outpace.models.fields import line, read_json
from outpace.models.int8 import quantise
from outpace.models.split import Index, Share
from outpace.models.transformer import Stack, Transformer

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PICKLED = ("*.bin", "*.pt", "*.pth")
FLOATS = ("BF16", "F16", "F32", "F64")
STACKED = (".qkv.", ".gate_up.")
"""In the names of parameters in which several matrices are stacked."""
COMPUTED = "rotary_emb.inv_freq"
"""End of the name of a tensor that follows from the configuration."""


class Weights:
    """The tensors of a folder's safetensors files, opened lazily, by published name."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.files: dict[str, tuple[Path, Any]] = {}
        for path in shards(folder):
            try:
                opened = stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ValueError(
                    f"{path} is not a readable safetensors file: {line(error)}"
                ) from error
            for name in opened.keys():  # noqa: SIM118 - a safetensors file is no mapping
                self.files[name] = path, opened

    def find(self, name: str) -> tuple[Path, Any]:
        """File that has a tensor; `ValueError` if there is none."""
        if name not in self.files:
            raise ValueError(f"{self.folder}: no tensor {name!r} in its weights")
        return self.files[name]

    def tensor(self, name: str, shape: tuple[int, ...], index: Index | None = None) -> Tensor:
        """One tensor, or that part of it; `ValueError` if it has another shape or numbers."""
        path, opened = self.find(name)
        header = opened.get_slice(name)
        if header.get_dtype() not in FLOATS:
            raise ValueError(
                f"{path}: tensor {name!r} holds {header.get_dtype()}; what loads is unquantised, "
                f"in {', '.join(FLOATS)}"
            )
        if (found := tuple(header.get_shape())) != shape:
            raise ValueError(
                f"{path}: tensor {name!r} has shape {found}, but config.json means {shape}"
            )
        # Pages of the file that were read stay in memory for as long as it is open.
        with safe_open(path, framework="pt") as again:
            tensor: Tensor = (
                again.get_tensor(name) if index is None else again.get_slice(name)[index]
            )
        return tensor

    def check_depth(self, config: ModelConfig) -> None:
        """Raise `ValueError` if the last layer is missing, before a model is made of them all."""
        last = f"blocks.{config.layers - 1}.mlp_norm.weight"
        self.find(*FAMILIES[config.family].published(last))

    def check_names(self, config: ModelConfig, wanted: Collection[str]) -> None:
        """Raise `ValueError` for tensors that the model has no use for."""
        left = {name for name in self.files if name not in wanted and not name.endswith(COMPUTED)}
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


@dataclass(frozen=True, slots=True)
class Piece:
    """A published tensor, or what of it a process holds.

    Attributes:
        source: its published name.
        shape: that of the whole tensor.
        index: what is read of it; None for all.
    """

    source: str
    shape: tuple[int, ...]
    index: Index | None = None


def pieces(model: Stack) -> dict[str, list[Piece]]:
    """What each parameter of a model is made of, one behind the other."""
    return {
        name: [
            Piece(source, (size, *parameter.shape[1:]))
            for source, size in sources(model.config, name, parameter.shape[0])
        ]
        for name, parameter in model.named_parameters()
    }


def slices(model: Stack, whole: Stack, share: Share) -> dict[str, list[Piece]]:
    """What each parameter of a slice of a `whole` model is made of, one behind the other."""
    own = dict(model.named_parameters())
    made: dict[str, list[Piece]] = {}
    for name, parameter in whole.named_parameters():
        names, rest = FAMILIES[whole.config.family].published(name), tuple(parameter.shape[1:])
        sizes = stacked(whole, name, len(parameter)), stacked(model, name, len(own[name]))
        made[name] = []
        for number, (size, rows) in enumerate(zip(*sizes, strict=True)):
            # Parts that are stacked are shared out one by one, also where they come as one tensor.
            apart = len(names) > 1
            source, total = (names[number], size) if apart else (names[0], len(parameter))
            before = 0 if apart else sum(sizes[0][:number])
            index = share.index((size, *rest), (rows, *own[name].shape[1:]), before)
            made[name].append(Piece(source, (total, *rest), index))
    return made


def stacked(model: Stack, name: str, rows: int) -> tuple[int, ...]:
    """Rows of each part that is stacked in our parameter `name`."""
    return part_sizes(model.config, name) if any(part in name for part in STACKED) else (rows,)


def fill(
    model: Stack,
    weights: Weights,
    dtype: torch.dtype,
    device: torch.device | str,
    adapter: Adapter | None = None,
    *,
    quantize: bool = False,
    wanted: Mapping[str, Sequence[Piece]] | None = None,
) -> None:
    """Give a model without memory its parameters, with an adapter's updates added.

    To `quantize` is done matrix by matrix, so that no two are in memory in full. What is `wanted`
    for each parameter are whole tensors unless it is given.
    """
    wanted = wanted or pieces(model)
    names = {piece.source for parts in wanted.values() for piece in parts}
    weights.check_names(model.config, names)
    if adapter is not None:
        adapter.check(names)
    for prefix, module in list(model.named_modules()):
        for name, parameter in list(module.named_parameters(prefix, recurse=False)):
            kept = None if quantize and parameter.dim() == 2 else dtype
            parts = [part(weights, piece, kept, device, adapter) for piece in wanted[name]]
            whole = torch.cat(parts) if len(parts) > 1 else parts[0]
            if missing := len(parameter) - len(whole):  # of the last slice of a vocabulary
                whole = F.pad(whole, (0, 0, 0, missing))
            own = nn.Parameter(whole, requires_grad=False)
            module.register_parameter(name.rpartition(".")[2], own)
        if quantize:
            quantise(module, dtype)
    rotary = torch.float32 if model.config.rope.float32 else dtype
    model.cos, model.sin = (table.to(device, rotary) for table in model.rotary())
    model.eval()


def part(
    weights: Weights,
    piece: Piece,
    dtype: torch.dtype | None,
    device: torch.device | str,
    adapter: Adapter | None,
) -> Tensor:
    """A piece in a dtype, by default the published one as far as it is no wider than float32."""
    source, index = piece.source, piece.index
    if adapter is not None and source in adapter.updates:
        found = adapter.merge(source, weights.tensor(source, piece.shape))
        found = found if index is None else found[index]
    else:
        found = weights.tensor(source, piece.shape, index)
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
    if not tensor.numel():  # a slice of a vocabulary that has fewer tokens
        return True
    low, high = torch.aminmax(tensor)
    return bool(low.isfinite() & high.isfinite())


def save_model(
    model: Stack,
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    given: Mapping[str, Tensor] | None = None,
) -> None:
    """Write `config.json` and `model.safetensors` in the format of the model's family.

    `given` are its parameters, where those of the model are not in one piece. Raises `ValueError`
    for a model whose parameters are not those of its configuration, which no program could load,
    and where the files cannot be written.
    """
    folder = Path(folder)
    given = given or model.state_dict()
    check_whole(model, given)
    tensors: dict[str, Tensor] = {}
    for name, parameter in given.items():
        dense = (parameter.to_dense() if parameter.is_mkldnn else parameter).to("cpu", dtype)
        names, sizes = zip(*sources(model.config, name, dense.shape[0]), strict=True)
        parts = zip(names, dense.split(sizes), strict=True)
        tensors |= {source: part.contiguous() for source, part in parts}
    kind = {"torch_dtype": str(dtype).removeprefix("torch.")}
    config = {**model.config.source, **kind}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{folder} cannot be written: {error}") from error


def check_whole(model: Stack, given: Mapping[str, Tensor]) -> None:
    """Raise `ValueError` naming a parameter that a model of this configuration does not share."""
    with torch.device("meta"):
        fresh = (
            FeatureDraft(model.config, *model.lender)
            if isinstance(model, FeatureDraft)
            else Transformer(model.config)
        )
    wanted = {name: parameter.shape for name, parameter in fresh.named_parameters()}
    found = {name: parameter.shape for name, parameter in given.items()}
    if differing := sorted(dict(wanted.items() ^ found.items())):
        raise ValueError(
            f"{differing[0]!r} is missing, new or of another shape ({len(differing)} parameters "
            f"are): a saved model must have the modules of {model.config.architecture}"
        )
