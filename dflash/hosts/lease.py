"""Leases: who holds a training or a GPU of this host, for as long as a process lives.

A lease is a file under flock. The lock belongs to the open file, not to a process: children that inherit the descriptor
keep it, so that the lease is free only when launcher and trainer are both gone. The kernel drops it with the last of them,
whatever killed it. Liveness is the lock; the pid in the file is for people and signals, and a file without a lock says
nothing. Costs an open and a system call each look.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import json
import os
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from dflash.base.errors import PermanentError
from dflash.base.records import LeaseRecord, now

CLONE, USER = "DFLASH_CLONE", "DFLASH_USER"
"""Whose work this is when another machine asked for it: its checkout and its user."""
PROBE_GRACE = 0.5
"""Seconds that `acquire` goes on trying: a look by `holder` takes the lock for microseconds."""


class LeaseHeld(PermanentError):
    """Somebody else holds the resource. `holder` says who."""

    def __init__(self, holder: LeaseRecord, path: Path) -> None:
        self.holder = holder
        super().__init__(
            f"{holder.resource} is held by {holder.user}, run {holder.run}, from {holder.clone} "
            f"(pid {holder.pid}, since {holder.start})",
            where=str(path),
            remedy=f"Wait for it to end, or stop it with `dflash stop {holder.run}`.",
        )


@dataclass(frozen=True)
class Lease:
    """Leases that this process holds. Pass `descriptors` to children that must hold them too (`pass_fds`)."""

    record: LeaseRecord
    descriptors: tuple[int, ...]

    def release(self) -> None:
        """Lets go; the lease is free once every process that inherited it has done so or ended."""
        for descriptor in self.descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def new_record(resource: str, key: str, run: str) -> LeaseRecord:
    """A record that names this process, its user and its checkout as the holder."""
    return LeaseRecord(
        resource=resource, key=key, run=run, user=user_name(), clone=clone_name(), pid=os.getpid(), start=now()
    )


def clone_name() -> str:
    """The checkout that asks, `machine:folder`."""
    return os.environ.get(CLONE) or f"{socket.gethostname()}:{Path(__file__).resolve().parents[2]}"


def user_name() -> str:
    """The login name of who asks, or the uid where there is none (bare containers)."""
    if os.environ.get(USER):
        return os.environ[USER]
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def acquire(paths: Mapping[Path, str] | Sequence[Path], record: LeaseRecord) -> Lease:
    """Takes all leases or none, for the life of this process and of children that inherit the descriptors.

    Args:
        paths: lease files; a mapping gives each the name of its resource, else `record.resource` stands in all.
        record: who takes them.

    Raises:
        LeaseHeld: somebody holds one of them; says who.
        PermanentError: a lease file cannot be opened or written.
    """
    names = paths if isinstance(paths, Mapping) else dict.fromkeys(paths, record.resource)
    taken: list[int] = []
    try:
        for path in sorted(names):
            taken.append(_acquire_one(path, record.model_copy(update={"resource": names[path]})))
    except BaseException:
        for descriptor in taken:
            os.close(descriptor)
        raise
    return Lease(record, tuple(taken))


def _acquire_one(path: Path, record: LeaseRecord) -> int:
    deadline = time.monotonic() + PROBE_GRACE
    while True:
        descriptor = _open(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A file that was deleted or replaced meanwhile would be a lock nobody else looks at.
            if path.exists() and path.stat().st_ino == os.fstat(descriptor).st_ino:
                content = record.model_dump_json().encode() + b"\n"
                os.pwrite(descriptor, content, 0)
                os.ftruncate(descriptor, len(content))
                return descriptor
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(descriptor)
                raise LeaseHeld(holder(path) or _unknown(path), path) from None
        except OSError as error:
            os.close(descriptor)
            raise PermanentError(f"the lease cannot be written: {error.strerror}", where=str(path)) from error
        os.close(descriptor)
        time.sleep(0.02)


def _open(path: Path) -> int:
    """Opens for writing; creates the file for all users of the host. Links are never followed."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            return os.open(path, flags)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
                with contextlib.suppress(OSError):
                    os.fchmod(descriptor, 0o666)
                return descriptor
            return os.open(path, flags)
    except OSError as error:
        raise PermanentError(f"the lease cannot be opened: {error.strerror}", where=str(path)) from error


def holder(path: Path) -> LeaseRecord | None:
    """Who holds the lease; None when nobody does, whatever the file says."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        for _ in range(20):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return None
            except BlockingIOError:
                pass
            try:
                return LeaseRecord.model_validate(json.loads(os.pread(descriptor, 1 << 16, 0)))
            except (ValueError, ValidationError):
                time.sleep(0.02)  # its holder is writing it just now
        return _unknown(path)
    finally:
        os.close(descriptor)


def _unknown(path: Path) -> LeaseRecord:
    return LeaseRecord(
        resource=path.stem, key="unknown", run="unknown", user="unknown", clone="unknown", pid=0, start="unknown"
    )


def leases_folder() -> Path:
    """The host-wide folder of GPU leases: `DFLASH_LEASES`, else one under /var/tmp that every user may write to."""
    folder = Path(os.environ.get("DFLASH_LEASES") or "/var/tmp/dflash-leases")
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):
            folder.chmod(0o1777)
    return folder


def gpu_leases(device: str) -> dict[Path, str]:
    """Lease files of the GPUs that `device` (`cpu`, `cuda`, `cuda:1`) means in this environment, each with its name.

    GPUs are known by UUID where `nvidia-smi` tells it, so that two views of one host (`CUDA_VISIBLE_DEVICES`) agree.
    """
    if not device.startswith("cuda"):
        return {}
    index = int(device.partition(":")[2] or 0)
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    name = visible[index] if index < len(visible) else str(index)
    identity = _gpu_uuids().get(name, name)
    return {leases_folder() / f"gpu-{identity}.json": f"GPU {identity}"}


def cpu_lease(host: str) -> dict[Path, str]:
    """The lease file of a host that trains on its CPU: trainings take turns there, as they do on a GPU."""
    return {leases_folder() / f"cpu-{host}.json": f"the CPU of {host}"}


def _gpu_uuids() -> dict[str, str]:
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    pairs = [line.split(",") for line in done.stdout.splitlines() if line.count(",") == 1]
    return {index.strip(): uuid.strip() for index, uuid in pairs}
