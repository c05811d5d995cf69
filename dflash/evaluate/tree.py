"""Draft trees: which prefixes of a block are worth verifying, when the drafter's slots are taken as independent.

A tree of `budget` nodes beside the root holds the `budget` prefixes with the greatest product of per-slot marginals. The
product can only fall as a prefix grows, so the best prefixes are closed under cutting the end off and form a tree; a
best-first search finds them in order. The greedy chain is in the tree only as deep as it is probable enough.

Cost: a tree takes about `budget` heap steps (0.02 ms for 16 nodes, 0.06 ms for 64) after picking the top `budget` tokens of
each slot, since no other token can be in it: a node of rank r has r better siblings. Source: the DDTree method.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from dflash.base.errors import PermanentError

Prefix = tuple[int, ...]


def top_tokens(log_probs: NDArray[np.floating], count: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The `count` most probable tokens of each slot, best first; equal ones in the order of their ids.

    Args:
        log_probs: [depth, V].

    Returns:
        ids and their log-probabilities, both [depth, min(count, V)].

    Raises:
        PermanentError: a log-probability is NaN.
    """
    if np.isnan(log_probs).any():
        raise PermanentError("the drafter gave NaN log-probabilities", remedy="Look at the checkpoint's weights.")
    count = min(count, log_probs.shape[1])
    # The partition settles which values get in; ties at the edge are then settled by id, for a result that never varies.
    edge = -np.partition(-log_probs, count - 1, axis=1)[:, count - 1]
    ids = np.empty((log_probs.shape[0], count), dtype=np.int64)
    for slot, row in enumerate(log_probs):
        candidates = np.flatnonzero(row >= edge[slot])
        ids[slot] = candidates[np.argsort(-row[candidates], kind="stable")[:count]]
    return ids, np.take_along_axis(log_probs, ids, axis=1).astype(np.float64)


def build_tree(log_probs: NDArray[np.floating], budget: int) -> list[Prefix]:
    """The `budget` best prefixes over per-slot log-probabilities [depth, V], best first, the root (empty) left out.

    Of equally probable prefixes the shorter comes first, then the one of smaller token ids. Fewer come back when fewer
    have a probability above zero.

    Raises:
        PermanentError: a log-probability is NaN.
    """
    if budget < 1 or not log_probs.shape[0]:
        return []
    return build_tree_from_top(*top_tokens(log_probs, budget), budget)


def build_tree_from_top(ids: NDArray[np.integer], log_probs: NDArray[np.floating], budget: int) -> list[Prefix]:
    """`build_tree` for slots of which only the best tokens are at hand: `ids` and `log_probs` [depth, k], best first.

    Exact when k >= min(budget, V).
    """
    tokens: list[list[int]] = ids.tolist()
    scores: list[list[float]] = log_probs.tolist()
    depth, width = ids.shape
    prefixes: list[Prefix] = []
    # Entries sort by score, then length, then tokens. `above` is the score of the parent, so that a sibling's score is
    # one sum away; `rank` is the place of the last token in its slot.
    heap: list[tuple[float, int, Prefix, float, int]] = []

    def push(parent: Prefix, above: float, rank: int) -> None:
        slot = len(parent)
        if slot < depth and rank < width and scores[slot][rank] > -np.inf:
            heapq.heappush(heap, (-(above + scores[slot][rank]), slot + 1, (*parent, tokens[slot][rank]), above, rank))

    push((), 0.0, 0)
    while heap and len(prefixes) < budget:
        negative, _, prefix, above, rank = heapq.heappop(heap)
        prefixes.append(prefix)
        push(prefix[:-1], above, rank + 1)
        push(prefix, -negative, 0)
    return prefixes


def longest_accepted(prefixes: Iterable[Prefix], following: Sequence[int]) -> int:
    """How many tokens of `following` a verification of the tree accepts: the longest of its prefixes inside the tree.

    The bonus token is not counted.
    """
    nodes = prefixes if isinstance(prefixes, set | frozenset) else set(prefixes)
    accepted = 0
    while accepted < len(following) and tuple(following[: accepted + 1]) in nodes:
        accepted += 1
    return accepted
