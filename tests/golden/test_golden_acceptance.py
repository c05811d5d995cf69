"""Our offline walk accepts what z-lab's client accepted, verification by verification, stop and length limit included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflash.evaluate.acceptance import Continuation, draft_continuation
from dflash.evaluate.decode import Decoder
from dflash.model.drafter import Drafter, DrafterConfig
from dflash.model.target import Target, target_from_state


class Golden:
    """Target, drafter and recorded decodes of one golden file."""

    def __init__(self, folder: Path) -> None:
        recorded = json.loads((folder / "acceptance.json").read_text())
        tensors = load_file(folder / "acceptance.safetensors")
        part = {
            name: {key.removeprefix(name): value for key, value in tensors.items() if key.startswith(name)}
            for name in ("target.", "drafter.")
        }
        self.cases: list[dict[str, Any]] = recorded["cases"]
        self.target: Target = target_from_state(recorded["config"]["target"], part["target."])
        self.drafter = Drafter(DrafterConfig(**recorded["config"]["drafter"]), seed=None)
        self.drafter.load_state_dict(part["drafter."])

    def output(self, case: dict[str, Any]) -> list[int]:
        """The target's own greedy continuation."""
        ((output, _),) = self.target.generate(
            [case["prompt"]], case["max_new_tokens"], stop_ids=case["stop_token_ids"] or []
        )
        return output


@pytest.fixture(scope="module")
def golden(golden_dir: Path) -> Golden:
    return Golden(golden_dir)


def test_the_targets_greedy_continuations_are_the_golden_tokens(golden: Golden) -> None:
    for case in golden.cases:
        assert case["prompt"] + golden.output(case) == case["output"]


@torch.no_grad()
def test_the_offline_walk_has_the_golden_acceptance_lengths(golden: Golden) -> None:
    ends = set()
    for case in golden.cases:
        output = case["output"][len(case["prompt"]) :]
        continuation = Continuation(case["prompt"], output, case["max_new_tokens"])
        features = golden.target.features(torch.tensor([case["output"]]), None, golden.drafter.config.target_layer_ids)
        target = golden.target
        drafts = draft_continuation(golden.drafter, continuation, features[0], target.embed, target.lm_head, top=4)
        assert drafts.walk_chain().lengths == case["acceptance_lengths"]
        ends.add(len(output) == case["max_new_tokens"])
    assert ends == {True, False}, "the golden cases no longer cover both ways to end"


def test_a_real_decode_has_the_golden_tokens_and_acceptance_lengths(golden: Golden) -> None:
    for case in golden.cases:
        decoder = Decoder.of(golden.target, golden.drafter, stop_ids=case["stop_token_ids"] or [])
        made = decoder.chain(case["prompt"], case["max_new_tokens"])
        assert case["prompt"] + made.output == case["output"]
        assert made.lengths == case["acceptance_lengths"]
