"""What a hosts file may say of one host, and the way to it as a list of hops.

Ids are names that people choose; addresses never enter a key. Costs nothing but pydantic's import.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

ROLES = ("gpu", "eval", "generate")
"""What hosts are for: `gpu` trains, `eval` judges checkpoints, `generate` writes completions."""

HOST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
JUMP = re.compile(r"(?P<user>[^@\s:]+)@(?P<address>\[[0-9A-Fa-f:.]+\]|[^@\s:\[\]]+)(:(?P<port>\d+))?")

# Neither a blank nor a control character, and no leading dash that a program would take for an option.
Word = Annotated[str, StringConstraints(pattern=r"^[^\s\x00-\x1f\x7f\-][^\s\x00-\x1f\x7f]*$")]
Port = Annotated[int, Field(ge=1, le=65535, strict=True)]


DEFAULT_FILE = Path("config/hosts.yaml")
"""The hosts file of commands to which none is named."""


def with_file(command: str, file: Path | None) -> str:
    """A command as a person must give it so that it reads this hosts file."""
    default = file is None or file.absolute() == DEFAULT_FILE.absolute()
    return command if default else f"{command} --hosts {shlex.quote(str(file))}"


@dataclass(frozen=True)
class Hop:
    """One ssh connection: where, as whom, with which key, and what the other side must prove.

    name: as the hosts file calls it. known_hosts: the only file whose host keys are trusted. file: the hosts file.
    """

    name: str
    address: str
    port: int
    user: str | None
    key_file: Path | None
    known_hosts: Path
    agent: bool = False
    default_keys: bool = False
    file: Path | None = None

    @property
    def known_as(self) -> str:
        """The hop's name in a known_hosts file: the address, with its port in brackets unless it is 22."""
        return self.address if self.port == 22 else f"[{self.address}]:{self.port}"


class HostEntry(BaseModel):
    """One host of a hosts file.

    Attributes:
        kind: `local` (this machine) or `ssh`.
        jump: hosts to go through, nearest first: ids of this file, or `user@address:port` (same key and known_hosts as here).
        key_file, known_hosts: relative to the hosts file. known_hosts is `known_hosts` beside the hosts file when left out.
        workdir: absolute folder there that code, environments and results go to; without a colon.
        python: the interpreter of all roles, or one for each role; the environment of `dflash hosts setup` when left out.
        wrap: what every command begins with there, for instance `[pct, exec, "200", --]` for a container without an sshd.
        device: cpu, cuda or cuda:N.
        agent: also try the keys of an ssh agent. default_keys: also try the keys of ~/.ssh.
        scratch: folder there for large temporary files; under workdir when left out.
        targets: name or digest of a target model -> its folder there.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["local", "ssh"]
    address: Word | None = None
    port: Port = 22
    user: Word | None = None
    jump: tuple[str, ...] = ()
    key_file: Path | None = None
    known_hosts: Path | None = None
    workdir: Path | None = None
    python: str | Mapping[str, str] | None = None
    wrap: tuple[str, ...] = ()
    device: Annotated[str, StringConstraints(pattern=r"^(cpu|cuda(:\d+)?)$")] | None = None
    agent: bool = False
    default_keys: bool = False
    scratch: Path | None = None
    targets: Mapping[str, Path] = Field(default_factory=dict)

    @field_validator("workdir", "scratch")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        if value is not None and not value.is_absolute():
            raise ValueError("is not an absolute path")
        if value is not None and ":" in str(value):
            raise ValueError("a colon would end it in PYTHONPATH")
        return value

    @field_validator("python")
    @classmethod
    def _known_roles(cls, value: str | Mapping[str, str] | None) -> str | Mapping[str, str] | None:
        unknown = [role for role in value if role not in ROLES] if isinstance(value, Mapping) else []
        if unknown:
            raise ValueError(f"unknown role {unknown[0]}; known: {', '.join(ROLES)}")
        return value

    @model_validator(mode="after")
    def _complete(self) -> HostEntry:
        if self.kind == "local":
            given = [name for name in SSH_ONLY if name in self.model_fields_set]
            if given:
                raise ValueError(f"`{given[0]}` means nothing for `kind: local`; remove it or say `kind: ssh`")
        elif self.address is None:
            raise ValueError("`address` is missing: `kind: ssh` needs one")
        elif self.key_file is None and not self.agent and not self.default_keys:
            raise ValueError("no key to offer: name one in `key_file`, or say `agent: true` or `default_keys: true`")
        return self


SSH_ONLY = ("address", "port", "user", "jump", "key_file", "known_hosts", "agent", "default_keys")


class Notify(BaseModel):
    """Whom to tell of what: a command that gets the message as JSON on standard input, or a URL that it is posted to."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    command: tuple[str, ...] = ()
    webhook: str = ""
    on: tuple[Literal["failure", "finish", "low_disk", "starvation"], ...] = ("failure", "finish")

    @field_validator("webhook")
    @classmethod
    def _webhook_is_a_url(cls, value: str) -> str:
        """The message does not repeat the value: whoever knows it may post to it."""
        if value and not re.fullmatch(r"https?://[!-~]+", value):
            raise ValueError("must start with http:// or https:// and hold no blanks")
        return value
