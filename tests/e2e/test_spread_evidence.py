"""Evidence over several machines of a run that is done: it is shown, what hosts hold is collected, and it is made again here."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from conftest import PATIENCE  # type: ignore[import-not-found]
from spread import Spread, connections, copy_spread, make_spread, names
from sshd import Sshd

from dflash.hosts.inventory import load_inventory
from dflash.hosts.lease import acquire, new_record
from dflash.plan.sweep import Needs
from dflash.remote import garbage_there

pytestmark = pytest.mark.timeout(900 * PATIENCE)


@pytest.fixture(scope="module")
def spread_run(tmp_path_factory: pytest.TempPathFactory, cache: Path, servers: dict[str, Sshd]) -> Spread:
    """The micro run over two sshd, finished once."""
    space = make_spread(tmp_path_factory.mktemp("evidence") / "work", cache, servers)
    space.call("run")
    return space


@pytest.fixture
def spread(tmp_path: Path, spread_run: Spread) -> Spread:
    """A copy of the finished run with the workdirs of its hosts."""
    return copy_spread(spread_run, tmp_path / "all")


def test_a_finished_run_is_shown_by_host_and_no_host_is_asked(spread: Spread) -> None:
    before = connections(spread)
    done = spread.call("watch", "micro")
    assert "run micro: done" in done.stdout
    assert "trained on: trainbox 2 of 2" in done.stdout
    assert "shipped to: judge 2 of 2" in done.stdout
    assert "evaluated on: judge 2 of 2" in done.stdout
    assert "trained on trainbox -> shipped to judge -> evaluated on judge, tau" in done.stdout
    assert connections(spread) == before


# ---------------------------------------------------------------- gc


def forget_askers(space: Spread) -> None:
    """A copied workspace is another controller than the one that its hosts have worked for."""
    for host in space.servers:
        shutil.rmtree(space.workdir(host) / "results/askers", ignore_errors=True)


def moved_on(space: Spread) -> None:
    """The run is gone and the config asks for another training."""
    shutil.rmtree(space.results / "runs")
    space.write_config(train={"lr": 2e-3})


def test_what_hosts_hold_for_a_run_that_stands_is_not_listed(spread: Spread) -> None:
    forget_askers(spread)
    for host in ("trainbox", "judge"):
        assert names(spread.call("gc", "--host", host).stdout, spread, host) == []
    done = spread.call("gc")
    assert "trainbox: nothing that no run needs" in done.stdout
    assert "judge: nothing that no run needs" in done.stdout


def test_garbage_of_each_host_is_listed_with_bytes_and_goes_only_when_told(spread: Spread) -> None:
    forget_askers(spread)
    moved_on(spread)
    (weights,) = spread.store("trainbox").glob("train/*/step_6/drafter/model.safetensors")
    stray = spread.workdir("trainbox") / "code/0123456789abcdef"
    stray.mkdir()
    (stray / "old.py").write_text("old")
    done = spread.call("gc", "--host", "trainbox")
    assert {"results/store/train/*", "code/*"} <= set(names(done.stdout, spread, "trainbox"))
    assert not [name for name in names(done.stdout, spread, "trainbox") if "dataset" in name or "buckets" in name]
    assert "Nothing is deleted without --delete" in done.stderr
    assert weights.exists()
    size = sum(path.stat().st_size for path in weights.parents[2].rglob("*") if path.is_file())
    assert f"{size:,} bytes" in done.stdout
    done = spread.call("gc")
    assert re.search(r"trainbox: [\d,]+ bytes in \d+ items that no run needs; `dflash gc --host trainbox`", done.stdout)
    done = spread.call("gc", "--host", "trainbox", "--delete")
    assert "kept:" not in done.stderr
    assert not weights.exists()
    assert not stray.exists()
    assert names(spread.call("gc", "--host", "trainbox").stdout, spread, "trainbox") == []
    done = spread.call("gc", "--host", "judge", "--delete")
    listed = names(done.stdout, spread, "judge")
    assert {"results/store/shipped/train/*", "results/store/evaluate/*"} <= set(listed)
    assert not list(spread.store("judge").glob("shipped/train/*"))
    assert list(spread.store("judge").glob("references/*/receipt.json"))
    spread.call("gc", "--delete")
    assert not [path for path in spread.results.glob("store/train/*") if (path / "receipts").exists()]
    spread.call("plan", "--verify")  # what was kept is whole, here and there


def test_a_workdir_that_another_controller_uses_too_is_not_collected(spread: Spread) -> None:
    moved_on(spread)
    done = spread.call("gc", "--host", "trainbox", "--delete", expect=1)
    assert "stages ran there for" in done.stderr
    assert "results/askers" in done.stderr
    assert list(spread.store("trainbox").glob("train/*/step_6/drafter/model.safetensors"))
    assert "Take care:" in spread.call("gc", "--host", "trainbox").stderr


def test_what_begins_between_listing_and_deleting_is_not_deleted(spread: Spread) -> None:
    host = load_inventory(spread.folder / "hosts.yaml").get("trainbox")
    (folder,) = spread.store("trainbox").glob("train/*")
    listed = [[path, mark] for path, _, _, _, mark in garbage_there(host, Needs().as_json())["garbage"]]
    (spread.store("trainbox") / "shipped/buckets").glob("*")
    held = acquire([folder / "lease.json"], new_record("cpu", folder.name, "later"))
    try:
        answer = garbage_there(host, Needs().as_json(), listed)
    finally:
        held.release()
    assert answer["live"] == [folder.name]
    kept = dict(answer["kept"])
    assert kept[str(folder.relative_to(spread.workdir("trainbox")))] == "it is needed now"
    assert (folder / "step_6/drafter/model.safetensors").exists()
    needed = {
        str(path.relative_to(spread.workdir("trainbox"))) for path in spread.store("trainbox").glob("shipped/*/*")
    }
    assert needed
    assert needed <= set(kept), "what the training was made from"


# ---------------------------------------------------------------- reproduce


def test_a_run_over_several_hosts_is_made_again_here_and_compared_by_the_digests_of_its_receipts(
    spread: Spread,
) -> None:
    (spread.folder / "hosts.yaml").unlink()
    for host in spread.servers:
        shutil.rmtree(spread.workdir(host), ignore_errors=True)
    manifest = spread.results / "runs/micro/latest/manifest.json"
    recorded = json.loads(manifest.read_text())
    assert {label.partition("/")[0] for label in recorded["environments"]} == {"local", "trainbox", "judge"}
    done = spread.call("reproduce", str(manifest), "--check", timeout=600)
    count = len(recorded["tensors"])
    assert f"step 6: {count} of {count} tensors equal" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("reproduced: ")
    outputs = sum(len(files) for stage in recorded["stages"] for files in stage["outputs"].values())
    assert f"reproduced: {outputs} outputs compared" in done.stdout
    far = spread.call("reproduce", str(manifest), "--check", "--steps", "4:6", expect=1)
    assert "the state of step 4 lies on trainbox, where it was trained" in far.stderr
