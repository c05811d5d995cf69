"""The one signature all stages share: `run(params, inputs, workdir, host_context) -> outputs`.

A stage is a function. It reads its params model, the folders of its upstream stages and nothing else of the store, writes
files below `workdir` (a private folder that the runner publishes by rename), and returns what it wrote. Keys, receipts,
digests, environments and retries are the runner's business (`dflash/runner.py`), so that no stage can get them wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash.base.errors import PermanentError
from dflash.base.progress import Progress
from dflash.base.records import Counts, ParamsFile, Receipt


@dataclass(frozen=True)
class Upstream:
    """One input: the folder of an upstream result, its params, and its receipt (None for `train`, whose steps have their own)."""

    directory: Path
    params: ParamsFile
    receipt: Receipt | None


@dataclass(frozen=True)
class Inputs:
    """What a stage may read.

    upstream: by input name: `dataset`, `completions/arithmetic`, `references/torch`.
    files: external files by sha256 (prompt files), as paths on this host.
    target_path: the target's directory on this host, or None when the target is drawn from a seed.
    step: the checkpoint to work on, for stages that run once a checkpoint.
    """

    upstream: Mapping[str, Upstream]
    files: Mapping[str, Path] = field(default_factory=dict)
    target_path: Path | None = None
    step: int | None = None

    def one(self, name: str) -> Upstream:
        """The upstream called `name`.

        Raises:
            PermanentError: there is none; the plan and the stage disagree.
        """
        try:
            return self.upstream[name]
        except KeyError:
            raise PermanentError(f"no upstream called {name!r} among {sorted(self.upstream)}") from None

    def all(self, stage: str) -> dict[str, Upstream]:
        """Upstreams of a stage that a run may have several of, by their own name: `completions/b` under `b`, sorted."""
        prefix = f"{stage}/"
        return {
            name.removeprefix(prefix): self.upstream[name] for name in sorted(self.upstream) if name.startswith(prefix)
        }


@dataclass(frozen=True)
class HostContext:
    """Where and how the stage runs; nothing in here may change a result.

    placement: values that enter no key (batch sizes of generation, chunk sizes, topology, ...).
    """

    host: str = "local"
    device: str = "cpu"
    threads: int = 1
    attempt: int = 1
    placement: Mapping[str, Any] = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)


@dataclass(frozen=True)
class Outputs:
    """What a stage wrote.

    files: paths relative to `workdir`, in the order the receipt lists them.
    results: small JSON values for the receipt. kernels: what was bound, when a model ran.
    """

    files: list[str]
    counts: Counts = field(default_factory=Counts)
    results: dict[str, Any] = field(default_factory=dict)
    kernels: dict[str, Any] = field(default_factory=dict)
