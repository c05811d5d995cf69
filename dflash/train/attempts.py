"""One start of a trainer, as it is recorded in `attempts/<n>.json`: what was run, where, and how it ended.

The record is written by the launcher: before the trainer starts, when its pid is known, and when it has ended. A record
without an end is an attempt whose launcher was killed. No torch; a small file an attempt.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from dflash.base.errors import ConfigError
from dflash.base.files import read_json
from dflash.base.records import Record

EXIT_BY_KIND = {"config": 2, "permanent": 4, "corrupt": 5, "transient": 6}
"""Exit status of launcher and trainer by the kind of a failure; 0 is done or stopped, anything else a crash."""


class Placement(BaseModel):
    """Where and how a training runs; nothing in it enters a key.

    host: stable name of the host. device: `cpu`, `cuda`, `cuda:0`. threads: of the trainer's process. target_path: the
    target's folder on this host, None for a random target. accept_env: why this attempt may go on although the probe has
    drifted; empty to stop. shipped: inputs that lie here as copies from another host. rehearsal: every step takes longest
    batches (`rehearse.py`). values: the placement fields of `TrainParams` by name (`checkpoint_every`, `keep_states`, ...).
    """

    model_config = ConfigDict(extra="forbid")
    host: str = "local"
    device: str = "cpu"
    threads: int = Field(1, ge=1)
    target_path: str | None = None
    accept_env: str = ""
    shipped: list[str] = Field(default_factory=list)
    rehearsal: bool = False
    values: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Placement:
        """Reads a placement file.

        Raises:
            ConfigError: an unknown field or a wrong value; names file and field.
        """
        try:
            return cls.model_validate(read_json(path))
        except ValueError as error:
            raise ConfigError(f"not a placement: {error}", where=str(path)) from error


class Attempt(Record):
    """`attempts/<n>.json`. `exit` is the trainer's exit status, `signal` the signal that killed it; None while it runs.

    Of several ranks those of the rank to blame count, and `cause` names it with its host, step and last line; `rank_pids`
    are theirs by rank, and `trainer_pid` is that of the lead. An attempt that torchrun started knows its lead only.
    """

    attempt: int
    run: str
    invocation: str
    argv: list[str]
    launcher_pid: int
    trainer_pid: int | None = None
    rank_pids: list[int] = Field(default_factory=list)
    start: str
    end: str | None = None
    exit: int | None = None
    signal: str | None = None
    cause: str = ""
    code: str
    placement: Placement


def attempt_path(directory: Path, attempt: int) -> Path:
    """Where the record of an attempt lies."""
    return directory / "attempts" / f"{attempt}.json"


def attempt_numbers(directory: Path) -> list[int]:
    """The numbers of all attempts of a training, ascending."""
    folder = directory / "attempts"
    if not folder.is_dir():
        return []
    return sorted(int(path.stem) for path in folder.glob("*.json") if path.stem.isdigit())


def read_attempts(directory: Path) -> list[Attempt]:
    """All attempts of a training, oldest first."""
    return [Attempt.read(attempt_path(directory, number)) for number in attempt_numbers(directory)]
