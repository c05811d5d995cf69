"""The `references` stage: the target's own greedy continuations of the evaluation prompts, and their features.

The continuations are the truth that every checkpoint is judged against, made once for each kernel. An evaluation prompt that
was also trained on is refused, since its tau would flatter.

Cost: one greedy generation of `max_new_tokens` a prompt, `batch_size` prompts together, and one forward a request for its
features (see `features.py` for their size on disk). As in `completions`, another `batch_size`, device or library may turn a
near tie between two tokens: the shape of a matrix product moves its last bits. Continuations may come from a server instead
(`server.py`); the share of their tokens that the local target agrees with is then part of the result.

Memory: the target, which may lie on several devices (`target_devices`); a shard of features (64 MB, see `features.py`); tokens
and messages of all requests, 4 kB a short one (10,000 prompts: `tests/bench/many_references.py`).

Files: `references.parquet` (`schemas.REFERENCES`, prompt sets in the order of the config), `features-<i>.safetensors`,
`features.json`, `tags.json` where prompts have tags (`tags.py`), and `probe.safetensors`: the features of fixed sequences under
these kernels, which every evaluation compares with those of the training.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from jinja2.exceptions import TemplateError

from dflash.base.canonical import canonical_json
from dflash.base.errors import ConfigError
from dflash.base.records import Counts
from dflash.base.stage import HostContext, Inputs, Outputs
from dflash.data.chat import length_limit, render
from dflash.data.prompt_sets import tags_by_line
from dflash.data.prompts import Message, external_file, messages_id, read_prompts
from dflash.data.prompts_params import PromptsParams
from dflash.data.schemas import REFERENCES
from dflash.data.tables import TableWriter
from dflash.evaluate.features import FeatureWriter, compute_features
from dflash.evaluate.overlap import stored_messages
from dflash.evaluate.references_params import PromptSet, ReferencesParams
from dflash.evaluate.server import agreement, continue_on_server
from dflash.evaluate.tags import places_of, write_places
from dflash.model.identity import target_source
from dflash.model.probe import FILE as PROBE
from dflash.model.probe import target_probe
from dflash.model.target import DTYPES, Target, load_target

Tokens = Sequence[int]
"""Kept as arrays of 4 bytes a token: 10,000 requests of 600 tokens are 24 MB, as lists ten times that."""


@dataclass(frozen=True)
class Request:
    """An evaluation prompt; `prompt` is what the target reads."""

    prompt_set: str
    id: str
    messages: list[Message]
    prompt: Tokens


def run(params: ReferencesParams, inputs: Inputs, workdir: Path, host_context: HostContext) -> Outputs:
    """The stage.

    Raises:
        ConfigError: a prompt set is empty, has an id twice, or has a malformed line; a prompt is too long.
        PermanentError: a file changed since the plan was made.
    """
    by_set = {item.name: read_prompt_set(item, inputs) for item in params.prompt_sets}
    placement = host_context.placement
    devices = placement.get("target_devices", params.target_devices) or host_context.device
    target = load_target(
        target_source(params.target, inputs.target_path), params.dtype, devices, kernels=params.kernels
    )
    longest = params.target.max_position_embeddings
    check_tokenizer(target)
    requests = [
        _request(name, messages, target, params.thinking, longest)
        for name, prompts in by_set.items()
        for messages, _ in prompts
    ]
    tags = write_places(workdir, places_of({name: [own for _, own in found] for name, found in by_set.items()}))
    together = placement.get("batch_size", params.batch_size)
    if params.engine == "openai":
        continuations = ask_server(target, requests, params, longest, together, host_context)
    else:
        continuations = continue_all(target, requests, params.max_new_tokens, longest, together, host_context)
    summaries: dict[str, Counter[str]] = {name: Counter() for name in by_set}
    cap = placement.get("features_cache_gb", params.features_cache_gb) * 1e9
    writer = FeatureWriter(workdir, params.taps, params.kernels, params.dtype, cap)
    caching = True
    with TableWriter(workdir / "references.parquet", REFERENCES) as table:
        for number, (request, (output, reason)) in enumerate(zip(requests, continuations, strict=True)):
            table.append([_row(request, output, reason)])
            _count(summaries[request.prompt_set], request, output, reason)
            if params.engine == "openai":
                summaries[request.prompt_set]["agreeing"] += agreement(target, request.prompt, output)
            # The first that does not fit ends it, so that what is cached is a prefix of the rows.
            caching = caching and cache_features(writer, target, [*request.prompt, *output], params, request.id)
            host_context.progress.update(number + 1, len(requests), "features")
    target_probe(target, params.target, params.taps).write(workdir / PROBE)
    return Outputs(
        ["references.parquet", *writer.close(), *tags, PROBE],
        Counts(total=len(requests), ok=len(requests)),
        {
            "prompt_sets": {name: _summary(counts, params.engine) for name, counts in summaries.items()},
            "features": {"cached_requests": writer.count, "bytes": writer.bytes},
            "chat": {"thinking": params.thinking, "template_sha256": template_digest(target.tokenizer)},
        },
        {"target": target.kernels.to_dict()},
    )


def check_tokenizer(target: Target) -> None:
    """Refuses a tokenizer that gives tokens which the target does not know: it is another model's.

    Raises:
        ConfigError: names both sizes.
    """
    largest = max(target.tokenizer.get_vocab().values())
    if largest >= target.facts.vocab_size:
        raise ConfigError(
            f"the tokenizer gives tokens up to {largest}, the target knows {target.facts.vocab_size}",
            where="target.path",
            remedy="The directory holds the tokenizer of another model; put the target's own there.",
        )


def template_digest(tokenizer: Any) -> str | None:
    """sha256 of the chat template that renders the prompts; None when there is none."""
    template = tokenizer.chat_template
    return None if template is None else hashlib.sha256(canonical_json(template)).hexdigest()


def read_prompt_set(prompt_set: PromptSet, inputs: Inputs) -> list[tuple[list[Message], list[str]]]:
    """The messages of a set's prompts with the tags of each, in file order.

    Raises:
        ConfigError: malformed line, no prompt, or a prompt twice.
    """
    where = f"references.prompt_sets.{prompt_set.name}"
    prompts: list[tuple[list[Message], list[str]]]
    if prompt_set.held_out:
        prompts = [(held, []) for held in stored_messages(inputs.one("dataset").directory / "validation.parquet")]
    else:
        path = external_file(inputs, prompt_set.digest or "", f"the file of prompt set {prompt_set.name!r}")
        source = PromptsParams(name=prompt_set.name, path=str(path), digest=prompt_set.digest or "")
        tags = {} if path.suffix == ".parquet" else tags_by_line(path)
        prompts = [(prompt.messages, tags.get(prompt.line, [])) for prompt in read_prompts(path, source)]
    prompts = prompts[: prompt_set.limit]
    if not prompts:
        remedy = "Raise dataset.validation_share." if prompt_set.held_out else "Give at least one line."
        raise ConfigError("the prompt set is empty", where=where, remedy=remedy)
    twice = [name for name, count in Counter(messages_id(messages) for messages, _ in prompts).items() if count > 1]
    if twice:
        raise ConfigError(
            f"{len(twice)} prompts stand in it more than once, id {twice[0][:12]} first",
            where=where,
            remedy="Keep one line of each.",
        )
    return prompts


def _request(prompt_set: str, messages: list[Message], target: Target, thinking: bool, longest: int) -> Request:
    identity, where = messages_id(messages), f"references.prompt_sets.{prompt_set}"
    try:
        prompt = render(target.tokenizer, messages, thinking=thinking)
    except TemplateError as error:
        raise ConfigError(
            f"the target's chat template refuses prompt {identity[:12]}: {error.message}",
            where=where,
            remedy="Take the prompt out of the set.",
        ) from error
    if len(prompt) >= longest:
        raise ConfigError(
            f"prompt {identity[:12]} has {len(prompt)} tokens, the target's context {longest}",
            where=where,
            remedy="Take the prompt out of the set.",
        )
    return Request(prompt_set, identity, messages, array("i", prompt))


def continue_all(
    target: Target,
    requests: Sequence[Request],
    max_new_tokens: int,
    longest: int,
    batch_size: int,
    host_context: HostContext,
) -> list[tuple[Tokens, str]]:
    """Greedy continuations in the order of `requests`: (token ids, `stop` or `length`); prompts of like length together."""

    def limit(row: int) -> int:
        return length_limit(max_new_tokens, longest, len(requests[row].prompt))

    done: dict[int, tuple[Tokens, str]] = {}
    order = sorted(range(len(requests)), key=lambda row: (limit(row), len(requests[row].prompt), row))
    for most, group in groupby(order, key=limit):
        rows = list(group)
        for start in range(0, len(rows), batch_size):
            batch = rows[start : start + batch_size]
            outputs = target.generate([list(requests[row].prompt) for row in batch], most)
            done.update(
                {row: (array("i", tokens), reason) for row, (tokens, reason) in zip(batch, outputs, strict=True)}
            )
            host_context.progress.update(len(done), len(requests), "continuations")
    return [done[row] for row in range(len(requests))]


def ask_server(
    target: Target,
    requests: Sequence[Request],
    params: ReferencesParams,
    longest: int,
    parallel: int,
    host_context: HostContext,
) -> list[tuple[Tokens, str]]:
    """Continuations of a server in the order of `requests`.

    Raises:
        ConfigError: no server is named on this host.
    """
    url = host_context.placement.get("server_url", params.server_url)
    if url is None or params.server_model is None:
        raise ConfigError(
            "`references.engine: openai` has no server", where="references.server_url", remedy="Say where it runs."
        )
    found = continue_on_server(
        url,
        params.server_model,
        [request.prompt for request in requests],
        [length_limit(params.max_new_tokens, longest, len(request.prompt)) for request in requests],
        target.facts.eos_ids,
        parallel=parallel,
        progress=lambda done: host_context.progress.update(done, len(requests), "continuations of the server"),
        api_key_variable=host_context.placement.get("api_key_variable", params.api_key_variable),
    )
    return [(array("i", tokens), reason) for tokens, reason in found]


@torch.no_grad()
def cache_features(
    writer: FeatureWriter, target: Target, tokens: Sequence[int], params: ReferencesParams, name: str
) -> bool:
    """Computes and keeps the features of one request; False, and nothing done, when they do not fit under the cap."""
    width = len(params.taps) * target.facts.hidden_size
    if not writer.fits(len(tokens), width, DTYPES[params.dtype].itemsize):
        return False
    writer.add(tokens, compute_features(target, tokens, params.taps, name[:12]))
    return True


def _row(request: Request, output: Sequence[int], reason: str) -> dict[str, Any]:
    return {
        "prompt_set": request.prompt_set,
        "id": request.id,
        "messages": canonical_json(request.messages).decode(),
        "prompt_ids": request.prompt,
        "output_ids": output,
        "finish_reason": reason,
    }


def _count(counts: Counter[str], request: Request, output: Sequence[int], reason: str) -> None:
    counts["requests"] += 1
    counts["prompt_tokens"] += len(request.prompt)
    counts["output_tokens"] += len(output)
    counts["truncated"] += reason == "length"


def _summary(counts: Counter[str], engine: str) -> dict[str, Any]:
    """Counts of one set; `truncated_share` is the share of continuations cut at the length limit, `agreement` the share of a
    server's tokens that are the local target's most probable ones."""
    told: dict[str, Any] = {name: counts[name] for name in ("requests", "prompt_tokens", "output_tokens")}
    if engine == "openai":
        told["agreement"] = counts["agreeing"] / counts["output_tokens"]
    return {**told, "truncated_share": counts["truncated"] / counts["requests"]}
