"""A workspace whose stages run on other machines: real sshd on loopback, each host with a workdir of its own."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from conftest import Workspace, make_workspace  # type: ignore[import-not-found]
from sshd import Sshd, start_sshd

from dflash.hosts.lease import holder

PYTHON = sys.executable
ROLES = {"gpu": "trainbox", "eval": "judge"}


@dataclass
class Spread(Workspace):
    """A workspace with a hosts file. `servers`: host id -> its sshd; workdirs lie beside the working folder, by host id.
    more: further entries of a host. prefix: what every command of the controller begins with."""

    servers: dict[str, Sshd] = field(default_factory=dict)
    roles: dict[str, str | list[str]] = field(default_factory=lambda: dict(ROLES))
    more: dict[str, dict[str, Any]] = field(default_factory=dict)
    prefix: list[str] = field(default_factory=list)

    def _run(self, command: list[str], expect: int | None, timeout: float) -> subprocess.CompletedProcess[str]:
        # connections and far processes on top of the same work: patience for a busy machine
        return super()._run([*self.prefix, *command], expect, timeout * 3)

    def workdir(self, host: str) -> Path:
        return self.folder.parent / host

    def store(self, host: str) -> Path:
        return self.workdir(host) / "results/store"

    def write_hosts(self, **roles: str | list[str]) -> None:
        """Writes the hosts file; roles as given, else as they were."""
        self.roles.update(roles)
        hosts = {
            host: server.host_entry(self.workdir(host), python=PYTHON, **self.more.get(host, {}))
            for host, server in self.servers.items()
        }
        (self.folder / "hosts.yaml").write_text(yaml.safe_dump({"hosts": hosts, "roles": self.roles}))
        self.write_config(hosts="hosts.yaml")

    def shipments(self) -> dict[str, int]:
        """Records of shipments, `host/key/step`, with their inodes."""
        root = self.results / "store/ship"
        return {
            f"{path.parent.name}/{path.parent.parent.name}/{path.stem}": path.stat().st_ino
            for path in root.glob("*/*/*.json")
        }

    def kill_trainers(self) -> None:
        for lease in self.folder.parent.glob("*/results/store/train/*/lease.json"):
            record = holder(lease)
            if record is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(record.pid, signal.SIGKILL)


def start_servers(
    folder: Path, cache: Path, hosts: tuple[str, ...] = ("trainbox", "judge", "spare")
) -> dict[str, Sshd]:
    """One sshd a host. All believe that they are machines of their own: each has its own leases and caches."""
    found = {}
    for host in hosts:
        environment = {"DFLASH_LEASES": str(cache / f"leases-{host}"), "XDG_CACHE_HOME": str(cache / f"cache-{host}")}
        found[host] = start_sshd(folder / host, environment={**environment, "PYTHONDONTWRITEBYTECODE": "1"})
    return found


def make_spread(folder: Path, cache: Path, servers: dict[str, Sshd]) -> Spread:
    plain = make_workspace(folder, cache)
    space = Spread(folder, cache, config=plain.config, servers=servers)
    space.write_hosts()
    return space


def copy_spread(finished: Spread, parent: Path) -> Spread:
    """A copy of working folder and workdirs (modification times kept)."""
    shutil.copytree(finished.folder.parent, parent, symlinks=True)
    folder = parent / finished.folder.name
    config = yaml.safe_load((folder / "config/config.yaml").read_text())
    space = Spread(folder, finished.cache, config=config, servers=finished.servers)
    space.write_hosts()
    return space


def connections(space: Spread) -> int:
    """How often somebody has logged in at `trainbox`."""
    return space.servers["trainbox"].log.read_text().count("Accepted publickey")


def names(text: str, space: Spread, host: str) -> list[str]:
    """What of a host's workdir is listed, with keys left out."""
    found = re.findall(rf"{host}:{re.escape(str(space.workdir(host)))}/(\S+)", text)
    return sorted(re.sub(r"[0-9a-f]{12,}", "*", name) for name in found)
