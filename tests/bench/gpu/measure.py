"""How the GPU benchmarks measure: device events around fresh random work, contenders in alternating order, medians with spread.

A contender is a function that does one round of work and returns the useful tokens of it. All of them get the same rounds; the
order turns round after every round, so that heat and clock drift meet both alike. Each round is said aloud on stderr as it
begins: what ends by a time-out shows where it was. Results are JSON lines on stdout, and files in $OUT where that is set.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

STARTED = time.monotonic()
Work = Callable[[int], int]
"""One round by its number (from 0; negative ones warm up) -> useful tokens."""


def tell(text: str) -> None:
    """A line for people, at once."""
    print(f"[{time.monotonic() - STARTED:7.1f} s] {text}", file=sys.stderr, flush=True)


def report(name: str, **found: Any) -> dict[str, Any]:
    """One JSON line, on stdout and in $OUT."""
    line = {"name": name, **found}
    text = json.dumps(line)
    print(text, flush=True)
    if os.environ.get("OUT"):
        with (Path(os.environ["OUT"]) / "bench_gpu.jsonl").open("a") as stream:
            stream.write(text + "\n")
    return line


def synchronize(device: torch.device) -> None:
    """Waits for the device; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Clock:
    """Seconds of a device between `begin` and `end`: events on a GPU, the wall on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def begin(self) -> None:
        """Starts."""
        synchronize(self.device)
        if self.device.type == "cuda":
            self.first, self.last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.first.record()
        self.wall = time.perf_counter()

    def end(self) -> float:
        """Seconds since `begin`."""
        if self.device.type != "cuda":
            return time.perf_counter() - self.wall
        self.last.record()
        self.last.synchronize()
        return float(self.first.elapsed_time(self.last)) / 1e3


@dataclass
class Readings:
    """What a contender did in each round. peak: bytes over what was allocated when the round began."""

    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak: list[int] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Median of tokens per second."""
        return statistics.median(self.rates())

    def rates(self) -> list[float]:
        """Tokens per second by round."""
        return [tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds, strict=True)]

    def told(self) -> dict[str, Any]:
        """For a report."""
        rates = sorted(self.rates())
        return {
            "tokens_per_second": {"min": _short(rates[0]), "median": _short(self.rate), "max": _short(rates[-1])},
            "seconds": _short(statistics.median(self.seconds)),
            "peak_gb": round(max(self.peak) / 1e9, 3),
            "n": len(self.seconds),
        }


def _short(number: float) -> float:
    return float(f"{number:.4g}")


def alternate(
    name: str, contenders: Mapping[str, Work], device: torch.device, rounds: int, warm_up: int
) -> dict[str, Readings]:
    """Runs every contender `warm_up` times unmeasured, then `rounds` times measured, the order turned round each time."""
    found = {contender: Readings() for contender in contenders}
    for number in range(-warm_up, rounds):
        order = list(contenders.items())
        for contender, work in order if number % 2 == 0 else reversed(order):
            stage = f"round {number + 1} of {rounds}" if number >= 0 else "warm-up"
            tell(f"{name}: {stage}, {contender}")
            before = reset_peak(device)
            clock = Clock(device)
            clock.begin()
            tokens = work(number)
            seconds = clock.end()
            if number >= 0:
                found[contender].tokens.append(tokens)
                found[contender].seconds.append(seconds)
                found[contender].peak.append(peak(device) - before)
    return found


def reset_peak(device: torch.device) -> int:
    """Bytes allocated now, from where the next peak is counted."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return int(torch.cuda.memory_allocated(device))


def peak(device: torch.device) -> int:
    """The most bytes allocated since `reset_peak`."""
    return int(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else 0


def matmul_ceiling(device: torch.device, dtype: torch.dtype, size: int = 8192) -> float:
    """Operations per second of torch's own matmul, the best of a few shapes of these models, fresh random inputs."""
    best = 0.0
    for rows, inner, columns in ((size, size, size), (size, size * 5 // 8, size * 17 // 8)):
        left = torch.randn(rows, inner, device=device, dtype=dtype)
        right = torch.randn(inner, columns, device=device, dtype=dtype)
        seconds = []
        for _ in range(8):
            clock = Clock(device)
            clock.begin()
            left @ right
            seconds.append(clock.end())
        best = max(best, 2 * rows * inner * columns / statistics.median(seconds[3:]))
    tell(f"matmul: {best / 1e12:.3g} TFLOP/s")
    return best
