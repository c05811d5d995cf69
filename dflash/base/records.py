"""What is written beside every result, as typed records: these are the contracts between the rooms.

Every record carries `schema_version`; a version this code does not know, a missing field or a surplus one is refused with
the file's name, so that damaged or hand-edited evidence is never trusted. Reading one costs under a millisecond; nothing
here imports torch.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dflash.base.canonical import digest
from dflash.base.errors import CorruptError
from dflash.base.files import read_json, write_json

SCHEMA_VERSION = 1
"""Enters every key: raise it when the meaning of stored results changes."""


def now() -> str:
    """UTC time to the millisecond, ISO 8601: how every record writes time."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


class Record(BaseModel):
    """A typed JSON document with strict reading and atomic writing."""

    model_config = ConfigDict(extra="forbid")
    schema_version: Literal[1] = 1

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads and validates.

        Raises:
            CorruptError: missing, not JSON, of another schema version, or not of this shape; names file and field.
        """
        raw = read_json(path)
        version = raw.get("schema_version") if isinstance(raw, dict) else None
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise CorruptError(
                f"schema version {version} is newer than this dflash knows ({SCHEMA_VERSION})",
                where=str(path),
                remedy="Read it with the dflash that wrote it.",
            )
        try:
            return cls.model_validate(raw)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            raise CorruptError(
                f"not a {cls.__name__}: {field or 'document'}: {first['msg']}",
                where=str(path),
                remedy="It was damaged or edited; delete it and run `dflash run` to rebuild it.",
            ) from error

    def write(self, path: Path) -> None:
        """Writes the record atomically."""
        write_json(path, self.model_dump(mode="json"))

    def digest(self) -> str:
        """sha256 of the record's canonical JSON."""
        return digest(self.model_dump(mode="json"))


class CodeDigest(BaseModel):
    """The code a stage imports: one digest, and one for each module so that a change can be named."""

    model_config = ConfigDict(extra="forbid")
    digest: str
    modules: dict[str, str]


class ParamsFile(Record):
    """`params.json`: a stage's only source of parameters, beside its outputs.

    `params` holds every value with defaults; `origins` says for each dotted name where it came from (`default`,
    `config/config.yaml:12`, `override`, `derived`); `upstream` maps input names (`dataset`, `completions/arithmetic`) to keys.
    """

    stage: str
    key: str
    params: dict[str, Any]
    origins: dict[str, str]
    upstream: dict[str, str]
    code: CodeDigest

    def compute_key(self) -> str:
        """The key this content has; `key` must equal it."""
        return stage_key(self.stage, self.params, self.upstream, self.code.digest)


def stage_key(stage: str, params: dict[str, Any], upstream: dict[str, str], code: str) -> str:
    """First 12 hex digits of sha256(canonical JSON {schema, stage, params, upstream keys, code})."""
    return digest({"schema": SCHEMA_VERSION, "stage": stage, "params": params, "upstream": upstream, "code": code})[:12]


class OutputFile(BaseModel):
    """One output: path relative to the stage's folder, bytes, sha256."""

    model_config = ConfigDict(extra="forbid")
    path: str
    size: int
    sha256: str


class Counts(BaseModel):
    """What went in and what became of it. `total` must equal ok + error + skipped: nothing is lost in silence."""

    model_config = ConfigDict(extra="forbid")
    total: int = 0
    ok: int = 0
    error: int = 0
    skipped: int = 0
    reasons: dict[str, int] = Field(default_factory=dict)

    def balanced(self) -> bool:
        """Whether everything that went in is accounted for."""
        return self.total == self.ok + self.error + self.skipped


class Receipt(Record):
    """`receipt.json`, written last and by rename: the result exists, whole, exactly when its receipt does.

    `inputs` holds the digest of each upstream receipt as it was when this stage read it; `results` holds small values
    (counts by bucket, tau) that need no file of their own.
    """

    stage: str
    key: str
    step: int | None = None
    outputs: list[OutputFile]
    inputs: dict[str, str]
    host: str
    started: str
    finished: str
    attempt: int
    exit: int = 0
    environment: str
    counts: Counts = Counts()
    results: dict[str, Any] = Field(default_factory=dict)

    def content_digest(self) -> str:
        """Digest of what the stage produced, without times, host and attempt: equal results have equal digests."""
        content = {
            "stage": self.stage,
            "key": self.key,
            "step": self.step,
            "outputs": [output.model_dump() for output in self.outputs],
        }
        return digest(content)


class Environment(Record):
    """Where a result was made: what is installed, and what was *bound*. Stored once per digest."""

    python: str
    platform: str
    cpu: str
    cores: int
    memory_bytes: int
    distributions: dict[str, str]
    torch: dict[str, Any] = Field(default_factory=dict)
    gpus: list[dict[str, Any]] = Field(default_factory=list)
    kernels: dict[str, Any] = Field(default_factory=dict)
    git: dict[str, Any] = Field(default_factory=dict)
    variables: dict[str, str] = Field(default_factory=dict)


class TensorFact(BaseModel):
    """One tensor of a checkpoint. sha256: of its bytes as stored; empty in records from before it was kept."""

    model_config = ConfigDict(extra="forbid")
    name: str
    shape: list[int]
    dtype: str
    bytes: int
    sha256: str = ""


class ArtifactFile(BaseModel):
    """One file of an artifact with the sha256 of each 8 MiB chunk."""

    model_config = ConfigDict(extra="forbid")
    path: str
    size: int
    chunks: list[str]


class Artifact(BaseModel):
    """A directory by content. `root` = sha256 of the canonical JSON of [[path, size, chunks]...] sorted by path."""

    model_config = ConfigDict(extra="forbid")
    root: str
    files: list[ArtifactFile]


class Lineage(BaseModel):
    """Where a checkpoint's weights came from: the attempts that trained it, what it continued from, adopted code.

    accepted: each drift of the training's probe that somebody accepted: attempt, why, drift, changed environment fields.
    """

    model_config = ConfigDict(extra="forbid")
    parent: dict[str, Any] | None = None
    attempts: list[dict[str, Any]] = Field(default_factory=list)
    code: list[str] = Field(default_factory=list)
    accepted: list[dict[str, Any]] = Field(default_factory=list)


class CheckpointManifest(Record):
    """`step_<n>/manifest.json`, written last: everything that made this checkpoint.

    `config` maps every upstream stage (`prompts/arithmetic`, ..., `train`) to its resolved params; `params_files` to the
    whole `params.json` of each, so that the key of every stage can be checked again with no store at hand.
    """

    key: str
    step: int
    created: str
    config: dict[str, dict[str, Any]]
    params_files: dict[str, dict[str, Any]]
    placement: dict[str, Any]
    dataset: dict[str, Any]
    buckets: dict[str, Any]
    topology: dict[str, Any]
    kernels: dict[str, Any]
    environment: Environment
    lineage: Lineage
    tensors: list[TensorFact]
    drafter: Artifact
    state: Artifact | None


class MetricsLine(BaseModel):
    """A line of `metrics.jsonl`. Of several lines of one step the last attempt's counts.

    `accuracy_by_slot` has block_size - 1 entries (slot 1 first, null where a slot had no supervised position);
    `tokens_per_second` and `stalled_seconds` are by role. `starving` has the side that waits for the other, if one does, and
    the share of the step's time that it waits; nothing where both are one process. `memory_bytes` is by GPU (`cuda:0`), or by
    rank (`rank 3`) where each has one.
    """

    model_config = ConfigDict(extra="forbid")
    attempt: int
    step: int
    time: str
    loss: float
    accuracy_by_slot: list[float | None]
    learning_rate: float
    gradient_norm: float
    anchors: int
    tokens: int
    seconds: float
    tokens_per_second: dict[str, float]
    stalled_seconds: dict[str, float] = Field(default_factory=dict)
    features_waiting: list[int] = Field(default_factory=list)
    starving: dict[str, float] = Field(default_factory=dict)
    padding_share: float
    batch_ids: list[str]
    buckets: list[int]
    memory_bytes: dict[str, int] = Field(default_factory=dict)


class LedgerLine(BaseModel):
    """What became of one input of `completions` or `dataset`."""

    model_config = ConfigDict(extra="forbid")
    id: str
    status: Literal["ok", "error", "skipped"]
    reason: str = ""


class StageEntry(BaseModel):
    """One stage of a run, as its manifest lists it. The maps are by step, or under an empty name for a stage without steps.

    receipts: content digests. outputs: what each receipt lists, so that a repetition can be compared with no store at hand.
    environments: under which name of `RunManifest.environments` each was made. counts, results: of a stage without steps.
    """

    model_config = ConfigDict(extra="forbid")
    name: str
    stage: str
    key: str
    receipts: dict[str, str]
    outputs: dict[str, list[OutputFile]] = Field(default_factory=dict)
    environments: dict[str, str] = Field(default_factory=dict)
    counts: Counts | None = None
    results: dict[str, Any] = Field(default_factory=dict)


class RunManifest(Record):
    """`results/runs/<run>/<runkey>/manifest.json`: everything that this state of a run consists of.

    `determinism` is `bitwise` (same bytes expected), `tolerance` or `statistical`. `source` is the configuration of this run
    with every default filled in and the paths as they were given: run again, it asks for the same keys. `tensors` are those of
    the last checkpoint, with digests. `code` is the digest of the exact code, kept as `results/code/<digest>.tar.gz`; empty
    where it was not kept.
    """

    run: str
    runkey: str
    created: str
    config: dict[str, dict[str, Any]]
    source: dict[str, Any] = Field(default_factory=dict)
    tensors: list[TensorFact] = Field(default_factory=list)
    params_files: dict[str, dict[str, Any]]
    stages: list[StageEntry]
    steps: list[int]
    git: dict[str, Any]
    code: str = ""
    environments: dict[str, Environment]
    adoptions: list[dict[str, Any]]
    determinism: Literal["bitwise", "tolerance", "statistical"]


class Assertion(BaseModel):
    """A value that somebody says, and nothing proves. standing: always `asserted`; it stays so in every later answer."""

    model_config = ConfigDict(extra="forbid")
    value: Any
    said_by: str
    standing: Literal["asserted"] = "asserted"


class ImportRecord(Record):
    """`store/imported/<key>/import.json`: what a person brought in from outside.

    kind: `weights`, `dataset` or `config`. origin: the path as it was given. proven: what was read from the content itself.
    asserted: by stage, name -> what somebody says. artifact: the files, None for a config alone.
    """

    key: str
    kind: Literal["weights", "dataset", "config"]
    origin: str
    by: str
    at: str
    proven: dict[str, Any]
    asserted: dict[str, dict[str, Assertion]]
    artifact: Artifact | None = None
    tensors: list[TensorFact] = Field(default_factory=list)

    def compute_key(self) -> str:
        """The key this content has: of the files and of everything asserted about them."""
        said = {
            stage: {name: item.model_dump() for name, item in part.items()} for stage, part in self.asserted.items()
        }
        return digest({"files": self.artifact.root if self.artifact else None, "kind": self.kind, "asserted": said})[
            :12
        ]


class StopMarker(Record):
    """`stop.json` beside a trainer's files: who ended it, and whether what exists is to be finished."""

    run: str
    by: str
    at: str
    finish: bool = False


class ShipmentReceipt(Record):
    """`.<name>.shipment.json` beside a shipped file or folder, written last: what arrived is whole exactly when this exists.

    `root` is that of the artifact (`dflash/ship/artifact.py`); a single file has the path `.` in it. `bytes` counts the content,
    `bytes_sent` what this shipment put on the wire as data, `bytes_resent` what failed attempts had sent in vain,
    `chunks_reused` what an earlier attempt or shipment had left. `seconds` and `bytes_per_second` cover everything from the
    first look at the source to the rename. `seal` digests inode, size and mtime of every file as they were then.
    """

    root: str
    what: Literal["drafter", "full"]
    source_host: str
    source: str
    destination_host: str
    destination: str
    files: int
    bytes: int
    chunks: int
    chunks_reused: int
    bytes_sent: int
    bytes_resent: int
    seconds: float
    bytes_per_second: float
    route: Literal["relay", "direct"]
    plane: str
    streams: int
    compress: Literal["none", "zlib", "zstd"]
    pinned: bool
    verified: Literal[True]
    attempts: int
    started: str
    finished: str
    seal: str


class Failure(Record):
    """`failure.json` beside a stage: the cause of a permanent failure, so that retries of the same invocation stop."""

    stage: str
    key: str
    kind: str
    message: str
    at: str
    invocation: str


class LeaseRecord(Record):
    """What a lease file says of its holder. Liveness is the flock on the file, never the pid."""

    resource: str
    key: str
    run: str
    user: str
    clone: str
    pid: int
    start: str


def last_attempts(path: Path) -> list[MetricsLine]:
    """Reads `metrics.jsonl`: for each step the line of its last attempt, steps ascending; a torn last line is skipped.

    Raises:
        CorruptError: a line before the last is not a metrics line.
    """
    by_step: dict[int, MetricsLine] = {}
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            parsed = MetricsLine.model_validate(json.loads(line))
        except ValueError as error:
            if number == len(lines):
                continue
            raise CorruptError("not a metrics line", where=f"{path}:{number}") from error
        known = by_step.get(parsed.step)
        if known is None or parsed.attempt >= known.attempt:
            by_step[parsed.step] = parsed
    return [by_step[step] for step in sorted(by_step)]
