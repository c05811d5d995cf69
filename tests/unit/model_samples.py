"""Tiny targets and drafters that several tests share: milliseconds to build, every kind of layer present."""

from __future__ import annotations

from typing import Any

from dflash.model.drafter import DrafterConfig

DENSE: dict[str, Any] = {
    "model_type": "qwen3",
    "seed": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}

HYBRID: dict[str, Any] = {
    **DENSE,
    "model_type": "qwen3_5_text",
    "full_attention_interval": 3,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    },
}

SPECS = {"dense": DENSE, "hybrid": HYBRID}

FULL = ("full_attention", "full_attention")
SLIDING = ("sliding_attention", "full_attention")


def drafter_config(**changes: Any) -> DrafterConfig:
    """A two-layer drafter for the targets above, with blocks of 4."""
    fields: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "block_size": 4,
        "vocab_size": 260,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_target_layers": 6,
        "target_layer_ids": (1, 3),
        "mask_token_id": 259,
        "layer_types": FULL,
    }
    return DrafterConfig(**{**fields, **changes})
