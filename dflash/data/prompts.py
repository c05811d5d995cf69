"""Prompts: one JSONL file of a source becomes `prompts.parquet`, every line checked, every prompt with a lasting id.

A line is an object with `messages` (a list of {role, content}) or a prompt text; field names are the source's params.
A malformed line stops the stage and the plan alike, with its number: data that is skipped in silence is data nobody
knows is missing. Repeated prompts are kept once and counted. Costs, for a million short lines on one core, 13 s to
validate and 20 s to run; memory is one row group plus 150 bytes a prompt. Importing this needs neither torch nor
pyarrow, since planning validates with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.base.canonical import canonical_json, digest
from dflash.base.errors import ConfigError, PermanentError
from dflash.base.files import sha256_file
from dflash.base.records import Counts
from dflash.base.stage import HostContext, Inputs, Outputs
from dflash.data.prompts_params import PromptsParams

Message = dict[str, str]

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Prompt:
    """A prompt as it goes down the road.

    id: sha256 of the canonical JSON of `messages`. line: where it stood in its file, from 1.
    """

    id: str
    line: int
    messages: list[Message]


def messages_id(messages: list[Message]) -> str:
    """The id of a prompt: sha256 (64 hex digits) of the canonical JSON of its messages."""
    return digest(messages)


def question_id(messages: list[Message]) -> str:
    """Like `messages_id` without system messages: two prompts that ask the same under other instructions share it."""
    return digest([message for message in messages if message["role"] != "system"])


def read_prompts(path: Path, params: PromptsParams) -> Iterator[Prompt]:
    """Yields the file's prompts in order, repeated ones included; blank lines are passed over.

    Raises:
        ConfigError: the file cannot be read, or a line is malformed: names `FILE:LINE`, the field and the value given.
    """
    try:
        with path.open("rb") as stream:
            for number, raw in enumerate(stream, start=1):
                text = _decoded(raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw, f"{path}:{number}")
                if text.strip():
                    messages = _messages(_object(text, f"{path}:{number}"), params, f"{path}:{number}")
                    yield Prompt(messages_id(messages), number, messages)
    except OSError as error:
        raise ConfigError(
            f"cannot read the prompts of source {params.name!r}: {error.strerror}",
            where=str(path),
            remedy="Give the path of a readable JSONL file.",
        ) from error


def _decoded(raw: bytes, where: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        bad = raw[error.start : error.start + 4]
        raise ConfigError(
            f"the line is not UTF-8: byte {error.start + 1} starts {bad!r}",
            where=where,
            remedy="Save the file as UTF-8.",
        ) from error


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ConfigError(
            "the line is nested too deeply", where=where, remedy="Write one JSON object a line."
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"the line is not JSON ({error}): `{_short(text.strip())}`",
            where=where,
            remedy="Write one JSON object a line.",
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(
            f"the line is {_kind(value)}, not an object: {_shown(value)}",
            where=where,
            remedy="Write one JSON object a line.",
        )
    return value


def _messages(line: dict[str, Any], params: PromptsParams, where: str) -> list[Message]:
    """The line's messages, the source's system message first."""
    if params.messages_field in line:
        messages = _listed(line[params.messages_field], params.messages_field, where)
    elif params.prompt_field in line:
        messages = [{"role": "user", "content": _text(line[params.prompt_field], params.prompt_field, where)}]
    else:
        raise ConfigError(
            f"the line has neither `{params.messages_field}` nor `{params.prompt_field}`: its fields are {_shown(list(line))}",
            where=where,
            remedy=f"Name the field with `prompt_field` or `messages_field` of source {params.name!r}.",
        )
    if params.system is None:
        return messages
    if messages[0]["role"] == "system":
        raise ConfigError(
            f"`{params.messages_field}[0]` is a system message ({_shown(messages[0]['content'])}), "
            f"and source {params.name!r} sets `system` too",
            where=where,
            remedy="Keep one of them.",
        )
    return [{"role": "system", "content": params.system}, *messages]


def _listed(value: Any, field: str, where: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise ConfigError(
            f"`{field}` is {_kind(value)}, not a list of messages: {_shown(value)}",
            where=where,
            remedy="A message is an object with `role` and `content`.",
        )
    messages = [_message(item, f"{field}[{index}]", where) for index, item in enumerate(value)]
    for index, message in enumerate(messages):
        if message["role"] == "system" and index > 0:
            raise ConfigError(
                f"`{field}[{index}]` is a system message", where=where, remedy="Only the first may be one."
            )
    if messages[-1]["role"] != "user":
        raise ConfigError(
            f"`{field}[{len(messages) - 1}].role` is {_shown(messages[-1]['role'])}, and a prompt ends with the user",
            where=where,
            remedy="Cut the answer off: the target writes its own.",
        )
    return messages


def _message(value: Any, field: str, where: str) -> Message:
    if not isinstance(value, dict):
        raise ConfigError(
            f"`{field}` is {_kind(value)}, not an object: {_shown(value)}",
            where=where,
            remedy="A message is an object with `role` and `content`.",
        )
    for name in ("role", "content"):
        if name not in value:
            raise ConfigError(
                f"`{field}.{name}` is missing: the message is {_shown(value)}", where=where, remedy=f"Add `{name}`."
            )
    if value["role"] not in ROLES:
        raise ConfigError(
            f"`{field}.role` is {_shown(value['role'])}", where=where, remedy=f"Use one of {', '.join(ROLES)}."
        )
    return {"role": value["role"], "content": _text(value["content"], f"{field}.content", where)}


def _text(value: Any, field: str, where: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"`{field}` is {_kind(value)}, not text: {_shown(value)}", where=where, remedy="Give text.")
    if not value.strip():
        raise ConfigError(f"`{field}` is empty: {_shown(value)}", where=where, remedy="Delete the line or fill it in.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"`{field}` holds half a surrogate pair: {_shown(value)}", where=where, remedy="Repair the \\u escapes."
        ) from error
    return value


def _kind(value: Any) -> str:
    if isinstance(value, list) and not value:
        return "an empty list"
    names = {dict: "an object", list: "a list", str: "text", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")


def _shown(value: Any) -> str:
    return _short(json.dumps(value))


def _short(text: str, most: int = 60) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def kept_prompts(path: Path, params: PromptsParams, counts: Counts) -> Iterator[Prompt]:
    """Yields each distinct prompt once, in file order, `params.limit` at most; fills in `counts` on the way.

    Raises:
        ConfigError: as `read_prompts`; or the file holds no prompt.
    """
    seen: set[str] = set()
    for prompt in read_prompts(path, params):
        counts.total += 1
        if prompt.id in seen:
            counts.skipped += 1
            counts.reasons["duplicate"] = counts.reasons.get("duplicate", 0) + 1
            continue
        seen.add(prompt.id)
        counts.ok += 1
        yield prompt
        if params.limit is not None and counts.ok >= params.limit:
            return
    if not seen:
        raise ConfigError(
            f"the file of source {params.name!r} holds no prompt", where=str(path), remedy="Give at least one line."
        )


def validate_prompts_file(path: Path, params: PromptsParams) -> int:
    """Reads the file as the stage will and returns how many prompts it will keep. Writes nothing; no torch, no pyarrow.

    Raises:
        ConfigError: as the stage: names `FILE:LINE`, the field and the value given.
    """
    return sum(1 for _ in kept_prompts(path, params, Counts()))


def external_file(inputs: Inputs, wanted: str, what: str) -> Path:
    """The path on this host of an external file, checked against its digest.

    Raises:
        PermanentError: it was not handed over, or has changed since the plan was made.
    """
    path = inputs.files.get(wanted)
    if path is None:
        raise PermanentError(
            f"{what} (sha256 {wanted[:12]}) was not handed to the stage", remedy="Run `dflash run` again."
        )
    if wanted and path.is_file() and sha256_file(path) != wanted:
        raise PermanentError(
            f"{what} has changed since the run was planned (sha256 {wanted[:12]} expected)",
            where=str(path),
            remedy="Run `dflash run` again.",
        )
    return path


def run(params: PromptsParams, inputs: Inputs, workdir: Path, host_context: HostContext) -> Outputs:
    """The `prompts` stage: writes `prompts.parquet` (`schemas.PROMPTS`), in file order.

    Raises:
        ConfigError: a malformed line. PermanentError: the file is not the one planned for.
    """
    from dflash.data.schemas import PROMPTS
    from dflash.data.tables import ROW_GROUP, TableWriter

    path = external_file(inputs, params.digest, f"the file of source {params.name!r}")
    counts = Counts()
    with TableWriter(workdir / "prompts.parquet", PROMPTS) as writer:
        rows: list[dict[str, Any]] = []
        for prompt in kept_prompts(path, params, counts):
            rows.append(
                {
                    "id": prompt.id,
                    "source": params.name,
                    "line": prompt.line,
                    "messages": canonical_json(prompt.messages).decode(),
                }
            )
            if len(rows) == ROW_GROUP:
                writer.append(rows)
                rows = []
        writer.append(rows)
    return Outputs(["prompts.parquet"], counts, {"prompts": counts.ok})
