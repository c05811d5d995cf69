"""The code of this checkout on another host: sent once for each content, verified there, and verified again at every use.

What goes over is the whole package and the lock, as they lie on disk here. Its digest is one that a shell can compute
(sha256 of what `sha256sum` says of all files), because a container may not have python yet. Costs one command a use (0.2 s on
loopback), and a megabyte the first time.
"""

from __future__ import annotations

import functools
import hashlib
import io
import tarfile
from pathlib import Path

from dflash.base.errors import CorruptError, PermanentError
from dflash.hosts.environment_path import LOCK, lock_file
from dflash.hosts.host import Finished, Host, LocalHost

PACKAGE = "dflash"
DIGITS = 16
SAME, OTHER = 0, 3
"""Exit status of the check: the code is there, or it is not."""

DIGEST = """\
set -e
LC_ALL=C
export LC_ALL
digest() (cd "$1" && find . -name __pycache__ -prune -o -type f -print | sort | xargs sha256sum | sha256sum | cut -c 1-64)
"""
CHECK = f'{DIGEST}[ -d "$1" ] && [ "$(digest "$1")" = "$2" ] || exit {OTHER}\n'
UNPACK = f"""\
{DIGEST}
mkdir -p -- "$3"
work=$(mktemp -d "$3/.incoming.XXXXXX")
trap 'rm -rf -- "$work"' EXIT
mkdir "$work/code"
tar -xf - -C "$work/code"
if [ "$(digest "$work/code")" != "$2" ]; then echo "what arrived is not what was sent" >&2; exit 65; fi
if [ -d "$1" ] && [ "$(digest "$1")" != "$2" ]; then mv -T -- "$1" "$work/damaged"; fi
[ -d "$1" ] || mv -T -- "$work/code" "$1" || [ "$(digest "$1")" = "$2" ]
"""
"""Shell programs: $1 is the folder, $2 its digest, $3 the folder above it. A rename makes it visible, so a reader finds the
whole of it, and of two senders one wins and the other is content."""


def source_files() -> dict[str, bytes]:
    """Relative path -> content of everything that a host needs of this checkout."""
    root = Path(__file__).resolve().parents[2]
    found = {LOCK: lock_file().read_bytes()}
    for path in sorted((root / PACKAGE).rglob("*")):
        name = path.relative_to(root)
        hidden = any(part.startswith(".") or part == "__pycache__" for part in name.parts)
        if path.is_file() and not hidden and path.suffix != ".pyc":
            if any(not sign.isalnum() and sign not in "._-/" for sign in str(name)):
                raise PermanentError(f"a file of the package has the odd name {str(name)!r}", remedy="Rename it.")
            found[str(name)] = path.read_bytes()
    return found


def digest_of(files: dict[str, bytes]) -> str:
    """sha256 (64 hex digits) of the lines `<sha256>  ./<path>`, sorted by path in byte order."""
    lines = [f"{hashlib.sha256(files[name]).hexdigest()}  ./{name}\n" for name in sorted(files)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def archive(files: dict[str, bytes]) -> bytes:
    """A tar of the files, the same bytes for the same files."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in sorted(files):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(files[name]), 0o644
            tar.addfile(entry, io.BytesIO(files[name]))
    return made.getvalue()


@functools.cache
def _this_code() -> tuple[dict[str, bytes], str]:
    files = source_files()
    return files, digest_of(files)


def send_code(host: Host) -> Path:
    """Makes sure that this code lies on a host; returns the folder to put on PYTHONPATH there.

    On this machine that is the checkout itself; elsewhere `<workdir>/code/<digest>`. The code is read once a process, so
    that an edit in the middle of a run changes nothing.

    Raises:
        PermanentError: it cannot be written there. TransientError: the connection failed. CorruptError: other bytes arrived.
    """
    if isinstance(host, LocalHost) and not host.entry.wrap:
        return Path(__file__).resolve().parents[2]
    files, digest = _this_code()
    folder = host.workdir / "code" / digest[:DIGITS]
    found = host.run(["sh", "-c", CHECK, "check", str(folder), digest])
    if found.status == SAME:
        return folder
    if found.status != OTHER:
        raise _failed(host, folder, found)
    done = host.stream(["sh", "-c", UNPACK, "unpack", str(folder), digest, str(folder.parent)], [archive(files)])
    if done.status == 65:
        raise CorruptError("the code that arrived is not what was sent", where=f"{host.id}:{folder}")
    if done.status:
        raise _failed(host, folder, done)
    return folder


def _failed(host: Host, folder: Path, done: Finished) -> PermanentError:
    return PermanentError(
        f"the code cannot be sent: {done.last_line()}",
        where=f"{host.id}:{folder}",
        remedy="Make `workdir` writable or free some space; the host needs sh, tar, find and sha256sum.",
    )
