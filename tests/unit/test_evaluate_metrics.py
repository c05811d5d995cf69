"""Numbers from acceptance lengths: what is averaged over what, in which bucket, how surely."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dflash.evaluate.metrics import (
    CLIPPED,
    COLUMNS,
    UNCLIPPED,
    Counted,
    RequestResult,
    Settings,
    committed_sums,
    difference,
    length_buckets,
    ratio_intervals,
    tau,
)
from dflash.evaluate.metrics import rows as rows_of_counts

SETTINGS = Settings(length_edges=[10, 20], longest=100, resamples=200, confidence=0.9, seed=0)
LABELS = {
    "train_key": "0123456789ab",
    "step": 5,
    "drafter": "trained",
    "prompt_set": "s",
    "kernel": "torch",
    "method": "chain",
    "budget": 3,
}


def result(contexts: list[int], lengths: list[int], whole: int = 0) -> RequestResult:
    return RequestResult(contexts, lengths, contexts[:whole], lengths[:whole])


def rows(
    labels: dict[str, Any], results: list[RequestResult], block_size: int, settings: Settings
) -> list[dict[str, Any]]:
    """The rows of requests that were counted one by one."""
    counted = Counted(settings.buckets(), block_size - 1 if any(item.hits is not None for item in results) else 0)
    for item in results:
        counted.add(item)
    return rows_of_counts(labels, counted, block_size, settings)


def value(made: list[dict[str, Any]], metric: str, bucket: str = "all", convention: str = CLIPPED) -> dict[str, Any]:
    (row,) = [
        row for row in made if (row["metric"], row["length_bucket"], row["convention"]) == (metric, bucket, convention)
    ]
    return row


def test_a_row_has_exactly_the_columns_of_the_interface_in_their_order() -> None:
    interface = (
        "run train_key step drafter prompt_set length_bucket kernel method budget block_size horizon sampling "
        "convention metric value ci_low ci_high n"
    )
    assert tuple(interface.split()) == COLUMNS
    row = rows(LABELS, [result([5], [3])], 4, SETTINGS)[0]
    assert tuple(row) == COLUMNS
    assert (row["run"], row["block_size"], row["horizon"], row["sampling"]) == ("", 4, 3, "greedy")


def test_pooled_tau_weighs_verifications_and_the_mean_weighs_requests() -> None:
    made = rows(LABELS, [result([1, 5], [4, 4]), result([1, 2, 3, 4, 5, 6], [1] * 6)], 4, SETTINGS)
    assert value(made, "tau_pooled")["value"] == pytest.approx(14 / 8)
    assert value(made, "tau_request_mean")["value"] == pytest.approx((4 + 1) / 2)
    assert value(made, "tau_pooled")["n"] == 2
    assert tau(np.array([[8.0, 2.0], [1.0, 1.0]])) == pytest.approx(3.0)
    assert tau(np.empty((0, 2))) == 0.0
    assert committed_sums([[4, 4], [1]]).tolist() == [[8, 2], [1, 1]]


def test_a_long_request_is_kept_in_as_many_bytes_as_a_short_one() -> None:
    kept = []
    for length in (10, 5000):
        counted = Counted(SETTINGS.buckets(), 3)
        anchors = np.arange(length)
        hits = np.ones((length, 3), dtype=bool)
        counted.add(RequestResult(list(anchors), [1] * length, list(anchors), [1] * length, hits, hits, anchors))
        kept.append(counted.counts().nbytes)
        assert counted.committed().tolist() == [[min(length, 100), min(length, 100)]], "within the target's context"
    assert kept == [4 * 16 * 4, 4 * 16 * 4], "four buckets of 4 + 4 * 3 counts of 4 bytes"


def test_intervals_do_not_depend_on_how_many_weights_are_drawn_together(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(5)
    top, bottom = generator.integers(1, 9, (40, 2)).astype(float), np.ones((40, 2))
    asked: dict[str, Any] = {"resamples": 250, "confidence": 0.95, "seed": 1}
    whole = ratio_intervals(top, bottom, **asked)
    gap = difference(top, top[::-1].copy(), **asked)
    monkeypatch.setattr("dflash.evaluate.metrics.WEIGHTS_AT_ONCE", 70)
    for one, other in zip(whole, ratio_intervals(top, bottom, **asked), strict=True):
        assert one == pytest.approx(other, rel=1e-12)
    assert gap == pytest.approx(difference(top, top[::-1].copy(), **asked), rel=1e-12)


def test_unclipped_numbers_stand_in_rows_of_their_own_convention() -> None:
    made = rows(LABELS, [result([1, 5, 9], [4, 4, 1], whole=2)], 4, SETTINGS)
    assert value(made, "tau_pooled")["value"] == 3.0
    assert value(made, "tau_pooled", convention=UNCLIPPED)["value"] == 4.0


def test_length_buckets_are_half_open_and_split_by_the_context_of_each_verification() -> None:
    assert length_buckets([10, 20], 100) == [("all", 0, 100), ("0-10", 0, 10), ("10-20", 10, 20), ("20-100", 20, 100)]
    assert length_buckets([10, 200], 100) == [("all", 0, 100), ("0-10", 0, 10), ("10-100", 10, 100)]
    made = rows(LABELS, [result([8, 9, 10, 19, 20], [1, 2, 3, 4, 5])], 8, SETTINGS)
    taus = {row["length_bucket"]: row["value"] for row in made if row["metric"] == "tau_pooled"}
    assert taus == {"all": 3.0, "0-10": 1.5, "10-20": 3.5, "20-100": 5.0}


def test_a_bucket_without_verifications_has_no_row() -> None:
    made = rows(LABELS, [result([5], [2])], 4, SETTINGS)
    assert {row["length_bucket"] for row in made} == {"all", "0-10"}


def test_slot_accuracy_is_over_all_anchors_in_bounds_and_given_prefix_over_those_right_so_far() -> None:
    scored = result([1], [1])
    scored.hits = np.array([[1, 1, 0], [1, 0, 1], [0, 1, 1], [1, 0, 0]], dtype=bool)
    scored.in_bounds = np.array([[1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 0, 0]], dtype=bool)
    scored.anchor_contexts = np.array([1, 2, 3, 4])
    made = rows(LABELS, [scored], 4, SETTINGS)
    assert value(made, "slot_accuracy_1")["value"] == pytest.approx(3 / 4)
    assert value(made, "slot_accuracy_2")["value"] == pytest.approx(2 / 3)
    assert value(made, "slot_accuracy_3")["value"] == pytest.approx(2 / 3)
    assert value(made, "slot_accuracy_given_prefix_1")["value"] == pytest.approx(3 / 4)
    assert value(made, "slot_accuracy_given_prefix_2")["value"] == pytest.approx(1 / 2)
    assert value(made, "slot_accuracy_given_prefix_3")["value"] == 0.0
    assert not any(row["metric"].startswith("slot_accuracy_4") for row in made), "three tokens are drafted"


def test_a_request_alone_has_an_interval_of_no_width() -> None:
    row = value(rows(LABELS, [result([1, 2], [1, 4])], 4, SETTINGS), "tau_pooled")
    assert row["ci_low"] == row["value"] == row["ci_high"] == 2.5


def test_intervals_are_the_same_for_the_same_seed_and_hold_the_value() -> None:
    generator = np.random.default_rng(0)
    top, bottom = generator.uniform(1, 4, (50, 2)), np.ones((50, 2))
    first = ratio_intervals(top, bottom, resamples=300, confidence=0.95, seed=1)
    again = ratio_intervals(top, bottom, resamples=300, confidence=0.95, seed=1)
    other = ratio_intervals(top, bottom, resamples=300, confidence=0.95, seed=2)
    assert all((one == two).all() for one, two in zip(first, again, strict=True))
    assert (first[1] != other[1]).any()
    assert (first[1] < first[0]).all()
    assert (first[0] < first[2]).all()


def test_intervals_cover_the_truth_about_as_often_as_they_claim() -> None:
    generator = np.random.default_rng(3)
    truth, covered, trials = 2.5, 0, 300
    for trial in range(trials):
        verifications = generator.integers(5, 30, 40).astype(np.float64)
        # Requests differ from one another, so that resampling verifications instead of requests would cover too little.
        tokens = verifications * np.clip(generator.normal(truth, 0.6, 40), 1, 4)
        _, low, high = ratio_intervals(
            tokens[:, None], verifications[:, None], resamples=200, confidence=0.9, seed=trial
        )
        covered += bool(low[0] <= truth <= high[0])
    assert 0.84 < covered / trials < 0.95


def test_a_metric_that_no_request_has_part_in_is_nan_and_makes_no_row() -> None:
    values, low, high = ratio_intervals(np.zeros((3, 1)), np.zeros((3, 1)), resamples=20, confidence=0.9, seed=0)
    assert np.isnan([values[0], low[0], high[0]]).all()
    made = rows(LABELS, [result([1], [1])], 4, SETTINGS)
    assert not any(row["convention"] == UNCLIPPED for row in made)
    assert all(np.isfinite([row["value"], row["ci_low"], row["ci_high"]]).all() for row in made)


def test_some_of_the_requests_give_the_rows_that_they_would_give_alone() -> None:
    results = [result([1, 5], [4, 2], whole=1), result([30], [3]), result([2, 3], [1, 1])]
    counted = Counted(SETTINGS.buckets())
    for item in results:
        counted.add(item)
    alone = [row for row in rows(LABELS, [results[0], results[2]], 4, SETTINGS) if row["length_bucket"] == "all"]
    assert rows_of_counts(LABELS, counted.of_requests([0, 2]), 4, SETTINGS) == alone
    counted.add(results[1])
    assert len(counted) == 4
    assert len(Counted(SETTINGS.buckets())) == 0
