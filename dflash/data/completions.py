"""Completions: the target answers every prompt of a source, and its token ids are kept exactly as it wrote them.

Prompts are rendered with the target's chat template and generated in batches of neighbours in length, longest first. Row i
draws from its own seed, a function of (params.seed, sample id). What was cut at the token limit is counted; above
`max_truncated_share` the stage stops, as soon as it is certain.

Two engines: `transformers`, in process and batched, and `openai`, any number of OpenAI-compatible servers (`openai_engine.py`).
A source may be cut into shards, each a job of its own; a prompt belongs to a shard by its id.

**What holds of bits.** In process, the batches are a function of the prompt list and of `GENERATION_BATCH` alone, and a batch
is kept whole or not at all, so an interrupted run ends with the bytes of an undisturbed one on the same machine. A
`batch_size` below `GENERATION_BATCH` cuts each batch for the sake of memory, one above changes nothing. Padding and batch
mates never reach a result in exact arithmetic, but the shape of a matrix product can move its last bits, so another
`batch_size`, device or library may turn a near tie between two tokens. What a server writes is its own affair; what is kept
is never asked again.

Costs: memory for the target and its cache for one batch (or the requests in flight), and the finished tokens (4 bytes a token
and 0.5 kB a sample). A kill loses the batches since the last one kept.
"""

from __future__ import annotations

import hashlib
import json
import time
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch
from jinja2.exceptions import TemplateError

from dflash.base.canonical import short_digest
from dflash.base.errors import CorruptError, PermanentError, TransientError
from dflash.base.files import write_atomically
from dflash.base.records import LedgerLine
from dflash.base.stage import HostContext, Inputs, Outputs
from dflash.data.chat import render
from dflash.data.completions_params import CompletionsParams
from dflash.data.ledger import write_ledger
from dflash.data.openai_engine import Answer, Client, Refusal, Sampling, Servers, words_of
from dflash.data.preflight import require_room
from dflash.data.quality import fault_of
from dflash.data.requests import Request, sample_seed
from dflash.data.schemas import COMPLETIONS, PROMPTS
from dflash.data.tables import ROW_GROUP, TableWriter, read_rows, table_bytes
from dflash.model.identity import target_source
from dflash.model.target import load_target, load_tokenizer

GENERATION_BATCH = 64
"""Prompts of a batch. A constant, not a parameter, so that where a run is interrupted changes no bit of it."""


class Generator(Protocol):
    """What this stage needs of a target: `dflash.model.target.Target`."""

    tokenizer: Any
    kernels: Any

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        temperature: float,
        seeds: Sequence[int] | None,
        stop_ids: Sequence[int] | None,
    ) -> list[tuple[list[int], str]]: ...


def requests_of(
    rows: Sequence[Mapping[str, Any]], tokenizer: Any, params: CompletionsParams
) -> tuple[list[Request], dict[str, LedgerLine]]:
    """Renders every prompt: those the target can answer, in order, and a ledger line by id for each it cannot.

    A prompt that leaves no room for `max_new_tokens` within the target's context is skipped; one that the template refuses
    is an error.

    Raises:
        PermanentError: the target has no chat template.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise PermanentError(
            "the target's tokenizer has no chat template",
            where="target",
            remedy="Add chat_template.jinja to its directory.",
        )
    check_generation_prompt(tokenizer, [row for row in rows if len(row["messages"]) < 100_000][:1], params)
    room = params.target.max_position_embeddings - params.max_new_tokens
    most_bytes = room * longest_token(tokenizer)
    requests: list[Request] = []
    refused: dict[str, LedgerLine] = {}
    for row in rows:
        if len(row["messages"]) > most_bytes:
            refused[row["id"]] = LedgerLine(id=row["id"], status="skipped", reason="prompt too long")
            continue
        try:
            prompt_ids = render(tokenizer, json.loads(row["messages"]), thinking=params.thinking)
        except TemplateError as error:
            refused[row["id"]] = LedgerLine(id=row["id"], status="error", reason=f"template: {error.message}")
            continue
        if len(prompt_ids) > room:
            refused[row["id"]] = LedgerLine(id=row["id"], status="skipped", reason="prompt too long")
            continue
        seed = sample_seed(params.seed, row["id"])
        requests.append(Request(row["id"], row["source"], row["messages"], array("i", prompt_ids), seed))
    return requests, refused


def longest_token(tokenizer: Any) -> int:
    """Bytes that a token can stand for at most, with room for JSON's escapes and a normaliser that joins letters: text longer
    than so many times the context need not be tokenised, which takes minutes for ten megabytes without a blank."""
    return 6 * max(len(token.encode()) for token in tokenizer.get_vocab())


def check_generation_prompt(tokenizer: Any, rows: Sequence[Mapping[str, Any]], params: CompletionsParams) -> None:
    """A template that ignores `add_generation_prompt` would have the target go on with the user's words.

    Raises:
        PermanentError: the rendered prompt is the same with and without it.
    """
    for row in rows:
        messages = json.loads(row["messages"])
        try:
            opened = render(tokenizer, messages, thinking=params.thinking)
            closed = render(tokenizer, messages, thinking=params.thinking, open_turn=False)
        except TemplateError:
            continue
        if opened == closed:
            raise PermanentError(
                "the target's chat template has no generation prompt: it renders the same with and without one",
                where="target",
                remedy="Let the template open the assistant's turn when `add_generation_prompt` is set.",
            )


def in_shard(sample_id: str, params: CompletionsParams) -> bool:
    """Whether a prompt is answered by this job: its id, 64 hex digits, modulo the number of shards."""
    return int(sample_id[:12], 16) % params.shards == params.shard


def generation_batches(requests: Sequence[Request]) -> list[list[Request]]:
    """Neighbours in length together, longest first (too little memory shows at once); a function of the list alone."""
    order = sorted(range(len(requests)), key=lambda index: (-len(requests[index].prompt_ids), index))
    return [
        [requests[index] for index in order[start : start + GENERATION_BATCH]]
        for start in range(0, len(order), GENERATION_BATCH)
    ]


class Shards:
    """Finished batches in a persistent folder: one Parquet file each, written once, whole or ignored.

    A file belongs to this work when its name carries the digest of everything that decides the tokens and of the batch's
    prompts. It holds the rows of those prompts that were answered; what is there is known by its id, never by its place.
    """

    def __init__(self, folder: Path | None, params: CompletionsParams) -> None:
        decisive = params.keyed_values()
        decisive.pop("max_truncated_share")
        decisive.pop("max_error_share")
        self.folder = folder
        self.work = short_digest(decisive)

    def path(self, batch: Sequence[Request]) -> Path | None:
        """Where a batch is kept; None when there is no folder."""
        name = short_digest([[request.id, request.source, list(request.prompt_ids)] for request in batch])
        return None if self.folder is None else self.folder / f"shard-{self.work}-{name}.parquet"

    def load(self, batch: Sequence[Request]) -> dict[str, dict[str, Any]]:
        """The rows of a batch that are kept, by id; none when it was never finished, or its file is torn."""
        path = self.path(batch)
        if path is None or not path.exists():
            return {}
        try:
            rows = read_rows(path, COMPLETIONS)
        except CorruptError:
            return {}
        wanted = {request.id: request for request in batch}
        kept = {}
        for row in rows:
            request = wanted.get(row["id"])
            if (
                request is not None
                and row["prompt_ids"] == list(request.prompt_ids)
                and row["source"] == request.source
            ):
                kept[request.id] = request.answered(row["completion_ids"], row["finish_reason"])
        return kept

    def save(self, batch: Sequence[Request], rows: Mapping[str, dict[str, Any]]) -> None:
        """Keeps the rows of a batch, by id, atomically."""
        path = self.path(batch)
        if path is not None and rows:
            write_atomically(path, table_bytes(COMPLETIONS, [rows[item.id] for item in batch if item.id in rows]))


def answer(
    target: Generator, batch: Sequence[Request], params: CompletionsParams, together: int
) -> list[dict[str, Any]]:
    """Generates one batch, at most `together` prompts at once.

    Raises:
        PermanentError: the device's memory does not hold it.
    """
    rows: list[dict[str, Any]] = []
    for start in range(0, len(batch), together):
        part = batch[start : start + together]
        try:
            answers = target.generate(
                [list(request.prompt_ids) for request in part],
                params.max_new_tokens,
                temperature=params.temperature,
                seeds=[request.seed for request in part] if params.temperature > 0 else None,
                stop_ids=params.target.eos_token_ids or None,
            )
        except torch.OutOfMemoryError as error:
            raise PermanentError(
                f"out of memory generating {len(part)} prompts of up to {len(part[0].prompt_ids)} tokens together",
                where="completions.batch_size",
                remedy=f"Set it to {max(1, len(part) // 2)}; it is in no key, and finished batches are kept.",
            ) from error
        rows.extend(request.answered(*given) for request, given in zip(part, answers, strict=True))
    return rows


@dataclass
class Answered:
    """What is answered so far. done: rows by id. refused: why there is no answer, by id. Speed is of this attempt."""

    params: CompletionsParams
    total: int
    done: dict[str, dict[str, Any]] = field(default_factory=dict)
    refused: dict[str, Refusal] = field(default_factory=dict)
    truncated: int = 0
    generated_tokens: int = 0
    seconds: float = 0.0

    def add(self, rows: Mapping[str, dict[str, Any]], host_context: HostContext) -> None:
        """Takes rows in, and says how far it is.

        Raises:
            PermanentError: as `check_truncated`.
        """
        self.done.update(rows)
        self.truncated += sum(row["finish_reason"] == "length" for row in rows.values())
        host_context.progress.update(len(self.done) + len(self.refused), self.total, "completions")
        check_truncated(self.truncated, len(self.done), self.total, self.params)


def answer_in_process(
    target: Generator,
    requests: Sequence[Request],
    params: CompletionsParams,
    host_context: HostContext,
) -> Answered:
    """Generates what is not yet in the scratch folder, batch by batch.

    Raises:
        PermanentError: more completions are cut at the limit than `max_truncated_share` allows.
    """
    shards = _shards(params, host_context)
    together = min(GENERATION_BATCH, int(host_context.placement.get("batch_size", params.batch_size)))
    found = Answered(params, len(requests))
    for batch in generation_batches(requests):
        rows = shards.load(batch)
        if len(rows) < len(batch):
            start = time.monotonic()
            rows = {row["id"]: row for row in answer(target, batch, params, together)}
            found.seconds += time.monotonic() - start
            found.generated_tokens += sum(len(row["completion_ids"]) for row in rows.values())
            shards.save(batch, rows)
        found.add(rows, host_context)
    return found


def answer_by_servers(
    tokenizer: Any, requests: Sequence[Request], params: CompletionsParams, host_context: HostContext
) -> tuple[Answered, dict[str, Any]]:
    """Asks the servers for what is not yet in the scratch folder; returns it and what the servers said of themselves.

    Raises:
        PermanentError: too many completions are cut, or a server refuses for good. TransientError: no server is alive.
    """
    shards = _shards(params, host_context)
    found = Answered(params, len(requests))
    batches, kept = generation_batches(requests), []
    for batch in batches:
        kept.append(shards.load(batch))
        found.add(kept[-1], host_context)
    open_batches = [
        (batch, rows, [request for request in batch if request.id not in rows])
        for batch, rows in zip(batches, kept, strict=True)
        if len(rows) < len(batch)
    ]
    client = Client(servers_of(params, host_context), sampling_of(params), tokenizer)
    start = time.monotonic()

    def finished(place: int, answers: dict[str, Answer], refusals: dict[str, Refusal]) -> None:
        batch, rows, asked = open_batches[place]
        new = {
            request.id: request.answered(answers[request.id].ids, answers[request.id].finish_reason)
            for request in asked
            if request.id in answers
        }
        shards.save(batch, {**rows, **new})
        found.refused.update(refusals)
        found.generated_tokens += sum(len(row["completion_ids"]) for row in new.values())
        found.add(new, host_context)

    if open_batches:
        client.answer([asked for _, _, asked in open_batches], finished)
    found.seconds = time.monotonic() - start if found.generated_tokens else 0.0
    return found, client.about


def _shards(params: CompletionsParams, host_context: HostContext) -> Shards:
    scratch = host_context.placement.get("scratch")
    return Shards(None if scratch is None else Path(scratch), params)


def servers_of(params: CompletionsParams, host_context: HostContext) -> Servers:
    """The servers to ask: placement of this host over that of the config."""
    values = {**params.placement_values(), **host_context.placement}
    return Servers(
        endpoints=list(values["endpoints"]),
        model=values["model"],
        prompts=values["send_prompts"],
        concurrency=int(values["concurrency"]),
        timeout=float(values["timeout"]),
        deadline=float(values["deadline"]),
        attempts=int(values["attempts"]),
        pause=float(values["pause"]),
        api_key_variable=values["api_key_variable"],
    )


def sampling_of(params: CompletionsParams) -> Sampling:
    """What decides the tokens."""
    return Sampling(params.max_new_tokens, params.temperature, params.target.eos_token_ids)


def check_refused(found: Answered) -> None:
    """Too many requests without an answer are a fault to be mended, not a dataset; what was answered is kept.

    Raises:
        PermanentError: not one request was answered. TransientError: with the counts by reason.
    """
    if found.total and not found.done:
        reasons = Counter(refusal.reason for refusal in found.refused.values())
        raise PermanentError(
            f"none of {found.total} requests was answered: {words_of(reasons)}",
            where="completions.endpoints",
            remedy="Look whether the servers serve this target, and why they refuse.",
        )
    open_refusals = [refusal.reason for refusal in found.refused.values() if not refusal.final]
    if len(open_refusals) > found.params.max_error_share * found.total:
        raise TransientError(
            f"{len(open_refusals)} of {found.total} requests got no answer ({words_of(Counter(open_refusals))}); "
            f"at most {found.params.max_error_share:.1%} may",
            where="completions.max_error_share",
            remedy="Mend the servers and run again: only what is missing is asked.",
        )


def check_truncated(truncated: int, done: int, total: int, params: CompletionsParams) -> None:
    """Stops as soon as the share of cut completions is certain to be too large.

    Raises:
        PermanentError: with the numbers.
    """
    if truncated > params.max_truncated_share * total:
        raise PermanentError(
            f"{truncated} of {done} completions so far ({truncated / total:.1%} of all {total}) were cut at "
            f"max_new_tokens = {params.max_new_tokens}; at most {params.max_truncated_share:.1%} are allowed",
            where="completions.max_truncated_share",
            remedy="Raise completions.max_new_tokens, or max_truncated_share if cut answers are what you want.",
        )


def run(params: CompletionsParams, inputs: Inputs, workdir: Path, host_context: HostContext) -> Outputs:
    """The `completions` stage: writes `completions.parquet` (`schemas.COMPLETIONS`, in the order of the prompts) and
    `ledger.jsonl`. Resumes from `host_context.placement["scratch"]` when given.

    Raises:
        PermanentError: kernels not bound as asked, no chat template, no prompt answerable, too many completions cut, too
            little memory or disk, or a server refuses for good. TransientError: too many requests without an answer.
    """
    prompts = read_rows(inputs.one("prompts").directory / "prompts.parquet", PROMPTS)
    prompts = [row for row in prompts if in_shard(row["id"], params)]
    source = target_source(params.target, inputs.target_path)
    target: Generator | None = None
    if params.engine == "transformers":
        target = load_target(source, params.dtype, host_context.device, kernels=params.kernels)
    tokenizer = target.tokenizer if target is not None else load_tokenizer(source)
    requests, ledger = requests_of(prompts, tokenizer, params)
    if not requests and (prompts or params.shards == 1):
        raise PermanentError(
            f"none of {len(prompts)} prompts can be answered: {sorted({line.reason for line in ledger.values()})}",
            where=str(inputs.one("prompts").directory),
            remedy="A prompt and max_new_tokens must fit into the target's context.",
        )
    tokens = sum(len(request.prompt_ids) for request in requests) + params.max_new_tokens * len(requests)
    require_room(
        workdir,
        disk=2 * (4 * tokens + 500 * len(requests)),
        memory=4 * tokens + 1_500 * len(requests),
        what=f"{len(requests):,} completions",
        progress=host_context.progress,
    )
    if target is not None:
        found = answer_in_process(target, requests, params, host_context)
        about: dict[str, Any] = {"versions": [f"transformers {version('transformers')}"]}
    else:
        found, about = answer_by_servers(tokenizer, requests, params, host_context)
        check_refused(found)
    check_none_lost(requests, found)
    stops = frozenset(params.target.eos_token_ids)
    for request in requests:
        ledger[request.id] = ledger_line(request.id, found, stops)
    _write(workdir / "completions.parquet", [found.done[item.id] for item in requests if item.id in found.done])
    counts = write_ledger(workdir / "ledger.jsonl", [ledger[row["id"]] for row in prompts])
    results = {
        **summary(list(found.done.values()), found),
        "engine": {"name": params.engine, **about},
        "template_sha256": hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest(),
        "target": {"revision": params.target.revision, "digest": params.target.digest},
        "thinking": params.thinking,
    }
    kernels = target.kernels.to_dict() if target is not None else {}
    return Outputs(["completions.parquet", "ledger.jsonl"], counts, results, kernels)


def check_none_lost(requests: Sequence[Request], found: Answered) -> None:
    """Every request must have come to an end, and nothing else may have an answer.

    Raises:
        PermanentError: names how many were lost or invented.
    """
    asked, ended = {request.id for request in requests}, {*found.done, *found.refused}
    if asked != ended or found.done.keys() & found.refused.keys():
        raise PermanentError(
            f"{len(asked - ended)} of {len(asked)} prompts have neither an answer nor a reason, {len(ended - asked)} answers "
            "have no prompt",
            where="completions",
            remedy="Delete the `partial` folder beside the result and run again.",
        )


def ledger_line(name: str, found: Answered, stops: frozenset[int]) -> LedgerLine:
    """What became of a request: answered (with what is wrong with the answer, if anything), or not and why."""
    if name in found.done:
        row = found.done[name]
        return LedgerLine(id=name, status="ok", reason=fault_of(row["completion_ids"], row["finish_reason"], stops))
    refusal = found.refused[name]
    return LedgerLine(id=name, status="skipped" if refusal.final else "error", reason=refusal.reason)


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    with TableWriter(path, COMPLETIONS) as writer:
        for start in range(0, len(rows), ROW_GROUP):
            writer.append(rows[start : start + ROW_GROUP])


def summary(rows: Sequence[Mapping[str, Any]], found: Answered) -> dict[str, Any]:
    """Tokens, how many completions were cut, and the speed of what was generated this time (None when nothing was)."""
    truncated = sum(row["finish_reason"] == "length" for row in rows)
    seconds = found.seconds
    return {
        "completions": len(rows),
        "prompt_tokens": sum(len(row["prompt_ids"]) for row in rows),
        "completion_tokens": sum(len(row["completion_ids"]) for row in rows),
        "truncated": truncated,
        "truncated_share": truncated / len(rows) if rows else 0.0,
        "generated_tokens": found.generated_tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(found.generated_tokens / seconds, 1) if seconds > 0 else None,
    }
