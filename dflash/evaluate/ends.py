"""The two ends of the target that a drafter needs, embedding and head, without the layers in between.

For a target of 27B they are 2.5 GB each in bfloat16, against 54 GB for all of it. A random target is small and is drawn whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from dflash.base.errors import CorruptError
from dflash.model.drafter import HiddenToLogits, TokensToHidden
from dflash.model.target import DTYPES, random_target

EMBEDDINGS = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight", "embed_tokens.weight")
HEADS = ("lm_head.weight",)


@dataclass(frozen=True)
class Ends:
    """embed: ids [...] -> [..., H]. head: hidden [..., H] -> logits [..., V]."""

    embed: TokensToHidden
    head: HiddenToLogits


def load_ends(source: Path | Mapping[str, Any], dtype: str, device: str) -> Ends:
    """Loads embedding and head in `dtype` on `device`.

    Raises:
        CorruptError: the directory has no embedding, or a file cannot be read.
    """
    if isinstance(source, Mapping):
        target = random_target(source, dtype, device)
        return Ends(target.embed, target.lm_head)
    embedding = _find(source, EMBEDDINGS)
    if embedding is None:
        raise CorruptError(
            f"no tensor called {' or '.join(EMBEDDINGS)}", where=str(source), remedy="Give a complete HF checkpoint."
        )
    embedding = embedding.to(device, DTYPES[dtype])
    head = _find(source, HEADS)
    tied = embedding if head is None else head.to(device, DTYPES[dtype])
    return Ends(
        lambda ids: torch.nn.functional.embedding(ids, embedding),
        lambda hidden: torch.nn.functional.linear(hidden, tied),
    )


def _find(directory: Path, names: tuple[str, ...]) -> torch.Tensor | None:
    """The first of the tensors `names` in a directory of safetensors files; None when there is none."""
    for file in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as stream:
                held = set(stream.keys())
                for name in names:
                    if name in held:
                        tensor: torch.Tensor = stream.get_tensor(name)
                        return tensor
        except SafetensorError as error:
            raise CorruptError(f"unreadable: {error}", where=str(file), remedy="Fetch it again.") from error
    return None
