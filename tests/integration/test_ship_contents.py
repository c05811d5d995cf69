"""What can be shipped, what is refused, and what a receipt is worth."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from paramiko.packet import Packetizer
from ship_hosts import content, left_behind, make_checkpoint, ssh_host, write_random
from sshd import Sshd

from dflash.base.errors import ConfigError, CorruptError, PermanentError
from dflash.base.files import DigestCache
from dflash.hosts.channel import Channel
from dflash.hosts.host import LocalHost
from dflash.hosts.ssh import SshHost
from dflash.ship import artifact, sink
from dflash.ship.planes import Plane
from dflash.ship.receipt import content_root, receipt_path, require_receipt
from dflash.ship.ship import SINK, Compress, ship

LOCAL = LocalHost()
STRANGE = ["two words", 'it\'s "quoted"', "new\nline", "-rf", "$(touch x); `y` & #", "ümläut", "%h", "\\n"]


@pytest.fixture
def pair(tmp_path: Path, start_server: Callable[..., Sshd]) -> tuple[SshHost, SshHost]:
    """One server that plays both hosts. No home, so that no start-up file of the user's shell takes its time."""
    sshd = start_server(environment={"HOME": str(tmp_path)})
    return ssh_host(sshd, "gpu", tmp_path / "gpu"), ssh_host(sshd, "eval", tmp_path / "eval")


@pytest.mark.parametrize("plane", ["ssh", "paramiko"])
def test_strange_names_arrive_as_they_are(pair: tuple[SshHost, SshHost], plane: Plane) -> None:
    source, destination = pair
    folder = source.workdir / "-a 'b' \n \"c\""
    for index, name in enumerate(STRANGE):
        write_random(folder / name / f"-{name}", 1000 + index, index)
    place = destination.workdir / "-x 'y' \n z"
    ship(source, folder, destination, place, plane=plane)
    assert content(place) == content(folder)
    assert require_receipt(place).files == len(STRANGE)


@pytest.mark.parametrize("size", [0, 1, (8 << 20) - 1, 8 << 20, (8 << 20) + 1])
def test_a_single_file_of_any_size_arrives(tmp_path: Path, size: int) -> None:
    write_random(tmp_path / "one", size, size)
    receipt = ship(LOCAL, tmp_path / "one", LOCAL, tmp_path / "two")
    assert (tmp_path / "two").read_bytes() == (tmp_path / "one").read_bytes()
    assert (receipt.bytes, receipt.chunks) == (size, -(-size // artifact.CHUNK))
    assert require_receipt(tmp_path / "two") == receipt
    assert left_behind(tmp_path) == []


def test_empty_files_and_an_empty_folder_arrive(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    ship(LOCAL, tmp_path / "source", LOCAL, tmp_path / "nothing")
    assert list((tmp_path / "nothing").iterdir()) == []
    (tmp_path / "source/empty").touch()
    ship(LOCAL, tmp_path / "source", LOCAL, tmp_path / "empty")
    assert content(tmp_path / "empty") == content(tmp_path / "source")


def test_a_folder_of_10000_files_arrives(pair: tuple[SshHost, SshHost]) -> None:
    source, destination = pair
    for number in range(10_000):
        path = source.workdir / f"many/{number % 100}/{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(number))
    receipt = ship(source, Path("many"), destination, Path("many"), streams=2)
    assert receipt.files == receipt.chunks == 10_000
    assert content_root(destination.workdir / "many") == content_root(source.workdir / "many") == receipt.root


@pytest.mark.skipif(not os.environ.get("DFLASH_LARGE"), reason="set DFLASH_LARGE=1: needs 6 GB of disk and a minute")
def test_a_file_over_4_gib_arrives_and_stays_sparse(pair: tuple[SshHost, SshHost]) -> None:
    source, destination = pair
    large = source.workdir / "large"
    write_random(large, 1 << 30, 1)
    with large.open("r+b") as stream:
        stream.truncate((5 << 30) + 1)
        stream.seek(-1, os.SEEK_END)
        stream.write(b"!")
    ship(source, large, destination, Path("large"), streams=2)
    assert content(destination.workdir / "large") == content(large)
    assert (destination.workdir / "large").stat().st_blocks * 512 < 2 << 30


@pytest.mark.parametrize("plane", ["ssh", "paramiko"])
def test_many_rekeys_on_one_connection_do_no_harm(
    tmp_path: Path, start_server: Callable[..., Sshd], plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides ask for them, now one and now the other."""
    monkeypatch.setattr(Packetizer, "REKEY_BYTES", 2_000_000)
    server = start_server(more="RekeyLimit 2M", environment={"HOME": str(tmp_path)})
    source, destination = (ssh_host(server, name, tmp_path / name) for name in ("gpu", "eval"))
    write_random(source.workdir / "data", 24 << 20, 5)
    ship(source, Path("data"), destination, Path("data"), plane=plane, attempts=1)
    assert content(destination.workdir / "data") == content(source.workdir / "data")


@pytest.mark.parametrize("compress", ["zlib", "zstd"])
def test_compression_sends_less_and_changes_nothing(tmp_path: Path, compress: Compress) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source/plain").write_bytes(b"many of the same words, " * 1_000_000)
    write_random(tmp_path / "source/random", 3 << 20, 3)
    receipt = ship(LOCAL, tmp_path / "source", LOCAL, tmp_path / "place", compress=compress)
    assert content(tmp_path / "place") == content(tmp_path / "source")
    assert receipt.bytes_sent < receipt.bytes / 4


def test_all_connections_of_a_shipment_are_made_at_once(
    pair: tuple[SshHost, SshHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a long way each takes ten round trips; none waits for another one to be there."""
    source, destination = pair
    write_random(source.workdir / "data", 1000, 1)
    streams = 3
    together = threading.Barrier(2 + streams)
    connect = SshHost.channel

    def wait_for_all(host: SshHost, argv: Sequence[str]) -> Channel:
        if argv[-1] != "store":
            together.wait(30)
        return connect(host, argv)

    monkeypatch.setattr(SshHost, "channel", wait_for_all)
    ship(source, Path("data"), destination, Path("data"), plane="paramiko", streams=streams, attempts=1)
    assert content(destination.workdir / "data") == content(source.workdir / "data")


def test_the_direct_route_goes_from_host_to_host(pair: tuple[SshHost, SshHost]) -> None:
    source, destination = pair
    checkpoint = make_checkpoint(source.workdir / "step_1", 10)
    words = destination.command(["true"])[:-1]
    receipt = ship(source, checkpoint, destination, Path("step_1"), route="direct", direct=words, streams=2)
    assert receipt.route == "direct"
    assert content(destination.workdir / "step_1") == content(checkpoint)


def test_the_direct_route_must_be_configured(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="route: direct"):
        ship(LOCAL, tmp_path, LOCAL, tmp_path / "x", route="direct")


def test_of_a_checkpoint_only_the_drafter_is_shipped_when_asked(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "step_1", 1)
    ship(LOCAL, checkpoint, LOCAL, tmp_path / "there/step_1", what="drafter")
    assert set(content(tmp_path / "there/step_1")) == {
        "drafter/config.json",
        "drafter/model.safetensors",
        "manifest.json",
    }
    with pytest.raises(PermanentError, match="there is no `drafter` in it"):
        ship(LOCAL, checkpoint / "state", LOCAL, tmp_path / "there/step_2", what="drafter")


def test_what_is_there_already_is_not_sent_again(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "step_1", 1)
    place = tmp_path / "there/step_1"
    first = ship(LOCAL, checkpoint, LOCAL, place)
    assert ship(LOCAL, checkpoint, LOCAL, place) == first
    receipt_path(place).unlink()  # as when its writer was killed between the rename and the receipt
    again = ship(LOCAL, checkpoint, LOCAL, place)
    assert (again.bytes_sent, again.chunks_reused) == (0, again.chunks)
    require_receipt(place)


def test_damage_at_the_destination_is_found_and_mended(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "step_1", 1)
    place = tmp_path / "there/step_1"
    ship(LOCAL, checkpoint, LOCAL, place)
    (place / "state/moments.bin").write_bytes(bytes(1 << 20))
    with pytest.raises(CorruptError, match="not those of its receipt"):
        require_receipt(place, DigestCache(tmp_path / "digests"))
    ship(LOCAL, checkpoint, LOCAL, place)
    assert content(place) == content(checkpoint)


def test_a_newer_shipment_replaces_an_older_one_but_never_a_stranger(tmp_path: Path) -> None:
    place = tmp_path / "there/step_1"
    ship(LOCAL, make_checkpoint(tmp_path / "old", 1, 1), LOCAL, place)
    new = make_checkpoint(tmp_path / "new", 1, 2)
    ship(LOCAL, new, LOCAL, place)
    assert content(place) == content(new)
    stranger = tmp_path / "there/mine"
    stranger.mkdir()
    (stranger / "notes.txt").write_text("do not touch")
    with pytest.raises(PermanentError, match="something else is there"):
        ship(LOCAL, new, LOCAL, stranger)
    assert content(stranger).keys() == {"notes.txt"}
    assert left_behind(tmp_path / "there") == []


def test_without_a_receipt_nothing_is_opened(tmp_path: Path) -> None:
    with pytest.raises(CorruptError, match="no receipt"):
        require_receipt(make_checkpoint(tmp_path / "step_1", 0.1))


def test_a_source_that_is_not_what_is_recorded_is_refused(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "step_1", 1)
    known = artifact.describe(checkpoint)
    assert ship(LOCAL, checkpoint, LOCAL, tmp_path / "a", known=known).root == known.root
    (checkpoint / "state/moments.bin").write_bytes(bytes(1 << 20))
    with pytest.raises(Exception, match="not those described"):
        ship(LOCAL, checkpoint, LOCAL, tmp_path / "b", known=known, attempts=1)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("other", ["root", "size", "one more file"])
def test_a_source_of_other_files_than_are_recorded_is_corrupt(tmp_path: Path, other: str) -> None:
    checkpoint = make_checkpoint(tmp_path / "step_1", 0.1)
    known = artifact.describe(checkpoint)
    if other == "root":
        known = known.model_copy(update={"root": "0" * 64})
    elif other == "size":
        with (checkpoint / "state/moments.bin").open("ab") as stream:
            stream.write(b"more")
    else:
        (checkpoint / "state/more.bin").write_bytes(b"more")
    with pytest.raises(CorruptError, match="recorded"):
        ship(LOCAL, checkpoint, LOCAL, tmp_path / "a", known=known, attempts=1)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("source", "place", "said"),
    [
        ("absent", "x", "absent: No such file or directory"),
        ("step_1", "a-file/x", "a-file: File exists"),
        ("link", "x", "neither a regular file nor a folder"),
    ],
)
def test_what_cannot_be_shipped_is_named(tmp_path: Path, source: str, place: str, said: str) -> None:
    make_checkpoint(tmp_path / "step_1", 0.1)
    (tmp_path / "a-file").touch()
    (tmp_path / "link").symlink_to("step_1")
    with pytest.raises(PermanentError, match=said):
        ship(LOCAL, tmp_path / source, LOCAL, tmp_path / place)


def test_a_read_only_destination_is_named(tmp_path: Path, require_or_skip: Callable[[str, str], None]) -> None:
    folder = tmp_path / "fixed"
    folder.mkdir()
    argv = ["mount", "-t", "tmpfs", "-o", "ro", "none", str(folder)]
    if os.getuid() or subprocess.run(argv, capture_output=True, check=False).returncode:
        require_or_skip("tmpfs", "a filesystem can be mounted by root only")
    try:
        with pytest.raises(PermanentError, match=r"fixed.*Read-only file system"):
            ship(LOCAL, make_checkpoint(tmp_path / "step_1", 0.1), LOCAL, folder / "step_1")
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_host_without_python3_is_named(pair: tuple[SshHost, SshHost]) -> None:
    source, destination = pair
    bare = SshHost("eval", destination.entry.model_copy(update={"wrap": ("env", "PATH=/nowhere")}), destination.route)
    with pytest.raises(PermanentError, match="python3"):
        ship(source, make_checkpoint(source.workdir / "step_1", 0.1), bare, Path("step_1"))


def test_the_far_ends_program_is_one_file_of_standard_library_for_python_3_8() -> None:
    tree = ast.parse(SINK.read_text(), feature_version=(3, 8))
    imported = {
        alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    }
    imported |= {str(node.module).split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported <= sys.stdlib_module_names


def test_both_ends_and_the_project_agree_on_the_root(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "ünï", 9)
    assert content_root(folder) == artifact.describe(folder).root


def test_no_path_of_a_manifest_leads_outside() -> None:
    for path in ("../x", "/etc/passwd", "a/../../x", "a//b", ""):
        files = [{"path": path, "size": 0, "chunks": []}]
        with pytest.raises(sink.Failure, match="impossible entry"):
            sink.check_manifest(files, sink.root_digest(files))
