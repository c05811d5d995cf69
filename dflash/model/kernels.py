"""Which kernels really run in the target's linear-attention layers.

An installed package proves nothing: `flash-linear-attention` without triton falls back in silence, and with triton on a
CPU it is bound and then raises. So the truth is read from the functions that transformers' modelling module would call,
and on a CPU the reference is put in their place.

Binding is a property of the process: transformers binds at import, for all models of an architecture. Costs nothing to
read.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import wraps
from types import ModuleType
from typing import Any

from torch import nn

from dflash.base.errors import ConfigError, PermanentError

# Our name for a function -> its name in transformers' qwen3_5 modelling module (5.16 and later).
FUNCTIONS = {
    "chunk_gated_delta_rule": "torch_chunk_gated_delta_rule",
    "recurrent_gated_delta_rule": "torch_recurrent_gated_delta_rule",
    "causal_conv1d": "causal_conv1d_fn",
    "causal_conv1d_update": "causal_conv1d_update",
}
DELTA_RULES = ("chunk_gated_delta_rule", "recurrent_gated_delta_rule")
FAST_PACKAGES = ("fla", "causal_conv1d")
FORMS = ("chunked", "recurrent")
RECURRENT = "torch_recurrent"
"""Name of the reference when it runs whole sequences token by token: slow, and a second opinion on a machine without fla."""
KERNELS = ("fla", "torch", RECURRENT)
NONE_NEEDED = "none needed"


@dataclass(frozen=True)
class BoundKernels:
    """What a loaded target computes with.

    Attributes:
        linear: `fla`, `torch` or `mixed` by the two delta rules that are bound; `none needed` for a dense target.
        functions: our name -> `module.function` that is bound; empty for a dense target.
        form: `chunked` (a parallel form over chunks) or `recurrent` (token by token) for whole sequences.
        attention: transformers' name of the attention backend.
    """

    linear: str
    functions: dict[str, str]
    form: str
    attention: str

    @property
    def name(self) -> str:
        """What a config calls these kernels: `linear`, or `torch_recurrent` for the reference in its recurrent form."""
        return RECURRENT if self.linear == "torch" and self.form == "recurrent" else self.linear

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, for environments and manifests."""
        return asdict(self)


def _modelling_module(model: nn.Module) -> ModuleType | None:
    """The transformers module that holds the model's gated-delta-rule layers; None for a dense model."""
    for module in model.modules():
        if type(module).__name__.endswith("GatedDeltaNet"):
            source = sys.modules[type(module).__module__]
            missing = [name for name in FUNCTIONS.values() if not hasattr(source, name)]
            if missing:
                raise PermanentError(
                    f"this transformers does not name its linear-attention functions {missing}",
                    where=source.__name__,
                    remedy="Install transformers 5.17 or later.",
                )
            return source
    return None


def _implementation(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function behind transformers' wrapper, which chose it at import and keeps it in its closure."""
    if hasattr(function, "__dflash_reference__"):
        return function.__wrapped__  # type: ignore[attr-defined]
    chosen = inspect.getclosurevars(function).nonlocals.get("implementation") if inspect.isfunction(function) else None
    return chosen if callable(chosen) else function


def _qualified(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__name__)}"


def kind(qualified_name: str) -> str:
    """`fla` for the fast packages, `torch` for everything that transformers itself defines."""
    return "fla" if qualified_name.split(".")[0] in FAST_PACKAGES else "torch"


def bound_kernels(model: nn.Module) -> BoundKernels:
    """Read what is bound for `model`, a loaded transformers model.

    Raises:
        PermanentError: transformers keeps its functions under names unknown here.
    """
    attention = str(getattr(model.config, "_attn_implementation", "unknown"))
    source = _modelling_module(model)
    if source is None:
        return BoundKernels(NONE_NEEDED, {}, "chunked", attention)
    functions = {ours: _qualified(_implementation(getattr(source, theirs))) for ours, theirs in FUNCTIONS.items()}
    kinds = {kind(functions[name]) for name in DELTA_RULES}
    form = "recurrent" if functions[DELTA_RULES[0]] == functions[DELTA_RULES[1]] else "chunked"
    return BoundKernels(kinds.pop() if len(kinds) == 1 else "mixed", functions, form, attention)


def _reference(wrapped: Callable[..., Any]) -> Callable[..., Any]:
    """The plain torch function under transformers' wrapper, with the wrapper's refusal of packed sequences kept."""
    plain = inspect.unwrap(wrapped)
    accepted = set(inspect.signature(plain).parameters)

    @wraps(plain)
    def reference(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("cu_seqlens") is not None or kwargs.get("seq_idx") is not None:
            raise PermanentError(
                f"{plain.__name__} would let packed documents run into each other",
                remedy="Pad the batch instead of packing it, or run where flash-linear-attention is bound.",
            )
        return plain(*args, **{name: value for name, value in kwargs.items() if name in accepted})

    reference.__dflash_reference__ = True  # type: ignore[attr-defined]
    return reference


def force_reference(model: nn.Module, form: str = "chunked") -> None:
    """Make the torch reference run for every model of this architecture in the process. Does nothing for a dense model.

    Args:
        model: a loaded transformers model.
        form: `chunked`, or `recurrent` to run whole sequences token by token too (slow; for comparing kernels).

    Raises:
        ConfigError: an unknown form.
        PermanentError: transformers keeps its functions under names unknown here.
    """
    if form not in FORMS:
        raise ConfigError(f"form {form!r} of the delta rule is unknown", remedy=f"Choose one of {list(FORMS)}.")
    source = _modelling_module(model)
    if source is None:
        return
    originals: dict[str, Callable[..., Any]] = source.__dict__.setdefault(
        "__dflash_originals__", {name: getattr(source, name) for name in FUNCTIONS.values()}
    )
    for name, original in originals.items():
        setattr(source, name, _reference(original))
    if form == "recurrent":
        chunk, recurrent = (FUNCTIONS[name] for name in DELTA_RULES)
        setattr(source, chunk, _reference(originals[recurrent]))


def release_reference(model: nn.Module) -> None:
    """Undo `force_reference`: bind again what transformers bound at import. Does nothing for a dense model."""
    source = _modelling_module(model)
    for name, original in (vars(source).get("__dflash_originals__", {}) if source is not None else {}).items():
        setattr(source, name, original)


def require(bound: BoundKernels, asked: str) -> None:
    """Stop unless the kernels that are bound are the ones asked for. A dense target needs none, so any request is met.

    Raises:
        PermanentError: one of `KERNELS` was asked for and something else is bound.
        ConfigError: an unknown request; `auto` takes what is bound.
    """
    if asked not in ("auto", *KERNELS):
        raise ConfigError(
            f"kernels {asked!r} are unknown", remedy=f"Choose auto, {', '.join(KERNELS[:-1])} or {KERNELS[-1]}."
        )
    if asked == "auto" or bound.linear == NONE_NEEDED or asked == bound.name:
        return
    named = ", ".join(f"{name} = {function}" for name, function in bound.functions.items())
    remedy = (
        "Install flash-linear-attention with a triton that works on this machine."
        if asked == "fla"
        else "Load the target with kernels: torch, which puts the reference in place."
    )
    raise PermanentError(f"kernels {asked} were asked for, but {bound.name} is bound ({named})", remedy=remedy)


def refuse_packing(bound: BoundKernels) -> None:
    """Stop before several documents are packed into one row that the bound kernels cannot keep apart.

    Raises:
        PermanentError: a delta rule or a convolution that is bound is the torch reference.
    """
    leaking = [name for name, function in bound.functions.items() if kind(function) == "torch"]
    if leaking:
        raise PermanentError(
            f"packed documents would run into each other: {', '.join(leaking)} run on the torch reference",
            remedy="Pad the batch instead, or install flash-linear-attention and causal-conv1d.",
        )
