"""Where a result is made: what is installed, what is bound, and which commit of the workflow ran.

Collected once a process (about 40 ms, most of it the list of distributions), stored once per digest. torch is described
only when the process has already imported it. Environment variables come from an allow-list, so that no secret can end up
in a file.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from dflash.base.files import read_json
from dflash.base.records import Environment

GIT_VARIABLE = "DFLASH_GIT"
"""How a stage on another host learns which commit its code is of: what `git_facts` said on the controller, as JSON."""
ALLOWED_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "MKL_NUM_THREADS",
    "NCCL_DEBUG",
    "NCCL_NVLS_ENABLE",
    "OMP_NUM_THREADS",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_LOGS",
    "TRITON_CACHE_DIR",
)


@functools.cache
def _distributions() -> dict[str, str]:
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            found.setdefault(name.lower(), distribution.version)
    return dict(sorted(found.items()))


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def torch_facts() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What torch was built with and which GPUs it sees; empty when the process has not imported torch."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}, []
    facts: dict[str, Any] = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None,
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    gpus: list[dict[str, Any]] = []
    if torch.cuda.is_available():
        facts["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
        facts["driver"] = _driver_version()
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            gpus.append(
                {
                    "index": index,
                    "name": properties.name,
                    "uuid": str(properties.uuid),
                    "memory_bytes": properties.total_memory,
                    "capability": f"{properties.major}.{properties.minor}",
                }
            )
    return facts, gpus


def _driver_version() -> str | None:
    try:
        return Path("/proc/driver/nvidia/version").read_text().split("Kernel Module")[1].split()[0]
    except (OSError, IndexError):
        return None


@functools.cache
def git_facts() -> dict[str, Any]:
    """Commit and dirty flag of the checkout that holds this package; empty when it is not one (an installed wheel)."""
    root = Path(__file__).resolve().parents[2]

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    top = git("rev-parse", "--show-toplevel")
    commit = git("rev-parse", "HEAD")
    if top is None or commit is None or Path(top).resolve() != root:
        return dict(json.loads(os.environ.get(GIT_VARIABLE) or "{}"))
    changed = git("status", "--porcelain", "--untracked-files=no") or ""
    return {"commit": commit, "dirty": bool(changed), "changed": [line[3:] for line in changed.splitlines()][:50]}


def collect(kernels: dict[str, Any] | None = None) -> Environment:
    """Describes this process. `kernels`: what was bound, as `dflash/model/kernels.py` reports it."""
    torch, gpus = torch_facts()
    return Environment(
        python=platform.python_version(),
        platform=platform.platform(),
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        distributions=_distributions(),
        torch=torch,
        gpus=gpus,
        kernels=kernels or {},
        git=git_facts(),
        variables={name: os.environ[name] for name in ALLOWED_VARIABLES if name in os.environ},
    )


def store_environment(store: Path, environment: Environment) -> str:
    """Writes the environment under its digest (once) and returns the digest, 12 hex digits."""
    name = environment.digest()[:12]
    path = store / "environments" / f"{name}.json"
    if not path.exists() or read_json(path) != environment.model_dump(mode="json"):
        environment.write(path)
    return name
