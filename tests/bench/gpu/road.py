"""The whole road on one GPU without Snakemake: which kernels run, and whether asking for others stops the run.

    python tests/bench/gpu/road.py [--fla] [--steps N]

For the demo's target and for a two-layer cut of Qwen3.6-27B's shapes (random weights, hidden 5120, no download), under
`kernels: torch` and, with `--fla`, `kernels: fla`: completions, dataset, buckets, training with a checkpoint, references,
evaluation. Prints one JSON line a run: the functions that the checkpoint's manifest says were bound, losses, tokens per second
by role, tau. The weights of the cut are drawn on the GPU. Without flash-linear-attention installed, asking for fla must be
refused before the first step; that is shown too. Takes about two minutes on an H200.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

from shapes import TWO_LAYERS, drafter_27b  # noqa: E402

from dflash.base.errors import PermanentError  # noqa: E402
from dflash.base.records import CheckpointManifest, Receipt, last_attempts  # noqa: E402
from dflash.plan.config import load_config  # noqa: E402
from dflash.plan.graph import Plan, build_plan  # noqa: E402
from dflash.runner import Job, run_job  # noqa: E402


def demo(kernels: str, steps: int) -> dict[str, Any]:
    """The demo's config on a GPU, shortened."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "config/config.yaml").read_text())
    config["train"].update(schedule_steps=steps, checkpoint_every=steps, kernels=kernels)
    config["completions"]["kernels"] = kernels
    config["evaluate"]["kernels"] = [kernels]
    return config


def cut(kernels: str, steps: int) -> dict[str, Any]:
    """A random target of the 27B's shapes, cut to two layers, and a drafter of its published shape with one layer."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "config/micro.yaml").read_text())
    config["target"] = {"random": TWO_LAYERS}
    config["completions"].update(kernels=kernels, dtype="bfloat16")
    config["train"] = {
        **drafter_27b(2, 1),
        "max_anchors": 8,
        "lr": 1e-4,
        "schedule_steps": 3,
        "checkpoint_every": 3,
        "dtype": "bfloat16",
        "kernels": kernels,
    }
    config["references"]["dtype"] = config["evaluate"]["dtype"] = "bfloat16"
    config["evaluate"]["kernels"] = [kernels]
    return config


ROADS = {"demo": demo, "27B shapes, two layers": cut}


def travel(plan: Plan) -> None:
    """Runs every job of a plan in the order of the road, but for the report."""
    for node in plan.nodes.values():
        if node.stage.name == "report":
            continue
        node.params.write(node.directory / "params.json")
        for step in node.steps if node.stage.stepwise else [None]:
            placement = {**node.placement, "node": node.name, "steps": node.steps}
            run_job(Job(node.stage, node.directory / "params.json", plan.store, step, placement, "bench"))


def run(name: str, config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One road; returns what its last checkpoint and evaluation say."""
    folder.mkdir(parents=True)
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump({**config, "results": str(folder / "results")}))
    plan = build_plan(load_config([file]))
    start = time.perf_counter()
    travel(plan)
    nodes = plan.runs[0].nodes
    train = nodes["train"]
    manifest = CheckpointManifest.read(train.directory / f"step_{train.steps[-1]}" / "manifest.json")
    lines = last_attempts(train.directory / "metrics.jsonl")
    evaluated = Receipt.read(nodes["evaluate"].receipt(train.steps[-1]))
    return {
        "name": name,
        "seconds": round(time.perf_counter() - start, 1),
        "device": manifest.placement.get("device"),
        "gpus": [gpu["name"] for gpu in manifest.environment.gpus],
        "kernels": manifest.kernels,
        "loss": [round(lines[0].loss, 4), round(lines[-1].loss, 4)],
        "batches": [line.batch_ids for line in lines[:3]],
        "tokens_per_second": {role: round(rate) for role, rate in lines[-1].tokens_per_second.items()},
        "memory_bytes": lines[-1].memory_bytes,
        "tau": evaluated.results.get("tau"),
    }


def main() -> int:
    """Runs all roads; exit code 1 when one does not end as it must."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fla", action="store_true", help="flash-linear-attention is installed: run with it too")
    parser.add_argument("--steps", type=int, default=60, help="training steps of the demo")
    parser.add_argument("--one", nargs=3, metavar=("NAME", "KERNELS", "FOLDER"), help="one road, in this process")
    given = parser.parse_args()
    os.chdir(ROOT)
    if given.one:
        return one(*given.one, steps=given.steps)
    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        for number, (name, kernels) in enumerate((name, kernels) for name in ROADS for kernels in ("torch", "fla")):
            # A process each: forcing the reference kernels holds for the whole process.
            command = [
                sys.executable,
                __file__,
                "--steps",
                str(given.steps),
                "--one",
                name,
                kernels,
                f"{scratch}/{number}",
            ]
            status = subprocess.run(command, check=False).returncode
            failed |= status != (3 if kernels == "fla" and not given.fla else 0)
    return int(failed)


def one(name: str, kernels: str, folder: str, *, steps: int) -> int:
    """One road; exit code 3 when it was refused for good, as it must be where fla is asked for and not bound."""
    label = f"{name}, kernels: {kernels}"
    try:
        print(json.dumps(run(label, ROADS[name](kernels, steps), Path(folder))), flush=True)
    except PermanentError as error:
        print(json.dumps({"name": label, "refused": error.message()}), flush=True)
        return 3
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
