"""The manifest of a run: every key, every receipt, every environment, in one file that explains the whole state.

Built from the run's own `params.json` and the store, so that anybody who has the store can build it again; the configuration as
it was given is added by the plan. Costs one small read a receipt.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from dflash.base.environment import git_facts
from dflash.base.records import (
    CheckpointManifest,
    Environment,
    ParamsFile,
    Receipt,
    RunManifest,
    StageEntry,
    TensorFact,
    now,
)
from dflash.base.store import STEPWISE_RECEIPTS, checkpoint_directory, read_params, receipt_path, stage_directory


def build_manifest(
    directory: Path, store: Path, source: Mapping[str, Any] | None = None, code: str = ""
) -> RunManifest:
    """Describes the run whose report lies (or will lie) in `directory`.

    Args:
        source: the run's configuration, every default filled in (`config.resolved_source`).
        code: digest of the code that is kept (`kept_code.py`).

    Raises:
        CorruptError: a params file or receipt that the run needs is missing or damaged.
    """
    report = read_params(directory)
    steps: list[int] = report.params["steps"]
    entries: list[StageEntry] = []
    params_files: dict[str, dict[str, Any]] = {"report": report.model_dump(mode="json")}
    environments: dict[str, Environment] = {}
    for name, key in report.upstream.items():
        stage = name.split("/")[0]
        folder = stage_directory(store, stage, key)
        params_files[name] = ParamsFile.read(folder / "params.json").model_dump(mode="json")
        entry = StageEntry(name=name, stage=stage, key=key, receipts={})
        for step in steps if stage in STEPWISE_RECEIPTS else [None]:
            receipt = Receipt.read(receipt_path(folder, stage, step))
            place = str(step) if step is not None else ""
            entry.receipts[place] = receipt.content_digest()
            entry.outputs[place] = receipt.outputs
            label = f"{receipt.host}/{receipt.environment}"
            entry.environments[place] = label
            if label not in environments:
                environments[label] = Environment.read(store / "environments" / f"{receipt.environment}.json")
            if step is None:
                entry.counts, entry.results = receipt.counts, receipt.results
        entries.append(entry)
    return RunManifest(
        run=report.params["run"],
        runkey=report.key,
        created=now(),
        config={name: document["params"] for name, document in params_files.items()},
        source=dict(source or {}),
        tensors=_last_tensors(store, report.upstream.get("train"), steps),
        params_files=params_files,
        stages=entries,
        steps=steps,
        git=git_facts(),
        code=code,
        environments=environments,
        adoptions=report.params["adoptions"],
        determinism=_determinism(environments),
    )


def _last_tensors(store: Path, key: str | None, steps: list[int]) -> list[TensorFact]:
    """The tensors of the last checkpoint; none when the run trains nothing or the checkpoint lies on another host only."""
    if key is None or not steps:
        return []
    path = checkpoint_directory(stage_directory(store, "train", key), max(steps)) / "manifest.json"
    return CheckpointManifest.read(path).tensors if path.exists() else []


def _determinism(environments: dict[str, Environment]) -> Literal["bitwise", "tolerance", "statistical"]:
    """On CPUs with one thread results are equal bit for bit; a GPU's reductions are equal within a tolerance only."""
    return "tolerance" if any(environment.gpus for environment in environments.values()) else "bitwise"
