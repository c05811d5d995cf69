"""Whatever a training in one process does, one with a process a rank does too, and says which rank it speaks of."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rank_store import Ran, run_topology
from train_store import Training, again, make_training

from dflash.base.errors import PermanentError
from dflash.base.records import CheckpointManifest, last_attempts
from dflash.model.probe import Probe
from dflash.train import drafter_rank, forward, preflight, prepare, schedule, target_rank, trainer
from dflash.train.roles import Roles
from dflash.train.trainer import Learner

torch.set_num_threads(1)

BATCHING = {"batches_per_step": 4, "max_batch_size": 3}
RANKS = range(4)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """Colocated, in float64; three steps."""
    training = make_training(tmp_path_factory.mktemp("whole"), batching=BATCHING, dtype="float64")
    training.run(1, 3)
    return training


@pytest.fixture
def training(whole: Training, tmp_path: Path) -> Training:
    """The same, untrained."""
    return again(whole, tmp_path)


def distance(first: Training, second: Training, step: int = 3) -> float:
    ours, theirs = first.weights(step), second.weights(step)
    names = [name for name in ours if "generator." not in name]
    return max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in names)


def succeeded(ran: Ran) -> bool:
    assert ran.ok, "\n".join(ran.said)
    return True


# ---------------------------------------------------------------- how a batch goes through


@pytest.mark.parametrize("size", [1, 2])
def test_a_batch_in_parts_teaches_the_same_at_any_topology(training: Training, tmp_path: Path, size: int) -> None:
    ranked = [again(training, tmp_path / name) for name in ("1-1", "2-2")]
    training.run(3, micro_batch=size)
    assert succeeded(run_topology(ranked[0], 1, 1, 3, micro_batch=size))
    assert succeeded(run_topology(ranked[1], 2, 2, 3, micro_batch=size))
    assert distance(training, ranked[0]) == 0, "one drafter adds up in the order of the single process"
    assert distance(training, ranked[1]) <= 1e-12
    assert ranked[1].batch_ids() == training.batch_ids()


def test_a_rank_never_computes_more_samples_at_once_than_micro_batch(training: Training) -> None:
    def count() -> None:
        target, drafter = target_rank.Target.features, Learner.add

        def features(self: Any, ids: Any, mask: Any, taps: Any) -> Any:
            if mask is not None:  # the probe has none
                print("rows", len(ids), flush=True)
            return target(self, ids, mask, taps)

        def add(self: Any, batch: Any, *rest: Any) -> None:
            print("rows", len(batch.rows), flush=True)
            drafter(self, batch, *rest)

        target_rank.Target.features, Learner.add = features, add  # type: ignore[method-assign]

    ran = run_topology(training, 2, 2, 2, micro_batch=2, changes=dict.fromkeys(RANKS, count))
    assert succeeded(ran)
    for said in ran.said:
        assert set(re.findall(r"rows (\d+)", said)) == {"1", "2"}


def test_activations_computed_again_are_the_same_bits(whole: Training, training: Training) -> None:
    assert succeeded(run_topology(training, 2, 1, 3, activation_checkpointing=True, anchor_chunk=2))
    assert distance(whole, training) <= 1e-10


def test_compiled_ranks_make_a_graph_a_bucket_and_teach_the_same(whole: Training, training: Training) -> None:
    def quick() -> None:
        forward.BACKEND = "eager"
        torch._dynamo.reset()  # a fork has what this process compiled before
        torch._dynamo.utils.counters.clear()
        real = drafter_rank.DrafterRank.outputs

        def outputs(self: Any) -> Any:
            print("graphs", torch._dynamo.utils.counters["stats"]["unique_graphs"], flush=True)
            return real(self)

        drafter_rank.DrafterRank.outputs = outputs  # type: ignore[method-assign]

    ran = run_topology(training, 2, 2, 3, compile=True, changes=dict.fromkeys(RANKS, quick))
    assert succeeded(ran)
    assert ["graphs 2" in said for said in ran.said[2:]] == [True, True]
    assert distance(whole, training) < 1e-10


# ---------------------------------------------------------------- the probe


def nudge_target() -> None:
    real = prepare.load_target

    def load(*arguments: Any, **named: Any) -> Any:
        target = real(*arguments, **named)
        next(w for n, w in target.model.named_parameters() if n.endswith("layers.1.mlp.up_proj.weight")).data[3, 5] += (
            1e-9
        )
        return target

    prepare.load_target = load


def nudge_drafter() -> None:
    real = drafter_rank.StreamLearner.__init__

    def init(self: Any, *arguments: Any) -> None:
        real(self, *arguments)
        self.masters["fc.weight"].data[1, 2] += 1e-9

    drafter_rank.StreamLearner.__init__ = init  # type: ignore[method-assign]


def test_ranks_write_the_probe_that_one_process_writes(whole: Training, training: Training) -> None:
    (training.directory / "probe.safetensors").unlink()
    assert succeeded(run_topology(training, 2, 2, 1))
    ours, theirs = (Probe.read(one.directory / "probe.safetensors") for one in (whole, training))
    assert ours.tensors.keys() == theirs.tensors.keys()
    assert all(torch.equal(ours.tensors[name], theirs.tensors[name]) for name in ours.tensors)
    assert ours.facts == theirs.facts


@pytest.mark.parametrize(
    ("rank", "change", "reference"),
    [(1, nudge_target, "rank 0 (target 0)"), (3, nudge_drafter, "rank 2 (drafter 0)")],
)
def test_a_rank_that_computes_something_else_is_named_before_the_first_step(
    training: Training, rank: int, change: Callable[[], None], reference: str
) -> None:
    ran = run_topology(training, 2, 2, 3, changes={rank: change})
    assert ran.statuses[2] == 4
    assert f"{Roles(2, 2).name(rank)} computes something else than {reference}: " in ran.said[2]
    assert not (training.directory / "metrics.jsonl").exists()


def test_a_resume_on_a_changed_machine_stops_unless_it_is_accepted(training: Training) -> None:
    training.run(1)
    before = (training.directory / "probe.safetensors").read_bytes()
    changes = dict.fromkeys((0, 1), nudge_target)
    ran = run_topology(training, 2, 2, 3, attempt=2, changes=changes)
    assert ran.statuses[2] == 4
    assert re.search(r"tap \d of the sequence .*every bit should be the same.*--accept-env", ran.said[2])
    assert schedule.existing_steps(training.directory) == [1]
    assert (training.directory / "probe.safetensors").read_bytes() == before
    assert succeeded(run_topology(training, 2, 2, 3, attempt=3, changes=changes, accept_env="a new driver"))
    lineage = CheckpointManifest.read(training.directory / "step_3" / "manifest.json").lineage
    assert [(entry["attempt"], entry["why"]) for entry in lineage.accepted] == [(3, "a new driver")]


# ---------------------------------------------------------------- what does not fit


def test_memory_that_is_too_small_for_all_ranks_of_a_host_is_refused_by_every_one(training: Training) -> None:
    def small() -> None:
        preflight.host_memory_free = lambda: 1_000_000

    ran = run_topology(training, 2, 2, 3, changes=dict.fromkeys(RANKS, small))
    assert ran.statuses == [4] * 4
    for said in ran.said:
        assert re.search(r"the 4 ranks on \S+ need about .* of host memory .*, 1\.00 MB are free; most of it, ", said)
        assert "is for rank 2 (drafter 0) (" in said, "the lead copies checkpoints too"
        assert "train." in said
    assert not (training.directory / "metrics.jsonl").exists()


class Told:
    """Stands in for `Peers`: every rank's claim is this rank's own, with what a test changes of it."""

    def __init__(self, *changed: dict[str, Any]) -> None:
        self.roles = Roles(1, 1)
        self.changed = changed

    def gather(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        return [{**value, **changed} for changed in self.changed]


def test_each_gpu_is_judged_alone_and_a_host_by_the_sum(whole: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    params = whole.params()
    need = preflight.batch_need(params, prepare.drafter_config(params), forward.Shape(3, 24, 5), target_width=16)
    monkeypatch.setattr(preflight, "gpu_memory_free", lambda _: need.total)
    monkeypatch.setattr(preflight, "host_memory_free", lambda: 2 * need.total)
    preflight.refuse_ranks(Told({}, {}), need, "cuda:0")  # type: ignore[arg-type]
    with pytest.raises(
        PermanentError, match=r"rank 1 \(drafter 0\) on .*, cuda:1: the longest batch \(3 samples .*GPU"
    ):
        preflight.refuse_ranks(Told({}, {"device": "cuda:1", "free": need.total - 1}), need, "cuda:0")  # type: ignore[arg-type]
    preflight.refuse_ranks(Told({}, {}), need, "cpu")  # type: ignore[arg-type]
    with pytest.raises(PermanentError, match=r"the 2 ranks on .* of host memory"):
        preflight.refuse_ranks(Told({}, {}), need, "cpu", 1)  # type: ignore[arg-type]
    preflight.refuse_ranks(Told({}, {"host": "another"}), need, "cpu", 1)  # type: ignore[arg-type]


def test_the_needs_of_the_roles_are_those_of_one_process_apart(whole: Training) -> None:
    params = whole.params()
    config = prepare.drafter_config(params)
    made = trainer.Trainer(params, *_begun(whole))
    plan = trainer.batch_plan(trainer.load_train_samples(made.dataset.directory), made.dataset, made.buckets)
    target = prepare.load_checked_target(params, None, "cpu")
    one = preflight.largest_need(params, config, plan, target)
    computes = preflight.target_need(params, config, plan, target)
    learns = preflight.drafter_need(params, config, plan, 100, 3, has_moments=False)
    assert set(computes.parts) == {"features", "target"}
    assert learns.parts["target"] == 0
    assert learns.parts["gathered"] == 4 * preflight.PIECE * 8
    assert learns.parts["features"] == one.parts["features"] + 100 * config.feature_size * 8
    assert computes.parts["target"] == one.parts["target"]


def _begun(training: Training) -> Any:
    import threading

    from dflash.base.stage import HostContext
    from dflash.base.store import load_inputs, read_params

    inputs = load_inputs(read_params(training.directory), training.store)
    return inputs, training.directory, HostContext(), threading.Event()


def test_a_disk_without_room_for_two_checkpoints_is_refused_before_anything_is_loaded(training: Training) -> None:
    def full() -> None:
        preflight.disk_free = lambda _: 1000

    ran = run_topology(training, 2, 2, 1, 3, changes={2: full})
    assert ran.statuses[2] == 4
    assert re.search(r"rank 2 \(drafter 0\) on local.*the next 2 checkpoints need .* are free", ran.said[2])


@pytest.mark.parametrize(("rank", "what"), [(1, "step 1, target features"), (3, "step 1")])
def test_running_out_of_memory_names_the_rank_and_the_knobs(training: Training, rank: int, what: str) -> None:
    def full() -> None:
        def fail(*_: Any, **__: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

        if rank < 2:
            real = target_rank.Target.features
            target_rank.Target.features = lambda self, ids, mask, taps: (  # type: ignore[method-assign]
                real(self, ids, mask, taps) if mask is None else fail()
            )
        else:
            trainer.objective = fail

    ran = run_topology(training, 2, 2, 3, changes={rank: full})
    assert ran.statuses[rank] == 4
    assert re.search(
        rf"{re.escape(Roles(2, 2).name(rank))} on local.*{what}: out of memory.*train\.micro_batch", ran.said[rank]
    )


# ---------------------------------------------------------------- numbers that are none


def test_a_loss_that_is_not_finite_on_one_drafter_is_skipped_by_all(training: Training) -> None:
    def poison() -> None:
        real = drafter_rank.StreamLearner.add

        def add(self: Any, batch: Any, samples: Any, sums: Any) -> None:
            real(self, batch, samples, sums)
            if self.receiver.peers is not None and self.optimizer.moments() and not hasattr(self, "spoilt"):
                self.spoilt = True  # in the second step
                sums.loss = math.nan

        drafter_rank.StreamLearner.add = add  # type: ignore[method-assign]

    assert succeeded(run_topology(training, 2, 2, 1, 2, 3, changes={3: poison}, keep_states=9))
    weights = [training.weights(step)["state/masters:fc.weight"] for step in (1, 2, 3)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])
    lines = last_attempts(training.directory / "metrics.jsonl")
    assert [math.isfinite(line.loss) for line in lines] == [True, False, True]


def test_too_many_of_them_end_it_with_their_batches_on_disk(training: Training) -> None:
    def poison() -> None:
        real = Learner.gradient_norm
        Learner.gradient_norm = lambda self, weight: (  # type: ignore[method-assign]
            math.nan if self.optimizer.moments() else real(self, weight)
        )

    ran = run_topology(training, 2, 2, 30, max_nonfinite=2, changes=dict.fromkeys((2, 3), poison))
    assert ran.statuses[2:] == [4, 4]
    assert "2 steps in a row, up to step 3" in ran.said[2]
    assert [said.count("the update is skipped") for said in ran.said] == [0, 0, 2, 0], "the lead alone tells"
    named = json.loads((training.directory / "nonfinite.json").read_text())["steps"]
    assert list(named) == ["2", "3"]
    assert named["2"] == training.batch_ids()[1]


# ---------------------------------------------------------------- trackers


class Fake(ModuleType):
    """wandb, as far as it is used; prints what it is told."""

    def init(self, **options: Any) -> None:
        print("init", options["name"], flush=True)

    def log(self, values: dict[str, float], step: int) -> None:
        print("log", step, values["loss"], flush=True)

    def finish(self) -> None:
        print("finish", flush=True)


def test_the_lead_alone_tells_a_tracker(training: Training) -> None:
    def install() -> None:
        sys.modules["wandb"] = Fake("wandb")

    ran = run_topology(training, 2, 2, 3, tracker="wandb", changes=dict.fromkeys(RANKS, install))
    assert succeeded(ran)
    told = re.findall(r"^log (\d+) (\S+)$", ran.said[2], re.MULTILINE)
    assert told == [(str(line.step), str(line.loss)) for line in last_attempts(training.directory / "metrics.jsonl")]
    assert not any("init" in said or "log" in said for rank, said in enumerate(ran.said) if rank != 2)


def test_a_missing_tracker_is_refused_before_the_first_step(training: Training) -> None:
    def uninstall() -> None:
        sys.modules["trackio"] = None  # type: ignore[assignment]

    ran = run_topology(training, 2, 1, 3, tracker="trackio", changes=dict.fromkeys(range(3), uninstall))
    assert ran.statuses[2] == 2
    assert "train.tracker: " in ran.said[2]
    assert not (training.directory / "metrics.jsonl").exists()


def test_a_status_that_names_what_is_written_fits_where_it_is_kept() -> None:
    status = schedule.Status(attempt=99, step=10**9, lease_pid=10**7, lease_start="x" * 40, alert="y" * 300)
    longest = status.model_copy(update={"writing": [10**9 - 1, 10**9], "ending": True})
    assert len(longest.model_dump_json().encode()) < schedule.STATUS_BYTES
