"""Decisions only a person may take: keep an old result although its code has changed, or make it anew.

They are kept for ever in `<results>/adoptions.jsonl`, one JSON object a line: `{decision: adopt | recompute, stage, old_key,
new_key, why, by, at}`. An adoption maps the key that the present code would have to the old key, which then stands in its
place, for downstream keys too. Costs one small file read a plan.
"""

from __future__ import annotations

import getpass
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash.base.errors import CorruptError
from dflash.base.files import append_line
from dflash.base.records import now

FIELDS = {"decision", "stage", "old_key", "new_key", "why", "by", "at"}


@dataclass
class Decisions:
    """What was decided, oldest first."""

    path: Path
    entries: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def load(cls, results: Path) -> Decisions:
        """Reads the decisions of a results folder (none when there is no file).

        Raises:
            CorruptError: a line is not a decision; names it.
        """
        path = results / "adoptions.jsonl"
        found = cls(path)
        if not path.exists():
            return found
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            try:
                entry = json.loads(line)
            except ValueError:
                entry = None
            if not isinstance(entry, dict) or set(entry) != FIELDS:
                raise CorruptError("not a decision", where=f"{path}:{number}", remedy="Mend or remove the line.")
            found.entries.append(entry)
        return found

    def adopted(self, stage: str, key: str) -> str | None:
        """The old key that stands in the place of `key`, when the newest decision about `key` is an adoption."""
        newest = self._newest(stage, key)
        return newest["old_key"] if newest is not None and newest["decision"] == "adopt" else None

    def recompute(self, stage: str, key: str) -> bool:
        """Whether it was decided that `key` is to be made although an older result stands."""
        newest = self._newest(stage, key)
        return newest is not None and newest["decision"] == "recompute"

    def _newest(self, stage: str, key: str) -> dict[str, Any] | None:
        for entry in reversed(self.entries):
            if entry["stage"] == stage and entry["new_key"] == key:
                return entry
        return None

    def add(self, decision: str, stage: str, old_key: str, new_key: str, why: str) -> None:
        """Records a decision, durably, at the end of the file."""
        entry = {
            "decision": decision,
            "stage": stage,
            "old_key": old_key,
            "new_key": new_key,
            "why": why,
            "by": _user(),
            "at": now(),
        }
        append_line(self.path, json.dumps(entry, sort_keys=True, ensure_ascii=False))
        self.entries.append(entry)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"
