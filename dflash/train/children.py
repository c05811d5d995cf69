"""The processes of one attempt, as their launcher sees them: started together, ended together, and the one to blame named.

A child that ends badly ends the whole job: whoever has not ended a second later is killed. So does one that neither ends nor
goes on (`pulse.py`). What the children print goes to the launcher's own output line by line, with the rank in front, and the
last line of each is remembered. No torch; a thread a rank and a look ten times a second.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from dflash.train.attempts import EXIT_BY_KIND
from dflash.train.pulse import VARIABLE, Watch
from dflash.train.roles import Roles

POLL = 0.1
GRACE = 1.0
"""Seconds that the others have to end by themselves once one has ended that may be to blame."""
CULPRIT_GRACE = 15.0
"""Seconds to wait for the one to blame when all that have ended lost another rank: a killed process with tens of GB on a GPU
takes seconds to be gone (3 to 4 seen on an H200), and its peers notice first."""
BLAME = ("permanent", "config", "corrupt")
"""Failures that explain themselves, before deaths that do not; a rank that lost another one is never to blame."""
LOST_A_PEER = 3
"""Innocence of a rank that ended because another was gone."""


@dataclass(frozen=True)
class Ended:
    """How an attempt ended: exit status (negative: killed by that signal) of the rank to blame, and a sentence on it."""

    status: int
    cause: str = ""


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Children:
    """The ranks of a topology on this host.

    Args:
        argv: the command of every rank. environment: theirs; rank, world size and meeting point are added.
        descriptors: passed on, so that the leases are held until the last rank is gone. host: for messages. timeout: seconds
        without progress after which a rank ends the job.
    """

    def __init__(
        self,
        argv: Sequence[str],
        roles: Roles,
        environment: Mapping[str, str],
        descriptors: Sequence[int],
        host: str,
        timeout: float,
    ) -> None:
        self.roles = roles
        self.host = host
        self.last_lines = [""] * roles.world_size
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(roles.world_size)}
        self.watch = Watch(roles.world_size, timeout)
        meeting[VARIABLE] = str(self.watch.descriptor)
        if sys.platform == "linux":
            meeting["GLOO_SOCKET_IFNAME"] = "lo"
        self.processes: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []
        for rank in range(roles.world_size):
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(*descriptors, self.watch.descriptor),
                env={**environment, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            self.processes.append(process)
            reader = threading.Thread(target=self._read, args=(rank, process.stdout), daemon=True)
            reader.start()
            self._readers.append(reader)

    @property
    def pids(self) -> list[int]:
        """By rank."""
        return [process.pid for process in self.processes]

    def terminate(self) -> None:
        """Asks every rank to end with its step."""
        for process in self.processes:
            if process.poll() is None:
                process.terminate()

    def wait(self) -> Ended:
        """Waits for all ranks; kills the rest when one has failed, and all when one is stuck."""
        stuck: tuple[int, str] | None = None
        while any(process.poll() is None for process in self.processes):
            if any(process.poll() for process in self.processes):
                self._end_the_rest()
                break
            stuck = self.watch.stuck([rank for rank, process in enumerate(self.processes) if process.poll() is None])
            if stuck is not None:
                break
            time.sleep(POLL)
        ended = [process.poll() for process in self.processes]
        self._kill()
        self.watch.close()
        for reader in self._readers:
            reader.join(timeout=GRACE)
        if stuck is not None and ended[stuck[0]] is None:
            return Ended(EXIT_BY_KIND["transient"], self._sentence(*stuck))
        return self._judge(ended)

    def _sentence(self, rank: int, how: str) -> str:
        said = f"; it last said: {self.last_lines[rank]}" if self.last_lines[rank] else ""
        return f"{self.roles.name(rank)} on {self.host} {how}{said}"

    def _end_the_rest(self) -> None:
        begun = time.monotonic()
        found = None
        while any(process.poll() is None for process in self.processes):
            now = time.monotonic()
            ends = [status for process in self.processes if (status := process.poll())]
            if found is None and any(_innocence(status) < LOST_A_PEER for status in ends):
                found = now
            if now >= (found + GRACE if found is not None else begun + CULPRIT_GRACE):
                return
            time.sleep(POLL)

    def _kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for process in self.processes:
            process.wait()

    def _judge(self, statuses: Sequence[int | None]) -> Ended:
        failed = {rank: status for rank, status in enumerate(statuses) if status}
        if not failed:
            return Ended(0)
        rank = min(failed, key=lambda rank: (_innocence(failed[rank]), rank))
        how = (
            f"was killed by {signal.Signals(-failed[rank]).name}"
            if failed[rank] < 0
            else f"ended with exit status {failed[rank]}"
        )
        return Ended(failed[rank], self._sentence(rank, how))

    def _read(self, rank: int, stream: IO[bytes] | None) -> None:
        """Copies what a rank prints, with its name in front."""
        if stream is None:
            return
        name = self.roles.name(rank)
        for line in stream:
            text = line.decode(errors="replace").rstrip()
            if text:
                self.last_lines[rank] = text
                os.write(2, f"{name}: {text}\n".encode())


def _innocence(status: int) -> int:
    """The lower, the more likely this rank is the cause: a failure that says why, a death, a crash, a lost peer."""
    if status in {EXIT_BY_KIND[kind] for kind in BLAME}:
        return 0
    if status < 0:
        return 1
    return LOST_A_PEER if status == EXIT_BY_KIND["transient"] else 2
