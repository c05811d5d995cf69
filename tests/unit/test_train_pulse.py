"""A launcher tells the rank that hangs from those that wait for it, and is not misled by its own sleep."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator

import pytest

from dflash.train import pulse
from dflash.train.pulse import Pulse, Watch, pack_note

ALL = range(3)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: found[0])
    return found


@pytest.fixture
def watch(clock: list[float]) -> Iterator[Watch]:
    made = Watch(3, 10.0)
    yield made
    made.close()


def put(watch: Watch, rank: int, seen: float, doing: str, waiting: bool, since: float) -> None:
    content = struct.pack("d", seen) + pack_note(doing, waiting, since, 7)
    os.pwrite(watch.descriptor, content, rank * pulse.SLOT)


def later(watch: Watch, clock: list[float], seconds: float) -> tuple[int, str] | None:
    """Looks once a second, as a launcher would."""
    found = None
    for _ in range(round(seconds)):
        clock[0] += 1
        found = watch.stuck(ALL)
    return found


def test_one_that_works_too_long_is_stuck_and_those_that_wait_are_not(watch: Watch, clock: list[float]) -> None:
    for rank in ALL:
        put(watch, rank, 1011.0, "waiting for batch 9", rank != 1, 1000.0)
    put(watch, 1, 1011.0, "learning", False, 1000.5)
    assert later(watch, clock, 10) is None
    assert later(watch, clock, 1) == (1, "made no progress for 10 s (in step 7, learning)")
    assert watch.stuck([0, 2]) is None, "it has ended"


def test_one_that_gives_no_sign_is_stuck_even_while_it_waits(watch: Watch, clock: list[float]) -> None:
    for rank in ALL:
        put(watch, rank, 1010.0, "waiting", True, 1000.0)
    put(watch, 2, 1000.5, "comparing notes", True, 1000.0)
    assert later(watch, clock, 10) is None
    assert later(watch, clock, 1) == (2, "gave no sign of life for 10 s (in step 7, comparing notes)")


def test_all_waiting_for_each_other_is_left_to_the_library(watch: Watch, clock: list[float]) -> None:
    for rank in ALL:
        put(watch, rank, 2000.0, "waiting", True, 1000.0)
    assert later(watch, clock, 100) is None


def test_a_start_may_take_longer_than_a_step(watch: Watch, clock: list[float]) -> None:
    assert later(watch, clock, pulse.PATIENCE) is None
    assert later(watch, clock, 1) == (0, "made no progress for 601 s (in step 0, starting)")


def test_a_launcher_that_slept_blames_nobody_for_what_it_missed(watch: Watch, clock: list[float]) -> None:
    for rank in ALL:
        put(watch, rank, 1000.0, "learning", False, 1000.0)
    clock[0] += 500
    assert watch.stuck(ALL) is None
    assert later(watch, clock, 10) is None
    assert later(watch, clock, 1) is not None


def test_a_note_that_is_being_written_does_not_count(watch: Watch, clock: list[float]) -> None:
    put(watch, 0, 1000.0, "learning", False, 1000.0)
    watch.signs()
    os.pwrite(watch.descriptor, b'[false, 10"', pulse.HEAD)
    assert watch.signs()[0].doing == "learning"


def test_a_rank_tells_what_it_does_and_for_whom_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(2, 10.0)
    monkeypatch.setenv(pulse.VARIABLE, str(watch.descriptor))
    mine = Pulse()
    assert not mine.watched
    mine.begin(1)
    assert mine.watched
    mine.works("learning", 4)
    before = watch.signs()[1]
    assert (before.doing, before.waiting, before.step) == ("learning", False, 4)
    with mine.waits("waiting for rank 0 " + "x" * 300):
        assert watch.signs()[1].waiting
        assert watch.signs()[1].doing.startswith("waiting for rank 0 xxx")
    after = watch.signs()[1]
    assert (after.doing, after.waiting, after.since > before.since) == ("learning", False, True)
    deadline = time.monotonic() + 10
    while watch.signs()[1].seen == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert time.monotonic() - watch.signs()[1].seen < 10
    assert watch.signs()[0].seen == 0
    mine._descriptor = None  # its thread ends


def test_nobody_listens_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(pulse.VARIABLE, raising=False)
    mine = Pulse()
    mine.begin(0)
    mine.works("learning", 1)
    with mine.waits("somebody"):
        pass
    assert not mine.watched
