"""A lost connection is made again, within bounds; a host that refuses us or never answered is not waited for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dflash import remote
from dflash.base.errors import CorruptError, PermanentError, TransientError
from dflash.plan.places import Home, Moving, home_path, read_home
from dflash.remote import LinkLost, Unreachable, persist, raise_error
from dflash.runner import Job
from dflash.stages import BY_NAME


@dataclass
class Box:
    """A host that answers `true` as the list says: an error, or None when it is well."""

    answers: list[Exception | None] = field(default_factory=list)
    id: str = "box"

    def run(self, argv: list[str], *, timeout: float) -> None:
        answer = self.answers.pop(0) if self.answers else None
        if answer is not None:
            raise answer


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds * 20

    monkeypatch.setattr(remote.time, "sleep", sleep)
    monkeypatch.setattr(remote.time, "monotonic", lambda: clock[0])


def attempts(*outcomes: Exception | str) -> Callable[[], str]:
    left = list(outcomes)

    def attempt() -> str:
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return attempt


def test_a_lost_connection_is_made_again_and_said() -> None:
    said: list[str] = []
    box = Box([TransientError("no route"), None])
    found = persist(box, said.append, attempts(LinkLost("cut"), Unreachable("still away"), "receipt"))  # type: ignore[arg-type]
    assert found == "receipt"
    assert said.count("the connection to box is lost; trying again") == 2


def test_a_host_that_never_answered_is_not_waited_for() -> None:
    with pytest.raises(Unreachable, match="no route"):
        persist(Box(), print, attempts(Unreachable("no route"), "never"))  # type: ignore[arg-type]


def test_silence_is_bounded_and_says_that_training_goes_on() -> None:
    box = Box([TransientError("no route")] * 1000)
    with pytest.raises(TransientError, match="nothing heard") as lost:
        persist(box, lambda text: None, attempts(LinkLost("cut"), "never"))  # type: ignore[arg-type]
    assert "attaches to it" in lost.value.message()


def test_a_stage_whose_connection_breaks_every_time_is_given_up() -> None:
    with pytest.raises(LinkLost):
        persist(Box(), lambda text: None, attempts(*[LinkLost("cut")] * 3, "never"), limit=3)  # type: ignore[arg-type]


def test_a_host_that_refuses_us_is_not_asked_again() -> None:
    box = Box([PermanentError("the host key is not the one that is pinned")])
    with pytest.raises(PermanentError, match="pinned"):
        persist(box, lambda text: None, attempts(LinkLost("cut"), "never"))  # type: ignore[arg-type]


def test_a_failure_there_is_the_same_failure_here() -> None:
    raise_error({"error": None}, Box())  # type: ignore[arg-type]
    told = {"kind": "corrupt", "what": "bad bytes", "where": "/srv/x", "remedy": "Look."}
    with pytest.raises(CorruptError) as failed:
        raise_error({"error": told}, Box())  # type: ignore[arg-type]
    assert failed.value.message() == "box:/srv/x: bad bytes. Look."


def training_on(folder: Path, host: str) -> Job:
    return Job(BY_NAME["train"], folder / "params.json", folder, 2, {"host": host})


def ask_a(folder: Path, error: Exception | None = None, host: str = "a") -> Home | None:
    """Asks a host for a step; returns where the training was said to live meanwhile."""
    with remote._at_home(training_on(folder, host)):
        found = read_home(folder)
        if error is not None:
            raise error
    return found


def test_where_a_training_lives_is_noted_before_its_host_is_asked_unless_it_was_never_reached(tmp_path: Path) -> None:
    with pytest.raises(Unreachable):
        ask_a(tmp_path, Unreachable("no route"))
    assert read_home(tmp_path) is None
    assert ask_a(tmp_path) == Home(place="a")
    with pytest.raises(Unreachable):
        ask_a(tmp_path, Unreachable("no route"))
    assert read_home(tmp_path) == Home(place="a")


def test_several_steps_that_do_not_reach_the_host_all_say_so(tmp_path: Path) -> None:
    def ask() -> None:
        with remote._at_home(training_on(tmp_path, "a")):
            home_path(tmp_path).unlink()  # by another step, which did not reach it either
            raise Unreachable("no route")

    with pytest.raises(Unreachable, match="no route"):
        ask()


def test_a_training_is_not_asked_for_where_it_does_not_live_or_while_it_moves(tmp_path: Path) -> None:
    Home(place="a").write(home_path(tmp_path))
    with pytest.raises(PermanentError, match=r"was begun on a, and roles\.gpu is b now"):
        ask_a(tmp_path, host="b")
    Home(place="a", moving=Moving(to="b", token="t")).write(home_path(tmp_path))
    with pytest.raises(PermanentError, match="is on its way from a to b"):
        ask_a(tmp_path)
