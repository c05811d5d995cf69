"""A launcher and its four ranks as real processes: whoever is killed, the job ends at once, says who it was, and resumes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rank_store import run_topology
from train_store import Training, again, make_training, saved, wait_until

from dflash.base.errors import TransientError
from dflash.base.records import last_attempts
from dflash.train import attempts, checkpoint, launch, schedule

FAR = 3000
"""A scheduled step that no test reaches."""
TOPOLOGY = {"targets": 2, "drafters": 2, "colocate": False}


def reached(training: Training, step: int, attempt: int) -> bool:
    line = launch.last_metrics(training.directory / "metrics.jsonl")
    return line is not None and line.attempt == attempt and line.step >= step


def record(training: Training, number: int) -> attempts.Attempt:
    return attempts.Attempt.read(attempts.attempt_path(training.directory, number))


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.fixture
def training(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Training]:
    """At 2:2. A test may ask for a `rank_timeout` by `indirect`."""
    placed = {"keep_states": 3, "topology": TOPOLOGY, "rank_timeout": getattr(request, "param", 60)}
    made = make_training(tmp_path, schedule_steps=FAR, placed=placed, batching={"batches_per_step": 4})
    yield made
    with contextlib.suppress(TransientError):
        launch.stop(made.directory, "cleanup", timeout=60)


def test_any_killed_rank_ends_the_job_with_its_name_and_the_next_start_resumes(
    training: Training, tmp_path: Path
) -> None:
    names = ["rank 0 (target 0)", "rank 1 (target 1)", "rank 2 (drafter 0)", "rank 3 (drafter 1)"]
    for attempt, (victim, name) in enumerate(enumerate(names), 1):
        step = 10 * attempt
        training.ensure_alive(step, FAR)
        wait_until(lambda s=step, a=attempt: reached(training, s + 2, a) and saved(training, s), 120)
        pids = record(training, attempt).rank_pids
        os.kill(pids[victim], signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(TransientError) as lost:
            training.wait(FAR)
        seconds = time.monotonic() - killed
        assert seconds < 30, f"{seconds:.1f} s"
        print(f"the job ended {seconds:.1f} s after {name} was killed")
        assert wait_until(lambda pids=pids: all(map(gone, pids)))
        assert f"{name} on local was killed by SIGKILL; it last said: " in lost.value.message()
        ended = record(training, attempt)
        assert ended.signal == "SIGKILL"
        assert int(ended.cause.removeprefix("step ").partition(":")[0]) > step
        assert f"the job ends in {ended.cause}" in (training.directory / "trainer.log").read_text()

    training.ensure_alive(50, FAR)
    training.wait(50)
    launch.stop(training.directory, "demo", timeout=60)
    assert (record(training, 5).exit, record(training, 5).cause) == (0, "")
    undisturbed = again(training, tmp_path / "undisturbed")
    ran = run_topology(undisturbed, 2, 2, 50)
    assert ran.ok, ran.said
    lines = last_attempts(training.directory / "metrics.jsonl")[:50]
    assert [line.attempt for line in lines] == [1 + step // 10 for step in range(50)]
    assert [line.batch_ids for line in lines] == undisturbed.batch_ids()
    files = [t.directory / "step_50" / "drafter" / "model.safetensors" for t in (training, undisturbed)]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("victim", [1, 2, 3])
@pytest.mark.parametrize("training", [4], indirect=True)
def test_a_rank_that_is_stopped_and_does_not_die_ends_the_job_by_name(training: Training, victim: int) -> None:
    training.ensure_alive(2, FAR)
    wait_until(lambda: reached(training, 3, 1), 120)
    pids = record(training, 1).rank_pids
    os.kill(pids[victim], signal.SIGSTOP)
    stopped = time.monotonic()
    with pytest.raises(TransientError) as lost:
        training.wait(FAR)
    assert 3 < time.monotonic() - stopped < 4 + 20
    assert wait_until(lambda: all(map(gone, pids)))
    name = {1: "rank 1 (target 1)", 2: "rank 2 (drafter 0)", 3: "rank 3 (drafter 1)"}[victim]
    said = lost.value.message()
    assert re.search(
        rf"step \d+: {re.escape(name)} on local gave no sign of life for \d+ s \(in step \d+, .*\)", said
    ), said
    assert "; it last said: " in said
    ended = record(training, 1)
    assert (ended.exit, ended.signal) == (attempts.EXIT_BY_KIND["transient"], None)


def test_signals_and_requests_reach_a_training_of_several_ranks(training: Training) -> None:
    training.ensure_alive(FAR)
    wait_until(lambda: reached(training, 2, 1), 120)
    attempt = record(training, 1)
    for pid in (attempt.launcher_pid, *attempt.rank_pids):
        os.kill(pid, signal.SIGHUP)
    before = schedule.passed(training.directory)
    step = launch.checkpoint_now(training.directory, "demo", timeout=60, poll=0.01)
    assert before < step < FAR
    assert schedule.read_schedule(training.directory) == [step, FAR]
    checkpoint.load_state(training.directory, step, training.directory.name)
    assert not any(map(gone, attempt.rank_pids)), "nobody minds SIGHUP"
    os.kill(attempt.launcher_pid, signal.SIGTERM)
    wait_until(lambda: training.holder() is None, 60)
    ended = record(training, 1)
    assert (ended.exit, ended.signal, ended.cause) == (0, None, "")
    newest = max(schedule.resumable_steps(training.directory))
    assert newest > step, "the step it was in was finished and saved"
    assert len(last_attempts(training.directory / "metrics.jsonl")) == newest
    assert checkpoint.load_state(training.directory, newest, training.directory.name).next_step == newest
    assert wait_until(lambda: all(map(gone, attempt.rank_pids)))


def test_torchrun_starts_the_same_program_and_sigterm_saves_the_step(training: Training) -> None:
    schedule.merge_steps(training.directory, [FAR])
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    argv += ["--no-python", sys.executable, "-m", "dflash.train.ranks", "--directory", str(training.directory)]
    argv += ["--store", str(training.store), "--placement", str(training.placement)]
    with subprocess.Popen(argv, env=launch.own_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as job:
        try:
            wait_until(lambda: reached(training, 2, 1), 120)
            assert training.holder().run == "torchrun"
        finally:
            job.send_signal(signal.SIGTERM)
        said, _ = job.communicate(timeout=60)
    ended = record(training, 1)
    assert (ended.exit, ended.signal) == (0, None), said.decode()
    (saved,) = schedule.resumable_steps(training.directory)
    assert len(last_attempts(training.directory / "metrics.jsonl")) == saved
    assert training.holder() is None
