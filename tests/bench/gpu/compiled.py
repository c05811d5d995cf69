"""Training under torch.compile on one GPU: graphs, recompilations and memory over many steps of mixed lengths.

    python tests/bench/gpu/compiled.py [--steps 200] [--buckets 3]
    python tests/bench/gpu/compiled.py --placed '{"fuse": true, "attention": "flex"}'
    python tests/bench/gpu/compiled.py --small --device cpu --backend eager --steps 20

A two-layer cut of Qwen3.6-27B's shapes and a drafter of one layer of its published shape, both roles in one process. First a
few steps as they are, then the whole number compiled, from the same weights on the same batches. Prints one JSON line: graphs
compiled against buckets, graphs after the first epoch against those at the end (none may be new), warnings of the compiler,
the most memory of each quarter of the steps, the largest difference of the losses, and seconds a step. Exit code 1 when there
are more graphs than buckets (compiled whole), a new graph after every bucket has been seen, or a warning that a recompile limit
was hit.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)]

import torch  # noqa: E402
import torch._dynamo  # noqa: E402
from shapes import LENGTHS_27B, TWO_LAYERS, drafter_27b, fla_is_there  # noqa: E402
from topology import counting_texts  # noqa: E402
from train_store import TINY, Training, identity, make_training  # noqa: E402

from dflash.base.progress import Progress  # noqa: E402
from dflash.base.records import MetricsLine, last_attempts  # noqa: E402
from dflash.base.stage import HostContext  # noqa: E402
from dflash.base.store import load_inputs, read_params  # noqa: E402
from dflash.model.target_params import RandomTarget  # noqa: E402
from dflash.train import forward, schedule, trainer  # noqa: E402


class Heard(logging.Handler):
    """Keeps what the compiler warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage()[:300])


def graphs() -> int:
    """Graphs that this process has compiled."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def make(folder: Path, given: argparse.Namespace) -> Training:
    """The training, in a store of its own; its key does not depend on the folder."""
    if given.tiny:
        sizes = {"mean": 30.0, "longest": 96}
        values: dict[str, Any] = {"target": identity(TINY)}
    else:
        sizes = LENGTHS_27B
        values = {
            "target": identity(RandomTarget(**TWO_LAYERS)),
            **drafter_27b(2, 1),
            "max_anchors": given.anchors,
            "lr": 1e-4,
            "dtype": "bfloat16",
            "kernels": "fla" if given.device.startswith("cuda") and fla_is_there() else "torch",
        }
    batching = {"token_budget": sizes["longest"], "max_seq_len": sizes["longest"], "quantiles": given.buckets}
    rows = counting_texts(given.samples, **sizes)
    return make_training(folder, rows=rows, batching=batching, **{**values, "schedule_steps": 10_000})


def train(
    training: Training, given: argparse.Namespace, steps: int, placed: dict[str, Any], seen: list[int]
) -> list[MetricsLine]:
    """Trains in this process; `seen` gets the number of graphs after each step."""
    schedule.merge_steps(training.directory, [steps])
    inputs = load_inputs(read_params(training.directory), training.store)
    context = HostContext(device=given.device, threads=given.threads, progress=Progress(quiet=True))
    whole = trainer.Trainer._tell

    def tell(self: Any, line: MetricsLine) -> None:
        seen.append(graphs())
        whole(self, line)

    trainer.Trainer._tell = tell  # type: ignore[method-assign]
    try:
        trainer.run(training.params(**placed), inputs, training.directory, context)
    finally:
        trainer.Trainer._tell = whole  # type: ignore[method-assign]
    return last_attempts(training.directory / "metrics.jsonl")


def main() -> int:
    """Both trainings; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--plain-steps", type=int, default=20)
    parser.add_argument("--buckets", type=int, default=3)
    parser.add_argument("--anchors", type=int, default=64)
    parser.add_argument("--samples", type=int, default=400)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--backend", default=forward.BACKEND)
    parser.add_argument("--placed", type=json.loads, default={"compile": True}, help="placement that compiles, as JSON")
    parser.add_argument("--tiny", "--small", action="store_true", help="a tiny target and drafter")
    given = parser.parse_args()
    forward.BACKEND = given.backend
    heard = Heard()
    logging.getLogger("torch._dynamo").addHandler(heard)
    with tempfile.TemporaryDirectory() as folder:
        plain = train(make(Path(folder) / "plain", given), given, given.plain_steps, {}, [])
        begun = time.perf_counter()
        seen: list[int] = []
        lines = train(make(Path(folder) / "compiled", given), given, given.steps, given.placed, seen)
        seconds = time.perf_counter() - begun
    used: set[int] = set()
    complete = len(lines)
    for place, line in enumerate(lines):
        if not set(line.buckets) <= used:
            complete = place + 1
        used |= set(line.buckets)
    limits = [text for text in heard.said if "recompile" in text.lower()]
    quarter = max(1, len(lines) // 4)
    memory = [
        max((sum(line.memory_bytes.values()) for line in lines[start : start + quarter]), default=0)
        for start in range(0, len(lines), quarter)
    ]
    found = {
        "name": "compiled training",
        "device": given.device,
        "placed": given.placed,
        "steps": len(lines),
        "buckets": len(used),
        "graphs": seen[-1],
        "graphs_when_every_bucket_was_seen": seen[complete - 1],
        "all_buckets_after_step": complete,
        "recompile_warnings": limits,
        "other_warnings": len(heard.said) - len(limits),
        "memory_gb_by_quarter": [round(size / 1e9, 3) for size in memory],
        "largest_loss_difference": max(
            abs(ours.loss - theirs.loss) for ours, theirs in zip(lines, plain, strict=False)
        ),
        "loss": [round(lines[0].loss, 4), round(lines[-1].loss, 4)],
        "step_seconds": {
            "plain": round(statistics.median(line.seconds for line in plain[5:] or plain), 4),
            "compiled": round(statistics.median(line.seconds for line in lines[complete:] or lines), 4),
        },
        "seconds": round(seconds, 1),
    }
    print(json.dumps(found), flush=True)
    if os.environ.get("OUT"):
        (Path(os.environ["OUT"]) / "compiled.json").write_text(json.dumps(found) + "\n")
    few = found["graphs"] <= found["buckets"] or not given.placed.get("compile")
    good = few and seen[-1] == seen[complete - 1] and not limits
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
