"""What keys cannot see is found: results that are not what their receipts say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from plan_store import make_folder, plan_of, same_size_and_time, stand

from dflash.base.records import Receipt
from dflash.plan.graph import Node, Plan
from dflash.plan.places import shipments
from dflash.plan.verify import find_damage, retire


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """The micro run with prompts, completions, dataset and buckets made."""
    monkeypatch.chdir(make_folder(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = plan_of()
    for name in ("prompts/short", "completions/short", "dataset", "buckets"):
        stand(made.runs[0].nodes[name])
    assert find_damage(made, deep=True) == []
    return made


def node(plan: Plan, name: str) -> Node:
    return plan.runs[0].nodes[name]


@pytest.mark.parametrize(
    ("content", "why"),
    [("mode", "other bytes than its receipt says"), ("longer", "has 6 bytes, its receipt says 4"), (None, "missing")],
    ids=["bytes", "size", "missing"],
)
def test_an_output_that_is_not_what_its_receipt_says_is_named(plan: Plan, content: str | None, why: str) -> None:
    output = node(plan, "dataset").directory / "output.txt"
    output.unlink()
    if content is not None:
        output.write_text(content)
    (damage,) = find_damage(plan)
    assert damage.node.name == "dataset"
    assert str(output) in damage.why
    assert why in damage.why


def test_deep_reads_what_the_quick_look_trusts(plan: Plan) -> None:
    find_damage(plan)
    same_size_and_time(node(plan, "dataset").directory / "output.txt", "mode")
    assert find_damage(plan) == []
    assert [damage.node.name for damage in find_damage(plan, deep=True)] == ["dataset"]


def test_a_result_whose_input_was_made_again_with_other_content_is_found_and_with_equal_content_is_not(
    plan: Plan,
) -> None:
    stand(node(plan, "dataset"))
    assert find_damage(plan) == []
    stand(node(plan, "dataset"), "otherwise")
    (damage,) = find_damage(plan)
    assert damage.node.name == "buckets"
    assert damage.why == "its input dataset has been made again with other content"


def test_a_receipt_of_another_result_is_damage(plan: Plan) -> None:
    receipt = node(plan, "buckets").receipt()
    Receipt.read(receipt).model_copy(update={"key": "0" * 12}).write(receipt)
    assert [damage.node.name for damage in find_damage(plan)] == ["buckets"]


def test_a_damaged_result_is_put_aside_and_never_deleted(plan: Plan) -> None:
    dataset = node(plan, "dataset")
    (dataset.directory / "output.txt").write_text("mode")
    retire(plan, find_damage(plan), [])
    assert not dataset.receipt().exists()
    assert len(list(dataset.directory.glob("receipt.json.retired-*"))) == 1
    assert dataset in plan.stale()


def test_the_copy_of_old_content_is_found_in_the_round_that_retires_what_read_it(plan: Plan) -> None:
    hosts = {"hosts": {"a": {"kind": "local", "workdir": "/srv/a", "device": "cpu"}}, "roles": {"generate": "a"}}
    Path("hosts.yaml").write_text(yaml.safe_dump(hosts))
    plan = plan_of(hosts="hosts.yaml")
    made = node(plan, "completions/short")
    (record,) = [item.path for item in shipments(plan, made).values() if item.stage == "prompts"]
    old = Receipt.read(node(plan, "prompts/short").receipt()).content_digest()
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps({"content": old}))

    def there(*_: object, **__: object) -> dict[str, str]:
        return {}

    find_damage(plan, there=there)
    assert record.exists()
    stand(node(plan, "prompts/short"), "otherwise")
    assert made.receipt() in {damage.receipt for damage in find_damage(plan, there=there)}
    assert not record.exists()
