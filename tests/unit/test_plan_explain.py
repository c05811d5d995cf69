"""The reason given for a stale stage is its cause: which value, from where, which input, which module."""

from __future__ import annotations

from pathlib import Path

import pytest
from plan_store import make_folder, plan_of, stand

from dflash.base.records import ParamsFile
from dflash.plan.explain import explain, reasons
from dflash.plan.graph import Plan

ROAD = ("prompts/short", "completions/short", "dataset", "buckets")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(make_folder(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def why(plan: Plan) -> dict[str, str]:
    return {plan.node(*identity).name: words for identity, words in reasons(plan).items()}


def make(plan: Plan) -> None:
    for name in ROAD:
        stand(plan.runs[0].nodes[name])


def test_of_what_never_was_made_nothing_else_is_said() -> None:
    assert set(why(plan_of()).values()) == {"never made"}


def test_a_changed_value_is_named_with_both_values_and_the_line_it_stands_on() -> None:
    make(plan_of())
    after = plan_of(batching={"max_batch_size": 4})
    line = next(n for n, row in enumerate(Path("config.yaml").read_text().splitlines(), 1) if "max_batch_size" in row)
    assert why(after)["buckets"] == f"max_batch_size: 8 -> 4 (config.yaml:{line})"
    assert "dataset" not in why(after)


def test_what_follows_a_changed_stage_names_that_input() -> None:
    make(plan_of())
    found = why(plan_of(dataset={"split_seed": 5}))
    assert found["dataset"].startswith("split_seed: 0 -> 5")
    assert found["buckets"] == "dataset changed"


def test_a_changed_module_is_named() -> None:
    plan = plan_of()
    node = plan.runs[0].nodes["prompts/short"]
    old = ParamsFile.model_validate({**node.params.model_dump(), "code": {"digest": "0" * 16, "modules": {}}})
    old.key = old.compute_key()
    old.write(node.directory.with_name(old.key) / "params.json")
    words = explain(node, plan.store, None)
    assert words.startswith("code changed: ")
    assert "dflash.data.prompts" in words


def test_a_lost_receipt_and_lost_steps_are_told_apart_from_a_change() -> None:
    plan = plan_of()
    make(plan)
    buckets = plan.runs[0].nodes["buckets"]
    (buckets.directory / "partial").mkdir()
    buckets.receipt().unlink()
    assert why(plan)["buckets"] == "its receipt is missing"
    train = plan.runs[0].nodes["train"]
    train.receipt(2).parent.mkdir(parents=True)
    train.receipt(2).write_text("{}")
    assert why(plan)["train"] == "2 of 3 steps are missing"
