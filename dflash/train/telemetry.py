"""What training says of itself: `metrics.jsonl`, one line a step, and alerts in the log. Cannot change a result.

A line is one write. The trainer is the only writer, under the lease; a line torn by a kill is cut off by the next attempt,
so that the file stays readable to its end. A full disk costs the line, never the training. 2 kB and 30 microseconds a step.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

from dflash.base.records import MetricsLine, now


class Metrics:
    """Appends to `metrics.jsonl`.

    Args:
        path: the file; a torn last line in it is cut off.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        cut_torn_line(path)

    def write(self, line: MetricsLine) -> bool:
        """Appends a line; False, with nothing written, when the disk is full."""
        content = (json.dumps(line.model_dump(mode="python")) + "\n").encode()
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            alert(f"{self.path.name} cannot be written: {error.strerror}")
            return False
        try:
            size = os.fstat(descriptor).st_size
            try:
                whole = os.write(descriptor, content) == len(content)
            except OSError:
                whole = False
            if not whole:
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, size)
                alert(f"step {line.step} is missing from {self.path.name}: the disk is full")
            return whole
        finally:
            os.close(descriptor)


def cut_torn_line(path: Path) -> None:
    """Cuts a last line that does not end, as a kill in mid-write leaves it. Reads the last megabyte at most."""
    try:
        with path.open("rb") as stream:
            start = max(0, stream.seek(0, os.SEEK_END) - (1 << 20))
            stream.seek(start)
            tail = stream.read()
    except FileNotFoundError:
        return
    if tail and not tail.endswith(b"\n"):
        os.truncate(path, start + tail.rfind(b"\n") + 1)


def alert(text: str) -> None:
    """A line of the log that a person should see."""
    with contextlib.suppress(OSError):
        print(f"{now()} ALERT {text}", file=sys.stderr, flush=True)
