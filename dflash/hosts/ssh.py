"""A host over ssh. Control commands use the system's `ssh`, which is faster than any library and is kept patched by the system.

What the user's own ssh configuration says is left out on purpose (`-F none`): every hop trusts the host keys of one file
only, offers the keys that the hosts file names only, asks nothing, adds nothing. A way with jump hosts needs a configuration
file, because `-J` does not hand options on to hops; one is made in a private folder for the life of this process (no secret
in it). `channel` is the same way in this process, by paramiko (`dflash/hosts/channel.py`).

A dead link ends a command within 15 s (two unanswered probes). Costs a handshake a command: about 0.15 s on loopback, 4
round trips and more on a network.
"""

from __future__ import annotations

import atexit
import functools
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dflash.base.errors import ConfigError, DflashError, PermanentError, TransientError
from dflash.hosts.entry import Hop, HostEntry, with_file
from dflash.hosts.environment_path import environment_python
from dflash.hosts.host import ByCommand, Finished, named_python, with_variables

if TYPE_CHECKING:
    from dflash.hosts.channel import Channel

CONNECT_TIMEOUT = 10
ALIVE_INTERVAL, ALIVE_COUNT = 5, 2
"""ssh gives up one interval after the last unanswered probe: 15 s."""
CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr")
"""Preferred because processors compute them in hardware."""
LOST = 255
"""Exit status of `ssh` itself, when the connection failed."""


@dataclass(frozen=True)
class SshHost(ByCommand):
    """A host at the end of `route`. `file`: the hosts file, for messages."""

    id: str
    entry: HostEntry
    route: tuple[Hop, ...]
    file: Path | None = None

    @property
    def workdir(self) -> Path:
        """See `Host.workdir`."""
        if self.entry.workdir is None:
            raise ConfigError(
                f"`hosts.{self.id}.workdir` is missing",
                where=str(self.file),
                remedy="Name a folder of that host that results may go to.",
            )
        return self.entry.workdir

    @property
    def device(self) -> str | None:
        """See `Host.device`."""
        return self.entry.device

    def python(self, role: str = "") -> str:
        """See `Host.python`: that of the environment which `dflash hosts setup` makes when the hosts file names none."""
        return named_python(self.entry, role) or str(environment_python(self.workdir))

    def command(self, argv: Sequence[str]) -> list[str]:
        """See `Host.command`."""
        for hop in self.route:
            require_keys(hop)
        ssh = shutil.which("ssh")
        if ssh is None:
            raise PermanentError("there is no `ssh` on this machine", where=self.id, remedy="Install openssh-client.")
        return [ssh, "-T", *way(self.route), shlex.join([*self.entry.wrap, *argv])]

    def channel(self, argv: Sequence[str]) -> Channel:
        """Runs `argv` there over a connection of its own in this process.

        Raises:
            PermanentError: the host refuses us or is not the one we know. TransientError: it cannot be reached.
        """
        from dflash.hosts.channel import open_channel

        for hop in self.route:
            require_keys(hop)
        return open_channel(self.id, self.route, shlex.join([*self.entry.wrap, *argv]))

    def run(
        self, argv: Sequence[str], *, timeout: float | None = None, environment: Mapping[str, str] | None = None
    ) -> Finished:
        """See `Host.run`. Where this machine has no `ssh`, by paramiko."""
        if shutil.which("ssh"):
            return super().run(argv, timeout=timeout, environment=environment)
        return self._by_channel(with_variables(argv, environment or {}), (), timeout)

    def stream(self, argv: Sequence[str], stdin: Iterable[bytes]) -> Finished:
        """See `Host.stream`. Where this machine has no `ssh`, by paramiko."""
        return super().stream(argv, stdin) if shutil.which("ssh") else self._by_channel(argv, stdin, None)

    def follow(
        self, argv: Sequence[str], tell: Callable[[str], None], *, environment: Mapping[str, str] | None = None
    ) -> Finished:
        """See `Host.follow`. Where this machine has no `ssh`, all lines come at the end."""
        if shutil.which("ssh"):
            return super().follow(argv, tell, environment=environment)
        done = self.run(argv, environment=environment)
        for line in done.stdout.decode(errors="replace").splitlines():
            tell(line)
        return Finished(done.status, b"", done.stderr)

    def _by_channel(self, argv: Sequence[str], stdin: Iterable[bytes], timeout: float | None) -> Finished:
        from dflash.hosts.channel import communicate

        with self.channel(argv) as channel:
            return super().judged(argv, communicate(channel, stdin, timeout, argv[0]))

    def judged(self, argv: Sequence[str], done: Finished) -> Finished:
        """See `ByCommand.judged`: an exit status of 255 is that of ssh."""
        if done.status == LOST:
            raise connection_error(self.id, self.route, done.stderr)
        return super().judged(argv, done)


def require_keys(hop: Hop) -> None:
    """Checks a hop's key file before ssh passes over it in silence.

    Raises:
        PermanentError: it is missing, unreadable, or open to others.
    """
    if hop.key_file is None:
        return
    key = f"the key file {hop.key_file}"
    try:
        mode = hop.key_file.stat().st_mode
        with hop.key_file.open("rb"):
            pass
    except OSError as error:
        raise PermanentError(
            f"{key} cannot be read: {error.strerror}",
            where=hop.name,
            remedy="Check `key_file` in the hosts file, or make a key with `ssh-keygen -t ed25519`.",
        ) from error
    if mode & 0o077:
        raise PermanentError(
            f"{key} is open to others, so ssh will not use it",
            where=hop.name,
            remedy=f"Run `chmod 600 {shlex.quote(str(hop.key_file))}`.",
        )


def options(hop: Hop) -> dict[str, str]:
    """The ssh options of one hop, by name."""
    keys = _quoted(hop.key_file) if hop.key_file else None if hop.default_keys else "none"
    return {
        "BatchMode": "yes",
        "StrictHostKeyChecking": "yes",
        "UserKnownHostsFile": _quoted(hop.known_hosts),
        "GlobalKnownHostsFile": "/dev/null",
        "UpdateHostKeys": "no",
        "PreferredAuthentications": "publickey",
        "IdentitiesOnly": "no" if hop.agent else "yes",
        **({} if hop.agent else {"IdentityAgent": "none"}),
        **({} if keys is None else {"IdentityFile": keys}),
        "ForwardAgent": "no",
        "ControlPath": "none",
        "Ciphers": f"^{','.join(CIPHERS)}",
        "ConnectTimeout": str(CONNECT_TIMEOUT),
        "ServerAliveInterval": str(ALIVE_INTERVAL),
        "ServerAliveCountMax": str(ALIVE_COUNT),
        "Port": str(hop.port),
        **({"User": hop.user} if hop.user else {}),
    }


def way(route: Sequence[Hop]) -> list[str]:
    """The arguments of `ssh` that lead to the end of a route."""
    if len(route) == 1:
        given = [f"-o{name}={value}" for name, value in options(route[0]).items()]
        return ["-F", "none", *given, "--", route[0].address]
    return ["-F", str(_configuration_file(configuration(route))), "--", _alias(len(route) - 1)]


def configuration(route: Sequence[Hop]) -> str:
    """An ssh configuration with a block for each hop, each reached through the one before."""
    lines: list[str] = []
    for index, hop in enumerate(route):
        lines += [f"Host {_alias(index)}", f"  HostName {hop.address}"]
        lines += [f"  {name} {value}" for name, value in options(hop).items()]
        if index:
            lines.append(f"  ProxyJump {_alias(index - 1)}")
    return "\n".join(lines) + "\n"


def _alias(index: int) -> str:
    return f"hop{index}"


def _quoted(path: Path) -> str:
    """A path as a value of an ssh option: quoted, and with the signs that ssh would expand doubled."""
    text = str(path).replace("%", "%%")
    if re.search(r'["\\$\x00-\x1f]', text):
        raise PermanentError(f"ssh cannot read a file of the name {text!r}", remedy="Rename it.")
    return f'"{text}"'


@functools.cache
def _configuration_file(content: str) -> Path:
    """A private file (mode 0600) that goes away with this process."""
    # ssh hands the path on to hops through a shell, unquoted.
    parent = tempfile.gettempdir() if re.fullmatch(r"[\w/.+-]+", tempfile.gettempdir()) else "/tmp"
    folder = Path(tempfile.mkdtemp(prefix="dflash-ssh-", dir=parent))
    path = folder / "config"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(content)
    atexit.register(_remove, folder, os.getpid())
    return path


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


UNKNOWN_KEY = re.compile(r"No (?P<kind>\S+) host key is known for (?P<name>\S+) and")
CHANGED_KEY = re.compile(r"Host key for (?P<name>\S+) has changed and")
NOISE = re.compile(
    r"^(@|Warning:|Connection (closed|reset) by UNKNOWN|Host key verification failed|kex_exchange_identification: Connection"
    r" closed by remote host$|Connection closed by remote host$)"
)


def connection_error(host: str, route: Sequence[Hop], stderr: str) -> DflashError:
    """What ssh's words mean: refused for good (unknown or changed host key, no permission), or worth another attempt."""
    file = route[-1].file
    if found := UNKNOWN_KEY.search(stderr):
        return unknown_key(host, _hop_known_as(route, found["name"]), file)
    if found := CHANGED_KEY.search(stderr):
        return changed_key(host, _hop_known_as(route, found["name"]), file)
    if "Host key verification failed" in stderr:
        return unknown_key(host, ", ".join(hop.known_as for hop in route), file)
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    line = next((line for line in reversed(lines) if not NOISE.match(line)), lines[-1] if lines else "no reason given")
    if "Permission denied" in line:
        return denied(host, route, line)
    if re.search(r"Bad owner or permissions|Bad configuration option|no matching .* found", line):
        return PermanentError(f"ssh: {line}", where=host, remedy=look_there(host, file))
    return TransientError(
        f"the connection failed: {line}",
        where=host,
        remedy=look_there(host, file),
    )


def look_there(host: str, file: Path | None) -> str:
    """What to do about a host that cannot be reached. file: the hosts file that names it."""
    return f"Look at the way there with `{with_file(f'dflash doctor --host {host}', file)}`."


def _hop_known_as(route: Sequence[Hop], name: str) -> str:
    """A hop as people know it: its name in the hosts file and its address."""
    for hop in route:
        if name in (hop.known_as, hop.address):
            return f"{hop.name} ({hop.known_as})" if hop.name not in hop.known_as else hop.known_as
    return name


def unknown_key(host: str, hop: str, file: Path | None) -> PermanentError:
    """What is said when a hop's host key is not pinned."""
    return PermanentError(
        f"the host key of {hop} is not known",
        where=host,
        remedy=f"See it and pin it with `{with_file(f'dflash doctor --pin {host}', file)}`.",
    )


def changed_key(host: str, hop: str, file: Path | None) -> PermanentError:
    """What is said when a hop shows another host key than the pinned one."""
    return PermanentError(
        f"the host key of {hop} is not the one that is pinned: another machine answers, or it was installed anew",
        where=host,
        remedy=f"Ask its owner; only if that is right, pin it with `{with_file(f'dflash doctor --pin {host}', file)}`.",
    )


def denied(host: str, route: Sequence[Hop], line: str) -> PermanentError:
    """What is said when a hop does not let us in."""
    hop = next((hop for hop in route if f"{hop.user}@{hop.address}:" in line), route[-1])
    offered = [str(hop.key_file)] if hop.key_file else []
    offered += ["the agent's keys"] if hop.agent else []
    offered += ["the keys of ~/.ssh"] if hop.default_keys else []
    return PermanentError(
        f"{hop.name} does not let {hop.user or 'this user'} in (offered: {', '.join(offered)}; ssh says: {line})",
        where=host,
        remedy="Check `user` and `key_file`, and that the public key stands in its authorized_keys.",
    )
