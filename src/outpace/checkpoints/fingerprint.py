"""Fingerprints: identify the model, tokenizer and chat template by which training data was made."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

from outpace.checkpoints.gguf.file import open_gguf
from outpace.checkpoints.hub import resolve_checkpoint
from outpace.checkpoints.name import is_gguf
from outpace.tokenizer import Tokenizer

SAMPLES, SAMPLE_BYTES = 64, 4096
"""Number and size of the samples, evenly spaced, that identify a file of weights."""

DIGEST_CHARACTERS = 16
"""Hexadecimal characters of a digest."""


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """Digests of what determines the answers of a model."""

    target: str
    """Digest of the files of its weights, and of its adapter's."""
    tokenizer: str
    """Digest of the vocabulary and the rules of the tokenizer."""
    template: str
    """Digest of the chat template and its variables."""

    @classmethod
    def of(
        cls,
        model: str | Path,
        tokenizer: Tokenizer | None,
        template: Mapping[str, Any],
        adapter: str | Path | None = None,
    ) -> Fingerprint:
        """Return the fingerprint of a model, given its name, and of its tokenizer."""
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        source = None if tokenizer is None else tokenizer.chat_template
        weights = [digest_weights(each) for each in (model, adapter) if each is not None]
        return cls(
            target=weights[0] if len(weights) == 1 else shorten_digest("".join(weights)),
            tokenizer=shorten_digest("" if backend is None else backend.to_str()),
            template=shorten_digest(json.dumps([source, dict(template)], sort_keys=True)),
        )

    def as_record(self) -> dict[str, str]:
        return asdict(self)

    def differences(self, record: Any) -> list[str]:
        """Return the names of the digests that differ from those of a record."""
        found = record if isinstance(record, dict) else {}
        return [name for name, digest in self.as_record().items() if found.get(name) != digest]


def digest_weights(name: str | Path) -> str:
    folder = resolve_checkpoint(name)
    files = [folder] if is_gguf(folder) else sorted(folder.glob("*.safetensors"))
    digest = sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(str(size).encode())
        with path.open("rb") as file:
            for place in range(0, size, max(size // SAMPLES, SAMPLE_BYTES)):
                file.seek(place)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:DIGEST_CHARACTERS]


def digest_files(names: Iterable[str | Path]) -> str:
    """Return a digest of all bytes that the weights of models and adapters are read from."""
    digest = sha256()
    for name in names:
        folder = resolve_checkpoint(name)
        if is_gguf(folder):
            files = {folder, *(entry.path for entry in open_gguf(folder).tensors.values())}
        else:
            files = {*folder.glob("*.safetensors"), *folder.glob("*config.json")}
        for path in sorted(files):
            with path.open("rb") as file:
                digest.update(file_digest(file, "sha256").digest())
    return digest.hexdigest()


def shorten_digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:DIGEST_CHARACTERS]
