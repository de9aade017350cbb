"""The tensors of a checkpoint folder, by their published names."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outpace.checkpoints.families import config_family
from outpace.checkpoints.fields import error_line, read_json_object
from outpace.checkpoints.piece import TensorPart
from outpace.checkpoints.quantised.packing import PackingError, pack_groups
from outpace.checkpoints.quantised.scheme import FLOAT_TYPES, GroupedCodes, Scheme
from outpace.checkpoints.stacks import StackEntry, stack_sizes, stored_name
from outpace.kernels.packed import PackedMatrix
from outpace.models.config import ModelConfig
from outpace.models.split import ShardIndex

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

        Raises:
            ValueError: If the tensor has another shape or type.
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
        """Read a dequantized tensor, or the slice at `index`.

        Raises:
            ValueError: If it has another shape, or a type that cannot be read.
        """
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
        unread = config_family(config).unread_prefixes(config)
        self.stacks, used = stack_sizes(stored), {*map(stored_name, stored)}
        unused = {
            name
            for name in self.files
            if not (name in used or name.endswith(COMPUTED_SUFFIX) or name.startswith(unread))
        }
        unused -= unread_keys(config)
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
    """Return the safetensors files of a folder; raise `ValueError` if one is missing."""
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
