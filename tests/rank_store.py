"""Ranks of a training as forked processes of a test: they start in no time, and a test may change one of them."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from train_store import Training

from dflash.base.errors import DflashError
from dflash.base.progress import Progress
from dflash.base.stage import HostContext
from dflash.base.store import load_inputs, read_params
from dflash.train import schedule
from dflash.train.children import free_port

Change = Callable[[], None]
"""What a rank does to itself before it begins."""


@dataclass
class Ran:
    """How the ranks ended: exit status and what they printed, by rank."""

    statuses: list[int]
    said: list[str]
    seconds: float
    ok: bool = field(init=False)

    def __post_init__(self) -> None:
        self.ok = not any(self.statuses)


def fork_ranks(count: int, body: Callable[[int], None], folder: Path, timeout: float = 60.0) -> Ran:
    """Runs `body(rank)` in `count` processes that know their place; kills who has not ended after `timeout` seconds, or 5
    seconds after another has failed."""
    folder.mkdir(parents=True, exist_ok=True)
    port = str(free_port())
    started = time.monotonic()
    pids = []
    for rank in range(count):
        pid = os.fork()
        if pid == 0:
            _child(rank, count, port, body, folder / f"rank_{rank}.log")
        pids.append(pid)
    statuses: dict[int, int] = {}
    deadline = started + timeout
    while len(statuses) < count:
        for rank, pid in enumerate(pids):
            if rank not in statuses:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    statuses[rank] = os.waitstatus_to_exitcode(status)
                    if statuses[rank]:
                        deadline = min(deadline, time.monotonic() + 5)
        if time.monotonic() > deadline:
            for rank, pid in enumerate(pids):
                if rank not in statuses:
                    os.kill(pid, 9)
                    os.waitpid(pid, 0)
                    statuses[rank] = -9
        time.sleep(0.005)
    said = [(folder / f"rank_{rank}.log").read_text() for rank in range(count)]
    return Ran([statuses[rank] for rank in range(count)], said, time.monotonic() - started)


def _child(rank: int, count: int, port: str, body: Callable[[int], None], log: Path) -> None:
    status = 1
    try:
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
        os.environ.update(place, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, GLOO_SOCKET_IFNAME="lo")
        body(rank)
        status = 0
    except DflashError as error:
        print(f"{type(error).__name__}: {error.message()}", flush=True)
        status = {"transient": 6, "permanent": 4, "config": 2}.get(error.kind, 1)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run_topology(
    training: Training,
    targets: int,
    drafters: int,
    *steps: int,
    attempt: int = 1,
    changes: Mapping[int, Change] | None = None,
    timeout: float = 60.0,
    accept_env: str = "",
    **placed: Any,
) -> Ran:
    """Trains with ranks of their own up to the last of `steps`. `changes`: by rank."""
    from dflash.train.ranks import run_rank

    schedule.merge_steps(training.directory, steps)
    topology = {"targets": targets, "drafters": drafters, "colocate": False}

    def body(rank: int) -> None:
        if changes and rank in changes:
            changes[rank]()
        inputs = load_inputs(read_params(training.directory), training.store)
        context = HostContext(attempt=attempt, placement={"accept_env": accept_env}, progress=Progress("train"))
        params = training.params(**{"topology": topology, "rank_timeout": 20, **placed})
        run_rank(params, inputs, training.directory, context, threading.Event())

    return fork_ranks(targets + drafters, body, training.directory / "ranks", timeout)
