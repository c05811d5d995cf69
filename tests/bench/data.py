"""The data road at the size of a real job: merging, bucket statistics, the batches of an epoch, near duplicates.

    python tests/bench/data.py [--disk FOLDER] [--near N] SAMPLES...

Samples come from a generator (lengths as in a real dataset, mean 2,200 tokens) and pass through the real merge: repeats and
evaluation prompts removed, split by hash, written as zstd Parquet. Each shard is deleted once written, all but its ids and
lengths, so that 1.1 M samples (10 GB of tokens) need little disk. Each size runs in a process of its own, whose peak
memory is its own. Prints one JSON line a measurement and a table.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from dflash.base.files import write_json
from dflash.base.progress import Progress
from dflash.base.records import CodeDigest, ParamsFile
from dflash.base.stage import HostContext, Inputs, Upstream
from dflash.data import buckets
from dflash.data.batches import BatchPlan
from dflash.data.buckets_params import BucketsParams
from dflash.data.dataset import Merge, describe, samples_of
from dflash.data.dataset_params import DatasetParams
from dflash.data.ledger import Ledger
from dflash.data.near import NearDuplicates
from dflash.data.schemas import COMPLETIONS, SAMPLES
from dflash.data.tables import ROW_GROUP, ShardedWriter, TableWriter, list_array

BATCHING = BucketsParams(
    token_budget=65536, max_batch_size=64, max_seq_len=8193, edges=[752, 1400, 2200, 3295, 8193], batches_per_step=8
)
REPEATED = 100
"""One in so many completions answers a prompt that another one has answered."""


def lengths_of(generator: np.random.Generator, count: int) -> np.ndarray:
    """Lengths of a real dataset: long-tailed, mean about 2,200 tokens, at most 8,193."""
    drawn = generator.lognormal(7.5, 0.68, count)
    return np.clip(drawn, 40, 8193).astype(np.int64)


def completions(count: int) -> Iterator[pa.Table]:
    """Pieces of `schemas.COMPLETIONS`, a row group each. Tokens are slices of one pool, so that making them costs little."""
    generator = np.random.default_rng(1)
    pool = np.minimum(generator.zipf(1.3, 1 << 21), 151_000).astype(np.int32)
    for first in range(0, count, ROW_GROUP):
        size = min(ROW_GROUP, count - first)
        lengths = lengths_of(generator, size)
        prompts = np.minimum(lengths // 4 + 1, 600)
        starts = generator.integers(0, len(pool) - 8200, size)
        numbers = [
            number - number % REPEATED if number % REPEATED == 1 else number for number in range(first, first + size)
        ]
        ids = [hashlib.sha256(str(number).encode()).hexdigest() for number in numbers]
        whole = [pool[start : start + length] for start, length in zip(starts, lengths, strict=True)]
        yield pa.table(
            {
                "id": ids,
                "source": ["bench"] * size,
                "messages": [f'[{{"content":"question {number}","role":"user"}}]' for number in numbers],
                "prompt_ids": list_array(
                    np.concatenate([row[:cut] for row, cut in zip(whole, prompts, strict=True)]), prompts
                ),
                "completion_ids": list_array(
                    np.concatenate([row[cut:] for row, cut in zip(whole, prompts, strict=True)]), lengths - prompts
                ),
                "finish_reason": ["stop"] * size,
                "seed": [0] * size,
            },
            schema=COMPLETIONS,
        )


class Thinned(ShardedWriter):
    """Writes whole shards, then keeps of each only what bucket statistics read."""

    def __init__(self, path: Path, kept: TableWriter) -> None:
        super().__init__(path, SAMPLES)
        self.kept = kept
        self.bytes = 0

    def append(self, rows: pa.Table) -> None:
        super().append(rows)
        empty = pa.array([[0]] * rows.num_rows, type=pa.list_(pa.int32()))
        place = rows.schema.get_field_index("input_ids")
        self.kept.append(rows.set_column(place, SAMPLES.field("input_ids"), empty))
        self.drop(self.files[:-1])

    def drop(self, files: list[Path]) -> None:
        """Deletes shards that are written."""
        for path in files:
            if path.exists():
                self.bytes += path.stat().st_size
                path.unlink()


def merge(folder: Path, count: int) -> dict[str, Any]:
    """Merges `count` completions; leaves a dataset folder whose samples have lengths but one token each."""
    dataset = folder / "dataset"
    dataset.mkdir()
    excluded = {hashlib.sha256(str(number).encode()).hexdigest() for number in range(0, count, 1000)}
    spent = time.perf_counter()
    for _ in completions(min(count, 20 * ROW_GROUP)):
        pass
    making = (time.perf_counter() - spent) / min(count, 20 * ROW_GROUP)
    start, cpu = time.perf_counter(), time.process_time()
    with Ledger(folder / "ledger.jsonl") as ledger, TableWriter(dataset / "train.parquet", SAMPLES) as kept:
        found = Merge(DatasetParams(validation_share=0.01), excluded, ledger)
        writer = Thinned(folder / "whole.parquet", kept)
        with writer, ShardedWriter(folder / "validation.parquet", SAMPLES) as held_out:
            for split, rows in found.rows("bench", (samples_of(piece) for piece in completions(count))):
                (writer if split == "train" else held_out).append(rows)
        writer.drop(writer.files)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    write_json(dataset / "dataset.json", {**describe(found), "parent": None})
    counts = ledger.counts
    assert counts.total == count == counts.ok + counts.skipped
    tokens = sum(int(side.all_lengths().sum(dtype=np.int64)) for side in found.sides.values())
    return {
        "merge_s": round(seconds, 1),
        "merge_cpu_s": round(cpu, 1),
        "generator_s": round(making * count, 1),
        "samples_per_s": round(count / seconds),
        "tokens": tokens,
        "million_tokens_per_s": round(tokens / seconds / 1e6, 1),
        "written_gb": round(writer.bytes / 1e9, 2),
        "reasons": counts.reasons,
        "merge_peak_gb": peak_gb(),
    }


def statistics(folder: Path) -> dict[str, Any]:
    """The buckets stage, then all batches of an epoch."""
    code = CodeDigest(digest="0" * 64, modules={})
    document = ParamsFile(stage="dataset", key="0" * 12, params={}, origins={}, upstream={}, code=code)
    inputs = Inputs({"dataset": Upstream(folder / "dataset", document, None)})
    start, cpu = time.perf_counter(), time.process_time()
    buckets.run(BATCHING, inputs, folder, HostContext(progress=Progress(quiet=True)))
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    samples = buckets.load_train_samples(folder / "dataset")
    start, epoch_cpu = time.perf_counter(), time.process_time()
    plan = BatchPlan(samples.lengths, samples.ids, BATCHING, "0" * 12)
    batches = sum(1 for number in range(plan.batches_per_epoch) if plan.batch(number).batch_id)
    planning, epoch_cpu = time.perf_counter() - start, time.process_time() - epoch_cpu
    found = {"buckets_s": round(seconds, 2), "buckets_cpu_s": round(cpu, 4), "epoch_s": round(planning, 2)}
    found |= {"epoch_cpu_s": round(epoch_cpu, 4)}
    return {**found, "batches": batches, "buckets_peak_gb": peak_gb()}


def near(count: int) -> dict[str, Any]:
    """Samples a second through near deduplication; one in ten is a kept one with 1% of its tokens changed."""
    generator = np.random.default_rng(2)
    keeper = NearDuplicates(0.8)
    texts = [generator.integers(0, 150_000, length, dtype=np.int32) for length in lengths_of(generator, count)]
    copies = range(9, count, 10)
    for place in copies:
        copy = texts[place - 1].copy()
        copy[generator.integers(0, len(copy), len(copy) // 100)] = 7
        texts[place] = copy
    start, _cpu = time.perf_counter(), time.process_time()
    dropped = 0
    for text in texts:
        dropped += not keeper.admit(keeper.signatures(text, np.array([len(text)]))[0])
    seconds = time.perf_counter() - start
    return {
        "near_s": round(seconds, 2),
        "near_per_s": round(count / seconds),
        "copies": len(copies),
        "dropped": dropped,
    }


def peak_gb() -> float:
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2)


def measure(what: str, count: int, folder: Path) -> dict[str, Any]:
    """Runs one measurement in a process of its own."""
    command = [sys.executable, __file__, "--part", what, "--disk", str(folder), str(count)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(arguments: list[str]) -> None:
    """Prints the measurements of all sizes."""
    parser = argparse.ArgumentParser(description="the data road at real size")
    parser.add_argument("samples", nargs="+", type=int)
    parser.add_argument("--disk", type=Path)
    parser.add_argument("--near", type=int, default=2000)
    parser.add_argument("--part", choices=["merge", "statistics", "near"])
    given = parser.parse_args(arguments)
    if given.part is not None:
        parts = {"merge": lambda: merge(given.disk, given.samples[0]), "statistics": lambda: statistics(given.disk)}
        print(json.dumps(parts.get(given.part, lambda: near(given.samples[0]))()))
        return
    rows = []
    for count in given.samples:
        with tempfile.TemporaryDirectory(dir=given.disk) as scratch:
            row = {"samples": count, **measure("merge", count, Path(scratch))}
            row |= measure("statistics", count, Path(scratch))
        rows.append(row)
        print(json.dumps({"name": f"data road, {count:,} samples", **row}), flush=True)
    for name in ("merge_cpu_s", "buckets_cpu_s", "epoch_cpu_s"):
        per_sample = [1e6 * float(row[name]) / row["samples"] for row in rows]
        line = {
            "name": f"{name[:-2]} time a sample, {rows[-1]['samples']:,} samples over {rows[0]['samples']:,}",
            "ratio": round(per_sample[-1] / max(per_sample[0], 1e-9), 3),
            "unit": "microseconds",
            "n": len(rows),
        }
        values = {"min": min(per_sample), "median": float(np.median(per_sample)), "max": max(per_sample)}
        print(json.dumps({**line, **{key: round(value, 2) for key, value in values.items()}}), flush=True)
    print(json.dumps({"name": "near duplicates", "n": given.near, **measure("near", given.near, Path())}), flush=True)
    columns = [
        "samples",
        "merge_s",
        "merge_cpu_s",
        "samples_per_s",
        "merge_peak_gb",
        "buckets_s",
        "buckets_peak_gb",
        "epoch_s",
    ]
    for row in [dict(zip(columns, columns, strict=True)), *rows]:
        print("  ".join(f"{row[name]!s:>15}" for name in columns), file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
