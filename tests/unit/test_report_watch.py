"""`dflash watch`: how far a run is, told from files alone, while it goes on and after the fact."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from report_store import Made, Story, make_run
from rich.console import Console

from dflash.base.records import StopMarker
from dflash.report.watch import Checkpoint, View, Watched, look, plain, table, watch


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


def busy() -> View:
    """A run over hosts with many results, of which two are at work, and 30 checkpoints, of which 28 are trained."""
    view = View("demo", alive=True)
    view.stages = [
        (f"{stage}/{set_}", "0123456789ab", 1, 1) for stage in ("prompts", "completions") for set_ in "abcdef"
    ]
    view.stages += [("train", "ba9876543210", 28, 30), ("evaluate", "0a1b2c3d4e5f", 27, 30)]
    for step in range(100, 3100, 100):
        trained, judged = ("trainbox" if step <= 2800 else ""), ("judge" if step <= 2700 else "")
        view.checkpoints.append(
            Checkpoint(step, trained, trained and "judge, spare", judged, f"{step / 1000:.2f}" if judged else "")
        )
    view.training = ["step 2,834 of 3,000 on trainbox; pid 4711, run demo, since 2026-01-02 03:04:05"]
    view.training += ["tok/s over the last 20 steps: drafter 39,075, target 70,993; features waiting a drafter: 1.5"]
    view.training += ["loss 2.209, 1.17 s a step; waiting: target 2%", "training ends in about 3 min 14 s"]
    view.shares = [
        "trained on: trainbox 28 of 30",
        "shipped to: judge 28, spare 28 of 30",
        "evaluated on: judge 27 of 30",
    ]
    return view


def screen(view: View, width: int, height: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    console.print(table(view, console))
    return str(console.file.getvalue()).splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize("height", [21, 24, 25])
def test_on_a_low_terminal_what_is_finished_is_one_line_and_the_newest_checkpoints_stay(height: int) -> None:
    view = busy()
    lines = screen(view, 80, height)
    assert len(lines) < height, "the last row is the prompt's"
    assert "done: 12 of 14 results (prompts/a, prompts/b, " in "\n".join(lines)
    assert "completions/f)" in "\n".join(lines)
    assert [line.split() for line in lines if line.startswith(("train ", "evaluate "))] == [
        ["train", "ba9876543210", "28", "of", "30"],
        ["evaluate", "0a1b2c3d4e5f", "27", "of", "30"],
    ]
    assert set(view.training[2:] + view.shares) <= set(lines)
    shown = [line.split()[0] for line in lines if line.lstrip()[:1].isdigit()]
    assert "2,800" in shown, "the newest that is trained"
    assert "100" not in shown, "the oldest"
    earlier = next(item for item in range(30) if view.checkpoints[item].step == int(shown[0].replace(",", "")))
    assert lines[-1].startswith(f"+ {earlier} earlier")
    assert len(lines) == height - 1 or len(shown) == 12, "no row is wasted"


@pytest.mark.parametrize(("width", "height"), [(80, 18), (40, 24)])
def test_where_even_that_is_too_much_finished_results_are_counted_and_checkpoints_stay(width: int, height: int) -> None:
    lines = screen(busy(), width, height)
    assert len(lines) == height - 1
    assert "done: 12 of 14 results" in lines
    assert sum(line.startswith(("2,7", "2,8")) for line in lines) == 2


def test_a_high_terminal_shows_every_result_with_its_key() -> None:
    view = busy()
    lines = screen(view, 118, 80)
    assert all(any(line.startswith(name) and key in line for line in lines) for name, key, _, _ in view.stages)


@pytest.mark.parametrize(("width", "gone"), [(80, []), (40, ["shipped to"]), (28, ["shipped to", "trained"])])
def test_on_a_narrow_terminal_tau_stays_and_less_important_columns_go(width: int, gone: list[str]) -> None:
    lines = screen(busy(), width, 60)
    heading = next(line for line in lines if line.lstrip().startswith("step ") and line.endswith("tau"))
    assert [name for name in ("shipped to", "trained", "evaluated") if name not in heading] == gone
    newest = next(line for line in lines if line.lstrip().startswith("2,700"))
    assert newest.endswith("2.70")
    assert max(map(len, lines)) <= width
