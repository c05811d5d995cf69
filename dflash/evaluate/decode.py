"""Real speculative decoding: what a drafter is for, and the proof that the offline numbers are those of a real decode.

The target reads the prompt; then drafter and target take turns. The drafter proposes from the anchor and the features of
everything before it, the target reads the proposal in one pass, the accepted tokens and its own next one are committed, and
what it read too much is taken back. Greedy decoding gives the text that the target would write alone, token for token (in
float32; in bfloat16 a near tie may turn, since a block and a single token are products of another shape).

Taking back is where such decoders go wrong. Keys and values of a layer of full attention are cut (for a tree: the places of
the accepted path are picked). A linear-attention layer has a recurrent state that nothing can cut, and a sliding layer has
forgotten what fell out of its window: there the cache of before is kept, put back, and the accepted tokens are read again,
in one pass with the next proposal. A tree is read in one pass, under a mask in which each node sees
its ancestors, by a target of full attention only; others read it branch by branch, and go on to another branch only while the
target's own next token lies on it.

Above temperature 0 drafts are drawn from the drafter's distribution q and kept with probability min(1, p/q), p the target's;
the first that is not is drawn anew from max(0, p - q). Every token is then distributed as the target alone would draw it
(Leviathan et al. 2023, Chen et al. 2023).

Ends and counts are those of z-lab's client (dflash 0.1.0), as in `acceptance.py`.

Memory: the target's cache, the drafter's keys and values of one text, and a snapshot of the recurrent states (27B: 150 MB;
keys and values are shared with the cache and not copied).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from dflash.evaluate.acceptance import choices, matched_prefix
from dflash.evaluate.tree import Prefix, build_tree_from_top
from dflash.model.drafter import Drafter, HiddenToLogits, TokensToHidden
from dflash.model.target import Target

STATES = ("conv_states", "recurrent_states")
MOST_PENDING = 32
"""Accepted tokens that may wait to be read again before they get a pass of their own, which moves the snapshot forward."""
FLAGS = ("is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state")


@dataclass(frozen=True)
class Decoded:
    """One decode.

    output: new tokens, the end token included. lengths: tokens committed by each verification, bonus included, clipped at the
    end; empty for a plain decode. passes: forwards of the target, the prompt's included. seconds: wall time of all of it.
    """

    output: list[int]
    lengths: list[int]
    passes: int
    seconds: float


class Reader:
    """The target along one text. What it read last can be taken back, all or in part.

    The cache holds the text but for its last tokens, `pending`: a cache that cannot be cut goes back to where it was before
    they were read, and they are read again with what comes next.
    """

    def __init__(self, target: Target, taps: Sequence[int] = ()) -> None:
        self._target = target
        self._taps = list(taps)
        self._cache = DynamicCache(config=target.model.config)
        self._kept: list[Any] | None = None
        self._cached = 0
        self._pending: list[int] = []
        self._last: list[int] = []
        self.cuttable = set(target.facts.layer_types) == {"full_attention"}
        self.passes = 0

    def read(
        self,
        tokens: Sequence[int],
        *,
        depths: Sequence[int] | None = None,
        seen: Tensor | None = None,
        last_only: bool = False,
        returns: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Reads tokens after those that are kept: logits [n, V] after each, and features [n, K*H].

        Args:
            depths: place of each token after the kept ones, for a tree; None: 0, 1, 2, ...
            seen: [n, n] bool, which of the new tokens each new token sees, itself included; for a tree.
            last_only: logits after the last alone.
            returns: whether `keep` may be asked to take some back.
        """
        if returns and not self.cuttable:
            self._kept = _snapshot(self._cache)
        device = self._target.device
        ids = torch.tensor([[*self._pending, *tokens]], device=device)
        places = range(ids.shape[1]) if depths is None else depths
        positions = torch.tensor([[self._cached + place for place in places]], device=device)
        mask = None
        if seen is not None:
            past = torch.ones(len(tokens), self._cached, dtype=torch.bool, device=device)
            mask = torch.cat([past, seen.to(device)], dim=1)[None, None]
        logits, features = self._target.read(ids, positions, self._cache, self._taps, mask=mask, last_only=last_only)
        self._last = list(tokens)
        self.passes += 1
        return logits[-len(tokens) :], features[-len(tokens) :]

    def keep(self, places: Sequence[int]) -> None:
        """Keeps, of the tokens read last, those at `places` (a chain from the first on, unless the target is cuttable)."""
        tokens = [self._last[place] for place in places]
        if self.cuttable:
            self._cut(places)
            self._cached += len(tokens)
        elif len(tokens) == len(self._last):
            self._commit(tokens)
        else:
            self._restore()
            self._pending += tokens
            if len(self._pending) > MOST_PENDING:
                self.read([], last_only=True, returns=False)
                self._commit([])
        self._last = []

    def _commit(self, tokens: list[int]) -> None:
        """The cache now holds what was pending, and `tokens` after it."""
        self._cached += len(self._pending) + len(tokens)
        self._pending = []

    def _cut(self, places: Sequence[int]) -> None:
        """Picks the columns of the kept tokens from keys and values."""
        if list(places) == list(range(len(self._last))):
            return
        columns = [*range(self._cached), *(self._cached + place for place in places)]
        index = torch.tensor(columns, device=self._target.device)
        contiguous = list(places) == list(range(len(places)))
        for layer in self._cache.layers:
            for name in ("keys", "values"):
                states = getattr(layer, name)
                picked = index.to(states.device)
                part = states[..., : len(columns), :] if contiguous else states.index_select(-2, picked)
                setattr(layer, name, part)

    def _restore(self) -> None:
        """Puts the cache back to what it was before the last read."""
        assert self._kept is not None
        self._cache.layers = self._kept
        self._kept = None


def _snapshot(cache: DynamicCache) -> list[Any]:
    """A copy of the layers of a cache that later reads leave alone. Keys and values are replaced by a read, never written
    into, so they are shared; states of linear attention are written in place, so they are copied."""
    kept = []
    for layer in cache.layers:
        copied = copy.copy(layer)
        for name in STATES:
            if hasattr(layer, name):
                states = {key: None if state is None else state.clone() for key, state in getattr(layer, name).items()}
                setattr(copied, name, states)
        for name in FLAGS:
            if hasattr(layer, name):
                setattr(copied, name, dict(getattr(layer, name)))
        kept.append(copied)
    return kept


class Proposer:
    """The drafter along one text: keys and values of its context grow with what is committed.

    Args:
        embed, head: the target's.
        longest: most tokens that the text will have.
    """

    def __init__(self, drafter: Drafter, embed: TokensToHidden, head: HiddenToLogits, longest: int) -> None:
        config = drafter.config
        weight = drafter.norm.weight
        shape = (1, config.num_key_value_heads, longest + 1, config.head_dim)
        self._drafter, self._embed, self._head = drafter, embed, head
        self._memory = [(weight.new_zeros(shape), weight.new_zeros(shape)) for _ in drafter.layers]
        self._tokens = torch.zeros(1, longest + 1, dtype=torch.long, device=weight.device)
        self._positions = torch.arange(longest + 1, device=weight.device)[None]
        self._known = 0

    def add(self, features: Tensor) -> None:
        """Features [n, K*H] of the next n committed tokens."""
        features = features.to(self._tokens.device)  # the target may be elsewhere
        start, end = self._known, self._known + features.shape[0]
        parts = self._drafter.remember(features[None], self._positions[:, start:end])
        for (keys, values), (new_keys, new_values) in zip(self._memory, parts, strict=True):
            keys[:, :, start:end], values[:, :, start:end] = new_keys, new_values
        self._known = end

    @torch.no_grad()
    def draft(self, anchor: int, slots: int) -> Tensor:
        """Logits [slots, V], float32, of the tokens after the token `anchor`, which follows those that are known."""
        place, end = self._known, self._known + 1
        self._tokens[0, place] = anchor
        memory = [(keys[:, :, :end], values[:, :, :end]) for keys, values in self._memory]
        hidden = self._drafter.draft_blocks(
            memory,
            self._tokens[:, :end],
            self._positions[:, place:end],
            None,
            self._positions[:, :end],
            self._embed,
            slots + 1,
        )
        return self._head(hidden[0, 0, 1:]).float()


Verified = tuple[list[int], list[int]]
"""What a verification found: places, among the tokens read last, of the anchor and the accepted tokens; and the tokens to
commit, the accepted ones and the bonus token."""

Verify = Callable[[Reader, Proposer, int, int], tuple[Verified, Tensor]]
"""`verify(reader, proposer, anchor, slots)`: one turn of drafter and target; also the features [n, K*H] of the tokens that it
read last."""


@dataclass(frozen=True)
class Decoder:
    """A target and a drafter for it. embed, head: the target's, in the drafter's type. stops: tokens that end a text."""

    target: Target
    drafter: Drafter
    embed: TokensToHidden
    head: HiddenToLogits
    stops: frozenset[int]

    @classmethod
    def of(cls, target: Target, drafter: Drafter, *, stop_ids: Sequence[int] | None = None) -> Decoder:
        """With the target's own ends and stop tokens."""
        stops = target.facts.eos_ids if stop_ids is None else stop_ids
        return cls(target, drafter, target.embed, target.lm_head, frozenset(stops))

    @torch.no_grad()
    def plain(self, prompt: Sequence[int], limit: int, *, temperature: float = 0.0, seed: int = 0) -> Decoded:
        """The target alone, one token a pass: greedy, or sampled.

        Args:
            limit: most new tokens, at least 1.
        """
        generator = torch.Generator().manual_seed(seed)
        start = self._clock()
        reader = Reader(self.target)
        output: list[int] = []
        tokens = list(prompt)
        while True:
            logits, _ = reader.read(tokens, last_only=True, returns=False)
            reader.keep(range(len(tokens)))
            output.append(pick(logits[-1], temperature, generator))
            if output[-1] in self.stops or len(output) == limit:
                return Decoded(output, [], reader.passes, self._clock() - start)
            tokens = output[-1:]

    def chain(self, prompt: Sequence[int], limit: int) -> Decoded:
        """Greedy decoding that verifies chains."""
        return self._decode(prompt, limit, verify_chain, 0.0, torch.Generator())

    def tree(self, prompt: Sequence[int], limit: int, budget: int) -> Decoded:
        """Greedy decoding that verifies trees of `budget` nodes beside the root."""

        def verify(reader: Reader, proposer: Proposer, anchor: int, slots: int) -> tuple[Verified, Tensor]:
            _, ids, log_probs = choices(proposer.draft(anchor, slots)[None], budget)
            prefixes = build_tree_from_top(ids[0], log_probs[0], budget)
            verify_nodes = verify_tree if reader.cuttable else verify_branches
            return verify_nodes(reader, anchor, prefixes)

        return self._decode(prompt, limit, verify, 0.0, torch.Generator())

    def sampled(self, prompt: Sequence[int], limit: int, temperature: float, seed: int) -> Decoded:
        """Sampling that verifies chains by rejection.

        Args:
            temperature: of target and drafter, above 0.
            seed: of all draws.
        """
        generator = torch.Generator().manual_seed(seed)

        def verify(reader: Reader, proposer: Proposer, anchor: int, slots: int) -> tuple[Verified, Tensor]:
            q = probabilities(proposer.draft(anchor, slots), temperature)
            drafted = torch.multinomial(q, 1, generator=generator)[:, 0].tolist()
            logits, features = reader.read([anchor, *drafted])
            accepted, bonus = accept_or_resample(drafted, q, probabilities(logits, temperature), generator)
            return (list(range(accepted + 1)), [*drafted[:accepted], bonus]), features

        return self._decode(prompt, limit, verify, temperature, generator)

    @torch.no_grad()
    def _decode(
        self, prompt: Sequence[int], limit: int, verify: Verify, temperature: float, generator: torch.Generator
    ) -> Decoded:
        start = self._clock()
        reader = Reader(self.target, self.drafter.config.target_layer_ids)
        proposer = Proposer(self.drafter, self.embed, self.head, len(prompt) + limit)
        logits, features = reader.read(list(prompt), last_only=True, returns=False)
        reader.keep(range(len(prompt)))
        proposer.add(features)
        output, lengths = [pick(logits[-1], temperature, generator)], []
        while len(output) < limit and output[-1] not in self.stops:
            # As z-lab's client: a block near the limit is no longer than what still fits.
            slots = min(self.drafter.config.block_size, limit - len(output) + 1) - 1
            (places, found), features = verify(reader, proposer, output[-1], slots)
            committed = self._clip(found, limit - len(output))
            output += committed
            lengths.append(len(committed))
            if len(output) < limit and output[-1] not in self.stops:
                reader.keep(places)
                proposer.add(features[places])
        return Decoded(output, lengths, reader.passes, self._clock() - start)

    def _clip(self, tokens: list[int], most: int) -> list[int]:
        """Up to and including the first stop token, and no more than `most`."""
        tokens = tokens[:most]
        ends = [place for place, token in enumerate(tokens) if token in self.stops]
        return tokens[: ends[0] + 1] if ends else tokens

    def _clock(self) -> float:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()


def verify_chain(reader: Reader, proposer: Proposer, anchor: int, slots: int) -> tuple[Verified, Tensor]:
    """Drafts the most probable chain and reads it in one pass."""
    drafted = proposer.draft(anchor, slots).argmax(-1).tolist()
    logits, features = reader.read([anchor, *drafted])
    answers = logits.argmax(-1).tolist()
    accepted = matched_prefix(drafted, answers)
    return (list(range(accepted + 1)), answers[: accepted + 1]), features


def verify_tree(reader: Reader, anchor: int, prefixes: Sequence[Prefix]) -> tuple[Verified, Tensor]:
    """Reads a whole tree in one pass: each node sees its ancestors and itself, and stands at its own depth."""
    nodes = {prefix: number for number, prefix in enumerate([(), *prefixes])}
    seen = torch.zeros(len(nodes), len(nodes), dtype=torch.bool)
    for prefix, number in nodes.items():
        seen[number, [nodes[prefix[:depth]] for depth in range(len(prefix) + 1)]] = True
    tokens = [anchor, *(prefix[-1] for prefix in prefixes)]
    logits, features = reader.read(tokens, depths=[len(prefix) for prefix in nodes], seen=seen)
    answers = logits.argmax(-1).tolist()
    places: list[int] = [0]
    path: Prefix = (answers[0],)  # the path runs one token ahead of the places: its last is the bonus
    while path in nodes:
        places.append(nodes[path])
        path = (*path, answers[nodes[path]])
    return (places, list(path)), features


def verify_branches(reader: Reader, anchor: int, prefixes: Sequence[Prefix]) -> tuple[Verified, Tensor]:
    """Reads a tree branch by branch, each from the same place: the best first, then one that agrees with all that the target
    has said, as long as there is one."""
    inner = {prefix[:-1] for prefix in prefixes}
    branches = [prefix for prefix in prefixes if prefix not in inner] or [()]
    branch = branches[0]
    while True:
        logits, features = reader.read([anchor, *branch])
        answers = logits.argmax(-1).tolist()
        accepted = matched_prefix(branch, answers)
        said = tuple(answers[: accepted + 1])
        fitting = [other for other in branches if other[: len(said)] == said]
        if not fitting:
            return (list(range(accepted + 1)), list(said)), features
        reader.keep([])
        branch = fitting[0]


def pick(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    """A token of logits [V]: the most probable at temperature 0, else drawn."""
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(probabilities(logits, temperature), 1, generator=generator))


def probabilities(logits: Tensor, temperature: float) -> Tensor:
    """Logits [..., V] as probabilities at a temperature above 0, in float64 on the CPU, where all draws are made."""
    return torch.softmax(logits.detach().cpu().double() / temperature, dim=-1)


def accept_or_resample(drafted: Sequence[int], q: Tensor, p: Tensor, generator: torch.Generator) -> tuple[int, int]:
    """Rejection sampling of one chain.

    Args:
        drafted: tokens drawn from `q`. q: [slots, V]. p: [slots + 1, V], the target's, the last row after the whole chain.

    Returns:
        how many tokens are accepted, and the token to commit after them.
    """
    for slot, token in enumerate(drafted):
        draw = float(torch.rand((), generator=generator, dtype=torch.float64))
        if draw * float(q[slot, token]) < float(p[slot, token]):
            continue
        rest = (p[slot] - q[slot]).clamp(min=0)
        # Equal distributions leave nothing over; a rejection is then a matter of rounding.
        rest = rest if float(rest.sum()) > 0 else p[slot]
        return slot, int(torch.multinomial(rest, 1, generator=generator))
    return len(drafted), int(torch.multinomial(p[len(drafted)], 1, generator=generator))
