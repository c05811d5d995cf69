"""From acceptance lengths to numbers with intervals, in rows of one number each.

Columns of a row, in this order:

    run             name of the run; empty here, the report fills it in
    train_key, step which checkpoint
    drafter         `trained` for a checkpoint of the run's own training, else the drafter's name, and in brackets how it differs
                    from the run's own: taps, block size, a target that is another or unknown
    prompt_set      which prompts
    length_bucket   `all`, or `lo-hi`: verifications whose context (the tokens before the anchor) has lo <= length < hi
    kernel          linear attention kernels of the target that made continuation and features; `a-b` in rows that compare two
    method          chain, tree, prompt_lookup, ngram: offline. online, online_tree: real decodes of chains and trees
    budget          nodes of the tree beside the root; for the other methods the tokens of their one chain, block_size - 1
    block_size      B: most tokens a chain commits at a time, the bonus token included
    horizon         tokens drafted ahead, B - 1
    sampling        greedy: the target's greedy continuation, verified exactly. temperature T: drawn, verified by rejection
    convention      committed_with_bonus: tokens committed per verification, the bonus token counted, the last verification
                    clipped at the end. committed_with_bonus_unclipped: the same without the verifications whose whole
                    block does not fit before the end
    metric          tau_pooled: tokens committed / verifications, over all requests together. tau_request_mean: the mean
                    over requests of each request's own ratio. slot_accuracy_<k>: share of all anchors at which slot k
                    names the token k after the anchor (not tau: a decode visits few of the anchors, and stops at the first
                    miss). slot_accuracy_given_prefix_<k>: the same among the anchors where slots 1..k-1 are right
                    tau_difference: pooled tau under the first kernels less that under the second, requests paired.
                    same_continuation: share of requests that both kernels continue alike. lossless, speedup,
                    same_lengths_as_offline: of real decodes, see `online.py`
    value, ci_low, ci_high    the number and its bootstrap interval
    n               requests behind the number, which are what the bootstrap resamples

Every metric is a ratio of sums over requests, so a request is kept as a few counts a bucket whatever its length (`Counted`),
and all intervals come from one product of resampling weights [resamples, requests] and sums [requests, metrics].

Cost: 4 bytes a count kept, so a request of a chain of block size 8 or 16 at four buckets beside `all` takes 0.6 or 1.3 kB; the
weights are drawn `WEIGHTS_AT_ONCE` at a time. 1,000 resamples of 10,000 requests take 1 s.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

COLUMNS = (
    "run",
    "train_key",
    "step",
    "drafter",
    "prompt_set",
    "length_bucket",
    "kernel",
    "method",
    "budget",
    "block_size",
    "horizon",
    "sampling",
    "convention",
    "metric",
    "value",
    "ci_low",
    "ci_high",
    "n",
)
GREEDY = "greedy"
CLIPPED = "committed_with_bonus"
UNCLIPPED = "committed_with_bonus_unclipped"

Array = NDArray[np.float64]


Bucket = tuple[str, int, int]
"""(name, lo, hi): verifications whose context has lo <= length < hi."""

WEIGHTS_AT_ONCE = 1_000_000
"""Resampling weights in memory together: 16 MB."""


@dataclass
class RequestResult:
    """One request under one method.

    contexts: tokens before the anchor, a verification. lengths: tokens committed, a verification. unclipped: of those
    verifications whose whole block fits before the end, `unclipped_contexts` with them.
    hits, in_bounds: [anchors, B-1] over all anchors, with `anchor_contexts`; None for methods without slots.
    """

    contexts: Sequence[int]
    lengths: Sequence[int]
    unclipped_contexts: Sequence[int]
    unclipped: Sequence[int]
    hits: NDArray[np.bool_] | None = None
    in_bounds: NDArray[np.bool_] | None = None
    anchor_contexts: NDArray[np.int64] | None = None


class Counted:
    """The requests of one method on one prompt set, as the counts that all metrics are ratios of.

    Counts of a request and bucket: tokens committed and verifications, clipped; the same, unclipped; then for each slot hits and
    anchors in bounds, hits and anchors with the prefix right.

    Args:
        buckets: as `length_buckets` gives them, the first of them `all`.
        slots: tokens drafted ahead; 0 for methods without slots.
    """

    def __init__(self, buckets: Sequence[Bucket], slots: int = 0) -> None:
        self.buckets = buckets
        self.slots = slots
        self._counts = array("i")

    def __len__(self) -> int:
        return len(self._counts) // (len(self.buckets) * self._columns)

    @property
    def _columns(self) -> int:
        return 4 + 4 * self.slots

    def add(self, result: RequestResult) -> None:
        """Counts one more request."""
        for _, low, high in self.buckets:
            self._counts.extend(_committed(result.contexts, result.lengths, low, high))
            self._counts.extend(_committed(result.unclipped_contexts, result.unclipped, low, high))
            if self.slots:
                self._counts.extend(_slot_counts(result, low, high, self.slots))

    def counts(self) -> NDArray[np.int32]:
        """[requests, buckets, counts], a copy."""
        return self._view().copy()

    def _view(self) -> NDArray[np.int32]:
        """The counts where they lie; nothing can be added while it is held."""
        return np.asarray(self._counts, dtype=np.int32).reshape(-1, len(self.buckets), self._columns)

    def of_requests(self, places: Sequence[int]) -> Counted:
        """The counts of some of the requests, at all lengths together and without slots."""
        made = Counted(self.buckets[:1])
        made._counts = array("i", self._view()[list(places), 0, :4].tobytes())
        return made

    def committed(self) -> Array:
        """[requests, 2]: tokens committed and verifications, clipped, at all lengths."""
        return self._view()[:, 0, :2].astype(np.float64)


@dataclass(frozen=True)
class Settings:
    """How intervals and buckets are made; fields as in `EvaluateParams`, `longest` = the target's context in tokens."""

    length_edges: Sequence[int]
    longest: int
    resamples: int
    confidence: float
    seed: int

    def buckets(self) -> list[Bucket]:
        """All of them, `all` first."""
        return length_buckets(self.length_edges, self.longest)


def length_buckets(edges: Sequence[int], longest: int) -> list[Bucket]:
    """(name, lo, hi) of each bucket: `all`, then from 0 to the first edge, and so on to the target's context `longest`."""
    bounds = [0, *(edge for edge in edges if edge < longest), longest]
    return [("all", 0, longest), *((f"{low}-{high}", low, high) for low, high in pairwise(bounds))]


def ratio_intervals(
    numerators: Array, denominators: Array, *, resamples: int, confidence: float, seed: int
) -> tuple[Array, Array, Array]:
    """Ratios of sums with percentile bootstrap intervals, requests resampled with replacement.

    Args:
        numerators, denominators: [requests, metrics]; a request that has no part in a metric has 0 in both.

    Returns:
        value, low, high: [metrics]; NaN where a metric's denominators sum to 0.
    """
    metrics = numerators.shape[1]
    sums = np.concatenate([numerators, denominators], axis=1)
    drawn_sums = _resampled(sums, resamples, seed)
    with np.errstate(invalid="ignore", divide="ignore"):
        drawn = drawn_sums[:, :metrics] / drawn_sums[:, metrics:]
        value = numerators.sum(0) / denominators.sum(0)
    # A resample may hold no request of a metric; such ratios do not exist and are left out.
    known = ~np.isnan(value)
    low, high = np.full_like(value, np.nan), np.full_like(value, np.nan)
    tail = (1 - confidence) / 2
    if known.any():
        low[known], high[known] = np.nanquantile(drawn[:, known], [tail, 1 - tail], axis=0)
    return value, low, high


def _resampled(sums: Array, resamples: int, seed: int) -> Array:
    """Sums [requests, columns] over each resample of the requests: [resamples, columns]."""
    requests = sums.shape[0]
    at_once = max(1, WEIGHTS_AT_ONCE // max(requests, 1))
    generator = np.random.default_rng(seed)
    chances = np.full(requests, 1 / requests)
    parts = []
    for start in range(0, resamples, at_once):
        weights = generator.multinomial(requests, chances, size=min(at_once, resamples - start))
        parts.append(weights.astype(np.float64) @ sums)
    return np.concatenate(parts)


def difference(
    first: Array, second: Array, *, resamples: int, confidence: float, seed: int
) -> tuple[float, float, float]:
    """Pooled tau of `first` less that of `second`, on the same requests in the same order, with its interval.

    Both sides of a resample are the same requests, so what makes a request hard for both cancels out.

    Args:
        first, second: [requests, 2], tokens committed and verifications.

    Returns:
        value, low, high; NaN when a side has no verification.

    Raises:
        ValueError: the two have not the same number of requests.
    """
    if len(first) != len(second):
        raise ValueError(f"{len(first)} requests against {len(second)}")
    drawn_sums = _resampled(np.concatenate([first, second], axis=1), resamples, seed)
    with np.errstate(invalid="ignore", divide="ignore"):
        drawn = drawn_sums[:, 0] / drawn_sums[:, 1] - drawn_sums[:, 2] / drawn_sums[:, 3]
        values = [np.divide(*side.sum(0)) for side in (first, second)]
    tail = (1 - confidence) / 2
    if np.isnan(drawn).all():
        return float("nan"), float("nan"), float("nan")
    low, high = np.nanquantile(drawn, [tail, 1 - tail])
    return float(values[0] - values[1]), float(low), float(high)


def committed_sums(lengths: Sequence[Sequence[int]]) -> Array:
    """[requests, 2] tokens committed and verifications, of each request's acceptance lengths."""
    return np.array([[sum(own), len(own)] for own in lengths], dtype=np.float64).reshape(-1, 2)


def tau(committed: Array) -> float:
    """The pooled tau of some requests, [requests, 2] tokens committed and verifications; 0.0 when there was no verification."""
    tokens, verifications = committed.sum(0)
    return float(tokens / verifications) if verifications else 0.0


def rows(labels: dict[str, Any], counted: Counted, block_size: int, settings: Settings) -> list[dict[str, Any]]:
    """All rows of one method on one prompt set.

    Args:
        labels: train_key, step, drafter, prompt_set, kernel, method, budget.
    """
    names, numerators, denominators = _ratios(counted)
    values, lows, highs = ratio_intervals(
        numerators,
        denominators,
        resamples=settings.resamples,
        confidence=settings.confidence,
        seed=settings.seed,
    )
    made = []
    for column, (bucket, convention, metric) in enumerate(names):
        count = int((denominators[:, column] > 0).sum())
        if count:
            interval = float(values[column]), float(lows[column]), float(highs[column])
            where = {**labels, "length_bucket": bucket}
            made.append(row(where, metric, interval, count, block_size=block_size, convention=convention))
    return made


def row(
    labels: dict[str, Any],
    metric: str,
    interval: tuple[float, float, float],
    n: int,
    *,
    block_size: int,
    sampling: str = GREEDY,
    convention: str = CLIPPED,
) -> dict[str, Any]:
    """One row of one number.

    Args:
        labels: train_key, step, drafter, prompt_set, kernel, method, budget; `length_bucket` is `all` when left out.
        interval: value, low, high.
    """
    value, low, high = interval
    made = {
        "length_bucket": "all",
        **labels,
        "run": "",
        "block_size": block_size,
        "horizon": block_size - 1,
        "sampling": sampling,
        "convention": convention,
        "metric": metric,
        "value": value,
        "ci_low": low,
        "ci_high": high,
        "n": n,
    }
    return {column: made[column] for column in COLUMNS}


def _ratios(counted: Counted) -> tuple[list[tuple[str, str, str]], Array, Array]:
    """(bucket, convention, metric) of all metrics, and by request what each is a ratio of, both [requests, metrics]."""
    counts = counted.counts()
    names: list[tuple[str, str, str]] = []
    pairs: list[tuple[Array, Array]] = []
    for place, (bucket, _, _) in enumerate(counted.buckets):
        held = counts[:, place].astype(np.float64)
        if not held.any():
            continue
        for first, convention in ((0, CLIPPED), (2, UNCLIPPED)):
            committed, verifications = held[:, first], held[:, first + 1]
            own = np.divide(committed, verifications, out=np.zeros_like(committed), where=verifications > 0)
            names += [(bucket, convention, "tau_pooled"), (bucket, convention, "tau_request_mean")]
            pairs += [(committed, verifications), (own, (verifications > 0).astype(np.float64))]
        for slot in range(counted.slots):
            hits, bounds, right_hits, right_bounds = held[:, 4 + 4 * slot : 8 + 4 * slot].T
            names.append((bucket, CLIPPED, f"slot_accuracy_{slot + 1}"))
            names.append((bucket, CLIPPED, f"slot_accuracy_given_prefix_{slot + 1}"))
            pairs += [(hits, bounds), (right_hits, right_bounds)]
    shape = len(counts), len(pairs)
    return (
        names,
        np.stack([pair[0] for pair in pairs], axis=1) if pairs else np.empty(shape),
        np.stack([pair[1] for pair in pairs], axis=1) if pairs else np.empty(shape),
    )


def _committed(contexts: Sequence[int], lengths: Sequence[int], low: int, high: int) -> tuple[int, int]:
    """Tokens committed and verifications of one request in a bucket."""
    places = np.asarray(contexts, dtype=np.int64)
    inside = (places >= low) & (places < high)
    return int(np.asarray(lengths, dtype=np.int64)[inside].sum()), int(inside.sum())


def _slot_counts(result: RequestResult, low: int, high: int, slots: int) -> list[int]:
    """Hits and anchors, hits and anchors with the prefix right, of each slot of one request in a bucket."""
    if result.hits is None or result.in_bounds is None or result.anchor_contexts is None:
        return [0] * (4 * slots)
    inside = (result.anchor_contexts >= low) & (result.anchor_contexts < high)
    hits, bounds = result.hits[inside], result.in_bounds[inside]
    prefix_right = np.ones_like(hits)
    prefix_right[:, 1:] = np.logical_and.accumulate(hits, axis=1)[:, :-1]
    counts = np.stack(
        [hits.sum(0), bounds.sum(0), (hits & prefix_right).sum(0), (bounds & prefix_right).sum(0)], axis=1
    )
    found: list[int] = counts.ravel().tolist()
    return found
