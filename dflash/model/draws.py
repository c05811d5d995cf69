"""Random weights by counter: number i of a tensor is a function of (seed, name of the tensor, i), in whole-number arithmetic,
so that every device draws the same bits, where the weights lie and as many at a time as one likes.

Small models keep torch's generator, one sequence for the whole model. Large ones would take minutes to draw on a CPU and twice
their size to carry over: 26 B weights take about 2 s on an H200, and half a minute a billion on one CPU core. Working memory is
`PIECE` numbers of 8 bytes, a few times.
"""

from __future__ import annotations

import hashlib
from functools import cache
from statistics import NormalDist

import torch
from torch import Tensor

LARGE = 1 << 28
"""Weights from which on a model is drawn by counter."""
PIECE = 1 << 26
"""Numbers drawn at once."""
WORD = 0xFFFFFFFF


@torch.no_grad()
def draw_normal(weight: Tensor, name: str, seed: int, std: float) -> None:
    """Fills `weight` with N(0, std), rounded to its type: one of 65,536 quantiles a number, so none is beyond 4.4 std.

    Args:
        weight: contiguous, fewer than 2**32 numbers, on any device. name: of the tensor; two names draw different numbers.
    """
    first, second = _keys(name, seed)
    quantiles = _quantiles().to(weight.device)
    flat = weight.view(-1)
    for start in range(0, len(flat), PIECE):
        part = flat[start : start + PIECE]
        counter = torch.arange(start, start + len(part), dtype=torch.int64, device=weight.device)
        word = _mixed((_mixed(counter ^ first) + second) & WORD)
        part.copy_(quantiles[word >> 16] * std)


def _keys(name: str, seed: int) -> tuple[int, int]:
    found = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(found[:4], "little"), int.from_bytes(found[4:8], "little")


def _mixed(word: Tensor) -> Tensor:
    """A bijection of 32-bit words (in int64) in which every bit depends on every other. Its factors are under 2**31, so that no
    product leaves int64."""
    word = word ^ (word >> 16)
    word = (word * 0x21F0AAAD) & WORD
    word = word ^ (word >> 15)
    word = (word * 0x735A2D97) & WORD
    return word ^ (word >> 15)


@cache
def _quantiles() -> Tensor:
    """The middles of 65,536 equally likely parts of the normal distribution, float32."""
    normal = NormalDist()
    count = 1 << 16
    return torch.tensor([normal.inv_cdf((index + 0.5) / count) for index in range(count)], dtype=torch.float32)
