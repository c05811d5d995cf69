"""Completions: the target answers every prompt of a source, and its token ids are kept exactly as it wrote them.

Prompts are rendered with the target's chat template and generated in batches of neighbours in length, longest first. Row i
draws from its own seed, a function of (params.seed, sample id). What was cut at the token limit is counted; above
`max_truncated_share` the stage stops, as soon as it is certain.

**What holds of bits.** The batches are a function of the prompt list and of `GENERATION_BATCH` alone, and a batch is kept
whole or not at all, so an interrupted run ends with the bytes of an undisturbed one on the same machine. A `batch_size`
below `GENERATION_BATCH` cuts each batch for the sake of memory, one above changes nothing. Padding and batch mates never
reach a result in exact arithmetic, but the shape of a matrix product can move its last bits, so another `batch_size`, device
or library may turn a near tie between two tokens.

Costs: memory for the target, its cache for one batch, and the finished tokens (4 bytes a token and 0.5 kB a sample). A kill
loses the batches since the last shard: at most one.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from jinja2.exceptions import TemplateError

from dflash.base.canonical import short_digest
from dflash.base.errors import CorruptError, PermanentError
from dflash.base.files import write_atomically
from dflash.base.records import LedgerLine
from dflash.base.stage import HostContext, Inputs, Outputs
from dflash.data.completions_params import CompletionsParams
from dflash.data.ledger import write_ledger
from dflash.data.schemas import COMPLETIONS, PROMPTS
from dflash.data.tables import ROW_GROUP, TableWriter, read_rows, table_bytes
from dflash.model.target import load_target

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


@dataclass(frozen=True)
class Request:
    """One prompt, ready for the target."""

    id: str
    source: str
    messages: str
    prompt_ids: list[int]
    seed: int

    def answered(self, completion_ids: list[int], finish_reason: str) -> dict[str, Any]:
        """The row of `schemas.COMPLETIONS`."""
        return {**vars(self), "completion_ids": completion_ids, "finish_reason": finish_reason}


def sample_seed(seed: int, sample_id: str) -> int:
    """The seed of one sample, 63 bits: the same whatever batch it is in."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{sample_id}".encode()).digest()[:8], "big") >> 1


def render(tokenizer: Any, messages: list[dict[str, str]], *, thinking: bool) -> list[int]:
    """Token ids of a prompt, up to where the assistant begins to write.

    Raises:
        jinja2.TemplateError: the target's template refuses the messages.
    """
    rendered = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, enable_thinking=thinking, tokenize=True, return_dict=False
    )
    return [int(token) for token in rendered]


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
    room = params.target.max_position_embeddings - params.max_new_tokens
    requests: list[Request] = []
    refused: dict[str, LedgerLine] = {}
    for row in rows:
        try:
            prompt_ids = render(tokenizer, json.loads(row["messages"]), thinking=params.thinking)
        except TemplateError as error:
            refused[row["id"]] = LedgerLine(id=row["id"], status="error", reason=f"template: {error.message}")
            continue
        if len(prompt_ids) > room:
            refused[row["id"]] = LedgerLine(id=row["id"], status="skipped", reason="prompt too long")
            continue
        seed = sample_seed(params.seed, row["id"])
        requests.append(Request(row["id"], row["source"], row["messages"], prompt_ids, seed))
    return requests, refused


def generation_batches(requests: Sequence[Request]) -> list[list[Request]]:
    """Neighbours in length together, longest first (too little memory shows at once); a function of the list alone."""
    order = sorted(range(len(requests)), key=lambda index: (-len(requests[index].prompt_ids), index))
    return [
        [requests[index] for index in order[start : start + GENERATION_BATCH]]
        for start in range(0, len(order), GENERATION_BATCH)
    ]


class Shards:
    """Finished batches in a persistent folder: one Parquet file each, whole or ignored.

    A file belongs to this work when its name carries the digest of everything that decides the tokens, and its prompts are
    those of the batch.
    """

    def __init__(self, folder: Path | None, params: CompletionsParams) -> None:
        decisive = params.keyed_values()
        decisive.pop("max_truncated_share")
        self.folder = folder
        self.work = short_digest(decisive)

    def path(self, batch: Sequence[Request]) -> Path | None:
        """Where a batch is kept; None when there is no folder."""
        name = short_digest([[request.id, request.source, request.prompt_ids] for request in batch])
        return None if self.folder is None else self.folder / f"shard-{self.work}-{name}.parquet"

    def load(self, batch: Sequence[Request]) -> list[dict[str, Any]] | None:
        """The rows of a finished batch; None when it was never finished, or its file is torn."""
        path = self.path(batch)
        if path is None or not path.exists():
            return None
        try:
            rows = read_rows(path, COMPLETIONS)
        except CorruptError:
            return None
        kept = [(row["id"], row["source"], row["prompt_ids"]) for row in rows]
        return rows if kept == [(request.id, request.source, request.prompt_ids) for request in batch] else None

    def save(self, batch: Sequence[Request], rows: list[dict[str, Any]]) -> None:
        """Keeps a finished batch, atomically."""
        path = self.path(batch)
        if path is not None:
            write_atomically(path, table_bytes(COMPLETIONS, rows))


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
                [request.prompt_ids for request in part],
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


def answer_all(
    target: Generator, requests: Sequence[Request], params: CompletionsParams, host_context: HostContext
) -> tuple[dict[str, dict[str, Any]], dict[str, float]]:
    """Generates what is not yet in the scratch folder. Returns rows by id, and what was generated in how many seconds.

    Raises:
        PermanentError: more completions are cut at the limit than `max_truncated_share` allows.
    """
    scratch = host_context.placement.get("scratch")
    shards = Shards(None if scratch is None else Path(scratch), params)
    together = min(GENERATION_BATCH, int(host_context.placement.get("batch_size", params.batch_size)))
    done: dict[str, dict[str, Any]] = {}
    speed = {"generated_tokens": 0.0, "seconds": 0.0}
    truncated = 0
    for batch in generation_batches(requests):
        rows = shards.load(batch)
        if rows is None:
            start = time.monotonic()
            rows = answer(target, batch, params, together)
            speed["seconds"] += time.monotonic() - start
            speed["generated_tokens"] += sum(len(row["completion_ids"]) for row in rows)
            shards.save(batch, rows)
        done.update((row["id"], row) for row in rows)
        truncated += sum(row["finish_reason"] == "length" for row in rows)
        host_context.progress.update(len(done), len(requests), "completions")
        check_truncated(truncated, len(done), len(requests), params)
    return done, speed


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
        PermanentError: kernels not bound as asked, no chat template, no prompt answerable, too many completions cut, or too
            little memory.
    """
    prompts = read_rows(inputs.one("prompts").directory / "prompts.parquet", PROMPTS)
    source = params.target.random.model_dump() if params.target.random else inputs.target_path
    if source is None:
        raise PermanentError("the target's directory was not handed to the stage", remedy="Run `dflash run` again.")
    target = load_target(source, params.dtype, host_context.device, kernels=params.kernels)
    requests, ledger = requests_of(prompts, target.tokenizer, params)
    if not requests:
        raise PermanentError(
            f"none of {len(prompts)} prompts can be answered: {sorted({line.reason for line in ledger.values()})}",
            where=str(inputs.one("prompts").directory),
            remedy="A prompt and max_new_tokens must fit into the target's context.",
        )
    done, speed = answer_all(target, requests, params, host_context)
    _write(workdir / "completions.parquet", [done[request.id] for request in requests])
    ledger.update((request.id, LedgerLine(id=request.id, status="ok")) for request in requests)
    counts = write_ledger(workdir / "ledger.jsonl", [ledger[row["id"]] for row in prompts])
    results = summary(list(done.values()), speed)
    return Outputs(["completions.parquet", "ledger.jsonl"], counts, results, target.kernels.to_dict())


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    with TableWriter(path, COMPLETIONS) as writer:
        for start in range(0, len(rows), ROW_GROUP):
            writer.append(rows[start : start + ROW_GROUP])


def summary(rows: Sequence[Mapping[str, Any]], speed: Mapping[str, float]) -> dict[str, Any]:
    """Tokens, how many completions were cut, and the speed of what was generated this time (None when nothing was)."""
    truncated = sum(row["finish_reason"] == "length" for row in rows)
    seconds = speed["seconds"]
    return {
        "completions": len(rows),
        "prompt_tokens": sum(len(row["prompt_ids"]) for row in rows),
        "completion_tokens": sum(len(row["completion_ids"]) for row in rows),
        "truncated": truncated,
        "truncated_share": truncated / len(rows),
        "generated_tokens": int(speed["generated_tokens"]),
        "seconds": round(seconds, 3),
        "tokens_per_second": round(speed["generated_tokens"] / seconds, 1) if seconds > 0 else None,
    }
