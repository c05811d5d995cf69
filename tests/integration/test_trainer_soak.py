"""Kills at random: whichever process dies at whatever moment, what is left is whole, and the next start goes on from it.

    DFLASH_KILLS=30 python -m pytest tests/integration/test_trainer_soak.py -s     the whole soak, about six minutes
    DFLASH_KILLS_SEED=7 ...                                                        the same choices again

Two kills run with every test run. The seed is chosen when it starts and printed; moments are in seconds, so the same seed
meets a slower machine elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from rank_store import run_topology
from train_store import Training, again, make_training, wait_until

from dflash.base.errors import PermanentError, TransientError
from dflash.base.records import CheckpointManifest, last_attempts
from dflash.ship import artifact
from dflash.train import attempts, checkpoint, launch, schedule

KILLS = int(os.environ.get("DFLASH_KILLS", "2"))
SEED = int(os.environ.get("DFLASH_KILLS_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
TOPOLOGY = {"targets": 2, "drafters": 2, "colocate": False}
EVERY = 3
"""Steps from one checkpoint to the next."""
FAR = 30_000
PATIENCE = 300.0
"""Seconds that a start may take, on a machine that is busy."""


def record(training: Training, number: int) -> attempts.Attempt:
    return attempts.Attempt.read(attempts.attempt_path(training.directory, number))


def stepped(training: Training, attempt: int) -> bool:
    line = launch.last_metrics(training.directory / "metrics.jsonl")
    return line is not None and line.attempt == attempt


def processes(training: Training, number: int) -> dict[str, int]:
    """The processes of an attempt that are known by now."""
    if number not in attempts.attempt_numbers(training.directory):
        return {}
    found = record(training, number)
    ranks = {f"rank {rank}": pid for rank, pid in enumerate(found.rank_pids)}
    return {"launcher": found.launcher_pid, **ranks}


def states(alive: dict[str, int]) -> dict[str, str]:
    """What became of processes: gone, or the state that the kernel tells (D waits for a disk, and cannot even be killed)."""
    found = {}
    for name, pid in alive.items():
        with contextlib.suppress(OSError):
            found[name] = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    return {name: found.get(name, "gone") for name in alive}


def verify_all(training: Training) -> int:
    """Every folder that looks like a checkpoint is one, byte by byte; returns how many there are."""
    steps = schedule.existing_steps(training.directory)
    for step in steps:
        folder = training.directory / f"step_{step}"
        manifest = CheckpointManifest.read(folder / "manifest.json")
        assert (manifest.key, manifest.step) == (training.directory.name, step)
        artifact.verify(folder / "drafter", manifest.drafter)
        if (folder / "state").exists():
            assert checkpoint.load_state(training.directory, step, training.directory.name).next_step == step
    bare = [path.name for path in training.directory.glob("step_*") if not (path / "manifest.json").exists()]
    assert bare == [], "a folder under its final name has its manifest"
    return len(steps)


def metrics(training: Training) -> list[dict[str, Any]]:
    path = training.directory / "metrics.jsonl"
    whole = path.read_bytes().rpartition(b"\n")[0].splitlines() if path.exists() else []
    return [json.loads(line) for line in whole]


@pytest.mark.timeout(240 + 60 * KILLS)
def test_random_kills_leave_nothing_that_loads_wrongly_and_no_batch_twice_or_never(tmp_path: Path) -> None:
    print(f"\nseed {SEED}, {KILLS} kills")
    draw = random.Random(SEED)
    placed = {"topology": TOPOLOGY, "keep_states": 2, "checkpoint_every": EVERY}
    batching = {"batches_per_step": 3, "max_batch_size": 4}
    training = make_training(tmp_path, schedule_steps=FAR, placed=placed, batching=batching)
    scheduled = range(EVERY, FAR, EVERY)
    try:
        for number in range(1, KILLS + 1):
            training.ensure_alive(*scheduled)
            wait_until(lambda number=number: len(processes(training, number)) == 5, PATIENCE)
            if draw.random() < 0.75:  # else anywhere in the start
                wait_until(lambda number=number: stepped(training, number), PATIENCE)
            time.sleep(draw.uniform(0.0, 1.5))
            victim = draw.choice(sorted(processes(training, number)))
            reached = schedule.passed(training.directory)
            alive = processes(training, number)
            os.kill(alive[victim], signal.SIGKILL)
            killed = time.monotonic()
            try:
                wait_until(lambda: training.holder() is None, 30)
            except AssertionError:
                pytest.fail(f"kill {number} of {victim}: 30 s later the lease is held by {states(alive)}")
            print(
                f"kill {number}: {victim} at step {reached}; the job ended {time.monotonic() - killed:.1f} s later, "
                f"{verify_all(training)} checkpoints are whole",
                flush=True,
            )
        last = max(schedule.resumable_steps(training.directory), default=0) + 2 * EVERY
        training.ensure_alive(last)
        training.wait(last)
    finally:
        with contextlib.suppress(TransientError, PermanentError):
            launch.stop(training.directory, "cleanup", timeout=60)
    verify_all(training)

    lines = [line for line in metrics(training) if line["step"] <= last]
    assert {line["attempt"] for line in lines} <= set(attempts.attempt_numbers(training.directory))
    order = [line["attempt"] for line in lines]
    assert order == sorted(order), "a later attempt writes after an earlier one"
    undisturbed = again(training, tmp_path / "undisturbed")
    ran = run_topology(undisturbed, 2, 2, last, timeout=600)
    assert ran.ok, ran.said
    ours = last_attempts(training.directory / "metrics.jsonl")[:last]
    assert [line.step for line in ours] == list(range(1, last + 1))
    assert [line.batch_ids for line in ours] == undisturbed.batch_ids()
    files = [t.directory / f"step_{last}" / "drafter" / "model.safetensors" for t in (training, undisturbed)]
    assert files[0].read_bytes() == files[1].read_bytes()
    print(f"{last} steps, {max(order)} attempts; batches and weights are those of an undisturbed training")
