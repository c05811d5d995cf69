"""Training is a function of its key: resumed, cut otherwise or run again, it gives the same bits; and it refuses bad input."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from train_store import TINY, Training, again, identity, make_samples, make_training, put_stage

from dflash.base.errors import ConfigError, CorruptError, PermanentError
from dflash.base.records import CheckpointManifest, ParamsFile, last_attempts
from dflash.base.store import read_params
from dflash.data.batches import Batch, Samples
from dflash.model.export import load_drafter, read_metadata
from dflash.train import checkpoint, schedule, trainer
from dflash.train.optimizer import learning_rate
from dflash.train.trainer import Learner, StepSums, Trainer

torch.set_num_threads(1)


def same(first: Training, second: Training, step: int) -> bool:
    ours, theirs = first.weights(step), second.weights(step)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def attempts_by_step(training: Training) -> dict[int, list[int]]:
    """Which attempts trained each step: a step trained twice has two."""
    found: dict[int, list[int]] = {}
    for line in (training.directory / "metrics.jsonl").read_text().splitlines():
        found.setdefault(json.loads(line)["step"], []).append(json.loads(line)["attempt"])
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """Six steps without a break; an epoch has four batches, a step takes three, so the boundary falls within steps."""
    training = make_training(tmp_path_factory.mktemp("undisturbed"), batching={"batches_per_step": 3})
    training.run(6)
    return training


# ---------------------------------------------------------------- the same bits


def test_two_trainings_give_the_same_bits_and_the_same_drafter_files(undisturbed: Training, tmp_path: Path) -> None:
    second = again(undisturbed, tmp_path)
    second.run(6)
    assert same(undisturbed, second, 6)
    for name in ("model.safetensors", "config.json"):
        files = [t.directory / "step_6" / "drafter" / name for t in (undisturbed, second)]
        assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("stop", [1, 3, 4, 5])
def test_k_steps_and_a_resume_equal_an_undisturbed_training_bit_for_bit(
    undisturbed: Training, tmp_path: Path, stop: int
) -> None:
    resumed = again(undisturbed, tmp_path)
    resumed.run(stop)
    resumed.run(6, attempt=2)
    # Equal bits prove nothing if the second attempt began anew: each step must have been trained once.
    assert attempts_by_step(resumed) == {step: [1 if step <= stop else 2] for step in range(1, 7)}
    assert same(undisturbed, resumed, 6)
    assert resumed.batch_ids() == undisturbed.batch_ids()
    cursor = json.loads((resumed.directory / "step_6/state/cursor.json").read_text())
    assert [(entry["attempt"], entry["from_step"]) for entry in cursor["history"]] == [(1, 0), (2, stop)]


def test_a_resume_at_the_epoch_boundary_begins_the_next_epoch_and_skips_nothing(
    undisturbed: Training, tmp_path: Path
) -> None:
    plan_epochs = 4 / math.gcd(4, 3)  # step 4 ends the third epoch exactly
    assert plan_epochs == 4
    resumed = again(undisturbed, tmp_path)
    resumed.run(4)
    outputs = resumed.run(5, attempt=2)
    assert outputs.results == {"step": 5, "saved": [5]}
    assert resumed.batch_ids() == undisturbed.batch_ids()[:5]


@pytest.mark.parametrize("changed", [{"dtype": "bfloat16"}, {"optimizer": "muon"}, {"dtype": "float64"}])
def test_every_precision_and_optimizer_resumes_bit_for_bit(tmp_path: Path, changed: dict[str, Any]) -> None:
    whole = make_training(tmp_path / "whole", **changed)
    whole.run(4)
    resumed = again(whole, tmp_path / "resumed")
    resumed.run(2)
    resumed.run(4, attempt=2)
    assert attempts_by_step(resumed)[3] == [2]
    assert same(whole, resumed, 4)
    masters = {str(t.dtype) for name, t in whole.weights(4).items() if name.startswith("state/masters")}
    assert masters == {"torch.float64" if changed.get("dtype") == "float64" else "torch.float32"}


def test_a_hybrid_target_and_sliding_layers_train_and_resume_bit_for_bit(tmp_path: Path) -> None:
    hybrid = TINY.model_copy(update={"model_type": "qwen3_5_text"})
    sliding = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
    whole = make_training(tmp_path / "whole", target=identity(hybrid), **sliding)
    assert whole.run(3).kernels["linear"] == "torch"
    resumed = again(whole, tmp_path / "resumed")
    resumed.run(2)
    resumed.run(3, attempt=2)
    assert attempts_by_step(resumed)[3] == [2]
    assert same(whole, resumed, 3)


def learner_of(training: Training, **placed: Any) -> tuple[Learner, Samples]:
    params = training.params(**placed)
    config = trainer.drafter_config(params)
    target = trainer.load_checked_target(params, None, "cpu")
    dataset = training.store / "dataset" / read_params(training.directory).upstream["dataset"]
    return Learner(params, target, config, "cpu"), Samples(dataset / "train.parquet")


def batch_of(rows: list[int], samples: Samples) -> Batch:
    return Batch("batch", 0, 0, 0, np.asarray(rows), samples.lengths[rows])


@pytest.mark.parametrize("cut", [[1, 4], [3], [2, 3, 5]])
def test_gradients_added_up_over_batches_equal_those_of_one_big_batch(tmp_path: Path, cut: list[int]) -> None:
    learner, samples = learner_of(make_training(tmp_path, dtype="float64"))
    found = []
    for parts in ([list(range(8))], [part.tolist() for part in np.split(np.arange(8), cut)]):
        sums = StepSums()
        learner.clear_gradients()
        for rows in parts:
            learner.add(batch_of(rows, samples), samples, sums)
        norm = learner.gradient_norm(sums.weight)
        gradients = {name: master.grad.clone() for name, master in learner.masters.items() if master.grad is not None}
        found.append((sums.loss / sums.weight, sums.weight, norm, gradients))
    whole, pieces = found
    assert whole[0] == pytest.approx(pieces[0], rel=1e-12)
    assert whole[1] == pytest.approx(pieces[1], rel=1e-12)
    assert whole[3].keys() == learner.masters.keys()
    for name, gradient in whole[3].items():
        torch.testing.assert_close(gradient, pieces[3][name], rtol=1e-9, atol=1e-12)


def test_bfloat16_keeps_masters_that_move_less_than_bfloat16_can_say(tmp_path: Path) -> None:
    training = make_training(tmp_path, dtype="bfloat16", lr=1e-6)
    training.run(1)
    found = training.weights(1)
    drafter, master = found["drafter/model:fc.weight"], found["state/masters:fc.weight"]
    assert drafter.dtype == torch.bfloat16
    assert torch.equal(drafter, master.to(torch.bfloat16))
    assert not torch.equal(drafter.float(), master)


def test_chunking_is_placement_and_changes_nothing_but_rounding(tmp_path: Path) -> None:
    whole = make_training(tmp_path / "whole", dtype="float64")
    whole.run(3)
    chunked = again(whole, tmp_path / "chunked")
    chunked.run(3, anchor_chunk=2, logit_chunk=5)
    ours, theirs = whole.weights(3), chunked.weights(3)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-7, atol=1e-10)


def test_training_teaches(tmp_path: Path) -> None:
    training = make_training(tmp_path, lr=2e-2, schedule_steps=30)
    training.run(30)
    losses = [line.loss for line in last_attempts(training.directory / "metrics.jsonl")]
    assert losses[-1] < 0.85 * losses[0]


def test_the_learning_rate_warms_up_and_follows_the_cosine_to_its_floor(tmp_path: Path) -> None:
    params = make_training(tmp_path, lr=1.0, warmup=4, schedule_steps=14, min_lr_share=0.1).params()
    rates = [learning_rate(params, step) for step in range(1, 15)]
    assert rates[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert rates[9] == pytest.approx(0.1 + 0.9 * 0.5)
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[4:]))
    assert learning_rate(params, 15) == pytest.approx(0.1)


def test_a_gradient_longer_than_clip_is_cut_to_it_and_a_shorter_one_is_left(tmp_path: Path) -> None:
    learner, samples = learner_of(make_training(tmp_path, clip=0.25))
    for scale, wanted in ((1.0, 0.25), (0.01, None)):
        learner.clear_gradients()
        sums = StepSums()
        learner.add(batch_of([0, 1], samples), samples, sums)
        for master in learner.masters.values():
            assert master.grad is not None
            master.grad.mul_(scale)
        norm = learner.gradient_norm(sums.weight)
        learner.update(norm, 1)
        after = float(torch.nn.utils.get_total_norm([master.grad for master in learner.masters.values()]))
        assert after == pytest.approx(wanted or norm, rel=1e-4)


def test_anchors_are_drawn_anew_in_each_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    epochs = []
    real = trainer.batch_anchors

    def record(*arguments: Any, epoch: int, **named: Any) -> Any:
        epochs.append(epoch)
        return real(*arguments, epoch=epoch, **named)

    monkeypatch.setattr(trainer, "batch_anchors", record)
    make_training(tmp_path).run(5)
    assert epochs == [0] * 4 + [1] * 4 + [2] * 2


# ---------------------------------------------------------------- what a checkpoint says


def test_a_checkpoint_explains_itself_and_every_key_in_it_can_be_checked(undisturbed: Training) -> None:
    folder = undisturbed.directory / "step_6"
    manifest = CheckpointManifest.read(folder / "manifest.json")
    stages = ["buckets", "completions/synthetic", "dataset", "prompts/synthetic", "train"]
    assert sorted(manifest.config) == sorted(manifest.params_files) == stages
    for content in manifest.params_files.values():
        params = ParamsFile.model_validate(content)
        assert params.compute_key() == params.key
    for name in ("max_anchors", "block_size", "gamma", "num_draft_layers", "lr"):
        assert manifest.config["train"][name] is not None
    assert manifest.config["buckets"]["token_budget"] == 96
    assert manifest.buckets["table"]["samples"] == [7, 7]
    assert manifest.kernels["linear"] == manifest.environment.kernels["linear"] == "none needed"
    assert manifest.environment.torch["version"] == torch.__version__
    assert {fact.name for fact in manifest.tensors} == set(load_drafter(folder / "drafter").state_dict())
    assert {path.suffix for path in folder.rglob("*") if path.is_file()} == {".json", ".safetensors"}


def test_a_lone_weights_file_still_says_what_made_it(undisturbed: Training) -> None:
    explained = json.loads(read_metadata(undisturbed.directory / "step_6" / "drafter" / "model.safetensors")["dflash"])
    assert (explained["key"], explained["step"]) == (undisturbed.directory.name, 6)
    assert explained["config"]["train"]["max_anchors"] == 5
    assert explained["config"]["buckets"]["token_budget"] == 96


def test_config_and_environment_are_on_disk_before_the_first_batch_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = make_training(tmp_path)
    seen = []

    def look(*_: Any) -> None:
        resolved = json.loads((training.directory / "resolved.json").read_text())
        seen.append((training.store / "environments" / f"{resolved['environment']}.json").exists())
        raise PermanentError("enough")

    monkeypatch.setattr(trainer, "collate", look)
    with pytest.raises(PermanentError, match="enough"):
        training.run(1)
    assert seen == [True]


def test_metrics_say_what_was_trained(undisturbed: Training) -> None:
    lines = last_attempts(undisturbed.directory / "metrics.jsonl")
    assert [line.step for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all(len(line.accuracy_by_slot) == 3 and len(line.batch_ids) == 3 and line.anchors > 0 for line in lines)
    assert sum(line.tokens for line in lines[:4]) == 3 * sum(len(row["input_ids"]) for row in make_samples())


def test_a_torn_line_of_metrics_is_cut_by_the_next_attempt(tmp_path: Path) -> None:
    training = make_training(tmp_path)
    training.run(2)
    path = training.directory / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines()[0][:70])
    training.run(3, attempt=2)
    assert path.read_bytes().startswith(whole)
    assert [(line.step, line.attempt) for line in last_attempts(path)] == [(1, 1), (2, 1), (3, 2)]


# ---------------------------------------------------------------- steps that are odd


def test_a_batch_without_an_anchor_is_legal_and_a_step_of_them_changes_nothing(tmp_path: Path) -> None:
    rows = make_samples(8, prompt_only=range(1, 8))
    training = make_training(tmp_path, rows=rows, batching={"max_batch_size": 1, "batches_per_step": 1})
    training.run(*range(1, 9), keep_states=8)
    lines = last_attempts(training.directory / "metrics.jsonl")
    assert sorted(line.anchors > 0 for line in lines) == [False] * 7 + [True]
    for line in lines[1:]:
        before, after = (training.weights(step)["state/masters:fc.weight"] for step in (line.step - 1, line.step))
        assert torch.equal(before, after) == (line.anchors == 0)
    empty = next(line for line in lines if not line.anchors)
    assert (empty.loss, empty.accuracy_by_slot) == (0.0, [None] * 3)


def poison(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """Makes the gradient norm of some steps not a number."""
    real = Trainer.one_step

    def one_step(self: Trainer, index: int) -> Any:
        norm = Learner.gradient_norm
        if index + 1 in steps:
            monkeypatch.setattr(Learner, "gradient_norm", lambda *_: math.nan)
        try:
            return real(self, index)
        finally:
            monkeypatch.setattr(Learner, "gradient_norm", norm)

    monkeypatch.setattr(Trainer, "one_step", one_step)


def test_a_non_finite_step_is_skipped_and_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = make_training(tmp_path)
    poison(monkeypatch, {2, 4})
    training.run(1, 2, 3, 4, keep_states=9, max_nonfinite=2)
    weights = [training.weights(step)["state/masters:fc.weight"] for step in (1, 2, 3)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])
    assert math.isnan(last_attempts(training.directory / "metrics.jsonl")[1].gradient_norm)


def test_too_many_non_finite_steps_end_it_with_their_batches_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = make_training(tmp_path)
    poison(monkeypatch, {2, 3})
    training.run(2, max_nonfinite=2)
    with pytest.raises(PermanentError, match="2 steps in a row, up to step 3"):
        training.run(9, attempt=2, max_nonfinite=2)  # the count survives a resume
    named = json.loads((training.directory / "nonfinite.json").read_text())["steps"]
    assert list(named) == ["2", "3"]
    assert named["2"] == training.batch_ids()[1]


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("rows", "train", "named"),
    [
        ([], {}, "no training sample"),
        (make_samples(4, prompt_only=range(4)), {}, "loss mask is all zero"),
        (make_samples(4), {"mask_token_id": 80}, "holds the mask token 80"),
    ],
)
def test_data_that_cannot_be_learned_from_is_refused(
    tmp_path: Path, rows: list[dict[str, Any]], train: dict[str, Any], named: str
) -> None:
    if "mask_token_id" in train:
        rows[0]["input_ids"][-1] = 80
    with pytest.raises(PermanentError, match=named):
        make_training(tmp_path, rows=rows, **train).run(1)


def test_a_token_outside_the_vocabulary_is_refused_with_its_sample(tmp_path: Path) -> None:
    rows = make_samples(3)
    rows[1]["input_ids"][2] = TINY.vocab_size
    with pytest.raises(PermanentError, match=f"sample {rows[1]['id']} holds token 260"):
        make_training(tmp_path, rows=rows).run(1)


@pytest.mark.parametrize(("name", "value"), [("hidden_size", 24), ("vocab_size", 300), ("num_layers", 6)])
def test_a_target_of_other_sizes_than_recorded_is_refused(tmp_path: Path, name: str, value: int) -> None:
    wrong = identity().model_copy(update={name: value})
    with pytest.raises(PermanentError, match=f"has {name} .*, the recorded one {value}"):
        make_training(tmp_path, target=wrong).run(1)


def test_a_target_with_another_digest_than_recorded_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text("{}")
    (target / "model.safetensors").write_bytes(b"")
    params = make_training(tmp_path).params(target=identity().model_copy(update={"random": None, "digest": "0" * 64}))
    with pytest.raises(PermanentError, match=r"the target has digest [0-9a-f]{64}, the recorded one is 0{64}"):
        trainer.load_checked_target(params, target, "cpu")


def test_no_mask_token_is_a_config_error_that_names_the_key(tmp_path: Path) -> None:
    nameless = identity().model_copy(update={"mask_token_id": None})
    with pytest.raises(ConfigError, match=r"train\.mask_token_id"):
        make_training(tmp_path, target=nameless).run(1)


def test_features_that_no_healthy_target_gives_are_refused_with_the_batch_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = make_training(tmp_path)
    real = trainer.Target.features

    def broken(self: Any, ids: Any, mask: Any, taps: Any) -> Any:
        features = real(self, ids, mask, taps)
        return features if mask is None else features * float("nan")  # batches have a mask, the probe has none

    monkeypatch.setattr(trainer.Target, "features", broken)
    with pytest.raises(PermanentError, match=r"batch [0-9a-f]{12}: features hold NaN"):
        training.run(1)


# ---------------------------------------------------------------- schedule, retention, damage


def test_steps_added_while_training_runs_are_saved_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = make_training(tmp_path)
    real = Trainer.one_step

    def one_step(self: Trainer, index: int) -> Any:
        if index + 1 == 3:
            schedule.merge_steps(training.directory, [4, 7])
        return real(self, index)

    monkeypatch.setattr(Trainer, "one_step", one_step)
    training.run(5)
    assert schedule.existing_steps(training.directory) == [4, 5, 7]


def test_a_request_to_end_between_two_steps_never_loses_the_one_that_was_just_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = make_training(tmp_path)
    real = Trainer._after_step

    def after_step(self: Trainer) -> None:
        real(self)
        if self.step == 2:
            self.ending.set()

    monkeypatch.setattr(Trainer, "_after_step", after_step)
    training.run(30)
    assert schedule.existing_steps(training.directory) == [3]


def test_only_the_newest_states_stay_and_a_tombstone_marks_the_others(tmp_path: Path) -> None:
    training = make_training(tmp_path)
    training.run(1, 2, 3, 4, keep_states=2)
    assert schedule.existing_steps(training.directory) == [1, 2, 3, 4]
    assert schedule.resumable_steps(training.directory) == [3, 4]
    assert [(training.directory / f"step_{n}" / "state.pruned").exists() for n in (1, 2, 3, 4)] == [
        True,
        True,
        False,
        False,
    ]
    checkpoint.verified_manifest(training.directory, 1, training.directory.name)


def test_a_kill_while_a_state_is_deleted_leaves_nothing_that_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = make_training(tmp_path)
    monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda *_, **__: None)  # killed after the renaming
    training.run(1, 2, keep_states=1)
    monkeypatch.undo()
    assert (training.directory / "step_1" / ".state.pruning").exists()
    assert schedule.resumable_steps(training.directory) == [2]
    training.run(3, attempt=2)
    assert not (training.directory / "step_1" / ".state.pruning").exists()


@pytest.mark.parametrize("place", ["save_weights", "write_state", "tensor_facts", "fsync_directory"])
def test_a_kill_while_a_checkpoint_is_written_leaves_nothing_that_could_be_taken_for_one(
    undisturbed: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    training = again(undisturbed, tmp_path)

    def killed(*_: Any, **__: Any) -> None:
        raise SystemExit("killed")

    monkeypatch.setattr(checkpoint, place, killed)
    with pytest.raises(SystemExit):
        training.run(2)
    monkeypatch.undo()
    assert list(training.directory.glob("step_*")) == []
    training.run(2, 6, attempt=2)
    assert list(training.directory.glob(".step_*")) == []
    assert same(undisturbed, training, 6)


def test_a_damaged_state_is_named_and_the_one_before_it_is_used(
    undisturbed: Training, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training = again(undisturbed, tmp_path)
    training.run(2, 4)
    victim = training.directory / "step_4" / "state" / "moments.safetensors"
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1
    victim.write_bytes(content)
    training.run(6, attempt=2)
    said = capsys.readouterr().err
    assert "step 4 cannot be resumed from" in said
    assert "moments.safetensors" in said
    assert attempts_by_step(training)[3] == [1, 2]
    assert same(undisturbed, training, 6)
    # Step 4 was written anew, and what was damaged has been kept.
    checkpoint.load_state(training.directory, 4, training.directory.name)
    assert (training.directory / "damaged_step_4_0").exists()


def test_the_state_of_one_step_under_another_is_not_resumed_from(tmp_path: Path) -> None:
    training = make_training(tmp_path)
    training.run(1, 2)
    (training.directory / "step_2").rename(training.directory / "step_3")
    assert checkpoint.newest_state(training.directory, training.directory.name).next_step == 1  # type: ignore[union-attr]


def test_a_checkpoint_that_is_whole_is_never_written_again(tmp_path: Path) -> None:
    training = make_training(tmp_path)
    training.run(2, 3, keep_states=1)
    before = (training.directory / "step_2" / "manifest.json").stat().st_ino
    for leftover in ("state",):
        (training.directory / "step_3" / leftover).rename(tmp_path / leftover)
    training.run(4, attempt=2)  # from scratch, past step 2
    assert attempts_by_step(training)[2] == [1, 2]
    assert (training.directory / "step_2" / "manifest.json").stat().st_ino == before


# ---------------------------------------------------------------- continuing another training


def child_of(parent: Training, root: Path, what: str, **train: Any) -> Training:
    """A training in the same store that continues step 4 of `parent`."""
    source = {"key": parent.directory.name, "step": 4, "what": what}
    params = parent.params().model_copy(update={})
    values = {**params.keyed_values(), "continue_from": source, **train}
    model = type(params).model_validate(values)
    directory = put_stage(parent.store, "train", model.keyed_values(), read_params(parent.directory).upstream)
    return Training(parent.store, directory, parent.placement)


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Training:
    training = make_training(tmp_path_factory.mktemp("parent"))
    training.run(4, 6)
    return training


def test_a_continued_state_goes_on_as_if_it_had_never_stopped(parent: Training, tmp_path: Path) -> None:
    child = child_of(parent, tmp_path, "state")
    assert child.directory != parent.directory
    child.run(6)
    assert same(parent, child, 6)
    assert list(attempts_by_step(child)) == [5, 6]
    lineage = CheckpointManifest.read(child.directory / "step_6" / "manifest.json").lineage
    assert lineage.parent is not None
    assert (lineage.parent["key"], lineage.parent["step"], lineage.parent["what"]) == (
        parent.directory.name,
        4,
        "state",
    )


def test_continued_weights_begin_a_schedule_of_their_own(parent: Training, tmp_path: Path) -> None:
    child = child_of(parent, tmp_path, "weights", lr=1e-9, weight_decay=0.0)
    child.run(1)
    torch.testing.assert_close(
        child.weights(1)["drafter/model:fc.weight"], parent.weights(4)["drafter/model:fc.weight"], rtol=0, atol=1e-7
    )
    assert attempts_by_step(child) == {1: [1]}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"target_layer_ids": [1, 2]}, "target_layer_ids"),
        ({"target_layer_ids": [3, 1]}, "target_layer_ids"),
        ({"target_layer_ids": [1, 2, 3]}, "target_layer_ids"),
        ({"intermediate_size": 32}, "intermediate_size"),
    ],
)
@pytest.mark.parametrize("what", ["weights", "state"])
def test_a_parent_with_other_taps_or_shapes_is_refused(
    parent: Training, tmp_path: Path, what: str, changed: dict[str, Any], named: str
) -> None:
    with pytest.raises(PermanentError, match=f"the parent's drafter has {named}"):
        child_of(parent, tmp_path, what, **changed).run(5)


def test_a_damaged_parent_is_refused(parent: Training, tmp_path: Path) -> None:
    moved = again(parent, tmp_path)
    moved.run(4)
    weights = moved.directory / "step_4" / "drafter" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(CorruptError, match=r"model\.safetensors"):
        child_of(moved, tmp_path, "weights").run(1)
