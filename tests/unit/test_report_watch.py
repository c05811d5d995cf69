"""`dflash watch`: how far a run is, told from files alone, while it goes on and after the fact."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from report_store import Made, Story, make_run
from rich.console import Console

from dflash.base.records import StopMarker
from dflash.report.watch import Watched, look, plain, table, watch


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return make_run(tmp_path)


def watched(made: Made, report: Path | None = None) -> Watched:
    results = [(entry.name, entry.stage, entry.key) for entry in made.manifest.stages]
    return Watched("demo", made.store, results, made.manifest.steps, report or made.store / "none")


def test_a_finished_run_shows_every_step_from_trained_to_evaluated_with_tau(made: Made, tmp_path: Path) -> None:
    (tmp_path / "receipt.json").write_text("{}")
    text = "\n".join(plain(look(watched(made, tmp_path))))
    assert text.startswith("run demo: done")
    assert "train" in text
    assert "6 of 6" in text
    assert "step     300: trained -> evaluated, tau 2.41" in text
    assert "tok/s over the last 20 steps: drafter 1" in text


def test_what_is_not_evaluated_yet_is_told_apart_from_what_is_not_trained(made: Made) -> None:
    (made.directory("evaluate") / "step_250.json").unlink()
    (made.directory("evaluate") / "step_300.json").unlink()
    (made.directory("train") / "receipts/step_300.json").unlink()
    lines = plain(look(watched(made)))
    assert "  step     250: trained" in lines
    assert "  step     300: to come" in lines
    assert lines[0] == "run demo: not at work"


def test_a_shipment_stands_between_trained_and_evaluated(made: Made) -> None:
    receipt = made.store / "ship" / made.directory("train").name / "gpu2" / "step_300.json"
    receipt.parent.mkdir(parents=True)
    receipt.write_text("{}")
    assert any(
        line.startswith("  step     300: trained -> shipped to gpu2 -> evaluated")
        for line in plain(look(watched(made)))
    )


def test_a_pipe_gets_plain_lines_and_an_end_when_nobody_is_at_work(made: Made) -> None:
    stream = io.StringIO()
    watch(watched(made), stream)
    assert "\x1b" not in stream.getvalue()
    assert stream.getvalue().splitlines() == plain(look(watched(made)))


def test_a_stop_and_a_failure_are_told(made: Made) -> None:
    StopMarker(run="demo", by="somebody", at="2026-01-02T03:04:05").write(made.directory("train") / "stop.json")
    (made.directory("train") / "failure.step_300.json").write_text("{}")
    text = "\n".join(plain(look(watched(made))))
    assert "stopped by somebody at 2026-01-02 03:04:05" in text
    assert "FAILED, see " in text


def test_torn_metrics_and_damaged_rows_never_end_the_view(made: Made) -> None:
    metrics = made.directory("train") / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-40] + b"\xff")
    (made.directory("evaluate") / "step_300/rows.json").write_text("[{")
    text = "\n".join(plain(look(watched(made))))
    assert "step     300: trained -> evaluated, tau ?" in text
    assert "loss " in text


def test_many_checkpoints_are_counted_and_the_newest_shown(tmp_path: Path) -> None:
    made = make_run(tmp_path, Story(steps=list(range(1, 31))))
    lines = plain(look(watched(made)))
    assert "  and 18 more checkpoints" in lines
    assert any("step      30" in line for line in lines)


@pytest.mark.parametrize("width", [60, 118])
def test_the_terminal_view_fits_and_holds_the_same_facts(made: Made, width: int) -> None:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(table(look(watched(made))))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= width
    assert "6 of 6" in text
    assert "2.41" in text
