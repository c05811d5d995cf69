"""The same few numbers about lengths wherever lengths are reported. Costs 0.1 s a million samples."""

from __future__ import annotations

from typing import Any

import numpy as np

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


def describe_lengths(lengths: np.ndarray) -> dict[str, Any]:
    """Mean, least, most and quantiles (values that occur) of lengths [n] in tokens; empty when there are none."""
    if len(lengths) == 0:
        return {}
    found = np.quantile(lengths, QUANTILES, method="inverted_cdf")
    return {
        "mean": int(lengths.sum()) / len(lengths),
        "min": int(lengths.min()),
        "max": int(lengths.max()),
        "quantiles": {f"{share:g}": int(value) for share, value in zip(QUANTILES, found, strict=True)},
    }


def length_counts(lengths: np.ndarray) -> dict[str, list[int]]:
    """The whole distribution of lengths [n]: each length that occurs, ascending, and how often. At most 100 kB of JSON."""
    values, counts = np.unique(lengths, return_counts=True)
    return {"lengths": values.tolist(), "counts": counts.tolist()}


def lengths_from(counts: dict[str, list[int]]) -> np.ndarray:
    """The lengths that `length_counts` describes, ascending [n]."""
    return np.repeat(np.asarray(counts["lengths"], dtype=np.int64), np.asarray(counts["counts"], dtype=np.int64))
