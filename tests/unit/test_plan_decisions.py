"""A costly result made by other code stands or falls by a person's decision, and only where that decision was meant."""

from __future__ import annotations

from pathlib import Path

import pytest
from plan_store import make_folder, plan_of, stand

from dflash.base.errors import CorruptError, DecisionNeeded
from dflash.base.records import ParamsFile
from dflash.plan.costly import code_changes, decide_recompute, require_decisions
from dflash.plan.decisions import Decisions
from dflash.plan.graph import Node, Plan

OLD_CODE = "0" * 16


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(make_folder(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def completions(plan: Plan) -> Node:
    return plan.runs[0].nodes["completions/short"]


def put_old(plan: Plan, code: str = OLD_CODE) -> str:
    """A result of the completions asked for, made by other code; returns its key."""
    node = completions(plan)
    old = ParamsFile.model_validate(
        {**node.params.model_dump(), "code": {"digest": code, "modules": {"dflash.data.gone": code}}}
    )
    old.key = old.compute_key()
    stand(plan.runs[0].nodes["prompts/short"])
    stand(Node(node.name, node.stage, old.key, old, {}, node.directory.with_name(old.key), node.inputs, []))
    return old.key


def test_a_result_of_other_code_stops_the_plan_and_names_the_modules_and_both_ways_on() -> None:
    require_decisions(plan_of())
    old = put_old(plan_of())
    with pytest.raises(DecisionNeeded) as asked:
        require_decisions(plan_of())
    for words in ("dflash.data.gone", f"dflash adopt completions {old}", "--recompute completions"):
        assert words in asked.value.message()


def test_a_result_of_other_params_asks_nothing() -> None:
    put_old(plan_of())
    assert code_changes(plan_of(completions={"seed": 5})) == []


def test_an_adopted_result_stands_in_the_place_of_the_key_it_was_adopted_for_and_of_no_other() -> None:
    before = plan_of()
    old = put_old(before)
    before.decisions.add("adopt", "completions", old, completions(before).key, "only words changed")
    after = plan_of()
    assert completions(after).key == old
    assert completions(after).missing() == []
    assert after.runs[0].nodes["dataset"].params.upstream == {"completions/short": old}
    assert after.runs[0].runkey != before.runs[0].runkey
    require_decisions(after)
    assert completions(plan_of(completions={"seed": 5})).key != old


def test_an_adoption_of_a_result_of_other_params_is_refused() -> None:
    before = plan_of()
    old = put_old(before)
    other = plan_of(completions={"seed": 5})
    other.decisions.add("adopt", "completions", old, completions(other).key, "by mistake")
    with pytest.raises(CorruptError, match="made from other params or upstreams"):
        plan_of(completions={"seed": 5})


def test_the_newest_decision_about_a_key_counts() -> None:
    before = plan_of()
    old, key = put_old(before), completions(before).key
    for decision in ("adopt", "recompute"):
        before.decisions.add(decision, "completions", old, key, "changed my mind")
    assert completions(plan_of()).key == key
    require_decisions(plan_of())
    before.decisions.add("adopt", "completions", old, key, "and again")
    assert completions(plan_of()).key == old


def test_recompute_is_remembered_for_the_stages_it_names() -> None:
    put_old(plan_of())
    decide_recompute(plan_of(), ["train"])
    with pytest.raises(DecisionNeeded):
        require_decisions(plan_of())
    decide_recompute(plan_of(), ["completions"])
    require_decisions(plan_of())


def test_a_line_that_is_no_decision_is_named(folder: Path) -> None:
    decisions = Decisions.load(folder)
    decisions.add("adopt", "train", "a" * 12, "b" * 12, "why")
    assert Decisions.load(folder).adopted("train", "b" * 12) == "a" * 12
    with decisions.path.open("a") as stream:
        stream.write('{"decision": "adopt"}\n')
    with pytest.raises(CorruptError, match=r"adoptions\.jsonl:2"):
        Decisions.load(folder)
