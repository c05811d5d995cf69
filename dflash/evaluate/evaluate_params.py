"""Parameters of the `evaluate` stage: how a checkpoint is judged."""

from __future__ import annotations

from pydantic import Field, field_validator, model_validator

from dflash.base.params import Params, derived, keyed, placement
from dflash.model.target_params import SPREAD, Dtype, Kernels, TargetDevices, TargetIdentity


def _reference_kernels() -> list[Kernels]:
    return ["torch"]


class Online(Params):
    """`evaluate.online:` real decodes beside the offline numbers."""

    prompts: int = keyed(4, ge=1, unit="prompts", description="first prompts of each set that are decoded for real")
    every_checkpoint: bool = Field(
        False, description="at every checkpoint; otherwise at the last one of the schedule alone"
    )
    budget: int | None = keyed(
        None, ge=1, unit="nodes", description="node budget of trees to decode with, beside chains"
    )
    temperature: float = keyed(
        0.0, ge=0.0, description="0 for greedy; otherwise chains are verified by rejection sampling"
    )

    @model_validator(mode="after")
    def _trees_are_greedy(self) -> Online:
        if self.temperature > 0 and self.budget is not None:
            raise ValueError("trees are decoded greedily alone; leave `budget` out, or set `temperature: 0`")
        return self


class OtherDrafter(Params):
    """One entry of `evaluate.drafters:`; a drafter trained elsewhere, judged beside the run's own at every checkpoint."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", description="name of the drafter in every table")
    path: str | None = placement(None, description="its directory: ours, z-lab's, SpecForge's or speculators'")
    files: dict[str, str] = derived(default_factory=dict, description="sha256 of each of its files")

    @model_validator(mode="after")
    def _somewhere(self) -> OtherDrafter:
        # A stored result names the files alone; where they lie on a host is no part of it.
        if self.path is None and not self.files:
            raise ValueError(f"drafter {self.name!r} has no `path`")
        return self

    @field_validator("name")
    @classmethod
    def _not_ours(cls, value: str) -> str:
        if value == "trained":
            raise ValueError("`trained` is the run's own drafter")
        return value


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
    online: Online | None = Field(None, description="decode some prompts for real; none when left out")
    drafters: list[OtherDrafter] = Field(
        default_factory=list, description="other drafters, as columns of the same table"
    )
    target_devices: TargetDevices = placement(default_factory=list, description=SPREAD)
    anchor_chunk: int = placement(256, ge=1, unit="anchors", description="anchors drafted together")

    @field_validator("budgets", "length_edges")
    @classmethod
    def _positive(cls, value: list[int]) -> list[int]:
        if any(item < 1 for item in value):
            raise ValueError("must be positive")
        if len(set(value)) != len(value):
            raise ValueError("must be distinct")
        return sorted(value)

    @field_validator("drafters")
    @classmethod
    def _distinct_names(cls, value: list[OtherDrafter]) -> list[OtherDrafter]:
        names = [item.name for item in value]
        if len(set(names)) != len(names):
            raise ValueError("names must be distinct")
        return value

    @field_validator("kernels")
    @classmethod
    def _distinct(cls, value: list[Kernels]) -> list[Kernels]:
        if len(set(value)) != len(value):
            raise ValueError("must be distinct")
        return value
