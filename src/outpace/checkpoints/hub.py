"""Where checkpoints are: folders, GGUF files, the zoo, and the hub, from which they are pulled.

GGUF models of the hub are named `ORG/REPO:QUANT`. The folder of models has the layout of LM
Studio's, `ORG/REPO/FILE.gguf`. Beside each file stands its SHA-256, as `sha256sum -c` reads it;
only files with it are removed. A download that has not ended is `FILE.gguf.DIGEST.partial`, with
the digest of the file as the hub gives it, and the next pull continues it.
"""

from __future__ import annotations

import errno
import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from glob import escape
from hashlib import file_digest
from http.client import HTTPException
from io import FileIO
from pathlib import Path, PurePosixPath
from shutil import disk_usage
from typing import TYPE_CHECKING, Self
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from outpace.checkpoints.fields import error_line
from outpace.checkpoints.name import (
    GGUF_SUFFIX,
    HUB_CACHE_PREFIX,
    PART_SUFFIX,
    is_gguf,
    split_head_name,
)
from outpace.errors import OptionError
from outpace.lock import lock_file
from outpace.measurements import user_cache

if TYPE_CHECKING:
    from _hashlib import HASH

REPOSITORY = r"\w[\w.-]*/\w[\w.-]*"
REPOSITORY_NAME = re.compile(REPOSITORY, re.ASCII)
GGUF_NAME = re.compile(
    rf"(?P<repository>{REPOSITORY}):(?P<quant>\w[\w.-]*)|{REPOSITORY}[-_]gguf",
    re.ASCII | re.IGNORECASE,
)
QUANT = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:[IT]?Q\d\w*|(?:BF|FP?)(?:16|32)|\w*FP4\w*))$", re.IGNORECASE
)
"""Quantisation at the end of a file's name, without `.gguf` and the number of a part."""

USUAL_QUANT = "Q4_K_M"
"""Quantisation of a name without one, as for llama.cpp's `-hf`, if the repository has it."""

NO_MODEL = ("mmproj", "imatrix")
"""Parts of the names of GGUF files that are no language models."""

RECORD_SUFFIX, PARTIAL_SUFFIX = ".sha256", ".partial"
CHUNK_BYTES, TIMEOUT_SECONDS, DIGEST_CHARACTERS = 2**20, 30, 16

DISK_ERRORS = (errno.ENOSPC, errno.EACCES, errno.EROFS)

Progress = Callable[[int, int], None]
"""Receives the bytes that are done and their total."""


def ignore_progress(done: int, total: int) -> None:
    """Discard progress."""


LOAD_PROGRESS: ContextVar[Progress] = ContextVar("LOAD_PROGRESS", default=ignore_progress)


@contextmanager
def report_load_progress(progress: Progress) -> Iterator[None]:
    """Report the bytes read by every load of this thread to `progress` within the block."""
    before = LOAD_PROGRESS.set(progress)
    try:
        yield
    finally:
        LOAD_PROGRESS.reset(before)


ZOO_FOLDER = Path(__file__).parent.parent / "zoo"
ZOO_TOKENIZER = ZOO_FOLDER / "vocabulary"
"""Tokenizer shared by the models of the zoo."""

CHECKPOINT_PATTERNS = ("*.json", "*.safetensors", "*.txt", "*.jinja")
CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"


def zoo_names() -> list[str]:
    """Return the names of the models in the package."""
    return sorted(path.parent.name for path in ZOO_FOLDER.glob("*/config.json"))


@dataclass(frozen=True)
class HubName:
    """Name of a GGUF model of the hub; without a quantisation, the usual one."""

    repository: str
    quant: str | None = None

    @classmethod
    def parse(cls, name: str | Path) -> Self | None:
        """Parse `ORG/REPO:QUANT`, or `ORG/REPO` that ends with `GGUF`; None for other names."""
        found = GGUF_NAME.fullmatch(str(name))
        if found is None or os.path.exists(name):
            return None
        return cls(found["repository"] or found[0], found["quant"])

    def __str__(self) -> str:
        return self.repository if self.quant is None else f"{self.repository}:{self.quant}"


def group_models(paths: Iterable[str], *, partial: bool = False) -> dict[str, tuple[str, ...]]:
    """Return the files of each GGUF model among paths, by its path without parts and suffix.

    Models with missing parts are left out, except with `partial`.
    """
    groups: dict[tuple[str, int], list[str]] = defaultdict(list)
    for path in sorted({*paths}):
        stem, suffix = os.path.splitext(path)
        name = os.path.basename(stem).lower()
        if suffix.lower() != GGUF_SUFFIX or any(each in name for each in NO_MODEL):
            continue
        part = PART_SUFFIX.search(stem)
        groups[PART_SUFFIX.sub("", stem), int(part[0][-5:]) if part else 1].append(path)
    return {
        stem: tuple(files)
        for (stem, count), files in groups.items()
        if partial or len(files) == count
    }


def find_quant(models: Collection[str], quant: str | None) -> str | None:
    """Return the model whose name ends with a quantisation, the shortest name if several do.

    Without one, it is `USUAL_QUANT` or else the first model.
    """
    end = re.compile(rf"(?:^|[-._/\\]){re.escape(quant or USUAL_QUANT)}$", re.IGNORECASE)
    matching = [model for model in models if end.search(model)]
    if not matching and quant is None:
        return min(models, default=None)
    return min(matching, key=lambda each: (len(each), each), default=None)


def list_quants(models: Iterable[str]) -> dict[str, str]:
    """Return models by their quantisation, or by their whole name if it is taken or missing."""
    named: dict[str, str] = {}
    for model in sorted(models, key=lambda each: (len(each), each)):
        found, name = QUANT.search(model), PurePosixPath(model).name
        named[found[1] if found and found[1] not in named else name] = model
    return named


@dataclass(frozen=True)
class ModelStore:
    """A folder of GGUF files of one program."""

    program: str
    root: Path
    layout: str
    """Pattern of the files of a repository in it."""

    def list_models(self, repository: str = "*/*") -> dict[str, tuple[str, ...]]:
        """Return the files of each complete model of a repository."""
        org, _, repo = repository.partition("/")
        files = self.root.glob(self.layout.format(org=org, repo=repo))
        return group_models(str(path) for path in files if path.is_file())

    def repository_of(self, model: str) -> str | None:
        """Return the repository of a model, where the layout has it."""
        first, *rest = Path(model).relative_to(self.root).parts
        if first.startswith(HUB_CACHE_PREFIX):
            return first.removeprefix(HUB_CACHE_PREFIX).replace("--", "/", 1)
        return f"{first}/{rest[0]}" if len(rest) > 1 else None

    def list_names(self) -> dict[str, tuple[str, ...]]:
        """Return the files of all models by the names that load them."""
        models = self.list_models()
        groups: dict[str | None, list[str]] = defaultdict(list)
        for model in models:
            groups[self.repository_of(model)].append(model)
        named = {models[model][0]: models[model] for model in groups.pop(None, [])}
        for repository, group in groups.items():
            for quant, model in list_quants(group).items():
                named[f"{repository}:{quant}"] = models[model]
        return named


def own_store() -> ModelStore:
    """Return the folder of models, into which they are pulled."""
    return ModelStore("outpace", user_cache() / "models", "{org}/{repo}/**/*.gguf")


def model_stores() -> list[ModelStore]:
    """Return the folder of models, and those of other programs, which are only read."""
    home, cache = Path.home(), user_cache().parent
    llama = os.environ.get("LLAMA_CACHE") or cache / "llama.cpp"
    places = (home / ".lmstudio" / "models", home / ".cache" / "lm-studio" / "models")
    hub = Path(constants.HF_HUB_CACHE)
    return [
        own_store(),
        *(ModelStore("LM Studio", place, "{org}/{repo}/**/*.gguf") for place in places),
        ModelStore("llama.cpp", Path(llama), "{org}_{repo}_*.gguf"),
        ModelStore("the hub's cache", hub, "models--{org}--{repo}/snapshots/*/**/*.gguf"),
    ]


def find_model(name: HubName) -> Path | None:
    """Return the first file of a model on this machine, without the network; None if absent."""
    for store in model_stores():
        models = store.list_models(name.repository)
        if (found := find_quant(models, name.quant)) is not None:
            return Path(models[found][0])
    return None


@dataclass(frozen=True)
class RemoteFile:
    """A file of the hub, and where it is kept in the folder of models."""

    repository: str
    revision: str
    path: str
    size: int
    digest: str

    @property
    def target(self) -> Path:
        return own_store().root / self.repository / self.path

    @property
    def partial(self) -> Path:
        ending = f".{self.digest[:DIGEST_CHARACTERS]}{PARTIAL_SUFFIX}"
        return self.target.with_name(self.target.name + ending)

    @property
    def missing_bytes(self) -> int:
        here = next((p for p in (self.target, self.partial) if p.is_file()), None)
        return self.size - (0 if here is None else here.stat().st_size)


def describe_hub_error(error: Exception) -> str:
    """Describe in one line why the hub does not give a repository."""
    if isinstance(error, GatedRepoError):
        return "the hub has it for those who accept its terms: do so there, then hf auth login"
    if isinstance(error, RepositoryNotFoundError):
        return "the hub has no such repository, or requires a token for it (hf auth login)"
    if isinstance(error, HTTPError) or getattr(error, "response", None) is not None:
        return f"the hub refuses it: {error_line(error)[:200]}"
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        return error_line(error)
    reason = error_line(error.__cause__ or error)[:120]
    return f"the hub at {constants.ENDPOINT} cannot be reached ({reason})"


def list_remote(name: HubName) -> list[RemoteFile]:
    """Return the files of a model on the hub."""
    try:
        info = huggingface_hub.HfApi().model_info(
            name.repository, files_metadata=True, timeout=TIMEOUT_SECONDS
        )
    except Exception as error:  # the library raises those of its HTTP library too
        raise OptionError(
            "model", str(name), f"no download of {name}: {describe_hub_error(error)}"
        ) from error
    remote = {each.rfilename: each.lfs for each in info.siblings or ()}
    models = group_models(path for path in remote if is_safe(path))
    found = find_quant(models, name.quant)
    if found is None:
        quants = ", ".join(sorted(list_quants(models))) or "no GGUF models"
        wanted = "GGUF model" if name.quant is None else name.quant
        raise OptionError("model", str(name), f"{name.repository} has no {wanted}: it has {quants}")
    files = []
    for path in models[found]:
        if (stored := remote[path]) is None or info.sha is None:
            raise OptionError(
                "model", str(name), f"the hub gives no SHA-256 of {path} in {name.repository}"
            )
        files.append(RemoteFile(name.repository, info.sha, path, stored.size, stored.sha256))
    return files


def is_safe(path: str) -> bool:
    """Return whether a path stays in the folder that it is relative to."""
    return not PurePosixPath(path).is_absolute() and not {"..", "\\", ":"} & {
        *path,
        *path.split("/"),
    }


def pull_model(name: HubName, progress: Progress) -> Path:
    """Download a model into the folder of models, and return its first file.

    Raises:
        OptionError: If the hub does not give it, or not all of it: the rest is then downloaded by
            the next call. Also if the disk is too small, or a file has another SHA-256.
    """
    files = list_remote(name)
    folder = own_store().root / name.repository
    folder.mkdir(parents=True, exist_ok=True)
    needed, free = sum(file.missing_bytes for file in files), disk_usage(folder).free
    if needed > free:
        raise OptionError(
            "model",
            str(name),
            f"{name} needs {needed / 1e9:.1f} GB, and {folder} has "
            f"{free / 1e9:.1f} GB left: make room",
        )
    total, done = sum(file.size for file in files), 0
    for file in files:
        before = done

        def report(size: int, before: int = before) -> None:
            progress(before + size, total)

        if not file.target.is_file():
            download_file(file, report)
        done += file.size
        progress(done, total)
    return files[0].target


def download_file(file: RemoteFile, report: Callable[[int], None]) -> None:
    """Download a file, or continue to; `report` receives the bytes that are there."""
    file.target.parent.mkdir(parents=True, exist_ok=True)
    with file.partial.open("ab+", buffering=0) as output:
        try:
            lock_file(output)
        except BlockingIOError:
            raise refusal(file, "another process is pulling it: wait for that one") from None
        if file.target.is_file():  # since the other process has ended
            file.partial.unlink(missing_ok=True)
            return
        output.seek(0)
        digest = file_digest(output, "sha256")
        try:
            extend_file(file, output, digest, report)
        except OSError as error:
            here = output.tell()
            part = f"{here / 1e6:.0f} MB are kept in {file.partial}"
            raise refusal(file, f"{error_line(error)}; {part}") from error
        if digest.hexdigest() != file.digest:
            file.partial.unlink()
            remedy = "it is deleted: pull it again"
            raise refusal(file, f"its SHA-256 is not the one that the hub gives; {remedy}")
    record = f"{file.digest}  {file.target.name}\n"
    record_path(file.target).write_text(record, encoding="utf-8")
    file.partial.replace(file.target)
    with suppress(BlockingIOError):
        remove_partials(file.target)  # those of earlier revisions


def refusal(file: RemoteFile, message: str) -> OptionError:
    return OptionError("model", file.path, f"{file.repository}/{file.path}: {message}")


def record_path(file: Path) -> Path:
    """Return the path of a file's SHA-256."""
    return file.with_name(file.name + RECORD_SUFFIX)


def extend_file(
    file: RemoteFile, output: FileIO, digest: HASH, report: Callable[[int], None]
) -> None:
    """Append the bytes of a file that are missing; a connection that ends early is reopened."""
    while (begin := output.tell()) < file.size:
        problem: Exception | str = "the hub sends too few bytes"
        try:
            for chunk in read_chunks(file, begin):
                written = output.write(chunk[: file.size - output.tell()])
                digest.update(chunk[:written])
                report(output.tell())
        except TransferError as error:
            problem = error
        if output.tell() == begin:
            part = f"{begin / 1e6:.0f} of {file.size / 1e6:.0f} MB are here"
            raise refusal(file, f"{problem}; {part}: repeat the command to continue")


class TransferError(Exception):
    """The hub cannot be reached, or ended the connection."""


def read_chunks(file: RemoteFile, begin: int) -> Iterator[bytes]:
    """Yield the bytes of a file from a position on."""
    url = huggingface_hub.hf_hub_url(file.repository, file.path, revision=file.revision)
    request = Request(url, headers={"Range": f"bytes={begin}-"})
    if token := huggingface_hub.get_token():
        # The hub redirects to a host of files, which refuses the hub's token.
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        with urlopen(request, timeout=TIMEOUT_SECONDS) as response:
            skipped = begin if response.status == 200 else 0
            while skipped and (content := response.read(min(skipped, CHUNK_BYTES))):
                skipped -= len(content)
            while content := response.read(CHUNK_BYTES):
                yield content
    except (OSError, HTTPException) as error:
        raise TransferError(describe_hub_error(error)) from error


def placed_files(repository: str = "*/*") -> dict[str, tuple[str, ...]]:
    """Return the files of each model that `pull_model` placed, or began to."""
    root = own_store().root
    records = root.glob(f"{repository}/**/*{RECORD_SUFFIX}")
    partials = root.glob(f"{repository}/**/*{GGUF_SUFFIX}.*{PARTIAL_SUFFIX}")
    began = (str(path).removesuffix(PARTIAL_SUFFIX).rpartition(".")[0] for path in partials)
    return group_models(
        [*(str(path).removesuffix(RECORD_SUFFIX) for path in records), *began], partial=True
    )


def remove_model(name: HubName) -> int:
    """Remove the files of a model that `pull_model` placed, and return their bytes."""
    models = placed_files(name.repository)
    if name.quant is None and len(models) > 1:
        quants = ", ".join(f"{name}:{quant}" for quant in sorted(list_quants(models)))
        raise OptionError("model", str(name), f"{name} is several: give one of {quants}")
    found = find_quant(models, name.quant)
    if found is None:
        other = find_model(name)
        message = "is not in the folder of models" if other is None else f"is {other}"
        raise OptionError(
            "model", str(name), f"{name} {message}: only what outpace pull placed is removed"
        )
    removed = 0
    for target in map(Path, models[found]):
        try:
            removed += remove_partials(target)
        except BlockingIOError:
            raise OptionError(
                "model", str(name), f"another process is pulling {name}: end that one first"
            ) from None
        removed += remove_file(target) if record_path(target).is_file() else 0
        record_path(target).unlink(missing_ok=True)
        remove_empty(target.parent)
    return removed


def remove_partials(target: Path) -> int:
    """Remove downloads of a file that have not ended, and return their bytes.

    Raises:
        BlockingIOError: If another process is downloading it.
    """
    removed = 0
    for partial in target.parent.glob(f"{escape(target.name)}.*{PARTIAL_SUFFIX}"):
        with partial.open("ab") as lock:
            lock_file(lock)
        removed += remove_file(partial)
    return removed


def remove_file(path: Path) -> int:
    """Remove a file if it exists, and return its bytes."""
    size = path.lstat().st_size if path.exists() else 0
    path.unlink(missing_ok=True)
    return size


def remove_empty(folder: Path) -> None:
    """Remove a folder and those around it that are empty, up to the folder of models."""
    root = own_store().root
    while folder != root and root in folder.parents and not any(folder.iterdir()):
        folder.rmdir()
        folder = folder.parent


def find_checkpoint(name: str | Path) -> Path | None:
    """Return a folder, a GGUF file, a zoo model, or a GGUF model of the hub that is here."""
    if os.path.isdir(name) or is_gguf(Path(name)):
        return Path(name)
    if os.path.isfile(ZOO_FOLDER / name / CONFIG_FILE):
        return ZOO_FOLDER / name
    hub_name = HubName.parse(name)
    return None if hub_name is None else find_model(hub_name)


def resolve_checkpoint(
    name: str | Path, patterns: Sequence[str] = CHECKPOINT_PATTERNS, *, param: str = "model"
) -> Path:
    """Return the folder of a checkpoint: a path, a zoo model, or a hub name (downloaded once).

    A GGUF file, given by its path or as `ORG/REPO:QUANT`, has no folder: its path is returned.
    Files of other hub repositories must match `patterns`. Errors name the option `param`.
    """
    if not isinstance(name, str | Path):
        raise OptionError(param, name, "must be a name or a path")
    name = split_head_name(name)[0]
    if (found := find_checkpoint(name)) is not None:
        return found
    if (hub_name := HubName.parse(name)) is not None:
        try:
            return pull_model(hub_name, LOAD_PROGRESS.get())
        except OptionError as error:
            raise error.with_param(param) from error
    if REPOSITORY_NAME.fullmatch(str(name)) is None:
        raise OptionError(
            param,
            name,
            f"no model {str(name)!r}: give a folder with a config.json, a GGUF file, a hub name "
            "such as 'Qwen/Qwen3-0.6B' or 'ORG/REPO:Q4_K_M', or one of "
            f"{', '.join(zoo_names()) or 'the zoo (empty)'}",
        )
    return download_snapshot(str(name), patterns, param)


def download_snapshot(name: str, patterns: Sequence[str], param: str = "model") -> Path:
    """Return the folder of a repository in the hub's cache, with the files that match `patterns`.

    A name in an existing folder is that of a missing one, unless the cache has the repository.
    """
    folder = Path(name).parent
    is_path = folder.is_dir()
    try:
        return Path(
            huggingface_hub.snapshot_download(
                name, allow_patterns=[*patterns], local_files_only=is_path
            )
        )
    except Exception as error:  # the library raises those of its HTTP library too
        reason = f"{str(folder)!r} does not have it" if is_path else describe_hub_error(error)
        raise OptionError(param, name, f"no folder {name!r}: {reason}") from error


def is_local(name: str) -> bool:
    """Return whether a checkpoint is available without a download."""
    if find_checkpoint(name) is not None:
        return True
    try:
        folder = huggingface_hub.snapshot_download(
            name, allow_patterns=[*CHECKPOINT_PATTERNS], local_files_only=True
        )
    except Exception:  # the hub's library raises various errors for an empty cache
        return False
    return os.path.isfile(Path(folder) / CONFIG_FILE)
