"""Pages of prefix caches in a folder, which outlive the process and may be shared by several.

A file holds a page, or the recurrent states at its end, under the name of its content. A private
key in the folder is part of all names and authenticates each file. So a file of another key, model
or machine is never found, and one that was cut or changed is rejected.
"""

from __future__ import annotations

import hmac
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from errno import EFBIG
from functools import partial
from hashlib import blake2b, sha256
from pathlib import Path
from queue import SimpleQueue
from tempfile import mkstemp
from threading import Thread, current_thread
from typing import Self

import torch
from torch import Tensor

from outpace.engine.cache import PagedCache, PageStates
from outpace.errors import OptionError
from outpace.field_types import CacheSize, check_value

LOG = logging.getLogger(__name__)

KEY_FILE, KEY_BYTES = "key", 32

CODE_BYTES = sha256().digest_size
"""Bytes of the code before the content. SHA-256 is twice as fast as BLAKE2 on new processors."""

PAGE_SUFFIX, STATES_SUFFIX, NEW_SUFFIX = ".page", ".states", ".new"

MAX_QUEUED = 1024
"""Requests whose pages wait to be written; those of further ones are dropped."""

CLOSE_SECONDS = 10.0
"""Time limit for writing the rest when a model is unloaded or the process ends."""

OPEN_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)  # a pipe would wait for a writer
    | getattr(os, "O_BINARY", 0)
)


class PrefixStore:
    """Reads pages of a folder, and writes pages to it in a thread.

    Args:
        folder: the folder, which is created if it does not exist.
        limit: most bytes of its files; the least recently used are deleted first.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self.key = open_key(folder)
        self.room = 0
        """Bytes that may be written before the files are counted again."""
        self.queue: SimpleQueue[tuple[PagedCache, Sequence[bytes]] | None] = SimpleQueue()
        self.thread: Thread | None = None
        self.has_stopped = False

    @classmethod
    def open(
        cls, folder: str | Path | None, gib: float, *, prefix_cache: bool, tensor_parallel: int
    ) -> Self | None:
        """Return the store of a folder, if one is set.

        Raises:
            OptionError: the folder cannot be written, or an option excludes it.
        """
        check_value("prefix_gib", gib, CacheSize)
        check_value("prefix_dir", folder, str | Path | None)
        if folder is None:
            return None
        if not str(folder):
            raise OptionError("prefix_dir", folder, "must be the path of a folder")
        if tensor_parallel > 1 or not prefix_cache:
            other = "tensor_parallel" if tensor_parallel > 1 else "prefix_cache=False"
            raise OptionError("prefix_dir", folder, f"cannot be combined with {other}: omit one")
        return cls(Path(os.path.expanduser(folder)), int(gib * 2**30))

    def derive_salt(self, identity: str) -> bytes:
        """Return the key of the names of all pages that depend on `identity`."""
        return blake2b(identity.encode(), key=self.key, digest_size=16).digest()

    def read(self, name: str, tensors: Sequence[Tensor]) -> bytearray | None:
        """Return the content of a file for such tensors; None without a valid file."""
        path, size = self.folder / name, sum(each.nbytes for each in tensors)
        try:
            with open(os.open(path, OPEN_FLAGS), "rb") as file:
                status = os.fstat(file.fileno())
                if stat.S_ISREG(status.st_mode) and status.st_size == CODE_BYTES + size:
                    code, content = file.read(CODE_BYTES), bytearray(file.read(size))
                    if hmac.compare_digest(code, self.sign(name, [content])):
                        return content
            reason = "it is cut, changed or of another origin"
            path.unlink()  # so that it is written again
        except FileNotFoundError:
            return None
        except OSError as error:
            reason = error.strerror or str(error)
        LOG.warning("prefix file %s is ignored: %s", path, reason)
        return None

    def sign(self, name: str, parts: Sequence[memoryview | bytearray]) -> bytes:
        code = hmac.new(self.key, name.encode(), "sha256")
        for part in parts:
            code.update(part)
        return code.digest()

    def submit(self, cache: PagedCache, names: Sequence[bytes]) -> None:
        """Write the pages of a sequence in the background, or mark those written as used."""
        if self.has_stopped or self.queue.qsize() >= MAX_QUEUED:
            return
        self.queue.put((cache, names))
        if self.thread is None:
            self.thread = Thread(target=self.write_submitted, name="outpace-prefixes", daemon=True)
            self.thread.start()

    def close(self) -> None:
        """Write what was submitted, for at most `CLOSE_SECONDS`."""
        if self.thread is not None:
            self.queue.put(None)
            if self.thread is not current_thread():  # which may have collected the engine
                self.thread.join(CLOSE_SECONDS)
                self.has_stopped = True

    def write_submitted(self) -> None:
        try:
            while self.write_sequence(self.queue.get()):
                pass
        except OSError as error:
            LOG.warning("no more prefixes are written to %s: %s", self.folder, error.strerror)
        finally:
            self.has_stopped = True

    def write_sequence(self, item: tuple[PagedCache, Sequence[bytes]] | None) -> bool:
        """Write the pages of a sequence; return whether to continue."""
        if item is None:
            return False
        (cache, names), used = item, time.time_ns()
        for depth, name in enumerate(names):
            # Later pages are found by way of earlier ones, and so are to be deleted first.
            age = used - 1000 * depth
            self.write_file(page_file(name), age, partial(cache.copy_content, name))
            if (states := cache.states_by_name.get(name)) is not None:
                self.write_file(states_file(name), age, partial(state_tensors, states))
            if self.has_stopped:
                return False
        return True

    def write_file(self, name: str, used: int, copy: Callable[[], list[Tensor] | None]) -> None:
        """Write a file, or only its time of use if it exists."""
        path = self.folder / name
        with suppress(FileNotFoundError):
            if stat.S_ISREG(path.lstat().st_mode):
                os.utime(path, ns=(used, used))
                return
        if (tensors := copy()) is None:
            return
        parts = [each.cpu().flatten().view(torch.uint8).numpy().data for each in tensors]
        self.make_room(CODE_BYTES + sum(map(len, parts)))
        with new_file(self.folder) as (descriptor, draft):
            with open(descriptor, "wb") as file:
                file.writelines([self.sign(name, parts), *parts])
            os.utime(draft, ns=(used, used))
            draft.replace(path)

    def make_room(self, size: int) -> None:
        """Delete the least recently used files where another would exceed the limit."""
        if size > self.limit:
            raise OSError(EFBIG, f"prefix_gib is less than a file of {size} bytes")
        if size > self.room:
            step = max(self.limit // 16, size)  # other processes may write as much between counts
            files = sorted(list_files(self.folder))
            total = sum(length for _, length, _ in files)
            for _, length, path in files:
                if total + step <= self.limit:
                    break
                path.unlink(missing_ok=True)
                total -= length
            self.room = step
        self.room -= size


def page_file(name: bytes) -> str:
    return name.hex() + PAGE_SUFFIX


def states_file(name: bytes) -> str:
    return name.hex() + STATES_SUFFIX


def state_tensors(states: PageStates) -> list[Tensor]:
    """Return what the states at the end of a page consist of, layer by layer."""
    ordered = [states[layer] for layer in sorted(states)]
    return [tensor for each in ordered for tensor in (each.state, each.inputs)]


def fill_tensors(tensors: Sequence[Tensor], content: bytearray) -> None:
    """Copy the content of a file into tensors."""
    begin = 0
    for each in tensors:
        part = torch.frombuffer(content, dtype=each.dtype, count=each.numel(), offset=begin)
        each.copy_(part.view(each.shape))
        begin += each.nbytes


def list_files(folder: Path) -> Iterator[tuple[int, int, Path]]:
    """Yield time of use, size and path of each file that a store has written."""
    for entry in os.scandir(folder):
        if entry.name.endswith((PAGE_SUFFIX, STATES_SUFFIX, NEW_SUFFIX)):
            with suppress(FileNotFoundError):  # another process has deleted it
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    yield status.st_mtime_ns, status.st_size, folder / entry.name


@contextmanager
def new_file(folder: Path) -> Iterator[tuple[int, Path]]:
    """Create a file that only this user can read; yield its descriptor and path."""
    descriptor, name = mkstemp(NEW_SUFFIX, dir=folder)
    try:
        yield descriptor, Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def open_key(folder: Path) -> bytes:
    """Return the key of a folder, where files can be written; create both if needed.

    Raises:
        OptionError: the folder cannot be used.
    """
    path = folder / KEY_FILE
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with new_file(folder) as (descriptor, draft):
            with open(descriptor, "wb") as file:
                file.write(os.urandom(KEY_BYTES))
            with suppress(FileExistsError):  # perhaps that of a process which starts as well
                path.hardlink_to(draft)
        with open(os.open(path, OPEN_FLAGS), "rb") as file:
            status, key = os.fstat(file.fileno()), file.read(KEY_BYTES + 1)
    except (OSError, ValueError) as error:  # the latter for a null byte
        reason = getattr(error, "strerror", None) or error
        raise OptionError(
            "prefix_dir", folder, f"{folder} cannot be used: {reason}; set another folder"
        ) from error
    is_private = not hasattr(os, "geteuid") or (
        status.st_uid == os.geteuid() and not status.st_mode & 0o077
    )
    if not (is_private and len(key) == KEY_BYTES):
        raise OptionError(
            "prefix_dir",
            folder,
            f"{path} must be a file of {KEY_BYTES} bytes that only this user can read: delete it",
        )
    return key
