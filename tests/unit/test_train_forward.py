"""How a batch goes through the drafter is placement: in parts, computed again or compiled, it teaches the same."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
from pydantic import ValidationError
from train_store import Training, again, make_samples, make_training

from dflash.base.errors import PermanentError
from dflash.base.records import last_attempts
from dflash.base.store import load_inputs, read_params
from dflash.data.batches import Batch, BatchPlan, load_train_samples
from dflash.data.buckets_params import BucketsParams
from dflash.model import drafter
from dflash.model.drafter import Drafter
from dflash.train import forward, trainer
from dflash.train.forward import Shape, aligned, bucket_shapes, parts, require_compiler
from dflash.train.trainer import drafter_config, load_checked_target

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """Four steps in float64, a batch at a time."""
    training = make_training(tmp_path_factory.mktemp("plain"), dtype="float64", weight_decay=0.1)
    training.run(4)
    return training


def largest_difference(ours: Training, theirs: Training, step: int) -> float:
    """Of the weights and moments of a step, relative to the largest number of each tensor."""
    mine, others = ours.weights(step), theirs.weights(step)
    assert mine.keys() == others.keys()
    return max(
        float((mine[name] - others[name]).abs().max() / mine[name].abs().max().clamp(min=1e-30))
        for name in mine
        if not name.endswith("generator.cpu")
    )


def metrics(training: Training) -> list[dict[str, Any]]:
    lines = last_attempts(training.directory / "metrics.jsonl")
    return [
        line.model_dump(include={"anchors", "tokens", "batch_ids", "buckets", "accuracy_by_slot"}) for line in lines
    ]


def test_parts_are_the_batch_whatever_their_size() -> None:
    batch = Batch("id", 3, 1, 2, np.arange(7), np.arange(10, 17))
    for size, sizes in ((None, [7]), (1, [1] * 7), (3, [3, 3, 1]), (7, [7]), (99, [7])):
        cut = list(parts([batch], size))
        assert [len(part.rows) for part in cut] == sizes
        assert np.concatenate([part.rows for part in cut]).tolist() == list(range(7))
        assert np.concatenate([part.lengths for part in cut]).tolist() == list(range(10, 17))
        assert {(part.batch_id, part.epoch, part.index, part.bucket) for part in cut} == {("id", 3, 1, 2)}


@pytest.mark.parametrize("size", [1, 3])
def test_a_batch_in_parts_teaches_the_same(plain: Training, tmp_path: Path, size: int) -> None:
    other = again(plain, tmp_path)
    other.run(4, micro_batch=size)
    assert metrics(other) == metrics(plain)
    assert largest_difference(plain, other, 4) < 1e-10


@pytest.mark.parametrize("placed", [{}, {"anchor_chunk": 2}])
def test_activations_computed_again_are_the_same_bits(plain: Training, tmp_path: Path, placed: dict[str, Any]) -> None:
    first, second = again(plain, tmp_path / "kept"), again(plain, tmp_path / "again")
    first.run(2, **placed)
    second.run(2, activation_checkpointing=True, **placed)
    ours, theirs = first.weights(2), second.weights(2)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_only_one_layer_is_kept_when_activations_are_computed_again(plain: Training) -> None:
    params = plain.params()
    model = Drafter(drafter_config(params)).double()
    target = load_checked_target(params, None, "cpu")
    ids = torch.arange(60, 84)[None]
    features = target.features(ids, None, [1, 3])
    kept = {}
    for again_ in (False, True):
        saved: list[int] = []

        def note(tensor: torch.Tensor, saved: list[int] = saved) -> torch.Tensor:
            saved.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            model(features, ids, torch.tensor([[3, 9, 15]]), target.embed, recompute_layers=again_)
        kept[again_] = sum(saved)
    assert kept[True] < 0.6 * kept[False]


# ---------------------------------------------------------------- compiled


@pytest.fixture
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Traces and guards as ever and generates no code; counts graphs."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(forward, "BACKEND", "eager")
    yield lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()


def test_every_bucket_has_one_shape_that_holds_all_its_batches(plain: Training) -> None:
    inputs = load_inputs(read_params(plain.directory), plain.store)
    samples = load_train_samples(inputs.one("dataset").directory)
    batching = BucketsParams.model_validate(inputs.one("buckets").params.params)
    plan = BatchPlan(samples.lengths, samples.ids, batching, "0" * 12)
    for params in (plain.params(), plain.params(micro_batch=2)):
        shapes = bucket_shapes(plan, params)
        for number in range(2 * plan.batches_per_epoch):
            for part in parts([plan.batch(number)], params.micro_batch):
                shape = shapes[part.bucket]
                assert len(part.rows) <= shape.rows <= (params.micro_batch or 99)
                assert part.lengths.max() <= shape.length
        assert all(shape.anchors == 5 for shape in shapes.values())


def test_on_a_gpu_a_mask_has_rows_of_whole_vectors() -> None:
    assert aligned(Shape(3, 5327, 61), 16) == Shape(3, 5376, 64)
    assert aligned(Shape(3, 5376, 64), 16) == Shape(3, 5376, 64)
    found = aligned(Shape(1, 1, 1), 7)
    assert (found.length, found.anchors * 7 % 64) == (64, 0)


@pytest.mark.parametrize("placed", [{}, {"anchor_chunk": 4, "activation_checkpointing": True, "micro_batch": 3}])
def test_a_compiled_training_makes_one_graph_a_bucket_and_teaches_the_same(
    plain: Training, tmp_path: Path, quick_compiler: Any, placed: dict[str, Any]
) -> None:
    other = again(plain, tmp_path)
    other.run(4, compile=True, **placed)
    assert metrics(other) == metrics(plain)
    assert quick_compiler() == 2, "two buckets"
    assert largest_difference(plain, other, 4) < 1e-10


def test_a_shape_beyond_those_of_the_buckets_is_an_error(
    plain: Training, tmp_path: Path, quick_compiler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = forward.DraftForward.__call__
    extra = iter(range(9))

    def call(self: Any, *arguments: Any, bucket: int, **named: Any) -> Any:
        known = dict(self._shapes)
        self._shapes[bucket] = Shape(known[bucket].rows, known[bucket].length + next(extra), known[bucket].anchors)
        try:
            return real(self, *arguments, bucket=bucket, **named)
        finally:
            self._shapes.clear()
            self._shapes.update(known)

    monkeypatch.setattr(forward.DraftForward, "__call__", call)
    other = again(plain, tmp_path)
    with pytest.raises(PermanentError, match=r"cannot be compiled .* for 2 buckets.*train\.compile to false"):
        other.run(4, compile=True)


def test_a_drafter_that_cannot_be_compiled_whole_is_an_error_and_no_fallback(
    plain: Training, tmp_path: Path, quick_compiler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = drafter.rotary_table

    def breaks(*arguments: Any) -> Any:
        torch._dynamo.graph_break()
        return real(*arguments)

    monkeypatch.setattr(drafter, "rotary_table", breaks)
    other = again(plain, tmp_path)
    with pytest.raises(PermanentError, match="cannot be compiled"):
        other.run(1, compile=True)


def test_what_cannot_be_compiled_whole_is_refused_before_anything_is_loaded(plain: Training) -> None:
    flex = {"compile": True, "attention": "flex"}
    assert plain.params(**flex).anchor_chunk is None
    with pytest.raises(ValidationError, match="set fuse instead of compile"):
        plain.params(**flex, anchor_chunk=2)


def test_a_batch_without_an_anchor_has_the_shape_of_the_others(tmp_path: Path, quick_compiler: Any) -> None:
    rows = make_samples(8, prompt_only=range(1, 8))
    training = make_training(tmp_path, rows=rows, batching={"max_batch_size": 1, "batches_per_step": 1, "quantiles": 1})
    training.run(8, compile=True)
    assert quick_compiler() == 1


def test_fused_kernels_teach_the_same_at_any_length(
    plain: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced as the compiler would trace them (without its code): batches of every length, and few graphs."""
    monkeypatch.setattr(forward, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    other = again(plain, tmp_path)
    other.run(4, fuse=True)
    assert metrics(other) == metrics(plain)
    assert largest_difference(plain, other, 4) < 1e-10
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert 4 <= graphs <= 12, "norms of two ranks, rotary positions, SwiGLU, the loss; not one a length"


@pytest.mark.parametrize(
    ("placed", "device", "told"),
    [
        (
            {"fuse": True},
            "cpu",
            r"train\.fuse: `train\.fuse: true` needs a C\+\+ compiler, .*\(g\+\+\)\. Install one \(Debian: g\+\+\)",
        ),
        ({"fuse": True, "compile": True}, "cpu", "or set train.fuse to false and train.compile to false; the weights"),
        (
            {"attention": "flex"},
            "cuda:0",
            r"`train\.attention: flex` needs a C compiler.*, or set train\.attention to sdpa;",
        ),
    ],
)
def test_without_a_compiler_what_must_be_compiled_is_refused_before_anything_is_loaded(
    plain: Training, monkeypatch: pytest.MonkeyPatch, placed: dict[str, Any], device: str, told: str
) -> None:
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(PermanentError, match=told):
        require_compiler(plain.params(**placed), device)
    require_compiler(plain.params(), device)
    require_compiler(plain.params(attention="flex"), "cpu")
    monkeypatch.setenv("CC" if device.startswith("cuda") else "CXX", sys.executable)
    require_compiler(plain.params(**placed), device)


def test_a_fused_training_without_a_compiler_ends_for_good_before_a_target_is_loaded(
    plain: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(trainer, "load_checked_target", lambda *_: pytest.fail("a target was loaded"))
    with pytest.raises(PermanentError, match=r"needs a C\+\+ compiler, and there is none here \(no-such-compiler\)"):
        again(plain, tmp_path).run(1, fuse=True)


def test_a_kernel_that_cannot_be_compiled_is_no_matter_of_another_attempt() -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no room")

    drafter.fused.cache_clear()
    torch._dynamo.reset()
    with pytest.raises(
        PermanentError, match=r"train\.fuse: `gated` cannot be compiled: .*no room.* Set train\.fuse to false"
    ):
        drafter.fused(drafter.gated, broken)(torch.ones(2, 3), torch.ones(2, 3))
