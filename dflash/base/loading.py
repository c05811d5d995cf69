"""Loading large libraries without the garbage collector.

Torch and transformers make some million objects that live as long as the process. Collecting while they are made finds
nothing, and looking through them once more at the end of the process finds nothing either: of the 4.0 s of CPU that a
process needs to import both and to end again, 1.6 s are spent on that.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Inside, nothing is collected; what exists when it ends is never looked at by the collector again (`gc.freeze`)."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()
