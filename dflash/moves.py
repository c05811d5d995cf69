"""`dflash run` carries a training over when `roles.gpu` names another host than the one where it lives.

    the old host lets it go (`train/moving.py`) -> one verified shipment, host to host through this machine
    -> the new host is told to take it in -> home.json names the new host -> moves.jsonl tells of it

`home.json` says at every moment how far that is, so that the next run goes on where this one was killed, or takes the move
back when the role was set back. What was begun on the new host is never half visible: it lives there from one moment on.
Costs what the shipment costs: 14 bytes a parameter for the newest checkpoint, 2 for each that has no receipt yet.
"""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from dflash.base.errors import CorruptError, DflashError, PermanentError, TransientError
from dflash.base.files import append_line
from dflash.base.progress import Progress
from dflash.base.records import Artifact, Receipt, now
from dflash.base.store import stage_directory
from dflash.hosts.host import Host, LocalHost
from dflash.plan.graph import Node, Plan
from dflash.plan.places import (
    LOCAL,
    Home,
    Moving,
    begun_at,
    home_path,
    is_moved,
    not_here,
    planned_place,
    read_home,
    training_place,
)
from dflash.plan.sweep import ARRIVING
from dflash.remote import STORE, LinkLost, Unreachable, ask, asker, raise_error
from dflash.ship.ship import ship
from dflash.shipments import ATTEMPTS, IDLE
from dflash.stages import BY_NAME
from dflash.train import moving


def moved_trainings(plan: Plan) -> list[Node]:
    """The trainings that are not complete and live elsewhere than their role runs now."""
    return [node for node in plan.nodes.values() if is_moved(plan, node)]


def carry_over(plan: Plan) -> None:
    """Carries every such training over, or takes back a move whose role was set back.

    Raises:
        PermanentError: its trainer is at work, somebody stopped it, or a host lacks the room.
        TransientError: a host cannot be reached.
    """
    for node in moved_trainings(plan):
        _Move(plan, node).make()


def refuse_moved(plan: Plan) -> None:
    """Refuses to train where a training does not live: only `dflash run` carries it over.

    Raises:
        PermanentError: names both hosts.
    """
    for node in moved_trainings(plan):
        home = read_home(node.directory)
        under_way = home.moving if home is not None else None
        place, here = training_place(plan, node), planned_place(plan, node)
        raise not_here(node.key, place, under_way, here, _where(plan, node))


def _where(plan: Plan, node: Node) -> str:
    return str(plan.config.inventory.file or node.directory)


def ask_home(plan: Plan, node: Node, request: Mapping[str, Any]) -> dict[str, bytes]:
    """Asks the host where a training lives, which is not this machine; returns the files of its answer.

    Raises:
        TransientError: it cannot be reached; says what to do. DflashError: what it answered.
    """
    place, here = training_place(plan, node), planned_place(plan, node)
    host = _host(plan, node, place)
    try:
        answer, back = ask(host, BY_NAME["train"].role, {"key": node.key, **request}, {})
    except LinkLost as error:
        if place == here:
            raise
        raise TransientError(
            f"training {node.key} lives on {place}, which cannot be reached now ({error.what.rstrip('.')}), "
            f"and roles.gpu is {here}",
            where=_where(plan, node),
            remedy=f"Run again when {place} answers, or set the role back to it. To give up what it has and train anew on "
            f"{here}, move {node.directory} away.",
        ) from error
    raise_error(answer, host)
    return back


def _host(plan: Plan, node: Node, place: str) -> Host:
    if place == LOCAL:
        return LocalHost()
    if place not in plan.config.inventory.entries:
        raise PermanentError(
            f"training {node.key} lives on `{place}`, which is no longer a host",
            where=_where(plan, node),
            remedy=f"Name it again, or move {node.directory} away to train anew.",
        )
    return plan.config.inventory.get(place)


class _Move:
    """One training on its way. The order of its steps is what a kill between any two of them is survived by."""

    def __init__(self, plan: Plan, node: Node) -> None:
        self.plan, self.node = plan, node
        self.run = "+".join(node.runs)
        self.progress = Progress(f"carry training {node.key}")
        home = read_home(node.directory)
        self.home = home or Home(place=begun_at(plan, node) or LOCAL)

    def make(self) -> None:
        """Brings the training to where its role runs."""
        here = planned_place(self.plan, self.node)
        under_way = self.home.moving
        if under_way is not None and under_way.asked:
            self._arrive(under_way)  # it may live there already, so it does
            under_way = None
        if self.home.place == here:
            if under_way is not None:
                self._take_back(under_way)
            return
        token = under_way.token if under_way is not None else uuid.uuid4().hex
        self._write(Moving(to=here, token=token))
        self.progress.say(f"it lives on {self.home.place} and goes to {here}")
        listed = self._leave(here, token)
        self._ship(here, listed)
        self._arrive(Moving(to=here, token=token, root=listed.root))

    def _write(self, under_way: Moving | None) -> None:
        self.home = self.home.model_copy(update={"moving": under_way})
        self.home.write(home_path(self.node.directory))

    def _leave(self, to: str, token: str) -> Artifact:
        """Has the old host let it go; returns what goes along."""
        asked: dict[str, Any] = {
            "to": to,
            "token": token,
            "run": self.run,
            "receipted": self._receipted(),
            "inputs": self._inputs(),
        }
        if self.home.place == LOCAL:
            return moving.leave(self.node.directory, self.plan.store, **asked)
        back = ask_home(self.plan, self.node, {"do": "leave", **asked})
        if len(back) != 1:
            raise CorruptError("the answer does not list what goes along", where=self.home.place)
        return Artifact.model_validate_json(next(iter(back.values())))

    def _take_back(self, under_way: Moving) -> None:
        """The role was set back before the new host was asked to take anything in."""
        asked = {"token": under_way.token, "run": self.run}
        if self.home.place == LOCAL:
            moving.stay(self.node.directory, **asked)
        else:
            ask_home(self.plan, self.node, {"do": "stay", **asked})
        self._write(None)
        self.progress.say(f"it stays on {self.home.place}")

    def _receipted(self) -> list[int]:
        """Steps with a receipt here: those checkpoints are known where they lie."""
        names = [path.stem.removeprefix("step_") for path in (self.node.directory / "receipts").glob("step_*.json")]
        return sorted(int(name) for name in names if name.isdigit())

    def _inputs(self) -> dict[str, str]:
        receipts = {name: item.receipt() for name, item in self.node.inputs.items()}
        return {name: moving.input_digest(Receipt.read(path)) for name, path in receipts.items() if path.exists()}

    def _ship(self, here: str, listed: Artifact) -> None:
        receipt = ship(
            _host(self.plan, self.node, self.home.place),
            self._folder(self.home.place) / moving.LEAVING,
            _host(self.plan, self.node, here),
            self._folder(here) / ARRIVING,
            known=listed,
            progress=partial(self.progress.update, unit="bytes"),
            tell=self.progress.say,
            idle=IDLE,
            attempts=ATTEMPTS,
        )
        told = {"from": self.home.place, "to": here, "at": now(), "shipment": receipt.model_dump(mode="json")}
        append_line(self.node.directory / "moves.jsonl", json.dumps(told, sort_keys=True))

    def _folder(self, place: str) -> Path:
        """The training's folder on a place."""
        host = _host(self.plan, self.node, place)
        store = self.plan.store.resolve() if place == LOCAL else host.workdir / STORE
        return stage_directory(store, "train", self.node.key)

    def _arrive(self, under_way: Moving) -> None:
        """Has the new host take it in; from then on it lives there."""
        asked: dict[str, Any] = {
            "origin": self.home.place,
            "token": under_way.token,
            "root": under_way.root,
            "run": self.run,
        }
        self._write(under_way.model_copy(update={"asked": True}))
        refused = self._take_in(under_way, asked)
        if refused is not None:
            self._write(under_way.model_copy(update={"asked": False}))
            raise refused
        origin = self.home.place
        self.home = Home(place=under_way.to)
        self._write(None)
        print(
            f"dflash: training {self.node.key} was carried over from {origin} to {under_way.to}",
            file=sys.stderr,
            flush=True,
        )

    def _take_in(self, under_way: Moving, asked: dict[str, Any]) -> DflashError | None:
        """Returns why the new host did not take it in, when it says that it did not, or was never asked.

        Raises:
            DflashError: it gave no answer, so nobody knows.
        """
        place = under_way.to
        host = _host(self.plan, self.node, place)
        if place == LOCAL:
            return self._take_in_here(asked)
        try:
            request = {"do": "arrive", "key": self.node.key, "asker": asker(self.plan.store), **asked}
            answer, _ = ask(host, BY_NAME["train"].role, request, {})
        except LinkLost as error:
            if isinstance(error, Unreachable) and not under_way.asked:
                return error
            raise TransientError(
                f"whether training {self.node.key} has arrived on {place} is not known: {error.what}",
                where=_where(self.plan, self.node),
                remedy=f"Run again when {place} answers.",
            ) from error
        try:
            raise_error(answer, host)
        except DflashError as error:
            return error
        return None

    def _take_in_here(self, asked: dict[str, Any]) -> DflashError | None:
        try:
            moving.arrive(self.node.directory, self.plan.store, **asked, forget_stop=False)
        except DflashError as error:
            return error
        return None
