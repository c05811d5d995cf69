"""A training at work on another machine, which goes on by itself: it is watched there, and keeps what it reads from deletion.

It takes a core as long as it lives, so nothing else is in this file."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import PATIENCE, Workspace, wait_until  # type: ignore[import-not-found]
from spread import Spread, connections, make_spread, names
from sshd import Sshd
from test_spread_survival import copy_upstream, lease
from test_survival import running

pytestmark = pytest.mark.timeout(900 * PATIENCE)
ENDLESS = {"schedule_steps": 60000, "checkpoint_every": 30000}


@pytest.fixture(scope="module")
def endless(
    tmp_path_factory: pytest.TempPathFactory, servers: dict[str, Sshd], finished_run: Workspace
) -> Iterator[Spread]:
    """A training at work on `trainbox`, whose controller has gone: nobody but the tests connects there."""
    space = make_spread(tmp_path_factory.mktemp("endless") / "all" / "work", finished_run.cache, servers)
    copy_upstream(finished_run, space)
    space.write_config(train=ENDLESS)
    space.write_hosts(eval="local")
    with running(space) as process:
        wait_until(lambda: lease(space) and far_step(space) > 3, seconds=200, what="a training at work")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60 * PATIENCE)
    yield space
    space.kill_trainers()


def far_step(space: Spread) -> int:
    paths = list(space.store("trainbox").glob("train/*/metrics.jsonl"))
    lines = paths[0].read_text().splitlines() if paths else []
    return len(lines)


def glances(space: Spread) -> list[int]:
    """Processes on `trainbox` that tell a watcher how training stands."""
    return [pid for pid in space.servers["trainbox"].commands() if b"dflash.report.glance" in command_line(pid)]


def command_line(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


class Piped:
    """`dflash watch` in a pipe, with the lines that it has printed."""

    def __init__(self, space: Spread, *arguments: str) -> None:
        self.lines: list[str] = []
        self.process = space.start("watch", "micro", *arguments)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def find(self, pattern: str, after: int = 0) -> list[str]:
        return [line for line in self.lines[after:] if re.search(pattern, line)]

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        self.process.wait(30 * PATIENCE)


def test_a_training_elsewhere_is_followed_step_by_step_over_one_connection(endless: Spread) -> None:
    before = connections(endless)
    watching = Piped(endless)
    try:
        pattern = r"step [\d,]+ of 60,000 on trainbox; pid \d+, run micro"
        wait_until(lambda: len(watching.find(pattern)) > 3, seconds=120, what="steps as they come")
    finally:
        watching.stop()
    assert watching.find("run micro: training$")
    steps = [int(line.split("step ")[1].split(" ")[0].replace(",", "")) for line in watching.find(pattern)]
    assert steps == sorted(set(steps))
    assert watching.find("tok/s over the last 20 steps: drafter")
    assert connections(endless) - before <= 2, "one for the code, one for all looks"
    assert not list(endless.results.glob("store/train/*/receipts/*"))
    wait_until(lambda: not glances(endless), what="the end of the process there")


def test_a_host_that_falls_silent_is_told_with_the_age_and_heard_again_without_being_asked(endless: Spread) -> None:
    server = endless.servers["trainbox"]
    watching = Piped(endless)
    try:
        wait_until(lambda: watching.find("on trainbox; pid"), seconds=120, what="a first word")
        os.kill(server.process.pid, signal.SIGSTOP)
        server.kill_children()
        wait_until(
            lambda: watching.find(r"trainbox has not been heard for \d+ s.*; shown is what it said then"),
            seconds=120,
            what="silence",
        )
        assert watching.find("run micro: training when last heard")
        os.kill(server.process.pid, signal.SIGCONT)
        count = len(watching.lines)
        wait_until(lambda: watching.find("on trainbox; pid", count), seconds=180, what="to hear it again")
    finally:
        os.kill(server.process.pid, signal.SIGCONT)
        watching.stop()


def captured(space: Spread, seconds: float, until: str) -> str:
    """What `dflash watch` writes to a terminal of 100 columns, until it holds some words."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(space.folder)
        os.execve(
            sys.executable,
            [sys.executable, "-m", "dflash", "watch", "micro"],
            {**space.environment(), "TERM": "xterm-256color"},
        )
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 100, 0, 0))
    text = ""
    deadline = time.monotonic() + seconds * PATIENCE
    try:
        while time.monotonic() < deadline and until not in text:
            if select.select([terminal], [], [], 0.2)[0]:
                text += os.read(terminal, 1 << 16).decode(errors="replace")
    finally:
        os.kill(pid, signal.SIGTERM)
        with contextlib.suppress(OSError):
            while os.read(terminal, 1 << 16):
                pass
        os.waitpid(pid, 0)
        os.close(terminal)
    return text


def test_the_screen_stands_before_a_host_that_hangs_has_answered(endless: Spread) -> None:
    server = endless.servers["trainbox"]
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        text = captured(endless, 9, "asking trainbox")
        assert "asking trainbox" in text
        assert "to come" not in text, "a table, not lines"
    finally:
        os.kill(server.process.pid, signal.SIGCONT)
    assert "on trainbox; pid" in captured(endless, 60, "on trainbox; pid")


def test_one_look_at_a_host_that_cannot_be_reached_ends_and_says_so(endless: Spread) -> None:
    text = (endless.folder / "hosts.yaml").read_text()
    port = endless.servers["trainbox"].port
    (endless.folder / "hosts.yaml").write_text(text.replace(f"port: {port}", "port: 1"))
    try:
        done = endless.call("watch", "micro", "--once")
    finally:
        (endless.folder / "hosts.yaml").write_text(text)
    assert re.search(r"trainbox cannot be reached \(.*\)", done.stdout)


def test_a_training_at_work_elsewhere_keeps_itself_what_it_reads_its_code_and_its_copy_here(endless: Spread) -> None:
    old = dict(endless.config["train"])
    endless.write_config(train={"lr": 3e-3})
    try:
        (key,) = (path.name for path in endless.store("trainbox").glob("train/*"))
        record = lease(endless)
        assert record is not None
        there = endless.call("gc", "--host", "trainbox", "--delete")
        assert names(there.stdout, endless, "trainbox") == []
        assert list(endless.workdir("trainbox").glob("code/*/dflash/cli.py"))
        here = endless.call("gc", "--delete")
        assert "1 training at work" in here.stdout
        assert key not in here.stdout
        assert (endless.results / "store/train" / key / "params.json").exists()
        offline = endless.call("gc", "--host", "local", "--delete")
        assert key not in offline.stdout
        assert "not every host was asked" in offline.stderr
        after = lease(endless)
        assert after is not None
        assert after.pid == record.pid
        steps = far_step(endless)
        wait_until(lambda: far_step(endless) > steps, what="training goes on")
    finally:
        endless.write_config(train=old)
