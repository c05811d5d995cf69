"""What a large store costs to ask: 1,000 checkpoints of three runs, 20,000 files. Wall time and peak memory of each command.

The store is written here, true to every schema and to the keys that the plan computes, without a single training.

Measured on two cores of a shared virtual machine with Python 3.11, 1,002 checkpoints, 20,065 files (`dflash --help`: 0.09 s):

    dflash plan                      0.87 s    46 MB      at most 10 s is asked for
    dflash plan --verify             1.8 s     58 MB
    dflash inspect of a checkpoint   0.27 s    38 MB      at most 1 s
    dflash compare of two runs       0.35 s    47 MB
    dflash watch --once              0.87 s    45 MB
    dflash gc                        1.2 s     60 MB      at most 10 s; seconds of processor, the machine was busy
    report of 334 evaluations        1.7 s     208 MB     at most 60 s
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from dflash.base.environment import collect, store_environment
from dflash.base.files import sha256_file
from dflash.base.records import (
    Artifact,
    ArtifactFile,
    CheckpointManifest,
    Counts,
    Environment,
    Lineage,
    MetricsLine,
    OutputFile,
    Receipt,
    TensorFact,
    now,
)
from dflash.plan.config import load_config, resolved_source
from dflash.plan.graph import Node, Plan, build_plan
from dflash.plan.manifest import build_manifest

ROOT = Path(__file__).resolve().parents[2]
RUNS, STEPS, DETAILS = 3, 334, 13
"""Runs, checkpoints of each, and files of an evaluation beside its rows and samples."""
METHODS = ("chain", "prompt_lookup", "ngram")


def make_store(folder: Path) -> Plan:
    """Three finished runs in `folder`, which becomes the working directory."""
    (folder / "config").mkdir(parents=True)
    shutil.copytree(ROOT / "config/micro", folder / "config/micro")
    config = yaml.safe_load((ROOT / "config/micro.yaml").read_text())
    del config["run"]
    config["train"] |= {"schedule_steps": STEPS, "checkpoint_every": 1}
    config["runs"] = [{"name": f"run{index}", "train": {"lr": (index + 1) * 1e-3}} for index in range(RUNS)]
    (folder / "config/config.yaml").write_text(yaml.safe_dump(config))
    os.chdir(folder)
    with patch("os.fsync"):
        plan = build_plan(load_config([Path("config/config.yaml")]))
        environment = collect({"linear": "none needed", "functions": {}, "form": "chunked", "attention": "sdpa"})
        digest = store_environment(plan.store, environment)
        for node in plan.nodes.values():
            node.params.write(node.directory / "params.json")
            _stand(node, environment, digest)
        for run in plan.runs:
            manifest = build_manifest(run.directory, plan.store, resolved_source(run.config))
            manifest.write(run.directory / "manifest.json")
    return plan


def _stand(node: Node, environment: Environment, digest: str) -> None:
    if node.stage.name == "train":
        lines = [_metrics(step) for step in range(1, STEPS + 1)]
        (node.directory / "metrics.jsonl").write_text("".join(f"{line.model_dump_json()}\n" for line in lines))
        for step in node.steps:
            _receipt(node, digest, _checkpoint(node, step, environment), step)
    elif node.stage.name == "evaluate":
        for step in node.steps:
            _receipt(node, digest, _evaluation(node, step), step)
    elif node.stage.name != "report":
        (node.directory / "output.bin").write_bytes(b"x" * 1000)
        _receipt(node, digest, ["output.bin"])


def _receipt(node: Node, environment: str, files: list[str], step: int | None = None) -> None:
    outputs = [
        OutputFile(path=name, size=(node.directory / name).stat().st_size, sha256=sha256_file(node.directory / name))
        for name in files
    ]
    inputs = {
        name: Receipt.read(item.receipt(step if item.stage.stepwise else None)).content_digest()
        for name, item in node.inputs.items()
        if not item.stage.stepwise or step is not None
    }
    Receipt(
        stage=node.stage.name,
        key=node.key,
        step=step,
        outputs=outputs,
        inputs=inputs,
        host="local",
        started=now(),
        finished=now(),
        attempt=1,
        environment=environment,
        counts=Counts(),
    ).write(node.receipt(step))


def _checkpoint(node: Node, step: int, environment: Environment) -> list[str]:
    folder = node.directory / f"step_{step}"
    (folder / "drafter").mkdir(parents=True)
    header = json.dumps({"fc.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}).encode()
    (folder / "drafter/model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(24))
    (folder / "drafter/config.json").write_text("{}")
    files = [ArtifactFile(path="model.safetensors", size=24, chunks=["0" * 64])]
    names = [
        f"layers.{layer}.{part}.weight" for layer in range(5) for part in ("q", "k", "v", "o", "up", "down", "gate")
    ]
    CheckpointManifest(
        key=node.key,
        step=step,
        created=now(),
        config={"train": node.params.params},
        params_files={"train": node.params.model_dump(mode="json")},
        placement={},
        dataset={},
        buckets={},
        topology={},
        kernels=environment.kernels,
        environment=environment,
        lineage=Lineage(attempts=[{"attempt": 1}]),
        tensors=[TensorFact(name=name, shape=[2, 3], dtype="float32", bytes=24, sha256="0" * 64) for name in names],
        drafter=Artifact(root="0" * 64, files=files),
        state=None,
    ).write(folder / "manifest.json")
    return [f"step_{step}/drafter/model.safetensors", f"step_{step}/drafter/config.json"]


def _evaluation(node: Node, step: int) -> list[str]:
    folder = node.directory / f"step_{step}"
    folder.mkdir(parents=True)
    tau = 1 + 3 * (1 - math.exp(-step / 100))
    rows = [_row(node, step, method, metric, tau) for method in METHODS for metric in _metrics_of(method)]
    (folder / "rows.json").write_text(json.dumps(rows))
    (folder / "samples.json").write_text("[]")
    names = ["rows.json", "samples.json", *(f"detail_{index}.json" for index in range(DETAILS))]
    for name in names[2:]:
        (folder / name).write_text(json.dumps(list(range(500))))
    return [f"step_{step}/{name}" for name in names]


def _metrics_of(method: str) -> list[str]:
    slots = [f"slot_accuracy_{slot}" for slot in range(1, 16)] if method == "chain" else []
    return ["tau_pooled", "tau_request_mean", *slots]


def _row(node: Node, step: int, method: str, metric: str, tau: float) -> dict[str, Any]:
    return {
        "run": "",
        "train_key": node.inputs["train"].key,
        "step": step,
        "drafter": "trained",
        "prompt_set": "held_out",
        "length_bucket": "all",
        "kernel": "torch",
        "method": method,
        "budget": 15,
        "block_size": 16,
        "horizon": 15,
        "sampling": "greedy",
        "convention": "committed_with_bonus",
        "metric": metric,
        "value": tau,
        "ci_low": tau - 0.1,
        "ci_high": tau + 0.1,
        "n": 80,
    }


def _metrics(step: int) -> MetricsLine:
    return MetricsLine(
        attempt=1,
        step=step,
        time=now(),
        loss=8.0 / step,
        accuracy_by_slot=[0.5] * 15,
        learning_rate=1e-3,
        gradient_norm=1.0,
        anchors=512,
        tokens=65_536,
        seconds=3.0,
        tokens_per_second={"target": 20_000.0, "drafter": 18_000.0},
        padding_share=0.1,
        batch_ids=["0"],
        buckets=[0],
    )


def measured(command: list[str], cwd: Path) -> tuple[float, float]:
    """Wall seconds and peak memory in MB of a command that must succeed.

    The peak is read from the kernel's high-water mark while the command runs: what `wait4` tells is at least the size of the
    process that forked it.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    start = time.perf_counter()
    peak = 0
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(command, cwd=cwd, env=environment, stdout=subprocess.DEVNULL, stderr=errors)
        while child.poll() is None:
            peak = max(peak, _high_water(child.pid))
            time.sleep(0.01)
        seconds = time.perf_counter() - start
        if child.returncode != 0:
            errors.seek(0)
            raise RuntimeError(f"{command}: {errors.read().decode()[-2000:]}")
    return seconds, peak / 1024


def _high_water(pid: int) -> int:
    """Largest resident size of a process so far, kB; 0 when it has just ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)


def main(base: Path, baseline: float) -> None:
    """Prints one line a command. baseline: seconds that `dflash --help` takes."""
    here = Path.cwd()
    folder = base / "evidence"
    try:
        plan = make_store(folder)
    finally:
        os.chdir(here)
    files = sum(len(names) for _, _, names in os.walk(folder / "results/store"))
    dflash = [sys.executable, "-m", "dflash"]
    run = plan.runs[0]
    train = run.nodes["train"].directory
    placement = json.dumps({"manifest": str(run.directory / "manifest.json"), "host": "local"})
    report = [
        "stage",
        "report",
        "--params",
        str(run.directory / "params.json"),
        "--run",
        run.name,
        "--placement",
        placement,
    ]
    commands = {
        "dflash plan": ["plan"],
        "dflash plan --verify": ["plan", "--verify"],
        "dflash inspect of a checkpoint": ["inspect", str(train / f"step_{STEPS}")],
        "dflash compare of two runs": ["compare", *(str(item.directory) for item in plan.runs[:2])],
        "dflash watch --once": ["watch", run.name, "--once"],
        "dflash gc": ["gc"],
        f"report of {STEPS} evaluations": report,
    }
    for name, words in commands.items():
        receipt = run.directory / "receipt.json"
        if words[0] == "stage":
            for item in plan.runs:
                (item.directory / "receipt.json").unlink(missing_ok=True)
        found = [measured([*dflash, *words], folder) for _ in range(1 if words[0] == "stage" else 3)]
        seconds = sorted(item[0] for item in found)
        line = {
            "name": f"{name}, {RUNS * STEPS:,} checkpoints, {files:,} files",
            "ratio": round(seconds[len(seconds) // 2] / baseline, 3),
            "unit": "s",
            "n": len(seconds),
            "min": round(seconds[0], 3),
            "median": round(seconds[len(seconds) // 2], 3),
            "max": round(seconds[-1], 3),
            "peak_mb": round(max(item[1] for item in found), 1),
        }
        if words[0] == "stage" and receipt.exists():
            line["page_mb"] = round((run.directory / "report.html").stat().st_size / 1e6, 2)
        print(json.dumps(line), flush=True)
