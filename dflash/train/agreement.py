"""What the ranks of a training compare before they begin and whenever they save: a difference ends the job with both named.

Costs a round of JSON (0.3 ms), and at a checkpoint one pass over the weights of each drafter (1.5 GB/s).
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
from dflash.train.peers import Peers
from dflash.train.prepare import drafter_config
from dflash.train.roles import Roles
from dflash.train.train_params import TrainParams


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
    """sha256 (16 hex digits) of weights by name; 1.5 GB/s."""
    found = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        found.update(name.encode())
        found.update(weight.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()[:16]


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
