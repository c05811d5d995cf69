"""What will not fit is refused before the first step, with both numbers and the knob that helps."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from train_store import make_training

from dflash.base.errors import PermanentError
from dflash.model.drafter import DrafterConfig, parameter_count
from dflash.train import preflight, trainer
from dflash.train.forward import Shape
from dflash.train.preflight import batch_need, checkpoint_bytes, is_out_of_memory, memory_explained
from dflash.train.train_params import TrainParams
from dflash.train.trainer import Learner, drafter_config

torch.set_num_threads(1)
BIG = DrafterConfig(
    hidden_size=5120,
    num_hidden_layers=5,
    block_size=16,
    vocab_size=248320,
    intermediate_size=17408,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    num_target_layers=64,
    target_layer_ids=(1, 16, 31, 46, 61),
    mask_token_id=248070,
    layer_types=("full_attention",) * 5,
)


def params(tmp_path: Path, **changed: Any) -> TrainParams:
    return make_training(tmp_path).params(**changed)


def need(tmp_path: Path, shape: Shape, **changed: Any) -> preflight.Need:
    return batch_need(params(tmp_path, **changed), BIG, shape, target_width=17408)


def refuse_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("a step was taken")

    monkeypatch.setattr(Learner, "add", never)


def test_too_little_memory_is_refused_before_the_first_step_with_numbers_and_knob(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_steps(monkeypatch)
    training = make_training(tmp_path, max_anchors=20)
    copies = sum(checkpoint_bytes(training.params(), drafter_config(training.params())))
    monkeypatch.setattr(preflight, "host_memory_free", lambda: 1_000_000 + copies)
    with pytest.raises(PermanentError) as refused:
        training.run(1)
    said = refused.value.message()
    assert "the longest batch (6 samples of 15 tokens with 14 anchors) needs about" in said
    assert "1.00 MB are free" in said
    assert "train." in said


def test_the_border_is_the_estimate_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[preflight.Need] = []
    real = preflight.largest_need
    monkeypatch.setattr(
        preflight, "largest_need", lambda *given, **named: found.append(real(*given, **named)) or found[-1]
    )
    training = make_training(tmp_path)
    training.run(1)
    copies = sum(checkpoint_bytes(training.params(), drafter_config(training.params())))
    wanted = found[0].total + copies
    for free, refused in ((wanted - 1, True), (wanted, False)):
        monkeypatch.setattr(preflight, "host_memory_free", lambda free=free: free)
        other = make_training(tmp_path / str(free))
        if refused:
            with pytest.raises(PermanentError, match="longest batch"):
                other.run(1)
        else:
            other.run(1)


def test_too_little_disk_for_the_next_two_checkpoints_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = make_training(tmp_path)
    one = sum(checkpoint_bytes(training.params(), drafter_config(training.params())))
    refuse_steps(monkeypatch)
    monkeypatch.setattr(preflight, "disk_free", lambda _: 2 * one - 1)
    with pytest.raises(PermanentError, match=r"the next 2 checkpoints need .* are free.*train\.keep_states"):
        training.run(1, 2, 3)
    monkeypatch.undo()
    monkeypatch.setattr(preflight, "disk_free", lambda _: one)
    make_training(tmp_path / "last").run(1)  # one is left, and it fits


@pytest.mark.parametrize("changed", [{}, {"dtype": "bfloat16"}, {"optimizer": "muon"}, {"dtype": "float64"}])
def test_a_checkpoint_has_the_size_that_was_foretold(tmp_path: Path, changed: dict[str, Any]) -> None:
    training = make_training(tmp_path, intermediate_size=2048, **changed)
    training.run(1)
    foretold = checkpoint_bytes(training.params(), drafter_config(training.params()))
    for name, size in zip(("drafter", "state"), foretold, strict=True):
        files = (training.directory / "step_1" / name).iterdir()
        written = sum(path.stat().st_size for path in files)
        assert written <= size < written + preflight.SMALL_FILES // 10


def test_more_of_anything_needs_more_and_every_knob_lowers_its_part(tmp_path: Path) -> None:
    base = Shape(4, 4096, 512)
    whole = need(tmp_path, base, dtype="bfloat16", max_anchors=512)
    for other in (Shape(5, 4096, 512), Shape(4, 5000, 512), Shape(4, 4096, 600)):
        assert need(tmp_path, other, dtype="bfloat16").total > whole.total
    for knob, part in (
        ({"anchor_chunk": 64}, "blocks"),
        ({"anchor_chunk": 64}, "attention"),
        ({"activation_checkpointing": True}, "blocks"),
        ({"logit_chunk": 256}, "objective"),
    ):
        assert need(tmp_path, base, dtype="bfloat16", **knob).parts[part] < 0.7 * whole.parts[part]
    assert need(tmp_path, Shape(1, 4096, 512), dtype="bfloat16").parts["features"] == whole.parts["features"] / 4


def test_the_published_shape_needs_what_arithmetic_says(tmp_path: Path) -> None:
    assert math.isclose(parameter_count(BIG), 1.73e9, rel_tol=0.01)
    found = need(tmp_path, Shape(1, 8192, 512), dtype="bfloat16").parts
    assert found["gradients"] == parameter_count(BIG) * 6
    assert found["moments"] == parameter_count(BIG) * 8
    assert found["features"] == 3 * 8192 * 5 * 5120 * 2
    assert found["objective"] == 4 * 512 * 16 * 5120 * 2 + 4096 * 248320 * 14


def test_the_remedy_names_the_largest_part_that_a_knob_lowers(tmp_path: Path) -> None:
    assert "train.anchor_chunk" in need(tmp_path, Shape(1, 2048, 2000), dtype="bfloat16").remedy()
    assert "train.logit_chunk" in need(tmp_path, Shape(1, 64, 300), dtype="bfloat16", logit_chunk=99999).remedy()
    assert "train.micro_batch" in need(tmp_path, Shape(64, 8192, 1), dtype="bfloat16").remedy()
    assert need(tmp_path, Shape(1, 16, 1), dtype="float32", logit_chunk=1).remedy() == preflight.NO_KNOB


def test_an_estimate_is_above_what_is_kept_for_the_backward_pass_and_not_far_above(tmp_path: Path) -> None:
    values = {"max_anchors": 64, "intermediate_size": 256}
    training = make_training(tmp_path, **values)
    given = training.params()
    config = drafter_config(given)
    learner = Learner(given, trainer.load_checked_target(given, None, "cpu"), config, "cpu")
    shape = Shape(2, 128, 64)
    ids = torch.randint(0, 250, (2, 128))
    features = learner.target.features(ids, None, [1, 3])
    anchors = torch.arange(0, 128, 2)[:64].repeat(2, 1)
    seen: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    held = []  # storages must not be freed and counted once for several
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (held.append(t), keep(t))[1], lambda t: t):
        learner.drafter(features, ids, anchors, learner.target.embed)
    weights = {weight.untyped_storage().data_ptr() for weight in learner.drafter.parameters()}
    kept = sum(size for pointer, size in seen.items() if pointer not in weights)
    parts = batch_need(given, config, shape, target_width=16).parts
    estimate = parts["context"] + parts["blocks"] + parts["attention"]
    assert kept <= estimate <= 2.5 * kept


# ---------------------------------------------------------------- when it did not fit after all


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes"
        ),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        MemoryError(),
    ],
)
def test_running_out_of_memory_in_a_step_is_permanent_and_names_the_knobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(*_: Any) -> None:
        raise error

    monkeypatch.setattr(trainer, "objective", lambda *_, **__: full())
    with pytest.raises(PermanentError, match=r"step 1: out of memory.*train\.anchor_chunk.*train\.micro_batch"):
        make_training(tmp_path).run(1)


def test_other_errors_pass_unchanged() -> None:
    with pytest.raises(RuntimeError, match="shapes"), memory_explained("step 1"):
        raise RuntimeError("shapes do not fit")
    assert not is_out_of_memory(ValueError("out of memory"))


def test_a_real_allocation_that_cannot_be_had_is_recognised() -> None:
    with pytest.raises(PermanentError, match="out of memory"), memory_explained("step 1"):
        torch.empty(1 << 50)


def test_free_memory_and_disk_are_numbers_of_this_machine(tmp_path: Path) -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < preflight.host_memory_free() < total
    assert preflight.disk_free(tmp_path) > 0
    assert preflight.gigabytes(12_345_678_901) == "12.35 GB"
    assert preflight.gigabytes(2_500_000) == "2.50 MB"
    assert preflight.gigabytes(1500) == "1.5 kB"
