"""A training changes its host: what leaves the old one, and how it arrives at the new one.

    old host   lease taken -> what goes along is verified -> .leaving/ (hard links) -> moved.json: nobody goes on here
    shipment   .leaving/ there -> .arriving/ here, verified (`dflash/ship/ship.py`)
    new host   lease taken -> moved.json: nobody begins yet -> everything in place -> arrived.json -> moved.json removed

What goes along: the newest checkpoint that is whole and has its state; the drafters of the checkpoints that the controller has
no receipt of; metrics, attempts, schedule and probe; and the checkpoint that the training itself was continued from. A
checkpoint with a receipt stays: its receipt says where it lies, and whoever needs it has it shipped from there.

Removing `moved.json` is the moment at which the training lives on the new host. The old host keeps its files and its
`moved.json`, so that nothing there goes on by mistake until the training comes back the same way. Both halves may be killed at
any point and called again. No torch. Costs one read of what goes along on the old host (about 1 GB/s) and one on the new one.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from dflash.base.errors import CorruptError, PermanentError
from dflash.base.files import fsync_directory, locked, write_json
from dflash.base.records import Artifact, ArtifactFile, CheckpointManifest, Receipt, Record, now
from dflash.base.store import checkpoint_directory, read_params, stage_directory
from dflash.hosts import lease
from dflash.plan.sweep import ARRIVING
from dflash.plan.verify import retire_checkpoints
from dflash.ship import artifact
from dflash.ship.receipt import receipt_path, require_receipt
from dflash.train import launch, schedule
from dflash.train.launch import Moved, moved_path, read_moved

LEAVING, PARENT = ".leaving", "parent"
NAME = "move.json"
"""A file of what goes along that names the move: even a training that has saved nothing leaves with something."""
FILES = ("metrics.jsonl", "resolved.json", "nonfinite.json")
GLOBS = ("probe*.safetensors", "attempts/[0-9]*.json")


class Arrived(Record):
    """`arrived.json`: the training came here. token: names this move. step: of the checkpoint that it goes on from, or 0."""

    token: str
    origin: str
    step: int
    at: str


def read_arrived(directory: Path) -> Arrived | None:
    """How a training came to this host; None when it began here or was never here."""
    path = directory / "arrived.json"
    return Arrived.read(path) if path.exists() else None


# ---------------------------------------------------------------- the old host


def leave(
    directory: Path,
    store: Path,
    *,
    to: str,
    token: str,
    run: str,
    receipted: Collection[int],
    inputs: Mapping[str, str],
) -> Artifact:
    """Ends what a training may do on this host and lays out in `.leaving` what goes along; returns what that holds.

    Args:
        directory, store: of the training, on this host.
        to, token: where it goes, and the name of this move, which may be begun again and go elsewhere until it has arrived.
        receipted: steps that the controller has a receipt of.
        inputs: `input_digest` of `dataset` and `buckets` as they stand; checkpoints made from others are retired.

    Raises:
        PermanentError: its trainer is at work, somebody stopped it, or it has been carried elsewhere already.
    """
    with _held(directory, run):
        moved = read_moved(directory)
        if moved is not None and moved.token != token:
            launch.refuse_moved(directory)
        marker = launch.read_stop(directory)
        if marker is not None and not marker.finish:
            launch.refuse_stopped(directory)
        steps, newest = _what_goes(directory, receipted, inputs)
        files = _small_files(directory)
        for step in steps:
            files |= _checkpoint_files(directory, step, f"step_{step}", state=step == newest)
        files |= _parent_files(directory, store)
        view = directory / LEAVING
        _lay_out(view, {name: path for name, (path, _) in files.items()})
        write_json(view / NAME, {"token": token})
        files[NAME] = (view / NAME, None)
        listed = [_described(name, path, known) for name, (path, known) in sorted(files.items())]
        Moved(to=to, token=token, run=run, by=lease.user_name(), at=now()).write(moved_path(directory))
        return Artifact(root=artifact.root_digest(listed), files=listed)


def stay(directory: Path, *, token: str, run: str) -> None:
    """Takes `leave` back, of a move that has not arrived and never will."""
    with _held(directory, run):
        moved = read_moved(directory)
        if moved is not None and moved.token == token:
            moved_path(directory).unlink()
        shutil.rmtree(directory / LEAVING, ignore_errors=True)


@contextlib.contextmanager
def _held(directory: Path, run: str) -> Iterator[None]:
    """Holds the training's own lease: no trainer is at work and none begins meanwhile.

    Raises:
        PermanentError: a trainer is at work, or another such move.
    """
    resource = f"training {directory.name}"
    try:
        held = lease.acquire(
            {schedule.lease_path(directory): resource}, lease.new_record(resource, directory.name, run)
        )
    except lease.LeaseHeld as error:
        who = error.holder
        raise PermanentError(
            f"training {directory.name} is at work (run {who.run}, {who.user}, pid {who.pid}): it cannot change its host",
            where=str(directory),
            remedy=f"End it with `dflash stop {who.run}`; then `dflash run --resume` carries it over.",
        ) from error
    try:
        yield
    finally:
        held.release()


def _what_goes(directory: Path, receipted: Collection[int], inputs: Mapping[str, str]) -> tuple[list[int], int]:
    """The checkpoints that go along, ascending, and which of them with its state (0: none is whole)."""
    retire_unfit(directory, inputs)
    loose = [step for step in schedule.existing_steps(directory) if step not in receipted]
    for step in loose:
        if not _is_whole(directory, step, state=False):  # trained again, as on one host
            retire_checkpoints(directory, step, f"retired-{time.time_ns()}")
            loose = [other for other in loose if other < step]
            break
    states = reversed(schedule.resumable_steps(directory))
    newest = next((step for step in states if _is_whole(directory, step, state=True)), 0)
    return sorted({*loose, *([newest] if newest else [])}), newest


def _is_whole(directory: Path, step: int, *, state: bool) -> bool:
    """Whether the drafter of a checkpoint, and its state, have the bytes that its manifest records."""
    folder = checkpoint_directory(directory, step)
    try:
        manifest = CheckpointManifest.read(folder / "manifest.json")
        artifact.verify(folder / "drafter", manifest.drafter)
        if state and manifest.state is not None:
            artifact.verify(folder / "state", manifest.state)
    except CorruptError:
        return False
    return (manifest.key, manifest.step) == (directory.name, step) and not (state and manifest.state is None)


Laid = dict[str, tuple[Path, ArtifactFile | None]]
"""Name in `.leaving` -> the file, and its chunk digests where they are known."""


def _small_files(directory: Path) -> Laid:
    paths = [directory / name for name in (*FILES, "schedule.json")]
    paths += [path for pattern in GLOBS for path in sorted(directory.glob(pattern))]
    return {path.relative_to(directory).as_posix(): (path, None) for path in paths if path.is_file()}


def _checkpoint_files(directory: Path, step: int, name: str, *, state: bool) -> Laid:
    folder = checkpoint_directory(directory, step)
    manifest = CheckpointManifest.read(folder / "manifest.json")
    parts = {"drafter": manifest.drafter, **({"state": manifest.state} if state and manifest.state else {})}
    found: Laid = {
        f"{name}/{part}/{file.path}": (folder / part / file.path, file)
        for part, recorded in parts.items()
        for file in recorded.files
    }
    found[f"{name}/manifest.json"] = (folder / "manifest.json", None)
    if (folder / "state.pruned").is_file():
        found[f"{name}/state.pruned"] = (folder / "state.pruned", None)
    return found


def _parent_files(directory: Path, store: Path) -> Laid:
    """The checkpoint that this training was continued from, which every attempt reads again."""
    path = directory / "params.json"
    source = read_params(directory).params.get("continue_from") if path.exists() else None
    if not source:
        return {}
    parent, step = stage_directory(store, "train", str(source["key"])), int(source["step"])
    state = source["what"] == "state"
    if not (parent / "params.json").exists() or not _is_whole(parent, step, state=state):
        return {}  # the trainer says so, where it can be mended
    name = f"{PARENT}/{parent.name}"
    return {
        f"{name}/params.json": (parent / "params.json", None),
        **_checkpoint_files(parent, step, f"{name}/step_{step}", state=state),
    }


def _lay_out(view: Path, files: Mapping[str, Path]) -> None:
    """A folder of hard links; costs no space."""
    shutil.rmtree(view, ignore_errors=True)
    view.mkdir(parents=True)
    for name, path in files.items():
        _link(path, view / name)


def _link(source: Path, destination: Path) -> None:
    destination.parent.mkdir(parents=True, exist_ok=True)
    try:
        destination.hardlink_to(source)
    except OSError:  # somebody else's file, or a filesystem without links
        shutil.copy2(source, destination)


def _described(name: str, path: Path, known: ArtifactFile | None) -> ArtifactFile:
    if known is not None:
        return known.model_copy(update={"path": name})
    return ArtifactFile(path=name, size=path.stat().st_size, chunks=artifact.chunk_digests(path))


# ---------------------------------------------------------------- the new host


def arrive(directory: Path, store: Path, *, origin: str, token: str, root: str, run: str, forget_stop: bool) -> None:
    """Takes what was shipped to `.arriving` into the training's folder; from then on the training lives here.

    Args:
        origin, token: where it came from, and the name of the move. root: of what was shipped.
        forget_stop: remove a stop marker that an earlier stay has left here.

    Raises:
        PermanentError: a trainer is at work here, or a training of this key began here by itself.
        CorruptError: what was shipped is not here, or has other bytes.
    """
    with _held(directory, run):
        moved, arrived = read_moved(directory), read_arrived(directory)
        if arrived is not None and arrived.token == token and moved is not None and moved.token != token:
            return  # it arrived, and has left again since
        if arrived is None or arrived.token != token:
            _refuse_own(directory, moved)
            if require_receipt(directory / ARRIVING).root != root:
                raise CorruptError("another shipment lies there than the one that was sent", where=str(directory))
            Moved(to=origin, token=token, run=run, by=lease.user_name(), at=now()).write(moved_path(directory))
            step = _take_in(directory, store, token)
            if forget_stop:
                launch.clear_stop(directory)
            Arrived(token=token, origin=origin, step=step, at=now()).write(directory / "arrived.json")
        moved_path(directory).unlink(missing_ok=True)
        fsync_directory(directory)
        _tidy(directory, store)


def _refuse_own(directory: Path, moved: Moved | None) -> None:
    if moved is None and (directory / "trainer.log").exists():
        raise PermanentError(
            f"a training {directory.name} was begun here too: two of them cannot become one",
            where=str(directory),
            remedy="Set roles.gpu back, or move that folder away.",
        )


def _take_in(directory: Path, store: Path, token: str) -> int:
    """Puts everything in its place by hard links, so that it can be done again; returns the newest step with a state."""
    place = directory / ARRIVING
    (directory / "attempts").mkdir(exist_ok=True)
    for folder in place.glob("step_*"):
        _replace(folder, directory, token)
    for folder in place.glob(f"{PARENT}/*/step_*"):
        parent = stage_directory(store, "train", folder.parent.name)
        if not (parent / "params.json").exists():
            _replace_file(folder.parent / "params.json", parent / "params.json")
        if not _is_whole(parent, int(folder.name.removeprefix("step_")), state=(folder / "state").is_dir()):
            _replace(folder, parent, token)
    for pattern in (*FILES, *GLOBS):
        for path in place.glob(pattern):
            _replace_file(path, directory / path.relative_to(place))
    if (place / "schedule.json").exists():
        steps = schedule.read_schedule(place)
        with locked(schedule.schedule_lock(directory), why="the schedule of this training"):
            union = sorted({*steps, *schedule.read_schedule(directory)})
            schedule.Schedule(steps=union).write(directory / "schedule.json")
    fsync_directory(directory)
    return max(schedule.resumable_steps(place), default=0)


def _replace(source: Path, directory: Path, token: str) -> None:
    """A checkpoint into its place, whole or not at all; what was there is set aside."""
    target, temporary = directory / source.name, directory / f".{source.name}.arriving.tmp"
    files = [path.relative_to(source) for path in source.rglob("*") if path.is_file()]
    if all((target / name).is_file() and (target / name).samefile(source / name) for name in files):
        return
    shutil.rmtree(temporary, ignore_errors=True)
    for name in files:
        _link(source / name, temporary / name)
    if target.exists():
        aside = directory / _replaced(token) / source.name
        if aside.exists():
            shutil.rmtree(target)
        else:
            aside.parent.mkdir(exist_ok=True)
            target.rename(aside)
    temporary.rename(target)


def _replaced(token: str) -> str:
    return f"replaced-{token}"


def _replace_file(source: Path, target: Path) -> None:
    temporary = target.with_name(f".{target.name}.arriving.tmp")
    temporary.unlink(missing_ok=True)
    _link(source, temporary)
    temporary.replace(target)
    temporary.unlink(missing_ok=True)  # nothing is renamed onto another link to the same file


def _tidy(directory: Path, store: Path) -> None:
    """Removes what the move needed; the receipt of the shipment after the folder that it is the receipt of."""
    (directory / f"{LEAVING}.json").unlink(missing_ok=True)
    leftovers = [directory / LEAVING, directory / ARRIVING]
    leftovers += [*directory.glob(f".{ARRIVING}.*.partial"), *directory.glob(_replaced("*"))]
    for parent in (directory / ARRIVING / PARENT).glob("*"):
        leftovers += stage_directory(store, "train", parent.name).glob(_replaced("*"))
    for folder in leftovers:
        shutil.rmtree(folder, ignore_errors=True)
    receipt_path(directory / ARRIVING).unlink(missing_ok=True)


# ---------------------------------------------------------------- checkpoints that do not fit


def input_digest(receipt: Receipt) -> str:
    """The digest under which a checkpoint's manifest names its dataset or buckets."""
    return str(receipt.results.get("digest", receipt.content_digest()))


def fits(directory: Path, inputs: Mapping[str, str]) -> bool:
    """Whether the newest checkpoint, and so every one before it, was made from these inputs.

    Args:
        inputs: `input_digest` by the name of the input; one that is not known is not compared.
    """
    steps = schedule.existing_steps(directory)
    return not steps or _fits(directory, steps[-1], inputs)


def retire_unfit(directory: Path, inputs: Mapping[str, str]) -> None:
    """Moves aside the checkpoints that were made from other inputs, which training then passes again."""
    if not fits(directory, inputs):
        steps = schedule.existing_steps(directory)
        first = next(step for step in steps if not _fits(directory, step, inputs))
        retire_checkpoints(directory, first, f"retired-{time.time_ns()}")


def _fits(directory: Path, step: int, inputs: Mapping[str, str]) -> bool:
    try:
        manifest = CheckpointManifest.read(checkpoint_directory(directory, step) / "manifest.json")
    except CorruptError:
        return True  # damage is another matter, and found where it is read
    recorded = {"dataset": manifest.dataset.get("digest"), "buckets": manifest.buckets.get("digest")}
    return all(recorded.get(name) in (None, digest) for name, digest in inputs.items())


def left_behind(directory: Path, step: int) -> bool:
    """Whether a step was saved on an earlier host and stayed there, for it had a receipt."""
    arrived = read_arrived(directory)
    return (
        arrived is not None
        and step <= arrived.step
        and step in schedule.read_schedule(directory)
        and not schedule.exists(directory, step)
    )
