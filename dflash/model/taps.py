"""Which target layers a drafter reads. Costs nothing; no torch, since planning needs it."""

from __future__ import annotations

from collections.abc import Sequence

from dflash.base.errors import ConfigError


def default_taps(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """The target layers to read: D ids spread evenly from layer 1 to layer L-3; the middle layer alone for D = 1.

    Id k means the output of target layer k. Source: z-lab dflash 0.1.0. (64, 5) -> (1, 16, 31, 46, 61).

    Raises:
        ConfigError: the spread names a layer twice or leaves the target, as (4, 2) does.
    """
    if num_draft_layers < 1 or num_target_layers < 1:
        raise ConfigError(
            f"no taps for {num_target_layers} target layers and {num_draft_layers} draft layers",
            remedy="Both counts must be at least 1.",
        )
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    if num_target_layers < 4:
        raise ConfigError(
            f"a target of {num_target_layers} layers has no {num_draft_layers} layers to spread taps over",
            remedy="Name target_layer_ids yourself.",
        )
    step = (num_target_layers - 4) / (num_draft_layers - 1)
    taps = tuple(round(1 + i * step) for i in range(num_draft_layers))
    check_taps(taps, num_target_layers)
    return taps


def check_taps(taps: Sequence[int], num_target_layers: int, *, where: str = "target_layer_ids") -> None:
    """Refuse taps that are missing, repeated or outside 0..num_target_layers-1, with a ConfigError at `where`."""
    if not taps:
        raise ConfigError("no target layer is tapped", where=where, remedy="Name at least one target layer.")
    if len(set(taps)) != len(taps):
        raise ConfigError(
            f"the same target layer is tapped twice: {list(taps)}", where=where, remedy="Name each layer once."
        )
    outside = [k for k in taps if not 0 <= k < num_target_layers]
    if outside:
        raise ConfigError(
            f"taps {outside} are outside the target, which has layers 0 to {num_target_layers - 1}",
            where=where,
            remedy="A tap is the id of a target layer, counted from 0.",
        )
