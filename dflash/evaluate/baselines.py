"""Drafters that need no training, which a trained one must beat: prompt lookup, and a count n-gram with back-off.

Both propose a chain of tokens that is verified by the same rule as the drafter's, so the numbers compare.

*Prompt lookup* finds the longest suffix of the text so far (prompt and committed output), of at most `ngram` tokens, that
occurred before, and proposes what followed its newest earlier occurrence: recent text is the likelier to be repeated again.
It proposes fewer tokens when that occurrence lies near the end, and none when not even the last token occurred before.

*The n-gram* counts, over the training completions, which token followed each context of up to `ngram - 1` tokens, and
proposes the most frequent follower of the longest context it knows, token after token (equal counts: the smaller id).
Contexts reach back into the prompt; only completion tokens are counted as followers.

Cost: prompt lookup takes a dictionary entry a token and order. The n-gram is built with sorts, 1 s and 250 MB at the
peak a million tokens and order 4 (so from `NGRAM_TOKENS` at most), and keeps about 16 bytes a distinct context; a token
takes about 10 microseconds an order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from dflash.evaluate.acceptance import Continuation, Walk, matched_prefix, walk

NGRAM_TOKENS = 8_000_000
"""Most training tokens that an evaluation counts n-grams of: 2 GB and 8 s; all of a large training set would take 600 GB."""


class PromptLookup:
    """Prompt lookup along one continuation. `propose` is called with growing indices: text once seen stays known."""

    def __init__(self, continuation: Continuation, ngram: int) -> None:
        self._text = continuation.prompt + continuation.output
        self._first = len(continuation.prompt)
        self._ngram = ngram
        self._newest: dict[tuple[int, ...], int] = {}  # n-gram -> index just after its newest occurrence
        self._indexed = 0

    def propose(self, index: int, slots: int) -> list[int]:
        """At most `slots` tokens to follow output token `index`."""
        known = self._first + index + 1
        # The suffix itself ends at `known`; only occurrences that end before it have a token after them.
        while self._indexed < known - 1:
            self._indexed += 1
            for order in range(1, min(self._ngram, self._indexed) + 1):
                self._newest[tuple(self._text[self._indexed - order : self._indexed])] = self._indexed
        for order in range(min(self._ngram, known), 0, -1):
            after = self._newest.get(tuple(self._text[known - order : known]))
            if after is not None:
                return self._text[after : min(after + slots, known)]
        return []


class NGram:
    """A count n-gram model with back-off; see `count`.

    Each known context of c tokens has an id. It is found from the end backwards: the pair (its first token, id of the c-1
    tokens after that) is looked up among the sorted pairs of that length, and its place among them is the id.
    """

    def __init__(self, order: int) -> None:
        self.order = order
        self.tokens = 0
        """Tokens that were counted, prompts included."""
        self._default: int | None = None
        self._pairs: list[NDArray[np.int64]] = []  # by context length - 1: sorted codes of known contexts
        self._best: list[NDArray[np.int64]] = []  # by context length - 1: the best follower of each

    @classmethod
    def count(cls, samples: Iterable[tuple[Sequence[int], int]], order: int) -> NGram:
        """Counts (input ids, prompt length) samples: each token from the prompt length on is a follower.

        Args:
            order: tokens of an n-gram, the follower included; at least 2.
        """
        model = cls(order)
        text, followers, offsets = _lay_out(samples)
        model.tokens = len(text)
        if not len(followers):
            return model
        counts = np.bincount(text[followers])
        model._default = int(counts.argmax())
        ids = np.zeros(len(followers), dtype=np.int64)
        for length in range(1, order):
            alive = offsets >= length
            followers, offsets, ids = followers[alive], offsets[alive], ids[alive]
            if not len(followers):
                break
            codes, ids = np.unique(_code(text[followers - length], ids), return_inverse=True)
            model._pairs.append(codes)
            model._best.append(_most_frequent(ids, text[followers]))
        return model

    def next_token(self, text: Sequence[int]) -> int | None:
        """The most frequent follower of the longest known suffix of `text`; None when nothing was counted."""
        best, identity = self._default, 0
        for length, (codes, followers) in enumerate(zip(self._pairs, self._best, strict=True), start=1):
            if length > len(text):
                break
            code = _code(text[-length], identity)
            identity = int(np.searchsorted(codes, code))
            if identity == len(codes) or codes[identity] != code:
                break
            best = int(followers[identity])
        return best

    def propose(self, text: Sequence[int], slots: int) -> list[int]:
        """`slots` tokens to follow `text`, each chosen after the ones before it."""
        recent = list(text[-(self.order - 1) :])
        proposed: list[int] = []
        for _ in range(slots):
            token = self.next_token(recent)
            if token is None:
                break
            proposed.append(token)
            recent = [*recent, token][-(self.order - 1) :]
        return proposed


def _code(token: NDArray[np.int64] | int, identity: NDArray[np.int64] | int) -> NDArray[np.int64] | int:
    """One number for a token and the id of the shorter context after it: ids stay below 2**40, tokens below 2**23."""
    return token * (1 << 40) + identity


def _lay_out(
    samples: Iterable[tuple[Sequence[int], int]],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """All samples end to end; the places of the followers; and how far each is from the start of its sample."""
    texts, followers, offsets, start = [], [], [], 0
    for ids, prompt_length in samples:
        texts.append(np.asarray(ids, dtype=np.int64))
        own = np.arange(prompt_length, len(ids))
        followers.append(own + start)
        offsets.append(own)
        start += len(ids)
    if not texts:
        empty = np.empty(0, dtype=np.int64)
        return empty, empty, empty
    return np.concatenate(texts), np.concatenate(followers), np.concatenate(offsets)


def _most_frequent(contexts: NDArray[np.int64], followers: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each context id 0, 1, ... the follower seen most often with it, the smaller of equals."""
    order = np.lexsort((followers, contexts))
    contexts, followers = contexts[order], followers[order]
    changes = np.flatnonzero((np.diff(contexts) != 0) | (np.diff(followers) != 0)) + 1
    starts = np.concatenate([[0], changes])
    counts = np.diff(np.concatenate([starts, [len(contexts)]]))
    ranked = np.lexsort((followers[starts], -counts, contexts[starts]))
    _, first = np.unique(contexts[starts][ranked], return_index=True)
    return followers[starts][ranked][first]


def walk_prompt_lookup(continuation: Continuation, block_size: int, ngram: int) -> Walk:
    """The walk that verifies what prompt lookup proposes."""
    lookup = PromptLookup(continuation, ngram)
    return walk(
        continuation,
        block_size,
        lambda index, slots: matched_prefix(lookup.propose(index, slots), continuation.following(index)),
    )


def walk_ngram(continuation: Continuation, block_size: int, model: NGram) -> Walk:
    """The walk that verifies what a count n-gram proposes."""
    text = continuation.prompt + continuation.output
    first = len(continuation.prompt)

    def matched(index: int, slots: int) -> int:
        recent = text[max(0, first + index + 2 - model.order) : first + index + 1]
        return matched_prefix(model.propose(recent, slots), continuation.following(index))

    return walk(continuation, block_size, matched)
