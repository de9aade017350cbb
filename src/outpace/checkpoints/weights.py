"""The tensors of a checkpoint folder, by their published names."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outpace.checkpoints.families import FAMILIES
from outpace.checkpoints.fields import line, read_json
from outpace.checkpoints.piece import Piece
from outpace.checkpoints.quantised.scheme import FLOATS, Scheme
from outpace.checkpoints.stacks import Entry, held, sizes
from outpace.kernels.packed import Packed
from outpace.models.config import ModelConfig
from outpace.models.split import Index

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

    @property
    def size(self) -> int:
        """Bytes of the files."""
        return sum(path.stat().st_size for path in {path for path, _ in self.files.values()})

    def __contains__(self, name: str) -> bool:
        return held(name) in self.files

    def find(self, name: str) -> tuple[Path, Any]:
        """File that has a tensor, or its stack; `ValueError` if there is none."""
        if (own := held(name)) not in self.files:
            raise ValueError(f"{self.folder}: no tensor {own!r} in its weights")
        return self.files[own]

    def path(self, name: str) -> Path:
        """File that has a tensor, or the first part of it; `ValueError` if there is none."""
        return self.find(next(iter(self.parts(name)), name))[0]

    def kind(self, name: str) -> str:
        """Type of a tensor's numbers, such as `BF16`."""
        kind: str = self.find(name)[1].get_slice(held(name)).get_dtype()
        return kind

    def stored(
        self,
        name: str,
        shapes: Collection[tuple[int, ...]],
        kinds: Collection[str],
        index: Index = (),
    ) -> Tensor:
        """A tensor as it is stored; `ValueError` where it has none of these shapes and types.

        Any will do where none is named. Of a stack one entry is read; of each, what `index` names.
        """
        path, opened = self.find(name)
        entry, name = Entry.of(name), held(name)
        header = opened.get_slice(name)
        if entry is not None:
            shapes = [(self.stacks.get(name, 0), *shape) for shape in shapes]
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
            where = index if entry is None else (entry.number, *index)
            tensor: Tensor = again.get_slice(name)[where] if where else again.get_tensor(name)
        return tensor

    @property
    def about(self) -> str:
        """What loads, for the text of errors."""
        return "unquantised" if self.scheme is None else self.scheme.about

    def parts(self, name: str) -> tuple[str, ...]:
        """Stored tensors that make a quantised matrix; none where it is plain."""
        return () if self.scheme is None else self.scheme.parts(self, name)

    def tensor(self, name: str, shape: tuple[int, ...], index: Index = ()) -> Tensor:
        """A plain tensor, or what is at `index`; `ValueError` for another shape or numbers."""
        if self.scheme is not None and self.parts(name):
            return self.scheme.plain(self, name, shape)[index]
        if (entry := Entry.of(name)) is not None and entry.turned:
            return self.stored(name, (shape[::-1],), FLOATS).T[index].contiguous()
        return self.stored(name, (shape,), FLOATS, index)

    def codes(
        self, name: str, shape: tuple[int, ...], *, rounded: bool
    ) -> tuple[Tensor, Tensor] | None:
        """Codes `i8[out, in]` and scales `f32[out]` of a matrix that is stored as such, or None.

        Unless rows are to be `rounded` to 8 bits anyhow, the checkpoint must say that they are.
        """
        if self.scheme is None or not (rounded or self.scheme.rounds_rows(name)):
            return None
        return self.scheme.codes(self, name, shape)

    def packed(self, pieces: Sequence[Piece]) -> Packed | None:
        """A matrix of several tensors in the block format that they are stored in, or None."""
        return None

    def check_depth(self, config: ModelConfig) -> None:
        """Raise `ValueError` if the last layer is missing, before a model is made of them all."""
        last = f"blocks.{config.layers - 1}.attention.out.weight"
        self.path(*FAMILIES[config.family].published(last))

    def check_names(self, config: ModelConfig, wanted: Collection[str]) -> None:
        """Raise `ValueError` for tensors that the model has no use for, or a scheme without."""
        stored = {part for name in wanted for part in self.parts(name) or (name,)}
        self.stacks, used = sizes(stored), {*map(held, stored)}
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
