"""Tiny targets, half-trained drafters and a slow honest decode, shared by the tests of evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from dflash.evaluate.acceptance import Continuation, matched_prefix
from dflash.evaluate.tree import build_tree, longest_accepted
from dflash.model.drafter import Drafter, DrafterConfig
from dflash.model.target import Target, load_target
from dflash.model.target_params import RandomTarget, TargetIdentity

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
# These seeds write outputs that end at the end token and others that end at the limit.
DENSE = RandomTarget(seed=8, num_hidden_layers=6, max_position_embeddings=256, **SIZES)
HYBRID = RandomTarget(
    model_type="qwen3_5_text",
    seed=1,
    num_hidden_layers=4,
    linear_num_value_heads=4,
    max_position_embeddings=256,
    **SIZES,
)
SPECS: dict[str, dict[str, Any]] = {"dense": DENSE.fields_of_type(), "hybrid": HYBRID.fields_of_type()}
TAPS = (1, 2)
PROMPTS = [b"one two", b"three", b"a longer prompt of some words"]


def identity(random: RandomTarget) -> TargetIdentity:
    """How the plan names a random target."""
    return TargetIdentity(
        digest=None,
        revision=None,
        random=random,
        num_layers=random.num_hidden_layers,
        hidden_size=random.hidden_size,
        vocab_size=random.vocab_size,
        hybrid=random.model_type != "qwen3",
        max_position_embeddings=random.max_position_embeddings,
        eos_token_ids=[257],
        pad_token_id=256,
        mask_token_id=259,
    )


@cache
def target(kind: str) -> Target:
    """A tiny random target, made once."""
    return load_target(SPECS[kind])


def drafter_config(block_size: int, layers: int) -> DrafterConfig:
    """A one-layer drafter for the targets above."""
    return DrafterConfig(
        hidden_size=32,
        num_hidden_layers=1,
        block_size=block_size,
        vocab_size=260,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_target_layers=layers,
        target_layer_ids=TAPS,
        mask_token_id=259,
        layer_types=("full_attention",),
    )


@dataclass(frozen=True)
class Example:
    """A target, a drafter for it, and a continuation with its features."""

    target: Target
    drafter: Drafter
    continuation: Continuation
    features: torch.Tensor


def continue_prompt(model: Target, prompt: Sequence[int], limit: int) -> tuple[Continuation, torch.Tensor]:
    """The greedy continuation of a prompt and the features of both."""
    ((output, _),) = model.generate([prompt], limit)
    features = model.features(torch.tensor([[*prompt, *output]]), None, TAPS)[0]
    return Continuation(list(prompt), output, limit), features


def train(drafter: Drafter, model: Target, data: list[tuple[Continuation, torch.Tensor]], steps: int) -> None:
    """Fits a drafter to continuations: cross-entropy over all anchors and slots."""
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    slots = torch.arange(1, drafter.config.block_size)
    batches = []
    for continuation, features in data:
        ids = torch.tensor([continuation.prompt + continuation.output])
        anchors = torch.arange(len(continuation.prompt), ids.shape[1] - 1)
        places = anchors[:, None] + slots
        labels = torch.where(places < ids.shape[1], ids[0, places.clamp(max=ids.shape[1] - 1)], -100)
        batches.append((ids, anchors[None], labels, features[None].clone()))
    for step in range(steps):
        ids, anchors, labels, features = batches[step % len(batches)]
        hidden = drafter(features, ids, anchors, model.embed)[0, :, 1:]
        loss = F.cross_entropy(model.lm_head(hidden).flatten(0, 1), labels.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


@cache
def half_trained(kind: str, steps: int = 60, block_size: int = 4) -> list[Example]:
    """A drafter that is right now and then, with continuations that it saw and one that it did not."""
    model = target(kind)
    drafter = Drafter(drafter_config(block_size, model.facts.num_layers), seed=0)
    data = [continue_prompt(model, list(prompt), 30 + 3 * number) for number, prompt in enumerate(PROMPTS)]
    train(drafter, model, data[:2], steps)
    return [Example(model, drafter, continuation, features) for continuation, features in data]


@torch.no_grad()
def decode(example: Example, budget: int | None = None) -> tuple[list[int], list[int]]:
    """A real greedy speculative decode, as slow and plain as can be: every verification runs target and drafter afresh
    on the committed text alone.

    Args:
        budget: nodes of a tree to verify; None verifies a chain.

    Returns:
        output, and tokens committed by each verification, clipped at the end token and at the limit.
    """
    model, drafter, prompt = example.target, example.drafter, example.continuation.prompt
    most, ends = len(prompt) + example.continuation.limit, set(model.facts.eos_ids)

    def greedy(text: list[int]) -> list[int]:
        return model.model(torch.tensor([text])).logits[0].argmax(-1).tolist()

    text = [*prompt, greedy(prompt)[-1]]
    lengths: list[int] = []
    while len(text) < most and text[-1] not in ends:
        anchor = len(text) - 1
        size = min(drafter.config.block_size, most - anchor)
        features = torch.zeros(1, len(text), len(TAPS) * 32)
        features[:, :anchor] = model.features(torch.tensor([text[:anchor]]), None, TAPS)
        hidden = drafter(features, torch.tensor([text]), torch.tensor([[anchor]]), model.embed, block_size=size)
        logits = model.lm_head(hidden[0, 0, 1:])
        if budget is None:
            drafted = logits.argmax(-1).tolist()
            answers = greedy(text + drafted)[anchor:]
            matched = matched_prefix(drafted, answers)
        else:
            tree = build_tree(logits.log_softmax(-1).double().numpy(), budget)
            answers = []
            for _ in range(size):
                answers.append(greedy(text + answers)[-1])
            matched = longest_accepted(tree, answers)
        committed = answers[: min(matched + 1, most - len(text))]
        stop = next((place for place, token in enumerate(committed) if token in ends), None)
        committed = committed if stop is None else committed[: stop + 1]
        text += committed
        lengths.append(len(committed))
    return text[len(prompt) :], lengths
