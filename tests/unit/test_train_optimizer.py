"""The optimizer in one pass does what the plain one does, and its state moves between both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from train_store import DRAFTER, identity

from dflash.train.optimizer import Optimizer
from dflash.train.train_params import TrainParams

torch.set_num_threads(1)


def params(**changes: Any) -> TrainParams:
    return TrainParams(target=identity(), **{**DRAFTER, "weight_decay": 0.1, **changes})


def updated(steps: range, masters: dict[str, torch.Tensor], optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Masters after updates with gradients that depend on the step alone."""
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        for master in masters.values():
            master.grad = torch.empty_like(master).normal_(generator=draw)
        optimizer.step(1e-2 / (step + 1))
    return {name: master.clone() for name, master in masters.items()}


def fresh() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(99)
    shapes: dict[str, tuple[int, ...]] = {"matrix": (24, 16), "norm": (16,)}
    return {name: torch.empty(shape).normal_(generator=draw) for name, shape in shapes.items()}


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_one_pass_gives_the_weights_of_the_plain_loop(kind: str) -> None:
    plain, fused = fresh(), fresh()
    first = updated(range(6), plain, Optimizer(plain, params(optimizer=kind)))
    second = updated(range(6), fused, Optimizer(fused, params(optimizer=kind), fused=True))
    for name, weight in first.items():
        torch.testing.assert_close(second[name], weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("before", "after"), [(True, True), (True, False), (False, True)])
def test_a_state_goes_on_in_either(before: bool, after: bool) -> None:
    whole = fresh()
    expected = updated(range(6), whole, Optimizer(whole, params(), fused=before))
    masters = fresh()
    first = Optimizer(masters, params(), fused=before)
    updated(range(3), masters, first)
    second = Optimizer(masters, params(), fused=after)
    second.load(first.state())
    found = updated(range(3, 6), masters, second)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6)
    assert float(second.state()["norm.step"]) == 6
