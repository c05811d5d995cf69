"""Reads what a run left in the store, and notes what is missing or damaged instead of failing on it.

A report must come out just when something went wrong, so every read ends in a value or in a `Trouble` that names the file
and the reason. Files up to 8 MiB are checked byte by byte against their receipts, larger ones by size alone. 200
evaluations of 100 rows take about 2 s and 60 MB, most of it the digests and the checkpoint manifests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dflash.base.errors import CorruptError, DflashError
from dflash.base.files import read_json, sha256_file
from dflash.base.records import (
    CheckpointManifest,
    Environment,
    MetricsLine,
    ParamsFile,
    Receipt,
    RunManifest,
    StageEntry,
    last_attempts,
)
from dflash.base.store import (
    STEPWISE_RECEIPTS,
    checkpoint_directory,
    read_params,
    receipt_path,
    stage_directory,
)
from dflash.data.tables import shards_of
from dflash.evaluate.tags import COLUMN
from dflash.evaluate.tags import FILE as TAGS
from dflash.report.tables import tidy, tidy_by_tag

WHOLE_BYTES = 8 << 20
"""Outputs up to this size are read and digested; of larger ones only the size is compared."""

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class Trouble:
    """A piece of evidence that cannot be used: its file, relative to the store, and why."""

    file: str
    why: str


class Read(BaseModel):
    """Base of what the report reads from JSON that other stages own: it takes what it knows and ignores the rest."""

    model_config = ConfigDict(extra="ignore", strict=True)


class Lengths(Read):
    """Lengths in tokens; `quantiles` by share (`0.5`)."""

    mean: float
    min: int
    max: int
    quantiles: dict[str, int] = Field(default_factory=dict)


class Side(Read):
    """One side of the split: training or validation."""

    samples: int
    tokens: int
    trainable_tokens: int
    truncated: int
    length: Lengths | dict[str, Any]


class Source(Read):
    """What became of the completions of one source; `skipped` by reason."""

    total: int
    train: int
    validation: int
    skipped: dict[str, int] = Field(default_factory=dict)


class Dataset(Read):
    """`dataset.json`."""

    digest: str
    samples: int
    sources: dict[str, Source]
    train: Side
    validation: Side
    unchecked_against_exclude: int = 0


class Bucket(Read):
    """One bucket: lengths `above` < length <= `up_to`, in tokens."""

    above: int
    up_to: int
    samples: int
    sample_share: float
    tokens: int
    token_share: float
    batches: int
    batch_share: float
    batch_size: int
    padding_share: float


class Histogram(Read):
    """`counts[i]` samples are longer than `edges[i]` and at most `edges[i + 1]` tokens."""

    edges: list[int]
    counts: list[int]

    @model_validator(mode="after")
    def _fits(self) -> Histogram:
        if len(self.edges) != len(self.counts) + 1:
            raise ValueError(f"{len(self.edges)} edges do not bound {len(self.counts)} counts")
        return self


class Load(Read):
    """What a version's plan carries: lengths, batches and steps of an epoch, tokens."""

    samples: int
    mean_length: float
    batches_per_epoch: int
    steps_per_epoch: float
    tokens_per_step: float
    padded_tokens_per_step: float
    largest_batch_tokens: int
    padding_share: float


class ShiftedBucket(Read):
    """One bucket before and now: shares of samples, tokens and batches, samples a batch."""

    above: int
    up_to: int
    sample_share_before: float
    sample_share_now: float
    token_share_before: float
    token_share_now: float
    batch_share_before: float
    batch_share_now: float
    batch_size_before: int
    batch_size_now: int


class Shift(Read):
    """What changed since the parent version of the dataset, under the same budget and buckets."""

    parent_digest: str
    before: Load
    now: Load
    buckets: list[ShiftedBucket]
    warnings: list[str]


class Buckets(Read):
    """`buckets.json`."""

    samples: int
    tokens: int
    cut_samples: int
    cut_tokens: int
    length: Lengths
    histogram: Histogram
    buckets: list[Bucket]
    padding_share: float
    budget_share: float
    batches_per_epoch: int
    steps_per_epoch: float
    packed_padding_share: float | None = None
    shift: Shift | None = None


class Verification(Read):
    """One verification of a sample: how many drafted tokens it saw, accepted, and committed with the bonus token."""

    drafted: list[str]
    accepted: int
    committed: int


class Sample(Read):
    """One entry of `samples.json`: the text of each output token, and whether it came from `prefill`, `draft` or `bonus`."""

    prompt_set: str
    id: str
    kernel: str
    prompt: str
    output: list[str]
    origin: list[Literal["prefill", "draft", "bonus"]]
    verifications: list[Verification]

    @model_validator(mode="after")
    def _fits(self) -> Sample:
        if len(self.output) != len(self.origin):
            raise ValueError(f"{len(self.output)} tokens have {len(self.origin)} origins")
        return self


class Shipped(Read):
    """What the report tells of a shipment's receipt. `bytes` counts the content; `verified` that every byte was compared."""

    bytes: int
    seconds: float
    bytes_per_second: float
    verified: bool
    bytes_sent: int | None = None
    source_host: str = "?"
    route: str = "?"
    plane: str = "?"
    attempts: int = 1
    finished: str = ""


class ShippedRecord(Read):
    """The workflow's record of a shipment (`dflash/shipments.py`), which holds the receipt of the copy."""

    shipment: Shipped


@dataclass(frozen=True)
class Shipment:
    """One shipment: of which result (and step), to which host."""

    name: str
    step: int | None
    host: str
    shipped: Shipped


@dataclass(frozen=True)
class Parent:
    """The dataset that this run's dataset grew from, or that it is best compared with. what: in words."""

    what: str
    buckets: Buckets


@dataclass
class Audit:
    """What came of checking the receipts: how many there are, how many files by which check, and what is wrong."""

    expected: int = 0
    found: int = 0
    by_bytes: int = 0
    by_size: int = 0
    elsewhere: int = 0
    unrecorded: int = 0
    troubles: list[Trouble] = field(default_factory=list)


@dataclass
class Evidence:
    """Everything the page is made of. `troubles` are by section of the page."""

    manifest: RunManifest
    store: Path
    host: str
    troubles: dict[str, list[Trouble]] = field(default_factory=dict)
    audit: Audit = field(default_factory=Audit)
    receipts: dict[tuple[str, int | None], Receipt] = field(default_factory=dict)
    environments: dict[str, Environment] = field(default_factory=dict)
    checkpoints: dict[int, CheckpointManifest] = field(default_factory=dict)
    metrics: list[MetricsLine] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    tag_rows: list[dict[str, Any]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    samples_step: int | None = None
    dataset: Dataset | None = None
    buckets: Buckets | None = None
    parent: Parent | None = None
    shipments: list[Shipment] = field(default_factory=list)
    shared_prompts: dict[str, int] | None = None
    damaged: set[Path] = field(default_factory=set)

    def note(self, section: str, path: Path, error: DflashError | OSError | ValueError) -> None:
        """Keeps a trouble for a section of the page, once."""
        why = error.what if isinstance(error, DflashError) else str(error)
        trouble = Trouble(self.relative(error.where if isinstance(error, DflashError) and error.where else path), why)
        listed = self.troubles.setdefault(section, [])
        if trouble not in listed:
            listed.append(trouble)

    def relative(self, path: Path | str) -> str:
        """A path as the page shows it: relative to the store where it lies in it."""
        text, root = str(path), f"{self.store}/"
        return text.removeprefix(root)

    def attempt(self, section: str, path: Path, read: Callable[[Path], T]) -> T | None:
        """What `read(path)` returns, or None with a trouble noted; a file that its receipt disowns is not read."""
        if path in self.damaged:
            self.note(
                section, path, CorruptError("its bytes are not those that its receipt records, so it is not used")
            )
            return None
        try:
            return read(path)
        except (DflashError, OSError, ValueError) as error:
            self.note(section, path, error)
            return None

    def entries(self, stage: str) -> list[StageEntry]:
        """The run's results of one stage, in the manifest's order."""
        return [entry for entry in self.manifest.stages if entry.stage == stage]

    def first(self, stage: str) -> StageEntry | None:
        """The run's only result of a stage, or None."""
        return next(iter(self.entries(stage)), None)

    def directory(self, entry: StageEntry) -> Path:
        """The folder of a result."""
        return stage_directory(self.store, entry.stage, entry.key)

    def params(self, stage: str) -> dict[str, Any]:
        """The resolved params of the run's first result of a stage; empty when there is none."""
        entry = self.first(stage)
        return self.manifest.config.get(entry.name, {}) if entry else {}


def read_as(model: type[M], path: Path) -> M:
    """Reads a JSON file as `model`.

    Raises:
        CorruptError: missing, not JSON, or without a field that the report needs; names file and field.
    """
    return as_model(model, read_json(path), path)


def as_model(model: type[M], value: Any, path: Path) -> M:
    """Validates a plain value as `model`; errors as in `read_as`."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        field_name = ".".join(str(part) for part in first["loc"]) or "document"
        raise CorruptError(f"{field_name}: {first['msg']}", where=str(path)) from error


def gather(manifest: RunManifest, store: Path, host: str = "local") -> Evidence:
    """Reads all evidence of a run. Never raises for evidence that is missing or damaged."""
    evidence = Evidence(manifest, store, host)
    for entry in manifest.stages:
        if entry.stage != "report":
            _audit_stage(evidence, entry)
    _check_inputs(evidence)
    _read_environments(evidence)
    _read_data(evidence)
    _read_parent(evidence)
    _read_training(evidence)
    _read_shipments(evidence)
    _read_evaluations(evidence)
    return evidence


def _expected_receipts(evidence: Evidence, entry: StageEntry) -> Iterator[tuple[int | None, Path]]:
    directory = evidence.directory(entry)
    steps: list[int | None] = list(evidence.manifest.steps) if entry.stage in STEPWISE_RECEIPTS else [None]
    for step in steps:
        yield step, receipt_path(directory, entry.stage, step)


def _audit_stage(evidence: Evidence, entry: StageEntry) -> None:
    """Checks params, receipts and outputs of one result."""
    directory, audit = evidence.directory(entry), evidence.audit
    try:
        _check_params(evidence, entry, read_params(directory))
    except (DflashError, OSError) as error:
        _complain(evidence, directory / "params.json", error)
    for step, path in _expected_receipts(evidence, entry):
        audit.expected += 1
        try:
            receipt = Receipt.read(path)
            _check_receipt(entry, step, receipt, path)
        except DflashError as error:
            _complain(evidence, path, error)
            continue
        audit.found += 1
        evidence.receipts[entry.name, step] = receipt
        _check_files(evidence, directory, receipt)


def _check_params(evidence: Evidence, entry: StageEntry, params: ParamsFile) -> None:
    recorded = evidence.manifest.params_files.get(entry.name)
    path = evidence.directory(entry) / "params.json"
    if recorded is not None and recorded.get("key") != params.key:
        raise CorruptError(f"the manifest records key {recorded.get('key')} for {entry.name}", where=str(path))


def _check_receipt(entry: StageEntry, step: int | None, receipt: Receipt, path: Path) -> None:
    if (receipt.stage, receipt.key, receipt.step) != (entry.stage, entry.key, step):
        raise CorruptError(
            f"it is the receipt of {receipt.stage}/{receipt.key} step {receipt.step}, not of this result",
            where=str(path),
        )
    if receipt.exit != 0:
        raise CorruptError(f"it records a failure (exit {receipt.exit})", where=str(path))
    if not receipt.counts.balanced():
        counts = receipt.counts
        raise CorruptError(
            f"{counts.total} went in, but {counts.ok} ok, {counts.error} failed and {counts.skipped} skipped are accounted for",
            where=str(path),
        )
    recorded = set(entry.receipts.values())
    if recorded and not recorded & {receipt.digest(), receipt.content_digest(), sha256_file(path)}:
        raise CorruptError("it is not the receipt that the run's manifest records", where=str(path))


def _check_files(evidence: Evidence, directory: Path, receipt: Receipt) -> None:
    audit = evidence.audit
    for output in receipt.outputs:
        path = directory / output.path
        if not path.exists():
            if receipt.host != evidence.host:
                audit.elsewhere += 1
            else:
                _complain(evidence, path, CorruptError("the file is missing"))
        elif path.stat().st_size != output.size:
            evidence.damaged.add(path)
            _complain(evidence, path, CorruptError(f"{path.stat().st_size} bytes, its receipt says {output.size}"))
        elif output.size > WHOLE_BYTES:
            audit.by_size += 1
        elif sha256_file(path) != output.sha256:
            evidence.damaged.add(path)
            _complain(evidence, path, CorruptError("its bytes are not those that its receipt records"))
        else:
            audit.by_bytes += 1


def _complain(evidence: Evidence, path: Path, error: DflashError | OSError) -> None:
    why = error.what if isinstance(error, DflashError) else str(error)
    evidence.audit.troubles.append(Trouble(evidence.relative(path), why))


def _check_inputs(evidence: Evidence) -> None:
    """Every receipt says which upstream receipts it was made from: those must be the ones that stand now."""
    by_key = {(entry.stage, entry.key): entry for entry in evidence.manifest.stages}
    for (name, step), receipt in evidence.receipts.items():
        upstream = evidence.manifest.params_files.get(name, {}).get("upstream", {})
        for label, recorded in receipt.inputs.items():
            entry = by_key.get((label.split("/", 1)[0], str(upstream.get(label, ""))))
            if entry is None:
                continue
            now = evidence.receipts.get((entry.name, step if entry.stage in STEPWISE_RECEIPTS else None))
            if now is None or recorded in (now.digest(), now.content_digest()):
                continue
            place = receipt_path(stage_directory(evidence.store, receipt.stage, receipt.key), receipt.stage, step)
            _complain(evidence, place, CorruptError(f"it was made from another state of {label}"))


def _read_environments(evidence: Evidence) -> None:
    """The environments that receipts name; the manifest's own list, by host, stands in where a file is lost."""
    by_digest = {item.digest()[:12]: item for item in evidence.manifest.environments.values()}
    for name in sorted({receipt.environment for receipt in evidence.receipts.values() if receipt.environment}):
        path = evidence.store / "environments" / f"{name}.json"
        if not path.exists() and name in by_digest:
            evidence.environments[name] = by_digest[name]
            continue
        read = evidence.attempt("environments", path, Environment.read)
        if read is not None and read.digest()[: len(name)] != name:
            evidence.note("environments", path, CorruptError("its content does not have the digest of its name"))
        elif read is not None:
            evidence.environments[name] = read


def _read_training(evidence: Evidence) -> None:
    entry = evidence.first("train")
    if entry is None:
        return
    directory = evidence.directory(entry)
    for step in evidence.manifest.steps:
        path = checkpoint_directory(directory, step) / "manifest.json"
        read = evidence.attempt("checkpoints", path, CheckpointManifest.read)
        if read is not None:
            evidence.checkpoints[step] = read
    path = directory / "metrics.jsonl"
    if not path.exists():
        evidence.note("training", path, CorruptError("the file is missing"))
    evidence.metrics = evidence.attempt("training", path, last_attempts) or []


def _read_data(evidence: Evidence) -> None:
    entry = evidence.first("dataset")
    if entry is not None:
        path = evidence.directory(entry) / "dataset.json"
        evidence.dataset = evidence.attempt("dataset", path, lambda where: read_as(Dataset, where))
        evidence.shared_prompts = _shared_prompts(evidence, evidence.directory(entry) / "train.parquet")
    entry = evidence.first("buckets")
    if entry is not None:
        path = evidence.directory(entry) / "buckets.json"
        evidence.buckets = evidence.attempt("buckets", path, lambda where: read_as(Buckets, where))


def _read_parent(evidence: Evidence) -> None:
    """The dataset to compare lengths with: that of the training this one continues, else of an earlier state of this run."""
    own = evidence.first("buckets")
    if own is None:
        return
    continued = evidence.params("train").get("continue_from")
    if isinstance(continued, dict) and "key" in continued:
        try:
            params = ParamsFile.read(stage_directory(evidence.store, "train", str(continued["key"])) / "params.json")
        except DflashError:
            return
        key, what = (
            str(params.upstream.get("buckets", "")),
            f"the dataset of train {params.key}, which this run continues",
        )
    else:
        found = _earlier_state(evidence, own.key)
        if found is None:
            return
        key, what = found
    path = stage_directory(evidence.store, "buckets", key) / "buckets.json"
    if key and key != own.key and path.exists():
        buckets = evidence.attempt("buckets", path, lambda where: read_as(Buckets, where))
        evidence.parent = Parent(what, buckets) if buckets is not None else None


def _earlier_state(evidence: Evidence, own: str) -> tuple[str, str] | None:
    """Key of the buckets of the newest earlier state of this run that had others, and what to call it."""
    states = []
    for path in (evidence.store.parent / "runs" / evidence.manifest.run).glob("*/manifest.json"):
        if path.parent.is_symlink():
            continue
        try:
            manifest = RunManifest.read(path)
        except DflashError:
            continue
        key = next((entry.key for entry in manifest.stages if entry.stage == "buckets"), own)
        if key != own and manifest.created < evidence.manifest.created:
            states.append((manifest.created, key, manifest.runkey))
    if not states:
        return None
    created, key, runkey = max(states)
    return key, f"the dataset of the state before ({runkey}, {created[:10]})"


def _read_shipments(evidence: Evidence) -> None:
    """Records of shipments of this run's results: `ship/<key>/<host>/receipt.json` and `step_<n>.json`."""
    for entry in evidence.manifest.stages:
        for path in sorted((evidence.store / "ship" / entry.key).glob("*/*.json")):
            step = path.stem.removeprefix("step_")
            read = evidence.attempt("shipments", path, lambda where: read_as(ShippedRecord, where))
            if read is not None:
                number = int(step) if step.isdigit() else None
                evidence.shipments.append(Shipment(entry.name, number, path.parent.name, read.shipment))
    evidence.shipments.sort(key=lambda item: (item.name, item.step or 0, item.host))


def _shared_prompts(evidence: Evidence, train: Path) -> dict[str, int] | None:
    """By prompt set, how many prompts that drafters are judged on were trained on, by id, which is a digest of content."""
    entries = evidence.entries("references")
    if any(_left_elsewhere(evidence, entry) for entry in [*evidence.entries("dataset"), *entries]):
        return None  # too large to come here; every evaluation has refused overlap where the files are
    trained = evidence.attempt("dataset", train, lambda path: _columns(path, ["id"]))
    if trained is None or not entries:
        return None
    known = set(trained.column("id").to_pylist())
    shared: dict[str, int] = {}
    for entry in entries:
        path = evidence.directory(entry) / "references.parquet"
        judged = evidence.attempt("tau", path, lambda where: _columns(where, ["prompt_set", "id"]))
        if judged is None:
            return None
        for prompt_set, name in zip(
            judged.column("prompt_set").to_pylist(), judged.column("id").to_pylist(), strict=True
        ):
            shared[prompt_set] = shared.get(prompt_set, 0) + (name in known)
    return shared


def _left_elsewhere(evidence: Evidence, entry: StageEntry) -> bool:
    """Whether tables of a result were too large to come from the host that made it."""
    receipt = evidence.receipts.get((entry.name, None))
    if receipt is None or receipt.host == evidence.host:
        return False
    return any(
        output.path.endswith(".parquet") and not (evidence.directory(entry) / output.path).exists()
        for output in receipt.outputs
    )


def _columns(path: Path, names: list[str]) -> pa.Table:
    try:
        return pa.concat_tables([pq.read_table(shard, columns=names) for shard in shards_of(path)])
    except (OSError, pa.ArrowException) as error:
        why = "the file is missing" if not path.exists() else f"not readable Parquet ({error})"
        raise CorruptError(why, where=str(path)) from error


def _read_evaluations(evidence: Evidence) -> None:
    """Rows of all steps whose receipt stands; samples of the last step that has some."""
    for entry in evidence.entries("evaluate"):
        directory = evidence.directory(entry)
        for step in evidence.manifest.steps:
            path = directory / f"step_{step}" / "rows.json"
            if (entry.name, step) in evidence.receipts:
                evidence.rows += evidence.attempt("tau", path, _rows) or []
                by_tag = f"step_{step}/{TAGS}"
                if any(output.path == by_tag for output in evidence.receipts[entry.name, step].outputs):
                    evidence.tag_rows += evidence.attempt("tau", directory / by_tag, _tag_rows) or []
            else:
                where = receipt_path(directory, "evaluate", step)
                evidence.note("tau", where, CorruptError("no valid receipt, so this step is not shown"))
        _read_samples(evidence, entry)


def _read_samples(evidence: Evidence, entry: StageEntry) -> None:
    steps = [step for step in evidence.manifest.steps if (entry.name, step) in evidence.receipts]
    path = evidence.directory(entry) / f"step_{max(steps, default=0)}" / "samples.json"
    if not steps:
        evidence.note("samples", path, CorruptError("no evaluation of this run has a valid receipt"))
        return
    evidence.samples = evidence.attempt("samples", path, _samples) or []
    evidence.samples_step = max(steps)


def _samples(path: Path) -> list[Sample]:
    listed = read_json(path)
    if not isinstance(listed, list):
        raise CorruptError("not a list of samples", where=str(path))
    return [as_model(Sample, item, path) for item in listed]


def _tag_rows(path: Path) -> list[dict[str, Any]]:
    """The rows by tag of one evaluation.

    Raises:
        CorruptError: as `_rows`, or without a tag.
    """
    rows = read_json(path)
    if not isinstance(rows, list) or not all(
        isinstance(row, dict) and isinstance(row.get(COLUMN), str) for row in rows
    ):
        raise CorruptError("not a list of rows with a tag", where=str(path))
    try:
        tidy_by_tag(rows, "")
    except (ValueError, TypeError, KeyError) as error:
        raise CorruptError(f"not rows of an evaluation ({error})", where=str(path)) from error
    return rows


def _rows(path: Path) -> list[dict[str, Any]]:
    """The rows of one evaluation.

    Raises:
        CorruptError: not a list of rows with the columns of the csv, each with numbers where numbers belong.
    """
    rows = read_json(path)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise CorruptError("not a list of rows", where=str(path))
    try:
        tidy(rows, "")
    except (ValueError, TypeError) as error:
        raise CorruptError(str(error), where=str(path)) from error
    return rows
