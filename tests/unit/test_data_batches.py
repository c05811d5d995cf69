"""The batch plan: a pure function, every sample once an epoch, the budget never exceeded, any step found at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from data_road import completion, run_dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.base.errors import CorruptError, PermanentError
from dflash.data.batches import (
    Batch,
    BatchPlan,
    Samples,
    collate,
    evenly_dealt,
    load_train_samples,
    load_validation_samples,
)
from dflash.data.buckets_params import BucketsParams
from dflash.data.schemas import SAMPLES
from dflash.data.tables import ROW_GROUP, TableWriter, read_rows, write_table

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=80)


@st.composite
def batching(draw: st.DrawFn) -> BucketsParams:
    """Any batching params that are consistent."""
    longest = draw(st.integers(2, 250))
    edges = sorted(draw(st.sets(st.integers(1, 400), max_size=4)) | {400})
    return BucketsParams(
        max_seq_len=longest,
        token_budget=draw(st.integers(longest, 1000)),
        max_batch_size=draw(st.integers(1, 12)),
        edges=draw(st.sampled_from([None, edges])),
        quantiles=draw(st.integers(1, 6)),
        batches_per_step=draw(st.integers(1, 9)),
        seed=draw(st.integers(0, 3)),
    )


def plan_of(lengths: list[int], params: BucketsParams, key: str = "0123456789ab") -> BatchPlan:
    """A plan over samples called s0, s1, ..."""
    return BatchPlan(np.array(lengths), [f"s{row}" for row in range(len(lengths))], params, key)


def first_batches(plan: BatchPlan, count: int) -> list[Batch]:
    """The first so many batches, by walking the steps."""
    found: list[Batch] = []
    while len(found) < count:
        found.extend(plan.step(len(found) // plan.params.batches_per_step))
    return sorted(found, key=lambda batch: (batch.epoch, batch.index))[:count]


def facts(batch: Batch) -> tuple:
    """A batch as a value to compare."""
    return batch.batch_id, batch.epoch, batch.index, batch.bucket, batch.rows.tolist(), batch.lengths.tolist()


@given(LENGTHS, batching())
@settings(max_examples=80, deadline=None)
def test_every_sample_comes_once_an_epoch_within_budget_and_bucket(lengths: list[int], params: BucketsParams) -> None:
    plan = plan_of(lengths, params)
    batches = first_batches(plan, 3 * plan.batches_per_epoch)
    for epoch in range(3):
        own = [batch for batch in batches if batch.epoch == epoch]
        assert [batch.index for batch in own] == list(range(plan.batches_per_epoch))
        assert sorted(row for batch in own for row in batch.rows.tolist()) == list(range(len(lengths)))
    for batch in batches:
        assert batch.lengths.tolist() == [min(lengths[row], params.max_seq_len) for row in batch.rows]
        assert batch.padded_tokens == len(batch.rows) * max(batch.lengths) <= params.token_budget
        assert 1 <= len(batch.rows) <= params.max_batch_size
        above = 0 if batch.bucket == 0 else plan.edges[batch.bucket - 1]
        assert all(above < length <= plan.edges[batch.bucket] for length in batch.lengths)
        assert 0.0 <= batch.padding_share < 1.0


@given(LENGTHS, batching(), st.lists(st.integers(0, 40), min_size=1, max_size=6))
@settings(max_examples=60, deadline=None)
def test_any_step_asked_for_in_any_order_is_what_walking_gives(
    lengths: list[int], params: BucketsParams, steps: list[int]
) -> None:
    walked = plan_of(lengths, params)
    in_order = [[facts(batch) for batch in walked.step(step)] for step in range(max(steps) + 1)]
    fresh = plan_of(lengths, params)
    for step in steps:
        assert [facts(batch) for batch in fresh.step(step)] == in_order[step]
    numbers = [place for step in in_order for place in sorted((epoch, index) for _, epoch, index, *_ in step)]
    assert numbers == [divmod(number, walked.batches_per_epoch) for number in range(len(numbers))]


def test_the_order_is_that_of_dataset_seed_and_epoch_and_nothing_else() -> None:
    lengths = list(range(10, 210))
    params = BucketsParams(token_budget=400, max_seq_len=400, quantiles=3)

    def rows(plan: BatchPlan, epoch: int = 0) -> list[int]:
        return plan.epoch(epoch).rows.tolist()

    plan = plan_of(lengths, params)
    assert rows(plan) != rows(plan, 1)
    assert rows(plan) != rows(plan_of(lengths, params.model_copy(update={"seed": 1})))
    assert rows(plan) != rows(plan_of(lengths, params, "ba9876543210"))
    np.random.seed(5)
    assert rows(plan) == rows(plan_of(lengths, params))


def test_two_epochs_are_remembered_and_no_more() -> None:
    plan = plan_of([10] * 10, BucketsParams())
    first = plan.epoch(0)
    plan.epoch(1)
    assert plan.epoch(0) is first
    plan.epoch(1), plan.epoch(2)
    assert plan.epoch(0) is not first
    assert plan.epoch(0).rows.tolist() == first.rows.tolist()


def test_the_order_is_pinned_for_ever() -> None:
    plan = plan_of(
        [5, 9, 2, 7, 7, 3, 8, 1], BucketsParams(token_budget=18, max_seq_len=9, quantiles=2, batches_per_step=2)
    )
    assert [facts(batch) for batch in plan.step(0)] == [
        ("baa08e5c7ca8", 0, 1, 0, [5, 7, 2], [3, 1, 2]),
        ("7b7f5be99e60", 0, 0, 1, [4, 6], [7, 8]),
    ]


def test_a_batch_id_names_the_plan_the_place_and_the_samples() -> None:
    params = BucketsParams(token_budget=100, max_seq_len=20, max_batch_size=4)
    plan = plan_of([10] * 40, params)
    ids = [batch.batch_id for batch in first_batches(plan, 30)]
    assert len(set(ids)) == 30
    assert all(len(name) == 12 and int(name, 16) >= 0 for name in ids)
    renamed = BatchPlan(np.array([10] * 40), [f"t{row}" for row in range(40)], params, "0123456789ab")
    assert not set(ids) & {batch.batch_id for batch in first_batches(renamed, 30)}


def test_steps_cross_epochs_without_losing_a_batch() -> None:
    plan = plan_of([10] * 10, BucketsParams(token_budget=20, max_seq_len=20, batches_per_step=3))
    assert plan.batches_per_epoch == 5
    assert plan.steps_per_epoch == pytest.approx(5 / 3)
    assert [(batch.epoch, batch.index) for batch in plan.step(1)] == [(0, 3), (0, 4), (1, 0)]
    with pytest.raises(ValueError, match="count from 0"):
        plan.step(-1)


def sized(*counts: int) -> list[Batch]:
    """Batches of so many samples, ten tokens each."""
    return [
        Batch(f"{place:012x}", 0, place, 0, np.arange(count), np.full(count, 10)) for place, count in enumerate(counts)
    ]


@pytest.mark.parametrize(
    ("counts", "limits"),
    [
        ((1, 12, 3, 8, 4, 5), {2: 1.05, 3: 1.4}),
        ((16, 1, 1, 9, 2, 2, 7, 4, 3, 1, 12, 5), {2: 1.05, 3: 1.1, 4: 1.25}),
    ],
)
def test_every_rank_gets_its_share_of_the_many_short_samples(counts: tuple[int, ...], limits: dict[int, float]) -> None:
    dealt = [len(batch.rows) for batch in evenly_dealt(sized(*counts))]
    assert sorted(dealt) == sorted(counts)
    for ranks, limit in limits.items():
        shares = [sum(dealt[rank::ranks]) for rank in range(ranks)]
        assert max(shares) <= limit * sum(counts) / ranks


def test_the_order_in_a_step_is_a_function_of_its_batches_alone() -> None:
    names = [batch.batch_id for batch in evenly_dealt(sized(1, 12, 3, 8, 4, 5))]
    assert names == [batch.batch_id for batch in evenly_dealt(sized(1, 12, 3, 8, 4, 5))]
    assert [batch.index for batch in evenly_dealt(sized(2, 2, 2))] == [0, 1, 2]


def test_a_plan_of_nothing_is_refused() -> None:
    for lengths in ([], [3, 0]):
        with pytest.raises(PermanentError, match="no batches can be made"):
            plan_of(lengths, BucketsParams())


@pytest.fixture(scope="module")
def dataset_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of more than one row group."""
    rows = [completion(f"prompt {n}", [n % 250 + 1] * (2 + n * 7 % 13)) for n in range(ROW_GROUP + 200)]
    out = tmp_path_factory.mktemp("dataset") / "out"
    run_dataset(out, {"a": rows}, validation_share=0.02)
    return out


def test_samples_give_lengths_ids_and_tokens(dataset_dir: Path) -> None:
    rows = read_rows(dataset_dir / "train.parquet", SAMPLES)
    assert len(rows) > ROW_GROUP
    samples = Samples(dataset_dir / "train.parquet", cache_bytes=0)
    assert samples.ids == [row["id"] for row in rows]
    assert samples.lengths.tolist() == [len(row["input_ids"]) for row in rows]
    for row in (0, len(rows) - 1, ROW_GROUP, ROW_GROUP - 1, 3):
        assert samples.tokens(row).tolist() == rows[row]["input_ids"]
    assert len(load_validation_samples(dataset_dir)) == len(read_rows(dataset_dir / "validation.parquet", SAMPLES))


def test_a_collated_batch_holds_the_tokens_pads_on_the_right_and_masks_prompts(dataset_dir: Path) -> None:
    rows = read_rows(dataset_dir / "train.parquet", SAMPLES)
    samples = load_train_samples(dataset_dir)
    params = BucketsParams(token_budget=90, max_seq_len=18, quantiles=2)
    plan = BatchPlan(samples.lengths, samples.ids, params, "0123456789ab")
    supervised = 0
    for batch in first_batches(plan, 40):
        arrays = collate(batch, samples, pad_token_id=256)
        assert arrays["input_ids"].shape == arrays["loss_mask"].shape == (len(batch.rows), batch.lengths.max())
        assert arrays["sample_ids"] == [rows[row]["id"] for row in batch.rows]
        for place, row in enumerate(batch.rows):
            length = min(len(rows[row]["input_ids"]), 18)
            assert arrays["input_ids"][place, :length].tolist() == rows[row]["input_ids"][:length]
            assert (arrays["input_ids"][place, length:] == 256).all()
            assert arrays["attention_mask"][place].tolist() == [p < length for p in range(batch.lengths.max())]
            mask = [rows[row]["prompt_length"] <= p < length for p in range(batch.lengths.max())]
            assert arrays["loss_mask"][place].tolist() == mask
            supervised += sum(mask)
    assert supervised > 0


def test_pieces_of_any_size_give_the_same_bytes(tmp_path: Path, dataset_dir: Path) -> None:
    rows = [row for _ in range(3) for row in read_rows(dataset_dir / "train.parquet", SAMPLES)]
    written = set()
    for size in (97, ROW_GROUP, 2500, len(rows)):
        with TableWriter(tmp_path / "piecewise.parquet", SAMPLES) as writer:
            for start in range(0, len(rows), size):
                writer.append(rows[start : start + size])
        written.add((tmp_path / "piecewise.parquet").read_bytes())
        assert read_rows(tmp_path / "piecewise.parquet", SAMPLES) == rows
    assert len(written) == 1


def test_damaged_samples_are_refused(dataset_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    with pytest.raises(CorruptError, match=r"train\.parquet"):
        load_train_samples(tmp_path)
    data = bytearray((dataset_dir / "train.parquet").read_bytes())
    data[len(data) // 4] ^= 255
    path.write_bytes(data)
    with pytest.raises(CorruptError, match=r"train\.parquet"):
        load_train_samples(tmp_path).tokens(0)
    row = {**read_rows(dataset_dir / "train.parquet", SAMPLES)[0], "prompt_length": 10_000}
    write_table(path, SAMPLES, [row])
    with pytest.raises(CorruptError, match="longer than its sample"):
        load_train_samples(tmp_path)


def test_planning_batches_needs_no_torch() -> None:
    code = "import sys, dflash.data.batches, dflash.data.buckets, dflash.data.dataset; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
