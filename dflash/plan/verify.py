"""What keys cannot see: results that were damaged after they were made.

A receipt is retired (renamed, never deleted) when it cannot be read, an output is missing or has other bytes, or an input
it recorded is no longer the one that stands upstream. The key then has no result and is made again. Quick checks cost a stat
an output (digests are remembered by inode, size and modification time); `deep` reads every byte.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from dflash.base.errors import CorruptError, DecisionNeeded, PermanentError
from dflash.base.files import DigestCache, sha256_file
from dflash.base.records import CheckpointManifest, ParamsFile, Receipt, RunManifest
from dflash.base.store import STEPWISE_RECEIPTS, checkpoint_directory, read_params, receipt_path
from dflash.plan.graph import Node, Plan, PlannedRun


@dataclass(frozen=True)
class Damage:
    """One result that is not what its receipt says."""

    node: Node
    step: int | None
    receipt: Path
    why: str

    def sentence(self) -> str:
        """For people."""
        step = f" step {self.step}" if self.step is not None else ""
        return f"{self.node.name} {self.node.key}{step}: {self.why}"

    def remedy(self) -> str:
        """How it is made again."""
        stage = self.node.stage
        return f"`dflash run --recompute {stage.name}`" if stage.costly else "`dflash run`"


def find_damage(plan: Plan, *, deep: bool = False) -> list[Damage]:
    """All damaged results of a plan, upstream first."""
    cache = DigestCache()
    found = []
    for node in plan.nodes.values():
        for step in node.steps if node.stage.stepwise else [None]:
            receipt = node.receipt(step)
            if receipt.exists() or receipt.is_symlink():
                why = _fault(node, step, receipt, cache, deep)
                if why:
                    found.append(Damage(node, step, receipt, why))
    for run in plan.runs:
        manifest = run.directory / "manifest.json"
        why = _manifest_fault(run, manifest) if manifest.exists() else None
        if why:
            found.append(Damage(run.nodes["report"], None, manifest, why))
    cache.save()
    return found


def _fault(node: Node, step: int | None, path: Path, cache: DigestCache, deep: bool) -> str | None:
    try:
        receipt = Receipt.read(path)
        if receipt.key != node.key or receipt.stage != node.stage.name or receipt.step != step:
            return f"{path} is the receipt of {receipt.stage} {receipt.key} step {receipt.step}"
        _refuse_collision(node, read_params(node.directory))
        if node.stage.name == "train" and step is not None:
            CheckpointManifest.read(checkpoint_directory(node.directory, step) / "manifest.json")
    except CorruptError as error:
        return error.message()
    for output in receipt.outputs:
        file = node.directory / output.path
        if not file.is_file():
            return f"{file} is missing"
        if file.stat().st_size != output.size:
            return f"{file} has {file.stat().st_size} bytes, its receipt says {output.size}"
        if (sha256_file(file) if deep else cache.sha256(file)) != output.sha256:
            return f"{file} has other bytes than its receipt says"
    return _input_fault(node, step, receipt)


def _refuse_collision(node: Node, standing: ParamsFile) -> None:
    """Another result under the same key would be taken for this one; making either again cannot help.

    Raises:
        PermanentError: params, upstreams or code of the standing result are not those asked for.
    """
    asked = node.params
    if (standing.params, standing.upstream, standing.code.digest) != (asked.params, asked.upstream, asked.code.digest):
        raise PermanentError(
            f"key collision: another {node.stage.name} has the key {node.key}",
            where=str(node.directory / "params.json"),
            remedy="Move that folder away, or change a seed so that the key changes.",
        )


def _manifest_fault(run: PlannedRun, path: Path) -> str | None:
    """A manifest names every receipt by its content; one that was made again since leaves manifest and report behind."""
    try:
        manifest = RunManifest.read(path)
    except CorruptError as error:
        return error.message()
    for entry in manifest.stages:
        for step, recorded in entry.receipts.items():
            receipt = run.nodes[entry.name].receipt(int(step) if step else None)
            try:
                standing = Receipt.read(receipt).content_digest() if receipt.exists() else recorded
            except CorruptError:
                continue
            if standing != recorded:
                return f"its manifest describes another {entry.name}{f' step {step}' if step else ''} than the one that stands"
    return None


def _input_fault(node: Node, step: int | None, receipt: Receipt) -> str | None:
    for known_as, upstream in node.inputs.items():
        recorded = receipt.inputs.get(known_as)
        if recorded is None:
            continue
        path = receipt_path(upstream.directory, upstream.stage.name, step)
        if not path.exists():
            continue
        try:
            standing = Receipt.read(path).content_digest()
        except CorruptError:
            continue
        if standing != recorded:
            return f"its input {known_as} has been made again with other content"
    return None


def retire(plan: Plan, damages: list[Damage], recompute: list[str]) -> None:
    """Takes damaged results out of the way so that they are made again.

    Damage to trained checkpoints asks first, since training resumes from the last whole checkpoint before it.

    Raises:
        DecisionNeeded: a costly stage is damaged and `recompute` does not name it.
    """
    for damage in damages:
        if damage.node.stage.costly and damage.node.stage.name not in recompute:
            raise DecisionNeeded(
                damage.sentence(),
                remedy=f"Making it again is costly; decide with `dflash run --recompute {damage.node.stage.name}`, "
                "or put the file back.",
            )
    for damage in damages:
        mark = f"retired-{time.time_ns()}"
        retired = {damage.receipt, *([damage.node.receipt()] if damage.node.stage.name == "report" else [])}
        for path in retired:
            if path.exists() or path.is_symlink():
                path.replace(path.with_name(f"{path.name}.{mark}"))
        if damage.node.stage.name == "train" and damage.step is not None:
            _retire_checkpoints(damage.node.directory, damage.step, mark)
        elif damage.node.stage.name not in STEPWISE_RECEIPTS:
            _rebuild_params(damage.node)


def _retire_checkpoints(directory: Path, step: int, mark: str) -> None:
    """Moves aside the damaged checkpoint and all later ones: the trainer then resumes before it and passes them again."""
    aside = directory / mark
    aside.mkdir()
    for folder in directory.glob("step_*"):
        number = folder.name.removeprefix("step_")
        if number.isdigit() and int(number) >= step:
            folder.replace(aside / folder.name)


def _rebuild_params(node: Node) -> None:
    try:
        read_params(node.directory)
    except CorruptError:
        node.params.write(node.directory / "params.json")
