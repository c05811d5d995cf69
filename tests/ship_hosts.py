"""Hosts, folders and wraps for tests, soak and bench of shipping. Costs what its sshd cost: about 0.2 s each."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from proxy import Proxy
from sshd import Sshd

from dflash.base.files import sha256_file
from dflash.hosts.entry import Hop, HostEntry
from dflash.hosts.ssh import SshHost


def ssh_host(
    server: Sshd, name: str, workdir: Path, *, through: Proxy | None = None, wrap: Sequence[str] = ()
) -> SshHost:
    """A host behind a throwaway sshd, straight or through a proxy."""
    workdir.mkdir(parents=True, exist_ok=True)
    address, port = (through.address, through.port) if through else (server.address, server.port)
    if through:
        server.pin(address, port)
    given = {**server.host_entry(workdir), "address": address, "port": port, "wrap": list(wrap)}
    hop = Hop(name, address, port, server.user, server.key_file, server.known_hosts)
    return SshHost(name, HostEntry.model_validate(given), (hop,))


def write_random(path: Path, size: int, seed: int) -> None:
    """A file of random bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    source = random.Random(seed)
    with path.open("wb") as stream:
        while size > 0:
            stream.write(source.randbytes(min(size, 1 << 20)))
            size -= 1 << 20


def make_checkpoint(folder: Path, megabytes: float, seed: int = 0) -> Path:
    """Something like a checkpoint: a large drafter, some state, a manifest."""
    write_random(folder / "drafter/model.safetensors", int(megabytes * (1 << 20)), seed)
    (folder / "drafter/config.json").write_text("{}")
    write_random(folder / "state/moments.bin", 1 << 20, seed + 1)
    (folder / "manifest.json").write_text('{"step": 1}')
    return folder


def content(place: Path) -> dict[str, str]:
    """path -> sha256 of every file: what an outsider sees."""
    if place.is_file():
        return {".": sha256_file(place)}
    return {str(path.relative_to(place)): sha256_file(path) for path in sorted(place.rglob("*")) if path.is_file()}


FLIP = """\
import os, subprocess, sys
after, mode, marker, argv = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:]
if argv[-1] != mode or os.path.exists(marker):
    os.execvp(argv[0], argv)
child = subprocess.Popen(argv, stdin=subprocess.PIPE)
seen = 0
while piece := os.read(0, 1 << 16):
    if seen <= after < seen + len(piece):
        piece = bytearray(piece)
        piece[after - seen] ^= 4
        open(marker, "w").close()
    seen += len(piece)
    child.stdin.write(piece)
    child.stdin.flush()
child.stdin.close()
sys.exit(child.wait())
"""


def flipping_wrap(folder: Path, after: int, marker: Path, mode: str = "store") -> list[str]:
    """A wrap that turns one bit of what a far end is fed, once: damage that no checksum of ssh can see."""
    script = folder / "flip.py"
    script.write_text(FLIP)
    return [sys.executable, str(script), str(after), mode, str(marker)]


def waiting_until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Whether something came true in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.005)
    return False


def journaled(place: Path) -> int:
    """Chunks that the destination has journaled for a shipment that is under way."""
    lines = 0
    for journal in place.parent.glob(f".{place.name}.*.partial/journal*"):
        try:
            lines += journal.read_bytes().count(b"\n")
        except OSError:
            continue
    return lines


def left_behind(folder: Path) -> list[str]:
    """Partials, pins and temporary files in a folder."""
    return sorted(path.name for path in folder.iterdir() if path.name.endswith((".partial", ".pin", ".tmp")))
