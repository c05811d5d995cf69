"""Offline acceptance: the walk, its ends, and its equality with a real decode."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from evaluate_samples import TAPS, Example, continue_prompt, decode, drafter_config, half_trained, target, train

from dflash.base.errors import PermanentError
from dflash.data.chat import length_limit
from dflash.evaluate.acceptance import Continuation, Drafts, draft_continuation, matched_prefix, walk
from dflash.model.drafter import Drafter

KINDS = ("dense", "hybrid")


def drafts_of(example: Example, *, top: int = 16, chunk: int = 64) -> Drafts:
    target = example.target
    return draft_continuation(
        example.drafter, example.continuation, example.features, target.embed, target.lm_head, top=top, chunk=chunk
    )


def oracle(continuation: Continuation, shift: int = 0) -> Callable[[int, int], int]:
    """A drafter that knows the continuation, `shift` tokens late or early."""

    def matched(index: int, slots: int) -> int:
        known = continuation.output[index + 1 + shift : index + 1 + shift + slots]
        return matched_prefix(known, continuation.following(index))

    return matched


@pytest.mark.parametrize("blocks", [1, 2, 5])
@pytest.mark.parametrize("block_size", [2, 4, 16])
def test_an_oracle_commits_a_whole_block_at_every_verification(block_size: int, blocks: int) -> None:
    output = list(range(100, 101 + block_size * blocks))
    continuation = Continuation([1, 2, 3], output, len(output))
    result = walk(continuation, block_size, oracle(continuation))
    assert result.lengths == result.unclipped == [block_size] * blocks


def test_an_oracle_has_tau_b_unclipped_at_any_length() -> None:
    for length in range(6, 30):
        continuation = Continuation([1], list(range(length)), length)
        result = walk(continuation, 4, oracle(continuation))
        assert set(result.unclipped) == {4}
        assert sum(result.lengths) == length - 1


@pytest.mark.parametrize("shift", [-1, 1])
def test_an_oracle_shifted_by_one_commits_one_token_a_verification(shift: int) -> None:
    continuation = Continuation([1], np.random.default_rng(0).permutation(200).tolist(), 200)
    result = walk(continuation, 8, oracle(continuation, shift))
    assert result.lengths == [1] * 199


def test_the_last_verification_is_clipped_at_the_end_token() -> None:
    continuation = Continuation([1], [10, 11, 12, 13, 14, 257], 100)
    assert walk(continuation, 4, oracle(continuation)).lengths == [4, 1]
    assert walk(continuation, 4, oracle(continuation)).unclipped == [4]


def test_near_the_length_limit_only_what_still_fits_is_drafted() -> None:
    continuation = Continuation([1], list(range(10)), 10)
    asked: list[tuple[int, int]] = []

    def nothing(index: int, slots: int) -> int:
        asked.append((index, slots))
        return 0

    assert walk(continuation, 4, nothing).lengths == [1] * 9
    assert asked == [(0, 3), (1, 3), (2, 3), (3, 3), (4, 3), (5, 3), (6, 3), (7, 2), (8, 1)]
    assert walk(continuation, 4, oracle(continuation)).lengths == [4, 4, 1]


def test_an_end_token_far_from_the_limit_leaves_blocks_whole() -> None:
    continuation = Continuation([1], [10, 11, 257], 100)
    asked: list[int] = []
    walk(continuation, 8, lambda index, slots: asked.append(slots) or 0)
    assert asked == [7, 7]


@pytest.mark.parametrize("output", [[257], [5]])
def test_an_output_of_one_token_needs_no_verification(output: list[int]) -> None:
    result = walk(Continuation([1], output, 1), 4, lambda index, slots: 3)
    assert result.anchors == result.lengths == result.unclipped == []


def test_the_length_limit_is_what_the_context_leaves() -> None:
    assert length_limit(256, 4096, 100) == 256
    assert length_limit(256, 300, 100) == 200


@pytest.mark.parametrize("kind", KINDS)
def test_the_offline_walk_equals_a_real_decode_with_chains(kind: str) -> None:
    seen = set()
    for example in half_trained(kind):
        output, lengths = decode(example)
        assert output == example.continuation.output
        assert drafts_of(example).walk_chain().lengths == lengths
        seen.update(lengths)
    assert len(seen) > 1, "the drafter is never right, so the test proves little"


@pytest.mark.parametrize("kind", KINDS)
def test_the_offline_walk_equals_a_real_decode_with_trees(kind: str) -> None:
    example = half_trained(kind)[-1]
    output, lengths = decode(example, budget=12)
    assert output == example.continuation.output
    assert drafts_of(example).walk_tree(12).lengths == lengths


def test_a_tree_of_every_likely_chain_accepts_no_less_than_the_chain() -> None:
    for example in half_trained("dense"):
        drafts = drafts_of(example, top=64)
        assert sum(drafts.walk_tree(64).lengths) == sum(drafts.walk_chain().lengths)
        assert len(drafts.walk_tree(64).lengths) <= len(drafts.walk_chain().lengths)


@pytest.mark.parametrize("chunk", [1, 3])
def test_all_anchors_in_one_forward_equal_chunks(chunk: int) -> None:
    example = half_trained("dense")[0]
    whole, pieces = drafts_of(example, chunk=1000), drafts_of(example, chunk=chunk)
    assert (whole.tokens == pieces.tokens).all()
    assert (whole.ids == pieces.ids).all()
    np.testing.assert_allclose(whole.log_probs, pieces.log_probs, atol=1e-5)


def test_drafts_do_not_see_the_features_of_the_anchor_or_after_it() -> None:
    example = half_trained("dense")[0]
    place = 6
    changed = example.features.clone()
    changed[len(example.continuation.prompt) + place :] = 7.0
    before = drafts_of(example)
    after = drafts_of(Example(example.target, example.drafter, example.continuation, changed))
    np.testing.assert_array_equal(before.log_probs[: place + 1], after.log_probs[: place + 1])
    assert (before.log_probs[place + 1] != after.log_probs[place + 1]).any()


def test_the_best_tokens_come_best_first_and_the_chain_is_the_first_of_each() -> None:
    drafts = drafts_of(half_trained("dense")[0])
    assert (np.diff(drafts.log_probs, axis=-1) <= 0).all()
    assert (drafts.ids[..., 0] == drafts.tokens).all()


def test_hits_are_where_the_drafted_token_is_the_true_one_and_none_lie_beyond_the_end() -> None:
    example = half_trained("dense")[0]
    drafts = drafts_of(example)
    output = example.continuation.output
    for index in range(len(output) - 1):
        for slot in range(1, 4):
            inside = index + slot < len(output)
            assert drafts.in_bounds()[index, slot - 1] == inside
            assert drafts.hits()[index, slot - 1] == (inside and drafts.tokens[index, slot - 1] == output[index + slot])


def test_one_sample_overfitted_has_tau_equal_to_the_block_size() -> None:
    model = target("hybrid")
    continuation, features = continue_prompt(model, list(b"another one"), 25)
    assert len(continuation.output) == 25
    drafter = Drafter(drafter_config(4, model.facts.num_layers), seed=0)
    train(drafter, model, [(continuation, features)], 200)
    drafts = drafts_of(Example(model, drafter, continuation, features))
    assert drafts.hits().sum() == drafts.in_bounds().sum(), "every slot of every anchor is right"
    assert drafts.walk_chain().lengths == [4] * 6


def test_a_drafter_with_nan_weights_is_refused() -> None:
    example = half_trained("dense")[0]
    drafter = Drafter(drafter_config(4, 6), seed=0)
    with torch.no_grad():
        drafter.fc.weight[0, 0] = torch.nan
    with pytest.raises(PermanentError, match="not finite"):
        drafts_of(Example(example.target, drafter, example.continuation, example.features))


def test_features_that_end_too_early_are_refused() -> None:
    example = half_trained("dense")[0]
    short = Example(example.target, example.drafter, example.continuation, example.features[:-5])
    with pytest.raises(PermanentError, match="features"):
        drafts_of(short)


def test_the_taps_of_the_examples_fit_both_targets() -> None:
    assert all(max(TAPS) < target(kind).facts.num_layers for kind in KINDS)
