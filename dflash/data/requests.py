"""What is asked of the target: prompts rendered, each with its own seed. 60 bytes and 4 a token, each."""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Request:
    """One prompt, ready for the target. prompt_ids: int32, compact."""

    id: str
    source: str
    messages: str
    prompt_ids: array[int]
    seed: int

    def answered(self, completion_ids: list[int], finish_reason: str) -> dict[str, Any]:
        """The row of `schemas.COMPLETIONS`, its tokens as compact arrays."""
        return {**vars(self), "completion_ids": array("i", completion_ids), "finish_reason": finish_reason}


def sample_seed(seed: int, sample_id: str) -> int:
    """The seed of one sample, 63 bits: the same whatever batch it is in."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{sample_id}".encode()).digest()[:8], "big") >> 1
