"""Starts, watches and stops the detached trainer of one training. What the rule `checkpoint_step` and `dflash stop` call.

    python -m dflash.train.launch --directory DIR --store STORE --placement FILE --run NAME [--invocation ID] [--foreground]

The launcher leaves the session and process group it was called from, ignores SIGHUP, writes to `trainer.log`, takes the
lease, records the attempt, starts the trainer as its child and waits for it (with `topology.colocate: false` one child a
rank, see `children.py`). All of them hold the lease: it is free only when all are gone. If the launcher dies the trainer
sees that its parent has changed, and ends itself; if the trainer dies the launcher records how. Whoever waits for a
checkpoint holds nothing and may be killed without harm.

Costs: a launcher is a Python process without torch, about 40 MB, asleep; a waiter looks five times a second at two files.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from dflash.base.errors import ConfigError, CorruptError, DflashError, PermanentError, TransientError
from dflash.base.progress import Progress
from dflash.base.records import CheckpointManifest, Failure, LeaseRecord, MetricsLine, Record, StopMarker, now
from dflash.base.store import checkpoint_directory, read_params
from dflash.hosts import lease
from dflash.hosts.host import LocalHost
from dflash.train import schedule
from dflash.train.attempts import EXIT_BY_KIND, Attempt, Placement, attempt_numbers, attempt_path
from dflash.train.begin import REHEARSED
from dflash.train.children import Children, Ended
from dflash.train.roles import Roles, rank_device
from dflash.train.train_params import Topology, TrainParams

POLL = 0.2
"""Seconds between two looks of a waiter."""
LAUNCH_TIMEOUT = 120.0
"""Seconds a launcher may take to hold the lease."""
ALREADY_HELD = 3
"""Exit status of a launcher that found the lease taken: somebody else's launcher is there already."""
DEVICE_HELD = 7
"""Exit status of a launcher whose GPU another training holds."""
SCHEDULER_VARIABLES = ("DFLASH_FOREGROUND", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")
"""By any of these a process knows that it is a scheduler's job; the first is for schedulers that set none of the others."""
QUEUE_POLL = 3.0
"""Seconds between two tries to get a GPU that is held."""
QUEUE_SAY = 60.0
"""Seconds between two lines that say who holds it."""


class Moved(Record):
    """`moved.json`: the training lives on another host, `to` by the name that the controller has for it, or is on its way to or
    from there (`moving.py`). token: names the move. While it stands nothing is trained here."""

    to: str
    token: str
    run: str
    by: str
    at: str


def invocation_id(given: str | None) -> str:
    """Which call of the workflow this belongs to: as given, else `DFLASH_INVOCATION`, else empty (unknown)."""
    return given if given is not None else os.environ.get("DFLASH_INVOCATION", "")


# ---------------------------------------------------------------- what rules call


def ensure_alive(
    directory: Path,
    store: Path,
    placement: Path,
    run: str,
    steps: Iterable[int],
    *,
    invocation: str | None = None,
    progress: Progress | None = None,
) -> None:
    """Makes sure that every step either exists or has a trainer at work on it. Returns as soon as that is so.

    While another training holds the GPU it waits in line, and says behind whom.

    Args:
        directory: the training's folder, with its `params.json`.
        store: the store it lies in.
        placement: JSON file, see `attempts.Placement`.
        run: name of the run that asks.
        steps: scheduled steps of that run; they join the training's schedule.
        invocation: the call of the workflow (default: `DFLASH_INVOCATION`); a permanent failure of the same call is
            repeated at once rather than tried again.
        progress: where it says that it waits.

    Raises:
        PermanentError: the run was stopped; a step was passed unsaved; or this invocation has failed for good already.
        TransientError: the launcher did not get going.
    """
    wanted = set(steps)
    missing = {step for step in wanted if not schedule.exists(directory, step)}
    ahead = {step for step in missing if step > schedule.passed(directory)}
    if ahead:  # what was trained elsewhere, before it was carried here, is not for this place to make
        refuse_stopped(directory)
    if missing:
        refuse_moved(directory)
    schedule.merge_steps(directory, wanted)
    if not ahead or _at_work(directory):
        return
    _refuse_known_failure(directory, invocation_id(invocation))
    _tell_of_a_death(directory, progress or Progress("train"))
    told = -QUEUE_SAY
    while held_by := _start_launcher(directory, store, placement, run, invocation_id(invocation)):
        if time.monotonic() - told >= QUEUE_SAY:
            (progress or Progress("train")).say(f"waiting in line: {held_by}")
            told = time.monotonic()
        time.sleep(QUEUE_POLL)
        refuse_stopped(directory)


def wait_for_step(
    directory: Path, step: int, *, progress: Progress | None = None, poll: float = POLL
) -> CheckpointManifest:
    """Waits for the checkpoint of a step and returns its manifest. Holds nothing; killing it leaves training alone.

    Raises:
        PermanentError: training has passed the step unsaved, was stopped, or has failed for good.
        TransientError: the trainer is gone and may be started again; carries the end of its log.
        CorruptError: the manifest is damaged or of another training.
    """
    progress = progress or Progress("train")
    watch = _Watch(directory, step, progress)
    while True:
        # The order matters: a trainer writes the manifest before its status, and both before it lets go of the lease.
        holder = lease.holder(schedule.lease_path(directory))
        reached = schedule.passed(directory)
        if schedule.exists(directory, step):
            return _read_manifest(directory, step)
        if holder is None:
            _raise_gone(directory, step)
        elif step <= reached:
            _refuse_unsaved(directory, step, holder)
        watch.look()
        time.sleep(poll)


def stop(directory: Path, run: str, *, finish: bool = False, timeout: float = 600.0, poll: float = 0.1) -> StopMarker:
    """Ends the training: leaves `stop.json`, asks the trainer to save and end, and waits until the lease is free.

    Calling it again changes nothing but `finish`. The trainer completes the step it is in and saves a resumable state.

    Raises:
        TransientError: the trainer has not ended within `timeout` seconds; the marker stands and it goes on ending.
    """
    marker = _leave_marker(directory, run, finish)
    deadline = time.monotonic() + timeout
    signalled: set[tuple[int, str]] = set()
    while (holder := lease.holder(schedule.lease_path(directory))) is not None:
        if (holder.pid, holder.start) not in signalled and is_launcher(holder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(holder.pid, signal.SIGTERM)
            signalled.add((holder.pid, holder.start))
        if time.monotonic() >= deadline:
            raise TransientError(
                f"the trainer (pid {holder.pid}) is still finishing its step after {timeout:.0f} s",
                where=str(directory),
                remedy="It ends with that step; look into trainer.log.",
            )
        time.sleep(poll)
    return marker


def stop_training(directory: Path, run: str, *, finish: bool, force: bool) -> None:
    """`dflash stop`: ends a training that is ours, if there is anything to end.

    Raises:
        PermanentError: somebody else's, already complete, or another one of that run is at work. TransientError: see `stop`.
    """
    _require_something_to_stop(directory, run)
    refuse_foreign(directory, force=force)
    stop(directory, run, finish=finish)


def _require_something_to_stop(directory: Path, run: str) -> None:
    """Refuses to mark a training stopped when it is complete, or when the one at work belongs to another config."""
    if lease.holder(schedule.lease_path(directory)) is not None:
        return
    for other in sorted(directory.parent.iterdir()):
        record = lease.holder(schedule.lease_path(other)) if other != directory and other.is_dir() else None
        if record is not None and run in record.run.split("+"):
            raise PermanentError(
                f"no training of {run} is at work under this config ({directory.name}), but {other.name} is",
                remedy="Name the config of that one with --configfile.",
            )
    scheduled = schedule.read_schedule(directory)
    if scheduled and all(schedule.exists(directory, step) for step in scheduled):
        raise PermanentError(f"training of {run} ({directory.name}) is complete; there is nothing to stop")


def refuse_foreign(directory: Path, *, force: bool) -> None:
    """Refuses to touch a training that another user or another checkout has started, unless forced to.

    Raises:
        PermanentError: names the run, its user and its checkout.
    """
    holder = lease.holder(schedule.lease_path(directory))
    if holder is None or force or (holder.user, holder.clone) == (lease.user_name(), lease.clone_name()):
        return
    raise PermanentError(
        f"this training belongs to {holder.user}, run {holder.run}, from {holder.clone} (pid {holder.pid})",
        where=str(directory),
        remedy="Ask them, or end it all the same with `--force`.",
    )


def checkpoint_now(directory: Path, run: str, *, timeout: float = 3600.0, poll: float = 0.1) -> int:
    """Has the trainer save the next step that completes, and waits until it has; returns the step.

    The step joins the training's schedule. Where several ask at once one checkpoint serves them all.

    Raises:
        PermanentError: no trainer is at work, or it ended before it heard.
        TransientError: no step was saved within `timeout` seconds.
    """
    if lease.holder(schedule.lease_path(directory)) is None:
        raise PermanentError("no trainer is at work on it", where=str(directory), remedy="`dflash run` starts one.")
    path = schedule.request_checkpoint(directory, run)
    deadline = time.monotonic() + timeout
    while True:
        holder = lease.holder(schedule.lease_path(directory))
        step = schedule.Request.read(path).step
        if step is not None and schedule.exists(directory, step):
            return step
        if holder is None:
            path.unlink(missing_ok=True)
            existing = ", ".join(map(str, schedule.existing_steps(directory)))
            raise PermanentError(
                f"the trainer ended before it saved; saved are {existing or 'none'}",
                where=str(directory),
                remedy="`dflash run` goes on from the last checkpoint.",
            )
        if step is not None and step <= schedule.passed(directory):
            _refuse_unsaved(directory, step, holder)
        if time.monotonic() >= deadline:
            raise TransientError(
                f"no step was saved within {timeout:.0f} s",
                where=str(directory),
                remedy="The request stands; look into trainer.log.",
            )
        time.sleep(poll)


def clear_stop(directory: Path) -> None:
    """Lets training go on after `stop` (`dflash run --resume`)."""
    (directory / "stop.json").unlink(missing_ok=True)


def read_stop(directory: Path) -> StopMarker | None:
    """The stop marker of a training, or None."""
    path = directory / "stop.json"
    return StopMarker.read(path) if path.exists() else None


def refuse_stopped(directory: Path) -> None:
    """Raises PermanentError when somebody has stopped this training."""
    marker = read_stop(directory)
    if marker is not None:
        status = schedule.read_status(directory)
        raise PermanentError(
            f"run {marker.run} was stopped by {marker.by} at {marker.at}{f', after step {status.step:,}' if status else ''}",
            where=str(directory / "stop.json"),
            remedy=f"`dflash run --resume` continues it, `dflash stop {marker.run} --finish` reports what exists; either with the "
            "--configfile that the run was begun with.",
        )


def moved_path(directory: Path) -> Path:
    """Where it stands that a training lives on another host."""
    return directory / "moved.json"


def read_moved(directory: Path) -> Moved | None:
    """Where a training lives when not here; None when nothing says so."""
    path = moved_path(directory)
    return Moved.read(path) if path.exists() else None


def refuse_moved(directory: Path) -> None:
    """Raises PermanentError when this training was carried over to another host: going on here would make two of it."""
    moved = read_moved(directory)
    if moved is not None:
        raise PermanentError(
            f"training {directory.name} was carried over from here to `{moved.to}` by {moved.by}, run {moved.run}, at {moved.at}",
            where=str(moved_path(directory)),
            remedy=f"Set roles.gpu to `{moved.to}`. A run that has begun there carries it back when the role is set to this host.",
        )


# ---------------------------------------------------------------- their parts


def on_scheduler() -> bool:
    """Whether this is a job of a batch scheduler, which kills what a job leaves behind: then nothing can be detached."""
    return any(os.environ.get(name) for name in SCHEDULER_VARIABLES)


def train_segment(directory: Path, store: Path, placement: Path, run: str, step: int, *, progress: Progress) -> None:
    """Trains up to one step in the foreground, as a job of a scheduler does, and returns when the trainer has ended.

    Raises:
        PermanentError, CorruptError: as `ensure_alive`. TransientError: another training holds the GPU.
    """
    if schedule.exists(directory, step):
        return
    refuse_stopped(directory)
    refuse_moved(directory)
    schedule.merge_steps(directory, [step])
    _refuse_known_failure(directory, invocation_id(None))
    watch = _Watch(directory, step, progress)
    launcher = start_foreground(directory, store, placement, run)
    while launcher.poll() is None:
        watch.look()
        time.sleep(POLL)
    if launcher.returncode == DEVICE_HELD:
        raise TransientError(
            log_tail(directory, 1), where=str(directory), remedy="The scheduler gave one GPU to two jobs."
        )


def start_foreground(directory: Path, store: Path, placement: Path, run: str) -> subprocess.Popen[bytes]:
    """A launcher that stays a child of this process and ends with it; it writes to `trainer.log`."""
    argv = _launcher_command(directory, store, placement, run, invocation_id(None))
    with (directory / "trainer.log").open("ab") as log:
        return subprocess.Popen(
            [*argv, "--foreground"], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=own_environment()
        )


def health(directory: Path) -> dict[str, Any]:
    """What a person should be told of a training: `alert` (a checkpoint that found no space, say) and `stalled`, the share of
    its last steps that the slowest role spent waiting."""
    status = schedule.read_status(directory)
    holder = lease.holder(schedule.lease_path(directory))
    alive = holder is not None and status is not None and status.belongs_to(holder)
    line = last_metrics(directory / "metrics.jsonl") if alive else None
    stalled = max(line.stalled_seconds.values(), default=0.0) / max(line.seconds, 1e-9) if line else 0.0
    return {"alert": status.alert if alive and status else "", "stalled": min(stalled, 1.0)}


def _at_work(directory: Path) -> bool:
    """Whether a trainer holds the lease that will read the schedule again. Waits for one that is just ending."""
    deadline = time.monotonic() + LAUNCH_TIMEOUT
    while (holder := lease.holder(schedule.lease_path(directory))) is not None:
        status = schedule.read_status(directory)
        if status is None or not status.belongs_to(holder) or not status.ending:
            return True
        if time.monotonic() >= deadline:
            raise TransientError(f"a trainer (pid {holder.pid}) is ending and does not end", where=str(directory))
        time.sleep(POLL / 4)
    return False


def _leave_marker(directory: Path, run: str, finish: bool) -> StopMarker:
    try:
        marker = read_stop(directory)
    except CorruptError:
        marker = None
    if marker is None or (finish and not marker.finish):
        marker = StopMarker(run=run, by=lease.user_name(), at=now(), finish=finish)
        marker.write(directory / "stop.json")
    return marker


def is_launcher(holder: LeaseRecord) -> bool:
    """Whether the pid is a launcher still, or the lead that torchrun started: a trainer that outlives its launcher for a
    moment holds the lease under a pid that may already be somebody else's."""
    try:
        command = Path(f"/proc/{holder.pid}/cmdline").read_bytes()
        return b"dflash.train.launch" in command or b"dflash.train.ranks" in command
    except OSError:
        return False


def _refuse_known_failure(directory: Path, invocation: str) -> None:
    path = directory / "failure.json"
    if not path.exists():
        return
    failure = Failure.read(path)
    if invocation and failure.invocation == invocation:
        raise _failed(failure, path)
    path.unlink(missing_ok=True)


def _failed(failure: Failure, path: Path) -> DflashError:
    kinds = {"config": ConfigError, "corrupt": CorruptError}
    return kinds.get(failure.kind, PermanentError)(f"training failed for good: {failure.message}", where=str(path))


def _start_launcher(directory: Path, store: Path, placement: Path, run: str, invocation: str) -> str:
    """Starts a launcher; returns who holds its GPU, or nothing when a trainer is at work."""
    argv = _launcher_command(directory, store, placement, run, invocation)
    done = LocalHost().run(argv, timeout=LAUNCH_TIMEOUT, environment=own_environment())
    if done.status == DEVICE_HELD:
        return done.stderr.strip() or "somebody else's training"
    if done.status not in (0, ALREADY_HELD):
        message = done.stderr.strip() or f"exit status {done.status}"
        kind = (
            PermanentError if done.status in (2, EXIT_BY_KIND["permanent"], EXIT_BY_KIND["corrupt"]) else TransientError
        )
        raise kind(f"the launcher failed: {message}", where=str(directory))
    return ""


def _launcher_command(directory: Path, store: Path, placement: Path, run: str, invocation: str) -> list[str]:
    argv = [sys.executable, "-m", "dflash.train.launch", "--directory", str(directory.absolute())]
    argv += ["--store", str(store.absolute()), "--placement", str(placement.absolute())]
    return [*argv, "--run", run, "--invocation", invocation]


def own_environment() -> dict[str, str]:
    """This environment, with this checkout first on the path: the launcher must run the code that called it."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *(path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != root)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _read_manifest(directory: Path, step: int) -> CheckpointManifest:
    path = checkpoint_directory(directory, step) / "manifest.json"
    manifest = CheckpointManifest.read(path)
    if (manifest.key, manifest.step) != (directory.name, step):
        raise CorruptError(f"the manifest is of step {manifest.step} of training {manifest.key}", where=str(path))
    return manifest


def _raise_gone(directory: Path, step: int) -> None:
    """Says why nobody is at work on the step."""
    if schedule.exists(directory, step):
        return
    refuse_stopped(directory)
    path = directory / "failure.json"
    if path.exists():
        raise _failed(Failure.read(path), path)
    schedule.refuse_passed(directory, [step])
    raise TransientError(
        f"the trainer is gone and step {step} does not exist{_last_end(directory)}; its log ends:\n{log_tail(directory)}",
        where=str(directory / "trainer.log"),
        remedy="The next attempt goes on from the last checkpoint.",
    )


def _refuse_unsaved(directory: Path, step: int, holder: LeaseRecord) -> None:
    status = schedule.read_status(directory)
    if status is None or not status.belongs_to(holder) or step in status.writing or schedule.exists(directory, step):
        return
    if status.alert:
        raise PermanentError(f"step {step} was not saved: {status.alert}", where=str(directory))
    schedule.refuse_passed(directory, [step])


def _tell_of_a_death(directory: Path, progress: Progress) -> None:
    """Says how the last attempt died: nobody may have been waiting for it when it did."""
    numbers = attempt_numbers(directory)
    if numbers and Attempt.read(attempt_path(directory, numbers[-1])).exit != 0:
        progress.say(f"the trainer died{_last_end(directory)}; starting it again; its log ends:\n{log_tail(directory)}")


def _last_end(directory: Path) -> str:
    numbers = attempt_numbers(directory)
    if not numbers:
        return ""
    attempt = Attempt.read(attempt_path(directory, numbers[-1]))
    if attempt.cause:
        return f" (attempt {attempt.attempt}: {attempt.cause})"
    if attempt.signal:
        return f" (attempt {attempt.attempt} was killed by {attempt.signal})"
    if attempt.end is None:
        return f" (the launcher of attempt {attempt.attempt} was killed)"
    return f" (attempt {attempt.attempt} ended with exit status {attempt.exit})"


def log_tail(directory: Path, lines: int = 20) -> str:
    """The last lines of `trainer.log`."""
    try:
        with (directory / "trainer.log").open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - 16384))
            text = stream.read().decode(errors="replace")
    except OSError:
        return "(no log)"
    return "\n".join(text.splitlines()[-lines:])


class _Watch:
    """Turns new lines of `metrics.jsonl` into one line of progress every few seconds."""

    def __init__(self, directory: Path, step: int, progress: Progress) -> None:
        self.path = directory / "metrics.jsonl"
        self.step = step
        self.progress = progress
        self._next = time.monotonic() + progress.every

    def look(self) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self.progress.every
        line = last_metrics(self.path)
        if line is None:
            self.progress.say(f"waiting for step {self.step}; the trainer is starting")
            return
        left = max(0, self.step - line.step) * line.seconds
        rate = line.tokens / max(line.seconds, 1e-9)
        self.progress.say(
            f"step {line.step:,}/{self.step:,}, loss {line.loss:.4f}, {rate:,.0f} tok/s, about {left:.0f} s left"
            + "".join(f"; the {side}s wait {share:.0%} of the time" for side, share in line.starving.items())
        )


def last_metrics(path: Path) -> MetricsLine | None:
    """The last whole line of `metrics.jsonl`, or None. Reads at most the last 256 kB."""
    try:
        with path.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - (256 << 10)))
            lines = stream.read().split(b"\n")
    except OSError:
        return None
    for line in reversed(lines):
        with contextlib.suppress(ValueError):
            return MetricsLine.model_validate(json.loads(line))
    return None


# ---------------------------------------------------------------- the launcher


class _Launcher:
    """The process that holds the lease and the trainer's hand."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.directory: Path = arguments.directory.resolve()
        self.store: Path = arguments.store.resolve()
        self.run: str = arguments.run
        self.invocation: str = invocation_id(arguments.invocation)
        self.params = read_params(self.directory)
        self.placement = Placement.read(arguments.placement)
        self.topology = self._read_topology()
        self.child: subprocess.Popen[bytes] | Children | None = None
        self.ending = False

    def _read_topology(self) -> Topology:
        try:
            return Topology.model_validate(self.placement.values.get("topology", {}))
        except ValueError as error:
            raise ConfigError(f"not a topology: {error}", where="train.topology") from error

    def take_lease(self) -> lease.Lease:
        """Takes the lease of the training and those of its GPUs, and refuses a training that was stopped meanwhile."""
        paths = {schedule.lease_path(self.directory): f"training {self.params.key}"}
        for rank in range(1 if self.topology.colocate else self.topology.targets + self.topology.drafters):
            paths |= lease.gpu_leases(rank_device(self.placement.device, rank))
        if self.placement.device == "cpu" and self.placement.host != "local":
            paths |= lease.cpu_lease(self.placement.host)
        held = lease.acquire(paths, lease.new_record(f"training {self.params.key}", self.params.key, self.run))
        try:
            refuse_stopped(self.directory)
            refuse_moved(self.directory)
        except DflashError:
            held.release()  # before anybody is told: who comes next must find it free
            raise
        (self.directory / "failure.json").unlink(missing_ok=True)
        return held

    def attend(self, held: lease.Lease) -> int:
        """Runs one trainer to its end; returns its exit status (128 + signal when it was killed)."""
        number = max(attempt_numbers(self.directory), default=0) + 1
        role = "trainer" if self.topology.colocate else "ranks"
        argv = [sys.executable, "-m", "dflash.train.begin", f"{REHEARSED}{role}" if self.placement.rehearsal else role]
        argv += ["--directory", str(self.directory)]
        argv += ["--store", str(self.store), "--attempt", str(number), "--parent", str(os.getpid())]
        attempt = Attempt(
            attempt=number,
            run=self.run,
            invocation=self.invocation,
            argv=argv,
            launcher_pid=os.getpid(),
            start=now(),
            code=self.params.code.digest,
            placement=self.placement,
        )
        path = attempt_path(self.directory, number)
        attempt.write(path)
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, self._forward)
        self.child = self._start(argv, held, attempt)
        attempt.write(path)
        if self.ending:  # asked before there was a child to tell
            self.child.terminate()
        ended = self.child.wait()
        if isinstance(ended, Ended):
            attempt.cause = self._cause(ended, number)
            ended = ended.status
        status = ended
        attempt.end = now()
        attempt.exit = status if status >= 0 else None
        attempt.signal = signal.Signals(-status).name if status < 0 else None
        attempt.write(path)
        return status if status >= 0 else 128 - status

    def _start(self, argv: list[str], held: lease.Lease, attempt: Attempt) -> subprocess.Popen[bytes] | Children:
        environment = self._child_environment()
        if self.topology.colocate:
            child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, pass_fds=held.descriptors, env=environment)
            attempt.trainer_pid = child.pid
            return child
        roles = Roles(self.topology.targets, self.topology.drafters)
        timeout = float(self.placement.values.get("rank_timeout", TrainParams.model_fields["rank_timeout"].default))
        children = Children(argv, roles, environment, held.descriptors, self.placement.host, timeout)
        attempt.trainer_pid, attempt.rank_pids = children.pids[roles.lead], children.pids
        return children

    def _cause(self, ended: Ended, number: int) -> str:
        """Which rank ended the attempt, with the step it was in; also the last line of the log."""
        if not ended.cause:
            return ""
        status = schedule.read_status(self.directory)
        begun = status is not None and status.attempt == number
        cause = f"step {status.step + 1 if begun and status else 'not begun'}: {ended.cause}"
        print(f"{now()} the job ends in {cause}", file=sys.stderr, flush=True)
        return cause

    def end_with(self, parent: int) -> None:
        """Asks the trainer to save and end when the caller is gone (`--foreground`)."""

        def watch() -> None:
            while os.getppid() == parent:
                time.sleep(0.25)
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=watch, name="caller-watch", daemon=True).start()

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self.ending = True
        if self.child is not None:
            self.child.terminate()

    def _child_environment(self) -> dict[str, str]:
        threads = str(self.placement.threads)
        # Deterministic matrix products on CUDA need the workspace setting before the first of them.
        fixed = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1"}
        return {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "CUDA_DEVICE_ORDER": "PCI_BUS_ID", **own_environment(), **fixed}


def _detach(log: Path) -> int:
    """Leaves session, process group and parent; returns, in the process that lives on, where to report the start.

    The process that was called stays behind until that report, prints it and exits with its status.
    """
    reader, writer = os.pipe()
    if os.fork() > 0:
        os.close(writer)
        with os.fdopen(reader) as stream:
            report = stream.read()
        outcome: dict[str, Any] = (
            json.loads(report) if report else {"status": 1, "message": "it died before it held the lease"}
        )
        if outcome["message"]:
            print(outcome["message"], file=sys.stderr, flush=True)
        os._exit(outcome["status"])
    os.close(reader)
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    _redirect(log)
    return writer


def _redirect(log: Path) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for source, target in ((null, 0), (out, 1), (out, 2)):
        os.dup2(source, target)
    for descriptor in (null, out):
        if descriptor > 2:
            os.close(descriptor)


def _report(writer: int | None, status: int, message: str) -> None:
    if writer is None:
        if message:
            print(message, file=sys.stderr, flush=True)
        return
    with contextlib.suppress(OSError):
        os.write(writer, json.dumps({"status": status, "message": message}).encode())
    os.close(writer)


def main(argv: Sequence[str] | None = None) -> int:
    """The launcher's command line; see the module's docstring.

    Exit status: 0 the lease is held and the trainer starts (with `--foreground`: the trainer has ended well), 3 somebody
    holds the lease already, 2 config, 4 permanent, 5 corrupt, 6 transient, 7 another training holds the GPU.
    """
    parser = argparse.ArgumentParser(
        prog="python -m dflash.train.launch", description="Hold a training and its trainer."
    )
    parser.add_argument("--directory", type=Path, required=True, help="the training's folder")
    parser.add_argument("--store", type=Path, required=True, help="the store it lies in")
    parser.add_argument("--placement", type=Path, required=True, help="where and how it runs (JSON)")
    parser.add_argument("--run", required=True, help="name of the run that asks")
    parser.add_argument("--invocation", default=None, help="call of the workflow that asks")
    parser.add_argument(
        "--foreground", action="store_true", help="stay with the caller (schedulers): one attempt a job"
    )
    arguments = parser.parse_args(argv)
    writer = None
    try:
        launcher = _Launcher(arguments)
        if not arguments.foreground:
            writer = _detach(launcher.directory / "trainer.log")
        held = launcher.take_lease()
    except DflashError as error:
        status = EXIT_BY_KIND.get(error.kind, 1)
        if isinstance(error, lease.LeaseHeld):
            # By the lease, not by the key: another clone may train the same on this GPU.
            own = str(schedule.lease_path(arguments.directory.resolve()))
            status = ALREADY_HELD if error.where == own else DEVICE_HELD
        _report(writer, status, error.message())
        return status
    _report(writer, 0, "")
    if arguments.foreground:
        launcher.end_with(os.getppid())
    return launcher.attend(held)


if __name__ == "__main__":
    sys.exit(main())
