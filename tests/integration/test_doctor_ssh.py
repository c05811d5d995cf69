"""`dflash doctor` over real sshd: keys are pinned only after a person has seen them, and what is wrong is said."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paramiko
import pytest
import yaml
from sshd import Sshd, make_key

from dflash.base.errors import PermanentError
from dflash.hosts.doctor import examine
from dflash.hosts.inventory import load_inventory
from dflash.hosts.pins import pin, pinned_keys, shown_key

Start = Callable[..., Sshd]
ROOT = Path(__file__).resolve().parents[2]


def hosts_file(folder: Path, hosts: dict[str, Any], **roles: str) -> Path:
    path = folder / "hosts.yaml"
    path.write_text(yaml.safe_dump({"hosts": hosts, "roles": roles}))
    return path


def dflash(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-m", "dflash", *arguments]
    given = {"stdin": subprocess.DEVNULL, "timeout": 250, **options}
    return subprocess.run(argv, capture_output=True, text=True, env=environment, check=False, **given)


def fingerprint(server: Sshd) -> str:
    argv = ["ssh-keygen", "-lf", str(server.folder / "host_key.pub")]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()[1]


@pytest.fixture
def two(tmp_path: Path, start_server: Start) -> tuple[Path, Path, Sshd, Sshd]:
    """A host behind a jump host, neither pinned: hosts file, known_hosts, jump host, host."""
    jump, target = start_server("jump"), start_server("target")
    known = tmp_path / "known hosts"
    more = {"known_hosts": str(known), "python": sys.executable}
    path = hosts_file(
        tmp_path,
        {
            "bastion": jump.host_entry(tmp_path / "work", **more),
            "box": target.host_entry(tmp_path / "work", jump=["bastion"], **more),
        },
        gpu="box",
    )
    return path, known, jump, target


# Pinning


def test_without_a_terminal_nothing_is_pinned_but_what_was_agreed_to(two: tuple[Path, Path, Sshd, Sshd]) -> None:
    path, known, jump, target = two
    done = dflash("doctor", "--pin", "box", "--hosts", str(path))
    assert done.returncode == 2
    assert f"--yes {fingerprint(jump)}" in done.stderr
    assert f"ssh-ed25519 {fingerprint(jump)}" in done.stdout
    assert not known.exists()

    done = dflash("doctor", "--pin", "box", "--yes", fingerprint(target), "--hosts", str(path))
    assert done.returncode == 1
    assert f"bastion shows the host key {fingerprint(jump)}, not {fingerprint(target)}" in done.stderr
    assert not known.exists()

    answers = ["--yes", fingerprint(jump), "--yes", fingerprint(target)]
    done = dflash("doctor", "--pin", "box", *answers, "--hosts", str(path))
    assert (done.returncode, done.stderr) == (0, "")
    assert known.read_text().splitlines() == [
        f"[127.0.0.1]:{jump.port} {jump.host_key}",
        f"[127.0.0.1]:{target.port} {target.host_key}",
    ]
    assert load_inventory(path).get("box").run(["true"]).status == 0, "the system's ssh reads what was pinned"
    done = dflash("doctor", "--pin", "box", "--hosts", str(path))
    assert done.stdout.count("pinned already") == 2


def at_a_terminal(path: Path, *answers: str) -> tuple[int, str]:
    """Runs `dflash doctor --pin box` at a terminal where a person gives these answers."""
    controller, terminal = pty.openpty()
    argv = [sys.executable, "-m", "dflash", "doctor", "--pin", "box", "--hosts", str(path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        argv, stdin=terminal, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        os.write(controller, "".join(f"{answer}\n" for answer in answers).encode())
        said, _ = process.communicate(timeout=60)
    os.close(controller)
    os.close(terminal)
    return process.returncode, said


def test_at_a_terminal_a_person_is_asked_for_each_hop(two: tuple[Path, Path, Sshd, Sshd]) -> None:
    path, known, jump, target = two
    status, said = at_a_terminal(path, "y", "")
    assert status == 1
    assert "the host key of box was not pinned" in said
    assert [line.split()[0] for line in known.read_text().splitlines()] == [f"[127.0.0.1]:{jump.port}"]
    assert "Accepted" not in target.log.read_text()
    status, said = at_a_terminal(path, "yes")
    assert status == 0
    assert known.read_text().count("ssh-ed25519") == 2


def test_a_changed_key_is_shown_beside_the_pinned_one_and_takes_its_place(
    two: tuple[Path, Path, Sshd, Sshd], tmp_path: Path
) -> None:
    path, known, jump, _ = two
    make_key(tmp_path / "old")
    old = " ".join((tmp_path / "old.pub").read_text().split()[:2])
    name = f"[127.0.0.1]:{jump.port}"
    hashed = paramiko.HostKeys.hash_host(name)
    others = f"# a comment\nother.example {old}\n"
    known.write_text(f"{others}{name},other.too {old}\n{hashed} {old}\n{name} {old}\n")
    done = dflash("doctor", "--pin", "bastion", "--hosts", str(path))
    assert done.returncode == 2
    assert "pinned is another: SHA256:" in done.stdout
    assert "Another machine may be answering" in done.stdout

    done = dflash("doctor", "--pin", "bastion", "--yes", fingerprint(jump), "--hosts", str(path))
    assert done.returncode == 0
    assert known.read_text() == f"{others}other.too {old}\n{name} {jump.host_key}\n"
    assert load_inventory(path).get("bastion").run(["true"]).status == 0


def test_a_hop_that_is_not_pinned_is_not_passed_on_the_way(two: tuple[Path, Path, Sshd, Sshd]) -> None:
    path, _, jump, target = two
    route = load_inventory(path).route("box")
    with pytest.raises(PermanentError, match=r"the host key of bastion .* is not known"):
        shown_key("box", route)
    assert "Accepted" not in jump.log.read_text() + target.log.read_text()


def test_a_fingerprint_that_was_not_confirmed_is_never_written(two: tuple[Path, Path, Sshd, Sshd]) -> None:
    path, known, jump, target = two
    shown = shown_key("box", load_inventory(path).route("bastion"))
    with pytest.raises(PermanentError, match="Nothing was pinned"):
        pin(shown, fingerprint(target))
    assert not known.exists()
    pin(shown, fingerprint(jump))
    assert set(pinned_keys(shown.hop)) == {"ssh-ed25519"}


# Looking at hosts


def test_a_host_is_looked_at_through_its_jump_host(two: tuple[Path, Path, Sshd, Sshd]) -> None:
    path, known, jump, target = two
    known.write_text(jump.known_hosts.read_text() + target.known_hosts.read_text())
    done = dflash("doctor", "--host", "box", "--json", "--hosts", str(path))
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    box = document["hosts"]["box"]
    assert document["differ"] == {}
    assert box["pinned"] == {"bastion": True, "box": True}
    assert (box["reachable"], box["problems"]) == (True, [])
    assert abs(box["clock_skew"]) <= box["clock_uncertainty"] + 0.05
    assert box["python"] == {"executable": sys.executable, "version": sys.version.split()[0]}
    assert box["machine"]["disk"]["refused"] == ""
    assert {one["function"]: one["right"] for one in box["numeric"]["self_test"]} == {
        "chunk_gated_delta_rule": True,
        "recurrent_gated_delta_rule": True,
        "causal_conv1d": True,
        "causal_conv1d_update": True,
    }


def test_a_host_that_is_not_pinned_or_cannot_be_reached_is_a_problem(two: tuple[Path, Path, Sshd, Sshd]) -> None:
    path, _, jump, _ = two
    done = dflash("doctor", "--host", "box", "--hosts", str(path))
    assert done.returncode == 1
    assert "bastion NOT pinned, box NOT pinned" in done.stdout
    assert done.stderr.splitlines()[-1].endswith(f"See it and pin it with `dflash doctor --pin box --hosts {path}`.")
    jump.stop()
    found = examine(load_inventory(path), "bastion")
    assert found.facts["reachable"] is False
    assert "Connection refused" in found.problems[0]


def broken(tmp_path: Path, server: Sshd, **more: Any) -> list[str]:
    entry = {**server.host_entry(tmp_path / "work", python=sys.executable), **more}
    return examine(load_inventory(hosts_file(tmp_path, {"box": entry}, gpu="box")), "box").problems


def test_a_wrong_python_is_a_problem_with_its_remedy(tmp_path: Path, sshd: Sshd) -> None:
    (problem,) = broken(tmp_path, sshd, python="/no/python")
    assert problem.startswith(
        "there is no program `/no/python`. Make the environment with `dflash hosts setup box --hosts "
    )
    old = tmp_path / "old"
    old.write_text('#!/bin/sh\n[ $1 = -m ] && exec python3 "$@"\necho 3 9 2\n')
    old.chmod(0o755)
    assert any(f"{old} is python 3.9.2; 3.11 is needed" in one for one in broken(tmp_path, sshd, python=str(old)))
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    (problem,) = broken(tmp_path, sshd, python=str(bare))
    assert "the kernels could not be tested" in problem
    assert "No module named" in problem
    assert "dflash hosts setup box" in problem


def test_the_interpreter_of_every_role_is_looked_at(tmp_path: Path, sshd: Sshd) -> None:
    bare = tmp_path / "bare"  # its kernels are not tested, which would take a while
    bare.write_text(f'#!/bin/sh\n[ "$2" = dflash ] && exit 1\nexec {sys.executable} "$@"\n')
    bare.chmod(0o755)
    entry = sshd.host_entry(tmp_path / "work", python={"gpu": str(bare), "eval": "/no/python"})
    found = examine(load_inventory(hosts_file(tmp_path, {"box": entry}, gpu="box", eval="box")), "box")
    assert found.problems[0].startswith(f"the kernels could not be tested with {bare}")
    assert found.problems[1].startswith("for eval: there is no program `/no/python`")


def test_a_workdir_that_cannot_be_written_is_a_problem(
    tmp_path: Path, sshd: Sshd, require_or_skip: Callable[..., None]
) -> None:
    folder = tmp_path / "mount"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "ro,size=1m", "none", folder], capture_output=True, check=False
    )
    if done.returncode:
        require_or_skip("mount", "mounting is not allowed here")
    try:
        (problem,) = broken(tmp_path, sshd, workdir=str(folder))
        assert "Read-only file system" in problem
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_clock_that_is_wrong_is_a_problem(tmp_path: Path, sshd: Sshd) -> None:
    late = tmp_path / "late"
    # Its kernels are not tested, which would take a while.
    late.write_text(
        f'#!/bin/sh\nif [ "$1" = -c ]; then code=$2; shift 2; '
        f'exec {sys.executable} -c "import time; now = time.time; time.time = lambda: now() - 3600\n$code" "$@"; fi\n'
        f'[ "$2" = dflash ] && exit 1\nexec {sys.executable} "$@"\n'
    )
    late.chmod(0o755)
    assert broken(tmp_path, sshd, python=str(late))[0] == "its clock is -3600 s off ours; set it (NTP)"


def test_an_unknown_host_is_a_mistake_of_the_user(two: tuple[Path, Path, Sshd, Sshd]) -> None:
    done = dflash("doctor", "--host", "bx", "--hosts", str(two[0]))
    assert done.returncode == 2
    assert "there is no host `bx`. Did you mean `box`?" in done.stderr
