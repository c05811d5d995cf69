"""The tables that people and scripts read: the tidy csv, the terminal's table, and the words below it."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from report_store import Story, make_run

from dflash.evaluate.metrics import COLUMNS
from dflash.report.tables import csv_text, results_table, shown_steps, tau_tables, tidy, verdict

REPORT = Path("results/runs/demo/latest/report.html")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def row(**values: Any) -> dict[str, Any]:
    base = dict.fromkeys(COLUMNS, "") | {
        "train_key": "0123456789ab",
        "step": 100,
        "drafter": "trained",
        "prompt_set": "held_out",
        "length_bucket": "all",
        "kernel": "torch",
        "method": "chain",
        "budget": 7,
        "block_size": 8,
        "horizon": 7,
        "sampling": "greedy",
        "convention": "committed_with_bonus",
        "metric": "tau_pooled",
        "value": 2.0,
        "ci_low": 1.9,
        "ci_high": 2.1,
        "n": 50,
    }
    return base | values


def frame_of(chain: tuple[float, float, float], **rivals: tuple[float, float, float]) -> pd.DataFrame:
    rows = [
        row(method=name, value=value, ci_low=low, ci_high=high)
        for name, (value, low, high) in {"chain": chain, **rivals}.items()
    ]
    return tidy(rows, "demo")


def piped(frame: pd.DataFrame) -> str:
    stream = io.StringIO()
    results_table(frame, REPORT, stream=stream)
    return stream.getvalue()


def test_the_csv_has_the_promised_columns_in_their_order_and_steps_ascend(tmp_path: Path) -> None:
    made = make_run(tmp_path, Story(steps=[50, 100, 1000, 200]))
    made.report()
    read = pd.read_csv(made.workdir / "evaluations.csv", keep_default_na=False, na_values=[""])
    assert ",".join(read.columns) == (
        "run,train_key,step,drafter,prompt_set,length_bucket,kernel,method,budget,block_size,horizon,sampling,convention,"
        "metric,value,ci_low,ci_high,n"
    )
    assert read["step"].is_monotonic_increasing
    assert sorted(set(read["step"])) == [50, 100, 200, 1000]
    assert set(read["run"]) == {"demo"}
    assert set(read["train_key"]) == {made.directory("train").name}
    for name in ("step", "budget", "block_size", "horizon", "n"):
        assert pd.api.types.is_integer_dtype(read[name]), name
    for name in ("value", "ci_low", "ci_high"):
        assert pd.api.types.is_float_dtype(read[name]), name


def test_the_csv_holds_values_to_the_last_bit() -> None:
    value = 1.0000000000000002
    read = pd.read_csv(io.StringIO(csv_text(tidy([row(value=value)], "demo"))), dtype={"value": str})
    assert float(read["value"][0]) == value


def test_a_missing_budget_stays_empty_and_others_stay_integers() -> None:
    text = csv_text(tidy([row(budget=None), row(budget=16)], "demo"))
    budgets = [line.split(",")[COLUMNS.index("budget")] for line in text.splitlines()[1:]]
    assert budgets == ["", "16"]


@pytest.mark.parametrize("damage", [{"value": "much"}, {"surplus": 1}])
def test_a_row_that_is_no_row_is_refused(damage: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"much|surplus"):
        tidy([row(**damage)], "demo")


def test_only_the_clipped_pooled_tau_over_all_lengths_makes_the_table() -> None:
    rows = [
        row(value=2.0),
        row(value=9.0, convention="committed_with_bonus_unclipped"),
        row(value=8.0, metric="tau_request_mean"),
        row(value=7.0, length_bucket="0-128"),
    ]
    (table,) = tau_tables(tidy(rows, "demo"))
    assert [(step, cells["chain"].value) for step, cells in table.rows] == [(100, 2.0)]


def test_columns_are_drafter_first_trees_by_budget_then_foreign_drafters_then_baselines() -> None:
    rows = [
        row(method="ngram"),
        row(method="tree", budget=64),
        row(method="chain", drafter="published"),
        row(method="tree", budget=8),
        row(),
        row(method="prompt_lookup"),
    ]
    (table,) = tau_tables(tidy(rows, "demo"))
    assert table.columns == ("chain", "tree-8", "tree-64", "chain (published)", "prompt lookup", "n-gram")


@pytest.mark.parametrize(
    ("chain", "ngram", "standing", "phrase"),
    [
        ((2.0, 1.9, 2.1), (1.5, 1.4, 1.6), "beats", "beats prompt lookup (1.10) and n-gram (1.50)"),
        ((2.0, 1.8, 2.2), (1.85, 1.8, 1.9), "unclear", "within the intervals of, n-gram"),
        ((1.4, 1.3, 1.5), (1.5, 1.4, 1.6), "loses", "does not beat n-gram"),
        ((1.5, 1.5, 1.5), (1.5, 1.5, 1.5), "loses", "does not beat n-gram"),
    ],
)
def test_the_verdict_says_whether_the_drafter_beats_the_baselines(
    chain: tuple[float, float, float], ngram: tuple[float, float, float], standing: str, phrase: str
) -> None:
    frame = frame_of(chain, ngram=ngram, prompt_lookup=(1.1, 1.0, 1.2))
    found = verdict(tau_tables(frame)[0])
    assert found.standing == standing
    assert phrase in found.words
    last = piped(frame).splitlines()[-1]
    assert phrase in last
    assert str(REPORT) in last


def test_without_baselines_nothing_is_called_proved() -> None:
    assert verdict(tau_tables(frame_of((2.0, 1.9, 2.1)))[0]).standing == "unknown"


def test_the_piped_table_is_plain_and_aligned(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    made.report()
    text = piped(pd.read_csv(made.workdir / "evaluations.csv"))
    assert text.isascii()
    assert "\x1b" not in text
    heading = next(line for line in text.splitlines() if line.lstrip().startswith("step"))
    assert heading.split() == ["step", "chain", "tree-8", "tree-16", "prompt", "lookup", "n-gram", "n"]
    body = [line for line in text.splitlines() if line.lstrip()[:1].isdigit()]
    assert len(body) == 6
    assert {len(line) for line in body} == {len(heading)}
    assert body[-1].split()[:4] == ["300", "2.41", "[2.32,", "2.50]"]


def test_a_terminal_gets_a_drawn_table_with_the_same_numbers() -> None:
    stream = Terminal()
    results_table(frame_of((2.0, 1.9, 2.1), ngram=(1.5, 1.4, 1.6)), REPORT, stream=stream)
    assert "─" in stream.getvalue()
    assert "2.00" in stream.getvalue()
    assert "beats n-gram (1.50)" in stream.getvalue()


@pytest.mark.parametrize(
    ("columns", "shown", "hidden"),
    [(120, "2.00 [1.90, 2.10]", ""), (40, "1.90-2.10", "["), (30, "2.00", "1.90"), (12, "2.00", "─")],
)
def test_no_number_is_ever_cut_however_narrow_the_terminal(
    monkeypatch: pytest.MonkeyPatch, columns: int, shown: str, hidden: str
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Terminal()
    results_table(frame_of((2.0, 1.9, 2.1), ngram=(1.5, 1.4, 1.6)), REPORT, stream=stream)
    text = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
    assert shown in text
    assert not hidden or hidden not in text
    assert "…" not in text


def test_a_long_run_shows_twenty_steps_with_the_first_and_the_last_and_says_so() -> None:
    assert shown_steps(1000)[0] == 0
    assert shown_steps(1000)[-1] == 999
    text = piped(tidy([row(step=step) for step in range(10, 1010, 10)], "demo"))
    assert len([line for line in text.splitlines() if line.lstrip()[:1].isdigit() and "[" in line]) == 20
    assert "80 more steps stand in evaluations.csv" in text


def test_with_no_evaluation_the_last_line_says_so() -> None:
    assert piped(tidy([], "demo")) == f"No checkpoint has been evaluated yet. Report: {REPORT}\n"
