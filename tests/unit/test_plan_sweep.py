"""What goes from a store or a workdir is what nothing needs and nobody uses: locked, changed, running and coming things stay."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash.hosts import lease
from dflash.plan import sweep
from dflash.plan.sweep import Needs, in_workdir, remove
from dflash.ship import sink

KEY, OTHER = "a" * 12, "b" * 12
OWN = "0" * 16


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A host's workdir in which nothing is needed."""
    root = tmp_path / "host"
    for name in (
        f"results/store/train/{KEY}/params.json",
        f"results/store/train/{KEY}/step_2/drafter/model.safetensors",
        f"results/store/shipped/dataset/{OTHER}/outputs/dataset.json",
        f"results/store/shipped/dataset/{OTHER}/.outputs.shipment.json",
        f"code/{OWN}/dflash/cli.py",
        f"code/{'1' * 16}/dflash/cli.py",
        f"targets/{KEY}/model.safetensors",
        f"targets/.{KEY}.shipment.json",
        f"files/{'f' * 64}",
        "env/abc/bin/python",
        "results/askers/0123",
    ):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return root


def listed(root: Path, needs: Needs | None = None) -> list[str]:
    return sorted(str(item.path.relative_to(root)) for item in in_workdir(root, needs or Needs(), OWN))


def everything(root: Path) -> list[str]:
    return listed(root)


def test_all_that_is_not_needed_is_listed_and_environments_and_the_own_code_are_not(root: Path) -> None:
    assert everything(root) == [
        f"code/{'1' * 16}",
        f"files/{'f' * 64}",
        f"results/store/shipped/dataset/{OTHER}",
        f"results/store/train/{KEY}",
        f"targets/{KEY}",
    ]
    items = in_workdir(root, Needs(), OWN)
    gone, kept = remove(items)
    assert (len(gone), kept) == (5, [])
    assert everything(root) == []
    assert sorted(path.name for path in (root / "targets").iterdir()) == []
    assert (root / "env/abc/bin/python").exists()


def test_what_is_needed_stays(root: Path) -> None:
    needs = Needs({("train", KEY), ("dataset", OTHER)}, targets={KEY}, files={"f" * 64})
    assert Needs.from_json(needs.as_json()) == needs
    assert listed(root, needs) == [f"code/{'1' * 16}"]


def test_sizes_are_those_of_the_files(root: Path) -> None:
    (item,) = [item for item in in_workdir(root, Needs(), OWN) if item.path.parent.name == "train"]
    files = [path for path in item.path.rglob("*") if path.is_file()]
    assert (item.size, item.files) == (sum(path.stat().st_size for path in files), len(files))


@pytest.mark.parametrize("what", ["grown", "added", "touched"])
def test_what_has_changed_since_it_was_listed_stays(root: Path, what: str) -> None:
    items = in_workdir(root, Needs(), OWN)
    folder = root / f"results/store/train/{KEY}"
    if what == "grown":
        (folder / "params.json").write_text("longer than before")
    elif what == "added":
        (folder / "attempts").mkdir()
    else:
        os.utime(folder / "params.json", (1, 1))
    _, kept = remove(items)
    assert kept == [(folder, "it has changed since it was listed")]
    assert (folder / "step_2/drafter/model.safetensors").exists()


def test_a_training_whose_lease_is_held_stays_though_it_was_listed(root: Path) -> None:
    folder = root / f"results/store/train/{KEY}"
    path = folder / "lease.json"
    lease.acquire([path], lease.new_record("cpu", KEY, "run")).release()
    items = [item for item in in_workdir(root, Needs(), OWN) if item.path == folder]
    held = lease.acquire([path], lease.new_record("cpu", KEY, "run"))
    try:
        assert sweep.live_trainings(root / "results/store") == {KEY}
        assert remove(items) == ([], [(folder, "somebody has begun to use it")])
    finally:
        held.release()
    assert folder.is_dir()


def locked(path: Path) -> int:
    descriptor = os.open(path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def test_a_job_at_work_keeps_its_folder_and_one_that_was_killed_leaves_only_rubbish(root: Path) -> None:
    folder = root / f"results/store/train/{KEY}"
    (folder / ".work.step_2").mkdir()
    (folder / ".work.step_2/half").write_text("half")
    (folder / ".lock.step_2").touch()
    needs = Needs({("train", KEY)})
    assert f"results/store/train/{KEY}/.work.step_2" in listed(root, needs)
    descriptor = locked(folder / ".lock.step_2")
    try:
        assert f"results/store/train/{KEY}/.work.step_2" not in listed(root, needs)
        _, kept = remove([item for item in in_workdir(root, Needs(), OWN) if item.path == folder])
        assert [why for _, why in kept] == ["somebody has begun to use it"]
    finally:
        os.close(descriptor)


@pytest.fixture
def partial(root: Path) -> Path:
    """A shipment of a checkpoint that was cut off."""
    path = root / f"results/store/shipped/train/{KEY}/step_4/.drafter.{'c' * 64}.partial"
    (path / "data").mkdir(parents=True)
    (path / "data/model.safetensors").write_bytes(b"half")
    return path


def test_a_shipment_that_was_cut_off_goes_unless_a_planned_run_goes_on_with_it(root: Path, partial: Path) -> None:
    name = str(partial.relative_to(root))
    needed = {("train", KEY)}
    assert name in listed(root, Needs(needed))
    assert name not in listed(root, Needs(needed, coming={("train", KEY, 4)}))
    assert name in listed(root, Needs(needed, coming={("train", KEY, 2)}))


def test_a_target_that_was_cut_off_goes_unless_a_planned_run_goes_on_with_it(root: Path) -> None:
    partial = root / f"targets/.{KEY}.{'c' * 64}.partial"
    (partial / "data").mkdir(parents=True)
    name = str(partial.relative_to(root))
    assert name in listed(root, Needs())
    assert name in listed(root, Needs(coming={("target", OTHER, None)}))
    assert name not in listed(root, Needs(coming={("target", KEY, None)}))


def test_a_shipment_in_progress_stays_whether_its_result_is_needed_or_not(root: Path, partial: Path) -> None:
    items = in_workdir(root, Needs({("train", KEY)}), OWN)
    whole = in_workdir(root, Needs(), OWN)
    descriptor = locked(partial)
    try:
        assert str(partial.relative_to(root)) not in listed(root, Needs({("train", KEY)}))
        _, kept = remove([item for item in items if item.path == partial])
        assert [path for path, _ in kept] == [partial]
        folder = partial.parents[1]
        _, kept = remove([item for item in whole if item.path == folder])
        assert [path for path, _ in kept] == [folder]
    finally:
        os.close(descriptor)
    assert (partial / "data/model.safetensors").exists()


def test_a_shipment_that_is_whole_but_for_its_receipt_keeps_what_the_next_one_knows_it_by(
    root: Path, partial: Path
) -> None:
    (partial / "data").rename(partial.parent / "drafter")
    assert str(partial.relative_to(root)) not in listed(root, Needs({("train", KEY)}))
    (partial.parent / ".drafter.shipment.json").write_text("{}")
    assert str(partial.relative_to(root)) in listed(root, Needs({("train", KEY)}))


@pytest.fixture
def running(root: Path) -> Iterator[str]:
    """A process that runs from the older code."""
    name = "1" * 16
    environment = {"PYTHONPATH": str(root / "code" / name)}
    process = subprocess.Popen([sys.executable, "-c", "input()"], env=environment, stdin=subprocess.PIPE)
    yield name
    process.communicate(b"\n")


def test_code_that_a_process_runs_from_stays(root: Path, running: str) -> None:
    assert f"code/{running}" not in listed(root)


def test_code_that_a_process_began_to_run_after_the_listing_stays(root: Path, request: pytest.FixtureRequest) -> None:
    items = [item for item in in_workdir(root, Needs(), OWN) if item.path.parent.name == "code"]
    running = request.getfixturevalue("running")
    assert remove(items)[1] == [(root / "code" / running, "somebody has begun to use it")]
    assert (root / "code" / running / "dflash/cli.py").exists()


def test_code_that_is_arriving_stays_until_it_is_an_hour_old(root: Path) -> None:
    arriving = root / "code/.incoming.abcdef"
    arriving.mkdir()
    assert "code/.incoming.abcdef" not in listed(root)
    os.utime(arriving, (1, 1))
    assert "code/.incoming.abcdef" in listed(root)


def test_a_deletion_that_was_cut_off_is_finished_by_the_next(root: Path) -> None:
    folder = root / f"results/store/train/{KEY}"
    folder.rename(folder.with_name(f".gone-{KEY}"))
    assert f"results/store/train/.gone-{KEY}" in listed(root, Needs({("train", KEY)}))
    remove(in_workdir(root, Needs({("train", KEY)}), OWN))
    assert list((root / "results/store/train").iterdir()) == []


def test_an_environment_whose_receipt_a_living_training_has_yet_to_write_stays(root: Path) -> None:
    path = root / "results/store/environments/abcdefabcdef.json"
    path.parent.mkdir()
    path.write_text("{}")
    name = str(path.relative_to(root))
    assert name in listed(root)
    lease_file = root / f"results/store/train/{KEY}/lease.json"
    held = lease.acquire([lease_file], lease.new_record("cpu", KEY, "run"))
    try:
        assert name not in listed(root)
    finally:
        held.release()


def test_a_real_destination_at_work_keeps_what_has_arrived_and_its_death_gives_it_up(
    root: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "model.safetensors").write_bytes(b"x" * 5000)
    files = sink.hash_all(str(source), sink.listing(str(source), []), lambda count: None)
    place = root / f"results/store/shipped/train/{KEY}/step_4/drafter"
    request = {"do": "prepare", "path": str(place), "root": sink.root_digest(files), "files": files}
    process = subprocess.Popen(
        [sys.executable, sink.__file__, "destination"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(sink.encode({**request, "session": "s", "wait": 5}))
        process.stdin.flush()
        while b"missing" not in process.stdout.readline():
            pass
        (partial,) = place.parent.glob(".drafter.*.partial")
        needs = Needs({("train", KEY)})
        assert str(partial.relative_to(root)) not in listed(root, needs)
        assert remove([sweep.measured(partial.parents[1], "")])[1] == [
            (partial.parents[1], "somebody has begun to use it")
        ]
        assert (partial / "data/model.safetensors").exists()
    finally:
        process.kill()
        process.communicate()
    assert str(partial.relative_to(root)) in listed(root, needs)
    remove([item for item in in_workdir(root, needs, OWN) if item.path == partial])
    assert not partial.exists()


def test_what_a_killed_rehearsal_has_left_goes_when_it_is_old_and_nobody_holds_it(root: Path) -> None:
    for name in ("old", "held", "new"):
        folder = root / f"results/store/.rehearsal-{name}"
        (folder / f"train/{KEY}").mkdir(parents=True)
        (folder / "drafter").mkdir()
        (folder / "drafter/model.safetensors").write_bytes(b"weights")
        if name != "new":
            os.utime(folder, (1, 1))
    held = root / f"results/store/.rehearsal-held/train/{KEY}/lease.json"
    lease_held = lease.acquire([held], lease.new_record("training", KEY, "demo"))
    try:
        left = [item for item in in_workdir(root, Needs(), OWN) if ".rehearsal-" in item.path.name]
        assert [item.path.name for item in left] == [".rehearsal-old"]
        remove(left)
        again = sweep.measured(held.parents[2], "")
        assert remove([again])[1] == [(again.path, "somebody has begun to use it")]
    finally:
        lease_held.release()
    names = {path.name for path in (root / "results/store").glob(".rehearsal-*")}
    assert names == {".rehearsal-held", ".rehearsal-new"}


def test_what_a_move_that_was_taken_back_has_brought_goes_and_what_is_on_its_way_stays(root: Path) -> None:
    folder = root / f"results/store/train/{KEY}"
    (folder / ".arriving/step_4/state").mkdir(parents=True)
    (folder / ".arriving/step_4/state/masters.safetensors").write_bytes(b"state")
    (folder / "..arriving.shipment.json").write_text("{}")
    (folder / f"..arriving.{'d' * 64}.partial").mkdir()
    names = {str(path.relative_to(root)) for path in folder.glob(".*arriving*") if path.is_dir()}
    needed = {("train", KEY)}
    assert not names & set(listed(root, Needs(needed, coming={("train", KEY, None)})))
    assert names <= set(listed(root, Needs(needed)))
    items = [item for item in in_workdir(root, Needs(needed), OWN) if str(item.path.relative_to(root)) in names]
    taken = lease.acquire([folder / "lease.json"], lease.new_record("training", KEY, "demo"))
    assert [path for path, _ in remove(items)[1]] == [item.path for item in items], "it is being taken in"
    taken.release()
    remove(items)
    assert not list(folder.glob(".*arriving*"))
    assert (folder / "step_2/drafter/model.safetensors").exists()
