"""The drafters that are judged side by side: the checkpoint of the run's own training, and any trained elsewhere.

Another drafter may read other layers, draft blocks of another size and be trained for another version of the target: that is
what a comparison is for. It is said wherever its numbers stand, in brackets after its name. Only another vocabulary or another
hidden size make its numbers meaningless, and are refused.

Cost: the drafters lie in memory together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflash.base.errors import PermanentError
from dflash.base.files import sha256_file
from dflash.evaluate.evaluate_params import EvaluateParams, OtherDrafter
from dflash.model.drafter import Drafter, DrafterConfig
from dflash.model.export import load_drafter, read_metadata
from dflash.model.target_params import TargetIdentity

OWN_DRAFTER = "trained"
"""In the `drafter` column: a checkpoint of the run's own training."""


@dataclass(frozen=True)
class Candidate:
    """A drafter and what its column is called. differs: how it differs from the run's own, as short phrases."""

    name: str
    drafter: Drafter
    differs: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The name, with what differs in brackets."""
        return f"{self.name} [{'; '.join(self.differs)}]" if self.differs else self.name

    @property
    def own(self) -> bool:
        """Whether the run itself trained it."""
        return self.name == OWN_DRAFTER

    @property
    def block_size(self) -> int:
        """B, the anchor included."""
        return self.drafter.config.block_size

    @property
    def taps(self) -> tuple[int, ...]:
        """The target layers it reads."""
        return self.drafter.config.target_layer_ids


def other_drafter(
    source: OtherDrafter, params: EvaluateParams, files: Mapping[str, Path], dtype: torch.dtype, device: str
) -> Candidate:
    """Loads a drafter that was trained elsewhere.

    Args:
        files: digest -> path on this host, each checked against its digest already.

    Raises:
        PermanentError: its files were not handed over, or it is for another vocabulary or hidden size.
        CorruptError: its files are damaged.
    """
    folder = _folder(source, files)
    drafter = load_drafter(folder, dtype=dtype, num_target_layers=params.target.num_layers).to(device).eval()
    for what, held, wanted in (
        ("vocabulary size", drafter.config.vocab_size, params.target.vocab_size),
        ("hidden size", drafter.config.hidden_size, params.target.hidden_size),
    ):
        if held != wanted:
            raise PermanentError(
                f"drafter {source.name!r} has {what} {held}, the target {wanted}",
                where=str(folder),
                remedy="Take it out of evaluate.drafters.",
            )
    return Candidate(source.name, drafter, differences(drafter.config, folder, params))


def _folder(source: OtherDrafter, files: Mapping[str, Path]) -> Path:
    """The folder that holds all files of a drafter. Two drafters may share a file (checkpoints of one training have the same
    config.json), so one file alone does not tell."""
    for folder in dict.fromkeys(files[digest].parent for digest in source.files.values() if digest in files):
        here = {name: folder / name for name in source.files}
        if all(path.is_file() and sha256_file(path) == source.files[name] for name, path in here.items()):
            return folder
    raise PermanentError(
        f"the files of drafter {source.name!r} were not handed to the stage together",
        where="evaluate.drafters",
        remedy="Give each drafter a directory of its own, and run `dflash run` again.",
    )


def differences(config: DrafterConfig, folder: Path, params: EvaluateParams) -> tuple[str, ...]:
    """How a drafter differs from those that the evaluation is for, and whether it is known to be for this target."""
    found = []
    if list(config.target_layer_ids) != list(params.taps):
        found.append(f"taps {' '.join(map(str, config.target_layer_ids))}")
    if config.block_size != params.block_size:
        found.append(f"block {config.block_size}")
    trained_for = _target_of(folder)
    if trained_for is None:
        found.append("target unknown")
    elif not same_target(trained_for, params.target):
        found.append("another target")
    return tuple(found)


def same_target(recorded: Mapping[str, Any], target: TargetIdentity) -> bool:
    """Whether a recorded identity is that of the target: by digest, or by the fields of a random one."""
    now = target.model_dump(mode="json")
    return all(recorded.get(name) == now[name] for name in ("digest", "random"))


def _target_of(folder: Path) -> dict[str, Any] | None:
    """The target that a drafter's weights say they were trained for; None when they say nothing."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            told = json.loads(read_metadata(file).get("dflash", "{}"))
        except ValueError:
            continue
        target = told.get("config", {}).get("train", {}).get("target") if isinstance(told, dict) else None
        if isinstance(target, dict):
            return target
    return None
