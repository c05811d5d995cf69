"""Files that are either whole or absent: atomic writes, locks, and digests that are not computed twice.

A write costs two fsyncs. A digest costs one read of the file (about 1 GB/s); `DigestCache` remembers it by inode, size and
modification time, so that a second look costs one stat.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dflash.base.errors import CorruptError, PermanentError, TransientError

CHUNK = 8 << 20


def fsync_directory(path: Path) -> None:
    """Makes a rename inside `path` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, data: bytes | str) -> None:
    """Writes `path` so that a reader sees the old content or the new, never a part.

    Raises:
        PermanentError: the folder cannot be written (permissions, read-only mount, full disk); names it.
    """
    content = data.encode() if isinstance(data, str) else data
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
        fsync_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise PermanentError(
            f"cannot write: {error.strerror}", where=str(path), remedy="Make the folder writable or free some space."
        ) from error


def write_json(path: Path, value: Any) -> None:
    """Writes readable JSON (two-space indent, sorted keys, newline at the end), atomically."""
    write_atomically(path, json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Reads JSON.

    Raises:
        CorruptError: the file is missing, unreadable, or not JSON; names it.
    """
    try:
        return json.loads(path.read_text())
    except FileNotFoundError as error:
        raise CorruptError("the file is missing", where=str(path)) from error
    except (OSError, ValueError) as error:
        raise CorruptError(
            f"not readable JSON ({error})", where=str(path), remedy="Run `dflash run` to rebuild it."
        ) from error


def sha256_file(path: Path) -> str:
    """sha256 (64 hex digits) of a file's bytes, read in 8 MiB pieces."""
    state = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(CHUNK):
            state.update(piece)
    return state.hexdigest()


class DigestCache:
    """Digests remembered by (inode, size, mtime), in one JSON file under the user's cache folder.

    The cache is a convenience: lost or damaged, it is rebuilt. `save` merges with what other processes wrote.
    """

    def __init__(self, path: Path | None = None) -> None:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self.path = path or base / "dflash" / "digests.json"
        self._known: dict[str, str] = self._load()
        self._fresh: dict[str, str] = {}

    def _load(self) -> dict[str, str]:
        try:
            loaded = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}
        return loaded if isinstance(loaded, dict) else {}

    def sha256(self, path: Path) -> str:
        """sha256 of the file, from memory when inode, size and mtime are those of the last look."""
        stat = path.stat()
        name = f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}"
        if name not in self._known:
            self._known[name] = self._fresh[name] = sha256_file(path)
        return self._known[name]

    def knows(self, fact: str) -> bool:
        """Whether `remember(fact)` was called before: for checks of a content that need not be repeated."""
        return f"fact:{fact}" in self._known

    def remember(self, fact: str) -> None:
        """Remembers that something holds of a content (named by its digest), for good."""
        self._known[f"fact:{fact}"] = self._fresh[f"fact:{fact}"] = ""

    def save(self) -> None:
        """Keeps the digests computed since the last save; a cache that cannot be written is not an error."""
        if not self._fresh:
            return
        with contextlib.suppress(PermanentError, OSError):
            write_atomically(self.path, json.dumps({**self._load(), **self._fresh}))
        self._fresh = {}


@contextlib.contextmanager
def locked(path: Path, *, wait: float | None = None, why: str = "") -> Iterator[None]:
    """Holds an exclusive flock on `path` (created when missing) for the length of the block.

    Args:
        wait: seconds to wait for the lock; None waits for ever, 0 tries once.
        why: what the lock protects, for the message.

    Raises:
        TransientError: somebody else held the lock for longer than `wait`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    deadline = None if wait is None else time.monotonic() + wait
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if deadline is not None and time.monotonic() >= deadline:
                    raise TransientError(
                        f"held by another process{f' ({why})' if why else ''}",
                        where=str(path),
                        remedy="Wait for it to end, or look with `dflash watch`.",
                    ) from None
                time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)


def append_line(path: Path, line: str) -> None:
    """Appends one line with a single write, so that concurrent writers never interleave and a kill leaves at most one
    torn last line, which readers skip."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, (line + "\n").encode())
    finally:
        os.close(descriptor)
