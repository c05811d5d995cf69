"""The best split of the GPUs follows from two rates, and the arithmetic is shown."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from plan_store import make_folder, plan_of
from typer.testing import CliRunner

from dflash.base.errors import ConfigError, PermanentError
from dflash.base.records import MetricsLine
from dflash.cli import app
from dflash.plan.code import source_root
from dflash.plan.topology import Rates, best, busy, predict, rates_of_run, read_rates, render

PAPER = Rates(target=8_900, drafter=6_800, gpus=8)
"""The rates of the design's numbers to beat, one H200."""


def line(step: int, attempt: int = 1, **rates: float) -> str:
    values: dict[str, Any] = {
        "attempt": attempt,
        "step": step,
        "time": "2026-01-01T00:00:00.000+00:00",
        "loss": 1.0,
        "accuracy_by_slot": [],
        "learning_rate": 1e-3,
        "gradient_norm": 1.0,
        "anchors": 1,
        "tokens": 100,
        "seconds": 1.0,
        "tokens_per_second": rates,
        "padding_share": 0.0,
        "batch_ids": [],
        "buckets": [],
    }
    return MetricsLine.model_validate(values).model_dump_json() + "\n"


def test_the_slower_side_sets_the_pace_and_the_other_waits() -> None:
    five = next(one for one in predict(PAPER, 8) if one.targets == 5)
    assert five.tokens_per_second == min(5 * 8_900, 3 * 6_800) == 20_400
    assert five.drafters_starve == 0
    assert five.targets_wait == pytest.approx(1 - 20_400 / 44_500)
    starved = next(one for one in predict(PAPER, 8) if one.targets == 1)
    assert starved.tokens_per_second == 8_900
    assert starved.drafters_starve == pytest.approx(1 - 8_900 / (7 * 6_800))
    assert starved.verdict() == "drafters starve 81%"


def test_the_best_split_is_the_fastest_and_of_equals_the_one_that_wastes_least() -> None:
    chosen = best(predict(PAPER, 8))
    assert (chosen.targets, chosen.drafters) == (4, 4)
    assert chosen.tokens_per_second == max(one.tokens_per_second for one in predict(PAPER, 8)) == 4 * 6_800
    one_to_four, _, three_to_two, _ = predict(Rates(target=10, drafter=5), 5)
    assert one_to_four.tokens_per_second == three_to_two.tokens_per_second == 10
    assert best([three_to_two, one_to_four]) == one_to_four, "its drafters could do 20, those targets 30"


def test_batches_that_do_not_divide_count_as_the_busiest_rank() -> None:
    assert [busy(ranks, 12) for ranks in (1, 2, 3, 4, 5, 6, 7, 12)] == [1, 2, 3, 4, 4, 6, 6, 12]
    assert busy(5, None) == 5
    even, uneven = predict(PAPER, 8), predict(PAPER, 8, batches_per_step=12)
    assert next(one for one in uneven if one.targets == 5).target_side == 4 * 8_900
    assert next(one for one in even if one.targets == 5).target_side == 5 * 8_900


def test_no_role_has_more_ranks_than_a_step_has_batches() -> None:
    assert {(one.targets, one.drafters) for one in predict(PAPER, 4, batches_per_step=2)} == {(2, 2)}
    with pytest.raises(ConfigError, match="no split"):
        best(predict(PAPER, 4, batches_per_step=1))


def test_one_gpu_cannot_be_split() -> None:
    with pytest.raises(ConfigError, match="colocate"):
        predict(PAPER, 1)


def test_the_table_shows_arithmetic_verdict_and_what_was_measured() -> None:
    measured = [{"targets": 5, "drafters": 3, "tokens_per_second": 19_000.0}]
    rates = Rates.model_validate({**PAPER.model_dump(), "measured": measured})
    text = render(rates, 8, 12, predict(rates, 8, 12))
    row = next(row for row in text.splitlines() if row.startswith("  5:3"))
    assert "min(4 * 8,900, 3 * 6,800) = 20,400 tok/s, targets wait 43%; measured 19,000 (0.93 of it)" in row
    assert text.count("<- best") == 1
    assert "1 / (1/8,900 + 1/6,800) = 3,855 tok/s" in text


@pytest.mark.parametrize("content", ['{"target": 1}', '{"target": 0, "drafter": 1}', "[]", "nonsense"])
def test_a_file_without_rates_is_refused_with_its_name(tmp_path: Path, content: str) -> None:
    path = tmp_path / "rates.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="no rates") as refused:
        read_rates(path)
    assert str(path) in refused.value.message()


def test_rates_of_a_run_are_those_of_one_rank_without_the_first_steps(tmp_path: Path) -> None:
    (tmp_path / "attempts").mkdir()
    topology = {"colocate": False, "targets": 5, "drafters": 2}
    (tmp_path / "attempts/1.json").write_text(json.dumps({"placement": {"values": {"topology": topology}}}))
    lines = [line(step, target=1.0, drafter=1.0) for step in (1, 2)]
    lines += [line(step, target=500.0, drafter=80.0) for step in (3, 4, 5)]
    lines += [line(step, attempt=2, target=9.0, drafter=9.0) for step in (6, 7)]  # its first steps: not counted either
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    rates = rates_of_run(tmp_path, "demo")
    assert (rates.target, rates.drafter) == (100.0, 40.0)
    assert "3 steps" in rates.source


def test_a_run_that_has_not_trained_says_how_to_measure(tmp_path: Path) -> None:
    with pytest.raises(PermanentError, match="dflash rehearse demo"):
        rates_of_run(tmp_path, "demo")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(make_folder(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_the_command_reads_a_rates_file_and_knows_the_batches_of_a_step(folder: Path) -> None:
    plan_of(batching={"batches_per_step": 12})
    (folder / "rates.json").write_text(json.dumps({"target": 8_900, "drafter": 6_800, "gpus": 8}))
    done = CliRunner().invoke(
        app, ["plan", "--configfile", "config.yaml", "--topology", "--rates", "rates.json", "--json"]
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert (found["gpus"], found["batches_per_step"], len(found["splits"])) == (8, 12, 7)
    assert found["best"] == {"targets": 4, "drafters": 4}
    assert found["splits"][4]["tokens_per_second"] == 20_400


def test_what_four_gpus_have_shown_stands_beside_what_was_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rates file in the docstring of `tests/bench/gpu/topology.py`, and what that says of the full-size job."""
    text = ast.get_docstring(ast.parse((source_root() / "tests/bench/gpu/topology.py").read_text())) or ""
    written = text[text.index('{"target"') : text.index("]}") + 2]
    (tmp_path / "rates.json").write_text(written)
    rates = read_rates(tmp_path / "rates.json")
    monkeypatch.chdir(source_root())
    config = ["plan", "--topology", "--configfile", "config/qwen3.6-27b.yaml", "--rates", str(tmp_path / "rates.json")]
    four = CliRunner().invoke(app, config).stdout
    assert "3:1  min(3 * 7,450, 1 * 4,500) = 4,500 tok/s, targets wait 80%; measured 5,635 (1.25 of it)" in four
    assert "measured 7,946 (0.94 of it)" in four, "15 batches over 2 drafters count as 1.875"
    assert [one.measured for one in predict(rates, 2)] == [4742]
    eight = CliRunner().invoke(app, [*config, "--gpus", "8"]).stdout
    assert "3:5  min(3 * 7,450, 5 * 4,500) = 22,350 tok/s, drafters starve 1%  <- best" in eight
    assert "5:3  min(5 * 7,450, 3 * 4,500) = 13,500 tok/s, targets wait 64%" in eight
