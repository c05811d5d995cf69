"""One shipment of the workflow: what the rule `ship` calls.

    result made elsewhere -> its outputs, as hard links, or the drafter of a checkpoint, or a target's folder
    -> a verified copy in `shipped/` of the destination's store -> the record on the controller, last

Costs what `dflash/ship/ship.py` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from dflash.base.errors import DflashError, PermanentError
from dflash.base.files import write_json
from dflash.base.progress import Progress
from dflash.base.records import CheckpointManifest, Receipt
from dflash.base.store import checkpoint_directory, receipt_path, shipped_artifact, stage_directory
from dflash.hosts.host import Host, LocalHost
from dflash.plan.places import LOCAL, TARGET
from dflash.remote import STORE, ask, open_host, raise_error
from dflash.runner import RepeatedFailure, leave_failure, refuse_repeated_failure, watch_controller
from dflash.ship.ship import ship
from dflash.there import make_view

TARGET_BYTES = 4 << 30
"""Targets up to this size are shipped; a larger one must be named by its path on the host."""
IDLE = 18.0
"""Seconds of silence that mean a dead link: hosts at work answer late, and a blackholed link is to be told within 20."""
ATTEMPTS = 6
FINAL = ("config", "permanent")
"""Kinds of errors that a retry cannot help; bytes that arrived damaged are sent again."""


def ship_result(record: Path, store: Path, shipment: Mapping[str, Any]) -> None:
    """Ships one artifact and writes its record. What a retry cannot help leaves its cause beside the record, and a retry of
    the same invocation stops at once.

    Args:
        record: `<store>/ship/<key>/<host>/receipt.json` or `step_<n>.json`.
        shipment: stage, source, destination, folder, hosts; see `plan/places.py`.

    Raises:
        DflashError: it did not arrive whole; a retry goes on where it ended unless the error is permanent.
    """
    watch_controller()
    failure = failure_path(record)
    try:
        refuse_repeated_failure(failure)
        _ship(record, store, shipment)
    except RepeatedFailure:
        raise
    except DflashError as error:
        if error.kind in FINAL:
            leave_failure(failure, f"ship {shipment['stage']}", record.parent.parent.name, error)
        raise
    failure.unlink(missing_ok=True)


def failure_path(record: Path) -> Path:
    """Where a shipment leaves the cause of a failure for good."""
    return record.with_name(f".{record.stem}.failure.json")


def _ship(record: Path, store: Path, shipment: Mapping[str, Any]) -> None:
    key, name = record.parent.parent.name, record.stem
    step = int(name.removeprefix("step_")) if name.startswith("step_") else None
    source, destination = _host(shipment, "source"), _host(shipment, "destination")
    to = _root(destination, shipment["destination"], store)
    progress = Progress(f"ship {shipment['stage']}{f' step {step}' if step is not None else ''} to {destination.id}")
    content = ""
    told: dict[str, Any] = {
        "progress": partial(progress.update, unit="bytes"),
        "tell": progress.say,
        "idle": IDLE,
        "attempts": ATTEMPTS,
    }
    if shipment["stage"] == TARGET:
        folder = small_target(Path(shipment["folder"]), destination)
        receipt = ship(source, folder, destination, destination.workdir / "targets" / key, **told)
    else:
        made_in = stage_directory(store, shipment["stage"], key)
        result = Receipt.read(receipt_path(made_in, shipment["stage"], step))
        content = result.content_digest()
        folder = _source_folder(source, shipment, store, key, step, result)
        if step is not None:
            told["known"] = CheckpointManifest.read(checkpoint_directory(made_in, step) / "manifest.json").drafter
        receipt = ship(source, folder, destination, shipped_artifact(to, shipment["stage"], key, step), **told)
    write_json(
        record,
        {
            "stage": shipment["stage"],
            "key": key,
            "step": step,
            "source": shipment["source"],
            "destination": shipment["destination"],
            "content": content,
            "shipment": receipt.model_dump(mode="json"),
        },
    )


def _host(shipment: Mapping[str, Any], end: str) -> Host:
    return LocalHost() if shipment[end] == LOCAL else open_host(shipment["hosts"], shipment[end])


def _root(host: Host, place: str, store: Path) -> Path:
    """The store of a place."""
    return store.resolve() if place == LOCAL else host.workdir / STORE


def _source_folder(
    host: Host, shipment: Mapping[str, Any], store: Path, key: str, step: int | None, result: Receipt
) -> Path:
    """The folder to ship: the drafter of a checkpoint, or the outputs of a result."""
    directory = stage_directory(_root(host, shipment["source"], store), shipment["stage"], key)
    if step is not None:
        return checkpoint_directory(directory, step) / "drafter"
    if shipment["source"] == LOCAL:
        return make_view(directory, result)
    answer, _ = ask(host, "", {"do": "view", "stage": shipment["stage"], "key": key}, {})
    raise_error(answer, host)
    return Path(answer["path"])


def small_target(folder: Path, destination: Host) -> Path:
    if not folder.is_dir():
        raise PermanentError(
            f"{destination.id} has no copy of the target, and neither has this machine",
            where=str(folder),
            remedy=f"Put it there by hand and name its folder under `hosts.{destination.id}.targets`.",
        )
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    if size > TARGET_BYTES:
        raise PermanentError(
            f"the target has {size / 1e9:.0f} GB, which is not shipped",
            where=f"{folder} to {destination.id}",
            remedy=f"Put it there by hand and name its folder under `hosts.{destination.id}.targets`.",
        )
    return folder.resolve()
