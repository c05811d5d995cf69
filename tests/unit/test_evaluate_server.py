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
from dflash.evaluate.server import _headers

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
