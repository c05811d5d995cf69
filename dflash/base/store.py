"""Where results live: `<store>/<stage>/<key>/`, and how a stage's inputs are found from its `params.json`.

    <store>/<stage>/<key>/params.json          parameters, upstream keys, code digest
    <store>/<stage>/<key>/receipt.json         last; the result exists when this does
    <store>/train/<key>/receipts/step_<n>.json one a scheduled checkpoint
    <store>/evaluate/<key>/step_<n>.json       one a judged checkpoint
    <store>/environments/<digest>.json         once per digest

Costs a few stats and small JSON reads an upstream.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dflash.base.errors import CorruptError, PermanentError
from dflash.base.records import ParamsFile, Receipt
from dflash.base.stage import Inputs, Upstream

STEPWISE_RECEIPTS = {"train": "receipts/step_{step}.json", "evaluate": "step_{step}.json"}
"""Stages with one receipt a checkpoint, and where it lies in the stage's folder."""


def stage_directory(store: Path, stage: str, key: str) -> Path:
    """The folder of one result."""
    return store / stage / key


def receipt_path(directory: Path, stage: str, step: int | None = None) -> Path:
    """The receipt of a result (of its step `step`, for `train` and `evaluate`)."""
    if stage in STEPWISE_RECEIPTS:
        if step is None:
            raise PermanentError(f"{stage} has one receipt a step; no step was given")
        return directory / STEPWISE_RECEIPTS[stage].format(step=step)
    return directory / "receipt.json"


def checkpoint_directory(train_directory: Path, step: int) -> Path:
    """The folder of a checkpoint; it is complete when its `manifest.json` stands."""
    return train_directory / f"step_{step}"


def read_params(directory: Path) -> ParamsFile:
    """Reads `params.json` and checks that its content has the key it claims and the folder's name.

    Raises:
        CorruptError: missing, damaged, edited by hand, or in the wrong folder.
    """
    path = directory / "params.json"
    params = ParamsFile.read(path)
    computed = params.compute_key()
    if not params.key == computed == directory.name:
        raise CorruptError(
            f"the content has key {computed}, the file says {params.key} and the folder {directory.name}",
            where=str(path),
            remedy="It was edited or moved; delete the folder and run `dflash run`.",
        )
    return params


def load_inputs(
    params: ParamsFile,
    store: Path,
    *,
    files: Mapping[str, Path] | None = None,
    target_path: Path | None = None,
    step: int | None = None,
) -> Inputs:
    """Finds the upstream results that `params` names, each with its receipt.

    Raises:
        CorruptError: an upstream receipt is missing or damaged.
    """
    upstream = {}
    for name, key in params.upstream.items():
        stage = name.split("/", 1)[0]
        directory = stage_directory(store, stage, key)
        receipt = None
        if stage not in STEPWISE_RECEIPTS:
            receipt = Receipt.read(receipt_path(directory, stage))
        elif step is not None:
            receipt = Receipt.read(receipt_path(directory, stage, step))
        upstream[name] = Upstream(directory, read_params(directory), receipt)
    return Inputs(upstream, dict(files or {}), target_path, step)
