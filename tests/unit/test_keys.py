"""A key is the digest of everything that makes a result, and of nothing else."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash.base import records
from dflash.base.canonical import canonical_json, digest
from dflash.base.params import PLACEMENT, Params, placement
from dflash.base.records import CodeDigest, ParamsFile, stage_key
from dflash.plan.code import _scan, source_root
from dflash.plan.config import load_config
from dflash.plan.graph import Plan, build_plan
from dflash.stages import STAGES

BASE = {"stage": "buckets", "params": {"a": 1, "b": 2.0}, "upstream": {"dataset": "0" * 12}, "code": "c" * 16}


def key(**changes: Any) -> str:
    return stage_key(**{**BASE, **changes})


@pytest.mark.parametrize(
    "change",
    [
        {"stage": "dataset"},
        {"params": {"a": 1, "b": 2.5}},
        {"params": {"a": 2.0, "b": 1}},
        {"params": {"a": 1}},
        {"upstream": {"dataset": "1" * 12}},
        {"upstream": {}},
        {"upstream": {"other": "0" * 12}},
        {"code": "d" * 16},
    ],
    ids=["stage", "value", "swapped", "dropped", "upstream key", "upstream dropped", "upstream renamed", "code"],
)
def test_everything_that_makes_a_result_is_in_its_key(change: dict[str, Any]) -> None:
    assert key(**change) != key()


def test_the_meaning_of_stored_results_is_in_every_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key()
    monkeypatch.setattr(records, "SCHEMA_VERSION", records.SCHEMA_VERSION + 1)
    assert key() != before


class Part(Params):
    size: int = 1
    path: str = placement("here")


class Whole(Params):
    one: Part = Part()
    more: tuple[Part, ...] = (Part(path="there"),)


def test_placement_within_a_part_is_in_no_key_either() -> None:
    assert Whole().keyed_values() == {"one": {"size": 1}, "more": [{"size": 1}]}


def test_the_order_of_fields_is_not() -> None:
    assert key(params={"b": 2.0, "a": 1}) == key()


def test_numbers_have_one_spelling() -> None:
    assert canonical_json({"x": -0.0}) == canonical_json({"x": 0.0})
    assert canonical_json([1e-4, 0.0001]) == b"[0.0001,0.0001]"
    assert digest({"x": 1}) != digest({"x": 1.0})
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="canonical"):
            canonical_json(bad)
    with pytest.raises(TypeError):
        canonical_json({1: 2})


@pytest.mark.parametrize("value", [0.1, 1e-7, 1.5, 1e7, 1e300])
def test_two_numbers_that_differ_in_their_last_bit_have_different_digests(value: float) -> None:
    assert digest({"x": value}) != digest({"x": math.nextafter(value, math.inf)})


def test_a_params_file_knows_its_own_key() -> None:
    code = CodeDigest(digest="c" * 16, modules={})
    made = ParamsFile(
        stage="buckets", key=key(), params=BASE["params"], origins={}, upstream=BASE["upstream"], code=code
    )  # type: ignore[arg-type]
    assert made.compute_key() == made.key
    assert made.model_copy(update={"params": {"a": 9}}).compute_key() != made.key
    assert made.model_copy(update={"origins": {"a": "config.yaml:3"}}).compute_key() == made.key


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(source_root() / "config/micro", tmp_path / "config/micro")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def plan(folder: Path, code: Path | None = None, **changes: dict[str, Any]) -> Plan:
    config = yaml.safe_load((source_root() / "config/micro.yaml").read_text())
    for section, values in changes.items():
        config[section] = {**config.get(section, {}), **values}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    _scan.cache_clear()
    return build_plan(load_config([Path("config.yaml")]), code_root=code)


def keys(made: Plan) -> dict[str, str]:
    return {name: node.key for name, node in made.runs[0].nodes.items()}


ROAD = ["completions/short", "dataset", "buckets", "train", "references/torch", "evaluate", "report"]


@pytest.mark.parametrize(
    ("section", "values", "first"),
    [
        ("completions", {"seed": 5}, "completions/short"),
        ("dataset", {"split_seed": 5}, "dataset"),
        ("batching", {"seed": 5}, "buckets"),
        ("train", {"seed": 5}, "train"),
        ("references", {"max_new_tokens": 5}, "references/torch"),
        ("evaluate", {"seed": 5}, "evaluate"),
        ("report", {"samples": 5}, "report"),
    ],
)
def test_a_param_changes_its_stage_and_all_that_follow(
    folder: Path, section: str, values: dict[str, int], first: str
) -> None:
    before, after = keys(plan(folder)), keys(plan(folder, **{section: values}))
    changed = {name for name in before if before[name] != after[name]}
    follows = {
        "completions/short": set(ROAD),
        "dataset": set(ROAD) - {"completions/short"},
        "buckets": {"buckets", "train", "evaluate", "report"},
        "train": {"train", "evaluate", "report"},
        "references/torch": {"references/torch", "evaluate", "report"},
        "evaluate": {"evaluate", "report"},
        "report": {"report"},
    }
    assert changed == follows[first]


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("train", {"checkpoint_every": 3}),
        ("train", {"stop_at": 4}),
        ("train", {"anchor_chunk": 1, "logit_chunk": 5, "keep_states": 9}),
        ("completions", {"batch_size": 1}),
        ("references", {"features_cache_gb": 0}),
        ("evaluate", {"anchor_chunk": 1}),
    ],
)
def test_placement_changes_no_key_of_a_result(folder: Path, section: str, values: dict[str, Any]) -> None:
    before, after = keys(plan(folder)), keys(plan(folder, **{section: values}))
    assert {name for name in before if before[name] != after[name]} <= {"report"}


def test_nothing_but_where_and_how_fast_stays_out_of_the_keys() -> None:
    """A field joins this table when a person is sure that it changes no result."""
    left_out = {}
    for model, name in ((stage.params_model(), stage.name) for stage in STAGES):
        left_out[name] = {field for field in model.model_fields if model.role_of(field) == PLACEMENT}
    assert left_out == {
        "prompts": {"path", "licence"},
        "completions": {
            "batch_size",
            "endpoints",
            "model",
            "send_prompts",
            "concurrency",
            "timeout",
            "deadline",
            "attempts",
            "pause",
            "api_key_variable",
        },
        "dataset": {"exclude", "parent"},
        "buckets": set(),
        "train": {
            "stop_at",
            "checkpoint_every",
            "keep_states",
            "topology",
            "features_in_flight",
            "rank_timeout",
            "micro_batch",
            "activation_checkpointing",
            "attention",
            "compile",
            "fuse",
            "anchor_chunk",
            "logit_chunk",
            "max_nonfinite",
            "tracker",
        },
        "references": {"api_key_variable", "batch_size", "features_cache_gb", "server_url", "target_devices"},
        "evaluate": {"anchor_chunk", "target_devices"},
        "report": set(),
    }


def test_the_code_that_a_stage_imports_is_in_its_key(folder: Path) -> None:
    code = folder / "code"
    shutil.copytree(source_root() / "dflash", code / "dflash")
    before = keys(plan(folder, code))
    path = code / "dflash/data/buckets.py"
    path.write_text(path.read_text() + "\nMORE = 1\n")
    after = keys(plan(folder, code))
    assert {name for name in before if before[name] != after[name]} == {"buckets", "train", "evaluate", "report"}


def test_a_default_written_out_is_the_same_key(folder: Path) -> None:
    assert keys(plan(folder)) == keys(
        plan(folder, train={"clip": 1, "optimizer": "adamw"}, evaluate={"confidence": "0.95"})
    )
