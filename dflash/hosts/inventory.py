"""Which machines there are and which role runs where, from `config/hosts.yaml`.

Host ids are names, never addresses, and enter no key. This version runs every role on the machine that runs the workflow;
a hosts file may say so, and anything else in it is refused rather than ignored.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from dflash.base.errors import ConfigError

ROLES = ("gpu", "eval", "generate")


@dataclass(frozen=True)
class Inventory:
    """Role -> host id, and host id -> device (`cpu`, `cuda`, `cuda:0`)."""

    roles: dict[str, str] = field(default_factory=lambda: dict.fromkeys(ROLES, "local"))
    devices: dict[str, str] = field(default_factory=dict)

    def host(self, role: str) -> str:
        """The host id that plays a role; the controller is always `local`."""
        return self.roles.get(role, "local")

    def device(self, role: str) -> str:
        """The device a role's stages use: as the hosts file says, else CUDA where an NVIDIA driver shows a GPU."""
        return self.devices.get(self.host(role)) or detected_device()


def detected_device() -> str:
    """`cuda` when an NVIDIA GPU is visible to this process, else `cpu`; looks at the driver's files, so needs no torch."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return "cpu"
    return "cuda" if any(Path("/dev").glob("nvidia[0-9]*")) else "cpu"


def load_inventory(path: Path | None) -> Inventory:
    """Reads a hosts file; None means everything local.

    Raises:
        ConfigError: missing, not YAML, an unknown key, role or host, or a host that is not `local`.
    """
    if path is None:
        return Inventory()
    try:
        raw = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"`hosts: {path}`: there is no such file", where="hosts") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"the hosts file cannot be read ({error})", where=str(path)) from error
    if not isinstance(raw, dict) or set(raw) - {"hosts", "roles"}:
        raise ConfigError("a hosts file has `hosts` and `roles`, nothing else", where=str(path))
    hosts = raw.get("hosts") or {}
    for name, host in hosts.items():
        if not isinstance(host, dict) or set(host) - {"kind", "device"} or host.get("kind") != "local":
            raise ConfigError(
                f"`hosts.{name}: {host}`: only `kind: local` is supported",
                where=str(path),
                remedy="Remote hosts are not part of this version.",
            )
    roles = raw.get("roles") or {}
    for role, host in roles.items():
        if role not in ROLES:
            raise ConfigError(f"`roles.{role}`: unknown role; known: {', '.join(ROLES)}", where=str(path))
        if host != "local" and host not in hosts:
            raise ConfigError(f"`roles.{role}: {host}` names no host of this file", where=str(path))
    devices = {name: str(host["device"]) for name, host in hosts.items() if "device" in host}
    for name, device in devices.items():
        if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
            raise ConfigError(f"`hosts.{name}.device: {device}` is not cpu, cuda or cuda:N", where=str(path))
    return Inventory({role: str(roles.get(role, "local")) for role in ROLES}, devices)
