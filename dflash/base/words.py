"""Numbers of things in words, for people: `1 file`, `1,234 files`. Costs nothing."""

from __future__ import annotations


def number_of(count: int, one: str, many: str = "") -> str:
    """`1 result`, `2 results`, `1,234 copies`.

    Args:
        one: a single thing. many: several of them; with an s when left out.
    """
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"
