"""Numbers of things and lengths of time in words, for people: `1 file`, `1,234 files`, `12.5 min`. Costs nothing."""

from __future__ import annotations


def number_of(count: int, one: str, many: str = "") -> str:
    """`1 result`, `2 results`, `1,234 copies`.

    Args:
        one: a single thing. many: several of them; with an s when left out.
    """
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"


def about(count: float) -> str:
    """A mean number of things as the whole number that it is or is near: `44`, `about 44`, `less than 1`."""
    nearest = round(count)
    if nearest == 0 and count > 0:
        return "less than 1"
    return f"{nearest:,}" if abs(count - nearest) < 0.005 else f"about {nearest:,}"


def duration(seconds: float) -> str:
    """`0.25 s`, `3.2 s`, `45 s`, `12.5 min` or `31.0 h`."""
    if 0 < seconds < 0.01:
        return "less than 0.01 s"
    if seconds < 10:
        return f"{seconds:.2f} s" if 0 < seconds < 1 else f"{seconds:.2g} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"
