"""The schedule is a union, and a step that training has passed unsaved is refused for good."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from train_store import python

from dflash.base.errors import PermanentError
from dflash.hosts.lease import acquire, new_record
from dflash.train import schedule
from dflash.train.train_params import TrainParams

MERGE = """
import sys
from pathlib import Path
from dflash.train.schedule import merge_steps
for step in range(int(sys.argv[2]), 200, 4):
    merge_steps(Path(sys.argv[1]), [step])
"""


def put_checkpoint(directory: Path, step: int, *, state: bool = True) -> None:
    folder = directory / f"step_{step}"
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    if state:
        (folder / "state").mkdir()


def tell(directory: Path, step: int, pid: int, start: str) -> None:
    schedule.write_status(directory, schedule.Status(attempt=1, step=step, lease_pid=pid, lease_start=start))


def test_runs_that_merge_at_once_lose_no_step(tmp_path: Path) -> None:
    processes = [python(MERGE, str(tmp_path), str(first)) for first in range(1, 5)]
    assert [process.wait() for process in processes] == [0, 0, 0, 0]
    assert schedule.read_schedule(tmp_path) == list(range(1, 200))


def test_only_a_manifest_makes_a_checkpoint_and_only_a_state_makes_it_resumable(tmp_path: Path) -> None:
    put_checkpoint(tmp_path, 4, state=False)
    put_checkpoint(tmp_path, 8)
    (tmp_path / "step_12" / "state").mkdir(parents=True)
    (tmp_path / ".step_16.77.tmp").mkdir()
    (tmp_path / "step_016").mkdir()
    assert schedule.existing_steps(tmp_path) == [4, 8]
    assert schedule.resumable_steps(tmp_path) == [8]


def test_a_step_passed_unsaved_is_refused_with_the_steps_that_exist(tmp_path: Path) -> None:
    record = new_record("training", "0123456789ab", "demo")
    held = acquire([schedule.lease_path(tmp_path)], record)
    put_checkpoint(tmp_path, 4)
    tell(tmp_path, 6, record.pid, record.start)
    with pytest.raises(PermanentError, match=r"passed step 5 .* at step 6; saved are 4"):
        schedule.merge_steps(tmp_path, [4, 5, 9])
    assert schedule.read_schedule(tmp_path) == []
    assert schedule.merge_steps(tmp_path, [4, 7]) == [4, 7]
    held.release()


def test_what_a_dead_trainer_passed_will_be_trained_again_and_may_be_asked_for(tmp_path: Path) -> None:
    put_checkpoint(tmp_path, 4)
    tell(tmp_path, 6, os.getpid(), "long ago")
    assert schedule.passed(tmp_path) == 4
    assert schedule.merge_steps(tmp_path, [5]) == [5]


def test_the_status_of_an_earlier_attempt_does_not_count_for_the_one_that_runs(tmp_path: Path) -> None:
    tell(tmp_path, 6, os.getpid(), "an earlier start")
    held = acquire([schedule.lease_path(tmp_path)], new_record("training", "0123456789ab", "demo"))
    assert schedule.passed(tmp_path) == 0
    held.release()


def test_a_scheduled_step_may_be_asked_for_again_even_if_it_was_never_saved(tmp_path: Path) -> None:
    schedule.merge_steps(tmp_path, [2, 4])
    put_checkpoint(tmp_path, 4)
    assert schedule.merge_steps(tmp_path, [2, 4, 6]) == [2, 4, 6]
    with pytest.raises(PermanentError):
        schedule.refuse_passed(tmp_path, [2])


def test_a_training_that_continues_a_state_counts_on_from_there() -> None:
    from train_store import DRAFTER, identity

    parent = {"key": "0123456789ab", "step": 20, "what": "state"}
    values = {"target": identity(), **DRAFTER, "checkpoint_every": 10, "continue_from": parent}
    assert TrainParams.model_validate(values).steps() == [30, 40]
    assert TrainParams.model_validate({**values, "continue_from": {**parent, "what": "weights"}}).steps() == [
        10,
        20,
        30,
        40,
    ]
    with pytest.raises(ValueError, match="training ends at step 20"):
        TrainParams.model_validate({**values, "stop_at": 20})


def test_a_request_becomes_the_next_step_once(tmp_path: Path) -> None:
    schedule.merge_steps(tmp_path, [9])
    schedule.serve_request(tmp_path, 3)
    assert schedule.read_schedule(tmp_path) == [9]
    path = schedule.request_checkpoint(tmp_path, "demo")
    for step in (4, 5):
        schedule.serve_request(tmp_path, step)
    assert schedule.read_schedule(tmp_path) == [4, 9]
    assert (schedule.Request.read(path).run, schedule.Request.read(path).step) == ("demo", 4)
