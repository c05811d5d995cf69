"""The sizes that Qwen3.6-27B's config names and those of its published drafter, for random models of them. No torch."""

from __future__ import annotations

import importlib.util
from typing import Any

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


def fla_is_there() -> bool:
    """Whether flash-linear-attention can be imported; what is bound is another question, which the trainer answers."""
    return importlib.util.find_spec("fla") is not None
