"""Who a target is: a digest of its content, never of its path.

Planning calls this, so nothing here imports torch. The first digest of a directory reads every byte (a 54 GB target
takes a minute or two from a fast disk); later ones are remembered by inode, size and modification time (`DigestCache`).
"""

from __future__ import annotations

from pathlib import Path

from dflash.base.canonical import digest
from dflash.base.errors import ConfigError
from dflash.base.files import DigestCache

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
