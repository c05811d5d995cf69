"""What a machine is, as far as a person must know before work is sent there: memory, limits, disk, GPUs, drivers, who holds them.

Run there as `python -m dflash.hosts.machine --workdir DIR`; prints JSON. Needs nothing but python 3.8's standard library, so
that it also runs where no environment has been made yet. Changes nothing, but for an empty file in the workdir that it takes
away again. Costs 0.1 s, with GPUs about 1 s of `nvidia-smi`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import pwd
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CGROUP = Path("/sys/fs/cgroup")
UNLIMITED = 1 << 60
"""cgroup v1 writes a number near 2^63 for no limit."""


def machine_facts(workdir: Path) -> dict[str, Any]:
    """Everything, as plain JSON values; what cannot be known is None."""
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "cores": len(os.sched_getaffinity(0)),
        "memory": memory(),
        "shared_memory": space(Path("/dev/shm")) if Path("/dev/shm").is_dir() else None,
        "disk": disk(workdir),
        "driver": drivers(),
        "gpus": gpus(),
    }


def memory() -> dict[str, int | None]:
    """Bytes: of the machine, of it available, and the limit of this process's control group with what it uses already."""
    found: dict[str, int] = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        found[name] = int(rest.split()[0]) * 1024
    limit, used = cgroup_memory(CGROUP, Path("/proc/self/cgroup").read_text())
    return {
        "total_bytes": found["MemTotal"],
        "available_bytes": found.get("MemAvailable"),
        "limit_bytes": limit,
        "limit_used_bytes": used,
    }


def cgroup_memory(root: Path, membership: str) -> tuple[int | None, int | None]:
    """The tightest memory limit of a control group and of all above it, with the use of the group that has it, bytes.

    Args:
        root: where control groups are mounted. membership: the text of /proc/self/cgroup.
    """
    tightest: tuple[int | None, int | None] = (None, None)
    for line in membership.splitlines():
        number, controllers, name = line.split(":", 2)
        if number == "0":
            base, limit_file, use_file = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit_file, use_file = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = base / name.lstrip("/")
        for folder in [group, *group.parents]:
            limit = _number(folder / limit_file)
            if limit is not None and limit < UNLIMITED and (tightest[0] is None or limit < tightest[0]):
                tightest = (limit, _number(folder / use_file))
            if folder == base:
                break
    return tightest


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def space(path: Path) -> dict[str, int]:
    """Bytes of the file system that holds `path`, and free ones."""
    usage = shutil.disk_usage(path)
    return {"total_bytes": usage.total, "free_bytes": usage.free}


def disk(workdir: Path) -> dict[str, Any]:
    """The file system that the workdir is or will be on, and why it cannot be written (empty when it can)."""
    existing = workdir
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    refused = ""
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".dflash-doctor-"):
            pass
    except OSError as error:
        refused = f"{existing}: {error.strerror}"
    return {**space(existing), "refused": refused}


def drivers() -> dict[str, str | None]:
    """The version of NVIDIA's kernel module and of the library that programs load; they must be equal in a container too."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        text = ""
    # Nvidia's open module says `Open Kernel Module for x86_64  580.1`, the other one `Kernel Module  580.1`.
    found = re.search(r"Kernel Module\s+(?:for\s+\S+\s+)?(\d[\d.]*)", text)
    kernel = found[1] if found else None
    return {"kernel": kernel, "library": _library_version(said("ldconfig", "-p"))}


def _library_version(listing: str) -> str | None:
    """The version in the real name of libcuda.so.1, from what `ldconfig -p` lists."""
    for found in re.finditer(r"libcuda\.so\.1 .*=> (\S+)", listing):
        name = re.search(r"libcuda\.so\.(\d+\.\d[\d.]*)$", os.path.realpath(found[1]))
        if name:
            return name[1]
    return None


def gpus() -> list[dict[str, Any]]:
    """Each GPU: index, name, uuid, memory in bytes, bytes that somebody holds now, and who (pid, user, program)."""
    fields = "index,name,uuid,memory.total,memory.used"
    rows = said("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits").splitlines()
    users = said("nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader,nounits")
    found = []
    for row in rows:
        parts = [part.strip() for part in row.split(",")]
        if len(parts) == 5:
            found.append(
                {
                    "index": int(parts[0]),
                    "name": parts[1],
                    "uuid": parts[2],
                    "memory_bytes": _mebibytes(parts[3]),
                    "held_bytes": _mebibytes(parts[4]),
                    "holders": [holder(line) for line in users.splitlines() if line.startswith(parts[2])],
                }
            )
    return found


def holder(line: str) -> dict[str, Any]:
    """A process on a GPU, from a line `uuid, pid, MiB`. In a container other people's processes have no name."""
    _, pid, held = (part.strip() for part in line.split(","))
    user = program = "unknown"
    try:
        user = pwd.getpwuid(Path(f"/proc/{pid}").stat().st_uid).pw_name
        program = Path(f"/proc/{pid}/comm").read_text().strip()
    except (OSError, KeyError):
        pass
    return {"pid": int(pid), "user": user, "program": program, "held_bytes": _mebibytes(held)}


def _mebibytes(text: str) -> int | None:
    return int(text) << 20 if text.isdigit() else None


def said(*argv: str) -> str:
    """What a program prints; nothing when it is absent or fails."""
    try:
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workdir", type=Path, required=True)
    print(json.dumps(machine_facts(parser.parse_args().workdir)))
