"""The manifest of a run: every key, every receipt, every environment, in one file that explains the whole state.

Built from the run's own `params.json` and the store alone, so that anybody who has the store can build it again. Costs one
small read a receipt.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from dflash.base.environment import git_facts
from dflash.base.records import Environment, ParamsFile, Receipt, RunManifest, StageEntry, now
from dflash.base.store import STEPWISE_RECEIPTS, read_params, receipt_path, stage_directory


def build_manifest(directory: Path, store: Path) -> RunManifest:
    """Describes the run whose report lies (or will lie) in `directory`.

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
        receipts = {}
        for step in steps if stage in STEPWISE_RECEIPTS else [None]:
            receipt = Receipt.read(receipt_path(folder, stage, step))
            receipts[str(step) if step is not None else ""] = receipt.content_digest()
            label = f"{receipt.host}/{receipt.environment}"
            if label not in environments:
                environments[label] = Environment.read(store / "environments" / f"{receipt.environment}.json")
        entries.append(StageEntry(name=name, stage=stage, key=key, receipts=receipts))
    return RunManifest(
        run=report.params["run"],
        runkey=report.key,
        created=now(),
        config={name: document["params"] for name, document in params_files.items()},
        params_files=params_files,
        stages=entries,
        steps=steps,
        git=git_facts(),
        environments=environments,
        adoptions=report.params["adoptions"],
        determinism=_determinism(environments),
    )


def _determinism(environments: dict[str, Environment]) -> Literal["bitwise", "tolerance", "statistical"]:
    """On CPUs with one thread results are equal bit for bit; a GPU's reductions are equal within a tolerance only."""
    return "tolerance" if any(environment.gpus for environment in environments.values()) else "bitwise"
