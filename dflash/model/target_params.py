"""Which target model a run uses, by content: a directory known by its digest, or a model drawn from a seed.

The target stands in the key of every stage that runs it (completions, train, references) through `TargetIdentity`. Costs
nothing to import (no torch).
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from dflash.base.params import Params, keyed, placement

Kernels = Literal["torch", "fla", "torch_recurrent"]
Dtype = Literal["float32", "bfloat16", "float64"]


DEVICE = re.compile(r"cpu|cuda(:(0|[1-9][0-9]?))?")


def _fit_together(devices: list[str]) -> list[str]:
    """Several devices must be told apart, and be of one kind: kernels are bound for a whole process."""
    for name in devices:
        if not DEVICE.fullmatch(name):
            raise ValueError(f"{name!r} is no device; name cpu, cuda or cuda:N")
    kinds = {name.partition(":")[0] for name in devices}
    if len(kinds) > 1:
        raise ValueError("cpu and cuda together; name devices of one kind")
    if len(devices) > 1 and kinds == {"cuda"}:
        if "cuda" in devices:
            raise ValueError("`cuda` is whichever GPU comes first; name each by its number, as cuda:0")
        if len(set(devices)) != len(devices):
            raise ValueError("names a GPU twice")
    return devices


TargetDevices = Annotated[list[str], AfterValidator(_fit_together)]
"""Devices that the target's layers are spread over; none: the host's own device."""
SPREAD = (
    "devices of the host to spread the target's layers over, as [cuda:0, cuda:1]; the first also holds embedding and head; "
    "none: the host's `device`"
)


class RandomTarget(Params):
    """A target with weights drawn from a seed, for tests and shape benchmarks: no file, the fields are its identity.

    Its tokenizer is byte-level: 256 bytes, then `<|endoftext|>` (padding), `<|im_end|>`, `<|im_start|>` and `<|mask|>`.
    """

    model_type: Literal["qwen3", "qwen3_5_text"] = Field("qwen3", description="dense (qwen3) or hybrid (qwen3_5_text)")
    seed: int = Field(0, ge=0, description="seed of the weights")
    vocab_size: int = Field(260, ge=260, description="at least the 256 bytes and four specials")
    hidden_size: int = Field(32, ge=8)
    intermediate_size: int = Field(64, ge=8)
    num_hidden_layers: int = Field(6, ge=1)
    num_attention_heads: int = Field(2, ge=1)
    num_key_value_heads: int = Field(1, ge=1)
    head_dim: int = Field(16, ge=4)
    rope_theta: float = Field(10000.0, gt=0)
    max_position_embeddings: int = Field(4096, ge=16, description="longest context, tokens")
    full_attention_interval: int = Field(4, ge=1, description="hybrid: every so many layers one of full attention")
    linear_num_key_heads: int = Field(2, ge=1, description="hybrid: heads of the linear layers")
    linear_num_value_heads: int = Field(2, ge=1, description="hybrid: heads of the linear layers")
    linear_key_head_dim: int = Field(8, ge=4, description="hybrid: width of a linear head")
    linear_value_head_dim: int = Field(8, ge=4, description="hybrid: width of a linear head")

    def fields_of_type(self) -> dict[str, Any]:
        """What `random_target` takes: the fields that this model type has."""
        hybrid_only = {"full_attention_interval"} | {
            name for name in type(self).model_fields if name.startswith("linear_")
        }
        return self.model_dump(mode="json", exclude=hybrid_only if self.model_type == "qwen3" else set())


class DeclaredFacts(Params):
    """`target.facts:` what planning reads from a target's config and tokenizer, for a controller that has no copy of it."""

    num_layers: int = Field(ge=1, description="`num_hidden_layers`")
    hidden_size: int = Field(ge=1, description="`hidden_size`")
    vocab_size: int = Field(ge=1, description="`vocab_size`, the rows of the embedding")
    hybrid: bool = Field(description="whether some of its layers are linear attention")
    max_position_embeddings: int = keyed(ge=1, unit="tokens", description="`max_position_embeddings`")
    eos_token_ids: list[int] = keyed(unit="token ids", description="what ends a completion, as generation_config.json")
    pad_token_id: int | None = keyed(
        None, ge=0, unit="token id", description="`pad_token_id`; null where there is none"
    )
    mask_token_id: int | None = keyed(
        None, ge=0, unit="token id", description="`<|mask|>` in tokenizer.json; null where there is none"
    )


class TargetSection(Params):
    """`target:` the model whose drafter is trained. Give `path` or `random`, not both."""

    path: str | None = placement(None, description="directory with config.json, safetensors and tokenizer")
    digest: str | None = Field(
        None, description="sha256 of the directory's content; computed when left out, checked on every host when given"
    )
    revision: str | None = Field(None, description="name of the version, for people; part of the identity when given")
    facts: DeclaredFacts | None = Field(
        None, description="what its config says, for a controller where `path` does not exist; needs `digest`"
    )
    random: RandomTarget | None = Field(None, description="draw a tiny target from a seed instead")

    @field_validator("digest")
    @classmethod
    def _hex(cls, value: str | None) -> str | None:
        if value is not None and (len(value) != 64 or set(value) - set("0123456789abcdef")):
            raise ValueError("a digest is 64 lower-case hex digits")
        return value

    @model_validator(mode="after")
    def _one_source(self) -> TargetSection:
        if (self.path is None) == (self.random is None):
            raise ValueError("give exactly one of `path` and `random`")
        if self.facts is not None and self.digest is None:
            raise ValueError("`facts` say nothing of the weights: give `digest` too")
        return self


class TargetIdentity(Params):
    """The target as it stands in keys: content, never a path.

    digest: sha256 of the directory, or None for a random target. The facts are read from the target's config.
    """

    digest: str | None
    revision: str | None
    random: RandomTarget | None
    num_layers: int
    hidden_size: int
    vocab_size: int
    hybrid: bool
    max_position_embeddings: int
    eos_token_ids: list[int]
    pad_token_id: int | None
    mask_token_id: int | None
