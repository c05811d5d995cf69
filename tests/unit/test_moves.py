"""The controller's side of a move: what it asks of whom, in which order, and what it knows when an answer never came."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from plan_store import make_folder, plan_of

from dflash import moves
from dflash.base.errors import PermanentError, TransientError
from dflash.base.records import Artifact, Receipt
from dflash.hosts.host import Host
from dflash.plan.graph import Node, Plan
from dflash.plan.places import Home, Moving, home_path, is_moved, read_home, training_place
from dflash.remote import LinkLost, Unreachable

LISTED = Artifact(root="r" * 64, files=[])


class World:
    """Two hosts that note what they are asked. answers: by (host, request) what goes wrong there."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.tokens: set[str] = set()
        self.answers: dict[str, Exception | str] = {}

    def ask(
        self, host: Host, role: str, request: Mapping[str, Any], files: Any
    ) -> tuple[dict[str, Any], dict[str, bytes]]:
        name = f"{host.id} {request['do']}"
        self.asked.append(name)
        self.tokens.add(request["token"])
        wrong = self.answers.get(name)
        if isinstance(wrong, Exception):
            raise wrong
        error = {"kind": "permanent", "what": wrong, "where": "", "remedy": ""} if wrong else None
        back = {"train/.leaving.json": LISTED.model_dump_json().encode()} if request["do"] == "leave" else {}
        return {"error": error}, back

    def ship(self, source: Host, _: Path, destination: Host, __: Path, **options: Any) -> Any:
        name = f"ship {source.id} to {destination.id}"
        self.asked.append(name)
        wrong = self.answers.get(name)
        if isinstance(wrong, Exception):
            raise wrong
        return SimpleNamespace(model_dump=lambda mode: {})


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.chdir(make_folder(tmp_path))
    made = World()
    monkeypatch.setattr(moves, "ask", made.ask)
    monkeypatch.setattr(moves, "ship", made.ship)
    return made


def plan_on(host: str) -> Plan:
    hosts = {name: {"kind": "local", "workdir": f"/srv/{name}", "device": "cpu"} for name in ("a", "b")}
    Path("hosts.yaml").write_text(yaml.safe_dump({"hosts": hosts, "roles": {"gpu": host}}))
    return plan_of(hosts="hosts.yaml")


def train(plan: Plan) -> Node:
    return plan.runs[0].nodes["train"]


def begun_on(plan: Plan, home: Home) -> Node:
    node = train(plan)
    home.write(home_path(node.directory))
    return node


TO_B = ["a leave", "ship a to b", "b arrive"]


def test_a_training_leaves_is_shipped_and_arrives_and_then_lives_there(world: World) -> None:
    plan = plan_on("b")
    moves.carry_over(plan)
    assert world.asked == [], "nothing has begun"
    node = begun_on(plan, Home(place="a"))
    moves.carry_over(plan)
    assert world.asked == TO_B
    assert read_home(node.directory) == Home(place="b")
    moves.carry_over(plan)
    assert world.asked == TO_B
    assert (node.directory / "moves.jsonl").read_text().count("\n") == 1


def test_a_move_that_ends_before_the_new_host_is_asked_is_taken_back_with_the_role(world: World) -> None:
    node = begun_on(plan_on("b"), Home(place="a"))
    world.answers["b arrive"] = Unreachable("no route")
    with pytest.raises(TransientError):
        moves.carry_over(plan_on("b"))
    home = read_home(node.directory)
    assert home is not None
    assert home.moving is not None
    assert not home.moving.asked
    world.asked.clear()
    moves.carry_over(plan_on("a"))
    assert world.asked == ["a stay"]
    assert read_home(node.directory) == Home(place="a")


@pytest.mark.parametrize(("role", "asked"), [("b", TO_B), ("a", ["a stay"])])
def test_a_move_that_ends_on_its_way_goes_on_as_the_same_move_or_is_taken_back(
    world: World, role: str, asked: list[str]
) -> None:
    """The old host has let it go under a name, and hears of no other."""
    node = begun_on(plan_on("b"), Home(place="a"))
    world.answers["ship a to b"] = TransientError("cut")
    with pytest.raises(TransientError):
        moves.carry_over(plan_on("b"))
    world.answers.clear()
    world.asked.clear()
    moves.carry_over(plan_on(role))
    assert world.asked == asked
    assert len(world.tokens) == 1
    assert read_home(node.directory) == Home(place=role)


def test_whether_it_arrived_is_asked_again_before_anything_else_when_the_answer_was_lost(world: World) -> None:
    node = begun_on(plan_on("b"), Home(place="a"))
    world.answers["b arrive"] = LinkLost("cut")
    with pytest.raises(TransientError, match=r"whether training .* has arrived on b is not known"):
        moves.carry_over(plan_on("b"))
    world.answers["b arrive"] = Unreachable("no route")
    with pytest.raises(TransientError, match="is not known"):
        moves.carry_over(plan_on("a"))
    world.answers.clear()
    world.asked.clear()
    moves.carry_over(plan_on("a"))
    assert world.asked == ["b arrive", "b leave", "ship b to a", "a arrive"]
    assert read_home(node.directory) == Home(place="a")


def test_a_refusal_of_the_new_host_is_told_and_leaves_the_way_back_open(world: World) -> None:
    begun_on(plan_on("b"), Home(place="a"))
    world.answers["b arrive"] = "was begun here too"
    with pytest.raises(PermanentError, match="was begun here too"):
        moves.carry_over(plan_on("b"))
    world.asked.clear()
    moves.carry_over(plan_on("a"))
    assert world.asked == ["a stay"]


def test_the_old_host_out_of_reach_is_named_with_what_to_do(world: World) -> None:
    node = begun_on(plan_on("b"), Home(place="a"))
    world.answers["a leave"] = Unreachable("no route")
    with pytest.raises(
        TransientError, match=r"lives on a, which cannot be reached now \(no route\), and roles\.gpu is b"
    ) as told:
        moves.carry_over(plan_on("b"))
    assert "set the role back" in told.value.message()
    assert f"move {node.directory} away" in told.value.message()


def test_a_host_that_the_file_no_longer_names_is_told_of(world: World) -> None:
    begun_on(plan_on("b"), Home(place="gone"))
    with pytest.raises(PermanentError, match="lives on `gone`, which is no longer a host"):
        moves.carry_over(plan_on("b"))


def test_where_a_training_lives_is_read_from_its_record_its_attempts_or_its_receipts(world: World) -> None:
    plan = plan_on("b")
    node = train(plan)
    assert training_place(plan, node) == "b"
    node.receipt(node.steps[0]).parent.mkdir(parents=True)
    made = {"host": "a", "started": "", "finished": "", "attempt": 1, "environment": ""}
    Receipt(stage="train", key=node.key, step=node.steps[0], outputs=[], inputs={}, **made).write(
        node.receipt(node.steps[0])
    )
    assert (training_place(plan, node), is_moved(plan, node)) == ("a", True)
    (node.directory / "attempts").mkdir()
    (node.directory / "attempts/2.json").write_text('{"placement": {"host": "b"}}')
    (node.directory / "attempts/10.json").write_text('{"placement": {"host": "local"}}')
    assert training_place(plan, node) == "local"
    begun_on(plan, Home(place="b"))
    assert is_moved(plan, node) is False
    begun_on(plan, Home(place="b", moving=Moving(to="a", token="t")))
    assert is_moved(plan, node)
