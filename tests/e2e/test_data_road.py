"""Sources added, removed, imported, cut into shards and built upon: what runs on real Snakemake, counted by receipts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Workspace  # type: ignore[import-not-found]

pytestmark = pytest.mark.timeout(2400)


def reruns(space: Workspace) -> list[str]:
    """Runs the road as far as buckets on plain Snakemake and says which receipts that made, sorted."""
    before = space.receipts()
    profile = ["--workflow-profile", str(space.code / "profiles/default")]
    command = [sys.executable, "-m", "snakemake", "-s", str(space.code / "Snakefile"), *profile, "--until", "buckets"]
    space._run(command, 0, 900)
    found: list[str] = space.made_since(before)
    return found


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def results_of(space: Workspace, stage: str, file: str) -> list[dict[str, Any]]:
    """A JSON file of every result of a stage, oldest first."""
    found = sorted(space.results.glob(f"store/{stage}/*/{file}"), key=lambda path: path.stat().st_mtime)
    return [json.loads(path.read_text()) for path in found]


def test_a_source_added_runs_its_own_completions_and_what_follows_and_removed_again_nothing(fresh: Workspace) -> None:
    first = fresh.config["prompts"]
    assert reruns(fresh) == ["buckets", "completions", "dataset", "prompts"]
    write_lines(fresh.folder / "more.jsonl", [{"prompt": f"question {n}"} for n in range(6)])
    fresh.write_config(prompts=[*first, {"name": "more", "path": "more.jsonl", "licence": "MIT"}])
    assert reruns(fresh) == ["buckets", "completions", "dataset", "prompts"]
    fresh.write_config(prompts=first)
    assert reruns(fresh) == []
    fresh.write_config(prompts=[*first, {"name": "more", "path": "more.jsonl", "licence": "CC0-1.0"}])
    assert reruns(fresh) == []


def test_shards_are_jobs_ready_samples_cost_no_completions_and_a_version_is_the_base_of_the_next(
    fresh: Workspace,
) -> None:
    (short,) = fresh.config["prompts"]
    rows = [{"input_ids": [n + 1, 5, 6, 7, 8], "loss_mask": [0, 0, 1, 1, 1]} for n in range(12)]
    write_lines(fresh.folder / "old.jsonl", rows)
    old = {"name": "old", "kind": "imported", "path": "old.jsonl"}
    fresh.write_config(prompts=[{**short, "shards": 2}, old])
    assert reruns(fresh) == ["buckets", "completions", "completions", "dataset", "prompts", "prompts"]
    (record,) = results_of(fresh, "dataset", "dataset.json")
    lines = len((fresh.folder / short["path"]).read_text().splitlines())
    assert {name: source["total"] for name, source in record["sources"].items()} == {"old": 12, "short": lines}
    (base,) = fresh.results.glob("store/dataset/*")
    write_lines(fresh.folder / "long.jsonl", [{"prompt": f"question {n} " + "and so on " * 6} for n in range(8)])
    version = {"name": "base", "kind": "dataset", "path": str(base.relative_to(fresh.folder))}
    fresh.write_config(prompts=[version, {"name": "long", "path": "long.jsonl"}])
    assert reruns(fresh) == ["buckets", "completions", "dataset", "prompts", "prompts"]
    *_, grown = results_of(fresh, "dataset", "dataset.json")
    assert grown["parent"]["digest"] == record["digest"]
    assert grown["sources"]["base"]["total"] == record["samples"]
    *_, buckets = results_of(fresh, "buckets", "buckets.json")
    assert buckets["shift"]["now"]["mean_length"] > buckets["shift"]["before"]["mean_length"]
    assert any("mean length" in sentence for sentence in buckets["shift"]["warnings"])
    assert reruns(fresh) == []
