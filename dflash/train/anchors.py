"""Where blocks begin: anchors drawn by counter, not from a stream.

The anchors of a sample are a function of (seed, sample id, epoch) and its loss mask alone: the same at any topology,
batch split, padding or order of arrival, and after any resume. Source of the sampling rule: SpecForge 0.2.0, uniform
without replacement among positions a with loss_mask[a] and loss_mask[a + 1].

Cost: one 64-bit random number a candidate and one sort; 8192 candidates take under a millisecond.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor


def select_anchors(
    loss_mask: ArrayLike, *, seed: int, sample_id: str, epoch: int, max_anchors: int
) -> NDArray[np.int64]:
    """Sorted anchors of one sample: int64 [n], n <= max_anchors, possibly empty.

    Args:
        loss_mask: [S], nonzero where the target wrote the token.
        seed: of the run.
        sample_id: hex string, unique in the dataset.
        epoch: counted from 0.
        max_anchors: the most to return.
    """
    wanted = np.asarray(loss_mask) > 0
    candidates = np.flatnonzero(wanted[:-1] & wanted[1:]).astype(np.int64)
    if len(candidates) <= max_anchors:
        return candidates
    key = hashlib.sha256(f"anchors:{seed}:{sample_id}:{epoch}".encode()).digest()
    # Philox's raw words are specified; numpy's own `choice` may change between versions.
    order = np.random.Philox(key=int.from_bytes(key[:16], "little")).random_raw(len(candidates))
    chosen = np.argsort(order, kind="stable")[:max_anchors]
    return np.sort(candidates[chosen])


def batch_anchors(
    loss_mask: Tensor, *, seed: int, sample_ids: Sequence[str], epoch: int, max_anchors: int
) -> tuple[Tensor, Tensor]:
    """Anchors of a padded batch, one sample a row: (anchors int64 [b, n], valid bool [b, n]) on the mask's device.

    n is the most that any row has, and at least 1, so that a batch without a single anchor still has a shape that every
    rank can run; its blocks are simply not valid. Invalid anchors are 0.
    """
    masks = loss_mask.detach().cpu().numpy()
    rows = [
        select_anchors(mask, seed=seed, sample_id=sample_id, epoch=epoch, max_anchors=max_anchors)
        for mask, sample_id in zip(masks, sample_ids, strict=True)
    ]
    width = max(1, *(len(row) for row in rows))
    anchors = np.zeros((len(rows), width), dtype=np.int64)
    valid = np.zeros((len(rows), width), dtype=bool)
    for i, row in enumerate(rows):
        anchors[i, : len(row)] = row
        valid[i, : len(row)] = True
    return torch.from_numpy(anchors).to(loss_mask.device), torch.from_numpy(valid).to(loss_mask.device)
