"""A throwaway OpenSSH server for tests: a real sshd on loopback with its own host key, client key and known_hosts.

It touches nothing of the user's: no ~/.ssh, no service, no PAM. As root or not, it lets in the user that started it, by the
key in its folder only. Starting costs about 0.2 s, most of it keys.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START_TIMEOUT = 20.0
MARK = "DFLASH_TEST_SSHD"
"""A variable of every command that a server starts: the server's folder."""

CONFIG = """\
Port {port}
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PubkeyAuthentication yes
PermitRootLogin prohibit-password
AllowTcpForwarding yes
PermitTTY no
X11Forwarding no
UseDNS no
PrintMotd no
MaxStartups 1000
MaxSessions 100
LoginGraceTime 30
LogLevel VERBOSE
Subsystem sftp internal-sftp
SetEnv {environment}
{more}
"""


def sshd_program() -> str | None:
    """Where sshd is; None when it is not installed. It insists on being called by an absolute path."""
    return shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin:/sbin")


def why_not() -> str:
    """Why no sshd can be started here; empty when one can."""
    for program in ("ssh", "ssh-keygen"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    return "" if sshd_program() else "sshd is not installed"


@dataclass
class Sshd:
    """A running server. `host_entry` is its entry of a hosts file."""

    folder: Path
    address: str
    port: int
    process: subprocess.Popen[bytes]
    user: str = field(default_factory=lambda: pwd.getpwuid(os.getuid()).pw_name)

    @property
    def key_file(self) -> Path:
        """The private key that is let in."""
        return self.folder / "client_key"

    @property
    def host_key(self) -> str:
        """The server's public key, `ssh-ed25519 AAAA...`."""
        return " ".join((self.folder / "host_key.pub").read_text().split()[:2])

    @property
    def known_hosts(self) -> Path:
        """A known_hosts file that pins the server's key for its address and port."""
        return self.folder / "known_hosts"

    @property
    def log(self) -> Path:
        """What the server says."""
        return self.folder / "sshd.log"

    def host_entry(self, workdir: Path, **more: Any) -> dict[str, Any]:
        """The server as an entry of a hosts file, reached through `workdir`."""
        return {
            "kind": "ssh",
            "address": self.address,
            "port": self.port,
            "user": self.user,
            "key_file": str(self.key_file),
            "known_hosts": str(self.known_hosts),
            "workdir": str(workdir),
            "device": "cpu",
            **more,
        }

    def pin(self, address: str, port: int) -> None:
        """Pins the server's key for one more way to reach it, for instance through a proxy."""
        with self.known_hosts.open("a") as stream:
            stream.write(f"[{address}]:{port} {self.host_key}\n")

    def children(self) -> list[int]:
        """Pids of the sshd processes that serve connections; not of the commands that they run."""
        return [pid for pid in descendants(self.process.pid) if command_name(pid).startswith("sshd")]

    def kill_children(self) -> int:
        """Kills every sshd process that serves a connection (SIGKILL), as a crash would; returns how many there were."""
        found = self.children()
        kill_all(found)
        return len(found)

    def commands(self) -> list[int]:
        """Pids of what this server ever started and still lives, detached or not, known by a variable of theirs."""
        return [pid for pid in all_processes() if f"{MARK}={self.folder}".encode() in environment_of(pid)]

    def stop(self) -> None:
        """Ends the server, all its connections and every command that it ever started; returns when they are gone."""
        found = set(descendants(self.process.pid))
        self.process.terminate()
        kill_all({*found, *self.commands()})
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        self.process.kill()
        self.process.wait()
        # A killed process is listed until the kernel gets to it, and one that was being started is seen only now.
        deadline = time.monotonic() + 30
        while (left := self.commands()) and time.monotonic() < deadline:
            kill_all(left)
            time.sleep(0.01)


def kill_all(pids: Iterable[int]) -> None:
    """SIGKILL to each; one that is gone already is fine."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def start_sshd(
    folder: Path,
    *,
    address: str = "127.0.0.1",
    prefix: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    more: str = "",
    client_key: Path | None = None,
) -> Sshd:
    """Starts a server whose files lie in `folder` (created; no spaces in its path).

    Args:
        prefix: what the server's command line begins with, for instance `ip netns exec NAME`.
        environment: variables of the commands that it runs (one thread a process by default).
        more: further lines of sshd_config.
        client_key: a private key to let in; one is made when left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    make_key(folder / "host_key")
    if client_key is None:
        make_key(folder / "client_key")
    else:
        for suffix in ("", ".pub"):
            shutil.copy(f"{client_key}{suffix}", folder / f"client_key{suffix}")
    shutil.copy(folder / "client_key.pub", folder / "authorized_keys")
    # A home of its own: bash reads ~/.bashrc for commands over ssh, and a user's may be slow, talk, or break when killed.
    (folder / "home").mkdir(exist_ok=True)
    variables = {"OMP_NUM_THREADS": "1", "HOME": f"{folder}/home", MARK: str(folder), **(environment or {})}
    for _ in range(5):
        port = free_port()
        (folder / "sshd_config").write_text(
            CONFIG.format(
                port=port,
                address=address,
                folder=folder,
                environment=" ".join(f'"{name}={value}"' for name, value in variables.items()),
                more=f"{_penalties()}\n{more}",
            )
        )
        (folder / "sshd.log").write_text("")
        argv = [*prefix, str(sshd_program()), "-D", "-f", f"{folder}/sshd_config", "-E", f"{folder}/sshd.log"]
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True)
        if _listens(process, folder / "sshd.log"):
            server = Sshd(folder, address, port, process)
            server.known_hosts.write_text("")
            server.pin(address, port)
            return server
    raise RuntimeError(f"sshd does not start: {(folder / 'sshd.log').read_text()}")


def _listens(process: subprocess.Popen[bytes], log: Path) -> bool:
    """Waits for the server to listen. Its log is asked, because its address may be out of reach from here."""
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline and process.poll() is None:
        if "Server listening on" in log.read_text():
            return True
        time.sleep(0.01)
    process.kill()
    process.wait()
    return False


def _penalties() -> str:
    """OpenSSH 9.8 and later shun an address whose connections are often cut, which is what tests do."""
    said = subprocess.run([str(sshd_program()), "-V"], capture_output=True, text=True, check=False).stderr
    found = re.search(r"OpenSSH_(\d+)\.(\d+)", said)
    return "PerSourcePenalties no" if found and (int(found[1]), int(found[2])) >= (9, 8) else ""


def make_key(path: Path) -> None:
    """Makes an ed25519 key pair without a passphrase; does nothing when there is one."""
    if not path.exists():
        argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(path)]
        subprocess.run(argv, stdin=subprocess.DEVNULL, check=True)


def free_port() -> int:
    """A port that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def command_name(pid: int) -> str:
    """The kernel's short name of a process; empty when it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def all_processes() -> list[int]:
    """Pids of all processes of the machine."""
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def environment_of(pid: int) -> list[bytes]:
    """`NAME=value` of every variable that a process was started with; empty when it is gone or somebody else's."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return []


def descendants(ancestor: int) -> list[int]:
    """Pids of all living descendants of a process."""
    parents: dict[int, int] = {}
    for pid in all_processes():
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                parents[pid] = int(fields[1])
    found = [ancestor]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]
