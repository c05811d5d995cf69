"""The probe: what a target gives for a few fixed sequences, kept so that a changed machine is noticed before it spoils work.

A driver is upgraded, a kernel falls back, a weight file is copied with a flipped bit: training goes on and gives plausible
numbers that mean something else. So the first step of a training writes the features of fixed sequences to a file, and whoever
goes on from there, or judges what was trained, computes them again.

The sequences are drawn by counter from the vocabulary, special tokens left out, in lengths on both sides of the 64-token chunks
of linear attention. They are kept in the file, and the recorded ones are computed again, so that a file outlives this
definition. An error is relative: |found - recorded| / |recorded| in the Euclidean norm, for each sequence and tap. Tolerances:

    the same numerics on a CPU       none: every bit
    otherwise                        TOLERANCE by compute type
    between other kernels, or types  ACROSS_KERNELS by the coarser type: bfloat16 hidden states of two right kernels differ by
                                     1% after one layer and 4% after sixteen; a wrong one differs by as much as it says

Costs one forward of 256 tokens (under a second at 27B) and 13 MB at 5 taps of 5120 in bfloat16.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dflash.base.canonical import canonical_json
from dflash.base.environment import NUMERIC_DISTRIBUTIONS, collect
from dflash.base.errors import CorruptError, PermanentError
from dflash.base.records import Environment, Receipt
from dflash.model.target import Target, check_features, select_taps
from dflash.model.target_params import TargetIdentity
from dflash.model.tensor_files import save_tensors

FILE = "probe.safetensors"
LENGTHS = (7, 33, 66, 150)
"""Tokens of the sequences, cut to the target's longest context."""

TOLERANCE = {"float64": 1e-10, "float32": 1e-4, "float16": 5e-3, "bfloat16": 2e-2}
"""Largest relative error by compute type, when the kernels are the same and the machine may be another."""
ACROSS_KERNELS = {"float64": 1e-9, "float32": 1e-3, "float16": 5e-2, "bfloat16": 2e-1}
"""Largest relative error between right kernels that add up in another order."""
_COARSENESS = tuple(TOLERANCE)


def probe_tokens(vocab_size: int, special: Iterable[int], longest: int) -> list[list[int]]:
    """The sequences: a function of the vocabulary alone.

    Args:
        special: tokens that a text never begins with (padding) or that mean something (mask, end).
        longest: the target's longest context, tokens.
    """
    allowed = np.setdiff1d(np.arange(vocab_size), list(special))
    made = []
    for length in sorted({min(length, longest) for length in LENGTHS}):
        key = hashlib.sha256(f"probe:{vocab_size}:{length}".encode()).digest()
        draws = np.random.Philox(key=int.from_bytes(key[:16], "little")).random_raw(length)
        made.append([int(token) for token in allowed[draws % np.uint64(len(allowed))]])
    return made


@torch.no_grad()
def probe_features(target: Target, tokens: Sequence[Sequence[int]], taps: Sequence[int]) -> dict[str, Tensor]:
    """The taps [S, K*H] of each sequence alone, as `features.<i>`, on the CPU.

    Raises:
        PermanentError: features that no healthy target gives.
    """
    found = {}
    for number, sequence in enumerate(tokens):
        features = target.features(torch.tensor([list(sequence)], device=target.device), None, taps)[0]
        check_features(features, len(sequence), f"probe {number}", taps=len(taps))
        found[f"features.{number}"] = features.cpu()
    return found


@dataclass(frozen=True)
class Probe:
    """A probe as it lies on disk.

    tensors: `tokens.<i>` int64 [S]; `features.<i>` [S, K*H]; of a training also `logits.<i>`, `loss`, `gradient_norm`.
    facts: plain JSON values: `taps`, `dtype` (compute type), and of a training `environment` (digest), `numerics`, `kernels`,
    `accepted`.
    """

    tensors: dict[str, Tensor]
    facts: dict[str, Any] = field(default_factory=dict)

    def tokens(self) -> list[list[int]]:
        """The sequences."""
        return [self.tensors[f"tokens.{number}"].tolist() for number in range(self.count())]

    def features(self) -> list[Tensor]:
        """The taps of each sequence."""
        return [self.tensors[f"features.{number}"] for number in range(self.count())]

    def count(self) -> int:
        """How many sequences there are."""
        return sum(name.startswith("tokens.") for name in self.tensors)

    def write(self, path: Path) -> None:
        """Writes the file, whole or not at all.

        Raises:
            PermanentError: the disk refuses.
        """
        try:
            save_tensors(self.tensors, path, {"dflash_probe": canonical_json(self.facts).decode()})
        except (OSError, SafetensorError) as error:
            raise PermanentError(f"cannot write: {error}", where=str(path), remedy="Free some space.") from error

    @classmethod
    def read(cls, path: Path) -> Probe:
        """Reads a probe.

        Raises:
            CorruptError: the file is missing or is no probe.
        """
        try:
            with safe_open(path, framework="pt") as stream:
                facts = json.loads((stream.metadata() or {})["dflash_probe"])
                return cls({name: stream.get_tensor(name) for name in stream.keys()}, facts)  # noqa: SIM118
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise CorruptError(f"not a probe: {error!r}", where=str(path)) from error


def tokens_as_tensors(tokens: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """The sequences as they stand in a probe's file."""
    return {f"tokens.{number}": torch.tensor(list(sequence)) for number, sequence in enumerate(tokens)}


def sequences(target: Target, identity: TargetIdentity) -> list[list[int]]:
    """The sequences for a target: a function of what the plan knows of it."""
    special = {*identity.eos_token_ids, identity.pad_token_id, identity.mask_token_id, target.facts.pad_id}
    known = [token for token in special if token is not None]
    return probe_tokens(identity.vocab_size, known, identity.max_position_embeddings)


def target_probe(target: Target, identity: TargetIdentity, taps: Sequence[int]) -> Probe:
    """The part of a probe that needs the target alone. No environment stands in it: equal results are equal bytes."""
    tokens = sequences(target, identity)
    features = probe_features(target, tokens, taps)
    return Probe({**tokens_as_tensors(tokens), **features}, {"taps": list(taps), "dtype": target.facts.dtype})


# ---------------------------------------------------------------- comparing


@dataclass(frozen=True)
class Drift:
    """The largest difference between two probes. error: relative; infinite where there is no number to compare."""

    what: str
    error: float
    tolerance: float

    @property
    def beyond(self) -> bool:
        """Whether it is more than may be."""
        return not self.error <= self.tolerance

    def sentence(self) -> str:
        """For messages."""
        allowed = f"{self.tolerance:.1e} is allowed" if self.tolerance else "every bit should be the same"
        return f"{self.what} is off by {self.error:.1e} ({allowed})"


def largest_drift(recorded: Probe, found: Mapping[str, Tensor], tolerance: float) -> Drift:
    """The largest difference of `found` from what is recorded, tap by tap.

    Args:
        found: tensors by the names they have in `recorded`; those it does not name are not compared.
        tolerance: largest relative error; 0 asks for every bit.
    """
    drifts = []
    for name, tensor in found.items():
        known = recorded.tensors.get(name)
        if known is None or known.shape != tensor.shape:
            drifts.append(Drift(f"{name} of shape {list(tensor.shape)}", math.inf, tolerance))
        elif name.startswith("features."):
            taps = recorded.facts["taps"]
            pairs = zip(taps, known.chunk(len(taps), dim=-1), tensor.chunk(len(taps), dim=-1), strict=True)
            length = tensor.shape[0]
            drifts += [
                Drift(f"tap {tap} of the sequence of {length} tokens", relative_error(ours, theirs), tolerance)
                for tap, ours, theirs in pairs
            ]
        else:
            drifts.append(Drift(name.replace("_", " "), relative_error(known, tensor), tolerance))
    return max(drifts, key=lambda drift: drift.error)


def relative_error(recorded: Tensor, found: Tensor) -> float:
    """|found - recorded| / |recorded|; 0 only when every bit is the same, infinite for what is not a number."""
    if recorded.dtype == found.dtype and torch.equal(recorded, found):
        return 0.0
    ours, theirs = recorded.double(), found.double()
    size = float(torch.linalg.vector_norm(ours))
    error = float(torch.linalg.vector_norm(theirs - ours)) / max(size, 1e-300)
    return max(error, 1e-300) if math.isfinite(error) else math.inf


def coarser(first: str, second: str) -> str:
    """The type of the two that keeps fewer digits."""
    return max(first, second, key=_COARSENESS.index)


def kernel_gap(trained: Path, judged: Path, kernel: str) -> dict[str, Any] | None:
    """How far the features under which a checkpoint is judged are from those under which it was trained.

    Args:
        trained: the training's folder. judged: the folder of the references. kernel: how they call their kernels.

    Returns:
        `{what, error, tolerance}` of the largest difference; None when either has no probe, or the sequences or taps are others.

    Raises:
        PermanentError: the difference is beyond what right kernels may show.
        CorruptError: a file is damaged.
    """
    if not ((trained / FILE).exists() and (judged / FILE).exists()):
        return None
    ours, theirs = Probe.read(trained / FILE), Probe.read(judged / FILE)
    taps, judged_taps = ours.facts["taps"], theirs.facts["taps"]
    if ours.tokens() != theirs.tokens() or not set(taps) <= set(judged_taps):
        return None
    tolerance = ACROSS_KERNELS[coarser(ours.facts["dtype"], theirs.facts["dtype"])]
    found = {
        name: select_taps(tensor, judged_taps, taps)
        for name, tensor in theirs.tensors.items()
        if name.startswith("features.")
    }
    drift = largest_drift(ours, found, tolerance)
    if drift.beyond:
        bound = ours.facts.get("kernels", {}).get("linear", "unknown")
        raise PermanentError(
            f"the target's features under {kernel} kernels are not those it was trained on (linear attention then: {bound}): "
            f"{drift.sentence()}",
            where=str(judged / FILE),
            remedy="One of the two kernels is wrong, or another target was loaded; compare their environments.",
        )
    return {"what": drift.what, "error": drift.error, "tolerance": drift.tolerance}


def check_target(target: Target, folder: Path) -> None:
    """Stops when a target that was loaded again gives other features than the probe of `folder`, within `TOLERANCE`.

    Raises:
        PermanentError: the features have drifted; names tap, sequence and numbers, and what has changed in the environment.
    """
    if not (folder / FILE).exists():
        return
    recorded = Probe.read(folder / FILE)
    found = probe_features(target, recorded.tokens(), recorded.facts["taps"])
    drift = largest_drift(recorded, found, TOLERANCE[coarser(recorded.facts["dtype"], target.facts.dtype)])
    if drift.beyond:
        raise PermanentError(
            f"the target gives other features than when its references were made: {drift.sentence()}; changed in the "
            f"environment: {_changed_since(folder, target)}",
            where=str(folder / FILE),
            remedy="Restore the environment, or make the references anew.",
        )


def _changed_since(folder: Path, target: Target) -> str:
    """What has changed in the environment since a result of the store was made, in words."""
    try:
        made = Receipt.read(folder / "receipt.json").environment
        before = Environment.read(folder.parents[1] / "environments" / f"{made}.json")
    except CorruptError:
        return "unknown, since its record is missing"
    device = str(target.device)
    now = collect({"target": target.kernels.to_dict()})
    return told_changes(changed_fields(numerics(before, device), numerics(now, device))) or "nothing that is recorded"


# ---------------------------------------------------------------- the environment, as far as numbers depend on it


def numerics(environment: Environment, device: str) -> dict[str, str]:
    """What of an environment may move a number, flat: `torch.version`, `kernels.linear`, `distributions.triton`, ..."""
    found: dict[str, Any] = {"device": device.partition(":")[0], "cpu": environment.cpu}
    found |= {f"torch.{name}": value for name, value in environment.torch.items()}
    for index, gpu in enumerate(environment.gpus):
        found |= {f"gpus.{index}.{name}": gpu.get(name) for name in ("name", "capability")}
    for name, version in environment.distributions.items():
        if name in NUMERIC_DISTRIBUTIONS or name.startswith("nvidia-"):
            found[f"distributions.{name}"] = version
    for name, value in environment.kernels.items():
        inner = value.items() if isinstance(value, dict) else [("", value)]
        found |= {f"kernels.{name}.{part}".rstrip("."): item for part, item in inner}
    return {name: str(value) for name, value in sorted(found.items())}


def changed_fields(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, list[str | None]]:
    """The fields that differ, with both values."""
    names = sorted(before.keys() | after.keys())
    return {name: [before.get(name), after.get(name)] for name in names if before.get(name) != after.get(name)}


def told_changes(changed: Mapping[str, Sequence[str | None]]) -> str:
    """`torch.version 2.12.0 -> 2.13.0, kernels.linear fla -> torch`."""
    return ", ".join(f"{name} {old or 'absent'} -> {new or 'absent'}" for name, (old, new) in changed.items())
