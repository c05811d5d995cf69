"""The commands that look after hosts: `dflash doctor`, `dflash hosts setup`. Thin, as `dflash/cli.py` is."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from dflash.base.errors import ConfigError, PermanentError
from dflash.hosts.entry import DEFAULT_FILE

HostsFile = Annotated[Path, typer.Option("--hosts", help="The hosts file.")]

hosts_app = typer.Typer(help="Look after the hosts of config/hosts.yaml.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Adds the commands to `dflash`."""
    app.add_typer(hosts_app, name="hosts")
    app.command()(doctor)
    app.command("doctor-facts", hidden=True)(doctor_facts)


def doctor(
    host: Annotated[
        list[str] | None, typer.Option("--host", help="One host; repeat for several. All by default.")
    ] = None,
    pin: Annotated[str | None, typer.Option("--pin", help="Show the host keys on the way to a host, ask, pin.")] = None,
    yes: Annotated[
        list[str] | None, typer.Option("--yes", metavar="FINGERPRINT", help="With --pin: the answer, one a hop.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
    hosts: HostsFile = DEFAULT_FILE,
) -> None:
    """Check hosts before a stage finds out: reachable, pinned, drivers, memory, disk, kernels right, numbers the same."""
    from dflash.hosts.inventory import load_inventory

    inventory = load_inventory(hosts)
    if pin is not None:
        from dflash.hosts.pins import pin_route

        pin_route(pin, inventory.route(pin), list(yes or []))
        return
    if yes:
        raise ConfigError("`--yes` answers `--pin`, which was not given", remedy="Say --pin HOST.")
    from dflash.hosts import doctor as room

    checkups = room.examine_all(inventory, host or room.hosts_to_examine(inventory))
    print(room.as_json(checkups) if as_json else room.render(checkups))
    sys.stdout.flush()
    problems = room.all_problems(checkups)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise PermanentError(f"{problems[0]}{more}")


@hosts_app.callback()
def hosts_group() -> None:
    """Look after the hosts of config/hosts.yaml."""


@hosts_app.command("setup")
def hosts_setup(
    host: Annotated[str, typer.Argument(metavar="H", help="a host of the hosts file")],
    torch: Annotated[
        str, typer.Option("--torch", metavar="SPEC", help="what pip installs first: 'torch==2.13.0 --index-url URL'")
    ] = "",
    also: Annotated[
        str, typer.Option("--also", metavar="SPEC", help="what pip installs last: 'causal-conv1d ...'")
    ] = "",
    python: Annotated[str, typer.Option("--python", help="interpreter there to make it with")] = "",
    hosts: HostsFile = DEFAULT_FILE,
) -> None:
    """Send this code to a host and make the environment of requirements.lock there. Does nothing when all is there."""
    from dflash.hosts.inventory import load_inventory
    from dflash.hosts.setup import set_up

    target = load_inventory(hosts).get(host)
    if target.entry.kind == "local" and target.entry.workdir is None:
        raise ConfigError(
            f"{host} is this machine and has no `workdir`", where=str(hosts), remedy="`make run` sets it up."
        )
    made = str(set_up(target, first=torch, also=also, python=python))
    other = next((role for role in ("gpu", "eval") if target.python(role) != made), None)
    print(made)
    if other is not None:
        print(
            f"{host}: the hosts file names {target.python(other)} for {other}; remove it there to use this environment",
            file=sys.stderr,
        )


def doctor_facts(device: Annotated[str, typer.Option("--device", help="cpu, cuda or cuda:N")] = "cpu") -> None:
    """Say which kernels are bound on this machine and whether they are right; what `dflash doctor` calls on each host."""
    from dflash.runner import quiet_libraries

    with quiet_libraries():
        try:
            from dflash.model.selftest import numeric_facts
        except ModuleNotFoundError as error:
            raise PermanentError(f"this environment has no {error.name}") from error
        print(json.dumps(numeric_facts(device)))
