"""A rank never outlives its launcher, at whatever moment that dies, though nobody reads any more what the rank writes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from train_store import wait_until

LIVE = """
import sys, time
from dflash.train.parent import end_with_parent
sys.platform = sys.argv[1]
end_with_parent(int(sys.argv[2]))
time.sleep(600)
"""
LAUNCH = """
import os, subprocess, sys
reader, writer = os.pipe()
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2], str(os.getpid())], stderr=writer)
os.close(writer)
print(child.pid, flush=True)
sys.stdin.read()
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("platform", ["linux", "other"])
def test_one_whose_launcher_died_while_it_started_ends(platform: str) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", ""])
    launcher.wait()
    reader, writer = os.pipe()
    os.close(reader)
    rank = subprocess.Popen([sys.executable, "-c", LIVE, platform, str(launcher.pid)], stderr=writer)
    os.close(writer)
    try:
        assert rank.wait(60) == 137
    finally:
        rank.kill()
        rank.wait()


@pytest.mark.parametrize("platform", ["linux", "other"])
def test_one_whose_launcher_dies_later_ends(platform: str) -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, LIVE, platform], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert launcher.stdout is not None
    rank = int(launcher.stdout.readline())
    assert alive(rank)
    launcher.kill()
    launcher.communicate()
    wait_until(lambda: not alive(rank), 60)
