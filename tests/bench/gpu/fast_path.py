"""Does the fast path learn what the reference learns? Loss over 200 steps, and gradients against float64, on one device.

    python tests/bench/gpu/fast_path.py [--steps 200] [--fast '{"fuse": true}'] [--device cuda]
    python tests/bench/gpu/fast_path.py --small                                      (a CPU, half a minute)

A hybrid target small enough to train on in minutes (random weights), counting texts that a drafter can learn, one batch
plan. Four trainings from equal weights: the reference (float32, plain placement), the type alone (bfloat16, plain), the
fast path (bfloat16 and the placement of `--fast`), and the reference once more with another seed of the anchors. What the
last differs by from the reference is the noise of sampling; what the second differs by is the noise of the type. The fast
path must stay within twice the noise of the type beside the plain bfloat16 run, in the mean of the last quarter of the
steps and in the largest step. The target runs on the torch reference, since fla is for 16-bit types.

Then the gradients of one step on fresh inputs: relative error to float64 of every weight, of the plain bfloat16 path and of
the fast one. The fast path's largest may be 1.5 times the plain one's. Prints a JSON line for each; exit code 1 when one
does not hold.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from measure import report, tell  # noqa: E402
from roles import DrafterWork, Job  # noqa: E402
from shapes import SMALL, SMALL_DRAFTER, SMALL_LENGTHS  # noqa: E402
from topology import counting_texts  # noqa: E402
from torch import Tensor  # noqa: E402
from train_store import identity, make_training  # noqa: E402

from dflash.model.target_params import RandomTarget  # noqa: E402
from dflash.train import forward  # noqa: E402
from dflash.train.prepare import load_checked_target  # noqa: E402
from dflash.train.trainer import StepSums  # noqa: E402

MEDIUM: dict[str, Any] = {
    **SMALL, "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
}  # fmt: skip
MEDIUM_DRAFTER: dict[str, Any] = {
    **SMALL_DRAFTER, "block_size": 16, "sliding_window": 128, "head_dim": 64, "num_attention_heads": 8, "intermediate_size": 1536,
}  # fmt: skip


def job(given: argparse.Namespace, folder: Path, dtype: str, placed: dict[str, Any], seed: int = 3) -> Job:
    """The training under one type, placement and seed, in a store of its own."""
    target = RandomTarget(**(SMALL if given.small else MEDIUM))
    shape = SMALL_DRAFTER if given.small else MEDIUM_DRAFTER
    sizes = SMALL_LENGTHS if given.small else {"mean": 300.0, "longest": 1024}
    batching = {"token_budget": 4 * sizes["longest"], "max_seq_len": sizes["longest"], "quantiles": 3}
    train = {"target": identity(target), "dtype": dtype, "kernels": given.kernels, "schedule_steps": 10_000, "lr": 1e-3}
    rows = counting_texts(120 if given.small else 400, **sizes)
    anchors = 8 if given.small else 64
    made = make_training(
        Path(tempfile.mkdtemp(dir=folder)), rows=rows, batching={**batching, "batches_per_step": 1},
        **{**shape, **train, "seed": seed, "max_anchors": anchors},
    )  # fmt: skip
    return Job.read(made, given.device, given.threads, **placed)


def learner(made: Job, weights: dict[str, Tensor] | None) -> DrafterWork:
    """A learner with a whole target, from the given weights where there are any."""
    work = DrafterWork(made, load_checked_target(made.params, None, str(made.device)))
    work.alone = False
    if weights is not None:
        work.learner.load_weights(weights)
    return work


def curve(work: DrafterWork, steps: int, name: str) -> np.ndarray:
    """Losses of the first steps."""
    for step in range(steps):
        if step % max(1, steps // 10) == 0:
            tell(f"{name}: step {step} of {steps}")
        work(step)
    return np.asarray(work.losses)


def curves(given: argparse.Namespace, folder: Path) -> bool:
    """The four trainings side by side."""
    reference = learner(job(given, folder, "float32", {}), None)
    weights = {name: weight.detach().clone() for name, weight in reference.learner.masters.items()}
    found = {"reference": curve(reference, given.steps, "reference")}
    for name, dtype, placed, seed in (
        ("plain", "bfloat16", {}, 3),
        ("fast", "bfloat16", given.fast, 3),
        ("other_anchors", "float32", {}, 4),
    ):
        found[name] = curve(learner(job(given, folder, dtype, placed, seed), weights), given.steps, name)
    last = slice(-max(1, given.steps // 4), None)

    def apart(one: str, other: str) -> dict[str, float]:
        gap = np.abs(found[one] - found[other])
        means = abs(found[one][last].mean() - found[other][last].mean())
        return {"largest": round(float(gap.max()), 6), "mean_of_last_quarter": round(float(means), 6)}

    noise, fast, sampling = apart("plain", "reference"), apart("fast", "plain"), apart("other_anchors", "reference")
    allowed = {name: max(2 * noise[name], 0.002) for name in noise}
    within = all(fast[name] <= allowed[name] for name in allowed)
    ends = {name: [round(float(values[0]), 4), round(float(values[last].mean()), 4)] for name, values in found.items()}
    report(
        "fast path: loss curves", steps=given.steps, device=given.device, fast=given.fast, first_and_last=ends,
        noise_of_type=noise, noise_of_anchors=sampling, fast_against_plain=fast, within=within,
    )  # fmt: skip
    return within


def exactness(given: argparse.Namespace, folder: Path) -> bool:
    """Errors of gradients to float64, on features drawn afresh in float64 and rounded to each type."""
    exact = learner(job(given, folder, "float64", {}), None)
    weights = {name: weight.detach().clone() for name, weight in exact.learner.masters.items()}
    errors: dict[str, dict[str, float]] = {}
    features = torch.randn(exact.ready.shape, device=exact.job.device, dtype=torch.float64)
    exact.ready, exact.alone = features, True
    truth = ready_gradients(exact, features)
    for name, dtype, placed in (("plain", "bfloat16", {}), ("fast", "bfloat16", given.fast)):
        work = learner(job(given, folder, dtype, placed), weights)
        found = ready_gradients(work, features.to(work.ready.dtype))
        errors[name] = {key: float((found[key] - truth[key]).norm() / truth[key].norm()) for key in truth}
    largest = {name: round(max(values.values()), 6) for name, values in errors.items()}
    within = largest["fast"] <= 1.5 * largest["plain"]
    worst = {name: max(values, key=lambda key: values[key]) for name, values in errors.items()}
    report(
        "fast path: gradients", device=given.device, fast=given.fast, largest_error_to_float64=largest, of=worst, within=within,
    )  # fmt: skip
    return within


def ready_gradients(work: DrafterWork, features: Tensor) -> dict[str, Tensor]:
    """Gradients on features that were drawn afresh."""
    work.learner.clear_gradients()
    work.learner.ready = features
    sums = StepSums()
    for batch in work.job.plan.step(0):
        work.learner.add(batch, work.job.samples, sums)
    work.learner.gradient_norm(sums.weight)
    return {name: master.grad.double() for name, master in work.learner.masters.items() if master.grad is not None}


def main(arguments: list[str] | None = None) -> int:
    """1 when the fast path learns something else."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--fast",
        type=json.loads,
        default={"fuse": True, "attention": "flex"},
        help="placement of the fast path, as JSON",
    )
    parser.add_argument("--backend", default=forward.BACKEND, help="of torch.compile")
    parser.add_argument("--kernels", default="torch", choices=["fla", "torch"], help="of the target")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument(
        "--small", action="store_true", help="a tiny target and drafter on a CPU, graphs without a compiler"
    )
    given = parser.parse_args(arguments)
    if given.small:
        given.device, given.threads, given.backend = "cpu", 1, "eager"
    forward.BACKEND = given.backend
    with tempfile.TemporaryDirectory() as folder:
        good = [exactness(given, Path(folder)), curves(given, Path(folder))]
    return 0 if all(good) else 1


if __name__ == "__main__":
    raise SystemExit(main())
