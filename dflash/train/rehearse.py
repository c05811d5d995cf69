"""A rehearsal of a training on this host, in minutes: does it fit, does it save, how long will it take?

The real trainer begins in a scratch folder beside the store (same disk, upstream results by link): the probe and preflight run,
then the longest batch of every bucket goes forward and backward, the optimizer takes a step, one checkpoint is written and
verified, and one request is evaluated. Nothing is left behind, and nothing but the dataset and its buckets need exist.

Costs: loading the target, two passes of a batch a bucket, one checkpoint on disk for a moment. A GPU is leased meanwhile, so
that a rehearsal never meets a training on it.
"""

from __future__ import annotations

import resource
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dflash.base.errors import PermanentError
from dflash.base.records import ParamsFile
from dflash.base.stage import HostContext
from dflash.base.store import load_inputs, receipt_path, stage_directory
from dflash.data.batches import Batch
from dflash.data.chat import length_limit
from dflash.evaluate.acceptance import Continuation, draft_continuation
from dflash.evaluate.features import compute_features
from dflash.hosts import lease
from dflash.train import checkpoint, preflight, schedule
from dflash.train.forward import bucket_shapes, parts
from dflash.train.preflight import gigabytes
from dflash.train.train_params import TrainParams
from dflash.train.trainer import StepSums, Trainer, prepare_process

NEEDED = ("dataset", "buckets")
REQUEST_TOKENS = 32
"""Tokens that the target writes for the request that is evaluated."""


def duration(seconds: float) -> str:
    """`45 s`, `12.5 min` or `31.0 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


@dataclass(frozen=True)
class BucketRate:
    """One batch of a bucket, as long as its samples get."""

    samples: int
    length: int
    tokens: int
    target_seconds: float
    drafter_seconds: float


@dataclass(frozen=True)
class Rehearsal:
    """What was seen. Sizes in bytes, times in seconds.

    estimate: what preflight foretold of the longest batch. peak, headroom: memory of the device (of the host on a CPU) at the
    worst moment. buckets: by bucket. step_seconds: a step of batches as the plan mixes them. checkpoint_bytes:
    `drafter/`, `state/`. disk_needed: of the whole run. tau: tokens a verification commits of the request; about 1 untrained.
    """

    estimate: preflight.Need
    peak: int
    headroom: int
    buckets: dict[int, BucketRate]
    step_seconds: float
    steps: int
    checkpoints: int
    checkpoint_seconds: float
    checkpoint_bytes: tuple[int, int]
    disk_needed: int
    disk_free: int
    evaluation_seconds: float
    tau: float

    @property
    def total_seconds(self) -> float:
        """Steps and checkpoints of the whole training."""
        return self.steps * self.step_seconds + self.checkpoints * self.checkpoint_seconds

    def lines(self) -> list[str]:
        """For people."""
        drafter, state = self.checkpoint_bytes
        rates = [
            f"  bucket {bucket}: {rate.samples:,} samples of up to {rate.length:,} tokens, "
            f"target {rate.tokens / max(rate.target_seconds, 1e-9):,.0f} tok/s, "
            f"drafter {rate.tokens / max(rate.drafter_seconds, 1e-9):,.0f} tok/s"
            for bucket, rate in sorted(self.buckets.items())
        ]
        fits = "fits" if self.disk_needed <= self.disk_free else "DOES NOT FIT"
        return [
            f"memory: the longest batch ({self.estimate.told()}) fits; the peak was {gigabytes(self.peak)}, "
            f"{gigabytes(self.headroom)} are left (estimated: {gigabytes(self.estimate.total)} for the batch)",
            "rates, longest batch of each bucket:",
            *rates,
            f"time: {self.step_seconds:.2f} s a step, {self.steps:,} steps and {self.checkpoints:,} checkpoints: "
            f"about {duration(self.total_seconds)}",
            f"checkpoint: {gigabytes(drafter + state)} written and verified in {self.checkpoint_seconds:.1f} s",
            f"disk: the whole run needs {gigabytes(self.disk_needed)} of {gigabytes(self.disk_free)} free: {fits}",
            f"evaluation: one request in {self.evaluation_seconds:.1f} s (untrained, tau {self.tau:.2f})",
        ]


def rehearse(
    document: ParamsFile, params: TrainParams, store: Path, target_path: Path | None, context: HostContext, run: str
) -> Rehearsal:
    """Rehearses a training.

    Args:
        document: its `params.json`, written or not.
        params: the same with placement.
        store: where its dataset and buckets are.
        context: device and threads.
        run: name of the run, for the lease.

    Raises:
        PermanentError: dataset or buckets do not exist yet (says how to make them), or it does not fit.
        LeaseHeld: somebody uses the GPU.
    """
    receipts = {name: receipt_path(stage_directory(store, name, document.upstream[name]), name) for name in NEEDED}
    for name, receipt in receipts.items():
        if not receipt.exists():
            raise PermanentError(
                f"the {name} that a rehearsal needs is not made yet",
                where=str(receipt),
                remedy=f"Run `snakemake {receipts['buckets']}` with the same --configfile, or `dflash run` for everything.",
            )
    record = lease.new_record(f"rehearsal of {document.key}", document.key, run)
    held = lease.acquire(lease.gpu_leases(context.device), record)
    try:
        with tempfile.TemporaryDirectory(prefix=".rehearsal-", dir=store) as scratch:
            return _rehearse(document, params, store.resolve(), Path(scratch), target_path, context)
    finally:
        held.release()


def _rehearse(
    document: ParamsFile,
    params: TrainParams,
    store: Path,
    scratch: Path,
    target_path: Path | None,
    context: HostContext,
) -> Rehearsal:
    directory = _scratch_training(document, params, store, scratch)
    inputs = load_inputs(document, scratch, target_path=target_path)
    prepare_process(params, context)
    schedule.merge_steps(directory, params.steps())
    free = preflight.disk_free(store)
    trainer = Trainer(params, inputs, directory, context, threading.Event())
    trainer.begin()
    meter = _Meter(context.device)
    with preflight.memory_explained("rehearsal"):
        buckets = {bucket: _rate(trainer, bucket) for bucket in bucket_shapes(trainer.plan, params)}
        update_seconds = _update(trainer)
    peak, headroom = meter.read()
    started = time.perf_counter()
    trainer.step = first = trainer.first_step + 1
    trainer.writing.append(first)
    trainer._save()
    trainer._collect(wait=True)
    checkpoint.verified_manifest(directory, first, document.key)
    checkpoint.load_state(directory, first, document.key)
    checkpoint_seconds = time.perf_counter() - started
    sizes = tuple(_size(directory / f"step_{first}" / name) for name in ("drafter", "state"))
    started = time.perf_counter()
    tau = _evaluate(trainer)
    evaluation_seconds = time.perf_counter() - started
    plan = trainer.plan
    steps = params.steps()
    seconds = sum(
        int(plan.batches[bucket]) * (rate.target_seconds + rate.drafter_seconds) for bucket, rate in buckets.items()
    )
    return Rehearsal(
        estimate=preflight.largest_need(params, trainer.config, plan, trainer.learner.target),
        peak=peak,
        headroom=headroom,
        buckets=buckets,
        step_seconds=plan.params.batches_per_step * seconds / plan.batches_per_epoch + update_seconds,
        steps=steps[-1] - params.first_step(),
        checkpoints=len(steps),
        checkpoint_seconds=checkpoint_seconds,
        checkpoint_bytes=(sizes[0], sizes[1]),
        # One state more than is kept exists while the next is written.
        disk_needed=len(steps) * sizes[0] + min(len(steps), params.keep_states + 1) * sizes[1],
        disk_free=free,
        evaluation_seconds=evaluation_seconds,
        tau=tau,
    )


def _scratch_training(document: ParamsFile, params: TrainParams, store: Path, scratch: Path) -> Path:
    """A store whose upstream results are links, with a folder for the training; what is written there goes with it."""
    for folder in store.iterdir():
        if folder.is_dir() and folder.name not in ("train", "environments") and not folder.name.startswith("."):
            (scratch / folder.name).symlink_to(folder)
    directory = stage_directory(scratch, "train", document.key)
    directory.mkdir(parents=True)
    if params.continue_from is not None:
        parent = params.continue_from.key
        stage_directory(scratch, "train", parent).symlink_to(stage_directory(store, "train", parent))
    document.write(directory / "params.json")
    return directory


def _rate(trainer: Trainer, bucket: int) -> BucketRate:
    """Times the largest batch that a bucket can give; the first pass warms up (and compiles), the second counts."""
    plan = trainer.plan
    rows = np.flatnonzero(plan.bucket_of == bucket)
    rows = rows[np.argsort(-plan.lengths[rows], kind="stable")][: int(plan.batch_sizes[bucket])]
    batch = Batch(f"rehearsal {bucket}", 0, 0, bucket, rows, plan.lengths[rows])
    for _ in range(2):
        sums = StepSums()
        for part in parts([batch], trainer.params.micro_batch):
            trainer.learner.add(part, trainer.samples, sums)
        _settle(trainer.context.device)
    return BucketRate(
        len(rows),
        int(batch.lengths.max()),
        int(batch.lengths.sum()),
        sums.target_seconds,
        sums.drafter_seconds + sums.data_seconds,
    )


def _update(trainer: Trainer) -> float:
    started = time.perf_counter()
    trainer.learner.update(trainer.learner.gradient_norm(1.0), 1)
    trainer.learner.clear_gradients()
    _settle(trainer.context.device)
    return time.perf_counter() - started


def _settle(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def _evaluate(trainer: Trainer) -> float:
    """One request from the shortest prompt: the target writes, the drafter drafts, acceptance is counted."""
    samples, target, drafter = trainer.samples, trainer.learner.target, trainer.learner.drafter
    row = int(np.argmin(samples.prompt_lengths))
    prompt = samples.tokens(row)[: int(samples.prompt_lengths[row])].tolist()
    limit = length_limit(REQUEST_TOKENS, trainer.params.target.max_position_embeddings, len(prompt))
    ((output, _),) = target.generate([prompt], limit)
    if len(output) < 2:
        return 1.0
    features = compute_features(target, prompt + output, list(trainer.config.target_layer_ids), "rehearsal")
    drafts = draft_continuation(
        drafter, Continuation(prompt, output, limit), features, target.embed, target.lm_head, top=1
    )
    walk = drafts.walk_chain()
    return float(np.mean(walk.lengths))


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class _Meter:
    """The most memory in use from now on."""

    def __init__(self, device: str) -> None:
        self._gpu = device if device.startswith("cuda") else None
        self._before = _resident()
        self._free = preflight.gpu_memory_free(device) if self._gpu else preflight.host_memory_free()
        if self._gpu:
            self._allocated = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)

    def read(self) -> tuple[int, int]:
        """(peak, what was left at that moment), in bytes."""
        if self._gpu:
            peak = torch.cuda.max_memory_allocated(self._gpu)
            return peak, self._free - (peak - self._allocated)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        return peak, self._free - max(0, peak - self._before)


def _resident() -> int:
    """Bytes of host memory that this process occupies."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
