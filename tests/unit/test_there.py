"""What stands on another host is handed back only while its bytes and its inputs are what they were."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from plan_store import make_folder, plan_of, stand

from dflash import moves, rehearsal, remote, there
from dflash.base.errors import CorruptError, PermanentError
from dflash.base.records import OutputFile, Receipt
from dflash.base.store import read_params, receipt_path, shipped_directory
from dflash.evaluate import trial
from dflash.plan.graph import Node, Plan
from dflash.plan.places import Moving
from dflash.runner import Job
from dflash.train import moving, rehearse, schedule


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """The micro run with everything before training made."""
    monkeypatch.chdir(make_folder(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = plan_of()
    for name in ("prompts/short", "completions/short", "dataset", "buckets"):
        stand(made.runs[0].nodes[name])
    return made


def node(plan: Plan, name: str) -> Node:
    return plan.runs[0].nodes[name]


def job_of(plan: Plan, name: str, step: int | None = None, **placement: object) -> Job:
    item = node(plan, name)
    return Job(item.stage, item.directory / "params.json", plan.store, step, placement)


def trained(plan: Plan, step: int) -> Job:
    """A checkpoint that stands, made from the buckets that stand now."""
    train = node(plan, "train")
    train.params.write(train.directory / "params.json")
    (train.directory / f"step_{step}").mkdir(parents=True)
    inputs = {name: Receipt.read(item.receipt()).content_digest() for name, item in train.inputs.items()}
    facts = {"host": "a", "started": "", "finished": "", "attempt": 1, "environment": ""}
    receipt = Receipt(stage="train", key=train.key, step=step, outputs=[], inputs=inputs, **facts)
    train.receipt(step).parent.mkdir(parents=True, exist_ok=True)
    receipt.write(train.receipt(step))
    return job_of(plan, "train", step)


def test_a_result_whose_input_has_other_content_now_is_retired_and_with_equal_content_it_stays(plan: Plan) -> None:
    job = job_of(plan, "buckets")
    stand(node(plan, "dataset"))
    there._recheck(job)
    assert job.receipt.exists()
    stand(node(plan, "dataset"), "otherwise")
    there._recheck(job)
    assert not job.receipt.exists()


def test_of_a_shipped_input_the_receipt_beside_the_copy_counts(plan: Plan) -> None:
    job = job_of(plan, "buckets", shipped=["dataset"])
    dataset = node(plan, "dataset")
    receipt = Receipt.read(dataset.receipt())
    beside = receipt_path(shipped_directory(plan.store, "dataset", dataset.key), "dataset")
    beside.parent.mkdir(parents=True)
    receipt.write(beside)
    stand(dataset, "otherwise")
    there._recheck(job)
    assert job.receipt.exists()
    other = OutputFile(path="output.txt", size=1, sha256="0" * 64)
    receipt.model_copy(update={"outputs": [other]}).write(beside)
    there._recheck(job)
    assert not job.receipt.exists()


def test_the_checkpoints_of_a_trainer_at_work_stay_where_they_are(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    job = trained(plan, 2)
    there._recheck(job)
    assert job.receipt.exists()
    stand(node(plan, "buckets"), "otherwise")
    monkeypatch.setattr(there.launch.lease, "holder", lambda path: SimpleNamespace(pid=1))
    with pytest.raises(PermanentError, match="trainer is at work"):
        there._recheck(job)
    assert job.receipt.exists()
    assert (job.directory / "step_2").is_dir()
    monkeypatch.setattr(there.launch.lease, "holder", lambda path: None)
    there._recheck(job)
    assert not job.receipt.exists()
    assert not (job.directory / "step_2").exists()


def accept(job: Job, receipt: Receipt) -> Receipt:
    box = SimpleNamespace(id="box")
    return remote._accept(job, read_params(job.directory), {"it": receipt.model_dump_json().encode()}, box)  # type: ignore[arg-type]


def test_an_answer_made_from_another_input_is_not_accepted(plan: Plan) -> None:
    job = job_of(plan, "buckets", host="box")
    receipt = Receipt.read(job.receipt)
    assert accept(job, receipt).content_digest() == receipt.content_digest()
    stand(node(plan, "dataset"), "otherwise")
    with pytest.raises(CorruptError, match="made from another dataset"):
        accept(job, receipt)


def test_a_result_is_known_by_the_name_under_which_the_host_was_asked(plan: Plan) -> None:
    job = job_of(plan, "buckets", host="box")
    elsewhere = Receipt.read(job.receipt).model_copy(update={"host": "as-another-controller-calls-it"})
    assert accept(job, elsewhere).host == "box"
    assert Receipt.read(job.receipt).host == "box"


def test_a_step_that_stayed_on_an_earlier_host_and_was_lost_there_is_trained_again_with_all_after_it(
    plan: Plan,
) -> None:
    job = trained(plan, 4)
    (job.directory / "step_4/manifest.json").write_text("{}")
    schedule.Schedule(steps=[2, 4]).write(job.directory / "schedule.json")
    asked = job_of(plan, "train", 2)
    there._retire_unfit(asked)
    assert schedule.existing_steps(job.directory) == [4], "it never came from elsewhere"
    moving.Arrived(token="t", origin="a", step=4, at="").write(job.directory / "arrived.json")
    there._retire_unfit(job_of(plan, "train", 3))
    assert schedule.existing_steps(job.directory) == [4], "nobody ever scheduled step 3"
    there._retire_unfit(asked)
    assert schedule.existing_steps(job.directory) == []


def test_a_training_that_is_asked_for_goes_on_from_no_checkpoint_of_other_inputs(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = trained(plan, 2)
    monkeypatch.setattr(moving, "_fits", lambda *_: False)

    def run(job: Job) -> Receipt:
        assert schedule.existing_steps(job.directory) == []
        raise PermanentError("it is trained anew")

    (job.directory / "step_2/manifest.json").write_text("{}")
    monkeypatch.setattr(there, "run_job", run)
    with pytest.raises(PermanentError, match="trained anew"):
        there.do_stage(
            Path.cwd(), {"stage": "train", "key": job.directory.name, "step": 4, "placement": {}, "run": "demo"}
        )


def test_the_inputs_that_count_are_those_that_the_job_reads(plan: Plan) -> None:
    train = node(plan, "train")
    train.params.write(train.directory / "params.json")
    standing = there._input_digests(job_of(plan, "train", 2))
    assert set(standing) == {"dataset", "buckets"}
    assert "dataset" not in there._input_digests(job_of(plan, "train", 2, shipped=["dataset"]))


def test_a_rehearsal_leaves_nothing_whatever_its_end_is(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Path] = []

    def interrupted(*parts: Any) -> None:
        begun.append(parts[-1].scratch)
        (begun[0] / "train").mkdir(parents=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(rehearsal, "_rehearse_parts", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rehearsal.rehearse(plan, plan.runs[0])
    assert [path.exists() for path in begun] == [False]


@pytest.mark.parametrize("part", ["train", "evaluate", "clear"])
def test_every_part_of_a_rehearsal_takes_away_what_killed_ones_left_there_and_none_its_own(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    for name in (".rehearsal-killed", ".rehearsal-mine"):
        (plan.store / name / "drafter").mkdir(parents=True)
        os.utime(plan.store / name, (1, 1))
    monkeypatch.setattr(rehearse, "rehearse_training", lambda *_: {})
    monkeypatch.setattr(trial, "try_drafter", lambda *_: {})
    there.rehearse_part(plan.store, {"part": part, "scratch": ".rehearsal-mine"})
    left = [path.name for path in plan.store.glob(".rehearsal-*")]
    assert left == ([] if part == "clear" else [".rehearsal-mine"])


def test_a_training_that_was_carried_here_keeps_others_from_deleting_it_before_any_stage_has_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: Plan
) -> None:
    monkeypatch.setattr(moving, "arrive", lambda *_, **__: None)
    asked: list[dict[str, Any]] = []

    def ask(
        _host: object, _role: str, request: dict[str, Any], _files: object
    ) -> tuple[dict[str, Any], dict[str, bytes]]:
        asked.append(request)
        return {"error": None}, {}

    monkeypatch.setattr(moves, "ask", ask)
    monkeypatch.setattr(moves, "_host", lambda *_: SimpleNamespace(id="b"))
    moves._Move(plan, node(plan, "train"))._arrive(Moving(to="b", token="t", root="r" * 64))
    there.do_arrive(tmp_path, asked[0])
    assert [path.read_text().strip() for path in (tmp_path / there.ASKERS).iterdir()] == [remote.asker(plan.store)]
