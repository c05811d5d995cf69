"""The dataset: completions of all sources become training and validation samples, each prompt once and on one side only.

A sample's token ids are the prompt as the target read it followed by the tokens the target wrote, joined and never
tokenised again, so the rendered prompt is an exact prefix. Whether a prompt is held out is a hash of what it asks, so adding a
source moves no other sample. Costs, on one core: 160 s for 1.1 M samples of 2,200 tokens; memory is a
few row groups (370 MB at that length) and 500 bytes a sample. No torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dflash.base.errors import CorruptError, PermanentError
from dflash.base.files import write_json
from dflash.base.records import LedgerLine
from dflash.base.stage import HostContext, Inputs, Outputs
from dflash.data.dataset_params import DatasetParams
from dflash.data.ledger import write_ledger
from dflash.data.lengths import describe_lengths
from dflash.data.prompts import external_file, question_id, read_prompts
from dflash.data.prompts_params import PromptsParams
from dflash.data.schemas import COMPLETIONS, SAMPLES
from dflash.data.tables import TableWriter, list_array, lists_of, read_pieces

SPLITS = ("train", "validation")


def held_out(question: str, params: DatasetParams) -> bool:
    """Whether a prompt belongs to validation: the first 64 bits of a hash of (split_seed, what it asks), as a share."""
    drawn = hashlib.sha256(f"{params.split_seed}:{question}".encode()).digest()[:8]
    return int.from_bytes(drawn, "big") < params.validation_share * 2**64


def question_of(sample_id: str, messages: str) -> str:
    """`prompts.question_id` of a stored row: its id, unless it has a system message (the same question under other
    instructions must not end up on the other side of the split)."""
    return question_id(json.loads(messages)) if '"role":"system"' in messages else sample_id


def excluded_questions(params: DatasetParams, inputs: Inputs) -> set[str]:
    """What the files of excluded prompts ask; a prompt of any source that asks it is dropped, whatever its instructions.

    Raises:
        ConfigError: a malformed line. PermanentError: a file was not handed over or has changed.
    """
    found: set[str] = set()
    for wanted in params.exclude_digests:
        path = external_file(inputs, wanted, "a file of `dataset.exclude`")
        found.update(question_id(prompt.messages) for prompt in read_prompts(path, exclude_source(path)))
    return found


def exclude_source(path: Path) -> PromptsParams:
    """How a file of `dataset.exclude` is read: `messages` or `prompt`. Planning validates it with the same."""
    return PromptsParams(name="exclude", path=str(path))


def _in_words(counts: dict[str, Any]) -> str:
    skipped = ", ".join(f"{count} skipped ({reason})" for reason, count in sorted(counts["skipped"].items()))
    tail = f", {skipped}" if skipped else ""
    return f"{counts['total']} completions, {counts['train']} to train on, {counts['validation']} held out{tail}"


@dataclass
class Side:
    """What one of train and validation adds up to."""

    samples: int = 0
    prompt_tokens: int = 0
    truncated: int = 0
    lengths: list[np.ndarray] = field(default_factory=list)

    def add(self, rows: pa.Table) -> None:
        """Counts rows of `schemas.SAMPLES`."""
        self.samples += rows.num_rows
        self.prompt_tokens += int(rows.column("prompt_length").to_numpy().sum())
        self.truncated += rows.column("finish_reason").to_pylist().count("length")
        self.lengths.append(lists_of(rows, "input_ids")[1])

    def all_lengths(self) -> np.ndarray:
        """Tokens of each sample [samples]."""
        return np.concatenate(self.lengths) if self.lengths else np.zeros(0, dtype=np.int64)

    def anchors(self) -> int:
        """Places where a block can start: a trainable token followed by another. Zero means nothing to learn from."""
        return int(self.all_lengths().sum()) - self.prompt_tokens - self.samples

    def describe(self) -> dict[str, Any]:
        """Plain JSON values for `dataset.json`."""
        lengths = self.all_lengths()
        return {
            "samples": self.samples,
            "tokens": int(lengths.sum()),
            "trainable_tokens": int(lengths.sum()) - self.prompt_tokens,
            "truncated": self.truncated,
            "truncated_share": self.truncated / self.samples if self.samples else 0.0,
            "length": describe_lengths(lengths),
        }


class Merge:
    """Goes through the sources by name and decides for each completion: train, validation, or why not.

    Of several usable completions of one prompt the first counts, in the order of source names.

    After `rows` is exhausted, `ledger`, `by_source`, `sides` and `content` say what happened.
    """

    def __init__(self, params: DatasetParams, excluded: set[str]) -> None:
        self.params = params
        self.excluded = excluded
        self.seen: set[str] = set()
        self.ledger: list[LedgerLine] = []
        self.by_source: dict[str, dict[str, Any]] = {}
        self.sides = {split: Side() for split in SPLITS}
        self.content = hashlib.sha256()

    def rows(self, source: str, path: Path) -> Iterator[tuple[str, pa.Table]]:
        """Yields (split, rows of `schemas.SAMPLES`) for one source, in its order.

        Raises:
            CorruptError: the file is damaged, or a rendered prompt is empty.
        """
        self.by_source[source] = {"total": 0, "train": 0, "validation": 0, "skipped": {}}
        for piece in read_pieces(path, COMPLETIONS):
            fates = self._fates(source, piece, path)
            for split in SPLITS:
                chosen = piece.filter(pa.array([fate == split for fate in fates]))
                if chosen.num_rows:
                    rows = samples_of(chosen)
                    self.sides[split].add(rows)
                    self._digest(split, rows)
                    yield split, rows

    def _fates(self, source: str, piece: pa.Table, path: Path) -> list[str]:
        """For each row the split it goes to, or the reason why it goes nowhere; writes them down."""
        if piece.num_rows and int(lists_of(piece, "prompt_ids")[1].min()) < 1:
            raise CorruptError("a rendered prompt has no tokens", where=str(path), remedy="Rebuild the completions.")
        lengths = lists_of(piece, "completion_ids")[1].tolist()
        columns = [piece.column(name).to_pylist() for name in ("id", "messages", "finish_reason")]
        tally = self.by_source[source]
        fates = []
        for sample_id, messages, reason, length in zip(*columns, lengths, strict=True):
            fate = self._fate(sample_id, messages, reason, length)
            fates.append(fate)
            tally["total"] += 1
            if fate in SPLITS:
                tally[fate] += 1
                self.ledger.append(LedgerLine(id=sample_id, status="ok", reason=fate))
            else:
                tally["skipped"][fate] = tally["skipped"].get(fate, 0) + 1
                self.ledger.append(LedgerLine(id=sample_id, status="skipped", reason=fate))
        return fates

    def _fate(self, sample_id: str, messages: str, finish_reason: str, length: int) -> str:
        if sample_id in self.seen:
            return "duplicate"
        question = question_of(sample_id, messages)
        if question in self.excluded:
            return "excluded"
        if length < self.params.min_completion_tokens:
            return "short"
        if finish_reason == "length" and self.params.truncated == "drop":
            return "truncated"
        self.seen.add(sample_id)
        return "validation" if held_out(question, self.params) else "train"

    def _digest(self, split: str, rows: pa.Table) -> None:
        """Feeds ids and tokens, each with its length, into the content digest."""
        values, lengths = lists_of(rows, "input_ids")
        tokens = memoryview(np.ascontiguousarray(values, dtype="<i4").tobytes())
        ends = np.cumsum(lengths).tolist()
        prompts = rows.column("prompt_length").to_pylist()
        for sample_id, end, length, prompt in zip(
            rows.column("id").to_pylist(), ends, lengths.tolist(), prompts, strict=True
        ):
            self.content.update(f"{split} {sample_id} {prompt} {length}\n".encode())
            self.content.update(tokens[4 * (end - length) : 4 * end])


def samples_of(completions: pa.Table) -> pa.Table:
    """Rows of `schemas.COMPLETIONS` as rows of `schemas.SAMPLES`: prompt and completion joined, token by token."""
    prompts, prompt_lengths = lists_of(completions, "prompt_ids")
    written, written_lengths = lists_of(completions, "completion_ids")
    lengths = prompt_lengths + written_lengths
    starts = np.cumsum(lengths) - lengths
    place_in_row = np.arange(int(lengths.sum())) - np.repeat(starts, lengths)
    from_prompt = place_in_row < np.repeat(prompt_lengths, lengths)
    joined = np.empty(len(from_prompt), dtype=np.int32)
    joined[from_prompt] = prompts
    joined[~from_prompt] = written
    return pa.table(
        {
            "id": completions.column("id"),
            "source": completions.column("source"),
            "messages": completions.column("messages"),
            "input_ids": list_array(joined, lengths),
            "prompt_length": pa.array(prompt_lengths, type=pa.int32()),
            "finish_reason": completions.column("finish_reason"),
        },
        schema=SAMPLES,
    )


def run(params: DatasetParams, inputs: Inputs, workdir: Path, host_context: HostContext) -> Outputs:
    """The `dataset` stage: writes `train.parquet`, `validation.parquet` (`schemas.SAMPLES`; sources by name, each in its
    order), `ledger.jsonl` and `dataset.json`.

    Raises:
        PermanentError: nothing in the training set could train anything (no sample, or a loss mask that is zero wherever a
            block could start).
        CorruptError: an upstream file is damaged. ConfigError: a malformed line in a file of excluded prompts.
    """
    merge = Merge(params, excluded_questions(params, inputs))
    with (
        TableWriter(workdir / "train.parquet", SAMPLES) as train,
        TableWriter(workdir / "validation.parquet", SAMPLES) as validation,
    ):
        writers = {"train": train, "validation": validation}
        for source, upstream in inputs.all("completions").items():
            for split, rows in merge.rows(source, upstream.directory / "completions.parquet"):
                writers[split].append(rows)
            host_context.progress.say(f"{source}: {_in_words(merge.by_source[source])}")
    counts = write_ledger(workdir / "ledger.jsonl", merge.ledger)
    if merge.sides["train"].anchors() < 1:
        raise PermanentError(
            f"the training set has nothing to train on: of {counts.total} completions {merge.sides['train'].samples} are "
            f"training samples and none has two trainable tokens in a row; {counts.reasons or 'no source has any'}",
            where="dataset",
            remedy="Look at min_completion_tokens, truncated, exclude and validation_share, or add prompts.",
        )
    record = describe(merge)
    write_json(workdir / "dataset.json", record)
    files = ["train.parquet", "validation.parquet", "ledger.jsonl", "dataset.json"]
    return Outputs(files, counts, {name: record[name] for name in ("digest", "train", "validation")})


def describe(merge: Merge) -> dict[str, Any]:
    """What stands in `dataset.json`."""
    kept = sum(side.samples for side in merge.sides.values())
    truncated = sum(side.truncated for side in merge.sides.values())
    return {
        "digest": merge.content.hexdigest(),
        "samples": kept,
        "sources": merge.by_source,
        "truncated_share": truncated / kept if kept else 0.0,
        **{split: side.describe() for split, side in merge.sides.items()},
    }
