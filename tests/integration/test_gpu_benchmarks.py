"""The scripts that measure the full-size job on a GPU run here at tiny sizes, from end to end: what they compare is the same
work, and what they print is whole. Nothing is asserted of times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dflash.model.drafter import root_mean_square
from dflash.plan.code import source_root

GPU = source_root() / "tests/bench/gpu"


def lines(*command: str, status: int = 0) -> dict[str, dict[str, Any]]:
    """The JSON lines of a script by name; it must end with `status`, and must have said where it was."""
    environment = {**os.environ, "PYTHONPATH": str(source_root()), "OMP_NUM_THREADS": "1"}
    environment.pop("OUT", None)
    run = [sys.executable, str(GPU / command[0]), *command[1:]]
    done = subprocess.run(run, capture_output=True, text=True, timeout=280, env=environment, check=False)
    assert done.returncode == status, done.stderr[-3000:]
    assert "[" in done.stderr or command[0] == "compiled.py"
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["name"]: line for line in found}


def is_spread(told: dict[str, Any]) -> bool:
    rates = told["tokens_per_second"]
    return 0 < rates["min"] <= rates["median"] <= rates["max"] and told["n"] >= 3


def test_target_features_are_compared_on_the_same_features() -> None:
    found = lines("features.py", "--small")["target features"]
    assert max(found["difference_by_tap"]) < 1e-6
    assert all(is_spread(found[name]) for name in ("ours", "transformers", "transformers_unsorted"))
    assert found["ratio"] > 0
    assert 0 < found["share_of_matmul"]["ours"] < 1


def test_a_drafter_step_is_told_for_every_placement_with_and_without_packing() -> None:
    found = lines("drafter_step.py", "--small")
    assert {name for name, told in found["drafter step, long"].items() if isinstance(told, dict) and "n" in told} == {
        "plain", "chunked", "fused flex",
    }  # fmt: skip
    mean = found["drafter step, mean"]
    assert all(is_spread(mean[name]) for name in ("plain", "plain, all anchors", "chunked"))


def test_a_fused_contender_leaves_the_kernels_of_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(GPU))
    import drafter_step

    setting = drafter_step.Setting.make(True, "cpu", 16)
    shared = setting.drafter()
    drafter_step.ours(setting, shared, {"fuse": True}, drafter_step.plan_of([40, 23], 64), 16)
    assert shared.norm.run is root_mean_square


def test_both_roles_in_turn_are_measured_against_each_alone_and_looked_into() -> None:
    found = lines("pipeline.py", "--small")
    told = found["colocated pipeline"]
    target, drafter = told["rates"]["target"], told["rates"]["drafter"]
    assert told["allowed"] == pytest.approx(1 / (1 / target + 1 / drafter), rel=1e-3)
    assert told["ratio"] == pytest.approx(told["pipeline"]["tokens_per_second"]["median"] / told["allowed"], rel=0.01)
    assert found["pipeline: one step inside"]["most_time"]


def test_the_fast_path_learns_what_the_reference_learns() -> None:
    found = lines("fast_path.py", "--small", "--steps", "20")
    curves, gradients = found["fast path: loss curves"], found["fast path: gradients"]
    assert curves["within"]
    assert gradients["within"]
    assert gradients["largest_error_to_float64"]["plain"] > 1e-4, (
        "bfloat16 is not float64: the comparison sees something"
    )
    starts = {name: ends[0] for name, ends in curves["first_and_last"].items()}
    assert starts["fast"] == pytest.approx(starts["reference"], abs=0.01), "equal weights, equal batch"
    assert starts["other_anchors"] != starts["reference"]


@pytest.mark.parametrize("placed", ['{"compile": true}', '{"fuse": true, "attention": "flex"}'])
def test_a_training_of_mixed_lengths_makes_no_graph_after_its_warm_up(placed: str) -> None:
    small = ["--small", "--device", "cpu", "--threads", "1", "--backend", "eager", "--steps", "12"]
    told = lines("compiled.py", *small, "--placed", placed)["compiled training"]
    assert told["graphs"] == told["graphs_when_every_bucket_was_seen"] > 0
    assert told["graphs"] <= told["buckets"] or "fuse" in placed


@pytest.mark.skipif("DFLASH_SPECFORGE_PATH" not in os.environ, reason="needs the unpacked wheel of SpecForge 0.2.0")
def test_specforge_learns_the_same_from_the_same_batch() -> None:
    found = lines("drafter_step.py", "--small", "--specforge", os.environ["DFLASH_SPECFORGE_PATH"])
    assert found["drafter step: the same learning"]["same"]
    assert is_spread(found["drafter step, long"]["specforge"])


def test_lengths_of_the_benchmarks_are_those_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(GPU))
    import shapes

    drawn = shapes.lengths(100_000, **shapes.LENGTHS_27B)
    assert drawn.mean() == pytest.approx(2202, rel=0.02)
    assert drawn.max() == 8192


def test_an_idle_device_is_the_time_between_its_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(GPU))
    monkeypatch.syspath_prepend(str(source_root() / "tests"))
    from pipeline import idle_share

    assert idle_share([]) is None
    assert idle_share([(0, 2), (1, 3), (8, 10)]) == 0.5
