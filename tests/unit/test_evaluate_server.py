"""Continuations from a server: asked for by token ids, checked against the local target, refused where they cannot be."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from evaluate_road import Road, references_params
from evaluate_samples import target

from dflash.base.errors import ConfigError, PermanentError, TransientError
from dflash.data.schemas import REFERENCES
from dflash.data.tables import read_rows
from dflash.evaluate.server import _headers, continue_on_server

Answer = Callable[[dict[str, Any]], tuple[int, Any]]


@contextmanager
def serving(answer: Answer) -> Iterator[str]:
    """A server that answers completions requests; yields its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, body = answer(asked) if self.path == "/v1/completions" else (404, {})
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def honest(asked: dict[str, Any]) -> tuple[int, Any]:
    """What the target itself would say."""
    assert asked["temperature"] == 0
    assert asked["model"] == "tiny"
    ((output, reason),) = target("dense").generate([asked["prompt"]], asked["max_tokens"])
    return 200, {"choices": [{"token_ids": output, "text": "", "finish_reason": reason}]}


def slightly_other(asked: dict[str, Any]) -> tuple[int, Any]:
    """As the target, but for the third token."""
    status, body = honest(asked)
    body["choices"][0]["token_ids"][2] = 7
    return status, body


def asked_of(road: Road, url: str | None) -> Any:
    placement = {"server_url": url} if url else {}
    return road.references("served", engine="openai", server_model="tiny", placement=placement)


@pytest.fixture
def road(tmp_path: Path) -> Road:
    return Road(tmp_path / "road")


def test_an_honest_server_gives_the_references_of_the_local_target(road: Road) -> None:
    with serving(honest) as url:
        made = asked_of(road, url)
    road.references("local")
    served, local = (read_rows(road.root / name / "references.parquet", REFERENCES) for name in ("served", "local"))
    assert served == local
    assert made.results["prompt_sets"]["held_out"]["agreement"] == 1.0


def test_tokens_that_the_target_would_not_write_lower_the_agreement(road: Road) -> None:
    with serving(slightly_other) as url:
        summary = asked_of(road, url).results["prompt_sets"]["held_out"]
    wrong = summary["output_tokens"] * (1 - summary["agreement"])
    assert round(wrong) >= summary["requests"] == 2


@pytest.mark.parametrize(
    ("answer", "error", "said"),
    [
        (lambda asked: (400, {"error": "too long"}), PermanentError, "status 400.*too long"),
        (lambda asked: (503, {}), TransientError, "status 503"),
        (lambda asked: (200, {"choices": [{"text": "words"}]}), PermanentError, "gives no token ids"),
        (lambda asked: (200, {"hello": 1}), PermanentError, "not an answer of the completions interface"),
    ],
    ids=["refusal", "overload", "text", "nonsense"],
)
def test_a_server_that_cannot_do_it_is_refused(road: Road, answer: Answer, error: type[Exception], said: str) -> None:
    with serving(answer) as url, pytest.raises(error, match=said):
        asked_of(road, url)


@pytest.mark.parametrize(
    ("written", "found"),
    [([5, 9], ([5, 9], "stop")), ([5, 9, 7, 9], ([5, 9], "stop")), ([5, 6, 7, 8, 9], ([5, 6, 7, 8], "length"))],
    ids=["at the end", "in the middle", "beyond the limit"],
)
def test_an_answer_goes_to_its_first_end_token_which_counts(written: list[int], found: tuple[list[int], str]) -> None:
    said = {"choices": [{"token_ids": written, "text": "", "finish_reason": "stop"}]}
    with serving(lambda asked: (200, said)) as url:
        assert continue_on_server(url, "tiny", [[1, 2]], [4], [9], parallel=1) == [found]


@pytest.mark.parametrize("told", [{}, {"stop_reason": 257}], ids=["unsaid", "named"])
def test_an_end_token_that_a_server_leaves_out_is_put_back(road: Road, told: dict[str, Any]) -> None:
    stopped: list[bool] = []

    def without_end(asked: dict[str, Any]) -> tuple[int, Any]:
        status, body = honest({**asked, "max_tokens": asked["max_tokens"]})
        choice = body["choices"][0]
        stopped.append(choice["finish_reason"] == "stop")
        if stopped[-1]:
            choice["token_ids"] = choice["token_ids"][:-1]
            choice.update(told)
        return status, body

    lines = [{"prompt": text} for text in ("a", "of what", "tell me", "bcd")]
    prompt_set, files = road.prompts("extra", lines)
    asked: dict[str, Any] = {"files": files, "prompt_sets": [prompt_set], "max_new_tokens": 200}
    with serving(without_end) as url:
        road.references("served", engine="openai", server_model="tiny", placement={"server_url": url}, **asked)
    road.references("local", **asked)
    served, local = (read_rows(road.root / name / "references.parquet", REFERENCES) for name in ("served", "local"))
    assert any(stopped), "some of these texts must end"
    assert served == local


def test_after_a_refusal_nothing_more_is_asked() -> None:
    asked: list[Any] = []

    def refuse(body: dict[str, Any]) -> tuple[int, Any]:
        asked.append(body)
        return 400, {"error": "no"}

    with serving(refuse) as url, pytest.raises(PermanentError, match="status 400"):
        continue_on_server(url, "tiny", [[65]] * 200, [4] * 200, [257], parallel=2)
    assert len(asked) < 100


def test_an_answer_cut_short_is_refused(road: Road) -> None:
    def cut(asked: dict[str, Any]) -> tuple[int, Any]:
        return 200, {"choices": [{"token_ids": [65, 66, 67], "finish_reason": "length"}]}

    with (
        serving(cut) as url,
        pytest.raises(PermanentError, match="ended after 3 of 20 tokens, at no end token: length"),
    ):
        asked_of(road, url)


def test_everything_that_decides_tokens_is_said(road: Road) -> None:
    bodies: list[dict[str, Any]] = []

    def noting(asked: dict[str, Any]) -> tuple[int, Any]:
        bodies.append(asked)
        return honest(asked)

    with serving(noting) as url:
        asked_of(road, url)
    for body in bodies:
        assert (body["top_p"], body["top_k"], body["repetition_penalty"]) == (1.0, -1, 1.0)
        assert body["skip_special_tokens"] is False


def test_a_server_that_is_not_there_or_not_named(road: Road) -> None:
    with serving(honest) as gone:
        pass
    with pytest.raises(TransientError, match="no answer"):
        asked_of(road, gone)
    (road.root / "served").rmdir()
    with pytest.raises(ConfigError, match=r"has no server"):
        asked_of(road, None)
    with pytest.raises(ValueError, match="needs `server_model`"):
        references_params(engine="openai")


def test_the_key_of_the_server_comes_from_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_KEY", "open sesame")
    assert _headers("SERVER_KEY") == {"Authorization": "Bearer open sesame"}
    assert _headers(None) == {}
    monkeypatch.delenv("SERVER_KEY")
    with pytest.raises(ConfigError, match=r"references.api_key_variable.*SERVER_KEY is not set"):
        _headers("SERVER_KEY")
