"""References and evaluation of 1,000 and of 10,000 prompts on a tiny target: what memory grows with.

    {"name": ..., "prompts": n, "seconds": {stage: s}, "peak_mib": {stage: MiB of the process by then}, "features_mib": ...}

Continuations are kept as 4 bytes a token, features go to disk as they come and are read back request by request, so memory
grows by what is kept a request: its tokens while references are made, and its acceptance lengths and slot hits for the
intervals. A process for each count. `python tests/bench/many_references.py [COUNT ...]`; a few minutes, so not in `make bench`.
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


def peak() -> float:
    """MiB that this process has held at most."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)


def one(count: int) -> None:
    """Both stages over `count` prompts, in this process."""
    import torch
    from evaluate_road import Road
    from evaluate_samples import drafter_config

    from dflash.model.drafter import Drafter

    torch.set_num_threads(1)
    peaks, seconds = {"start": peak()}, {}
    with tempfile.TemporaryDirectory() as folder:
        road = Road(Path(folder))
        lines = [{"prompt": f"question number {number} of very many"} for number in range(count)]
        prompt_set, files = road.prompts("many", lines)
        start = time.perf_counter()
        made = road.references(files=files, prompt_sets=[prompt_set], max_new_tokens=32)
        peaks["references"], seconds["references"] = peak(), round(time.perf_counter() - start, 1)
        road.checkpoint(Drafter(drafter_config(4, 6), seed=0))
        start = time.perf_counter()
        road.evaluate(road.inputs(prompt_sets=[prompt_set], max_new_tokens=32), budgets=[8], bootstrap=1000)
        peaks["evaluate"], seconds["evaluate"] = peak(), round(time.perf_counter() - start, 1)
    line = {"name": "references of many prompts", "prompts": count, "seconds": seconds, "peak_mib": peaks}
    print(json.dumps({**line, "features_mib": round(made.results["features"]["bytes"] / 2**20, 1)}), flush=True)


def main() -> None:
    """A process for each count."""
    for count in sys.argv[1:] or ["1000", "10000"]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, __file__, "--one", count], check=True, env=environment)


if __name__ == "__main__":
    one(int(sys.argv[2])) if sys.argv[1:2] == ["--one"] else main()
