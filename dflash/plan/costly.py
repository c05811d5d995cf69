"""Costly stages are never redone by accident.

When the key of a costly stage has no result yet, but the same params and upstreams have one under other code, planning stops
and asks: adopt the old result, or recompute. Costs one small read for each stored result of a costly stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dflash.base.errors import CorruptError, DecisionNeeded
from dflash.base.records import ParamsFile
from dflash.plan.code import source_root
from dflash.plan.graph import Node, Plan, has_results
from dflash.plan.history import commits_touching


@dataclass(frozen=True)
class CodeChange:
    """A node whose result stands under other code. modules: those that differ, added and removed ones included."""

    node: Node
    old_key: str
    modules: tuple[str, ...]


def code_changes(plan: Plan) -> list[CodeChange]:
    """The costly nodes without a result of their own for which a result of other code exists and nothing was decided."""
    found = []
    for node in plan.nodes.values():
        if not node.stage.costly or node.has_results() or plan.decisions.recompute(node.stage.name, node.key):
            continue
        for old in twins(node, plan.store):
            found.append(CodeChange(node, old.key, changed_modules(old, node.params)))
            break
    return found


def twins(node: Node, store: Path) -> list[ParamsFile]:
    """Stored results of the same params and upstreams under other code, newest first."""
    found = []
    folders = sorted(
        store.glob(f"{node.stage.name}/*/params.json"), key=lambda path: path.stat().st_mtime, reverse=True
    )
    for path in folders:
        if path.parent.name == node.key or not has_results(path.parent, node.stage):
            continue
        try:
            old = ParamsFile.read(path)
        except CorruptError:
            continue
        if old.params == node.params.params and old.upstream == node.params.upstream:
            found.append(old)
    return found


def changed_modules(old: ParamsFile, new: ParamsFile) -> tuple[str, ...]:
    """The modules whose digest differs between two results."""
    names = {*old.code.modules, *new.code.modules}
    return tuple(sorted(name for name in names if old.code.modules.get(name) != new.code.modules.get(name)))


def require_decisions(plan: Plan) -> None:
    """Stops when a costly stage would be redone only because its code has changed.

    Raises:
        DecisionNeeded: names stage, modules, the commits that touched them, and the two commands to choose from.
    """
    changes = code_changes(plan)
    if not changes:
        return
    parts = []
    for change in changes:
        stage = change.node.stage.name
        commits = commits_touching(source_root(), change.modules)
        parts.append(
            f"the code of {change.node.name} changed ({', '.join(change.modules)}"
            f"{'; ' + '; '.join(commits) if commits else ''}) and a result made by the old code stands "
            f'({stage} {change.old_key}). Keep it: `dflash adopt {stage} {change.old_key} --why "..."`. '
            f"Make it anew: `dflash run --recompute {stage}`"
        )
    raise DecisionNeeded("; ".join(parts))


def decide_recompute(plan: Plan, stages: list[str]) -> None:
    """Records for each changed node of `stages` that it is to be made anew."""
    for change in code_changes(plan):
        if change.node.stage.name in stages:
            plan.decisions.add("recompute", change.node.stage.name, change.old_key, change.node.key, "--recompute")
