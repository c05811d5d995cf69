"""The reason given for a stale stage is its cause: which value, from where, which input, which module."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from plan_store import make_folder, plan_of, stand

from dflash.base.records import ParamsFile, RunManifest, StageEntry, now
from dflash.plan.code import source_root
from dflash.plan.config import load_config
from dflash.plan.explain import explain, reasons
from dflash.plan.graph import Plan, build_plan
from dflash.plan.links import relink_latest

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
    train.receipt(4).parent.mkdir(parents=True)
    train.receipt(4).write_text("{}")
    assert why(plan)["train"] == "1 of 2 steps are missing"


# ---- every row of the table of what must hold, in words


def finish(plan: Plan) -> None:
    """Receipts of everything, as a finished run leaves them; what is in them does not matter to the plan."""
    for node in plan.nodes.values():
        node.params.write(node.directory / "params.json")
        for path in node.receipts():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{}")
    for run in plan.runs:
        entries = [StageEntry(name=n, stage=i.stage.name, key=i.key, receipts={}) for n, i in run.nodes.items()]
        RunManifest(
            run=run.name,
            runkey=run.runkey,
            created=now(),
            config={},
            params_files={name: node.params.model_dump(mode="json") for name, node in run.nodes.items()},
            stages=entries,
            steps=run.steps,
            git={},
            environments={},
            adoptions=[],
            determinism="bitwise",
        ).write(run.directory / "manifest.json")
    relink_latest(plan)


def line_of(text: str) -> int:
    return next(n for n, row in enumerate(Path("config.yaml").read_text().splitlines(), 1) if text in row)


def test_nothing_changed_and_nothing_is_said() -> None:
    finish(plan_of())
    assert why(plan_of()) == {}


def test_an_evaluation_param_is_named_and_back_again_nothing_is_said() -> None:
    finish(plan_of())
    found = why(plan_of(evaluate={"bootstrap": 60}))
    assert found == {
        "evaluate": f"bootstrap: 50 -> 60 (config.yaml:{line_of('bootstrap')})",
        "report": "evaluate changed",
    }
    assert why(plan_of()) == {}


def test_a_batching_param_is_named_at_the_buckets_and_followed_downstream() -> None:
    finish(plan_of())
    found = why(plan_of(batching={"token_budget": 384}))
    assert found == {
        "buckets": f"token_budget: 256 -> 384 (config.yaml:{line_of('token_budget')})",
        "train": "buckets changed",
        "evaluate": "train changed",
        "report": "buckets changed; evaluate changed; train changed",
    }


def test_a_training_param_is_named_at_the_training() -> None:
    finish(plan_of())
    found = why(plan_of(train={"lr": "2e-3"}))
    assert found["train"] == f"lr: 0.001 -> 0.002 (config.yaml:{line_of('lr:')})"
    assert set(found) == {"train", "evaluate", "report"}


def test_an_added_source_is_named_where_it_comes_in_and_other_completions_stay() -> None:
    finish(plan_of())
    Path("more.jsonl").write_text('{"prompt": "and more"}\n')
    sources = [{"name": "short", "path": "config/micro/short.jsonl"}, {"name": "more", "path": "more.jsonl"}]
    found = why(plan_of(prompts=sources))
    assert found["dataset"] == "completions/more was added"
    assert found["prompts/more"] == "never made"
    assert "completions/short" not in found
    assert found["buckets"] == "dataset changed"


def test_another_path_a_touch_another_topology_and_more_cores_say_nothing() -> None:
    finish(plan_of())
    Path("moved.jsonl").write_bytes(Path("config/micro/short.jsonl").read_bytes())
    found = plan_of(
        prompts=[{"name": "short", "path": "moved.jsonl"}],
        train={"topology": {"targets": 2, "drafters": 1, "colocate": False}, "logit_chunk": 64, "tracker": "none"},
    )
    assert why(found) == {}


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        (
            "dflash/evaluate/tree.py",
            "from __future__",
            "X = 1\nfrom __future__",
            {"evaluate": "code changed: dflash.evaluate.tree"},
        ),
        ("dflash/evaluate/tree.py", "from __future__", "# a remark\nfrom __future__", {}),
        ("dflash/base/progress.py", "import time", "import time\n\nUNUSED = 1", {}),
    ],
    ids=["semantics", "comment", "inert module"],
)
def test_code_is_named_by_module_unless_it_cannot_count(
    tmp_path: Path, file: str, old: str, new: str, said: dict[str, str]
) -> None:
    finish(plan_of())
    code = tmp_path / "code"
    shutil.copytree(source_root() / "dflash", code / "dflash")
    path = code / file
    path.write_text(path.read_text().replace(old, new, 1))
    plan = build_plan(load_config([Path("config.yaml")]), code_root=code)
    found = why(plan)
    assert {name: words for name, words in found.items() if name != "report"} == said
    assert ("report" in found) == bool(said)


def test_more_steps_of_the_same_schedule_are_counted() -> None:
    finish(plan_of(train={"stop_at": 4}))
    found = why(plan_of(train={"stop_at": 6}))
    assert found["train"] == "1 of 2 steps are missing"
    assert found["evaluate"] == "1 of 2 steps are missing"
    assert "steps" in found["report"]


def test_a_lost_receipt_is_said_to_be_missing_and_nothing_downstream_is_stale() -> None:
    plan = plan_of()
    finish(plan)
    dataset = plan.runs[0].nodes["dataset"]
    (dataset.directory / "dataset.json").write_text("{}")
    dataset.receipt().unlink()
    assert why(plan_of()) == {"dataset": "its receipt is missing"}
