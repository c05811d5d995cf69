"""Prompts: one source becomes `prompts.parquet`, every row checked, every prompt with a lasting id.

A row (a JSONL line, a Parquet row, a row of a hub's dataset) holds messages, a ShareGPT conversation or a prompt text; field
names are the source's params. A malformed row stops the stage and the plan alike, with its number: data that is skipped in
silence is data nobody knows is missing. Where the source says `malformed: skip`, it is counted and named in `rejected.jsonl`
instead. Repeated prompts are kept once and counted. Costs, for a million short lines on one core, 13 s to validate and 20 s
to run; memory is one row group plus 150 bytes a prompt. Importing this needs neither torch nor pyarrow, since planning
validates with it.

Sources of ready samples (`imported`, `dataset`) take the same stage and write `samples.parquet` (`imported.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.base.canonical import canonical_json, digest
from dflash.base.errors import ConfigError, PermanentError
from dflash.base.files import sha256_file
from dflash.base.records import Counts
from dflash.base.stage import HostContext, Inputs, Outputs
from dflash.data.prompts_params import PromptsParams
from dflash.data.rows import MalformedRow, kind_of, read_source, shown

Message = dict[str, str]

ROLES = ("system", "user", "assistant")
TOOL_ROLES = ("tool", "function", "function_call", "observation")
TOOL_FIELDS = ("tool_calls", "function_call", "tool_call_id")


@dataclass(frozen=True)
class Prompt:
    """A prompt as it goes down the road.

    id: sha256 of the canonical JSON of `messages`. line: where it stood in its source, from 1.
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


def read_prompts(
    path: Path, params: PromptsParams, reject: Callable[[int, MalformedRow], None] | None = None
) -> Iterator[Prompt]:
    """Yields the source's prompts in order, repeated ones included.

    Args:
        reject: told of each malformed row and its number, where the source skips them.

    Raises:
        ConfigError: the file cannot be read, or a row is malformed and must not be: names `FILE:LINE`, the field and the value.
    """
    for row in read_source(path, params):
        try:
            messages = messages_of(row.values(), params, row.where)
        except MalformedRow as error:
            if params.malformed == "stop":
                raise
            if reject is not None:
                reject(row.number, error)
            continue
        yield Prompt(messages_id(messages), row.number, messages)


def messages_of(line: dict[str, Any], params: PromptsParams, where: str) -> list[Message]:
    """The conversation that a row asks to be continued, the source's system message first.

    Raises:
        MalformedRow: names the field and the value given.
    """
    field = _chosen_field(line, params, where)
    if field == params.prompt_field and params.mapping in ("auto", "prompt"):
        messages = [{"role": "user", "content": _text(line[field], field, where)}]
    else:
        given = line[field]
        if field == params.conversations_field and params.mapping in ("auto", "sharegpt"):
            given = _from_sharegpt(given, field, where)
        messages = _listed(given, field, params, where)
    if params.system is None:
        return messages
    if messages[0]["role"] == "system":
        raise MalformedRow(
            f"`{field}[0]` is a system message ({shown(messages[0]['content'])}), "
            f"and source {params.name!r} sets `system` too",
            where=where,
            remedy="Keep one of them.",
        )
    return [{"role": "system", "content": params.system}, *messages]


def _chosen_field(line: dict[str, Any], params: PromptsParams, where: str) -> str:
    """The field that holds the conversation; null counts as absent, unless it is all there is."""
    known = {
        "messages": params.messages_field,
        "sharegpt": params.conversations_field,
        "prompt": params.prompt_field,
    }
    wanted = list(known.values()) if params.mapping == "auto" else [known[params.mapping]]
    for field in [*(name for name in wanted if line.get(name) is not None), *(name for name in wanted if name in line)]:
        return field
    named = [f"`{name}`" for name in wanted if name != params.conversations_field or params.mapping == "sharegpt"]
    raise MalformedRow(
        f"the line has neither {' nor '.join(named)}: its fields are {shown(list(line))}",
        where=where,
        remedy=f"Name the field with `prompt_field` or `messages_field` of source {params.name!r}.",
        reason="no known field",
    )


SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


def _from_sharegpt(value: Any, field: str, where: str) -> Any:
    """`{from, value}` as `{role, content}`; what is no such list is left for `_listed` to name."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        return value
    turns = []
    for index, item in enumerate(value):
        for name in ("from", "value"):
            if name not in item:
                raise MalformedRow(
                    f"`{field}[{index}].{name}` is missing: the turn is {shown(item)}",
                    where=where,
                    remedy=f"Add `{name}`.",
                )
        role = item["from"]
        turns.append(
            {"role": SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role, "content": item["value"]}
        )
    return turns


def _listed(value: Any, field: str, params: PromptsParams, where: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise MalformedRow(
            f"`{field}` is {kind_of(value)}, not a list of messages: {shown(value)}",
            where=where,
            remedy="A message is an object with `role` and `content`.",
        )
    messages = [_message(item, f"{field}[{index}]", where) for index, item in enumerate(value)]
    for index, message in enumerate(messages):
        if message["role"] == "system" and index > 0:
            raise MalformedRow(
                f"`{field}[{index}]` is a system message", where=where, remedy="Only the first may be one."
            )
    if params.answers == "drop":
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
    if not messages or messages[-1]["role"] != "user":
        if not messages or all(message["role"] == "system" for message in messages):
            raise MalformedRow(
                f"`{field}` has no user turn: {shown(value)}",
                where=where,
                remedy="A prompt ends with the user.",
                reason="no user turn",
            )
        raise MalformedRow(
            f"`{field}[{len(messages) - 1}].role` is {shown(messages[-1]['role'])}, and a prompt ends with the user",
            where=where,
            remedy=f"Cut the answer off, or set `answers: drop` for source {params.name!r}: the target writes its own.",
            reason="ends with an answer",
        )
    return messages


def _message(value: Any, field: str, where: str) -> Message:
    if not isinstance(value, dict):
        raise MalformedRow(
            f"`{field}` is {kind_of(value)}, not an object: {shown(value)}",
            where=where,
            remedy="A message is an object with `role` and `content`.",
        )
    for name in ("role", "content"):
        if name not in value and not any(value.get(tool) for tool in TOOL_FIELDS):
            raise MalformedRow(
                f"`{field}.{name}` is missing: the message is {shown(value)}", where=where, remedy=f"Add `{name}`."
            )
    if value["role"] in TOOL_ROLES or any(value.get(name) for name in TOOL_FIELDS):
        raise MalformedRow(
            f"`{field}` calls a tool or holds a tool's answer: {shown(value)}",
            where=where,
            remedy="Tool calls are not supported; leave such conversations out, or set `malformed: skip`.",
            reason="tool calls",
        )
    if value["role"] not in ROLES:
        raise MalformedRow(
            f"`{field}.role` is {shown(value['role'])}",
            where=where,
            remedy=f"Use one of {', '.join(ROLES)}.",
            reason="unknown role",
        )
    return {"role": value["role"], "content": _text(value["content"], f"{field}.content", where)}


def _text(value: Any, field: str, where: str) -> str:
    if not isinstance(value, str):
        raise MalformedRow(f"`{field}` is {kind_of(value)}, not text: {shown(value)}", where=where, remedy="Give text.")
    if not value.strip():
        raise MalformedRow(
            f"`{field}` is empty: {shown(value)}", where=where, remedy="Delete the line or fill it in.", reason="empty"
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise MalformedRow(
            f"`{field}` holds half a surrogate pair: {shown(value)}", where=where, remedy="Repair the \\u escapes."
        ) from error
    return value


def kept_prompts(
    path: Path, params: PromptsParams, counts: Counts, reject: Callable[[int, MalformedRow], None] | None = None
) -> Iterator[Prompt]:
    """Yields each distinct prompt once, in order, `params.limit` at most; fills in `counts` on the way.

    Raises:
        ConfigError: as `read_prompts`; or the source holds no prompt.
    """

    def rejected(number: int, error: MalformedRow) -> None:
        counts.total += 1
        counts.error += 1
        counts.reasons[error.reason] = counts.reasons.get(error.reason, 0) + 1
        if reject is not None:
            reject(number, error)

    seen: set[str] = set()
    for prompt in read_prompts(path, params, rejected):
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
    """The `prompts` stage: writes `prompts.parquet` (`schemas.PROMPTS`), or of ready samples `samples.parquet`
    (`schemas.SAMPLES`), in the order of the source; `rejected.jsonl` where malformed rows are skipped.

    Raises:
        ConfigError: a malformed row. PermanentError: the file is not the one planned for, or the hub cannot be used.
        TransientError: the hub is not reachable.
    """
    from dflash.data.imported import write_imported, write_version
    from dflash.data.schemas import PROMPTS
    from dflash.data.tables import ROW_GROUP, TableWriter

    path = Path(params.huggingface or "")
    if params.huggingface is None:
        path = external_file(inputs, params.digest, f"the file of source {params.name!r}")
    about = {"kind": params.kind, "revision": params.revision, "licence": params.licence}
    if params.kind == "dataset":
        return write_version(path, workdir, host_context, about)
    counts = Counts()
    rejected: list[str] = []

    def reject(number: int, error: MalformedRow) -> None:
        rejected.append(json.dumps({"row": number, "reason": error.reason, "error": error.message()}) + "\n")

    if params.kind == "imported":
        files, results = write_imported(path, params, workdir, host_context, counts, reject)
    else:
        files, results = ["prompts.parquet"], {}
        with TableWriter(workdir / "prompts.parquet", PROMPTS) as writer:
            rows: list[dict[str, Any]] = []
            for prompt in kept_prompts(path, params, counts, reject):
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
        results = {"prompts": counts.ok}
    if params.malformed == "skip":
        (workdir / "rejected.jsonl").write_text("".join(rejected), encoding="utf-8")
        files = [*files, "rejected.jsonl"]
    return Outputs(files, counts, {**results, **about})
