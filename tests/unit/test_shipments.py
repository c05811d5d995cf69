"""A shipment that failed for good is not tried again in the same invocation, and its cause is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from plan_store import make_folder, plan_of

from dflash import run as workflow
from dflash import shipments
from dflash.base.errors import ConfigError, CorruptError, DflashError, PermanentError, TransientError
from dflash.runner import INVOCATION, RepeatedFailure
from dflash.shipments import failure_path, ship_result


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(make_folder(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(INVOCATION, "1:1")
    path = Path("results/store/ship/0123456789ab/a/step_2.json")
    path.parent.mkdir(parents=True)
    return path


def attempt(record: Path, monkeypatch: pytest.MonkeyPatch, error: DflashError | None) -> None:
    def ship(record: Path, *_: object) -> None:
        if error is not None:
            raise error
        record.write_text(json.dumps({}))

    monkeypatch.setattr(shipments, "_ship", ship)
    ship_result(record, Path("results/store"), {"stage": "train"})


@pytest.mark.parametrize("kind", [PermanentError, ConfigError])
def test_what_failed_for_good_stops_at_once_is_explained_and_is_tried_again_later(
    record: Path, monkeypatch: pytest.MonkeyPatch, kind: type[DflashError]
) -> None:
    with pytest.raises(kind, match="the disk is full"):
        attempt(record, monkeypatch, kind("the disk is full"))
    with pytest.raises(RepeatedFailure, match="the disk is full"):
        attempt(record, monkeypatch, None)
    assert not record.exists()
    assert workflow._explain_failure(plan_of(), 0) == ["ship train 0123456789ab to a: the disk is full"]
    monkeypatch.setenv(INVOCATION, "2:2")
    attempt(record, monkeypatch, None)
    assert record.exists()
    assert not failure_path(record).exists()


@pytest.mark.parametrize("kind", [CorruptError, TransientError])
def test_what_a_retry_may_help_is_retried(
    record: Path, monkeypatch: pytest.MonkeyPatch, kind: type[DflashError]
) -> None:
    with pytest.raises(kind):
        attempt(record, monkeypatch, kind("bad luck"))
    attempt(record, monkeypatch, None)
    assert record.exists()
