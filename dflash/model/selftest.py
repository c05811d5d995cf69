"""The numeric self-test of a host: each linear-attention function that a target would really call there, against the
float32 reference.

A tiny hybrid target (Qwen3.5's kind) is loaded on the device as any target is, so that what is bound is what training and
evaluation get. Then each bound function computes on drawn inputs of real head sizes (128), and the plain torch function
computes on the same inputs, on the CPU in float32: token by token for both delta rules, so that the chunked form is checked
against another algorithm and not against itself. The error is |found - reference| / |reference| in the Euclidean norm; a
function whose inputs were rounded to bfloat16 may be off by its rounding.

Costs the import of torch and transformers (5 s), 0.3 s and 20 MB on a CPU; on a GPU the first call of a triton kernel compiles
it (10 to 60 s).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5

from dflash.base.environment import collect
from dflash.base.errors import DflashError
from dflash.model.kernels import FUNCTIONS, BoundKernels
from dflash.model.probe import TOLERANCE, numerics, relative_error
from dflash.model.target import load_target

SPEC: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "seed": 1,
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "full_attention_interval": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [6, 5, 5],
    },
}
HEADS, VALUE_HEADS, SIZE, TOKENS, CHANNELS, KERNEL = 2, 4, 128, 150, 96, 4
"""150 tokens are two chunks of 64 and a part of a third."""


@dataclass(frozen=True)
class Tried:
    """One function: what is bound, its relative error (infinite when it raised), and how large that may be."""

    function: str
    bound: str
    error: float
    tolerance: float
    failure: str = ""

    @property
    def right(self) -> bool:
        """Whether it computes what it should."""
        return self.error <= self.tolerance

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; an infinite error is None."""
        error = self.error if self.error < float("inf") else None
        return {
            "function": self.function,
            "bound": self.bound,
            "error": error,
            "tolerance": self.tolerance,
            "right": self.right,
            "failure": self.failure,
        }


def numeric_facts(device: str) -> dict[str, Any]:
    """What of this machine decides numbers, and whether its kernels are right, as plain JSON values.

    Returns:
        `numerics`: flat, see `dflash.model.probe.numerics`. `kernels`: what is bound. `self_test`: one entry a function.
        `peer_to_peer`: pairs of GPUs without direct access to each other. `torch`, `gpus`: see `dflash.base.environment`.
    """
    # bfloat16 on a GPU is what real targets compute in; a CPU computes demos, in float32.
    dtype = "float32" if device == "cpu" else "bfloat16"
    target = load_target(SPEC, dtype=dtype, device=device)
    tried = tried_functions(qwen3_5, target.kernels, device, dtype)
    environment = collect(target.kernels.to_dict())
    return {
        "numerics": numerics(environment, device),
        "kernels": target.kernels.to_dict(),
        "self_test": [one.to_dict() for one in tried],
        "peer_to_peer": pairs_without_peer_access(),
        "torch": environment.torch,
        "gpus": environment.gpus,
    }


@torch.no_grad()
def tried_functions(source: ModuleType, bound: BoundKernels, device: str, dtype: str) -> list[Tried]:
    """Tries the functions of a modelling module; none of them can end this by raising.

    Args:
        bound: what is bound in it, for the names. dtype: of the inputs.
    """
    found = []
    for ours, theirs in FUNCTIONS.items():
        arguments = DRAWN[ours](getattr(torch, dtype))
        reference = _last(_plain(source, REFERENCE.get(ours, theirs)), _moved(arguments, "cpu", torch.float32))
        error, failure = float("inf"), ""
        try:
            result = _last(getattr(source, theirs), _moved(arguments, device, None))
            error = relative_error(reference, result.to("cpu", torch.float32))
        except (
            RuntimeError,
            TypeError,
            ValueError,
            NotImplementedError,
            ImportError,
            AssertionError,
            DflashError,
        ) as raised:
            failure = f"{type(raised).__name__}: {str(raised).strip().splitlines()[0] if str(raised).strip() else ''}"
        found.append(Tried(ours, bound.functions[ours], error, TOLERANCE[dtype], failure))
    return found


REFERENCE = {"chunk_gated_delta_rule": FUNCTIONS["recurrent_gated_delta_rule"]}
"""Functions whose reference is another one."""


def _plain(source: ModuleType, name: str) -> Callable[..., Any]:
    """The torch function that transformers itself defines, whatever is bound in its place."""
    plain: Callable[..., Any] = inspect.unwrap(getattr(source, name))
    return plain


def _last(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Tensor:
    """What a function gives: its output, with its final state behind it where it has one."""
    positional = [arguments[name] for name in arguments if name.startswith("_")]
    named = {name: value for name, value in arguments.items() if not name.startswith("_")}
    result = function(*positional, **named)
    parts = result if isinstance(result, tuple) else (result,)
    return torch.cat([part.float().flatten() for part in parts if part is not None])


def _moved(arguments: Mapping[str, Any], device: str, dtype: torch.dtype | None) -> dict[str, Any]:
    return {
        name: value.to(device=device, dtype=dtype or value.dtype, copy=True) if isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }


def _draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _delta_rule(dtype: torch.dtype, tokens: int, state: bool) -> dict[str, Any]:
    """Arguments of a delta rule as the model calls it; positional ones begin with `_`."""
    return {
        "_query": _draw(1, 1, tokens, HEADS, SIZE).to(dtype),
        "_key": _draw(2, 1, tokens, HEADS, SIZE).to(dtype),
        "_value": _draw(3, 1, tokens, VALUE_HEADS, SIZE).to(dtype),
        "g": -torch.nn.functional.softplus(_draw(4, 1, tokens, VALUE_HEADS)),
        "beta": _draw(5, 1, tokens, VALUE_HEADS).sigmoid().to(dtype),
        "initial_state": _draw(6, 1, VALUE_HEADS, SIZE, SIZE) if state else None,
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }


def _convolution(dtype: torch.dtype) -> dict[str, Any]:
    return {
        "_states": _draw(1, 2, CHANNELS, TOKENS).to(dtype),
        "_weight": _draw(2, CHANNELS, KERNEL).to(dtype),
        "_bias": None,
        "activation": "silu",
    }


def _convolution_step(dtype: torch.dtype) -> dict[str, Any]:
    return {
        "_states": _draw(1, 2, CHANNELS, 1).to(dtype),
        "_past": _draw(3, 2, CHANNELS, KERNEL).to(dtype),
        "_weight": _draw(2, CHANNELS, KERNEL).to(dtype),
        "_bias": None,
        "_activation": "silu",
    }


DRAWN: dict[str, Callable[[torch.dtype], dict[str, Any]]] = {
    "chunk_gated_delta_rule": lambda dtype: _delta_rule(dtype, TOKENS, state=False),
    "recurrent_gated_delta_rule": lambda dtype: _delta_rule(dtype, 1, state=True),
    "causal_conv1d": _convolution,
    "causal_conv1d_update": _convolution_step,
}


def pairs_without_peer_access() -> list[list[int]]:
    """Pairs of GPUs that cannot read each other's memory directly (their traffic goes through the host, slower)."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    pairs = [(first, second) for first in range(count) for second in range(count) if first < second]
    return [list(pair) for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
