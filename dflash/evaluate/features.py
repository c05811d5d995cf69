"""Features of the references, kept on disk within a cap and computed again beyond it.

A request's features are always computed alone, one forward of the target without padding, so that those from disk and those
computed again are the same numbers. They are kept in the type the target computed them in: 51 kB a token at 5 taps of 5120 in
bfloat16, so 10,000 prompts of 500 tokens are 260 GB. The index names taps, kernels, type, and the digest of each request's
tokens; a mismatch is refused, since features of other tokens or other layers give plausible numbers that mean nothing.

Memory: the features of a shard while writing (`SHARD_BYTES` and one request more), of one request while reading.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from dflash.base.canonical import digest
from dflash.base.errors import CorruptError, PermanentError
from dflash.base.files import read_json, write_json
from dflash.model.target import Target, check_features
from dflash.model.tensor_files import save_tensors

INDEX = "features.json"
SHARD_BYTES = 64 << 20
"""Features that wait in memory for their shard to be whole; a request of 27B is 25 MB at 500 tokens."""
SHARD_ROWS = 256
"""Most requests of a shard: reading one request reads the names of all that its shard holds."""


def compute_features(target: Target, tokens: Sequence[int], taps: Sequence[int], name: str) -> torch.Tensor:
    """The taps [S, K*H] of one request, checked; one forward of the target.

    Raises:
        PermanentError: the target gives features that no healthy target gives; names the request.
    """
    ids = torch.tensor([list(tokens)], device=target.device)
    features = target.features(ids, None, taps)[0]
    check_features(features, len(tokens), name, taps=len(taps), width=len(taps) * target.facts.hidden_size)
    return features


class FeatureWriter:
    """Writes features in the order of the requests until `cap` bytes are reached; the later requests are left out."""

    def __init__(self, directory: Path, taps: Sequence[int], kernels: str, dtype: str, cap: float) -> None:
        self._directory = directory
        self._kernels = kernels
        self._head = {"taps": list(taps), "kernels": kernels, "dtype": dtype}
        self._cap = cap
        self._rows: list[dict[str, str]] = []
        self._shard: dict[str, torch.Tensor] = {}
        self._shard_bytes = 0
        self.bytes = 0
        self.files: list[str] = []

    @property
    def count(self) -> int:
        """Requests whose features are kept."""
        return len(self._rows)

    def fits(self, tokens: int, width: int, itemsize: int) -> bool:
        """Whether the features of one more request of so many tokens stay within the cap."""
        return self.bytes + tokens * width * itemsize <= self._cap

    def add(self, tokens: Sequence[int], features: torch.Tensor) -> None:
        """Keeps the features [S, K*H] of the next request."""
        size = features.numel() * features.element_size()
        self._shard[str(len(self._rows))] = features.cpu().contiguous()
        self._rows.append({"shard": self._shard_name(), "tokens": digest(list(tokens))})
        self.bytes += size
        self._shard_bytes += size
        if self._shard_bytes >= SHARD_BYTES or len(self._shard) == SHARD_ROWS:
            self._flush()

    def close(self) -> list[str]:
        """Writes what is left and the index; returns the names of all files, the index last."""
        self._flush()
        write_json(self._directory / INDEX, {**self._head, "rows": self._rows})
        return [*self.files, INDEX]

    def _shard_name(self) -> str:
        return f"features-{len(self.files)}.safetensors"

    def _flush(self) -> None:
        if not self._shard:
            return
        name = self._shard_name()
        path = self._directory / name
        try:
            save_tensors(self._shard, path, {"kernels": self._kernels})
        except (OSError, SafetensorError) as error:
            raise PermanentError(
                f"cannot write features: {error}",
                where=str(path),
                remedy="Free some space, or lower references.features_cache_gb.",
            ) from error
        self.files.append(name)
        self._shard, self._shard_bytes = {}, 0


class FeatureReader:
    """Features of a references folder by row; rows beyond the cache are computed by `target()`, loaded on first use."""

    def __init__(self, directory: Path, taps: Sequence[int], kernels: str, target: Callable[[], Target]) -> None:
        self._directory = directory
        self._taps = list(taps)
        self._load = target
        self._target: Target | None = None
        index: dict[str, Any] = read_json(directory / INDEX)
        for name, wanted in (("taps", self._taps), ("kernels", kernels)):
            if index.get(name) != wanted:
                raise PermanentError(
                    f"the features have {name} {index.get(name)}, the evaluation asks for {wanted}",
                    where=str(directory / INDEX),
                    remedy="Run `dflash run`, which makes the references that this evaluation needs.",
                )
        self._rows: list[dict[str, str]] = index["rows"]

    def read(self, row: int, tokens: Sequence[int], name: str) -> torch.Tensor:
        """The taps [S, K*H] of a request's tokens.

        Raises:
            CorruptError: the stored features are of other tokens, or cannot be read.
        """
        if row >= len(self._rows):
            if self._target is None:
                self._target = self._load()
            return compute_features(self._target, tokens, self._taps, name)
        entry = self._rows[row]
        path = self._directory / entry["shard"]
        if entry["tokens"] != digest(list(tokens)):
            raise CorruptError(
                f"the features of row {row} ({name}) are of other tokens than the references",
                where=str(path),
                remedy="Delete the folder and run `dflash run` to rebuild it.",
            )
        try:
            with safe_open(path, framework="pt") as stream:
                features: torch.Tensor = stream.get_tensor(str(row))
        except (OSError, SafetensorError) as error:
            raise CorruptError(
                f"unreadable: {error}", where=str(path), remedy="Delete the folder and run `dflash run` to rebuild it."
            ) from error
        if features.shape[0] != len(tokens):
            raise CorruptError(f"{features.shape[0]} features for {len(tokens)} tokens of row {row}", where=str(path))
        return features
