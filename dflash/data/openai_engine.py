"""Completions from OpenAI-compatible servers (SGLang, vLLM, `transformers serve`): many requests at once, none lost.

One request asks for one prompt, so that no order of answers can mix them up, and an answer counts only when it can be proved:
the server must have read as many tokens as were rendered, and the token ids it wrote must come back, or follow from its text
with the number it reports. What may be retried is (429, 5xx, closed connections, hangs, half an answer), with pauses that
grow, as the server asks (Retry-After) where it does, and never without one. Each endpoint has its own limit of requests in
flight, which grows by one a round of answers and halves when the endpoint is busy; one that fails again and again is asked
only now and then. Every request ends by its deadline: answered, or refused for a reason that is counted.

Which endpoints, how many at once and how patiently is placement. Costs 1 ms a request; memory is that of the requests in
flight and of batches begun.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from dflash.base.errors import ConfigError, PermanentError, TransientError
from dflash.data.requests import Request

DEAD = 4
"""Failures in a row after which an endpoint counts as dead: one request at a time tries whether it is back."""
LONGEST_PAUSE = 30.0


@dataclass(frozen=True)
class Servers:
    """Placement of the engine.

    endpoints: base addresses, `http://host:port/v1`. model: what requests ask for; the first that a server lists when left out.
    prompts: `ids`, or `text` for servers that take no ids. concurrency: most requests in flight an endpoint. timeout: seconds
    an answer may take. deadline: seconds a request may take with all its retries. attempts: failures of its own that a request
    survives. pause: first pause after a failure, in seconds; it doubles. api_key_variable: where the key is, if any.
    """

    endpoints: Sequence[str]
    model: str | None = None
    prompts: str = "ids"
    concurrency: int = 64
    timeout: float = 600.0
    deadline: float = 3600.0
    attempts: int = 6
    pause: float = 0.5
    api_key_variable: str | None = None


@dataclass(frozen=True)
class Sampling:
    """What of the params decides the tokens. stop_ids: tokens that end a completion."""

    max_new_tokens: int
    temperature: float
    stop_ids: Sequence[int]


@dataclass(frozen=True)
class Answer:
    """What the target wrote: ids, end token included, and `stop` or `length`."""

    ids: list[int]
    finish_reason: str


@dataclass(frozen=True)
class Refusal:
    """Why there is no answer, in words to be counted. final: asking again would change nothing."""

    reason: str
    final: bool = False


@dataclass(frozen=True)
class Retry:
    """An attempt that failed. own: whether it counts against the request rather than the endpoint alone."""

    reason: str
    own: bool = True


@dataclass
class Endpoint:
    """One server, and how it has been doing."""

    url: str
    model: str
    most: int
    pause: float
    limit: float = 4.0
    in_flight: int = 0
    failures: int = 0
    rest_until: float = 0.0
    answered: int = 0
    failed: int = 0

    def free(self, now: float) -> bool:
        """Whether it may be asked now."""
        allowed = 1 if self.failures >= DEAD else max(1, int(self.limit))
        return now >= self.rest_until and self.in_flight < allowed

    def well(self) -> None:
        """It has answered."""
        self.failures = 0
        self.answered += 1
        self.limit = min(float(self.most), self.limit + 1.0 / max(self.limit, 1.0))

    def busy(self, now: float, wanted: float | None) -> None:
        """It asks to be left alone, for `wanted` seconds where it says how long."""
        self.failed += 1
        self.failures = min(self.failures + 1, DEAD - 1)
        self.limit = max(1.0, self.limit / 2)
        self.rest(now, wanted)

    def ill(self, now: float) -> None:
        """It has failed."""
        self.failed += 1
        self.failures += 1
        self.limit = max(1.0, self.limit / 2)
        self.rest(now, None)

    def rest(self, now: float, wanted: float | None) -> None:
        """No request before the pause is over: as asked, or doubled with each failure, spread by chance."""
        grown = min(LONGEST_PAUSE, self.pause * 2.0 ** min(self.failures - 1, 10))
        seconds = wanted if wanted is not None else grown * random.uniform(0.5, 1.5)
        self.rest_until = max(self.rest_until, now + max(seconds, self.pause / 2))


Finished = Callable[[int, dict[str, Answer], dict[str, Refusal]], None]


@dataclass
class Client:
    """Asks the servers. `tokenizer` turns text back into ids where a server gives none."""

    servers: Servers
    sampling: Sampling
    tokenizer: Any
    about: dict[str, Any] = field(default_factory=dict)

    def answer(self, batches: Sequence[Sequence[Request]], finished: Finished) -> None:
        """Answers all requests; tells `finished` of each batch as it ends: its place, answers and refusals by id.

        Raises:
            PermanentError: a server refuses for good (no such model, no right to ask). TransientError: none is alive.
            ConfigError: no endpoint is named, or the key's variable is not set.
        """
        if not self.servers.endpoints:
            raise ConfigError(
                "engine `openai` needs the addresses of its servers",
                where="completions.endpoints",
                remedy="Give a list such as [http://localhost:8000/v1].",
            )
        asyncio.run(self._answer(batches, finished))

    async def _answer(self, batches: Sequence[Sequence[Request]], finished: Finished) -> None:
        async with httpx.AsyncClient(
            headers=self._headers(), timeout=self.servers.timeout, limits=httpx.Limits(max_connections=None)
        ) as http:
            self.http = http
            self.endpoints = await self._meet()
            self.changed = asyncio.Event()
            self.last_answer = time.monotonic()
            work = ((place, request) for place, batch in enumerate(batches) for request in batch)
            left = [len(batch) for batch in batches]
            answers: dict[int, dict[str, Answer]] = {}
            refusals: dict[int, dict[str, Refusal]] = {}

            async def worker() -> None:
                for place, request in work:
                    found = await self._ask(request)
                    where: dict[int, dict[str, Any]] = answers if isinstance(found, Answer) else refusals
                    where.setdefault(place, {})[request.id] = found
                    left[place] -= 1
                    if left[place] == 0:
                        finished(place, answers.pop(place, {}), refusals.pop(place, {}))

            workers = [asyncio.create_task(worker()) for _ in range(self.servers.concurrency * len(self.endpoints))]
            try:
                await asyncio.gather(*workers)
            finally:
                for task in workers:
                    task.cancel()
                await asyncio.gather(*workers, return_exceptions=True)
        self.about["endpoints"] = [{"answered": end.answered, "failed": end.failed} for end in self.endpoints]

    def _headers(self) -> dict[str, str]:
        variable = self.servers.api_key_variable
        if variable is None:
            return {}
        if variable not in os.environ:
            raise ConfigError(f"the variable {variable} is not set", where="completions.api_key_variable")
        return {"Authorization": f"Bearer {os.environ[variable]}"}

    async def _meet(self) -> list[Endpoint]:
        """Asks every server which model it serves and what it is; a dead one is kept, and tried later."""
        urls = [url.rstrip("/") for url in self.servers.endpoints]
        found = await asyncio.gather(*(self._introduce(url) for url in urls))
        models = [model for model, _ in found if model is not None]
        if not models:
            raise TransientError(
                f"none of {len(urls)} servers answers: {', '.join(urls)}",
                where="completions.endpoints",
                remedy="Start them, or correct the addresses.",
            )
        self.about["models"] = sorted(set(models))
        self.about["versions"] = sorted({version for _, version in found if version})
        endpoints = [
            Endpoint(url, self.servers.model or model or models[0], self.servers.concurrency, self.servers.pause)
            for url, (model, _) in zip(urls, found, strict=True)
        ]
        for endpoint, (model, _) in zip(endpoints, found, strict=True):
            endpoint.limit = min(endpoint.limit, float(endpoint.most))
            if model is None:
                endpoint.failures = DEAD
                endpoint.rest(time.monotonic(), None)
        return endpoints

    async def _introduce(self, url: str) -> tuple[str | None, str]:
        """(model it lists first, what software it says it is)."""
        try:
            async with asyncio.timeout(min(10.0, self.servers.timeout)):
                listed = await self.http.get(f"{url}/models")
                version = await self.http.get(f"{url.removesuffix('/v1')}/version")
            names = [item["id"] for item in listed.json()["data"]]
        except (httpx.HTTPError, TimeoutError, ValueError, KeyError, TypeError):
            return None, ""
        said = version.text.strip()[:80] if version.status_code == 200 else ""
        wanted = self.servers.model or (names[0] if names else None)
        return wanted, said or listed.headers.get("server", "")

    async def _ask(self, request: Request) -> Answer | Refusal:
        """One request to its end."""
        end = time.monotonic() + self.servers.deadline
        failures, last = 0, "no server was free"
        while True:
            endpoint = await self._free_endpoint(end)
            if endpoint is None:
                return Refusal(f"deadline: {last}")
            endpoint.in_flight += 1
            try:
                found = await self._once(endpoint, request, end)
            finally:
                endpoint.in_flight -= 1
                self.changed.set()
            if isinstance(found, Retry):
                last = found.reason
                failures += found.own
                if failures >= self.servers.attempts:
                    return Refusal(last)
                continue
            self.last_answer = time.monotonic()
            return found

    async def _free_endpoint(self, end: float) -> Endpoint | None:
        """The least busy endpoint that may be asked; waits for one, None when the deadline comes first."""
        while True:
            now = time.monotonic()
            if now >= end:
                return None
            self._give_up_if_all_are_dead(now)
            free = [endpoint for endpoint in self.endpoints if endpoint.free(now)]
            if free:
                return min(free, key=lambda item: (item.failures, item.in_flight / max(item.limit, 1.0)))
            rests = [item.rest_until - now for item in self.endpoints if item.rest_until > now]
            self.changed.clear()
            try:
                async with asyncio.timeout(max(0.01, min([end - now, 1.0, *rests]))):
                    await self.changed.wait()
            except TimeoutError:
                continue

    def _give_up_if_all_are_dead(self, now: float) -> None:
        """Waiting for every request's deadline in turn would take days."""
        if all(item.failures >= DEAD for item in self.endpoints) and now - self.last_answer > self.servers.deadline / 2:
            raise TransientError(
                f"no server has answered for {now - self.last_answer:.0f} s: {', '.join(self.servers.endpoints)}",
                where="completions.endpoints",
                remedy="Start them and run again; finished completions are kept.",
            )

    async def _once(self, endpoint: Endpoint, request: Request, end: float) -> Answer | Refusal | Retry:
        """One attempt at one endpoint."""
        seconds = min(self.servers.timeout, end - time.monotonic())
        try:
            async with asyncio.timeout(seconds):
                response = await self.http.post(f"{endpoint.url}/completions", json=self._body(endpoint, request))
        except (TimeoutError, httpx.TimeoutException):
            endpoint.ill(time.monotonic())
            return Retry("timeout")
        except httpx.ConnectError:
            endpoint.ill(time.monotonic())
            return Retry("no connection", own=False)
        except httpx.HTTPError:
            endpoint.ill(time.monotonic())
            return Retry("connection lost")
        if response.status_code != 200:
            return self._turned_down(endpoint, response)
        try:
            document = response.json()
            choices = document["choices"]
        except (ValueError, KeyError, TypeError, AttributeError):
            endpoint.ill(time.monotonic())
            return Retry("not a whole answer")
        if not choices:
            endpoint.ill(time.monotonic())
            return Retry("no choices")
        try:
            found = self._proved(request, document, choices)
        except (KeyError, TypeError, ValueError, AttributeError):
            endpoint.ill(time.monotonic())
            return Retry("not an answer")
        if isinstance(found, Retry):
            endpoint.ill(time.monotonic())
        else:
            endpoint.well()
        return found

    def _turned_down(self, endpoint: Endpoint, response: httpx.Response) -> Refusal | Retry:
        status = response.status_code
        if status in (429, 503):
            endpoint.busy(time.monotonic(), retry_after(response.headers.get("retry-after")))
            return Retry(f"status {status}", own=False)
        if status in (401, 403, 404):
            raise PermanentError(
                f"the server refuses with status {status}: {response.text.strip()[:200]}",
                where=endpoint.url,
                remedy="Look at completions.model, api_key_variable and the address.",
            )
        if status >= 500 or status in (408, 409, 425):
            endpoint.ill(time.monotonic())
            return Retry(f"status {status}")
        endpoint.failed += 1
        self.about.setdefault("refused", response.text.strip()[:200])
        return Refusal(f"status {status}")

    def _body(self, endpoint: Endpoint, request: Request) -> dict[str, Any]:
        """The request. Everything that decides tokens is said, so that a server's own defaults decide none."""
        body: dict[str, Any] = {
            "model": endpoint.model,
            "max_tokens": self.sampling.max_new_tokens,
            "temperature": self.sampling.temperature,
            "top_p": 1.0,
            "stream": False,
        }
        if self.sampling.temperature > 0:
            body["seed"] = request.seed % 2**31
        if self.servers.prompts == "text":
            return {**body, "prompt": self.tokenizer.decode(list(request.prompt_ids), skip_special_tokens=False)}
        return {
            **body,
            "prompt": list(request.prompt_ids),
            "return_token_ids": True,
            "skip_special_tokens": False,
            "top_k": -1,
            "repetition_penalty": 1.0,
            "stop_token_ids": list(self.sampling.stop_ids),
        }

    def _proved(self, request: Request, document: dict[str, Any], choices: Any) -> Answer | Refusal | Retry:
        """The answer, if it is one to this prompt and its token ids are certain."""
        if len(choices) != 1 or choices[0].get("index", 0) != 0:
            return Retry("answers out of order")
        choice, usage = choices[0], document.get("usage") or {}
        prompt = choice.get("prompt_token_ids") or document.get("prompt_token_ids")
        if prompt is not None and prompt != list(request.prompt_ids):
            return Retry("answer to another prompt")
        if usage.get("prompt_tokens") not in (None, len(request.prompt_ids)):
            return Refusal("prompt read as other tokens")
        reason = choice["finish_reason"]
        if reason == "content_filter":
            return Refusal("refused", final=True)
        ids = choice.get("token_ids")
        if ids is None:
            text = choice["text"]
            ids = [int(token) for token in self.tokenizer(text, add_special_tokens=False)["input_ids"]]
            if self.tokenizer.decode(ids, skip_special_tokens=False) != text:
                return Refusal("tokens do not follow from the text")
        return self._ended([int(token) for token in ids], reason, usage.get("completion_tokens"), choice)

    def _ended(self, ids: list[int], reason: str, counted: int | None, choice: dict[str, Any]) -> Answer | Refusal:
        """Adds the end token where a server leaves it out; checks the number of tokens that it reports."""
        stops = set(self.sampling.stop_ids)
        if stops and (not ids or ids[-1] not in stops):
            said = choice.get("stop_reason")
            # Text alone cannot tell an end token at the limit from text that has one token less when it is read again.
            named = isinstance(said, int) and said in stops
            at_limit = reason != "stop" and counted == len(ids) + 1 and named
            if (reason == "stop" and counted in (None, len(ids) + 1)) or at_limit:
                ids = [*ids, self._end_token(choice)]
        if counted is not None and counted != len(ids):
            return Refusal("tokens do not follow from the text")
        if ids and ids[-1] in stops:
            return Answer(ids, "stop")
        if len(ids) < self.sampling.max_new_tokens:
            return Refusal(f"ended by the server: {reason}")
        return Answer(ids, "length")

    def _end_token(self, choice: dict[str, Any]) -> int:
        said = choice.get("stop_reason")
        if isinstance(said, int) and said in self.sampling.stop_ids:
            return said
        own = getattr(self.tokenizer, "eos_token_id", None)
        return own if isinstance(own, int) and own in self.sampling.stop_ids else self.sampling.stop_ids[0]


def retry_after(value: str | None) -> float | None:
    """Seconds that a server asks to wait (a number or a date, RFC 9110 section 10.2.3), an hour at most; None when unsaid."""
    if not value:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError):
            return None
    return min(max(seconds, 0.0), 3600.0) if seconds == seconds else None


def words_of(refusals: dict[str, int]) -> str:
    """`3 timeout, 1 status 500`."""
    return json.dumps(refusals)[1:-1].replace('"', "")
