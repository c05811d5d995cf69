"""What git knows of a code change, in words for a person. Costs one `git log`; without git it says nothing."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path


def commits_touching(root: Path, modules: Iterable[str], limit: int = 3) -> list[str]:
    """The newest commits that touched the files of `modules`, as `abc1234 subject`, and whether the files are uncommitted.

    Args:
        root: the folder that holds the package. limit: most commits named.
    """
    paths = [str(Path(*module.split(".")).with_suffix(".py")) for module in modules]
    if not paths:
        return []
    changed = _git(root, "status", "--porcelain", "--", *paths)
    if changed is None:
        return []
    log = _git(root, "log", f"-{limit}", "--format=%h %s", "--", *paths) or ""
    return (["uncommitted changes"] if changed.strip() else []) + log.splitlines()


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
