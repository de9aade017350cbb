"""The tensors of a checkpoint folder, and a model's parameters from them and back."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from outpace.models.adapter import Adapter
from outpace.models.config import ModelConfig
from outpace.models.draft import FeatureDraft
from outpace.models.families import FAMILIES
from outpace.models.families.family import part_sizes
from outpace.models.fields import line, read_json
from outpace.models.int8 import QUANTISED, exact, hold, quantise
from outpace.models.quantised.scheme import FLOATS, Scheme
from outpace.models.transformer import Stack, Transformer

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PICKLED = ("*.bin", "*.pt", "*.pth")
COMPUTED = "rotary_emb.inv_freq"
"""End of the name of a tensor that follows from the configuration."""


class Weights:
    """The tensors of a folder's safetensors files, opened lazily, by published name.

    What a `scheme` of quantisation stores in several is read as one plain matrix.
    """

    def __init__(self, folder: Path, stack: ExitStack, scheme: Scheme | None = None) -> None:
        self.folder, self.scheme = folder, scheme
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

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def find(self, name: str) -> tuple[Path, Any]:
        """File that has a tensor; `ValueError` if there is none."""
        if name not in self.files:
            raise ValueError(f"{self.folder}: no tensor {name!r} in its weights")
        return self.files[name]

    def path(self, name: str) -> Path:
        """File that has a tensor, or the first part of it; `ValueError` if there is none."""
        return self.find(next(iter(self.parts(name)), name))[0]

    def kind(self, name: str) -> str:
        """Type of a tensor's numbers, such as `BF16`."""
        kind: str = self.find(name)[1].get_slice(name).get_dtype()
        return kind

    def stored(
        self, name: str, shapes: Collection[tuple[int, ...]], kinds: Collection[str]
    ) -> Tensor:
        """A tensor as it is stored; `ValueError` where it has none of these shapes and types.

        Any will do where none is named.
        """
        path, opened = self.find(name)
        header = opened.get_slice(name)
        if kinds and header.get_dtype() not in kinds:
            raise ValueError(
                f"{path}: tensor {name!r} holds {header.get_dtype()}; what loads is "
                f"{self.about}, in {', '.join(kinds)}"
            )
        if (found := tuple(header.get_shape())) not in shapes and shapes:
            wanted = " or ".join(map(str, shapes))
            raise ValueError(
                f"{path}: tensor {name!r} has shape {found}, but config.json means {wanted}"
            )
        # Pages of the file that were read stay in memory for as long as it is open.
        with safe_open(path, framework="pt") as again:
            tensor: Tensor = again.get_tensor(name)
        return tensor

    @property
    def about(self) -> str:
        """What loads, for the text of errors."""
        return "unquantised" if self.scheme is None else self.scheme.about

    def parts(self, name: str) -> tuple[str, ...]:
        """Stored tensors that make a quantised matrix; none where it is plain."""
        return () if self.scheme is None else self.scheme.parts(self, name)

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One plain tensor; `ValueError` if it has another shape or other numbers."""
        if self.scheme is not None and self.parts(name):
            return self.scheme.plain(self, name, shape)
        return self.stored(name, (shape,), FLOATS)

    def codes(
        self, name: str, shape: tuple[int, ...], *, rounded: bool
    ) -> tuple[Tensor, Tensor] | None:
        """Codes `i8[out, in]` and scales `f32[out]` of a matrix that is stored as such, or None.

        Unless rows are to be `rounded` to 8 bits anyhow, the checkpoint must say that they are.
        """
        if self.scheme is None or not (rounded or self.scheme.rounds_rows(name)):
            return None
        return self.scheme.codes(self, name, shape)

    def check_depth(self, config: ModelConfig) -> None:
        """Raise `ValueError` if the last layer is missing, before a model is made of them all."""
        last = f"blocks.{config.layers - 1}.mlp_norm.weight"
        self.find(*FAMILIES[config.family].published(last))

    def check_names(self, config: ModelConfig, wanted: Collection[str]) -> None:
        """Raise `ValueError` for tensors that the model has no use for, or a scheme without."""
        used = {part for name in wanted for part in self.parts(name) or (name,)}
        left = {name for name in self.files if name not in used and not name.endswith(COMPUTED)}
        if config.tied:
            left -= self.copies(config)
        if self.scheme is not None:
            left = {name for name in left if not self.scheme.idle(self, name)}
            if not any(map(self.parts, wanted)):
                raise ValueError(
                    f"{self.folder}: config.json has a quantization_config, but no matrix of the "
                    f"weights is quantised so; what loads is {self.about}"
                )
        if left:
            names = ", ".join(repr(name) for name in sorted(left)[:3])
            raise ValueError(
                f"{self.folder}: {len(left)} tensors of its weights are not of the model that "
                f"config.json means, such as {names}; what loads is "
                f"{FAMILIES[config.family].about}, {self.about} and whole"
            )

    def copies(self, config: ModelConfig) -> set[str]:
        """The head of a tied model, where a file has the embedding twice."""
        family, shape = FAMILIES[config.family], (config.vocab, config.dim)
        (head,), (embedding,) = map(family.published, ("unembedding.weight", "embedding.weight"))
        if not (head in self.files or self.parts(head)) or not torch.equal(
            self.tensor(head, shape), self.tensor(embedding, shape)
        ):
            return set()
        return {*self.parts(head), head}


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


Matrix = tuple[Tensor, Tensor]
"""Codes `i8[out, in]` and scales `f32[out]`."""


def fill(
    model: Stack,
    weights: Weights,
    dtype: torch.dtype,
    device: torch.device | str,
    adapter: Adapter | None = None,
    *,
    quantize: bool = False,
    keeps: bool = False,
) -> None:
    """Give a model without memory its parameters, with an adapter's updates added.

    To `quantize` is done matrix by matrix, so that no two are in memory in full. With `keeps`,
    matrices that are stored with 8 bits stay so.
    """
    wanted = {
        name: sources(model.config, name, parameter.shape[0])
        for name, parameter in model.named_parameters()
    }
    names = {source for parts in wanted.values() for source, _ in parts}
    weights.check_names(model.config, names)
    if adapter is not None:
        adapter.check(names)
    for prefix, module in list(model.named_modules()):
        held = None
        if keeps and type(module) in QUANTISED:
            parts = wanted[f"{prefix}.weight"]
            if adapter is None or not any(name in adapter.updates for name, _ in parts):
                columns = module.get_parameter("weight").shape[1]
                held = stacked(weights, parts, columns, rounded=quantize)
        for name, parameter in list(module.named_parameters(prefix, recurse=False)):
            if held is not None and parameter.dim() == 2:
                continue
            kept = None if quantize and parameter.dim() == 2 else dtype
            row = tuple(parameter.shape[1:])
            found = [
                part(weights, source, (size, *row), kept, device, adapter)
                for source, size in wanted[name]
            ]
            whole = torch.cat(found) if len(found) > 1 else found[0]
            own = nn.Parameter(whole, requires_grad=False)
            module.register_parameter(name.rpartition(".")[2], own)
        if held is not None:
            hold(module, *held, dtype)
        elif quantize:
            quantise(module, dtype)
    rotary = torch.float32 if model.config.rope.float32 else dtype
    model.cos, model.sin = (table.to(device, rotary) for table in model.rotary())
    model.eval()


def stacked(
    weights: Weights, parts: Sequence[tuple[str, int]], columns: int, *, rounded: bool
) -> Matrix | None:
    """A matrix that is stored with 8 bits, one part upon the other; None where one is not."""
    found: list[Matrix] = []
    for source, size in parts:
        matrix = weights.codes(source, (size, columns), rounded=rounded)
        if matrix is None or not exact():
            return None
        found.append(matrix)
    codes, scale = zip(*found, strict=True)
    return torch.cat(codes), torch.cat(scale)


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
            f"{weights.path(source)}: tensor {source!r} has NaN or infinite values in "
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
