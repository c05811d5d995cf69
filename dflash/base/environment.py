"""Where a result is made: what is installed, what is bound, and which commit of the workflow ran.

Collected once a process (about 40 ms, most of it the list of distributions; on a GPU machine 0.3 s more for nvidia-smi),
stored once per digest. torch is described only when the process has already imported it. Environment variables come from an
allow-list and are masked when they look like a secret all the same, so that none can end up in a file.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import platform
import re
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

NUMERIC_DISTRIBUTIONS = (
    "torch",
    "transformers",
    "triton",
    "flash-linear-attention",
    "fla-core",
    "causal-conv1d",
    "liger-kernel",
)
"""Distributions whose version may move a number, beside all of NVIDIA's."""
CODE_PATHS = ("dflash", "workflow", "Snakefile", "profiles", "pyproject.toml")
"""What of the checkout can change a result: only its uncommitted changes are kept, never other files of the user's."""
MOST_DIFF = 200_000
"""Characters of uncommitted changes that are kept; beyond it only the names of the files are."""
SECRET = re.compile(
    r"(hf_|sk-|ghp_|gho_|github_pat_|glpat-|AKIA|xox[abp]-)[A-Za-z0-9_-]{12,}"
    r"|(?i:(token|secret|password|passwd|api_?key|credential)s?[\"']?\s*[=:]\s*[\"']?)[A-Za-z0-9+/_-]{20,}"
    r"|://[^/\s:@]+:[^/\s@]+@"
)
"""What looks like a token, a key or a password, in an address too."""
NAME_LINE, VERSION_LINE = (re.compile(rf"^{field}: *(\S+)[ \r]*\n", re.MULTILINE) for field in ("Name", "Version"))


def masked(text: str) -> str:
    """The text with everything that looks like a secret replaced by `[masked]`."""
    return SECRET.sub("[masked]", text)


@functools.cache
def _distributions() -> dict[str, str]:
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name, version = _name_and_version(distribution)
        if name:
            found.setdefault(name.lower(), version)
    return dict(sorted(found.items()))


def _name_and_version(distribution: importlib.metadata.Distribution) -> tuple[str, str]:
    """From the first lines of the metadata, where every installer writes them: parsing all of it, a README included, takes
    ten times as long."""
    head = (distribution.read_text("METADATA") or "")[:500]
    name, version = NAME_LINE.search(head), VERSION_LINE.search(head)
    if name and version:
        return name[1], version[1]
    return distribution.metadata["Name"], distribution.version


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
        facts["topology"] = _topology()
        caps = _power_caps()
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            gpus.append(
                {
                    "index": index,
                    "name": properties.name,
                    "uuid": str(properties.uuid),
                    "memory_bytes": properties.total_memory,
                    "capability": f"{properties.major}.{properties.minor}",
                    "power_cap_watts": caps.get(str(properties.uuid).removeprefix("GPU-")),
                }
            )
    return facts, gpus


DRIVER_FILE = Path("/proc/driver/nvidia/version")


def _driver_version() -> str | None:
    """The driver's version, as in `NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build`."""
    try:
        found = re.search(r"\s(\d{3,}(?:\.\d+)+)\s", DRIVER_FILE.read_text().splitlines()[0])
    except (OSError, IndexError):
        return None
    return found[1] if found else None


@functools.cache
def _nvidia_smi(*arguments: str) -> str:
    """What nvidia-smi prints; empty where it is missing, refuses or hangs."""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _power_caps() -> dict[str, float]:
    """Enforced power limit of each GPU in watts, by UUID without its prefix."""
    found = {}
    for line in _nvidia_smi("--query-gpu=uuid,enforced.power.limit", "--format=csv,noheader,nounits").splitlines():
        uuid, _, watts = (part.strip() for part in line.partition(","))
        try:
            found[uuid.removeprefix("GPU-")] = float(watts)
        except ValueError:
            continue  # "[N/A]": the card does not say
    return found


def _topology() -> dict[str, dict[str, str]]:
    """How GPUs are connected, `GPU0 -> {GPU1: NV18, ...}`, as `nvidia-smi topo -m` draws it; empty for a single GPU."""
    rows = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in _nvidia_smi("topo", "-m").splitlines()]
    heads = next(([word for word in row if re.fullmatch(r"GPU\d+", word)] for row in rows if row[:1] == ["GPU0"]), [])
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        if row and re.fullmatch(r"GPU\d+", row[0]) and "X" in row[1 : len(heads) + 1]:
            links = {head: link for head, link in zip(heads, row[1:], strict=False) if link != "X"}
            if links:
                found[row[0]] = links
    return found


@functools.cache
def git_facts() -> dict[str, Any]:
    """Commit, dirty flag and uncommitted changes of the checkout that holds this package; empty for an installed wheel."""
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
    facts: dict[str, Any] = {
        "commit": commit,
        "dirty": bool(changed),
        "changed": [line.strip().partition(" ")[2].strip() for line in changed.splitlines()][:50],
    }
    diff = git("diff", "HEAD", "--", *CODE_PATHS) if changed else ""
    if diff and len(diff) <= MOST_DIFF:
        facts["diff"] = masked(diff) + "\n"
    return facts


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
        variables={name: masked(os.environ[name]) for name in ALLOWED_VARIABLES if name in os.environ},
    )


def store_environment(store: Path, environment: Environment) -> str:
    """Writes the environment under its digest (once) and returns the digest, 12 hex digits."""
    name = environment.digest()[:12]
    path = store / "environments" / f"{name}.json"
    if not path.exists() or read_json(path) != environment.model_dump(mode="json"):
        environment.write(path)
    return name
