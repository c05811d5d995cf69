"""Parameters of the `dataset` stage: what becomes of the completions."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dflash.base.params import Params, derived, keyed, placement


class DatasetParams(Params):
    """`dataset:`"""

    validation_share: float = keyed(
        0.1, ge=0.0, lt=1.0, unit="share", description="share of prompts held out, chosen by a hash of the prompt"
    )
    split_seed: int = Field(0, ge=0, description="enters the hash that splits")
    truncated: Literal["keep", "drop"] = Field("keep", description="completions cut at the token limit")
    min_completion_tokens: int = keyed(2, ge=1, unit="tokens", description="shorter completions are skipped")
    near_duplicates: float | None = keyed(
        None,
        gt=0.0,
        le=1.0,
        unit="share",
        description="drop samples that share so much of their 5-token shingles (Jaccard, estimated) with one kept; off by default",
    )
    parent: str | None = placement(
        None, description="`dataset.json` of the version to compare with; that of a `dataset` source when left out"
    )
    parent_digest: str | None = derived(None, description="sha256 of it")
    exclude: list[str] = placement(
        default_factory=list, description="JSONL files of prompts that must not be trained on (evaluation prompts)"
    )
    exclude_digests: list[str] = derived(default_factory=list, description="sha256 of each, sorted")
