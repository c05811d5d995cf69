"""The tests' own tools do what they say: the throwaway sshd and the bad network."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest
from proxy import Proxy
from sshd import Sshd, command_name


def ssh(server: Sshd, *command: str, port: int | None = None) -> list[str]:
    options = ["-F", "none", "-oBatchMode=yes", "-oIdentityAgent=none", "-oIdentitiesOnly=yes"]
    options += [f"-oUserKnownHostsFile={server.known_hosts}", "-oGlobalKnownHostsFile=/dev/null"]
    target = ["-i", str(server.key_file), "-p", str(port or server.port), f"{server.user}@{server.address}"]
    return ["ssh", "-T", *options, *target, *command]


def test_the_server_lets_in_its_own_key_only(sshd: Sshd) -> None:
    done = subprocess.run(
        ssh(sshd, "echo", "$OMP_NUM_THREADS"), capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")
    sshd.known_hosts.write_text("")
    done = subprocess.run(ssh(sshd, "true"), capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 255
    assert "Host key verification failed" in done.stderr


def test_killed_children_end_the_connection_and_nothing_else(sshd: Sshd) -> None:
    with subprocess.Popen(ssh(sshd, "echo here; exec sleep 60"), stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"here\n"
        while "sleep" not in {command_name(pid) for pid in sshd.commands()}:
            time.sleep(0.01)
        assert sshd.kill_children() > 0
        assert client.wait(60) == 255
    assert subprocess.run(ssh(sshd, "true"), timeout=30, check=False).returncode == 0
    assert "sleep" in {command_name(pid) for pid in sshd.commands()}, "the command outlives its connection"
    sshd.stop()
    assert sshd.commands() == []


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that sends back what it gets."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer(client: socket.socket) -> None:
        with client, contextlib.suppress(ConnectionResetError):
            while piece := client.recv(1 << 16):
                client.sendall(piece)

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(client,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield listener.getsockname()[1]
    listener.close()


def exchange(client: socket.socket, message: bytes) -> bytes:
    client.sendall(message)
    found = b""
    while len(found) < len(message):
        piece = client.recv(1 << 16)
        if not piece:
            break
        found += piece
    return found


def test_the_proxy_delays_counts_flips_silences_and_cuts(echo: int) -> None:
    with Proxy("127.0.0.1", echo) as proxy, socket.create_connection(("127.0.0.1", proxy.port)) as client:
        client.settimeout(10)
        assert exchange(client, b"hello") == b"hello"
        assert proxy.counts() == {"up": 5, "down": 5, "connections": 1, "fired": 0}
        proxy.delay(50)
        started = time.monotonic()
        exchange(client, b"hello")
        assert 0.1 <= time.monotonic() - started < 10
        proxy.delay(0)
        proxy.flip(after=2)
        assert exchange(client, b"hello") == b"he,lo"
        proxy.blackhole()
        client.settimeout(0.5)
        with pytest.raises(TimeoutError):
            exchange(client, b"hello")
        proxy.restore()
        client.settimeout(10)
        assert client.recv(5) == b"hello"
        proxy.arm("drop", after=3)
        with pytest.raises(ConnectionResetError):
            exchange(client, b"hello")
        assert proxy.counts()["fired"] == 2


def test_delay_does_not_limit_bandwidth(echo: int) -> None:
    payload = b"x" * (16 << 20)
    with Proxy("127.0.0.1", echo, delay_ms=100) as proxy, socket.create_connection(("127.0.0.1", proxy.port)) as client:
        client.settimeout(30)
        digest = hashlib.sha256()

        def read() -> None:
            left = len(payload)
            while left and (piece := client.recv(1 << 20)):
                digest.update(piece)
                left -= len(piece)

        reader = threading.Thread(target=read)
        started = time.monotonic()
        reader.start()
        client.sendall(payload)
        reader.join()
        took = time.monotonic() - started
    assert digest.hexdigest() == hashlib.sha256(payload).hexdigest()
    assert took < 5, "64 KiB a round trip would take 51 s"
