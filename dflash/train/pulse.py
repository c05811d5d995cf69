"""Signs of life: every rank notes what it does and since when, so that its launcher can tell a rank that hangs from those that
wait for it.

The notes lie in a file without a name that launcher and ranks share, a slot a rank: when the process was last seen (a thread
writes that twice a second; a stopped process writes nothing), and what its main thread does, since when, and whether it is
waiting for another rank. A rank is stuck when it was not seen, or has done one thing without waiting, for `train.rank_timeout`
seconds. Ranks that wait are never blamed: whoever they wait for is stuck, or torch.distributed gives up in their place.

Costs a write of 200 bytes to memory at every exchange, 2 microseconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

VARIABLE = "DFLASH_PULSE"
"""Environment variable with the descriptor of the shared file."""
SLOT, HEAD = 256, 8
TICK = 0.5
STARTING = "starting"
PATIENCE = 600.0
"""Seconds that a start may take at least, whatever the timeout: weights are read from a disk."""


@dataclass(frozen=True)
class Sign:
    """What a rank was last doing. Times are of the host's monotonic clock; `seen` is 0 when it has not begun to tell."""

    seen: float
    doing: str
    waiting: bool
    since: float
    step: int


class Pulse:
    """A rank's side. Without a launcher of ours nobody listens, and nothing is written."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._start = 0
        self._doing, self._waiting, self._step = STARTING, False, 0

    @property
    def watched(self) -> bool:
        """Whether a launcher reads the signs."""
        return self._descriptor is not None

    def begin(self, rank: int) -> None:
        """Starts to give signs, if the launcher has left a file for them."""
        if VARIABLE not in os.environ:
            return
        self._descriptor, self._start = int(os.environ[VARIABLE]), rank * SLOT
        self._tell()
        threading.Thread(target=self._tick, name="pulse", daemon=True).start()

    def _tick(self) -> None:
        while self._descriptor is not None:
            os.pwrite(self._descriptor, struct.pack("d", time.monotonic()), self._start)
            time.sleep(TICK)

    def _tell(self) -> None:
        if self._descriptor is not None:
            os.pwrite(
                self._descriptor,
                pack_note(self._doing, self._waiting, time.monotonic(), self._step),
                self._start + HEAD,
            )

    def works(self, doing: str, step: int) -> None:
        """The main thread begins something that needs no other rank."""
        self._doing, self._waiting, self._step = doing, False, step
        self._tell()

    @contextlib.contextmanager
    def waits(self, doing: str) -> Iterator[None]:
        """The main thread waits for another rank, and works on afterwards."""
        before = self._doing, self._waiting
        self._doing, self._waiting = doing, True
        self._tell()
        try:
            yield
        finally:
            self._doing, self._waiting = before
            self._tell()


PULSE = Pulse()
"""Of this process: a process is one rank."""


def pack_note(doing: str, waiting: bool, since: float, step: int) -> bytes:
    """A note in the size that a slot has room for."""
    room = SLOT - HEAD
    text = json.dumps([waiting, since, step, doing.encode("ascii", "replace").decode()[:120]])
    return text.encode().ljust(room)[:room]


class Watch:
    """The launcher's side.

    Args:
        count: ranks. timeout: seconds without progress after which a rank counts as stuck.
    """

    def __init__(self, count: int, timeout: float) -> None:
        self.timeout = timeout
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the ranks
        self._from = self._last = time.monotonic()
        for rank in range(count):
            os.pwrite(self.descriptor, struct.pack("d", 0.0) + pack_note(STARTING, False, self._last, 0), rank * SLOT)
        self._signs = [Sign(0.0, STARTING, False, self._last, 0) for _ in range(count)]

    @property
    def descriptor(self) -> int:
        """To be inherited by every rank; its number goes to them in `VARIABLE`."""
        return self._file.fileno()

    def signs(self) -> Sequence[Sign]:
        """The last sign of each rank; of a note that is being written the one before."""
        for rank in range(len(self._signs)):
            content = os.pread(self.descriptor, SLOT, rank * SLOT)
            with contextlib.suppress(ValueError, struct.error):
                waiting, since, step, doing = json.loads(content[HEAD:])
                self._signs[rank] = Sign(struct.unpack("d", content[:HEAD])[0], doing, waiting, since, step)
        return self._signs

    def stuck(self, alive: Iterable[int]) -> tuple[int, str] | None:
        """The rank that is stuck, of those that have not ended, and what there is to say of it, or None. Call it several
        times a second."""
        clock = time.monotonic()
        if clock - self._last > self.timeout / 2:  # this very process was stopped: what others did meanwhile is unknown
            self._from = clock
        self._last = clock
        signs = dict(enumerate(self.signs()))
        signs = {rank: signs[rank] for rank in alive}
        unseen = {rank: clock - max(sign.seen, self._from) for rank, sign in signs.items() if sign.seen}
        rank = max(unseen, key=lambda rank: unseen[rank], default=0)
        if unseen.get(rank, 0.0) > self.timeout:
            return (
                rank,
                f"gave no sign of life for {unseen[rank]:.0f} s (in step {signs[rank].step}, {signs[rank].doing})",
            )
        busy = {rank: clock - max(sign.since, self._from) for rank, sign in signs.items() if not sign.waiting}
        for rank in sorted(busy, key=lambda rank: -busy[rank]):
            limit = max(self.timeout, PATIENCE) if signs[rank].doing == STARTING else self.timeout
            if busy[rank] > limit:
                return (
                    rank,
                    f"made no progress for {busy[rank]:.0f} s (in step {signs[rank].step}, {signs[rank].doing})",
                )
        return None

    def close(self) -> None:
        """Lets go of the file."""
        self._file.close()
