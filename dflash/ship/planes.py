"""How far ends are started and talked to: the system's `ssh` and paramiko behind one small interface.

With `ssh` on both sides a data stream never enters this process: the kernel's pipe joins the two ssh processes, as in
`ssh a cat | ssh b cat`. With paramiko a thread moves the bytes. Nothing here waits without a
deadline: reads happen on threads, and whoever waits for them counts the seconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import select
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from dflash.base.errors import CorruptError, DflashError, PermanentError, TransientError
from dflash.hosts.host import ByCommand, Finished, Host
from dflash.hosts.ssh import SshHost
from dflash.ship import sink

if TYPE_CHECKING:
    from dflash.hosts.channel import Channel

Plane = Literal["ssh", "paramiko"]

PIPE_BYTES = 1 << 20
WRITE_DEADLINE = 12.0
GOODBYE = 1.0
"""Seconds that a far end gets to tidy up when its input has ended."""


class SourceChanged(CorruptError):
    """The source did not stand still; what was copied of it is worth nothing."""


class ProgramMissing(TransientError):
    """The far ends' program is not on that host (yet, or any more)."""

    def __init__(self, host: Host) -> None:
        self.host = host
        super().__init__("it has no copy of the program that ships", where=host.id)


class Process(Protocol):
    """A process on a host, seen from here."""

    def read(self) -> bytes:
        """Some of its output; empty at the end."""

    def write(self, data: bytes) -> None:
        """Writes all of `data`, within a deadline.

        Raises:
            TransientError: it takes nothing more.
        """

    def beat(self) -> None:
        """Writes an empty line, unless something is being written anyway or nobody reads any more."""

    def close_stdin(self) -> None:
        """Ends its input."""

    def wait(self, timeout: float) -> int | None:
        """Its exit status; None when it is still at work after `timeout` seconds."""

    def kill(self) -> None:
        """Ends it, or at least the way to it."""

    def stderr(self) -> str:
        """What it complained about so far."""


class Beating:
    """Signs of life between whole writes, never within one."""

    def __init__(self) -> None:
        self.writing = threading.Lock()

    def write(self, data: bytes) -> None:
        """See `Process.write`."""
        with self.writing:
            self.write_now(data)

    def write_now(self, data: bytes) -> None:
        """Writes; the caller holds the lock."""
        raise NotImplementedError

    def beat(self) -> None:
        """See `Process.beat`."""
        if self.writing.acquire(blocking=False):
            try:
                with contextlib.suppress(DflashError, OSError):
                    self.write_now(b"\n")
            finally:
                self.writing.release()


class SystemProcess(Beating):
    """A local process, mostly an `ssh` that runs another one elsewhere."""

    def __init__(self, argv: Sequence[str], *, stdin: int | None = None, stdout: int | None = None) -> None:
        super().__init__()
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                list(argv),
                stdin=subprocess.PIPE if stdin is None else stdin,
                stdout=subprocess.PIPE if stdout is None else stdout,
                stderr=self._complaints,
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            raise PermanentError(f"cannot start `{argv[0]}`: {error.strerror}", remedy="Install it.") from error
        if self._process.stdin is not None:
            os.set_blocking(self._process.stdin.fileno(), False)

    def read(self) -> bytes:
        """See `Process.read`."""
        assert self._process.stdout is not None
        return os.read(self._process.stdout.fileno(), 1 << 20)

    def write_now(self, data: bytes) -> None:
        """See `Process.write`."""
        assert self._process.stdin is not None
        descriptor = self._process.stdin.fileno()
        rest = memoryview(data)
        try:
            while rest:
                if not select.select([], [descriptor], [], WRITE_DEADLINE)[1]:
                    raise TransientError(f"nothing was taken for {WRITE_DEADLINE:.0f} s")
                with contextlib.suppress(BlockingIOError):
                    rest = rest[os.write(descriptor, rest) :]
        except (BrokenPipeError, ValueError) as error:
            raise TransientError("the connection has ended") from error

    def close_stdin(self) -> None:
        """See `Process.close_stdin`."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    def wait(self, timeout: float) -> int | None:
        """See `Process.wait`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout)
        return None

    def kill(self) -> None:
        """See `Process.kill`. The whole session goes: a wrap or a jump has processes of its own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def stderr(self) -> str:
        """See `Process.stderr`."""
        size = os.fstat(self._complaints.fileno()).st_size
        return os.pread(self._complaints.fileno(), 4096, max(0, size - 4096)).decode(errors="replace")


class Peer:
    """One far end: requests to it, messages from it into a shared inbox, and how long it has been silent."""

    def __init__(self, name: str, host: Host, argv: Sequence[str], process: Process, inbox: Inbox) -> None:
        self.name, self.host, self.process = name, host, process
        self.received = self.stored = 0
        self.heard = time.monotonic()
        self.data = name == "store"
        self.finished = False
        self._argv = argv
        self._inbox = inbox
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        held = b""
        message: dict[str, Any] = {"is": "gone"}
        try:
            while piece := self.process.read():
                *lines, held = (held + piece).split(b"\n")
                for line in lines:
                    self._take(sink.decode(line))
        except (ValueError, OSError, DflashError) as error:
            message["why"] = str(error)
        if not self.finished:
            self._inbox.put((self, message))

    def _take(self, message: dict[str, Any]) -> None:
        """A data end is alive when bytes arrive or it is at work on them; a control end when it says anything."""
        if message["is"] in ("beat", "done"):
            moved = message["received"] != self.received
            self.received, self.stored = message["received"], message["stored"]
            if self.data and not moved and not message.get("busy", True):
                return
        self.heard = time.monotonic()
        self.finished = self.finished or message["is"] in ("done", "left")
        if message["is"] != "beat":
            self._inbox.put((self, message))

    def ask(self, **request: Any) -> None:
        """Sends a request."""
        try:
            self.process.write(sink.encode(request))
        except TransientError as error:
            raise self.lost(str(error)) from error

    def beat(self) -> None:
        """A sign of life from here."""
        self.process.beat()

    def error(self, message: dict[str, Any]) -> DflashError:
        """What the far end says went wrong, as this project's errors."""
        kinds = {"permanent": PermanentError, "corrupt": CorruptError, "changed": SourceChanged}
        kind = kinds.get(message["kind"], TransientError)
        where = f"{self.host.id}:{message['where']}" if message["where"] else self.host.id
        return kind(message["what"], where=where, remedy=message["remedy"])

    def lost(self, why: str = "") -> DflashError:
        """What to say when it ended before its work did. A refused host key or login is permanent; the host knows."""
        return ended(self.process, self.host, self._argv, f"{self.name} end", why)


Inbox = queue.Queue[tuple[Peer, dict[str, Any]]]


def ended(process: Process, host: Host, argv: Sequence[str], name: str, why: str = "") -> DflashError:
    """What to say of a process that ended too early."""
    status = process.wait(GOODBYE)
    complaint = process.stderr()
    if "can't open file" in complaint and ".dflash-sink-" in complaint:
        return ProgramMissing(host)
    finished = Finished(-1 if status is None else status, b"", complaint)
    if isinstance(host, ByCommand):
        try:
            host.judged(argv, finished)
        except DflashError as error:
            return error
    last = [line.strip() for line in complaint.splitlines() if line.strip()][-1:] or [why or "no reason given"]
    return TransientError(f"the {name} ended before its work did (status {status}: {last[0]})", where=host.id)


def start(host: Host, argv: Sequence[str], plane: Plane) -> Process:
    """Starts a process on a host. paramiko is used where asked for and where the host can be reached by it.

    Raises:
        PermanentError: no such program; the host refuses us. TransientError: the connection failed.
    """
    if plane == "paramiko" and isinstance(host, SshHost):
        return ChannelProcess(host.channel(argv))
    return SystemProcess(host.command(argv))


class ChannelProcess(Beating):
    """A process behind a paramiko channel."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def read(self) -> bytes:
        """See `Process.read`."""
        return self._channel.read(1 << 20)

    def write_now(self, data: bytes) -> None:
        """See `Process.write`."""
        self._channel.write(data)

    def close_stdin(self) -> None:
        """See `Process.close_stdin`."""
        self._channel.close_stdin()

    def wait(self, timeout: float) -> int | None:
        """See `Process.wait`."""
        try:
            return self._channel.wait(timeout)
        except DflashError:
            return None

    def kill(self) -> None:
        """See `Process.kill`."""
        self._channel.kill()

    def stderr(self) -> str:
        """See `Process.stderr`."""
        return self._channel.stderr_tail()


class Stream:
    """One data stream: `send` at the source, `store` at the destination, and a pipe between them.

    It is started early, because connecting takes round trips, and idles until `begin`.
    """

    def __init__(
        self,
        source: tuple[Host, Sequence[str]],
        destination: tuple[Host, Sequence[str]],
        plane: Plane,
        direct: bool,
        inbox: Inbox,
    ) -> None:
        self.begun = False
        self._starting = threading.Lock()
        self._source = source
        self._writing = -1
        self.send: Process
        if direct:
            self.send = start(*source, plane)
            self.store = Peer("store", *destination, self.send, inbox)
        elif plane == "paramiko" and any(isinstance(host, SshHost) for host in (source[0], destination[0])):
            self.send = start(*source, plane)
            try:
                self.store = Peer("store", *destination, start(*destination, plane), inbox)
            except DflashError:
                self.send.kill()
                raise
        else:
            self._join(destination, inbox)

    def _join(self, destination: tuple[Host, Sequence[str]], inbox: Inbox) -> None:
        reading, self._writing = os.pipe()
        try:
            with contextlib.suppress(OSError):
                fcntl.fcntl(self._writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
            host, argv = destination
            self.send = SystemProcess(self._source[0].command(self._source[1]), stdout=self._writing)
            self.store = Peer("store", host, argv, SystemProcess(host.command(argv), stdin=reading), inbox)
        except DflashError:
            self._let_go()
            raise
        finally:
            os.close(reading)

    def begin(self, request: dict[str, Any], header: dict[str, Any]) -> None:
        """Lets it work: `store` gets the header, then `send` the request.

        Raises:
            TransientError, PermanentError: one of the two has ended already; says why.
        """
        self.store.heard = time.monotonic()
        words = sink.encode(header)
        with self._starting:
            self.begun = True
            try:
                if self._writing >= 0:
                    os.write(self._writing, words)
                    self._let_go()
                elif self.send is not self.store.process:
                    self.store.process.write(words)
                    threading.Thread(target=self._pump, daemon=True).start()
            except (OSError, TransientError) as error:
                raise self.store.lost(str(error)) from error
        try:
            self.send.write(sink.encode({**request, "header": header}))
        except TransientError as error:
            raise ended(self.send, *self._source, "sending end", str(error)) from error

    def _let_go(self) -> None:
        """Closes our end of the pipe, so that `store` sees the end when `send` ends."""
        if self._writing >= 0:
            os.close(self._writing)
            self._writing = -1

    def _pump(self) -> None:
        """What `send` says goes to `store`; whatever ends it, `store` then sees an end without the END frame."""
        with contextlib.suppress(OSError, DflashError, ValueError):
            while piece := self.send.read():
                self.store.process.write(piece)
        with contextlib.suppress(OSError, DflashError, ValueError):
            self.store.process.close_stdin()

    def beat(self) -> None:
        """A sign of life to `send`; that of `store` comes from `send` once it has begun."""
        self.send.beat()
        if self._starting.acquire(blocking=False):
            try:
                if self._writing >= 0:
                    with contextlib.suppress(OSError):
                        os.write(self._writing, b"\n")
                elif not self.begun and self.send is not self.store.process:
                    self.store.process.beat()
            finally:
                self._starting.release()

    def cause(self) -> DflashError | None:
        """Why `send` has ended, if it has and badly: more telling than `store`, which only saw its input end."""
        if self.send is self.store.process or not self.send.wait(GOODBYE):
            return None
        return ended(self.send, *self._source, "sending end")

    def stop_sending(self) -> None:
        """Ends `send`; `store` journals what it has and ends by itself."""
        self.store.finished = True
        self._let_go()
        self.send.kill()


def end_all(peers: Sequence[Peer], streams: Sequence[Stream]) -> None:
    """Lets every far end tidy up for a moment, all at once, then ends what is left."""
    for stream in streams:
        stream.stop_sending()
    for peer in peers:
        with contextlib.suppress(OSError, DflashError):
            peer.process.close_stdin()
    deadline = time.monotonic() + GOODBYE
    for process in (*(stream.store.process for stream in streams), *(peer.process for peer in peers)):
        process.wait(max(0.0, deadline - time.monotonic()))
        process.kill()
