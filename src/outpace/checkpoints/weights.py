"""The tensors of a checkpoint folder, by their published names: reading and writing."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Container, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from outpace.checkpoints.families import config_family
from outpace.checkpoints.families.family import part_sizes
from outpace.checkpoints.fields import error_line, read_json_object
from outpace.checkpoints.quantised.scheme import (
    FLOAT_TYPES,
    GroupedCodes,
    PackingError,
    Scheme,
    pack_groups,
)
from outpace.checkpoints.stacks import StackEntry, stack_entries, stack_sizes, stored_name
from outpace.kernels.packed import PackedMatrix
from outpace.models.config import ModelConfig
from outpace.models.draft import Draft
from outpace.models.extending import build_draft_model
from outpace.models.split import ModelShard, ShardIndex
from outpace.models.transformer import Stack, Transformer

STACKED_PARAMETERS = (".qkv.", ".gate_up.")
"""Parts of the names of parameters that stack several matrices."""


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A published tensor, or the slice of it that a process holds."""

    source: str
    """Published name."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    index: ShardIndex = ()
    """Slice that is read; empty for all."""


def source_tensors(
    config: ModelConfig, name: str, rows: int, stored: Container[str] = ()
) -> list[tuple[str, int]]:
    """Return the published tensors of parameter `name`, each with its number of rows.

    `stored` are the tensors of a checkpoint, by which names are chosen if there are several.
    """
    names = config_family(config).tensor_names(name, stored)
    sizes = part_sizes(config, name) if len(names) > 1 else (rows,)
    return [(source, size) for source, size in zip(names, sizes, strict=True) if size]


def parameter_parts(model: Stack, stored: Container[str]) -> dict[str, list[TensorPart]]:
    """Return the parts of each parameter of a model in a checkpoint, in stacking order."""
    return {
        name: [
            TensorPart(source, (size, *parameter.shape[1:]))
            for source, size in source_tensors(model.config, name, parameter.shape[0], stored)
        ]
        for name, parameter in model.named_parameters()
    }


def sharded_parts(model: Stack, whole: Stack, share: ModelShard) -> dict[str, list[TensorPart]]:
    """Return the parts of each parameter of a shard of the `whole` model, in stacking order."""
    own = dict(model.named_parameters())
    made: dict[str, list[TensorPart]] = {}
    for name, parameter in whole.named_parameters():
        names, rest = config_family(whole.config).tensor_names(name), tuple(parameter.shape[1:])
        sizes = (
            stacked_sizes(whole, name, len(parameter)),
            stacked_sizes(model, name, len(own[name])),
        )
        made[name] = []
        for number, (size, rows) in enumerate(zip(*sizes, strict=True)):
            # Stacked matrices are sharded one by one, even if they are published as one tensor.
            apart = len(names) > 1
            source, total = (names[number], size) if apart else (names[0], len(parameter))
            before = 0 if apart else sum(sizes[0][:number])
            index = share.shard_index((size, *rest), (rows, *own[name].shape[1:]), before)
            made[name].append(TensorPart(source, (total, *rest), index))
    return made


def stacked_sizes(model: Stack, name: str, rows: int) -> tuple[int, ...]:
    return (
        part_sizes(model.config, name)
        if any(part in name for part in STACKED_PARAMETERS)
        else (rows,)
    )


LOG = logging.getLogger(__name__)

WEIGHTS_INDEX, WEIGHTS_FILE = "model.safetensors.index.json", "model.safetensors"
PICKLED_PATTERNS = ("*.bin", "*.pt", "*.pth")
COMPUTED_SUFFIX = "rotary_emb.inv_freq"
"""Suffix of tensors that are computed from the configuration."""

MAX_READ_BYTES = 2**26
"""Bytes to read before a file is opened again: pages stay in memory until it is closed."""


class CheckpointWeights:
    """The tensors of a folder's safetensors files, read lazily by published name.

    A matrix that a quantization `scheme` stores as several tensors is read as one.
    """

    def __init__(self, folder: Path, stack: ExitStack, scheme: Scheme | None = None) -> None:
        self.folder, self.scheme = folder, scheme
        self.files: dict[str, tuple[Path, Any]] = {}
        self.stacks: dict[str, int] = {}
        self.unpacked: dict[str, list[str]] = {}
        self.readers: dict[Path, tuple[Any, int]] = {}
        self.is_part = False
        for path in find_shards(folder):
            try:
                opened = stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ValueError(
                    f"{path} is not a readable safetensors file: {error_line(error)}"
                ) from error
            for name in opened.keys():  # noqa: SIM118 - a safetensors file is not a mapping
                self.files[name] = path, opened

    def select_prefix(self, prefix: str) -> None:
        """Drop the tensors of other names: the rest is a part of the checkpoint."""
        self.files = {name: at for name, at in self.files.items() if name.startswith(prefix)}
        self.is_part = True

    @property
    def size(self) -> int:
        """Size of the files in bytes."""
        return sum(path.stat().st_size for path in {path for path, _ in self.files.values()})

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and stored_name(name) in self.files

    def find_tensor(self, name: str) -> tuple[Path, Any]:
        """Return the file of a tensor or of its stack; raise `ValueError` if there is none."""
        if (own := stored_name(name)) not in self.files:
            raise ValueError(f"{self.folder}: no tensor {own!r} in its weights")
        return self.files[own]

    def tensor_path(self, name: str) -> Path:
        """Return the file of a tensor or of its first part; raise `ValueError` if there is none."""
        return self.find_tensor(next(iter(self.part_names(name)), name))[0]

    def stored_type(self, name: str) -> str:
        """Return the type of a tensor's elements, such as `BF16`."""
        kind: str = self.find_tensor(name)[1].get_slice(stored_name(name)).get_dtype()
        return kind

    def read_stored(
        self,
        name: str,
        shapes: Collection[tuple[int, ...]],
        kinds: Collection[str],
        index: ShardIndex = (),
    ) -> Tensor:
        """Read a stored tensor, or an entry of a stack.

        Args:
            name: Published name.
            shapes: Allowed shapes; empty for any.
            kinds: Allowed types; empty for any.
            index: Slice to read; empty for all.
        """
        path, opened = self.find_tensor(name)
        entry, name = StackEntry.from_name(name), stored_name(name)
        header = opened.get_slice(name)
        if entry is not None:
            shapes = [(self.stacks.get(name, 0), *shape) for shape in shapes]
        if kinds and header.get_dtype() not in kinds:
            raise ValueError(
                f"{path}: tensor {name!r} holds {header.get_dtype()}; supported: "
                f"{self.about}, in {', '.join(kinds)}"
            )
        if (found := tuple(header.get_shape())) not in shapes and shapes:
            wanted = " or ".join(map(str, shapes))
            raise ValueError(
                f"{path}: tensor {name!r} has shape {found}, but config.json requires {wanted}"
            )
        reader, read_bytes = self.readers.pop(path, None) or (safe_open(path, framework="pt"), 0)
        item = index if entry is None else (entry.number, *index)
        tensor: Tensor = reader.get_slice(name)[item] if item else reader.get_tensor(name)
        if (read_bytes := read_bytes + tensor.nbytes) < MAX_READ_BYTES:
            self.readers[path] = reader, read_bytes
        return tensor

    def read_table(self, name: str, shape: tuple[int, ...], kind: str) -> Tensor:
        """Read a draft's vocabulary table; raise `ValueError` for another shape or type."""
        return self.read_stored(name, (shape,), (kind,))

    @property
    def about(self) -> str:
        """Supported format, for error messages."""
        return "unquantised" if self.scheme is None else self.scheme.about

    def part_names(self, name: str) -> tuple[str, ...]:
        """Return the stored tensors of a quantized matrix; empty if it is not quantized."""
        return () if self.scheme is None else self.scheme.part_names(self, name)

    def read_tensor(self, name: str, shape: tuple[int, ...], index: ShardIndex = ()) -> Tensor:
        """Read a dequantized tensor, or the slice at `index`."""
        if self.scheme is not None and self.part_names(name):
            return self.scheme.read_matrix(self, name, shape)[index]
        if (entry := StackEntry.from_name(name)) is not None and entry.is_transposed:
            return self.read_stored(name, (shape[::-1],), FLOAT_TYPES).T[index].contiguous()
        return self.read_stored(name, (shape,), FLOAT_TYPES, index)

    def read_codes(
        self, name: str, shape: tuple[int, ...], *, rounded: bool
    ) -> tuple[Tensor, Tensor] | None:
        """Read a matrix stored as codes `i8[out, in]` and scales `f32[out]`, or return None.

        Args:
            name: Published name.
            shape: Shape of the matrix.
            rounded: Whether activations are rounded to 8 bits anyway. Otherwise the checkpoint must
                request it.
        """
        if self.scheme is None or not (rounded or self.scheme.rounds_rows(name)):
            return None
        return self.scheme.read_codes(self, name, shape)

    @property
    def has_packed(self) -> bool:
        """Whether matrices may be stored in a format that `read_packed` reads."""
        return self.scheme is not None and self.scheme.has_int4

    def read_packed(self, pieces: Sequence[TensorPart]) -> PackedMatrix | None:
        """Read a matrix of several tensors in its block format of few bits, or return None.

        None also if its blocks would not be exact; `log_unpacked` logs the reason.
        """
        groups: list[GroupedCodes] = []
        for piece in pieces:
            scheme = self.scheme
            found = None if scheme is None else scheme.read_int4(self, piece.source, piece.shape)
            if found is None:
                return None
            groups.append(found)
        try:
            return pack_groups(groups)
        except PackingError as reason:
            self.unpacked.setdefault(str(reason), []).append(pieces[0].source)
            return None

    def log_unpacked(self) -> None:
        """Log which matrices `read_packed` could not pack without loss."""
        for reason, names in self.unpacked.items():
            count = (self.folder, len(names), names[0])
            LOG.warning("%s: %d matrices (%r, …) are dequantized: %s", *count, reason)

    def check_depth(self, config: ModelConfig) -> None:
        """Raise `ValueError` if the last layer is missing, before the model is built."""
        part = "out" if config.has_attention(config.layers - 1) else "merge"
        last = f"blocks.{config.layers - 1}.attention.{part}.weight"
        self.tensor_path(*config_family(config).tensor_names(last))

    def check_names(self, config: ModelConfig, wanted: Collection[str]) -> None:
        """Raise `ValueError` for unused tensors, or for a scheme that no matrix uses."""
        stored = {part for name in wanted for part in self.part_names(name) or (name,)}
        unread = config_family(config).unread
        self.stacks, used = stack_sizes(stored), {*map(stored_name, stored)}
        unused = {
            name
            for name in self.files
            if not (name in used or name.endswith(COMPUTED_SUFFIX) or name.startswith(unread))
        }
        unused -= unread_keys(config)
        # Some tied checkpoints store the head all the same.
        if config.tied:
            unused -= self.redundant_head(config)
        if self.scheme is not None:
            unused = {name for name in unused if not self.scheme.is_unused(self, name)}
            if not self.is_part and not any(map(self.part_names, wanted)):
                raise ValueError(
                    f"{self.folder}: config.json has a quantization_config, but no matrix of the "
                    f"weights is quantized that way; supported: {self.about}"
                )
        if unused:
            names = ", ".join(repr(name) for name in sorted(unused)[:3])
            raise ValueError(
                f"{self.folder}: {len(unused)} tensors of its weights are not of the model that "
                f"config.json describes, such as {names}; supported: "
                f"{config_family(config).about}, {self.about} and whole"
            )

    def redundant_head(self, config: ModelConfig) -> set[str]:
        """Return the tensors of a tied model's head that repeat the embedding."""
        family, shape = config_family(config), (config.vocab, config.dim)
        (head,), (embedding,) = map(family.tensor_names, ("unembedding.weight", "embedding.weight"))
        if not (head in self.files or self.part_names(head)) or not torch.equal(
            self.read_tensor(head, shape), self.read_tensor(embedding, shape)
        ):
            return set()
        return {*self.part_names(head), head}


def unread_keys(config: ModelConfig) -> set[str]:
    """Return the tensors for keys that layers have although they share those of others."""
    family = config_family(config)
    return {
        name
        for layer in range(config.layers)
        if config.kv_layer(layer) != layer
        for part in ("qkv", "k_norm")
        for name in family.tensor_names(f"blocks.{layer}.attention.{part}.weight")
    }


def find_shards(folder: Path) -> list[Path]:
    index = folder / WEIGHTS_INDEX
    if index.is_file():
        return read_index(folder, index)
    if (folder / WEIGHTS_FILE).is_file():
        return [folder / WEIGHTS_FILE]
    if pickled := sorted(path.name for kind in PICKLED_PATTERNS for path in folder.glob(kind)):
        raise ValueError(
            f"{folder} has only pickled weights ({', '.join(pickled)}), which can run code when "
            f"they are opened; convert them to {WEIGHTS_FILE} first"
        )
    raise ValueError(f"{folder} has no {WEIGHTS_FILE}")


def read_index(folder: Path, index: Path) -> list[Path]:
    """Return the files of an index; raise `ValueError` for one that is not in the folder."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: weight_map must name the file of each tensor")
    files = {path.name for path in folder.iterdir() if path.is_file()}
    # Names are compared with the folder's files, so a path in a name is rejected.
    if missing := sorted({str(name) for name in weight_map.values()} - files):
        raise ValueError(f"{index} names {', '.join(missing[:3])}, which {folder} does not have")
    return [folder / name for name in sorted(set(weight_map.values()))]


def save_model(
    model: Stack,
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    parameters: Mapping[str, Tensor] | None = None,
) -> None:
    """Write `config.json` and `model.safetensors` in the format of the model's family.

    Args:
        model: The model.
        folder: Folder to write to; created if missing.
        dtype: Type of the written floating-point tensors.
        parameters: Whole parameters by name, if those of the model are sharded.

    Raises:
        ValueError: If the parameters do not match the model's configuration, so that no program
            could load them, or if the files cannot be written.
    """
    folder = Path(folder)
    parameters = parameters or model.state_dict()
    check_parameters(model, parameters)
    tensors: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        kind = dtype if parameter.is_floating_point() else parameter.dtype
        dense = (parameter.to_dense() if parameter.is_mkldnn else parameter).to("cpu", kind)
        names, sizes = zip(*source_tensors(model.config, name, dense.shape[0]), strict=True)
        parts = zip(names, dense.split(sizes), strict=True)
        tensors |= {source: part.contiguous() for source, part in parts}
    config = {**model.config.source, "torch_dtype": str(dtype).removeprefix("torch.")}
    config.pop("quantization_config", None)  # the written tensors are not quantized
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(stack_entries(tensors), folder / WEIGHTS_FILE, metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{folder} cannot be written: {error}") from error


def check_parameters(model: Stack, parameters: Mapping[str, Tensor]) -> None:
    """Raise `ValueError` naming a parameter that does not match the model's configuration."""
    with torch.device("meta"):
        fresh = (
            build_draft_model(model.config, *model.lender)
            if isinstance(model, Draft)
            else Transformer(model.config)
        )
    wanted = {name: parameter.shape for name, parameter in fresh.state_dict().items()}
    found = {name: parameter.shape for name, parameter in parameters.items()}
    if differing := sorted(dict(wanted.items() ^ found.items())):
        raise ValueError(
            f"parameter {differing[0]!r} is missing, unexpected or of another shape "
            f"({len(differing)} such parameters): a saved model must have the modules of "
            f"{model.config.architecture}"
        )
