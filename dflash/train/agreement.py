"""What the ranks of a training compare before they begin and whenever they save: a difference ends the job with both named.

Costs a round of JSON (0.3 ms), and at a checkpoint one pass over the weights of each drafter, where they are, with 600 MB beside.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash.base.canonical import short_digest
from dflash.base.errors import PermanentError
from dflash.data.batches import Batch
from dflash.train.peers import PIECE, Peers
from dflash.train.prepare import drafter_config
from dflash.train.roles import Roles
from dflash.train.train_params import TrainParams

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
MIXING = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))
"""Constants of SplitMix64, as signed numbers."""


def kernel_tag(kernels: Mapping[str, Any], dtype: str) -> str:
    """What a target computes with, in a word that people can read and two processes can compare."""
    return f"{kernels['linear']}, {kernels['attention']}, {dtype}, {short_digest(dict(kernels))}"


def agree(
    peers: Peers, common: dict[str, Any], kernels: dict[str, Any] | None, dtype: str
) -> tuple[str, dict[str, Any]]:
    """Compares what every rank has loaded; returns the kernel tag of the targets and their kernels.

    Args:
        common: what must be equal everywhere. kernels: of a target's rank; None from a drafter.

    Raises:
        PermanentError: two ranks differ; names them, the field and both values.
    """
    tag = None if kernels is None else kernel_tag(kernels, dtype)
    found = peers.gather({"common": common, "tag": tag, "kernels": kernels})
    lead = found[peers.roles.lead]["common"]
    for rank, facts in enumerate(found):
        odd = [name for name, value in facts["common"].items() if value != lead[name]]
        if odd:
            refuse_other(peers.roles, rank, peers.roles.lead, odd[0], facts["common"][odd[0]], lead[odd[0]])
        if rank < peers.roles.targets and facts["tag"] != found[0]["tag"]:
            refuse_other(peers.roles, rank, 0, "kernels", facts["tag"], found[0]["tag"])
    return found[0]["tag"], found[0]["kernels"]


def refuse_other(roles: Roles, rank: int, other: int, name: str, theirs: Any, ours: Any) -> None:
    """Raises PermanentError: two ranks differ in `name`; names both and both values."""
    raise PermanentError(
        f"{roles.name(rank)} has {name} {theirs!r}, {roles.name(other)} has {ours!r}",
        where="train.topology",
        remedy="Every rank must run this checkout, on this dataset, target and kernels.",
    )


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """16 hex digits that stand for names and bits of weights. Computed where they are, since training waits for it: a GPU reads
    1.73 B float32 weights in 0.1 s, a copy to the host alone would take longer; sha256 of a CPU does 1.5 GB/s."""
    found = hashlib.sha256()
    for name in sorted(weights):
        flat = weights[name].detach().contiguous().view(-1)
        found.update(name.encode())
        if flat.is_cuda:
            found.update(repr(int(_sum_of_bits(flat))).encode())
        else:
            found.update(flat.view(torch.uint8).numpy().data)
    return found.hexdigest()[:16]


def _sum_of_bits(flat: Tensor) -> Tensor:
    """The bits of every number mixed with its place (the finaliser of SplitMix64) and added up modulo 2^64: one number that
    differs always changes the sum, more of them all but 1 time in 2^64, and no order of adding does."""
    bits = flat.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), PIECE):
        piece = bits[start : start + PIECE].to(torch.int64)
        place = torch.arange(start + 1, start + 1 + len(piece), device=bits.device)
        mixed = piece + place * GOLDEN
        for shift, factor in MIXING:
            mixed = (mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))) * factor
        total += (mixed ^ ((mixed >> 31) & ((1 << 33) - 1))).sum()
    return total


def pack_tensors(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Small uint8 tensors as text (states of generators: 5 kB each)."""
    return {name: base64.b64encode(value.cpu().numpy().tobytes()).decode() for name, value in tensors.items()}


def unpack_tensors(texts: Mapping[str, str]) -> dict[str, Tensor]:
    """What `pack_tensors` packed."""
    return {
        name: torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8) for name, text in texts.items()
    }


def own_generators(states: Mapping[str, str], rank: int) -> dict[str, Tensor]:
    """The generator states that a checkpoint holds of a rank."""
    prefix = f"rank{rank}."
    return unpack_tensors({name.removeprefix(prefix): text for name, text in states.items() if name.startswith(prefix)})


def common_facts(params: TrainParams, directory: Path, first: Batch) -> dict[str, Any]:
    """What no two ranks may have otherwise. The id of the first batch stands for dataset and batching."""
    taps = list(drafter_config(params).target_layer_ids)
    return {"training": directory.name, "first batch": first.batch_id, "taps": taps, "dtype": params.dtype}
