"""The sizes that Qwen3.6-27B's config names, for random targets of them. No torch."""

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


def fla_is_there() -> bool:
    """Whether flash-linear-attention can be imported; what is bound is another question, which the trainer answers."""
    return importlib.util.find_spec("fla") is not None
