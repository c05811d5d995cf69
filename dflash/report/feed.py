"""What is known of a training on another host, kept fresh by a thread of its own over one connection.

The screen never waits for the host: it shows what was heard last and how old that is. A connection that breaks is made again,
and goes on with the byte of the metrics that was read last. Costs an `ssh` and a thread here, mostly asleep, and a small process
there.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from dflash.base.errors import DflashError
from dflash.hosts.code import send_code
from dflash.hosts.host import ByCommand, Finished, Host
from dflash.report.glance import RECENT, Place, Training, as_training, parsed

RETRY = (2.0, 30.0)
"""Seconds between two attempts to connect: at first, and at most."""


@dataclass(frozen=True)
class Heard:
    """What is known of a training elsewhere. training: as it was `age` seconds ago; None when nothing was heard yet. trouble:
    why nothing is heard now."""

    host: str
    training: Training | None
    age: float
    trouble: str


class Feed:
    """Listens to a host about one of its trainings until closed."""

    def __init__(self, host: Host, role: str, key: str) -> None:
        """Begins to listen; returns at once.

        Args:
            role: whose interpreter there is used.
        """
        self._host, self._role, self._key = host, role, key
        self._lock = threading.Lock()
        self._place = Place()
        self._training: Training | None = None
        self._seen = time.monotonic()
        self._trouble = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = threading.Event()
        self._news = threading.Event()
        threading.Thread(target=self._listen, daemon=True, name=f"watch-{host.id}").start()

    def heard(self) -> Heard:
        """What is known now; never waits."""
        with self._lock:
            return Heard(self._host.id, self._training, time.monotonic() - self._seen, self._trouble)

    def wait(self, seconds: float) -> None:
        """Waits until the host has said something or cannot be reached, `seconds` at most."""
        self._news.wait(seconds)

    def close(self) -> None:
        """Ends the connection; the process there ends with it."""
        self._closed.set()
        with self._lock:
            if self._process is not None:
                self._process.kill()

    def _listen(self) -> None:
        pause = RETRY[0]
        while not self._closed.is_set():
            before = self._seen
            try:
                trouble = self._one_connection()
            except DflashError as error:
                trouble = error.what
            except OSError as error:
                trouble = str(error)
            with self._lock:
                self._trouble = trouble
            self._news.set()
            pause = RETRY[0] if self._seen != before else min(2 * pause, RETRY[1])
            self._closed.wait(pause)

    def _one_connection(self) -> str:
        """Listens until the connection ends; says why it did."""
        code = send_code(self._host)
        argv = ["env", f"PYTHONPATH={code}", "PYTHONDONTWRITEBYTECODE=1", self._host.python(self._role), "-m"]
        argv += ["dflash.report.glance", str(self._host.workdir), self._key]
        argv += [str(self._place.inode), str(self._place.offset)]
        with tempfile.TemporaryFile() as said:
            process = subprocess.Popen(
                self._host.command(argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, process_group=0
            )
            with self._lock:
                self._process = process
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                if not self._closed.is_set():
                    self._read(process.stdout, process.stdin)
            finally:
                process.kill()
                status = process.wait()
                for pipe in (process.stdin, process.stdout):
                    with contextlib.suppress(OSError):
                        pipe.close()
            said.seek(0)
            done = Finished(status, b"", said.read().decode(errors="replace"))
        if isinstance(self._host, ByCommand) and not self._closed.is_set():
            self._host.judged(argv, done)
        return f"the connection ended ({done.last_line()})"

    def _read(self, stream: IO[bytes], back: IO[bytes]) -> None:
        """Takes in line by line, and answers each with a byte: the other side ends when these stop coming."""
        for line in stream:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # a greeting that a login shell prints
                document = json.loads(line)
                same = document["inode"] == self._place.inode
                lines = self._training.lines if self._training is not None and same else []
                training = as_training(document, [*lines, *parsed(document["metrics"])][-RECENT:])
                with self._lock:
                    self._place = Place(int(document["inode"]), int(document["offset"]))
                    self._training, self._seen, self._trouble = training, time.monotonic(), ""
                self._news.set()
            with contextlib.suppress(OSError):
                back.write(b"\n")
                back.flush()


def age_in_words(seconds: float) -> str:
    """`42 s`, `3 min`, `5 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def age_of(path: Path) -> float | None:
    """Seconds since a file was written; None when there is none."""
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return None
