"""The sizes that Qwen3.6-27B's config names and those of its published drafter, for random models of them. No torch."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np

SHAPES_27B: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "seed": 0,
    "vocab_size": 248320,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 64,
    "full_attention_interval": 4,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rope_theta": 1e7,
    "max_position_embeddings": 262144,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
"""Every fourth layer has full attention, the others are Gated DeltaNet."""
TWO_LAYERS = {**SHAPES_27B, "num_hidden_layers": 2, "full_attention_interval": 2}
"""One linear layer and one of full attention."""
LENGTHS_27B = {"mean": 2202.0, "longest": 8192}
"""Tokens of a sample of the real job."""


SMALL: dict[str, Any] = {
    **SHAPES_27B,
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rope_theta": 1e4,
    "max_position_embeddings": 4096,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
"""The same kinds of layers, for a CPU."""
SMALL_LENGTHS = {"mean": 30.0, "longest": 96}


def drafter_27b(target_layers: int = 64, layers: int = 5) -> dict[str, Any]:
    """The published drafter as values of `train:`, or one of fewer layers for a target that is cut."""
    spread = target_layers - 4
    taps = [round(1 + i * spread / (layers - 1)) for i in range(layers)] if layers > 1 else [target_layers // 2]
    return {
        "block_size": 16,
        "num_draft_layers": layers,
        "target_layer_ids": taps,
        "layer_types": ["sliding_attention"] * (layers - 1) + ["full_attention"],
        "sliding_window": 2048,
        "head_dim": 128,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 17408,
    }


SMALL_DRAFTER: dict[str, Any] = {
    "block_size": 4,
    "num_draft_layers": 2,
    "target_layer_ids": [1, 2],
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 16,
    "head_dim": 16,  # the least that flex attention takes on a GPU
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}
"""Both kinds of layers, for a CPU."""


def lengths(count: int, mean: float, longest: int) -> np.ndarray:
    """Lengths of samples in tokens: log-normal, so that most are short and a few are cut at `longest`."""
    draw = np.random.default_rng(8)
    spread = 0.75
    found = draw.lognormal(np.log(mean * 1.04) - spread**2 / 2, spread, count)
    return np.clip(found, 16, longest).astype(int)


def fla_is_there() -> bool:
    """Whether flash-linear-attention can be imported; what is bound is another question, which the trainer answers."""
    return importlib.util.find_spec("fla") is not None
