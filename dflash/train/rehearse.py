"""The part of a rehearsal that needs the GPU host: the ranks of a training, on its longest batches, in a throwaway store.

    <store>/.rehearsal-<id>/    a store of its own on the same disk: what comes before training by link, and a training folder

The launcher that `dflash run` uses starts the ranks that it would start, on the GPUs and under the leases that they would have.
Only the steps differ: each is made of the longest batch of one bucket (`LongestBatches`), so that every rank meets the worst
that can come to it; every bucket has `PASSES` steps, of which the last counts. After the last step a checkpoint is written as
ever, verified, and its state loaded. Nothing but dataset and buckets need exist. `clear` takes all of it away again.

Costs the start of a training, `PASSES` steps a bucket, and one checkpoint on the disk. This process needs no torch.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dflash.base.canonical import short_digest
from dflash.base.errors import ConfigError, CorruptError, DflashError, PermanentError, TransientError
from dflash.base.files import read_json, write_json
from dflash.base.progress import Progress
from dflash.base.records import CheckpointManifest, Failure, MetricsLine, ParamsFile
from dflash.base.store import (
    checkpoint_directory,
    load_inputs,
    read_params,
    shipped_artifact,
    shipped_directory,
    stage_directory,
)
from dflash.data.batches import Batch, BatchPlan, Samples, load_train_samples
from dflash.data.buckets_params import BucketsParams
from dflash.hosts import lease, machine
from dflash.plan.sweep import REHEARSAL
from dflash.train import launch, schedule
from dflash.train.attempts import Attempt, Placement, attempt_path
from dflash.train.child import resolved_params
from dflash.train.train_params import Topology, TrainParams

PREFIX = REHEARSAL
STALE = 3600.0
"""Seconds after which a throwaway store that nobody holds was left behind by a kill."""
PASSES = 2
"""Steps of each bucket: the first warms up (allocator, kernels, compilation), the second is measured."""
REQUESTS = 2
"""Prompts that are handed on to be answered in the rehearsed evaluation: the shortest."""
POLL = 0.1
RAISED = re.compile(r"[A-Za-z_][\w.]*: \S|[A-Za-z_][\w.]*(Error|Exception)$")
"""The line of a traceback that names what was raised: it stands at the margin."""
CLEAR_TIMEOUT = 30.0
KINDS: dict[str, type[DflashError]] = {"config": ConfigError, "corrupt": CorruptError, "transient": TransientError}


# ---------------------------------------------------------------- the batches


class LongestBatches(BatchPlan):
    """The samples and buckets of a plan, in steps that hold nothing but the longest batch of one bucket, buckets with the
    longest samples first. `first_step`: index of the first step that is rehearsed."""

    first_step = 0

    def order(self) -> list[int]:
        """The buckets that have samples, in the order in which they come."""
        return sorted(np.flatnonzero(self.samples).tolist(), key=lambda bucket: -int(self.longest[bucket]))

    def longest_batch(self, bucket: int) -> Batch:
        """The most tokens that a batch of a bucket can hold: its longest samples, as many as go into a batch."""
        rows = np.flatnonzero(self.bucket_of == bucket)
        rows = rows[np.argsort(-self.lengths[rows], kind="stable")][: int(self.batch_sizes[bucket])]
        return Batch(short_digest({"longest": bucket}), 0, 0, bucket, rows, self.lengths[rows])

    def step(self, step_index: int) -> list[Batch]:
        """`batches_per_step` times the longest batch of the bucket whose turn it is."""
        order = self.order()
        bucket = order[min((step_index - self.first_step) // PASSES, len(order) - 1)]
        longest = self.longest_batch(bucket)
        names = [short_digest([step_index, place]) for place in range(self.params.batches_per_step)]
        return [replace(longest, batch_id=name) for name in names]  # a credit names its batch


def longest_batches(
    samples: Samples, dataset_key: str, batching: Mapping[str, Any], params: TrainParams
) -> LongestBatches:
    """The plan of a rehearsal, the same on every rank."""
    plan = LongestBatches(samples.lengths, samples.ids, BucketsParams.model_validate(batching), dataset_key)
    plan.first_step = params.first_step()
    return plan


def bucket_facts(plan: LongestBatches) -> list[dict[str, Any]]:
    """By bucket in the order of the plan: its longest batch, and its share of all batches."""
    found = []
    for bucket in plan.order():
        batch = plan.longest_batch(bucket)
        found.append(
            {
                "bucket": bucket,
                "samples": len(batch.rows),
                "length": int(batch.lengths.max()),
                "tokens": int(batch.lengths.sum()),
                "share": int(plan.batches[bucket]) / plan.batches_per_epoch,
            }
        )
    return found


# ---------------------------------------------------------------- the training


def rehearse_training(store: Path, name: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Rehearses a training in `<store>/<name>`, where the `params.json` of everything before it lie already.

    Args:
        request: `key` of the training, `placement` (see `attempts.Placement`), `run` that asks.

    Returns:
        `buckets` (see `bucket_facts`), `lines` (the metrics of every step), `ranks` (see `rehearsed.py`), `topology`,
        `batches_per_step`, `tokens_a_batch` (the mean over the whole plan), `mean_length`, `start_seconds`, `checkpoint` (step,
        seconds, bytes by part, `artifact` of the drafter), `prompts`, `existing` checkpoints of the real training, and
        `disk_free` bytes before it.

    Raises:
        PermanentError: somebody trains there; it does not fit; whatever else stops a training, in its own words.
        ConfigError, CorruptError, TransientError: as a training's.
    """
    scratch, key = store / name, str(request["key"])
    real = stage_directory(store, "train", key)
    held = lease.holder(schedule.lease_path(real))
    if held is not None:
        raise lease.LeaseHeld(held, schedule.lease_path(real))
    directory = stage_directory(scratch, "train", key)
    placement = Placement.model_validate({**request["placement"], "rehearsal": True})
    document = read_params(directory)
    link_upstream(store, scratch, document, placement.shipped)
    params = resolved_params(document.params, placement.values)
    refuse_missing_gpus(placement.device, params.topology)
    inputs = load_inputs(document, scratch, shipped=placement.shipped)
    dataset = inputs.one("dataset")
    samples = load_train_samples(dataset.directory)
    plan = longest_batches(samples, dataset.params.key, inputs.one("buckets").params.params, params)
    first = params.first_step()
    last = first + PASSES * len(plan.order())
    found: dict[str, Any] = {
        "buckets": bucket_facts(plan),
        "topology": params.topology.model_dump(),
        "batches_per_step": plan.params.batches_per_step,
        "tokens_a_batch": int(plan.lengths.sum()) / plan.batches_per_epoch,
        "mean_length": float(plan.lengths.mean()),
        "prompts": shortest_prompts(samples),
        "existing": schedule.existing_steps(real),
        "disk_free": machine.space(store)["free_bytes"],
    }
    schedule.merge_steps(directory, [last])
    write_json(scratch / "placement.json", placement.model_dump(mode="json"))
    began = time.time()
    with cleared_when_killed(store, name):
        run_launcher(directory, scratch, str(request["run"]), last - first)
    lines = read_lines(directory)
    found["lines"] = [line.model_dump(mode="json") for line in lines]
    found["start_seconds"] = max(0.0, _seconds(lines[0].time) - lines[0].seconds - began)
    found["ranks"] = [read_json(path) for path in sorted(directory.glob("rank_*.json"))]
    found["checkpoint"] = _checkpoint(directory, last)
    return found


def link_upstream(store: Path, scratch: Path, document: ParamsFile, shipped: Sequence[str]) -> None:
    """Lets what a training reads lie in the throwaway store: results of this host by link, copies from elsewhere by link
    unless they were shipped into it, and the training that it continues."""
    for input_name, key in document.upstream.items():
        stage = input_name.split("/", 1)[0]
        if input_name in shipped:
            copy = shipped_artifact(scratch, stage, key)
            if not copy.exists():
                shipped_directory(scratch, stage, key).mkdir(parents=True, exist_ok=True)
                copy.symlink_to(shipped_artifact(store, stage, key).absolute())
            continue
        folder = stage_directory(scratch, stage, key)
        shutil.rmtree(folder, ignore_errors=True)  # it holds a params.json and nothing else
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.symlink_to(stage_directory(store, stage, key).absolute())
    parent = document.params.get("continue_from")
    if parent is not None:
        stage_directory(scratch, "train", parent["key"]).symlink_to(
            stage_directory(store, "train", parent["key"]).absolute()
        )


def refuse_missing_gpus(device: str, topology: Topology) -> None:
    """Refuses a topology of more ranks than the host has GPUs, where that is known. On a CPU ranks share what there is.

    Raises:
        PermanentError: names both numbers and the knob.
    """
    if not device.startswith("cuda"):
        return
    ranks = 1 if topology.colocate else topology.targets + topology.drafters
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    known = len(visible or machine.gpus())
    there = known - int(device.partition(":")[2] or 0)
    if known and ranks > there:
        raise PermanentError(
            f"{ranks} ranks need a GPU each, {max(0, there)} are there from `{device}` on",
            where="train.topology",
            remedy="Lower train.topology.targets or .drafters, or set colocate: true (one GPU); no key changes.",
        )


def shortest_prompts(samples: Samples) -> list[list[int]]:
    """The prompts of the samples that have the shortest ones."""
    rows = np.argsort(samples.prompt_lengths, kind="stable")[:REQUESTS].tolist()
    return [samples.tokens(row)[: int(samples.prompt_lengths[row])].tolist() for row in rows]


def run_launcher(directory: Path, store: Path, run: str, steps: int) -> None:
    """Runs the launcher to its end; it does not outlive this call, whatever ends it.

    Raises:
        DflashError: what stopped the training.
    """
    progress = Progress("rehearsal")
    progress.say("the ranks are starting")
    launcher = launch.start_foreground(directory, store, store / "placement.json", f"{run} (rehearsal)")
    seen = 0
    try:
        while launcher.poll() is None:
            done = len(read_lines(directory))
            if done > seen:
                seen = done
                progress.update(done, steps, "steps")
            time.sleep(POLL)
    finally:
        end(launcher)
    if launcher.returncode:
        raise cause(directory, launcher.returncode)


def end(launcher: subprocess.Popen[bytes]) -> None:
    """Ends a launcher at once; its ranks end with it."""
    if launcher.poll() is None:
        launcher.kill()
    launcher.wait()


def cause(directory: Path, status: int) -> DflashError:
    """Why a launcher has ended with a status other than 0, in the words of whoever knows best."""
    log = last_words(launch.log_tail(directory, 100))
    if status == launch.DEVICE_HELD:
        return PermanentError(log)
    path = directory / "failure.json"
    if path.exists():
        failure = Failure.read(path)
        return KINDS.get(failure.kind, PermanentError)(failure.message)
    record = attempt_path(directory, 1)
    attempt = Attempt.read(record) if record.exists() else None
    killed = attempt is not None and attempt.signal == "SIGKILL"
    how = f"a rank was killed by {attempt.signal}" if attempt is not None and attempt.signal else f"status {status}"
    said = attempt.cause if attempt is not None and attempt.cause else f"it ended with {how}; its log ends: {log}"
    remedy = "Was it the kernel, for want of host memory? Lower train.micro_batch, or use fewer ranks on this host."
    return PermanentError(said, remedy=remedy if killed else "")


def last_words(log: str) -> str:
    """Of a log that ends with a traceback the line that says what went wrong, though hints come below it; else the last line
    that is not blank."""
    lines = [line.rstrip() for line in log.splitlines() if line.strip()]
    _, found, tail = log.rpartition("Traceback (most recent call last):")
    causes = [line for line in tail.splitlines() if RAISED.match(line)] if found else []
    return causes[0].rstrip() if causes else (lines or ["it is empty"])[-1]


def read_lines(directory: Path) -> list[MetricsLine]:
    """The whole lines of `metrics.jsonl`, none when there is none."""
    try:
        text = (directory / "metrics.jsonl").read_text()
    except OSError:
        return []
    return [MetricsLine.model_validate_json(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _seconds(moment: str) -> float:
    """A record's time as seconds of the epoch."""
    return datetime.datetime.fromisoformat(moment).timestamp()


def _checkpoint(directory: Path, step: int) -> dict[str, Any]:
    """What a checkpoint is: its sizes, and the seconds between the last step's end and its being whole on the disk."""
    folder = checkpoint_directory(directory, step)
    path = folder / "manifest.json"
    manifest = CheckpointManifest.read(path)
    return {
        "step": step,
        "seconds": max(0.0, path.stat().st_mtime - (directory / "metrics.jsonl").stat().st_mtime),
        "bytes": {name: _size(folder / name) for name in ("drafter", "state")},
        "manifest_bytes": path.stat().st_size,
        "artifact": manifest.drafter.model_dump(mode="json"),
    }


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# ---------------------------------------------------------------- nothing stays


def is_scratch(name: str) -> bool:
    """Whether a name is that of a throwaway store, and of nothing else."""
    return name.startswith(PREFIX) and len(name) > len(PREFIX) and "/" not in name


def clear(store: Path, name: str) -> None:
    """Takes a throwaway store away, once nobody works in it; whoever goes on working there is ended.

    Raises:
        PermanentError: it is not the name of one, or it cannot be deleted. TransientError: a process there does not end.
    """
    if not is_scratch(name):
        raise PermanentError(f"`{name}` is no throwaway store", where=str(store))
    scratch = store / name
    began = time.monotonic()
    while (held := next(_holders(scratch), None)) is not None:
        if launch.is_launcher(held):
            with contextlib.suppress(ProcessLookupError):
                os.kill(held.pid, signal.SIGKILL)
        if time.monotonic() - began > CLEAR_TIMEOUT:
            raise TransientError(f"a process of the rehearsal (pid {held.pid}) does not end", where=str(scratch))
        time.sleep(POLL)
    shutil.rmtree(scratch, ignore_errors=True)
    if scratch.exists():
        raise PermanentError("it cannot be deleted", where=str(scratch), remedy="Delete it by hand.")


@contextlib.contextmanager
def cleared_when_killed(store: Path, name: str) -> Iterator[None]:
    """While this lasts a process outside of our session waits for our death, however sudden, and takes the throwaway store away
    after it, with whoever works in it. An error is no death: whoever hears of it calls `clear`."""
    argv = [sys.executable, "-m", "dflash.train.rehearse", str(store.absolute()), name]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    waiter = subprocess.Popen(
        argv, stdin=subprocess.PIPE, env=launch.own_environment(), start_new_session=True, **quiet
    )
    try:
        yield
    finally:
        waiter.kill()
        waiter.communicate()


def sweep(store: Path) -> None:
    """Takes away what rehearsals that were killed have left: throwaway stores that are old and that nobody holds. Every part of a
    rehearsal does it, on whichever host: a kill leaves something on each."""
    for scratch in store.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - scratch.stat().st_mtime > STALE and next(_holders(scratch), None) is None:
                shutil.rmtree(scratch, ignore_errors=True)


def _holders(scratch: Path) -> Iterator[Any]:
    """Who holds a training in a throwaway store."""
    for folder in scratch.glob("train/*"):
        if not folder.is_symlink() and (held := lease.holder(schedule.lease_path(folder))) is not None:
            yield held


def main() -> None:
    """What `cleared_when_killed` starts: waits for the end of its standard input, then clears."""
    sys.stdin.buffer.read()
    clear(Path(sys.argv[1]), sys.argv[2])


if __name__ == "__main__":
    main()
