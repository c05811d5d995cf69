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

Every metric is a ratio of sums over requests, so all intervals come from one product of resampling weights [resamples,
requests] and sums [requests, metrics]. Cost: 1,000 resamples of 10,000 requests take 1 s and 100 MB.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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


@dataclass
class RequestResult:
    """One request under one method.

    contexts: tokens before the anchor, a verification. lengths: tokens committed, a verification. unclipped: of those
    verifications whose whole block fits before the end, `unclipped_contexts` with them.
    hits, in_bounds: [anchors, B-1] over all anchors, with `anchor_contexts`; None for methods without slots.
    """

    contexts: Sequence[int] | NDArray[np.int32]
    lengths: Sequence[int] | NDArray[np.int32]
    unclipped_contexts: Sequence[int] | NDArray[np.int32]
    unclipped: Sequence[int] | NDArray[np.int32]
    hits: NDArray[np.bool_] | None = None
    in_bounds: NDArray[np.bool_] | None = None
    anchor_contexts: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class Settings:
    """How intervals and buckets are made; fields as in `EvaluateParams`, `longest` = the target's context in tokens."""

    length_edges: Sequence[int]
    longest: int
    resamples: int
    confidence: float
    seed: int


@dataclass
class _Sums:
    """Numerators and denominators by request of the metrics asked for, as columns."""

    names: list[tuple[str, str]] = field(default_factory=list)
    numerators: list[Array] = field(default_factory=list)
    denominators: list[Array] = field(default_factory=list)

    def add(self, convention: str, metric: str, numerator: Array, denominator: Array) -> None:
        self.names.append((convention, metric))
        self.numerators.append(numerator)
        self.denominators.append(denominator)


def length_buckets(edges: Sequence[int], longest: int) -> list[tuple[str, int, int]]:
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
    requests = numerators.shape[0]
    weights_at_once = max(1, 10_000_000 // max(requests, 1))
    generator = np.random.default_rng(seed)
    parts = []
    with np.errstate(invalid="ignore", divide="ignore"):
        for start in range(0, resamples, weights_at_once):
            rows = min(weights_at_once, resamples - start)
            weights = generator.multinomial(requests, np.full(requests, 1 / requests), size=rows).astype(np.float64)
            parts.append((weights @ numerators) / (weights @ denominators))
        value = numerators.sum(0) / denominators.sum(0)
    drawn = np.concatenate(parts)
    # A resample may hold no request of a metric; such ratios do not exist and are left out.
    known = ~np.isnan(value)
    low, high = np.full_like(value, np.nan), np.full_like(value, np.nan)
    tail = (1 - confidence) / 2
    if known.any():
        low[known], high[known] = np.nanquantile(drawn[:, known], [tail, 1 - tail], axis=0)
    return value, low, high


def difference(
    first: Sequence[RequestResult], second: Sequence[RequestResult], *, resamples: int, confidence: float, seed: int
) -> tuple[float, float, float]:
    """Pooled tau of `first` less that of `second`, on the same requests in the same order, with its interval.

    Both sides of a resample are the same requests, so what makes a request hard for both cancels out.

    Returns:
        value, low, high; NaN when a side has no verification.

    Raises:
        ValueError: the two have not the same number of requests.
    """
    if len(first) != len(second):
        raise ValueError(f"{len(first)} requests against {len(second)}")
    sides = []
    for results in (first, second):
        sides.append(np.array([[np.sum(item.lengths), len(item.lengths)] for item in results], dtype=np.float64))
    generator = np.random.default_rng(seed)
    weights = generator.multinomial(len(first), np.full(len(first), 1 / len(first)), size=resamples).astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratios = [np.divide(*(weights @ side).T) for side in sides]
        values = [np.divide(*side.sum(0)) for side in sides]
    drawn = ratios[0] - ratios[1]
    tail = (1 - confidence) / 2
    if np.isnan(drawn).all():
        return float("nan"), float("nan"), float("nan")
    low, high = np.nanquantile(drawn, [tail, 1 - tail])
    return float(values[0] - values[1]), float(low), float(high)


def tau(results: Sequence[RequestResult]) -> float:
    """The pooled tau of some requests; 0.0 when there was no verification."""
    verifications = sum(len(result.lengths) for result in results)
    return float(sum(int(np.sum(result.lengths)) for result in results) / verifications) if verifications else 0.0


def rows(
    labels: dict[str, Any], results: Sequence[RequestResult], block_size: int, settings: Settings
) -> list[dict[str, Any]]:
    """All rows of one method on one prompt set.

    Args:
        labels: train_key, step, drafter, prompt_set, kernel, method, budget.
    """
    made = []
    for name, low, high in length_buckets(settings.length_edges, settings.longest):
        sums = _sums(results, low, high, block_size - 1)
        numerators, denominators = np.stack(sums.numerators, axis=1), np.stack(sums.denominators, axis=1)
        values, lows, highs = ratio_intervals(
            numerators,
            denominators,
            resamples=settings.resamples,
            confidence=settings.confidence,
            seed=settings.seed,
        )
        for column, (convention, metric) in enumerate(sums.names):
            count = int((denominators[:, column] > 0).sum())
            if count:
                interval = float(values[column]), float(lows[column]), float(highs[column])
                where = {**labels, "length_bucket": name}
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


def _sums(results: Sequence[RequestResult], low: int, high: int, slots: int) -> _Sums:
    sums = _Sums()
    for convention in (CLIPPED, UNCLIPPED):
        committed, verifications = _committed(results, low, high, clipped=convention == CLIPPED)
        sums.add(convention, "tau_pooled", committed, verifications)
        own = np.divide(committed, verifications, out=np.zeros_like(committed), where=verifications > 0)
        sums.add(convention, "tau_request_mean", own, (verifications > 0).astype(np.float64))
    if any(result.hits is not None for result in results):
        _add_slots(sums, results, low, high, slots)
    return sums


def _committed(results: Sequence[RequestResult], low: int, high: int, *, clipped: bool) -> tuple[Array, Array]:
    """Tokens committed and verifications by request, in the bucket."""
    committed, verifications = np.zeros(len(results)), np.zeros(len(results))
    for row, result in enumerate(results):
        contexts = np.asarray(result.contexts if clipped else result.unclipped_contexts, dtype=np.int64)
        lengths = np.asarray(result.lengths if clipped else result.unclipped, dtype=np.float64)
        inside = (contexts >= low) & (contexts < high)
        committed[row], verifications[row] = lengths[inside].sum(), inside.sum()
    return committed, verifications


def _add_slots(sums: _Sums, results: Sequence[RequestResult], low: int, high: int, slots: int) -> None:
    totals = np.zeros((4, len(results), slots))  # hits and anchors; hits and anchors with the prefix right
    for row, result in enumerate(results):
        if result.hits is None or result.in_bounds is None or result.anchor_contexts is None:
            continue
        inside = (result.anchor_contexts >= low) & (result.anchor_contexts < high)
        hits, bounds = result.hits[inside], result.in_bounds[inside]
        prefix_right = np.ones_like(hits)
        prefix_right[:, 1:] = np.logical_and.accumulate(hits, axis=1)[:, :-1]
        totals[:, row] = hits.sum(0), bounds.sum(0), (hits & prefix_right).sum(0), (bounds & prefix_right).sum(0)
    for slot in range(slots):
        sums.add(CLIPPED, f"slot_accuracy_{slot + 1}", totals[0, :, slot], totals[1, :, slot])
        sums.add(CLIPPED, f"slot_accuracy_given_prefix_{slot + 1}", totals[2, :, slot], totals[3, :, slot])
