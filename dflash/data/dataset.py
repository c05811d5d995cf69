"""The dataset: what the target wrote for all sources becomes training and validation samples, each prompt once and on one
side only.

A sample's token ids are the prompt as the target read it followed by the tokens the target wrote, joined and never
tokenised again, so the rendered prompt is an exact prefix. Imported samples keep their ids and loss mask as they are.
Whether a prompt is held out is a hash of what it asks, so adding a source moves no other sample. Of samples with the same
prompt, or the same tokens, the first counts: earlier versions and imported sources come first, then completions, each by
name; near duplicates go the same way when asked for.

Goes through the sources once, a row group at a time, so cost grows linearly: 69 microseconds of processor time a sample of
2,200 tokens, 76 s for 1.1 M of them (165 s on a busy machine); memory is a few row groups (350 MB at that length) and 300
bytes a sample, 0.67 GB in all. No torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dflash.base.errors import CorruptError, PermanentError
from dflash.base.files import read_json, write_json
from dflash.base.stage import HostContext, Inputs, Outputs
from dflash.data.dataset_params import DatasetParams
from dflash.data.ledger import Ledger
from dflash.data.lengths import describe_lengths, length_counts
from dflash.data.near import NearDuplicates
from dflash.data.preflight import require_room
from dflash.data.prompts import external_file, question_id, read_prompts
from dflash.data.prompts_params import PromptsParams
from dflash.data.samples import NO_MESSAGES, SPLITS, content_digest, parent_record, update_content
from dflash.data.schemas import COMPLETIONS, SAMPLES
from dflash.data.tables import ShardedWriter, list_array, lists_of, read_pieces, rows_of, shards_of

MEMORY_A_SAMPLE = 400
MEMORY_A_NEAR_SAMPLE = 1_700
MEMORY_OF_PIECES = 600_000_000


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
    trainable_tokens: int = 0
    anchors: int = 0
    truncated: int = 0
    lengths: list[np.ndarray] = field(default_factory=list)

    def add(self, rows: pa.Table) -> None:
        """Counts rows of `schemas.SAMPLES`. Anchors are places where a block can start: a trainable token followed by
        another."""
        lengths = rows.column("length").to_numpy().astype(np.int32)
        trainable = trainable_tokens(rows)
        self.samples += rows.num_rows
        self.trainable_tokens += int(trainable.sum())
        self.anchors += int(np.maximum(trainable - 1, 0).sum())
        self.truncated += rows.column("finish_reason").to_pylist().count("length")
        self.lengths.append(lengths)

    def all_lengths(self) -> np.ndarray:
        """Tokens of each sample [samples]."""
        return np.concatenate(self.lengths) if self.lengths else np.zeros(0, dtype=np.int32)

    def describe(self) -> dict[str, Any]:
        """Plain JSON values for `dataset.json`."""
        lengths = self.all_lengths()
        return {
            "samples": self.samples,
            "tokens": int(lengths.sum(dtype=np.int64)),
            "trainable_tokens": self.trainable_tokens,
            "truncated": self.truncated,
            "truncated_share": self.truncated / self.samples if self.samples else 0.0,
            "length": describe_lengths(lengths.astype(np.int64)),
            "length_counts": length_counts(lengths),
        }


def trainable_tokens(rows: pa.Table) -> np.ndarray:
    """Tokens trained on of rows of `schemas.SAMPLES` [rows]."""
    counts = (rows.column("length").to_numpy() - rows.column("prompt_length").to_numpy()).astype(np.int64)
    ends, span_counts = lists_of(rows, "loss_spans")
    spanned = np.flatnonzero(span_counts)
    if len(spanned):
        starts = (np.cumsum(span_counts) - span_counts)[spanned] // 2
        counts[spanned] = np.add.reduceat((ends[1::2] - ends[::2]).astype(np.int64), starts)
    return counts


class Merge:
    """Goes through the sources and decides for each sample: train, validation, or why not.

    ledger: takes one line a sample. After `rows` is exhausted, `by_source`, `sides` and `content` say what happened.
    """

    def __init__(self, params: DatasetParams, excluded: set[str], ledger: Ledger) -> None:
        self.params = params
        self.excluded = excluded
        self.ledger = ledger
        self.seen: set[bytes] = set()
        self.seen_tokens: set[bytes] = set()
        self.near = NearDuplicates(params.near_duplicates) if params.near_duplicates is not None else None
        self.by_source: dict[str, dict[str, Any]] = {}
        self.unchecked = 0
        self.sides = {split: Side() for split in SPLITS}
        self.content = {split: hashlib.sha256() for split in SPLITS}

    def rows(self, source: str, pieces: Iterable[pa.Table]) -> Iterator[tuple[str, pa.Table]]:
        """Yields (split, rows) for one source, in its order; `pieces` are rows of `schemas.SAMPLES`."""
        self.by_source.setdefault(source, {"total": 0, "train": 0, "validation": 0, "skipped": {}})
        for piece in pieces:
            fates = self._fates(source, piece)
            for split in SPLITS:
                rows = piece.filter(pa.array([fate == split for fate in fates]))
                if rows.num_rows:
                    self.sides[split].add(rows)
                    update_content(self.content[split], rows)
                    yield split, rows

    def _fates(self, source: str, piece: pa.Table) -> list[str]:
        """For each row the split it goes to, or the reason why it goes nowhere; writes them down."""
        values, lengths = lists_of(piece, "input_ids")
        ends = np.cumsum(lengths)
        tokens = memoryview(np.ascontiguousarray(values, dtype="<i4").tobytes())
        near = self.near.signatures(values, lengths) if self.near is not None else None
        columns = [piece.column(name).to_pylist() for name in ("id", "messages", "finish_reason")]
        tally = self.by_source[source]
        fates = []
        rows = zip(*columns, trainable_tokens(piece).tolist(), (ends - lengths).tolist(), ends.tolist(), strict=True)
        for place, (sample_id, messages, reason, written, start, end) in enumerate(rows):
            name = bytes.fromhex(sample_id)
            fate = self._unusable(name, sample_id, messages, reason, written)
            if not fate:
                same = hashlib.blake2b(tokens[4 * start : 4 * end], digest_size=16).digest()
                if same in self.seen_tokens:
                    fate = "same tokens"
                elif self.near is not None and near is not None and not self.near.admit(near[place]):
                    fate = "near duplicate"
                else:
                    self.seen.add(name)
                    self.seen_tokens.add(same)
                    fate = self._split(sample_id, messages)
            fates.append(fate)
            tally["total"] += 1
            if fate in SPLITS:
                tally[fate] += 1
                self.ledger.add(sample_id, "ok", fate)
            else:
                tally["skipped"][fate] = tally["skipped"].get(fate, 0) + 1
                self.ledger.add(sample_id, "skipped", fate)
        return fates

    def _unusable(self, name: bytes, sample_id: str, messages: str, finish_reason: str, written: int) -> str:
        if name in self.seen:
            return "duplicate"
        if self.excluded and question_of(sample_id, messages) in self.excluded:
            return "excluded"
        if written < self.params.min_completion_tokens:
            return "short"
        if finish_reason == "length" and self.params.truncated == "drop":
            return "truncated"
        return ""

    def _split(self, sample_id: str, messages: str) -> str:
        if messages == NO_MESSAGES:
            self.unchecked += 1
            return "train"
        return "validation" if held_out(question_of(sample_id, messages), self.params) else "train"


def samples_of(completions: pa.Table) -> pa.Table:
    """Rows of `schemas.COMPLETIONS` as rows of `schemas.SAMPLES`: prompt and completion joined, token by token."""
    prompts, prompt_lengths = lists_of(completions, "prompt_ids")
    written, written_lengths = lists_of(completions, "completion_ids")
    lengths = prompt_lengths + written_lengths
    # Marks the prompt's places: +1 where a prompt starts, -1 where it ends, added up.
    starts = np.cumsum(lengths) - lengths
    change = np.zeros(int(lengths.sum()) + 1, dtype=np.int8)
    np.add.at(change, starts, 1)
    np.add.at(change, starts + prompt_lengths, -1)
    from_prompt = np.cumsum(change[:-1], dtype=np.int8).astype(bool)
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
            "length": pa.array(lengths, type=pa.int32()),
            "loss_spans": pa.nulls(completions.num_rows, pa.list_(pa.int32())),
        },
        schema=SAMPLES,
    )


def completed_samples(path: Path) -> Iterator[pa.Table]:
    """The completions of one file as samples, a row group at a time.

    Raises:
        CorruptError: the file is damaged, or a rendered prompt is empty.
    """
    for piece in read_pieces(path, COMPLETIONS):
        if piece.num_rows and int(lists_of(piece, "prompt_ids")[1].min()) < 1:
            raise CorruptError("a rendered prompt has no tokens", where=str(path), remedy="Rebuild the completions.")
        yield samples_of(piece)


def sources_of(inputs: Inputs) -> list[tuple[str, Path]]:
    """(source, file) in the order of merging: ready samples first, then completions; shards of a source in their order."""
    ready = [(name, item.directory / "samples.parquet") for name, item in inputs.all("prompts").items()]
    made = [
        (name.partition("@")[0], item.directory / "completions.parquet")
        for name, item in sorted(inputs.all("completions").items(), key=lambda pair: _shard_order(pair[0]))
    ]
    return ready + made


def _shard_order(name: str) -> tuple[str, int]:
    source, _, shard = name.partition("@")
    return source, int(shard or 0)


def run(params: DatasetParams, inputs: Inputs, workdir: Path, host_context: HostContext) -> Outputs:
    """The `dataset` stage: writes `train.parquet`, `validation.parquet` and their further shards (`schemas.SAMPLES`),
    `ledger.jsonl` and `dataset.json`.

    Raises:
        PermanentError: too little disk or memory, or nothing in the training set could train anything (no sample, or a loss
            mask that is zero wherever a block could start).
        CorruptError: an upstream file is damaged. ConfigError: a malformed line in a file of excluded prompts.
    """
    sources = sources_of(inputs)
    total = sum(rows_of(path) for _, path in sources)
    require_room(
        workdir,
        disk=sum(shard.stat().st_size for _, path in sources for shard in shards_of(path)) * 5 // 4 + 120 * total,
        memory=MEMORY_OF_PIECES + total * (MEMORY_A_SAMPLE if params.near_duplicates is None else MEMORY_A_NEAR_SAMPLE),
        what=f"a dataset of up to {total:,} samples",
        progress=host_context.progress,
    )
    with (
        Ledger(workdir / "ledger.jsonl") as ledger,
        ShardedWriter(workdir / "train.parquet", SAMPLES) as train,
        ShardedWriter(workdir / "validation.parquet", SAMPLES) as validation,
    ):
        merge = Merge(params, excluded_questions(params, inputs), ledger)
        writers = {"train": train, "validation": validation}
        for source, path in sources:
            pieces = read_pieces(path, SAMPLES) if path.name == "samples.parquet" else completed_samples(path)
            for split, rows in merge.rows(source, pieces):
                writers[split].append(rows)
                host_context.progress.update(ledger.counts.total, total, "samples")
            host_context.progress.say(f"{source}: {_in_words(merge.by_source[source])}")
    if merge.unchecked and merge.excluded:
        host_context.progress.say(
            f"{merge.unchecked:,} imported samples came without messages: not checked against `dataset.exclude`"
        )
    if merge.sides["train"].anchors < 1:
        raise PermanentError(
            f"the training set has nothing to train on: of {total} completions {merge.sides['train'].samples} are "
            f"training samples and none has two trainable tokens in a row; {ledger.counts.reasons or 'no source has any'}",
            where="dataset",
            remedy="Look at min_completion_tokens, truncated, exclude and validation_share, or add prompts.",
        )
    record = {**describe(merge), "parent": parent_of(params, inputs)}
    write_json(workdir / "dataset.json", record)
    tables = [path.name for path in (*train.files, *validation.files)]
    results = {name: _brief(record[name]) for name in ("digest", "train", "validation")}
    return Outputs([*tables, "ledger.jsonl", "dataset.json"], ledger.counts, results)


def _brief(value: Any) -> Any:
    return {name: item for name, item in value.items() if name != "length_counts"} if isinstance(value, dict) else value


def parent_of(params: DatasetParams, inputs: Inputs) -> dict[str, Any] | None:
    """What the version before was, as far as lengths go: `dataset.parent`, else the first source that is a dataset.

    Raises:
        CorruptError: its `dataset.json` cannot be read. PermanentError: it has changed since the plan.
    """
    if params.parent_digest is not None:
        path = external_file(inputs, params.parent_digest, "`dataset.parent`")
        return parent_record(path)
    for _, item in inputs.all("prompts").items():
        if (item.directory / "parent.json").exists():
            found: dict[str, Any] = read_json(item.directory / "parent.json")
            return found
    return None


def describe(merge: Merge) -> dict[str, Any]:
    """What stands in `dataset.json`, but for the parent."""
    kept = sum(side.samples for side in merge.sides.values())
    truncated = sum(side.truncated for side in merge.sides.values())
    return {
        "digest": content_digest(merge.content),
        "samples": kept,
        "sources": merge.by_source,
        "unchecked_against_exclude": merge.unchecked,
        "truncated_share": truncated / kept if kept else 0.0,
        **{split: side.describe() for split, side in merge.sides.items()},
    }
