"""`dflash hosts setup` makes an environment on a host from nothing but a python, once, and says what is in its way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from sshd import Sshd

from dflash.base.errors import PermanentError
from dflash.hosts.entry import HostEntry
from dflash.hosts.environment_path import environment_folder
from dflash.hosts.host import LocalHost
from dflash.hosts.inventory import load_inventory
from dflash.hosts.setup import require_python, set_up
from dflash.hosts.ssh import SshHost

WHEEL = """\
import sys, zipfile
name, version, folder = sys.argv[1:]
with zipfile.ZipFile(f"{folder}/{name}-{version}-py3-none-any.whl", "w") as wheel:
    info = f"{name}-{version}.dist-info"
    wheel.writestr(f"{name}.py", f"version = {version!r}")
    wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n")
    wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nGenerator: test\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
    wheel.writestr(f"{info}/RECORD", "")
"""


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """A folder of three tiny packages, so that nothing is downloaded."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name, version in (("torch", "2.13.0+cpu"), ("torch", "2.13.0+gpu"), ("other", "1.0"), ("kernel", "3.0")):
        subprocess.run([sys.executable, "-c", WHEEL, name, version, str(folder)], check=True)
    return folder


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    path = tmp_path / "small.lock"
    path.write_text("torch==2.13.0\nother==1.0\n")
    return path


def host_of(tmp_path: Path, sshd: Sshd, **more: Any) -> SshHost:
    (tmp_path / "hosts.yaml").write_text(
        yaml.safe_dump({"hosts": {"box": sshd.host_entry(tmp_path / "a work'dir", **more)}})
    )
    found = load_inventory(tmp_path / "hosts.yaml").get("box")
    assert isinstance(found, SshHost)
    return found


@pytest.fixture
def offline(start_server: Any, wheels: Path) -> Sshd:
    """A host whose pip finds the packages of the folder only."""
    server: Sshd = start_server(environment={"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)})
    return server


def test_it_is_made_once_with_what_comes_first_and_last(
    tmp_path: Path, offline: Sshd, lock: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    host = host_of(tmp_path, offline)
    python = set_up(host, first="torch==2.13.0+cpu", also="kernel", python=sys.executable, lock=lock)
    assert host.python("gpu") == host.python("eval") == str(python)
    program = "import torch, other, kernel; print(torch.version, other.version, kernel.version)"
    assert host.run([str(python), "-c", program]).stdout.split() == [b"2.13.0+cpu", b"1.0", b"3.0"]
    said = capfd.readouterr().err
    assert "setup: box: pip install torch==2.13.0+cpu" in said, "progress is shown as it comes"
    assert "setup: box: installing them" in said
    assert "Processing" not in said, "pip's own words fill screens"

    before = python.parent.parent.joinpath("ready.json").stat().st_mtime_ns
    assert set_up(host, first="torch==2.13.0+cpu", also="kernel", python=sys.executable, lock=lock) == python
    said = capfd.readouterr().err
    assert "is there already" in said
    assert "pip install" not in said
    assert python.parent.parent.joinpath("ready.json").stat().st_mtime_ns == before


def test_one_that_is_unfinished_or_other_is_made_anew(tmp_path: Path, offline: Sshd, lock: Path) -> None:
    host = host_of(tmp_path, offline)
    folder = environment_folder(host.workdir)
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").write_text("half")
    python = set_up(host, first="torch==2.13.0+cpu", python=sys.executable, lock=lock)
    assert host.run([str(python), "-c", "import torch; print(torch.version)"]).stdout.strip() == b"2.13.0+cpu"
    set_up(host, first="torch==2.13.0+gpu", python=sys.executable, lock=lock)
    assert host.run([str(python), "-c", "import torch; print(torch.version)"]).stdout.strip() == b"2.13.0+gpu"


def test_what_pip_says_is_passed_on_and_nothing_counts_as_ready(tmp_path: Path, offline: Sshd, lock: Path) -> None:
    lock.write_text("nowhere==9\n")
    host = host_of(tmp_path, offline)
    with pytest.raises(PermanentError, match=r"box:.*could not be made: ERROR: No matching distribution.*nowhere==9"):
        set_up(host, python=sys.executable, lock=lock)
    assert not (environment_folder(host.workdir) / "ready.json").exists()


def test_a_python_that_will_not_do_is_named(tmp_path: Path, sshd: Sshd) -> None:
    host = host_of(tmp_path, sshd)
    with pytest.raises(PermanentError, match=r"box: there is no program `/no/python`.*--python"):
        set_up(host, python="/no/python")
    old = tmp_path / "old"
    old.write_text("#!/bin/sh\necho 3 9 2\n")
    old.chmod(0o755)
    with pytest.raises(PermanentError, match=r"box: .*/old is python 3\.9\.2\. Install python 3\.11"):
        set_up(host, python=str(old))
    old.write_text("#!/bin/sh\necho 'ModuleNotFoundError: No module named ensurepip' >&2\nexit 1\n")
    with pytest.raises(PermanentError, match=r"will not do: .*ensurepip.*python3-venv"):
        set_up(host_of(tmp_path, sshd, python=str(old)))


def test_a_host_that_refuses_us_is_not_told_to_install_a_python(tmp_path: Path, sshd: Sshd) -> None:
    host = host_of(tmp_path, sshd)
    sshd.known_hosts.write_text("")
    with pytest.raises(PermanentError, match=r"box: the host key of .* is not known\. See it and pin it") as refused:
        set_up(host, python=sys.executable)
    assert "Install python" not in refused.value.message()


def test_a_wrap_that_is_not_there_is_not_told_to_install_a_python() -> None:
    host = LocalHost("box", HostEntry(kind="local", wrap=["no-such-wrap", "--"]))
    with pytest.raises(PermanentError, match="there is no program `no-such-wrap`") as refused:
        require_python(host, "python3")
    assert "Install python" not in refused.value.message()


def test_the_command_needs_a_host_with_a_workdir(tmp_path: Path) -> None:
    (tmp_path / "hosts.yaml").write_text("hosts: {here: {kind: local}}")
    argv = [sys.executable, "-m", "dflash", "hosts", "setup", "here", "--hosts", str(tmp_path / "hosts.yaml")]
    done = subprocess.run(argv, capture_output=True, text=True, env={**os.environ}, check=False)
    assert (done.returncode, "`workdir`" in done.stderr) == (2, True)
