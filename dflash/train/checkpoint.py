"""Checkpoints: `step_<n>/` with what servers load, what training resumes from, and a manifest that explains both.

    step_<n>/drafter/        model.safetensors and config.json, the published format; stays
    step_<n>/state/          masters.safetensors, moments.safetensors, cursor.json; the newest few stay
    step_<n>/state.pruned    a tombstone in place of a state that retention took
    step_<n>/manifest.json   everything that made it; written last

The folder is written under another name, synced, and renamed as a whole: a reader sees all of it or nothing. Equal trainings
give equal bytes in `drafter/`: times and attempts stand in the manifest and the state only. Nothing is pickled.

Costs: 2 bytes a parameter for `drafter/` in bfloat16 and 12 for `state/` (1.73 B parameters: 3.5 GB and 21 GB), written once
and read back once for the digests.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dflash.base.canonical import canonical_json
from dflash.base.errors import CorruptError, DflashError, PermanentError
from dflash.base.files import fsync_directory, read_json, write_json
from dflash.base.records import Artifact, CheckpointManifest, ParamsFile, TensorFact, now
from dflash.base.store import checkpoint_directory, read_params, stage_directory
from dflash.model.drafter import DrafterConfig
from dflash.model.export import save_weights
from dflash.model.tensor_files import save_tensors
from dflash.ship import artifact
from dflash.train import schedule
from dflash.train.telemetry import alert

FULL = (errno.ENOSPC, errno.EDQUOT)


class DiskFull(PermanentError):
    """The checkpoint does not fit on the disk. Nothing of it is left."""


@dataclass(frozen=True)
class State:
    """What training resumes from.

    masters: weights by name in master precision. moments: the optimizer's tensors. next_step: index (from 0) of the step
    to train next, which equals the steps done; batches are a function of it. nonfinite: skipped steps in a row so far.
    history: which attempt trained from which step on. generators: states of torch's generators, by device.
    """

    masters: dict[str, Tensor]
    moments: dict[str, Tensor]
    next_step: int
    nonfinite: int = 0
    history: list[dict[str, int]] = field(default_factory=list)
    generators: dict[str, Tensor] = field(default_factory=dict)


def collect_params(directory: Path, store: Path, stage: str) -> dict[str, ParamsFile]:
    """The `params.json` of a result and of everything it was made from, by stage (`prompts/<source>`, ..., `train`).

    Raises:
        CorruptError: one is missing, damaged, or not what its key says.
    """
    found = {stage: read_params(directory)}
    waiting = [(stage, found[stage])]
    while waiting:
        name, params = waiting.pop()
        for upstream, key in sorted(params.upstream.items()):
            # The prompts of `completions/arithmetic` are `prompts/arithmetic`.
            full = f"{upstream}/{name.partition('/')[2]}" if "/" in name and "/" not in upstream else upstream
            parent = read_params(stage_directory(store, upstream.partition("/")[0], key))
            known = found.setdefault(full, parent)
            if known.key != parent.key:
                raise CorruptError(f"{full} is {known.key} for one stage and {key} for {name}", where=str(directory))
            waiting.append((full, parent))
    return dict(sorted(found.items()))


@dataclass(frozen=True)
class Writer:
    """Writes the checkpoints of one training.

    directory: the training's folder. config: of the drafter. params_files: `collect_params`. manifest: the fields of the
    manifest that do not change between checkpoints. keep_states: how many resumable states stay.
    """

    directory: Path
    config: DrafterConfig
    params_files: Mapping[str, ParamsFile]
    manifest: Mapping[str, Any]
    keep_states: int

    @property
    def key(self) -> str:
        return self.params_files["train"].key

    def metadata(self, step: int) -> dict[str, str]:
        """What stands in the header of the weights: who they are and every parameter that made them; no time, no host."""
        explained = {
            "key": self.key,
            "step": step,
            "config": {name: params.params for name, params in self.params_files.items()},
            "upstream": {name: params.key for name, params in self.params_files.items()},
        }
        return {"dflash": canonical_json(explained).decode()}

    def save(self, step: int, weights: Mapping[str, Tensor], state: State, lineage: Any) -> CheckpointManifest:
        """Writes the checkpoint of a step and takes older states away. Runs beside training, so the tensors must be copies.

        A checkpoint of this step that is whole already is left as it is: others may have read it.

        Raises:
            DiskFull: it does not fit; nothing of it is left.
            PermanentError: the folder cannot be written.
        """
        final = checkpoint_directory(self.directory, step)
        standing = self._standing(final)
        if standing is not None:
            return standing
        temporary = self.directory / f".step_{step}.{os.getpid()}.tmp"
        try:
            manifest = self._write(temporary, step, weights, state, lineage)
            if final.exists():
                self._set_aside(final)
            temporary.rename(final)
            fsync_directory(self.directory)
        except (OSError, SafetensorError, DflashError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if is_full(error):
                raise DiskFull(
                    f"step {step} is not saved: the disk is full",
                    where=str(self.directory),
                    remedy="Free some space; training goes on and saves the next scheduled step.",
                ) from error
            raise PermanentError(f"step {step} cannot be saved: {error}", where=str(self.directory)) from error
        prune_states(self.directory, self.keep_states)
        return manifest

    def _write(
        self, root: Path, step: int, weights: Mapping[str, Tensor], state: State, lineage: Any
    ) -> CheckpointManifest:
        shutil.rmtree(root, ignore_errors=True)
        (root / "state").mkdir(parents=True)
        save_weights(weights, self.config, root / "drafter", self.metadata(step))
        write_state(root / "state", state, self.key)
        manifest = CheckpointManifest(
            key=self.key,
            step=step,
            created=now(),
            config={name: params.params for name, params in self.params_files.items()},
            params_files={name: params.model_dump(mode="json") for name, params in self.params_files.items()},
            lineage=lineage,
            tensors=tensor_facts(weights),
            drafter=artifact.describe(root / "drafter"),
            state=artifact.describe(root / "state"),
            **self.manifest,
        )
        for path in sorted(root.rglob("*")):
            _sync(path)
        manifest.write(root / "manifest.json")
        fsync_directory(root)
        return manifest

    def _standing(self, final: Path) -> CheckpointManifest | None:
        """The manifest of a whole checkpoint at `final`; None when there is none or it is damaged."""
        if not final.exists():
            return None
        try:
            manifest = CheckpointManifest.read(final / "manifest.json")
            artifact.verify(final / "drafter", manifest.drafter)
            if (final / "state").exists():
                artifact.verify(final / "state", _recorded_state(manifest, final))
        except CorruptError as error:
            alert(f"the checkpoint is written anew: {error}")
            return None
        return manifest

    def _set_aside(self, final: Path) -> None:
        for number in range(1000):
            aside = self.directory / f"damaged_{final.name}_{number}"
            if not aside.exists():
                final.rename(aside)
                alert(f"what was damaged is kept as {aside.name}")
                return


def _recorded_state(manifest: CheckpointManifest, where: Path) -> Artifact:
    if manifest.state is None:
        raise CorruptError("there is a state that the manifest does not record", where=str(where))
    return manifest.state


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_full(error: BaseException) -> bool:
    """Whether an error, or what caused it, says that there is no space left. safetensors gives the number as text."""
    while True:
        if isinstance(error, OSError) and error.errno in FULL:
            return True
        if isinstance(error, SafetensorError) and any(f"os error {number}" in str(error) for number in FULL):
            return True
        if error.__cause__ is None:
            return False
        error = error.__cause__


def tensor_facts(tensors: Mapping[str, Tensor]) -> list[TensorFact]:
    """Name, shape, dtype, bytes and digest of each tensor, by name. Reads every byte (about 1 GB/s)."""
    return [
        TensorFact(
            name=name,
            shape=list(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            bytes=tensor.numel() * tensor.element_size(),
            sha256=tensor_digest(tensor),
        )
        for name, tensor in sorted(tensors.items())
    ]


def tensor_digest(tensor: Tensor) -> str:
    """sha256 of a tensor's bytes as a safetensors file holds them: row by row, little-endian."""
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(plain.view(torch.uint8).numpy().tobytes()).hexdigest()


# ---------------------------------------------------------------- state


def write_state(root: Path, state: State, key: str) -> None:
    """Writes the three files of a state into `root`."""
    save_tensors(state.masters, root / "masters.safetensors")
    extra = {f"generator.{name}": value for name, value in state.generators.items()}
    save_tensors({**state.moments, **extra}, root / "moments.safetensors")
    cursor = {"key": key, "next_step": state.next_step, "nonfinite": state.nonfinite, "history": state.history}
    write_json(root / "cursor.json", cursor)


def read_state(root: Path) -> State:
    """Reads a state.

    Raises:
        CorruptError: a file is missing or not what it should be; names it.
    """
    cursor = read_json(root / "cursor.json")
    try:
        masters = load_file(root / "masters.safetensors")
        tensors = load_file(root / "moments.safetensors")
    except (OSError, SafetensorError) as error:
        raise CorruptError(f"unreadable: {error}", where=str(root)) from error
    generators = {name.removeprefix("generator."): value for name, value in tensors.items() if _is_generator(name)}
    moments = {name: value for name, value in tensors.items() if not _is_generator(name)}
    try:
        return State(
            masters, moments, int(cursor["next_step"]), int(cursor["nonfinite"]), list(cursor["history"]), generators
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptError(f"not a cursor: {error!r}", where=str(root / "cursor.json")) from error


def _is_generator(name: str) -> bool:
    return name.startswith("generator.")


def generator_states() -> dict[str, Tensor]:
    """The states of torch's generators. Training draws from counters and not from these; they are kept all the same."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states |= {f"cuda{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def restore_generators(states: Mapping[str, Tensor]) -> None:
    """Sets torch's generators to what `generator_states` returned, where the device is there."""
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    for index in range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0):
        if f"cuda{index}" in states:
            torch.cuda.set_rng_state(states[f"cuda{index}"], index)


def verified_manifest(directory: Path, step: int, key: str) -> CheckpointManifest:
    """The manifest of a checkpoint whose `drafter/` has the bytes that it records.

    Raises:
        CorruptError: something is missing, damaged or of another training; names it.
    """
    folder = checkpoint_directory(directory, step)
    manifest = CheckpointManifest.read(folder / "manifest.json")
    if (manifest.key, manifest.step) != (key, step):
        raise CorruptError(f"the manifest is of step {manifest.step} of {manifest.key}", where=str(folder))
    artifact.verify(folder / "drafter", manifest.drafter)
    return manifest


def load_state(directory: Path, step: int, key: str) -> State:
    """The state of a checkpoint, after its bytes have been compared with the manifest.

    Raises:
        CorruptError: missing, damaged, or of another step or training; names it.
    """
    folder = checkpoint_directory(directory, step)
    manifest = CheckpointManifest.read(folder / "manifest.json")
    artifact.verify(folder / "state", _recorded_state(manifest, folder))
    state = read_state(folder / "state")
    if (manifest.key, manifest.step, state.next_step) != (key, step, step):
        raise CorruptError(
            f"the state is of step {state.next_step}, the manifest of step {manifest.step} of {manifest.key}",
            where=str(folder),
        )
    return state


def newest_state(directory: Path, key: str) -> State | None:
    """The newest state that verifies; damaged ones are named in the log and passed over. None to start from scratch."""
    for step in reversed(schedule.resumable_steps(directory)):
        try:
            return load_state(directory, step, key)
        except CorruptError as error:
            alert(f"step {step} cannot be resumed from: {error}")
    return None


# ---------------------------------------------------------------- retention


def prune_states(directory: Path, keep: int) -> None:
    """Takes all but the `keep` newest states away, leaving a tombstone each. `drafter/` is never touched.

    A state is renamed before it is deleted, so that a kill leaves no half of one that could be loaded.
    """
    for step in schedule.resumable_steps(directory)[:-keep]:
        folder = checkpoint_directory(directory, step)
        with contextlib.suppress(OSError):
            (folder / "state.pruned").write_text(f"{now()}: the {keep} newest states are kept\n")
            (folder / "state").rename(folder / ".state.pruning")
    sweep(directory)


def sweep(directory: Path) -> None:
    """Deletes what a killed trainer left behind: states on their way out, checkpoints on their way in."""
    for leftover in (*directory.glob("step_*/.state.pruning"), *directory.glob(".step_*.tmp")):
        shutil.rmtree(leftover, ignore_errors=True)
