"""Parameters of batching (`batching:`), keyed from the `buckets` stage on."""

from __future__ import annotations

from pydantic import Field, model_validator

from dflash.base.params import Params, keyed


class BucketsParams(Params):
    """`batching:` token-budget batches from length buckets."""

    token_budget: int = keyed(8192, ge=1, unit="tokens", description="most tokens of a batch, padding counted")
    max_batch_size: int = keyed(64, ge=1, unit="samples", description="most samples of a batch")
    max_seq_len: int = keyed(8192, ge=2, unit="tokens", description="longer samples are cut to this")
    edges: list[int] | None = keyed(
        None, unit="tokens", description="upper edges of the buckets, ascending; from quantiles when left out"
    )
    quantiles: int = keyed(
        4, ge=1, unit="buckets", description="how many buckets of equal count, when no edges are given"
    )
    batches_per_step: int = keyed(
        4, ge=1, unit="batches", description="batches of one optimizer step, whatever the topology"
    )
    shift_warning: float = keyed(
        0.05, gt=0.0, unit="share", description="changes since the parent version beyond this are said aloud"
    )
    seed: int = Field(0, ge=0, description="seed of the order of samples and batches")

    @model_validator(mode="after")
    def _consistent(self) -> BucketsParams:
        if self.edges is not None:
            if not self.edges or any(b <= a for a, b in zip([0, *self.edges], self.edges, strict=False)):
                raise ValueError("`edges` must be positive and ascending")
            if self.edges[-1] < self.max_seq_len:
                raise ValueError(f"the last of `edges` ({self.edges[-1]}) must reach max_seq_len ({self.max_seq_len})")
        if self.token_budget < self.max_seq_len:
            raise ValueError(
                f"token_budget ({self.token_budget}) must hold one sample of max_seq_len ({self.max_seq_len}) tokens"
            )
        return self
