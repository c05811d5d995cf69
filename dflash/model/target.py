"""The target: the large model whose tokens are drafted, whose hidden states feed the drafter, whose continuations are
the truth.

Dense Qwen3 and hybrid Qwen3.5 (Gated DeltaNet) are run with transformers, from a directory, or small and random from a
seed for tests and for trying the road. All weights are frozen.

Features stop after the last tap: no later layer, no final norm and no logits are computed. With taps up to layer 61 of
64 that saves 3% of the layers and, at a vocabulary of 248320, 2 * H * V operations a token. They take b * S * K * H
numbers: 51 kB a token at 5 taps of 5120 in bfloat16.

Batches come padded on the right for features and (inside `generate`, with mask and positions) on the left for decoding,
where every row must end at the same place. Padding never reaches a result: a batch gives what its rows give one by one. On a
GPU whose kernels keep documents apart (`kernels.py`) nothing is computed on padding: the rows of a batch go through the layers
packed into one, each with positions from 0, and come back in their places. Which rows make a batch does not depend on it.

The layers may be spread over several devices (`sharding.py`); features and logits come back on the first.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dflash.base.errors import ConfigError, CorruptError, PermanentError
from dflash.model import draws
from dflash.model.kernels import (
    RECURRENT,
    BoundKernels,
    attending_by_document,
    bind_document_convolution,
    bound_kernels,
    documents_stay_apart,
    force_reference,
    packing_arguments,
    refuse_packing,
    release_reference,
    require,
)
from dflash.model.sharding import Devices, spread
from dflash.model.taps import check_taps
from dflash.model.transfer import on_device

MODEL_TYPES = ("qwen3", "qwen3_5", "qwen3_5_text")
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}

PAD, END, START, MASK = "<|endoftext|>", "<|im_end|>", "<|im_start|>", "<|mask|>"
BYTE_VOCABULARY = 260
"""Tokens of the byte-level tokenizer: 256 bytes, then pad (256), end (257), start (258), mask (259)."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class TargetFacts:
    """What the rest of the project needs to know of a target.

    Attributes:
        layer_types: transformers' name for each layer (`full_attention`, `linear_attention`, ...).
        eos_ids: tokens that end a completion, from the generation config, the config and the tokenizer.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    layer_types: tuple[str, ...]
    eos_ids: tuple[int, ...]
    pad_id: int
    dtype: str

    @property
    def hybrid(self) -> bool:
        """Whether some layer is a linear-attention layer with a recurrent state."""
        return "linear_attention" in self.layer_types


class Target:
    """A frozen target model. `model` is transformers' causal language model, `tokenizer` may be None in tests.

    Attributes:
        facts: sizes, stop tokens, pad token.
        kernels: what is bound for its linear-attention layers.
        device: where it takes ids and gives features and logits; of several devices the first.
        embed: the embedding module, ids [...] -> [..., H].
        lm_head: the head, [..., H] -> logits [..., V].
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, *, kernels: str = "auto", form: str = "chunked") -> None:
        self.model: Any = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.facts = _facts(model, tokenizer)
        self.embed: nn.Module = model.get_input_embeddings()
        self.lm_head: nn.Module = model.get_output_embeddings()
        self.device: torch.device = next(self.embed.parameters()).device
        if self.device.type == "cpu" or kernels in ("torch", RECURRENT):
            force_reference(model, "recurrent" if kernels == RECURRENT else form)
        else:
            if kernels == "fla":
                release_reference(model)
            bind_document_convolution(model)
        self.kernels: BoundKernels = bound_kernels(model)
        require(self.kernels, kernels)
        self.kernels = dataclasses.replace(self.kernels, packed=self.device.type != "cpu" and self.can_pack())
        # transformers renamed the argument in 5.2x; both names work in between.
        named = inspect.signature(self.model.forward).parameters
        self._cache_name = "cache" if "cache" in named else "past_key_values"

    def can_pack(self) -> bool:
        """Whether documents that share a row stay apart, in attention and in linear layers."""
        backbone = self.model.model
        # How they attend is said in the config: it must be one, or some layers would not be told.
        told = all(
            layer.self_attn.config is backbone.config for layer in backbone.layers if hasattr(layer, "self_attn")
        )
        return self._attends_plainly() and told and documents_stay_apart(self.model, self.kernels)

    def _attends_plainly(self) -> bool:
        """Whether no layer has a window, so that without padding none needs a mask."""
        return set(self.facts.layer_types) <= {"full_attention", "linear_attention"}

    @torch.no_grad()
    def features(self, input_ids: Tensor, attention_mask: Tensor | None, taps: Sequence[int]) -> Tensor:
        """Outputs of the tapped layers, concatenated in the order of `taps`: [b, S, K*H], zero on padding.

        Layer id k is the output of layer k, before any final norm: `hidden_states[k + 1]` of transformers, but for the
        last layer, whose entry there is already normed.

        Args:
            input_ids: [b, S], padded on the right.
            attention_mask: [b, S], ones on tokens and zeros on padding; None when no row is padded on the left. Given on the
                CPU, nothing of it has to be read back from the device, and the host runs ahead.
            taps: layer ids from 0, each once.

        Raises:
            PermanentError: a row is padded on the left.
            ConfigError: taps repeated or outside the target.
        """
        taps = list(taps)
        check_taps(taps, self.facts.num_layers, where="taps")
        refuse_left_padding(input_ids, attention_mask, self.facts.pad_id)
        trunk = self._trunk(max(taps) + 1)
        if attention_mask is not None and bool(attention_mask.all()):
            attention_mask = None
        if attention_mask is not None and self.kernels.packed:
            return self._packed_features(trunk, input_ids, attention_mask.bool(), taps)
        kept = None if attention_mask is None else on_device(attention_mask, input_ids.device)
        masks: Any = kept
        if masks is None and self.kernels.attention == "sdpa" and self._attends_plainly():
            masks = dict.fromkeys(self.facts.layer_types)  # transformers would look for packed rows, on the device
        with _layer_outputs(trunk.layers, taps) as outputs:
            trunk(input_ids=input_ids, attention_mask=masks, use_cache=False)
        features = self._together([outputs[k] for k in taps])
        return features if kept is None else features * kept[..., None].to(features)

    def _packed_features(self, trunk: Any, input_ids: Tensor, kept: Tensor, taps: Sequence[int]) -> Tensor:
        """`features` of the tokens that are kept ([b, S], no holes) in one row without padding, put back in their places.

        Raises:
            PermanentError: the bound kernels would let documents run into each other.
        """
        refuse_packing(self.kernels)
        lengths = kept.sum(dim=1).tolist()
        places = kept.flatten().nonzero().flatten()  # where the mask is: on the CPU nothing is waited for
        positions = on_device((places % input_ids.shape[1])[None], input_ids.device)
        places = on_device(places, input_ids.device)
        with attending_by_document(trunk.config), _layer_outputs(trunk.layers, taps) as outputs:
            trunk(
                input_ids=input_ids.flatten()[places][None],
                position_ids=positions,
                attention_mask=dict.fromkeys(self.facts.layer_types),  # no mask for any kind of layer
                use_cache=False,
                **packing_arguments(lengths, input_ids.device),
            )
        packed = self._together([outputs[k][0] for k in taps])
        features = packed.new_zeros(kept.numel(), packed.shape[-1])
        return features.index_copy_(0, places, packed).view(*kept.shape, -1)

    def _together(self, outputs: Sequence[Tensor]) -> Tensor:
        """Outputs of layers, side by side on the target's device."""
        return torch.cat([output.to(self.device) for output in outputs], dim=-1)

    def _trunk(self, count: int) -> Any:
        """The backbone cut after `count` layers, sharing every weight, without the final norm."""
        backbone = self.model.model
        trunk = copy.copy(backbone)
        trunk._modules = dict(backbone._modules)
        trunk.layers = nn.ModuleList(backbone.layers[:count])
        trunk.norm = nn.Identity()
        return trunk

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        seeds: Sequence[int] | None = None,
        stop_ids: Sequence[int] | None = None,
    ) -> list[tuple[list[int], str]]:
        """Continue each prompt, all in one batch: [(new token ids, `stop` or `length`)] in the order of the prompts.

        The ids include the stop token. Greedy at temperature 0; otherwise row i draws from a generator of `seeds[i]`
        alone, one number a token, so its batch mates do not change its numbers. Rows that have ended leave the batch.

        Args:
            prompts: token ids, none empty.
            max_new_tokens: limit a row, at least 1.
            temperature: 0 for greedy.
            seeds: one a prompt, required when sampling.
            stop_ids: tokens that end a row; None takes the target's own.

        Raises:
            ConfigError: an empty prompt, a limit under 1, a negative temperature, or sampling without seeds.
        """
        _check_request(prompts, max_new_tokens, temperature, seeds)
        if not prompts:
            return []
        stops = set(self.facts.eos_ids if stop_ids is None else stop_ids)
        draws = _uniform_numbers(seeds) if temperature > 0 and seeds is not None else None
        done: list[list[int]] = [[] for _ in prompts]
        rows = list(range(len(prompts)))
        ids, mask, positions = _pad_left(prompts, self.facts.pad_id, self.device)
        padded = bool((mask == 0).any())
        cache = DynamicCache(config=self.model.config)
        for step in range(max_new_tokens):
            logits = self._next_logits(ids, mask if padded else None, positions, cache)
            if draws is None:
                chosen = logits.argmax(dim=-1).tolist()
            else:
                numbers = torch.tensor([next(draws[row]) for row in rows], dtype=torch.float64, device=self.device)
                chosen = _pick(logits, temperature, numbers).tolist()
            for row, token in zip(rows, chosen, strict=True):
                done[row].append(token)
            keep = [i for i, token in enumerate(chosen) if token not in stops]
            if not keep or step + 1 == max_new_tokens:
                break
            if len(keep) < len(rows):
                rows = [rows[i] for i in keep]
                index = torch.tensor(keep, device=self.device)
                cache.reorder_cache(cast(torch.LongTensor, index))
                mask, positions = mask[index], positions[index]
            ids = torch.tensor([[chosen[i]] for i in keep], device=self.device)
            positions = positions[:, -1:] + 1
            mask = torch.cat([mask, mask.new_ones(len(keep), 1)], dim=1)
        return [(tokens, "stop" if tokens[-1] in stops else "length") for tokens in done]

    @torch.no_grad()
    def read(
        self,
        ids: Tensor,
        positions: Tensor,
        cache: DynamicCache,
        taps: Sequence[int],
        *,
        mask: Tensor | None = None,
        last_only: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Reads more of one text; the cache moves on.

        Args:
            ids, positions: [1, n] the tokens, and where each stands in the text.
            cache: what was read before.
            taps: layers whose outputs are wanted; none gives features of width 0.
            mask: bool [1, 1, n, past + n], what each token sees; None: all that came before it. Only for targets whose
                layers are all of full attention.
            last_only: logits of the last token alone.

        Returns:
            logits [n, V] (or [1, V]) and features [n, K*H].
        """
        with _layer_outputs(self.model.model.layers, taps) as outputs:
            logits = self._logits(ids, mask, positions, cache, 1 if last_only else 0)
        if not taps:
            return logits[0], logits.new_empty(ids.shape[1], 0)
        return logits[0], self._together([outputs[k] for k in taps])[0]

    def _next_logits(self, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: DynamicCache) -> Tensor:
        """Logits [b, V] of the token after the last of `ids`; the cache moves on."""
        return self._logits(ids, mask, positions, cache, 1)[:, -1]

    def _logits(self, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: DynamicCache, keep: int) -> Tensor:
        """Logits [b, keep, V] after the last `keep` tokens (0: after all of them)."""
        output = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=keep,
            **{self._cache_name: cache},
        )
        logits: Tensor = output.logits
        return logits


@contextmanager
def _layer_outputs(layers: nn.ModuleList, taps: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Collect the outputs of the tapped layers while the context is open."""
    outputs: dict[int, Tensor] = {}

    def keep(k: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            outputs[k] = output[0] if isinstance(output, tuple) else output

        return hook

    with ExitStack() as stack:
        for k in taps:
            stack.callback(layers[k].register_forward_hook(keep(k)).remove)
        yield outputs


def refuse_left_padding(input_ids: Tensor, attention_mask: Tensor | None, pad_id: int) -> None:
    """Features are computed on right-padded batches only: with padding on the left, and no mask, they are off by as
    much as 3.0 on a hybrid target, since padding runs through the recurrent state.

    Raises:
        PermanentError: a row begins with the pad token and there is no mask, or the mask has a hole or begins with
            zero.
    """
    if attention_mask is None:
        bad = (input_ids[:, 0] == pad_id).nonzero().flatten().tolist()
        what = "begin with the pad token and there is no attention mask"
    else:
        kept = attention_mask.bool()
        bad = (~kept[:, 0] | (kept[:, 1:] & ~kept[:, :-1]).any(dim=1)).nonzero().flatten().tolist()
        what = "are padded on the left, by their attention mask"
    if bad:
        raise PermanentError(f"rows {bad[:8]} of the batch {what}", remedy="Pad on the right.")


def select_taps(features: Tensor, stored: Sequence[int], wanted: Sequence[int]) -> Tensor:
    """The features [..., K*H] of some of the stored taps, in the order of `wanted`.

    Raises:
        PermanentError: a wanted tap is not among the stored ones.
    """
    if list(stored) == list(wanted):
        return features
    absent = [tap for tap in wanted if tap not in stored]
    if absent:
        raise PermanentError(
            f"features of layers {list(stored)}, but taps {absent} are asked for",
            remedy="Run `dflash run`, which makes the features that are needed.",
        )
    parts = features.chunk(len(stored), dim=-1)
    return torch.cat([parts[list(stored).index(tap)] for tap in wanted], dim=-1)


def check_features(
    features: Tensor, n_tokens: int | Sequence[int], batch_name: str, *, taps: int = 1, width: int | None = None
) -> None:
    """Refuse features that no healthy target gives, before they train or judge anything.

    Args:
        features: [b, S, K*H] or [S, K*H].
        n_tokens: tokens of every row, or one count a row (S must be the largest).
        batch_name: named in the error.
        taps: K, so that a single dead tap is seen.
        width: K*H when known.

    Raises:
        PermanentError: wrong length or width, NaN or infinity, a token whose tap is all zero, or a row whose values are
            all the same or whose tokens are all the same.
    """
    rows = features[None] if features.ndim == 2 else features
    counts = [n_tokens] * rows.shape[0] if isinstance(n_tokens, int) else list(n_tokens)
    check_feature_shape(rows, counts, batch_name, taps=taps, width=width)
    refuse_faults(feature_faults(rows, counts, taps).tolist(), batch_name)


def check_feature_shape(
    rows: Tensor, counts: Sequence[int], batch_name: str, *, taps: int = 1, width: int | None = None
) -> None:
    """The part of `check_features` that needs no value of the features.

    Raises:
        PermanentError: wrong length or width.
    """

    def refuse(what: str) -> None:
        raise PermanentError(
            f"features {what}", where=f"batch {batch_name}", remedy="Check the target's weights, kernels and batch."
        )

    if len(counts) != rows.shape[0] or max(counts, default=0) != rows.shape[1]:
        refuse(f"of shape {tuple(rows.shape)} do not fit {len(counts)} rows of {max(counts, default=0)} tokens")
    if rows.shape[-1] % taps or (width is not None and rows.shape[-1] != width):
        refuse(f"have width {rows.shape[-1]}, not {width if width is not None else f'a multiple of {taps}'}")


FAULTS = ("hold NaN or infinity", "of row {row} are zero for a whole token", "of row {row} are constant")
"""What `feature_faults` looks for, in the order of its rows."""


def feature_faults(features: Tensor, counts: Sequence[int], taps: int) -> Tensor:
    """Which rows no healthy target gives, without waiting for the device: bool [3, b], by `FAULTS`.

    Args:
        features: [b, S, K*H], right-padded.
        counts: tokens of every row.
        taps: K.
    """
    length = features.shape[1]
    kept = torch.arange(length, device=features.device) < on_device(torch.tensor(counts), features.device)[:, None]
    low, high = torch.aminmax(features.unflatten(-1, (taps, -1)), dim=-1)  # [b, S, K]; NaN stays NaN
    finite = (low.isfinite() & high.isfinite()).all(dim=-1).all(dim=-1)
    zero = (((low == 0) & (high == 0)).any(dim=-1) & kept).any(dim=-1)
    flat = ((low.amin(dim=-1) == high.amax(dim=-1)) | ~kept).all(dim=-1)
    same = ((features == features[:, :1]).all(dim=-1) | ~kept).all(dim=-1) & (kept.sum(dim=-1) > 1)
    return torch.stack([~finite, zero, flat | same])


def refuse_faults(told: Sequence[Sequence[float]], batch_name: str) -> None:
    """Refuses what `feature_faults` found, read back; the row with the first fault is named.

    Raises:
        PermanentError: as `check_features`.
    """
    infinite, *others = told
    found = FAULTS[0] if any(infinite) else ""
    for row in range(len(infinite)):
        for words, flags in zip(FAULTS[1:], others, strict=True):
            if not found and flags[row]:
                found = words.format(row=row)
    if found:
        raise PermanentError(
            f"features {found}", where=f"batch {batch_name}", remedy="Check the target's weights, kernels and batch."
        )


# Loading ----------------------------------------------------------------------------------------------------


def load_target(
    source: str | Path | Mapping[str, Any],
    dtype: str = "float32",
    device: Devices = "cpu",
    *,
    kernels: str = "auto",
    form: str = "chunked",
) -> Target:
    """Load a target from a directory, or make a random one from a spec (see `random_target`).

    Args:
        source: directory with a transformers checkpoint, or a mapping.
        dtype: type to compute in, whatever the type on disk: `float32`, `bfloat16`, `float16` or `float64`.
        device: `cpu`, `cuda`, `cuda:1`, ..., or several to spread the layers over.
        kernels: `auto`, `fla`, `torch` or `torch_recurrent`; what must be bound. On a CPU the reference always is.
        form: `chunked` or `recurrent` form of the reference.

    Raises:
        ConfigError: no such directory, an unknown dtype or device, more devices than layers, or a spec that makes no sense.
        PermanentError: a model type that is not supported, or kernels other than asked for.
        CorruptError: the checkpoint lacks tensors, or a file is damaged.
    """
    if isinstance(source, Mapping):
        return random_target(source, dtype, device, kernels=kernels, form=form)
    path = Path(source)
    _model_type(path)
    with _damage_named(path):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=_dtype(dtype), attn_implementation="sdpa", output_loading_info=True, local_files_only=True
        )
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise CorruptError(
            f"the checkpoint lacks {len(missing)} tensors, {missing[0]} first",
            where=str(path),
            remedy="Fetch it again.",
        )
    return Target(_place(model, dtype, device), load_tokenizer(path), kernels=kernels, form=form)


def load_ends(source: str | Path | Mapping[str, Any], dtype: str = "float32", device: str = "cpu") -> Target:
    """Embedding, head and tokenizer of a target and none of its layers: what a drafter needs when features come from
    elsewhere. Of a directory only those tensors are read (2 * V * H numbers).

    Raises:
        ConfigError, CorruptError, PermanentError: as `load_target`.
    """
    if isinstance(source, Mapping):
        # Head and embedding are drawn before any layer, so a model without layers has the same.
        return random_target({**source, "num_hidden_layers": 0}, dtype, device)
    path = Path(source)
    _model_type(path)
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    text = config.get_text_config()
    text.num_hidden_layers, text.layer_types = 0, []
    with _damage_named(path):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=_dtype(dtype),
            attn_implementation="sdpa",
            output_loading_info=True,
            local_files_only=True,
        )
    model, info = loaded
    if info["missing_keys"]:
        raise CorruptError(
            f"the checkpoint lacks {min(info['missing_keys'])}", where=str(path), remedy="Fetch it again."
        )
    return Target(_place(model, dtype, device), load_tokenizer(path))


def load_tokenizer(source: str | Path | Mapping[str, Any]) -> Any:
    """The tokenizer of a target without its weights; the byte-level one for a random target."""
    if isinstance(source, Mapping):
        return byte_tokenizer()
    with _damage_named(Path(source)):
        return AutoTokenizer.from_pretrained(source, local_files_only=True)


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """Says in which directory a file could not be read, whatever library found out.

    Raises:
        CorruptError: a file is missing, truncated or not what its name says.
    """
    try:
        yield
    except (SafetensorError, OSError, ValueError) as error:
        what = str(error).strip().partition("\n")[0]
        raise CorruptError(f"not a whole checkpoint: {what}", where=str(path), remedy="Fetch it again.") from error


def random_target(
    spec: Mapping[str, Any],
    dtype: str = "float32",
    device: Devices = "cpu",
    *,
    kernels: str = "auto",
    form: str = "chunked",
) -> Target:
    """A target with random weights, the same on every machine, and the byte-level tokenizer. One whose vocabulary and width
    make it large (`draws.LARGE`) is built and drawn on its device: 27 B weights in seconds, without passing through the host. One
    for several devices is built on the host first.

    Args:
        spec: `model_type` (`qwen3` or `qwen3_5_text`), `seed`, and any field of that type's transformers config;
            `vocab_size` is 260 when left out and never less.

    Raises:
        ConfigError: an unknown model type or field, or a vocabulary too small for the tokenizer.
    """
    fields = {"vocab_size": BYTE_VOCABULARY, "tie_word_embeddings": False, **spec}
    seed = fields.pop("seed", 0)
    if fields["vocab_size"] < BYTE_VOCABULARY:
        raise ConfigError(
            f"vocab_size = {fields['vocab_size']} is too small for the byte-level tokenizer",
            where="random target",
            remedy=f"Give at least {BYTE_VOCABULARY}.",
        )
    tokenizer = byte_tokenizer()
    fields.update(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    if is_large(fields):
        model = _place(_empty_model(fields, dtype, device if isinstance(device, str) else "cpu"), dtype, device)
        draw_weights(model, seed, by_counter=True)
    else:
        model = _empty_model(fields)
        draw_weights(model, seed)
        model = _place(model, dtype, device)
    return Target(model, tokenizer, kernels=kernels, form=form)


def is_large(fields: Mapping[str, Any]) -> bool:
    """Whether a random target of these fields is drawn by counter: by its embedding, which every cut of it has."""
    return int(fields["vocab_size"]) * int(fields.get("hidden_size", 4096)) > draws.LARGE


def target_from_state(
    fields: Mapping[str, Any], state: Mapping[str, Tensor], dtype: str = "float32", device: str = "cpu"
) -> Target:
    """A target without a tokenizer from config fields and a complete state dict, as in golden files.

    Raises:
        ConfigError: an unknown model type or field.
        CorruptError: tensors missing or left over.
    """
    model = _empty_model(dict(fields))
    found = model.load_state_dict(dict(state), strict=False)
    if found.missing_keys or found.unexpected_keys:
        raise CorruptError(f"target state with missing {found.missing_keys} and unknown {found.unexpected_keys}")
    return Target(_place(model, dtype, device), None)


def _empty_model(fields: dict[str, Any], dtype: str = "float32", device: str = "cpu") -> Any:
    """A model of the given config, made on `device` in `dtype`, whose weights are transformers' own initial ones; the global
    generators are restored."""
    classes = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "qwen3_5_text": (Qwen3_5TextConfig, Qwen3_5ForCausalLM),
    }
    model_type = fields.pop("model_type", None)
    if model_type not in classes:
        raise ConfigError(f"model_type = {model_type!r} cannot be built", remedy=f"Choose one of {sorted(classes)}.")
    config_class, model_class = classes[model_type]
    known = set(config_class().to_dict()) | {"rope_theta", "partial_rotary_factor", "full_attention_interval"}
    unknown = sorted(set(fields) - known)
    if unknown:
        raise ConfigError(f"{model_type} has no config fields {unknown}", where="target")
    config = config_class(**fields, attn_implementation="sdpa")
    where = torch.device(device)
    standard = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[where] if where.type == "cuda" else []), where:
        torch.set_default_dtype(_dtype(dtype))
        try:
            model = model_class(config)
        finally:
            torch.set_default_dtype(standard)
    return model


@torch.no_grad()
def draw_weights(model: nn.Module, seed: int, *, by_counter: bool = False) -> None:
    """Draw the weights of a Qwen3 or Qwen3.5 model from `seed`, in the order of their names.

    With `by_counter` matrices come from `draws.py`, else all comes from one sequence of torch's generator.

    Matrices are N(0, 1/fan_in) and the embedding N(0, 1), so that a tiny random target writes varied text; norms keep
    their neutral value. The decay of the delta rule is slow enough for its state to matter.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, weight in sorted(model.named_parameters()):
        if name.endswith("A_log"):
            weight.copy_(torch.empty(weight.shape).uniform_(0.05, 1.0, generator=generator).log())
        elif weight.ndim > 1:
            std = 1.0 if "embed_tokens" in name else weight[0].numel() ** -0.5
            if by_counter:
                draws.draw_normal(weight, name, seed, std)
                continue
            weight.copy_(torch.empty(weight.shape).normal_(0.0, std, generator=generator))


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer without merges: byte i is token i; then pad 256, end of turn 257, start of turn 258, mask 259.

    Any text goes in and comes out unchanged. The chat template is ChatML with a generation prompt.
    """
    alphabet = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (PAD, END, START, MASK)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        mask_token=MASK,
        additional_special_tokens=[START],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's alphabet)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _place(model: Any, dtype: str, device: Devices) -> Any:
    """Move the model to its device or devices and its weights to the type, whatever its config says of types.

    Buffers keep theirs: `Module.to(bfloat16)` would round the rotary frequencies, and positions with them.
    """
    if isinstance(device, str):
        model.to(device)
    else:
        spread(model, device)
    for weight in model.parameters():
        weight.data = weight.data.to(_dtype(dtype))
    return model


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} is unknown", remedy=f"Choose one of {sorted(DTYPES)}.")
    return DTYPES[name]


def _model_type(path: Path) -> str:
    """The model type that the directory's config names, if it is one that is supported."""
    file = path / "config.json"
    if not file.is_file():
        raise ConfigError("no config.json", where=str(path), remedy="Give a directory with a transformers checkpoint.")
    try:
        model_type = json.loads(file.read_text()).get("model_type")
    except ValueError as error:
        raise CorruptError(f"not JSON: {error}", where=str(file), remedy="Fetch the checkpoint again.") from error
    if model_type not in MODEL_TYPES:
        raise PermanentError(
            f"model_type {model_type!r} is not supported", where=str(file), remedy=f"Supported: {list(MODEL_TYPES)}."
        )
    return str(model_type)


def _facts(model: Any, tokenizer: Any) -> TargetFacts:
    config = model.config.get_text_config()
    ends: list[int] = []
    for holder in (getattr(model, "generation_config", None), config, tokenizer):
        ids = getattr(holder, "eos_token_id", None)
        ends.extend([ids] if isinstance(ids, int) else ids or [])
    pads = [getattr(holder, "pad_token_id", None) for holder in (tokenizer, config)]
    known = [pad for pad in [*pads, *ends, 0] if pad is not None]
    return TargetFacts(
        model_type=config.model_type,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        layer_types=tuple(config.layer_types),
        eos_ids=tuple(dict.fromkeys(ends)),
        pad_id=known[0],
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
    )


# Decoding ----------------------------------------------------------------------------------------------------


def _check_request(
    prompts: Sequence[Sequence[int]], max_new_tokens: int, temperature: float, seeds: Sequence[int] | None
) -> None:
    empty = [i for i, prompt in enumerate(prompts) if not len(prompt)]
    if empty:
        raise ConfigError(f"prompts {empty[:8]} have no tokens", where="generate")
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens = {max_new_tokens} must be at least 1", where="generate")
    if temperature < 0:
        raise ConfigError(f"temperature = {temperature} must not be negative", where="generate")
    if temperature > 0 and (seeds is None or len(seeds) != len(prompts)):
        raise ConfigError("sampling needs one seed a prompt", where="generate")


def _pad_left(prompts: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, mask and positions [b, S] with every prompt ending in the last column; positions of padding are 0."""
    length = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[pad_id] * (length - len(p)) + list(p) for p in prompts], device=device)
    mask = torch.tensor([[0] * (length - len(p)) + [1] * len(p) for p in prompts], device=device)
    return ids, mask, (mask.cumsum(dim=1) - 1).clamp(min=0)


def _uniform_numbers(seeds: Sequence[int]) -> list[Iterator[float]]:
    """For each seed its own endless stream of numbers in [0, 1), the same on every machine."""

    def stream(seed: int) -> Iterator[float]:
        source = np.random.Philox(key=seed % 2**128)
        while True:
            yield (int(source.random_raw()) >> 11) * 2.0**-53

    return [stream(int(seed)) for seed in seeds]


def _pick(logits: Tensor, temperature: float, numbers: Tensor) -> Tensor:
    """Sample tokens [b] from logits [b, V]: the token at which the cumulative probability passes the row's number."""
    steps = torch.softmax(logits.double() / temperature, dim=-1).cumsum(dim=-1)
    chosen = torch.searchsorted(steps, (numbers[:, None] * steps[:, -1:]), right=True)[:, 0]
    return chosen.clamp(max=logits.shape[-1] - 1)
