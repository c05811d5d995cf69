"""The far end: what runs on another host when the controller asks for a stage there.

    PYTHONPATH=<workdir>/code/<digest> python -m dflash.there WORKDIR

One request comes in on stdin (`bundle.py`): what to do, the small files that it needs, who asks. One answer goes out on
stdout: the outcome and the small files that come back. stderr is the stage's own. Stdin stays open meanwhile and carries a
byte every few seconds: when it ends or falls silent the controller is gone, and so is this process with all its children. A
trainer has left for a session of its own and stays.

Costs what the stage costs; small files are held in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash import bundle
from dflash.base.errors import CorruptError, DflashError, PermanentError
from dflash.base.files import DigestCache, sha256_file, write_atomically
from dflash.base.records import Receipt
from dflash.base.store import (
    checkpoint_directory,
    read_params,
    receipt_path,
    shipped_directory,
    stage_directory,
    stays_there,
)
from dflash.plan import sweep
from dflash.plan.verify import retire_checkpoints
from dflash.runner import Job, changed_inputs, quiet_libraries, run_job
from dflash.ship.receipt import content_root, require_receipt
from dflash.stages import BY_NAME
from dflash.train import launch, moving, schedule

STORE = Path("results/store")
"""The store of a host, in its workdir."""
ASKERS = Path("results/askers")
"""Who has had stages run here: a file each, so that nobody deletes what another needs."""
SILENCE = 60.0
"""Seconds without a byte after which the controller counts as gone."""
TRAINING_FILES = (
    "metrics.jsonl",
    "placement.json",
    "schedule.json",
    "resolved.json",
    "probe.safetensors",
)
"""What reports and inspections read of a training beside its checkpoints."""


def watch_caller(answered: threading.Event, silence: float = SILENCE) -> None:
    """Ends this process group when stdin ends or is silent for `silence` seconds before the answer is out."""
    if os.getpgrp() != os.getpid():
        os.setpgrp()

    def watch() -> None:
        while True:
            ready, _, _ = select.select([0], [], [], silence)
            if not ready or not os.read(0, 4096):
                break
        if answered.is_set():
            return
        print("the controller is gone or cannot be heard; stopping", file=sys.stderr, flush=True)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="caller-watch").start()


# ---------------------------------------------------------------- what can be asked


def do_stage(root: Path, request: dict[str, Any]) -> tuple[dict[str, Any], list[Path]]:
    """Runs a stage; the answer holds nothing, its files everything that the controller keeps of the result."""
    job = _job(root, request)
    _note_asker(root, str(request.get("asker") or ""))
    try:
        _recheck(job)
        if job.stage.name == "train":
            _retire_unfit(job)
        with quiet_libraries():
            receipt = run_job(job)
    except DflashError as error:
        if job.stage.name == "train":
            error.files = _training_files(job)  # type: ignore[attr-defined]
        raise
    return {}, _what_comes_back(job, receipt)


def _job(root: Path, request: dict[str, Any]) -> Job:
    store = root / STORE
    placement = dict(request["placement"])
    placement["files"] = {digest: str(root / path) for digest, path in placement.get("files", {}).items()}
    if placement.get("target_path"):
        placement["target_path"] = str(root / placement["target_path"])
    stage = BY_NAME[request["stage"]]
    directory = stage_directory(store, stage.name, request["key"])
    return Job(stage, directory / "params.json", store, request["step"], placement, request["run"])


def _recheck(job: Job) -> None:
    """Retires a result that stands here although its bytes are gone or its inputs are others now: the controller asks because
    it has none.

    Raises:
        PermanentError: the checkpoints of a training that is at work would have to be moved away.
    """
    if not job.receipt.exists():
        return
    receipt = Receipt.read(job.receipt)
    faults = [
        why for output in receipt.outputs if (why := _fault(job.directory / output.path, output.size, output.sha256))
    ]
    shipped = job.placement.get("shipped", ())
    faults += [f"its input {name} has other content now" for name in changed_inputs(job, receipt, shipped)]
    if not faults:
        return
    if job.stage.name == "train":
        _refuse_at_work(job, faults[0])
    mark = f"retired-{time.time_ns()}"
    job.receipt.replace(job.receipt.with_name(f"{job.receipt.name}.{mark}"))
    if job.stage.name == "train" and job.step is not None:
        retire_checkpoints(job.directory, job.step, mark)


def _refuse_at_work(job: Job, why: str) -> None:
    if launch.lease.holder(schedule.lease_path(job.directory)) is not None:
        raise PermanentError(
            f"its checkpoints must be made again ({why}), but its trainer is at work",
            where=job.label,
            remedy="End it with `dflash stop`, then run again with `--resume`.",
        )


def _retire_unfit(job: Job) -> None:
    """Retires checkpoints without a receipt that cannot lead to the step that is asked for: made from other inputs than those
    that are here now, or later than a step that stayed on an earlier host and is no longer whole there.

    Raises:
        PermanentError: its trainer is at work.
    """
    if job.receipt.exists() or job.step is None or not job.directory.is_dir():
        return
    inputs = _input_digests(job)
    if not moving.fits(job.directory, inputs):
        _refuse_at_work(job, "its inputs have other content now")
        moving.retire_unfit(job.directory, inputs)
    if moving.left_behind(job.directory, job.step):
        _refuse_at_work(job, f"step {job.step} is no longer whole where it was made")
        retire_checkpoints(job.directory, job.step, f"retired-{time.time_ns()}")


def _input_digests(job: Job) -> dict[str, str]:
    """`moving.input_digest` of the inputs that are here."""
    found = {}
    for name, key in read_params(job.directory).upstream.items():
        folder = shipped_directory if name in job.placement.get("shipped", ()) else stage_directory
        path = receipt_path(folder(job.store, name, key), name)
        if path.exists():
            found[name] = moving.input_digest(Receipt.read(path))
    return found


def _fault(path: Path, size: int, sha256: str, cache: DigestCache | None = None) -> str:
    if not path.is_file():
        return f"{path} is missing"
    if path.stat().st_size != size:
        return f"{path} has {path.stat().st_size} bytes, its receipt says {size}"
    found = cache.sha256(path) if cache is not None else sha256_file(path)
    return "" if found == sha256 else f"{path} has other bytes than its receipt says"


def _what_comes_back(job: Job, receipt: Receipt) -> list[Path]:
    paths = [job.directory / output.path for output in receipt.outputs if not stays_there(output)]
    paths.append(job.store / "environments" / f"{receipt.environment}.json")
    if job.stage.name == "train" and job.step is not None:
        paths += [checkpoint_directory(job.directory, job.step) / "manifest.json", *_training_files(job)]
    return [*paths, job.receipt]


def _training_files(job: Job) -> list[Path]:
    attempts = [path for path in (job.directory / "attempts").glob("*.json") if path.stem.isdigit()]
    return [*(job.directory / name for name in TRAINING_FILES), *sorted(attempts, key=lambda path: int(path.stem))]


def do_check(root: Path, request: dict[str, Any]) -> tuple[dict[str, Any], list[Path]]:
    """Which files are not what they should be, and which copies; see `find_faults`."""
    return {"faults": find_faults(root, request["check"], request["shipped"], deep=bool(request["deep"]))}, []


def find_faults(root: Path, files: list[list[Any]], shipped: list[str], *, deep: bool) -> dict[str, str]:
    """Path -> what is wrong, for those with which something is.

    Args:
        files: path relative to `root`, size, sha256 of each. shipped: paths of what was shipped here, which has receipts.
        deep: read every byte; else digests are remembered by inode, size and modification time.
    """
    cache = DigestCache()
    faults = {}
    for path, size, sha256 in files:
        why = _fault(root / path, size, sha256, None if deep else cache)
        if why:
            faults[path] = why
    for path in shipped:
        try:
            receipt = require_receipt(root / path, cache)
            if deep and content_root(root / path) != receipt.root:
                faults[path] = f"{path} has other bytes than were shipped"
        except CorruptError as error:
            faults[path] = error.message()
    cache.save()
    return faults


def _note_asker(root: Path, asker: str) -> None:
    path = root / ASKERS / hashlib.sha256(asker.encode()).hexdigest()[:12]
    if asker and not path.exists():
        write_atomically(path, f"{asker}\n")


def do_gc(root: Path, request: dict[str, Any]) -> tuple[dict[str, Any], list[Path]]:
    """Lists what nothing needs here; deletes what was listed before, as far as it is the same and still not needed.

    The request: `needs` (`sweep.Needs`), `delete` (None, or path and mark of what was listed).
    """
    store = root / STORE
    live = sweep.live_trainings(store)
    needs = sweep.Needs.from_json(request["needs"])
    needed, targets = sweep.closure(store, needs.results | sweep.at_work(store))
    needs.results |= needed
    needs.targets |= targets
    found = sweep.in_workdir(root, needs, Path(__file__).resolve().parents[1].name)
    answer: dict[str, Any] = {
        "garbage": [[str(item.path.relative_to(root)), item.size, item.files, item.why, item.mark] for item in found],
        "live": sorted(live),
        "askers": sorted(path.read_text().strip() for path in (root / ASKERS).glob("[0-9a-f]*")),
    }
    if request.get("delete") is not None:
        listed = {str(path): str(mark) for path, mark in request["delete"]}
        same = {str(item.path.relative_to(root)): item for item in found}
        gone, kept = sweep.remove(replace(same[path], mark=mark) for path, mark in listed.items() if path in same)
        answer["gone"] = [str(item.path.relative_to(root)) for item in gone]
        answer["kept"] = [[str(path.relative_to(root)), why] for path, why in kept]
        answer["kept"] += [[path, "it is needed now"] for path in listed if path not in same and (root / path).exists()]
    return answer, []


def do_view(root: Path, request: dict[str, Any]) -> tuple[dict[str, Any], list[Path]]:
    """Makes a folder of hard links to the outputs of a result, to be shipped; says where."""
    directory = stage_directory(root / STORE, request["stage"], request["key"])
    return {"path": str(make_view(directory, Receipt.read(directory / "receipt.json")))}, []


def make_view(directory: Path, receipt: Receipt) -> Path:
    """`<directory>/.outputs`: hard links to exactly the outputs that the receipt lists. Costs no space."""
    view = directory / ".outputs"
    wanted = {output.path for output in receipt.outputs}
    for path in sorted(view.rglob("*"), reverse=True) if view.is_dir() else []:
        name = path.relative_to(view).as_posix()
        if path.is_file() and not (name in wanted and path.samefile(directory / name)):
            path.unlink()
    for name in wanted:
        link, source = view / name, directory / name
        if not source.is_file():
            raise CorruptError("the file is missing", where=str(source), remedy="`dflash run` makes it again.")
        if not link.exists():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.hardlink_to(source)
    return view


def do_stop(root: Path, request: dict[str, Any]) -> tuple[dict[str, Any], list[Path]]:
    """Ends a training, as `dflash stop` does."""
    directory = stage_directory(root / STORE, "train", request["key"])
    launch.stop_training(directory, request["run"], finish=bool(request["finish"]), force=bool(request["force"]))
    return {}, [*_of_training(root, request), directory / "stop.json"]


def do_resume(root: Path, request: dict[str, Any]) -> tuple[dict[str, Any], list[Path]]:
    """Lets a stopped training go on."""
    launch.clear_stop(stage_directory(root / STORE, "train", request["key"]))
    return {}, []


def do_leave(root: Path, request: dict[str, Any]) -> tuple[dict[str, Any], list[Path]]:
    """Lets a training go to another host; the answer's file lists what goes along."""
    store = root / STORE
    directory = stage_directory(store, "train", request["key"])
    asked = {name: request[name] for name in ("to", "token", "run", "receipted", "inputs")}
    listed = directory / f"{moving.LEAVING}.json"
    write_atomically(listed, moving.leave(directory, store, **asked).model_dump_json())
    return {}, [listed]


def do_stay(root: Path, request: dict[str, Any]) -> tuple[dict[str, Any], list[Path]]:
    """Takes `leave` back."""
    directory = stage_directory(root / STORE, "train", request["key"])
    moving.stay(directory, token=request["token"], run=request["run"])
    return {}, []


def do_arrive(root: Path, request: dict[str, Any]) -> tuple[dict[str, Any], list[Path]]:
    """Takes in a training that was shipped here."""
    store = root / STORE
    directory = stage_directory(store, "train", request["key"])
    asked = {name: request[name] for name in ("origin", "token", "root", "run")}
    _note_asker(root, str(request.get("asker") or ""))  # it lives here before any stage has run here
    moving.arrive(directory, store, **asked, forget_stop=True)
    return {}, []


def do_checkpoint(root: Path, request: dict[str, Any]) -> tuple[dict[str, Any], list[Path]]:
    """Has a trainer save its next step."""
    directory = stage_directory(root / STORE, "train", request["key"])
    step = launch.checkpoint_now(directory, request["run"])
    return {"step": step}, [*_of_training(root, request), checkpoint_directory(directory, step) / "manifest.json"]


def do_training(root: Path, request: dict[str, Any]) -> tuple[dict[str, Any], list[Path]]:
    """How a training stands: who holds it, which steps exist, its files."""
    directory = stage_directory(root / STORE, "train", request["key"])
    holder = launch.lease.holder(schedule.lease_path(directory))
    steps = schedule.existing_steps(directory)
    found = {"holder": holder.model_dump() if holder else None, "steps": steps, **launch.health(directory)}
    return found, _of_training(root, request)


def _of_training(root: Path, request: dict[str, Any]) -> list[Path]:
    store = root / STORE
    directory = stage_directory(store, "train", request["key"])
    manifests = [checkpoint_directory(directory, step) / "manifest.json" for step in schedule.existing_steps(directory)]
    return [*_training_files(Job(BY_NAME["train"], directory / "params.json", store)), *manifests]


def do_rehearse(root: Path, request: dict[str, Any]) -> tuple[dict[str, Any], list[Path]]:
    """A part of a rehearsal; see `rehearse_part`."""
    return {"found": rehearse_part(root / STORE, request)}, []


def rehearse_part(store: Path, request: dict[str, Any]) -> dict[str, Any]:
    """The part of a rehearsal that `request["part"]` names: `train`, `evaluate`, or `clear`, which takes away what is left."""
    from dflash.train import rehearse

    if request["part"] == "clear":
        rehearse.clear(store, request["scratch"])
        rehearse.sweep(store)
        return {}
    with contextlib.suppress(OSError):
        os.utime(store / request["scratch"])  # it is in use: no sweep may take it for an old one
    rehearse.sweep(store)
    if request["part"] == "train":
        return rehearse.rehearse_training(store, request["scratch"], request)
    from dflash.evaluate.trial import try_drafter

    with quiet_libraries():
        return try_drafter(store, request["scratch"], request)


ACTIONS: dict[str, Callable[[Path, dict[str, Any]], tuple[dict[str, Any], list[Path]]]] = {
    "stage": do_stage,
    "check": do_check,
    "gc": do_gc,
    "view": do_view,
    "stop": do_stop,
    "resume": do_resume,
    "leave": do_leave,
    "stay": do_stay,
    "arrive": do_arrive,
    "checkpoint": do_checkpoint,
    "training": do_training,
    "rehearse": do_rehearse,
}


# ---------------------------------------------------------------- the process


def answer(root: Path, request: dict[str, Any], files: dict[str, bytes]) -> bytes:
    """Does what is asked; a failure on purpose is an answer too."""
    try:
        bundle.place(files, root)
        found, back = ACTIONS[request["do"]](root, request)
        return _packed({"error": None, **found}, root, back, request)
    except DflashError as error:
        return _packed({"error": as_document(error)}, root, getattr(error, "files", []), request)


def _packed(document: dict[str, Any], root: Path, back: list[Path], request: dict[str, Any]) -> bytes:
    """The answer; of growing files that the controller has a part of (`have`) only the rest goes over."""
    files = bundle.collect(root, back)
    offsets = {}
    for name, prefix in request.get("have", {}).items():
        if name in files:
            offsets[name], files[name] = bundle.rest_of(files[name], prefix)
    return bundle.pack({**document, "offsets": offsets}, files)


def as_document(error: DflashError) -> dict[str, str]:
    """An error as the controller reads it."""
    return {"kind": error.kind, "what": error.what, "where": error.where, "remedy": error.remedy}


def main() -> int:
    """Reads the request, does it, answers. Exit status 0 when there is an answer, of whatever kind."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not end up in the answer
    root = Path(sys.argv[1]).expanduser()
    try:
        root.mkdir(parents=True, exist_ok=True)
        os.chdir(root)
    except OSError as error:
        failed = PermanentError(f"the workdir cannot be used: {error.strerror}", where=str(root))
        out.write(bundle.pack({"error": as_document(failed)}, {}))
        out.close()
        return 0
    with os.fdopen(os.dup(0), "rb") as stream:
        request, files = bundle.unpack(stream)
    os.environ.update(request.get("environment", {}))
    answered = threading.Event()
    watch_caller(answered, float(request.get("silence", SILENCE)))
    told = answer(Path.cwd(), request, files)
    answered.set()
    out.write(told)
    out.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
