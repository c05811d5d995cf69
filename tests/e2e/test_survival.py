"""Training goes on whatever happens to the workflow, and the workflow goes on whatever happens to training."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import PATIENCE, Workspace, copy_upstream, wait_until  # type: ignore[import-not-found]

from dflash.base.records import LeaseRecord, last_attempts
from dflash.hosts.lease import holder

LONG = {"schedule_steps": 600, "checkpoint_every": 300}
LONGER = {"schedule_steps": 6000, "checkpoint_every": 300}
"""Not over before `dflash stop` is there: on a good day a step takes 14 ms."""
"""A training of tens of seconds: long enough to do something to it."""


@pytest.fixture
def long(begun: Workspace) -> Workspace:
    begun.write_config(train=LONG)
    return begun


def lease(space: Workspace) -> LeaseRecord | None:
    found = list(space.results.glob("store/train/*/lease.json"))
    return holder(found[0]) if found else None


def checkpoint(space: Workspace, step: int) -> bool:
    return any(space.results.glob(f"store/train/*/step_{step}/manifest.json"))


def batch_ids(space: Workspace) -> dict[int, list[str]]:
    return {line.step: line.batch_ids for line in last_attempts(space.train_directory() / "metrics.jsonl")}


def begun_training(store: Path) -> bool:
    """Whether a training of a store has made a step; all others are still to come."""
    return any(store.glob("train/*/metrics.jsonl"))


@contextlib.contextmanager
def running(space: Workspace, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`dflash run` in the background; killed with its Snakemake when the block leaves it running."""
    process = space.start("run", *arguments)
    try:
        yield process
    finally:
        for pid in [*snakemakes(process.pid), process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def snakemakes(parent: int) -> list[int]:
    """The Snakemake processes that `dflash run` started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text()
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if int(stat.rpartition(")")[2].split()[1]) == parent and b"snakemake" in command:
            found.append(int(folder.name))
    return found


def trained(space: Workspace) -> None:
    assert sorted(batch_ids(space)) == list(range(1, LONG["schedule_steps"] + 1))


def test_evaluation_of_a_step_overlaps_training_of_the_next(begun: Workspace) -> None:
    begun.write_config(train={"schedule_steps": 800, "checkpoint_every": 400})
    begun.call("run")
    lines = last_attempts(begun.train_directory() / "metrics.jsonl")
    during = {}
    for path in begun.results.glob("store/evaluate/*/step_*.json"):
        receipt = json.loads(path.read_text())
        start, end = moment(receipt["started"]), moment(receipt["finished"])
        during[receipt["step"]] = sum(start < moment(line.time) < end for line in lines)
    assert max(during.values()) > 10, f"training steps finished during each evaluation: {during}"
    assert during[800] == 0
    assert begun.attempts() == 1


def moment(text: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text)


def test_after_kill_9_of_snakemake_a_rerun_attaches_to_the_live_trainer(long: Workspace) -> None:
    with running(long) as process:
        wait_until(lambda: begun_training(long.results / "store"), what="first step")
        before = lease(long)
        assert before is not None
        (snakemake,) = snakemakes(process.pid)
        os.kill(process.pid, signal.SIGKILL)
        os.kill(snakemake, signal.SIGKILL)
    alive = lease(long)
    assert alive is not None
    assert alive.pid == before.pid
    long.call("run")
    assert long.attempts() == 1
    trained(long)


def test_after_kill_9_of_the_trainer_it_resumes_and_sees_the_same_batches(long: Workspace) -> None:
    with running(long) as process:
        wait_until(lambda: checkpoint(long, 300), what="first checkpoint")
        attempt = json.loads(next(long.results.glob("store/train/*/attempts/1.json")).read_text())
        os.kill(attempt["trainer_pid"], signal.SIGKILL)
        out, _ = process.communicate(timeout=240 * PATIENCE)
        assert process.returncode == 0, out
    assert long.attempts() == 2
    disturbed = batch_ids(long)
    again = Workspace(long.folder.parent / "again", long.cache, config=json.loads(json.dumps(long.config)))
    (again.folder / "config").mkdir(parents=True)
    again.config["prompts"][0]["path"] = str(long.folder / "config/micro/short.jsonl")
    again.write_config()
    copy_upstream(long, again)
    again.snakemake(f"results/store/train/{long.train_directory().name}/receipts/step_600.json")
    assert again.attempts() == 1
    assert disturbed == batch_ids(again)
    for step in (300, 600):
        name = f"store/train/*/step_{step}/drafter/model.safetensors"
        assert next(long.results.glob(name)).read_bytes() == next(again.results.glob(name)).read_bytes()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_a_signal_gives_the_prompt_back_and_leaves_training_alive(long: Workspace, number: signal.Signals) -> None:
    with running(long) as process:
        wait_until(lambda: begun_training(long.results / "store"), what="first step")
        before = lease(long)
        start = time.monotonic()
        os.kill(process.pid, number)
        out, _ = process.communicate(timeout=30 * PATIENCE)
        assert time.monotonic() - start < 5.0 * PATIENCE
        assert process.returncode == 128 + number
        assert "goes on" in out
    after = lease(long)
    assert before is not None
    assert after is not None
    assert after.pid == before.pid
    long.call("run")
    assert long.attempts() == 1
    trained(long)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_a_signal_while_the_snakefile_is_read_ends_with_the_same_line_and_no_traceback(
    fresh: Workspace, number: signal.Signals
) -> None:
    (fresh.folder / "Snakefile").write_text("import pathlib, time\npathlib.Path('read').touch()\ntime.sleep(600)\n")
    with running(fresh) as process:
        wait_until(lambda: (fresh.folder / "read").exists(), what="snakemake to read the Snakefile")
        start = time.monotonic()
        os.kill(process.pid, number)
        out, _ = process.communicate(timeout=30 * PATIENCE)
        assert time.monotonic() - start < 3.0 * PATIENCE
    assert process.returncode == 128 + number
    assert "Traceback" not in out
    assert out.splitlines()[-1].startswith("dflash: stopped; a training that was running goes on")


def test_stop_ends_training_and_neither_run_nor_snakemake_revives_it(long: Workspace) -> None:
    with running(long) as process:
        wait_until(lambda: begun_training(long.results / "store"), what="first step")
        os.kill(process.pid, signal.SIGINT)
        process.communicate(timeout=30 * PATIENCE)
    long.call("stop", "micro")
    assert lease(long) is None
    steps = len(batch_ids(long))
    assert steps < LONG["schedule_steps"]
    refused = long.call("run", expect=1)
    assert "was stopped by" in refused.stderr
    assert "--resume" in refused.stderr
    long.snakemake(expect=1)
    assert lease(long) is None
    assert len(batch_ids(long)) == steps
    long.call("run", "--resume")
    trained(long)


def test_stop_finish_evaluates_and_reports_what_exists(long: Workspace) -> None:
    long.write_config(train=LONGER)
    with running(long) as process:
        wait_until(lambda: checkpoint(long, 300), what="first checkpoint")
        os.kill(process.pid, signal.SIGINT)
        process.communicate(timeout=30 * PATIENCE)
    long.call("stop", "micro", "--finish")
    existing = {int(path.parent.name[5:]) for path in long.results.glob("store/train/*/step_*/manifest.json")}
    scheduled = sorted(step for step in existing if step % 300 == 0)
    assert 300 in scheduled
    assert 6000 not in scheduled
    long.call("run")
    manifest: dict[str, Any] = json.loads((long.results / "runs/micro/latest/manifest.json").read_text())
    assert manifest["steps"] == scheduled
    assert (long.results / "runs/micro/latest/report.html").exists()
    assert lease(long) is None


def test_a_second_dflash_run_in_the_same_folder_is_refused_by_name(long: Workspace) -> None:
    with running(long) as process:
        wait_until(lambda: checkpoint(long, 300), what="first checkpoint")
        refused = long.call("run", expect=1)
        assert str(process.pid) in refused.stderr


def test_a_permanent_failure_is_not_retried_and_its_cause_is_the_last_word(fresh: Workspace) -> None:
    fresh.write_config(completions={"max_truncated_share": 0.0})
    done = fresh.call("run", expect=1)
    last = done.stderr.strip().splitlines()[-1]
    assert "max_truncated_share" in last
    assert not list(fresh.results.glob("store/completions/*/receipt.json"))


def test_a_thousand_checkpoints_can_be_planned(fresh: Workspace) -> None:
    fresh.write_config(train={"schedule_steps": 1000, "checkpoint_every": 1})
    assert fresh.node("train")["missing"] == 1000
    done = fresh.snakemake("-n", "--quiet")
    assert done.returncode == 0


def test_continue_from_another_training(finished: Workspace) -> None:
    parent = finished.node("train")["key"]
    finished.write_config(train={"continue_from": {"key": parent, "step": 6}, "schedule_steps": 4, "lr": 1e-4})
    assert "train:4" in finished.reruns()
    child = finished.node("train")["key"]
    assert child != parent
    manifest = json.loads((finished.results / f"store/train/{child}/step_4/manifest.json").read_text())
    assert manifest["lineage"]["parent"]["key"] == parent
    finished.write_config(train={"continue_from": {"key": parent, "step": 5}})
    assert "4, 6" in finished.call("run", expect=2).stderr
    finished.write_config(train={"continue_from": {"key": parent, "step": 6}, "target_layer_ids": [2, 3]})
    assert "target_layer_ids" in finished.call("run", expect=2).stderr
