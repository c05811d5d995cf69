"""Prompt lookup and the count n-gram, by examples worked out by hand."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from dflash.data.schemas import SAMPLES
from dflash.data.tables import write_table
from dflash.evaluate.acceptance import Continuation
from dflash.evaluate.baselines import NGram, PromptLookup, walk_ngram, walk_prompt_lookup
from dflash.evaluate.evaluate import training_samples


def test_prompt_lookup_proposes_what_followed_the_longest_earlier_match() -> None:
    # The text so far ends with 2 3; after 2 3 came 4 5, after another 3 came 9.
    lookup = PromptLookup(Continuation([1, 2, 3, 4, 5, 3, 9, 2], [3, 0], 10), ngram=3)
    assert lookup.propose(0, 2) == [4, 5]
    assert lookup.propose(0, 4) == [4, 5, 3, 9]


def test_prompt_lookup_looks_at_no_more_than_ngram_tokens_and_takes_the_newest() -> None:
    continuation = Continuation([1, 2, 3, 4, 5, 3, 9, 2], [3, 0], 10)
    assert PromptLookup(continuation, ngram=1).propose(0, 2) == [9, 2]


def test_prompt_lookup_proposes_nothing_for_a_token_never_seen_before() -> None:
    assert PromptLookup(Continuation([1, 2, 3], [4, 5], 10), ngram=3).propose(0, 3) == []


def test_prompt_lookup_never_reads_output_that_is_not_committed_yet() -> None:
    lookup = PromptLookup(Continuation([7, 8], [7, 8, 7, 8, 7, 8], 10), ngram=2)
    assert lookup.propose(0, 5) == [8, 7], "7 8 7 is known when output token 0 is the anchor"
    assert lookup.propose(1, 5) == [7, 8]
    assert lookup.propose(3, 5) == [7, 8]


def test_prompt_lookup_on_text_that_repeats_itself_accepts_by_the_same_rule_as_the_drafter() -> None:
    # 5 6 7 repeats with period 3: at the first anchor the match is 5 (prompt), then 3 tokens a time are known.
    continuation = Continuation([5, 6, 7], [5, 6, 7, 5, 6, 7, 5, 6], 8)
    result = walk_prompt_lookup(continuation, 4, ngram=3)
    assert result.anchors == [0, 4]
    assert result.lengths == [4, 3]


def test_the_ngram_proposes_the_most_frequent_follower_of_the_longest_context() -> None:
    # After 1 2: 3 twice, 4 once. After 9 2: 5. After 2 alone: 3 twice, 4 once, 5 once.
    samples = [([1, 2, 3, 1, 2, 4, 1, 2, 3], 1), ([9, 2, 5], 1)]
    model = NGram.count(samples, 3)
    assert model.next_token([1, 2]) == 3
    assert model.next_token([9, 2]) == 5
    assert model.next_token([8, 2]) == 3, "an unknown context falls back to its last token"
    assert model.next_token([77]) == 2, "an unknown token falls back to the commonest follower of all"
    assert model.propose([0, 1], 3) == [2, 3, 1]


def test_the_ngram_counts_followers_in_completions_only_but_reads_contexts_in_prompts() -> None:
    model = NGram.count([([4, 5, 4, 5, 4, 6], 5)], 3)
    assert model.next_token([4]) == 6
    assert model.next_token([5, 4]) == 6
    assert model.next_token([5]) == 6, "5 was followed by 4 in the prompt only"


def test_the_ngram_does_not_look_across_samples() -> None:
    model = NGram.count([([1, 2], 0), ([3, 4], 0)], 3)
    assert model.next_token([2]) == 1, "2 ends its sample: it has no follower, so the commonest (smallest) token"


def test_equal_counts_go_to_the_smaller_token() -> None:
    assert NGram.count([([1, 9, 1, 3], 1)], 2).next_token([1]) == 3


def test_the_ngram_equals_a_dictionary_of_counts() -> None:
    generator = np.random.default_rng(0)
    samples = [(generator.integers(0, 5, size=40).tolist(), int(generator.integers(0, 10))) for _ in range(20)]
    order = 4
    counts: dict[tuple[int, ...], dict[int, int]] = {}
    for ids, prompt_length in samples:
        for place in range(prompt_length, len(ids)):
            for length in range(min(order - 1, place) + 1):
                followers = counts.setdefault(tuple(ids[place - length : place]), {})
                followers[ids[place]] = followers.get(ids[place], 0) + 1
    model = NGram.count(samples, order)
    for context in (tuple(generator.integers(0, 6, size=3).tolist()) for _ in range(300)):
        known = next(context[cut:] for cut in range(4) if context[cut:] in counts)
        expected = min(counts[known], key=lambda token: (-counts[known][token], token))
        assert model.next_token(list(context)) == expected


def test_an_ngram_that_counted_nothing_commits_the_bonus_token_alone() -> None:
    continuation = Continuation([1, 2], [3, 4, 5], 3)
    assert walk_ngram(continuation, 4, NGram.count([], 4)).lengths == [1, 1]


def test_the_ngram_walk_counts_like_the_drafters() -> None:
    model = NGram.count([([0, 1, 2, 3, 4, 5, 6, 7], 1)], 3)
    continuation = Continuation([0], [1, 2, 3, 4, 5, 9, 9], 7)
    result = walk_ngram(continuation, 4, model)
    assert result.anchors == [0, 4, 5]
    assert result.lengths == [4, 1, 1]


@pytest.mark.parametrize("known", [True, False], ids=["lengths", "no lengths"])
def test_the_ngram_counts_a_bounded_choice_of_samples_that_no_order_changes(tmp_path: Path, known: bool) -> None:
    names = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(200)]
    rows = [
        {
            "id": name,
            "source": "hand",
            "messages": "[]",
            "input_ids": [number] * 10,
            "prompt_length": 1,
            "finish_reason": "stop",
            **({"length": 10} if known else {}),
        }
        for number, name in enumerate(names)
    ]
    write_table(tmp_path / "a.parquet", SAMPLES, rows)
    write_table(tmp_path / "b.parquet", SAMPLES, rows[::-1])
    chosen = [
        {int(ids[0]) for ids, _ in training_samples(tmp_path / f"{name}.parquet", most)}
        for name, most in (("a", 2000), ("a", 1000), ("b", 1000))
    ]
    assert len(chosen[0]) == 200
    least = sorted(range(200), key=lambda number: names[number])[:100]
    assert chosen[1] == chosen[2] == set(least)
    assert NGram.count(training_samples(tmp_path / "a.parquet", 1000), 2).tokens == 10 * len(chosen[1])
