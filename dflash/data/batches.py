"""The batch plan: which samples make up which batch of which step, a pure function of (dataset key, batching params, step).

Samples fall into buckets by length. Every epoch shuffles the samples of each bucket, cuts them into batches of the
bucket's size (the most samples whose longest possible padding stays within the token budget), and shuffles the
batches. A bucket's batch size does not depend on the epoch, so every epoch has the same number of batches and any
step is found without walking there. Steps take `batches_per_step` batches from the endless row of epochs, across
their boundaries. Nothing here depends on ranks or on arrival order: batch i of a step goes to whoever the topology
says.

The generator is counter-based (Philox keyed by dataset, seed and epoch), used for raw bits only, whose values numpy
guarantees for ever; the order is a stable sort of them. Costs, at 1.1 M samples on one core: 1 s an epoch, 18 MB,
then under 1 ms a step. No torch: the trainer converts.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import numpy as np
import pyarrow as pa

from dflash.base.canonical import canonical_json, digest, short_digest
from dflash.base.errors import CorruptError, PermanentError
from dflash.data.buckets_params import BucketsParams
from dflash.data.schemas import SAMPLES
from dflash.data.tables import lists_of, open_table, read_group, shards_of

STEPS_REMEMBERED = 4
DEALT_TO = (2, 3, 4)
"""Numbers of ranks that the batches of a step are dealt out evenly to."""


@dataclass(frozen=True)
class Batch:
    """One batch.

    batch_id: 12 hex digits, a digest of the plan, the place in it and the samples. epoch, index: its place, from 0.
    bucket: which bucket it came from. rows [b]: indices into `train.parquet`. lengths [b]: tokens, cut to max_seq_len.
    """

    batch_id: str
    epoch: int
    index: int
    bucket: int
    rows: np.ndarray
    lengths: np.ndarray

    @property
    def padded_tokens(self) -> int:
        """Tokens that the batch occupies, padding counted."""
        return len(self.lengths) * int(self.lengths.max())

    @property
    def padding_share(self) -> float:
        """Share of those that are padding."""
        return 1.0 - int(self.lengths.sum()) / self.padded_tokens


@dataclass(frozen=True)
class EpochOrder:
    """One epoch: `rows` [n] in order of bucket and batch; batch i is `rows[starts[i]:ends[i]]`, of bucket `buckets[i]`."""

    rows: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    buckets: np.ndarray


def bucket_edges(lengths: np.ndarray, params: BucketsParams) -> np.ndarray:
    """Upper edges (inclusive, ascending) of the buckets: the given ones, or those of equal count.

    Args:
        lengths: tokens of each training sample [n], n > 0, already cut to max_seq_len.
    """
    if params.edges is not None:
        return np.asarray(params.edges, dtype=np.int64)
    shares = np.arange(1, params.quantiles + 1) / params.quantiles
    return np.unique(np.quantile(lengths, shares, method="inverted_cdf")).astype(np.int64)


class BatchPlan:
    """The batches of every step.

    Args:
        lengths: tokens of each training sample [n], in the order of `train.parquet`.
        sample_ids: their ids [n]; they enter the batch ids.
        params: the `batching` section.
        dataset_key: key of the dataset stage.

    Raises:
        PermanentError: there is no sample, or lengths and ids do not fit together.
    """

    def __init__(self, lengths: np.ndarray, sample_ids: Sequence[str], params: BucketsParams, dataset_key: str) -> None:
        if len(lengths) == 0 or len(lengths) != len(sample_ids) or int(np.min(lengths)) < 1:
            raise PermanentError(
                f"no batches can be made of {len(lengths)} lengths and {len(sample_ids)} ids; "
                "every sample needs at least one token",
                where=f"dataset {dataset_key}",
                remedy="Look at the counts in its dataset.json.",
            )
        self.params = params
        self.dataset_key = dataset_key
        self.sample_ids = sample_ids
        self.lengths = np.minimum(np.asarray(lengths, dtype=np.int64), params.max_seq_len)
        self.edges = bucket_edges(self.lengths, params)
        self.bucket_of = np.searchsorted(self.edges, self.lengths, side="left").astype(np.int32)
        self.samples = np.bincount(self.bucket_of, minlength=len(self.edges))
        self.longest = np.zeros(len(self.edges), dtype=np.int64)
        np.maximum.at(self.longest, self.bucket_of, self.lengths)
        self.batch_sizes = np.minimum(params.max_batch_size, params.token_budget // np.maximum(self.longest, 1))
        self.batches = -(-self.samples // self.batch_sizes)
        self._starts, self._ends, self._buckets = self._bounds()
        decisive = {name: value for name, value in params.keyed_values().items() if name != "shift_warning"}
        self._identity = digest({"dataset": dataset_key, "batching": decisive})
        self._epochs: OrderedDict[int, EpochOrder] = OrderedDict()
        self._steps: OrderedDict[int, list[Batch]] = OrderedDict()

    def _bounds(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Where each batch starts and ends in an epoch's rows, and its bucket, before batches are shuffled."""
        buckets = np.repeat(np.arange(len(self.edges)), self.batches)
        first_batch = np.cumsum(self.batches) - self.batches
        first_row = np.cumsum(self.samples) - self.samples
        within = np.arange(len(buckets)) - first_batch[buckets]
        starts = first_row[buckets] + within * self.batch_sizes[buckets]
        ends = np.minimum(starts + self.batch_sizes[buckets], (first_row + self.samples)[buckets])
        return starts, ends, buckets

    @property
    def batches_per_epoch(self) -> int:
        """The same for every epoch."""
        return len(self._starts)

    @property
    def steps_per_epoch(self) -> float:
        """Not a whole number in general, since steps cross epoch boundaries."""
        return self.batches_per_epoch / self.params.batches_per_step

    def epoch(self, epoch: int) -> EpochOrder:
        """The order of one epoch, from 0. The last two asked for are remembered."""
        if epoch not in self._epochs:
            self._epochs[epoch] = self._shuffled(epoch)
            if len(self._epochs) > 2:
                self._epochs.popitem(last=False)
        self._epochs.move_to_end(epoch)
        return self._epochs[epoch]

    def _shuffled(self, epoch: int) -> EpochOrder:
        name = canonical_json(["order", self.dataset_key, self.params.seed, epoch])
        key = int.from_bytes(hashlib.sha256(name).digest()[:16], "little")
        bits = np.random.Philox(key=key).random_raw(len(self.lengths) + self.batches_per_epoch)
        by_chance = np.argsort(bits[: len(self.lengths)], kind="stable")
        rows = by_chance[np.argsort(self.bucket_of[by_chance], kind="stable")]
        order = np.argsort(bits[len(self.lengths) :], kind="stable")
        return EpochOrder(rows, self._starts[order], self._ends[order], self._buckets[order])

    def batch(self, number: int) -> Batch:
        """Batch `number` (from 0) of the endless row of epochs."""
        epoch, index = divmod(number, self.batches_per_epoch)
        order = self.epoch(epoch)
        rows = order.rows[order.starts[index] : order.ends[index]]
        ids = [str(self.sample_ids[row]) for row in rows.tolist()]
        name = short_digest({"plan": self._identity, "epoch": epoch, "index": index, "samples": ids})
        return Batch(name, epoch, index, int(order.buckets[index]), rows, self.lengths[rows])

    def step(self, step_index: int) -> list[Batch]:
        """The batches of one step (from 0): `batches_per_step` of them, in an order that deals them out evenly.

        The last steps asked for are remembered: ranks ask batch by batch, and look ahead.

        Raises:
            ValueError: a negative step.
        """
        if step_index < 0:
            raise ValueError(f"steps count from 0; {step_index} was asked for")
        if step_index not in self._steps:
            first = step_index * self.params.batches_per_step
            batches = [self.batch(number) for number in range(first, first + self.params.batches_per_step)]
            self._steps[step_index] = evenly_dealt(batches)
            if len(self._steps) > STEPS_REMEMBERED:
                self._steps.popitem(last=False)
        return list(self._steps[step_index])


def evenly_dealt(batches: Sequence[Batch]) -> list[Batch]:
    """The batches of a step in an order in which batch i going to rank i mod M gives every rank like work, for M of 2 to 4.

    Anchors are drawn by sample, so a batch of many short samples costs a drafter many times what one long sample does; a step
    is as slow as its slowest rank (2:2 at six unordered batches lost 17% to that on H200s). Starts from the largest first and
    swaps pairs while that helps. A function of the sizes alone; 12 batches take about a millisecond.
    """
    order = sorted(batches, key=lambda batch: (-len(batch.rows), -batch.padded_tokens))
    costs = np.array([len(batch.rows) for batch in order])
    ranks = [count for count in DEALT_TO if count < len(order)]

    def unevenness(costs: np.ndarray) -> float:
        return sum(max(costs[rank::count].sum() for rank in range(count)) * count for count in ranks)

    best, improved = unevenness(costs), bool(ranks)
    while improved:
        improved = False
        for left, right in itertools.combinations(range(len(order)), 2):
            if costs[left] == costs[right]:
                continue
            costs[[left, right]] = costs[[right, left]]
            found = unevenness(costs)
            if found < best:
                best, improved = found, True
                order[left], order[right] = order[right], order[left]
            else:
                costs[[left, right]] = costs[[right, left]]
    return order


class Samples:
    """The samples of one table: ids, lengths and loss masks in memory, token ids read by row group when asked for.

    ids [n]; lengths, prompt_lengths [n] in tokens, uncut; `sources` [n] where asked for. 230 bytes a sample. Decoded row
    groups stay in memory up to `cache_bytes` (4 bytes a token), least recently used out first; a cold row costs one row
    group (12 ms at 2,200 tokens a row).

    Raises:
        CorruptError: the file is missing, damaged, or holds a prompt longer than its sample.
    """

    def __init__(self, path: Path, cache_bytes: int = 1 << 30) -> None:
        self.path = path
        self.cache_bytes = cache_bytes
        self.ids: list[str] = []
        self._files = [(shard, open_table(shard, SAMPLES)) for shard in shards_of(path)]
        self._places = [
            (number, group) for number, (_, file) in enumerate(self._files) for group in range(file.num_row_groups)
        ]
        lengths, prompts, spans = [], [], []
        for number, group in self._places:
            piece = self._read(number, group, ["id", "length", "prompt_length", "loss_spans"])
            self.ids.extend(piece.column("id").to_pylist())
            if piece.column("length").null_count:
                lengths.append(lists_of(self._read(number, group, ["input_ids"]), "input_ids")[1])
            else:
                lengths.append(piece.column("length").to_numpy().astype(np.int64))
            prompts.append(piece.column("prompt_length").to_numpy().astype(np.int64))
            spans.append(lists_of(piece, "loss_spans"))
        self.lengths = _joined(lengths)
        self.prompt_lengths = _joined(prompts)
        self._span_ends = np.concatenate([[0], np.cumsum(_joined([count for _, count in spans]))])
        self._span_values = _joined([values.astype(np.int64) for values, _ in spans])
        if np.any(self.prompt_lengths > self.lengths) or np.any(self.prompt_lengths < 1):
            raise CorruptError("a prompt is empty or longer than its sample", where=str(path))
        self._first = np.cumsum([0, *(len(group) for group in lengths)])[:-1]
        self._groups: OrderedDict[int, tuple[np.ndarray, np.ndarray]] = OrderedDict()
        self._held = 0

    def __len__(self) -> int:
        return len(self.ids)

    def tokens(self, row: int) -> np.ndarray:
        """Token ids of one sample, int32 [length], prompt and completion."""
        group = int(np.searchsorted(self._first, row, side="right")) - 1
        values, offsets = self._group(group)
        place = row - int(self._first[group])
        return values[offsets[place] : offsets[place + 1]]

    def loss_mask(self, row: int) -> np.ndarray:
        """Which tokens of one sample are trained on, bool [length]: those the target wrote, or as imported."""
        mask = np.zeros(int(self.lengths[row]), dtype=bool)
        spans = self._span_values[self._span_ends[row] : self._span_ends[row + 1]]
        for start, end in spans.reshape(-1, 2) if len(spans) else [(self.prompt_lengths[row], len(mask))]:
            mask[start:end] = True
        return mask

    def trainable(self, longest: int) -> np.ndarray:
        """Tokens trained on [n], of samples cut to `longest` tokens."""
        counts = np.maximum(np.minimum(self.lengths, longest) - self.prompt_lengths, 0)
        spanned = np.flatnonzero(np.diff(self._span_ends))
        if len(spanned):
            pairs = np.minimum(self._span_values, longest).reshape(-1, 2)
            counts[spanned] = np.add.reduceat(pairs[:, 1] - pairs[:, 0], self._span_ends[spanned] // 2)
        return counts

    def has_spans(self, row: int) -> bool:
        """Whether the loss mask is anything but "from the end of the prompt on"."""
        return bool(self._span_ends[row + 1] > self._span_ends[row])

    def _read(self, number: int, group: int, columns: list[str]) -> pa.Table:
        shard, file = self._files[number]
        return read_group(file, shard, group, columns)

    def _group(self, group: int) -> tuple[np.ndarray, np.ndarray]:
        if group not in self._groups:
            values, lengths = lists_of(self._read(*self._places[group], ["input_ids"]), "input_ids")
            self._groups[group] = values, np.concatenate([[0], np.cumsum(lengths)])
            self._held += values.nbytes
            while self._held > self.cache_bytes and len(self._groups) > 1:
                self._held -= self._groups.popitem(last=False)[1][0].nbytes
        self._groups.move_to_end(group)
        return self._groups[group]


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts])


def load_train_samples(dataset_dir: Path) -> Samples:
    """The training samples of a dataset stage's folder. Reads ids and lengths, not the tokens (1 s a million samples)."""
    return Samples(dataset_dir / "train.parquet")


def load_validation_samples(dataset_dir: Path) -> Samples:
    """The held-out samples of a dataset stage's folder."""
    return Samples(dataset_dir / "validation.parquet")


class Collated(TypedDict):
    """A batch as a dictionary of arrays, padded on the right to its longest sample S.

    input_ids int64 [b, S]; loss_mask bool [b, S], true on the completion's tokens; attention_mask bool [b, S], true on
    tokens that are no padding; sample_ids [b].
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray
    attention_mask: np.ndarray
    sample_ids: list[str]


def collate(batch: Batch, samples: Samples, pad_token_id: int) -> Collated:
    """Reads a batch's tokens, cut to the lengths the plan gives."""
    width = int(batch.lengths.max())
    input_ids = np.full((len(batch.rows), width), pad_token_id, dtype=np.int64)
    positions = np.arange(width)[None, :]
    attention_mask = positions < batch.lengths[:, None]
    loss_mask = attention_mask & (positions >= samples.prompt_lengths[batch.rows][:, None])
    for place, (row, length) in enumerate(zip(batch.rows.tolist(), batch.lengths.tolist(), strict=True)):
        input_ids[place, :length] = samples.tokens(row)[:length]
        if samples.has_spans(row):
            loss_mask[place, :length] = samples.loss_mask(row)[:length]
    return {
        "input_ids": input_ids,
        "loss_mask": loss_mask,
        "attention_mask": attention_mask,
        "sample_ids": [samples.ids[row] for row in batch.rows.tolist()],
    }
