"""Hundreds of shipments, a random fault in the middle of each, and an outsider who re-hashes what arrived.

    python tests/integration/soak_ship.py [--count 300] [--seed N] [--log FILE] [--kinds a,b] [--break-verification]

This process injects, logs and re-hashes; each shipment is made by a process of its own, over real sshd and through a proxy.
A line of JSON a shipment: kind of fault, bytes that had passed when it struck, outcome of the struck attempt and of the next.
Exit 1 when a receipt stands over wrong bytes, when an attempt takes over 60 s, or when a sound source has not arrived after the
next attempt. `--break-verification` ships with a program whose verification is patched out; the soak must then fail.

Costs 40 MB of memory, 2 to 5 s a shipment on two cores. As root it also fills a small tmpfs; otherwise it says that it cannot.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

from proxy import Proxy  # noqa: E402
from ship_hosts import content, flipping_wrap, ssh_host  # noqa: E402
from sshd import Sshd, start_sshd  # noqa: E402

from dflash.base.errors import DflashError  # noqa: E402
from dflash.hosts.ssh import SshHost  # noqa: E402
from dflash.ship.receipt import receipt_path  # noqa: E402
from dflash.ship.ship import SINK, ship  # noqa: E402

MEGABYTE = 1 << 20
SIZE = 25 * MEGABYTE + 12345
HANG = 60.0
KINDS = (
    "kill_sshd", "blackhole", "kill_controller", "disk_full", "overwritten",
    "truncated", "deleted", "two_copiers", "wire_flip", "inner_flip",
)  # fmt: skip
BAD_SOURCE = ("overwritten", "truncated")


class Controller:
    """One attempt of a shipment in a process of its own, which leaves its outcome in a file."""

    def __init__(self, arguments: tuple[Any, ...], options: dict[str, Any], outcome: Path) -> None:
        self.outcome = outcome
        self.began = time.monotonic()
        outcome.unlink(missing_ok=True)
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os._exit(self._work(arguments, options))

    def _work(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> int:
        try:
            receipt = ship(*arguments, attempts=1, **options)
            said = {"outcome": "arrived", "reused": receipt.chunks_reused, "started": receipt.started}
        except DflashError as error:
            said = {"outcome": type(error).__name__, "why": error.message()[:200]}
        self.outcome.write_text(json.dumps(said))
        return 0

    def alive(self) -> bool:
        """Whether it is still at work."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def kill(self) -> None:
        """kill -9."""
        os.kill(self.pid, signal.SIGKILL)

    def join(self) -> dict[str, Any]:
        """Its outcome and how long it took; a hang is killed and says so."""
        while self.alive() and time.monotonic() - self.began < HANG:
            time.sleep(0.01)
        hung = self.alive()
        if hung:
            self.kill()
        os.waitpid(self.pid, 0)
        seconds = round(time.monotonic() - self.began, 2)
        if hung:
            return {"outcome": "hang", "seconds": seconds}
        said = json.loads(self.outcome.read_text()) if self.outcome.exists() else {"outcome": "killed"}
        return {**said, "seconds": seconds}


class Soak:
    """Two hosts, a bad network, and what is done to them."""

    def __init__(self, folder: Path, seed: int, broken: bool) -> None:
        self.folder = folder
        self.random = random.Random(seed)
        self.servers: dict[str, Sshd] = {
            name: start_sshd(folder / f"sshd-{name}", environment={"HOME": str(folder)}) for name in ("gpu", "eval")
        }
        self.proxies = {name: Proxy(server.address, server.port) for name, server in self.servers.items()}
        self.hosts = {
            name: ssh_host(server, name, folder / name, through=self.proxies[name])
            for name, server in self.servers.items()
        }
        self.base = self.random.randbytes(SIZE)
        self.program = self._program(broken, "")
        self.unreserving = self._program(broken, "-unreserving")
        self.small = folder / "small"
        self.small.mkdir()
        argv = ["mount", "-t", "tmpfs", "-o", "size=72m", "none", str(self.small)]
        self.mounted = not os.getuid() and not subprocess.run(argv, capture_output=True, check=False).returncode

    def _program(self, broken: bool, suffix: str) -> Path:
        """A copy of the far ends' program: verification out, or as on a filesystem that reserves nothing."""
        text = SINK.read_text()
        patches = [("return digest == wanted", "return True")] if broken else []
        patches += [("call = ctypes.CDLL(None, use_errno=True).fallocate", "return")] if suffix else []
        for old, new in patches:
            assert text.count(old) == 1
            text = text.replace(old, new)
        path = self.folder / f"sink{suffix}.py"
        path.write_text(text)
        return path

    def close(self) -> None:
        """Leaves nothing behind."""
        for proxy in self.proxies.values():
            proxy.close()
        for server in self.servers.values():
            server.stop()
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.small)], check=False)

    def source(self, number: int) -> Path:
        """A checkpoint of its own content: every chunk is new."""
        folder = self.folder / f"gpu/step_{number}"
        (folder / "drafter").mkdir(parents=True)
        data = bytearray(self.base)
        for offset in range(0, SIZE, MEGABYTE):
            data[offset : offset + 8] = self.random.randbytes(8)
        (folder / "drafter/model.safetensors").write_bytes(data)
        (folder / "manifest.json").write_text(json.dumps({"step": number}))
        return folder

    def moved(self) -> int:
        """Bytes that have passed towards the destination."""
        return self.proxies["eval"].counts()["up"]

    def shipment(self, number: int, kind: str) -> dict[str, Any]:
        """One shipment: struck once, then tried again in peace; what it left is re-hashed after each."""
        source = self.source(number)
        model = source / "drafter/model.safetensors"
        place = (self.small if kind == "disk_full" else self.folder / "eval") / f"step_{number}"
        plane = "paramiko" if self.random.random() < 0.2 else "ssh"
        options: dict[str, Any] = {
            "plane": plane,
            "streams": self.random.choice([1, 1, 2]),
            "program": self.unreserving if kind == "disk_full" else self.program,
            "idle": 8.0 if kind == "blackhole" else 12.0,
        }
        before = content(source)
        strike = self.random.randrange(2 * MEGABYTE, SIZE * 3 // 5)
        marker = self.folder / f"flipped-{number}"
        hosts = dict(self.hosts)
        if kind == "inner_flip":
            wrap = tuple(flipping_wrap(self.folder, strike, marker))
            plain = hosts["eval"]
            hosts["eval"] = SshHost("eval", plain.entry.model_copy(update={"wrap": wrap}), plain.route)
        for proxy in self.proxies.values():
            proxy.delay(15)
        start = self.moved()
        fired = self.proxies["eval"].counts()["fired"]
        if kind in ("blackhole", "wire_flip"):
            what = "flip" if kind == "wire_flip" else kind
            self.proxies["eval"].arm(what, after=strike)
        arguments = (hosts["gpu"], source, hosts["eval"], place)
        first = Controller(arguments, options, self.folder / "outcome")
        second: list[Controller] = []
        acts: dict[str, Callable[[], object]] = {
            "kill_sshd": lambda: self.servers[self.random.choice(["gpu", "eval"])].kill_children(),
            "kill_controller": first.kill,
            "disk_full": lambda: fill(self.small / "filler"),
            "overwritten": lambda: overwrite(model, self.random),
            "truncated": lambda: os.truncate(model, SIZE // 7),
            "deleted": lambda: shutil.rmtree(source),
            "two_copiers": lambda: second.append(Controller(arguments, options, self.folder / "outcome2")),
        }
        if kind in acts:
            while first.alive() and self.moved() - start < strike and time.monotonic() - first.began < HANG:
                time.sleep(0.002)
            struck_at = self.moved() - start
            still = first.alive()
            acts[kind]()
            mid = still and first.outcome.exists() is False and MEGABYTE < struck_at < SIZE
        struck = first.join()
        if kind in ("blackhole", "wire_flip"):
            struck_at, mid = strike, self.proxies["eval"].counts()["fired"] > fired
        if kind == "inner_flip":
            struck_at, mid = strike, marker.exists()
        line: dict[str, Any] = {"number": number, "kind": kind, "plane": plane, "streams": options["streams"]}
        line |= {"moved": struck_at, "total": SIZE, "mid_transfer": bool(mid), "struck": struck}
        line["wrong"] = wrong_bytes(place, [before])
        for other in second:
            line["other"] = other.join()
            line["wrong"] |= wrong_bytes(place, [before])
        self._calm(kind)
        if struck["outcome"] != "arrived":
            now_there = content(source)
            line["next"] = Controller(arguments, {**options, "idle": 12.0}, self.folder / "outcome").join()
            line["wrong"] |= wrong_bytes(place, [now_there])
        line["bad"] = self._judge(line, kind)
        for folder in (source, place):
            shutil.rmtree(folder, ignore_errors=True)
        for rest in place.parent.glob(f".{place.name}.*"):
            shutil.rmtree(rest, ignore_errors=True) if rest.is_dir() else rest.unlink()
        return line

    def _calm(self, kind: str) -> None:
        """A good network again, and room."""
        for proxy in self.proxies.values():
            proxy.disarm()
        if kind == "blackhole":
            for proxy in self.proxies.values():
                proxy.drop()
                proxy.restore()
            time.sleep(0.3)
        (self.small / "filler").unlink(missing_ok=True)

    def _judge(self, line: dict[str, Any], kind: str) -> list[str]:
        bad = ["a receipt over wrong bytes"] if line["wrong"] else []
        attempts = [line[name] for name in ("struck", "other", "next") if name in line]
        bad += ["an attempt took over 60 s"] if any(one["outcome"] == "hang" for one in attempts) else []
        if not any(one["outcome"] == "arrived" for one in attempts):
            bad.append("not arrived after the next attempt")
        if kind in BAD_SOURCE and line["mid_transfer"] and line["struck"]["outcome"] not in ("SourceChanged",):
            bad.append(f"a source that changed ended as {line['struck']['outcome']}")
        return bad


def overwrite(path: Path, source: random.Random) -> None:
    """Other bytes in place, of the same size."""
    with path.open("r+b") as stream:
        stream.seek(source.randrange(0, SIZE - 4096))
        stream.write(source.randbytes(4096))


def fill(path: Path) -> None:
    """Writes until the disk is full."""
    with path.open("wb", buffering=0) as stream, contextlib.suppress(OSError):
        while stream.write(bytes(MEGABYTE)):
            pass


def wrong_bytes(place: Path, right: list[dict[str, str]]) -> bool:
    """Whether there is a receipt and the content, hashed here, is none that was ever shipped."""
    return receipt_path(place).exists() and (not place.is_dir() or content(place) not in right)


def main() -> int:
    """Runs the soak; prints the seed first and a summary last."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "big"))
    parser.add_argument("--log", type=Path)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no shipment after so long")
    parser.add_argument("--break-verification", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))
    print(f"seed {options.seed}", flush=True)
    shared = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="dflash-soak-", dir=shared if shared.is_dir() else None))
    soak = Soak(folder, options.seed, options.break_verification)
    kinds = [kind for kind in options.kinds.split(",") if kind != "disk_full" or soak.mounted]
    if "disk_full" in options.kinds and not soak.mounted:
        print("no small filesystem can be mounted here: disk_full is left out", flush=True)
    order = [kinds[index % len(kinds)] for index in range(options.count)]
    soak.random.shuffle(order)
    lines: list[dict[str, Any]] = []
    began = time.monotonic()
    log = options.log.open("w") if options.log else contextlib.nullcontext(sys.stdout)
    try:
        with log as stream:
            for number, kind in enumerate(order):
                if time.monotonic() - began > options.seconds:
                    break
                lines.append(soak.shipment(number, kind))
                print(json.dumps(lines[-1]), file=stream, flush=True)
    finally:
        soak.close()
        shutil.rmtree(folder, ignore_errors=True)
    return summary(lines, options.seed, time.monotonic() - began)


def summary(lines: list[dict[str, Any]], seed: int, seconds: float) -> int:
    """Prints what happened; 1 when anything must not have."""
    attempts = [line[name] for line in lines for name in ("struck", "other", "next") if name in line]
    bad = [line for line in lines if line["bad"]]
    said = {
        "seed": seed,
        "shipments": len(lines),
        "fired": dict(Counter(line["kind"] for line in lines)),
        "fired_mid_transfer": dict(Counter(line["kind"] for line in lines if line["mid_transfer"])),
        "receipts_over_wrong_bytes": sum(line["wrong"] for line in lines),
        "over_60_s": sum(one["outcome"] == "hang" for one in attempts),
        "longest_s": max([one["seconds"] for one in attempts], default=0),
        "bad": [{name: line[name] for name in ("number", "kind", "bad")} for line in bad],
        "seconds": round(seconds),
    }
    print(json.dumps(said), flush=True)
    return 1 if bad or not lines else 0


if __name__ == "__main__":
    assert threading.active_count() == 1  # shipments are forked off
    sys.exit(main())
