"""Kinds of prompts within a set, by the tags that its file gives them.

`tags.json` in the folder of the references is {prompt set: {tag: [places in the set, from 0]}}, and absent where no prompt has a
tag. A tag that every prompt of a set carries says no more than the set itself and is left out.

Evaluation tells tau for each tag in rows of their own: the columns of `metrics.py` and then `tag`. They stand apart from the
other rows, so that whoever averages over all prompt sets does not count a prompt twice. Costs a number a prompt and tag.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dflash.base.errors import CorruptError
from dflash.base.files import read_json, write_json

FILE = "tags.json"
COLUMN = "tag"
Places = Mapping[str, Mapping[str, list[int]]]
"""By prompt set and tag, which prompts of the set carry it."""


def places_of(tags_by_set: Mapping[str, Iterable[Iterable[str]]]) -> dict[str, dict[str, list[int]]]:
    """Where the tags of each set stand.

    Args:
        tags_by_set: by prompt set, the tags of each of its prompts.
    """
    made: dict[str, dict[str, list[int]]] = {}
    for name, prompts in tags_by_set.items():
        places: dict[str, list[int]] = {}
        count = 0
        for place, tags in enumerate(prompts):
            count += 1
            for tag in tags:
                places.setdefault(tag, []).append(place)
        kept = {tag: found for tag, found in places.items() if len(found) < count}
        if kept:
            made[name] = kept
    return made


def write_places(directory: Path, places: Places) -> list[str]:
    """Writes the file if there are tags; returns the names of the files written."""
    if not places:
        return []
    write_json(directory / FILE, places)
    return [FILE]


def read_places(directory: Path) -> Places:
    """The tags of a references folder; none where it has no such file.

    Raises:
        CorruptError: it is not what was written.
    """
    path = directory / FILE
    if not path.exists():
        return {}
    found: Any = read_json(path)
    if not isinstance(found, dict) or not all(isinstance(tags, dict) for tags in found.values()):
        raise CorruptError(
            "not the tags of prompt sets",
            where=str(path),
            remedy="Delete the folder and run `dflash run` to rebuild it.",
        )
    return found
