"""`make run-two-hosts` runs the road over two servers of its own and leaves nothing behind but results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PATIENCE, Workspace  # type: ignore[import-not-found]
from sshd import all_processes, environment_of

from dflash.plan.code import source_root

pytestmark = pytest.mark.timeout(900 * PATIENCE)


def test_the_demo_over_two_hosts_leaves_results_and_nothing_else(fresh: Workspace, tmp_path: Path) -> None:
    own = tmp_path / "tmp"
    own.mkdir()
    command = [sys.executable, str(source_root() / "tests/two_hosts.py"), "--results", "results/two-hosts"]
    done = subprocess.run(
        command,
        cwd=fresh.folder,
        env={**fresh.environment(), "TMPDIR": str(own)},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "tau on held_out" in done.stdout
    assert "trainbox: train" in done.stdout
    assert "judge: evaluate, references" in done.stdout
    assert "shipped: 5 artifacts" in done.stdout
    results = fresh.folder / "results/two-hosts"
    hosts = {json.loads(path.read_text())["host"] for path in results.glob("store/evaluate/*/step_*.json")}
    assert hosts == {"judge"}
    assert list(own.glob("dflash-*")) == []
    mark = str(own).encode()
    left = [pid for pid in all_processes() if pid != os.getpid() and any(mark in word for word in environment_of(pid))]
    assert left == []
