"""Asking a host for its key: what answers but is no ssh server is told in one line, without paramiko's own traceback."""

from __future__ import annotations

import logging
import socket
import threading
from pathlib import Path

import pytest

from dflash.base.errors import TransientError
from dflash.hosts.entry import Hop
from dflash.hosts.pins import shown_key


def test_no_ssh_server_is_told_without_a_traceback(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, caplog.at_level(logging.DEBUG):
        threading.Thread(target=lambda: server.accept()[0].close(), daemon=True).start()
        hop = Hop("box", "127.0.0.1", server.getsockname()[1], "jo", None, tmp_path / "known_hosts")
        with pytest.raises(TransientError, match=r"box .* cannot be reached"):
            shown_key("box", (hop,))
    assert not caplog.records
