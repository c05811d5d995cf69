"""Where results live: `<store>/<stage>/<key>/`, and how a stage's inputs are found from its `params.json`.

    <store>/<stage>/<key>/params.json          parameters, upstream keys, code digest
    <store>/<stage>/<key>/receipt.json         last; the result exists when this does
    <store>/train/<key>/receipts/step_<n>.json one a scheduled checkpoint
    <store>/evaluate/<key>/step_<n>.json       one a judged checkpoint
    <store>/environments/<digest>.json         once per digest
    <store>/shipped/<stage>/<key>/             what was made on another host and lies here as a verified copy: `outputs/` with
                                               its `receipt.json`, or `step_<n>/drafter/` with its `receipts/step_<n>.json`

A shipped copy never mixes with what was made here: a host that becomes a training's own host later starts from a clean folder.

Costs a few stats and small JSON reads an upstream.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from dflash.base.errors import CorruptError, PermanentError
from dflash.base.records import OutputFile, ParamsFile, Receipt
from dflash.base.stage import Inputs, Upstream

STEPWISE_RECEIPTS = {"train": "receipts/step_{step}.json", "evaluate": "step_{step}.json"}
"""Stages with one receipt a checkpoint, and where it lies in the stage's folder."""

SMALL_BYTES = 4 << 20
"""Outputs up to this size come back from another host, weights and features excepted."""


def stays_there(output: OutputFile) -> bool:
    """Whether an output of a stage that ran on another host is left there, known by its digest."""
    return output.size > SMALL_BYTES or output.path.endswith(".safetensors")


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


def shipped_directory(store: Path, stage: str, key: str) -> Path:
    """The folder in which a host keeps the copy of a result that was made elsewhere."""
    return store / "shipped" / stage / key


def shipped_artifact(store: Path, stage: str, key: str, step: int | None = None) -> Path:
    """The folder that was shipped: the outputs of a result, or the drafter of a checkpoint."""
    folder = shipped_directory(store, stage, key)
    return folder / "outputs" if step is None else checkpoint_directory(folder, step) / "drafter"


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
    shipped: Collection[str] = (),
) -> Inputs:
    """Finds the upstream results that `params` names, each with its receipt.

    Args:
        shipped: names of those that were made on another host, whose verified copies are to be read.

    Raises:
        CorruptError: an upstream receipt is missing or damaged.
    """
    upstream = {}
    for name, key in params.upstream.items():
        stage = name.split("/", 1)[0]
        directory = stage_directory(store, stage, key)
        params_file = read_params(directory)
        receipt = None
        if name in shipped:
            directory = shipped_directory(store, stage, key)
        if stage not in STEPWISE_RECEIPTS:
            receipt = Receipt.read(receipt_path(directory, stage))
            directory = directory / "outputs" if name in shipped else directory
        elif step is not None:
            receipt = Receipt.read(receipt_path(directory, stage, step))
        upstream[name] = Upstream(directory, params_file, receipt)
    return Inputs(upstream, dict(files or {}), target_path, step)
