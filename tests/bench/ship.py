"""Shipping against what people would do instead, over real sshd on loopback: ratios of rates within one run.

    {"name": ..., "ratio": rate of the first / rate of the second, "unit": "MB/s", "n", "min", "median", "max": of the first}

A source is never hashed before unless the line says that its digests are recorded, as those of checkpoints are: then its end
of a shipment reads each byte once, not twice. sftp.get is what paramiko does by default (it asks for everything at once, and
its ciphers are not ours); with `prefetch=False` it would wait for each 32 KiB, and be many times slower.

`python tests/bench/ship.py [--megabytes 512] [--repeat 3] [--only NAME]`. Files lie in memory (/dev/shm) where there is some, so
that the disk is not what is measured. Each pair is measured in turns. Takes 3 minutes on two quiet cores, 2 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

from proxy import Proxy  # noqa: E402
from ship_hosts import ssh_host, write_random  # noqa: E402
from sshd import start_sshd  # noqa: E402

from dflash.base.errors import TransientError  # noqa: E402
from dflash.base.files import CHUNK  # noqa: E402
from dflash.base.records import Artifact, ArtifactFile  # noqa: E402
from dflash.hosts.host import LocalHost  # noqa: E402
from dflash.hosts.ssh import SshHost  # noqa: E402
from dflash.ship.artifact import chunk_digests, root_digest  # noqa: E402
from dflash.ship.receipt import receipt_path  # noqa: E402
from dflash.ship.ship import ship  # noqa: E402
from dflash.ship.sink import SINGLE  # noqa: E402

ROUND_TRIP_MS = 40.0


class Bench:
    """Two servers, a file on the first, and ways to bring it to the second or here."""

    def __init__(self, folder: Path, megabytes: int, repeat: int) -> None:
        self.folder, self.repeat = folder, repeat
        self.size = megabytes << 20
        self.servers = [start_sshd(folder / name, environment={"HOME": str(folder)}) for name in ("a", "b")]
        self.gpu = ssh_host(self.servers[0], "gpu", folder / "gpu")
        self.eval = ssh_host(self.servers[1], "eval", folder / "eval")
        self.here = LocalHost()
        self.file = self.gpu.workdir / "data"
        write_random(self.file, self.size, 1)
        files = [ArtifactFile(path=SINGLE, size=self.size, chunks=chunk_digests(self.file))]
        self.recorded = Artifact(root=root_digest(files), files=files)
        for far in (self.eval, self.gpu):  # the far ends' program gets there once, not in what is measured
            write_random(folder / "small", 1, 1)
            ship(self.here, folder / "small", far, far.workdir / "small")

    def close(self) -> None:
        """Ends the servers."""
        for server in self.servers:
            server.stop()

    def place(self, host: SshHost | None = None) -> Path:
        """Where it shall go; nothing is there."""
        place = (host.workdir if host else self.folder) / "place"
        for path in (place, receipt_path(place)):
            path.unlink(missing_ok=True)
        return place

    def compare(
        self, name: str, first: Callable[[], object], second: Callable[[], object], size: int | None = None
    ) -> None:
        """Measures both in turns and prints the ratio of the median rates."""
        rates: tuple[list[float], list[float]] = ([], [])
        for _ in range(self.repeat):
            for found, work in zip(rates, (first, second), strict=True):
                start = time.perf_counter()
                work()
                found.append((size or self.size) / (time.perf_counter() - start) / 1e6)
        report(name, statistics.median(rates[0]) / statistics.median(rates[1]), "MB/s", rates[0], rates[1])

    def relay(self, **options: object) -> None:
        """Ours: verified, through this process."""
        ship(self.gpu, self.file, self.eval, self.place(self.eval), **options)  # type: ignore[arg-type]

    def relay_recorded(self) -> None:
        """Ours, when the digests of the source are recorded."""
        self.relay(known=self.recorded)

    def cat_cat(self) -> None:
        """ssh cat | ssh cat: nobody looks at a byte."""
        place = self.place(self.eval)
        reading = subprocess.Popen(self.gpu.command(["cat", str(self.file)]), stdout=subprocess.PIPE)
        subprocess.run(self.eval.command(into(place)), stdin=reading.stdout, check=True)
        assert reading.wait() == 0

    def copy_then_hash(self) -> None:
        """The same, then sha256sum on both ends, one after the other."""
        self.cat_cat()
        sums = [
            subprocess.run(host.command(["sha256sum", str(path)]), capture_output=True, check=True).stdout[:64]
            for host, path in ((self.gpu, self.file), (self.eval, self.eval.workdir / "place"))
        ]
        assert sums[0] == sums[1]

    def pull(self) -> None:
        """Ours by paramiko to this machine, verified."""
        ship(self.gpu, self.file, self.here, self.place(), plane="paramiko")

    def pull_recorded(self) -> None:
        """The same, when the digests of the source are recorded."""
        ship(self.gpu, self.file, self.here, self.place(), plane="paramiko", known=self.recorded)

    def stream(self) -> None:
        """Our paramiko plane alone: an exec stream into a file."""
        with self.gpu.channel(["cat", str(self.file)]) as channel, self.place().open("wb", buffering=0) as stream:
            while piece := channel.read():
                stream.write(piece)
            assert channel.wait(10) == 0

    def cat(self) -> None:
        """ssh cat into a file."""
        with self.place().open("wb") as stream:
            subprocess.run(self.gpu.command(["cat", str(self.file)]), stdout=stream, check=True)

    def sftp(self) -> None:
        """paramiko's sftp.get."""
        import paramiko

        hop = self.gpu.route[0]
        client = paramiko.SSHClient()
        client.load_host_keys(str(hop.known_hosts))
        client.connect(
            hop.address, hop.port, hop.user, key_filename=str(hop.key_file), look_for_keys=False, allow_agent=False
        )
        client.open_sftp().get(str(self.file), str(self.place()))
        client.close()

    def far(self) -> None:
        """One stream against four over a long round trip."""
        with Proxy("127.0.0.1", self.servers[0].port, delay_ms=ROUND_TRIP_MS / 2) as proxy:
            distant = ssh_host(self.servers[0], "gpu", self.gpu.workdir, through=proxy)
            part = self.gpu.workdir / "part"
            write_random(part, self.size // 2, 2)
            for plane in ("ssh", "paramiko"):

                def bring(streams: int, plane: str = plane) -> None:
                    ship(distant, part, self.here, self.place(), streams=streams, plane=plane)  # type: ignore[arg-type]

                name = f"4 streams over 1 at {ROUND_TRIP_MS:.0f} ms, {plane}"
                self.compare(name, lambda: bring(4), lambda: bring(1), self.size // 2)

    def resume(self) -> None:
        """Bytes sent again after a cut in the middle, in chunks a stream: the data of both attempts over the file's size.

        What the proxy counts of the first attempt is ssh's traffic; a shipment that is not cut says how much of that is data.
        """
        for streams in (1, 4):
            found = []
            for _ in range(self.repeat):
                with Proxy("127.0.0.1", self.servers[1].port) as proxy:
                    distant = ssh_host(self.servers[1], "eval", self.eval.workdir, through=proxy)
                    whole = ship(self.gpu, self.file, distant, self.place(self.eval), streams=streams).bytes_sent
                    traffic = proxy.counts()["up"]
                    proxy.arm("drop", after=self.size // 2)
                    place = self.place(self.eval)
                    try:
                        ship(self.gpu, self.file, distant, place, streams=streams, attempts=1)
                    except TransientError:
                        first = (proxy.counts()["up"] - traffic) * whole // traffic
                    second = ship(self.gpu, self.file, distant, place, streams=streams).bytes_sent
                found.append(max(0, first + second - self.size) / CHUNK / streams)
            report(
                f"chunks sent again on resume, a stream, of {streams}", statistics.median(found), "chunks", found, [1.0]
            )

    def run(self, only: str) -> None:
        """All of it, or what has `only` in its name."""
        pairs: list[tuple[str, Callable[[], object], Callable[[], object]]] = [
            ("verified relay over ssh cat | ssh cat", self.relay, self.cat_cat),
            ("verified relay, digests recorded, over ssh cat | ssh cat", self.relay_recorded, self.cat_cat),
            ("verified relay over copy, then sha256sum on both ends", self.relay, self.copy_then_hash),
            ("verified paramiko pull over ssh cat", self.pull, self.cat),
            ("verified paramiko pull, digests recorded, over ssh cat", self.pull_recorded, self.cat),
            ("paramiko plane over ssh cat", self.stream, self.cat),
            ("verified paramiko pull over sftp.get", self.pull, self.sftp),
            ("paramiko plane over sftp.get", self.stream, self.sftp),
        ]
        for name, first, second in pairs:
            if only in name:
                self.compare(name, first, second)
        if only in "4 streams":
            self.far()
        if only in "resume":
            self.resume()


def into(path: Path) -> list[str]:
    """A command that writes its input to a file."""
    return ["sh", "-c", f"cat > {shlex.quote(str(path))}"]


def report(name: str, ratio: float, unit: str, measured: list[float], baseline: list[float]) -> None:
    """Prints one line."""
    line = {
        "name": name,
        "ratio": round(ratio, 3),
        "unit": unit,
        "n": len(measured),
        "min": round(min(measured), 1),
        "median": round(statistics.median(measured), 1),
        "max": round(max(measured), 1),
        "baseline": [round(value, 1) for value in (min(baseline), statistics.median(baseline), max(baseline))],
    }
    print(json.dumps(line), flush=True)


def main(megabytes: int = 512, repeat: int = 3, only: str = "") -> None:
    """Runs the benchmarks in memory."""
    shared = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="dflash-bench-", dir=shared if shared.is_dir() else None))
    bench = Bench(folder, megabytes, repeat)
    try:
        bench.run(only)
    finally:
        bench.close()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    main(given.megabytes, given.repeat, given.only)
