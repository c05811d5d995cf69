"""`make bench`: what must stay fast, as ratios within one run, one JSON line each.

    {"name": ..., "ratio": ..., "unit": ..., "n": ..., "min": ..., "median": ..., "max": ...}

`ratio` compares medians within this run; min, median and max are those of the measured side, in `unit`. No threshold here:
a person reads the numbers.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import data
import evaluation
import evidence
import ship
import stream
import yaml

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def timed(command: list[str], cwd: Path, repeat: int) -> list[float]:
    """Wall seconds of `repeat` runs of a command that must succeed."""
    found = []
    for _ in range(repeat):
        start = time.perf_counter()
        subprocess.run(command, cwd=cwd, env=ENVIRONMENT, check=True, capture_output=True)
        found.append(time.perf_counter() - start)
    return found


def line(name: str, measured: list[float], baseline: list[float], unit: str = "s") -> None:
    """Prints one result."""
    print(
        json.dumps(
            {
                "name": name,
                "ratio": round(statistics.median(measured) / statistics.median(baseline), 3),
                "unit": unit,
                "n": len(measured),
                "min": round(min(measured), 4),
                "median": round(statistics.median(measured), 4),
                "max": round(max(measured), 4),
            }
        ),
        flush=True,
    )


def workspace(folder: Path, change: Callable[[dict[str, object]], None] | None = None) -> Path:
    """A working directory with the micro config."""
    (folder / "config").mkdir(parents=True)
    shutil.copytree(ROOT / "config/micro", folder / "config/micro")
    config = yaml.safe_load((ROOT / "config/micro.yaml").read_text())
    if change is not None:
        change(config)
    (folder / "config/config.yaml").write_text(yaml.safe_dump(config))
    return folder


def thousand_checkpoints(config: dict[str, object]) -> None:
    train = config["train"]
    assert isinstance(train, dict)
    train.update(schedule_steps=1000, checkpoint_every=1)


def main() -> None:
    """Runs all benchmarks."""
    stream.main()
    data.main(["5000", "20000"])
    ship.main()
    evaluation.main()
    dflash = [sys.executable, "-m", "dflash"]
    snakemake = [sys.executable, "-m", "snakemake", "-s", str(ROOT / "Snakefile")]
    snakemake += ["--workflow-profile", str(ROOT / "profiles/default")]
    bare = [sys.executable, "-c", "pass"]
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch)
        start = timed(bare, base, 5)
        helped = timed([*dflash, "--help"], ROOT, 5)
        line("dflash --help over an empty Python", helped, start)
        evidence.main(base, statistics.median(helped))
        large = workspace(base / "large", thousand_checkpoints)
        small = workspace(base / "small")
        plain = timed([*dflash, "plan"], small, 5)
        line("dflash plan of 1,000 checkpoints over 3", timed([*dflash, "plan"], large, 5), plain)
        few = timed([*snakemake, "-n", "--quiet"], small, 3)
        line("snakemake -n of 1,000 checkpoints over 3", timed([*snakemake, "-n", "--quiet"], large, 3), few)
        subprocess.run([*dflash, "run"], cwd=small, env=ENVIRONMENT, check=True, capture_output=True)
        nothing = timed(snakemake, small, 5)
        line(
            "dflash run with nothing to do over snakemake with nothing to do",
            timed([*dflash, "run"], small, 5),
            nothing,
        )


if __name__ == "__main__":
    main()
