"""Buckets: a table of lengths that adds up, and that is the table of the plan training follows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from data_road import completion, context, run_dataset, upstream
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.base.errors import PermanentError
from dflash.base.stage import Inputs
from dflash.data import buckets
from dflash.data.batches import BatchPlan
from dflash.data.buckets_params import BucketsParams
from dflash.data.lengths import length_counts

PARAMS = BucketsParams(token_budget=120, max_seq_len=40, max_batch_size=8, quantiles=3, batches_per_step=2)


@pytest.fixture(scope="module")
def dataset_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 samples of 6 to 55 tokens."""
    rows = [completion(f"{number:04d}", [1] * (2 + number * 7 % 50)) for number in range(300)]
    out = tmp_path_factory.mktemp("dataset") / "out"
    run_dataset(out, {"a": rows}, validation_share=0.1)
    return out


def run(dataset_dir: Path, workdir: Path, params: BucketsParams = PARAMS) -> dict:
    """The stage, and what it wrote."""
    workdir.mkdir(exist_ok=True)
    outputs = buckets.run(params, Inputs({"dataset": upstream(dataset_dir, "dataset")}), workdir, context())
    assert outputs.files == ["buckets.json"]
    assert outputs.counts.balanced()
    return json.loads((workdir / "buckets.json").read_text())


def test_the_table_adds_up_and_is_that_of_the_plan(dataset_dir: Path, tmp_path: Path) -> None:
    record = run(dataset_dir, tmp_path)
    table = record["buckets"]
    for share in ("sample_share", "token_share", "batch_share"):
        assert sum(row[share] for row in table) == pytest.approx(1.0)
    for total, name in (("samples", "samples"), ("tokens", "tokens"), ("batches_per_epoch", "batches")):
        assert sum(row[name] for row in table) == record[total]
    assert [row["up_to"] for row in table] == record["edges"]
    assert sum(record["histogram"]["counts"]) == record["samples"]
    assert record["steps_per_epoch"] == record["batches_per_epoch"] / 2
    samples = buckets.load_train_samples(dataset_dir)
    plan = BatchPlan(samples.lengths, samples.ids, PARAMS, upstream(dataset_dir, "dataset").params.key)
    batches = [plan.batch(number) for number in range(plan.batches_per_epoch)]
    assert record["padded_tokens"] == sum(batch.padded_tokens for batch in batches)
    assert record["padding_share"] == pytest.approx(1 - record["tokens"] / record["padded_tokens"])
    for number, row in enumerate(table):
        own = [batch for batch in batches if batch.bucket == number]
        assert row["batches"] == len(own)
        assert row["samples"] == sum(len(batch.rows) for batch in own)
        assert row["padding_share"] == pytest.approx(1 - row["tokens"] / sum(batch.padded_tokens for batch in own))


def test_longer_samples_are_cut_and_what_is_cut_is_counted(dataset_dir: Path, tmp_path: Path) -> None:
    record = run(dataset_dir, tmp_path)
    lengths = buckets.load_train_samples(dataset_dir).lengths
    assert record["cut_samples"] == (lengths > 40).sum() > 0
    assert record["cut_tokens"] == np.maximum(lengths - 40, 0).sum()
    assert record["tokens"] == np.minimum(lengths, 40).sum()
    assert record["length"]["max"] == 40
    assert record["length"]["mean"] == pytest.approx(np.minimum(lengths, 40).mean())


def test_given_edges_are_taken_as_they_are_and_empty_buckets_stay(dataset_dir: Path, tmp_path: Path) -> None:
    record = run(dataset_dir, tmp_path, PARAMS.model_copy(update={"edges": [3, 20, 64]}))
    assert record["edges"] == [3, 20, 64]
    assert record["buckets"][0]["samples"] == record["buckets"][0]["batches"] == 0
    assert record["buckets"][2]["longest"] == 40


def test_quantile_buckets_hold_about_equal_counts(dataset_dir: Path, tmp_path: Path) -> None:
    record = run(dataset_dir, tmp_path, PARAMS.model_copy(update={"max_seq_len": 60}))
    assert len(record["buckets"]) == 3
    assert all(abs(row["sample_share"] - 1 / 3) < 0.05 for row in record["buckets"])


def test_samples_cut_before_anything_trainable_are_counted_and_all_of_them_abort(
    dataset_dir: Path, tmp_path: Path
) -> None:
    assert run(dataset_dir, tmp_path)["samples_without_anchor"] == 0
    with pytest.raises(PermanentError, match="two trainable tokens in its first 5 tokens"):
        run(dataset_dir, tmp_path, PARAMS.model_copy(update={"max_seq_len": 5}))


def test_equal_content_gives_equal_bytes(dataset_dir: Path, tmp_path: Path) -> None:
    run(dataset_dir, tmp_path / "one")
    run(dataset_dir, tmp_path / "two")
    assert (tmp_path / "one/buckets.json").read_bytes() == (tmp_path / "two/buckets.json").read_bytes()


def lengths_of_mean(mean: float, count: int, seed: int) -> np.ndarray:
    """Long-tailed lengths in [40, 8193] whose mean is the given one to a token."""
    drawn = np.random.default_rng(seed).lognormal(0, 0.71, count)
    low, high = 100.0, 8000.0
    while high - low > 0.01:
        middle = (low + high) / 2
        low, high = (middle, high) if np.clip(drawn * middle, 40, 8193).mean() < mean else (low, middle)
    return np.clip(drawn * low, 40, 8193).astype(np.int64)


STORY = BucketsParams(token_budget=65536, max_batch_size=32, max_seq_len=8193, edges=[752, 1400, 2200, 3295, 8193])


def two_versions() -> tuple[dict, dict]:
    """The dataset that grew from 902,087 samples of mean 2,068 to 1.1 million of mean 2,202, a tenth of each: the shift, and
    the parent as `dataset.json` would keep it."""
    before = lengths_of_mean(2068.5, 90_209, 1)
    mean_of_new = (2202.5 * 110_000 - before.sum()) / 19_791
    now = np.concatenate([before, lengths_of_mean(mean_of_new, 19_791, 2)])
    parent = {"digest": "a" * 64, "samples": len(before), "length_counts": length_counts(before)}
    return buckets.shift(BatchPlan(now, [""] * len(now), STORY, "0" * 12), parent), parent


def test_the_story_of_two_versions_is_told_by_the_shift() -> None:
    found, _ = two_versions()
    assert round(found["before"]["mean_length"]) == 2068
    assert round(found["now"]["mean_length"]) == 2202
    *shorter, longest = found["buckets"]
    assert (longest["above"] + 1, longest["up_to"]) == (3296, 8193)
    assert longest["batch_share_now"] == pytest.approx(0.466, abs=0.005)
    assert longest["batch_share_now"] - longest["batch_share_before"] > 0.03
    assert all(row["batch_share_now"] < row["batch_share_before"] for row in shorter[:3])
    assert sum(row["batch_share_now"] for row in found["buckets"]) == pytest.approx(1.0)
    assert "the mean length went from 2,068 to 2,202 (+6.5%)" in found["warnings"]
    assert found["now"]["largest_batch_tokens"] <= STORY.token_budget


def test_a_shift_under_the_threshold_warns_of_nothing() -> None:
    _, parent = two_versions()
    same = buckets.lengths_from(parent["length_counts"])
    plan = BatchPlan(same, [""] * len(same), STORY, "0" * 12)
    found = buckets.shift(plan, parent)
    assert found["warnings"] == []
    assert all(row["batch_share_before"] == row["batch_share_now"] for row in found["buckets"])


def test_a_parent_with_longer_samples_than_any_now_has_a_bucket_to_fall_into(dataset_dir: Path) -> None:
    samples = buckets.load_train_samples(dataset_dir)
    plan = BatchPlan(samples.lengths, samples.ids, PARAMS.model_copy(update={"max_seq_len": 120}), "0" * 12)
    found = buckets.shift(plan, {"digest": "a", "length_counts": {"lengths": [10, 110], "counts": [5, 5]}})
    assert found["buckets"][-1]["up_to"] == 110
    assert sum(row["sample_share_before"] for row in found["buckets"]) == pytest.approx(1.0)


def test_packing_is_what_next_fit_gives(dataset_dir: Path, tmp_path: Path) -> None:
    samples = buckets.load_train_samples(dataset_dir)
    plan = BatchPlan(samples.lengths, samples.ids, PARAMS, "0" * 12)
    rows, held = 1, 0
    for length in plan.lengths[plan.epoch(0).rows].tolist():
        if held + length > PARAMS.token_budget:
            rows, held = rows + 1, 0
        held += length
    assert buckets.packed_padding(plan) == pytest.approx(1 - plan.lengths.sum() / (rows * PARAMS.token_budget))
    assert run(dataset_dir, tmp_path)["shift"] is None


@given(st.lists(st.integers(1, 500), min_size=1, max_size=100))
@settings(max_examples=50, deadline=None)
def test_the_histogram_counts_every_length_in_its_bar(lengths: list[int]) -> None:
    drawn = buckets.histogram(np.array(lengths))
    bars = list(zip(drawn["edges"], drawn["edges"][1:], drawn["counts"], strict=False))
    assert len(drawn["edges"]) == len(drawn["counts"]) + 1
    assert all(count == sum(low < length <= high for length in lengths) for low, high, count in bars)
