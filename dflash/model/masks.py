"""Who sees whom: the boolean masks of block drafting.

A block is `block_size` query slots that stand at positions anchor, anchor + 1, and so on. Every slot sees the context
of its own document *strictly before* the anchor, and the slots of its own block; never another block, never another
document. A context that held the anchor itself would show the drafter the target's hidden state of a token it must
still wait for when serving.

Full layers see the whole block. Sliding layers are causal inside the block and see no key further back than `window -
1` positions, counted from the query slot, not from the anchor (z-lab dflash 0.1.0, `model.py`).

Cost: a mask of n blocks of B slots over S context tokens takes n*B*(S + n*B) bytes, so 512 anchors of 16 over 8192
    tokens are 134 MB a sequence; `Drafter` builds them for `anchor_chunk` anchors at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask


def context_mask(
    anchors: Tensor,
    positions: Tensor,
    block_size: int,
    *,
    window: int | None = None,
    attention_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    anchor_valid: Tensor | None = None,
) -> Tensor:
    """Which context tokens each slot sees: bool [b, n, block_size, S].

    Args:
        anchors: [b, n] indices into the sequence, in 0..S-1.
        positions: [b, S] rotary positions; the window is counted in them.
        window: sliding window in tokens, the query included; None for a full layer.
        attention_mask: [b, S], nonzero where there is a token and not padding.
        document_ids: [b, S], equal inside a document; None when the sequence is one document.
        anchor_valid: [b, n]; a block whose anchor is not valid sees no context.
    """
    index = torch.arange(positions.shape[1], device=positions.device)
    seen = index < anchors[..., None]
    if document_ids is not None:
        seen &= document_ids[:, None, :] == document_ids.gather(1, anchors)[..., None]
    if attention_mask is not None:
        seen &= attention_mask.bool()[:, None, :]
    if anchor_valid is not None:
        seen &= anchor_valid.bool()[..., None]
    seen = seen[:, :, None, :]
    if window is None:
        return seen.expand(-1, -1, block_size, -1)
    slots = torch.arange(block_size, device=positions.device)
    query = positions.gather(1, anchors)[..., None] + slots
    return seen & (positions[:, None, None, :] >= query[..., None] - (window - 1))


def own_block_mask(block_size: int, *, window: int | None = None, device: torch.device | None = None) -> Tensor:
    """Which slots of its own block each slot sees: bool [block_size, block_size]; causal and windowed when `window` is
    set."""
    slots = torch.arange(block_size, device=device)
    if window is None:
        return torch.ones(block_size, block_size, dtype=torch.bool, device=device)
    back = slots[:, None] - slots[None, :]
    return (back >= 0) & (back <= window - 1)


def block_mask(
    anchors: Tensor,
    positions: Tensor,
    block_size: int,
    *,
    window: int | None = None,
    attention_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    anchor_valid: Tensor | None = None,
) -> Tensor:
    """The whole mask over keys [context ; all blocks]: bool [b, n*block_size, S + n*block_size]. Arguments as
    `context_mask`.

    No row is empty, even for an anchor at position 0 or one that is not valid: a slot always sees itself.
    """
    batch, count = anchors.shape
    context = context_mask(
        anchors,
        positions,
        block_size,
        window=window,
        attention_mask=attention_mask,
        document_ids=document_ids,
        anchor_valid=anchor_valid,
    ).reshape(batch, count * block_size, -1)
    same_block = torch.eye(count, dtype=torch.bool, device=anchors.device)
    own = own_block_mask(block_size, window=window, device=anchors.device)
    blocks = (same_block[:, None, :, None] & own[None, :, None, :]).reshape(count * block_size, count * block_size)
    return torch.cat([context, blocks.expand(batch, -1, -1)], dim=-1)


def document_positions(document_ids: Tensor) -> Tensor:
    """Positions that restart at 0 with every document: int64 [b, S] from `document_ids` [b, S]."""
    index = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(document_ids)
    starts = torch.zeros_like(index)
    starts[:, 1:] = torch.where(document_ids[:, 1:] != document_ids[:, :-1], index[:, 1:], 0)
    return index - starts.cummax(dim=1).values


def sparse_block_mask(
    anchors: Tensor,
    positions: Tensor,
    block_size: int,
    *,
    window: int | None = None,
    attention_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    anchor_valid: Tensor | None = None,
) -> BlockMask:
    """`block_mask` as flex attention takes it, which skips tiles of 128 x 128 in which nobody sees anybody: other blocks, what
    lies behind the anchor, and what is beyond the window. Arguments as `context_mask`.

    Costs a bool a pair of query and key while it is made, once a batch and kind of layer.
    """
    count, length = anchors.shape[1], positions.shape[1]
    seen = attention_mask.bool() if attention_mask is not None else torch.ones_like(positions, dtype=torch.bool)
    valid = anchor_valid.bool() if anchor_valid is not None else torch.ones_like(anchors, dtype=torch.bool)
    home = document_ids if document_ids is not None else torch.zeros_like(positions)
    starts, homes = positions.gather(1, anchors), home.gather(1, anchors)

    def sees(batch: Any, _head: Any, query: Any, key: Any) -> Any:
        block, slot = query // block_size, query % block_size
        place = key.clamp(max=length - 1)
        context = (key < length) & (place < anchors[batch, block]) & seen[batch, place] & valid[batch, block]
        context = context & (home[batch, place] == homes[batch, block])
        other = key - length
        own = (other >= 0) & (other // block_size == block)
        if window is not None:
            context = context & (positions[batch, place] >= starts[batch, block] + slot - (window - 1))
            back = slot - other % block_size
            own = own & (back >= 0) & (back <= window - 1)
        return context | own

    queries = count * block_size
    return create_block_mask(sees, anchors.shape[0], None, queries, length + queries, device=str(anchors.device))
