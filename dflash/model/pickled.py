"""Old checkpoints: `.pt` files, read with torch's weights-only reader, which builds tensors and plain values and runs nothing.

Costs the size of the file in host memory.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash.base.errors import CorruptError, PermanentError

STATES = ("model", "state_dict", "model_state_dict", "drafter", "draft_model", "module", "weights", "ema")
"""Names under which trainers keep the weights, most usual first."""
PREFIXES = ("module.", "_orig_mod.", "model.", "drafter.", "draft_model.")
"""What wrappers put before every name."""


def read_pickled(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weights of an old checkpoint by name, without wrappers' prefixes, and the plain values beside them.

    Raises:
        PermanentError: it holds Python objects, which would have to be run to be read, or no weights.
        CorruptError: it is cut short or no torch file.
    """
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise PermanentError(
            f"it holds Python objects, which are not loaded ({str(error).splitlines()[0][:160]})",
            where=str(path),
            remedy="Save the state_dict alone, or as safetensors, where the checkpoint was made.",
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        raise CorruptError(f"not a whole torch file ({str(error).splitlines()[0][:160]})", where=str(path)) from error
    weights = _weights(loaded)
    if not weights:
        raise PermanentError("it holds no weights", where=str(path), remedy=f"Looked under {', '.join(STATES)}.")
    rest = {name: value for name, value in loaded.items() if _is_plain(value)} if isinstance(loaded, Mapping) else {}
    return _bare(weights), rest


def _weights(value: Any) -> dict[str, Tensor]:
    if not isinstance(value, Mapping):
        return {}
    if value and all(isinstance(item, Tensor) for item in value.values()):
        return {str(name): item for name, item in value.items()}
    for name in STATES:
        found = _weights(value.get(name))
        if found:
            return found
    return {}


def _bare(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the prefixes that all names share."""
    for prefix in PREFIXES * 2:
        if all(name.startswith(prefix) for name in weights):
            weights = {name.removeprefix(prefix): item for name, item in weights.items()}
    return weights


def _is_plain(value: Any) -> bool:
    """Numbers, texts and nested mappings and lists of them."""
    if isinstance(value, Mapping):
        return all(isinstance(name, str) and _is_plain(item) for name, item in value.items())
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)
