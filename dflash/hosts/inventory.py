"""Which machines there are and which role runs where, from `config/hosts.yaml`.

Host ids are names, never addresses, and enter no key. Without a hosts file every role runs on the machine that runs the
workflow. Reading a file costs about a millisecond; no host is contacted.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from dflash.base.errors import ConfigError
from dflash.base.yaml_source import Source, load_yaml
from dflash.hosts.entry import HOST_ID, JUMP, ROLES, Hop, HostEntry, Notify
from dflash.hosts.host import Host, LocalHost
from dflash.hosts.ssh import SshHost

SECTIONS = ("hosts", "roles", "notify")
LOCAL = "local"
SHARED_ROLE = "generate"
"""The role that several hosts may play at once."""
M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class Inventory:
    """The hosts and who plays which role. `file`: where it was read from. `generate` may be played by several hosts, which share
    the completions; its first host plays it for everything else."""

    roles: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: dict.fromkeys(ROLES, (LOCAL,)))
    entries: Mapping[str, HostEntry] = field(default_factory=dict)
    notify: Notify = field(default_factory=Notify)
    file: Path | None = None

    def host(self, role: str, part: int = 0) -> str:
        """The host id that plays a role, for part `part` of what is shared; the controller is always `local`."""
        players = self.roles.get(role, (LOCAL,))
        return players[part % len(players)]

    def device(self, role: str, part: int = 0) -> str:
        """The device a role's stages use: as the hosts file says, else CUDA where an NVIDIA driver shows a GPU."""
        return self.entry(self.host(role, part)).device or detected_device()

    def ids(self) -> list[str]:
        """All hosts, `local` included."""
        return list(dict.fromkeys([*self.entries, LOCAL]))

    def entry(self, host_id: str) -> HostEntry:
        """What the file says of a host.

        Raises:
            ConfigError: there is no host of that name.
        """
        if host_id in self.entries:
            return self.entries[host_id]
        if host_id == LOCAL:
            return HostEntry(kind="local")
        where = str(self.file or "no hosts file")
        raise ConfigError(f"there is no host `{host_id}`", where=where, remedy=_hint(host_id, self.ids()))

    def get(self, host_id: str) -> Host:
        """A host to run commands on; nothing is contacted yet.

        Raises:
            ConfigError: there is no host of that name.
        """
        entry = self.entry(host_id)
        if entry.kind == "local":
            return LocalHost(host_id, entry)
        return SshHost(host_id, entry, self.route(host_id), self.file)

    def route(self, host_id: str) -> tuple[Hop, ...]:
        """The ssh connections that lead to a host, its own last; empty for this machine.

        Raises:
            ConfigError: a jump host is unknown, local, or leads back to itself.
        """
        return self._route(host_id, ())

    def _route(self, host_id: str, passed: tuple[str, ...]) -> tuple[Hop, ...]:
        if host_id in passed:
            raise ConfigError(
                f"`hosts.{host_id}.jump` leads in a circle: {' -> '.join((*passed, host_id))}",
                where=str(self.file),
                remedy="A jump host must be reachable without the hosts behind it.",
            )
        entry = self.entry(host_id)
        if entry.kind == "local":
            return ()
        hops: list[Hop] = []
        for jump in entry.jump:
            if jump in self.entries:
                hops += self._route(jump, (*passed, host_id))
            else:
                hops.append(self._jump(host_id, entry, jump))
        assert entry.address is not None
        return (*hops, self._hop(host_id, entry, entry.address, entry.port, entry.user))

    def _jump(self, host_id: str, entry: HostEntry, text: str) -> Hop:
        found = JUMP.fullmatch(text)
        if found is None:
            raise ConfigError(
                f"`hosts.{host_id}.jump: {text}` is neither a host of this file nor `user@address:port`",
                where=str(self.file),
                remedy=_hint(text, self.entries),
            )
        address = found["address"].strip("[]")
        return self._hop(text, entry, address, int(found["port"] or 22), found["user"])

    def _hop(self, name: str, entry: HostEntry, address: str, port: int, user: str | None) -> Hop:
        return Hop(
            name=name,
            address=address,
            port=port,
            user=user,
            key_file=self._beside(entry.key_file) if entry.key_file else None,
            known_hosts=self._beside(entry.known_hosts or Path("known_hosts")),
            agent=entry.agent,
            default_keys=entry.default_keys,
            file=self.file,
        )

    def _beside(self, path: Path) -> Path:
        """A path of the file as an absolute one: `~` is the user's home, relative ones start at the file's folder."""
        folder = self.file.parent if self.file else Path()
        return (folder / path.expanduser()).absolute()


def detected_device() -> str:
    """`cuda` when an NVIDIA GPU is visible to this process, else `cpu`; looks at the driver's files, so needs no torch."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return "cpu"
    return "cuda" if any(Path("/dev").glob("nvidia[0-9]*")) else "cpu"


def load_inventory(path: Path | None) -> Inventory:
    """Reads a hosts file; None means everything local.

    Raises:
        ConfigError: missing, not YAML, an unknown key, role or host, a value out of range; names file, line, key and value.
    """
    if path is None:
        return Inventory()
    if not path.exists():
        raise ConfigError(f"`hosts: {path}`: there is no such file", where="hosts", remedy="Check the path.")
    source = load_yaml(path)
    for name in source.values:
        if name not in SECTIONS:
            raise ConfigError(
                f"unknown key `{name}`: a hosts file has `hosts`, `roles` and `notify`, nothing else",
                where=source.origin(name),
                remedy=_hint(name, SECTIONS),
            )
    entries = {name: _entry(name, value, source) for name, value in _mapping("hosts", source).items()}
    notify = _validated(Notify, "notify", _mapping("notify", source), source)
    inventory = Inventory(_roles(entries, source), entries, notify, path)
    for name, entry in entries.items():
        for index, jump in enumerate(entry.jump):
            if jump not in entries and not JUMP.fullmatch(jump):
                raise ConfigError(
                    f"`hosts.{name}.jump: {jump}` is neither a host of this file nor `user@address:port`",
                    where=source.origin(f"hosts.{name}.jump.{index}"),
                    remedy=_hint(jump, entries),
                )
            if jump in entries and entries[jump].kind == "local":
                raise ConfigError(
                    f"`hosts.{name}.jump: {jump}` is this machine; no jump is needed",
                    where=source.origin(f"hosts.{name}.jump.{index}"),
                    remedy="Remove it.",
                )
        inventory.route(name)
    return inventory


def _mapping(section: str, source: Source) -> dict[str, Any]:
    value = source.values.get(section)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"`{section}: {value}` is not a mapping", where=source.origin(section))
    return value


def _entry(name: str, value: Any, source: Source) -> HostEntry:
    path = f"hosts.{name}"
    if not HOST_ID.fullmatch(name):
        raise ConfigError(
            f"`{path}`: not a host id", where=source.origin(path), remedy="Use letters, digits, '-' and '_'."
        )
    if not isinstance(value, dict):
        raise ConfigError(f"`{path}: {value}` is not a mapping", where=source.origin(path), remedy="Say its `kind`.")
    return _validated(HostEntry, path, value, source)


def _validated(model: type[M], path: str, value: dict[str, Any], source: Source) -> M:
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _config_error(error, model, path, source) from error


def _config_error(error: ValidationError, model: type[BaseModel], path: str, source: Source) -> ConfigError:
    """The first thing that is wrong: an unknown key before a missing one, for the one is often the other misspelt."""
    items = error.errors()
    first = next((item for item in items if item["type"] == "extra_forbidden"), items[0])
    places = [str(part) for part in first["loc"] if str(part) not in ("str", "mapping[str,str]")]
    name = ".".join([path, *places])
    message = first["msg"].removeprefix("Value error, ")
    where = source.origin(name) or source.origin(path)
    if first["type"] == "extra_forbidden":
        known = list(model.model_fields)
        return ConfigError(f"unknown key `{name}: {first['input']}`", where=where, remedy=_hint(places[-1], known))
    if first["type"] == "missing":
        return ConfigError(f"`{name}` is missing", where=where, remedy=_wanted(model, places[-1]))
    if not places:
        return ConfigError(f"`{name}`: {message}", where=where, remedy="See the examples in config/hosts.yaml.")
    said = f"{message[:1].lower()}{message[1:]}"
    value = "" if places[0] == "webhook" else f": {first['input']}"  # whoever knows a webhook may post to it
    return ConfigError(f"`{name}{value}`: {said}", where=where, remedy=_wanted(model, places[0]))


WANTED = {
    "kind": "Say `local` or `ssh`.",
    "address": "Give a name or an IP address without blanks.",
    "port": "Give a number from 1 to 65535.",
    "device": "Say cpu, cuda or cuda:N.",
    "workdir": "Give an absolute path on that host.",
    "scratch": "Give an absolute path on that host.",
    "python": "Give the path of an interpreter, or one for each role.",
    "wrap": 'Give a list of words in quotes, like ["pct", "exec", "200", "--"].',
    "webhook": "Give a URL that messages are posted to.",
    "jump": "Give a list of host ids or `user@address:port`.",
}


def _wanted(model: type[BaseModel], name: str) -> str:
    return WANTED.get(name, f"Known keys: {', '.join(model.model_fields)}.")


def _hint(word: str, known: Iterable[str]) -> str:
    names = list(known)
    near = difflib.get_close_matches(word, names, n=1)
    return f"Did you mean `{near[0]}`?" if near else f"Known: {', '.join(names) or 'none'}."


def _roles(entries: Mapping[str, HostEntry], source: Source) -> dict[str, tuple[str, ...]]:
    roles = _mapping("roles", source)
    found: dict[str, tuple[str, ...]] = dict.fromkeys(ROLES, (LOCAL,))
    for role, value in roles.items():
        where = source.origin(f"roles.{role}")
        if role not in ROLES:
            raise ConfigError(f"`roles.{role}`: unknown role", where=where, remedy=_hint(role, ROLES))
        several = isinstance(value, list)
        if several and (role != SHARED_ROLE or not value):
            raise ConfigError(
                f"`roles.{role}: {value}`: one host plays this role",
                where=where,
                remedy=f"Name one host; only `{SHARED_ROLE}` may be a list.",
            )
        found[role] = tuple(str(host) for host in (value if several else [value]))
        for host in found[role]:
            _check_player(role, host, entries, source, where)
    return found


def _check_player(role: str, host: str, entries: Mapping[str, HostEntry], source: Source, where: str) -> None:
    if host != LOCAL and host not in entries:
        raise ConfigError(
            f"`roles.{role}: {host}` names no host of this file", where=where, remedy=_hint(host, entries)
        )
    entry = entries.get(host)
    for name in ("workdir", "device"):
        if entry is not None and entry.kind == "ssh" and getattr(entry, name) is None:
            raise ConfigError(
                f"`hosts.{host}.{name}` is missing: a host that plays a role (`roles.{role}`) needs one",
                where=source.origin(f"hosts.{host}"),
                remedy=WANTED[name],
            )
