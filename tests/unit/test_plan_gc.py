"""`dflash gc`: what nothing needs is listed with its size; what a run, a config, a training or a person needs stays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from plan_store import make_folder, plan_of, stand

from dflash import cli_gc, remote
from dflash.base.errors import CorruptError, TransientError
from dflash.base.files import locked
from dflash.base.records import RunManifest, StageEntry, now
from dflash.hosts import lease
from dflash.plan.gc import find_garbage, find_needs
from dflash.plan.graph import Plan
from dflash.plan.kept_code import keep_code, kept_path
from dflash.plan.places import Home, Moving, home_path
from dflash.plan.sweep import remove

RESULTS = Path("results")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(make_folder(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def stand_data(plan: Plan) -> None:
    for name in ("prompts/short", "completions/short", "dataset", "buckets"):
        stand(plan.runs[0].nodes[name])


def listed(plan: Plan | None = None) -> list[str]:
    return sorted(str(item.path.relative_to("results/store")) for item in find_garbage(RESULTS, plan))


def finish(plan: Plan) -> Path:
    """The manifest of a run's state, as its last job writes it."""
    run = plan.runs[0]
    fields: dict[str, Any] = {"config": {}, "params_files": {}, "git": {}, "environments": {}, "adoptions": []}
    entries = [
        StageEntry(name=name, stage=node.stage.name, key=node.key, receipts={})
        for name, node in run.nodes.items()
        if name != "report"
    ]
    path = run.directory / "manifest.json"
    RunManifest(
        run=run.name, runkey=run.runkey, created=now(), stages=entries, steps=run.steps, determinism="bitwise", **fields
    ).write(path)
    return path


def test_what_a_runs_manifest_names_stays_though_the_config_has_moved_on() -> None:
    old = plan_of()
    stand_data(old)
    finish(old)
    assert listed(plan_of(batching={"quantiles": 1})) == []


def test_a_trial_that_no_run_finished_and_no_config_asks_for_is_garbage_with_its_size() -> None:
    trial = plan_of(batching={"quantiles": 1})
    stand_data(trial)
    plan = plan_of()
    stand_data(plan)
    (found,) = find_garbage(RESULTS, plan)
    assert found.path == trial.runs[0].nodes["buckets"].directory
    assert found.size == sum(path.stat().st_size for path in found.path.iterdir())
    assert found.files == 3
    remove([found])
    assert not found.path.exists()
    assert listed(plan) == []
    assert plan.runs[0].nodes["buckets"].receipt().exists()


def test_a_training_at_work_keeps_itself_and_all_it_was_made_from() -> None:
    plan = plan_of()
    stand_data(plan)
    train = plan.runs[0].nodes["train"]
    train.params.write(train.directory / "params.json")
    everything = {"train", "buckets", "dataset", "completions", "prompts"}
    assert {path.partition("/")[0] for path in listed()} == everything
    held = lease.acquire([train.directory / "lease.json"], lease.new_record("cpu", train.key, "micro"))
    try:
        assert listed() == []
    finally:
        held.release()
    assert {path.partition("/")[0] for path in listed()} == everything


def test_the_parent_of_a_continued_training_stays() -> None:
    plan = plan_of()
    parent = plan.runs[0].nodes["train"]
    parent.params.write(parent.directory / "params.json")
    child = parent.params.model_copy(
        update={"key": "c" * 12, "params": parent.params.params | {"continue_from": {"key": parent.key, "step": 2}}}
    )
    child.write(RESULTS / "store/train" / child.key / "params.json")
    path = finish(plan)
    text = path.read_text().replace(parent.key, child.key)
    path.write_text(text)
    assert listed() == []


def test_the_parent_of_a_training_that_is_only_planned_stays() -> None:
    plan = plan_of()
    parent = plan_of(train={"seed": 7}).runs[0].nodes["train"]
    parent.params.write(parent.directory / "params.json")
    assert listed(plan) == [f"train/{parent.key}"]
    train = plan.runs[0].nodes["train"]
    train.params.params["continue_from"] = {"key": parent.key, "step": 2}
    assert listed(plan) == []


def test_a_result_stays_when_the_config_names_a_file_of_it() -> None:
    trial = plan_of(batching={"quantiles": 1})
    stand_data(trial)
    other = trial.runs[0].nodes["buckets"]
    plan = plan_of()
    stand_data(plan)
    assert listed(plan) == [f"buckets/{other.key}"]
    files = {**plan.runs[0].config.files, "0" * 64: next(other.directory.iterdir()).absolute()}
    plan.runs[0].config = replace(plan.runs[0].config, files=files)
    assert listed(plan) == []


def test_what_a_person_imported_is_never_garbage() -> None:
    (RESULTS / "store/imported/0123").mkdir(parents=True)
    (RESULTS / "store/imported/0123/import.json").write_text("{}")
    assert listed() == []


def test_environments_go_with_the_last_receipt_that_names_them() -> None:
    environments = RESULTS / "store/environments"
    environments.mkdir(parents=True)
    (environments / "abcdefabcdef.json").write_text("{}")
    assert listed() == ["environments/abcdefabcdef.json"]


def test_a_manifest_that_cannot_be_read_stops_everything() -> None:
    plan = plan_of()
    stand_data(plan)
    finish(plan).write_text('{"schema_version": 1, "run"')
    with pytest.raises(CorruptError, match=r"manifest.json.*nothing is deleted"):
        find_garbage(RESULTS, plan)


def test_an_adopted_result_stays_though_no_plan_asks_for_it() -> None:
    old = plan_of(train={"seed": 7}).runs[0].nodes["train"]
    old.params.write(old.directory / "params.json")
    plan = plan_of()
    assert listed(plan) == [f"train/{old.key}"]
    plan.decisions.add("adopt", "train", old.key, "n" * 12, "the same numbers")
    assert listed(plan) == []


def test_a_copy_of_a_training_elsewhere_stays_while_that_is_at_work_or_cannot_be_asked() -> None:
    plan = plan_of()
    far = plan_of(train={"seed": 7}).runs[0].nodes["train"]
    far.params.write(far.directory / "params.json")
    assert [item.path for item in find_garbage(RESULTS, plan, {far.key})] == []
    assert [item.path for item in find_garbage(RESULTS, plan, unsure=True)] == []
    assert [item.path for item in find_garbage(RESULTS, plan)] == [far.directory]
    lease.acquire([far.directory / "lease.json"], lease.new_record("cpu", far.key, "micro")).release()
    assert [item.path for item in find_garbage(RESULTS, plan, unsure=True)] == [far.directory]


def test_a_training_that_was_begun_here_and_carried_over_is_one_elsewhere() -> None:
    plan = plan_of()
    far = plan_of(train={"seed": 7}).runs[0].nodes["train"]
    far.params.write(far.directory / "params.json")
    lease.acquire([far.directory / "lease.json"], lease.new_record("cpu", far.key, "micro")).release()
    on_its_way = Moving(to="gpubox", token="t", asked=True)
    for home in (Home(place="gpubox"), Home(place="local", moving=on_its_way)):
        home.write(home_path(far.directory))
        assert [item.path for item in find_garbage(RESULTS, plan, unsure=True)] == [], home
        assert [item.path for item in find_garbage(RESULTS, plan)] == [far.directory]
    Home(place="local").write(home_path(far.directory))
    assert [item.path for item in find_garbage(RESULTS, plan, unsure=True)] == [far.directory], "it came back"


def test_kept_code_goes_with_the_last_manifest_that_names_it() -> None:
    plan = plan_of()
    stand_data(plan)
    path = finish(plan)
    digest = keep_code(RESULTS)
    kept = kept_path(RESULTS, digest)
    assert [item.path for item in find_garbage(RESULTS, plan)] == [kept]
    manifest = RunManifest.read(path)
    manifest.model_copy(update={"code": digest}).write(path)
    assert find_garbage(RESULTS, plan) == []


def test_a_result_that_is_needed_again_since_it_was_listed_is_not_deleted() -> None:
    trial = plan_of(batching={"quantiles": 1})
    stand_data(trial)
    (found,) = find_garbage(RESULTS, plan_of())
    (found.path / "later").write_text("a run has begun to write")
    assert remove([found]) == ([], [(found.path, "it has changed since it was listed")])


def test_a_job_at_work_for_another_config_keeps_itself_and_what_it_reads() -> None:
    other = plan_of(batching={"quantiles": 1})
    stand_data(other)
    everything = {"buckets", "completions", "dataset", "prompts"}
    assert {path.partition("/")[0] for path in listed()} == everything
    with locked(other.runs[0].nodes["dataset"].directory / ".lock"):
        assert {path.partition("/")[0] for path in listed()} == {"buckets"}
    assert {path.partition("/")[0] for path in listed()} == everything


def test_what_is_carried_over_to_a_host_must_stay_there_whichever_config_asks() -> None:
    plan = plan_of()
    node = plan_of(train={"seed": 7}).runs[0].nodes["train"]
    Home(place="a", moving=Moving(to="b", token="t")).write(home_path(node.directory))
    assert ("train", node.key, None) in find_needs(RESULTS, plan, place="b").coming
    assert ("train", node.key, None) not in find_needs(RESULTS, plan, place="a").coming
    Home(place="b").write(home_path(node.directory))
    assert ("train", node.key, None) not in find_needs(RESULTS, plan, place="b").coming


@pytest.mark.parametrize(
    ("home", "answer", "stays"),
    [
        (Home(place="b"), {"live": ["KEY"]}, True),
        (Home(place="b"), {"live": []}, False),
        (Home(place="b"), TransientError("no route"), True),
        (Home(place="gone"), {"live": []}, True),
        (Home(place="a", moving=Moving(to="b", token="t")), {"live": []}, True),
        (Home(place="b", moving=Moving(to="a", token="t")), {"live": []}, True),
        (Home(place="a"), {"live": []}, False),
    ],
)
def test_what_a_training_has_left_on_a_host_stays_there_while_it_is_at_work_on_another(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], home: Home, answer: Any, stays: bool
) -> None:
    hosts = {name: {"kind": "local", "workdir": f"/srv/{name}", "device": "cpu"} for name in ("a", "b")}
    Path("hosts.yaml").write_text(yaml.safe_dump({"hosts": hosts}))
    key = plan_of(train={"seed": 7}).runs[0].nodes["train"].key
    plan = plan_of(hosts="hosts.yaml")
    home.write(home_path(plan.store / "train" / key))
    told = {"live": [key for _ in answer["live"]]} if isinstance(answer, dict) else answer
    monkeypatch.setattr(cli_gc, "_asked", lambda _, names: dict.fromkeys(names, told))
    needs: list[Any] = []

    def garbage_there(_host: object, needed: Any, _delete: object = None) -> dict[str, Any]:
        needs.append(needed)
        return {"garbage": [], "askers": [], "live": []}

    monkeypatch.setattr(remote, "garbage_there", garbage_there)
    cli_gc._collect_there(plan, "a", delete=False)
    said = capsys.readouterr().err
    assert (f"trainings on {home.place} have left here" in said) is (told is answer or home.place == "gone")
    assert (["train", key] in needs[0]["results"]) is stays


@pytest.mark.parametrize(
    ("answer", "stays"),
    [
        ({"garbage": [], "live": []}, False),
        ({"garbage": [], "live": ["KEY"]}, True),
        (TransientError("no route"), True),
    ],
)
def test_what_is_kept_here_of_a_training_elsewhere_stays_while_that_is_at_work_or_its_host_cannot_be_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: Any, stays: bool
) -> None:
    Path("hosts.yaml").write_text(yaml.safe_dump({"hosts": {"a": {"kind": "local", "workdir": "/srv/a"}}}))
    key = plan_of(train={"seed": 7}).runs[0].nodes["train"].key
    plan = plan_of(hosts="hosts.yaml")
    Home(place="a").write(home_path(plan.store / "train" / key))
    told = {**answer, "live": [key for _ in answer["live"]]} if isinstance(answer, dict) else answer
    monkeypatch.setattr(cli_gc, "_asked", lambda _, names: dict.fromkeys(names, told))
    cli_gc._collect_here(plan, delete=False, ask=True)
    assert (f"train/{key}" not in capsys.readouterr().out) is stays
