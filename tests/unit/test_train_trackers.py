"""A tracker is told what the file says; whatever it does, training goes on."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from train_store import Training, make_training

from dflash.base.errors import ConfigError
from dflash.base.records import MetricsLine, last_attempts
from dflash.train import trackers

torch.set_num_threads(1)


class FakeLogger(ModuleType):
    """The calls of wandb and trackio that are used, remembered."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.begun: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished = 0
        self.fault: BaseException | None = None
        self.hang = threading.Event()
        self.hang.set()

    def init(self, **options: Any) -> None:
        self.begun.append(options)

    def log(self, values: dict[str, float], step: int) -> None:
        self.hang.wait()
        if self.fault is not None:
            raise self.fault
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture(params=["wandb", "trackio"])
def fake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeLogger:
    made = FakeLogger(request.param)
    monkeypatch.setitem(sys.modules, request.param, made)
    return made


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return make_training(tmp_path)


def lines(training: Training) -> list[MetricsLine]:
    return last_attempts(training.directory / "metrics.jsonl")


def test_it_is_told_the_numbers_of_every_line_once_by_step(training: Training, fake: FakeLogger) -> None:
    training.run(3, tracker=fake.__name__)
    assert fake.logged == [(line.step, trackers.numbers(line)) for line in lines(training)]
    assert [step for step, _ in fake.logged] == [1, 2, 3]
    values = fake.logged[0][1]
    assert values["loss"] == lines(training)[0].loss
    assert {"accuracy/slot_1", "tokens_per_second/target", "gradient_norm", "learning_rate"} <= values.keys()
    assert fake.begun[0]["config"]["buckets"]["token_budget"] == 96
    assert fake.begun[0]["name"] == training.directory.name
    assert fake.finished == 1


def test_an_attempt_tells_its_own_lines_only(training: Training, fake: FakeLogger) -> None:
    training.run(2)
    training.run(4, attempt=2, tracker=fake.__name__)
    assert [step for step, _ in fake.logged] == [3, 4]


@pytest.mark.parametrize("fault", [OSError("no network"), SystemExit(3), KeyboardInterrupt()])
def test_a_tracker_that_fails_costs_one_alert(
    training: Training, fake: FakeLogger, fault: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.fault = fault
    assert training.run(3, tracker=fake.__name__).results["saved"] == [3]
    assert capsys.readouterr().err.count("is told nothing more") == 1


def test_a_tracker_that_hangs_is_left_behind(
    training: Training, fake: FakeLogger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trackers, "PATIENCE", 0.2)
    fake.hang.clear()
    started = time.monotonic()
    training.run(3, tracker=fake.__name__)
    assert time.monotonic() - started < 10
    assert "does not answer" in capsys.readouterr().err
    fake.hang.set()


@pytest.mark.parametrize("kind", ["tensorboard", "wandb", "trackio"])
def test_a_missing_package_is_a_config_error_that_names_the_extra(
    training: Training, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setitem(sys.modules, kind, None)
    with pytest.raises(ConfigError, match=rf"train\.tracker: .*{kind}.*dflash-workflow\[track\]"):
        training.run(1, tracker=kind)
    assert not (training.directory / "metrics.jsonl").exists()


def test_tensorboard_writes_scalars(training: Training, require_or_skip: Any) -> None:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        require_or_skip("tensorboard", str(error))
    training.run(2, tracker="tensorboard")
    found = EventAccumulator(str(training.directory / "tensorboard"))
    found.Reload()
    assert [event.step for event in found.Scalars("loss")] == [1, 2]
    assert [event.value for event in found.Scalars("loss")] == pytest.approx([line.loss for line in lines(training)])
