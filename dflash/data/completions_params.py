"""Parameters of the `completions` stage: how the target answers the prompts of one source."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dflash.base.params import Params, derived, keyed, placement
from dflash.model.target_params import Dtype, Kernels, TargetIdentity


class CompletionsParams(Params):
    """`completions:`"""

    target: TargetIdentity = derived()
    engine: Literal["transformers"] = Field("transformers", description="in process, batched")
    max_new_tokens: int = keyed(256, ge=1, unit="tokens", description="a completion stops here with `length`")
    temperature: float = keyed(0.0, ge=0.0, description="0 is greedy; above it each sample draws from its own seed")
    seed: int = Field(0, ge=0, description="with the sample id, the seed of each sample")
    thinking: bool = Field(False, description="passed to the chat template as `enable_thinking`")
    dtype: Dtype = Field("float32", description="precision of the target")
    kernels: Kernels = Field("torch", description="linear attention kernels that must be bound")
    shard: int = derived(0)
    shards: int = derived(1)
    max_truncated_share: float = keyed(
        0.2,
        ge=0.0,
        le=1.0,
        unit="share",
        description="above this share of completions cut at the limit the stage stops",
    )
    batch_size: int = placement(64, ge=1, unit="prompts", description="prompts generated together")
