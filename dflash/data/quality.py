"""What can be wrong with a completion that came: empty, or caught in a loop. 10 microseconds a completion."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

LONGEST_PERIOD = 64
REPEATS = 4
SHORTEST_LOOP = 32
"""Tokens at the end that must repeat, at least four times over, to be called a loop."""


def fault_of(ids: Sequence[int], finish_reason: str, stops: frozenset[int]) -> str:
    """`empty` (nothing but an end token), `loop` (cut while repeating itself), or nothing."""
    if not ids or all(token in stops for token in ids):
        return "empty"
    return "loop" if finish_reason == "length" and is_loop(ids) else ""


def is_loop(ids: Sequence[int]) -> bool:
    """Whether the end repeats with a period of at most 64 tokens, four times and over 32 tokens or more."""
    tail = np.asarray(ids[-LONGEST_PERIOD * REPEATS :])
    for period in range(1, LONGEST_PERIOD + 1):
        span = max(SHORTEST_LOOP, REPEATS * period)
        if span > len(tail):
            return False
        end = tail[-span:]
        if np.array_equal(end[period:], end[:-period]):
            return True
    return False
