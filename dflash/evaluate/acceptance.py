"""How many tokens each verification commits, worked out offline against the target's own greedy continuation.

Under exact greedy verification the committed text is always a prefix of the continuation y that the target would have
written alone. So one walk along y gives what a real decode would: draft from the anchor y[i] and the features strictly
before it, count the drafted tokens that equal y[i+1], y[i+2], ..., commit those and the bonus token, move on. No target
forward is needed when the features of y are at hand.

Counts follow z-lab's client (dflash 0.1.0): the first token comes from the prefill and is not counted; a verification near
the length limit drafts only as many tokens as still fit, in a smaller block; the last verification commits up to and
including the end token, or up to the limit. Those are the *clipped* counts. The *unclipped* ones leave out every
verification whose whole block does not fit before the end, right or wrong, since the end may have cut it: a drafter that
is always right then has tau = block size at any length.

Cost: all anchors of a continuation are drafted in a few forwards of `chunk` anchors, each holding chunk * (B-1) * V logits
twice in float32 (256 x 15 x 248,320: 7.6 GB; 256 x 7 x 260: 4 MB); kept are B-1 tokens and `top` log-probabilities an anchor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from dflash.base.errors import PermanentError
from dflash.evaluate.tree import Prefix, build_tree_from_top, longest_accepted
from dflash.model.drafter import Drafter, HiddenToLogits, TokensToHidden, draft_chunks

Matched = Callable[[int, int], int]
"""`matched(index, slots)`: of `slots` tokens drafted after output token `index`, how many the target accepts."""


@dataclass(frozen=True)
class Continuation:
    """A prompt and the target's greedy continuation of it.

    prompt, output: token ids, the end token included. limit: most output tokens this request could have had.
    """

    prompt: list[int]
    output: list[int]
    limit: int

    def following(self, index: int) -> list[int]:
        """The output after token `index`."""
        return self.output[index + 1 :]


@dataclass(frozen=True)
class Walk:
    """The verifications of one continuation.

    anchors: index in the output of each verification's anchor. lengths: tokens each committed, bonus included, clipped at
    the end. unclipped: the same for the verifications whose whole block fits before the end, and for no others.
    """

    anchors: list[int]
    lengths: list[int]
    unclipped: list[int]


def walk(continuation: Continuation, block_size: int, matched: Matched) -> Walk:
    """Follows a drafter along a continuation.

    Args:
        block_size: B, the anchor included: at most B tokens are committed at a time.
        matched: the drafter, as what it gets accepted.
    """
    end = len(continuation.output) - 1
    result = Walk([], [], [])
    index = 0
    while index < end:
        slots = min(block_size, continuation.limit - index) - 1
        committed = min(matched(index, slots) + 1, end - index)
        result.anchors.append(index)
        result.lengths.append(committed)
        if index + block_size <= end:
            result.unclipped.append(committed)
        index += committed
    return result


def matched_prefix(drafted: Sequence[int], following: Sequence[int]) -> int:
    """How many tokens of `drafted` equal those of `following` before the first that differs."""
    count = 0
    for one, other in zip(drafted, following, strict=False):
        if one != other:
            break
        count += 1
    return count


@dataclass
class Drafts:
    """What a drafter proposes after each output token of a continuation but the last.

    tokens: [n-1, B-1] its first choice in each slot. ids, log_probs: [n-1, B-1, k] its best tokens, best first.
    `shorter(index, slots)` drafts a block of fewer slots; the choices of a smaller block are others than the first of a
    whole one, since a block sees all of itself.
    """

    continuation: Continuation
    tokens: NDArray[np.int64]
    ids: NDArray[np.int64]
    log_probs: NDArray[np.float64]
    shorter: Callable[[int, int], Drafts]
    _short: dict[tuple[int, int], Drafts] = field(default_factory=dict)

    def _row(self, index: int, slots: int) -> tuple[Drafts, int]:
        if slots == self.tokens.shape[1]:
            return self, index
        if (index, slots) not in self._short:
            self._short[index, slots] = self.shorter(index, slots)
        return self._short[index, slots], 0

    def chain(self, index: int, slots: int) -> list[int]:
        """The drafted chain of `slots` tokens after output token `index`."""
        drafts, row = self._row(index, slots)
        drafted: list[int] = drafts.tokens[row].tolist()
        return drafted

    def tree(self, index: int, slots: int, budget: int) -> list[Prefix]:
        """The drafted tree of `budget` nodes and depth `slots` after output token `index`."""
        drafts, row = self._row(index, slots)
        return build_tree_from_top(drafts.ids[row], drafts.log_probs[row], budget)

    def walk_chain(self) -> Walk:
        """The walk that verifies chains."""
        return self._walk(self.matched_chain)

    def walk_tree(self, budget: int) -> Walk:
        """The walk that verifies trees of `budget` nodes."""
        following = self.continuation.following
        return self._walk(lambda index, slots: longest_accepted(self.tree(index, slots, budget), following(index)))

    def matched_chain(self, index: int, slots: int) -> int:
        """How many tokens of the chain the target accepts."""
        return matched_prefix(self.chain(index, slots), self.continuation.following(index))

    def _walk(self, matched: Matched) -> Walk:
        return walk(self.continuation, self.tokens.shape[1] + 1, matched)

    def hits(self) -> NDArray[np.bool_]:
        """[n-1, B-1] whether slot k's first choice is the token k after the anchor; False beyond the end."""
        following = _following(self.continuation.output, self.tokens.shape[1])
        return (self.tokens == following) & (following >= 0)

    def in_bounds(self) -> NDArray[np.bool_]:
        """[n-1, B-1] whether there is a token k after the anchor."""
        return _following(self.continuation.output, self.tokens.shape[1]) >= 0


def _following(output: Sequence[int], slots: int) -> NDArray[np.int64]:
    """[n-1, slots] the tokens after each output token but the last; -1 beyond the end."""
    padded = np.concatenate([np.asarray(output, dtype=np.int64), np.full(slots, -1, dtype=np.int64)])
    return np.lib.stride_tricks.sliding_window_view(padded, slots)[1 : len(output)]


def draft_continuation(
    drafter: Drafter,
    continuation: Continuation,
    features: torch.Tensor,
    embed: TokensToHidden,
    head: HiddenToLogits,
    *,
    top: int,
    chunk: int = 64,
) -> Drafts:
    """Drafts after every output token of a continuation but the last.

    Args:
        features: [F, K*H] the taps of prompt and output, on the drafter's device; F reaches the last but one token.
        embed, head: the target's.
        top: tokens kept a slot; the largest tree budget that will be asked for.
        chunk: anchors a forward.

    Raises:
        PermanentError: the drafter gives NaN or infinite logits, or the features do not fit.
    """

    def draft(indices: Sequence[int], slots: int) -> Drafts:
        first = len(continuation.prompt)
        parts = [
            choices(logits, top)
            for _, logits in draft_chunks(
                drafter,
                features,
                continuation.prompt + continuation.output,
                [first + index for index in indices],
                embed,
                head,
                anchor_chunk=chunk,
                block_size=slots + 1,
            )
        ]
        tokens = np.concatenate([np.empty((0, slots), dtype=np.int64), *(part[0] for part in parts)])
        ids = np.concatenate([part[1] for part in parts] or [np.empty((0, slots, 1), dtype=np.int64)])
        log_probs = np.concatenate([part[2] for part in parts] or [np.empty((0, slots, 1))])
        return Drafts(continuation, tokens, ids, log_probs, lambda index, slots: draft([index], slots))

    return draft(range(len(continuation.output) - 1), drafter.config.block_size - 1)


def choices(logits: torch.Tensor, top: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """First choices, and the `top` best tokens with their log-probabilities, of logits [c, slots, V]."""
    if not bool(torch.isfinite(logits).all()):
        raise PermanentError(
            "the drafter gave logits that are not finite", remedy="Look at the checkpoint's weights and the features."
        )
    ids = logits.topk(min(top, logits.shape[-1]), dim=-1).indices.sort(dim=-1).values
    chosen = logits.log_softmax(-1).gather(-1, ids)
    # A stable sort of ascending ids puts equal tokens in the order of their ids.
    order = chosen.sort(dim=-1, descending=True, stable=True)
    return (
        logits.argmax(-1).cpu().numpy(),
        ids.gather(-1, order.indices).cpu().numpy(),
        order.values.double().cpu().numpy(),
    )
