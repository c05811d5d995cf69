"""Which kernels really run in the target's linear-attention layers.

An installed package proves nothing: `flash-linear-attention` without triton falls back in silence, and with triton on a
CPU it is bound and then raises. So the truth is read from the functions that transformers' modelling module would call,
and on a CPU the reference is put in their place.

Binding is a property of the process: transformers binds at import, for all models of an architecture. Costs nothing to
read.

Several documents may share a row (packing) where both functions that run over whole sequences keep them apart. The fast delta
rule does, told where documents end; the torch reference of the convolution does not, and some versions of transformers do not
say so. Where the fast delta rule is bound and the fast convolution is not, a convolution is bound that goes document by
document: the reference itself, over slices.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import wraps
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from dflash.base.errors import ConfigError, PermanentError
from dflash.model.transfer import on_device

# Our name for a function -> its name in transformers' qwen3_5 modelling module (5.16 and later).
FUNCTIONS = {
    "chunk_gated_delta_rule": "torch_chunk_gated_delta_rule",
    "recurrent_gated_delta_rule": "torch_recurrent_gated_delta_rule",
    "causal_conv1d": "causal_conv1d_fn",
    "causal_conv1d_update": "causal_conv1d_update",
}
WHOLE_SEQUENCE = ("chunk_gated_delta_rule", "causal_conv1d")
"""The functions that a forward without a cache calls."""
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
        packed: whether batches with padding are computed packed, document behind document.
    """

    linear: str
    functions: dict[str, str]
    form: str
    attention: str
    packed: bool = False

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


def bind_document_convolution(model: nn.Module) -> None:
    """Where the fast delta rule is bound and the convolution is the torch reference, binds a convolution that keeps packed
    documents apart. Without packing it is the reference. Does nothing for a dense model, or where everything is torch or fast.

    Raises:
        PermanentError: transformers keeps its functions under names unknown here.
    """
    source = _modelling_module(model)
    if source is None:
        return
    rule, convolution = (_implementation(getattr(source, FUNCTIONS[name])) for name in WHOLE_SEQUENCE)
    if kind(_qualified(rule)) == "fla" and kind(_qualified(convolution)) == "torch":
        name = FUNCTIONS["causal_conv1d"]
        setattr(source, name, _by_document(inspect.unwrap(getattr(source, name))))


def _by_document(plain: Callable[..., Any]) -> Callable[..., Any]:
    def convolution(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        document_lengths: tuple[int, ...] | None = None,
        **_: Any,
    ) -> Tensor:
        """[b, channels, T] -> the same, causal inside each document."""
        pieces = hidden_states.split(document_lengths, dim=-1) if document_lengths else (hidden_states,)
        return torch.cat([plain(piece, weight, bias, activation=activation) for piece in pieces], dim=-1)

    convolution.__qualname__ = "convolution_by_document"
    convolution.__wrapped__ = plain  # type: ignore[attr-defined]
    return convolution


def attention_by_document(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    document_lengths: tuple[int, ...],
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each document of a packed row, in the form that transformers calls: query [1, heads, T, d], key
    and value [1, key heads, T, d] -> [1, T, heads, d]. Costs the sum of the squares of the lengths, and no mask."""
    parts = zip(*(tensor.split(document_lengths, dim=2) for tensor in (query, key, value)), strict=True)
    mixed = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1])
        for q, k, v in parts
    ]
    return torch.cat(mixed, dim=2).transpose(1, 2).contiguous(), None


AttentionInterface.register("by_document", attention_by_document)


@contextmanager
def attending_by_document(config: Any) -> Iterator[None]:
    """While it is open, models with this config attend by document; every forward must say `document_lengths`."""
    before = config._attn_implementation
    config._attn_implementation = "by_document"
    try:
        yield
    finally:
        config._attn_implementation = before


@torch.no_grad()
def documents_stay_apart(model: nn.Module, bound: BoundKernels) -> bool:
    """Whether packed documents really do not see each other in the model's linear layers, tried on one of them: a library that
    drops the argument that says where documents end would mix them in silence. True for a dense model.

    Costs two forwards of one layer over 192 tokens, at the sizes that will be run.
    """
    layer = next((module for module in model.modules() if type(module).__name__.endswith("GatedDeltaNet")), None)
    if layer is None:
        return True
    if leaking_functions(bound):
        return False
    weight = next(layer.parameters())
    lengths = (128, 64)
    config: Any = model.config
    width = config.get_text_config().hidden_size
    rows = torch.randn(1, sum(lengths), width, generator=torch.Generator().manual_seed(0))
    rows = rows.to(device=weight.device, dtype=weight.dtype)
    together = layer(rows, **packing_arguments(lengths, weight.device))[:, lengths[0] :].double()
    alone = layer(rows[:, lengths[0] :]).double()
    return float((together - alone).norm()) <= 0.05 * float(alone.norm())


def packing_arguments(lengths: Sequence[int], device: torch.device) -> dict[str, Any]:
    """What a forward of transformers must be told of the documents in its one row, for all functions that may be bound."""
    ends = torch.tensor([0, *lengths]).cumsum(0)
    documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(list(lengths)))
    return {
        "cu_seq_lens_q": on_device(ends, device),
        "seq_idx": on_device(documents[None].int(), device),
        "document_lengths": tuple(lengths),
    }


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


def leaking_functions(bound: BoundKernels) -> list[str]:
    """The bound functions that let packed documents run into each other."""
    ours = f"{__name__}.convolution_by_document"
    return [
        name
        for name, function in bound.functions.items()
        if name in WHOLE_SEQUENCE and kind(function) == "torch" and function != ours
    ]


def refuse_packing(bound: BoundKernels) -> None:
    """Stop before several documents are packed into one row that the bound kernels cannot keep apart.

    Raises:
        PermanentError: the delta rule or the convolution that is bound is the torch reference.
    """
    leaking = leaking_functions(bound)
    if leaking:
        raise PermanentError(
            f"packed documents would run into each other: {', '.join(leaking)} run on the torch reference",
            remedy="Pad the batch instead, or install flash-linear-attention.",
        )
