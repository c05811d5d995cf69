"""What a dataset version is, apart from how it was made: its two sides, its content digest, what a child keeps of it.

Digesting costs one pass over the tokens (1 GB/s).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dflash.base.canonical import digest
from dflash.base.errors import CorruptError
from dflash.base.files import read_json
from dflash.data.tables import lists_of

SPLITS = ("train", "validation")
NO_MESSAGES = "[]"
"""The messages of an imported sample that came without any: nobody can tell what it asks."""


def update_content(content: Any, rows: pa.Table) -> None:
    """Feeds ids, tokens and loss masks, each with its length, into the digest of one side."""
    values, lengths = lists_of(rows, "input_ids")
    tokens = memoryview(np.ascontiguousarray(values, dtype="<i4").tobytes())
    ends = np.cumsum(lengths).tolist()
    ids, prompts = rows.column("id").to_pylist(), rows.column("prompt_length").to_pylist()
    spans = rows.column("loss_spans").to_pylist()
    for sample_id, end, length, prompt, span in zip(ids, ends, lengths.tolist(), prompts, spans, strict=True):
        marks = f" {span}" if span else ""
        content.update(f"{sample_id} {prompt} {length}{marks}\n".encode())
        content.update(tokens[4 * (end - length) : 4 * end])


def content_digest(content: Mapping[str, Any]) -> str:
    """What a dataset *is*, whatever wrote it: sha256 (hex) of the digests of its sides."""
    return digest({split: content[split].hexdigest() for split in SPLITS})


def parent_record(path: Path) -> dict[str, Any]:
    """What a child keeps of a version's `dataset.json`: digest, samples and the lengths of its training side.

    Raises:
        CorruptError: it is no `dataset.json`, or one that does not hold its lengths.
    """
    record = read_json(path)
    try:
        train = record["train"]
        kept = {"digest": record["digest"], "samples": train["samples"], "length_counts": train["length_counts"]}
    except (KeyError, TypeError) as error:
        raise CorruptError(
            "not a dataset.json that holds the lengths of its samples", where=str(path), remedy="Rebuild that dataset."
        ) from error
    return kept
