"""Features of a target on disk: computed once for all examples of an epoch, then read.

A folder has an index, which says of what they are, and files of some records each, in order. Each
file appears whole or not at all, so that what was interrupted goes on where it was.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from outpace.models.transformer import Transformer
from outpace.training.data import Example, Examples
from outpace.training.folder import alone, write_whole, writing
from outpace.training.reading import Reading
from outpace.training.rows import Rows, next_tokens, pack

INDEX = "features.json"

RECORDS = 32
"""Records of a file."""

LOOKED_AT = 4096
"""Numbers of each weight by which a target is known again, evenly spread."""


class Store:
    """Features of the records of some examples, in a folder."""

    def __init__(
        self,
        folder: str | Path,
        examples: Examples,
        reading: Reading | None,
        target: Transformer | None,
        precision: str,
    ) -> None:
        """Raise `ValueError` for what cannot be stored, and for a folder of other features."""
        if reading is None or target is None:
            raise ValueError("features are what a draft reads of a target, and nothing reads them")
        if examples.records is None:
            raise ValueError(
                "features of examples that are made without end cannot be stored; give [data] "
                "path a file or a data set of the hub"
            )
        self.folder, self.examples, self.reading = Path(folder), examples, reading
        self.records = examples.records
        self.row = reading.width(target.config) * target.norm.weight.element_size()
        self.facts = {
            "target": known_by(target),
            "data": content(examples),
            "layers": [*reading.layers],
            "last": reading.last,
            "computed": f"{target.norm.weight.dtype}".removeprefix("torch.") + f", {precision}",
        }
        self.check()

    def check(self) -> None:
        """Raise `ValueError` where the folder holds anything but these features."""
        path = self.folder / INDEX
        if not path.exists():
            if self.folder.exists() and not (self.folder.is_dir() and not any(self.held())):
                raise ValueError(f"{self.folder} holds something else; give features a new folder")
            return
        try:
            found = json.loads(path.read_text())
            other = [name for name, fact in self.facts.items() if found[name] != fact]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged; delete {self.folder}") from error
        if other:
            raise ValueError(
                f"{self.folder} has features that differ in {', '.join(other)} from this run's; "
                "give another folder, or delete that one"
            )

    def held(self) -> list[Path]:
        """What the folder holds, besides what is hidden."""
        return [path for path in self.folder.iterdir() if not path.name.startswith(".")]

    def path(self, number: int) -> Path:
        """One of the files."""
        return self.folder / f"features-{number:06d}.safetensors"

    def missing(self) -> list[int]:
        """Numbers of files that are not there yet."""
        files = range(-(-self.records // RECORDS))
        return [number for number in files if not self.path(number).is_file()]

    def of(self, number: int) -> list[int]:
        """Records of a file."""
        return [*range(number * RECORDS, min((number + 1) * RECORDS, self.records))]

    def fill(
        self, scored: nn.Module, portion: int, accelerator: Accelerator, say: Callable[[str], None]
    ) -> None:
        """Compute what is missing, so many records in a pass; processes take files in turn."""
        missing, first = self.missing(), accelerator.is_main_process
        accelerator.wait_for_everyone()  # who has found what, before anybody changes it
        if not missing:
            return
        with alone(self.folder) if first else nullcontext():
            if first:
                self.announce(missing, say)
                write_whole(self.folder / INDEX, json.dumps(self.facts, indent=2) + "\n")
            accelerator.wait_for_everyone()
            for at in range(0, len(missing), accelerator.num_processes):
                turn = missing[at : at + accelerator.num_processes]
                passes = -(-max(len(self.of(number)) for number in turn) // portion)
                mine = turn[accelerator.process_index :][:1]
                # All make as many passes: those of a target that is shared out must.
                records = self.of(mine[0]) if mine else []
                made = self.made(scored, records, passes, portion, accelerator.device)
                if mine:
                    self.write(mine[0], made)
            accelerator.wait_for_everyone()
            say(f"features are in {self.folder}")

    def announce(self, missing: Sequence[int], say: Callable[[str], None]) -> None:
        """Say what will be written; `ValueError` where the disk has no room for it."""
        tokens = sum(len(self.examples.read(r)) for number in missing for r in self.of(number))
        size, free = tokens * self.row, shutil.disk_usage(self.folder).free
        say(f"features of {tokens:,} tokens go to {self.folder}: {size / 2**30:,.2f} GiB")
        if size > free:
            raise ValueError(
                f"{self.folder} has {free / 2**30:,.2f} GiB of room for features of "
                f"{size / 2**30:,.2f} GiB; give a larger disk, or no features"
            )

    @torch.no_grad()
    def made(
        self,
        scored: nn.Module,
        records: Sequence[int],
        passes: int,
        portion: int,
        device: torch.device,
    ) -> dict[str, Tensor]:
        """Features by record, on the host."""
        found: dict[str, Tensor] = {}
        for number in range(passes):
            few = records[number * portion : (number + 1) * portion]
            texts = [(record, self.examples.read(record)) for record in few or [0]]
            texts.sort(key=lambda text: len(text[1]))  # as they are packed
            rows = pack([plain(example) for _, example in texts]).to(device)
            parts = scored(rows, self.reading).split([len(example) for _, example in texts])
            if few:
                pairs = zip(texts, parts, strict=True)
                found |= {str(record): part.cpu().contiguous() for (record, _), part in pairs}
        return found

    def write(self, number: int, tensors: dict[str, Tensor]) -> None:
        """Put a file in its place, whole."""
        path = self.path(number)
        partial = path.with_name(f".{path.name}")
        with writing(path):
            try:
                save_file(tensors, partial)
                os.replace(partial, path)
            finally:
                partial.unlink(missing_ok=True)

    def added(self, rows: Rows, number: int, example: Example) -> Rows:
        """Rows of example number n with what the target makes of its tokens."""
        record = self.examples.record(number)
        path = self.path(record // RECORDS)
        try:
            with safe_open(path, framework="pt") as file:
                rows.features = file.get_tensor(str(record))
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"{path} is missing or damaged ({error}); delete it, and the same command makes "
                "it anew"
            ) from error
        if len(rows.features) != len(example):
            raise ValueError(f"{path} is of other examples; delete {self.folder}")
        return rows


def plain(example: Example) -> Rows:
    """Prompt and response as they stand, with nothing to learn."""
    tokens = np.array([*example.prompt, *example.response])
    return next_tokens(tokens, np.zeros(len(tokens)))


def known_by(target: Transformer) -> str:
    """A digest of a model's configuration and of numbers of each of its weights."""
    digest = sha256(repr(target.config).encode())
    for name, weight in target.named_parameters():
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        flat = weight.detach().flatten()
        some = flat[:: max(len(flat) // LOOKED_AT, 1)]
        digest.update(some.float().cpu().numpy().tobytes())
    return digest.hexdigest()


def content(examples: Examples) -> str:
    """A digest of all records, and of how they become tokens."""
    data, tokenizer = examples.data, examples.tokenizer
    spoken: Any = getattr(tokenizer, "backend_tokenizer", None)
    how = [data.longest, examples.end, dict(data.template), tokenizer.chat_template]
    digest = sha256(json.dumps([*how, spoken and spoken.to_str()], default=str).encode())
    for each in examples.sources:
        for _, record in each.all():
            digest.update(json.dumps(record).encode())
    return digest.hexdigest()
