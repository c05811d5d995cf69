"""Training on another host goes on whatever happens to the controller and to the link; whoever comes next attaches."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import PATIENCE, Workspace, copy_upstream, wait_until  # type: ignore[import-not-found]
from spread import Spread, make_spread
from sshd import Sshd
from test_survival import LONG, LONGER, begun_training, running, snakemakes

from dflash.base.records import LeaseRecord, last_attempts
from dflash.base.store import load_inputs, read_params
from dflash.data.batches import load_train_samples
from dflash.hosts.lease import holder
from dflash.train.trainer import batch_plan

pytestmark = pytest.mark.timeout(900 * PATIENCE)


@pytest.fixture
def far(tmp_path: Path, servers: dict[str, Sshd], finished_run: Workspace) -> Iterator[Spread]:
    """A long training on another host, not yet begun; judged on the controller. What comes before it stands already."""
    space = make_spread(tmp_path / "all" / "work", finished_run.cache, servers)
    copy_upstream(finished_run, space)
    space.write_config(train=LONG)
    space.write_hosts(eval="local")
    yield space
    space.kill_trainers()


def lease(space: Spread) -> LeaseRecord | None:
    found = list(space.store("trainbox").glob("train/*/lease.json"))
    return holder(found[0]) if found else None


def checkpoint(space: Spread, step: int) -> bool:
    return any(space.store("trainbox").glob(f"train/*/step_{step}/manifest.json"))


def attempts(space: Spread) -> int:
    return len(list(space.store("trainbox").glob("train/*/attempts/*.json")))


def batch_ids(folder: Path) -> dict[int, list[str]]:
    (path,) = folder.glob("train/*/metrics.jsonl")
    return {line.step: line.batch_ids for line in last_attempts(path)}


def undisturbed(space: Spread) -> dict[int, list[str]]:
    """The batches that the dataset and the batching params give to each step; `test_survival` proves that an undisturbed
    training takes just these."""
    inputs = load_inputs(read_params(space.train_directory()), space.results / "store")
    samples = load_train_samples(inputs.one("dataset").directory)
    plan = batch_plan(samples, inputs.one("dataset"), inputs.one("buckets"))
    steps = range(1, LONG["schedule_steps"] + 1)
    return {step: [batch.batch_id for batch in plan.step(step - 1)] for step in steps}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=["ctrl-c", "sigterm", "kill-9"])
def test_the_controller_goes_and_the_next_run_attaches_to_the_live_trainer(far: Spread, number: signal.Signals) -> None:
    with running(far) as process:
        wait_until(lambda: begun_training(far.store("trainbox")), seconds=200, what="first step")
        before = lease(far)
        assert before is not None
        if number == signal.SIGKILL:
            (snakemake,) = snakemakes(process.pid)
            os.kill(process.pid, signal.SIGKILL)
            os.kill(snakemake, signal.SIGKILL)
        else:
            os.kill(process.pid, number)
            process.communicate(timeout=30 * PATIENCE)
            assert process.returncode == 128 + number
    after = lease(far)
    assert after is not None
    assert (after.pid, after.start) == (before.pid, before.start)
    far.call("run")
    assert attempts(far) == 1
    assert batch_ids(far.results / "store") == batch_ids(far.store("trainbox")) == undisturbed(far)


def test_a_lost_link_is_made_again_and_training_does_not_notice(far: Spread) -> None:
    with running(far) as process:
        wait_until(lambda: lease(far), seconds=200, what="trainer")
        wait_until(lambda: far.servers["trainbox"].children(), what="a waiting connection")
        time.sleep(1.0)
        assert far.servers["trainbox"].kill_children()
        out, _ = process.communicate(timeout=600 * PATIENCE)
        assert process.returncode == 0, out
    assert "the connection to trainbox is lost; trying again" in out
    assert attempts(far) == 1


def test_a_killed_trainer_is_told_of_with_the_end_of_its_log_and_started_again(far: Spread) -> None:
    with running(far) as process:
        wait_until(lambda: checkpoint(far, 300), seconds=200, what="first checkpoint")
        (path,) = far.store("trainbox").glob("train/*/attempts/1.json")
        os.kill(json.loads(path.read_text())["trainer_pid"], signal.SIGKILL)
        out, _ = process.communicate(timeout=600 * PATIENCE)
        assert process.returncode == 0, out
    assert "was killed by SIGKILL" in out
    assert "its log ends:" in out
    assert "trainbox:" in out
    assert attempts(far) == 2
    assert batch_ids(far.results / "store") == undisturbed(far)


def second_clone(far: Spread, name: str) -> Spread:
    """Another checkout of the same code, with a config like the first, that uses the same hosts and workdirs."""
    folder = far.folder.parent / name
    shutil.copytree(far.folder, folder, ignore=shutil.ignore_patterns("results", ".snakemake"))
    clone = Spread(folder, far.cache, config=json.loads(json.dumps(far.config)), servers=far.servers, roles=far.roles)
    copy_upstream(far, clone)
    clone.edited_code("dflash/cli.py", '"""The `dflash` command:', '"""The `dflash` command, in another checkout:')
    return clone


def test_a_second_clone_waits_in_line_may_not_stop_the_first_and_no_retry_revives_a_stopped_run(far: Spread) -> None:
    far.write_config(train={"schedule_steps": 40000, "checkpoint_every": 20000})  # it is stopped long before
    other = second_clone(far, "other")
    other.write_config(run="other", train={"lr": 2e-3, "schedule_steps": 4, "checkpoint_every": 2})
    with running(far) as first:
        wait_until(lambda: lease(far), seconds=200, what="the first trainer")
        with running(other) as second:
            queue = wait_until(lambda: waiting_line(other), seconds=200, what="the line that says who holds the host")
            assert "run micro" in queue
            assert str(far.code) in queue
            same = second_clone(far, "same")
            (same.results / "store/train" / far.node("train")["key"]).mkdir(parents=True)
            refused = same.call("stop", "micro", expect=1)
            assert "belongs to" in refused.stderr
            assert "run micro" in refused.stderr
            assert "--force" in refused.stderr
            assert lease(far) is not None
            same.call("stop", "micro", "--force")
            out, _ = first.communicate(timeout=400 * PATIENCE)
            assert first.returncode == 1
            assert "was stopped by" in out
            said, _ = second.communicate(timeout=600 * PATIENCE)
            assert second.returncode == 0, said
    far.call("run", expect=1)
    assert attempts(far) <= 2, "one start for each of the two trainings at most"


def waiting_line(space: Spread) -> str | None:
    for log in space.results.glob("logs/train/*/*.log"):
        found = re.search(r".*waiting in line: .*", log.read_text())
        if found:
            return found[0]
    return None


def test_stop_finish_ships_evaluates_and_reports_what_exists(far: Spread) -> None:
    far.write_hosts(eval="judge")
    far.write_config(train=LONGER)
    with running(far) as process:
        wait_until(lambda: checkpoint(far, 300), seconds=200, what="first checkpoint")
        os.kill(process.pid, signal.SIGINT)
        process.communicate(timeout=30 * PATIENCE)
    far.call("stop", "micro", "--finish")
    assert lease(far) is None
    far.call("run")
    manifest = json.loads((far.results / "runs/micro/latest/manifest.json").read_text())
    existing = [step for step in range(300, 6300, 300) if checkpoint(far, step)]
    assert manifest["steps"] == existing
    assert 300 in existing
    assert 6000 not in existing
    assert all(list(far.results.glob(f"store/ship/*/judge/step_{step}.json")) for step in existing)
    assert lease(far) is None


def test_checkpoint_now_works_on_a_training_elsewhere(far: Spread) -> None:
    with running(far) as process:
        wait_until(lambda: lease(far), seconds=200, what="trainer")
        done = far.call("checkpoint", "micro", "--now")
        step = int(re.search(r"step (\d+) of micro is saved", done.stdout)[1])  # type: ignore[index]
        assert checkpoint(far, step)
        assert (far.train_directory() / f"step_{step}/manifest.json").exists()
        os.kill(process.pid, signal.SIGINT)
        process.communicate(timeout=30 * PATIENCE)


def test_a_detached_run_survives_its_terminal_and_the_next_run_looks_in(far: Workspace) -> None:
    terminal = subprocess.run(
        ["setsid", "--wait", sys.executable, "-m", "dflash", "run", "--detach"],
        cwd=far.folder,
        env=far.environment(),
        capture_output=True,
        text=True,
        timeout=60 * PATIENCE,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert terminal.returncode == 0, terminal.stderr
    pid = int(re.search(r"pid (\d+)", terminal.stderr)[1])  # type: ignore[index]
    os.kill(pid, signal.SIGHUP)
    refused = far.call("run", "--detach", expect=1)
    assert str(pid) in refused.stderr
    done = far.call("run")
    assert "at work in the background" in done.stderr
    assert "checkpoints trained" in done.stderr
    assert "run micro" in done.stdout
