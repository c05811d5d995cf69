"""Ready samples: token ids and loss masks taken as they are, from rows that say them or from an earlier dataset version.

Nothing is generated, rendered or tokenised. Memory is one row group. Costs, on one core at 2,200 tokens a sample: 0.5 ms a
JSONL line; an earlier version is copied and checked at 200 MB/s.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dflash.base.canonical import canonical_json
from dflash.base.errors import ConfigError, CorruptError, PermanentError
from dflash.base.files import read_json, write_json
from dflash.base.records import Counts
from dflash.base.stage import HostContext, Outputs
from dflash.data.preflight import require_room
from dflash.data.prompts import messages_id, messages_of
from dflash.data.prompts_params import PromptsParams
from dflash.data.rows import MalformedRow, count_rows, kind_of, read_source, shown
from dflash.data.samples import NO_MESSAGES, SPLITS, content_digest, parent_record, update_content
from dflash.data.schemas import SAMPLES
from dflash.data.tables import ROW_GROUP, ShardedWriter, list_array, read_pieces, rows_of, shards_of

FINISHED = ("stop", "length")


def write_imported(
    path: Path,
    params: PromptsParams,
    workdir: Path,
    host_context: HostContext,
    counts: Counts,
    reject: Callable[[int, MalformedRow], None],
) -> tuple[list[str], dict[str, Any]]:
    """Writes `samples.parquet` from rows of `input_ids` and `loss_mask`; returns the files and what they add up to.

    Raises:
        ConfigError: a malformed row of a source that does not skip them, or no row at all.
    """
    if params.huggingface is None:
        size = path.stat().st_size
        what = f"importing {params.name!r}"
        require_room(workdir, disk=size, memory=600_000_000, what=what, progress=host_context.progress)
    tokens = trained = 0
    expected = count_rows(path, params)
    with ShardedWriter(workdir / "samples.parquet", SAMPLES) as writer:
        rows: list[dict[str, Any]] = []
        for row in read_source(path, params):
            counts.total += 1
            try:
                rows.append(sample_of(row.values(), params, row.where))
            except MalformedRow as error:
                if params.malformed == "stop":
                    raise
                counts.error += 1
                counts.reasons[error.reason] = counts.reasons.get(error.reason, 0) + 1
                reject(row.number, error)
                continue
            counts.ok += 1
            tokens += len(rows[-1]["input_ids"])
            trained += int(rows[-1]["loss_mask"].sum())
            if len(rows) == ROW_GROUP:
                writer.append(samples_table(rows))
                if expected is not None:
                    host_context.progress.update(min(counts.total, expected), expected + 1, "rows")
                rows = []
            if params.limit is not None and counts.ok >= params.limit:
                break
        if rows:
            writer.append(samples_table(rows))
    if not counts.ok:
        raise ConfigError(f"source {params.name!r} holds no sample", where=str(path), remedy="Give at least one row.")
    return [file.name for file in writer.files], {"samples": counts.ok, "tokens": tokens, "trainable_tokens": trained}


def sample_of(values: dict[str, Any], params: PromptsParams, where: str) -> dict[str, Any]:
    """One row, checked: id, source, messages, input_ids int32 [S], loss_mask bool [S], finish_reason.

    Its id is that of the messages it answers, where the row has them, so that it meets the same prompt of another source;
    else that of its tokens.

    Raises:
        MalformedRow: names the field and the value given.
    """
    ids = _numbers(values, "input_ids", where)
    mask = _numbers(values, "loss_mask", where)
    if len(ids) != len(mask):
        raise MalformedRow(
            f"`input_ids` has {len(ids)} entries and `loss_mask` {len(mask)}", where=where, reason="lengths differ"
        )
    if ids.min() < 0 or ids.max() >= 2**31:
        bad = ids[(ids < 0) | (ids >= 2**31)][0]
        raise MalformedRow(f"`input_ids` holds {bad}, which is no token id", where=where, reason="not a token id")
    if not np.isin(mask, (0, 1)).all():
        bad = mask[~np.isin(mask, (0, 1))][0]
        raise MalformedRow(f"`loss_mask` holds {bad}, not 0 or 1", where=where, reason="mask not 0 or 1")
    if not mask[1:].any():
        raise MalformedRow(
            "`loss_mask` is zero throughout: nothing would be learnt",
            where=where,
            remedy="Mark the tokens that the target wrote with 1.",
            reason="zero mask",
        )
    known = [params.messages_field, params.conversations_field]
    if any(values.get(name) is not None for name in known):
        messages = messages_of(values, params.model_copy(update={"answers": "drop"}), where)
        name, text = messages_id(messages), canonical_json(messages).decode()
    else:
        name = hashlib.sha256(ids.astype("<i4").tobytes() + mask.astype("u1").tobytes()).hexdigest()
        text = NO_MESSAGES
    reason = values.get("finish_reason")
    return {
        "id": name,
        "source": params.name,
        "messages": text,
        "input_ids": ids.astype(np.int32),
        "loss_mask": mask.astype(bool),
        "finish_reason": reason if reason in FINISHED else "unknown",
    }


def _numbers(values: dict[str, Any], field: str, where: str) -> np.ndarray:
    given = values.get(field)
    if not isinstance(given, list) or not given:
        raise MalformedRow(
            f"`{field}` is {kind_of(given)}, not a list of whole numbers: {shown(given)}",
            where=where,
            remedy="An imported row has `input_ids` and `loss_mask`, as long as each other.",
            reason=f"no {field}",
        )
    try:
        found = np.asarray(given)
    except (ValueError, OverflowError):
        found = np.zeros(1, dtype=object)
    if found.ndim != 1 or found.dtype.kind not in "iub":
        raise MalformedRow(
            f"`{field}` holds more than whole numbers: {shown(given)}", where=where, reason=f"no {field}"
        )
    return found.astype(np.int64)


def samples_table(rows: list[dict[str, Any]]) -> pa.Table:
    """Rows of `sample_of` as `schemas.SAMPLES`. Spans are written only where the mask is more than "from the prompt on"."""
    lengths = np.array([len(row["input_ids"]) for row in rows], dtype=np.int64)
    prompts, spans = [], []
    for row in rows:
        edges = np.flatnonzero(np.diff(np.concatenate([[False], row["loss_mask"], [False]]).astype(np.int8)))
        prompts.append(max(1, int(edges[0])))
        whole = len(edges) == 2 and edges[0] >= 1 and edges[1] == len(row["loss_mask"])
        spans.append(None if whole else edges.tolist())
    return pa.table(
        {
            "id": [row["id"] for row in rows],
            "source": [row["source"] for row in rows],
            "messages": [row["messages"] for row in rows],
            "input_ids": list_array(np.concatenate([row["input_ids"] for row in rows]), lengths),
            "prompt_length": pa.array(prompts, type=pa.int32()),
            "finish_reason": [row["finish_reason"] for row in rows],
            "length": pa.array(lengths, type=pa.int32()),
            "loss_spans": pa.array(spans, type=pa.list_(pa.int32())),
        },
        schema=SAMPLES,
    )


def write_version(path: Path, workdir: Path, host_context: HostContext, about: dict[str, Any]) -> Outputs:
    """Takes over an earlier dataset version, train then validation: `samples.parquet`, and `parent.json` for comparison.

    Raises:
        CorruptError: its files are damaged, or are not those that `dataset.json` describes.
        PermanentError: too little disk.
    """
    tables = {split: path.parent / f"{split}.parquet" for split in SPLITS}
    total = sum(rows_of(table) for table in tables.values())
    size = sum(shard.stat().st_size for table in tables.values() for shard in shards_of(table))
    require_room(
        workdir, disk=size, memory=600_000_000, what=f"taking over {total:,} samples", progress=host_context.progress
    )
    content = {split: hashlib.sha256() for split in SPLITS}
    counts = Counts()
    with ShardedWriter(workdir / "samples.parquet", SAMPLES) as writer:
        for split, table in tables.items():
            for piece in read_pieces(table, SAMPLES):
                update_content(content[split], piece)
                writer.append(piece)
                counts.total += piece.num_rows
                counts.ok += piece.num_rows
                host_context.progress.update(counts.ok, total, "samples")
    found, recorded = content_digest(content), read_json(path).get("digest")
    if found != recorded:
        raise CorruptError(
            f"the samples beside it have digest {found[:12]}, it says {str(recorded)[:12]}",
            where=str(path),
            remedy="Give the dataset.json of a whole dataset version.",
        )
    if not counts.ok:
        raise PermanentError("the earlier version holds no sample", where=str(path))
    write_json(workdir / "parent.json", parent_record(path))
    files = [*(file.name for file in writer.files), "parent.json"]
    return Outputs(files, counts, {"samples": counts.ok, "digest": found, **about})
