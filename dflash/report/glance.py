"""How a training stands, from the files in its folder: read where the folder is, here or on another host.

    PYTHONPATH=<workdir>/code/<digest> python -m dflash.report.glance WORKDIR KEY [INODE OFFSET]

prints one JSON line at once and one every few seconds, each with what the metrics have grown by since the line before. It only
reads, and ends when its standard input does or falls silent. A look costs a few stats and small reads; of the metrics at most
the last 64 kB go over, so that a training of a million steps is seen as fast as one of ten.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash.base.errors import CorruptError
from dflash.base.records import LeaseRecord, MetricsLine, StopMarker
from dflash.hosts.lease import holder
from dflash.train import schedule

TAIL = 64 << 10
"""Bytes of the metrics that a look reads at most."""
RECENT = 20
"""Lines of the metrics that are kept."""
PERIOD = 2.0
"""Seconds between two looks."""
SILENCE = 60.0
"""Seconds without a sign of the caller after which it counts as gone."""
METRICS = "metrics.jsonl"


@dataclass
class Training:
    """How a training stands. step: the last completed one. stop: who ended it and when, or why that cannot be read. failures:
    files that say why it failed. steps: checkpoints that exist. lines: the last of the metrics."""

    holder: LeaseRecord | None = None
    step: int = 0
    alert: str = ""
    stop: str = ""
    failures: list[str] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    lines: list[MetricsLine] = field(default_factory=list)


@dataclass
class Place:
    """How far the metrics have been read: in which file (its inode), up to which byte."""

    inode: int = 0
    offset: int = 0


def facts(folder: Path) -> dict[str, Any]:
    """How a training stands but for its metrics, as JSON values."""
    record = holder(schedule.lease_path(folder))
    status = schedule.read_status(folder)
    return {
        "holder": record.model_dump() if record is not None else None,
        "step": status.step if status is not None else 0,
        "alert": status.alert if status is not None else "",
        "stop": _stop(folder / "stop.json"),
        "failures": sorted(str(path) for path in folder.glob("failure*.json")),
        "steps": schedule.existing_steps(folder),
    }


def _stop(path: Path) -> str:
    if not path.exists():
        return ""
    try:
        marker = StopMarker.read(path)
    except CorruptError as error:
        return f"stop.json: {error.what}"
    return f"stopped by {marker.by} at {marker.at[:19].replace('T', ' ')}; `dflash run --resume` goes on"


def grown(path: Path, place: Place) -> str:
    """Whole lines that the metrics have grown by since `place`, which moves on; of a new file, or of more than `TAIL` bytes,
    only the last."""
    try:
        with path.open("rb") as stream:
            stat = os.fstat(stream.fileno())
            same = stat.st_ino == place.inode and stat.st_size >= place.offset
            start = max(place.offset if same else 0, stat.st_size - TAIL)
            stream.seek(start)
            content = stream.read(TAIL)
    except OSError:
        return ""
    end = content.rfind(b"\n") + 1
    place.inode, place.offset = stat.st_ino, start + end
    return content[:end].decode(errors="replace")


def parsed(text: str) -> list[MetricsLine]:
    """The last lines of the metrics that can be read, `RECENT` at most."""
    found: list[MetricsLine] = []
    for line in reversed(text.splitlines()):
        try:
            found.append(MetricsLine.model_validate(json.loads(line)))
        except ValueError:
            continue  # torn by a kill, or cut by where the tail begins
        if len(found) == RECENT:
            break
    return found[::-1]


def as_training(document: dict[str, Any], lines: list[MetricsLine]) -> Training:
    """What `facts` wrote, with the lines read so far.

    Raises:
        ValueError: it is not what `facts` writes.
    """
    record = document["holder"]
    return Training(
        LeaseRecord.model_validate(record) if record is not None else None,
        int(document["step"]),
        str(document["alert"]),
        str(document["stop"]),
        [str(path) for path in document["failures"]],
        [int(step) for step in document["steps"]],
        lines,
    )


def read_training(folder: Path) -> Training:
    """How the training in a folder of this machine stands."""
    return as_training(facts(folder), parsed(grown(folder / METRICS, Place())))


def main() -> int:
    """Tells how a training stands until nobody listens."""
    root, key = Path(sys.argv[1]).expanduser(), sys.argv[2]
    place = Place(*map(int, sys.argv[3:5]))
    folder = root / "results/store/train" / key
    heard = time.monotonic()
    while time.monotonic() - heard < SILENCE:
        text = grown(folder / METRICS, place)
        document = {**facts(folder), "metrics": text, "inode": place.inode, "offset": place.offset}
        try:
            print(json.dumps(document), flush=True)
        except OSError:
            return 0
        until = time.monotonic() + PERIOD
        while (left := until - time.monotonic()) > 0:
            ready, _, _ = select.select([0], [], [], left)
            if ready:
                if not os.read(0, 4096):
                    return 0
                heard = time.monotonic()
    return 0


if __name__ == "__main__":
    sys.exit(main())
