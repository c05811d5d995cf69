"""A rehearsal runs the ranks of a training on its longest batches, says what it saw, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from train_store import Training, make_samples, make_training

from dflash.base.errors import ConfigError, CorruptError, DflashError, PermanentError, TransientError
from dflash.base.records import Failure, now
from dflash.base.store import load_inputs, read_params
from dflash.data.batches import load_train_samples
from dflash.hosts import lease
from dflash.plan.topology import Rates
from dflash.rehearsal import Disk, Part, Rehearsal, as_json, expect, memory_rows, render, table
from dflash.train import launch, rehearse, schedule
from dflash.train.attempts import Attempt, Placement, attempt_path
from dflash.train.rehearse import LongestBatches, bucket_facts, clear, longest_batches, rehearse_training, sweep
from dflash.train.train_params import Topology

NAME = ".rehearsal-0123456789ab"


def tree(folder: Path) -> dict[str, int]:
    """Every path below a folder with its inode."""
    return {str(path.relative_to(folder)): path.lstat().st_ino for path in folder.rglob("*")}


def scratch_of(training: Training) -> Path:
    """The throwaway store, as whoever asks has filled it."""
    directory = training.store / NAME / training.directory.relative_to(training.store)
    waiting = [(training.directory, directory)]
    while waiting:
        source, copy = waiting.pop()
        copy.mkdir(parents=True, exist_ok=True)
        (copy / "params.json").write_bytes((source / "params.json").read_bytes())
        for name, key in read_params(source).upstream.items():
            stage = name.split("/")[0]
            waiting.append((training.store / stage / key, training.store / NAME / stage / key))
    return directory


def rehearsed(training: Training, **values: Any) -> dict[str, Any]:
    scratch_of(training)
    request = {"key": training.directory.name, "run": "demo", "placement": {"values": values}}
    return rehearse_training(training.store, NAME, request)


def plan_of(training: Training, **params: Any) -> LongestBatches:
    inputs = load_inputs(read_params(training.directory), training.store)
    samples = load_train_samples(inputs.one("dataset").directory)
    batching = inputs.one("buckets").params.params
    return longest_batches(samples, "0" * 12, batching, training.params(**params))


# ---------------------------------------------------------------- the batches


def test_every_step_holds_the_longest_batch_of_one_bucket_and_each_bucket_comes_twice(tmp_path: Path) -> None:
    plan = plan_of(make_training(tmp_path))
    assert plan.order() == [1, 0]
    for step, bucket in enumerate([1, 1, 0, 0]):
        batches = plan.step(step)
        assert len(batches) == plan.params.batches_per_step
        longest = np.sort(plan.lengths[plan.bucket_of == bucket])[::-1][: plan.batch_sizes[bucket]]
        for batch in batches:
            assert batch.bucket == bucket
            assert batch.lengths.tolist() == longest.tolist()


def test_no_batch_of_the_training_is_longer_than_the_rehearsed_one(tmp_path: Path) -> None:
    training = make_training(tmp_path, rows=make_samples(60, 5))
    plan = plan_of(training)
    most = {bucket: plan.longest_batch(bucket).padded_tokens for bucket in plan.order()}
    for number in range(3 * plan.batches_per_epoch):
        batch = plan.batch(number)
        assert batch.padded_tokens <= most[batch.bucket]


def test_names_of_batches_are_as_long_as_a_credit_is_and_never_the_same_twice(tmp_path: Path) -> None:
    plan = plan_of(make_training(tmp_path))
    names = [batch.batch_id for step in range(4) for batch in plan.step(step)]
    assert len(set(names)) == len(names)
    assert {len(name) for name in names} == {len(plan.batch(0).batch_id)}


def test_a_rank_may_look_beyond_the_last_step(tmp_path: Path) -> None:
    plan = plan_of(make_training(tmp_path))
    assert {batch.bucket for batch in plan.step(50)} == {plan.order()[-1]}


def test_a_training_that_goes_on_from_a_step_is_rehearsed_from_there(tmp_path: Path) -> None:
    training = make_training(tmp_path)
    source = {"key": "0" * 12, "step": 7, "what": "state"}
    plan = plan_of(training, continue_from=source)
    assert [plan.step(step)[0].bucket for step in (7, 8, 9, 10)] == [1, 1, 0, 0]


def test_buckets_are_told_with_their_share_of_all_batches(tmp_path: Path) -> None:
    facts = bucket_facts(plan_of(make_training(tmp_path)))
    assert [(one["bucket"], one["samples"], one["length"]) for one in facts] == [(1, 4, 24), (0, 6, 15)]
    assert sum(one["share"] for one in facts) == pytest.approx(1.0)


# ---------------------------------------------------------------- the ranks


@pytest.mark.parametrize("ranks", [1, 3], ids=["colocated", "2:1"])
def test_the_real_ranks_run_and_nothing_stays(tmp_path: Path, ranks: int) -> None:
    training = make_training(tmp_path)
    before = tree(training.store)
    topology = {"topology": {"targets": 2, "drafters": 1, "colocate": False}} if ranks == 3 else {}
    found = rehearsed(training, **topology)
    assert [one["rank"] for one in found["ranks"]] == list(range(ranks))
    assert all(one["host_peak"] > 0 and one["host_left"] > 0 for one in found["ranks"])
    assert [line["buckets"][0] for line in found["lines"]] == [1, 1, 0, 0]
    assert found["checkpoint"]["step"] == 4
    assert found["existing"] == []
    folder = training.store / NAME / "train" / training.directory.name / "step_4"
    written = {name: sum(path.stat().st_size for path in (folder / name).iterdir()) for name in ("drafter", "state")}
    assert found["checkpoint"]["bytes"] == written
    clear(training.store, NAME)
    assert tree(training.store) == before


def test_what_stops_a_training_stops_the_rehearsal_in_the_same_words(tmp_path: Path) -> None:
    training = make_training(tmp_path)
    with pytest.raises(ConfigError, match=r"3 drafters share the 2 batches .*batching.batches_per_step"):
        rehearsed(training, topology={"targets": 1, "drafters": 3, "colocate": False})


def test_a_live_training_of_the_same_key_is_left_alone(tmp_path: Path) -> None:
    training = make_training(tmp_path)
    record = lease.new_record("training", training.directory.name, "theirs")
    held = lease.acquire([schedule.lease_path(training.directory)], record)
    with pytest.raises(lease.LeaseHeld, match="run theirs"):
        rehearsed(training)
    held.release()


def test_a_topology_of_more_ranks_than_gpus_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(rehearse.machine, "gpus", lambda: [{}] * 8)
    ranks = Topology(colocate=False, targets=5, drafters=3)
    rehearse.refuse_missing_gpus("cuda", ranks)
    rehearse.refuse_missing_gpus("cpu", ranks)
    for device, there in (("cuda:2", 6), ("cuda:9", 0)):
        with pytest.raises(PermanentError, match=rf"train.topology: 8 ranks need a GPU each, {there} are there"):
            rehearse.refuse_missing_gpus(device, ranks)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(PermanentError, match="2 are there"):
        rehearse.refuse_missing_gpus("cuda", ranks)


# ---------------------------------------------------------------- why it ended


def leave(directory: Path, **attempt: Any) -> None:
    fields = {"attempt": 1, "run": "demo", "invocation": "", "argv": [], "launcher_pid": 1, "start": now(), "code": ""}
    Attempt(**{**fields, "placement": Placement(), **attempt}).write(attempt_path(directory, 1))


@pytest.mark.parametrize(
    ("kind", "error"),
    [("config", ConfigError), ("permanent", PermanentError), ("corrupt", CorruptError), ("transient", TransientError)],
)
def test_a_cause_that_was_left_behind_is_passed_on(tmp_path: Path, kind: str, error: type[DflashError]) -> None:
    facts = {"stage": "train", "key": "", "at": now(), "invocation": ""}
    Failure(kind=kind, message="lower train.micro_batch", **facts).write(tmp_path / "failure.json")
    found = rehearse.cause(tmp_path, 4)
    assert type(found) is error
    assert found.message() == "lower train.micro_batch"


def test_who_holds_the_gpu_is_passed_on(tmp_path: Path) -> None:
    (tmp_path / "trainer.log").write_text("GPU 0 is held by jo, run other\n")
    assert rehearse.cause(tmp_path, launch.DEVICE_HELD).message() == "GPU 0 is held by jo, run other"


def test_a_killed_rank_points_at_the_hosts_memory(tmp_path: Path) -> None:
    leave(tmp_path, signal="SIGKILL", cause="step 1: rank 2 (drafter 0) on box was killed by SIGKILL")
    message = rehearse.cause(tmp_path, 137).message()
    assert message.startswith("step 1: rank 2 (drafter 0) on box was killed by SIGKILL")
    assert "train.micro_batch" in message


def test_a_crash_is_told_with_the_end_of_the_log(tmp_path: Path) -> None:
    (tmp_path / "trainer.log").write_text("Traceback\nRuntimeError: no such kernel\n")
    leave(tmp_path, exit=1)
    assert "RuntimeError: no such kernel" in rehearse.cause(tmp_path, 1).message()


# ---------------------------------------------------------------- nothing stays


def test_only_throwaway_stores_are_cleared(tmp_path: Path) -> None:
    (tmp_path / "dataset").mkdir()
    for name in ("dataset", ".rehearsal-", ".rehearsal-x/../dataset", ""):
        with pytest.raises(PermanentError, match="no throwaway store"):
            clear(tmp_path, name)
    assert (tmp_path / "dataset").is_dir()
    clear(tmp_path, NAME)  # never made


def test_what_a_throwaway_store_links_to_stays(tmp_path: Path) -> None:
    training = make_training(tmp_path)
    directory = scratch_of(training)
    before = tree(training.store / "dataset")
    rehearse.link_upstream(training.store, training.store / NAME, read_params(directory), [])
    assert (training.store / NAME / "dataset").is_dir()
    clear(training.store, NAME)
    assert tree(training.store / "dataset") == before
    assert not (training.store / NAME).exists()


def test_a_sweep_takes_what_is_old_and_nobodys(tmp_path: Path) -> None:
    for name in ("old", "held", "new"):
        (tmp_path / f".rehearsal-{name}/train/key").mkdir(parents=True)
        if name != "new":
            os.utime(tmp_path / f".rehearsal-{name}", (0, time.time() - 2 * rehearse.STALE))
    record = lease.new_record("training", "key", "demo")
    held = lease.acquire([tmp_path / ".rehearsal-held/train/key/lease.json"], record)
    sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".rehearsal-held", ".rehearsal-new"]
    held.release()


# ---------------------------------------------------------------- what is foretold


def training_of(**changes: Any) -> dict[str, Any]:
    """What a host answers: two buckets, a quarter and three quarters of the batches, 2 targets and 1 drafter."""
    buckets = [
        {"bucket": 1, "samples": 4, "length": 100, "tokens": 400, "share": 0.25},
        {"bucket": 0, "samples": 8, "length": 50, "tokens": 400, "share": 0.75},
    ]
    cold = {"tokens_per_second": {"target": 1.0, "drafter": 1.0}, "seconds": 99.0, "starving": {}}
    lines = [
        {**cold, "buckets": [1]},
        {"tokens_per_second": {"target": 200.0, "drafter": 100.0}, "seconds": 8.0, "starving": {}, "buckets": [1]},
        {**cold, "buckets": [0]},
        {
            "tokens_per_second": {"target": 400.0, "drafter": 50.0},
            "seconds": 4.0,
            "starving": {"target": 0.5},
            "buckets": [0],
        },
    ]
    found: dict[str, Any] = {
        "buckets": buckets,
        "lines": [{**line, "memory_bytes": {"rank 0": 5 << 30, "rank 2": 6 << 30}} for line in lines],
        "topology": {"targets": 2, "drafters": 1, "colocate": False},
        "batches_per_step": 10,
        "tokens_a_batch": 300.0,
        "start_seconds": 60.0,
        "checkpoint": {"seconds": 3.0},
        "ranks": [],
    }
    return {**found, **changes}


def test_the_second_pass_of_each_bucket_counts_by_its_share_of_the_batches() -> None:
    found = expect(training_of(), steps=100, checkpoints=10)
    assert found.step_seconds == pytest.approx(0.25 * 8 + 0.75 * 4)
    assert found.target == pytest.approx(400 / (0.25 * 400 / 100 + 0.75 * 400 / 200))
    assert found.drafter == pytest.approx(400 / (0.25 * 400 / 100 + 0.75 * 400 / 50))
    assert found.pipeline == pytest.approx(300 * 10 / 5.0)
    assert found.starving == {"target": pytest.approx(0.75 * 0.5 * 4 / 5)}
    assert found.seconds == pytest.approx(60 + 100 * 5)


def test_checkpoints_that_come_faster_than_they_are_written_hold_training_up() -> None:
    slow = expect(training_of(checkpoint={"seconds": 70.0}), steps=100, checkpoints=10)
    assert slow.seconds == pytest.approx(60 + 100 * 5 + 10 * (70 - 50))


def test_headroom_is_what_a_gpu_has_for_a_rank_less_the_most_it_took() -> None:
    ranks = [
        {"rank": rank, "device": f"cuda:{rank}", "host_peak": 1, "host_left": 1, "gpu_room": 8 * 10**9, "gpu_total": 1}
        for rank in range(3)
    ]
    training = training_of(ranks=ranks)
    training["lines"][0]["memory_bytes"] = {"rank 0": 5 * 10**9, "rank 2": 6 * 10**9}
    training["lines"][1]["memory_bytes"] = {"rank 0": 7 * 10**9}
    for line in training["lines"][2:]:
        line["memory_bytes"] = {}
    found = Rehearsal("demo", "key", [Part("training", "box")], training, steps=1, checkpoints=1)
    rows = {row[1]: row[2:] for row in memory_rows(found)}
    assert rows["cuda:0"] == ["rank 0 (target 0)", "7.0 GB", "1.0 GB"]
    assert rows["cuda:2"] == ["rank 2 (drafter 0)", "6.0 GB", "2.0 GB"]


@pytest.mark.parametrize(("peak", "problems"), [(2 * 10**9, 0), (2 * 10**9 + 1, 1)])
def test_an_evaluation_must_fit_beside_the_training_that_it_shares_a_gpu_with(peak: int, problems: int) -> None:
    ranks = [{"rank": 2, "device": "cuda:0", "host_peak": 1, "host_left": 1, "gpu_room": 8 * 10**9}]
    training = training_of(ranks=ranks)
    for line in training["lines"]:
        line["memory_bytes"] = {"rank 2": 6 * 10**9}
    evaluation = {"device": "cuda", "peak": peak, "left": 1}
    parts = [Part("training", "box"), Part("checkpoint", "box"), Part("shipment", "box"), Part("evaluation", "box")]
    found = Rehearsal("demo", "key", parts, training, evaluation=evaluation)
    assert len(found.problems) == problems
    assert all("roles.eval" in problem and "leaves 2.0 GB" in problem for problem in found.problems)
    parts[3].where = "judge"
    assert not found.problems


def test_a_disk_that_is_too_small_is_a_problem_that_names_the_knobs() -> None:
    found = Rehearsal("demo", "key", disks=[Disk("box", 10**10, 10**9, "4 drafters"), Disk("far", 1, None, "")])
    (problem,) = found.problems
    assert problem.startswith("disk: box needs 10.0 GB for the whole run (4 drafters) and has 1.0 GB free")
    assert "train.checkpoint_every" in problem
    assert "train.keep_states" in problem
    assert "DOES NOT FIT" in render(found)
    assert "unknown" in render(found)
    assert not replace(found, disks=[Disk("box", 10**9, 10**9, "")]).problems


def test_columns_of_a_table_are_aligned() -> None:
    assert table(["a", "bb"], [["ccc", "1"], ["d", "22"]], right=(1,)) == ["a    bb", "ccc   1", "d    22"]


def test_the_rehearsal_is_a_rates_file() -> None:
    training = {**training_of(), "ranks": [{"rank": 0, "device": "cpu", "host_peak": 1, "host_left": 1}]}
    found = Rehearsal("demo", "key", [Part("training", "box")], training, steps=1, checkpoints=1)
    rates = Rates.model_validate({**json.loads(as_json(found)), "source": "it"})
    assert rates.drafter == pytest.approx(expect(training_of(), 1, 1).drafter)


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("", "it is empty"),
        ("one\ntwo\n\n \n", "two"),
        (
            'train: 3 steps\nTraceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\n'
            "torch._inductor.exc.InductorError: InvalidCxxCompiler: No working C++ compiler found\n\n"
            "Set TORCHDYNAMO_VERBOSE=1 for the internal stack trace (please do this especially if you're reporting a bug).\n\n",
            "torch._inductor.exc.InductorError: InvalidCxxCompiler: No working C++ compiler found",
        ),
    ],
)
def test_the_cause_is_found_above_the_hints_and_blank_lines_that_follow_it(log: str, said: str) -> None:
    assert rehearse.last_words(log) == said
