"""A training goes on where its role moved to, from the state it had: over real sshd, with kills and lost hosts on the way."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import PATIENCE, Workspace, wait_until  # type: ignore[import-not-found]
from spread import Spread, make_spread
from sshd import Sshd, free_port
from test_spread_survival import batch_ids, copy_upstream
from test_survival import running, snakemakes

from dflash.base.records import Receipt
from dflash.hosts.lease import holder
from dflash.plan.places import read_home

pytestmark = pytest.mark.timeout(900 * PATIENCE)
STEPS = {"schedule_steps": 800, "checkpoint_every": 200}


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, servers: dict[str, Sshd], finished_run: Workspace) -> Spread:
    """The training of these tests, done on this machine in one go."""
    space = begin(tmp_path_factory.mktemp("undisturbed"), servers, finished_run)
    space.write_hosts(gpu="local")
    space.call("run")
    return space


@pytest.fixture
def space(tmp_path: Path, servers: dict[str, Sshd], finished_run: Workspace) -> Iterator[Spread]:
    """A training not yet begun, to be judged on the controller. What comes before it stands already."""
    made = begin(tmp_path / "all", servers, finished_run)
    yield made
    made.kill_trainers()
    Workspace.kill_trainers(made)


def begin(parent: Path, servers: dict[str, Sshd], finished_run: Workspace) -> Spread:
    made = make_spread(parent / "work", finished_run.cache, servers)
    copy_upstream(finished_run, made)
    made.write_config(train=STEPS)
    made.write_hosts(eval="local")
    return made


def training(space: Spread, host: str) -> Path:
    """The folder of the training on a host."""
    store = space.results / "store" if host == "local" else space.store(host)
    return store / "train" / space.train_directory().name


def saved(space: Spread, host: str, step: int) -> bool:
    store = space.results / "store" if host == "local" else space.store(host)
    return any(store.glob(f"train/*/step_{step}/manifest.json"))


def at_work(space: Spread, host: str) -> bool:
    return holder(training(space, host) / "lease.json") is not None


def train_until(space: Spread, host: str, step: int, then: Callable[[subprocess.Popen[str]], None]) -> None:
    """Runs until a step is saved on a host, and does something to the run."""
    with running(space) as process:
        wait_until(lambda: saved(space, host, step), seconds=300, what=f"step {step}")
        then(process)


def leave_it(process: subprocess.Popen[str]) -> None:
    """Ends the controller with Ctrl-C; training goes on."""
    os.kill(process.pid, signal.SIGINT)
    process.communicate(timeout=30 * PATIENCE)


def hosts_of_steps(space: Spread) -> dict[int, str]:
    paths = (space.train_directory() / "receipts").glob("step_*.json")
    return {receipt.step or 0: receipt.host for receipt in map(Receipt.read, paths)}


def assert_equal(space: Spread, undisturbed: Spread) -> None:
    """The same batches in the same steps, and the same weights, wherever they were trained."""
    assert batch_ids(space.results / "store") == batch_ids(undisturbed.results / "store")
    for step in (200, 400, 600, 800):
        receipt, other = (
            Receipt.read(w.train_directory() / f"receipts/step_{step}.json") for w in (space, undisturbed)
        )
        assert receipt.content_digest() == other.content_digest()
    table = "runs/micro/latest/evaluations.csv"
    assert (space.results / table).read_bytes() == (undisturbed.results / table).read_bytes()


def test_a_training_goes_on_on_another_host_and_its_weights_are_those_of_an_undisturbed_run(
    space: Spread, undisturbed: Spread
) -> None:
    train_until(space, "trainbox", 200, leave_it)
    space.write_hosts(gpu="spare")
    refused = space.call("run", expect=1)
    assert "trainbox" in refused.stderr
    assert "dflash stop micro" in refused.stderr
    assert not list(space.store("spare").glob("train/*"))
    wait_until(lambda: saved(space, "trainbox", 400), seconds=300, what="a checkpoint that has no receipt yet")
    space.call("stop", "micro")
    assert not at_work(space, "trainbox")
    assert "--resume" in space.call("run", expect=1).stderr
    space.call("run", "--resume")
    assert_equal(space, undisturbed)
    assert hosts_of_steps(space)[200] == "trainbox"
    assert hosts_of_steps(space)[800] == "spare"
    assert sorted(path.stem for path in training(space, "spare").glob("attempts/*.json")) == ["1", "2"]
    assert not [path.name for path in training(space, "spare").iterdir() if "arriving" in path.name]
    assert saved(space, "trainbox", 200), "the old host's copy stays"
    assert space.reruns() == []


def test_from_this_machine_to_another_and_back(space: Spread, undisturbed: Spread) -> None:
    space.write_hosts(gpu="local")
    train_until(space, "local", 200, lambda process: stop(space, process))
    space.write_hosts(gpu="trainbox")
    plain = space.snakemake(expect=None)
    assert plain.returncode != 0
    assert "`dflash run` carries it over to trainbox" in plain.stderr
    with running(space, "--resume") as process:
        wait_until(lambda: saved(space, "trainbox", 400), seconds=300, what="step 400")
        stop(space, process)
    assert read_home(space.train_directory()).place == "trainbox"  # type: ignore[union-attr]
    space.write_hosts(gpu="local")
    space.call("run", "--resume")
    assert_equal(space, undisturbed)
    assert hosts_of_steps(space)[200] == "local"
    assert hosts_of_steps(space)[800] == "local"
    assert not (training(space, "local") / "moved.json").exists()
    assert (training(space, "trainbox") / "moved.json").exists()


def stop(space: Spread, process: subprocess.Popen[str]) -> None:
    space.call("stop", "micro")
    process.communicate(timeout=60 * PATIENCE)


def test_what_lives_on_a_host_that_is_down_is_not_begun_anew(space: Spread, undisturbed: Spread) -> None:
    train_until(space, "trainbox", 200, leave_it)
    space.kill_trainers()
    space.more["trainbox"] = {"port": free_port()}
    space.write_hosts(gpu="spare")
    refused = space.call("run", expect=1)
    assert "lives on trainbox, which cannot be reached now" in refused.stderr
    assert "set the role back" in refused.stderr
    assert "train anew on spare" in refused.stderr
    assert not list(space.store("spare").glob("train/*"))
    del space.more["trainbox"]
    space.write_hosts(gpu="spare")
    space.call("run")
    assert hosts_of_steps(space)[800] == "spare"
    assert_equal(space, undisturbed)


def moving(space: Spread) -> dict[str, Any]:
    home = read_home(space.train_directory())
    return home.moving.model_dump() if home is not None and home.moving is not None else {}


MOMENTS: list[tuple[str, Callable[[Spread], bool]]] = [
    ("it has begun", lambda space: bool(moving(space))),
    ("the old host has let it go", lambda space: (training(space, "trainbox") / "moved.json").exists()),
    ("bytes arrive", lambda space: any(training(space, "spare").glob("..arriving.*.partial"))),
    ("all has arrived", lambda space: (training(space, "spare") / "..arriving.shipment.json").exists()),
    ("the new host was asked", lambda space: bool(moving(space).get("asked"))),
    ("it lives there", lambda space: (training(space, "spare") / "arrived.json").exists()),
]


def test_a_controller_killed_at_any_moment_of_the_move_leaves_it_to_the_next_run(
    space: Spread, undisturbed: Spread
) -> None:
    train_until(space, "trainbox", 200, leave_it)
    space.kill_trainers()
    space.write_hosts(gpu="spare")
    for what, reached in MOMENTS:
        with running(space) as process:
            wait_until(lambda: reached(space), seconds=120, what=what)  # noqa: B023
            children = snakemakes(process.pid)
            os.kill(process.pid, signal.SIGKILL)
            for child in children:
                os.kill(child, signal.SIGKILL)
        assert (training(space, "trainbox") / "moved.json").exists() or not saved(space, "spare", 200)
    space.call("run")
    assert hosts_of_steps(space)[800] == "spare"
    assert_equal(space, undisturbed)
    assert not moving(space)


def test_a_move_that_was_begun_is_taken_back_with_the_role_and_the_old_host_refuses_after_it_arrived(
    space: Spread, undisturbed: Spread
) -> None:
    train_until(space, "trainbox", 200, leave_it)
    space.kill_trainers()
    (space.workdir("spare")).mkdir(parents=True, exist_ok=True)
    store = space.workdir("spare") / "results"
    store.write_text("no folder: nothing can arrive")
    space.write_hosts(gpu="spare")
    space.call("run", expect=1)
    assert (training(space, "trainbox") / "moved.json").exists()
    store.unlink()
    space.write_hosts(gpu="trainbox")
    train_until(space, "trainbox", 400, leave_it)
    space.call("stop", "micro")
    space.write_hosts(gpu="spare")
    train_until_resumed = space.start("run", "--resume")
    wait_until(lambda: saved(space, "spare", 600), seconds=300, what="step 600 on spare")
    leave_it(train_until_resumed)
    space.kill_trainers()
    fresh = second_store(space)
    fresh.write_hosts(gpu="trainbox")
    refused = fresh.call("run", expect=1)
    assert "was carried over from here to `spare`" in refused.stderr
    space.call("run")
    assert_equal(space, undisturbed)


def second_store(space: Spread) -> Spread:
    """A controller that has lost its results: what it knows of a training is what the hosts say."""
    folder = space.folder.parent / "other"
    shutil.copytree(space.folder, folder, ignore=shutil.ignore_patterns("results", ".snakemake"))
    other = Spread(folder, space.cache, config=json.loads(json.dumps(space.config)), servers=space.servers)
    other.roles = dict(space.roles)
    copy_upstream(space, other)
    return other
