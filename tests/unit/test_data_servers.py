"""Servers that misbehave: the right result or a counted refusal, never a hang, a tight loop or another prompt's answer."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator
from email.utils import formatdate
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from data_road import read_ledger, run_completions, run_prompts, target, write_lines
from server_double import END, Double, written

from dflash.base.errors import ConfigError, PermanentError, TransientError
from dflash.data.openai_engine import Answer, Client, Refusal, Sampling, Servers, retry_after
from dflash.data.quality import fault_of, is_loop
from dflash.data.requests import Request
from dflash.data.schemas import COMPLETIONS
from dflash.data.tables import read_rows

Plan = Callable[[int, list[int]], str]
REQUESTS = [Request(f"{number:064x}", "s", "[]", array("i", [number + 1, 5]), number) for number in range(24)]


@pytest.fixture
def doubles() -> Iterator[Callable[[Plan], Double]]:
    """Makes doubles, and closes them."""
    made: list[Double] = []

    def make(plan: Plan = lambda number, prompt: "well") -> Double:
        made.append(Double(plan))
        return made[-1]

    yield make
    for double in made:
        double.close()


def ask(*urls: str, requests: list[Request] = REQUESTS, **values: Any) -> tuple[dict[str, Any], dict[str, Any], Client]:
    """(answers, refusals, client) of all requests, in batches of ten."""
    servers = Servers(urls, **{"timeout": 2.0, "deadline": 8.0, "pause": 0.05, "concurrency": 8, **values})
    client = Client(servers, Sampling(50, 0.0, [END]), target().tokenizer)
    answers: dict[str, Any] = {}
    refusals: dict[str, Any] = {}
    batches = [requests[start : start + 10] for start in range(0, len(requests), 10)]
    ended = []

    def finished(place: int, good: dict[str, Answer], bad: dict[str, Refusal]) -> None:
        assert {*good, *bad} == {request.id for request in batches[place]}
        ended.append(place)
        answers.update(good)
        refusals.update(bad)

    client.answer(batches, finished)
    assert sorted(ended) == list(range(len(batches)))
    return answers, refusals, client


def all_right(answers: dict[str, Answer], requests: list[Request] = REQUESTS) -> bool:
    """Whether every prompt has its own answer."""
    return {name: answer.ids for name, answer in answers.items()} == {
        request.id: written(list(request.prompt_ids)) for request in requests
    }


TROUBLES = (
    "busy 0.2",
    "status 500",
    "status 503",
    "hang",
    "drip",
    "half",
    "closed",
    "empty",
    "disordered",
    "another",
    "list",
)


@pytest.mark.parametrize("trouble", TROUBLES)
def test_one_request_in_three_in_trouble_still_gives_every_prompt_its_own_answer(
    doubles: Callable[[Plan], Double], trouble: str
) -> None:
    double = doubles(lambda number, prompt: trouble if number % 3 == 1 else "well")
    answers, refusals, _ = ask(double.url, attempts=20, deadline=30.0)
    assert refusals == {}
    assert all_right(answers)


@pytest.mark.parametrize("trouble", [name for name in TROUBLES if name not in ("busy 0.2", "status 503")])
def test_a_server_that_never_does_better_ends_in_counted_refusals_before_the_deadline(
    doubles: Callable[[Plan], Double], trouble: str
) -> None:
    double = doubles(lambda number, prompt: trouble)
    start = time.monotonic()
    try:
        answers, refusals, _ = ask(double.url, requests=REQUESTS[:4], attempts=3, deadline=3.0)
    except TransientError as error:
        answers, refusals = {}, dict.fromkeys(range(4), Refusal(str(error)))
    assert time.monotonic() - start < 3.0 + 7
    assert answers == {}
    assert len(refusals) == 4
    assert all(refusal.reason and not refusal.final for refusal in refusals.values())
    # Once the server counts as dead it is asked one at a time, with pauses between.
    gaps = [second - first for first, second in pairwise(double.times[4:])]
    assert len(double.times) <= 4 * 3
    assert all(gap >= 0.05 / 2 for gap in gaps)


def test_too_many_requests_is_obeyed_to_the_second(doubles: Callable[[Plan], Double]) -> None:
    double = doubles(lambda number, prompt: "busy 1" if number == 0 else "well")
    answers, _, _ = ask(double.url, requests=REQUESTS[:1])
    assert all_right(answers, REQUESTS[:1])
    assert double.times[1] - double.times[0] >= 1.0


@pytest.mark.parametrize(("trouble", "status"), [("busy 0.3", 429), ("status 503", 503)])
def test_a_server_that_is_busy_for_ever_ends_at_the_deadline_of_the_request(
    doubles: Callable[[Plan], Double], trouble: str, status: int
) -> None:
    double = doubles(lambda number, prompt: trouble)
    start = time.monotonic()
    _, refusals, _ = ask(double.url, requests=REQUESTS[:2], deadline=1.5)
    assert time.monotonic() - start < 1.5 + 7
    assert {refusal.reason for refusal in refusals.values()} == {f"deadline: status {status}"}
    assert len(double.times) <= 2 * 1.5 / 0.1 + 4


def test_one_of_three_servers_dead_from_the_start_costs_nothing(doubles: Callable[[Plan], Double]) -> None:
    dead = doubles()
    dead.close()
    answers, refusals, client = ask(doubles().url, dead.url, doubles().url)
    assert refusals == {}
    assert all_right(answers)
    assert [end["answered"] > 0 for end in client.about["endpoints"]] == [True, False, True]


def test_a_server_that_dies_in_the_middle_leaves_its_requests_to_the_others(doubles: Callable[[Plan], Double]) -> None:
    def die(number: int, prompt: list[int]) -> str:
        return "well" if number < 3 else "closed"

    answers, refusals, _ = ask(doubles(die).url, doubles().url, attempts=20, deadline=30.0)
    assert refusals == {}
    assert all_right(answers)


def test_no_server_at_all_is_said_at_once(doubles: Callable[[Plan], Double]) -> None:
    dead = doubles()
    dead.close()
    with pytest.raises(TransientError, match="none of 1 servers answers"):
        ask(dead.url)
    with pytest.raises(ConfigError, match="addresses of its servers"):
        ask()


def test_what_cannot_be_retried_is_not(doubles: Callable[[Plan], Double]) -> None:
    double = doubles(lambda number, prompt: "status 400" if prompt[0] == 3 else "well")
    answers, refusals, _ = ask(double.url)
    assert {name: refusal.reason for name, refusal in refusals.items()} == {REQUESTS[2].id: "status 400"}
    assert len(answers) == len(REQUESTS) - 1
    assert len(double.times) == len(REQUESTS)
    with pytest.raises(PermanentError, match="status 404"):
        ask(doubles(lambda number, prompt: "status 404").url)


def test_requests_in_flight_are_bounded(doubles: Callable[[Plan], Double]) -> None:
    double = doubles(lambda number, prompt: "slowly 0.05")
    ask(double.url, concurrency=2)
    in_flight = [sum(start <= time < start + 0.05 for start in double.times) for time in double.times]
    assert max(in_flight) <= 3


def test_everything_that_decides_tokens_is_said(doubles: Callable[[Plan], Double]) -> None:
    double = doubles()
    ask(double.url, requests=REQUESTS[:1])
    (body,) = double.bodies
    assert body["model"] == "the-target"
    assert body["prompt"] == [1, 5]
    assert (body["max_tokens"], body["temperature"], body["top_p"], body["top_k"]) == (50, 0.0, 1.0, -1)
    assert body["stop_token_ids"] == [END]


def test_retry_after_takes_seconds_and_dates() -> None:
    assert retry_after("7") == 7.0
    assert retry_after(None) is retry_after("soon") is retry_after("nan") is None
    assert retry_after("-3") == 0.0
    assert retry_after("1e9") == 3600.0
    date = retry_after(formatdate(time.time() + 20, usegmt=True))
    assert date is not None
    assert 17 < date <= 20


def test_the_stage_counts_what_was_refused_keeps_what_was_answered_and_a_rerun_asks_for_the_rest(
    doubles: Callable[[Plan], Double], tmp_path: Path
) -> None:
    run_prompts(write_lines(tmp_path / "source.jsonl", [{"prompt": f"question {n}"} for n in range(30)]), tmp_path)
    sick: set[int] = set(range(5))
    double = doubles(
        lambda number, prompt: "status 400" if prompt[15] - ord("0") in sick and prompt[16] > 255 else "well"
    )
    placement = {"endpoints": [double.url], "pause": 0.02, "scratch": str(tmp_path / "scratch")}
    values = {"engine": "openai", "max_error_share": 0.1, "placement": placement}
    with pytest.raises(TransientError, match=r"status 400: \d.*at most 10.0%"):
        run_completions(tmp_path, tmp_path / "first", **values)
    asked = len(double.bodies)
    sick.clear()
    outputs = run_completions(tmp_path, tmp_path / "second", **values)
    assert outputs.counts.ok == outputs.counts.total == 30
    assert 0 < len(double.bodies) - asked < 30
    rows = read_rows(tmp_path / "second" / "completions.parquet", COMPLETIONS)
    assert [row["completion_ids"] for row in rows] == [written(row["prompt_ids"]) for row in rows]
    assert outputs.results["engine"]["models"] == ["the-target"]
    assert outputs.results["engine"]["versions"] == ['{"version": "double 1.0"}']


def test_refused_content_is_skipped_by_reason(doubles: Callable[[Plan], Double], tmp_path: Path) -> None:
    run_prompts(write_lines(tmp_path / "source.jsonl", [{"prompt": f"{n}"} for n in range(4)]), tmp_path)
    double = doubles(lambda number, prompt: "filtered" if ord("2") in prompt else "well")
    outputs = run_completions(tmp_path, tmp_path / "out", engine="openai", placement={"endpoints": [double.url]})
    assert outputs.counts.reasons == {"refused": 1}
    assert [line["status"] for line in read_ledger(tmp_path / "out")] == ["ok", "ok", "skipped", "ok"]


@pytest.mark.parametrize(("trouble", "reason"), [("filtered", "refused"), ("reread", "prompt read as other tokens")])
def test_a_source_whose_every_request_is_refused_is_not_done(
    doubles: Callable[[Plan], Double], tmp_path: Path, trouble: str, reason: str
) -> None:
    run_prompts(write_lines(tmp_path / "source.jsonl", [{"prompt": f"{n}"} for n in range(4)]), tmp_path)
    double = doubles(lambda number, prompt: trouble)
    with pytest.raises(PermanentError, match=f"none of 4 requests was answered: {reason}: 4"):
        run_completions(tmp_path, tmp_path / "out", engine="openai", placement={"endpoints": [double.url]})


def test_prompts_read_as_other_tokens_count_toward_the_share_of_errors(
    doubles: Callable[[Plan], Double], tmp_path: Path
) -> None:
    run_prompts(write_lines(tmp_path / "source.jsonl", [{"prompt": f"{n}"} for n in range(4)]), tmp_path)
    double = doubles(lambda number, prompt: "reread" if ord("2") in prompt else "well")
    with pytest.raises(TransientError, match="1 of 4 requests got no answer"):
        run_completions(tmp_path, tmp_path / "out", engine="openai", placement={"endpoints": [double.url]})


def test_an_end_token_at_the_limit_needs_proof() -> None:
    client = Client(Servers(["http://x/v1"]), Sampling(4, 0.0, [END]), target().tokenizer)
    found = client._ended([10, 11, 12], "length", 4, {"stop_reason": None})
    assert found == Refusal("tokens do not follow from the text")
    assert client._ended([10, 11, 12], "length", 4, {"stop_reason": END}) == Answer([10, 11, 12, END], "stop")


def test_empty_completions_and_loops_are_told_from_others() -> None:
    stops = frozenset([END])
    assert fault_of([END], "stop", stops) == "empty"
    assert fault_of([], "length", stops) == "empty"
    assert fault_of([1, 2, 3] * 20, "length", stops) == "loop"
    assert fault_of([1, 2, 3] * 20, "stop", stops) == ""
    assert fault_of(list(range(100)), "length", stops) == ""
    assert is_loop(list(range(50)) + [9] * 40)
    assert not is_loop([9] * 20)
