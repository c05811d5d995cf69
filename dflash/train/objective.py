"""What the drafter is taught: cross entropy on the tokens that the target wrote, weighted by slot.

Slot k of a block at anchor a is labelled with token a + k: no shift. Slot 0 is the anchor itself and has no weight; nor
has a slot beyond the sequence, in another document or outside the loss mask. Slot k weighs exp(-(k - 1) / gamma), or 1.

The loss of a step is sum(weighted cross entropy) / sum(weights) over *all* its ranks and micro-batches. So the two sums
are returned apart and divided once, after they have been added up; the weights in the denominator are the decayed ones.

Cost: logits exist for `logit_chunk` slots at a time (1024 * 248320 * 4 bytes = 1.0 GB, and their logarithms, which become
    their gradient in place). The gradient with respect to the hidden states is taken chunk by chunk during the forward
    pass, since the head is frozen, so nothing is computed twice and nothing of size V is kept.

Source of the rule: SpecForge 0.2.0, `dflash` loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash.base.errors import ConfigError

HiddenToLogits = Callable[[Tensor], Tensor]


def labels_and_weights(
    input_ids: Tensor,
    loss_mask: Tensor,
    anchors: Tensor,
    block_size: int,
    *,
    gamma: float | None = None,
    anchor_valid: Tensor | None = None,
    document_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What each slot must predict and how much that counts: (labels int64 [b, n, B], weights [b, n, B]).

    Args:
        input_ids: [b, S].
        loss_mask: [b, S], nonzero where the target wrote the token.
        anchors: [b, n] indices in 0..S-1.
        block_size: B.
        gamma: decay of the weights by slot, in slots; None for equal weights.
        anchor_valid: [b, n]; blocks that are not valid weigh nothing.
        document_ids: [b, S] for packed sequences; a label in another document weighs nothing.

    Returns:
        Weights are float64 if `loss_mask` is, else float32. Labels without weight are some token of the row.

    Raises:
        ConfigError: gamma is not positive.
    """
    length = input_ids.shape[1]
    slots = torch.arange(block_size, device=input_ids.device)
    index = anchors[..., None] + slots
    inside = index.clamp(max=length - 1).flatten(1)
    labels = input_ids.gather(1, inside).view(index.shape)
    counts = (index < length) & (slots > 0) & (loss_mask.gather(1, inside).view(index.shape) > 0)
    if anchor_valid is not None:
        counts &= anchor_valid.bool()[..., None]
    if document_ids is not None:
        home = document_ids.gather(1, anchors)[..., None]
        counts &= document_ids.gather(1, inside).view(index.shape) == home
    kind = torch.float64 if loss_mask.dtype == torch.float64 else torch.float32
    return labels, counts.to(kind) * slot_decay(block_size, gamma, kind, input_ids.device)


def slot_decay(block_size: int, gamma: float | None, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """exp(-(k - 1) / gamma) for slots k = 0..B-1, [B]; ones when gamma is None. Slot 0 is 1 and never counts."""
    if gamma is None:
        return torch.ones(block_size, dtype=dtype, device=device)
    if gamma <= 0:
        raise ConfigError(f"gamma = {gamma} must be positive", remedy="Leave it out for equal weights.")
    slots = torch.arange(block_size, dtype=dtype, device=device)
    return torch.exp(-(slots - 1).clamp(min=0) / gamma)


@dataclass(frozen=True)
class ObjectiveSums:
    """Sums that add up over micro-batches and ranks.

    Attributes:
        loss_sum: weighted cross entropy, scalar, differentiable with respect to the hidden states.
        weight_sum: sum of the weights, scalar.
        correct: int64 [B], slots whose most likely token is the label.
        counts: int64 [B], slots that count.
    """

    loss_sum: Tensor
    weight_sum: Tensor
    correct: Tensor
    counts: Tensor


def objective(
    hidden: Tensor,
    labels: Tensor,
    weights: Tensor,
    lm_head: HiddenToLogits,
    *,
    logit_chunk: int = 1024,
    counted: Tensor | None = None,
    entropy: Any = None,
) -> ObjectiveSums:
    """Weighted cross entropy and accuracy of drafted blocks, as sums.

    Args:
        hidden: [b, n, B, H] from the drafter.
        labels, weights: [b, n, B] from `labels_and_weights`.
        lm_head: the target's head, frozen: its weights get no gradient.
        logit_chunk: slots whose logits exist at once.
        counted: int64 [m], the flat indices of slots with a weight, where they are known already; looking for them here
            waits for the device.
        entropy: `chunk_entropy`, or the same compiled.

    Cross entropy is computed in float32, or in float64 if the logits are. A batch in which nothing counts gives zero
    sums that can still be differentiated, so that no rank has to skip its backward pass.
    """
    if counted is None:
        counted = weights.flatten().nonzero().flatten()
    loss_sum, hits = _ChunkedCrossEntropy.apply(
        hidden, labels, weights, lm_head, logit_chunk, counted, entropy or chunk_entropy
    )
    heavy = weights > 0
    return ObjectiveSums(
        loss_sum=loss_sum,
        weight_sum=weights.sum(),
        correct=(hits & heavy).flatten(0, 1).sum(dim=0),
        counts=heavy.flatten(0, 1).sum(dim=0),
    )


@torch.no_grad()
def chunk_entropy(logits: Tensor, labels: Tensor, weights: Tensor, slope: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Weighted cross entropy of a chunk of logits [m, V]: (sum, whether the most likely token is the label [m], its gradient [m, V]
    in the type of the logits, or None when no `slope` is wanted).

    Held at once: the logits and their logarithms in float32 (or float64), which become the gradient in place; compiled, one
    reading of the logits and one writing of the gradient.
    """
    logs = torch.log_softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    loss = -(logs.gather(1, labels[:, None])[:, 0] * weights).sum()
    right = logits.argmax(dim=-1) == labels
    if not slope:
        return loss, right, None
    scale = weights.to(logs.dtype)[:, None]
    gradient = logs.exp_().mul_(scale).scatter_add_(1, labels[:, None], -scale)
    return loss, right, gradient.to(logits.dtype)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The weighted sum, whose gradient is taken while the logits of a chunk exist and kept as [b, n, B, H]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        labels: Tensor,
        weights: Tensor,
        lm_head: HiddenToLogits,
        chunk: int,
        counted: Tensor,
        entropy: Any,
    ) -> tuple[Tensor, Tensor]:
        rows, flat_labels, flat_weights = hidden.flatten(0, 2), labels.flatten(), weights.flatten()
        total = torch.zeros((), dtype=weights.dtype, device=hidden.device)
        hits = torch.zeros_like(flat_labels, dtype=torch.bool)
        gradient = torch.zeros_like(rows) if ctx.needs_input_grad[0] else None
        for part in counted.split(chunk):
            with torch.set_grad_enabled(gradient is not None):
                piece = rows[part].detach().requires_grad_(gradient is not None)
                logits = lm_head(piece)
            loss, right, slope = entropy(logits.detach(), flat_labels[part], flat_weights[part], gradient is not None)
            if gradient is not None:
                gradient[part] = torch.autograd.grad(logits, piece, slope)[0]
            total += loss
            hits[part] = right
        if gradient is not None:
            ctx.save_for_backward(gradient.view_as(hidden))
        hits = hits.view_as(labels)
        ctx.mark_non_differentiable(hits)
        return total, hits

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient * outputs[0].to(gradient.dtype), None, None, None, None, None, None
