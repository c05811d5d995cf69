"""Host keys: which are pinned, what a host shows, and pinning one after a person has seen its fingerprint.

Nothing is ever pinned without that: `pin` takes only a key whose fingerprint was confirmed. Costs a handshake a hop.
"""

from __future__ import annotations

import base64
import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import paramiko
from paramiko.hostkeys import HostKeyEntry, InvalidHostKey

from dflash.base.errors import ConfigError, CorruptError, PermanentError
from dflash.base.files import write_atomically
from dflash.hosts.channel import OPEN_TIMEOUT, Connection, unreachable
from dflash.hosts.entry import Hop


@dataclass(frozen=True)
class ShownKey:
    """The host key that a hop shows, beside the one of its kind that is pinned (None: there is none)."""

    hop: Hop
    key: paramiko.PKey
    pinned: paramiko.PKey | None

    @property
    def trusted(self) -> bool:
        """Whether it is the pinned one."""
        return self.pinned is not None and self.pinned == self.key

    @property
    def fingerprint(self) -> str:
        """As `ssh-keygen -l` writes it."""
        return fingerprint(self.key)

    def question(self) -> str:
        """What a person is shown before being asked."""
        kind = self.key.get_name()
        lines = [f"{self.hop.name} ({self.hop.known_as}) shows this host key:", f"  {kind} {self.fingerprint}"]
        if self.pinned is not None:
            lines.append(f"  pinned is another: {fingerprint(self.pinned)}. Another machine may be answering.")
        short = kind.removeprefix("ssh-").partition("-")[0]
        lines.append(f"Compare it on that machine: ssh-keygen -lf /etc/ssh/ssh_host_{short}_key.pub")
        return "\n".join(lines)


def fingerprint(key: paramiko.PKey) -> str:
    """`SHA256:` and the digest of a public key, as OpenSSH writes it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(key.asbytes()).digest()).decode().rstrip("=")


def pinned_keys(hop: Hop) -> dict[str, paramiko.PKey]:
    """Kind -> key of a hop in its known_hosts file; empty when the file is missing.

    Raises:
        CorruptError: the file cannot be read.
    """
    try:
        keys = paramiko.HostKeys(str(hop.known_hosts)) if hop.known_hosts.exists() else paramiko.HostKeys()
    except (OSError, UnicodeDecodeError, InvalidHostKey) as error:
        raise CorruptError(f"no known_hosts file: {error}", where=str(hop.known_hosts)) from error
    return dict(keys.lookup(hop.known_as) or {})


def shown_key(host: str, route: Sequence[Hop]) -> ShownKey:
    """Asks the last hop of a route for its host key, through the hops before it, which must be pinned. Logs in to those only.

    Raises:
        PermanentError: a hop before it refuses us or is not the one we know. TransientError: it cannot be reached.
    """
    hop = route[-1]
    pinned = pinned_keys(hop)
    connection = Connection(host, route)
    try:
        transport = paramiko.Transport(connection.open_to_last())
        transport.banner_timeout = OPEN_TIMEOUT
        options = transport.get_security_options()
        # A host with keys of several kinds shows the first that we ask for: ask for a pinned kind.
        options.key_types = tuple(sorted(options.key_types, key=lambda kind: kind not in pinned))
        try:
            transport.start_client(timeout=OPEN_TIMEOUT)
            key = transport.get_remote_server_key()
        except (OSError, paramiko.SSHException, EOFError) as error:
            raise unreachable(host, hop, error) from error
        finally:
            transport.close()
    finally:
        connection.close()
    return ShownKey(hop, key, pinned.get(key.get_name()))


def pin(shown: ShownKey, confirmed: str) -> None:
    """Writes a host key to its hop's known_hosts file, in the place of another of its kind, atomically.

    Args:
        confirmed: the fingerprint that a person has said yes to.

    Raises:
        PermanentError: that is another fingerprint, or the file cannot be written.
    """
    if confirmed != shown.fingerprint:
        raise PermanentError(
            f"{shown.hop.name} shows the host key {shown.fingerprint}, not {confirmed}",
            where=str(shown.hop.known_hosts),
            remedy="Nothing was pinned. Ask the owner of the machine which is right.",
        )
    path, name = shown.hop.known_hosts, shown.hop.known_as
    lines = path.read_text().splitlines() if path.exists() else []
    kept = [left for line in lines if (left := _without(line, name, shown.key.get_name())) is not None]
    made = f"{name} {shown.key.get_name()} {shown.key.get_base64()}"
    write_atomically(path, "\n".join([*kept, made]) + "\n")


def _without(line: str, name: str, kind: str) -> str | None:
    """A line of a known_hosts file that no longer pins a key of that kind for that name; None when nothing is left of it."""
    if not line.strip() or line.startswith(("#", "@")):
        return line
    entry = HostKeyEntry.from_line(line)
    if entry is None or entry.key is None or entry.hostnames is None or entry.key.get_name() != kind:
        return line
    others = [one for one in entry.hostnames if not _names(one, name)]
    if len(others) == len(entry.hostnames):
        return line
    return f"{','.join(others)} {kind} {entry.key.get_base64()}" if others else None


def _names(written: str, name: str) -> bool:
    """Whether a name of a known_hosts file, perhaps hashed, is that name."""
    return written == name or (written.startswith("|1|") and paramiko.HostKeys.hash_host(name, written) == written)


def pin_route(host: str, route: Sequence[Hop], confirmed: Sequence[str]) -> None:
    """Shows the host key of every hop that is not pinned yet, nearest first, and pins those that a person agrees to.

    Args:
        confirmed: fingerprints that a person has agreed to already; without them the terminal is asked.

    Raises:
        ConfigError: this is no terminal and no fingerprint was given.
        PermanentError: the person said no, or another fingerprint is shown. TransientError: a hop cannot be reached.
    """
    for index in range(len(route)):
        shown = shown_key(host, route[: index + 1])
        if shown.trusted:
            print(f"{shown.hop.name} ({shown.hop.known_as}): pinned already, {shown.fingerprint}")
            continue
        print(shown.question(), flush=True)
        pin(shown, _agreed(shown, confirmed))
        print(f"pinned in {shown.hop.known_hosts}")
    if not route:
        print(f"{host} is this machine; there is nothing to pin")


def _agreed(shown: ShownKey, confirmed: Sequence[str]) -> str:
    """The fingerprint that a person agrees to."""
    if confirmed:
        return shown.fingerprint if shown.fingerprint in confirmed else confirmed[0]
    if not sys.stdin.isatty():
        raise ConfigError(
            f"nobody can be asked about {shown.fingerprint}: this is not a terminal",
            where=shown.hop.name,
            remedy=f"Once you have compared it on that machine, add `--yes {shown.fingerprint}`.",
        )
    if input(f"Pin it in {shown.hop.known_hosts}? [y/N] ").strip().lower() not in ("y", "yes"):
        raise PermanentError(f"the host key of {shown.hop.name} was not pinned")
    return shown.fingerprint
