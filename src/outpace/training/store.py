"""Feature store: target features on disk, computed once per example and then read.

A folder has an index, which identifies target and tokenization, and files of consecutive records,
each with a digest of them. Files are written atomically, so an interrupted computation resumes at
the first missing file, and records that are added to the data only add files.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from outpace.models.packed import DenseState
from outpace.models.transformer import Transformer
from outpace.training.data import Example, Examples
from outpace.training.objective import FeatureSpec
from outpace.training.rows import Rows, next_token_rows, pack_documents
from outpace.training.trackers import lock_folder, raise_write_errors, write_atomically

INDEX_FILE = "features.json"

RECORDS_PER_FILE = 32
"""Records per file."""

DIGEST = "records"
"""Name of the digest of its records in a file's metadata."""

SAMPLED_ELEMENTS = 4096
"""Elements of each weight, evenly spaced, in the digest that identifies a target."""


class FeatureStore:
    """Target features of all records of a data set, in a folder."""

    def __init__(
        self,
        folder: str | Path,
        examples: Examples,
        reading: FeatureSpec | None,
        target: Transformer | None,
        precision: str,
    ) -> None:
        """Raise `ValueError` if features cannot be stored, or the folder holds others."""
        if reading is None or target is None:
            raise ValueError(
                "features needs an objective that reads features of a target; remove it"
            )
        if examples.record_count is None:
            raise ValueError(
                "features cannot be stored for endless generated problems; set [data] path to a "
                "file or a data set of the hub"
            )
        self.folder, self.examples, self.feature_spec = Path(folder), examples, reading
        self.records = examples.record_count
        self.dtype = target.norm.weight.dtype
        self.row_bytes = reading.feature_width(target.config) * self.dtype.itemsize
        self.index = {
            "target": model_digest(target),
            "tokenization": tokenization_digest(examples),
            "layers": [*reading.layers],
            "last": reading.last,
            "computed": f"{self.dtype}".removeprefix("torch.") + f", {precision}",
        }
        self.check_folder()
        files = range(-(-self.records // RECORDS_PER_FILE))
        self.missing = [number for number in files if not self.is_complete(number)]

    def check_folder(self) -> None:
        path = self.folder / INDEX_FILE
        if not path.exists():
            if self.folder.is_file() or any(self.folder.glob("[!.]*")):
                raise ValueError(
                    f"features folder {self.folder} holds other files; give a new folder"
                )
            return
        try:
            found = json.loads(path.read_text())
            other = [name for name, fact in self.index.items() if found[name] != fact]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged; delete {self.folder}") from error
        if other:
            raise self.difference_error(other)

    def difference_error(self, names: Sequence[str]) -> ValueError:
        return ValueError(
            f"features folder {self.folder} differs in {', '.join(names)} from this run; give "
            "another folder, or delete it"
        )

    def is_complete(self, number: int) -> bool:
        """Return whether a file has all its records; `ValueError` if it has others."""
        records = self.file_records(number)
        if not file_path(self.folder, number).is_file():
            return False
        with self.open_file(number) as file:
            count, digest = len(file.keys()), (file.metadata() or {}).get(DIGEST)
        if digest != self.digest_records(records[:count]):
            raise self.difference_error(["data"])
        return count == len(records)

    def digest_records(self, records: Sequence[int]) -> str:
        texts = [self.examples.read_conversation(record) for record in records]
        return sha256(json.dumps(texts).encode()).hexdigest()

    @contextmanager
    def open_file(self, number: int) -> Iterator[Any]:
        path = file_path(self.folder, number)
        try:
            with safe_open(path, framework="pt") as file:
                yield file
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"{path} is missing or damaged ({error}); delete it, and run the same command to "
                "compute it again"
            ) from error

    def file_records(self, number: int) -> list[int]:
        return [
            *range(number * RECORDS_PER_FILE, min((number + 1) * RECORDS_PER_FILE, self.records))
        ]

    def compute_missing(
        self,
        scored: nn.Module,
        batch: int,
        accelerator: Accelerator,
        print_line: Callable[[str], None],
    ) -> None:
        """Compute missing files, `batch` records per forward, distributed over processes."""
        missing, first = self.missing, accelerator.is_main_process
        accelerator.wait_for_everyone()  # all have listed the files before any is written
        if not missing:
            return
        with lock_folder(self.folder) if first else nullcontext():
            if first:
                self.report_size(missing, print_line)
                write_atomically(self.folder / INDEX_FILE, json.dumps(self.index, indent=2) + "\n")
            accelerator.wait_for_everyone()
            for at in range(0, len(missing), accelerator.num_processes):
                turn = missing[at : at + accelerator.num_processes]
                passes = -(-max(len(self.file_records(number)) for number in turn) // batch)
                mine = turn[accelerator.process_index :][:1]
                # All processes run equally many forwards, as a sharded target requires.
                records = self.file_records(mine[0]) if mine else []
                tensors = self.compute_features(scored, records, passes, batch, accelerator.device)
                if mine:
                    self.write_file(mine[0], tensors)
            accelerator.wait_for_everyone()
            print_line(f"features are in {self.folder}")

    def report_size(self, missing: Sequence[int], print_line: Callable[[str], None]) -> None:
        tokens = sum(
            len(self.examples.read_record(r))
            for number in missing
            for r in self.file_records(number)
        )
        size, free = tokens * self.row_bytes, shutil.disk_usage(self.folder).free
        print_line(
            f"writing features of {tokens:,} tokens to {self.folder}: {size / 2**30:,.2f} GiB"
        )
        if size > free:
            raise ValueError(
                f"features need {size / 2**30:,.2f} GiB, but {self.folder} has "
                f"{free / 2**30:,.2f} GiB free; give a folder on a larger disk, or no features"
            )

    @torch.no_grad()
    def compute_features(
        self,
        scored: nn.Module,
        records: Sequence[int],
        passes: int,
        batch: int,
        device: torch.device,
    ) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for number in range(passes):
            chunk = records[number * batch : (number + 1) * batch]
            texts = [(record, self.examples.read_record(record)) for record in chunk or [0]]
            texts.sort(key=lambda text: len(text[1]))  # the order of packing
            rows = pack_documents([unscored_rows(example) for _, example in texts]).to(device)
            parts = scored(rows, self.feature_spec).split([len(example) for _, example in texts])
            if chunk:
                # Quantized matrices return float32, whatever the dtype of their model.
                pairs = zip(texts, (part.to("cpu", self.dtype) for part in parts), strict=True)
                found |= {str(record): part.contiguous() for (record, _), part in pairs}
        return found

    def write_file(self, number: int, tensors: dict[str, Tensor]) -> None:
        path = file_path(self.folder, number)
        partial = path.with_name(f".{path.name}")
        with raise_write_errors(path):
            try:
                digest = self.digest_records(self.file_records(number))
                save_file(tensors, partial, {DIGEST: digest})
                os.replace(partial, path)
            finally:
                partial.unlink(missing_ok=True)

    def add_features(self, rows: Rows, number: int, example: Example) -> Rows:
        """Add stored features to the rows of example number n, in place."""
        record = self.examples.record_number(number)
        with self.open_file(record // RECORDS_PER_FILE) as file:
            rows.features = file.get_tensor(str(record))
        if len(rows.features) != len(example):
            raise self.difference_error(["data"])
        return rows


def file_path(folder: Path, number: int) -> Path:
    return folder / f"features-{number:06d}.safetensors"


def unscored_rows(example: Example) -> Rows:
    tokens = np.array([*example.prompt, *example.response])
    return next_token_rows(tokens, np.zeros(len(tokens)))


def model_digest(target: Transformer) -> str:
    pairs = ((each, getattr(target.config, each.name)) for each in fields(target.config))
    # Without defaults, so that features stay valid when a later version adds a field.
    settings = [(each.name, value) for each, value in pairs if each.repr and value != each.default]
    digest = sha256(repr(settings).encode())
    for name, weight in iterate_matrices(target):
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        flat = weight.detach().flatten()
        sample = flat[:: max(len(flat) // SAMPLED_ELEMENTS, 1)]
        digest.update(sample.float().cpu().numpy().tobytes())
    return digest.hexdigest()


def iterate_matrices(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield names and parameters; quantized matrices, whose layout varies, are dequantized."""
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            is_stored = isinstance(module, DenseState) and name.endswith("weight")
            yield name, module.dense_weight() if is_stored else parameter


def tokenization_digest(examples: Examples) -> str:
    data, tokenizer = examples.data, examples.tokenizer
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    settings = [data.longest, examples.end_token, dict(data.template), tokenizer.chat_template]
    text = json.dumps([*settings, backend and backend.to_str()], default=str)
    return sha256(text.encode()).hexdigest()
