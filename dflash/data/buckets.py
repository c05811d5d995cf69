"""Buckets: how the training lengths are distributed, and what the token budget makes of them, before anything is trained.

Two runs at different speeds may differ in nothing but their lengths; this table is what tells. All numbers are of the plan
that training follows (`batches.py`); those that depend on the shuffle (padding) are exact for the first epoch. Costs, on one
core: 1 s and 0.4 GB a million samples, ids and lengths only; tokens are not read. No torch.

Where the dataset names a parent, the same plan is made of the parent's lengths, cut into the same buckets, and what moved is
stated and, past `shift_warning`, said aloud.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dflash.base.errors import PermanentError
from dflash.base.files import read_json, write_json
from dflash.base.records import Counts
from dflash.base.stage import HostContext, Inputs, Outputs
from dflash.data.batches import BatchPlan, load_train_samples
from dflash.data.buckets_params import BucketsParams
from dflash.data.lengths import describe_lengths, lengths_from

BARS = 32
"""Bars of the histogram, of equal width."""


def padded_by_bucket(plan: BatchPlan) -> np.ndarray:
    """Tokens that each bucket's batches occupy in the first epoch, padding counted [buckets]."""
    order = plan.epoch(0)
    by_start = np.argsort(order.starts)
    longest = np.maximum.reduceat(plan.lengths[order.rows], order.starts[by_start])
    padded = longest * (order.ends - order.starts)[by_start]
    return np.bincount(order.buckets[by_start], weights=padded, minlength=len(plan.edges)).astype(np.int64)


def bucket_table(plan: BatchPlan) -> list[dict[str, Any]]:
    """One row a bucket, empty ones included. Each of the three shares sums to 1 over the buckets."""
    tokens = np.bincount(plan.bucket_of, weights=plan.lengths, minlength=len(plan.edges)).astype(np.int64)
    padded = padded_by_bucket(plan)
    lower = [0, *plan.edges.tolist()]
    return [
        {
            "above": lower[bucket],
            "up_to": lower[bucket + 1],
            "samples": int(plan.samples[bucket]),
            "sample_share": int(plan.samples[bucket]) / int(plan.samples.sum()),
            "tokens": int(tokens[bucket]),
            "token_share": int(tokens[bucket]) / int(tokens.sum()),
            "batches": int(plan.batches[bucket]),
            "batch_share": int(plan.batches[bucket]) / plan.batches_per_epoch,
            "batch_size": int(plan.batch_sizes[bucket]) if plan.samples[bucket] else 0,
            "longest": int(plan.longest[bucket]),
            "padding_share": 1.0 - int(tokens[bucket]) / int(padded[bucket]) if padded[bucket] else 0.0,
        }
        for bucket in range(len(plan.edges))
    ]


def histogram(lengths: np.ndarray) -> dict[str, list[int]]:
    """Samples by length: `counts[i]` of them are longer than `edges[i]` and at most `edges[i + 1]` tokens."""
    width = -(-int(lengths.max()) // BARS)
    counts = np.bincount((lengths - 1) // width, minlength=BARS)
    return {"edges": [bar * width for bar in range(len(counts) + 1)], "counts": counts.tolist()}


def packed_padding(plan: BatchPlan) -> float:
    """Padding share if samples were laid end to end into rows of `token_budget` in the order of the first epoch: next fit."""
    ends = np.cumsum(plan.lengths[plan.epoch(0).rows])
    budget, rows, start = plan.params.token_budget, 0, 0
    while start < int(ends[-1]):
        start = int(ends[np.searchsorted(ends, start + budget, side="right") - 1])
        rows += 1
    return 1.0 - int(ends[-1]) / (rows * budget)


def loads(plan: BatchPlan) -> dict[str, Any]:
    """What a step and the largest batch of a plan carry, in tokens; these are what time and memory follow."""
    padded = int(padded_by_bucket(plan).sum())
    return {
        "samples": len(plan.lengths),
        "mean_length": int(plan.lengths.sum()) / len(plan.lengths),
        "tokens": int(plan.lengths.sum()),
        "batches_per_epoch": plan.batches_per_epoch,
        "steps_per_epoch": plan.steps_per_epoch,
        "tokens_per_step": int(plan.lengths.sum()) / plan.steps_per_epoch,
        "padded_tokens_per_step": padded / plan.steps_per_epoch,
        "largest_batch_tokens": int((plan.batch_sizes * plan.longest).max()),
        "padding_share": 1.0 - int(plan.lengths.sum()) / padded,
    }


def shift(plan: BatchPlan, parent: dict[str, Any]) -> dict[str, Any]:
    """What changed since the parent version: its lengths under the same budget and the same buckets, beside this one's.

    Args:
        parent: `dataset.parent_record`.
    """
    before = lengths_from(parent["length_counts"])
    most = min(int(before.max()), plan.params.max_seq_len)
    edges = [*plan.edges.tolist()[:-1], max(int(plan.edges[-1]), most)]
    params = plan.params.model_copy(update={"edges": edges})
    old = BatchPlan(before, [""] * len(before), params, parent["digest"])
    tables = bucket_table(old), bucket_table(plan)
    rows = [
        {
            "above": now["above"],
            "up_to": edges[number],
            **{
                f"{name}_{when}": row[name]
                for name in ("sample_share", "token_share", "batch_share", "batch_size")
                for when, row in (("before", was), ("now", now))
            },
        }
        for number, (was, now) in enumerate(zip(*tables, strict=True))
    ]
    found = {"parent_digest": parent["digest"], "before": loads(old), "now": loads(plan), "buckets": rows}
    return {**found, "warnings": warnings_of(found, plan.params.shift_warning)}


def warnings_of(found: dict[str, Any], threshold: float) -> list[str]:
    """What of a shift a person should know before training: one sentence each, the largest first."""
    sentences = []
    was, now = found["before"], found["now"]
    for name, words in (("mean_length", "mean length"), ("tokens_per_step", "tokens a step")):
        change = now[name] / was[name] - 1.0
        if abs(change) > threshold:
            sentences.append(
                (abs(change), f"the {words} went from {was[name]:,.0f} to {now[name]:,.0f} ({change:+.1%})")
            )
    for row in found["buckets"]:
        change = row["batch_share_now"] - row["batch_share_before"]
        if abs(change) > threshold:
            sentences.append(
                (
                    abs(change),
                    f"samples of {row['above'] + 1:,} to {row['up_to']:,} tokens made up {row['batch_share_before']:.1%} of "
                    f"the batches and now make up {row['batch_share_now']:.1%}",
                )
            )
    return [sentence for _, sentence in sorted(sentences, key=lambda pair: -pair[0])]


def describe(plan: BatchPlan, lengths: np.ndarray, trainable: np.ndarray) -> dict[str, Any]:
    """What stands in `buckets.json`, but for the shift.

    Args:
        lengths: tokens of each training sample [n], uncut. trainable: those trained on [n], after cutting.
    """
    tokens = int(plan.lengths.sum())
    padded = int(padded_by_bucket(plan).sum())
    return {
        "samples": len(plan.lengths),
        "tokens": tokens,
        "trainable_tokens": int(trainable.sum()),
        "cut_samples": int((lengths > plan.lengths).sum()),
        "cut_tokens": int((lengths - plan.lengths).sum()),
        "samples_without_anchor": int((trainable < 2).sum()),
        "length": describe_lengths(plan.lengths),
        "histogram": histogram(plan.lengths),
        "edges": plan.edges.tolist(),
        "buckets": bucket_table(plan),
        "padded_tokens": padded,
        "padding_share": 1.0 - tokens / padded,
        "packed_padding_share": packed_padding(plan),
        "budget_share": padded / (plan.batches_per_epoch * plan.params.token_budget),
        "batches_per_epoch": plan.batches_per_epoch,
        "steps_per_epoch": plan.steps_per_epoch,
    }


def run(params: BucketsParams, inputs: Inputs, workdir: Path, host_context: HostContext) -> Outputs:
    """The `buckets` stage: writes `buckets.json`.

    Raises:
        PermanentError: cut to `max_seq_len`, no sample has two trainable tokens in a row.
    """
    upstream = inputs.one("dataset")
    samples = load_train_samples(upstream.directory)
    plan = BatchPlan(samples.lengths, samples.ids, params, upstream.params.key)
    record = describe(plan, samples.lengths, samples.trainable(params.max_seq_len))
    if record["samples_without_anchor"] == record["samples"]:
        raise PermanentError(
            f"none of {record['samples']} samples has two trainable tokens in its first {params.max_seq_len} tokens",
            where="batching.max_seq_len",
            remedy="Raise it above the length of the prompts.",
        )
    parent = read_json(upstream.directory / "dataset.json").get("parent")
    record["shift"] = shift(plan, parent) if parent is not None else None
    for sentence in record["shift"]["warnings"] if record["shift"] else []:
        host_context.progress.say(f"since the parent version, {sentence}")
    write_json(workdir / "buckets.json", record)
    count = record["samples"]
    small = ("batches_per_epoch", "steps_per_epoch", "padding_share", "edges")
    return Outputs(["buckets.json"], Counts(total=count, ok=count), {name: record[name] for name in small})
