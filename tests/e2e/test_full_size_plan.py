"""Snakemake plans the real job, on nine GPUs and on one, where neither its weights nor its prompts are."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dflash.plan.code import source_root

FULL = "config/qwen3.6-27b.yaml"


@pytest.mark.parametrize(
    ("files", "checkpoints", "shipments"),
    [([FULL], 38, 38), ([FULL, "config/qwen3.6-27b.one-gpu.yaml"], 76, 0)],
    ids=["5 + 3", "one GPU"],
)
def test_a_dry_run_plans_every_checkpoint(files: list[str], checkpoints: int, shipments: int, tmp_path: Path) -> None:
    for name in ("Snakefile", "workflow", "profiles", "config", "dflash"):
        source = source_root() / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    command = [sys.executable, "-m", "snakemake", "-n", "--quiet", "rules", "--configfile", *files]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    counts = dict(line.split() for line in (done.stdout + done.stderr).splitlines() if len(line.split()) == 2)
    assert int(counts["checkpoint_step"]) == int(counts["evaluate"]) == checkpoints
    assert int(counts.get("ship_step", 0)) == shipments
    assert int(counts["completions"]) == 41
    assert not (tmp_path / "results").exists(), "parsing writes nothing"
