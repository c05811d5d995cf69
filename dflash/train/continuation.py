"""Starting from another training's checkpoint (`train.continue_from`): its weights, or its whole state.

`weights` reads `drafter/`, which never leaves, so the result is a function of the key; `state` reads masters, moments and
cursor, and counts steps on from there. Costs one read of the parent's files.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from torch import Tensor

from dflash.base.errors import PermanentError
from dflash.base.store import checkpoint_directory, read_params, stage_directory
from dflash.model.drafter import DrafterConfig
from dflash.model.export import load_config, load_drafter
from dflash.train.checkpoint import State, load_state, verified_manifest
from dflash.train.train_params import ContinueFrom

FREE = {"block_size"}
"""Fields of the drafter that may differ from the parent's: they change no weight and no meaning of one."""


@dataclasses.dataclass(frozen=True)
class Parent:
    """What a continued training starts from. `state` is None when only the weights are taken over."""

    weights: dict[str, Tensor]
    state: State | None
    lineage: dict[str, Any]


def load_parent(source: ContinueFrom, store: Path, config: DrafterConfig) -> Parent:
    """Loads the checkpoint that `source` names, after its bytes have been verified.

    Raises:
        PermanentError: it does not exist, its state was pruned, or its drafter has other taps or shapes; names the field.
        CorruptError: its bytes are not those its manifest records.
    """
    directory = stage_directory(store, "train", source.key)
    folder = checkpoint_directory(directory, source.step)
    if not (folder / "manifest.json").exists():
        raise PermanentError(
            f"training {source.key} has no checkpoint of step {source.step}",
            where="train.continue_from",
            remedy=f"Look for step_<n> in {directory}.",
        )
    key = read_params(directory).key
    manifest = verified_manifest(directory, source.step, key)
    refuse_other_drafter(load_config(folder / "drafter"), config, folder)
    lineage = {"key": key, "step": source.step, "what": source.what, "drafter": manifest.drafter.root}
    if source.what == "weights":
        return Parent(dict(load_drafter(folder / "drafter").state_dict()), None, lineage)
    if not (folder / "state").exists():
        raise PermanentError(
            f"the state of step {source.step} was pruned",
            where=str(folder),
            remedy="Continue from a newer step, or from `what: weights`.",
        )
    state = load_state(directory, source.step, key)
    return Parent(state.masters, state, lineage)


def refuse_other_drafter(parent: DrafterConfig, child: DrafterConfig, where: Path) -> None:
    """Raises PermanentError when weights of `parent` would mean something else, or not fit, in `child`."""
    for name in sorted(parent.to_dict().keys() - FREE):
        theirs, ours = parent.to_dict()[name], child.to_dict()[name]
        if theirs != ours:
            raise PermanentError(
                f"the parent's drafter has {name} = {theirs}, this one {ours}",
                where=str(where),
                remedy=f"Set train.{name} to the parent's, or train from scratch.",
            )
