"""Anything that a person may ask about, read into one form: a checkpoint, a run's manifest, a lone safetensors, a foreign drafter.

What a path can say of itself depends on what it is, so every part may be empty, and `unknown` lists in words what cannot be
known of it. Reads JSON and the headers of safetensors files; a store, metrics or evaluations are read only when they lie where
the run left them. No torch; 0.1 s and 20 MB for a run of 200 checkpoints.
"""

from __future__ import annotations

import csv
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash.base.errors import ConfigError, CorruptError, DflashError
from dflash.base.files import read_json
from dflash.base.records import (
    CheckpointManifest,
    Environment,
    ImportRecord,
    MetricsLine,
    ParamsFile,
    Receipt,
    Record,
    RunManifest,
    StageEntry,
    last_attempts,
)
from dflash.base.store import STEPWISE_RECEIPTS, receipt_path, stage_directory
from dflash.plan.graph import PARENT_MUST_SHARE

CONFIG_FIELD = "dflash"
"""The metadata field of a drafter's safetensors file that holds its resolved config as JSON."""
MAX_HEADER = 100 << 20
OUR_FILES = ("receipt.json", "params.json", "manifest.json", "environment.json", "import.json")
WHAT_TO_GIVE = (
    "Give a checkpoint folder (step_<n>), a model.safetensors, a drafter's folder, a receipt.json, a params.json, or a run's "
    "manifest.json or folder (results/runs/RUN/latest)."
)
DTYPES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "I64": "int64",
    "I32": "int32",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Types as safetensors spells them, and as torch does."""


@dataclass
class Subject:
    """What is known of one thing.

    kind: `checkpoint`, `run`, `safetensors`, `foreign` or `result`. config: params by stage, origins likewise. environments,
    kernels: by role, `train` and `references/<kernel>`. tensors: name, shape, dtype, bytes, sha256 (when recorded). tau: rows of
    evaluations.csv. facts: further labelled lines. unknown: what cannot be known, in words.
    """

    path: Path
    kind: str
    label: str
    config: dict[str, dict[str, Any]] = field(default_factory=dict)
    origins: dict[str, dict[str, str]] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    dataset: dict[str, Any] = field(default_factory=dict)
    buckets: list[dict[str, Any]] = field(default_factory=list)
    environments: dict[str, Environment] = field(default_factory=dict)
    kernels: dict[str, dict[str, str]] = field(default_factory=dict)
    placement: dict[str, Any] = field(default_factory=dict)
    tensors: list[dict[str, Any]] = field(default_factory=list)
    metrics: list[MetricsLine] = field(default_factory=list)
    tau: list[dict[str, str]] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    code: dict[str, dict[str, str]] = field(default_factory=dict)
    """Digest of each module that a stage's code is made of, by stage."""
    unknown: list[str] = field(default_factory=list)


def _code(params_files: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """The modules of each stage's code, from the params files in a manifest."""
    found = {}
    for name, document in params_files.items():
        modules = (document.get("code") or {}).get("modules") if isinstance(document, Mapping) else None
        if isinstance(modules, Mapping):
            found[name] = {str(module): str(digest) for module, digest in modules.items()}
    return found


def read_header(path: Path) -> tuple[list[dict[str, Any]], dict[str, str], int]:
    """Tensors, metadata and the offset of the first byte of data, from the header of a safetensors file.

    Raises:
        CorruptError: cut short, or not safetensors.
    """
    with path.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else MAX_HEADER + 1
        header = stream.read(length) if length <= MAX_HEADER else b""
    try:
        fields = json.loads(header)
        metadata = dict(fields.pop("__metadata__", {}))
        tensors = [
            {
                "name": name,
                "shape": list(item["shape"]),
                "dtype": DTYPES.get(item["dtype"], item["dtype"]),
                "bytes": item["data_offsets"][1] - item["data_offsets"][0],
                "offset": item["data_offsets"][0],
            }
            for name, item in sorted(fields.items())
        ]
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise CorruptError(
            "not a whole safetensors file",
            where=str(path),
            remedy="It was cut short or is something else; copy it again.",
        ) from error
    end = max((tensor["offset"] + tensor["bytes"] for tensor in tensors), default=0)
    if path.stat().st_size != 8 + length + end:
        raise CorruptError(
            f"the file has {path.stat().st_size} bytes, its header describes {8 + length + end}",
            where=str(path),
            remedy="Copy it again, whole.",
        )
    return tensors, metadata, 8 + length


def plain_tensors(tensors: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tensors of a header without their offsets."""
    return [{name: value for name, value in tensor.items() if name != "offset"} for tensor in tensors]


def record_at(path: Path) -> Record:
    """The record that a JSON file holds, checked: its fields, its schema version, and the key that its content must have.

    Raises:
        ConfigError: it is nothing that dflash writes. CorruptError: it is, but damaged, edited or of a later schema.
    """
    try:
        document = read_json(path)
    except CorruptError as error:
        if path.name in OUR_FILES or path.name.startswith("step_"):
            raise CorruptError(
                error.what,
                where=str(path),
                remedy="It was cut short or edited: nothing in it is trusted. `dflash plan --verify` says how it is made again.",
            ) from error
        raise ConfigError("not a file that dflash writes", where=str(path), remedy=WHAT_TO_GIVE) from error
    for model in (CheckpointManifest, RunManifest, ImportRecord, Receipt, ParamsFile, Environment):
        required = {name for name, value in model.model_fields.items() if value.is_required()}
        if isinstance(document, dict) and required <= set(document):
            record = model.read(path)
            check_keys(record, path)
            return record
    if path.name in OUR_FILES and isinstance(document, dict) and "schema_version" in document:
        _refuse_unknown(document, path)
    raise ConfigError("not a receipt, manifest or params file of dflash", where=str(path), remedy=WHAT_TO_GIVE)


def _refuse_unknown(document: Mapping[str, Any], path: Path) -> None:
    """Says what is wrong with a file that has one of our names and a schema version, but lacks fields."""
    if path.name == "manifest.json":
        (RunManifest if "runkey" in document else CheckpointManifest).read(path)
    elif path.name == "environment.json":
        Environment.read(path)
    else:
        (Receipt if path.name == "receipt.json" else ParamsFile).read(path)


def check_keys(record: Record, path: Path) -> None:
    """Computes the key of every params file that a record holds: content edited by hand no longer has its key.

    Raises:
        CorruptError: names the stage and both keys.
    """
    documents: dict[str, Any]
    if isinstance(record, ImportRecord) and record.compute_key() != record.key:
        raise CorruptError(
            f"its content has key {record.compute_key()}, the file says {record.key}",
            where=str(path),
            remedy="It was edited after it was written: import again.",
        )
    if isinstance(record, ParamsFile):
        documents = {record.stage: record}
    elif isinstance(record, CheckpointManifest | RunManifest):
        documents = record.params_files
    else:
        return
    for name, document in documents.items():
        params = document if isinstance(document, ParamsFile) else ParamsFile.model_validate(document)
        if params.compute_key() != params.key:
            raise CorruptError(
                f"the params of {name} have key {params.compute_key()}, the file says {params.key}",
                where=str(path),
                remedy="They were edited after they were written: nothing in the file is trusted.",
            )


def load(path: Path) -> Subject:
    """Reads whatever lies at `path`.

    Raises:
        ConfigError: there is nothing, or nothing that says what made it. CorruptError: it is damaged.
    """
    if not path.exists():
        raise ConfigError("there is no such file or folder", where=str(path), remedy=WHAT_TO_GIVE)
    if path.is_dir():
        return _load_folder(path)
    if path.suffix == ".safetensors":
        return _load_safetensors(path)
    if path.suffix in (".pt", ".pth", ".bin", ".ckpt"):
        raise ConfigError(
            "a pickled checkpoint says nothing of what made it without being loaded",
            where=str(path),
            remedy=f"`dflash import {path}` reads it safely (weights only) into the store.",
        )
    record = record_at(path)
    if isinstance(record, CheckpointManifest):
        return _load_checkpoint(path.parent, record)
    if isinstance(record, RunManifest):
        return _load_run(path, record)
    if isinstance(record, ImportRecord):
        return _load_import(path, record)
    if isinstance(record, ParamsFile):
        return Subject(
            path,
            "result",
            f"{record.stage} {record.key}",
            config={record.stage: record.params},
            origins={record.stage: record.origins},
            keys={record.stage: record.key, **record.upstream},
        )
    if isinstance(record, Receipt) and (path.parent / "params.json").exists():
        return load(path.parent / "params.json")
    raise ConfigError("it names no parameters, so there is nothing to tell apart", where=str(path), remedy=WHAT_TO_GIVE)


def _load_folder(path: Path) -> Subject:
    for name in ("manifest.json", "import.json"):
        if (path / name).exists():
            return load(path / name)
    for folder in (path / "drafter", path):
        if (folder / "model.safetensors").exists():
            return _load_safetensors(folder / "model.safetensors")
        shards = sorted(folder.glob("*.safetensors"))
        if shards and (folder / "config.json").exists():
            return _load_shards(folder, shards)
    steps = sorted(path.glob("step_*/manifest.json"), key=lambda item: int(item.parent.name.partition("_")[2] or 0))
    if steps:
        return load(steps[-1])
    if (path / "params.json").exists():
        return load(path / "params.json")
    raise ConfigError(
        "the folder holds no manifest.json, params.json or model.safetensors", where=str(path), remedy=WHAT_TO_GIVE
    )


# ---------------------------------------------------------------- checkpoints


def _load_checkpoint(folder: Path, manifest: CheckpointManifest) -> Subject:
    train = folder.parent
    subject = Subject(
        folder,
        "checkpoint",
        f"step {manifest.step} of train {manifest.key}",
        config=dict(manifest.config),
        origins={name: dict(item.get("origins", {})) for name, item in manifest.params_files.items()},
        code=_code(manifest.params_files),
        keys={name: str(item.get("key", "")) for name, item in manifest.params_files.items()}
        or {"train": manifest.key},
        dataset=_dataset_facts(manifest.dataset.get("counts"), manifest.dataset.get("results"), manifest.config),
        buckets=_bucket_table(manifest.buckets.get("table")),
        environments={"train": manifest.environment},
        kernels={"train": flat(manifest.kernels)},
        placement=manifest.placement,
        tensors=[tensor.model_dump() for tensor in manifest.tensors],
    )
    subject.metrics = _metrics(train / "metrics.jsonl", subject, upto=manifest.step)
    if not subject.metrics:
        subject.unknown.append("throughput and stalls: no metrics.jsonl lies beside the checkpoint")
    subject.unknown.append("tau and the kernels of evaluation: give a run's manifest to compare those")
    return subject


def _metrics(path: Path, subject: Subject, upto: int | None = None) -> list[MetricsLine]:
    try:
        lines = last_attempts(path)
    except DflashError as error:
        subject.unknown.append(f"throughput and stalls: {error.message()}")
        return []
    return [line for line in lines if upto is None or line.step <= upto]


def _dataset_facts(counts: Any, results: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Counts, length and sources of a dataset from what its receipt recorded; empty when nothing was."""
    train = (results or {}).get("train") or {}
    length = train.get("length") or {}
    if not train:
        return {}
    sources = results.get("sources") or {
        name.partition("/")[2]: {} for name in config if name.startswith("completions/")
    }
    return {
        "digest": results.get("digest", ""),
        "samples": train.get("samples", 0),
        "tokens": train.get("tokens", 0),
        "trainable_tokens": train.get("trainable_tokens", 0),
        "truncated_share": train.get("truncated_share", 0.0),
        "mean": length.get("mean"),
        "quantiles": length.get("quantiles") or {},
        "max": length.get("max"),
        "sources": {name: item.get("train") if isinstance(item, Mapping) else None for name, item in sources.items()},
        "counts": counts or {},
    }


def _bucket_table(table: Any) -> list[dict[str, Any]]:
    """Upper edge, samples, share and batch size of each bucket, from the table in a checkpoint or from `buckets.json`."""
    if not isinstance(table, Mapping):
        return []
    if "buckets" in table:
        return [
            {"up_to": item["up_to"], "samples": item["samples"], "batch_size": item["batch_size"]}
            for item in table["buckets"]
        ]
    return [
        {"up_to": edge, "samples": samples, "batch_size": size}
        for edge, samples, size in zip(
            table.get("edges", []), table.get("samples", []), table.get("batch_sizes", []), strict=False
        )
    ]


def _load_safetensors(path: Path) -> Subject:
    tensors, metadata, _ = read_header(path)
    beside = path.parent.parent / "manifest.json"
    if path.parent.name == "drafter" and beside.exists():
        return load(beside)
    try:
        explained = json.loads(metadata.get(CONFIG_FIELD, "null"))
    except ValueError as error:
        raise CorruptError(f"the metadata field `{CONFIG_FIELD}` is not JSON", where=str(path)) from error
    if not isinstance(explained, dict):
        return _foreign(path, plain_tensors(tensors), metadata)
    subject = Subject(
        path,
        "safetensors",
        f"step {explained.get('step', '?')} of train {explained.get('key', '?')}, weights alone",
        config=dict(explained.get("config", {})),
        keys=dict(explained.get("upstream", {})),
        tensors=plain_tensors(tensors),
        unknown=[
            "environment, bound kernels, throughput, dataset counts, lineage and origins: they stand in the checkpoint's "
            "manifest.json, which did not come with the file",
        ],
    )
    return subject


def _foreign(path: Path, tensors: list[dict[str, Any]], metadata: Mapping[str, str]) -> Subject:
    subject = Subject(path, "foreign", "weights that dflash did not write", tensors=tensors)
    config = path.parent / "config.json"
    if config.exists():
        _add_foreign_config(subject, config)
    told = {name: text for name, text in metadata.items() if name != "format"}
    if told:
        subject.facts["metadata"] = json.dumps(told, sort_keys=True)[:400]
    subject.unknown.append(
        "token_budget, max_batch_size, max_anchors, gamma, max_seq_len, learning rate, dataset, kernels, environment, throughput: "
        "nothing in the file says them"
    )
    return subject


def _add_foreign_config(subject: Subject, path: Path) -> None:
    """What a published drafter's config.json says, under the names that training params have here."""
    values = read_json(path)
    if not isinstance(values, dict):
        raise CorruptError("not a mapping", where=str(path))
    nested = values.get("dflash_config") or {}
    both = {**values, **(nested if isinstance(nested, dict) else {})}
    given_as = {name: name for name in (*PARENT_MUST_SHARE, "dtype")} | {"num_draft_layers": "num_hidden_layers"}
    train = {name: both[given] for name, given in given_as.items() if given in both}
    train["target"] = {
        "hidden_size": both.get("hidden_size"),
        "vocab_size": both.get("vocab_size"),
        "num_layers": both.get("num_target_layers"),
    }
    subject.config["train"] = train
    subject.origins["train"] = dict.fromkeys(train, f"{path.name}, asserted by whoever wrote it")


def _load_shards(folder: Path, shards: list[Path]) -> Subject:
    tensors = [tensor for shard in shards for tensor in plain_tensors(read_header(shard)[0])]
    return _foreign(folder / shards[0].name, sorted(tensors, key=lambda item: str(item["name"])), {})


def _load_import(path: Path, record: ImportRecord) -> Subject:
    """What a person brought in: everything that is not proven carries `asserted` in its origin."""
    proven = record.proven
    dataset = _dataset_facts({}, {"train": proven, "digest": record.artifact.root if record.artifact else ""}, {})
    told = {name: value for name, value in proven.items() if record.kind != "dataset"}
    return Subject(
        path,
        "imported",
        f"{record.kind} {record.key}, imported from {record.origin} by {record.by} at {record.at[:19]}",
        config={stage: {name: item.value for name, item in part.items()} for stage, part in record.asserted.items()},
        origins={
            stage: {name: f"asserted ({item.said_by})" for name, item in part.items()}
            for stage, part in record.asserted.items()
        },
        dataset=dataset if record.kind == "dataset" else {},
        tensors=[tensor.model_dump() for tensor in record.tensors],
        facts={"proven": ", ".join(f"{name} {value}" for name, value in told.items())} if told else {},
        unknown=["environment, bound kernels, throughput and lineage: they were not imported and cannot be proven"],
    )


# ---------------------------------------------------------------- runs


def _load_run(path: Path, manifest: RunManifest) -> Subject:
    subject = Subject(
        path,
        "run",
        f"run {manifest.run} ({manifest.runkey})",
        config=dict(manifest.config),
        origins={name: dict(item.get("origins", {})) for name, item in manifest.params_files.items()},
        code=_code(manifest.params_files),
        keys={entry.name: entry.key for entry in manifest.stages},
        tensors=[tensor.model_dump() for tensor in manifest.tensors],
    )
    store = _store_of(path)
    for entry in manifest.stages:
        environment = _environment_of(manifest, entry, store)
        if environment is not None:
            subject.environments[entry.name] = environment
            if environment.kernels:
                bound = environment.kernels.get("target", environment.kernels)
                subject.kernels[entry.name] = flat(bound if isinstance(bound, Mapping) else {})
    _add_data(subject, manifest, store)
    _add_training(subject, manifest, store)
    _add_tau(subject, path.parent / "evaluations.csv")
    return subject


def _store_of(path: Path) -> Path | None:
    """The store beside a run's manifest: `results/store` of `results/runs/<run>/<runkey>/manifest.json`."""
    for parent in list(path.absolute().parents)[:4]:
        if (parent / "store").is_dir():
            return parent / "store"
    return None


def _environment_of(manifest: RunManifest, entry: StageEntry, store: Path | None) -> Environment | None:
    """Where a result was made; of a training, where its last checkpoint was."""
    labels = list(entry.environments.values())
    if labels and labels[-1] in manifest.environments:
        return manifest.environments[labels[-1]]
    if store is None:
        return None
    step = max(manifest.steps, default=None) if entry.stage in STEPWISE_RECEIPTS else None
    try:
        receipt = Receipt.read(receipt_path(stage_directory(store, entry.stage, entry.key), entry.stage, step))
        return Environment.read(store / "environments" / f"{receipt.environment}.json")
    except DflashError:
        return None


def _entry(manifest: RunManifest, stage: str) -> StageEntry | None:
    return next((entry for entry in manifest.stages if entry.stage == stage), None)


def _add_data(subject: Subject, manifest: RunManifest, store: Path | None) -> None:
    entry = _entry(manifest, "dataset")
    found: Any = entry.results if entry else {}
    counts: Any = entry.counts.model_dump() if entry and entry.counts else {}
    table: Any = None
    if store is not None and entry is not None:
        path = stage_directory(store, "dataset", entry.key) / "dataset.json"
        found = _read_or_note(subject, path, "dataset") or found
    buckets = _entry(manifest, "buckets")
    if buckets is not None:
        table = buckets.results.get("table")
        if store is not None:
            table = (
                _read_or_note(subject, stage_directory(store, "buckets", buckets.key) / "buckets.json", "buckets")
                or table
            )
    subject.dataset = _dataset_facts(counts, found, subject.config)
    subject.buckets = _bucket_table(table)
    if not subject.dataset:
        subject.unknown.append("the dataset's counts and lengths: neither the manifest nor a store beside it says them")


def _read_or_note(subject: Subject, path: Path, what: str) -> Any:
    try:
        return read_json(path)
    except CorruptError as error:
        subject.unknown.append(f"{what}: {error.message()}")
        return None


def _add_training(subject: Subject, manifest: RunManifest, store: Path | None) -> None:
    entry = _entry(manifest, "train")
    if entry is None:
        return
    if store is None:
        subject.unknown.append(
            "throughput and stalls: the manifest is not in its results folder, so metrics.jsonl is out of reach"
        )
        return
    folder = stage_directory(store, "train", entry.key)
    last = max(manifest.steps, default=0)
    subject.metrics = _metrics(folder / "metrics.jsonl", subject, upto=last or None)
    if not subject.metrics:
        subject.unknown.append(f"throughput and stalls: {folder / 'metrics.jsonl'} is missing or empty")
    path = folder / f"step_{last}" / "manifest.json"
    try:
        checkpoint = CheckpointManifest.read(path)
    except CorruptError as error:
        subject.unknown.append(f"tensors and placement: {error.message()}")
        return
    subject.tensors = subject.tensors or [tensor.model_dump() for tensor in checkpoint.tensors]
    subject.placement = checkpoint.placement
    subject.environments[entry.name] = checkpoint.environment
    subject.kernels[entry.name] = flat(checkpoint.kernels)


def _add_tau(subject: Subject, path: Path) -> None:
    if not path.exists():
        subject.unknown.append(f"tau: {path.name} is not beside the manifest")
        return
    with path.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    subject.tau = [row for row in rows if row.get("metric") == "tau_pooled" and row.get("length_bucket") == "all"]


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested facts under dotted names, as texts."""
    found: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found.update(flat(value, f"{prefix}{name}."))
        else:
            found[f"{prefix}{name}"] = str(value)
    return found
