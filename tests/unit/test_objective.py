"""The loss is the weighted cross entropy of the tokens that the target wrote, the same at any split."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from model_samples import DENSE, drafter_config
from torch import Tensor

from dflash.base.errors import ConfigError
from dflash.model.drafter import Drafter, draft_all
from dflash.model.target import random_target
from dflash.train.anchors import batch_anchors
from dflash.train.objective import ObjectiveSums, labels_and_weights, objective, slot_decay

BLOCK, VOCAB = 4, 50
IDS = torch.arange(30).reshape(1, 30)  # every token is another one, so a shift never matches by chance
MASK = torch.ones(1, 30)
ANCHORS = torch.tensor([[3, 10, 17, 28]])


def test_slot_k_is_labelled_with_the_token_at_anchor_plus_k() -> None:
    labels, weights = labels_and_weights(IDS, MASK, ANCHORS, BLOCK)
    assert labels[0, :3].tolist() == [[3, 4, 5, 6], [10, 11, 12, 13], [17, 18, 19, 20]]
    assert weights[0].tolist() == [[0, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 1], [0, 1, 0, 0]]


def test_an_oracle_is_always_right_and_the_same_oracle_shifted_by_one_never() -> None:
    labels, weights = labels_and_weights(IDS, MASK, ANCHORS, BLOCK)
    positions = (ANCHORS[..., None] + torch.arange(BLOCK)).clamp(max=29)
    truth = F.one_hot(IDS[0][positions], VOCAB).float()
    shifted = F.one_hot(IDS[0][(positions + 1).clamp(max=28)], VOCAB).float()
    right = objective(truth, labels, weights, lambda hidden: 20 * hidden)
    wrong = objective(shifted, labels, weights, lambda hidden: 20 * hidden)
    assert right.correct.tolist() == right.counts.tolist() == [0, 4, 3, 3]
    assert float(right.loss_sum / right.weight_sum) < 1e-3
    assert wrong.correct.sum() == 0
    assert float(wrong.loss_sum / wrong.weight_sum) > 10


def test_a_label_outside_the_loss_mask_another_document_or_an_invalid_block_weighs_nothing() -> None:
    mask = MASK.clone()
    mask[0, 5] = 0
    documents = torch.tensor([[0] * 12 + [1] * 18])
    valid = torch.tensor([[True, True, False, True]])
    _, weights = labels_and_weights(IDS, mask, ANCHORS, BLOCK, document_ids=documents, anchor_valid=valid)
    assert weights[0].tolist() == [[0, 1, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0], [0, 1, 0, 0]]


def test_weights_decay_from_slot_one_and_stand_in_the_denominator_too() -> None:
    gamma = 2.0
    labels, weights = labels_and_weights(IDS, MASK, ANCHORS[:, :1], BLOCK, gamma=gamma)
    decay = [0.0, 1.0, math.exp(-1 / gamma), math.exp(-2 / gamma)]
    torch.testing.assert_close(weights[0, 0], torch.tensor(decay))
    hidden = torch.randn(1, 1, BLOCK, VOCAB)
    sums = objective(hidden, labels, weights, lambda x: x)
    entropy = [float(F.cross_entropy(hidden[0, 0, k], labels[0, 0, k])) for k in range(BLOCK)]
    assert float(sums.weight_sum) == pytest.approx(sum(decay))
    expected = sum(w * e for w, e in zip(decay, entropy, strict=True)) / sum(decay)
    assert float(sums.loss_sum / sums.weight_sum) == pytest.approx(expected, rel=1e-5)


def test_a_uniform_drafter_loses_log_vocabulary_at_every_gamma() -> None:
    for gamma in (None, 1.0, 4.0, 7.0):
        labels, weights = labels_and_weights(IDS, MASK, ANCHORS, BLOCK, gamma=gamma)
        sums = objective(torch.zeros(1, 4, BLOCK, VOCAB), labels, weights, lambda x: x)
        assert float(sums.loss_sum / sums.weight_sum) == pytest.approx(math.log(VOCAB), rel=1e-6)


def test_a_gamma_that_is_not_positive_is_refused() -> None:
    assert slot_decay(3, None, torch.float32).tolist() == [1, 1, 1]
    for gamma in (0.0, -1.0):
        with pytest.raises(ConfigError, match="gamma"):
            labels_and_weights(IDS, MASK, ANCHORS, BLOCK, gamma=gamma)


class Setting:
    """A random head and random hidden states in float64."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.head = torch.randn(VOCAB, 8, generator=generator, dtype=torch.float64)
        self.hidden = torch.randn(2, 4, BLOCK, 8, generator=generator, dtype=torch.float64)
        self.ids = torch.randint(0, VOCAB, (2, 30), generator=generator)
        mask = (torch.rand(2, 30, generator=generator) > 0.2).double()
        self.labels, self.weights = labels_and_weights(self.ids, mask, ANCHORS.expand(2, -1), BLOCK, gamma=4.0)

    def run(self, hidden: Tensor, rows: slice = slice(None), chunk: int = 1024) -> ObjectiveSums:
        return objective(hidden[rows], self.labels[rows], self.weights[rows], self.logits, logit_chunk=chunk)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.head.T


@pytest.mark.parametrize("chunk", [1, 3, 1024])
def test_chunked_loss_and_gradient_are_those_of_plain_autograd(chunk: int) -> None:
    setting = Setting()
    plain, chunked = (setting.hidden.clone().requires_grad_() for _ in range(2))
    entropy = F.cross_entropy(setting.logits(plain).flatten(0, 2), setting.labels.flatten(), reduction="none")
    expected = (entropy * setting.weights.flatten()).sum()
    sums = setting.run(chunked, chunk=chunk)
    torch.testing.assert_close(sums.loss_sum, expected)
    (3 * expected).backward()
    (3 * sums.loss_sum).backward()
    torch.testing.assert_close(chunked.grad, plain.grad)
    assert sums.loss_sum.dtype == torch.float64


def test_no_more_logits_exist_at_once_than_the_chunk_allows() -> None:
    setting = Setting()
    sizes: list[int] = []

    def head(hidden: Tensor) -> Tensor:
        sizes.append(len(hidden))
        return setting.logits(hidden)

    sums = objective(setting.hidden, setting.labels, setting.weights, head, logit_chunk=3)
    assert max(sizes) <= 3
    assert sum(sizes) == int(sums.counts.sum())


def test_the_sums_do_not_depend_on_how_the_batch_is_split() -> None:
    setting = Setting()
    hidden = setting.hidden.clone().requires_grad_()
    whole = setting.run(hidden)
    (whole.loss_sum / whole.weight_sum).backward()
    gradient, hidden.grad = hidden.grad, None
    parts = [setting.run(hidden, rows) for rows in (slice(0, 1), slice(1, 2))]
    total = sum(float(part.weight_sum) for part in parts)
    for part in parts:
        (part.loss_sum / total).backward()
    torch.testing.assert_close(hidden.grad, gradient)
    assert total == pytest.approx(float(whole.weight_sum))
    assert sum(part.correct for part in parts).tolist() == whole.correct.tolist()  # type: ignore[union-attr]


def test_no_gradient_flows_through_slot_zero_or_a_slot_without_weight() -> None:
    setting = Setting()
    hidden = setting.hidden.clone().requires_grad_()
    setting.run(hidden).loss_sum.backward()
    assert not hidden.grad[:, :, 0].any()
    assert not hidden.grad[setting.weights == 0].any()
    assert bool((hidden.grad[setting.weights > 0].abs().sum(dim=-1) > 0).all())


def test_a_batch_in_which_nothing_counts_gives_zero_and_can_be_differentiated() -> None:
    setting = Setting()
    hidden = setting.hidden.clone().requires_grad_()
    sums = objective(hidden, setting.labels, torch.zeros_like(setting.weights), setting.logits)
    sums.loss_sum.backward()
    assert (sums.loss_sum.item(), sums.weight_sum.item()) == (0.0, 0.0)
    assert sums.counts.tolist() == [0] * BLOCK
    assert not hidden.grad.any()


def test_half_precision_logits_are_scored_in_float32() -> None:
    setting = Setting()
    hidden = setting.hidden.bfloat16().requires_grad_()
    head = setting.head.bfloat16()
    sums = objective(hidden, setting.labels, setting.weights.float(), lambda x: x @ head.T)
    sums.loss_sum.backward()
    assert sums.loss_sum.dtype == torch.float32
    assert hidden.grad.dtype == torch.bfloat16


def test_a_drafter_that_overfits_one_sample_drafts_all_of_it() -> None:
    target = random_target(DENSE)
    prompt = target.tokenizer.encode("once upon a time")
    continuation, _ = target.generate([prompt], 24, stop_ids=())[0]
    tokens = torch.tensor([prompt + continuation])
    mask = torch.tensor([[0] * len(prompt) + [1] * len(continuation)])
    features = target.features(tokens, None, (1, 3))
    drafter = Drafter(drafter_config(), seed=1)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=5e-3)
    anchors, valid = batch_anchors(mask, seed=0, sample_ids=["0"], epoch=0, max_anchors=100)
    labels, weights = labels_and_weights(tokens, mask, anchors, BLOCK, anchor_valid=valid)
    for _ in range(120):
        sums = objective(drafter(features, tokens, anchors, target.embed), labels, weights, target.lm_head)
        optimizer.zero_grad()
        (sums.loss_sum / sums.weight_sum).backward()
        optimizer.step()
    inside = [a for a in anchors[0].tolist() if a + BLOCK <= tokens.shape[1]]
    drafts = draft_all(drafter, features, tokens, inside, target.embed, target.lm_head).argmax(dim=-1)
    expected = torch.stack([tokens[0, a + 1 : a + BLOCK] for a in inside])
    assert torch.equal(drafts, expected)
