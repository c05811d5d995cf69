"""The DFlash drafter: a small block-diffusion model that drafts a whole block of tokens in one forward.

It reads hidden states of the target (taps), projects them once into a context, and lets every layer attend from the
block [anchor token, mask, mask, ...] to [context before the anchor ; the block itself]. Slot k of a block predicts the
token at anchor + k; there is no shift. Embedding and head are the target's, frozen, passed in and never saved.

The arithmetic and the tensor names are those of the published checkpoints (z-lab dflash 0.1.0), so that an export loads
in servers unchanged. Attention here is the reference: torch's `scaled_dot_product_attention` under an explicit boolean
mask; or, where it is asked for, flex attention under the same mask in tiles, of which it skips the empty ones.

Cost: a drafter of the 27B shape (H 5120, 5 layers) is 1.73 B parameters. A forward holds keys and values of the context
    for every layer (2 * layers * S * kv_heads * head_dim numbers) and, for `anchor_chunk` anchors at a time, the mask
    and the activations of the blocks. The context projection and its keys and values are computed once, whatever the
    chunking.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from dflash.base.errors import ConfigError, PermanentError
from dflash.model import draws
from dflash.model.masks import block_mask, document_positions, sparse_block_mask
from dflash.model.taps import check_taps

ATTENTIONS = ("sdpa", "flex")
GRAPHS = 64
"""Graphs of flex attention, or of a fused function, at most; one more is an error."""
LAYER_TYPES = ("full_attention", "sliding_attention")

TokensToHidden = Callable[[Tensor], Tensor]
"""The target's embedding: token ids [...] -> vectors [..., H]."""

HiddenToLogits = Callable[[Tensor], Tensor]
"""The target's head: hidden [..., H] -> logits [..., V]."""


@dataclass(frozen=True)
class DrafterConfig:
    """The shape of a drafter. Field names are those of the published config.json.

    Raises:
        ConfigError: on construction, when a field makes no sense; the message names field and value.
    """

    hidden_size: int
    num_hidden_layers: int
    block_size: int
    vocab_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    layer_types: tuple[str, ...]
    sliding_window: int | None = None
    rope_theta: float = 1e7
    rms_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("layer_types", "target_layer_ids"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in (
            "hidden_size",
            "num_hidden_layers",
            "vocab_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "num_target_layers",
        ):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "must be at least 1")
        _require(self.block_size >= 2, "block_size", self.block_size, "must be at least 2: slot 0 is the anchor itself")
        _require(
            0 <= self.mask_token_id < self.vocab_size, "mask_token_id", self.mask_token_id, "is not in the vocabulary"
        )
        _require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            "num_key_value_heads",
            self.num_key_value_heads,
            f"must divide num_attention_heads ({self.num_attention_heads})",
        )
        _require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "must be even: rotary positions turn pairs")
        _require(self.rope_theta > 0, "rope_theta", self.rope_theta, "must be positive")
        _require(self.rms_norm_eps > 0, "rms_norm_eps", self.rms_norm_eps, "must be positive")
        _require(
            len(self.layer_types) == self.num_hidden_layers,
            "layer_types",
            list(self.layer_types),
            f"must name one type for each of the {self.num_hidden_layers} layers",
        )
        unknown = sorted(set(self.layer_types) - set(LAYER_TYPES))
        _require(not unknown, "layer_types", unknown, f"are not among {list(LAYER_TYPES)}")
        if "sliding_attention" in self.layer_types:
            _require(
                self.sliding_window is not None and self.sliding_window >= 1,
                "sliding_window",
                self.sliding_window,
                "must be at least 1, since a layer is of type sliding_attention",
            )
        check_taps(self.target_layer_ids, self.num_target_layers)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DrafterConfig:
        """Build from plain values, lists allowed. Raises ConfigError for an unknown or a missing field."""
        names = {f.name for f in dataclasses.fields(cls)}
        required = {f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING}
        unknown, missing = sorted(set(values) - names), sorted(required - set(values))
        if unknown or missing:
            raise ConfigError(
                f"drafter config with unknown fields {unknown} and missing fields {missing}",
                remedy=f"The fields are {sorted(names)}.",
            )
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` gives the same config back."""
        values = dataclasses.asdict(self)
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    @property
    def feature_size(self) -> int:
        """Width of the concatenated taps, K * H."""
        return len(self.target_layer_ids) * self.hidden_size


def _require(holds: bool, field: str, value: object, must: str) -> None:
    if not holds:
        raise ConfigError(f"{field} = {value!r} {must}", where="drafter config")


def root_mean_square(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x` [..., size] over the root of its mean square, times `weight`; computed in float32 (float64 stays float64)."""
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps)
    return weight * exact.to(x.dtype)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU: silu(gate) * up."""
    return F.silu(gate) * up


def compiler_said(error: BaseException) -> str:
    """Why something cannot be compiled, in one line: what comes before torch's advice on how to look closer."""
    return " ".join(str(error).partition("\n\n")[0].split())


@functools.cache
def fused(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """A pointwise function as one kernel, for any length; one graph a rank and type of its arguments, and for sizes of one.

    The kernel raises PermanentError when it cannot be compiled.
    """
    compiled: Callable[..., Any] = torch.compile(function, dynamic=True, fullgraph=True, backend=backend)

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        import torch._dynamo as dynamo  # a second to import, which only this needs

        try:
            with dynamo.config.patch(recompile_limit=GRAPHS):  # torch's own, eight, would end a training at its ninth
                return compiled(*arguments)
        except (dynamo.exc.TorchDynamoException, dynamo.exc.FailOnRecompileLimitHit) as error:
            raise PermanentError(
                f"`{function.__name__}` cannot be compiled: {compiler_said(error)}",
                where="train.fuse",
                remedy="Set train.fuse to false; the weights are the same within rounding.",
            ) from error

    return call


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in float32 (float64 stays float64)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps
        self.run: Callable[[Tensor, Tensor, float], Tensor] = root_mean_square

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size], in the type of `x`."""
        return self.run(x, self.weight, self.eps)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear layer whose weights are left unset: `Drafter` draws or loads them, and the global generator is not
    touched."""
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, inputs, outputs, bias=False)
    return layer


def rotary_table(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines for integer `positions` [...]: two tensors [..., head_dim], computed in float32.

    Plain one-dimensional rotary positions over the full head, whatever partial or multimodal form the target uses.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions.to(torch.float32)[..., None] * (1.0 / theta**exponent)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Turn heads `x` [b, heads, T, head_dim] by the table of [b, T, head_dim]."""
    cos, sin = table[0][:, None], table[1][:, None]
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


@functools.cache
def _compiled_flex(backend: str) -> Any:
    return torch.compile(flex_attention, fullgraph=True, backend=backend)


def compiled_tiles(
    query: Tensor, keys: Tensor, values: Tensor, mask: BlockMask, *, backend: str = "inductor"
) -> Tensor:
    """Flex attention, compiled: a few dozen graphs at most, for windows and for counts of one (row, anchor, tile), none a length.

    Torch's own limit of eight would be reached, and from there on it would compute every pair in silence.
    """
    import torch._dynamo as dynamo  # a second to import, which only this needs

    with dynamo.config.patch(recompile_limit=GRAPHS, fail_on_recompile_limit_hit=True):
        mixed: Tensor = _compiled_flex(backend)(query, keys, values, block_mask=mask, enable_gqa=True)
    return mixed


def attend_in_tiles(query: Tensor, keys: Tensor, values: Tensor, mask: BlockMask) -> Tensor:
    """Flex attention, [b, heads, T, d] over fewer key heads. Compiled on a GPU. Where torch has no backward of it, on a CPU, the
    tiles' own rule is written out as a whole mask."""
    if query.is_cuda and not torch.compiler.is_compiling():
        return compiled_tiles(query, keys, values, mask)
    if query.is_cuda or not torch.is_grad_enabled():
        mixed: Tensor = flex_attention(query, keys, values, block_mask=mask, enable_gqa=True)
        return mixed
    batch, _, queries, length = mask.shape
    whole = create_mask(mask.mask_mod, batch, 1, queries, length, device=str(query.device))
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=whole, enable_gqa=True)


class Attention(nn.Module):
    """Attention from the block to [context ; block]. The same key and value projections serve both parts."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.turn: Callable[[Tensor, tuple[Tensor, Tensor]], Tensor] = rotate
        self.head_dim = config.head_dim
        self.group = config.num_attention_heads // config.num_key_value_heads
        self.q_proj = _linear(config.hidden_size, config.num_attention_heads * config.head_dim)
        self.k_proj = _linear(config.hidden_size, config.num_key_value_heads * config.head_dim)
        self.v_proj = _linear(config.hidden_size, config.num_key_value_heads * config.head_dim)
        self.o_proj = _linear(config.num_attention_heads * config.head_dim, config.hidden_size)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def heads(self, x: Tensor) -> Tensor:
        """[b, T, heads * head_dim] -> [b, T, heads, head_dim]."""
        return x.unflatten(-1, (-1, self.head_dim))

    def keys_values(self, x: Tensor, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys (normed, rotated) and values of `x` [b, T, H]: two tensors [b, kv_heads, T, head_dim]."""
        keys = self.turn(self.k_norm(self.heads(self.k_proj(x))).transpose(1, 2), table)
        return keys, self.heads(self.v_proj(x)).transpose(1, 2)

    def forward(
        self, block: Tensor, context: tuple[Tensor, Tensor], table: tuple[Tensor, Tensor], mask: Tensor | BlockMask
    ) -> Tensor:
        """[b, T, H] -> [b, T, H]; `context` from `keys_values`, `mask` bool [b, 1, T, S + T] or the same in tiles."""
        query = self.turn(self.q_norm(self.heads(self.q_proj(block))).transpose(1, 2), table)
        keys, values = self.keys_values(block, table)
        keys = torch.cat([context[0].to(keys.dtype), keys], dim=2)
        values = torch.cat([context[1].to(values.dtype), values], dim=2)
        query, keys = query.to(values.dtype), keys.to(values.dtype)
        if isinstance(mask, BlockMask):
            mixed = attend_in_tiles(query, keys, values, mask)
        else:
            keys, values = (part.repeat_interleave(self.group, dim=1) for part in (keys, values))
            mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """The gated MLP of Qwen3."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.run: Callable[[Tensor, Tensor], Tensor] = gated
        self.gate_proj = _linear(config.hidden_size, config.intermediate_size)
        self.up_proj = _linear(config.hidden_size, config.intermediate_size)
        self.down_proj = _linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        return self.down_proj(self.run(self.gate_proj(x), self.up_proj(x)))


class Layer(nn.Module):
    """One draft layer: attention and MLP, each behind a norm and a residual. The context is not normed again."""

    def __init__(self, config: DrafterConfig, layer_type: str) -> None:
        super().__init__()
        self.layer_type = layer_type
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, block: Tensor, context: tuple[Tensor, Tensor], table: tuple[Tensor, Tensor], mask: Tensor | BlockMask
    ) -> Tensor:
        """[b, T, H] -> [b, T, H]."""
        block = block + self.self_attn(self.input_layernorm(block), context, table, mask)
        return block + self.mlp(self.post_attention_layernorm(block))


class Drafter(nn.Module):
    """The drafter. `seed` draws the initial weights from a generator of its own; `seed=None` leaves them unset, for
    loading."""

    def __init__(self, config: DrafterConfig, *, seed: int | None = 0) -> None:
        super().__init__()
        self.config = config
        self.fc = _linear(config.feature_size, config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers: Sequence[Layer] = nn.ModuleList(  # type: ignore[assignment]
            Layer(config, layer_type) for layer_type in config.layer_types
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if seed is not None:
            self.draw_weights(seed)

    def fuse(self, backend: str) -> None:
        """Has norms, rotary positions and SwiGLU run as one kernel each, compiled at their first call (seconds)."""
        for module in self.modules():
            if isinstance(module, RMSNorm):
                module.run = fused(root_mean_square, backend)
            elif isinstance(module, Attention):
                module.turn = fused(rotate, backend)
            elif isinstance(module, MLP):
                module.run = fused(gated, backend)

    @torch.no_grad()
    def draw_weights(self, seed: int, std: float = 0.02) -> None:
        """Draw every matrix from N(0, std), in the order of their names; norms are one. The same numbers on every device."""
        generator = torch.Generator().manual_seed(seed)
        by_counter = parameter_count(self.config) > draws.LARGE
        for name, weight in sorted(self.named_parameters()):
            if weight.ndim == 1:
                weight.fill_(1.0)
            elif by_counter:
                draws.draw_normal(weight, name, seed, std)
            else:
                weight.copy_(torch.empty(weight.shape).normal_(0.0, std, generator=generator))

    def context(self, features: Tensor) -> Tensor:
        """The concatenated taps [b, S, K*H], projected and normed once: [b, S, H].

        Raises:
            PermanentError: `features` has another width than the K taps of the config give.
        """
        if features.shape[-1] != self.config.feature_size:
            raise PermanentError(
                f"features of width {features.shape[-1]}, but {len(self.config.target_layer_ids)} taps of "
                f"{self.config.hidden_size} are {self.config.feature_size}",
                remedy="Extract the layers that the drafter's target_layer_ids name.",
            )
        return self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))

    def forward(
        self,
        features: Tensor,
        input_ids: Tensor,
        anchors: Tensor,
        embed: TokensToHidden,
        *,
        anchor_valid: Tensor | None = None,
        document_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        anchor_chunk: int | None = None,
        block_size: int | None = None,
        recompute: bool = False,
        recompute_layers: bool = False,
        attention: str = "sdpa",
    ) -> Tensor:
        """Draft from many anchors at once: [b, n, block_size, H], after the final norm, ready for the target's head.

        Args:
            features: [b, S, K*H] taps of the target, concatenated in the order of `target_layer_ids`.
            input_ids: [b, S] tokens.
            anchors: [b, n] indices into the sequence; where not valid, any value in 0..S-1.
            embed: the target's embedding.
            anchor_valid: [b, n]; blocks that are not valid give numbers that mean nothing, but are finite.
            document_ids: [b, S] for packed sequences: context and positions then stay inside a document.
            position_ids: [b, S]; by default they count from 0, anew in each document. A block stands at the
                position of its anchor, + 1, + 2, ...
            attention_mask: [b, S], nonzero on tokens; right padding only.
            anchor_chunk: anchors at a time, to bound memory; the result is the same. None: all at once.
            block_size: slots to draft, when other than the config's.
            recompute: recompute the activations of each chunk in the backward pass instead of keeping them. Of a single chunk
                they are kept: all of them would exist at once in either case.
            recompute_layers: recompute those of each layer, so that one layer's exist at a time; the same bits on a CPU.
            attention: one of `ATTENTIONS`.

        Raises:
            PermanentError: shapes that do not fit, or left padding without position ids.
        """
        _check_shapes(features, input_ids, anchors, attention_mask, position_ids)
        if position_ids is None:
            position_ids = (
                torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
                if document_ids is None
                else document_positions(document_ids)
            )
        memory = self.remember(features, position_ids)
        size = self.config.block_size if block_size is None else block_size
        seen: dict[str, Any] = {
            "attention_mask": attention_mask,
            "document_ids": document_ids,
            "recompute_layers": recompute_layers and torch.is_grad_enabled(),
            "attention": attention,
        }

        def draft(part: Tensor, valid: Tensor | None) -> Tensor:
            return self.draft_blocks(memory, input_ids, part, valid, position_ids, embed, size, **seen)

        outputs = []
        count = max(anchors.shape[1], 1)
        step = anchor_chunk or count
        for start in range(0, count, step):
            stop = start + step
            part = anchors[:, start:stop]
            valid = None if anchor_valid is None else anchor_valid[:, start:stop]
            if recompute and step < count and torch.is_grad_enabled():
                outputs.append(checkpoint(draft, part, valid, use_reentrant=False))
            else:
                outputs.append(draft(part, valid))
        return torch.cat(outputs, dim=1)

    def remember(self, features: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of the context for every layer, computed once: L pairs of [b, kv_heads, S, head_dim]."""
        context = self.context(features)
        table = rotary_table(positions, self.config.head_dim, self.config.rope_theta, context.dtype)
        return [layer.self_attn.keys_values(context, table) for layer in self.layers]

    def draft_blocks(
        self,
        memory: list[tuple[Tensor, Tensor]],
        input_ids: Tensor,
        anchors: Tensor,
        anchor_valid: Tensor | None,
        positions: Tensor,
        embed: TokensToHidden,
        size: int,
        attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        recompute_layers: bool = False,
        attention: str = "sdpa",
    ) -> Tensor:
        """Blocks over a context that `remember` has made: [b, n, size, H]. Arguments as `forward`; `memory` holds S places, and
        what stands in it at an anchor or after it is not seen."""
        batch, count = anchors.shape
        tokens = torch.full((batch, count, size), self.config.mask_token_id, dtype=torch.long, device=input_ids.device)
        tokens[..., 0] = input_ids.gather(1, anchors)
        block = embed(tokens.flatten(1)).to(self.norm.weight.dtype)
        slots = torch.arange(size, device=input_ids.device)
        block_positions = (positions.gather(1, anchors)[..., None] + slots).flatten(1)
        table = rotary_table(block_positions, self.config.head_dim, self.config.rope_theta, block.dtype)
        seen: dict[str, Any] = {
            "anchor_valid": anchor_valid,
            "attention_mask": attention_mask,
            "document_ids": document_ids,
        }
        masks: dict[str, Tensor | BlockMask] = {}
        for kind in sorted(set(self.config.layer_types)):
            window = self.config.sliding_window if kind == "sliding_attention" else None
            if attention == "flex":
                masks[kind] = sparse_block_mask(anchors, positions, size, window=window, **seen)
            else:
                masks[kind] = block_mask(anchors, positions, size, window=window, **seen)[:, None]
        for layer, context in zip(self.layers, memory, strict=True):
            if recompute_layers:
                block = checkpoint(layer, block, context, table, masks[layer.layer_type], use_reentrant=False)
            else:
                block = layer(block, context, table, masks[layer.layer_type])
        return self.norm(block).unflatten(1, (count, size))


def _check_shapes(
    features: Tensor, input_ids: Tensor, anchors: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
) -> None:
    batch, length = input_ids.shape
    if features.shape[:2] != (batch, length):
        raise PermanentError(
            f"features for {tuple(features.shape[:2])} tokens, but input_ids are {(batch, length)}",
            remedy="Features and tokens must come from the same forward of the target.",
        )
    if anchors.ndim != 2 or anchors.shape[0] != batch:
        raise PermanentError(f"anchors of shape {tuple(anchors.shape)} for a batch of {batch}", remedy="Pass [b, n].")
    if attention_mask is not None and position_ids is None and not bool(attention_mask[:, 0].all()):
        raise PermanentError(
            "the batch is padded on the left and has no position ids",
            remedy="Pad on the right, as `Target.features` does.",
        )


@torch.no_grad()
def draft_chunks(
    drafter: Drafter,
    features: Tensor,
    tokens: Tensor | Sequence[int],
    anchors: Sequence[int],
    embed: TokensToHidden,
    lm_head: HiddenToLogits,
    *,
    anchor_chunk: int = 64,
    block_size: int | None = None,
) -> Iterator[tuple[list[int], Tensor]]:
    """Draft from the anchors of one sequence, chunk by chunk: yields (anchors of the chunk, float32 logits [c, B-1,
    V]).

    Row i, column k-1 are the logits of the token at anchor + k. `features` is [F, K*H] (or [1, F, K*H]) and may end
    before the tokens do: an anchor a needs features of the positions before it only, so F >= max(anchors).

    Raises:
        PermanentError: an anchor lies outside the tokens, or beyond the features.
    """
    features = features[None] if features.ndim == 2 else features
    ids = torch.as_tensor(tokens, dtype=torch.long, device=features.device).reshape(1, -1)
    length, known = ids.shape[1], features.shape[1]
    bad = [a for a in anchors if not 0 <= a < length or a > known]
    if bad:
        raise PermanentError(
            f"anchors {bad[:5]} for {length} tokens with features of {known}",
            remedy="An anchor is the index of a token, and every token before it needs features.",
        )
    features = F.pad(features, (0, 0, 0, max(0, length - known)))[:, :length]
    positions = torch.arange(length, device=features.device)[None]
    memory = drafter.remember(features, positions)
    size = drafter.config.block_size if block_size is None else block_size
    for start in range(0, len(anchors), anchor_chunk):
        part = list(anchors[start : start + anchor_chunk])
        # No block of the chunk sees anything after its last anchor: cut that off rather than mask it.
        end = max(part) + 1
        known_part = [(keys[:, :, :end], values[:, :, :end]) for keys, values in memory]
        at = torch.tensor([part], device=features.device)
        hidden = drafter.draft_blocks(known_part, ids[:, :end], at, None, positions[:, :end], embed, size)
        yield part, lm_head(hidden[0, :, 1:]).float()


def draft_all(
    drafter: Drafter,
    features: Tensor,
    tokens: Tensor | Sequence[int],
    anchors: Sequence[int],
    embed: TokensToHidden,
    lm_head: HiddenToLogits,
    *,
    anchor_chunk: int = 64,
    block_size: int | None = None,
) -> Tensor:
    """`draft_chunks` in one piece: float32 logits [n, B-1, V]. Holds n * (B-1) * V * 4 bytes; with a large vocabulary
    use `draft_chunks` and keep what you need of each."""
    chunks = draft_chunks(
        drafter, features, tokens, anchors, embed, lm_head, anchor_chunk=anchor_chunk, block_size=block_size
    )
    return torch.cat([logits for _, logits in chunks])


def parameter_count(config: DrafterConfig) -> int:
    """Parameters of a drafter of this shape, without building it (the 27B shape gives 1.73e9)."""
    attention = config.head_dim * (2 * config.num_attention_heads + 2 * config.num_key_value_heads) * config.hidden_size
    layer = attention + 3 * config.hidden_size * config.intermediate_size + 2 * config.hidden_size + 2 * config.head_dim
    return (
        config.num_hidden_layers * layer + math.prod((config.feature_size, config.hidden_size)) + 2 * config.hidden_size
    )
