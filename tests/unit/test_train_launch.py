"""What the rules call, without processes: who is refused, what is repeated, and what a waiter says."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from train_store import Training, make_training

from dflash.base.errors import ConfigError, CorruptError, DflashError, PermanentError, TransientError
from dflash.base.files import write_json
from dflash.base.progress import Progress
from dflash.base.records import CheckpointManifest, Environment, Failure, Lineage, StopMarker, now
from dflash.hosts.lease import acquire, cpu_lease, holder, new_record
from dflash.ship import artifact
from dflash.train import launch, schedule


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Training:
    """A training whose launcher is only pretended; `launched` of the module counts its starts."""
    started: list[str] = []
    monkeypatch.setattr(launch, "_start_launcher", lambda *arguments: started.append(arguments[3]))
    monkeypatch.setattr(launch, "started", started, raising=False)
    return make_training(tmp_path)


def starts() -> list[str]:
    return launch.started  # type: ignore[attr-defined, no-any-return]


def put_manifest(training: Training, place: int, **changed: Any) -> None:
    folder = training.directory / f"step_{place}"
    (folder / "drafter").mkdir(parents=True)
    environment = Environment(python="3", platform="p", cpu="c", cores=1, memory_bytes=1, distributions={})
    values = {"key": training.directory.name, "step": place, "created": now(), **changed}
    names = ("config", "params_files", "placement", "dataset", "buckets", "topology", "kernels")
    empty: dict[str, Any] = {name: {} for name in names}
    CheckpointManifest(
        environment=environment,
        lineage=Lineage(),
        tensors=[],
        drafter=artifact.describe(folder / "drafter"),
        state=None,
        **values,
        **empty,
    ).write(folder / "manifest.json")


def leave_failure(training: Training, kind: str, invocation: str) -> None:
    key = training.directory.name
    Failure(stage="train", key=key, kind=kind, message="too bad", at=now(), invocation=invocation).write(
        training.directory / "failure.json"
    )


def test_a_missing_step_starts_a_launcher_and_joins_the_schedule(training: Training) -> None:
    training.ensure_alive(4, 8, run="demo")
    assert starts() == ["demo"]
    assert schedule.read_schedule(training.directory) == [4, 8]


def test_nothing_is_started_when_every_step_exists_or_somebody_is_at_work(training: Training) -> None:
    put_manifest(training, 4)
    training.ensure_alive(4)
    held = acquire([schedule.lease_path(training.directory)], new_record("training", training.directory.name, "other"))
    training.ensure_alive(4, 8)
    held.release()
    assert starts() == []


def test_a_stopped_training_that_was_carried_here_is_reported_without_the_steps_that_stayed_elsewhere(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_manifest(training, 8)
    schedule.merge_steps(training.directory, [4, 8])  # comes with the training
    monkeypatch.setattr(schedule, "passed", lambda _: 9)
    StopMarker(run="demo", by="jo", at=now(), finish=True).write(training.directory / "stop.json")
    training.ensure_alive(4, 8)  # 4 lies on the host where it was trained
    assert starts() == []
    with pytest.raises(PermanentError, match="was stopped by jo"):
        training.ensure_alive(4, 8, 12)


def test_a_step_added_while_the_trainer_is_ending_starts_another(training: Training) -> None:
    record = new_record("training", training.directory.name, "demo")
    held = acquire([schedule.lease_path(training.directory)], record)
    status = schedule.Status(attempt=1, step=4, lease_pid=record.pid, lease_start=record.start, ending=True)
    schedule.write_status(training.directory, status)
    threading.Timer(0.3, held.release).start()
    training.ensure_alive(8)
    assert starts() == ["demo"]


def test_a_stopped_training_is_not_revived_and_the_message_says_what_to_do(training: Training) -> None:
    marker = launch.stop(training.directory, "demo")
    schedule.write_status(training.directory, schedule.Status(attempt=1, step=1234, lease_pid=1, lease_start=""))
    with pytest.raises(PermanentError) as refused:
        training.ensure_alive(4)
    said = refused.value.message()
    assert "`dflash run --resume` continues it, `dflash stop demo --finish` reports what exists" in said
    assert said.endswith("with the --configfile that the run was begun with.")
    assert f"run demo was stopped by {marker.by} at {marker.at}, after step 1,234" in said
    assert starts() == []
    assert schedule.read_schedule(training.directory) == []
    launch.clear_stop(training.directory)
    training.ensure_alive(4)
    assert starts() == ["demo"]


def test_what_exists_of_a_stopped_training_can_still_be_used(training: Training) -> None:
    put_manifest(training, 4)
    launch.stop(training.directory, "demo", finish=True)
    training.ensure_alive(4)
    assert training.wait(4).step == 4


def test_stopping_twice_keeps_the_first_marker_unless_it_is_to_be_finished(training: Training) -> None:
    first = launch.stop(training.directory, "demo")
    assert launch.stop(training.directory, "other") == first
    assert launch.stop(training.directory, "demo", finish=True).finish
    assert launch.stop(training.directory, "demo").finish
    launch.clear_stop(training.directory)
    launch.clear_stop(training.directory)
    assert launch.read_stop(training.directory) is None


def test_stop_signals_no_process_but_a_launcher(training: Training) -> None:
    # This process holds the lease and is no launcher; a pid in a file may have become anybody's.
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    held = acquire([schedule.lease_path(training.directory)], new_record("training", training.directory.name, "demo"))
    try:
        with pytest.raises(TransientError, match=f"pid {os.getpid()}"):
            launch.stop(training.directory, "demo", timeout=0.2, poll=0.02)
    finally:
        held.release()
        signal.signal(signal.SIGTERM, before)
    assert received == []
    assert StopMarker.read(training.directory / "stop.json").run == "demo"


def test_a_permanent_failure_is_repeated_to_its_own_invocation_and_tried_again_by_the_next(training: Training) -> None:
    leave_failure(training, "permanent", "one")
    with pytest.raises(PermanentError, match="too bad"):
        training.ensure_alive(4, invocation="one")
    assert starts() == []
    training.ensure_alive(4, invocation="two")
    assert starts() == ["demo"]
    assert not (training.directory / "failure.json").exists()


def test_a_failure_is_not_repeated_to_callers_that_nobody_can_tell_apart(training: Training) -> None:
    leave_failure(training, "permanent", "")
    training.ensure_alive(4, invocation="")
    assert starts() == ["demo"]


@pytest.mark.parametrize(
    ("kind", "error"), [("permanent", PermanentError), ("config", ConfigError), ("corrupt", CorruptError)]
)
def test_a_waiter_raises_what_the_trainer_failed_of(training: Training, kind: str, error: type[DflashError]) -> None:
    leave_failure(training, kind, "")
    with pytest.raises(error, match="training failed for good: too bad"):
        training.wait(4)


def test_a_waiter_whose_trainer_is_gone_shows_the_end_of_its_log_and_may_try_again(training: Training) -> None:
    (training.directory / "trainer.log").write_text("".join(f"line {n}\n" for n in range(100)) + "Killed\n")
    with pytest.raises(TransientError, match="line 99\nKilled") as gone:
        training.wait(4)
    assert "line 50\n" not in gone.value.message()


def test_a_waiter_refuses_a_step_that_is_passed_unsaved_while_training_goes_on(training: Training) -> None:
    record = new_record("training", training.directory.name, "demo")
    held = acquire([schedule.lease_path(training.directory)], record)
    put_manifest(training, 2)
    status = schedule.Status(attempt=1, step=5, lease_pid=record.pid, lease_start=record.start)
    schedule.write_status(training.directory, status)
    with pytest.raises(PermanentError, match=r"passed step 4 .* saved are 2"):
        training.wait(4)
    schedule.write_status(training.directory, status.model_copy(update={"alert": "the disk is full"}))
    with pytest.raises(PermanentError, match="step 4 was not saved: the disk is full"):
        training.wait(4)
    assert training.wait(2).step == 2
    held.release()


def test_a_manifest_of_another_training_or_step_is_corrupt(training: Training) -> None:
    put_manifest(training, 4, step=5)
    put_manifest(training, 6, key="0123456789ab")
    for step in (4, 6):
        with pytest.raises(CorruptError, match="the manifest is of step"):
            training.wait(step)


def test_a_folder_without_its_manifest_is_no_checkpoint(training: Training) -> None:
    put_manifest(training, 4)
    (training.directory / "step_4" / "manifest.json").unlink()
    with pytest.raises(TransientError):
        training.wait(4)


def test_progress_reads_the_last_whole_line_of_metrics(tmp_path: Path) -> None:
    training = make_training(tmp_path)
    training.run(2)
    path = training.directory / "metrics.jsonl"
    with path.open("a") as stream:
        stream.write('{"attempt": 1, "st')
    found = launch.last_metrics(path)
    assert found is not None
    assert found.step == 2
    assert launch.last_metrics(tmp_path / "none") is None


def test_a_placement_with_an_unknown_field_is_a_config_error(
    training: Training, capsys: pytest.CaptureFixture[str]
) -> None:
    write_json(training.placement, {"valves": {}})
    arguments = ["--directory", str(training.directory), "--store", str(training.store)]
    arguments += ["--placement", str(training.placement), "--run", "demo", "--foreground"]
    assert launch.main(arguments) == 2
    assert "valves" in capsys.readouterr().err


def test_who_finds_the_gpu_held_waits_in_line_and_says_behind_whom(
    training: Training, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = ["GPU 0 is held by jo, run big", "GPU 0 is held by jo, run big", ""]
    monkeypatch.setattr(launch, "_start_launcher", lambda *_: answers.pop(0))
    monkeypatch.setattr(launch, "QUEUE_POLL", 0.01)
    training.ensure_alive(4)
    assert answers == []
    assert capsys.readouterr().err.count("waiting in line: GPU 0 is held by jo, run big") == 1


def test_a_gpu_that_the_same_training_of_another_clone_holds_is_held_and_not_ours(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DFLASH_LEASES", str(tmp_path / "leases"))
    write_json(training.placement, {"host": "box"})
    arguments = ["--directory", str(training.directory), "--store", str(training.store)]
    arguments += ["--placement", str(training.placement), "--run", "demo", "--foreground"]
    record = new_record("training", training.directory.name, "other")
    for paths, status in (
        (cpu_lease("box"), launch.DEVICE_HELD),
        ({schedule.lease_path(training.directory): "training"}, launch.ALREADY_HELD),
    ):
        held = acquire(paths, record)
        assert launch.main(arguments) == status
        assert "run other" in capsys.readouterr().err
        held.release()


def test_who_waits_in_line_and_is_stopped_leaves_it(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_start_launcher", lambda *_: str(launch.stop(training.directory, "demo")))
    monkeypatch.setattr(launch, "QUEUE_POLL", 0.01)
    with pytest.raises(PermanentError, match="was stopped by"):
        training.ensure_alive(4)


def test_where_a_training_was_carried_away_from_nothing_is_started(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "start_foreground", lambda *_: pytest.fail("a trainer was started"))
    launch.Moved(to="b", token="t", run="demo", by="me", at=now()).write(launch.moved_path(training.directory))
    with pytest.raises(PermanentError, match="was carried over"):
        training.ensure_alive(4)
    with pytest.raises(PermanentError, match="was carried over"):
        launch.train_segment(
            training.directory, training.store, training.placement, "demo", 4, progress=Progress("train")
        )
    assert starts() == []
    assert schedule.read_schedule(training.directory) == [], "nobody waits for a step that will not come"


def test_a_launcher_before_which_the_training_was_carried_over_begins_nothing(
    training: Training, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was started, or waited in line, before that."""
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a trainer was started"))
    write_json(training.placement, {})
    launch.Moved(to="b", token="t", run="demo", by="me", at=now()).write(launch.moved_path(training.directory))
    arguments = ["--directory", str(training.directory), "--store", str(training.store)]
    arguments += ["--placement", str(training.placement), "--run", "demo", "--foreground"]
    assert launch.main(arguments) == 4
    assert "was carried over from here to `b`" in capsys.readouterr().err
    assert holder(schedule.lease_path(training.directory)) is None


@pytest.mark.parametrize("variable", ["DFLASH_USER", "DFLASH_CLONE"])
def test_a_training_of_somebody_else_is_not_stopped_without_force(
    training: Training, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    record = new_record("training", training.directory.name, "theirs").model_copy(update={"pid": 1})
    held = acquire([schedule.lease_path(training.directory)], record)
    monkeypatch.setenv(variable, "somebody else")
    with pytest.raises(PermanentError, match="run theirs") as refused:
        launch.stop_training(training.directory, "demo", finish=False, force=False)
    assert "--force" in refused.value.message()
    assert launch.read_stop(training.directory) is None
    threading.Timer(0.2, held.release).start()
    launch.stop_training(training.directory, "demo", finish=False, force=True)
    assert launch.read_stop(training.directory) is not None
