"""Ships a folder or a file from one host to another so that it arrives whole or not at all, whatever fails on the way.

The source end pins and hashes, the destination end says what is missing, data streams bring exactly that, each chunk is
verified against the source's manifest where it is written, and only when all are on the disk does the whole appear, by one
rename, with its receipt last (`dflash/ship/sink.py`, which runs at both ends). Nothing is hashed on this machine. An attempt that
fails is made again when that can help; what has arrived is not sent again.

Costs two ssh connections and two more a stream, and a hash of every byte at both ends; `make bench` says what that is in rates.
A dead link is an error after `idle` seconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import queue
import shlex
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dflash.base.errors import ConfigError, CorruptError, DflashError, PermanentError, TransientError
from dflash.base.records import Artifact, ArtifactFile, ShipmentReceipt, now
from dflash.hosts.host import Host, LocalHost
from dflash.ship import sink
from dflash.ship.artifact import root_digest
from dflash.ship.planes import Inbox, Peer, Plane, ProgramMissing, Stream, end_all, start

What = Literal["drafter", "full"]
Route = Literal["relay", "direct"]
Compress = Literal["none", "zlib", "zstd"]

INCLUDE: dict[What, list[str]] = {"drafter": ["drafter", "manifest.json"], "full": []}
"""What of a checkpoint's folder is shipped; an evaluation needs the exported drafter only."""

IDLE = 12.0
SINK = Path(sink.__file__)
PYTHON_OPTIONS = ("-I", "-S")
"""Nothing of the user's and no site packages: the program is standard library, and starts 0.1 s sooner."""


@dataclass(frozen=True)
class Options:
    """How to ship.

    streams: data streams; worth more than one where the round trip is long. direct: for the direct route, the words by which
    the source host reaches the destination host (`["ssh", "-oBatchMode=yes", "user@address"]`). known: the source's
    manifest, if it is recorded: then the source need not be hashed. attempts: how often a transient fault is met with another
    attempt. idle: seconds of silence that mean a dead link. wait: seconds to wait for another shipment of the same content.
    """

    what: What = "full"
    streams: int = 1
    route: Route = "relay"
    plane: Plane = "ssh"
    compress: Compress = "none"
    direct: Sequence[str] = ()
    known: Artifact | None = None
    attempts: int = 4
    idle: float = IDLE
    wait: float = 3600.0
    sink: Path = SINK


@dataclass
class Tally:
    """What all attempts of one shipment did so far."""

    started: str = field(default_factory=now)
    clock: float = field(default_factory=time.monotonic)
    attempts: int = 0
    sent: int = 0
    resent: int = 0
    reused: int | None = None


def ship(
    source: Host,
    source_path: Path,
    destination: Host,
    destination_path: Path,
    *,
    what: What = "full",
    streams: int = 1,
    route: Route = "relay",
    plane: Plane = "ssh",
    compress: Compress = "none",
    direct: Sequence[str] = (),
    known: Artifact | None = None,
    attempts: int = 4,
    idle: float = IDLE,
    wait: float = 3600.0,
    progress: Callable[[int, int], None] | None = None,
    tell: Callable[[str], None] | None = None,
    program: Path = SINK,
) -> ShipmentReceipt:
    """Ships a file or a folder; returns when it is verified and in place. What is there already is not sent again.

    Args:
        source_path, destination_path: absolute, or relative to the workdir of their host. `what`, `streams` and so on: see
            `Options`. progress: called with (bytes there, bytes in all). tell: called with a line when an attempt failed.
        program: the far ends' program.

    Raises:
        SourceChanged: the source changed meanwhile; nothing is visible at the destination.
        CorruptError: the source is not what `known` says.
        PermanentError: no such source, no permission, a full disk, a refused connection, something else in the place.
        TransientError: the last attempt failed too; what has arrived is kept for the next call.
        ConfigError: the direct route without the words for it.
    """
    options = Options(what, streams, route, plane, compress, direct, known, attempts, idle, wait, program)
    if route == "direct" and not direct:
        raise ConfigError(
            "`route: direct` needs to know how the source host reaches the destination",
            remedy="Configure it, or use the default route through this machine.",
        )
    places = (source.workdir / source_path, destination.workdir / destination_path)
    tally = Tally()
    served: list[str] = []
    while True:
        tally.attempts += 1
        try:
            return _Attempt(source, places[0], destination, places[1], options, tally, progress).run()
        except TransientError as error:
            if isinstance(error, ProgramMissing) and error.host.id not in served:
                install(error.host, program)
                served.append(error.host.id)
                tally.attempts -= 1
                continue
            if tally.attempts >= attempts:
                raise
            if tell is not None:
                tell(f"attempt {tally.attempts} failed: {error.message()} Trying again.")
            time.sleep(min(2.0 ** (tally.attempts - 1), 8.0) / 2)


def far_program(host: Host, program: Path) -> list[str]:
    """The argv prefix that runs the far ends' program on a host: on this machine as it lies, elsewhere a copy."""
    if isinstance(host, LocalHost) and not host.entry.wrap:
        return [host.python(), *PYTHON_OPTIONS, str(program)]
    digest = hashlib.sha256(program.read_bytes()).hexdigest()
    return ["python3", *PYTHON_OPTIONS, str(host.workdir / f".dflash-sink-{digest[:16]}.py")]


def install(host: Host, program: Path) -> None:
    """Puts a copy of the program on a host and sees whether python3 there can run it.

    Raises:
        PermanentError: it cannot be written, or cannot be run.
    """
    argv = far_program(host, program)
    content = program.read_bytes()
    host.put(Path(argv[-1]), content)
    done = host.run([*argv, "digest"], timeout=60)
    if done.status or done.stdout.decode(errors="replace").strip() != hashlib.sha256(content).hexdigest():
        raise PermanentError(
            f"python3 cannot run what was sent there: {done.stderr.strip() or 'it says nothing'}",
            where=f"{host.id}:{argv[-1]}",
            remedy="Ships need a python3 >= 3.8 on the PATH of that host.",
        )


class _Attempt:
    """One attempt: two control ends, some streams, and a clock for each."""

    def __init__(
        self,
        source: Host,
        source_path: Path,
        destination: Host,
        destination_path: Path,
        options: Options,
        tally: Tally,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.source, self.source_path = source, source_path
        self.destination, self.destination_path = destination, destination_path
        self.options, self.tally = options, tally
        self.report = progress or (lambda done, total: None)
        self.inbox: Inbox = queue.Queue()
        self.peers: list[Peer] = []
        self.streams: list[Stream] = []
        self.session = uuid.uuid4().hex
        self.there = self.total = 0
        self._over = threading.Event()

    def run(self) -> ShipmentReceipt:
        """The whole of it, in the order of the protocol."""
        with self._ends() as (near, far):
            near.ask(
                do="describe",
                path=str(self.source_path),
                include=INCLUDE[self.options.what],
                known=None if self.options.known is None else [f.model_dump() for f in self.options.known.files],
                idle=self.options.idle,
            )
            manifest = self._answer(near, "manifest")
            self._check(manifest)
            far.ask(
                do="prepare",
                path=str(self.destination_path),
                root=manifest["root"],
                files=manifest["files"],
                session=self.session,
                wait=self.options.wait,
                idle=self.options.idle,
            )
            answer = self._answer(far, "skip", "missing")
            if answer["is"] == "skip":
                return ShipmentReceipt.model_validate(answer["receipt"])
            chunks = sink.chunks_of(manifest["files"])
            if self.tally.reused is None:
                self.tally.reused = len(chunks) - len(answer["chunks"])
            if answer["chunks"]:
                self._transfer(near, manifest, chunks, answer)
            near.ask(do="restat")
            self._answer(near, "unchanged")
            far.ask(do="finish", facts=self._facts(manifest, chunks))
            receipt = ShipmentReceipt.model_validate(self._answer(far, "receipt")["receipt"])
            near.ask(do="leave")
            with contextlib.suppress(DflashError):  # what it would tidy up, the next shipment from there tidies up too
                self._answer(near, "left")
            return receipt

    @contextlib.contextmanager
    def _ends(self) -> Iterator[tuple[Peer, Peer]]:
        """The control ends; the streams connect meanwhile."""
        try:
            self._start()
            threading.Thread(target=self._beat, daemon=True).start()
            yield self.peers[0], self.peers[1]
        finally:
            self._over.set()
            self.tally.sent += self._received()
            end_all(self.peers, self.streams)

    def _start(self) -> None:
        """Starts all ends at once: a connection takes ten round trips.

        Raises:
            PermanentError: a host refuses us. TransientError: it cannot be reached. What has started is kept, to be ended.
        """
        near, far = (far_program(host, self.options.sink) for host in (self.source, self.destination))
        plane, direct = self.options.plane, self.options.route == "direct"

        def peer(name: str, host: Host, program: list[str]) -> Peer:
            argv = [*program, name]
            return Peer(name, host, argv, start(host, argv, plane), self.inbox)

        def stream() -> Stream:
            sending, storing = (self.source, [*near, "send"]), (self.destination, [*far, "store"])
            return Stream(sending, storing, plane, direct, self.inbox)

        with ThreadPoolExecutor(2 + self.options.streams) as pool:
            peers = [pool.submit(peer, "source", self.source, near)]
            peers.append(pool.submit(peer, "destination", self.destination, far))
            streams = [pool.submit(stream) for _ in range(self.options.streams)]
        self.peers = [each.result() for each in peers if each.exception() is None]
        self.streams = [each.result() for each in streams if each.exception() is None]
        for error in [each.exception() for each in peers] + [each.exception() for each in streams]:
            if error is not None:
                raise error

    def _received(self) -> int:
        return sum(stream.store.received for stream in self.streams if stream.begun)

    def _beat(self) -> None:
        while not self._over.wait(1.0):
            for peer in self.peers:
                peer.beat()
            for stream in self.streams:
                stream.beat()

    def _check(self, manifest: dict[str, Any]) -> None:
        files = [ArtifactFile(**item) for item in manifest["files"]]
        if root_digest(files) != manifest["root"]:
            raise TransientError("the manifest does not have the root it claims", where=self.source.id)
        if self.options.known is not None and manifest["root"] != self.options.known.root:
            raise CorruptError("the source is not what is recorded of it", where=f"{self.source.id}:{self.source_path}")

    def _answer(self, peer: Peer, *kinds: str) -> dict[str, Any]:
        """The next message of a control end, while all ends must stay alive."""
        while True:
            sender, message = self._next()
            if sender is peer and message["is"] in kinds:
                return message
            self._refuse(sender, message)

    def _next(self) -> tuple[Peer, dict[str, Any]]:
        """The next message of any end.

        Raises:
            TransientError: an end has been silent for too long.
        """
        while True:
            with contextlib.suppress(queue.Empty):
                return self.inbox.get(timeout=0.25)
            self._update()
            for peer in (*self.peers, *(stream.store for stream in self.streams if stream.begun)):
                if not peer.finished and time.monotonic() - peer.heard > self.options.idle:
                    what = "no data has come" if peer.data else "nothing was heard of it"
                    raise TransientError(f"{what} for {self.options.idle:.0f} s: the link is dead", where=peer.host.id)

    def _refuse(self, sender: Peer, message: dict[str, Any]) -> None:
        if message["is"] == "error":
            raise sender.error(message)
        raise sender.lost(message.get("why", ""))

    def _transfer(self, near: Peer, manifest: dict[str, Any], chunks: list[sink.Chunk], answer: dict[str, Any]) -> None:
        missing = [chunks[number] for number in answer["chunks"]]
        self.total = sum(item["size"] for item in manifest["files"])
        self.there = self.total - sum(chunk.length for chunk in missing)
        try:
            left = [stream.store for stream in self._begin_streams(manifest, missing, answer["partial"])]
            while left:
                sender, message = self._next()
                if message["is"] == "done" and sender in left:
                    left.remove(sender)
                else:
                    self._refuse(sender, message)
            self._update()
        except TransientError as error:
            self._count_waste()
            raise self._verdict(near, error) from error

    def _begin_streams(self, manifest: dict[str, Any], missing: list[sink.Chunk], partial: str) -> list[Stream]:
        used = self.streams[: max(1, math.ceil(len(missing) / 2))]
        command: list[str] = []
        if self.options.route == "direct":
            store = [*far_program(self.destination, self.options.sink), "store"]
            command = [*self.options.direct, shlex.join([*self.destination.entry.wrap, *store])]
        for index, stream in enumerate(used):
            request = {
                "base": manifest["base"],
                "chunks": [list(chunk) for chunk in missing[index :: len(used)]],
                "compress": self.options.compress,
                "command": command,
                "idle": self.options.idle,
            }
            header = {
                "partial": partial,
                "root": manifest["root"],
                "session": self.session,
                "stream": index,
                "idle": self.options.idle,
            }
            stream.begin(request, header)
        return used

    def _update(self) -> None:
        if self.total:
            self.report(self.there + sum(stream.store.stored for stream in self.streams), self.total)

    def _count_waste(self) -> None:
        for stream in self.streams:
            if stream.begun:
                self.tally.resent += max(0, stream.store.received - stream.store.stored)

    def _verdict(self, near: Peer, error: TransientError) -> DflashError:
        """Why a transfer failed: because the source is not what it was, because `send` died, or as it seemed."""
        try:
            near.ask(do="restat")
            deadline = time.monotonic() + 2
            while time.monotonic() < deadline:
                with contextlib.suppress(queue.Empty):
                    sender, message = self.inbox.get(timeout=0.25)
                    if sender is near and message["is"] == "error":
                        return near.error(message)
                    if sender is near:
                        break
        except DflashError:
            pass
        causes = (
            [cause for stream in self.streams if stream.begun and (cause := stream.cause())]
            if "ended early" in error.what
            else []
        )
        return causes[0] if causes else error

    def _facts(self, manifest: dict[str, Any], chunks: list[sink.Chunk]) -> dict[str, Any]:
        """The receipt, but for what only the destination knows."""
        return {
            "schema_version": 1,
            "root": manifest["root"],
            "what": self.options.what,
            "source_host": self.source.id,
            "source": str(self.source_path),
            "destination_host": self.destination.id,
            "destination": str(self.destination_path),
            "files": len(manifest["files"]),
            "bytes": sum(item["size"] for item in manifest["files"]),
            "chunks": len(chunks),
            "chunks_reused": self.tally.reused or 0,
            "bytes_sent": self.tally.sent + self._received(),
            "bytes_resent": self.tally.resent,
            "seconds": time.monotonic() - self.tally.clock,
            "route": self.options.route,
            "plane": self.options.plane,
            "streams": max(1, sum(stream.begun for stream in self.streams)),
            "compress": self.options.compress,
            "pinned": manifest["pinned"],
            "verified": True,
            "attempts": self.tally.attempts,
            "started": self.tally.started,
        }
