"""Three machines that see each other only where they should: network namespaces, a jump host, a container behind a wrapper."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import PATIENCE, Workspace  # type: ignore[import-not-found]
from spread import Spread, make_spread
from sshd import start_sshd, why_not
from test_spread import contents, hosts_of

PCT = """\
#!/bin/sh
# Stands in for Proxmox' `pct exec 200 -- COMMAND...`: checks its arguments, notes the command, becomes it.
[ "$1 $2 $3" = "exec 200 --" ] || { echo "pct: unexpected arguments: $*" >&2; exit 64; }
shift 3
echo "$1" >>"$(dirname "$0")/pct.log"
[ ! -t 0 ] && [ ! -t 1 ] || { echo "pct: there is a terminal" >&2; exit 65; }
exec "$@"
"""

pytestmark = pytest.mark.timeout(900 * PATIENCE)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


@pytest.fixture
def namespaces(require_or_skip: Callable[[str, str], None]) -> Iterator[dict[str, str]]:
    """controller -- bastion -- inner: the controller has no way to the inner machine but through the bastion."""
    if os.getuid() != 0:
        require_or_skip("netns", "this is not root")
    names = {role: f"dflash-{role}-{os.getpid()}" for role in ("controller", "bastion", "inner")}
    try:
        try:
            for name in names.values():
                ip("netns", "add", name)
                ip("-n", name, "link", "set", "lo", "up")
            link(names["controller"], "10.77.1.1", names["bastion"], "10.77.1.2", f"dfa{os.getpid()}")
            link(names["bastion"], "10.77.2.1", names["inner"], "10.77.2.2", f"dfb{os.getpid()}")
        except (OSError, subprocess.SubprocessError) as error:
            require_or_skip("netns", f"namespaces cannot be made ({error})")
        yield names
    finally:
        for name in names.values():
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def link(left: str, left_address: str, right: str, right_address: str, device: str) -> None:
    ip("link", "add", f"{device}l", "type", "veth", "peer", "name", f"{device}r")
    for name, address, end in ((left, left_address, f"{device}l"), (right, right_address, f"{device}r")):
        ip("link", "set", end, "netns", name)
        ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
        ip("-n", name, "link", "set", end, "up")


@pytest.fixture
def machines(
    tmp_path: Path, cache: Path, namespaces: dict[str, str], require_or_skip: Callable[[str, str], None]
) -> Iterator[Spread]:
    """The GPU host is a container on the inner machine, the bastion judges."""
    if reason := why_not():
        require_or_skip("sshd", reason)
    inside = {role: ["ip", "netns", "exec", name] for role, name in namespaces.items()}
    judge = start_sshd(tmp_path / "judge-sshd", address="10.77.1.2", prefix=inside["bastion"])
    trainbox = start_sshd(
        tmp_path / "trainbox-sshd",
        address="10.77.2.2",
        prefix=inside["inner"],
        client_key=judge.key_file,
        environment={"DFLASH_LEASES": str(tmp_path / "leases")},
    )
    pct = tmp_path / "pct"
    pct.write_text(PCT)
    pct.chmod(0o755)
    # the hop to the bastion and the one behind it are checked against one file each; both know both keys
    both = judge.known_hosts.read_text() + trainbox.known_hosts.read_text()
    trainbox.known_hosts.write_text(both)
    space = make_spread(tmp_path / "all" / "work", cache, {"trainbox": trainbox, "judge": judge})
    space.more = {"trainbox": {"jump": ["judge"], "wrap": [str(pct), "exec", "200", "--"]}}
    space.prefix = inside["controller"]
    space.write_hosts()
    yield space
    for server in (judge, trainbox):
        server.stop()


def test_the_road_through_a_jump_host_into_a_container_equals_the_local_one(
    machines: Spread, finished_run: Workspace, tmp_path: Path
) -> None:
    direct = subprocess.run(
        [
            *machines.prefix,
            "ssh",
            "-F",
            "none",
            "-oBatchMode=yes",
            "-oConnectTimeout=3",
            "-p",
            "1",
            "10.77.2.2",
            "true",
        ],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert "unreachable" in direct.stderr, "the controller has a way of its own to the inner machine"
    machines.call("run")
    assert contents(machines) == contents(finished_run)
    assert hosts_of(machines)["train"] == "trainbox"
    assert hosts_of(machines)["evaluate"] == "judge"
    assert "env" in (tmp_path / "pct.log").read_text().split()
