"""`dflash import`: what was made elsewhere becomes an entry of the store that says what is proven of it and what is only said.

    PATH                           becomes
    old checkpoint (.pt, .pth)     safetensors, read with the weights-only reader; plain values beside the weights are asserted
    a drafter's folder             its files as they are; config.json is asserted
    tokenised dataset              Parquet, JSON lines or Arrow with `input_ids`, and `prompt_length` or `loss_mask`
    W&B config (yaml, json)        asserted values
    launch command line (text)     asserted values, one an option

Proven is what the content itself shows: digests, shapes, counts, lengths. Everything else is `asserted`, says by what, and stays
so wherever it is shown. What an assertion says of the shape of weights is compared with the weights, and refused when they
disagree. Reads the content once (a checkpoint of 3.5 GB: 10 s).
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from dflash.base.environment import masked
from dflash.base.errors import ConfigError, CorruptError
from dflash.base.files import fsync_directory
from dflash.base.params import Params
from dflash.base.records import Assertion, ImportRecord, TensorFact, now
from dflash.data.buckets_params import BucketsParams
from dflash.data.completions_params import CompletionsParams
from dflash.data.dataset_params import DatasetParams
from dflash.hosts.lease import user_name
from dflash.report.subject import plain_tensors, read_header
from dflash.ship import artifact
from dflash.train.train_params import TrainParams

FOLDER = "imported"
MODELS: dict[str, type[Params]] = {
    "train": TrainParams,
    "buckets": BucketsParams,
    "dataset": DatasetParams,
    "completions": CompletionsParams,
}
ALIASES = {
    "learning_rate": "lr",
    "max_lr": "lr",
    "peak_lr": "lr",
    "num_layers": "num_draft_layers",
    "draft_layers": "num_draft_layers",
    "num_hidden_layers": "num_draft_layers",
    "max_length": "max_seq_len",
    "max_seq_length": "max_seq_len",
    "seq_len": "max_seq_len",
    "max_steps": "schedule_steps",
    "total_steps": "schedule_steps",
    "num_train_steps": "schedule_steps",
    "train_steps": "schedule_steps",
    "warmup_steps": "warmup",
    "num_anchors": "max_anchors",
    "loss_decay_gamma": "gamma",
    "loss_gamma": "gamma",
    "decay_gamma": "gamma",
    "grad_clip": "clip",
    "max_grad_norm": "clip",
    "clip_grad_norm": "clip",
    "batch_token_budget": "token_budget",
    "tokens_per_batch": "token_budget",
    "max_tokens_per_batch": "token_budget",
    "batch_size": "max_batch_size",
    "taps": "target_layer_ids",
    "tap_layers": "target_layer_ids",
    "random_seed": "seed",
}
"""What other trainers call our params."""
PICKLED = (".pt", ".pth", ".ckpt", ".bin")
TABLES = (".parquet", ".jsonl", ".arrow")
SECRET_NAME = re.compile(
    r"token|secret|passw|passphrase|passcode|pwd|(api|access|private)_?key|credential|bearer|(^|_)auth(?!or)|(^|_)keys?$"
)
NOT_SECRET = re.compile(
    r"tokenizer(_(path|name|class|file|revision|mode|type|dir|name_or_path))?"
    r"|(\w+_)?tokens?_(budget|ids?|type_ids|count|seen|per_\w+)"
    r"|(num|n|max|min|total)_(\w+_)?tokens|(new|trained|trainable|prompt|completion|draft|warmup)_tokens"
    r"|(bos|eos|pad|mask|unk|sep|cls|image|special|added|additional_special)_tokens?(_ids?)?"
)
"""Names with a word of a secret in them that are of none; the whole name must match."""


def import_path(
    path: Path, results: Path, *, wandb_config: Path | None = None, argv: Path | None = None
) -> ImportRecord:
    """Brings `path` into the store of `results`, with what a W&B config or a command line says of it.

    Raises:
        ConfigError: it is nothing that can be imported, or an assertion contradicts the content.
        CorruptError, PermanentError: it is damaged, or holds what would have to be run to be read.
    """
    if not path.exists():
        raise ConfigError("there is no such file or folder", where=str(path))
    store = results / "store" / FOLDER
    store.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".import-", dir=store))
    try:
        record = _content(path, work)
        for file in (wandb_config, argv):
            if file is not None:
                _say(record, read_config(file), file.name)
        _check(record, path)
        return _publish(record, work, store)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _publish(record: ImportRecord, work: Path, store: Path) -> ImportRecord:
    record.key = record.compute_key()
    final = store / record.key
    if (final / "import.json").exists():
        return ImportRecord.read(final / "import.json")
    record.write(work / "import.json")
    work.chmod(0o755)
    work.rename(final)
    fsync_directory(store)
    return record


def _content(path: Path, work: Path) -> ImportRecord:
    if path.is_dir():
        tables = sorted(file for kind in TABLES for file in path.glob(f"*{kind}"))
        if any(path.glob("*.safetensors")):
            return _drafter_folder(path, work)
        if tables:
            return _dataset(path, tables, work)
        pickled = sorted(file for kind in PICKLED for file in path.glob(f"*{kind}"))
        if len(pickled) == 1:
            return _content(pickled[0], work)
        raise ConfigError(
            "the folder holds no safetensors, no single .pt file and no Parquet, JSON lines or Arrow file",
            where=str(path),
            remedy="Name the file itself.",
        )
    if path.suffix in PICKLED:
        return _pickled(path, work)
    if path.suffix == ".safetensors":
        return _drafter_folder(path, work)
    if path.suffix in TABLES:
        return _dataset(path, [path], work)
    record = _record("config", path, {})
    _say(record, read_config(path), path.name)
    return record


def _record(kind: Any, path: Path, proven: dict[str, Any]) -> ImportRecord:
    return ImportRecord(
        key="", kind=kind, origin=str(path), by=user_name(), at=now(), proven=proven, asserted={}, artifact=None
    )


# ---------------------------------------------------------------- weights


def _pickled(path: Path, work: Path) -> ImportRecord:
    from dflash.model.pickled import read_pickled
    from dflash.model.tensor_files import save_tensors

    weights, rest = read_pickled(path)
    (work / "drafter").mkdir()
    save_tensors(weights, work / "drafter/model.safetensors")
    record = _weights(path, work)
    flat: dict[str, Any] = {}
    for name, value in rest.items():
        if not is_secret(str(name)):
            flat |= value if isinstance(value, Mapping) else {name: value}
    _say(record, flat, path.name)
    return record


def _drafter_folder(path: Path, work: Path) -> ImportRecord:
    (work / "drafter").mkdir()
    files = [*sorted(path.glob("*.safetensors")), path / "config.json"] if path.is_dir() else [path]
    for file in files:
        if file.exists():
            shutil.copyfile(file, work / "drafter" / file.name)
    record = _weights(path, work)
    config = work / "drafter/config.json"
    if config.exists():
        try:
            values = json.loads(config.read_text())
        except ValueError as error:
            raise CorruptError(f"not JSON ({error})", where=str(path / "config.json")) from error
        nested = values.pop("dflash_config", None)
        _say(record, {**values, **(nested if isinstance(nested, dict) else {})}, "config.json")
    return record


def _weights(path: Path, work: Path) -> ImportRecord:
    tensors = [
        tensor
        for file in sorted((work / "drafter").glob("*.safetensors"))
        for tensor in plain_tensors(read_header(file)[0])
    ]
    numbers = {int(match[1]) for tensor in tensors if (match := re.search(r"(?:^|\.)layers\.(\d+)\.", tensor["name"]))}
    proven = {"tensors": len(tensors), "bytes": sum(tensor["bytes"] for tensor in tensors)}
    if numbers:
        proven["num_draft_layers"] = len(numbers)
    record = _record("weights", path, proven)
    record.tensors = [TensorFact(**tensor) for tensor in sorted(tensors, key=lambda item: item["name"])]
    record.artifact = artifact.describe(work / "drafter")
    return record


# ---------------------------------------------------------------- datasets


def _dataset(path: Path, files: Iterable[Path], work: Path) -> ImportRecord:
    """Copies the tokens into one Parquet file and counts them."""
    lengths: list[int] = []
    trained = 0
    (work / "data").mkdir()
    target = work / "data/samples.parquet"
    schema = pa.schema([pa.field("input_ids", pa.list_(pa.int32())), pa.field("prompt_length", pa.int32())])
    with pq.ParquetWriter(target, schema, compression="zstd") as writer:
        for file in files:
            for table in _tables(file):
                ids, prompts = _columns(table, file)
                writer.write_table(pa.table({"input_ids": ids, "prompt_length": prompts}, schema=schema))
                lengths += [len(row) for row in ids]
                trained += sum(len(row) - prompt for row, prompt in zip(ids, prompts, strict=True))
    if not lengths:
        raise ConfigError("it holds no sample", where=str(path))
    ordered = sorted(lengths)
    proven = {
        "samples": len(lengths),
        "tokens": sum(lengths),
        "trainable_tokens": trained,
        "length": {
            "mean": sum(lengths) / len(lengths),
            "min": ordered[0],
            "max": ordered[-1],
            "quantiles": {str(q): ordered[min(len(ordered) - 1, int(q * len(ordered)))] for q in (0.05, 0.5, 0.95)},
        },
    }
    record = _record("dataset", path, proven)
    record.artifact = artifact.describe(work / "data")
    return record


def _tables(file: Path) -> Iterable[pa.Table]:
    try:
        if file.suffix == ".parquet":
            for batch in pq.ParquetFile(file).iter_batches(batch_size=1024):
                yield pa.Table.from_batches([batch])
        elif file.suffix == ".arrow":
            with pa.memory_map(str(file)) as source:
                with contextlib.suppress(pa.ArrowInvalid):
                    yield pa.ipc.open_file(source).read_all()
                    return
                source.seek(0)
                yield pa.ipc.open_stream(source).read_all()
        else:
            with file.open() as stream:
                for number, line in enumerate(stream, start=1):
                    if line.strip():
                        yield pa.Table.from_pylist([_json_row(line, file, number)])
    except (pa.ArrowException, OSError) as error:
        raise CorruptError(f"not readable ({error})", where=str(file)) from error


def _json_row(line: str, file: Path, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise CorruptError(f"not JSON ({error})", where=f"{file}:{number}") from error
    if not isinstance(row, dict):
        raise CorruptError("not an object", where=f"{file}:{number}")
    return {name: row[name] for name in ("input_ids", "prompt_length", "loss_mask") if name in row}


def _columns(table: pa.Table, file: Path) -> tuple[list[list[int]], list[int]]:
    """Token ids and the length of each prompt, which is where the loss mask turns to one for good."""
    names = set(table.column_names)
    if "input_ids" not in names or not names & {"prompt_length", "loss_mask"}:
        raise ConfigError(
            f"the columns are {', '.join(sorted(names)) or 'none'}",
            where=str(file),
            remedy="A tokenised dataset has `input_ids`, and `prompt_length` or `loss_mask`.",
        )
    ids = table.column("input_ids").to_pylist()
    if "prompt_length" in names:
        return ids, [int(value) for value in table.column("prompt_length").to_pylist()]
    prompts = []
    for mask in table.column("loss_mask").to_pylist():
        first = next((place for place, value in enumerate(mask) if value), len(mask))
        if not all(mask[first:]):
            raise ConfigError(
                "a loss mask has zeros after its first one, which a prompt length cannot say",
                where=str(file),
                remedy="Only samples of one prompt and one completion can be imported.",
            )
        prompts.append(first)
    return ids, prompts


# ---------------------------------------------------------------- what is only said


def read_config(path: Path) -> dict[str, Any]:
    """Names and values of a W&B config (`name: {value: ...}` or plain), of JSON or YAML, or of a launch command line.

    Raises:
        ConfigError: it is none of these.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read ({error})", where=str(path)) from error
    if re.search(r"(^|\s)--[A-Za-z]", text):
        return parse_argv(text)
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError:
        values = None
    if not isinstance(values, dict) or not values:
        raise ConfigError(
            "neither a checkpoint, a drafter's folder, a tokenised dataset, a config nor a launch command line",
            where=str(path),
        )
    return {
        str(name): item["value"] if isinstance(item, dict) and "value" in item else item
        for name, item in values.items()
        if name not in ("_wandb", "wandb_version")
    }


def parse_argv(text: str) -> dict[str, Any]:
    """`--name value`, `--name=value` and `--flag` of a command line, values as JSON where they are."""
    try:
        words = shlex.split(text.replace("\\\n", " "))
    except ValueError as error:
        raise ConfigError(f"not a command line ({error})") from error
    found: dict[str, Any] = {}
    for index, word in enumerate(words):
        if not word.startswith("--") or len(word) < 3:
            continue
        name, equals, value = word[2:].partition("=")
        if not equals:
            follows = words[index + 1] if index + 1 < len(words) else "--"
            value = "true" if follows.startswith("--") else follows
        found[name] = _value(value)
    return found


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _plain(name: str) -> str:
    """The last part of a dotted name or path, in small letters with `_` between words."""
    last = name.rpartition("/")[2].rpartition(".")[2].replace("-", "_")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", last).lower()


def is_secret(name: str) -> bool:
    """Whether a value of this name may be a password, a key or a token of access."""
    plain = _plain(name)
    return bool(SECRET_NAME.search(plain)) and not NOT_SECRET.fullmatch(plain)


def without_secrets(value: Any) -> Any:
    """The value without the secrets that mappings inside it hold, and with what looks like a secret masked."""
    if isinstance(value, Mapping):
        return {str(name): without_secrets(item) for name, item in value.items() if not is_secret(str(name))}
    if isinstance(value, list | tuple | set | frozenset):
        return [without_secrets(item) for item in value]
    return masked(value) if isinstance(value, str) else json.loads(masked(json.dumps(value, default=str)))


def _say(record: ImportRecord, values: Mapping[str, Any], said_by: str) -> None:
    """Files assertions under the stage whose param they name, or under `other`; secrets are left out."""
    for name, value in values.items():
        if is_secret(name):
            continue
        plain = _plain(name)
        ours = ALIASES.get(plain, plain)
        stage = next((stage for stage, model in MODELS.items() if ours in model.model_fields), "other")
        told = without_secrets(value)
        record.asserted.setdefault(stage, {}).setdefault(
            ours if stage != "other" else name, Assertion(value=told, said_by=said_by)
        )


def _check(record: ImportRecord, path: Path) -> None:
    """Refuses assertions that the content disproves."""
    said = record.asserted.get("train", {}).get("num_draft_layers")
    seen = record.proven.get("num_draft_layers")
    if said is not None and seen is not None and said.value != seen:
        raise ConfigError(
            f"{said.said_by} says num_draft_layers {said.value}, the weights have {seen}",
            where=str(path),
            remedy="The config is of another checkpoint.",
        )


def render(record: ImportRecord, store: Path) -> str:
    """What was imported, for people."""
    lines = [f"imported {record.kind} {record.key}  {store / FOLDER / record.key}"]
    lines += [f"  proven    {name}: {json.dumps(value)}" for name, value in record.proven.items()]
    for stage, part in sorted(record.asserted.items()):
        lines += [
            f"  asserted  {stage}.{name}: {json.dumps(item.value)} ({item.said_by})" for name, item in part.items()
        ]
    return "\n".join(lines)
