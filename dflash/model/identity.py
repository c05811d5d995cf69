"""Who a target is: a digest of its content, never of its path.

Planning calls this, so nothing here imports torch. The first digest of a directory reads every byte (a 54 GB target
takes a minute or two from a fast disk); later ones read a cache, keyed by device, inode, size and modification time, at
`$XDG_CACHE_HOME/dflash/file-digests.json`. The cache may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from dflash.base.errors import ConfigError

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


def target_digest(directory: str | Path) -> str:
    """sha256 (hex) of the sorted list of (file name, sha256 of its bytes): the same wherever the directory lies.

    Raises:
        ConfigError: as `target_files`.
    """
    files = target_files(directory)
    digests = cached_digests(files)
    listing = [[path.name, digest] for path, digest in zip(files, digests, strict=True)]
    return hashlib.sha256(json.dumps(listing, separators=(",", ":")).encode()).hexdigest()


def cached_digests(files: Iterable[Path]) -> list[str]:
    """sha256 (hex) of each file, from the cache where device, inode, size and modification time are unchanged."""
    cache_file = _cache_file()
    cache = _read_cache(cache_file)
    digests, fresh = [], {}
    for path in files:
        stat = path.stat()
        key = f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}"
        if key not in cache:
            with path.open("rb") as stream:
                cache[key] = fresh[key] = hashlib.file_digest(stream, "sha256").hexdigest()
        digests.append(cache[key])
    if fresh:
        _write_cache(cache_file, {**_read_cache(cache_file), **fresh})
    return digests


def _cache_file() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "dflash" / "file-digests.json"


def _read_cache(path: Path) -> dict[str, str]:
    """What the cache holds; nothing when it is absent or damaged, since it can always be computed again."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _write_cache(path: Path, content: dict[str, str]) -> None:
    """Replace the cache as a whole; a cache that cannot be written costs time, not correctness."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as stream:
            json.dump(content, stream)
        Path(stream.name).replace(path)
    except OSError:
        return
