"""A machine that stages run on, as the rest of the project sees it: run a command, feed a command, put and get small files.

Everything is argv, never a string for a shell. A detached job needs no method of its own: its launcher is a command that
leaves the session it was called from and reports when it holds its lease (`dflash/train/launch.py`), so `run` starts it on
any host, and its lease and files tell the rest. Costs one process a call.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from dflash.base.errors import CorruptError, PermanentError, TransientError
from dflash.base.files import write_atomically
from dflash.hosts.entry import HostEntry


@dataclass(frozen=True)
class Finished:
    """A command that has ended: its exit status (negative: the signal that killed it) and what it wrote."""

    status: int
    stdout: bytes
    stderr: str

    def last_line(self) -> str:
        """The last line of stderr that is not blank, else the exit status in words."""
        lines = [line.strip() for line in self.stderr.splitlines() if line.strip()]
        return lines[-1] if lines else f"exit status {self.status}"


class Host(Protocol):
    """What every kind of host offers."""

    @property
    def id(self) -> str:
        """A stable name, never an address; enters no key."""

    @property
    def entry(self) -> HostEntry:
        """What the hosts file says."""

    @property
    def workdir(self) -> Path:
        """The folder there that code, environments and results go to.

        Raises:
            ConfigError: the hosts file names none.
        """

    @property
    def device(self) -> str | None:
        """cpu, cuda or cuda:N as the hosts file says; None when it says nothing."""

    def python(self, role: str = "") -> str:
        """The interpreter there of a role's stages."""

    def command(self, argv: Sequence[str]) -> list[str]:
        """The argv that, run on this machine, runs `argv` there. Its stdin, stdout and exit status are those of `argv`.

        Raises:
            PermanentError: a key file is missing or open to others.
        """

    def run(
        self, argv: Sequence[str], *, timeout: float | None = None, environment: Mapping[str, str] | None = None
    ) -> Finished:
        """Runs a command to its end, without a terminal and without standard input.

        Args:
            timeout: seconds; None waits for ever. environment: variables on top of those that commands have there. Others
                on that host can read them, so never a secret.

        Raises:
            PermanentError: there is no such program, or the host refuses us. TransientError: the command did not end in time
                (it is killed here; what it started elsewhere may live on), or the connection failed.
        """

    def stream(self, argv: Sequence[str], stdin: Iterable[bytes]) -> Finished:
        """Runs a command that reads `stdin` piece by piece. An error in `stdin` kills the command and is passed on.

        Raises:
            PermanentError: there is no such program, or the host refuses us. TransientError: the connection failed.
        """

    def follow(
        self, argv: Sequence[str], tell: Callable[[str], None], *, environment: Mapping[str, str] | None = None
    ) -> Finished:
        """Runs a command and calls `tell` with each line that it prints, as it comes. See `run`.

        Returns:
            Status and stderr; stdout is empty, for it has been told.
        """

    def put(self, path: Path, content: bytes) -> None:
        """Writes a small file, whole or not at all, and its folder if need be.

        Raises:
            PermanentError: it cannot be written. TransientError: the connection failed.
        """

    def get(self, path: Path) -> bytes:
        """Reads a small file.

        Raises:
            CorruptError: it is not there or cannot be read. TransientError: the connection failed.
        """


PUT = """\
set -e
if [ -d "$3" ]; then echo "there is a folder of that name" >&2; exit 1; fi
mkdir -p -- "$1"
trap 'rm -f -- "$2"' EXIT
dd of="$2" bs=65536 conv=fsync status=none
if [ "$(wc -c <"$2")" -ne "$4" ]; then echo "the connection ended early" >&2; exit 1; fi
mv -f -- "$2" "$3"
"""
"""A shell's program: standard input into the file $3 of folder $1 by way of $2, when all $4 bytes of it have come. Exists
because a container may have neither python nor a way for files; every system has these programs."""


class ByCommand:
    """The methods of a host that need nothing but its `command`."""

    id: str

    def command(self, argv: Sequence[str]) -> list[str]:
        """See `Host.command`."""
        raise NotImplementedError

    def with_environment(
        self, argv: Sequence[str], environment: Mapping[str, str]
    ) -> tuple[list[str], dict[str, str] | None]:
        """The local argv that runs `argv` with more variables, and the local environment to run it in (None: this one)."""
        return self.command(with_variables(argv, environment)), None

    def judged(self, argv: Sequence[str], done: Finished) -> Finished:
        """Raises what the end of a command says of the way to it; else returns it.

        Raises:
            PermanentError, TransientError: see `Host.run`.
        """
        if done.status == 127 and argv[0] in done.stderr:
            raise NoProgram(argv[0], self.id)
        return done

    def run(
        self, argv: Sequence[str], *, timeout: float | None = None, environment: Mapping[str, str] | None = None
    ) -> Finished:
        """See `Host.run`. The command gets a session of its own, so that a Ctrl-C here does not reach it."""
        process = self._start(argv, subprocess.DEVNULL, environment)
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException as error:
            _end(process)
            if isinstance(error, subprocess.TimeoutExpired):
                raise TransientError(f"`{argv[0]}` did not end within {timeout:.0f} s", where=self.id) from error
            raise
        return self.judged(argv, Finished(process.returncode, out, err.decode(errors="replace")))

    def stream(self, argv: Sequence[str], stdin: Iterable[bytes]) -> Finished:
        """See `Host.stream`. Output is small: it is kept in memory."""
        process = self._start(argv, subprocess.PIPE, None)
        pipe, process.stdin = process.stdin, None
        assert pipe is not None
        written: list[bytes] = []
        reader = threading.Thread(target=lambda: written.extend(process.communicate()), daemon=True)
        reader.start()
        try:
            with contextlib.suppress(BrokenPipeError):  # it ended before it had read everything; its status says why
                for piece in stdin:
                    pipe.write(piece)
        except BaseException:
            _end(process)
            raise
        finally:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        reader.join()
        return self.judged(argv, Finished(process.returncode, written[0], written[1].decode(errors="replace")))

    def follow(
        self, argv: Sequence[str], tell: Callable[[str], None], *, environment: Mapping[str, str] | None = None
    ) -> Finished:
        """See `Host.follow`."""
        process = self._start(argv, subprocess.DEVNULL, environment)
        assert process.stdout is not None
        assert process.stderr is not None
        stderr = process.stderr
        said: list[bytes] = []
        reader = threading.Thread(target=lambda: said.append(stderr.read()), daemon=True)
        reader.start()
        try:
            for line in process.stdout:
                tell(line.decode(errors="replace").rstrip("\n"))
        except BaseException:
            _end(process)
            raise
        status = process.wait()
        reader.join()
        return self.judged(argv, Finished(status, b"", said[0].decode(errors="replace")))

    def put(self, path: Path, content: bytes) -> None:
        """See `Host.put`."""
        temporary = path.with_name(f".{path.name[:200]}.{uuid.uuid4().hex[:8]}.tmp")
        argv = ["sh", "-c", PUT, "put", str(path.parent), str(temporary), str(path), str(len(content))]
        done = self.stream(argv, [content])
        if done.status:
            raise PermanentError(
                f"cannot write: {_reason(done)}",
                where=f"{self.id}:{path}",
                remedy="Make the folder writable or free some space.",
            )

    def get(self, path: Path) -> bytes:
        """See `Host.get`."""
        done = self.run(["cat", "--", str(path)])
        if done.status:
            raise CorruptError(f"cannot be read ({_reason(done)})", where=f"{self.id}:{path}")
        return done.stdout

    def _start(self, argv: Sequence[str], stdin: int, environment: Mapping[str, str] | None) -> subprocess.Popen[bytes]:
        full, variables = self.with_environment(argv, environment or {})
        try:
            return subprocess.Popen(
                full, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, env=variables
            )
        except FileNotFoundError as error:
            raise NoProgram(full[0], self.id) from error
        except PermissionError as error:
            raise PermanentError(f"`{full[0]}` is no program that may be run", where=self.id) from error


@dataclass(frozen=True)
class LocalHost(ByCommand):
    """The machine that this process runs on, or a container on it (`wrap`)."""

    id: str = "local"
    entry: HostEntry = field(default_factory=lambda: HostEntry(kind="local"))

    @property
    def workdir(self) -> Path:
        """See `Host.workdir`: the current folder when the hosts file names none."""
        return self.entry.workdir or Path.cwd()

    @property
    def device(self) -> str | None:
        """See `Host.device`."""
        return self.entry.device

    def python(self, role: str = "") -> str:
        """See `Host.python`: the interpreter of this process when the hosts file names none."""
        return named_python(self.entry, role) or sys.executable

    def command(self, argv: Sequence[str]) -> list[str]:
        """See `Host.command`."""
        return [*self.entry.wrap, *argv]

    def with_environment(
        self, argv: Sequence[str], environment: Mapping[str, str]
    ) -> tuple[list[str], dict[str, str] | None]:
        """Without a wrap the variables need not pass through a command line."""
        if self.entry.wrap:
            return super().with_environment(argv, environment)
        return self.command(argv), {**os.environ, **environment}

    def put(self, path: Path, content: bytes) -> None:
        """See `Host.put`."""
        if self.entry.wrap:
            super().put(path, content)
        else:
            write_atomically(path, content)

    def get(self, path: Path) -> bytes:
        """See `Host.get`."""
        if self.entry.wrap:
            return super().get(path)
        try:
            return path.read_bytes()
        except OSError as error:
            raise CorruptError(f"cannot be read ({error.strerror})", where=f"{self.id}:{path}") from error


def with_variables(argv: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """A command line that sets variables and then is `argv`."""
    return [*(["env", *(f"{name}={value}" for name, value in environment.items())] if environment else []), *argv]


def named_python(entry: HostEntry, role: str) -> str | None:
    """The interpreter that the hosts file names for a role; None when it names none."""
    return entry.python.get(role) if isinstance(entry.python, Mapping) else entry.python


class NoProgram(PermanentError):
    """A program is not there. program: its name or path."""

    def __init__(self, program: str, host: str) -> None:
        self.program = program
        super().__init__(f"there is no program `{program}`", where=host, remedy="Install it or name its path.")


def _reason(done: Finished) -> str:
    """Why a small program of the system failed: the last part of what it said (`cat: x: No such file or directory`)."""
    return done.last_line().rpartition(": ")[2]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills a command and what it started in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
