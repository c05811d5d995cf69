"""The same rules on a scheduler: jobs are submitted, nothing is detached, training runs in segments."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from conftest import PATIENCE, Workspace  # type: ignore[import-not-found]
from test_spread import contents

from dflash.base.records import last_attempts
from dflash.plan.code import source_root

SUBMIT = """\
#!/bin/sh
# A cluster of one machine: starts the job script in the background and prints its id.
DFLASH_FOREGROUND=1 setsid sh "$1" >>cluster.log 2>&1 </dev/null &
echo $!
"""

pytestmark = pytest.mark.timeout(900 * PATIENCE)


def test_the_slurm_profile_plans_the_same_jobs(fresh: Workspace) -> None:
    pytest.importorskip("snakemake_executor_plugin_slurm")
    profile = ["--workflow-profile", str(source_root() / "profiles/slurm")]
    command = [sys.executable, "-m", "snakemake", "-s", str(source_root() / "Snakefile"), *profile, "-n"]
    done = fresh._run(command, 0, 240)
    for rule, count in (("checkpoint_step", 2), ("evaluate", 2), ("completions", 1), ("report", 1)):
        assert f"rule {rule}:" in done.stdout + done.stderr
        assert (done.stdout + done.stderr).count(f"rule {rule}:") == count
    assert "gres=gpu:1" in done.stdout + done.stderr
    assert not fresh.results.exists()


def test_jobs_submitted_to_a_scheduler_train_in_foreground_segments(begun: Workspace, finished_run: Workspace) -> None:
    pytest.importorskip("snakemake_executor_plugin_cluster_generic")
    shutil.rmtree(begun.results / "store/buckets")
    (begun.folder / "submit.sh").write_text(SUBMIT)
    command = [sys.executable, "-m", "snakemake", "-s", str(source_root() / "Snakefile"), "--jobs", "3"]
    command += ["--executor", "cluster-generic", "--cluster-generic-submit-cmd", "sh submit.sh"]
    command += ["--cores", "3", "--scheduler", "greedy", "--rerun-triggers", "mtime", "--latency-wait", "20"]
    begun._run([*command, "--workflow-profile", "none"], 0, 800)
    assert contents(begun) == contents(finished_run)
    directory = begun.train_directory()
    ends = [json.loads(path.read_text()) for path in sorted(directory.glob("attempts/*.json"))]
    assert [end["exit"] for end in ends] == [0, 0], "one segment a checkpoint, each ended by itself"
    assert [line.step for line in last_attempts(directory / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert ids(directory) == ids(finished_run.train_directory())


def ids(directory: Path) -> list[list[str]]:
    return [line.batch_ids for line in last_attempts(directory / "metrics.jsonl")]
