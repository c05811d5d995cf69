"""The optimizer: AdamW, or Muon for matrices beside AdamW for the rest, with a state that is plain tensors by name.

The state of a parameter is `<parameter>.<field>` in safetensors, so a checkpoint needs no pickle and no order of
parameters. Costs two numbers a parameter (AdamW) or one (Muon's matrices), in the type of the masters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from dflash.base.errors import CorruptError
from dflash.train.train_params import TrainParams

FIELDS = {"adamw": ("exp_avg", "exp_avg_sq", "step"), "muon": ("momentum_buffer",)}
"""What each optimizer keeps of a parameter."""


def learning_rate(params: TrainParams, step: int) -> float:
    """The learning rate of a step (from 1): linear warm-up, then a cosine from `lr` to `min_lr_share * lr`.

    The first step after the warm-up has the whole `lr`; the share would be reached by the step after the schedule's last.
    """
    done = step - 1
    if done < params.warmup:
        return params.lr * (done + 1) / params.warmup
    share = min(1.0, (done - params.warmup) / max(1, params.schedule_steps - params.warmup))
    floor = params.min_lr_share
    return params.lr * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * share)))


class Optimizer:
    """Updates master weights in place from their `.grad`.

    Args:
        masters: weights by name, float32 or float64. Weight decay applies to matrices, never to norms.
        fused: AdamW in one pass over weight, gradient and moments, without the buffers of their size that torch takes
            otherwise (7 GB for the 27B's drafter). By default on a GPU; on a CPU the plain loop, whose bits tests compare.
    """

    def __init__(self, masters: Mapping[str, Tensor], params: TrainParams, *, fused: bool | None = None) -> None:
        matrices = {name: weight for name, weight in masters.items() if weight.ndim == 2}
        others = {name: weight for name, weight in masters.items() if weight.ndim != 2}
        if fused is None:
            fused = all(weight.is_cuda for weight in masters.values()) or None
        self._parts: list[tuple[torch.optim.Optimizer, dict[str, Tensor], tuple[str, ...]]] = []
        if params.optimizer == "muon":
            # The update is scaled to the size that AdamW's has, so that one `lr` serves both halves.
            muon = torch.optim.Muon(
                matrices.values(), lr=params.lr, weight_decay=params.weight_decay, adjust_lr_fn="match_rms_adamw"
            )
            adamw = torch.optim.AdamW(others.values(), lr=params.lr, betas=params.betas, weight_decay=0.0, fused=fused)
            self._parts = [(muon, matrices, FIELDS["muon"]), (adamw, others, FIELDS["adamw"])]
        else:
            groups = [
                {"params": list(matrices.values()), "weight_decay": params.weight_decay},
                {"params": list(others.values()), "weight_decay": 0.0},
            ]
            adamw = torch.optim.AdamW(groups, lr=params.lr, betas=params.betas, fused=fused)
            self._parts = [(adamw, dict(masters), FIELDS["adamw"])]

    def step(self, rate: float) -> None:
        """One update at learning rate `rate`."""
        for optimizer, _, _ in self._parts:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()

    def moments(self) -> dict[str, Tensor]:
        """The moments by `<parameter>.<field>`, as they are used and will change; empty before the first update."""
        found = {}
        for optimizer, weights, fields in self._parts:
            for name, weight in weights.items():
                for field in fields:
                    value = optimizer.state.get(weight, {}).get(field)
                    if value is not None:
                        found[f"{name}.{field}"] = value.detach()
        return found

    def state(self) -> dict[str, Tensor]:
        """A copy of the moments on the CPU."""
        return {name: value.cpu().clone() for name, value in self.moments().items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Takes over what `state` returned.

        Raises:
            CorruptError: a moment is missing, left over or of another shape; another optimizer wrote it, or another model.
        """
        left = dict(state)
        if not left:
            return
        for optimizer, weights, fields in self._parts:
            for name, weight in weights.items():
                values = {field: left.pop(f"{name}.{field}", None) for field in fields}
                absent = [field for field, value in values.items() if value is None]
                if absent:
                    raise CorruptError(f"the optimizer state lacks {name}.{absent[0]}")
                fused = bool(optimizer.param_groups[0].get("fused"))
                optimizer.state[weight] = {
                    field: _placed(f"{name}.{field}", value, weight, fused)
                    for field, value in values.items()
                    if value is not None
                }
        if left:
            raise CorruptError(f"the optimizer state holds {min(left)}, which this optimizer does not know")


def _placed(name: str, value: Tensor, weight: Tensor, fused: bool) -> Tensor:
    if value.ndim == 0:  # AdamW counts its steps on the CPU, in one pass beside the weights
        return value.to(device=weight.device, dtype=torch.float32, copy=True) if fused else value.clone()
    if value.shape != weight.shape:
        raise CorruptError(f"the optimizer state {name} has shape {list(value.shape)}, the weight {list(weight.shape)}")
    return value.to(device=weight.device, dtype=weight.dtype, copy=True)
