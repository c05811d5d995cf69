"""A training goes on where its role moved to, from the state it had: over real sshd, with kills and lost hosts on the way."""

from __future__ import annotations

import contextlib
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
STEPS = {"schedule_steps": 400, "checkpoint_every": 100}


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


@contextlib.contextmanager
def trained(space: Spread, host: str, step: int, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Runs until a step is saved, and stops the clock: its trainer stands still until somebody wakes it. The step's receipt
    is the controller's to write, and comes."""
    with running(space, *arguments) as process:
        wait_until(lambda: saved(space, host, step), 300, f"step {step}")
        os.kill(trainer(space, host), signal.SIGSTOP)
        wait_until(lambda: any(space.results.glob(f"store/train/*/receipts/step_{step}.json")), 300, f"receipt {step}")
        yield process
        os.kill(process.pid, signal.SIGINT)
        process.communicate(timeout=60 * PATIENCE)


def trainer(space: Spread, host: str) -> int:
    paths = sorted(training(space, host).glob("attempts/*.json"), key=lambda path: int(path.stem))
    return int(json.loads(paths[-1].read_text())["trainer_pid"])


def wake(space: Spread, host: str) -> None:
    os.kill(trainer(space, host), signal.SIGCONT)


def crash(space: Spread, host: str) -> None:
    """Launcher and trainer are gone from one moment to the next."""
    record = holder(training(space, host) / "lease.json")
    assert record is not None
    for pid in (record.pid, trainer(space, host)):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not at_work(space, host), what="a free lease")


def stop(space: Spread, host: str) -> None:
    """`dflash stop`, of a trainer that stands still."""
    ending = space.start("stop", "micro")
    wait_until(lambda: (training(space, host) / "stop.json").exists(), what="the marker")
    wake(space, host)
    out, _ = ending.communicate(timeout=120 * PATIENCE)
    assert ending.returncode == 0, out


def hosts_of_steps(space: Spread) -> dict[int, str]:
    paths = (space.train_directory() / "receipts").glob("step_*.json")
    return {receipt.step or 0: receipt.host for receipt in map(Receipt.read, paths)}


def assert_equal(space: Spread, undisturbed: Spread) -> None:
    """The same batches in the same steps, and the same weights, wherever they were trained."""
    assert batch_ids(space.results / "store") == batch_ids(undisturbed.results / "store")
    for step in (100, 200, 300, 400):
        receipt, other = (
            Receipt.read(w.train_directory() / f"receipts/step_{step}.json") for w in (space, undisturbed)
        )
        assert receipt.content_digest() == other.content_digest()
    table = "runs/micro/latest/evaluations.csv"
    assert (space.results / table).read_bytes() == (undisturbed.results / table).read_bytes()


def test_a_training_goes_on_on_another_host_and_its_weights_are_those_of_an_undisturbed_run(
    space: Spread, undisturbed: Spread
) -> None:
    with trained(space, "trainbox", 100):
        pass
    space.write_hosts(gpu="spare")
    refused = space.call("run", expect=1)
    assert "trainbox" in refused.stderr
    assert "dflash stop micro" in refused.stderr
    assert not list(space.store("spare").glob("train/*"))
    wake(space, "trainbox")
    wait_until(lambda: saved(space, "trainbox", 200), 300, "a checkpoint that has no receipt yet")
    os.kill(trainer(space, "trainbox"), signal.SIGSTOP)
    stop(space, "trainbox")
    assert "--resume" in space.call("run", expect=1).stderr
    space.call("run", "--resume")
    assert_equal(space, undisturbed)
    assert hosts_of_steps(space) == {100: "trainbox", 200: "spare", 300: "spare", 400: "spare"}
    assert sorted(path.stem for path in training(space, "spare").glob("attempts/*.json")) == ["1", "2"]
    assert not [path.name for path in training(space, "spare").iterdir() if "arriving" in path.name]
    assert saved(space, "trainbox", 100), "the old host's copy stays"
    assert space.reruns() == []


def test_from_this_machine_to_another_and_back(space: Spread, undisturbed: Spread) -> None:
    space.write_hosts(gpu="local")
    with trained(space, "local", 100):
        stop(space, "local")
    space.write_hosts(gpu="trainbox")
    plain = space.snakemake(expect=None)
    assert plain.returncode != 0
    assert "`dflash run` carries it over to trainbox" in plain.stderr
    with trained(space, "trainbox", 200, "--resume"):
        stop(space, "trainbox")
    space.write_hosts(gpu="local")
    space.call("run", "--resume")
    assert_equal(space, undisturbed)
    assert hosts_of_steps(space) == {100: "local", 200: "trainbox", 300: "local", 400: "local"}
    assert not (training(space, "local") / "moved.json").exists()
    assert (training(space, "trainbox") / "moved.json").exists()


def test_what_lives_on_a_host_that_is_down_is_not_begun_anew(space: Spread, undisturbed: Spread) -> None:
    with trained(space, "trainbox", 100):
        pass
    crash(space, "trainbox")
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
    assert hosts_of_steps(space)[400] == "spare"
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
    with trained(space, "trainbox", 100):
        pass
    crash(space, "trainbox")
    space.write_hosts(gpu="spare")
    for what, reached in MOMENTS:
        with running(space) as process:
            wait_until(lambda: reached(space), seconds=120, what=what)  # noqa: B023
            for pid in (process.pid, *snakemakes(process.pid)):
                os.kill(pid, signal.SIGKILL)
        assert (training(space, "trainbox") / "moved.json").exists() or not saved(space, "spare", 100)
    space.call("run")
    assert hosts_of_steps(space)[400] == "spare"
    assert_equal(space, undisturbed)
    assert not moving(space)


def test_a_move_that_cannot_be_finished_is_taken_back_with_the_role_and_one_that_was_made_leaves_no_second_training(
    space: Spread, undisturbed: Spread
) -> None:
    with trained(space, "trainbox", 100):
        pass
    crash(space, "trainbox")
    space.workdir("spare").mkdir(parents=True)
    (space.workdir("spare") / "results").write_text("a file: nothing can arrive")
    space.write_hosts(gpu="spare")
    space.call("run", expect=1)
    assert (training(space, "trainbox") / "moved.json").exists()
    (space.workdir("spare") / "results").unlink()
    space.write_hosts(gpu="trainbox")
    with trained(space, "trainbox", 200):
        stop(space, "trainbox")
    assert not moving(space)
    space.write_hosts(gpu="spare")
    with trained(space, "spare", 300, "--resume"):
        pass
    crash(space, "spare")
    forgetful = without_results(space)
    refused = forgetful.call("run", expect=1)
    assert "was carried over from here to `spare`" in refused.stderr
    space.call("run")
    assert hosts_of_steps(space)[400] == "spare"
    assert_equal(space, undisturbed)


def test_a_role_that_moved_and_a_checkpoint_damaged_on_the_old_host_are_mended_by_one_run(
    tmp_path: Path, servers: dict[str, Sshd], finished_run: Workspace
) -> None:
    space = make_spread(tmp_path / "all/work", finished_run.cache, servers)
    copy_upstream(finished_run, space)
    space.write_hosts(eval="local")
    space.call("run")
    weights = training(space, "trainbox") / "step_4/drafter/model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    for path in (
        *space.results.glob("store/evaluate/*/step_4.json"),
        *space.results.glob("store/ship/*/local/step_4.json"),
    ):
        path.unlink()
    space.write_hosts(gpu="spare")
    assert "--recompute train" in space.call("run", expect=1).stderr
    space.call("run", "--recompute", "train")
    assert hosts_of_steps(space)[4] == "spare"
    assert (training(space, "spare") / "step_4/drafter/model.safetensors").read_bytes() == whole
    assert space.reruns() == []
    table = "runs/micro/latest/evaluations.csv"
    assert (space.results / table).read_bytes() == (finished_run.results / table).read_bytes()


def without_results(space: Spread) -> Spread:
    """A controller that has lost its results, with the role where it was at first."""
    folder = space.folder.parent / "other"
    shutil.copytree(space.folder, folder, ignore=shutil.ignore_patterns("results", ".snakemake"))
    config = json.loads(json.dumps(space.config))
    other = Spread(folder, space.cache, config=config, servers=space.servers, roles={**space.roles, "gpu": "trainbox"})
    copy_upstream(space, other)
    other.write_hosts()
    return other
