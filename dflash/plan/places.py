"""Where results are, where they are needed, and so what must be shipped.

A receipt says on which host its result was made; a result that does not stand yet will be made where its role runs. Whoever
needs a result of another host reads a verified copy of it, a shipment:

    <store>/ship/<key>/<host>/receipt.json, step_<n>.json      the record that the copy is in place

A training is more than its receipts: it lives at one place, its home, until `dflash run` has carried it over to another:

    <store>/train/<key>/home.json                              where it lives, and where it is being carried to

Hosts that are this machine count as one place, `local`. Costs one small read for each receipt that a missing result needs.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.base.errors import CorruptError, PermanentError
from dflash.base.files import read_json
from dflash.base.records import Receipt, Record
from dflash.hosts.inventory import Inventory
from dflash.plan.graph import Node, Plan

LOCAL = "local"
TARGET = "target"
"""What a shipment of the target's own folder is called in place of a stage."""


class Moving(Record):
    """A move under way. token: its name. root: of what goes along, once that is known. asked: the new host was told to take
    it in, so the training may live there already."""

    to: str
    token: str
    root: str = ""
    asked: bool = False


class Home(Record):
    """`home.json` on the controller: the place where a training lives."""

    place: str
    moving: Moving | None = None


@dataclass(frozen=True)
class Shipment:
    """One artifact that goes from one place to another. `path` is its record on the controller.

    key: of the result, or the first 12 digits of the target's digest. folder: of a target, on the controller.
    """

    stage: str
    key: str
    step: int | None
    source: str
    destination: str
    path: Path
    folder: Path | None = None


def place_of(inventory: Inventory, host: str) -> str:
    """The place that a host is: `local` for this machine, whatever the hosts file calls it. A host that the file does not
    name (it was renamed or given away) is a place of its own, out of reach."""
    if host != LOCAL and host not in inventory.entries:
        return host
    entry = inventory.entry(host)
    return LOCAL if entry.kind == "local" and entry.workdir is None and not entry.wrap else host


def target_on(inventory: Inventory, host: str, node: Node) -> Path | None:
    """Where a host has the target that a result needs, if the hosts file says so: by its digest or the first 8 digits of it,
    by its revision, or by the name of its folder on the controller. The stage checks the digest in any case."""
    target = node.params.params.get("target") or {}
    digest = str(target.get("digest") or "")
    folder = Path(str(node.placement.get("target_path") or "")).name
    for name, path in inventory.entry(host).targets.items():
        if name in (digest, target.get("revision"), folder) or (len(name) >= 8 and digest.startswith(name)):
            return path
    return None


def planned_place(plan: Plan, node: Node) -> str:
    """Where a result will be made; reports are made on the controller."""
    return place_of(plan.config.inventory, str(node.placement.get("host", LOCAL)))


def made_at(plan: Plan, node: Node, step: int | None = None) -> str:
    """Where a result is, by its receipt, or will be."""
    path = node.receipt(step)
    try:
        host = _receipt_host(path, path.stat().st_mtime_ns)
    except (OSError, CorruptError):
        return planned_place(plan, node)
    return place_of(plan.config.inventory, host)


def home_path(directory: Path) -> Path:
    """Where the controller keeps the home of a training."""
    return directory / "home.json"


def read_home(directory: Path) -> Home | None:
    """The home of a training, if it is recorded: one that began on this machine and never left it has no record."""
    path = home_path(directory)
    return Home.read(path) if path.exists() else None


def begun_at(plan: Plan, node: Node) -> str | None:
    """The place where a training lives; None when it has not begun."""
    home = read_home(node.directory)
    if home is not None:
        return home.place
    attempts = [path for path in (node.directory / "attempts").glob("*.json") if path.stem.isdigit()]
    if attempts:
        last = read_json(max(attempts, key=lambda path: int(path.stem)))
        return place_of(plan.config.inventory, str(last["placement"]["host"]))
    standing = [step for step in node.steps if node.receipt(step).exists()]
    return made_at(plan, node, standing[-1]) if standing else None


def training_place(plan: Plan, node: Node) -> str:
    """Where a training lives, or will begin: whom to ask about it."""
    return begun_at(plan, node) or planned_place(plan, node)


def is_moved(plan: Plan, node: Node) -> bool:
    """Whether a training that is not complete lives elsewhere than its role runs now, or is on its way."""
    if node.stage.name != "train" or not node.missing():
        return False
    home = read_home(node.directory)
    return begun_at(plan, node) not in (None, planned_place(plan, node)) or (
        home is not None and home.moving is not None
    )


def not_here(key: str, place: str, moving: Moving | None, here: str, where: str) -> PermanentError:
    """What is said to whoever would train where a training does not live, or while it moves."""
    if place == here and moving is not None:
        return PermanentError(
            f"training {key} is on its way from {place} to {moving.to}",
            where=where,
            remedy="`dflash run` brings it to where roles.gpu says.",
        )
    return PermanentError(
        f"training {key} was begun on {place}, and roles.gpu is {here} now",
        where=where,
        remedy=f"`dflash run` carries it over to {here}; or set the role back.",
    )


@functools.cache
def _receipt_host(path: Path, _changed: int) -> str:
    """The host that a receipt names, read once for each state of the file."""
    return Receipt.read(path).host


def _numbers(node: Node) -> list[int | None]:
    """The steps of a node; of one that has none, a single None."""
    return list(node.steps) if node.stage.stepwise else [None]


def ship_record(store: Path, key: str, host: str, step: int | None = None) -> Path:
    """The controller's record of a shipment."""
    return store / "ship" / key / host / (f"step_{step}.json" if step is not None else "receipt.json")


def shipments(plan: Plan, node: Node, step: int | None = None) -> dict[str, Shipment]:
    """What must be shipped before a result can be made, by the name of the input (`target` for the target)."""
    if node.stage.name == "report":
        return {}
    here = planned_place(plan, node)
    found = {}
    for name, upstream in node.inputs.items():
        number = step if upstream.stage.stepwise else None
        source = made_at(plan, upstream, number)
        if source != here:
            record = ship_record(plan.store, upstream.key, here, number)
            found[name] = Shipment(upstream.stage.name, upstream.key, number, source, here, record)
    target = node.placement.get("target_path")
    if here != LOCAL and target is not None and target_on(plan.config.inventory, here, node) is None:
        key = _target_digest(node)[:12]
        record = ship_record(plan.store, key, here)
        found[TARGET] = Shipment(TARGET, key, None, LOCAL, here, record, Path(str(target)))
    return found


def find_shipment(plan: Plan, key: str, host: str, step: int | None) -> Shipment | None:
    """The shipment that a record's path names, if the plan has one."""
    for node in plan.nodes.values():
        if planned_place(plan, node) != host:
            continue
        mentioned = key in {upstream.key for upstream in node.inputs.values()} or (
            step is None and _target_digest(node)[:12] == key
        )
        steps = [step] if node.stage.stepwise and step is not None else [None]
        if node.stage.stepwise and step is None:
            steps = list(node.steps[:1])
        for number in steps if mentioned else []:
            for shipment in shipments(plan, node, number).values():
                if (shipment.key, shipment.step) == (key, step):
                    return shipment
    return None


def placement(plan: Plan, node: Node, step: int | None = None) -> dict[str, Any]:
    """What enters no key about where a job runs: its host, its copies from elsewhere, its target there."""
    here = planned_place(plan, node)
    if node.stage.name == "report":
        elsewhere = [
            name
            for name, upstream in node.inputs.items()
            if any(made_at(plan, upstream, number) != LOCAL for number in _numbers(upstream))
        ]
        return {"elsewhere": elsewhere} if elsewhere else {}
    coming = shipments(plan, node, step)
    placed: dict[str, Any] = {"host": str(node.placement.get("host", LOCAL))}
    shipped = sorted(name for name in coming if name != TARGET)
    if shipped:
        placed["shipped"] = shipped
    if here != LOCAL:
        placed["hosts"] = str(plan.config.inventory.file)
        if node.placement.get("target_path") is not None:
            there = target_on(plan.config.inventory, here, node)
            placed["target_path"] = str(there) if there is not None else f"targets/{_target_digest(node)[:12]}"
    return placed


def _target_digest(node: Node) -> str:
    target = node.params.params.get("target") or {}
    return str(target.get("digest") or "")


def shipment_json(shipment: Shipment, hosts_file: Path | None) -> str:
    """A shipment as the command of its rule reads it."""
    return json.dumps(
        {
            "stage": shipment.stage,
            "source": shipment.source,
            "destination": shipment.destination,
            "folder": str(shipment.folder) if shipment.folder is not None else None,
            "hosts": str(hosts_file) if hosts_file is not None else None,
        },
        sort_keys=True,
    )
