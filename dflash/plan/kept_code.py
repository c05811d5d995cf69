"""The exact code of a run, kept beside its results: `results/code/<digest>.tar.gz`, which the run's manifest names.

A commit can be rebased away, a clone can be shallow, and uncommitted changes are in no commit: what ran is kept as it lay on
the disk. The digest is over the content of every file (not over the archive), so what is taken out again is checked. Costs
about 0.5 MB and 0.1 s for each state of the code.
"""

from __future__ import annotations

import gzip
import io
import tarfile
import zlib
from pathlib import Path, PurePosixPath

from dflash.base.errors import CorruptError
from dflash.base.files import write_atomically
from dflash.hosts.code import DIGITS, archive, digest_of
from dflash.plan.code import source_root

PARTS = ("dflash", "workflow", "profiles", "Snakefile", "requirements.lock", "pyproject.toml")
"""Of a checkout, what a run needs; files that its config names are not code."""


def code_files(root: Path) -> dict[str, bytes]:
    """Relative path -> content of the code of a checkout; of an installed package, what there is of it."""
    found = {}
    for part in PARTS:
        top = root / part
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            name = path.relative_to(root)
            hidden = any(piece.startswith(".") or piece == "__pycache__" for piece in name.parts)
            if path.is_file() and not hidden and path.suffix != ".pyc":
                found[name.as_posix()] = path.read_bytes()
    return found


def kept_path(results: Path, digest: str) -> Path:
    """Where the code of a digest (64 hex digits) is kept."""
    return results / "code" / f"{digest[:DIGITS]}.tar.gz"


def keep_code(results: Path, root: Path | None = None) -> str:
    """Keeps the code that runs, once, and returns its digest. What is kept of it already and damaged is written anew.

    Raises:
        PermanentError: it cannot be written.
    """
    files = code_files(root or source_root())
    digest = digest_of(files)
    path = kept_path(results, digest)
    if not _whole(results, digest):
        write_atomically(path, gzip.compress(archive(files), mtime=0))
    return digest


def _whole(results: Path, digest: str) -> bool:
    try:
        return kept_code(results, digest) is not None
    except CorruptError:
        return False


def kept_code(results: Path, digest: str) -> dict[str, bytes] | None:
    """The files of a digest, checked; None when they are not kept here.

    Raises:
        CorruptError: the archive cannot be read, or holds other files.
    """
    path = kept_path(results, digest)
    if not digest or not path.is_file():
        return None
    files = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(gzip.decompress(path.read_bytes())), mode="r:") as tar:
            for entry in tar:
                stream = tar.extractfile(entry)
                if stream is not None:
                    files[entry.name] = stream.read()
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise CorruptError(f"the kept code cannot be read ({error})", where=str(path)) from error
    inside = all(not PurePosixPath(name).is_absolute() and ".." not in PurePosixPath(name).parts for name in files)
    if not inside or digest_of(files) != digest:
        raise CorruptError("the kept code is not that of its digest", where=str(path))
    return files
