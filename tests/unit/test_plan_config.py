"""Every value of a configuration knows where it came from, and a later file changes what it names and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from plan_store import make_folder, plan_of

from dflash.base.errors import ConfigError
from dflash.base.yaml_source import load_yaml, merge
from dflash.plan.config import load_config, resolved_source
from dflash.plan.graph import build_plan


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(make_folder(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_params_say_of_each_value_whether_a_line_the_default_or_the_plan_gave_it() -> None:
    plan = plan_of()
    line = next(n for n, row in enumerate(Path("config.yaml").read_text().splitlines(), 1) if "lr:" in row)
    train = plan.runs[0].nodes["train"].params
    assert (train.origins["lr"], train.origins["clip"], train.origins["target"]) == (
        f"config.yaml:{line}",
        "default",
        "derived",
    )
    assert train.origins.keys() == train.params.keys()
    assert plan.runs[0].nodes["report"].params.origins["steps"] == "derived"


def test_a_later_file_changes_what_it_names_and_keeps_the_rest_of_the_section(folder: Path) -> None:
    (folder / "base.yaml").write_text("train:\n  lr: 1\n  clip: 2\n  topology: {targets: 1, drafters: 1}\nrun: a\n")
    (folder / "over.yaml").write_text("# changed\ntrain:\n  lr: 3\n  topology: {drafters: 2}\n")
    merged = merge(load_yaml(Path("base.yaml")), load_yaml(Path("over.yaml")))
    topology = {"targets": 1, "drafters": 2}
    assert merged.values == {"train": {"lr": 3, "clip": 2, "topology": topology}, "run": "a"}
    assert merged.origin("train.lr") == "over.yaml:3"
    assert merged.origin("train.clip") == "base.yaml:3"
    assert merged.origin("train.topology.targets") == "base.yaml:4"


def test_a_list_is_replaced_whole_with_the_origins_of_its_items(folder: Path) -> None:
    (folder / "base.yaml").write_text("prompts:\n  - {name: one, path: a}\n  - {name: two, path: b}\n")
    (folder / "over.yaml").write_text("prompts:\n  - {name: three}\n")
    merged = merge(load_yaml(Path("base.yaml")), load_yaml(Path("over.yaml")))
    assert merged.values == {"prompts": [{"name": "three"}]}
    assert not any(origin.startswith("base.yaml") for origin in merged.origins.values())


def test_the_configuration_in_a_manifest_planned_again_asks_for_the_same_keys() -> None:
    plan = plan_of(train={"lr": "2e-3"})
    again = resolved_source(plan.runs[0].config)
    Path("again.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(again))))
    planned = build_plan(load_config([Path("again.yaml")]))
    assert {name: node.key for name, node in planned.runs[0].nodes.items()} == {
        name: node.key for name, node in plan.runs[0].nodes.items()
    }
    assert again["train"]["clip"] == 1.0, "a default is written out, so that a later default changes nothing"
    assert again["prompts"][0]["path"] == "config/micro/short.jsonl"


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"train": {"token_budgets": 3, "warmupp": 3}}, "did you mean `warmup`?"),
        ({"evalute": {}}, "Did you mean `evaluate`?"),
    ],
    ids=["in a section", "a section"],
)
def test_a_misspelt_key_is_answered_with_the_nearest_known_one(changes: dict[str, Any], hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(**changes)
    assert hint in caught.value.message()


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("completions", {"endpoints": ["http://ok:1/v1", "http://ada:hush@host/v1"]}),
        ("completions", {"endpoint": "http://ada:hush@host/v1"}),
        ("references", {"server_url": "https://hush@host"}),
    ],
)
def test_a_password_in_an_address_is_refused_and_not_repeated(section: str, values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(**{section: values})
    assert "hush" not in str(caught.value)
    assert "endpoint" in values or "use `api_key_variable`" in str(caught.value)


@pytest.mark.parametrize("section", ["references", "evaluate"])
def test_more_devices_than_the_target_has_layers_are_refused_when_planning(section: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(**{section: {"target_devices": [f"cuda:{number}" for number in range(70)]}})
    assert f"`{section}.target_devices" in caught.value.message()
    assert "Name at most" in caught.value.message()


def test_spreading_the_target_over_devices_changes_no_key() -> None:
    plain, spread = (
        plan_of(),
        plan_of(references={"target_devices": ["cpu", "cpu"]}, evaluate={"target_devices": ["cpu", "cpu"]}),
    )
    assert {node.key for node in plain.nodes.values()} == {node.key for node in spread.nodes.values()}
    placed = [node.placement for (stage, _), node in spread.nodes.items() if stage in ("references", "evaluate")]
    assert [placement["target_devices"] for placement in placed] == [["cpu", "cpu"]] * 2


@pytest.mark.parametrize(
    ("value", "words"),
    [("nowhere.yaml", "there is no such file"), (".", "there is no such file"), ([1], "is not a path")],
)
def test_a_hosts_file_that_is_not_there_is_told_with_the_line_that_names_it(value: object, words: str) -> None:
    Path("my.yaml").write_text(f"run: a\nhosts: {json.dumps(value)}\n")
    with pytest.raises(ConfigError, match=rf"`hosts: .*{words}") as caught:
        load_config([Path("my.yaml")])
    assert caught.value.where == "my.yaml:2"
