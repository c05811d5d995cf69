"""From the host to a device without waiting for the device.

A plain copy to a GPU waits until all that was asked of the GPU before is done. From page-locked memory it is one more thing
that is asked, in its turn; torch gives that memory to nobody else until it has been read. Costs a copy on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device; the host goes on at once."""
    if device.type == "cpu":  # a host that does not wait would read what has not come yet
        return tensor.to(device)
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
