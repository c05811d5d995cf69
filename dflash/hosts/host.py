"""A machine that stages run on, as the rest of the project sees it: run a command, feed a command, put and get small files.

Everything is argv, never a string for a shell. A detached job needs no method of its own: its launcher is a command that
leaves the session it was called from and reports when it holds its lease (`dflash/train/launch.py`), so `run` starts it on
any host, and its lease and files tell the rest. Costs one process a call.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dflash.base.errors import CorruptError, PermanentError, TransientError
from dflash.base.files import write_atomically


@dataclass(frozen=True)
class Finished:
    """A command that has ended: its exit status (negative: the signal that killed it) and what it wrote."""

    status: int
    stdout: bytes
    stderr: str


class Host(Protocol):
    """What every kind of host offers. `id` is a stable name, never an address, and enters no key."""

    id: str

    def run(
        self, argv: Sequence[str], *, timeout: float | None = None, environment: Mapping[str, str] | None = None
    ) -> Finished:
        """Runs a command to its end, without a terminal and without standard input.

        Args:
            timeout: seconds; None waits for ever. environment: the whole environment; this process's when left out.

        Raises:
            PermanentError: there is no such program. TransientError: it did not end in time (it is killed).
        """

    def stream(self, argv: Sequence[str], stdin: Iterable[bytes]) -> Finished:
        """Runs a command that reads `stdin` piece by piece.

        Raises:
            PermanentError: there is no such program.
        """

    def put(self, path: Path, content: bytes) -> None:
        """Writes a small file, whole or not at all.

        Raises:
            PermanentError: it cannot be written.
        """

    def get(self, path: Path) -> bytes:
        """Reads a small file.

        Raises:
            CorruptError: it is not there or cannot be read.
        """


@dataclass(frozen=True)
class LocalHost:
    """The machine that this process runs on."""

    id: str = "local"

    def run(
        self, argv: Sequence[str], *, timeout: float | None = None, environment: Mapping[str, str] | None = None
    ) -> Finished:
        """See `Host.run`. The command gets a session of its own, so that a Ctrl-C here does not reach it."""
        try:
            done = subprocess.run(
                list(argv),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=timeout,
                start_new_session=True,
                check=False,
                env=None if environment is None else dict(environment),
            )
        except FileNotFoundError as error:
            raise _no_program(argv, self.id) from error
        except subprocess.TimeoutExpired as error:
            raise TransientError(f"`{argv[0]}` did not end within {timeout:.0f} s", where=self.id) from error
        return Finished(done.returncode, done.stdout, done.stderr.decode(errors="replace"))

    def stream(self, argv: Sequence[str], stdin: Iterable[bytes]) -> Finished:
        """See `Host.stream`. Output is small: it is kept in memory, and read only after the input has been fed."""
        try:
            process = subprocess.Popen(
                list(argv),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except FileNotFoundError as error:
            raise _no_program(argv, self.id) from error
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended before it had read everything; its status says why
            for piece in stdin:
                process.stdin.write(piece)
        out, err = process.communicate()
        return Finished(process.returncode, out, err.decode(errors="replace"))

    def put(self, path: Path, content: bytes) -> None:
        """See `Host.put`."""
        write_atomically(path, content)

    def get(self, path: Path) -> bytes:
        """See `Host.get`."""
        try:
            return path.read_bytes()
        except OSError as error:
            raise CorruptError(f"cannot be read ({error.strerror})", where=f"{self.id}:{path}") from error


def _no_program(argv: Sequence[str], host: str) -> PermanentError:
    return PermanentError(f"there is no program `{argv[0]}`", where=host, remedy="Install it or name its path.")
