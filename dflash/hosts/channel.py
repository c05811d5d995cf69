"""A command on another host over a connection of its own in this process (paramiko): bytes in, bytes out, an honest end.

Settings are measured ones. Ciphers that processors compute in hardware, set before the connection is made. The socket is our
own, with TCP_USER_TIMEOUT. Jump hosts are nested `direct-tcpip` channels, each hop with its own pinned host keys (never a
ProxyCommand, which costs a core). Every 5 s the far end is asked for an answer, and silence of 15 s ends the connection:
TCP alone does not notice a link whose near half still acknowledges, and a writer would wait for ever.

A killed sshd looks like a clean end of the output (`read` gives b""); only `wait` tells. Costs 0.2 s to open on loopback,
two threads, 4 MB.
"""

from __future__ import annotations

import contextlib
import getpass
import itertools
import logging
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import paramiko

from dflash.base.errors import DflashError, PermanentError, TransientError
from dflash.hosts.entry import Hop
from dflash.hosts.host import Finished
from dflash.hosts.ssh import (
    ALIVE_COUNT,
    ALIVE_INTERVAL,
    CIPHERS,
    CONNECT_TIMEOUT,
    changed_key,
    denied,
    look_there,
    unknown_key,
)

logging.getLogger("paramiko").setLevel(logging.CRITICAL)  # what it has to say comes as errors, too

OPEN_TIMEOUT = 15.0
USER_TIMEOUT = 12.0
IDLE_TIMEOUT = 30.0
SILENCE = float(ALIVE_INTERVAL * (ALIVE_COUNT + 1))
PIECE = 1 << 20
TAIL = 8192


class _Socket:
    """A socket that remembers when it last heard something. paramiko uses it as it would the socket itself."""

    def __init__(self, inner: socket.socket) -> None:
        self.inner = inner
        self.heard = time.monotonic()

    def recv(self, size: int) -> bytes:
        piece = self.inner.recv(size)
        self.heard = time.monotonic()
        return piece

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Channel:
    """A running command. One reader and one writer may work at once; everything else is for one thread."""

    def __init__(self, host: str, connection: Connection, channel: paramiko.Channel) -> None:
        self.host = host
        self._connection = connection
        self._channel = channel
        self._tail = b""

    def read(self, size: int = PIECE) -> bytes:
        """Up to `size` bytes of the command's output; b"" at its end, which a killed server looks like too: ask `wait`.

        Raises:
            TransientError: the connection is silent or lost.
        """
        try:
            piece = self._channel.recv(size)
        except (OSError, paramiko.SSHException) as error:
            raise self._lost(error) from error
        self._drain()
        if not piece and self._connection.why:
            raise self._lost(None)
        return piece

    def write(self, data: bytes | memoryview) -> None:
        """Feeds the command's standard input.

        Raises:
            TransientError: the command does not read any more (it may have ended), or the connection is silent or lost.
        """
        try:
            self._channel.sendall(data)  # type: ignore[arg-type]  # any buffer will do
        except (OSError, paramiko.SSHException) as error:
            raise self._lost(error) from error
        self._drain()

    def close_stdin(self) -> None:
        """Ends the command's standard input.

        Raises:
            TransientError: the connection is lost.
        """
        try:
            self._channel.shutdown_write()
        except (OSError, paramiko.SSHException) as error:
            raise self._lost(error) from error

    def stderr_tail(self) -> str:
        """The end of what the command wrote to stderr so far."""
        self._drain()
        return self._tail.decode(errors="replace")

    def wait(self, deadline: float) -> int:
        """The command's exit status. Read its output first: a command waits for its reader.

        Args:
            deadline: seconds to wait at most.

        Raises:
            TransientError: it has not ended by then, or the connection ended before it (its server was killed, say).
        """
        if not self._channel.status_event.wait(deadline):
            raise TransientError(f"the command did not end within {deadline:.0f} s", where=self.host)
        self._drain()
        status = self._channel.exit_status
        if status < 0:
            raise self._lost(None)
        return status

    def be_patient(self) -> None:
        """Lets a command be silent for as long as it likes: only a link that is silent counts."""
        self._channel.settimeout(None)

    def kill(self) -> None:
        """Cuts the connection; the command sees the end of its input, or nobody at the other end of its output."""
        self._connection.close()

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _drain(self) -> None:
        """Takes what stderr holds, which would else fill the window that stdout needs."""
        with contextlib.suppress(OSError, paramiko.SSHException):
            while self._channel.recv_stderr_ready():
                self._tail = (self._tail + self._channel.recv_stderr(PIECE))[-TAIL:]

    def _lost(self, error: BaseException | None) -> TransientError:
        said = self.stderr_tail().strip().splitlines()
        why = self._connection.why or (f"{error}" if error and str(error) else "it ended before the command did")
        if isinstance(error, TimeoutError):
            why = f"nothing moved for {IDLE_TIMEOUT:.0f} s"
        return TransientError(
            f"the connection failed: {why}" + (f"; the command said: {said[-1]}" if said else ""), where=self.host
        )


def communicate(channel: Channel, stdin: Iterable[bytes], timeout: float | None, name: str) -> Finished:
    """Feeds a command, takes all its output, and says how it ended.

    Args:
        timeout: seconds for all of it; None waits for ever. name: of the command, for messages.

    Raises:
        TransientError: it did not end in time, or the connection failed.
    """
    written: list[bytes] = []
    failed: list[TransientError] = []

    def read() -> None:
        try:
            while piece := channel.read():
                written.append(piece)
        except TransientError as error:
            failed.append(error)

    channel.be_patient()
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    with contextlib.suppress(TransientError):  # a command may end before it has read everything; its status says why
        for piece in stdin:
            channel.write(piece)
        channel.close_stdin()
    reader.join(timeout)
    if reader.is_alive():
        raise TransientError(f"`{name}` did not end within {timeout:.0f} s", where=channel.host)
    if failed:
        raise failed[0]
    return Finished(channel.wait(OPEN_TIMEOUT), b"".join(written), channel.stderr_tail())


class Connection:
    """The nested connections of a route. `why`: why they were cut, when it was us."""

    def __init__(self, host: str, route: Sequence[Hop]) -> None:
        self.host = host
        self.route = route
        self.why = ""
        self.clients: list[paramiko.SSHClient] = []
        self.socket: _Socket | None = None
        self.closed = threading.Event()

    def open(self) -> paramiko.Transport:
        """Connects and logs in hop by hop.

        Raises:
            PermanentError: a hop refuses us, or is not the one we know. TransientError: a hop cannot be reached.
        """
        through: Any = self._dial()
        for index, hop in enumerate(self.route):
            transport = self._log_in(hop, through)
            if index + 1 < len(self.route):
                through = self._tunnel(transport, self.route[index + 1])
        return transport

    def open_to_last(self) -> Any:
        """Connects to the last hop through all others, logged in to those only: a socket to talk to a host not yet known."""
        through: Any = self._dial()
        for hop, following in itertools.pairwise(self.route):
            through = self._tunnel(self._log_in(hop, through), following)
        return through

    def _dial(self) -> _Socket:
        first = self.route[0]
        try:
            inner = socket.create_connection((first.address, first.port), timeout=CONNECT_TIMEOUT)
        except OSError as error:
            raise unreachable(self.host, first, error) from error
        inner.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        inner.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(USER_TIMEOUT * 1000))
        self.socket = _Socket(inner)
        return self.socket

    def _tunnel(self, transport: paramiko.Transport, to: Hop) -> paramiko.Channel:
        try:
            return transport.open_channel("direct-tcpip", (to.address, to.port), ("127.0.0.1", 0), timeout=OPEN_TIMEOUT)
        except (OSError, paramiko.SSHException, EOFError) as error:
            raise unreachable(self.host, to, error) from error

    def _log_in(self, hop: Hop, through: Any) -> paramiko.Transport:
        client = paramiko.SSHClient()
        client.set_missing_host_key_policy(paramiko.RejectPolicy())
        if hop.known_hosts.is_file():
            client.load_host_keys(str(hop.known_hosts))
        self.clients.append(client)
        try:
            client.connect(
                hop.address,
                port=hop.port,
                username=hop.user or getpass.getuser(),
                key_filename=str(hop.key_file) if hop.key_file else None,
                sock=through,
                timeout=CONNECT_TIMEOUT,
                banner_timeout=OPEN_TIMEOUT,
                auth_timeout=OPEN_TIMEOUT,
                channel_timeout=OPEN_TIMEOUT,
                allow_agent=hop.agent,
                look_for_keys=hop.default_keys,
                transport_factory=_Transport,
            )
        except (paramiko.SSHException, OSError, EOFError, ValueError) as error:
            raise _refused(self.host, self.route, hop, error) from error
        transport = client.get_transport()
        assert transport is not None
        return transport

    def watch(self, transport: paramiko.Transport) -> None:
        """Asks the far end for an answer now and then, and cuts the connection when nothing at all is heard."""
        for work in (self._ask, self._listen):
            threading.Thread(target=work, args=(transport,), daemon=True, name=f"ssh-{work.__name__}").start()

    def _ask(self, transport: paramiko.Transport) -> None:
        while not self.closed.wait(ALIVE_INTERVAL) and transport.is_active():
            with contextlib.suppress(OSError, paramiko.SSHException, EOFError):
                transport.global_request("keepalive@openssh.com", wait=True)

    def _listen(self, transport: paramiko.Transport) -> None:
        assert self.socket is not None
        while not self.closed.wait(0.5) and transport.is_active():
            if time.monotonic() - self.socket.heard > SILENCE:
                self.why = f"nothing was heard from it for {SILENCE:.0f} s"
                self.close()

    def close(self) -> None:
        """Ends everything at once, without waiting for the other side."""
        self.closed.set()
        if self.socket is not None:
            with contextlib.suppress(OSError):
                self.socket.inner.shutdown(socket.SHUT_RDWR)
        for client in reversed(self.clients):
            with contextlib.suppress(OSError, paramiko.SSHException, EOFError):
                client.close()
        if self.socket is not None:
            self.socket.inner.close()


def open_channel(host: str, route: Sequence[Hop], command: str) -> Channel:
    """Connects along a route and starts a command at its end.

    Args:
        command: one string for the login shell there, joined by `shlex.join`.

    Raises:
        PermanentError: a hop refuses us, or is not the one we know. TransientError: a hop cannot be reached.
    """
    connection = Connection(host, route)
    try:
        transport = connection.open()
        try:
            channel = transport.open_session(timeout=OPEN_TIMEOUT)
            channel.settimeout(IDLE_TIMEOUT)
            channel.exec_command(command)
        except (OSError, paramiko.SSHException, EOFError) as error:
            raise unreachable(host, route[-1], error) from error
        connection.watch(transport)
    except BaseException:
        connection.close()
        raise
    return Channel(host, connection, channel)


class _Transport(paramiko.Transport):
    """A transport that prefers our ciphers, and whose reading thread never waits for itself.

    paramiko changes keys after 512 MiB. Until the new ones are there nothing else may be sent, and whoever wants to waits until
    the reading thread has taken them over. That thread answers the end of a command, too: when it is the one that waits, as
    it does where a command ends while keys change, the connection is silent for good (paramiko issue 822). Here its
    answers are put aside instead and go out with the new keys.
    """

    def __init__(self, sock: Any, **options: Any) -> None:
        super().__init__(sock, **options)
        self.get_security_options().ciphers = CIPHERS
        self._put_aside: list[paramiko.Message] = []

    def _send_user_message(self, data: paramiko.Message) -> None:
        if threading.current_thread() is self and not self.clear_to_send.is_set():
            self._put_aside.append(data)
        else:
            super()._send_user_message(data)  # type: ignore[misc]  # not in its stubs

    def _parse_newkeys(self, m: paramiko.Message) -> None:
        super()._parse_newkeys(m)  # type: ignore[misc]
        waiting, self._put_aside = self._put_aside, []
        for message in waiting:
            self._send_user_message(message)


def unreachable(host: str, hop: Hop, error: BaseException) -> TransientError:
    """What is said when no connection comes about."""
    return TransientError(
        f"{hop.name} ({hop.known_as}) cannot be reached: {error or type(error).__name__}",
        where=host,
        remedy=look_there(host, hop.file),
    )


def _refused(host: str, route: Sequence[Hop], hop: Hop, error: BaseException) -> DflashError:
    if isinstance(error, paramiko.BadHostKeyException):
        return changed_key(host, f"{hop.name} ({hop.known_as})", hop.file)
    if isinstance(error, paramiko.SSHException) and "not found in known_hosts" in str(error):
        return unknown_key(host, f"{hop.name} ({hop.known_as})", hop.file)
    if isinstance(error, paramiko.PasswordRequiredException):
        return PermanentError(
            f"the key file {hop.key_file} has a passphrase",
            where=host,
            remedy="Load it into an agent and say `agent: true`, or use a key of its own for this.",
        )
    if isinstance(error, paramiko.AuthenticationException) or "No authentication methods" in str(error):
        return denied(host, route, f"{hop.user}@{hop.address}: {error}")
    if isinstance(error, ValueError) or "not a valid" in str(error):
        return PermanentError(f"the key file {hop.key_file} is no private key", where=host, remedy="Check `key_file`.")
    return unreachable(host, hop, error)
