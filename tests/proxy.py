"""A TCP proxy for tests that can be a bad network: late, silent, cut, or wrong in one byte.

It is a process of its own, so that it steals no time from the interpreter under test and can be told anything at any moment.
Delay does not limit bandwidth: up to BUFFER bytes may be under way in each direction of each connection.

    with Proxy("127.0.0.1", 22) as proxy:
        proxy.delay(20)                          # ms each way
        proxy.arm("drop", after=1 << 20)         # when 1 MiB more has passed to the server
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PIECE = 1 << 18
BUFFER = 64 << 20


class Proxy:
    """A running proxy. `up` is the direction to the server, `down` the one to the client."""

    def __init__(self, address: str, port: int, *, listen: str = "127.0.0.1", delay_ms: float = 0.0) -> None:
        argv = [sys.executable, str(Path(__file__).resolve()), listen, address, str(port)]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.address = listen
        self.port = int(self._answer()["port"])
        if delay_ms:
            self.delay(delay_ms)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the proxy has ended")
        return dict(json.loads(line))

    def _tell(self, **order: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def delay(self, milliseconds: float) -> None:
        """Delays what passes from now on, each way."""
        self._tell(do="delay", seconds=milliseconds / 1000)

    def blackhole(self) -> None:
        """Forwards nothing more and keeps every socket open, as a dead link does."""
        self._tell(do="blackhole")

    def restore(self) -> None:
        """Ends a black hole: what is under way arrives late."""
        self._tell(do="restore")

    def drop(self) -> None:
        """Cuts every connection with a reset; new ones are served."""
        self._tell(do="drop")

    def flip(self, *, direction: str = "up", after: int = 0) -> None:
        """Turns one bit of the byte that passes `after` bytes from now."""
        self.arm("flip", direction=direction, after=after)

    def arm(self, what: str, *, direction: str = "up", after: int = 0) -> None:
        """Does `drop`, `blackhole` or `flip` once, as soon as `after` more bytes have passed in a direction."""
        self._tell(do="arm", what=what, direction=direction, after=after)

    def disarm(self) -> None:
        """Forgets what is armed and has not fired."""
        self._tell(do="disarm")

    def counts(self) -> dict[str, int]:
        """`up`, `down`: bytes passed; `connections`: how many were made; `fired`: armed orders that were carried out."""
        return {name: int(value) for name, value in self._tell(do="counts").items()}

    def close(self) -> None:
        """Ends the proxy and every connection through it."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class Network:
    """What the proxy does to all connections."""

    seconds: float = 0.0
    open: asyncio.Event = field(default_factory=asyncio.Event)
    passed: dict[str, int] = field(default_factory=lambda: {"up": 0, "down": 0})
    armed: list[dict[str, Any]] = field(default_factory=list)
    sockets: set[socket.socket] = field(default_factory=set)
    serving: set[asyncio.Task[None]] = field(default_factory=set)
    connections: int = 0
    fired: int = 0

    def obey(self, order: dict[str, Any]) -> dict[str, int]:
        """Carries out one order from outside."""
        what = order["do"]
        if what == "delay":
            self.seconds = order["seconds"]
        elif what == "blackhole":
            self.open.clear()
        elif what == "restore":
            self.open.set()
        elif what == "drop":
            self.drop()
        elif what == "disarm":
            self.armed.clear()
        elif what == "arm":
            self.armed.append({**order, "at": self.passed[order["direction"]] + order["after"]})
        return {**self.passed, "connections": self.connections, "fired": self.fired}

    def drop(self) -> None:
        """Resets every connection."""
        for one in list(self.sockets):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        for task in list(self.serving):
            task.cancel()

    def pass_on(self, direction: str, piece: bytearray) -> None:
        """Counts a piece that arrived and fires what is armed for its bytes."""
        start = self.passed[direction]
        self.passed[direction] += len(piece)
        for order in [one for one in self.armed if one["direction"] == direction]:
            if order["at"] < self.passed[direction]:
                self.armed.remove(order)
                self.fired += 1
                if order["what"] == "flip":
                    piece[max(order["at"] - start, 0)] ^= 0x40
                else:
                    self.obey({"do": order["what"]})


async def pump(network: Network, direction: str, source: socket.socket, sink: socket.socket) -> None:
    """Moves bytes one way until the source ends, each piece when its delay is over."""
    loop = asyncio.get_running_loop()
    waiting: deque[tuple[float, bytearray]] = deque()
    changed = asyncio.Event()
    under_way = 0

    async def deliver() -> None:
        nonlocal under_way
        while True:
            while not waiting:
                changed.clear()
                await changed.wait()
            due, piece = waiting.popleft()
            while (late := due - time.monotonic()) > 0:
                await asyncio.sleep(late)
            await network.open.wait()
            if not piece:
                with contextlib.suppress(OSError):
                    sink.shutdown(socket.SHUT_WR)
                return
            await loop.sock_sendall(sink, piece)
            under_way -= len(piece)

    async def take() -> None:
        nonlocal under_way
        while True:
            await network.open.wait()
            while under_way >= BUFFER:
                await asyncio.sleep(0.001)
            piece = bytearray(await loop.sock_recv(source, PIECE))
            network.pass_on(direction, piece)
            under_way += len(piece)
            waiting.append((time.monotonic() + network.seconds, piece))
            changed.set()
            if not piece:
                return

    # When one ends badly the other must not live on: it would wait on a descriptor that the next connection gets.
    async with asyncio.TaskGroup() as both:
        both.create_task(take())
        both.create_task(deliver())


async def serve(network: Network, client: socket.socket, address: str, port: int) -> None:
    """One connection, from accept to the end of both directions."""
    loop = asyncio.get_running_loop()
    server = socket.socket()
    server.setblocking(False)
    network.connections += 1
    network.sockets |= {client, server}
    ways: list[asyncio.Task[None]] = []
    try:
        await network.open.wait()
        await loop.sock_connect(server, (address, port))
        for one in (client, server):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ways = [
            asyncio.create_task(pump(network, "up", client, server)),
            asyncio.create_task(pump(network, "down", server, client)),
        ]
        await asyncio.wait(ways, return_when=asyncio.FIRST_EXCEPTION)
    except OSError:
        pass
    finally:
        for way in ways:
            way.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*ways, return_exceptions=True)
        network.sockets -= {client, server}
        client.close()
        server.close()


async def main(listen: str, address: str, port: int) -> None:
    """Serves until standard input ends."""
    network = Network()
    network.open.set()
    loop = asyncio.get_running_loop()
    listener = socket.create_server((listen, 0), backlog=128)
    listener.setblocking(False)
    print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
    orders = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)

    async def accept() -> None:
        while True:
            client, _ = await loop.sock_accept(listener)
            client.setblocking(False)
            task = asyncio.create_task(serve(network, client, address, port))
            network.serving.add(task)
            task.add_done_callback(network.serving.discard)

    accepting = asyncio.create_task(accept())
    while line := await orders.readline():
        print(json.dumps(network.obey(json.loads(line))), flush=True)
    accepting.cancel()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
