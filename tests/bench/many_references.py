"""References and evaluation of 1,000, 4,000 and 10,000 prompts on a tiny target: what memory grows with.

    {"name": ..., "prompts": n, "seconds": {stage: s}, "start_mib": ..., "peak_mib": {stage: MiB}, "features_mib": ...}

A process for each stage, as in a run; `start_mib` is what one holds once the libraries are imported.

Neither stage holds the features of more than one shard, nor tokens or acceptance lengths of the requests it has judged. Two
cores shared with other work, n = 1 a count:

    prompts   references   evaluate   features on disk
      1,000      485 MiB    493 MiB          18.9 MiB
      4,000      498 MiB    515 MiB          78.6 MiB
     10,000      521 MiB    529 MiB         197.1 MiB

of which 389 MiB are the libraries: 4 kB a prompt while references are made (its tokens and messages), 2.4 kB while they are
judged (its counts). A shard of features and the bootstrap's weights come to 64 and 16 MiB at most, whatever the count.
`python tests/bench/many_references.py [COUNT ...]`; two minutes, so not in `make bench`.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/unit")]
MOST_TOKENS = 32


def peak() -> float:
    """MiB that this process has held at most."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)


def one(stage: str, count: int, folder: Path) -> None:
    """One stage over `count` prompts, in this process; `evaluate` reads what `references` left in the folder."""
    import torch
    from evaluate_road import Road
    from evaluate_samples import drafter_config

    from dflash.model.drafter import Drafter

    torch.set_num_threads(1)
    found = {"start": peak()}
    road = Road(folder)
    lines = [{"prompt": f"question number {number} of very many"} for number in range(count)]
    prompt_set, files = road.prompts("many", lines)
    start = time.perf_counter()
    if stage == "references":
        made = road.references(files=files, prompt_sets=[prompt_set], max_new_tokens=MOST_TOKENS)
        found["features"] = round(made.results["features"]["bytes"] / 2**20, 1)
    else:
        road.checkpoint(Drafter(drafter_config(4, 6), seed=0))
        inputs = road.inputs(prompt_sets=[prompt_set], max_new_tokens=MOST_TOKENS)
        road.evaluate(inputs, budgets=[8], bootstrap=1000)
    print(json.dumps({**found, "seconds": round(time.perf_counter() - start, 1), "peak": peak()}))


def measured(stage: str, count: int, folder: str) -> dict[str, float]:
    """What a process that runs one stage says of itself."""
    command = [sys.executable, __file__, "--one", stage, str(count), folder]
    done = subprocess.run(
        command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    """A line for each count."""
    for count in [int(text) for text in sys.argv[1:]] or [1000, 4000, 10000]:
        with tempfile.TemporaryDirectory() as folder:
            found = {stage: measured(stage, count, folder) for stage in ("references", "evaluate")}
        line = {
            "name": "references of many prompts",
            "prompts": count,
            "seconds": {stage: item["seconds"] for stage, item in found.items()},
            "start_mib": found["references"]["start"],
            "peak_mib": {stage: item["peak"] for stage, item in found.items()},
            "features_mib": found["references"]["features"],
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    one(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])) if sys.argv[1:2] == ["--one"] else main()
