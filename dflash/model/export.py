"""Drafters on disk, in the published format: `model.safetensors` and `config.json`.

What vLLM, SGLang, transformers and z-lab's client load. The embedding and the head are not in it: they are the
target's. The safetensors metadata holds the strings it is given, so that a lone file still explains itself.

Writing costs 2 bytes a parameter in bfloat16 (3.5 GB for the 27B shape). Each file appears whole, by renaming, the
weights first and config.json last; whoever must see both or none reads a manifest written after them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dflash.base.errors import ConfigError, CorruptError
from dflash.model.drafter import Drafter, DrafterConfig
from dflash.model.published import SPECULATORS, VERIFIER_TENSORS, read_fields
from dflash.model.tensor_files import save_tensors


def published_config(config: DrafterConfig, dtype: str) -> dict[str, Any]:
    """The content of config.json. Both spellings of the rotary base are written, since loaders differ in what they
    read."""
    sliding = "sliding_attention" in config.layer_types
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": dtype,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
        },
        "layer_types": list(config.layer_types),
        "sliding_window": config.sliding_window,
        "use_sliding_window": sliding,
        "max_window_layers": 0 if sliding else config.num_hidden_layers,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
        "use_cache": True,
    }


def save_drafter(
    drafter: Drafter,
    directory: str | Path,
    metadata: Mapping[str, str] | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Write `drafter` into `directory`, which is made if need be. Equal weights and metadata give equal bytes.

    Args:
        drafter: on any device.
        metadata: strings for the safetensors header.
        dtype: type to store, e.g. `torch.bfloat16` for serving; None keeps that of the weights.

    Raises:
        OSError: the disk refuses.
    """
    weights = {name: weight.detach().to("cpu", dtype) for name, weight in drafter.state_dict().items()}
    save_weights(weights, drafter.config, directory, metadata)


def save_weights(
    weights: Mapping[str, Tensor],
    config: DrafterConfig,
    directory: str | Path,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """`save_drafter` for the weights of a drafter by name, in the type they have.

    Raises:
        OSError: the disk refuses.
    """
    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    kind = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    save_tensors(weights, root / "model.safetensors", metadata)
    partial = root / "config.json.partial"
    partial.write_text(json.dumps(published_config(config, kind), indent=2) + "\n")
    partial.replace(root / "config.json")


def load_config(directory: str | Path, num_target_layers: int | None = None) -> DrafterConfig:
    """The config of an exported directory, ours or a published one; see `published.read_fields`.

    Raises:
        CorruptError: config.json is absent, not JSON, or lacks or misstates a field, which is named.
        PermanentError: the drafter has options that are not implemented (DFlash 2, scaled embeddings, capped logits).
    """
    try:
        fields, _ = read_fields(directory, num_target_layers)
        return DrafterConfig.from_dict(fields)
    except (TypeError, ConfigError) as error:
        where = str(Path(directory) / "config.json")
        raise CorruptError(f"a field makes no sense: {error}", where=where) from error


def load_drafter(
    directory: str | Path, *, dtype: torch.dtype | None = None, num_target_layers: int | None = None
) -> Drafter:
    """Load an exported directory, strictly: every tensor present, none left over, every shape right.

    Args:
        directory: with config.json and one or more *.safetensors; ours, z-lab's, SpecForge's or speculators'.
        dtype: type to load into; None keeps the stored one.
        num_target_layers: of the target, for a layout whose config does not say.

    Raises:
        CorruptError: names the tensor or field that is missing, unknown or of another shape.
        PermanentError: the drafter has options that are not implemented.
    """
    root = Path(directory)
    drafter = Drafter(load_config(root, num_target_layers), seed=None)
    state = _read_tensors(root)
    if read_fields(root, num_target_layers)[1] == SPECULATORS:
        # Copies of the target's own tensors, which are passed in here.
        state = {name: tensor for name, tensor in state.items() if name not in VERIFIER_TENSORS}
    expected = drafter.state_dict()
    for what, names in (("is missing", set(expected) - set(state)), ("is not a drafter's", set(state) - set(expected))):
        if names:
            raise CorruptError(f"tensor {min(names)} {what} ({len(names)} such)", where=str(root))
    for name, tensor in expected.items():
        if state[name].shape != tensor.shape:
            raise CorruptError(
                f"tensor {name} has shape {list(state[name].shape)}, but the config asks for {list(tensor.shape)}",
                where=str(root),
            )
    stored = next(iter(state.values())).dtype
    drafter.to(dtype or stored)
    drafter.load_state_dict(state)
    return drafter


def _read_tensors(root: Path) -> dict[str, torch.Tensor]:
    files = sorted(root.glob("*.safetensors"))
    if not files:
        raise CorruptError("no *.safetensors", where=str(root), remedy="Export or fetch the drafter again.")
    state: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as stream:
                state.update({name: stream.get_tensor(name) for name in stream.keys()})  # noqa: SIM118
        except SafetensorError as error:
            raise CorruptError(f"unreadable: {error}", where=str(file), remedy="Export or fetch it again.") from error
    return state


def read_metadata(file: str | Path) -> dict[str, str]:
    """The strings in the header of a safetensors file; reads no tensor.

    Raises:
        CorruptError: the file is not safetensors.
    """
    try:
        with safe_open(file, framework="pt") as stream:
            return dict(stream.metadata() or {})
    except SafetensorError as error:
        raise CorruptError(f"unreadable: {error}", where=str(file)) from error
