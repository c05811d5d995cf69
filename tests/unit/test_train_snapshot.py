"""Checkpoints are written beside training: what is saved is the step that was due, and nobody is told more than is on disk."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from train_store import Training, again, make_training

from dflash.base.errors import PermanentError, TransientError
from dflash.base.records import last_attempts
from dflash.hosts import lease
from dflash.train import checkpoint, launch, schedule
from dflash.train.snapshot import Background, HostCopy
from dflash.train.trainer import Trainer

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Training:
    training = make_training(tmp_path_factory.mktemp("undisturbed"))
    training.run(2, 6, keep_states=9)
    return training


class Gate:
    """Holds the writing of one step back until `open` is called; `steps` tells what training did meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
        self.opened = threading.Event()
        self.at_step: dict[int, Any] = {}
        save, one_step = checkpoint.Writer.save, Trainer.one_step
        gate = self

        def slow(self: Any, number: int, *arguments: Any) -> Any:
            if number == step:
                gate.opened.wait(30)
            return save(self, number, *arguments)

        def look(self: Trainer, index: int) -> Any:
            if index in gate.at_step:
                gate.at_step[index](self)
            return one_step(self, index)

        monkeypatch.setattr(checkpoint.Writer, "save", slow)
        monkeypatch.setattr(Trainer, "one_step", look)


@pytest.fixture
def training(undisturbed: Training, tmp_path: Path) -> Iterator[Training]:
    """Untrained, with the lease that a launcher would hold."""
    made = again(undisturbed, tmp_path)
    made.directory.mkdir(parents=True, exist_ok=True)
    held = lease.acquire(
        [schedule.lease_path(made.directory)], lease.new_record("training", made.directory.name, "demo")
    )
    yield made
    held.release()


def test_a_checkpoint_written_late_holds_the_step_that_was_due(
    undisturbed: Training, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, 2)
    gate.at_step[5] = lambda _: gate.opened.set()  # three updates later
    training.run(2, 6, keep_states=9)
    for step in (2, 6):
        ours, theirs = undisturbed.weights(step), training.weights(step)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert checkpoint.load_state(training.directory, 2, training.directory.name).next_step == 2


def test_while_it_is_written_training_goes_on_and_nobody_takes_the_step_for_lost(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, 2)
    seen = []

    def look(_: Trainer) -> None:
        seen.append([line.step for line in last_attempts(training.directory / "metrics.jsonl")])
        assert schedule.existing_steps(training.directory) == []
        assert (schedule.passed(training.directory), schedule.being_written(training.directory)) == (4, {2})
        schedule.merge_steps(training.directory, [2])  # asked for again, by another run
        schedule.refuse_passed(training.directory, [2])
        with pytest.raises(PermanentError, match="passed step 3"):
            schedule.refuse_passed(training.directory, [3])
        waiter = threading.Thread(target=lambda: waited.append(training.wait(2).step))
        waiter.start()
        time.sleep(0.1)
        assert (waited, waiter.is_alive()) == ([], True)
        gate.opened.set()
        waiter.join(20)

    waited: list[int] = []
    gate.at_step[4] = look
    training.run(2, 6)
    assert (seen, waited) == ([[1, 2, 3, 4]], [2])
    assert schedule.being_written(training.directory) == set()


def test_a_second_checkpoint_waits_for_the_first_and_metrics_say_for_how_long(
    training: Training, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dflash.train.trainer.SLOW_DISK", 0.2)
    gate = Gate(monkeypatch, 2)
    gate.at_step[3] = lambda _: threading.Timer(2.0, gate.opened.set).start()
    training.run(2, 4, 6)
    assert schedule.existing_steps(training.directory) == [2, 4, 6]
    stalled = [line.stalled_seconds["checkpoint"] for line in last_attempts(training.directory / "metrics.jsonl")]
    assert stalled[4] > 1.0
    assert stalled[2] < 1.0
    assert [stalled[0], stalled[1], stalled[3], stalled[5]] == [0.0] * 4
    assert re.search(r"step 4: training waited [12]\.\d s", capsys.readouterr().err)


def test_an_error_of_the_writer_ends_training_with_its_message(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(checkpoint, "write_state", broken)
    with pytest.raises(PermanentError, match=r"step 2 cannot be saved: .*Input/output error"):
        training.run(2, 400)
    assert schedule.existing_steps(training.directory) == []
    assert len(last_attempts(training.directory / "metrics.jsonl")) < 400


def test_a_failing_training_lets_the_checkpoint_that_is_being_written_become_whole(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, 2)

    def fail(_: Trainer) -> None:
        threading.Timer(0.3, gate.opened.set).start()
        raise PermanentError("something else")

    gate.at_step[2] = fail
    with pytest.raises(PermanentError, match="something else"):
        training.run(2, 6)
    checkpoint.load_state(training.directory, 2, training.directory.name)
    assert list(training.directory.glob(".step_*")) == []


def test_a_step_added_while_the_last_checkpoint_is_written_is_trained_too(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, 3)
    real = Trainer._collect

    def collect(self: Trainer, *, wait: bool) -> None:
        if wait and self.step == 3 and not gate.opened.is_set() and self.background.step == 3:
            schedule.merge_steps(training.directory, [5])
            gate.opened.set()
        real(self, wait=wait)

    monkeypatch.setattr(Trainer, "_collect", collect)
    training.run(3)
    assert schedule.existing_steps(training.directory) == [3, 5]


def test_a_launched_trainer_that_is_asked_to_end_ends_with_its_checkpoint_whole(tmp_path: Path) -> None:
    training = make_training(tmp_path, schedule_steps=3000)
    training.ensure_alive(3000)
    try:
        launch.stop(training.directory, "demo", timeout=60)
    except TransientError:
        pytest.fail("it did not end")
    for step in schedule.resumable_steps(training.directory):
        checkpoint.load_state(training.directory, step, training.directory.name)
    assert list(training.directory.glob(".step_*")) == []


# ---------------------------------------------------------------- pieces


def test_a_copy_stays_what_it_was_and_its_memory_is_used_again() -> None:
    live = {"a": torch.arange(5.0), "step": torch.tensor(3.0), "half": torch.ones(3, 3, dtype=torch.bfloat16)}
    copy = HostCopy(torch.device("cpu"))
    first = copy.begin(live)
    copy.wait()
    live["a"] += 1
    copy.before_update()
    assert first["a"].tolist() == [0, 1, 2, 3, 4]
    assert (first["step"].shape, first["half"].dtype) == (torch.Size([]), torch.bfloat16)
    second = copy.begin(live)
    assert second["a"].data_ptr() == first["a"].data_ptr()
    assert second["a"].tolist() == [1, 2, 3, 4, 5]
    assert set(copy.begin({"a": live["a"]})) == {"a"}


def test_one_at_a_time_and_what_failed_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    background = Background()
    assert background.collect(wait=True) is None
    go = threading.Event()
    background.submit(1, go.wait)
    assert (background.step, background.collect(wait=False)) == (1, None)
    with pytest.raises(RuntimeError, match="step 1 is still being written"):
        background.submit(2, go.wait)
    go.set()
    found = background.collect(wait=True)
    assert found is not None
    assert (found.step, found.error) == (1, None)
    background.submit(2, lambda: [][1])
    background.close()
    assert "step 2 was not saved: list index out of range" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu_the_next_update_waits_for_the_copy_and_training_does_not() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    device = torch.device("cuda")
    live = {"a": torch.zeros(256 << 20, device=device)}  # 1 GiB
    copy = HostCopy(device)
    copy.prepare(live)
    torch.cuda.synchronize()
    started = time.perf_counter()
    copied = copy.begin(live)
    issued = time.perf_counter() - started
    copy.before_update()
    live["a"] += 1
    copy.wait()
    whole = time.perf_counter() - started
    assert float(copied["a"].sum()) == 0.0
    assert issued < 0.3 * whole, f"issued in {issued:.4f} s, copied in {whole:.4f} s"
