"""Why a stage is stale, in words that name the cause.

The nearest earlier result of the same stage (the one the run's last manifest names, else the newest in the store) is compared
with what is asked for now: changed params with their origin, changed upstreams, changed modules, missing steps. Costs a few
small reads a stale node.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash.base.errors import CorruptError
from dflash.base.records import ParamsFile, RunManifest, StopMarker
from dflash.hosts.lease import holder
from dflash.plan.costly import changed_modules
from dflash.plan.graph import Node, Plan


def reasons(plan: Plan) -> dict[tuple[str, str], str]:
    """For each stale node, one sentence."""
    earlier = {run.name: _last_manifest(plan.config.results, run.name) for run in plan.runs}
    return {(node.stage.name, node.key): explain(node, plan.store, earlier.get(node.runs[0])) for node in plan.stale()}


def explain(node: Node, store: Path, manifest: RunManifest | None) -> str:
    """Why `node` is not fresh."""
    missing = len(node.missing())
    if node.stage.name == "train" and (state := _training_state(node)):
        return state
    if node.stage.stepwise and 0 < missing < len(node.steps):
        return f"{missing} of {len(node.steps)} steps are missing"
    if not node.stage.stepwise and (node.has_results() or _has_outputs(node.directory)):
        return "its receipt is missing"
    old = _earlier(node, store, manifest)
    if old is None:
        return "never made"
    causes = [*_param_causes(old, node.params), *_upstream_causes(old, node.params)]
    modules = changed_modules(old, node.params)
    if modules:
        causes.append(f"code changed: {', '.join(modules)}")
    return "; ".join(causes) if causes else f"nothing of {node.key} stands in the store"


def _has_outputs(directory: Path) -> bool:
    """Whether a result's folder holds more than its params and the traces of attempts."""
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    return any(name != "params.json" and not name.startswith((".", "failure")) for name in names)


def _training_state(node: Node) -> str | None:
    """What a training that is at work or was ended is doing, from its files."""
    record = holder(node.directory / "lease.json")
    if record is not None:
        return f"training now (run {record.run}, pid {record.pid})"
    marker = node.directory / "stop.json"
    if marker.exists():
        stopped = StopMarker.read(marker)
        return f"stopped by {stopped.by} at {stopped.at}; `dflash run --resume` continues it"
    return None


def _earlier(node: Node, store: Path, manifest: RunManifest | None) -> ParamsFile | None:
    if manifest is not None and node.name in manifest.params_files:
        return ParamsFile.model_validate(manifest.params_files[node.name])
    if node.stage.name == "report":
        return None
    candidates = sorted(
        (path for path in store.glob(f"{node.stage.name}/*/params.json") if path.parent.name != node.key),
        key=lambda path: path.stat().st_mtime,
        reverse=True,
    )
    for path in candidates:
        try:
            found = ParamsFile.read(path)
        except CorruptError:
            continue
        if "name" not in found.params or found.params["name"] == node.params.params.get("name"):
            return found
    return None


def _param_causes(old: ParamsFile, new: ParamsFile) -> list[str]:
    before, after = flatten(old.params), flatten(new.params)
    causes = []
    if old.params.get("adoptions") != new.params.get("adoptions"):
        causes.append("the adoptions in use changed")
    before, after = ({k: v for k, v in side.items() if k.split(".")[0] != "adoptions"} for side in (before, after))
    for name in sorted({*before, *after}):
        if before.get(name) != after.get(name):
            origin = new.origins.get(name.split(".")[0], "")
            place = f" ({origin})" if origin not in ("", "default") else ""
            causes.append(f"{name}: {_value(before, name)} -> {_value(after, name)}{place}")
    return causes


def _value(values: dict[str, Any], name: str) -> str:
    text = str(values[name]) if name in values else "absent"
    return text if len(text) <= 24 else f"{text[:21]}..."


def _upstream_causes(old: ParamsFile, new: ParamsFile) -> list[str]:
    causes = []
    for name in sorted({*old.upstream, *new.upstream}):
        if name not in old.upstream:
            causes.append(f"{name} was added")
        elif name not in new.upstream:
            causes.append(f"{name} was removed")
        elif old.upstream[name] != new.upstream[name]:
            causes.append(f"{name} changed")
    return causes


def flatten(values: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings and lists as dotted names."""
    if isinstance(values, dict) and values:
        return {k: v for key, part in values.items() for k, v in flatten(part, f"{prefix}{key}.").items()}
    if isinstance(values, list) and values and isinstance(values[0], dict):
        return {k: v for i, part in enumerate(values) for k, v in flatten(part, f"{prefix}{i}.").items()}
    return {prefix[:-1]: values}


def _last_manifest(results: Path, run: str) -> RunManifest | None:
    path = results / "runs" / run / "latest" / "manifest.json"
    try:
        return RunManifest.read(path) if path.exists() else None
    except CorruptError:
        return None
