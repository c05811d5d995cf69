"""What the config.json of a drafter says, whoever wrote it, in the fields of `DrafterConfig`. No torch, since planning reads it.

Three families of exporters agree on the tensors and differ in the config:

- z-lab's, SpecForge's and ours: flat, with `dflash_config`. A tap is the index of a target layer.
- speculators': the draft layers under `transformer_layer_config`, taps as `aux_hidden_state_layer_ids`. Those count hidden
  *states*, the embedding first, so layer k is k + 1 there (speculators 0.9.0 adds the one when it converts z-lab's).

Options that change the arithmetic in a way that is not implemented here are refused by name; their neutral values pass.
Costs one small file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dflash.base.errors import CorruptError, PermanentError
from dflash.model.taps import default_taps

FLAT, SPECULATORS = "flat", "speculators"
VERIFIER_TENSORS = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight")
"""Copies of the target's tensors that speculators may keep beside a drafter's own."""

NEUTRAL_OPTIONS: dict[str, tuple[Any, ...]] = {
    "input_embedding_scale": (None, 1, 1.0),
    "output_multiplier": (None, 1, 1.0),
    "final_logit_softcapping": (None, 0, 0.0),
    "is_causal": (None,),
    "conv_kernel_size": (None,),
    "selector_rank": (None,),
    "attention_bias": (None, False),
    "hidden_act": (None, "silu"),
    "rope_scaling": (None,),
    "sliding_window_non_causal": (None, False),
    "sample_from_anchor": (None, False),
}
NEUTRAL_ROPE: dict[str, tuple[Any, ...]] = {
    "rope_type": (None, "default"),
    "partial_rotary_factor": (None, 1, 1.0),
    "mrope_section": (None,),
}


def read_fields(directory: str | Path, num_target_layers: int | None = None) -> tuple[dict[str, Any], str]:
    """The fields of a drafter's config, and the layout they were written in (`flat` or `speculators`).

    Args:
        num_target_layers: of the target, for a config that does not say.

    Raises:
        CorruptError: config.json is absent, not JSON, or lacks a field, which is named.
        PermanentError: the drafter has options that are not implemented, or drafts from a vocabulary of its own.
    """
    file = Path(directory) / "config.json"
    try:
        content = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise CorruptError(
            "no config.json", where=str(directory), remedy="Export or fetch the drafter again."
        ) from error
    except (OSError, ValueError) as error:
        raise CorruptError(f"not JSON: {error}", where=str(file), remedy="Export or fetch it again.") from error
    if not isinstance(content, dict):
        raise CorruptError("not a JSON object", where=str(file), remedy="Export or fetch it again.")
    layout = SPECULATORS if "speculators_model_type" in content else FLAT
    try:
        values = _speculators(content, str(file)) if layout == SPECULATORS else _flat(content)
        if values.get("num_target_layers") is None and num_target_layers is not None:
            values["num_target_layers"] = num_target_layers
        _refuse_options(values, str(file))
        return _fields(values), layout
    except KeyError as error:
        raise CorruptError(f"field {error.args[0]} is missing", where=str(file)) from error
    except (TypeError, AttributeError, ValueError) as error:
        raise CorruptError(f"a field makes no sense: {error}", where=str(file)) from error


def _flat(content: dict[str, Any]) -> dict[str, Any]:
    return {**content, **(content.get("dflash_config") or {})}


def _speculators(content: dict[str, Any], where: str) -> dict[str, Any]:
    if content["speculators_model_type"] != "dflash":
        kind = content["speculators_model_type"]
        raise PermanentError(f"a drafter of kind {kind}, not dflash", where=where, remedy="Give a DFlash drafter.")
    values = {**content, **content["transformer_layer_config"]}
    if content.get("draft_vocab_size") not in (None, values["vocab_size"]):
        raise PermanentError(
            f"it drafts from a vocabulary of {content['draft_vocab_size']} tokens of its own, "
            f"the target's has {values['vocab_size']}",
            where=where,
            remedy="Only drafters of the target's own vocabulary can be judged.",
        )
    states = content["aux_hidden_state_layer_ids"]
    if states is None:
        raise KeyError("aux_hidden_state_layer_ids")
    if 0 in states:
        raise PermanentError("it reads the target's embedding, which is no layer's output", where=where)
    values["target_layer_ids"] = [state - 1 for state in states]
    return values


def _refuse_options(values: dict[str, Any], where: str) -> None:
    rope = values.get("rope_parameters") or {}
    for options, holder in ((NEUTRAL_OPTIONS, values), (NEUTRAL_ROPE, rope)):
        for name, neutral in options.items():
            if holder.get(name) not in neutral:
                raise PermanentError(f"option {name} = {holder[name]!r} is not supported", where=where)


def _fields(values: dict[str, Any]) -> dict[str, Any]:
    rope = values.get("rope_parameters") or {}
    theta = rope.get("rope_theta", values.get("rope_theta"))
    if theta is None:
        raise KeyError("rope_theta")
    layers = values["num_hidden_layers"]
    layer_types = list(values.get("layer_types") or ["full_attention"] * layers)
    taps = values.get("target_layer_ids") or default_taps(values["num_target_layers"], layers)
    return {
        "hidden_size": values["hidden_size"],
        "num_hidden_layers": layers,
        "block_size": values["block_size"],
        "vocab_size": values["vocab_size"],
        "intermediate_size": values["intermediate_size"],
        "num_attention_heads": values["num_attention_heads"],
        "num_key_value_heads": values["num_key_value_heads"],
        "head_dim": values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"],
        "num_target_layers": values["num_target_layers"],
        "target_layer_ids": list(taps),
        "mask_token_id": values["mask_token_id"],
        "layer_types": layer_types,
        "sliding_window": values.get("sliding_window") if "sliding_attention" in layer_types else None,
        "rope_theta": float(theta),
        "rms_norm_eps": values.get("rms_norm_eps", 1e-6),
    }
