"""Where the environment of `dflash hosts setup` lies on a host: a folder named by what is installed in it.

Costs one read of a small file, once a process.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from dflash.base.errors import PermanentError

LOCK = "requirements.lock"


def lock_file() -> Path:
    """The lock of this checkout.

    Raises:
        PermanentError: this is no checkout (an installed wheel has no lock).
    """
    path = Path(__file__).resolve().parents[2] / LOCK
    if not path.is_file():
        raise PermanentError("there is no such file", where=str(path), remedy="Run from a checkout of the workflow.")
    return path


@functools.cache
def lock_digest() -> str:
    """The first 12 hex digits of the lock's sha256."""
    return hashlib.sha256(lock_file().read_bytes()).hexdigest()[:12]


def environment_folder(workdir: Path) -> Path:
    """The environment of this lock on a host with that workdir."""
    return workdir / "env" / lock_digest()


def environment_python(workdir: Path) -> Path:
    """Its interpreter."""
    return environment_folder(workdir) / "bin" / "python"
