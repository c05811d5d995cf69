"""The far end does what one request asks, answers once, and does not outlive who asked."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash import bundle
from dflash.base.files import sha256_file
from dflash.base.records import OutputFile, Receipt
from dflash.hosts.lease import acquire, new_record
from dflash.plan.code import source_root
from dflash.there import find_faults, make_view

KEY = "0123456789ab"


def start(workdir: Path, request: dict[str, Any], files: dict[str, bytes] | None = None) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(source_root()), "XDG_CACHE_HOME": str(workdir / "cache")}
    process = subprocess.Popen(
        [sys.executable, "-m", "dflash.there", str(workdir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    assert process.stdin is not None
    process.stdin.write(bundle.pack(request, files or {}))
    process.stdin.flush()
    return process


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """A request that never ends by itself: it waits for a checkpoint of a training that we only pretend."""
    directory = tmp_path / "results/store/train" / KEY
    directory.mkdir(parents=True)
    held = acquire([directory / "lease.json"], new_record("training", KEY, "demo"))
    yield tmp_path, {"do": "checkpoint", "key": KEY, "run": "demo", "silence": 3.0}
    held.release()


def at_work(root: Path) -> bool:
    return (root / "results/store/train" / KEY / "checkpoint_now.json").exists()


def wait_until_at_work(root: Path) -> None:
    deadline = time.monotonic() + 120
    while not at_work(root):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_it_lives_while_it_hears_from_who_asked_and_ends_with_the_connection(
    waiting: tuple[Path, dict[str, Any]],
) -> None:
    root, request = waiting
    with start(root, {**request, "silence": 8.0}) as process:
        wait_until_at_work(root)
        assert process.stdin is not None
        for _ in range(5):
            time.sleep(2.0)
            process.stdin.write(b"\n")
            process.stdin.flush()
        assert process.poll() is None
        process.stdin.close()
        assert process.wait(30) == -9
        assert process.stderr is not None
        assert b"the controller is gone" in process.stderr.read()


def test_it_ends_when_who_asked_falls_silent(waiting: tuple[Path, dict[str, Any]]) -> None:
    root, request = waiting
    with start(root, request) as process:
        wait_until_at_work(root)
        assert process.wait(60) == -9


def test_a_failure_on_purpose_is_an_answer(tmp_path: Path) -> None:
    with start(tmp_path, {"do": "checkpoint", "key": KEY, "run": "demo"}) as process:
        assert process.stdout is not None
        answer, _ = bundle.unpack(process.stdout)
        assert answer["error"]["kind"] == "permanent"
        assert "no trainer is at work" in answer["error"]["what"]
        assert process.wait(60) == 0


def test_files_that_came_along_lie_in_the_workdir_and_none_outside(tmp_path: Path) -> None:
    workdir = tmp_path / "with space and 'quote'"
    for path, expected in (("files/a", None), ("../out", "corrupt")):
        with start(workdir, {"do": "training", "key": KEY}, {path: b"content"}) as process:
            assert process.stdout is not None
            answer, _ = bundle.unpack(process.stdout)
            assert (answer["error"] or {"kind": None})["kind"] == expected
    assert (workdir / "files/a").read_bytes() == b"content"
    assert not (tmp_path / "out").exists()


def test_faults_of_files_and_copies_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    good = tmp_path / "good"
    good.write_bytes(b"good")
    entry = [good.name, 4, sha256_file(good)]
    assert find_faults(tmp_path, [entry], [], deep=False) == {}
    stamp = good.stat()
    with good.open("r+b") as stream:
        stream.write(b"evil")
    os.utime(good, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert find_faults(tmp_path, [entry], [], deep=False) == {}, "only reading the bytes can find it"
    assert "other bytes" in find_faults(tmp_path, [entry], [], deep=True)["good"]
    found = find_faults(tmp_path, [["lost", 1, "0" * 64], ["good", 9, "0" * 64]], ["no/copy"], deep=False)
    assert "is missing" in found["lost"]
    assert "4 bytes" in found["good"]
    assert "no receipt of a shipment" in found["no/copy"]


def test_a_view_holds_exactly_the_outputs_and_costs_no_space(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("a.parquet", "sub/b.json", "other"):
        (tmp_path / name).write_text(name)
    outputs = [OutputFile(path=name, size=1, sha256="0" * 64) for name in ("a.parquet", "sub/b.json")]
    receipt = Receipt(
        stage="dataset",
        key=KEY,
        outputs=outputs,
        inputs={},
        host="local",
        started="",
        finished="",
        attempt=1,
        environment="",
    )
    view = make_view(tmp_path, receipt)
    (view / "stale").write_text("of an earlier making")
    (tmp_path / "a.parquet").unlink()
    (tmp_path / "a.parquet").write_text("made again")
    view = make_view(tmp_path, receipt)
    assert {path.relative_to(view).as_posix() for path in view.rglob("*") if path.is_file()} == {
        "a.parquet",
        "sub/b.json",
    }
    assert (view / "a.parquet").samefile(tmp_path / "a.parquet")
