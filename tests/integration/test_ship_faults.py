"""Every row of the fault table of shipping, over real sshd: it arrives whole, or nothing of it is visible."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from proxy import Proxy
from ship_hosts import content, flipping_wrap, journaled, left_behind, make_checkpoint, ssh_host, waiting_until
from sshd import Sshd

from dflash.base.errors import PermanentError, TransientError
from dflash.base.records import ShipmentReceipt
from dflash.hosts.ssh import SshHost
from dflash.ship.planes import Plane, SourceChanged
from dflash.ship.receipt import content_root, receipt_path, require_receipt
from dflash.ship.ship import SINK, install, ship

MEGABYTES = 32
HALF = 18 << 20


class Road:
    """A checkpoint on one host, a place for it on another, a bad network between them."""

    def __init__(self, folder: Path, servers: dict[str, Sshd]) -> None:
        self.servers = servers
        self.proxies = {name: Proxy(server.address, server.port) for name, server in servers.items()}
        self.hosts = {
            name: ssh_host(server, name, folder / name, through=self.proxies[name]) for name, server in servers.items()
        }
        self.checkpoint = make_checkpoint(folder / "gpu/step_1", MEGABYTES)
        self.place = folder / "eval/step_1"

    def ship(self, **options: object) -> ShipmentReceipt:
        """Ships the checkpoint."""
        return ship(self.hosts["gpu"], self.checkpoint, self.hosts["eval"], self.place, **options)  # type: ignore[arg-type]

    def during(self, act: Callable[[], object]) -> threading.Thread:
        """Does something when two chunks have passed to the destination; the network stands still meanwhile."""
        proxy = self.proxies["eval"]
        proxy.arm("blackhole", after=HALF)

        def wait_and_act() -> None:
            if waiting_until(lambda: proxy.counts()["fired"] > 0, 60):
                act()
            proxy.restore()

        thread = threading.Thread(target=wait_and_act)
        thread.start()
        return thread

    def require_nothing_visible(self) -> None:
        """Neither the place nor a receipt exists."""
        assert not self.place.exists()
        assert not receipt_path(self.place).exists()

    def require_arrived(self) -> ShipmentReceipt:
        """All bytes are there, with a receipt, and nothing else is."""
        assert content(self.place) == content(self.checkpoint)
        assert left_behind(self.place.parent) == []
        return require_receipt(self.place)


@pytest.fixture
def road(tmp_path: Path, start_server: Callable[..., Sshd]) -> Iterator[Road]:
    made = Road(
        tmp_path, {name: start_server(name + "-sshd", environment={"HOME": str(tmp_path)}) for name in ("gpu", "eval")}
    )
    yield made
    for proxy in made.proxies.values():
        proxy.close()


@pytest.mark.parametrize("plane", ["ssh", "paramiko"])
@pytest.mark.parametrize("side", ["gpu", "eval"])
def test_a_killed_sshd_child_fails_the_copy_and_the_next_one_resumes(road: Road, side: str, plane: Plane) -> None:
    kill = road.during(road.servers[side].kill_children)
    with pytest.raises(TransientError):
        road.ship(attempts=1, plane=plane)
    kill.join()
    road.require_nothing_visible()
    receipt = road.ship(attempts=1, plane=plane)
    assert receipt.chunks_reused > 0
    assert road.require_arrived() == receipt


@pytest.mark.parametrize(("side", "plane"), [("eval", "ssh"), ("gpu", "paramiko")])
def test_a_dead_link_is_an_error_within_20_s_and_the_next_copy_resumes(road: Road, side: str, plane: Plane) -> None:
    road.proxies[side].arm("blackhole", direction="up" if side == "eval" else "down", after=HALF)
    died: list[float] = []
    waiting = threading.Thread(
        target=lambda: (
            waiting_until(lambda: road.proxies[side].counts()["fired"] > 0, 60) and died.append(time.monotonic())
        )
    )
    waiting.start()
    with pytest.raises(TransientError):
        road.ship(attempts=1, plane=plane)
    ended = time.monotonic()
    waiting.join()
    assert ended - died[0] < 20
    road.require_nothing_visible()
    road.proxies[side].drop()
    road.proxies[side].restore()
    assert road.ship(attempts=1, plane=plane).chunks_reused > 0
    road.require_arrived()


def test_a_transient_fault_costs_an_attempt_not_the_shipment(road: Road) -> None:
    road.proxies["eval"].arm("drop", after=HALF)
    told: list[str] = []
    receipt = road.ship(tell=told.append)
    assert (receipt.attempts, len(told)) == (2, 1)
    assert receipt.bytes_resent <= 8 << 20
    road.require_arrived()


def overwrite(path: Path) -> None:
    with path.open("r+b") as stream:
        stream.seek(MEGABYTES << 19)
        stream.write(b"another training wrote this")


@pytest.mark.parametrize("plane", ["ssh", "paramiko"])
@pytest.mark.parametrize(
    "change", [overwrite, lambda path: os.truncate(path, 9 << 20)], ids=["overwritten", "truncated"]
)
def test_a_source_that_changes_during_the_copy_aborts_it(
    road: Road, change: Callable[[Path], None], plane: Plane
) -> None:
    acting = road.during(lambda: change(road.checkpoint / "drafter/model.safetensors"))
    with pytest.raises(SourceChanged):
        road.ship(plane=plane)
    acting.join()
    road.require_nothing_visible()


def test_a_source_that_gains_a_file_during_the_copy_aborts_it(road: Road) -> None:
    acting = road.during(lambda: (road.checkpoint / "late.txt").write_text("?"))
    with pytest.raises(SourceChanged, match=r"late\.txt"):
        road.ship()
    acting.join()
    road.require_nothing_visible()


def test_a_source_removed_by_retention_during_the_copy_arrives_from_the_pin(road: Road) -> None:
    wanted = content(road.checkpoint)
    acting = road.during(lambda: shutil.rmtree(road.checkpoint))
    receipt = road.ship(attempts=1)
    acting.join()
    assert receipt.pinned
    assert not road.checkpoint.exists()
    assert content(road.place) == wanted
    assert left_behind(road.checkpoint.parent) == []


def tmpfs(folder: Path, megabytes: int, require_or_skip: Callable[[str, str], None], *options: str) -> None:
    """Mounts a small filesystem; only root may."""
    folder.mkdir(parents=True)
    argv = ["mount", "-t", "tmpfs", "-o", ",".join([f"size={megabytes}m", *options]), "none", str(folder)]
    if os.getuid() or subprocess.run(argv, capture_output=True, check=False).returncode:
        require_or_skip("tmpfs", "a filesystem can be mounted by root only")


def test_a_disk_that_is_too_small_is_refused_before_the_first_byte(
    road: Road, require_or_skip: Callable[[str, str], None]
) -> None:
    small = road.place.parent / "small"
    tmpfs(small, 40, require_or_skip)
    try:
        road.place = small / "step_1"
        with pytest.raises(PermanentError, match=r"the disk is full: .* MB are needed"):
            road.ship()
        road.require_nothing_visible()
        assert journaled(road.place) == 0
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_a_disk_that_fills_up_during_the_copy_keeps_what_came_and_writes_no_receipt(
    road: Road, require_or_skip: Callable[[str, str], None], tmp_path: Path
) -> None:
    program = tmp_path / "sink.py"  # as on a filesystem that cannot reserve space
    text = SINK.read_text()
    assert "        call = ctypes.CDLL(None, use_errno=True).fallocate\n" in text
    program.write_text(text.replace("call = ctypes.CDLL(None, use_errno=True).fallocate", "return"))
    small = road.place.parent / "small"
    tmpfs(small, 120, require_or_skip)
    try:
        road.place = small / "step_1"
        filling = road.during(lambda: fill(small / "other"))
        with pytest.raises(PermanentError, match="the disk is full"):
            road.ship(program=program)
        filling.join()
        road.require_nothing_visible()
        (small / "other").unlink()
        assert road.ship(program=program).chunks_reused > 0
        road.require_arrived()
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def fill(path: Path) -> None:
    """Writes until the disk is full."""
    with path.open("wb", buffering=0) as stream:
        try:
            while True:
                stream.write(bytes(1 << 20))
        except OSError:
            return


CONTROLLER = """\
import pickle, sys
from dflash.ship.ship import ship
hosts, source, place = pickle.load(sys.stdin.buffer)
ship(hosts["gpu"], source, hosts["eval"], place)
"""


def test_after_a_kill_9_of_the_controller_the_next_run_resumes(road: Road, tmp_path: Path) -> None:
    import pickle

    controller = subprocess.Popen([sys.executable, "-c", CONTROLLER], stdin=subprocess.PIPE)
    killing = road.during(controller.kill)
    controller.communicate(pickle.dumps((road.hosts, road.checkpoint, road.place)))
    killing.join()
    assert controller.returncode == -9
    road.require_nothing_visible()
    assert road.ship().chunks_reused > 0
    road.require_arrived()
    assert left_behind(road.checkpoint.parent) == []


def test_of_two_copiers_one_copies_and_the_other_waits(road: Road) -> None:
    receipts: list[ShipmentReceipt] = []
    copiers = [threading.Thread(target=lambda: receipts.append(road.ship())) for _ in range(2)]
    for copier in copiers:
        copier.start()
    for copier in copiers:
        copier.join()
    assert receipts[0] == receipts[1] == road.require_arrived()


def test_a_copier_that_may_not_wait_says_that_another_is_at_work(road: Road) -> None:
    road.place.parent.mkdir(parents=True, exist_ok=True)
    partial = road.place.parent / f".step_1.{content_root(road.checkpoint)}.partial"
    partial.mkdir()
    held = os.open(partial, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(TransientError, match="another shipment of the same content"):
        road.ship(wait=0.0, attempts=1)
    os.close(held)
    road.ship()
    road.require_arrived()


@pytest.mark.parametrize("plane", ["ssh", "paramiko"])
@pytest.mark.parametrize(
    "pinned", ["", "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIO3Z2Oj8YVRN4QOUsBqPdGvXqZ0bNMyx0u2kRnm1VQ0B"]
)
def test_an_unknown_or_changed_host_key_is_refused_without_another_attempt(
    road: Road, pinned: str, plane: Plane
) -> None:
    proxy, server = road.proxies["eval"], road.servers["eval"]
    server.known_hosts.write_text(f"[{proxy.address}]:{proxy.port} {pinned}\n" if pinned else "")
    told: list[str] = []
    with pytest.raises(PermanentError, match="dflash doctor --pin eval"):
        road.ship(tell=told.append, plane=plane)
    assert told == []
    assert "Accepted publickey" not in server.log.read_text()


def test_a_byte_damaged_on_the_wire_ends_the_connection_and_costs_one_attempt(road: Road) -> None:
    road.proxies["eval"].flip(after=HALF)
    assert road.ship().attempts == 2
    assert road.proxies["eval"].counts()["fired"] == 1
    road.require_arrived()


@pytest.mark.parametrize(("side", "mode", "after"), [("eval", "store", HALF), ("gpu", "source", 30)])
def test_a_byte_damaged_where_ssh_cannot_see_it_is_found_and_sent_again(
    road: Road, tmp_path: Path, side: str, mode: str, after: int
) -> None:
    for host in road.hosts.values():
        install(host, SINK)
    marker = tmp_path / "flipped"
    road.hosts[side] = wrapped(road.hosts[side], flipping_wrap(tmp_path, after, marker, mode))
    told: list[str] = []
    assert road.ship(tell=told.append).attempts == 2
    assert marker.exists()
    if mode == "store":
        assert "are not those described" in told[0]
    road.require_arrived()


def wrapped(host: SshHost, wrap: list[str]) -> SshHost:
    return SshHost(host.id, host.entry.model_copy(update={"wrap": tuple(wrap)}), host.route)


@pytest.mark.parametrize("damage", ["torn", "garbage", "folder", "gone", "claims all"])
def test_a_broken_journal_stops_nothing(road: Road, damage: str) -> None:
    road.proxies["eval"].arm("drop", after=HALF)
    with pytest.raises(TransientError):
        road.ship(attempts=1)
    partial = next(road.place.parent.glob(".step_1.*.partial"))
    journals = sorted(partial.glob("journal*"))
    lines = b"".join(journal.read_bytes() for journal in journals)
    for journal in journals:
        journal.unlink()
    broken = {"torn": lines[:-5], "garbage": lines[:40] + bytes(50) + b"\n" + lines, "claims all": claim_all(partial)}
    if damage == "folder":
        (partial / "journal").mkdir()
    elif damage in broken:
        (partial / "journal").write_bytes(broken[damage])
    receipt = road.ship(attempts=1)
    assert 0 < receipt.chunks_reused < receipt.chunks
    road.require_arrived()


def claim_all(partial: Path) -> bytes:
    """A journal that lies: it is believed only as to where to look."""
    import json

    from dflash.ship import sink

    chunks = sink.chunks_of(json.loads((partial / "manifest.json").read_text()))
    return b"".join(sink.journal_line(chunk) for chunk in chunks)


def test_a_partial_damaged_on_disk_is_not_believed(road: Road) -> None:
    road.proxies["eval"].arm("drop", after=HALF)
    with pytest.raises(TransientError):
        road.ship(attempts=1)
    partial = next(road.place.parent.glob(".step_1.*.partial"))
    with (partial / "data/drafter/model.safetensors").open("r+b") as stream:
        stream.write(b"damage")
    road.ship(attempts=1)
    road.require_arrived()
