"""Who a target is: a digest of its content, never of its path.

Planning calls this, so nothing here imports torch. The first digest of a directory reads every byte (a 54 GB target
takes a minute or two from a fast disk); later ones are remembered by inode, size and modification time (`DigestCache`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash.base.canonical import digest
from dflash.base.errors import ConfigError, PermanentError
from dflash.base.files import DigestCache
from dflash.model.target_params import TargetIdentity

# Beside *.safetensors: everything that decides which tokens go in, which come out, and where generation stops.
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)


def target_files(directory: str | Path) -> list[Path]:
    """The files that make a target what it is, sorted by name.

    Raises:
        ConfigError: the directory does not exist, or has no config.json or no *.safetensors.
    """
    root = Path(directory)
    if not root.is_dir():
        raise ConfigError("no such target directory", where=str(root), remedy="Give a directory with a HF checkpoint.")
    weights = list(root.glob("*.safetensors"))
    small = [root / name for name in SMALL_FILES if (root / name).is_file()]
    for missing, absent in (("config.json", not (root / "config.json").is_file()), ("*.safetensors", not weights)):
        if absent:
            raise ConfigError(f"the target has no {missing}", where=str(root), remedy="Give a complete HF checkpoint.")
    return sorted(weights + small, key=lambda path: path.name)


def target_digest(directory: str | Path, cache: DigestCache | None = None) -> str:
    """sha256 (hex) of the sorted list of (file name, sha256 of its bytes): the same wherever the directory lies.

    Raises:
        ConfigError: as `target_files`.
    """
    known = cache or DigestCache()
    listing = [[path.name, known.sha256(path)] for path in target_files(directory)]
    known.save()
    return digest(listing)


def target_source(identity: TargetIdentity, path: Path | None) -> Path | dict[str, Any]:
    """What `load_target` and `load_tokenizer` take: the directory, checked against its digest, or a random target's spec.

    Raises:
        PermanentError: the target is a directory and this host has none for it, or one of another digest.
    """
    if identity.random is not None:
        return identity.random.fields_of_type()
    if path is None:
        raise PermanentError(
            "the target's directory was not handed to the stage", remedy="Give `target.path` on this host."
        )
    found = target_digest(path)
    if found != identity.digest:
        raise PermanentError(
            f"the target has digest {found}, the recorded one is {identity.digest}",
            where=str(path),
            remedy=f"Fetch the recorded weights, or say `target.digest: {found}` if these are the ones that are meant.",
        )
    return path
