"""Launcher, trainer and waiters as real processes, killed in every way that happened to somebody."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from train_store import Training, again, make_training, python, saved, wait_until

from dflash.base.errors import PermanentError, TransientError
from dflash.base.records import last_attempts
from dflash.train import attempts, launch, schedule

FAR = 3000
"""A scheduled step that no test reaches: the trainer works until it is stopped."""

WAITER = """
import sys
from pathlib import Path
from dflash.train.launch import wait_for_step
wait_for_step(Path(sys.argv[1]), int(sys.argv[2]))
"""


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    made = make_training(tmp_path, schedule_steps=FAR, placed={"keep_states": 3})
    yield made
    with contextlib.suppress(TransientError):
        launch.stop(made.directory, "cleanup", timeout=60)


def reached(training: Training, step: int, attempt: int = 1) -> bool:
    line = launch.last_metrics(training.directory / "metrics.jsonl")
    return line is not None and line.attempt == attempt and line.step >= step


def record(training: Training, number: int) -> attempts.Attempt:
    return attempts.Attempt.read(attempts.attempt_path(training.directory, number))


def alive(pid: int | None) -> bool:
    assert pid is not None
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def kill(pid: int | None) -> None:
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def launch_again(training: Training) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "dflash.train.launch", "--directory", str(training.directory)]
    argv += ["--store", str(training.store), "--placement", str(training.placement), "--run", "rival"]
    return subprocess.run(argv, capture_output=True, text=True, check=False, env=launch.own_environment(), timeout=60)


def test_a_killed_trainer_is_recorded_and_resumed_and_no_batch_differs(
    training: Training, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training.ensure_alive(5, 10, FAR)
    wait_until(lambda: reached(training, 12) and saved(training, 10), 120)
    kill(record(training, 1).trainer_pid)
    with pytest.raises(TransientError, match=r"attempt 1 was killed by SIGKILL"):
        training.wait(FAR)
    ended = record(training, 1)
    assert (ended.signal, ended.exit) == ("SIGKILL", None)
    assert ended.end is not None

    assert "died" not in capsys.readouterr().err
    training.ensure_alive(5, 10, 20, FAR)
    assert "the trainer died (attempt 1 was killed by SIGKILL); starting it again" in capsys.readouterr().err
    training.wait(20)
    undisturbed = again(training, tmp_path / "undisturbed")
    undisturbed.run(20)
    lines = last_attempts(training.directory / "metrics.jsonl")[:20]
    assert [line.attempt for line in lines] == [1] * 10 + [2] * 10
    assert [line.batch_ids for line in lines] == undisturbed.batch_ids()
    files = [t.directory / "step_20" / "drafter" / "model.safetensors" for t in (training, undisturbed)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_killed_launcher_takes_its_trainer_with_it_and_frees_the_lease(training: Training) -> None:
    training.ensure_alive(FAR)
    wait_until(lambda: reached(training, 1), 120)
    attempt = record(training, 1)
    assert training.holder().pid == attempt.launcher_pid
    path = schedule.lease_path(training.directory).resolve()
    open_there = [file.resolve() for file in Path(f"/proc/{attempt.trainer_pid}/fd").iterdir()]
    assert path in open_there, "the trainer holds it too, as long as it lives"
    kill(attempt.launcher_pid)
    wait_until(lambda: training.holder() is None)
    wait_until(lambda: not alive(attempt.trainer_pid))
    with pytest.raises(TransientError, match="the launcher of attempt 1 was killed"):
        training.wait(FAR)


def test_waiters_come_and_go_launchers_are_refused_and_steps_are_added(training: Training) -> None:
    training.ensure_alive(2, FAR)
    assert training.wait(2).step == 2
    attempt = record(training, 1)
    assert os.getsid(attempt.launcher_pid) != os.getsid(0)
    for number in (signal.SIGKILL, signal.SIGINT, signal.SIGTERM):
        waiter = python(WAITER, str(training.directory), str(FAR), stderr=subprocess.DEVNULL)
        time.sleep(0.5)
        waiter.send_signal(number)
        assert waiter.wait() != 0
    os.kill(attempt.launcher_pid, signal.SIGHUP)
    assert attempt.trainer_pid is not None
    os.kill(attempt.trainer_pid, signal.SIGHUP)

    refused = launch_again(training)
    assert refused.returncode == launch.ALREADY_HELD
    assert "run demo" in refused.stderr
    assert f"pid {attempt.launcher_pid}" in refused.stderr
    training.ensure_alive(2, FAR, run="second")
    assert attempts.attempt_numbers(training.directory) == [1]

    with pytest.raises(PermanentError, match="saved are 2"):
        training.ensure_alive(3)
    ahead = schedule.passed(training.directory) + 40
    training.ensure_alive(ahead, run="second")
    assert training.wait(ahead).step == ahead
    assert (alive(attempt.launcher_pid), alive(attempt.trainer_pid)) == (True, True)


def test_stop_saves_the_step_and_is_obeyed_until_somebody_resumes(training: Training) -> None:
    training.ensure_alive(FAR)
    wait_until(lambda: reached(training, 3), 120)
    launch.stop(training.directory, "demo", timeout=60)
    assert training.holder() is None
    ended = record(training, 1)
    assert (ended.exit, ended.signal) == (0, None)
    (saved,) = schedule.resumable_steps(training.directory)
    assert [line.step for line in last_attempts(training.directory / "metrics.jsonl")] == list(range(1, saved + 1))
    for call in (lambda: training.ensure_alive(FAR), lambda: training.wait(FAR)):
        with pytest.raises(PermanentError, match="run demo was stopped by"):
            call()
    assert launch_again(training).returncode == attempts.EXIT_BY_KIND["permanent"], (
        "whoever starts one, the marker holds"
    )

    launch.clear_stop(training.directory)
    training.ensure_alive(saved + 2)
    training.wait(saved + 2)
    assert [line.attempt for line in last_attempts(training.directory / "metrics.jsonl")][saved:][:2] == [2, 2]


def test_a_training_that_cannot_be_says_why_and_leaves_its_cause(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    training = make_training(tmp_path, rows=rows)
    training.ensure_alive(2, invocation="one")
    with pytest.raises(PermanentError, match="the dataset has no training sample"):
        training.wait(2)
    with pytest.raises(PermanentError, match="the dataset has no training sample"):
        training.ensure_alive(2, invocation="one")
    assert attempts.attempt_numbers(training.directory) == [1]
    assert record(training, 1).exit == attempts.EXIT_BY_KIND["permanent"]


@pytest.fixture
def small_disk(tmp_path: Path, require_or_skip: Any) -> Iterator[Training]:
    """A training whose folder is a file system of its own, with room for its small files and little else."""
    training = make_training(tmp_path)
    params = (training.directory / "params.json").read_bytes()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(training.directory)], capture_output=True, check=False
    )
    if mounted.returncode:
        require_or_skip("mount", f"tmpfs cannot be mounted: {mounted.stderr.decode().strip()}")
    try:
        (training.directory / "params.json").write_bytes(params)
        yield training
    finally:
        subprocess.run(["umount", str(training.directory)], check=True)


def fill(directory: Path, *, leave: int) -> None:
    free = os.statvfs(directory).f_bavail * os.statvfs(directory).f_frsize
    (directory / "filler").write_bytes(b"x" * (free - leave))


@pytest.mark.parametrize("leave", [40_000, 60_000, 90_000])
def test_a_full_disk_costs_a_checkpoint_and_never_the_training(
    small_disk: Training, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], leave: int
) -> None:
    from dflash.train.trainer import Trainer

    directory = small_disk.directory
    real = Trainer.one_step

    def one_step(self: Trainer, index: int) -> Any:
        if index in (1, 3):
            self._collect(wait=True)
        if index == 1:
            fill(directory, leave=leave)
        if index == 3:
            assert [path.name for path in directory.glob("*step_*")] == ["step_1"], "nothing of step 2 is left"
            (directory / "filler").unlink()
        return real(self, index)

    monkeypatch.setattr(Trainer, "one_step", one_step)
    small_disk.run(1, 2, 4)
    assert schedule.existing_steps(directory) == [1, 4]
    assert "ALERT" in capsys.readouterr().err
    with pytest.raises(PermanentError, match="passed step 2"):
        small_disk.wait(2)


def test_a_last_checkpoint_that_does_not_fit_is_a_failure_not_a_success(
    small_disk: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dflash.train.trainer import Trainer

    real = Trainer.one_step

    def one_step(self: Trainer, index: int) -> Any:
        fill(small_disk.directory, leave=60_000)
        return real(self, index)

    monkeypatch.setattr(Trainer, "one_step", one_step)
    with pytest.raises(PermanentError, match="the disk is full"):
        small_disk.run(1)
    monkeypatch.undo()
    with pytest.raises(PermanentError, match=r"the next 1 checkpoints need .* are free"):
        small_disk.run(1, attempt=2)
    (small_disk.directory / "filler").unlink()
    small_disk.run(2, attempt=3)
    assert schedule.existing_steps(small_disk.directory) == [1, 2]
