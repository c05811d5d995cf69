"""Continuations from a server that speaks the OpenAI completions interface (vLLM, SGLang), where the target runs faster.

A server computes with kernels, types and batches of its own, so what it calls greedy need not be what the local target would
write. So every token is compared with the local target's most probable one after the same text: the share that agrees is part
of the result, and a low one says that the server runs another model or samples.

Prompts go out as token ids, so that no template or tokenizer of the server comes in between. Token ids come back where the
server gives them (vLLM: `return_token_ids`); a server that gives text alone is refused, since text does not say which tokens
it was made of. Everything that decides tokens is said in the request, since servers otherwise take what the model's generation
config says, and a repetition penalty changes greedy text too. An end token that a server leaves out is put back; an answer that
ends for another reason before its limit is refused, since nobody would draft on as the target would.

Cost: one request a prompt, `parallel` at a time; the check is one forward of the local target a request, with logits of
`CHUNK` tokens at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import torch

from dflash.base.errors import ConfigError, PermanentError, TransientError
from dflash.model.target import Target

CHUNK = 256
TIMEOUT = 600.0
"""Seconds that one request may take."""


def continue_on_server(
    url: str,
    model: str,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    stop_ids: Sequence[int],
    *,
    parallel: int,
    progress: Callable[[int], None] = lambda done: None,
    api_key_variable: str | None = None,
) -> list[tuple[list[int], str]]:
    """Greedy continuations in the order of `prompts`: (token ids, `stop` or `length`), the stop token included.

    Args:
        url: of the server, without `/v1`. model: what the server calls the target.
        limits: most new tokens of each. api_key_variable: the environment variable that holds the server's key, if any.

    Raises:
        TransientError: the server cannot be reached, or is overloaded.
        PermanentError: it refuses a request, or gives no token ids. ConfigError: the key's variable is not set.
    """
    headers = _headers(api_key_variable)
    with httpx.Client(base_url=url, timeout=TIMEOUT, headers=headers) as client, ThreadPoolExecutor(parallel) as pool:
        asked = [
            pool.submit(_continue, client, model, list(prompt), limit, list(stop_ids))
            for prompt, limit in zip(prompts, limits, strict=True)
        ]
        found = []
        try:
            for number, answer in enumerate(asked):
                found.append(answer.result())
                progress(number + 1)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # what has not been asked yet is not asked for nothing
            raise
        return found


def _headers(variable: str | None) -> dict[str, str]:
    if variable is None:
        return {}
    if variable not in os.environ:
        raise ConfigError(f"the variable {variable} is not set", where="references.api_key_variable")
    return {"Authorization": f"Bearer {os.environ[variable]}"}


def _continue(
    client: httpx.Client, model: str, prompt: list[int], limit: int, stop_ids: list[int]
) -> tuple[list[int], str]:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": limit,
        "temperature": 0,
        "top_p": 1.0,
        "top_k": -1,
        "repetition_penalty": 1.0,
        "skip_special_tokens": False,
        "stop_token_ids": stop_ids,
        "return_token_ids": True,
    }
    try:
        answer = client.post("/v1/completions", json=body)
    except httpx.HTTPError as error:
        raise TransientError(f"no answer: {error}", where=str(client.base_url), remedy="Is the server up?") from error
    if answer.status_code >= 500 or answer.status_code == 429:
        raise TransientError(f"status {answer.status_code}", where=str(client.base_url), remedy="Try again later.")
    if answer.status_code != 200:
        raise PermanentError(f"status {answer.status_code}: {answer.text[:200]}", where=str(client.base_url))
    tokens, choice = _token_ids(answer, str(client.base_url))
    return _ended(tokens[:limit], limit, stop_ids, choice, str(client.base_url))


def _ended(
    tokens: list[int], limit: int, stop_ids: list[int], choice: dict[str, Any], where: str
) -> tuple[list[int], str]:
    """The tokens up to and including the first end token, or to the limit."""
    ends = [place for place, token in enumerate(tokens) if token in stop_ids]
    if ends:
        return tokens[: ends[0] + 1], "stop"
    if len(tokens) == limit:
        return tokens, "length"
    if choice.get("finish_reason") == "stop" and stop_ids:
        named = choice.get("stop_reason")
        return [*tokens, named if named in stop_ids else stop_ids[0]], "stop"
    raise PermanentError(
        f"the server ended after {len(tokens)} of {limit} tokens, at no end token: {choice.get('finish_reason')}",
        where=where,
        remedy="Serve the target with its whole context, or lower references.max_new_tokens.",
    )


def _token_ids(answer: httpx.Response, where: str) -> tuple[list[int], dict[str, Any]]:
    """The tokens of the answer, and all that is said of it."""
    try:
        choice: dict[str, Any] = answer.json()["choices"][0]
        tokens = choice.get("token_ids")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise PermanentError(f"not an answer of the completions interface: {answer.text[:200]}", where=where) from error
    if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
        raise PermanentError(
            "the server gives no token ids", where=where, remedy="Use one that knows `return_token_ids`, such as vLLM."
        )
    return tokens, choice


@torch.no_grad()
def agreement(target: Target, prompt: Sequence[int], output: Sequence[int]) -> int:
    """How many tokens of `output` are the local target's most probable ones after all that stands before them."""
    ids = torch.tensor([[*prompt, *output]], device=target.device)
    hidden = target.model.model(input_ids=ids, use_cache=False).last_hidden_state[0, len(prompt) - 1 : -1]
    chosen = torch.cat([target.lm_head(part).argmax(-1) for part in hidden.split(CHUNK)])
    return int((chosen == ids[0, len(prompt) :]).sum())
