"""Which steps of a training are to be saved, which exist, and how far it has got: the small files of a training's folder.

    schedule.json, schedule.lock   the union of the steps that any run asked for; changed and read under flock
    checkpoint_now.json            somebody asks for a checkpoint of the next step; then which step it became
    status.json                    the last completed step, by whom; rewritten every step
    step_<n>/manifest.json         a checkpoint exists when this does
    step_<n>/state/                training can go on from there while this stands

Training passes a step once. A step that was not scheduled when training passed it is refused for good: nobody waits for
what cannot come. Costs a few small files a look; no torch.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from pydantic import Field

from dflash.base.errors import CorruptError, PermanentError
from dflash.base.files import locked
from dflash.base.records import LeaseRecord, Record, now
from dflash.base.store import checkpoint_directory
from dflash.hosts import lease

STATUS_BYTES = 1024
"""Size of `status.json`, whatever it says."""
_STEP = re.compile(r"step_([1-9][0-9]*)")


class Schedule(Record):
    """`schedule.json`: steps to save, ascending. Training ends at the last of them."""

    steps: list[int]


class Request(Record):
    """`checkpoint_now.json`: who wants a checkpoint of the next step that completes. step: which it became; None so far."""

    run: str
    by: str
    at: str
    step: int | None = None


class Status(Record):
    """`status.json`: the last completed step of an attempt, in at most 1 kB. It counts only while the lease it names is held.

    alert: what a person should know (a checkpoint skipped because the disk is full); empty when nothing.
    ending: the trainer has looked at the schedule for the last time and will let go of the lease. writing: steps that are
    passed and being saved: whether they will exist is not known yet.
    """

    attempt: int
    step: int
    lease_pid: int
    lease_start: str
    alert: str = Field("", max_length=300)
    ending: bool = False
    writing: list[int] = Field(default_factory=list)

    def belongs_to(self, holder: LeaseRecord) -> bool:
        """Whether the holder of the lease is the one this status speaks of."""
        return (self.lease_pid, self.lease_start) == (holder.pid, holder.start)


def lease_path(directory: Path) -> Path:
    """The lease file of a training."""
    return directory / "lease.json"


def schedule_lock(directory: Path) -> Path:
    """Held while the schedule changes, and while the trainer decides whether a step is to be saved."""
    return directory / "schedule.lock"


def read_schedule(directory: Path) -> list[int]:
    """The scheduled steps, ascending; none when nothing was scheduled yet."""
    path = directory / "schedule.json"
    return Schedule.read(path).steps if path.exists() else []


def merge_steps(directory: Path, steps: Iterable[int]) -> list[int]:
    """Adds steps to the schedule (a union, under lock) and returns it. Asking again for what is scheduled changes nothing.

    Raises:
        PermanentError: a new step that training has passed without saving it; names the steps that exist.
    """
    with locked(schedule_lock(directory), why="the schedule of this training"):
        known = set(read_schedule(directory))
        new = set(steps) - known
        refuse_passed(directory, new)
        merged = sorted(known | new)
        if new:
            Schedule(steps=merged).write(directory / "schedule.json")
    return merged


def request_checkpoint(directory: Path, run: str) -> Path:
    """Asks the trainer to save the next step that completes; returns the file in which it will say which that is."""
    path = directory / "checkpoint_now.json"
    with locked(schedule_lock(directory), why="the schedule of this training"):
        Request(run=run, by=lease.user_name(), at=now()).write(path)
    return path


def serve_request(directory: Path, step: int) -> None:
    """Adds `step` to the schedule if somebody asked for the next checkpoint. The caller holds the lock of the schedule."""
    path = directory / "checkpoint_now.json"
    if not path.exists():
        return
    request = Request.read(path)
    if request.step is None:
        Schedule(steps=sorted({*read_schedule(directory), step})).write(directory / "schedule.json")
        request.model_copy(update={"step": step}).write(path)


def refuse_passed(directory: Path, steps: Iterable[int]) -> None:
    """Refuses steps that training has passed and not saved.

    Raises:
        PermanentError: names the steps, how far training is, and the steps that exist.
    """
    # In this order: a trainer makes the checkpoint before its status says that it is no longer being written.
    reached, writing = passed(directory), being_written(directory)
    existing = existing_steps(directory)
    gone = sorted(step for step in set(steps) - set(existing) - writing if step <= reached)
    if gone:
        raise PermanentError(
            f"training has passed step {', '.join(map(str, gone))} without saving it and is at step {reached}; "
            f"saved are {', '.join(map(str, existing)) or 'none'}",
            where=str(directory),
            remedy="Ask for steps that exist or lie ahead, or train under another key.",
        )


def _steps_with(directory: Path, name: str) -> list[int]:
    """Steps whose folder holds a manifest and `name`, ascending."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for entry in directory.iterdir():
            match = _STEP.fullmatch(entry.name)
            if match and (entry / "manifest.json").exists() and (entry / name).exists():
                found.append(int(match[1]))
    return sorted(found)


def existing_steps(directory: Path) -> list[int]:
    """The checkpoints that exist, ascending."""
    return _steps_with(directory, "manifest.json")


def resumable_steps(directory: Path) -> list[int]:
    """The checkpoints whose state has not been pruned, ascending."""
    return _steps_with(directory, "state")


def exists(directory: Path, step: int) -> bool:
    """Whether the checkpoint of a step exists."""
    return (checkpoint_directory(directory, step) / "manifest.json").exists()


def passed(directory: Path) -> int:
    """The last step that training has completed and will not come back to; 0 when it has not begun.

    While a trainer runs this is its last completed step. When none does it is the newest resumable checkpoint: steps
    after that are trained again.
    """
    status = _live_status(directory)
    return max(resumable_steps(directory), default=0) if status is None else status.step


def being_written(directory: Path) -> set[int]:
    """Steps that a living trainer has passed and is saving."""
    status = _live_status(directory)
    return set() if status is None else set(status.writing)


def _live_status(directory: Path) -> Status | None:
    """The status if the trainer it speaks of still holds the lease."""
    status = read_status(directory)
    holder = lease.holder(lease_path(directory))
    return status if holder is not None and status is not None and status.belongs_to(holder) else None


def read_status(directory: Path) -> Status | None:
    """The status, or None when there is none or it was damaged (it is rewritten with the next step)."""
    try:
        return Status.read(directory / "status.json")
    except CorruptError:
        return None


def write_status(directory: Path, status: Status) -> bool:
    """Overwrites `status.json` in place; False when it cannot be written.

    In place, padded to one size and in one write: that needs no space on a full disk, no flush and no rename, and a reader
    sees the old text or the new. It is worth nothing after a power cut, so nothing is synced.
    """
    content = status.model_dump_json().encode().ljust(STATUS_BYTES)
    try:
        descriptor = os.open(directory / "status.json", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.pwrite(descriptor, content, 0)
        finally:
            os.close(descriptor)
    except OSError:
        return False
    return True
