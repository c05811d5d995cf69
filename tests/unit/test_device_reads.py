"""The host runs ahead: a training step never waits for the device to learn a number, and nothing of the vocabulary's size
lives longer than its chunk.

The device here is torch's `meta`, which has shapes and no numbers: whoever asks it for one gets an error. So a step that gets
through has read nothing, at the full size of the job too."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from model_samples import SPECS
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from train_store import identity

from dflash.data.batches import Batch
from dflash.model import target as target_module
from dflash.model.target import Target, load_target
from dflash.model.target_params import RandomTarget
from dflash.model.transfer import on_device
from dflash.plan.code import source_root
from dflash.train.prepare import drafter_config
from dflash.train.train_params import TrainParams
from dflash.train.trainer import Learner, StepSums

sys.path.insert(0, str(source_root() / "tests/bench/gpu"))
from shapes import SHAPES_27B, SMALL, SMALL_DRAFTER, drafter_27b

torch.set_num_threads(1)


WAITED: list[tuple[int, ...]] = []
"""Shapes that were copied to the device as a GPU would make the host wait for it, since models were placed."""


@pytest.fixture(autouse=True)
def blocking_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test here leaves one."""
    WAITED.clear()
    whole = Tensor.to

    def to(tensor: Tensor, *where: Any, **how: Any) -> Tensor:
        moved = whole(tensor, *where, **how)
        if (tensor.device.type, moved.device.type) == ("cpu", "meta") and not how.get("non_blocking"):
            WAITED.append(tuple(tensor.shape))
        return moved

    monkeypatch.setattr(Tensor, "to", to)
    yield
    assert WAITED == []


class Samples:
    """Texts of given lengths, as `collate` reads them."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = np.asarray(lengths)
        self.prompt_lengths = np.full(len(lengths), 4)
        self.ids = [f"{row:064x}" for row in range(len(lengths))]

    def tokens(self, row: int) -> np.ndarray:
        return np.arange(self.lengths[row]) % 200

    def has_spans(self, row: int) -> bool:
        return False


class MetaTarget:
    """Ends and features of a target without a number."""

    def __init__(self, shape: RandomTarget, width: int, dtype: torch.dtype) -> None:
        self.facts = dataclasses.make_dataclass("Facts", ["pad_id"])(0)
        with torch.device("meta"):
            self.embed = nn.Embedding(shape.vocab_size, shape.hidden_size, dtype=dtype).requires_grad_(False)
            self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False, dtype=dtype).requires_grad_(False)
        self.width, self.dtype = width, dtype

    def features(self, input_ids: Tensor, attention_mask: Tensor, taps: Any) -> Tensor:
        assert attention_mask.device.type == "cpu", "the target looks at the mask, and must not wait for the device"
        return torch.empty(*input_ids.shape, self.width, device="meta", dtype=self.dtype)


def learner(shape: dict[str, Any], drafter: dict[str, Any], monkeypatch: pytest.MonkeyPatch, **placed: Any) -> Learner:
    target = RandomTarget(**shape)
    params = TrainParams(target=identity(target), mask_token_id=shape["vocab_size"] - 1, **{**drafter, **placed})
    config = drafter_config(params)
    monkeypatch.setattr("dflash.model.drafter.Drafter.draw_weights", lambda self, seed, std=0.02: None)
    dtype = torch.bfloat16 if params.dtype == "bfloat16" else torch.float32
    with torch.device("meta"):
        made = Learner(params, MetaTarget(target, config.feature_size, dtype), config, "meta")  # type: ignore[arg-type]
    WAITED.clear()
    return made


def batch_of(samples: Samples) -> Batch:
    rows = np.arange(len(samples.lengths))
    return Batch("b0", 0, 0, 0, rows, samples.lengths[rows])


class Largest(TorchDispatchMode):
    """The largest tensor that appears, and how many products of the given shape are made."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.bytes, self.found, self.shape, self.seen = 0, (), shape, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                size = tensor.numel() * tensor.element_size()
                if size > self.bytes:
                    self.bytes, self.found = size, tuple(tensor.shape)
                self.seen += "mm" in func.__name__ and tuple(tensor.shape) in (self.shape, self.shape[::-1])
        return made


@pytest.mark.parametrize(
    "placed", [{}, {"anchor_chunk": 4}, {"activation_checkpointing": True}, {"logit_chunk": 7}, {"attention": "flex"}]
)
def test_a_step_reads_nothing_from_the_device(placed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made = learner(SMALL, SMALL_DRAFTER, monkeypatch, max_anchors=12, **placed)
    samples, sums = Samples([30, 17, 24]), StepSums()
    for _ in range(2):
        made.learn(batch_of(samples), samples, sums)  # type: ignore[arg-type]
    assert len(sums.unread) == 2
    assert sums.anchors == 72
    assert sums.weight > 0, "what depends on tokens and anchors alone is known on the host"
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        sums.read()


def test_what_is_read_is_one_tensor_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading is `tolist` of one tensor, however many batches: counted where it happens."""
    target = RandomTarget(hidden_size=16, intermediate_size=16, num_hidden_layers=5, head_dim=8)
    params = TrainParams(
        target=identity(target), block_size=4, num_draft_layers=1, target_layer_ids=[1], head_dim=8, max_anchors=5
    )
    made = Learner(params, load_target(target.fields_of_type()), drafter_config(params), "cpu")
    samples, sums = Samples([30, 17, 24]), StepSums()
    for _ in range(3):
        made.learn(batch_of(samples), samples, sums)  # type: ignore[arg-type]
    read = []
    whole = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda tensor: read.append(tuple(tensor.shape)) or whole(tensor))
    assert sums.loss == 0.0
    sums.read()
    slots, faults = 4, 3 * 3
    assert read == [(3 * (1 + slots + faults),)]
    assert sums.loss > 0
    sums.read()
    assert len(read) == 1, "what was read is not read again"


def test_at_full_size_nothing_is_larger_than_a_chunk_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    made = learner(
        SHAPES_27B, drafter_27b(), monkeypatch, max_anchors=512, dtype="bfloat16", anchor_chunk=128, logit_chunk=4096
    )
    samples, sums = Samples([8192]), StepSums()
    with Largest((248320, 5120)) as seen:
        made.learn(batch_of(samples), samples, sums)  # type: ignore[arg-type]
    assert seen.bytes == 4096 * 248320 * 4, f"{seen.found}: logits of a chunk, in float32"
    assert seen.seen == 0, "a gradient of the frozen head"
    assert made.target.lm_head.weight.grad is None
    assert all(master.grad is not None for master in made.masters.values())


def on_meta(kind: str) -> Target:
    target = load_target(SPECS[kind])
    target.model.to("meta")
    target.device = torch.device("meta")
    WAITED.clear()
    return target


@pytest.mark.parametrize(("kind", "packed"), [("dense", False), ("hybrid", False), ("dense", True)])
def test_features_read_nothing_when_the_mask_is_on_the_host(
    kind: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = on_meta(kind)
    target.kernels = dataclasses.replace(target.kernels, packed=packed)
    monkeypatch.setattr(target_module, "refuse_packing", lambda bound: None)
    mask = torch.ones(3, 12, dtype=torch.long)
    if packed:
        mask[1, 7:] = mask[2, 5:] = 0
    features = target.features(torch.ones(3, 12, dtype=torch.long, device="meta"), mask, [1, 3])
    assert features.shape == (3, 12, 64)


def test_padded_features_take_a_mask_from_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mask on the CPU, tokens on the device: whatever meets must have been brought together."""
    target = on_meta("dense")
    given = []
    trunk = target._trunk(4)
    monkeypatch.setattr(target, "_trunk", lambda count: trunk)
    whole = trunk.forward

    def forward(*, attention_mask: Tensor | None, **others: Any) -> Any:
        given.append(attention_mask)
        no_mask = dict.fromkeys(target.facts.layer_types)  # transformers would look for holes in a mask, on the device
        return whole(attention_mask=no_mask, **others)

    monkeypatch.setattr(trunk, "forward", forward)
    mask = torch.ones(3, 12, dtype=torch.long)
    mask[1, 7:] = 0
    features = target.features(torch.ones(3, 12, dtype=torch.long, device="meta"), mask, [1, 3])
    assert features.device.type == given[0].device.type == "meta"


def test_a_copy_to_the_host_is_waited_for() -> None:
    """The host would read memory into which nothing has been written yet."""
    asked: list[tuple[torch.device, dict[str, Any]]] = []

    class OnGpu:
        device = torch.device("cuda:0")

        def to(self, device: torch.device, **how: Any) -> OnGpu:
            asked.append((device, how))
            return self

    on_device(OnGpu(), torch.device("cpu"))  # type: ignore[arg-type]
    assert [(device.type, how.get("non_blocking", False)) for device, how in asked] == [("cpu", False)]
