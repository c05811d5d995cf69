"""Evidence over several machines: a training elsewhere is watched, what hosts hold is collected, and a run is made again here."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import shutil
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
from spread import Spread, copy_spread, make_spread
from sshd import Sshd
from test_spread_survival import copy_upstream, lease
from test_survival import running

from dflash.hosts.inventory import load_inventory
from dflash.hosts.lease import acquire, new_record
from dflash.plan.sweep import Needs
from dflash.remote import garbage_there

pytestmark = pytest.mark.timeout(900 * PATIENCE)
ENDLESS = {"schedule_steps": 60000, "checkpoint_every": 30000}


@pytest.fixture(scope="module")
def spread_run(tmp_path_factory: pytest.TempPathFactory, cache: Path, servers: dict[str, Sshd]) -> Spread:
    """The micro run over two sshd, finished once."""
    space = make_spread(tmp_path_factory.mktemp("evidence") / "work", cache, servers)
    space.call("run")
    return space


@pytest.fixture
def spread(tmp_path: Path, spread_run: Spread) -> Spread:
    """A copy of the finished run with the workdirs of its hosts."""
    return copy_spread(spread_run, tmp_path / "all")


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


def connections(space: Spread) -> int:
    return space.servers["trainbox"].log.read_text().count("Accepted publickey")


def glances(space: Spread) -> list[int]:
    """Processes on `trainbox` that tell a watcher how training stands."""
    return [pid for pid in space.servers["trainbox"].commands() if b"dflash.report.glance" in command_line(pid)]


def command_line(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


# ---------------------------------------------------------------- watch


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


def test_a_finished_run_is_shown_by_host_and_no_host_is_asked(spread: Spread) -> None:
    before = connections(spread)
    done = spread.call("watch", "micro")
    assert "run micro: done" in done.stdout
    assert "trained on: trainbox 3 of 3" in done.stdout
    assert "shipped to: judge 3 of 3" in done.stdout
    assert "evaluated on: judge 3 of 3" in done.stdout
    assert "trained on trainbox -> shipped to judge -> evaluated on judge, tau" in done.stdout
    assert connections(spread) == before


# ---------------------------------------------------------------- gc


def forget_askers(space: Spread) -> None:
    """A copied workspace is another controller than the one that its hosts have worked for."""
    for host in space.servers:
        shutil.rmtree(space.workdir(host) / "results/askers", ignore_errors=True)


def names(text: str, space: Spread, host: str) -> list[str]:
    """What of a host's workdir is listed, with keys left out."""
    found = re.findall(rf"{host}:{re.escape(str(space.workdir(host)))}/(\S+)", text)
    return sorted(re.sub(r"[0-9a-f]{12,}", "*", name) for name in found)


def moved_on(space: Spread) -> None:
    """The run is gone and the config asks for another training."""
    shutil.rmtree(space.results / "runs")
    space.write_config(train={"lr": 2e-3})


def test_what_hosts_hold_for_a_run_that_stands_is_not_listed(spread: Spread) -> None:
    forget_askers(spread)
    for host in ("trainbox", "judge"):
        assert names(spread.call("gc", "--host", host).stdout, spread, host) == []
    done = spread.call("gc")
    assert "trainbox: nothing that no run needs" in done.stdout
    assert "judge: nothing that no run needs" in done.stdout


def test_garbage_of_each_host_is_listed_with_bytes_and_goes_only_when_told(spread: Spread) -> None:
    forget_askers(spread)
    moved_on(spread)
    (weights,) = spread.store("trainbox").glob("train/*/step_6/drafter/model.safetensors")
    stray = spread.workdir("trainbox") / "code/0123456789abcdef"
    stray.mkdir()
    (stray / "old.py").write_text("old")
    done = spread.call("gc", "--host", "trainbox")
    assert {"results/store/train/*", "code/*"} <= set(names(done.stdout, spread, "trainbox"))
    assert not [name for name in names(done.stdout, spread, "trainbox") if "dataset" in name or "buckets" in name]
    assert "Nothing is deleted without --delete" in done.stderr
    assert weights.exists()
    size = sum(path.stat().st_size for path in weights.parents[2].rglob("*") if path.is_file())
    assert f"{size:,} bytes" in done.stdout
    done = spread.call("gc")
    assert re.search(r"trainbox: [\d,]+ bytes in \d+ items that no run needs; `dflash gc --host trainbox`", done.stdout)
    done = spread.call("gc", "--host", "trainbox", "--delete")
    assert "kept:" not in done.stderr
    assert not weights.exists()
    assert not stray.exists()
    assert names(spread.call("gc", "--host", "trainbox").stdout, spread, "trainbox") == []
    done = spread.call("gc", "--host", "judge", "--delete")
    listed = names(done.stdout, spread, "judge")
    assert {"results/store/shipped/train/*", "results/store/evaluate/*"} <= set(listed)
    assert not list(spread.store("judge").glob("shipped/train/*"))
    assert list(spread.store("judge").glob("references/*/receipt.json"))
    spread.call("gc", "--delete")
    assert not [path for path in spread.results.glob("store/train/*") if (path / "receipts").exists()]
    spread.call("plan", "--verify")  # what was kept is whole, here and there


def test_a_workdir_that_another_controller_uses_too_is_not_collected(spread: Spread) -> None:
    moved_on(spread)
    done = spread.call("gc", "--host", "trainbox", "--delete", expect=1)
    assert "stages ran there for" in done.stderr
    assert "results/askers" in done.stderr
    assert list(spread.store("trainbox").glob("train/*/step_6/drafter/model.safetensors"))
    assert "Take care:" in spread.call("gc", "--host", "trainbox").stderr


def test_what_begins_between_listing_and_deleting_is_not_deleted(spread: Spread) -> None:
    host = load_inventory(spread.folder / "hosts.yaml").get("trainbox")
    (folder,) = spread.store("trainbox").glob("train/*")
    listed = [[path, mark] for path, _, _, _, mark in garbage_there(host, Needs().as_json())["garbage"]]
    (spread.store("trainbox") / "shipped/buckets").glob("*")
    held = acquire([folder / "lease.json"], new_record("cpu", folder.name, "later"))
    try:
        answer = garbage_there(host, Needs().as_json(), listed)
    finally:
        held.release()
    assert answer["live"] == [folder.name]
    kept = dict(answer["kept"])
    assert kept[str(folder.relative_to(spread.workdir("trainbox")))] == "it is needed now"
    assert (folder / "step_6/drafter/model.safetensors").exists()
    needed = {
        str(path.relative_to(spread.workdir("trainbox"))) for path in spread.store("trainbox").glob("shipped/*/*")
    }
    assert needed
    assert needed <= set(kept), "what the training was made from"


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


# ---------------------------------------------------------------- reproduce


def test_a_run_over_several_hosts_is_made_again_here_and_compared_by_the_digests_of_its_receipts(
    spread: Spread,
) -> None:
    (spread.folder / "hosts.yaml").unlink()
    for host in spread.servers:
        shutil.rmtree(spread.workdir(host), ignore_errors=True)
    manifest = spread.results / "runs/micro/latest/manifest.json"
    recorded = json.loads(manifest.read_text())
    assert {label.partition("/")[0] for label in recorded["environments"]} == {"local", "trainbox", "judge"}
    done = spread.call("reproduce", str(manifest), "--check", timeout=600)
    count = len(recorded["tensors"])
    assert f"step 6: {count} of {count} tensors equal" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("reproduced: ")
    outputs = sum(len(files) for stage in recorded["stages"] for files in stage["outputs"].values())
    assert f"reproduced: {outputs} outputs compared" in done.stdout
    far = spread.call("reproduce", str(manifest), "--check", "--steps", "4:6", expect=1)
    assert "the state of step 4 lies on trainbox, where it was trained" in far.stderr
