"""What `dflash run` refuses before it starts anything, and how it is interrupted."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from plan_store import make_folder, plan_of

from dflash import __main__ as entry
from dflash import run as workflow
from dflash.base.errors import PermanentError
from dflash.base.records import Receipt, StopMarker
from dflash.plan.graph import Plan
from dflash.run import RunOptions, print_plan, require_ready, run


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(make_folder(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_step_that_training_passed_unsaved_is_refused_before_anything_is_written(folder: Path, dry_run: bool) -> None:
    saved = plan_of().runs[0].nodes["train"].directory / "step_6"
    (saved / "state").mkdir(parents=True)
    (saved / "manifest.json").write_text("{}")
    plan_of(train={"checkpoint_every": 3})
    before = sorted(folder.rglob("*"))
    with pytest.raises(PermanentError, match="passed step 3 without saving it and is at step 6; saved are 6"):
        run(RunOptions([Path("config.yaml")], dry_run=dry_run))
    assert sorted(folder.rglob("*")) == before


def test_a_stopped_training_is_refused_before_snakemake_starts_and_resume_lets_it_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[bool] = []
    monkeypatch.setattr(workflow, "run_snakemake", lambda *_: started.append(True) or 1)
    marker = plan_of().runs[0].nodes["train"].directory / "stop.json"
    StopMarker(run="micro", by="somebody", at="noon").write(marker)
    with pytest.raises(
        PermanentError, match=r"by somebody at noon.*--resume --configfile config.yaml`.*--finish --configfile"
    ):
        run(RunOptions([Path("config.yaml")]))
    assert marker.exists()
    assert not started
    assert run(RunOptions([Path("config.yaml")], resume=True)) == 1
    assert not marker.exists()
    assert started


@pytest.mark.parametrize("deep", [True, False])
def test_deep_has_other_hosts_read_every_byte(monkeypatch: pytest.MonkeyPatch, deep: bool) -> None:
    hosts = {"hosts": {"a": {"kind": "local", "workdir": "/srv/a", "device": "cpu"}}, "roles": {"gpu": "a"}}
    Path("hosts.yaml").write_text(yaml.safe_dump(hosts))
    asked: list[bool] = []
    monkeypatch.setattr("dflash.remote.check_there", lambda *_, deep: asked.append(deep) or {})
    plan_of(hosts="hosts.yaml")
    monkeypatch.setattr(workflow, "find_damage", lambda plan, there, **_: list(there("a", [], [])))
    run(RunOptions([Path("config.yaml")], dry_run=True, deep=deep))
    assert asked == [deep]


def test_the_workflow_itself_does_not_begin_a_training_anew_whose_role_moved_unless_nothing_is_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    hosts = {name: {"kind": "local", "workdir": f"/srv/{name}", "device": "cpu"} for name in ("a", "b")}

    def plan_on(host: str) -> Plan:
        Path("hosts.yaml").write_text(yaml.safe_dump({"hosts": hosts, "roles": {"gpu": host}}))
        return plan_of(hosts="hosts.yaml")

    train = plan_on("a").runs[0].nodes["train"]

    def stand(step: int) -> None:
        Receipt(
            stage="train",
            key=train.key,
            step=step,
            outputs=[],
            inputs={},
            host="a",
            started="",
            finished="",
            attempt=1,
            environment="",
        ).write(train.receipt(step))

    train.receipt(train.steps[0]).parent.mkdir(parents=True)
    require_ready(plan_on("b"))
    stand(train.steps[0])
    require_ready(plan_on("a"))
    with pytest.raises(PermanentError, match=f"training {train.key} was begun on a, and roles.gpu is b now") as refused:
        require_ready(plan_on("b"))
    assert "`dflash run` carries it over to b" in refused.value.message()
    print_plan(plan_on("b"))
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"training {train.key} of run micro lives on a, and roles.gpu is b in hosts.yaml: `dflash run` without -n carries it "
        "over to b; to keep it where it is, set the role to a"
    )
    for step in train.steps[1:]:
        stand(step)
    require_ready(plan_on("b"))


@pytest.fixture
def interrupt() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupt")
@pytest.mark.parametrize(
    ("command", "before", "then"),
    [
        ("run", signal.default_int_handler, signal.default_int_handler),
        ("stage", signal.SIG_IGN, signal.default_int_handler),  # as the rules start it
        ("run", signal.SIG_IGN, signal.SIG_IGN),  # in the background of a script
    ],
)
def test_ctrl_c_ends_a_command_unless_whoever_started_it_wants_otherwise(
    monkeypatch: pytest.MonkeyPatch, command: str, before: Any, then: Any
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(sys, "argv", ["dflash", command])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(typer.main, "get_command", lambda _: lambda: seen.append(signal.getsignal(signal.SIGINT)))
    signal.signal(signal.SIGINT, before)
    entry.main()
    assert seen == [then]


def test_ctrl_c_between_two_rounds_says_that_training_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    plan_of()
    monkeypatch.setattr(workflow, "run_snakemake", interrupted)
    assert run(RunOptions([Path("config.yaml")])) == 128 + signal.SIGINT
    assert capsys.readouterr().err.splitlines()[-1] == f"dflash: {workflow.STOPPED}"
