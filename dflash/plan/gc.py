"""What may go: results that no run needs any more, here and on other hosts.

A result is needed when a run's manifest names it, when the present config asks for it, when somebody decided that it stands
(`dflash adopt`), when a training that is at work has it upstream, here or on another host, when another needed result was made
from it (a continued training's parent too), when the config names a file of it (prompts, a drafter), or when a person imported
it. All else is garbage: trials whose params were changed before a run was finished, results whose run folder was deleted, code
that no manifest names, copies for runs that are gone, shipments that were cut off. The controller alone knows what is needed;
what lies on a host is looked at there (`sweep.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path

from dflash.base.errors import CorruptError
from dflash.base.records import RunManifest
from dflash.plan.decisions import Decisions
from dflash.plan.graph import Plan
from dflash.plan.kept_code import kept_path
from dflash.plan.places import LOCAL, Home, Shipment, planned_place, read_home, shipments
from dflash.plan.sweep import Coming, Garbage, Name, Needs, at_work, closure, in_store, measured

IMPORTED = "imported"
"""Folder of the store that holds what people brought in; only they decide when it goes."""


def find_garbage(
    results: Path, plan: Plan | None = None, live: Collection[str] = (), *, unsure: bool = False
) -> list[Garbage]:
    """Everything in `results` that nothing needs, largest first.

    Args:
        plan: of the present config; what it asks for is kept. live: keys of trainings at work on other hosts. unsure: some host
            could not be asked for those, so what is here of trainings elsewhere stays.

    Raises:
        CorruptError: a run's manifest or a needed `params.json` cannot be read, so what is needed cannot be told.
    """
    store = results / "store"
    needs = find_needs(results, plan, live)
    found = [item for item in in_store(store, needs) if not (unsure and _of_far_training(item.path))]
    kept = {key for _, key in needs.results} | needs.targets
    for folder in sorted(path for path in (store / "ship").glob("*") if path.is_dir() and path.name not in kept):
        found.append(measured(folder, "records of shipments of what nothing needs"))
    named = {kept_path(results, manifest.code) for _, manifest in _manifests(results)}
    for path in sorted((results / "code").glob("*.tar.gz")):
        if path not in named:
            found.append(measured(path, "code that no run's manifest names"))
    return by_size(found)


def by_size(found: list[Garbage]) -> list[Garbage]:
    """Largest first."""
    return sorted(found, key=lambda item: (-item.size, str(item.path)))


def find_needs(results: Path, plan: Plan | None = None, live: Collection[str] = (), place: str = LOCAL) -> Needs:
    """What must stay at a place.

    Args:
        live: keys of trainings at work on other hosts.

    Raises:
        CorruptError: see `find_garbage`.
    """
    roots = _roots(results, plan) | {("train", key) for key in live}
    needed, targets = closure(results / "store", roots)
    needs = Needs(needed, coming=_moving_to(results / "store", place), targets=targets)
    if plan is not None:
        nodes = [node for node in plan.nodes.values() if node.stage.name != "report"]
        needs.files = {str(digest) for node in nodes for digest in node.placement.get("files", {})}
        digests = [(node.params.params.get("target") or {}).get("digest") for node in nodes]
        needs.targets |= {str(digest)[:12] for digest in digests if digest}
        needs.coming |= {(item.stage, item.key, item.step) for item in _coming(plan, place)}
    return needs


def _of_far_training(path: Path) -> bool:
    """Whether this is the controller's copy of a training elsewhere, by its record; without one a training that began here has a
    lease, held or not."""
    if path.parent.name != "train" or path.parent.parent.name != "store":
        return False
    try:
        home = read_home(path)
    except CorruptError:
        return True  # nobody knows where it is
    if home is not None:
        return home.place != LOCAL or home.moving is not None
    return not (path / "lease.json").exists()


def _coming(plan: Plan, place: str) -> list[Shipment]:
    """Shipments that what is missing still needs at a place."""
    found: list[Shipment] = []
    for node in plan.nodes.values():
        if node.stage.name == "report" or planned_place(plan, node) != place or not node.missing():
            continue
        for step in node.steps if node.stage.stepwise else [None]:
            if not node.receipt(step).exists():
                found += [item for item in shipments(plan, node, step).values() if item.destination == place]
    return found


def _moving_to(store: Path, place: str) -> set[Coming]:
    """Trainings that are on their way to a place, whichever config had them carried over."""
    return {
        ("train", key, None)
        for key, home in homes(store).items()
        if home.moving is not None and home.moving.to == place
    }


def homes(store: Path) -> dict[str, Home]:
    """Where trainings live of which that is recorded, by key."""
    found = {}
    for path in store.glob("train/*/home.json"):
        with contextlib.suppress(CorruptError):
            found[path.parent.name] = Home.read(path)
    return found


def _manifests(results: Path) -> list[tuple[Path, RunManifest]]:
    found = []
    for path in sorted(results.glob("runs/*/*/manifest.json")):
        if path.parent.is_symlink():
            continue
        try:
            found.append((path, RunManifest.read(path)))
        except CorruptError as error:
            raise CorruptError(
                error.what,
                where=str(path),
                remedy="What this run needs cannot be told, so nothing is deleted: rebuild it with `dflash run`, or delete the "
                "run's folder if the run may go.",
            ) from error
    return found


def _roots(results: Path, plan: Plan | None) -> set[Name]:
    roots = {(entry.stage, entry.key) for _, manifest in _manifests(results) for entry in manifest.stages}
    decided = Decisions.load(results).entries
    roots |= {(str(item["stage"]), str(item["old_key"])) for item in decided if item["decision"] == "adopt"}
    if plan is not None:
        roots |= {(node.stage.name, node.key) for node in plan.nodes.values() if node.stage.name != "report"}
        roots |= _parents(plan) | _named_files(results / "store", plan)
    return roots | at_work(results / "store")


def _parents(plan: Plan) -> set[Name]:
    """Trainings that a planned one goes on from: its own `params.json` may not be written yet."""
    found = (node.params.params.get("continue_from") for node in plan.nodes.values())
    return {("train", str(parent["key"])) for parent in found if isinstance(parent, dict) and "key" in parent}


def _named_files(store: Path, plan: Plan) -> set[Name]:
    """Results of which the config names a file: prompts of a dataset, a parent dataset, a drafter."""
    base = store.resolve()
    names: set[Name] = set()
    for path in {Path(file).resolve() for run in plan.runs for file in run.config.files.values()}:
        if path.is_relative_to(base) and len(parts := path.relative_to(base).parts) > 2:
            names.add((parts[0], parts[1]))
    return names
