"""The Parquet schemas of the road's data, in one place. Token ids are int32; files are zstd-compressed.

A sample's id is the sha256 (hex) of the canonical JSON of its normalised messages: the same prompt has the same id
whatever file or source it came from.
"""

from __future__ import annotations

import pyarrow as pa

PROMPTS = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("line", pa.int32(), nullable=False),  # line of the source file, from 1
        pa.field("messages", pa.string(), nullable=False),  # canonical JSON: [{"content":...,"role":...}]
    ]
)

COMPLETIONS = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("messages", pa.string(), nullable=False),
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),  # the rendered prompt, as the target read it
        pa.field("completion_ids", pa.list_(pa.int32()), nullable=False),  # what it wrote, end token included
        pa.field("finish_reason", pa.string(), nullable=False),  # stop | length
        pa.field("seed", pa.int64(), nullable=False),
    ]
)

SAMPLES = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("messages", pa.string(), nullable=False),
        pa.field("input_ids", pa.list_(pa.int32()), nullable=False),  # prompt and completion, exactly as generated
        pa.field("prompt_length", pa.int32(), nullable=False),  # the loss mask is 0 up to here
        pa.field("finish_reason", pa.string(), nullable=False),  # stop | length | unknown (imported)
        pa.field("length", pa.int32()),  # of input_ids, so that lengths cost no reading of tokens; null in older files
        pa.field("loss_spans", pa.list_(pa.int32())),  # where the loss mask is 1: start, end, ...; null: to the end
    ]
)

REFERENCES = pa.schema(
    [
        pa.field("prompt_set", pa.string(), nullable=False),
        pa.field("id", pa.string(), nullable=False),
        pa.field("messages", pa.string(), nullable=False),
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("output_ids", pa.list_(pa.int32()), nullable=False),  # the greedy continuation, end token included
        pa.field("finish_reason", pa.string(), nullable=False),
    ]
)
