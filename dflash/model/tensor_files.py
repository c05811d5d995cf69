"""Safetensors files whose bytes are a function of their content, and that are either whole or absent.

The library writes the metadata of the header in an order of its own each time; here it is put in order, so that equal tensors
and equal metadata are equal bytes, which digests and shipments rely on. Costs one more read and write of the header.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from dflash.base.errors import CorruptError


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Writes a safetensors file under another name, in order, and renames it.

    Args:
        tensors: on any device, of any layout.
        path: its folder must exist.
        metadata: strings for the header; `format: pt` is added, which loaders of other libraries look for.

    Raises:
        OSError, SafetensorError: the disk refuses; nothing is left under `path`.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(plain, partial, metadata={**(metadata or {}), "format": "pt"})
        sort_header(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def sort_header(path: Path) -> None:
    """Puts the metadata of a safetensors file in order, in place.

    Raises:
        CorruptError: the file is not safetensors.
    """
    with path.open("r+b") as stream:
        size = int.from_bytes(stream.read(8), "little")
        try:
            header = json.loads(stream.read(size))
        except ValueError as error:
            raise CorruptError("not a safetensors header", where=str(path)) from error
        header["__metadata__"] = dict(sorted(header.get("__metadata__", {}).items()))
        content = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(content) > size:
            raise CorruptError(f"the header grows from {size} to {len(content)} bytes", where=str(path))
        stream.seek(8)
        stream.write(content.ljust(size))
