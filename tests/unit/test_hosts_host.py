"""The local host runs argv as it is, and says how a command ended."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dflash.base.errors import ConfigError, CorruptError, PermanentError, TransientError
from dflash.hosts.host import Host, LocalHost
from dflash.hosts.inventory import load_inventory

HOST: Host = LocalHost()
AWKWARD = "a b'c\"d\n$e;f -g"


def test_arguments_arrive_as_they_are() -> None:
    done = HOST.run([sys.executable, "-c", "import sys; print(repr(sys.argv[1]))", AWKWARD])
    assert (done.status, done.stdout.decode().strip()) == (0, repr(AWKWARD))


def test_status_signal_and_stderr_come_back() -> None:
    assert HOST.run([sys.executable, "-c", "import sys; sys.exit('no')"]).stderr.strip() == "no"
    assert HOST.run([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]).status == -9


def test_a_command_that_is_not_there_and_one_that_hangs() -> None:
    with pytest.raises(PermanentError, match="no program"):
        HOST.run(["no-such-program"])
    with pytest.raises(TransientError, match="did not end"):
        HOST.run([sys.executable, "-c", "import time; time.sleep(60)"], timeout=0.5)


def test_a_stream_is_fed_piece_by_piece_and_may_end_early() -> None:
    counting = "import sys; print(len(sys.stdin.buffer.read()))"
    assert HOST.stream([sys.executable, "-c", counting], [b"x" * 100_000] * 30).stdout.strip() == b"3000000"
    assert HOST.stream([sys.executable, "-c", "import sys; sys.exit(3)"], [b"x" * 100_000] * 30).status == 3


def test_small_files_go_and_come(tmp_path: Path) -> None:
    path = tmp_path / "deep" / AWKWARD.replace("\n", "")
    HOST.put(path, b"\x00content")
    assert HOST.get(path) == b"\x00content"
    with pytest.raises(CorruptError):
        HOST.get(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("hosts: {a: {kind: ssh}}", "hosts.a"),
        ("hosts: {local: {kind: local}}\nroles: {gpu: other}", "roles.gpu"),
        ("roles: {cook: local}", "roles.cook"),
        ("machines: {}", "nothing else"),
        ("hosts: {local: {kind: local, device: tpu}}", "tpu"),
        ("hosts: [", "cannot be read"),
    ],
)
def test_a_hosts_file_is_refused_by_name(tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "hosts.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=word):
        load_inventory(path)


def test_a_hosts_file_names_the_device_of_a_role(tmp_path: Path) -> None:
    path = tmp_path / "hosts.yaml"
    path.write_text("hosts: {box: {kind: local, device: 'cuda:1'}}\nroles: {gpu: box}")
    inventory = load_inventory(path)
    assert (inventory.host("gpu"), inventory.device("gpu")) == ("box", "cuda:1")
    assert inventory.host("eval") == "local"
