"""A draft tree is the best prefixes, whatever their shape."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from numpy.typing import NDArray

from dflash.base.errors import PermanentError
from dflash.evaluate.tree import build_tree, longest_accepted


def random_log_probs(generator: np.random.Generator, depth: int, vocabulary: int, spread: float) -> NDArray[np.float64]:
    logits = generator.normal(size=(depth, vocabulary)) * spread
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def brute_force(log_probs: NDArray[np.floating], budget: int) -> list[tuple[int, ...]]:
    """All prefixes, sorted by probability, then length, then tokens."""
    depth, vocabulary = log_probs.shape
    every = [
        (-sum(float(log_probs[slot, token]) for slot, token in enumerate(prefix)), length, prefix)
        for length in range(1, depth + 1)
        for prefix in itertools.product(range(vocabulary), repeat=length)
    ]
    return [prefix for score, _, prefix in sorted(every)[:budget] if score < np.inf]


def test_the_tree_is_the_top_prefixes_of_brute_force_in_200_random_cases() -> None:
    generator = np.random.default_rng(0)
    for case in range(200):
        depth, vocabulary = int(generator.integers(1, 5)), int(generator.integers(2, 6))
        log_probs = random_log_probs(generator, depth, vocabulary, float(generator.choice([0.05, 1.0, 4.0])))
        budget = int(generator.integers(1, 40))
        assert build_tree(log_probs, budget) == brute_force(log_probs, budget), f"case {case}"


def test_equal_prefixes_come_shorter_first_then_by_token_ids() -> None:
    log_probs = np.array([[-1.0, -1.0, -1.0], [0.0, -np.inf, -np.inf]])
    assert build_tree(log_probs, 4) == [(0,), (1,), (2,), (0, 0)]
    assert build_tree(log_probs, 99) == brute_force(log_probs, 99) == [(0,), (1,), (2,), (0, 0), (1, 0), (2, 0)]


def test_many_equal_tokens_at_the_edge_of_the_budget_are_taken_by_id() -> None:
    assert build_tree(np.full((1, 50), -np.log(50)), 5) == [(0,), (1,), (2,), (3,), (4,)]


def test_every_prefix_of_a_node_is_a_node() -> None:
    generator = np.random.default_rng(1)
    tree = set(build_tree(random_log_probs(generator, 7, 100, 3.0), 64))
    assert all(prefix[:-1] in tree for prefix in tree if len(prefix) > 1)


def test_the_greedy_chain_is_not_forced_into_the_tree() -> None:
    log_probs = np.log(np.full((3, 4), 0.25) + np.array([0.03, -0.01, -0.01, -0.01]))
    tree = build_tree(log_probs, 4)
    assert tree == [(0,), (1,), (2,), (3,)]
    assert (0, 0) not in tree


def test_only_the_top_tokens_of_a_slot_matter() -> None:
    generator = np.random.default_rng(2)
    log_probs = random_log_probs(generator, 3, 40, 1.0)
    cut = np.full_like(log_probs, -np.inf)
    kept = np.argsort(-log_probs, axis=1)[:, :8]
    np.put_along_axis(cut, kept, np.take_along_axis(log_probs, kept, axis=1), axis=1)
    assert build_tree(cut, 8) == build_tree(log_probs, 8)


def test_the_longest_prefix_inside_the_tree_is_accepted_without_the_bonus_token() -> None:
    tree = [(5,), (7,), (5, 1), (5, 1, 2)]
    assert longest_accepted(tree, [5, 1, 2, 9]) == 3
    assert longest_accepted(tree, [5, 1]) == 2
    assert longest_accepted(tree, [7, 1, 2]) == 1
    assert longest_accepted(tree, [1, 5]) == 0
    assert longest_accepted(tree, []) == 0


def test_no_budget_and_no_slots_give_no_tree_and_nan_is_refused() -> None:
    assert build_tree(np.zeros((2, 3)), 0) == []
    assert build_tree(np.zeros((0, 3)), 4) == []
    with pytest.raises(PermanentError, match="NaN"):
        build_tree(np.array([[0.0, np.nan]]), 4)


def test_hundreds_of_trees_a_second_at_a_vocabulary_of_2048() -> None:
    log_probs = random_log_probs(np.random.default_rng(3), 7, 2048, 3.0).astype(np.float32)
    start = time.process_time()
    for _ in range(40):
        build_tree(log_probs, 64)
    assert 40 / (time.process_time() - start) > 200
