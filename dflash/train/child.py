"""What every process that a launcher starts has in common: it reads its parameters the same way and leaves the cause of a
permanent failure beside the training. Costs a few small files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash.base.errors import ConfigError, DflashError, PermanentError
from dflash.base.progress import Progress
from dflash.base.records import Failure, now
from dflash.base.stage import HostContext, Inputs
from dflash.base.store import load_inputs, read_params
from dflash.train.attempts import Attempt
from dflash.train.telemetry import alert
from dflash.train.train_params import TrainParams


def resolved_params(keyed: dict[str, Any], placed: dict[str, Any]) -> TrainParams:
    """The parameters of a training: those of its key and those of its placement.

    Raises:
        ConfigError: they do not fit; names the field.
    """
    try:
        return TrainParams.model_validate({**keyed, **placed})
    except ValueError as error:
        raise ConfigError(f"parameters and placement do not fit: {error}", where="train") from error


def handed_over(directory: Path, store: Path, attempt: Attempt) -> tuple[TrainParams, Inputs, HostContext]:
    """What a process of an attempt is to train, on what, and where, from the files that its launcher left.

    Raises:
        ConfigError: parameters and placement do not fit. CorruptError: a file is missing or damaged.
    """
    params_file = read_params(directory)
    placement = attempt.placement
    params = resolved_params(params_file.params, placement.values)
    target_path = Path(placement.target_path) if placement.target_path else None
    context = HostContext(
        host=placement.host,
        device=placement.device,
        threads=placement.threads,
        attempt=attempt.attempt,
        placement={**placement.values, "accept_env": placement.accept_env, "store": str(store)},
        progress=Progress("train"),
    )
    return params, load_inputs(params_file, store, target_path=target_path, shipped=placement.shipped), context


def leave_failure(directory: Path, invocation: str, error: DflashError) -> None:
    """Writes `failure.json`: why it would fail again."""
    failure = Failure(
        stage="train",
        key=directory.name,
        kind=error.kind,
        message=error.message(),
        at=now(),
        invocation=invocation,
    )
    try:
        failure.write(directory / "failure.json")
    except PermanentError as full:
        alert(full.message())
