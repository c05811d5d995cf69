"""A training is seen from its files wherever they are: only what is new goes over, and silence is told with its age."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from report_store import Made, make_run

from dflash.hosts import lease
from dflash.hosts.entry import HostEntry
from dflash.hosts.host import LocalHost
from dflash.report import feed as feeds
from dflash.report.feed import Feed, Heard, age_in_words
from dflash.report.glance import METRICS, TAIL, Place, grown, parsed, read_training
from dflash.report.watch import Watched, look, plain


def test_a_second_look_reads_only_what_was_added_and_never_half_a_line(tmp_path: Path) -> None:
    path, place = tmp_path / METRICS, Place()
    assert grown(path, place) == ""
    path.write_text("one\ntwo\nthr")
    assert grown(path, place) == "one\ntwo\n"
    with path.open("a") as stream:
        stream.write("ee\n")
    assert grown(path, place) == "three\n"
    assert grown(path, place) == ""


def test_a_file_that_was_made_anew_is_read_anew(tmp_path: Path) -> None:
    path, place = tmp_path / METRICS, Place()
    path.write_text("old and long\n")
    grown(path, place)
    other = tmp_path / "other"
    other.write_text("a new file, longer than the old one\n")
    other.replace(path)
    assert grown(path, place) == "a new file, longer than the old one\n"
    path.write_text("x\n")
    assert grown(path, place) == "x\n"


def test_of_a_long_file_only_the_tail_is_read_and_a_cut_line_does_no_harm(tmp_path: Path) -> None:
    path, place = tmp_path / METRICS, Place()
    path.write_text("x" * 100 + "\n" + "".join(f"{number}\n" for number in range(TAIL)))
    text = grown(path, place)
    assert len(text) <= TAIL
    assert text.endswith(f"\n{TAIL - 1}\n")
    assert place.offset == path.stat().st_size


def test_lines_that_cannot_be_read_are_left_out() -> None:
    assert parsed('{"torn\nnot json\n') == []


@pytest.fixture
def far(tmp_path: Path) -> Iterator[tuple[Made, LocalHost]]:
    """A run whose training lies in the workdir of a host, at work there."""
    made = make_run(tmp_path / "work")
    workdir = tmp_path / "far"
    store = workdir / "results/store/train"
    store.mkdir(parents=True)
    made.directory("train").rename(store / made.directory("train").name)
    made.directory("train").mkdir()
    folder = store / made.directory("train").name
    held = lease.acquire([folder / "lease.json"], lease.new_record("cpu", folder.name, "demo"))
    yield made, LocalHost("trainbox", HostEntry(kind="local", workdir=workdir))
    held.release()


def until(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def watched(made: Made, feed: Feed) -> Watched:
    results = [(entry.name, entry.stage, entry.key) for entry in made.manifest.stages]
    return Watched("demo", made.store, results, made.manifest.steps, made.store / "none", feed)


def far_folder(made: Made, host: LocalHost) -> Path:
    return host.workdir / "results/store/train" / made.directory("train").name


def test_what_a_host_writes_is_seen_as_it_comes_and_its_checkpoints_before_their_receipts(
    far: tuple[Made, LocalHost],
) -> None:
    made, host = far
    folder = far_folder(made, host)
    feed = Feed(host, "gpu", folder.name)
    try:
        feed.wait(60)
        view = look(watched(made, feed))
        text = "\n".join(plain(view))
        assert view.heading() == "training"
        assert "step 300 of 300 on trainbox; pid" in text
        assert "step     300: trained on trainbox" in text
        last = json.loads((folder / METRICS).read_text().splitlines()[-1])
        with (folder / METRICS).open("a") as stream:
            stream.write(json.dumps({**last, "step": 301, "loss": 0.125}) + "\n")
        until(lambda: "loss 0.125" in "\n".join(plain(look(watched(made, feed)))), "the new line")
    finally:
        feed.close()


def heard_steps(feed: Feed) -> list[int]:
    training = feed.heard().training
    return [line.step for line in training.lines] if training is not None else []


def test_a_connection_that_breaks_goes_on_where_it_was_and_a_file_made_anew_is_shown_alone(
    far: tuple[Made, LocalHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds, "RETRY", (0.05, 0.05))
    made, host = far
    metrics = far_folder(made, host) / METRICS
    lines = metrics.read_text().splitlines()[-3:]  # fewer than are kept, so that a line that comes twice is seen
    metrics.write_text("\n".join([*lines, ""]))
    last = json.loads(lines[-1])
    feed = Feed(host, "gpu", metrics.parent.name)
    try:
        until(lambda: heard_steps(feed)[-1:] == [300], "what was there")
        before, process = heard_steps(feed), feed._process
        assert process is not None
        process.kill()
        process.wait()
        with metrics.open("a") as stream:
            stream.write(json.dumps({**last, "step": 301}) + "\n")
        until(lambda: heard_steps(feed)[-1:] == [301], "the connection after it")
        assert heard_steps(feed) == [*before, 301], "no line comes twice"
        other = metrics.with_name("other")
        other.write_text(json.dumps({**last, "step": 1}) + "\n")
        other.replace(metrics)
        until(lambda: heard_steps(feed)[-1:] == [1], "the new file")
        assert heard_steps(feed) == [1], "lines of the old file are not those of the new one"
    finally:
        feed.close()


def test_the_process_there_ends_with_the_view(far: tuple[Made, LocalHost]) -> None:
    made, host = far
    feed = Feed(host, "gpu", far_folder(made, host).name)
    feed.wait(60)
    process = feed._process
    assert process is not None
    assert process.poll() is None
    feed.close()
    until(lambda: process.poll() is not None, "the end of the process")


def silent(training: bool, age: float, trouble: str, folder: Path) -> Feed:
    """A feed that has heard something `age` seconds ago, or nothing."""
    feed = Feed.__new__(Feed)
    heard = Heard("trainbox", read_training(folder) if training else None, age, trouble)
    feed.heard = lambda: heard  # type: ignore[method-assign]
    return feed


def test_silence_is_told_with_the_age_of_what_is_shown(far: tuple[Made, LocalHost]) -> None:
    made, host = far
    view = look(watched(made, silent(True, 42.0, "the connection failed: timed out", far_folder(made, host))))
    assert view.heading() == "training when last heard"
    assert view.goes_on()
    assert (
        "  training: trainbox has not been heard for 42 s (the connection failed: timed out); shown is what it said then"
        in plain(view)
    )


def test_a_host_that_was_never_heard_leaves_what_had_come_here_with_its_age(far: tuple[Made, LocalHost]) -> None:
    made, host = far
    copy = made.directory("train") / METRICS
    copy.write_bytes((far_folder(made, host) / METRICS).read_bytes())
    os.utime(copy, (time.time() - 600, time.time() - 600))
    view = look(watched(made, silent(False, 5.0, "the connection failed: no route", copy.parent)))
    text = "\n".join(plain(view))
    assert (
        "trainbox cannot be reached (the connection failed: no route); shown is what had come here 10 min ago" in text
    )
    assert "loss " in text
    assert not view.goes_on()
    assert view.heading() == "not at work"


@pytest.mark.parametrize(("seconds", "words"), [(42, "42 s"), (600, "10 min"), (9000, "2 h")])
def test_ages_read_well(seconds: float, words: str) -> None:
    assert age_in_words(seconds) == words
