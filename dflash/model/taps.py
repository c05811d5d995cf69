"""Which target layers a drafter reads. Costs nothing; no torch, since planning needs it."""

from __future__ import annotations

from dflash.base.errors import ConfigError


def default_taps(num_target_layers: int, num_draft_layers: int) -> list[int]:
    """Layer ids spread over the target: `round(1 + i*(L-4)/(D-1))` for i = 0..D-1; the middle layer for D = 1.

    Args:
        num_target_layers: L. num_draft_layers: D; there are as many taps as draft layers.

    Raises:
        ConfigError: the spread names a layer twice or leaves the target (a target too shallow for so many taps).

    Source: z-lab's published drafters (L=64, D=5 gives 1, 16, 31, 46, 61).
    """
    if num_draft_layers == 1:
        return [num_target_layers // 2]
    taps = [round(1 + i * (num_target_layers - 4) / (num_draft_layers - 1)) for i in range(num_draft_layers)]
    if len(set(taps)) != len(taps) or any(not 0 <= tap < num_target_layers for tap in taps):
        raise ConfigError(
            f"{num_draft_layers} draft layers spread over {num_target_layers} target layers give taps {taps}",
            where="train.target_layer_ids",
            remedy="Name the layers yourself, or use fewer draft layers.",
        )
    return taps
