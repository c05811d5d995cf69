"""`dflash rehearse`: the real ranks, a checkpoint, a shipment and an evaluation, on every topology; and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import PATIENCE, Workspace, wait_until  # type: ignore[import-not-found]
from spread import Spread, make_spread
from sshd import Sshd, all_processes
from test_spread_survival import copy_upstream, lease
from test_survival import LONG, running

from dflash.model.target import load_target
from dflash.model.target_params import RandomTarget

pytestmark = pytest.mark.timeout(900 * PATIENCE)

TWO_TO_ONE = {"topology": {"targets": 2, "drafters": 1, "colocate": False}}
NO_MEMORY = """\
import pathlib
import re

read_text = pathlib.Path.read_text


def lie(self, *arguments, **options):
    text = read_text(self, *arguments, **options)
    return re.sub("MemAvailable: .*", "MemAvailable: 1000 kB", text) if str(self) == "/proc/meminfo" else text


pathlib.Path.read_text = lie
"""
"""A `sitecustomize.py` under which a host has one megabyte left."""


@pytest.fixture
def far(tmp_path: Path, servers: dict[str, Sshd], finished_run: Workspace) -> Iterator[Spread]:
    """Trained on one host, judged on another; nothing has been shipped or trained, what comes before training stands."""
    space = make_spread(tmp_path / "all" / "work", finished_run.cache, servers)
    copy_upstream(finished_run, space)
    yield space
    space.kill_trainers()


def files(*folders: Path) -> set[Path]:
    """Everything in some folders but the code and the program that were sent there, which are kept for the next time."""
    kept = re.compile(r"/code(/|$)|/\.dflash-sink-|/\.snakemake|/logs/")
    return {
        path
        for folder in folders
        for path in folder.rglob("*")
        if not kept.search(str(path.relative_to(folder.parent)))
    }


def places(space: Workspace) -> list[Path]:
    hosts = [space.workdir(host) for host in ("trainbox", "judge")] if isinstance(space, Spread) else []
    return [space.folder, *hosts]


def rehearse(space: Workspace, *options: str, expect: int = 0) -> tuple[dict[str, Any], str]:
    """What `--json` says, and what was said on the way; nothing may be left of it."""
    before = files(*places(space))
    done = space.call("rehearse", "micro", "--json", *options, expect=expect)
    after = files(*places(space))
    assert after - before <= {space.folder.parent / host / "results" for host in ("trainbox", "judge")} | {
        space.folder.parent / host / "results/store" for host in ("trainbox", "judge")
    }
    assert before <= after
    return json.loads(done.stdout), done.stderr


def states(found: dict[str, Any]) -> dict[str, str]:
    return {part["name"]: part["state"] for part in found["parts"]}


ALL_DONE = dict.fromkeys(("training", "checkpoint", "shipment", "evaluation"), "done")


@pytest.mark.parametrize("train", [{}, TWO_TO_ONE], ids=["colocated", "2:1"])
def test_every_rank_of_the_topology_meets_the_longest_batch(finished: Workspace, train: dict[str, Any]) -> None:
    finished.write_config(train=train)
    receipts = finished.receipts()
    found, _ = rehearse(finished)
    assert states(found) == {**ALL_DONE, "shipment": "not needed"}
    assert finished.receipts() == receipts
    ranks = 3 if train else 1
    assert [one["rank"] for one in found["training"]["ranks"]] == list(range(ranks))
    buckets = [bucket["bucket"] for bucket in found["training"]["buckets"]]
    assert [line["buckets"] for line in found["training"]["lines"]] == [
        [bucket] * 2 for bucket in buckets for _ in range(2)
    ]
    assert all(row["most"] for row in found["memory"])
    assert found["expected"]["pipeline"] > 0
    assert found["expected"]["seconds"] > found["steps"] * found["expected"]["step_seconds"]
    assert found["evaluation"]["kernels"]["torch"]["tau"] >= 1.0


def test_what_it_says_reads_as_a_table_and_feeds_the_plan_of_the_topology(finished: Workspace) -> None:
    finished.write_config(train=TWO_TO_ONE)
    lines = finished.call("rehearse", "micro").stdout.splitlines()
    (head,) = [line for line in lines if line.startswith("memory of")]
    rows = lines[lines.index(head) + 1 :]
    for row, who in zip(rows, ("rank 0 (target 0)", "rank 1 (target 1)", "rank 2 (drafter 0)"), strict=False):
        assert row[head.index("used by") :].startswith(who)
    (whole,) = [line for line in lines if line.startswith("whole run:")]
    assert re.match(r"whole run: 6 steps and 2 checkpoints, about [\d.]+ s", whole)
    rates = finished.folder / "rates.json"
    rates.write_text(finished.call("rehearse", "micro", "--json").stdout)
    assert "2 GPUs" in finished.call("plan", "--topology", "--rates", str(rates), "--gpus", "2").stdout


def test_over_two_hosts_the_drafter_is_shipped_verified_and_judged_there(far: Spread) -> None:
    far.write_config(train=TWO_TO_ONE)
    found, said = rehearse(far)
    assert states(found) == ALL_DONE, said
    assert {part["name"]: part["where"] for part in found["parts"]} == {
        "training": "trainbox",
        "checkpoint": "trainbox",
        "shipment": "trainbox to judge",
        "evaluation": "judge",
    }
    shipment = found["shipment"]
    assert shipment["verified"]
    assert shipment["bytes"] == found["training"]["checkpoint"]["bytes"]["drafter"]
    assert shipment["root"] == found["training"]["checkpoint"]["artifact"]["root"]
    assert [disk["where"] for disk in found["disk"]] == ["trainbox", "judge", "local"]
    assert all(disk["fits"] for disk in found["disk"])
    assert not far.shipments()
    assert lease(far) is None


def test_an_eval_host_that_is_not_there_is_named_and_the_rest_is_told(far: Spread) -> None:
    far.more = {"judge": {"port": 1}}
    far.write_hosts()
    found, said = rehearse(far, expect=1)
    assert states(found) == {**ALL_DONE, "shipment": "FAILED", "evaluation": "not tried"}
    assert "judge" in said.splitlines()[-1]
    assert found["expected"]["pipeline"] > 0
    assert {disk["where"]: disk["fits"] for disk in found["disk"]} == {"trainbox": True, "judge": None, "local": True}


@pytest.mark.parametrize("train", [{}, TWO_TO_ONE], ids=["colocated", "2:1"])
def test_a_batch_that_does_not_fit_is_named_with_its_knob(
    finished: Workspace, tmp_path: Path, train: dict[str, Any]
) -> None:
    (tmp_path / "lie").mkdir()
    (tmp_path / "lie/sitecustomize.py").write_text(NO_MEMORY)
    finished.write_config(train=train)
    environment = finished.environment()
    finished.environment = lambda: {**environment, "PYTHONPATH": f"{tmp_path / 'lie'}:{finished.code}"}  # type: ignore[method-assign]
    found, said = rehearse(finished, expect=1)
    assert states(found) == {
        "training": "FAILED",
        **dict.fromkeys(("checkpoint", "shipment", "evaluation"), "not tried"),
    }
    last = said.splitlines()[-1]
    assert last.startswith("dflash: training: ")
    assert "of host memory" in last
    assert "longest batch" in last
    assert re.search(r"lower train\.\w+", last)


def test_a_stream_too_small_for_the_longest_batch_is_named(finished: Workspace) -> None:
    finished.write_config(train={**TWO_TO_ONE, "features_in_flight": 10})
    _, said = rehearse(finished, expect=1)
    assert "train.features_in_flight" in said.splitlines()[-1]


def test_a_live_training_is_not_disturbed_and_the_rehearsal_says_whose_it_is(far: Spread) -> None:
    far.write_config(train=LONG)
    far.write_hosts(eval="local")
    with running(far) as process:
        held = wait_until(lambda: lease(far), seconds=200, what="the trainer")
        far.write_config(train={"lr": 2e-3})
        done = far.call("rehearse", "micro", expect=1)
        assert "run micro" in done.stderr
        assert "is held by" in done.stderr
        assert re.search(r"^training +trainbox +FAILED", done.stdout, re.MULTILINE)
        still = lease(far)
        assert still is not None
        assert still.pid == held.pid
        os.kill(process.pid, signal.SIGINT)
        process.communicate(timeout=60 * PATIENCE)
    assert not list(far.store("trainbox").glob(".rehearsal-*"))


@pytest.mark.parametrize(
    ("where", "number"), [("local", signal.SIGINT), ("hosts", signal.SIGTERM)], ids=["local-ctrl-c", "hosts-sigterm"]
)
def test_an_interrupted_rehearsal_leaves_no_folder_and_no_process(
    far: Spread, where: str, number: signal.Signals
) -> None:
    if where == "local":
        far.write_hosts(gpu="local", eval="local")
    store = far.results / "store" if where == "local" else far.store("trainbox")
    before = files(*places(far))
    process = far.start("rehearse", "micro")
    try:
        wait_until(
            lambda: list(store.glob(".rehearsal-*/train/*/attempts/1.json")), seconds=100, what="the ranks' start"
        )
        os.kill(process.pid, number)
        said, _ = process.communicate(timeout=100 * PATIENCE)
    finally:
        process.kill()
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[number], said
    assert not [path for path in files(*places(far)) - before if ".rehearsal-" in str(path)]
    mark = str(far.folder.parent).encode()
    wait_until(lambda: not [pid for pid in all_processes() if mark in command(pid)], what="the end of every process")


def test_an_impatient_sigterm_does_not_stop_the_clearing_up_of_hosts(far: Spread) -> None:
    before = files(*places(far))
    process = far.start("rehearse", "micro")
    try:
        store = far.store("trainbox")
        wait_until(
            lambda: list(store.glob(".rehearsal-*/train/*/attempts/1.json")), seconds=100, what="the ranks' start"
        )
        for _ in range(3):
            os.kill(process.pid, signal.SIGTERM)
            time.sleep(0.4)  # it is clearing up: that takes a connection to the host
        said, _ = process.communicate(timeout=100 * PATIENCE)
    finally:
        process.kill()
    assert process.returncode in (143, -signal.SIGTERM), said  # the last one may come when all is done
    assert not [path for path in files(*places(far)) - before if ".rehearsal-" in str(path)]


def command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("where", ["local", "hosts"])
def test_a_rehearsal_that_is_killed_in_mid_training_is_cleared_up_after_all_the_same(far: Spread, where: str) -> None:
    if where == "local":
        far.write_hosts(gpu="local", eval="local")
    store = far.results / "store" if where == "local" else far.store("trainbox")
    process = far.start("rehearse", "micro")
    wait_until(lambda: list(store.glob(".rehearsal-*/train/*/attempts/1.json")), seconds=100, what="the ranks' start")
    process.kill()
    process.communicate()
    wait_until(lambda: not list(store.glob(".rehearsal-*")), what="an empty place")
    mark = str(far.folder.parent).encode()
    wait_until(lambda: not [pid for pid in all_processes() if mark in command(pid)], what="the end of every process")


def test_what_must_be_made_first_is_said_and_a_target_that_was_never_shipped_goes_along(far: Spread) -> None:
    made = load_target(RandomTarget(model_type="qwen3", seed=1).fields_of_type(), "float32", "cpu")
    made.model.save_pretrained(far.folder / "target")
    made.tokenizer.save_pretrained(far.folder / "target")
    far.config["target"] = {"path": "target"}
    far.write_config()
    refused = far.call("rehearse", "micro", expect=1)
    first = re.search(r"the dataset that a rehearsal needs is not made yet\. Run `snakemake (\S+)`", refused.stderr)
    assert first is not None
    far.snakemake(first[1])
    found, said = rehearse(far)
    assert states(found) == ALL_DONE, said
    assert not [path for place in places(far)[1:] for path in place.glob("targets/*")]


def test_one_far_host_for_both_roles_ships_nothing_and_is_cleared_up_when_training_fails_too(far: Spread) -> None:
    far.write_config(train=TWO_TO_ONE)
    far.write_hosts(eval="trainbox")
    found, said = rehearse(far)
    assert states(found) == {**ALL_DONE, "shipment": "not needed"}, said
    far.write_config(train={"features_in_flight": 10})
    found, _ = rehearse(far, expect=1)
    assert states(found)["training"] == "FAILED"
