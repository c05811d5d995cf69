"""Our logits and losses are those of the published packages, full and sliding layers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from dflash.model.drafter import Drafter, DrafterConfig, draft_all
from dflash.train.objective import labels_and_weights, objective


@dataclass
class Golden:
    """One golden file, with a drafter that holds its weights."""

    drafter: Drafter
    tensors: dict[str, Tensor]
    recorded: dict[str, Any]

    def embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.tensors["embed"])

    def lm_head(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.tensors["lm_head"])


@pytest.fixture
def golden(golden_drafter: Path | None) -> Golden:
    assert golden_drafter is not None, "the golden folder holds no drafter_*.safetensors"
    with safe_open(golden_drafter, framework="pt") as stream:
        config = json.loads(stream.metadata()["config"])
        tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
    drafter = Drafter(DrafterConfig.from_dict(config), seed=None)
    prefix = "drafter."
    drafter.load_state_dict({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
    return Golden(drafter, tensors, json.loads(golden_drafter.with_suffix(".json").read_text()))


def test_the_recorded_config_is_the_one_in_the_metadata(golden: Golden) -> None:
    assert golden.drafter.config == DrafterConfig.from_dict(golden.recorded["config"])


@torch.no_grad()
@pytest.mark.parametrize("anchor_chunk", [None, 1, 3])
def test_all_anchors_in_one_forward_give_the_golden_logits(golden: Golden, anchor_chunk: int | None) -> None:
    t = golden.tensors
    hidden = golden.drafter(t["features"], t["input_ids"], t["anchors"][None], golden.embed, anchor_chunk=anchor_chunk)
    torch.testing.assert_close(golden.lm_head(hidden)[0], t["logits"], atol=1e-5, rtol=0)


def test_drafting_for_evaluation_gives_the_golden_logits_without_slot_zero(golden: Golden) -> None:
    t = golden.tensors
    anchors = t["anchors"].tolist()
    logits = draft_all(golden.drafter, t["features"][0], t["input_ids"][0], anchors, golden.embed, golden.lm_head)
    torch.testing.assert_close(logits, t["logits"][:, 1:], atol=1e-5, rtol=0)


@torch.no_grad()
def test_the_loss_over_all_valid_anchors_is_the_golden_one_for_every_gamma(golden: Golden) -> None:
    t = golden.tensors
    mask = t["loss_mask"]
    anchors = torch.nonzero((mask[0, :-1] > 0) & (mask[0, 1:] > 0)).T
    hidden = golden.drafter(t["features"], t["input_ids"], anchors, golden.embed)
    size = golden.drafter.config.block_size
    recorded = golden.recorded["objective_all_anchors"]
    assert recorded, "the golden file records no loss"
    for gamma, expected in recorded.items():
        decay = None if gamma == "None" else float(gamma)
        labels, weights = labels_and_weights(t["input_ids"], mask, anchors, size, gamma=decay)
        sums = objective(hidden, labels, weights, golden.lm_head, logit_chunk=5)
        assert float(sums.loss_sum / sums.weight_sum) == pytest.approx(expected["loss"], rel=1e-5), f"gamma {gamma}"
        accuracy = float(sums.correct.sum() / sums.counts.sum())
        assert accuracy == pytest.approx(expected["accuracy"], rel=1e-5), f"gamma {gamma}"
