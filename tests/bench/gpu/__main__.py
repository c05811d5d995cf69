"""Everything that one GPU can show of the full-size job, in one go: `python tests/bench/gpu --specforge FOLDER`.

    python tests/bench/gpu --specforge FOLDER --hours 0.5         (one H200; what does not fit the time is left out and said)
    python tests/bench/gpu --small --specforge FOLDER             (a CPU, two minutes; what continuous integration runs)

Scripts in the order of what is learned for the time: each is a process of its own, prints its JSON lines as they come, says on
stderr where it is, and stops no other when it fails or runs out of its time. The last line lists how each ended. Several GPUs:
`topology.py`. Kernels side by side: `kernel_gap.py`, `road.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
FUSED = '{"fuse": true, "attention": "flex", "anchor_chunk": 64}'
SCRIPTS: dict[str, tuple[str, int, list[str], list[str]]] = {
    "drafter": ("drafter_step.py", 420, [], []),
    "fast path": ("fast_path.py", 240, [], ["--steps", "20"]),
    "graphs": (
        "compiled.py", 300, ["--steps", "200", "--placed", FUSED],
        ["--steps", "12", "--plain-steps", "4", "--backend", "eager", "--device", "cpu", "--threads", "1", "--placed", FUSED],
    ),
    "features": ("features.py", 480, [], []),
    "pipeline": ("pipeline.py", 540, [], []),
    "pipeline, fast": ("pipeline.py", 540, ["--placed", FUSED], ["--placed", '{"anchor_chunk": 2}']),
    "compiled": (
        "compiled.py", 420, ["--steps", "200"],
        ["--steps", "12", "--plain-steps", "4", "--backend", "eager", "--device", "cpu", "--threads", "1"],
    ),
}  # fmt: skip
"""Script, most seconds on a GPU, what to add on a GPU, what to add to --small; the least tried last."""


def main() -> int:
    """1 when a script failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--specforge", type=Path, help="folder of the unpacked wheel of SpecForge 0.2.0")
    parser.add_argument("--hours", type=float, default=1.0, help="start nothing that would not end by then")
    parser.add_argument("--only", nargs="+", choices=list(SCRIPTS), default=list(SCRIPTS))
    parser.add_argument("--small", action="store_true", help="tiny sizes on a CPU")
    given = parser.parse_args()
    deadline = time.monotonic() + 3600 * given.hours
    ended: dict[str, str] = {}
    for part in given.only:
        script, seconds, large, small = SCRIPTS[part]
        left = deadline - time.monotonic()
        if left < (20 if given.small else 60):
            ended[part] = "left out: no time"
            continue
        command = [sys.executable, str(HERE / script), *(["--small", *small] if given.small else large)]
        if given.specforge and script == "drafter_step.py":
            command += ["--specforge", str(given.specforge)]
        print(f"{part}: {script}, at most {min(seconds, left):.0f} s", file=sys.stderr, flush=True)
        begun = time.monotonic()
        try:
            status = subprocess.run(command, timeout=min(seconds, left), check=False, env=dict(os.environ)).returncode
            ended[part] = f"{'done' if status == 0 else f'exit status {status}'} in {time.monotonic() - begun:.0f} s"
        except subprocess.TimeoutExpired:
            ended[part] = f"out of time after {time.monotonic() - begun:.0f} s"
    print(json.dumps({"name": "all", "ended": ended}), flush=True)
    return int(not all(word.startswith("done") for word in ended.values()))


if __name__ == "__main__":
    raise SystemExit(main())
