"""Parameters of the `references` stage: the target's own greedy continuations of the evaluation prompts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from dflash.base.params import Params, derived, keyed, placement, without_password
from dflash.model.target_params import SPREAD, Dtype, Kernels, TargetDevices, TargetIdentity


class PromptSet(Params):
    """One entry of `references.prompt_sets:`; a JSONL file, or the dataset's held-out split."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$", description="name of the set in every table")
    path: str | None = placement(
        None, description="JSONL file of prompts, with `id` and `tags` if wanted; tau is told by tag too"
    )
    digest: str | None = derived(None, description="sha256 of the file")
    held_out: bool = Field(False, description="use the prompts that the dataset stage held out")
    limit: int | None = keyed(None, ge=1, unit="prompts", description="take only the first so many")

    @model_validator(mode="after")
    def _one_source(self) -> PromptSet:
        if self.held_out == (self.path is not None or self.digest is not None):
            raise ValueError(f"prompt set {self.name!r}: give exactly one of `path` and `held_out: true`")
        return self


class ReferencesParams(Params):
    """`references:`"""

    target: TargetIdentity = derived()
    kernels: Kernels = derived("torch", description="one references result for each of evaluate.kernels")
    taps: list[int] = derived(default_factory=list, description="layer ids whose features the drafters read")
    prompt_sets: list[PromptSet] = Field(
        default_factory=lambda: [PromptSet(name="held_out", held_out=True)],
        min_length=1,
        description="what to judge on",
    )
    max_new_tokens: int = keyed(256, ge=1, unit="tokens", description="length limit of a continuation")
    thinking: bool = Field(False, description="passed to the chat template as `enable_thinking`")
    dtype: Dtype = Field("float32", description="precision of the target")
    engine: Literal["transformers", "openai"] = Field(
        "transformers",
        description="who writes the continuations: the target here, or a server of the completions interface",
    )
    server_model: str | None = Field(None, description="what the server calls the target, for `engine: openai`")
    server_url: str | None = placement(None, description="where the server is, without `/v1`")
    api_key_variable: str | None = placement(None, description="environment variable that holds the server's key")
    target_devices: TargetDevices = placement(default_factory=list, description=SPREAD)
    batch_size: int = placement(64, ge=1, unit="prompts", description="prompts continued together")
    features_cache_gb: float = placement(
        8.0, ge=0.0, unit="GB", description="features kept on disk; recomputed beyond it"
    )

    @field_validator("server_url")
    @classmethod
    def _no_password(cls, address: str | None) -> str | None:
        return None if address is None else without_password(address)

    @model_validator(mode="after")
    def _distinct(self) -> ReferencesParams:
        names = [item.name for item in self.prompt_sets]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"prompt sets named twice: {', '.join(twice)}")
        return self

    @model_validator(mode="after")
    def _server_named(self) -> ReferencesParams:
        if self.engine == "openai" and self.server_model is None:
            raise ValueError("`engine: openai` needs `server_model`, and `server_url` to say where it runs")
        return self
