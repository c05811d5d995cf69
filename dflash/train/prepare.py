"""What a training is made of: its mask token, the drafter's shape, the target it learns from and the tokens it reads.

Everything here refuses what cannot work before the first step. Costs the target's weights in compute precision (a drafter
of a rank of its own: embedding and head only) and one read of the dataset.
"""

from __future__ import annotations

from pathlib import Path

from dflash.base.errors import ConfigError, PermanentError
from dflash.data.batches import Samples
from dflash.model.drafter import DrafterConfig
from dflash.model.identity import target_source
from dflash.model.taps import default_taps
from dflash.model.target import Target, load_ends, load_target
from dflash.train.train_params import TrainParams


def mask_token(params: TrainParams) -> int:
    """The token that stands in the empty slots of a block.

    Raises:
        ConfigError: neither the config nor the target names one.
    """
    token = params.mask_token_id if params.mask_token_id is not None else params.target.mask_token_id
    if token is None:
        raise ConfigError(
            "the target has no mask token", where="train.mask_token_id", remedy="Name a token that no text holds."
        )
    return token


def drafter_config(params: TrainParams) -> DrafterConfig:
    """The drafter's shape, with what was left out filled in from the target.

    Raises:
        ConfigError: a shape that makes no sense; names the field.
    """
    target = params.target
    heads = params.num_attention_heads or target.hidden_size // params.head_dim
    taps = params.target_layer_ids or default_taps(target.num_layers, params.num_draft_layers)
    return DrafterConfig(
        hidden_size=target.hidden_size,
        num_hidden_layers=params.num_draft_layers,
        block_size=params.block_size,
        vocab_size=target.vocab_size,
        intermediate_size=params.intermediate_size or 3 * target.hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=params.num_key_value_heads or heads,
        head_dim=params.head_dim,
        num_target_layers=target.num_layers,
        target_layer_ids=tuple(taps),
        mask_token_id=mask_token(params),
        layer_types=tuple(params.layer_types or ["full_attention"] * params.num_draft_layers),
        sliding_window=params.sliding_window,
        rope_theta=params.rope_theta,
        rms_norm_eps=params.rms_norm_eps,
    )


def load_checked_target(params: TrainParams, path: Path | None, device: str) -> Target:
    """The target that the key names, on `device`, running the kernels that were asked for.

    Raises:
        PermanentError: it is not there, has another digest, other sizes, or other kernels are bound.
    """
    identity = params.target
    source = target_source(identity, path)
    target = load_target(source, params.dtype, device, kernels=params.kernels)
    facts = target.facts
    for name, found_size, wanted in (
        ("vocab_size", facts.vocab_size, identity.vocab_size),
        ("hidden_size", facts.hidden_size, identity.hidden_size),
        ("num_layers", facts.num_layers, identity.num_layers),
    ):
        if found_size != wanted:
            raise PermanentError(
                f"the loaded target has {name} {found_size}, the recorded one {wanted}", where="target"
            )
    return target


def load_target_ends(params: TrainParams, path: Path | None, device: str) -> Target:
    """Embedding and head of the target that the key names, for a drafter whose features come from another process.

    Raises:
        PermanentError: it is not there, has another digest or other sizes.
    """
    identity = params.target
    ends = load_ends(target_source(identity, path), params.dtype, device)
    found = (ends.facts.vocab_size, ends.facts.hidden_size)
    if found != (identity.vocab_size, identity.hidden_size):
        raise PermanentError(
            f"the loaded target has vocab_size and hidden_size {found}, "
            f"the recorded one {(identity.vocab_size, identity.hidden_size)}",
            where="target",
        )
    return ends


def check_tokens(samples: Samples, vocab_size: int, mask_token_id: int) -> None:
    """Refuses a dataset that this drafter cannot learn from. One read of the file (480 MB/s).

    Raises:
        PermanentError: no sample, no trainable token, a token outside the vocabulary, or the mask token; names the sample.
    """
    where = str(samples.path)
    if len(samples) == 0:
        raise PermanentError("the dataset has no training sample", where=where, remedy="Look at the dataset's ledger.")
    if not bool((samples.lengths - samples.prompt_lengths >= 2).any()):
        raise PermanentError("no sample has two tokens to learn from; the loss mask is all zero", where=where)
    for row in range(len(samples)):
        tokens = samples.tokens(row)
        outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
        if len(outside):
            raise PermanentError(
                f"sample {samples.ids[row]} holds token {outside[0]}; the target's vocabulary has {vocab_size}",
                where=where,
            )
        if (tokens == mask_token_id).any():
            raise PermanentError(
                f"sample {samples.ids[row]} holds the mask token {mask_token_id}",
                where=where,
                remedy="Choose a train.mask_token_id that no text holds.",
            )
