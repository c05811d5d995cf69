"""Both roles on one GPU: what the pipeline reaches of what its halves allow, and what its time goes to.

    python tests/bench/gpu/pipeline.py [--layers 64] [--rounds 5] [--placed '{"anchor_chunk": 64}']
    python tests/bench/gpu/pipeline.py --small                                       (a CPU, seconds)

Qwen3.6-27B's shapes with random weights and the published drafter, batches of mean 2,202 under the token budget. In one
process, in alternating order: the target alone, the drafter alone on features that are there already (update included), and
the training step that does both. `ratio` is the pipeline's rate over 1 / (1/target + 1/drafter); a scheduler that
overlapped the two could go beyond 1.

Then a profile of one training step: how often and how long the host waited for the device, copies to and from the host with
their number and time, the share of the step in which the device ran nothing, and the operators that took most of it. On a CPU
the reads of a tensor's value are counted instead, those of the host's own tensors too. Prints a JSON line for each. Estimated,
not yet run there: 117 GB of memory at 64 layers; `--layers 48` where that is too much.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)]

import torch  # noqa: E402
from measure import alternate, report, tell  # noqa: E402
from roles import DrafterWork, Job, TargetWork  # noqa: E402
from shapes import fla_is_there  # noqa: E402
from topology import Split, make_job  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero")


def measure(given: argparse.Namespace, folder: Path) -> None:
    """Rates, then the profile."""
    job = Job.read(make_job(folder, given, Split(1, 1), given.device), given.device, given.threads, **given.placed)
    tell("drawing the target's weights")
    target_alone = TargetWork(job)
    tell("drawing the drafter's weights")
    both = DrafterWork(job, target_alone.target)

    def drafter(step: int) -> int:
        both.alone = True
        return both(step)

    def pipeline(step: int) -> int:
        both.alone = False
        return both(step)

    def numbered(work: Any) -> Any:
        return lambda number: work(number + given.warm_up)  # steps count from 0

    contenders = {"target": numbered(target_alone), "drafter": numbered(drafter), "pipeline": numbered(pipeline)}
    found = alternate("pipeline", contenders, job.device, given.rounds, given.warm_up)
    allowed = 1.0 / (1.0 / found["target"].rate + 1.0 / found["drafter"].rate)
    report(
        "colocated pipeline",
        unit="tokens/s",
        device=torch.cuda.get_device_name(job.device) if job.device.type == "cuda" else "cpu",
        kernels=target_alone.kernels["linear"],
        layers=target_alone.target.facts.num_layers,
        placed=given.placed,
        batches_per_step=job.plan.params.batches_per_step,
        **{name: readings.told() for name, readings in found.items()},
        allowed=round(allowed, 1),
        ratio=round(found["pipeline"].rate / allowed, 4),
        rates={"target": round(found["target"].rate, 1), "drafter": round(found["drafter"].rate, 1)},
    )
    tell("profiling one step")
    look_inside(pipeline, given.rounds + given.warm_up, job.device)


def look_inside(work: Any, step: int, device: torch.device) -> None:
    """The profile of one step as a JSON line."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as seen:
        work(step)
    events = list(seen.events())
    named = {name: [event for event in events if event.name == name] for name in (*WAITS, *READS)}
    kernels = [event for event in events if str(event.device_type).endswith("CUDA")]
    copies = [event for event in kernels if event.name.startswith("Memcpy")]
    averages = sorted(seen.key_averages(), key=_own_time, reverse=True)
    report(
        "pipeline: one step inside",
        waits={name: {"times": len(named[name]), "ms": _milliseconds(named[name])} for name in WAITS if named[name]},
        reads={name: len(named[name]) for name in READS if named[name]},
        copies={
            way: {"times": len(some), "ms": _milliseconds(some)}
            for way in ("HtoD", "DtoH", "DtoD")
            if (some := [event for event in copies if way in event.name])
        },
        idle_share=idle_share([(event.time_range.start, event.time_range.end) for event in kernels]),
        most_time={average.key[:60]: round(_own_time(average) / 1e3, 2) for average in averages[:12]},
    )


def _own_time(average: Any) -> float:
    """Microseconds of an operator itself: on the device, or on the host where there is none."""
    on_device = float(getattr(average, "self_device_time_total", 0.0))
    return on_device or float(average.self_cpu_time_total)


def _milliseconds(events: Iterable[Any]) -> float:
    return round(sum(event.time_range.end - event.time_range.start for event in events) / 1e3, 3)


def idle_share(spans: list[tuple[float, float]]) -> float | None:
    """Share of the time from the first kernel to the last in which none ran; None without kernels."""
    if not spans:
        return None
    spans.sort()
    busy, reached = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return round(1.0 - busy / max(reached - spans[0][0], 1e-9), 4)


def main(arguments: list[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--layers", type=int, default=64, help="of the target")
    parser.add_argument("--draft-layers", type=int, default=5)
    parser.add_argument("--anchors", type=int, default=None, help="max_anchors (512)")
    parser.add_argument("--token-budget", type=int, default=None)
    parser.add_argument("--batches-per-step", type=int, default=3)
    parser.add_argument("--samples", type=int, default=400)
    parser.add_argument("--placed", type=json.loads, default={}, help="placement of the training, as JSON")
    parser.add_argument("--kernels", default=None, choices=["fla", "torch"], help="fla where it can be imported")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--small", action="store_true", help="a tiny target and drafter on a CPU")
    given = parser.parse_args(arguments)
    given.tiny, given.anchor_chunk = given.small, None
    if given.small:
        given.device, given.samples, given.rounds, given.warm_up, given.threads = "cpu", 60, 3, 1, 1
    elif not given.placed:
        given.placed = {"anchor_chunk": 64}
    given.kernels = given.kernels or ("fla" if given.device.startswith("cuda") and fla_is_there() else "torch")
    with tempfile.TemporaryDirectory() as folder:
        measure(given, Path(folder))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
