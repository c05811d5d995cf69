"""What keys cannot see: results that were damaged after they were made.

A receipt is retired (renamed, never deleted) when it cannot be read, an output is missing or has other bytes, or an input
it recorded is no longer the one that stands upstream. The key then has no result and is made again. Quick checks cost a stat
an output (digests are remembered by inode, size and modification time); `deep` reads every byte.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.base.errors import CorruptError, DecisionNeeded, PermanentError
from dflash.base.files import DigestCache, read_json, sha256_file
from dflash.base.records import CheckpointManifest, ParamsFile, Receipt, RunManifest
from dflash.base.store import (
    STEPWISE_RECEIPTS,
    checkpoint_directory,
    read_params,
    receipt_path,
    shipped_artifact,
    stage_directory,
    stays_there,
)
from dflash.plan.graph import Node, Plan, PlannedRun
from dflash.plan.places import LOCAL, TARGET, Shipment, place_of, shipments


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


CheckThere = Callable[[str, list[list[Any]], list[str]], dict[str, str]]
"""Asks a place about its files: (place, [[path in its workdir, size, sha256], ...], [path of a shipped copy, ...]) -> path ->
what is wrong with it."""


def find_damage(
    plan: Plan, *, deep: bool = False, there: CheckThere | None = None, everything: bool = False
) -> list[Damage]:
    """All damaged results of a plan, upstream first.

    Args:
        deep: read every byte.
        there: asks other hosts about what was left there; None leaves it out.
        everything: ask also about what no missing result will read.
    """
    cache = DigestCache()
    found = []
    for node in plan.nodes.values():
        for step in node.steps if node.stage.stepwise else [None]:
            receipt = node.receipt(step)
            if receipt.exists() or receipt.is_symlink():
                why = _fault(plan, node, step, cache, deep)
                if why:
                    found.append(Damage(node, step, receipt, why))
    if there is not None:
        known = {damage.receipt for damage in found}
        found += [damage for damage in damage_elsewhere(plan, there, everything, known) if damage.receipt not in known]
    for run in plan.runs:
        manifest = run.directory / "manifest.json"
        why = _manifest_fault(run, manifest) if manifest.exists() else None
        if why:
            found.append(Damage(run.nodes["report"], None, manifest, why))
    cache.save()
    return found


def damage_elsewhere(plan: Plan, there: CheckThere, everything: bool, lost: Collection[Path] = ()) -> list[Damage]:
    """Results whose bytes are gone on the host that made them, as far as a missing result needs them; a shipment's record
    whose copy is gone is retired at once, for a copy costs nothing but the copying.

    Args:
        lost: receipts that are about to be retired: what they stand for is to be made, and its inputs are needed.
    """
    results: dict[str, dict[str, tuple[Node, int | None]]] = {}
    files: dict[str, list[list[Any]]] = {}
    copies: dict[str, dict[str, Path]] = {}
    for node, step in _needed(plan, everything, lost):
        receipt = Receipt.read(node.receipt(step))
        place = place_of(plan.config.inventory, receipt.host)
        if place == LOCAL:
            continue
        for output in receipt.outputs:
            name = f"results/store/{node.stage.name}/{node.key}/{output.path}"
            if name not in results.setdefault(place, {}):
                results[place][name] = (node, step)
                files.setdefault(place, []).append([name, output.size, output.sha256])
    for node, step in _to_make(plan, lost):
        for shipment in shipments(plan, node, step).values():
            if shipment.path.exists() and not _is_of(shipment, plan):
                _retire(shipment.path)  # what it tells of has been made again since, with other content
            elif shipment.path.exists():
                copies.setdefault(shipment.destination, {})[_copy_path(plan, shipment)] = shipment.path
    found: dict[Path, Damage] = {}
    for place in sorted({*files, *copies}):
        faults = there(place, files.get(place, []), list(copies.get(place, {})))
        for path, why in faults.items():
            if path in copies.get(place, {}):
                _retire(copies[place][path])
            else:
                node, step = results[place][path]
                found.setdefault(node.receipt(step), Damage(node, step, node.receipt(step), f"on {place}: {why}"))
    return list(found.values())


def _is_of(shipment: Shipment, plan: Plan) -> bool:
    """Whether a shipment's record is readable and tells of the content that stands now."""
    try:
        record = read_json(shipment.path)
        if shipment.stage == TARGET:
            return True
        standing = receipt_path(
            stage_directory(plan.store, shipment.stage, shipment.key), shipment.stage, shipment.step
        )
        return not standing.exists() or record["content"] == Receipt.read(standing).content_digest()
    except (CorruptError, KeyError, TypeError):
        return False


def _copy_path(plan: Plan, shipment: Shipment) -> str:
    """Where a shipped copy lies: in the workdir of its host, or, on the controller, from the current folder."""
    if shipment.stage == TARGET:
        return f"targets/{shipment.key}"
    store = plan.store if shipment.destination == LOCAL else Path("results/store")
    return str(shipped_artifact(store, shipment.stage, shipment.key, shipment.step))


def _to_make(plan: Plan, lost: Collection[Path]) -> list[tuple[Node, int | None]]:
    """What is missing, reports excepted: those read on the controller only."""
    return [
        (node, step)
        for node in plan.nodes.values()
        if node.stage.name != "report"
        for step in (node.steps if node.stage.stepwise else [None])
        if not node.receipt(step).exists() or node.receipt(step) in lost
    ]


def _needed(plan: Plan, everything: bool, lost: Collection[Path]) -> list[tuple[Node, int | None]]:
    """The standing results that a missing one will read and that it does not have as a copy already; or all."""
    found: dict[Path, tuple[Node, int | None]] = {}
    if everything:
        for node in plan.nodes.values():
            for step in node.steps if node.stage.stepwise else [None]:
                if node.receipt(step).exists() and node.receipt(step) not in lost:
                    found[node.receipt(step)] = (node, step)
        return list(found.values())
    for node, step in _to_make(plan, lost):
        coming = shipments(plan, node, step)
        for name, upstream in node.inputs.items():
            number = step if upstream.stage.stepwise else None
            if upstream.stage.stepwise and number is None:
                continue
            receipt = upstream.receipt(number)
            copied = name in coming and coming[name].path.exists()
            if receipt.exists() and receipt not in lost and not copied:
                found[receipt] = (upstream, number)
    return list(found.values())


def _retire(path: Path) -> None:
    """Takes a record out of the way."""
    path.replace(path.with_name(f"{path.name}.retired-{time.time_ns()}"))


def _fault(plan: Plan, node: Node, step: int | None, cache: DigestCache, deep: bool) -> str | None:
    path = node.receipt(step)
    try:
        receipt = Receipt.read(path)
        if receipt.key != node.key or receipt.stage != node.stage.name or receipt.step != step:
            return f"{path} is the receipt of {receipt.stage} {receipt.key} step {receipt.step}"
        _refuse_collision(node, read_params(node.directory))
        if node.stage.name == "train" and step is not None:
            CheckpointManifest.read(checkpoint_directory(node.directory, step) / "manifest.json")
    except CorruptError as error:
        return error.message()
    elsewhere = place_of(plan.config.inventory, receipt.host) != LOCAL
    for output in receipt.outputs:
        file = node.directory / output.path
        if elsewhere and stays_there(output) and not file.exists():
            continue
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
            retire_checkpoints(damage.node.directory, damage.step, mark)
        elif damage.node.stage.name not in STEPWISE_RECEIPTS:
            _rebuild_params(damage.node)


def retire_checkpoints(directory: Path, step: int, mark: str) -> None:
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
