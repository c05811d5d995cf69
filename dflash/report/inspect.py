"""`dflash inspect`: what made this? For a checkpoint folder, a lone safetensors file, a receipt, a manifest, a params file.

Ten lines say what it is; then every parameter of every stage, several on a line. `--all` prints the whole record, `--json` the
same for programs. Reads JSON and the header of a safetensors file; needs no store, no config, no network and no torch. Under
0.4 s.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash.base.errors import ConfigError
from dflash.base.records import (
    CheckpointManifest,
    Environment,
    ParamsFile,
    Receipt,
    Record,
    RunManifest,
    last_attempts,
)
from dflash.base.words import number_of
from dflash.report.subject import (
    CONFIG_FIELD,
    WHAT_TO_GIVE,
    Subject,
    flat,
    load,
    plain_tensors,
    read_header,
    record_at,
)

WIDTH = 118
LABEL = 12
HIDDEN_LISTS = ("params_files", "distributions", "modules", "chunks", "origins")
ORDER = ("prompts", "completions", "dataset", "buckets", "train", "references", "evaluate", "report")
GLUE = "\u00a0"
"""Stands for a blank that a line must not be broken at."""


# ---------------------------------------------------------------- everything, for --json and --all


def describe(path: Path) -> dict[str, Any]:
    """Everything a path says of itself: `{"kind": ..., "path": ..., ...}` with the record's own fields.

    Raises:
        ConfigError: there is no such path, or it is nothing that dflash writes.
        CorruptError: it is, but damaged, edited or of a later schema.
    """
    if not path.exists():
        raise ConfigError("there is no such file or folder", where=str(path), remedy=WHAT_TO_GIVE)
    if path.is_dir():
        return _describe_folder(path)
    if path.suffix == ".safetensors":
        return {"kind": "safetensors", "path": str(path), **_safetensors(path)}
    if path.suffix in (".pt", ".pth", ".bin", ".ckpt"):
        load(path)  # says what to do with it
    record = record_at(path)
    return {"kind": type(record).__name__, "path": str(path), **record.model_dump(mode="json")}


def _describe_folder(path: Path) -> dict[str, Any]:
    for name in ("manifest.json", "import.json", "model.safetensors", "drafter/model.safetensors"):
        if (path / name).exists():
            return {**describe(path / name), "path": str(path)}
    if (path / "params.json").exists():
        found = {**describe(path / "params.json"), "path": str(path)}
        if (path / "receipt.json").exists():
            found["receipt"] = Receipt.read(path / "receipt.json").model_dump(mode="json")
        metrics = last_attempts(path / "metrics.jsonl")
        if metrics:
            found["last_step"] = metrics[-1].model_dump(mode="json")
        return found
    shards = sorted(path.glob("*.safetensors"))
    if shards and (path / "config.json").exists():
        tensors = [tensor for shard in shards for tensor in plain_tensors(read_header(shard)[0])]
        return {"kind": "foreign", "path": str(path), "tensors": tensors, "unknown": NO_METADATA}
    raise ConfigError(
        "the folder holds no manifest.json, params.json or model.safetensors", where=str(path), remedy=WHAT_TO_GIVE
    )


NO_METADATA = "the file says nothing of what made it: no dflash metadata"


def _safetensors(path: Path) -> dict[str, Any]:
    tensors, metadata, _ = read_header(path)
    found: dict[str, Any] = {
        "tensors": plain_tensors(tensors),
        "bytes": sum(tensor["bytes"] for tensor in tensors),
    }
    for name, text in metadata.items():
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text
    if not isinstance(found.get(CONFIG_FIELD), dict):
        found["unknown"] = NO_METADATA
    return found


def render(found: Mapping[str, Any]) -> str:
    """The whole description as indented text; long lists are counted, not printed."""
    lines = [f"{found['kind']}  {found['path']}"]
    _render_into(lines, {name: value for name, value in found.items() if name not in ("kind", "path")}, 1)
    return "\n".join(lines)


def _render_into(lines: list[str], value: Mapping[str, Any], depth: int) -> None:
    indent = "  " * depth
    for name, item in value.items():
        if name in HIDDEN_LISTS and isinstance(item, dict | list):
            lines.append(f"{indent}{name}: {len(item)} (see --json)")
        elif isinstance(item, dict):
            lines.append(f"{indent}{name}:")
            _render_into(lines, item, depth + 1)
        elif name == "tensors":
            total = sum(tensor["bytes"] for tensor in item)
            lines.append(f"{indent}tensors: {len(item)}, {total:,} bytes")
            lines += [f"{indent}  {t['name']}  {t['dtype']}  {t['shape']}  {t['bytes']:,} bytes" for t in item]
        elif isinstance(item, list) and item and isinstance(item[0], dict):
            lines.append(f"{indent}{name}:")
            for index, part in enumerate(item):
                lines.append(f"{indent}  [{index}]")
                _render_into(lines, part, depth + 2)
        else:
            lines.append(f"{indent}{name}: {item}")


# ---------------------------------------------------------------- the summary


def summarize(path: Path) -> str:
    """What a person asks first, and every parameter.

    Raises: as `describe`.
    """
    record = _record(path)
    if isinstance(record, Receipt):
        return "\n".join(_receipt_lines(path, record))
    if isinstance(record, Environment):
        return "\n".join(_lines("environment", str(path)) + _environment_lines(record))
    subject = load(path)
    lines = _lines(subject.kind, f"{subject.label}  {path}")
    lines += _record_lines(record) + _data_lines(subject) + _training_lines(subject)
    lines += _tensor_lines(subject) + _kernel_lines(subject)
    environment = next((item for name, item in subject.environments.items() if name == "train"), None)
    lines += _environment_lines(environment) if environment is not None else []
    for name, text in subject.facts.items():
        lines += _lines(name, text)
    for text in subject.unknown:
        lines += _lines("not known", text)
    lines += ["", *_config_lines(subject)]
    return "\n".join(lines)


def _record(path: Path) -> Record | None:
    """The record behind a path: of a folder its manifest or params; None for weights."""
    if path.is_dir():
        for name in ("manifest.json", "import.json", "params.json"):
            if (path / name).exists():
                return record_at(path / name)
        return None
    beside = path.parent.parent / "manifest.json"
    if path.parent.name == "drafter" and beside.exists():
        return record_at(beside)
    if not path.exists() or path.suffix in (".safetensors", ".pt", ".pth", ".bin", ".ckpt"):
        return None
    return record_at(path)


def _lines(label: str, text: str) -> list[str]:
    """A label and its text, wrapped under itself."""
    head = f"{label:<{LABEL}}"
    wrapped = textwrap.wrap(
        text, WIDTH, initial_indent=head, subsequent_indent=" " * LABEL, break_long_words=False, break_on_hyphens=False
    )
    return [line.replace(GLUE, " ") for line in wrapped] or [head.rstrip()]


def _record_lines(record: Record | None) -> list[str]:
    if isinstance(record, CheckpointManifest):
        return _checkpoint_lines(record)
    if isinstance(record, RunManifest):
        steps = record.steps
        hosts = ", ".join(sorted({name.partition("/")[0] for name in record.environments}))
        found = _lines(
            "written",
            f"{_when(record.created)}, {_commit(record.git)}; {record.determinism} repeatability; "
            f"{number_of(len(steps), 'checkpoint')} up to step {max(steps, default=0):,}; "
            f"{number_of(len(record.environments), 'environment')} on {hosts or 'no host'}",
        )
        found += _lines("code", f"{record.code[:16]}, kept under results/code/") if record.code else []
        for item in record.adoptions:
            found += _lines(
                "adopted",
                f"{item.get('stage')} {item.get('old_key')} stands for {item.get('new_key')}, by {item.get('by')} at "
                f"{item.get('at')}: {item.get('why')}",
            )
        return found
    if isinstance(record, ParamsFile):
        return _lines("code", f"{record.code.digest}, {number_of(len(record.code.modules), 'module')}")
    return []


def _checkpoint_lines(manifest: CheckpointManifest) -> list[str]:
    attempts = manifest.lineage.attempts
    found = _lines(
        "written",
        f"{_when(manifest.created)}, {_commit(manifest.environment.git)}, code {', '.join(manifest.lineage.code) or '-'}; "
        f"{number_of(len(attempts) or 1, 'attempt')}"
        f"{'; the state to resume from is kept' if manifest.state else ''}",
    )
    parent = manifest.lineage.parent
    if parent:
        found += _lines("continues", f"step {parent.get('step')} of train {parent.get('key')} ({parent.get('what')})")
    for item in manifest.lineage.accepted:
        found += _lines(
            "accepted", f"drift in attempt {item.get('attempt')}: {item.get('drift')}; why: {item.get('why')}"
        )
    topology = manifest.topology
    if topology:
        found += _lines("topology", ", ".join(f"{name} {value}" for name, value in topology.items()))
    return found


def _receipt_lines(path: Path, receipt: Receipt) -> list[str]:
    counts = receipt.counts
    step = f" step {receipt.step}" if receipt.step is not None else ""
    found = _lines("receipt", f"{receipt.stage} {receipt.key}{step}  {path}")
    found += _lines(
        "made", f"{_when(receipt.started)} to {_when(receipt.finished)} on {receipt.host}, attempt {receipt.attempt}"
    )
    found += _lines("environment", receipt.environment)
    found += _lines("counts", f"{counts.total} in: {counts.ok} ok, {counts.error} failed, {counts.skipped} skipped")
    for output in receipt.outputs:
        found += _lines("output", f"{output.path}  {output.size:,} bytes  sha256 {output.sha256}")
    for name, value in receipt.inputs.items():
        found += _lines("input", f"{name} {value[:12]}")
    if receipt.results:
        found += _lines("results", json.dumps(receipt.results, sort_keys=True))
    return found


def _when(stamp: str) -> str:
    return f"{stamp[:19].replace('T', ' ')} UTC" if stamp else "at a time not recorded"


def _commit(git: Mapping[str, Any]) -> str:
    if not git.get("commit"):
        return "no commit recorded"
    return f"commit {str(git['commit'])[:12]}{' with uncommitted changes' if git.get('dirty') else ''}"


def _data_lines(subject: Subject) -> list[str]:
    data = subject.dataset
    if not data:
        return []
    quantiles = ", ".join(f"{float(share):.0%} {length}" for share, length in data["quantiles"].items())
    mean = f"; length mean {data['mean']:.1f} ({quantiles}, most {data['max']})" if data.get("mean") is not None else ""
    sources = ", ".join(f"{name} {count:,}" if count is not None else name for name, count in data["sources"].items())
    found = _lines(
        "dataset",
        f"{number_of(data['samples'], 'training sample')}, {number_of(data['tokens'], 'token')}{mean}; sources: {sources or '-'}; "
        f"digest {data['digest'][:12]}",
    )
    if subject.buckets:
        table = ", ".join(f"<={item['up_to']}: {item['samples']:,} x{item['batch_size']}" for item in subject.buckets)
        found += _lines("buckets", f"{table} (samples x batch size)")
    return found


def _training_lines(subject: Subject) -> list[str]:
    lines = subject.metrics
    if not lines:
        return []
    roles = sorted({role for line in lines for role in line.tokens_per_second})
    rates = ", ".join(f"{role} {median_rate(subject, role):,.0f} tok/s" for role in roles)
    return _lines(
        "training", f"{number_of(len(lines), 'step')} measured, last loss {lines[-1].loss:.4g}; median {rates}"
    )


def median_rate(subject: Subject, role: str) -> float:
    """Median tokens a second of a role over all steps."""
    found = sorted(line.tokens_per_second[role] for line in subject.metrics if role in line.tokens_per_second)
    return found[len(found) // 2] if found else 0.0


def _tensor_lines(subject: Subject) -> list[str]:
    if not subject.tensors:
        return []
    total = sum(tensor["bytes"] for tensor in subject.tensors)
    types = ", ".join(sorted({tensor["dtype"] for tensor in subject.tensors}))
    return _lines("tensors", f"{len(subject.tensors)}, {total:,} bytes, {types}")


def _kernel_lines(subject: Subject) -> list[str]:
    told: dict[str, list[str]] = {}
    for role, bound in subject.kernels.items():
        head = f"linear attention {bound.get('linear', '?')} ({bound.get('form', '?')}), attention {bound.get('attention', '?')}"
        rest = [
            f"{name.removeprefix('functions.')} = {value}"
            for name, value in bound.items()
            if name not in ("linear", "form", "attention")
        ]
        told.setdefault("; ".join([head, *rest]), []).append(role)
    return [line for text, roles in told.items() for line in _lines("kernels", f"{text} [{', '.join(roles)}]")]


def _environment_lines(item: Environment) -> list[str]:
    torch = item.torch
    gpus: dict[str, int] = {}
    for gpu in item.gpus:
        cap = f" at {gpu['power_cap_watts']:.0f} W" if gpu.get("power_cap_watts") else ""
        name = f"{gpu.get('name')}{cap}"
        gpus[name] = gpus.get(name, 0) + 1
    told = ", ".join(f"{count} x {name}" for name, count in gpus.items()) or "no GPU"
    build = ", ".join(f"{name} {torch[name]}" for name in ("cuda", "cudnn", "nccl", "driver") if torch.get(name))
    return _lines(
        "machine",
        f"{item.cpu}, {number_of(item.cores, 'core')}, {item.memory_bytes / 1e9:.0f} GB; {told}; python {item.python}; torch "
        f"{torch.get('version', 'not imported')}{f' ({build})' if build else ''}; "
        f"{number_of(len(item.distributions), 'distribution')}; {item.platform}",
    )


def _config_lines(subject: Subject) -> list[str]:
    """Every parameter of every stage: results of one stage with equal values share their lines, the target is told once."""
    if not subject.config:
        return []
    found: list[str] = []
    targets: dict[str, list[str]] = {}
    groups: dict[tuple[str, str], list[str]] = {}
    for name in sorted(subject.config, key=_place):
        params = dict(subject.config[name])
        target = params.pop("target", None)
        if isinstance(target, Mapping):
            targets.setdefault(_values(target), []).append(name.partition("/")[0])
        groups.setdefault((name.partition("/")[0], _values(params)), []).append(name)
    for text, stages in targets.items():
        of = f" of {', '.join(dict.fromkeys(stages))}" if len(targets) > 1 else ""
        found += _lines("target", f"{text}{of}")
    for (stage, text), names in groups.items():
        keys = [subject.keys[name] for name in names if subject.keys.get(name)]
        which = [name.partition("/")[2] for name in names if "/" in name]
        head = f"[{', '.join(which)}] " if which else ""
        head += "asserted, nothing proves it: " if subject.kind in ("imported", "foreign") else ""
        found += _lines(
            stage, f"{head}{text}" + (f"  (key {', '.join(keys)})".replace("key ", f"key{GLUE}") if keys else "")
        )
    if subject.placement:
        found += _lines("placement", _values(subject.placement))
    return found


def _place(name: str) -> tuple[int, str]:
    stage = name.partition("/")[0]
    return (ORDER.index(stage) if stage in ORDER else len(ORDER), name)


def _values(values: Mapping[str, Any]) -> str:
    return "  ".join(f"{name}: {_short(value)}".replace(" ", GLUE) for name, value in flat(values).items())


def _short(value: str) -> str:
    """Digests are told by their first 12 digits; what is None was not set."""
    if len(value) == 64 and not set(value) - set("0123456789abcdef"):
        return value[:12]
    return "none" if value == "None" else value


def show(path: Path, everything: bool) -> str:
    """What `dflash inspect` prints.

    Raises: as `describe`.
    """
    return render(describe(path)) if everything else summarize(path)
