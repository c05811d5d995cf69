"""Some prompts decoded for real, beside the offline numbers: whether the text is the target's own, whether the acceptance
lengths are those that were worked out offline, and how much faster it is than the target alone, in the same run.

Greedy decoding must give the target's own text, token for token, in float32. `lossless` is the share of prompts whose text it
is; `same_lengths_as_offline` the share whose every verification commits as many tokens as the offline walk says. Both leave
out nothing: a prompt whose continuation in the references differs (they are made in batches) counts as different.

The speedup is seconds of the plain decodes over seconds of the speculative ones, over all prompts together, prefill included,
after one short decode of each kind that warms up; when sampling, where texts differ in length, seconds a token. It is that of
this implementation, one request at a time: a server's differs.

Cost: three decodes a prompt (plain, chain, tree).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash.evaluate import metrics
from dflash.evaluate.acceptance import Continuation
from dflash.evaluate.decode import Decoded, Decoder
from dflash.evaluate.evaluate_params import Online

ONLINE_CHAIN, ONLINE_TREE = "online", "online_tree"
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Prompt:
    """A request to decode, and what was worked out offline: tokens committed by each verification, by method."""

    continuation: Continuation
    offline: Mapping[str, list[int]]


def decode_all(
    decoder: Decoder, prompts: Sequence[Prompt], online: Online, seed: int, progress: Callable[[int], None]
) -> dict[str, list[dict[str, Any]]]:
    """Decodes every prompt by every method.

    Args:
        seed: of all draws when sampling; each prompt has a stream of its own.

    Returns:
        by method, one entry a prompt: `lengths`, `seconds`, `plain_seconds`, `lossless`, `same_lengths` (the last two None when
        sampling).
    """
    temperature = online.temperature
    ways: dict[str, Callable[[Sequence[int], int, int], Decoded]] = {}
    if temperature:
        ways[ONLINE_CHAIN] = lambda prompt, limit, own: decoder.sampled(prompt, limit, temperature, own)
    else:
        ways[ONLINE_CHAIN] = lambda prompt, limit, _: decoder.chain(prompt, limit)
        if online.budget is not None:
            budget = online.budget
            ways[ONLINE_TREE] = lambda prompt, limit, _: decoder.tree(prompt, limit, budget)

    def plain(prompt: Sequence[int], limit: int, own: int) -> Decoded:
        return decoder.plain(prompt, limit, temperature=temperature, seed=own)

    for way in (plain, *ways.values()):
        way(prompts[0].continuation.prompt, min(WARM_UP_TOKENS, prompts[0].continuation.limit), seed)
    found: dict[str, list[dict[str, Any]]] = {method: [] for method in ways}
    for number, item in enumerate(prompts):
        # Each prompt draws for itself: the intervals take requests as independent.
        own = int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
        given = item.continuation.prompt, item.continuation.limit, own
        alone = plain(*given)
        for method, way in ways.items():
            made = way(*given)
            found[method].append(
                {
                    "lengths": made.lengths,
                    "seconds": made.seconds,
                    "plain_seconds": alone.seconds * len(made.output) / len(alone.output),
                    "lossless": None if temperature else made.output == alone.output,
                    "same_lengths": None if temperature else made.lengths == item.offline[method],
                }
            )
        progress(number + 1)
    return found


def sampling_name(temperature: float) -> str:
    """What the `sampling` column says."""
    return f"temperature {temperature:g}" if temperature else "greedy"


def rows(
    labels: dict[str, Any],
    decoded: Sequence[Mapping[str, Any]],
    block_size: int,
    sampling: str,
    settings: metrics.Settings,
) -> list[dict[str, Any]]:
    """The tidy rows of one method on one prompt set; no row for a metric that was not measured.

    Args:
        labels: as `metrics.rows`.
    """
    ones = np.ones(len(decoded))
    count = np.array([len(item["lengths"]) for item in decoded], dtype=np.float64)
    committed = np.array([sum(item["lengths"]) for item in decoded], dtype=np.float64)
    own = np.divide(committed, count, out=np.zeros_like(committed), where=count > 0)
    sums = [("tau_pooled", committed, count), ("tau_request_mean", own, (count > 0).astype(np.float64))]
    for metric, name in (("lossless", "lossless"), ("same_lengths_as_offline", "same_lengths")):
        if all(item[name] is not None for item in decoded):
            sums.append((metric, np.array([float(item[name]) for item in decoded]), ones))
    seconds = [np.array([item[name] for item in decoded]) for name in ("plain_seconds", "seconds")]
    sums.append(("speedup", seconds[0], seconds[1]))
    values, lows, highs = metrics.ratio_intervals(
        np.stack([item[1] for item in sums], axis=1),
        np.stack([item[2] for item in sums], axis=1),
        resamples=settings.resamples,
        confidence=settings.confidence,
        seed=settings.seed,
    )
    made = []
    for column, (metric, _, denominator) in enumerate(sums):
        n = int((denominator > 0).sum())
        if n:
            interval = float(values[column]), float(lows[column]), float(highs[column])
            made.append(metrics.row(labels, metric, interval, n, block_size=block_size, sampling=sampling))
    return made
