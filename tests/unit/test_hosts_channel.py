"""What the reading thread of a connection must not send while keys change goes out with the new ones, in order."""

from __future__ import annotations

import threading
from typing import Any

import paramiko
import pytest

from dflash.hosts.channel import _Transport


def test_answers_put_aside_while_keys_change_go_out_with_the_new_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(paramiko.Transport, "_send_user_message", lambda self, data: sent.append(data))
    monkeypatch.setattr(paramiko.Transport, "_parse_newkeys", lambda self, message: self.clear_to_send.set())
    transport = _Transport.__new__(_Transport)
    transport.clear_to_send, transport._put_aside = threading.Event(), []
    transport._send_user_message("of another thread")  # type: ignore[arg-type]
    assert sent == ["of another thread"], "paramiko lets that one wait"
    monkeypatch.setattr(threading, "current_thread", lambda: transport)
    transport._send_user_message("first")  # type: ignore[arg-type]
    transport._send_user_message("second")  # type: ignore[arg-type]
    assert sent == ["of another thread"]
    transport._parse_newkeys(paramiko.Message())
    transport._send_user_message("third")  # type: ignore[arg-type]
    assert sent == ["of another thread", "first", "second", "third"]
