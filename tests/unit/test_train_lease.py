"""A lease is a lock: it lives with the processes that hold it and with nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest
from train_store import python, wait_until

from dflash.hosts import lease
from dflash.hosts.lease import LeaseHeld, acquire, holder, new_record

HOLD = """
import os, subprocess, sys, time
from pathlib import Path
from dflash.hosts.lease import acquire, new_record
held = acquire([Path(sys.argv[1])], new_record("training", "0123456789ab", "theirs"))
child = subprocess.Popen(["sleep", "60"], pass_fds=held.descriptors)
print(child.pid, flush=True)
time.sleep(60)
"""


def test_a_file_without_a_lock_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "lease.json"
    assert holder(path) is None
    new_record("training", "0123456789ab", "demo").write(path)
    assert holder(path) is None


def test_a_second_holder_is_refused_with_owner_run_clone_and_pid(tmp_path: Path) -> None:
    path = tmp_path / "lease.json"
    held = acquire([path], new_record("training 0123", "0123456789ab", "demo"))
    with pytest.raises(LeaseHeld) as refused:
        acquire([path], new_record("training 0123", "0123456789ab", "other"))
    clone = str(Path(lease.__file__).resolve().parents[2])
    for part in ("run demo", f"pid {os.getpid()}", clone, lease.user_name(), "dflash stop demo"):
        assert part in refused.value.message()
    held.release()
    assert holder(path) is None
    acquire([path], new_record("training 0123", "0123456789ab", "other")).release()


def test_all_leases_are_taken_or_none(tmp_path: Path) -> None:
    taken = acquire([tmp_path / "b"], new_record("b", "0123456789ab", "demo"))
    with pytest.raises(LeaseHeld):
        acquire({tmp_path / "a": "a", tmp_path / "b": "b"}, new_record("both", "0123456789ab", "demo"))
    assert holder(tmp_path / "a") is None
    taken.release()


def test_the_lease_is_free_only_when_the_holder_and_its_child_are_dead(tmp_path: Path) -> None:
    path = tmp_path / "lease.json"
    with python(HOLD, str(path), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        found = holder(path)
        assert found is not None
        assert (found.run, found.pid) == ("theirs", process.pid)
        process.kill()
        process.wait()
        assert holder(path) is not None, "the child inherited the lock"
        os.kill(child, signal.SIGKILL)
        wait_until(lambda: holder(path) is None)


def test_looking_never_makes_an_acquire_fail(tmp_path: Path) -> None:
    path = tmp_path / "lease.json"
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            holder(path)

    watchers = [threading.Thread(target=look) for _ in range(3)]
    for watcher in watchers:
        watcher.start()
    try:
        for _ in range(100):
            acquire([path], new_record("training", "0123456789ab", "demo")).release()
    finally:
        done.set()
        for watcher in watchers:
            watcher.join()


def test_a_deleted_lease_file_does_not_give_two_holders_one_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lease.json"
    real = lease._open

    def open_then_replace(which: Path) -> int:
        descriptor = real(which)
        monkeypatch.setattr(lease, "_open", real)
        which.unlink()
        which.touch()
        return descriptor

    monkeypatch.setattr(lease, "_open", open_then_replace)
    held = acquire([path], new_record("training", "0123456789ab", "demo"))
    assert holder(path) is not None
    held.release()


def test_gpus_are_leased_by_what_they_are_not_by_what_this_process_calls_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_LEASES", str(tmp_path))
    monkeypatch.setattr(lease, "_gpu_uuids", lambda: {"0": "GPU-aa", "1": "GPU-bb"})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert lease.gpu_leases("cpu") == {}
    assert lease.gpu_leases("cuda:1") == {tmp_path / "gpu-GPU-bb.json": "GPU GPU-bb"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert lease.gpu_leases("cuda") == {tmp_path / "gpu-GPU-bb.json": "GPU GPU-bb"}
