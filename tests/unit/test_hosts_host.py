"""The local host runs argv as it is, and says how a command ended."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from dflash.base.errors import CorruptError, PermanentError, TransientError
from dflash.hosts.entry import HostEntry
from dflash.hosts.host import Finished, Host, LocalHost

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


def test_a_wrap_comes_before_every_command(tmp_path: Path) -> None:
    wrapped = LocalHost("box", HostEntry(kind="local", wrap=("env", "INSIDE=1")))
    assert wrapped.command(["true"]) == ["env", "INSIDE=1", "true"]
    assert wrapped.run(["sh", "-c", 'echo "$INSIDE"']).stdout == b"1\n"
    wrapped.put(tmp_path / "deep" / AWKWARD, b"content")
    assert wrapped.get(tmp_path / "deep" / AWKWARD) == b"content"


def test_variables_are_added_and_stay_off_the_command_line() -> None:
    argv = ["sh", "-c", "tr '\\0' ' ' </proc/$$/cmdline; echo \"$WORD:$PATH\""]
    said = HOST.run(argv, environment={"WORD": "secret"}).stdout.decode()
    assert said.endswith(f"secret:{os.environ['PATH']}\n")
    assert said.count("secret") == 1


def test_a_command_that_hangs_takes_what_it_started_with_it(tmp_path: Path) -> None:
    with pytest.raises(TransientError, match="did not end"):
        HOST.run(["sh", "-c", f"(sleep 2; touch {tmp_path}/alive) & sleep 60"], timeout=0.5)
    time.sleep(2.5)
    assert not (tmp_path / "alive").exists()


def test_the_end_of_what_a_command_said() -> None:
    assert Finished(1, b"", "one\ntwo\n\n").last_line() == "two"
    assert Finished(3, b"", "").last_line() == "exit status 3"
