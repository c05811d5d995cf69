"""What may go: results in the store that no run needs any more.

A result is needed when a run's manifest names it, when the present config asks for it, when a training that is at work has
it upstream, when another needed result was made from it (a continued training's parent too), when the config names a file
of it (prompts, a drafter), or when a person imported it. All else is garbage: trials whose params were changed before a run
was finished, results whose run folder was deleted. Listing costs one small read a result and a stat a file: 20,000 files
take 0.5 s. Deleting renames first, so that no half of a result is ever taken for one.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dflash.base.errors import CorruptError, PermanentError
from dflash.base.records import ParamsFile, Receipt, RunManifest
from dflash.hosts.lease import holder
from dflash.plan.graph import Plan
from dflash.stages import BY_NAME

IMPORTED = "imported"
"""Folder of the store that holds what people brought in; only they decide when it goes."""
ENVIRONMENTS = "environments"
Name = tuple[str, str]


@dataclass(frozen=True)
class Garbage:
    """One result (or environment) that nothing needs. size: bytes of its files."""

    path: Path
    size: int
    files: int
    why: str


def find_garbage(results: Path, plan: Plan | None = None) -> list[Garbage]:
    """Everything in the store of `results` that nothing needs, largest first.

    Args:
        plan: of the present config; what it asks for is kept.

    Raises:
        CorruptError: a run's manifest or a needed `params.json` cannot be read, so what is needed cannot be told.
    """
    store = results / "store"
    needed = _closure(store, _roots(results, plan))
    found = []
    for stage in [name for name in BY_NAME if name != "report"]:
        for folder in sorted(path for path in (store / stage).glob("*") if path.is_dir()):
            if (stage, folder.name) not in needed:
                size, files = _size(folder)
                found.append(Garbage(folder, size, files, "no run's manifest names it"))
    kept = {key for _, key in needed}
    for folder in sorted(path for path in (store / "ship").glob("*") if path.is_dir() and path.name not in kept):
        size, files = _size(folder)
        found.append(Garbage(folder, size, files, "records of shipments of a result that nothing needs"))
    found += _stale_environments(store, needed)
    return sorted(found, key=lambda item: (-item.size, str(item.path)))


def _roots(results: Path, plan: Plan | None) -> set[Name]:
    roots: set[Name] = set()
    for path in sorted(results.glob("runs/*/*/manifest.json")):
        if path.parent.is_symlink():
            continue
        try:
            manifest = RunManifest.read(path)
        except CorruptError as error:
            raise CorruptError(
                error.what,
                where=str(path),
                remedy="What this run needs cannot be told, so nothing is deleted: rebuild it with `dflash run`, or delete the "
                "run's folder if the run may go.",
            ) from error
        roots |= {(entry.stage, entry.key) for entry in manifest.stages}
    if plan is not None:
        roots |= {(node.stage.name, node.key) for node in plan.nodes.values() if node.stage.name != "report"}
        roots |= _parents(plan) | _named_files(results / "store", plan)
    for lease in (results / "store").glob("train/*/lease.json"):
        if holder(lease) is not None:
            roots.add(("train", lease.parent.name))
    return roots


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


def _closure(store: Path, roots: set[Name]) -> set[Name]:
    """The roots and everything they were made from."""
    needed: set[Name] = set()
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name in needed:
            continue
        needed.add(name)
        path = store / name[0] / name[1] / "params.json"
        if path.exists():
            params = ParamsFile.read(path)
            waiting += [(label.partition("/")[0], key) for label, key in params.upstream.items()]
            parent = params.params.get("continue_from")
            if isinstance(parent, dict) and "key" in parent:
                waiting.append(("train", str(parent["key"])))
    return needed


def _size(folder: Path) -> tuple[int, int]:
    """Bytes and number of the files below a folder; links count as themselves."""
    sizes = [path.lstat().st_size for path in folder.rglob("*") if path.is_symlink() or path.is_file()]
    return sum(sizes), len(sizes)


def _stale_environments(store: Path, needed: set[Name]) -> list[Garbage]:
    """Environments that no receipt of a needed result names."""
    kept = {receipt.environment for stage, key in needed for receipt in _receipts(store / stage / key)}
    return [
        Garbage(path, path.stat().st_size, 1, "no receipt names it")
        for path in sorted((store / ENVIRONMENTS).glob("*.json"))
        if path.stem not in kept
    ]


def _receipts(folder: Path) -> Iterable[Receipt]:
    for path in (*folder.glob("receipt.json"), *folder.glob("receipts/step_*.json"), *folder.glob("step_*.json")):
        try:
            yield Receipt.read(path)
        except CorruptError:
            continue  # `dflash plan --verify` names it; its environment may go, it is rebuilt with the result


def delete(garbage: Iterable[Garbage]) -> None:
    """Deletes what `find_garbage` found.

    Raises:
        PermanentError: a file cannot be deleted; names it.
    """
    for item in garbage:
        if holder(item.path / "lease.json") is not None:
            continue  # a training began meanwhile
        try:
            if item.path.is_dir():
                aside = item.path.with_name(f".gone-{item.path.name}")
                item.path.rename(aside)
                shutil.rmtree(aside)
            else:
                item.path.unlink(missing_ok=True)
        except OSError as error:
            raise PermanentError(f"cannot be deleted: {error.strerror}", where=str(item.path)) from error
