"""How long work says how far it is: one line at most every few seconds, on stderr, with rate and time left.

Plain lines, so that logs and pipes read well; a caller that wants live bars draws them from files instead. Cannot change a
result. Costs one clock read an update.
"""

from __future__ import annotations

import sys
import time


class Progress:
    """Counts units of work and prints `label: done/total unit, rate, ETA` now and then."""

    def __init__(self, label: str = "", *, every: float = 5.0, quiet: bool = False) -> None:
        self.label = label
        self.every = every
        self.quiet = quiet
        self._start = self._last = time.monotonic()

    def update(self, done: int, total: int, unit: str = "") -> None:
        """Reports `done` of `total`; prints when `every` seconds have passed since the last line, and at the end."""
        clock = time.monotonic()
        if self.quiet or (done < total and clock - self._last < self.every):
            return
        self._last = clock
        rate = done / max(clock - self._start, 1e-9)
        left = (total - done) / rate if rate > 0 else 0.0
        eta = f", {left:.0f} s left" if done < total else ""
        self.say(f"{done:,}/{total:,} {unit}, {rate:,.1f}/s{eta}")

    def say(self, text: str) -> None:
        """Prints one line."""
        if not self.quiet:
            print(f"{self.label}: {text}" if self.label else text, file=sys.stderr, flush=True)
