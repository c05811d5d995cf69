"""A drafter written as a given server or client loads it. Costs what `export.py` does; training does not depend on it."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from dflash.base.errors import ConfigError
from dflash.model.drafter import DrafterConfig
from dflash.model.export import load_drafter, read_metadata, save_drafter

CLIENTS = ("vllm", "sglang", "transformers", "zlab")
SERVERS = ("vllm", "sglang")


def find_drafter(path: str | Path) -> Path:
    """The folder of the drafter in a checkpoint folder, or the folder itself.

    Raises:
        ConfigError: there is no drafter.
    """
    root = Path(path)
    for folder in (root / "drafter", root):
        if (folder / "config.json").is_file():
            return folder
    raise ConfigError(
        "no drafter here",
        where=str(root),
        remedy="Give a checkpoint's folder, or one with config.json and safetensors.",
    )


def export_for(
    client: str, source: str | Path, destination: str | Path, *, num_target_layers: int | None = None
) -> list[str]:
    """Write a drafter, whatever layout it came in, as a client loads it; returns what its reader must know, as sentences.

    All clients read the published layout; where they differ:

    - a server gets bfloat16, and `rope_theta` with `rope_scaling: null` beside `rope_parameters`: releases built on transformers 4
      read the former, and fall back to a base of 10,000 in silence when it is absent.
    - `block_size` stands in `dflash_config` too, where newer clients look for it.
    - no `auto_map`: it would have clients fetch and run code, and `model_type: qwen3` is known to all of them. The architecture
      name alone selects the drafter; transformers' own `AutoModel` has none of that name, z-lab's package has.
    - `layer_types` always: without it a client takes every layer for one of full attention. `dflash_config.causal` never: vLLM
      takes it for all layers, and sliding layers are causal where full ones are not.

    Args:
        client: one of `CLIENTS`.
        source: a checkpoint's folder, or a drafter's of any layout that `load_drafter` reads.
        destination: a folder that is absent or empty.
        num_target_layers: of the target, for a layout that does not say.

    Raises:
        ConfigError: an unknown client, no drafter at `source`, or a destination that holds something.
        CorruptError, PermanentError: as `load_drafter`.
        OSError: the disk refuses.
    """
    if client not in CLIENTS:
        raise ConfigError(f"`--for {client}` names no client", remedy=f"Clients: {', '.join(CLIENTS)}.")
    target = Path(destination)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError("the destination holds something", where=str(target), remedy="Name a folder that is empty.")
    folder = find_drafter(source)
    drafter = load_drafter(folder, num_target_layers=num_target_layers)
    first = sorted(folder.glob("*.safetensors"))[0]
    told = {name: text for name, text in read_metadata(first).items() if name != "format"}
    save_drafter(drafter, target, told, dtype=torch.bfloat16 if client in SERVERS else None)
    file = target / "config.json"
    content = json.loads(file.read_text())
    content["dflash_config"]["block_size"] = drafter.config.block_size
    if client in SERVERS:
        content["rope_scaling"] = None
    partial = target / "config.json.partial"
    partial.write_text(json.dumps(content, indent=2) + "\n")
    partial.replace(file)
    return _notes(client, drafter.config)


def _notes(client: str, config: DrafterConfig) -> list[str]:
    notes = []
    kinds = set(config.layer_types)
    if client in SERVERS and "sliding_attention" in kinds:
        mixed = "sliding and full layers are mixed" if len(kinds) > 1 else "all layers are sliding"
        notes.append(
            f"{mixed} (window {config.sliding_window}): a release that does not read `layer_types` for drafters runs them all "
            "as full attention, and acceptance falls on texts longer than the window"
        )
    if client == "transformers":
        notes.append(
            "load it with z-lab's `dflash.model.DFlashDraftModel.from_pretrained`; `AutoModel` would take it for a Qwen3"
        )
    return notes
