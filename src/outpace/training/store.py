"""Feature store: target features on disk, computed once per example and then read.

A folder has an index, which identifies target and data, and files of consecutive records. Files
are written atomically, so an interrupted computation resumes at the first missing file.
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
"""Records per file."""

LOOKED_AT = 4096
"""Elements of each weight, evenly spaced, in the digest that identifies a target."""


class Store:
    """Target features of all records of a data set, in a folder."""

    def __init__(
        self,
        folder: str | Path,
        examples: Examples,
        reading: Reading | None,
        target: Transformer | None,
        precision: str,
    ) -> None:
        """Raise `ValueError` if features cannot be stored, or the folder holds others."""
        if reading is None or target is None:
            raise ValueError(
                "features needs an objective that reads features of a target; remove it"
            )
        if examples.records is None:
            raise ValueError(
                "features cannot be stored for endless generated problems; set [data] path to a "
                "file or a data set of the hub"
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
        """Raise `ValueError` if the folder holds anything but these features."""
        path = self.folder / INDEX
        if not path.exists():
            if self.folder.exists() and not (self.folder.is_dir() and not any(self.held())):
                raise ValueError(
                    f"features folder {self.folder} holds other files; give a new folder"
                )
            return
        try:
            found = json.loads(path.read_text())
            other = [name for name, fact in self.facts.items() if found[name] != fact]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged; delete {self.folder}") from error
        if other:
            raise ValueError(
                f"features folder {self.folder} differs in {', '.join(other)} from this run; give "
                "another folder, or delete it"
            )

    def held(self) -> list[Path]:
        """Return the files of the folder, without hidden ones."""
        return [path for path in self.folder.iterdir() if not path.name.startswith(".")]

    def path(self, number: int) -> Path:
        """Return the path of a file by number."""
        return self.folder / f"features-{number:06d}.safetensors"

    def missing(self) -> list[int]:
        """Return the numbers of files not written yet."""
        files = range(-(-self.records // RECORDS))
        return [number for number in files if not self.path(number).is_file()]

    def of(self, number: int) -> list[int]:
        """Return the record numbers of a file."""
        return [*range(number * RECORDS, min((number + 1) * RECORDS, self.records))]

    def fill(
        self, scored: nn.Module, batch: int, accelerator: Accelerator, say: Callable[[str], None]
    ) -> None:
        """Compute missing files, `batch` records per forward, distributed over processes."""
        missing, first = self.missing(), accelerator.is_main_process
        accelerator.wait_for_everyone()  # all must list the files before any is written
        if not missing:
            return
        with alone(self.folder) if first else nullcontext():
            if first:
                self.announce(missing, say)
                write_whole(self.folder / INDEX, json.dumps(self.facts, indent=2) + "\n")
            accelerator.wait_for_everyone()
            for at in range(0, len(missing), accelerator.num_processes):
                turn = missing[at : at + accelerator.num_processes]
                passes = -(-max(len(self.of(number)) for number in turn) // batch)
                mine = turn[accelerator.process_index :][:1]
                # All processes run equally many forwards, as a sharded target requires.
                records = self.of(mine[0]) if mine else []
                tensors = self.made(scored, records, passes, batch, accelerator.device)
                if mine:
                    self.write(mine[0], tensors)
            accelerator.wait_for_everyone()
            say(f"features are in {self.folder}")

    def announce(self, missing: Sequence[int], say: Callable[[str], None]) -> None:
        """Report the size of the missing features; `ValueError` if the disk is too small."""
        tokens = sum(len(self.examples.read(r)) for number in missing for r in self.of(number))
        size, free = tokens * self.row, shutil.disk_usage(self.folder).free
        say(f"writing features of {tokens:,} tokens to {self.folder}: {size / 2**30:,.2f} GiB")
        if size > free:
            raise ValueError(
                f"features need {size / 2**30:,.2f} GiB, but {self.folder} has "
                f"{free / 2**30:,.2f} GiB free; give a folder on a larger disk, or no features"
            )

    @torch.no_grad()
    def made(
        self,
        scored: nn.Module,
        records: Sequence[int],
        passes: int,
        batch: int,
        device: torch.device,
    ) -> dict[str, Tensor]:
        """Compute features by record number, on the host."""
        found: dict[str, Tensor] = {}
        for number in range(passes):
            chunk = records[number * batch : (number + 1) * batch]
            texts = [(record, self.examples.read(record)) for record in chunk or [0]]
            texts.sort(key=lambda text: len(text[1]))  # the order of packing
            rows = pack([plain(example) for _, example in texts]).to(device)
            parts = scored(rows, self.reading).split([len(example) for _, example in texts])
            if chunk:
                pairs = zip(texts, parts, strict=True)
                found |= {str(record): part.cpu().contiguous() for (record, _), part in pairs}
        return found

    def write(self, number: int, tensors: dict[str, Tensor]) -> None:
        """Write a file atomically."""
        path = self.path(number)
        partial = path.with_name(f".{path.name}")
        with writing(path):
            try:
                save_file(tensors, partial)
                os.replace(partial, path)
            finally:
                partial.unlink(missing_ok=True)

    def added(self, rows: Rows, number: int, example: Example) -> Rows:
        """Add stored features to the rows of example number n, in place."""
        record = self.examples.record(number)
        path = self.path(record // RECORDS)
        try:
            with safe_open(path, framework="pt") as file:
                rows.features = file.get_tensor(str(record))
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"{path} is missing or damaged ({error}); delete it, and run the same command to "
                "compute it again"
            ) from error
        if len(rows.features) != len(example):
            raise ValueError(f"{path} has features of other examples; delete {self.folder}")
        return rows


def plain(example: Example) -> Rows:
    """Build causal rows of prompt and response, none of them scored."""
    tokens = np.array([*example.prompt, *example.response])
    return next_tokens(tokens, np.zeros(len(tokens)))


def known_by(target: Transformer) -> str:
    """Return a digest of a model's configuration and a sample of each weight."""
    digest = sha256(repr(target.config).encode())
    for name, weight in target.named_parameters():
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        flat = weight.detach().flatten()
        sample = flat[:: max(len(flat) // LOOKED_AT, 1)]
        digest.update(sample.float().cpu().numpy().tobytes())
    return digest.hexdigest()


def content(examples: Examples) -> str:
    """Return a digest of all records and of the tokenization settings."""
    data, tokenizer = examples.data, examples.tokenizer
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    settings = [data.longest, examples.end, dict(data.template), tokenizer.chat_template]
    digest = sha256(json.dumps([*settings, backend and backend.to_str()], default=str).encode())
    for each in examples.sources:
        for _, record in each.all():
            digest.update(json.dumps(record).encode())
    return digest.hexdigest()
