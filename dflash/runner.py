"""Runs one stage the way every stage must run: params checked, inputs checked, outputs published whole, receipt last.

    lock the result -> read params.json and check its key -> check upstream receipts and bytes -> run in a private folder
    -> move the outputs in place -> receipt.json by rename

A stage that is killed at any point leaves no receipt, and the next attempt starts from a clean private folder. A permanent
failure leaves `failure.json`, so that retries of the same invocation stop at once with its cause. Costs one hash of each
output; inputs are hashed once and then remembered by inode, size and modification time.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dflash import bundle
from dflash.base.environment import collect, store_environment
from dflash.base.errors import CorruptError, DflashError, PermanentError
from dflash.base.files import DigestCache, append_line, fsync_directory, locked, sha256_file, write_json
from dflash.base.params import PLACEMENT, Params
from dflash.base.progress import Progress
from dflash.base.records import Failure, OutputFile, ParamsFile, Receipt, now
from dflash.base.stage import HostContext, Inputs, Outputs
from dflash.base.store import (
    STEPWISE_RECEIPTS,
    checkpoint_directory,
    load_inputs,
    read_params,
    receipt_path,
    shipped_artifact,
    shipped_directory,
    stage_directory,
    stays_there,
)
from dflash.ship.receipt import require_receipt
from dflash.stages import BY_NAME, Stage

INVOCATION = "DFLASH_INVOCATION"
CONTROLLER = "DFLASH_CONTROLLER"


class RepeatedFailure(PermanentError):
    """A retry of what has failed for good in this invocation; its cause was printed when it failed."""

    told = True


@dataclass(frozen=True)
class Job:
    """One stage to run. placement: values in no key, among them `files` (digest -> path) and `target_path`."""

    stage: Stage
    params_path: Path
    store: Path
    step: int | None = None
    placement: Mapping[str, Any] = field(default_factory=dict)
    run: str = ""

    @property
    def directory(self) -> Path:
        """The result's folder: where its params lie."""
        return self.params_path.parent

    @property
    def receipt(self) -> Path:
        """Where the receipt goes."""
        return receipt_path(self.directory, self.stage.name, self.step)

    @property
    def failure(self) -> Path:
        """Where a permanent failure leaves its cause."""
        return self.directory / (f"failure.step_{self.step}.json" if self.step is not None else "failure.json")

    @property
    def label(self) -> str:
        """How the stage is called in messages."""
        step = f" step {self.step}" if self.step is not None else ""
        return f"{self.placement.get('node', self.stage.name)}{step}"


def run_job(job: Job, elsewhere: Callable[[Job], Receipt] | None = None) -> Receipt:
    """Runs a stage and writes its receipt; returns at once when the receipt stands.

    Args:
        elsewhere: what runs it on another host and brings its receipt back, when it is not to run in this process.

    Raises:
        DflashError: of the kind that says whether a retry may help.
    """
    watch_controller()
    refuse_repeated_failure(job.failure)
    try:
        if job.stage.name == "train" and elsewhere is None:
            return _wait_for_checkpoint(job)
        with locked(_lock_path(job)):
            if job.receipt.exists():
                return Receipt.read(job.receipt)
            return _run_locked(job) if elsewhere is None else elsewhere(job)
    except DflashError as error:
        if error.kind != "transient":
            leave_failure(job.failure, job.stage.name, job.directory.name, error)
        raise


def _lock_path(job: Job) -> Path:
    return job.directory / (f".lock.step_{job.step}" if job.step is not None else ".lock")


def _run_locked(job: Job) -> Receipt:
    started = now()
    document = read_params(job.directory)
    params = stage_params(job.stage, document, job.placement)
    inputs = _inputs(job, document)
    verify_inputs(inputs, job.placement.get("elsewhere", ()))
    work = job.directory / (f".work.step_{job.step}" if job.step is not None else ".work")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    context = host_context(job, _begin_attempt(job))
    outputs = job.stage.run()(params, inputs, work, context)
    if not outputs.counts.balanced():
        raise PermanentError(
            f"{outputs.counts.total} inputs, but ok {outputs.counts.ok} + error {outputs.counts.error} + skipped "
            f"{outputs.counts.skipped} do not add up to them",
            where=job.label,
        )
    files = _publish(work, job.directory, outputs)
    receipt = Receipt(
        stage=job.stage.name,
        key=document.key,
        step=job.step,
        outputs=files,
        inputs=input_digests(inputs),
        host=context.host,
        started=started,
        finished=now(),
        attempt=context.attempt,
        environment=store_environment(job.store, collect(outputs.kernels)),
        counts=outputs.counts,
        results=outputs.results,
    )
    receipt.write(job.receipt)
    job.failure.unlink(missing_ok=True)
    return receipt


def beside_copies(job: Job, document: ParamsFile) -> dict[str, bytes]:
    """What must lie beside the shipped inputs of a job, by path in a store: their receipts, and the probe under which a
    shipped checkpoint was trained. Read where the controller keeps them."""
    found = {}
    for name in job.placement.get("shipped", []):
        stage, key = name.split("/", 1)[0], document.upstream[name]
        directory, folder = stage_directory(job.store, stage, key), shipped_directory(Path(), stage, key)
        step = job.step if stage in STEPWISE_RECEIPTS else None
        found[str(receipt_path(folder, stage, step))] = receipt_path(directory, stage, step).read_bytes()
        probe = directory / "probe.safetensors"
        if stage == "train" and probe.exists():
            found[str(folder / probe.name)] = probe.read_bytes()
    return found


def stage_params(stage: Stage, document: ParamsFile, placement: Mapping[str, Any]) -> Params:
    """The params model of a stage from its `params.json` and the placement of this host.

    Raises:
        CorruptError: the file's values do not fit the model of this code.
    """
    model = stage.params_model()
    placed = {name: placement[name] for name in placement_fields(stage) if name in placement}
    try:
        return model.model_validate({**document.params, **placed})
    except ValidationError as error:
        first = error.errors()[0]
        raise CorruptError(
            f"params do not fit this version of {stage.name}: {'.'.join(map(str, first['loc']))}: {first['msg']}",
            where=f"{stage.name}/{document.key}/params.json",
            remedy="Plan again with `dflash run`.",
        ) from error


def _inputs(job: Job, document: ParamsFile) -> Inputs:
    target = job.placement.get("target_path")
    shipped = job.placement.get("shipped", [])
    for name in shipped:
        stage, key = name.split("/", 1)[0], document.upstream[name]
        step = job.step if stage in STEPWISE_RECEIPTS else None
        if stage not in STEPWISE_RECEIPTS or step is not None:
            require_receipt(shipped_artifact(job.store, stage, key, step))
    return load_inputs(
        document,
        job.store,
        files={digest: Path(path) for digest, path in job.placement.get("files", {}).items()},
        target_path=Path(target) if target else None,
        step=job.step,
        shipped=shipped,
    )


def verify_inputs(inputs: Inputs, elsewhere: Collection[str] = ()) -> None:
    """Checks that upstream outputs and external files are what their digests say.

    Args:
        elsewhere: inputs of a report that were made on other hosts: what was left there is not missing.

    Raises:
        CorruptError: a file is missing or has other bytes; names it.
    """
    cache = DigestCache()
    for name, upstream in inputs.upstream.items():
        for output in upstream.receipt.outputs if upstream.receipt else []:
            path = upstream.directory / output.path
            if name in elsewhere and stays_there(output) and not path.exists():
                continue
            if not path.exists() or path.stat().st_size != output.size or cache.sha256(path) != output.sha256:
                raise CorruptError(
                    "an input is missing or its bytes are not those its receipt records",
                    where=str(path),
                    remedy="Run `dflash run`, which finds and rebuilds damaged results.",
                )
    for digest, path in inputs.files.items():
        if not path.exists() or cache.sha256(path) != digest:
            raise CorruptError(
                "the file is missing or has changed since the plan was made",
                where=str(path),
                remedy="Run `dflash run` again.",
            )
    cache.save()


def input_digests(inputs: Inputs) -> dict[str, str]:
    """Content digests of the upstream receipts, as the receipt records them."""
    return {name: item.receipt.content_digest() for name, item in inputs.upstream.items() if item.receipt is not None}


def changed_inputs(job: Job, receipt: Receipt, shipped: Collection[str] = ()) -> list[str]:
    """The inputs that a result was made from and that have other content now, by the receipts that stand in the job's store.

    Args:
        shipped: inputs whose receipts lie beside their copies.
    """
    changed = []
    for name, key in read_params(job.directory).upstream.items():
        stage = name.split("/", 1)[0]
        if name not in receipt.inputs or (stage in STEPWISE_RECEIPTS and job.step is None):
            continue
        folder = (shipped_directory if name in shipped else stage_directory)(job.store, stage, key)
        standing = receipt_path(folder, stage, job.step if stage in STEPWISE_RECEIPTS else None)
        if standing.exists() and Receipt.read(standing).content_digest() != receipt.inputs[name]:
            changed.append(name)
    return changed


def host_context(job: Job, attempt: int = 1) -> HostContext:
    """This host, as stages see it."""
    placement = {**job.placement, "store": str(job.store), "run": job.run, "scratch": str(job.directory / "partial")}
    return HostContext(
        host=str(job.placement.get("host", "local")),
        device=str(job.placement.get("device", "cpu")),
        threads=int(job.placement.get("threads", 1)),
        attempt=attempt,
        placement=placement,
        progress=Progress(job.label),
    )


def _begin_attempt(job: Job) -> int:
    """Counts this attempt, durably, and returns its number from 1; killed attempts count too. Call under the job's lock."""
    path = job.directory / (f".attempts.step_{job.step}" if job.step is not None else ".attempts")
    append_line(path, now())
    return len(path.read_text().splitlines())


def _publish(work: Path, directory: Path, outputs: Outputs) -> list[OutputFile]:
    """Moves outputs from the private folder into the result's folder, each synced and digested before it moves."""
    listed = []
    for name in outputs.files:
        source, destination = work / name, directory / name
        with source.open("rb") as stream:
            os.fsync(stream.fileno())
        listed.append(_output(work, name))
        destination.parent.mkdir(parents=True, exist_ok=True)
        source.replace(destination)
        fsync_directory(destination.parent)
    shutil.rmtree(work)
    return listed


def _wait_for_checkpoint(job: Job) -> Receipt:
    """The `train` stage seen from a rule: make sure the trainer lives, wait for the step, write its receipt.

    The receipt lists the exported drafter, not `manifest.json`, which holds times: equal trainings have equal receipts.
    """
    from dflash.train.launch import ensure_alive, on_scheduler, train_segment, wait_for_step

    if job.step is None:
        raise PermanentError("train has one receipt a step; no step was given", where=job.label)
    if job.receipt.exists():
        return Receipt.read(job.receipt)
    started = now()
    document = read_params(job.directory)
    stage_params(job.stage, document, job.placement)
    inputs = _inputs(replace(job, step=None), document)
    verify_inputs(inputs)
    context = host_context(job)
    placement = job.directory / "placement.json"
    write_json(
        placement,
        {
            "host": context.host,
            "device": context.device,
            "threads": context.threads,
            "target_path": job.placement.get("target_path"),
            "accept_env": str(job.placement.get("accept_env", "")),
            "shipped": list(job.placement.get("shipped", [])),
            "values": {name: job.placement[name] for name in placement_fields(job.stage) if name in job.placement},
        },
    )
    steps = [int(step) for step in job.placement.get("steps", [job.step])]
    if on_scheduler():
        train_segment(job.directory, job.store, placement, job.run, job.step, progress=context.progress)
    else:
        ensure_alive(job.directory, job.store, placement, job.run, steps, progress=context.progress)
    manifest = wait_for_step(job.directory, job.step, progress=context.progress)
    folder = checkpoint_directory(Path(), job.step) / "drafter"
    receipt = Receipt(
        stage=job.stage.name,
        key=document.key,
        step=job.step,
        outputs=[_output(job.directory, str(folder / file.path)) for file in manifest.drafter.files],
        inputs=input_digests(inputs),
        host=context.host,
        started=started,
        finished=now(),
        attempt=len(manifest.lineage.attempts),
        environment=store_environment(job.store, manifest.environment),
    )
    receipt.write(job.receipt)
    return receipt


def _say_how_far(job: Job) -> None:
    """How many of the scheduled checkpoints have been trained, or evaluated."""
    steps = job.placement.get("steps")
    done = "trained" if job.stage.name == "train" else "evaluated"
    if job.step is not None and steps:
        count = sum(receipt_path(job.directory, job.stage.name, step).exists() for step in steps)
        Progress(job.label).say(f"{count} of {len(steps)} checkpoints {done}")


def placement_fields(stage: Stage) -> list[str]:
    """The names of a stage's params that enter no key."""
    model = stage.params_model()
    return [name for name in model.model_fields if model.role_of(name) == PLACEMENT]


def _output(directory: Path, name: str) -> OutputFile:
    path = directory / name
    return OutputFile(path=name, size=path.stat().st_size, sha256=sha256_file(path))


def refuse_repeated_failure(path: Path) -> None:
    """Stops at once when the failure at `path` was left in this invocation.

    Raises:
        RepeatedFailure: with its cause.
    """
    invocation = os.environ.get(INVOCATION)
    if invocation is None or not path.exists():
        return
    failure = Failure.read(path)
    if failure.invocation == invocation:
        raise RepeatedFailure(failure.message)


def leave_failure(path: Path, stage: str, key: str, error: DflashError) -> None:
    """Leaves the cause of a failure for retries of this invocation and for who explains it."""
    failure = Failure(
        stage=stage,
        key=key,
        kind=error.kind,
        message=error.message(),
        at=now(),
        invocation=os.environ.get(INVOCATION, ""),
    )
    with contextlib.suppress(PermanentError):
        failure.write(path)


def process_start(pid: int) -> str | None:
    """Start time of a process in clock ticks since boot, which with its pid names it for good; None when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def controller_identity() -> str:
    """This process as `pid:start`, for children to watch."""
    return f"{os.getpid()}:{process_start(os.getpid())}"


def watch_controller(poll: float = 0.5) -> None:
    """Ends this process when the Snakemake that started it is gone (a `kill -9` leaves jobs alive and writing).

    Nothing half-made can be taken for a result: receipts come last.
    """
    pid, _, start = os.environ.get(CONTROLLER, "").partition(":")
    if not start:
        return

    def watch() -> None:
        while process_start(int(pid)) == start:
            time.sleep(poll)
        print("the workflow that started this job is gone; stopping", file=sys.stderr, flush=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="controller-watch").start()


@contextlib.contextmanager
def quiet_libraries(*, offline: bool = True) -> Iterator[None]:
    """Silences warnings that mean nothing to a user of the workflow (missing optional kernels on a CPU, progress bars).

    Args:
        offline: keep libraries from asking the Hugging Face hub; only a source of prompts may be there.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if offline:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        yield


def main_stage(name: str, params: Path, store: Path, step: int | None, placement: Mapping[str, Any], run: str) -> None:
    """What `dflash stage` does. `params` lies in the result's folder."""
    if name not in BY_NAME:
        raise PermanentError(f"there is no stage {name!r}", remedy=f"Stages: {', '.join(BY_NAME)}.")
    with quiet_libraries(offline=name != "prompts"):
        job = Job(BY_NAME[name], params, store, step, placement, run)
        if placement.get("hosts"):
            from dflash.remote import run_there

            run_job(job, run_there)
        else:
            if placement.get("shipped"):
                bundle.place(beside_copies(job, read_params(job.directory)), job.store)
            run_job(job)
        _say_how_far(job)
