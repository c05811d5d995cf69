"""`dflash gc`: what no run needs any more, here and on other hosts, with sizes; and its end, when told.

Nothing is deleted without `--delete`. What is deleted was listed a moment before and is looked at again, under the locks of
whoever might use it. Other hosts are asked all at once: a host that cannot be reached costs its connection timeout (10 s).
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash.base.errors import ConfigError, DflashError, PermanentError
from dflash.base.words import number_of

if TYPE_CHECKING:
    from dflash.plan.graph import Plan
    from dflash.plan.sweep import Garbage

HERE = "local"


def gc(
    host: Annotated[str, typer.Option("--host", help="whose workdir; `local`: here, asking no other host")] = "",
    delete: Annotated[bool, typer.Option("--delete", help="delete what is listed")] = False,
    configfile: Annotated[
        list[Path] | None, typer.Option("--configfile", help="Configuration; repeat to merge, later over earlier.")
    ] = None,
) -> None:
    """List what no run needs any more, with sizes; delete it when told. What a running training or a config needs stays."""
    from dflash.plan.config import load_config
    from dflash.plan.graph import build_plan
    from dflash.plan.places import LOCAL, place_of
    from dflash.plan.workflow import DEFAULT_CONFIG

    made = build_plan(load_config(configfile or [DEFAULT_CONFIG]))
    inventory = made.config.inventory
    if host not in ("", HERE) and host not in inventory.entries:
        known = ", ".join([HERE, *inventory.entries])
        raise ConfigError(f"`--host {host}`: there is no such host", remedy=f"Hosts: {known}.")
    if host not in ("", HERE) and place_of(inventory, host) != LOCAL:
        _collect_there(made, host, delete)
    else:
        _collect_here(made, delete, ask=not host)


# ---------------------------------------------------------------- here


def _others(plan: Plan) -> list[str]:
    """Hosts that are other places than this one and have a workdir."""
    from dflash.plan.places import LOCAL, place_of

    inventory = plan.config.inventory
    entries = inventory.entries
    return [name for name in entries if place_of(inventory, name) != LOCAL and entries[name].workdir is not None]


def _asked(plan: Plan, hosts: list[str]) -> dict[str, dict[str, Any] | DflashError]:
    """What each host says of its garbage and its trainings, or why it does not."""
    from dflash.plan.gc import find_needs
    from dflash.remote import garbage_there

    needs = {name: find_needs(plan.config.results, plan, place=name).as_json() for name in hosts}

    def one(name: str) -> dict[str, Any] | DflashError:
        try:
            return garbage_there(plan.config.inventory.get(name), needs[name])
        except DflashError as error:
            return error

    with ThreadPoolExecutor(max(1, min(16, len(hosts)))) as pool:
        return dict(zip(hosts, pool.map(one, hosts), strict=True))


def _collect_here(plan: Plan, delete: bool, *, ask: bool) -> None:
    from dflash.plan.gc import find_garbage
    from dflash.plan.sweep import remove
    from dflash.run import owner_lock

    others = _others(plan)
    answers = _asked(plan, others) if ask else {}
    live = {key for answer in answers.values() if isinstance(answer, dict) for key in answer["live"]}
    unsure = any(not isinstance(answers.get(name), dict) for name in others)
    found = find_garbage(plan.config.results, plan, live, unsure=unsure)
    _tell(found, Path())
    for name, answer in answers.items():
        print(_line_of(name, answer))
    if unsure:
        print(
            "What is kept here of trainings on other hosts stays: not every host was asked whether one is at work.",
            file=sys.stderr,
        )
    if not delete or not found:
        _end(bool(found))
        return
    with owner_lock(plan.config.results):
        still = {item.path for item in find_garbage(plan.config.results, plan, live, unsure=unsure)}
        gone, kept = remove([item for item in found if item.path in still])
    kept += [(item.path, "it is needed now") for item in found if item.path not in still and item.path.exists()]
    _tell_deleted(len(gone), [(str(path), why) for path, why in kept])


def _line_of(name: str, answer: dict[str, Any] | DflashError) -> str:
    if isinstance(answer, DflashError):
        return f"{name}: cannot be asked ({answer.what})"
    items = answer["garbage"]
    working = f"; {number_of(len(answer['live']), 'training')} at work" if answer["live"] else ""
    if not items:
        return f"{name}: nothing that no run needs{working}"
    size = sum(item[1] for item in items)
    words = f"{number_of(size, 'byte')} in {number_of(len(items), 'item')} that no run needs"
    return f"{name}: {words}{working}; `dflash gc --host {name}`"


# ---------------------------------------------------------------- there


def _live_elsewhere(plan: Plan, name: str) -> set[str]:
    """Trainings that are at work on other hosts than this one, may be, or are on their way: what they saved here before they were
    carried over is here only."""
    from dflash.plan.gc import homes
    from dflash.plan.places import LOCAL

    known = {key: home for key, home in homes(plan.store).items() if home.moving or home.place not in (name, LOCAL)}
    places = {home.place for home in known.values()}
    answers = _asked(plan, [host for host in _others(plan) if host in places and host != name])

    mute = sorted(place for place in places - {name, LOCAL} if not isinstance(answers.get(place), dict))
    if mute:
        text = f"What trainings on {', '.join(mute)} have left here stays: whether one is at work cannot be asked."
        print(text, file=sys.stderr)

    def at_work(key: str) -> bool:
        answer = answers.get(known[key].place)
        return known[key].moving is not None or not isinstance(answer, dict) or key in answer["live"]

    return {key for key in known if at_work(key)}


def _collect_there(plan: Plan, name: str, delete: bool) -> None:
    from dflash.plan.gc import by_size, find_needs
    from dflash.plan.sweep import Garbage
    from dflash.remote import asker, garbage_there
    from dflash.run import owner_lock

    host = plan.config.inventory.get(name)
    results = plan.config.results
    live = _live_elsewhere(plan, name)
    answer = garbage_there(host, find_needs(results, plan, live, place=name).as_json())
    found = by_size([Garbage(Path(path), *rest) for path, *rest in answer["garbage"]])
    _tell(found, Path(f"{name}:{host.workdir}"))
    others = [item for item in answer["askers"] if item != asker(plan.store)]
    if others and found:
        _refuse_shared(f"{name}:{host.workdir}", others, delete)
    if not delete or not found:
        _end(bool(found))
        return
    with owner_lock(results):
        needs = find_needs(results, plan, live, place=name).as_json()
        answer = garbage_there(host, needs, [[str(item.path), item.mark] for item in found])
    _tell_deleted(len(answer["gone"]), [(f"{name}:{path}", why) for path, why in answer["kept"]])


def _refuse_shared(where: str, others: list[str], delete: bool) -> None:
    """Two controllers may share a workdir, and neither knows what the other needs.

    Raises:
        PermanentError: something was to be deleted.
    """
    error = PermanentError(
        f"stages ran there for {', '.join(others)} too, and what that needs cannot be told from here",
        where=where,
        remedy="Give each results folder a workdir of its own; if that one is gone, delete its file in results/askers there.",
    )
    if delete:
        raise error
    print(f"Take care: {error.message()}", file=sys.stderr)


# ---------------------------------------------------------------- telling


def _tell(found: list[Garbage], base: Path) -> None:
    for item in found:
        print(f"{item.size:>15,} bytes  {item.files:>6,} files  {base / item.path}  ({item.why})")
    total = sum(item.size for item in found)
    print(f"{total:>15,} bytes in {number_of(len(found), 'item')} that no run needs", flush=True)


def _end(found: bool) -> None:
    print("Nothing is deleted without --delete." if found else "Nothing to delete.", file=sys.stderr)


def _tell_deleted(count: int, kept: list[tuple[str, str]]) -> None:
    for path, why in kept:
        print(f"kept: {path}: {why}", file=sys.stderr)
    print(f"deleted {number_of(count, 'item')}", file=sys.stderr)


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(gc)
