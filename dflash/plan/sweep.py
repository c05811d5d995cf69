"""What lies in a store, or in the workdir of a host, and is not needed; and how it goes without anybody losing what they use.

Runs where the files are: on the controller, or on a host that was told what is needed. Both times the same care:

- what a process holds a lock of stays: a training (its lease), a job (`.lock`), a shipment that arrives or leaves (its folder);
- what has changed since it was listed stays: somebody has begun to use it;
- what goes is renamed first, under those locks, so that no half of it is ever taken for the whole.

Listing costs a stat a file and one small read a result: 20,000 files take 0.5 s.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dflash.base.errors import CorruptError, PermanentError
from dflash.base.records import ParamsFile, Receipt
from dflash.base.store import stage_directory
from dflash.hosts.lease import holder
from dflash.stages import BY_NAME

Name = tuple[str, str]
"""Stage and key of a result."""
Coming = tuple[str, str, int | None]
"""Stage, key and step of a shipment that a planned run still needs; stage `target` for a target; no step for a training itself."""
GONE = ".gone-"
"""How the name of a folder begins that is being deleted."""
GRACE = 3600.0
"""Seconds after which code that is still arriving, or a rehearsal, counts as left behind."""
ARRIVING = ".arriving"
"""Of a training that is carried over, what lies in its folder on the new host until it is taken in."""
REHEARSAL = ".rehearsal-"
"""What the name of a rehearsal's throwaway store begins with; it lies in the store itself."""
STAGES = tuple(name for name in BY_NAME if name != "report")


@dataclass(frozen=True)
class Garbage:
    """Something that nothing needs. size: bytes of its files. mark: changes when any file of it does."""

    path: Path
    size: int
    files: int
    why: str
    mark: str = ""


@dataclass
class Needs:
    """What must stay. targets: first 12 digits of the digests of targets. files: digests of prompt files and the like."""

    results: set[Name] = field(default_factory=set)
    coming: set[Coming] = field(default_factory=set)
    targets: set[str] = field(default_factory=set)
    files: set[str] = field(default_factory=set)

    def as_json(self) -> dict[str, Any]:
        """For the other side."""
        return {
            name: sorted(map(list, value), key=str) if name in ("results", "coming") else sorted(value)
            for name, value in asdict(self).items()
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Needs:
        """What `as_json` wrote."""
        return cls(
            {(stage, key) for stage, key in document["results"]},
            {(stage, key, step) for stage, key, step in document["coming"]},
            set(document["targets"]),
            set(document["files"]),
        )


# ---------------------------------------------------------------- what is needed


def live_trainings(store: Path) -> set[str]:
    """Keys of the trainings of a store whose lease somebody holds."""
    return {path.parent.name for path in store.glob("train/*/lease.json") if holder(path) is not None}


def at_work(store: Path) -> set[Name]:
    """Results of a store that somebody makes just now, whoever asked for them: a training's lease or a job's lock is held."""
    jobs = {
        (stage, folder.name)
        for stage in STAGES
        for folder in _folders(store / stage)
        if any(_locked(path) for path in folder.glob(".lock*"))
    }
    return jobs | {("train", key) for key in live_trainings(store)}


def closure(store: Path, roots: Iterable[Name]) -> tuple[set[Name], set[str]]:
    """The roots and everything they were made from, and the targets of all of these.

    Raises:
        CorruptError: a needed `params.json` cannot be read, so what it needs cannot be told.
    """
    needed: set[Name] = set()
    targets: set[str] = set()
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name in needed:
            continue
        needed.add(name)
        path = stage_directory(store, *name) / "params.json"
        if not path.exists():
            continue
        params = ParamsFile.read(path)
        waiting += [(label.partition("/")[0], key) for label, key in params.upstream.items()]
        parent = params.params.get("continue_from")
        if isinstance(parent, dict) and "key" in parent:
            waiting.append(("train", str(parent["key"])))
        target = params.params.get("target")
        if isinstance(target, dict) and target.get("digest"):
            targets.add(str(target["digest"])[:12])
    return needed, targets


# ---------------------------------------------------------------- what is not


def in_store(store: Path, needs: Needs) -> list[Garbage]:
    """Results, copies of results, environments and leftovers of a store that `needs` does not name."""
    found = []
    for stage in STAGES:
        for base, what in ((store / stage, "no run needs it"), (store / "shipped" / stage, "a copy that no run needs")):
            for folder in _folders(base):
                if (stage, folder.name) not in needs.results:
                    found.append(measured(folder, what))
                else:
                    found += _leftovers(folder, stage, needs)
    found += [measured(path, "left by a rehearsal that was killed") for path in _old_rehearsals(store)]
    return found + _stale_environments(store, needs.results)


def _old_rehearsals(store: Path) -> list[Path]:
    """Throwaway stores that are old and whose training nobody holds. What is at work in one renews its time."""
    throwaway = [path for path in _folders(store) if path.name.removeprefix(GONE).startswith(REHEARSAL)]
    return [path for path in throwaway if time.time() - path.stat().st_mtime >= GRACE and not live_trainings(path)]


def in_workdir(root: Path, needs: Needs, own_code: str) -> list[Garbage]:
    """The same of a host's whole workdir: also code, targets and files that were sent there.

    Args:
        own_code: name of the code that must stay, because it is the one that asks.
    """
    found = in_store(root / "results/store", needs)
    used = used_code(root)
    for folder in _folders(root / "code"):
        arriving = folder.name.startswith(".incoming.") and time.time() - folder.stat().st_mtime < GRACE
        if folder.name != own_code and used is not None and folder.name not in used and not arriving:
            found.append(measured(folder, "code of another version, which no process runs"))
    for folder in _folders(root / "targets"):
        partial = _partial_of(folder)
        if partial is not None:
            continue
        if folder.name not in needs.targets:
            found.append(measured(folder, "a target that no run needs"))
    arriving_targets = {key for stage, key, _ in needs.coming if stage == "target"}
    found += _partials(_folders(root / "targets"), arriving_targets)
    for path in sorted((root / "files").glob("*")):
        if path.is_file() and path.name not in needs.files:
            found.append(measured(path, "a file that no planned run reads"))
    return found


def measured(path: Path, why: str) -> Garbage:
    """Garbage with its size and its mark; links count as themselves."""
    state = hashlib.sha256()
    size = files = 0
    for item in [path] if not path.is_dir() else sorted(path.rglob("*")):
        with contextlib.suppress(FileNotFoundError):
            stat = item.lstat()
            folder = item.is_dir() and not item.is_symlink()
            size += 0 if folder else stat.st_size
            files += 0 if folder else 1
            facts = (stat.st_ino,) if folder else (stat.st_ino, stat.st_size, stat.st_mtime_ns)
            state.update(f"{item.relative_to(path.parent)}\0{facts}\n".encode(errors="surrogateescape"))
    return Garbage(path, size, files, why, state.hexdigest()[:16])


def _folders(base: Path) -> list[Path]:
    try:
        with os.scandir(base) as entries:
            return [base / name for name in sorted(item.name for item in entries if item.is_dir(follow_symlinks=False))]
    except OSError:
        return []


def _leftovers(folder: Path, stage: str, needs: Needs) -> list[Garbage]:
    """What jobs and shipments that ended early have left in the folder of a result that is needed."""
    inside = _folders(folder)
    found = [
        measured(path, "left by a job that has ended")
        for path in inside
        if path.name.startswith(".work") and not _busy(path)
    ]
    if stage == "train" and (stage, folder.name, None) not in needs.coming:
        found += [
            measured(path, "left by a move that was taken back")
            for path in inside
            if ARRIVING in (path.name, _partial_of(path)) and not _locked(path)
        ]
    for place in (folder, *(path for path in inside if path.name.startswith("step_"))):
        number = place.name.removeprefix("step_") if place is not folder else ""
        coming = (stage, folder.name, int(number) if number.isdigit() else None) in needs.coming
        hidden = [path for path in (inside if place is folder else _folders(place)) if path.name.startswith(".")]
        found += _partials(hidden, {_partial_of(path) for path in hidden} if coming else set())
        found += [
            measured(path, "left by a shipment that was cut off")
            for path in hidden
            if path.name.endswith(".pin") and not _locked(path)
        ]
    return found


def _partial_of(folder: Path) -> str | None:
    """Of `.<name>.<root>.partial` the name; None for another folder."""
    parts = folder.name.split(".")
    return ".".join(parts[1:-2]) if len(parts) > 3 and not parts[0] and parts[-1] == "partial" else None


def _partials(folders: Iterable[Path], coming: Collection[str | None]) -> list[Garbage]:
    """Shipments that began to arrive, that nobody sends now and that no planned run will go on with.

    One that is whole but for its receipt is what the next shipment knows its own content by: it stays.

    Args:
        coming: names of what a planned run still needs.
    """
    found = []
    for folder in folders:
        name = _partial_of(folder)
        if name is None or name in coming or _locked(folder):
            continue
        if name.startswith("."):
            continue  # no result and no copy of one: something on its way between two places, which goes on by itself
        base = folder.parent
        receipt = base / f".{name}.shipment.json"
        if (base / name).exists() and not receipt.exists() and not (folder / "data").exists():
            continue
        found.append(measured(folder, "a shipment that was cut off and that no planned run goes on with"))
    return found


def _stale_environments(store: Path, needed: Collection[Name]) -> list[Garbage]:
    """Environments that no receipt of a needed result names; none while a training is at work, whose receipts are to come."""
    if live_trainings(store):
        return []
    folders = [base / stage / key for stage, key in needed for base in (store, store / "shipped")]
    kept = {receipt.environment for folder in folders for receipt in _receipts(folder)}
    return [
        measured(path, "no receipt names it")
        for path in sorted((store / "environments").glob("*.json"))
        if path.stem not in kept
    ]


def _receipts(folder: Path) -> Iterable[Receipt]:
    for path in (*folder.glob("receipt.json"), *folder.glob("receipts/step_*.json"), *folder.glob("step_*.json")):
        try:
            yield Receipt.read(path)
        except CorruptError:
            continue  # `dflash plan --verify` names it; its environment may go, it is rebuilt with the result


def used_code(root: Path) -> set[str] | None:
    """Names of the code folders of a workdir that a process runs from; None when a training there cannot be looked into."""
    names = {folder.name: f"/code/{folder.name}".encode() for folder in _folders(root / "code")}
    found: set[str] = set()
    hidden = False
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
        except PermissionError:
            hidden = True
            continue
        except OSError:
            continue
        found |= {name for name, sign in names.items() if sign in words}
    return None if hidden and live_trainings(root / "results/store") else found


# ---------------------------------------------------------------- letting it go


def remove(items: Iterable[Garbage]) -> tuple[list[Garbage], list[tuple[Path, str]]]:
    """Deletes what was listed, but for what somebody has begun to use since.

    Returns:
        What is gone; what stays, and why.

    Raises:
        PermanentError: a file cannot be deleted; names it.
    """
    gone, kept = [], []
    for item in items:
        why = _remove_one(item)
        if why:
            kept.append((item.path, why))
        else:
            gone.append(item)
    return gone, kept


def _remove_one(item: Garbage) -> str:
    """Deletes one thing; says why not."""
    path = item.path
    if not path.exists():
        return "" if not path.is_symlink() else "it is a link"
    try:
        with contextlib.ExitStack() as held:
            for lock in [path, *_locks(path)]:
                if not held.enter_context(_held(lock)):
                    return "somebody has begun to use it"
            if item.mark and measured(path, "").mark != item.mark:
                return "it has changed since it was listed"
            if not path.is_dir():
                path.unlink(missing_ok=True)
                return ""
            aside = path.with_name(path.name if path.name.startswith(GONE) else f"{GONE}{path.name}")
            if aside != path and aside.exists():
                shutil.rmtree(aside)  # an earlier deletion was cut off
            path.rename(aside)
            if _is_code(path) and _runs(path):
                aside.rename(path)
                return "somebody has begun to use it"
            _forget_receipt(path)
            shutil.rmtree(aside)
    except OSError as error:
        raise PermanentError(f"cannot be deleted: {error.strerror}", where=str(path)) from error
    return ""


def _is_code(path: Path) -> bool:
    return path.parent.name == "code"


def _runs(code: Path) -> bool:
    """Whether a process runs from code that was just renamed: it has its name in its environment."""
    sign = f"/code/{code.name}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if sign in (process / "environ").read_bytes() + (process / "cmdline").read_bytes():
                return True
    return False


def _forget_receipt(path: Path) -> None:
    """The receipt of a shipment lies beside what it brought."""
    path.with_name(f".{path.name}.shipment.json").unlink(missing_ok=True)


def _locks(path: Path) -> Iterator[Path]:
    """Files and folders that whoever uses something holds a lock of."""
    if not path.is_dir():
        return
    if path.name.startswith(".work"):
        yield from _job_lock(path)
    for name in ("lease.json", "schedule.lock"):
        if (path / name).exists():
            yield path / name
    if ARRIVING in (path.name, _partial_of(path)) and (path.parent / "lease.json").exists():
        yield path.parent / "lease.json"  # who takes it in holds this
    if path.name.startswith(REHEARSAL):
        yield from sorted(item / "lease.json" for item in _folders(path / "train") if (item / "lease.json").exists())
    yield from sorted(item for item in path.glob(".lock*") if item.is_file())
    for pattern in ("**/.*.partial", "**/.*.pin"):
        yield from sorted(item for item in path.glob(pattern) if item.is_dir())


def _job_lock(work: Path) -> list[Path]:
    lock = work.with_name(f".lock{work.name.removeprefix('.work')}")
    return [lock] if lock.exists() else []


def _busy(work: Path) -> bool:
    return any(_locked(lock) for lock in _job_lock(work))


def _locked(path: Path) -> bool:
    with _held(path, patience=0.0) as free:
        return not free


@contextlib.contextmanager
def _held(path: Path, patience: float = 0.3) -> Iterator[bool]:
    """Holds the lock of a file or folder, if nobody else does. Whoever only looks holds it for a moment: that is waited for."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        yield True
        return
    deadline = time.monotonic() + patience
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    yield False
                    return
                time.sleep(0.02)
        yield True
    finally:
        os.close(descriptor)
