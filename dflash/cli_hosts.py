"""The commands that look after hosts: `dflash doctor`, `dflash hosts setup`. Thin, as `dflash/cli.py` is."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from dflash.base.errors import ConfigError, PermanentError

HostsFile = Annotated[Path, typer.Option("--hosts", help="The hosts file.")]
DEFAULT = Path("config/hosts.yaml")

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
    hosts: HostsFile = DEFAULT,
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


def doctor_facts(device: Annotated[str, typer.Option("--device", help="cpu, cuda or cuda:N")] = "cpu") -> None:
    """Say which kernels are bound on this machine and whether they are right; what `dflash doctor` calls on each host."""
    from dflash.runner import quiet_libraries

    with quiet_libraries():
        try:
            from dflash.model.selftest import numeric_facts
        except ModuleNotFoundError as error:
            raise PermanentError(f"this environment has no {error.name}") from error
        print(json.dumps(numeric_facts(device)))
