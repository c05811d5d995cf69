"""Anchors depend on the seed, the sample and the epoch, and on nothing else."""

from __future__ import annotations

import numpy as np
import torch

from dflash.train.anchors import batch_anchors, select_anchors

MASK = np.array([0] * 5 + [1] * 40 + [0] * 5 + [1] * 10)


def draw(mask: np.ndarray = MASK, **changes: object) -> list[int]:
    arguments = {"seed": 7, "sample_id": "a1b2", "epoch": 0, "max_anchors": 8, **changes}
    return select_anchors(mask, **arguments).tolist()  # type: ignore[arg-type]


def test_an_anchor_and_its_next_token_are_both_supervised() -> None:
    every = draw(max_anchors=1000)
    assert every == [a for a in range(len(MASK) - 1) if MASK[a] and MASK[a + 1]]
    assert set(draw()) <= set(every)


def test_anchors_are_sorted_distinct_and_at_most_so_many() -> None:
    anchors = draw()
    assert anchors == sorted(set(anchors))
    assert len(anchors) == 8


def test_anchors_change_with_seed_sample_and_epoch_and_with_nothing_else() -> None:
    first = draw()
    np.random.seed(1)
    torch.manual_seed(1)
    assert draw() == first
    assert draw(np.concatenate([MASK, np.zeros(30)])) == first
    assert draw(MASK.astype(bool)) == first
    others = [draw(seed=8), draw(sample_id="a1b3"), draw(epoch=1)]
    assert all(other != first for other in others)


def test_the_draw_is_pinned_so_that_a_new_library_cannot_move_it() -> None:
    assert draw() == [17, 26, 27, 28, 29, 50, 51, 57]


def test_every_candidate_is_drawn_equally_often() -> None:
    counts = np.zeros(len(MASK))
    for epoch in range(2000):
        counts[draw(epoch=epoch)] += 1
    drawn = counts[draw(max_anchors=1000)]
    expected = 2000 * 8 / len(drawn)
    assert np.abs(drawn - expected).max() < 5 * np.sqrt(expected)


def test_a_sample_without_anchors_is_legal() -> None:
    assert draw(np.zeros(9)) == []
    assert draw(np.array([0, 1, 0, 1])) == []
    assert draw(np.array([1])) == []
    assert draw(np.array([])) == []


def test_a_batch_gives_the_anchors_of_its_samples_and_says_which_are_valid() -> None:
    masks = torch.from_numpy(np.stack([MASK, np.zeros_like(MASK)]))
    anchors, valid = batch_anchors(masks, seed=7, sample_ids=["a1b2", "00"], epoch=0, max_anchors=8)
    assert anchors[0][valid[0]].tolist() == draw()
    assert not valid[1].any()
    assert not anchors[1].any()
    empty, none_valid = batch_anchors(masks[1:], seed=7, sample_ids=["00"], epoch=0, max_anchors=8)
    assert empty.shape == none_valid.shape == (1, 1)
    assert not none_valid.any()
