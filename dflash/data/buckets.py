"""Buckets: how the training lengths are distributed, and what the token budget makes of them, before anything is trained.

Two runs at different speeds may differ in nothing but their lengths; this table is what tells. All numbers are of the plan
that training follows (`batches.py`); those that depend on the shuffle (padding) are exact for the first epoch. Costs, on one
core: reading the training set once (600 MB/s) and 1.5 s a million samples. No torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dflash.base.errors import PermanentError
from dflash.base.files import write_json
from dflash.base.records import Counts
from dflash.base.stage import HostContext, Inputs, Outputs
from dflash.data.batches import BatchPlan, load_train_samples
from dflash.data.buckets_params import BucketsParams
from dflash.data.lengths import describe_lengths

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


def describe(plan: BatchPlan, lengths: np.ndarray, prompt_lengths: np.ndarray) -> dict[str, Any]:
    """What stands in `buckets.json`.

    Args:
        lengths, prompt_lengths: tokens of each training sample and of its prompt [n], uncut.
    """
    tokens = int(plan.lengths.sum())
    padded = int(padded_by_bucket(plan).sum())
    return {
        "samples": len(plan.lengths),
        "tokens": tokens,
        "trainable_tokens": int(np.maximum(plan.lengths - prompt_lengths, 0).sum()),
        "cut_samples": int((lengths > plan.lengths).sum()),
        "cut_tokens": int((lengths - plan.lengths).sum()),
        "samples_without_anchor": int((plan.lengths - prompt_lengths < 2).sum()),
        "length": describe_lengths(plan.lengths),
        "histogram": histogram(plan.lengths),
        "edges": plan.edges.tolist(),
        "buckets": bucket_table(plan),
        "padded_tokens": padded,
        "padding_share": 1.0 - tokens / padded,
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
    record = describe(plan, samples.lengths, samples.prompt_lengths)
    if record["samples_without_anchor"] == record["samples"]:
        raise PermanentError(
            f"none of {record['samples']} samples has two trainable tokens in its first {params.max_seq_len} tokens",
            where="batching.max_seq_len",
            remedy="Raise it above the length of the prompts.",
        )
    write_json(workdir / "buckets.json", record)
    count = record["samples"]
    small = ("batches_per_epoch", "steps_per_epoch", "padding_share", "edges")
    return Outputs(["buckets.json"], Counts(total=count, ok=count), {name: record[name] for name in small})
