"""Shared by all tests: one thread a process, and skips that a machine can turn into failures.

`DFLASH_REQUIRE=sshd,netns,fla,gpu` names the means that this machine is known to have: a test that would skip for want
of one of them fails instead.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sshd import Sshd, start_sshd, why_not

os.environ.setdefault("OMP_NUM_THREADS", "1")
# What test modules import stays: the collector would look through all of torch for nothing (see dflash/base/loading.py).
gc.disable()
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell without job control starts what it puts in the background so, and every process of these tests inherits it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Collection has imported everything."""
    gc.enable()
    gc.freeze()


@pytest.fixture(scope="session")
def require_or_skip() -> Callable[[str, str], None]:
    """`require_or_skip(name, reason)`: skip the test, or fail it when `DFLASH_REQUIRE` names what is missing."""

    def missing(name: str, reason: str) -> None:
        required = {part.strip() for part in os.environ.get("DFLASH_REQUIRE", "").split(",")}
        if name in required:
            pytest.fail(f"DFLASH_REQUIRE asks for {name}, but {reason}")
        pytest.skip(f"{name}: {reason}")

    return missing


@pytest.fixture
def start_server(tmp_path: Path, require_or_skip: Callable[[str, str], None]) -> Iterator[Callable[..., Sshd]]:
    """`start_server(name, ...)`: a throwaway sshd in `tmp_path/name`; see `sshd.start_sshd`. All end with the test."""
    if reason := why_not():
        require_or_skip("sshd", reason)
    started: list[Sshd] = []

    def start(name: str = "sshd", **options: Any) -> Sshd:
        started.append(start_sshd(tmp_path / name, **options))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def sshd(start_server: Callable[..., Sshd]) -> Sshd:
    """One throwaway sshd."""
    return start_server()
