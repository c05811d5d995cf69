"""A live trainer saves when it is asked to, and one whose machine has changed stops until somebody says why not."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from train_store import Training, make_training, wait_until

from dflash.base.errors import PermanentError, TransientError
from dflash.base.files import write_json
from dflash.base.records import CheckpointManifest
from dflash.model.probe import Probe
from dflash.train import launch, schedule
from dflash.train.attempts import Attempt, attempt_path

FAR = 3000


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    made = make_training(tmp_path, schedule_steps=FAR)
    yield made
    with contextlib.suppress(TransientError):
        launch.stop(made.directory, "cleanup", timeout=60)


def test_a_checkpoint_now_is_the_next_step_and_joins_the_schedule(training: Training) -> None:
    with pytest.raises(PermanentError, match="no trainer is at work"):
        launch.checkpoint_now(training.directory, "demo")
    training.ensure_alive(FAR)
    wait_until(lambda: schedule.passed(training.directory) >= 2, 120)
    before = schedule.passed(training.directory)
    step = launch.checkpoint_now(training.directory, "demo", timeout=60, poll=0.01)
    assert before < step < FAR
    wait_until(lambda: schedule.passed(training.directory) >= step, 60)
    assert schedule.read_schedule(training.directory) == [step, FAR]
    assert schedule.Request.read(training.directory / "checkpoint_now.json").step == step
    assert training.wait(step).step == step
    again = launch.checkpoint_now(training.directory, "demo", timeout=60, poll=0.01)
    assert schedule.read_schedule(training.directory) == [step, again, FAR]
    assert schedule.existing_steps(training.directory) == [step, again]


def test_a_changed_machine_stops_a_resume_until_it_is_accepted_and_that_is_recorded(training: Training) -> None:
    training.ensure_alive(2)
    training.wait(2)
    wait_until(lambda: training.holder() is None)
    path = training.directory / "probe.safetensors"
    ours = Probe.read(path)
    changed = {**ours.tensors, "features.1": ours.tensors["features.1"] * 1.01}
    numerics = {**ours.facts["numerics"], "torch.cuda": "13.0"}
    Probe(changed, {**ours.facts, "numerics": numerics}).write(path)

    training.ensure_alive(4)
    with pytest.raises(PermanentError, match=r"tap \d .*torch\.cuda 13\.0 -> None.*--accept-env"):
        wait_until(lambda: training.wait(4), 120)
    assert Attempt.read(attempt_path(training.directory, 2)).exit == 4

    placed = json.loads(training.placement.read_text())
    write_json(training.placement, {**placed, "accept_env": "back on the old machine"})
    training.ensure_alive(4)
    training.wait(4)
    assert Attempt.read(attempt_path(training.directory, 3)).placement.accept_env == "back on the old machine"
    lineage = CheckpointManifest.read(training.directory / "step_4" / "manifest.json").lineage
    assert [(entry["attempt"], entry["why"]) for entry in lineage.accepted] == [(3, "back on the old machine")]
