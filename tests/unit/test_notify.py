"""Whoever is not looking is told, once, of what they asked for; a failed delivery changes nothing."""

from __future__ import annotations

import json
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from dflash import notify
from dflash.base.errors import ConfigError
from dflash.hosts.entry import Notify
from dflash.hosts.inventory import load_inventory
from dflash.notify import Lookout, Notifier


def listener(path: Path) -> tuple[str, ...]:
    program = f"import sys; open({str(path)!r}, 'a').write(sys.stdin.read() + chr(10))"
    return (sys.executable, "-c", program)


def heard(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_command_gets_the_message_once_and_only_what_was_asked_for(tmp_path: Path) -> None:
    notifier = Notifier(Notify(command=listener(tmp_path / "heard"), on=("failure",)), "demo")
    notifier.tell("failure", 'it broke: "x"\nbadly')
    notifier.tell("failure", "it broke again")
    notifier.tell("finish", "done")
    (message,) = heard(tmp_path / "heard")
    assert (message["event"], message["run"], message["text"]) == ("failure", "demo", 'it broke: "x"\nbadly')


def test_a_webhook_gets_the_message() -> None:
    bodies = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.handle_request, daemon=True).start()
    Notifier(Notify(webhook=f"http://127.0.0.1:{server.server_port}/hook"), "demo").tell("finish", "done")
    server.server_close()
    assert [body["text"] for body in bodies] == ["done"]


@pytest.mark.parametrize(
    "settings",
    [
        Notify(command=("/no/such/program",)),
        Notify(command=(sys.executable, "-c", "raise SystemExit(3)")),
        Notify(webhook="http://127.0.0.1:1/nobody"),
        Notify(webhook="http://127.0.0.1:port/nobody"),
    ],
)
def test_a_delivery_that_fails_is_said_and_raises_nothing(settings: Notify, capsys: pytest.CaptureFixture[str]) -> None:
    Notifier(settings, "demo").tell("failure", "it broke")
    assert "was not delivered" in capsys.readouterr().err


def test_a_webhook_that_answers_nonsense_raises_nothing_and_its_address_is_not_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def nonsense() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"what?\r\n\r\n")

        threading.Thread(target=nonsense, daemon=True).start()
        port = server.getsockname()[1]
        Notifier(Notify(webhook=f"http://127.0.0.1:{port}/secret"), "demo").tell("finish", "done")
    Notifier(Notify(webhook="http://127.0.0.1:secret/secret"), "demo").tell("finish", "done")
    told = capsys.readouterr().err
    assert told.count("was not delivered") == 2
    assert "BadStatusLine" in told
    assert "secret" not in told


@pytest.mark.parametrize("webhook", ["ftp://example.org/secret", "example.org/secret", "https://example.org/a secret"])
def test_a_webhook_that_is_no_url_is_refused_without_being_repeated(tmp_path: Path, webhook: str) -> None:
    hosts = tmp_path / "hosts.yaml"
    hosts.write_text(f"notify: {{webhook: '{webhook}'}}")
    with pytest.raises(ConfigError, match=r"notify\.webhook.*must start with http") as refused:
        load_inventory(hosts)
    assert "secret" not in refused.value.message()


def test_low_disk_and_starvation_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "LOW_DISK_BYTES", 0)
    state = {"alert": "", "stalled": 0.9}
    notifier = Notifier(Notify(command=listener(tmp_path / "heard"), on=("low_disk", "starvation")), "demo")
    lookout = Lookout(notifier, tmp_path, {"demo": lambda: state})
    lookout.look()
    assert heard(tmp_path / "heard") == [], "one slow step is no starvation"
    lookout.look()
    lookout.look()
    state["alert"] = "step 4 is not saved: the disk is full"
    lookout.look()
    assert [message["event"] for message in heard(tmp_path / "heard")] == ["starvation", "low_disk"]
    monkeypatch.setattr(notify, "LOW_DISK_BYTES", 1 << 62)
    lookout.look()
    assert "GB left" in heard(tmp_path / "heard")[-1]["text"]
