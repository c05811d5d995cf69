"""`dflash inspect`: what made this? For a checkpoint folder, a lone safetensors file, a receipt, a manifest, a params file.

Reads JSON and the header of a safetensors file; needs no store, no config and no torch. Under 0.3 s.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from dflash.base.errors import ConfigError, CorruptError
from dflash.base.files import read_json
from dflash.base.records import CheckpointManifest, ParamsFile, Receipt, Record, RunManifest, last_attempts

CONFIG_FIELD = "dflash"
"""The metadata field of a drafter's safetensors file that holds its resolved config as JSON."""
MAX_HEADER = 100 << 20


def describe(path: Path) -> dict[str, Any]:
    """Everything a path says of itself: `{"kind": ..., "path": ..., ...}` with the record's own fields.

    Raises:
        ConfigError: there is no such path, or it is nothing that dflash writes.
        CorruptError: it is, but damaged.
    """
    if not path.exists():
        raise ConfigError("there is no such file or folder", where=str(path))
    if path.is_dir():
        return _describe_folder(path)
    if path.suffix == ".safetensors":
        return {"kind": "safetensors", "path": str(path), **_safetensors(path)}
    document = read_json(path)
    for model in (Receipt, ParamsFile, RunManifest, CheckpointManifest):
        if isinstance(document, dict) and _required(model) <= set(document):
            return {"kind": model.__name__, "path": str(path), **model.read(path).model_dump(mode="json")}
    raise ConfigError("not a receipt, manifest or params file of dflash", where=str(path))


def _required(model: type[Record]) -> set[str]:
    return {name for name, field in model.model_fields.items() if field.is_required()}


def _describe_folder(path: Path) -> dict[str, Any]:
    manifest = path / "manifest.json"
    if manifest.exists():
        return {**describe(manifest), "path": str(path)}
    for name in ("model.safetensors", "drafter/model.safetensors"):
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
    raise ConfigError(
        "the folder holds no manifest.json, params.json or model.safetensors",
        where=str(path),
        remedy="Give a checkpoint (step_<n>), a result folder of the store, or a run's state.",
    )


def _safetensors(path: Path) -> dict[str, Any]:
    """Tensors and metadata from the header: 8 bytes of length, then JSON (the safetensors format)."""
    with path.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else MAX_HEADER + 1
        header = stream.read(length) if length <= MAX_HEADER else b""
    try:
        fields = json.loads(header)
    except ValueError as error:
        raise CorruptError("not a whole safetensors file", where=str(path)) from error
    metadata = fields.pop("__metadata__", {})
    tensors = [
        {
            "name": name,
            "shape": item["shape"],
            "dtype": item["dtype"],
            "bytes": item["data_offsets"][1] - item["data_offsets"][0],
        }
        for name, item in sorted(fields.items())
    ]
    end = max((item["data_offsets"][1] for item in fields.values()), default=0)
    if path.stat().st_size != 8 + length + end:
        raise CorruptError(
            f"the file has {path.stat().st_size} bytes, its header describes {8 + length + end}", where=str(path)
        )
    found: dict[str, Any] = {"tensors": tensors, "bytes": end}
    for name, text in metadata.items():
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text
    if not any(isinstance(value, dict) for name, value in found.items() if name not in ("tensors", "bytes")):
        found["unknown"] = "the file says nothing of what made it: no dflash metadata"
    return found


def render(found: dict[str, Any]) -> str:
    """The description as indented text; long lists are counted, not printed."""
    lines = [f"{found['kind']}  {found['path']}"]
    _render_into(lines, {name: value for name, value in found.items() if name not in ("kind", "path")}, 1)
    return "\n".join(lines)


def _render_into(lines: list[str], value: dict[str, Any], depth: int) -> None:
    indent = "  " * depth
    for name, item in value.items():
        if name in ("params_files", "distributions", "modules", "chunks", "origins"):
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
