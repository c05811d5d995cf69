"""A request or an answer with the small files that belong to it, as one piece of bytes between two machines.

    {"files": [["results/store/...", 123], ...], ...}\n     the document, one line of JSON
    <the bytes of each file, in that order>

Whole or refused: a stream that ends early, or whose header is not one, is `Torn`. Held in memory, so it is for small files
(parameters, receipts, tables), never for weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import IO, Any

from dflash.base.errors import CorruptError, TransientError
from dflash.base.files import write_atomically

MARK = b"dflash-bundle "
"""What a header begins with; a shell's greeting on the same stream comes before it and is skipped."""
GREETING_BYTES = 1 << 20


class Torn(TransientError):
    """The stream ended before the bundle was whole."""


def pack(document: Mapping[str, Any], files: Mapping[str, bytes]) -> bytes:
    """The bundle of a JSON document and files by relative path."""
    listing = [[path, len(content)] for path, content in files.items()]
    header = json.dumps({**document, "files": listing}, ensure_ascii=True)
    return b"".join([MARK, header.encode(), b"\n", *files.values()])


def unpack(stream: IO[bytes]) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Reads one bundle and nothing after it.

    Raises:
        Torn: the stream ended too early. CorruptError: what came is not a bundle.
    """
    skipped = 0
    while not (line := stream.readline(GREETING_BYTES)).startswith(MARK):
        skipped += len(line)
        if not line:
            raise Torn("the other side ended without an answer")
        if skipped > GREETING_BYTES:
            raise CorruptError("the other side answers with something else than this program's answer")
    if not line.endswith(b"\n"):
        raise Torn("the answer of the other side was cut off")
    try:
        document = json.loads(line[len(MARK) :])
        listing = [(str(path), int(size)) for path, size in document.pop("files")]
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptError("the other side's answer cannot be read") from error
    files = {}
    for path, size in listing:
        content = stream.read(size)
        if len(content) != size:
            raise Torn("the answer of the other side was cut off")
        files[path] = content
    return document, files


def place(files: Mapping[str, bytes], root: Path) -> None:
    """Writes files below `root`, each whole or not at all, in the order given; equal files are left alone.

    Raises:
        CorruptError: a path leads out of `root`. PermanentError: a file cannot be written.
    """
    for name, content in files.items():
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts:
            raise CorruptError(f"`{name}` leads out of the folder", where=str(root))
        path = root / pure
        if not (path.is_file() and path.stat().st_size == len(content) and path.read_bytes() == content):
            write_atomically(path, content)


def prefix_of(path: Path) -> list[Any]:
    """What the other side must know of a growing file to send only its rest: [size, sha256 of that much]."""
    content = path.read_bytes() if path.is_file() else b""
    return [len(content), hashlib.sha256(content).hexdigest()]


def rest_of(content: bytes, prefix: list[Any]) -> tuple[int, bytes]:
    """(offset, what follows it) of a file of which the other side has a prefix; offset 0 when it has something else."""
    size, sha256 = prefix
    same = len(content) >= size and hashlib.sha256(content[:size]).hexdigest() == sha256
    return (size, content[size:]) if same else (0, content)


def collect(root: Path, paths: list[Path]) -> dict[str, bytes]:
    """The content of those of `paths` that exist, by path relative to `root`, in the order given."""
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths if path.is_file()}
