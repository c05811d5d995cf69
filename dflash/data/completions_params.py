"""Parameters of the `completions` stage: how the target answers the prompts of one source."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from dflash.base.params import Params, derived, keyed, placement, without_password
from dflash.model.target_params import Dtype, Kernels, TargetIdentity


class CompletionsParams(Params):
    """`completions:`"""

    target: TargetIdentity = derived()
    engine: Literal["transformers", "openai"] = Field(
        "transformers", description="in process and batched, or OpenAI-compatible servers (`endpoints`)"
    )
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
    max_error_share: float = keyed(
        0.02,
        ge=0.0,
        le=1.0,
        unit="share",
        description="above this share of requests without an answer the stage fails; a rerun asks for what is missing",
    )
    batch_size: int = placement(64, ge=1, unit="prompts", description="prompts generated together")
    endpoints: list[str] = placement(
        default_factory=list, description="engine `openai`: base addresses of the servers, `http://host:port/v1`"
    )
    model: str | None = placement(
        None, description="name of the target on the servers; the first they list when left out"
    )
    send_prompts: Literal["ids", "text"] = placement(
        "ids", description="`text` for servers that take no token ids, such as `transformers serve`"
    )
    concurrency: int = placement(64, ge=1, unit="requests", description="most requests in flight at one server")
    timeout: float = placement(600.0, gt=0.0, unit="seconds", description="longest wait for one answer")
    deadline: float = placement(
        3600.0, gt=0.0, unit="seconds", description="longest life of a request, retries included"
    )
    attempts: int = placement(6, ge=1, unit="attempts", description="failures of its own that a request survives")
    pause: float = placement(0.5, gt=0.0, unit="seconds", description="first pause after a server fails; it doubles")
    api_key_variable: str | None = placement(None, description="environment variable that holds the servers' key")

    @field_validator("endpoints")
    @classmethod
    def _no_password(cls, endpoints: list[str]) -> list[str]:
        return [without_password(address) for address in endpoints]
