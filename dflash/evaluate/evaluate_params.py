"""Parameters of the `evaluate` stage: how a checkpoint is judged."""

from __future__ import annotations

from pydantic import Field, field_validator

from dflash.base.params import Params, derived, keyed, placement
from dflash.model.target_params import Dtype, Kernels, TargetIdentity


def _reference_kernels() -> list[Kernels]:
    return ["torch"]


class EvaluateParams(Params):
    """`evaluate:`"""

    target: TargetIdentity = derived()
    taps: list[int] = derived(default_factory=list, description="layer ids the checkpoint must have been trained on")
    block_size: int = derived(description="block size the checkpoint must have")
    kernels: list[Kernels] = Field(
        default_factory=_reference_kernels, min_length=1, description="target kernels to judge under, one after another"
    )
    budgets: list[int] = keyed(
        default_factory=lambda: [16], unit="nodes", description="node budgets of the draft trees, the root not counted"
    )
    length_edges: list[int] = keyed(
        default_factory=lambda: [128, 512, 2048], unit="tokens", description="edges of the context length buckets"
    )
    ngram: int = keyed(4, ge=2, unit="tokens", description="order of the count n-gram and prompt lookup baselines")
    bootstrap: int = keyed(1000, ge=10, unit="resamples", description="resamples of requests for the intervals")
    confidence: float = keyed(0.95, gt=0.0, lt=1.0, description="coverage of the intervals")
    seed: int = Field(0, ge=0, description="seed of the bootstrap")
    dtype: Dtype = Field("float32", description="compute precision of the drafter")
    anchor_chunk: int = placement(256, ge=1, unit="anchors", description="anchors drafted together")

    @field_validator("budgets", "length_edges")
    @classmethod
    def _positive(cls, value: list[int]) -> list[int]:
        if any(item < 1 for item in value):
            raise ValueError("must be positive")
        if len(set(value)) != len(value):
            raise ValueError("must be distinct")
        return sorted(value)

    @field_validator("kernels")
    @classmethod
    def _distinct(cls, value: list[Kernels]) -> list[Kernels]:
        if len(set(value)) != len(value):
            raise ValueError("must be distinct")
        return value
