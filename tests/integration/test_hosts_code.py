"""The code that runs on another host is the code of this checkout, whole, whoever else sends it at the same time."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from sshd import Sshd

from dflash.base.errors import CorruptError, PermanentError
from dflash.hosts import code
from dflash.hosts.code import archive, digest_of, send_code, source_files
from dflash.hosts.host import Finished, Host, LocalHost
from dflash.hosts.inventory import load_inventory
from dflash.hosts.ssh import SshHost

AWKWARD = "a b'c\"d\n$e;f -g\\ %h é*"


@pytest.fixture
def host(tmp_path: Path, sshd: Sshd) -> SshHost:
    (tmp_path / "hosts.yaml").write_text(yaml.safe_dump({"hosts": {"box": sshd.host_entry(tmp_path / AWKWARD / "-w")}}))
    found = load_inventory(tmp_path / "hosts.yaml").get("box")
    assert isinstance(found, SshHost)
    return found


def test_the_package_arrives_and_runs(host: SshHost) -> None:
    folder = send_code(host)
    assert folder.parent == host.workdir / "code"
    assert {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()} == source_files()
    argv = [sys.executable, "-m", "dflash", "--help"]
    done = host.run(argv, environment={"PYTHONPATH": str(folder)})
    assert (done.status, b"dflash" in done.stdout) == (0, True)
    where = host.run(
        [sys.executable, "-c", "import dflash.cli; print(dflash.cli.__file__)"],
        environment={"PYTHONPATH": str(folder)},
    )
    assert where.stdout.decode().strip() == str(folder / "dflash" / "cli.py")
    assert send_code(host) == folder, "byte code that python wrote there does not count"


def test_it_is_sent_once(host: SshHost, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = send_code(host)
    before = (folder / "dflash" / "cli.py").stat()
    monkeypatch.setattr(SshHost, "stream", lambda *_: pytest.fail("it was sent again"))
    assert send_code(host) == folder
    assert (folder / "dflash" / "cli.py").stat() == before


@pytest.mark.parametrize("damage", ["edit", "delete", "add"])
def test_code_that_was_changed_there_is_replaced(host: SshHost, damage: str) -> None:
    folder = send_code(host)
    file = folder / "dflash" / "cli.py"
    if damage == "delete":
        file.unlink()
    elif damage == "edit":
        file.write_text(file.read_text() + "\n")
    else:
        (folder / "dflash" / "more.py").write_text("")
    assert send_code(host) == folder
    assert file.read_bytes() == source_files()["dflash/cli.py"]
    assert not (folder / "dflash" / "more.py").exists()
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_senders_at_the_same_time_do_not_disturb_each_other(host: SshHost) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(send_code(host))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert {digest_of({str(p.relative_to(f)): p.read_bytes() for p in f.rglob("*") if p.is_file()}) for f in found} == {
        digest_of(source_files())
    }
    assert [path.name for path in found[0].parent.iterdir()] == [found[0].name]


def test_bytes_that_were_changed_on_the_way_are_refused(host: SshHost, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = SshHost.stream

    def bad(self: SshHost, argv: Any, stdin: Any) -> Finished:
        return plain(self, argv, [next(iter(stdin)).replace(b"def main", b"def mein")])

    monkeypatch.setattr(SshHost, "stream", bad)
    with pytest.raises(CorruptError, match="not what was sent"):
        send_code(host)
    assert list((host.workdir / "code").iterdir()) == []


def test_a_connection_that_ends_early_leaves_nothing(host: SshHost, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = SshHost.stream
    monkeypatch.setattr(SshHost, "stream", lambda self, argv, stdin: plain(self, argv, [next(iter(stdin))[:100_000]]))
    with pytest.raises((CorruptError, PermanentError)):
        send_code(host)
    assert list((host.workdir / "code").iterdir()) == []


def test_a_workdir_that_cannot_be_written_is_named(tmp_path: Path, sshd: Sshd) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "hosts.yaml").write_text(yaml.safe_dump({"hosts": {"box": sshd.host_entry(tmp_path / "file")}}))
    host = load_inventory(tmp_path / "hosts.yaml").get("box")
    with pytest.raises(PermanentError, match=r"box:.*the code cannot be sent: .*(Not a directory|File exists)"):
        send_code(host)


def test_this_machine_runs_its_own_checkout() -> None:
    here: Host = LocalHost()
    assert (send_code(here) / "dflash" / "hosts" / "code.py").samefile(code.__file__)


def test_the_digest_is_that_of_every_byte_and_name(tmp_path: Path) -> None:
    files = {"b": b"1", "a/c": b"2", "B": b""}
    assert len({digest_of(files), digest_of({**files, "b": b"2"}), digest_of({"b2": b"1", "a/c": b"2", "B": b""})}) == 3
    (tmp_path / "code").mkdir()
    subprocess.run(["tar", "-xf", "-", "-C", str(tmp_path / "code")], input=archive(files), check=True)
    argv = ["sh", "-c", code.CHECK, "check", str(tmp_path / "code"), digest_of(files)]
    assert subprocess.run(argv, check=False).returncode == code.SAME
    assert archive(files) == archive(dict(reversed(files.items())))
