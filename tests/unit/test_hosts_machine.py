"""What a machine says of itself is what its files and tools say, in a container too, and needs no package to be installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash.hosts import machine

GIB = 1 << 30


def test_it_runs_with_nothing_but_the_standard_library(tmp_path: Path) -> None:
    argv = [sys.executable, "-S", "-m", "dflash.hosts.machine", "--workdir", str(tmp_path / "deep" / "er")]
    root = str(Path(machine.__file__).resolve().parents[2])
    done = subprocess.run(argv, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": root})
    found = json.loads(done.stdout)
    assert found["python"] == sys.version.split()[0]
    assert found["cores"] == len(os.sched_getaffinity(0))
    assert 0 < found["memory"]["available_bytes"] <= found["memory"]["total_bytes"]
    assert found["disk"]["refused"] == ""
    assert 0 < found["disk"]["free_bytes"] < found["disk"]["total_bytes"]
    assert list(tmp_path.iterdir()) == [], "looking leaves nothing behind"


def write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{value}\n")


def test_the_tightest_limit_above_a_process_counts(tmp_path: Path) -> None:
    membership = "0::/machine/job/step\n"
    assert machine.cgroup_memory(tmp_path, membership) == (None, None)
    write(tmp_path / "machine" / "memory.max", 8 * GIB)
    write(tmp_path / "machine" / "memory.current", 5 * GIB)
    write(tmp_path / "machine" / "job" / "memory.max", 16 * GIB)
    write(tmp_path / "machine" / "job" / "step" / "memory.max", "max")
    assert machine.cgroup_memory(tmp_path, membership) == (8 * GIB, 5 * GIB)
    write(tmp_path / "other" / "memory.max", GIB)
    assert machine.cgroup_memory(tmp_path, membership)[0] == 8 * GIB, "a group beside ours does not count"


def test_the_limit_of_the_older_control_groups_is_read_too(tmp_path: Path) -> None:
    membership = "12:pids:/x\n7:cpu,memory:/docker/abc\n0::/\n"
    write(tmp_path / "memory" / "memory.limit_in_bytes", 9223372036854771712)
    assert machine.cgroup_memory(tmp_path, membership) == (None, None)
    write(tmp_path / "memory" / "docker" / "abc" / "memory.limit_in_bytes", 2 * GIB)
    write(tmp_path / "memory" / "docker" / "abc" / "memory.usage_in_bytes", GIB)
    assert machine.cgroup_memory(tmp_path, membership) == (2 * GIB, GIB)


def test_a_workdir_that_cannot_be_written_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert machine.disk(tmp_path / "file")["refused"] == f"{tmp_path / 'file'}: Not a directory"


SMI = """\
#!/bin/sh
case "$1" in
--query-gpu=*) printf '0, NVIDIA H200, GPU-a, 143771, 4097\\n1, NVIDIA H200, GPU-b, 143771, [N/A]\\n' ;;
--query-compute-apps=*) printf 'GPU-a, %s, 4096\\nGPU-b, 999999999, 1\\n' "$PPID" ;;
esac
"""


def test_gpus_and_who_holds_their_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.gpus() == [] or Path("/dev/nvidia0").exists()
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    first, second = machine.gpus()
    assert (first["index"], first["name"], first["uuid"]) == (0, "NVIDIA H200", "GPU-a")
    assert (first["memory_bytes"], first["held_bytes"]) == (143771 << 20, 4097 << 20)
    assert [one["pid"] for one in first["holders"]] == [os.getpid()]
    assert first["holders"][0]["program"] == Path("/proc/self/comm").read_text().strip()
    assert (second["held_bytes"], second["holders"][0]["user"]) == (None, "unknown")


def test_the_version_of_the_driver_s_library_stands_in_its_real_name(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.580.95.05").touch()
    (tmp_path / "libcuda.so.1").symlink_to("libcuda.so.580.95.05")
    listing = f"\tlibcuda.so.1 (libc6,x86-64) => {tmp_path}/libcuda.so.1\n\tlibc.so.6 (libc6) => /lib/libc.so.6\n"
    assert machine._library_version(listing) == "580.95.05"
    assert machine._library_version("") is None
