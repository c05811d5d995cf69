"""A host over a real sshd: commands, streams and small files arrive whole or fail in words a person can act on.

Every test of the way there runs for the system's ssh and for paramiko, which must agree.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paramiko
import pytest
import yaml
from paramiko.packet import Packetizer
from proxy import Proxy
from sshd import Sshd, free_port, make_key

from dflash.base.errors import CorruptError, DflashError, PermanentError, TransientError
from dflash.hosts.channel import PIECE, Channel
from dflash.hosts.inventory import Inventory, load_inventory
from dflash.hosts.ssh import SshHost, configuration

AWKWARD = "a b'c\"d\n$e;f -g\\ %h é*"
Start = Callable[..., Sshd]


def inventory(folder: Path, **hosts: dict[str, Any]) -> Inventory:
    path = folder / "hosts.yaml"
    path.write_text(yaml.safe_dump({"hosts": hosts}))
    return load_inventory(path)


def host_of(folder: Path, server: Sshd, **more: Any) -> SshHost:
    found = inventory(folder, box=server.host_entry(folder / "work", **more)).get("box")
    assert isinstance(found, SshHost)
    return found


@pytest.fixture
def host(tmp_path: Path, sshd: Sshd) -> SshHost:
    return host_of(tmp_path, sshd)


@pytest.fixture(params=["ssh", "paramiko"])
def host_by_both(request: pytest.FixtureRequest, host: SshHost, monkeypatch: pytest.MonkeyPatch) -> SshHost:
    """A host as seen by a machine with ssh, and by one without."""
    if request.param == "paramiko":
        monkeypatch.setattr("dflash.hosts.ssh.shutil.which", lambda _: None)
    return host


@pytest.fixture
def behind(tmp_path: Path, start_server: Start) -> tuple[SshHost, Sshd, Sshd, Sshd]:
    """A host behind two jump hosts, each with keys of its own: one by its id, one by its address."""
    outer, inner, target = (start_server(name) for name in ("outer", "inner", "target"))
    work = tmp_path / "work"
    found = inventory(
        tmp_path,
        outer=outer.host_entry(work),
        inner=inner.host_entry(work, jump=["outer"]),
        box=target.host_entry(work, jump=["inner"]),
    ).get("box")
    assert isinstance(found, SshHost)
    return found, outer, inner, target


def by_ssh(host: SshHost) -> None:
    assert host.run(["true"], timeout=60).status == 0


def by_paramiko(host: SshHost) -> None:
    with host.channel(["true"]) as channel:
        assert channel.read() == b""
        assert channel.wait(60) == 0


BOTH = pytest.mark.parametrize("reach", [by_ssh, by_paramiko])


# Commands


def test_arguments_output_and_status_pass_unchanged(host_by_both: SshHost) -> None:
    done = host_by_both.run(
        [sys.executable, "-c", "import sys; print(repr(sys.argv[1:])); sys.exit(7)", AWKWARD, "", "-x"]
    )
    assert (done.status, done.stdout.decode().strip(), done.stderr) == (7, repr([AWKWARD, "", "-x"]), "")
    assert host_by_both.run(["cat"]).stdout == b"", "a command without input sees its end at once"


def test_a_stream_passes_every_byte(host_by_both: SshHost) -> None:
    block = os.urandom(1 << 16)
    done = host_by_both.stream(["sha256sum"], [block] * 200)
    assert done.stdout.split()[0].decode() == hashlib.sha256(block * 200).hexdigest()
    both = host_by_both.stream(["cat"], [block] * 50)
    assert both.stdout == block * 50, "output that is larger than a pipe does not stand in the way of input"


def test_an_error_in_the_stream_is_never_taken_for_its_end(host_by_both: SshHost, tmp_path: Path) -> None:
    def broken() -> Any:
        yield b"half"
        raise OSError("the disk has gone")

    with pytest.raises(OSError, match="the disk has gone"):
        host_by_both.stream(["sh", "-c", f"cat > {tmp_path}/got && touch {tmp_path}/complete; sleep 1"], broken())


def test_variables_are_added_to_those_that_are_there(host_by_both: SshHost) -> None:
    done = host_by_both.run(["sh", "-c", 'echo "$WORD:$OMP_NUM_THREADS"'], environment={"WORD": AWKWARD})
    assert done.stdout.decode() == f"{AWKWARD}:1\n"


def test_a_command_that_is_not_there_and_one_that_hangs(host_by_both: SshHost) -> None:
    with pytest.raises(PermanentError, match="box: there is no program `no-such-program`"):
        host_by_both.run(["no-such-program"])
    started = time.monotonic()
    with pytest.raises(TransientError, match="did not end within 1 s"):
        host_by_both.run(["sleep", "60"], timeout=1)
    assert time.monotonic() - started < 20


# Small files


@pytest.mark.parametrize("name", [AWKWARD, "-rf", "plain", " blank ", "x" * 255])
def test_small_files_go_and_come(host_by_both: SshHost, tmp_path: Path, name: str) -> None:
    path = tmp_path / AWKWARD / "-deep" / name
    content = os.urandom(100_000)
    host_by_both.put(path, b"before")
    host_by_both.put(path, content)
    assert path.read_bytes() == host_by_both.get(path) == content
    assert [other.name for other in path.parent.iterdir()] == [name], "nothing is left beside it"
    host_by_both.put(path, b"")
    assert host_by_both.get(path) == b""


def test_a_file_that_is_cut_short_on_its_way_is_not_put_in_place(host: SshHost, tmp_path: Path) -> None:
    path = tmp_path / "file"
    whole = host.command(["sh"])
    assert whole[-1] == "sh"
    from dflash.hosts.host import PUT

    done = host.stream(["sh", "-c", PUT, "put", str(tmp_path), str(tmp_path / "tmp"), str(path), "10"], [b"short"])
    assert done.status == 1
    assert "ended early" in done.stderr
    assert not path.exists()
    assert not (tmp_path / "tmp").exists()


def test_what_cannot_be_written_or_read_is_named(host: SshHost, tmp_path: Path) -> None:
    with pytest.raises(CorruptError, match=r"box:.*nothing: cannot be read \(No such file or directory\)"):
        host.get(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    with pytest.raises(PermanentError, match=r"box:.*file/below: cannot write: (Not a directory|File exists)"):
        host.put(tmp_path / "file" / "below", b"x")
    with pytest.raises(PermanentError, match="a folder of that name"):
        host.put(tmp_path, b"x")


def test_a_read_only_folder_is_named(host: SshHost, tmp_path: Path, require_or_skip: Callable[..., None]) -> None:
    folder = tmp_path / "mount"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "ro,size=1m", "none", folder], capture_output=True, check=False
    )
    if done.returncode:
        require_or_skip("mount", "mounting is not allowed here")
    try:
        with pytest.raises(PermanentError, match=r"cannot write: Read-only file system. Make the folder writable"):
            host.put(folder / "deep" / "file", b"x")
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_named(host: SshHost, tmp_path: Path, require_or_skip: Callable[..., None]) -> None:
    folder = tmp_path / "mount"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", folder], capture_output=True, check=False)
    if done.returncode:
        require_or_skip("mount", "mounting is not allowed here")
    try:
        with pytest.raises(PermanentError, match="cannot write: No space left on device"):
            host.put(folder / "file", bytes(1 << 20))
        assert list(folder.iterdir()) == []
    finally:
        subprocess.run(["umount", folder], check=True)


# The wrap

PCT = """\
#!/bin/sh
# What `pct exec 200 -- COMMAND...` does, for tests: a container that is this machine.
[ "$1" = exec ] && [ "$2" = 200 ] && [ "$3" = -- ] || { echo "usage: pct exec 200 -- COMMAND" >&2; exit 64; }
shift 3
exec env INSIDE=200 "$@"
"""


@pytest.fixture
def wrapped(tmp_path: Path, sshd: Sshd) -> SshHost:
    pct = tmp_path / "a tool's" / "pct"
    pct.parent.mkdir()
    pct.write_text(PCT)
    pct.chmod(0o755)
    return host_of(tmp_path, sshd, wrap=[str(pct), "exec", "200", "--"])


def test_a_wrap_passes_arguments_input_output_and_status(wrapped: SshHost, tmp_path: Path) -> None:
    program = "import os, sys; print(os.environ['INSIDE'], repr(sys.argv[1]), len(sys.stdin.read())); sys.exit(9)"
    done = wrapped.stream([sys.executable, "-c", program, AWKWARD], [b"x" * 100_000])
    assert (done.status, done.stdout.decode().strip()) == (9, f"200 {AWKWARD!r} 100000")
    with wrapped.channel([sys.executable, "-c", program, AWKWARD]) as channel:
        channel.write(b"x" * 1000)
        channel.close_stdin()
        assert channel.read().decode().strip() == f"200 {AWKWARD!r} 1000"
        assert channel.wait(60) == 9
    path = tmp_path / AWKWARD / "-file"
    wrapped.put(path, b"content")
    assert wrapped.get(path) == b"content"
    done = wrapped.run(["sh", "-c", 'echo "$INSIDE$MORE"'], environment={"MORE": AWKWARD})
    assert done.stdout.decode() == f"200{AWKWARD}\n"
    with pytest.raises(PermanentError, match="no program"):
        wrapped.run(["no-such-program"])


# Who is at the other end


@BOTH
def test_two_jump_hosts_are_passed_each_with_its_own_key(
    behind: tuple[SshHost, Sshd, Sshd, Sshd], reach: Callable[[SshHost], None]
) -> None:
    host, outer, inner, target = behind
    reach(host)
    for server in (outer, inner, target):
        assert server.log.read_text().count("Accepted publickey") == 1
    assert stored_keys(outer, inner, target) == 3


def stored_keys(*servers: Sshd) -> int:
    return len({server.known_hosts.read_text() for server in servers})


@BOTH
def test_a_jump_host_may_be_an_address(tmp_path: Path, start_server: Start, reach: Callable[[SshHost], None]) -> None:
    jump = start_server("jump")
    target = start_server("target", client_key=jump.key_file)
    target.pin(jump.address, jump.port)  # by the target's key: wrong
    entry = target.host_entry(tmp_path, jump=[f"{jump.user}@{jump.address}:{jump.port}"])
    with pytest.raises(PermanentError, match="is not the one that is pinned"):
        reach(inventory(tmp_path, box=entry).get("box"))  # type: ignore[arg-type]
    target.known_hosts.write_text("")
    target.pin(target.address, target.port)
    with target.known_hosts.open("a") as stream:
        stream.write(jump.known_hosts.read_text())
    reach(inventory(tmp_path, box=entry).get("box"))  # type: ignore[arg-type]


@BOTH
@pytest.mark.parametrize("which", [1, 2, 3])
def test_an_unknown_host_key_is_refused_on_every_hop(
    behind: tuple[SshHost, Sshd, Sshd, Sshd], which: int, reach: Callable[[SshHost], None]
) -> None:
    host, server = behind[0], behind[which]
    assert isinstance(server, Sshd)
    for missing in (False, True):
        server.known_hosts.unlink() if missing else server.known_hosts.write_text("")
        with pytest.raises(PermanentError) as caught:
            reach(host)
        name = ("outer", "inner", "box")[which - 1]
        assert caught.value.message() == (
            f"box: the host key of {name} ([127.0.0.1]:{server.port}) is not known. "
            f"See it and pin it with `dflash doctor --pin box --hosts {host.file}`."
        )
        assert not server.known_hosts.exists() or server.known_hosts.read_text() == "", "nothing is added silently"
        assert "Accepted" not in server.log.read_text(), "no key is offered to a stranger"


@BOTH
@pytest.mark.parametrize("which", [1, 2, 3])
def test_a_changed_host_key_is_refused_on_every_hop(
    behind: tuple[SshHost, Sshd, Sshd, Sshd], tmp_path: Path, which: int, reach: Callable[[SshHost], None]
) -> None:
    host, server = behind[0], behind[which]
    assert isinstance(server, Sshd)
    make_key(tmp_path / "other")
    pinned = f"[{server.address}]:{server.port} {(tmp_path / 'other.pub').read_text()}"
    server.known_hosts.write_text(pinned)
    with pytest.raises(PermanentError) as caught:
        reach(host)
    name = ("outer", "inner", "box")[which - 1]
    assert caught.value.what.startswith(f"the host key of {name} ([127.0.0.1]:{server.port}) is not the one that is")
    assert "dflash doctor --pin box" in caught.value.remedy
    assert server.known_hosts.read_text() == pinned
    assert "Accepted" not in server.log.read_text()


# What we offer


@pytest.fixture
def home_with_keys(tmp_path: Path, sshd: Sshd, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home whose ~/.ssh could open the door and would trust it, and an agent that would."""
    home = tmp_path / "home" / ".ssh"
    home.mkdir(parents=True, mode=0o700)
    for name in ("client_key", "client_key.pub"):
        target = home / name.replace("client_key", "id_ed25519")
        target.write_bytes((sshd.folder / name).read_bytes())
        target.chmod(0o600)
    (home / "config").write_text(f"Host *\n  IdentityFile {home}/id_ed25519\n  StrictHostKeyChecking no\n")
    (home / "known_hosts").write_text(sshd.known_hosts.read_text())
    monkeypatch.setenv("HOME", str(home.parent))
    return home


class FakeAgent:
    """An agent without keys that counts who asks it for them."""

    def __init__(self, path: Path) -> None:
        self.asked = 0
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            client, _ = self._socket.accept()
            with client:
                while client.recv(1 << 12):
                    self.asked += 1
                    client.sendall(b"\0\0\0\5\x0c\0\0\0\0")


@BOTH
def test_neither_agent_nor_default_keys_are_tried_unless_configured(
    tmp_path: Path,
    sshd: Sshd,
    home_with_keys: Path,
    monkeypatch: pytest.MonkeyPatch,
    reach: Callable[[SshHost], None],
) -> None:
    agent = FakeAgent(Path(os.path.relpath(tmp_path / "agent")))
    monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
    make_key(tmp_path / "other")
    with pytest.raises(PermanentError, match=r"box does not let \S+ in \(offered: \S+/other; ssh says: .*"):
        reach(host_of(tmp_path, sshd, key_file=str(tmp_path / "other")))
    assert agent.asked == 0
    assert "Accepted" not in sshd.log.read_text()
    assert sshd.log.read_text().count("Failed publickey") <= 1

    entry = sshd.host_entry(tmp_path, agent=True)
    del entry["key_file"]
    with pytest.raises(PermanentError, match="the agent's keys"):
        reach(inventory(tmp_path, box=entry).get("box"))  # type: ignore[arg-type]
    assert agent.asked > 0
    assert "Accepted" not in sshd.log.read_text(), "agent: true does not mean the keys of ~/.ssh"


def test_paramiko_takes_default_keys_when_they_are_configured(tmp_path: Path, sshd: Sshd, home_with_keys: Path) -> None:
    entry = sshd.host_entry(tmp_path, default_keys=True)
    del entry["key_file"]
    host = inventory(tmp_path, box=entry).get("box")
    assert isinstance(host, SshHost)
    by_paramiko(host)
    # The system's ssh looks for ~ in the password database, which a test cannot change.
    assert not any("IdentityFile" in word for word in host.command(["true"]))


def test_no_secret_is_on_a_command_line_or_in_the_configuration(behind: tuple[SshHost, Sshd, Sshd, Sshd]) -> None:
    host, *servers = behind
    argv = host.command(["true"])
    file = Path(argv[argv.index("-F") + 1])
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    for server in servers:
        secret = server.key_file.read_text().splitlines()[1]
        assert secret not in " ".join(argv) + file.read_text()
    assert file.read_text() == configuration(host.route)


def test_the_configuration_file_goes_with_the_process(behind: tuple[SshHost, Sshd, Sshd, Sshd], tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from dflash.hosts.inventory import load_inventory\n"
        "host = load_inventory(Path(sys.argv[1])).get('box'); print(host.command(['true'])[3])\n"
        "assert host.run(['true']).status == 0"
    )
    argv = [sys.executable, "-c", program, str(tmp_path / "hosts.yaml")]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert not Path(done.stdout.strip()).exists()
    assert not Path(done.stdout.strip()).parent.exists()


# What goes wrong on the way


@BOTH
def test_a_key_file_that_is_missing_or_open_to_others_is_named(
    tmp_path: Path, sshd: Sshd, reach: Callable[[SshHost], None]
) -> None:
    missing = tmp_path / "no-such-key"
    with pytest.raises(PermanentError, match=f"the key file {missing} cannot be read: No such file"):
        reach(host_of(tmp_path, sshd, key_file=str(missing)))
    sshd.key_file.chmod(0o644)
    with pytest.raises(PermanentError, match=r"is open to others.*chmod 600"):
        reach(host_of(tmp_path, sshd))


@BOTH
def test_a_file_that_is_no_key_is_refused_for_good(
    tmp_path: Path, sshd: Sshd, reach: Callable[[SshHost], None]
) -> None:
    (tmp_path / "words").write_text("not a key\n")
    (tmp_path / "words").chmod(0o600)
    with pytest.raises(PermanentError, match="words"):
        reach(host_of(tmp_path, sshd, key_file=str(tmp_path / "words")))


@BOTH
def test_a_host_that_does_not_answer_is_worth_another_try(
    tmp_path: Path, sshd: Sshd, reach: Callable[[SshHost], None]
) -> None:
    with pytest.raises(TransientError, match=r"box: .*Connection refused.*dflash doctor --host box"):
        reach(host_of(tmp_path, sshd, port=free_port()))
    with pytest.raises(TransientError, match="box: "):
        reach(host_of(tmp_path, sshd, address="no-such-host.invalid"))


@BOTH
def test_a_host_that_is_silent_from_the_start_is_given_up(
    tmp_path: Path, sshd: Sshd, reach: Callable[[SshHost], None]
) -> None:
    with Proxy(sshd.address, sshd.port) as proxy:
        proxy.blackhole()
        sshd.pin("127.0.0.1", proxy.port)
        started = time.monotonic()
        with pytest.raises(TransientError, match="box: "):
            reach(host_of(tmp_path, sshd, port=proxy.port))
        assert time.monotonic() - started < 20


def test_a_killed_server_is_not_taken_for_a_clean_end(host: SshHost, sshd: Sshd) -> None:
    failed: list[DflashError] = []

    def run() -> None:
        try:
            host.run(["sleep", "60"])
        except DflashError as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    with host.channel(["sh", "-c", "echo begun; exec sleep 60"]) as channel:
        assert channel.read() == b"begun\n"
        time.sleep(1)
        sshd.kill_children()
        assert channel.read() == b"", "paramiko says that the output ended"
        with pytest.raises(TransientError, match="the connection failed"):
            channel.wait(60)
    thread.join(10)
    assert isinstance(failed[0], TransientError)
    assert "the connection failed" in failed[0].what


@pytest.mark.slow
@pytest.mark.parametrize("way", ["pull", "push", "idle"])
def test_a_link_that_dies_in_the_middle_is_noticed_within_twenty_seconds(tmp_path: Path, sshd: Sshd, way: str) -> None:
    work = {"pull": "cat /dev/zero", "push": "cat >/dev/null", "idle": "sleep 60"}[way]
    argv = ["sh", "-c", f"echo begun >&2; {work}"]
    with (
        Proxy(sshd.address, sshd.port) as proxy,
        Path("/dev/zero" if way == "push" else os.devnull).open("rb") as stdin,
    ):
        sshd.pin("127.0.0.1", proxy.port)
        host = host_of(tmp_path, sshd, port=proxy.port)
        client = subprocess.Popen(
            host.command(argv),
            stdin=stdin,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            bufsize=0,
        )
        assert client.stderr is not None
        assert client.stderr.readline() == b"begun\n"
        with host.channel(argv) as channel:
            threading.Timer(0.5, proxy.blackhole).start()
            started = time.monotonic()
            with pytest.raises(TransientError, match="nothing was heard"):
                use(channel, way)
            assert time.monotonic() - started < 20
            _, said = client.communicate(timeout=20 - (time.monotonic() - started))
            assert client.returncode == 255
            assert b"not responding" in said or b"Broken pipe" in said


def use(channel: Channel, way: str) -> None:
    """Pulls, pushes or waits until the connection fails."""
    if way == "idle":
        channel.read()
        channel.wait(60)
    while way == "pull" and channel.read():
        pass
    while way == "push":
        channel.write(bytes(PIECE))


@pytest.fixture
def rekeys(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """paramiko changes keys every 256 KiB instead of 512 MiB; when it asked for it."""
    asked: list[float] = []
    ask = Packetizer._trigger_rekey  # type: ignore[attr-defined]

    def remember(packetizer: Packetizer) -> None:
        asked.append(time.monotonic())
        ask(packetizer)

    monkeypatch.setattr(Packetizer, "REKEY_BYTES", 1 << 18)
    monkeypatch.setattr(Packetizer, "_trigger_rekey", remember)
    return asked


def test_keys_change_again_and_again_while_data_flows_both_ways(
    behind: tuple[SshHost, Sshd, Sshd, Sshd], rekeys: list[float]
) -> None:
    data, times = os.urandom(PIECE), 16
    with behind[0].channel(["cat"]) as channel:

        def write() -> None:
            for _ in range(times):
                channel.write(data)
            channel.close_stdin()

        threading.Thread(target=write, daemon=True).start()
        found = hashlib.sha256()
        while piece := channel.read():
            found.update(piece)
        assert channel.wait(10) == 0
    assert found.hexdigest() == hashlib.sha256(data * times).hexdigest()
    assert len(rekeys) > 30, "on three connections, one within the other"


def test_a_command_that_ends_while_keys_change_is_heard_out(host: SshHost, rekeys: list[float]) -> None:
    """Its last words, its status and its end are under way together when the new keys are asked for."""
    for status in range(8):
        with host.channel(["sh", "-c", f"read x; echo said; exit {status}"]) as channel:
            transport = channel._connection.clients[-1].get_transport()
            assert transport is not None
            transport.packetizer._trigger_rekey()  # type: ignore[attr-defined]
            channel.write(b"\n")
            assert channel.read() == b"said\n"
            assert channel.read() == b""
            assert channel.wait(10) == status
            closed_after(transport, seconds=5)
    assert len(rekeys) == 8


def closed_after(transport: paramiko.Transport, seconds: float) -> None:
    """Waits until keys have changed and the channel is closed on both sides."""
    deadline = time.monotonic() + seconds
    while transport.packetizer.need_rekey() or transport._channels.values():  # type: ignore[attr-defined]
        assert time.monotonic() < deadline, "the connection is stuck"
        time.sleep(0.01)


def test_a_quoted_command_is_one_argument(host: SshHost) -> None:
    assert shlex.split(host.command(["echo", AWKWARD])[-1]) == ["echo", AWKWARD]
