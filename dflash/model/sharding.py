"""A target spread over several devices of one host: its layers in runs of like length, one run a device.

The first device also holds what is not a layer (embedding, rotary angles, final norm, head), and there every forward begins and
ends. Of layers that cannot be dealt out evenly the later devices get one more. A run of layers begins by moving what it is
given to its own device, so keys, values and recurrent states lie where their layers are, without anybody saying so. Nothing is
computed differently: results are those of the whole target on one such device.

Cost: the devices work one after another. Between two of them a forward moves the hidden states (b * S * H numbers) and, once a
run, angles and mask. A checkpoint passes through the host's memory and is never whole on a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from dflash.base.errors import ConfigError

Devices = str | Sequence[str]
"""`cpu`, `cuda`, `cuda:1`, ..., or several to spread the layers over."""


def check_devices(devices: Sequence[str], num_layers: int, *, where: str = "target_devices") -> None:
    """Refuses devices that this machine lacks, and more of them than there are layers.

    Raises:
        ConfigError: names the device, or both counts.
    """
    if not devices:
        raise ConfigError("no device is named", where=where, remedy="Name one, or leave the option out.")
    if len(devices) > max(num_layers, 1):
        raise ConfigError(
            f"{len(devices)} devices for a target of {num_layers} layers",
            where=where,
            remedy=f"Name at most {num_layers}: a device holds whole layers.",
        )
    for name in devices:
        try:
            device = torch.device(name)
        except RuntimeError as error:
            raise ConfigError(f"device {name!r} is unknown", where=where, remedy="Name cuda:0, cuda:1, ...") from error
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(
                f"device {name!r} is not here: this machine shows {torch.cuda.device_count()} GPUs",
                where=where,
                remedy="Name devices that it has, or leave the option out.",
            )


def runs_of_layers(num_layers: int, devices: int) -> list[range]:
    """The layers of each device."""
    bounds = [num_layers * number // devices for number in range(devices + 1)]
    return [range(start, end) for start, end in pairwise(bounds)]


def spread(model: Any, devices: Sequence[str]) -> None:
    """Moves a loaded causal language model of transformers onto its devices, and lets its forwards cross from one to the next.

    Raises:
        ConfigError: as `check_devices`.
    """
    backbone = model.model
    layers = backbone.layers
    check_devices(devices, len(layers))
    runs = list(zip(runs_of_layers(len(layers), len(devices)), devices, strict=True))
    for run, name in runs:
        for number in run:
            layers[number].to(name)
    backbone.layers = nn.ModuleList()
    model.to(devices[0])  # all the rest
    backbone.layers = layers
    for run, name in runs[1:]:
        mover = Mover(torch.device(name))
        layers[run[0]].register_forward_pre_hook(mover.begin)
        for number in run:
            layers[number].register_forward_pre_hook(mover, with_kwargs=True)
    if runs[1:]:
        backbone.norm.register_forward_pre_hook(Mover(torch.device(devices[0])), with_kwargs=True)


class Mover:
    """Hook before the layers of one device: moves their inputs there. What all of them are given (angles, mask) is moved by the
    first and used again by the others."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._copies: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # by id of the original, which is kept so that no other gets it

    def begin(self, _module: nn.Module, _args: tuple[Any, ...]) -> None:
        """Forgets what an earlier forward was given."""
        self._copies.clear()

    def __call__(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        moved = tuple(self.move(value) if isinstance(value, Tensor) else value for value in args)
        return moved, {name: self._shared(value) for name, value in kwargs.items()}

    def move(self, value: Tensor) -> Tensor:
        """The tensor on the hook's device."""
        return value.to(self.device)

    def _shared(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(self._shared(part) for part in value)
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self._copies:
            self._copies[id(value)] = (value, self.move(value))
        return self._copies[id(value)][1]
