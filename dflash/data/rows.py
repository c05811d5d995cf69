"""Rows of a source, one at a time, whatever holds them: a JSONL file, a Parquet file, a dataset of the Hugging Face hub.

Reading is lazy and memory is one row (JSONL), 256 rows (Parquet) or what the hub's library streams. pyarrow and `datasets`
are imported only for sources that need them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dflash.base.errors import ConfigError, PermanentError, TransientError
from dflash.base.files import CHUNK
from dflash.data.prompts_params import PromptsParams

PARQUET_ROWS = 256


class MalformedRow(ConfigError):
    """A row that cannot be taken. `reason`: its kind in one to four words, to be counted."""

    def __init__(self, what: str, *, where: str = "", remedy: str = "", reason: str = "malformed") -> None:
        super().__init__(what, where=where, remedy=remedy)
        self.reason = reason


@dataclass(frozen=True)
class Row:
    """One row. number: its place, from 1. where: `FILE:NUMBER`, for messages.

    `values()` gives its fields.

    Raises (from `values`):
        MalformedRow: it is not UTF-8, not JSON, or not an object.
    """

    number: int
    where: str
    values: Callable[[], dict[str, Any]]


def read_source(path: Path, params: PromptsParams) -> Iterator[Row]:
    """The rows of a source in order; blank lines are passed over.

    Raises:
        ConfigError: the file cannot be read. PermanentError, TransientError: as `hub_rows`.
    """
    if params.huggingface is not None:
        return hub_rows(params)
    return parquet_rows(path, params) if path.suffix == ".parquet" else jsonl_rows(path, params)


def count_rows(path: Path, params: PromptsParams) -> int | None:
    """About how many rows a source has, for progress: line ends or a footer; None for the hub. One read of a JSONL file."""
    if params.huggingface is not None:
        return None
    if path.suffix == ".parquet":
        from dflash.data.tables import rows_of

        return rows_of(path)
    with path.open("rb") as stream:
        return sum(piece.count(b"\n") for piece in iter(partial(stream.read, CHUNK), b""))


def jsonl_rows(path: Path, params: PromptsParams) -> Iterator[Row]:
    """The lines of a JSONL file."""
    try:
        with path.open("rb") as stream:
            for number, raw in enumerate(stream, start=1):
                line = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
                if line.strip():
                    where = f"{path}:{number}"
                    yield Row(number, where, partial(_line, line, where))
    except OSError as error:
        raise ConfigError(
            f"cannot read the prompts of source {params.name!r}: {error.strerror}",
            where=str(path),
            remedy="Give the path of a readable JSONL file.",
        ) from error


def parquet_rows(path: Path, params: PromptsParams) -> Iterator[Row]:
    """The rows of a Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as opened:
            for batch in opened.iter_batches(PARQUET_ROWS):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(number, f"{path}:{number}", partial(dict, values))
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(
            f"cannot read row {number + 1} of source {params.name!r}: {error}",
            where=str(path),
            remedy="Give the path of a readable Parquet file.",
        ) from error


def hub_rows(params: PromptsParams) -> Iterator[Row]:
    """The rows of a dataset on the Hugging Face hub, at the commit that the source names.

    Raises:
        PermanentError: the library is not installed, or the hub has no such dataset. TransientError: it is not reachable.
    """
    where = f"{params.huggingface}@{(params.revision or '')[:12]}"
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise PermanentError(
            f"source {params.name!r} is on the Hugging Face hub, and the package `datasets` is not installed",
            where=where,
            remedy="Install it (`pip install datasets`), or download the rows and give them as `path`.",
        ) from error
    number = 0
    try:
        rows = load_dataset(
            params.huggingface, params.subset, split=params.split, revision=params.revision, streaming=True
        )
        for values in rows:
            number += 1
            yield Row(number, f"{where}:{number}", partial(dict, values))
    except (FileNotFoundError, ValueError) as error:
        raise PermanentError(
            f"the hub has no such dataset, commit, subset or split: {error}",
            where=where,
            remedy="Correct `huggingface`, `revision`, `subset` or `split`.",
        ) from error
    except OSError as error:
        raise TransientError(
            f"the hub is not reachable (row {number + 1}): {error}",
            where=where,
            remedy="Run again with a connection, or download the rows and give them as `path`.",
        ) from error


def _line(raw: bytes, where: str) -> dict[str, Any]:
    return _object(_decoded(raw, where), where)


def _decoded(raw: bytes, where: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        bad = raw[error.start : error.start + 4]
        raise MalformedRow(
            f"the line is not UTF-8: byte {error.start + 1} starts {bad!r}",
            where=where,
            remedy="Save the file as UTF-8.",
            reason="not UTF-8",
        ) from error


def _object(text: str, where: str) -> dict[str, Any]:
    remedy = "Write one JSON object a line."
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise MalformedRow("the line is nested too deeply", where=where, remedy=remedy, reason="not JSON") from error
    except ValueError as error:
        what = f"the line is not JSON ({error}): `{short(text.strip())}`"
        raise MalformedRow(what, where=where, remedy=remedy, reason="not JSON") from error
    if not isinstance(value, dict):
        what = f"the line is {kind_of(value)}, not an object: {shown(value)}"
        raise MalformedRow(what, where=where, remedy=remedy, reason="not an object")
    return value


def kind_of(value: Any) -> str:
    """What a value is, in the words of JSON."""
    if isinstance(value, list) and not value:
        return "an empty list"
    names = {dict: "an object", list: "a list", str: "text", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")


def shown(value: Any) -> str:
    """A value as JSON, shortened, for messages."""
    return short(json.dumps(value, default=str))


def short(text: str, most: int = 60) -> str:
    """Text of at most `most` letters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."
