"""What must be shipped, for whom, and that none of it enters a key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from plan_store import make_folder, plan_of, stand

from dflash.base.records import Receipt
from dflash.plan import places
from dflash.plan.graph import Node, Plan


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(make_folder(tmp_path / "work"))


def hosts_file(**roles: str | list[str]) -> str:
    hosts = {name: {"kind": "local", "workdir": f"/srv/{name}", "device": "cpu"} for name in ("a", "b", "c")}
    Path("hosts.yaml").write_text(yaml.safe_dump({"hosts": {**hosts, "here": {"kind": "local"}}, "roles": roles}))
    return "hosts.yaml"


def plan_with(**roles: str | list[str]) -> Plan:
    return plan_of(hosts=hosts_file(**roles))


def node(plan: Plan, name: str) -> Node:
    (found,) = [item for item in plan.nodes.values() if item.name == name]
    return found


def coming(plan: Plan, name: str, step: int | None = None) -> dict[str, tuple[str, str]]:
    found = places.shipments(plan, node(plan, name), step)
    return {known_as: (item.source, item.destination) for known_as, item in found.items()}


def made_on(item: Node, host: str) -> None:
    """Lets a result stand that was made on a host."""
    stand(item)
    Receipt.read(item.receipt()).model_copy(update={"host": host}).write(item.receipt())


def test_on_one_machine_nothing_is_shipped_whatever_it_is_called() -> None:
    for roles in ({}, {"gpu": "here", "eval": "local", "generate": "here"}):
        plan = plan_with(**roles)
        for item in plan.nodes.values():
            assert places.shipments(plan, item, 2 if item.stage.stepwise else None) == {}


def test_keys_do_not_know_where_stages_run() -> None:
    everywhere = plan_with(gpu="a", eval="b", generate="c")
    assert set(everywhere.nodes) == set(plan_of().nodes)


def test_what_another_host_makes_is_shipped_to_who_needs_it() -> None:
    plan = plan_with(gpu="a", eval="b")
    assert coming(plan, "train", 2) == {"dataset": ("local", "a"), "buckets": ("local", "a")}
    assert coming(plan, "references/torch") == {"dataset": ("local", "b")}
    assert coming(plan, "evaluate", 2) == {"train": ("a", "b"), "dataset": ("local", "b")}
    assert coming(plan, "dataset") == {}


def test_hosts_that_share_the_completions_get_one_shard_after_the_other_each() -> None:
    sources = [{"name": "short", "path": "config/micro/short.jsonl", "shards": 3}]
    alone = plan_of(prompts=sources)
    shared = plan_of(prompts=sources, hosts=hosts_file(generate=["a", "b"]))
    shards = [f"completions/short@{number}" for number in range(3)]
    assert [node(shared, name).placement["host"] for name in shards] == ["a", "b", "a"]
    assert [node(shared, name).key for name in shards] == [node(alone, name).key for name in shards]
    assert coming(shared, "completions/short@1") == {"prompts": ("a", "b")}
    assert coming(shared, "dataset") == {"completions/short@1": ("b", "a")}


def test_a_result_that_stands_comes_from_where_it_was_made() -> None:
    plan = plan_with(gpu="a", eval="b")
    for name in ("prompts/short", "completions/short", "dataset"):
        made_on(node(plan, name), "c")
    assert coming(plan, "train", 2)["dataset"] == ("c", "a")
    plan = plan_with(gpu="c", eval="b")
    assert "dataset" not in coming(plan, "train", 2)


def test_two_roles_on_one_host_ship_nothing_between_them() -> None:
    assert coming(plan_with(gpu="a", eval="a", generate="a"), "evaluate", 4) == {}


def test_a_record_is_found_by_its_path_and_by_nothing_else() -> None:
    plan = plan_with(gpu="a", eval="b")
    train = node(plan, "train")
    found = places.find_shipment(plan, train.key, "b", 4)
    assert found is not None
    assert found.path == plan.store / "ship" / train.key / "b" / "step_4.json"
    assert (found.stage, found.source) == ("train", "a")
    assert places.find_shipment(plan, train.key, "c", 4) is None
    assert places.find_shipment(plan, "0" * 12, "b", None) is None
    dataset = places.find_shipment(plan, node(plan, "dataset").key, "b", None)
    assert dataset is not None
    assert (dataset.stage, dataset.step) == ("dataset", None)


def test_a_target_is_shipped_unless_the_hosts_file_says_where_it_lies(tmp_path: Path) -> None:
    def target_plan(targets: dict[str, str]) -> Plan:
        hosts: dict[str, Any] = {"a": {"kind": "local", "workdir": "/srv/a", "targets": targets}}
        Path("hosts.yaml").write_text(yaml.safe_dump({"hosts": hosts, "roles": {"eval": "a"}}))
        return plan_of(hosts="hosts.yaml")

    plan = target_plan({})
    references = node(plan, "references/torch")
    digest = "ab" * 32
    references.params.params["target"] = {"digest": digest, "revision": "v1"}
    references.placement["target_path"] = "models/mine"
    shipment = places.shipments(plan, references)["target"]
    assert (shipment.key, shipment.folder) == (digest[:12], Path("models/mine"))
    assert places.placement(plan, references)["target_path"] == f"targets/{digest[:12]}"
    for name in (digest, digest[:12], "v1", "mine"):
        known = target_plan({name: "/models/there"})
        assert "target" not in places.shipments(known, references)
        assert places.placement(known, references)["target_path"] == "/models/there"
    assert "target" in places.shipments(target_plan({"other": "/models/there"}), references)


def test_the_placement_says_where_and_which_inputs_are_copies() -> None:
    plan = plan_with(gpu="a", eval="b")
    placed = places.placement(plan, node(plan, "evaluate"), 2)
    assert placed == {"host": "b", "hosts": "hosts.yaml", "shipped": ["dataset", "train"]}
    assert places.placement(plan, node(plan, "dataset")) == {"host": "local"}
    assert set(places.placement(plan, node(plan, "report"))["elsewhere"]) == {"train", "references/torch", "evaluate"}
    shipment = places.shipments(plan, node(plan, "evaluate"), 2)["train"]
    assert json.loads(places.shipment_json(shipment, Path("hosts.yaml")))["source"] == "a"


def test_a_host_that_the_file_no_longer_names_is_a_place_of_its_own() -> None:
    plan = plan_with(gpu="a")
    for name in ("prompts/short", "completions/short", "dataset"):
        made_on(node(plan, name), "sold")
    assert coming(plan, "train", 2)["dataset"] == ("sold", "a")
