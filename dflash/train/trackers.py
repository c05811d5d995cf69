"""Tells a tracker (tensorboard, wandb, trackio) what `metrics.jsonl` says. Cannot change a result, nor end a training.

A thread reads the lines that this attempt adds to the file, which is the truth, and passes their numbers on. Whatever the tracker
does (refuse, hang, lose the network) costs at most one alert and, when training ends, a wait of `PATIENCE` seconds. Only a
package that is not installed is an error, before the first step. Costs one small read a second beside the tracker's own.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from dflash.base.errors import ConfigError
from dflash.base.records import MetricsLine
from dflash.train.telemetry import alert

PATIENCE = 10.0
"""Seconds that a tracker gets for the last lines when training ends."""
PROJECT = "dflash"


class Tracker(Protocol):
    """What is asked of a tracker."""

    def tell(self, values: Mapping[str, float], step: int) -> None:
        """Takes the numbers of a step."""

    def close(self) -> None:
        """Sends what is left."""


def numbers(line: MetricsLine) -> dict[str, float]:
    """The numbers of a line of metrics by name: `loss`, `accuracy/slot_1`, `tokens_per_second/target`, ..."""
    found: dict[str, float] = {}
    for name, value in line.model_dump(exclude={"attempt", "step", "time", "batch_ids", "buckets"}).items():
        if name == "accuracy_by_slot":
            slots = enumerate(value, start=1)
            found |= {f"accuracy/slot_{slot}": share for slot, share in slots if share is not None}
        elif isinstance(value, Mapping):
            found |= {f"{name}/{part}": float(number) for part, number in value.items()}
        elif isinstance(value, list):
            found |= {f"{name}/{place}": float(number) for place, number in enumerate(value)}
        else:
            found[name] = float(value)
    return found


class _Tensorboard:
    def __init__(self, directory: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(directory / "tensorboard"))

    def tell(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Logger:
    """wandb and trackio: the same three calls."""

    def __init__(self, module: Any, name: str, config: Mapping[str, Any], **options: Any) -> None:
        self._module = module
        module.init(project=PROJECT, name=name, config=dict(config), **options)

    def tell(self, values: Mapping[str, float], step: int) -> None:
        self._module.log(dict(values), step=step)

    def close(self) -> None:
        self._module.finish()


def check_installed(kind: str) -> None:
    """Refuses a tracker whose package is missing.

    Raises:
        ConfigError: names package and extra.
    """
    try:
        if kind == "tensorboard":
            import tensorboard  # noqa: F401
        elif kind == "wandb":
            import wandb  # noqa: F401
        elif kind == "trackio":
            import trackio  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"`tracker: {kind}` needs the package {kind}, which is not installed ({error})",
            where="train.tracker",
            remedy='Install the extra `track` (pip install "dflash-workflow[track]"), or set train.tracker: none.',
        ) from error


def open_tracker(kind: str, directory: Path, name: str, config: Mapping[str, Any]) -> Tracker:
    """The tracker of a kind. May wait for the network; call it from the thread that may hang.

    Args:
        directory: the training's folder; what the tracker writes locally goes below it.
        name: how the training is called there.
        config: its parameters, by stage.
    """
    if kind == "wandb":
        import wandb

        return _Logger(wandb, name, config, id=name, resume="allow", dir=str(directory))
    if kind == "trackio":
        import trackio

        return _Logger(trackio, name, config, resume="allow")
    return _Tensorboard(directory)


@contextlib.contextmanager
def following(kind: str, directory: Path, config: Mapping[str, Any], *, poll: float = 1.0) -> Iterator[None]:
    """While the block runs, a tracker is told every line that is added to `metrics.jsonl`.

    Raises:
        ConfigError: the tracker's package is not installed.
    """
    if kind == "none":
        yield
        return
    check_installed(kind)
    reader = _Reader(kind, directory, config, poll)
    reader.start()
    try:
        yield
    finally:
        reader.finish()


class _Reader(threading.Thread):
    def __init__(self, kind: str, directory: Path, config: Mapping[str, Any], poll: float) -> None:
        super().__init__(name=f"tracker-{kind}", daemon=True)
        self._kind = kind
        self._directory = directory
        self._config = config
        self._poll = poll
        self._path = directory / "metrics.jsonl"
        self._position = self._path.stat().st_size if self._path.exists() else 0
        self._ending = threading.Event()

    def finish(self) -> None:
        """Lets the last lines go out, and waits for it no longer than `PATIENCE`."""
        self._ending.set()
        self.join(PATIENCE)
        if self.is_alive():
            alert(f"{self._kind} does not answer; its last lines are in {self._path.name} only")

    def run(self) -> None:
        try:
            tracker = open_tracker(self._kind, self._directory, self._directory.name, self._config)
            while True:
                last = self._ending.is_set()
                for line in self._new_lines():
                    tracker.tell(numbers(line), line.step)
                if last:
                    break
                self._ending.wait(self._poll)
            tracker.close()
        except BaseException as error:
            alert(f"{self._kind} is told nothing more: {type(error).__name__}: {error}")

    def _new_lines(self) -> list[MetricsLine]:
        """The whole lines after the last one read."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as stream:
            stream.seek(self._position)
            content = stream.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._position += len(whole)
        return [MetricsLine.model_validate(json.loads(line)) for line in whole.splitlines()]
