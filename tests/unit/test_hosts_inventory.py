"""A hosts file says where roles run, and every mistake in it is named by file, line, key and value."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from dflash.base.errors import ConfigError, PermanentError, TransientError
from dflash.hosts.channel import unreachable
from dflash.hosts.environment_path import environment_python
from dflash.hosts.host import LocalHost
from dflash.hosts.inventory import Inventory, load_inventory
from dflash.hosts.ssh import SshHost, configuration, connection_error, options

TWO_MACHINES = """\
hosts:
  bastion: {kind: ssh, address: 203.0.113.1, user: jo, key_file: keys/bastion, known_hosts: keys/bastion_hosts}
  inner:
    kind: ssh
    address: 10.0.0.2
    user: jo
    key_file: ~/.ssh/inner
    jump: [bastion]
  gpu-box:
    kind: ssh
    address: 10.0.0.3
    port: 2222
    user: root
    key_file: keys/gpu
    jump: [inner, "relay@[2001:db8::1]:23", me@10.0.0.9]
    workdir: /srv/df lash
    device: cuda:1
    wrap: [pct, exec, "200", --]
    python: {gpu: /opt/train/bin/python}
    targets: {qwen: /models/qwen}
  eval-box: {kind: local, device: cpu, workdir: /srv/eval, python: /opt/eval/bin/python}
roles:
  gpu: gpu-box
  eval: eval-box
notify:
  command: [notify-send]
"""


def load(tmp_path: Path, text: str) -> Inventory:
    path = tmp_path / "hosts.yaml"
    path.write_text(text)
    return load_inventory(path)


def test_roles_devices_and_interpreters(tmp_path: Path) -> None:
    found = load(tmp_path, TWO_MACHINES)
    assert [found.host(role) for role in ("gpu", "eval", "generate", "controller")] == [
        "gpu-box",
        "eval-box",
        "local",
        "local",
    ]
    assert (found.device("gpu"), found.device("eval")) == ("cuda:1", "cpu")
    gpu, judge, local = found.get("gpu-box"), found.get("eval-box"), found.get("local")
    assert (gpu.id, gpu.workdir, gpu.device) == ("gpu-box", Path("/srv/df lash"), "cuda:1")
    assert gpu.python("gpu") == "/opt/train/bin/python"
    assert gpu.python("generate") == str(environment_python(Path("/srv/df lash"))), "what `dflash hosts setup` makes"
    assert judge.python("gpu") == judge.python("eval") == "/opt/eval/bin/python"
    assert (judge.workdir, local.workdir, local.python()) == (Path("/srv/eval"), Path.cwd(), sys.executable)
    assert gpu.entry.targets == {"qwen": Path("/models/qwen")}
    assert found.notify.command == ("notify-send",)


def test_without_a_file_everything_is_local() -> None:
    found = load_inventory(None)
    assert {found.host(role) for role in ("gpu", "eval", "generate")} == {"local"}
    assert found.get("local") == LocalHost()
    with pytest.raises(ConfigError, match="there is no host `gpu`"):
        found.get("gpu")


def test_the_way_to_a_host_is_a_list_of_hops_each_with_its_own_keys(tmp_path: Path) -> None:
    route = load(tmp_path, TWO_MACHINES).route("gpu-box")
    assert [(hop.name, hop.address, hop.port, hop.user) for hop in route] == [
        ("bastion", "203.0.113.1", 22, "jo"),
        ("inner", "10.0.0.2", 22, "jo"),
        ("relay@[2001:db8::1]:23", "2001:db8::1", 23, "relay"),
        ("me@10.0.0.9", "10.0.0.9", 22, "me"),
        ("gpu-box", "10.0.0.3", 2222, "root"),
    ]
    gpu, default = tmp_path / "keys" / "gpu", tmp_path / "known_hosts"
    assert [hop.key_file for hop in route] == [
        tmp_path / "keys" / "bastion",
        Path.home() / ".ssh" / "inner",
        gpu,
        gpu,
        gpu,
    ]
    assert [hop.known_hosts for hop in route] == [tmp_path / "keys" / "bastion_hosts", *[default] * 4]
    assert [hop.known_as for hop in route[3:]] == ["10.0.0.9", "[10.0.0.3]:2222"]


def test_the_system_reads_the_options_of_every_hop_as_they_are_meant(tmp_path: Path) -> None:
    text = TWO_MACHINES.replace("keys/bastion,", "'keys 100%/bas tion#1',")
    route = load(tmp_path, text).route("gpu-box")
    (tmp_path / "config").write_text(configuration(route))

    def resolved(index: int) -> dict[str, str]:
        argv = ["ssh", "-G", "-F", str(tmp_path / "config"), f"hop{index}"]
        lines = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()
        return dict(line.partition(" ")[::2] for line in reversed(lines))

    first, last = resolved(0), resolved(4)
    assert first["hostname"] == "203.0.113.1"
    assert first["identityfile"].replace("%%", "%").strip('"') == str(tmp_path / "keys 100%" / "bas tion#1")
    assert "proxyjump" not in first
    assert (last["hostname"], last["port"], last["user"], last["proxyjump"]) == ("10.0.0.3", "2222", "root", "hop3")
    for hop in (first, last):
        assert hop["stricthostkeychecking"] in ("yes", "true")
        assert hop["globalknownhostsfile"] == "/dev/null"
        assert (hop["batchmode"], hop["identityagent"], hop["identitiesonly"]) == ("yes", "none", "yes")
        assert (hop["passwordauthentication"], hop["preferredauthentications"]) == ("yes", "publickey")
        assert (hop["forwardagent"], hop["updatehostkeys"]) == ("no", "false")


def test_keys_are_offered_only_as_configured(tmp_path: Path) -> None:
    base = "hosts: {a: {kind: ssh, address: a, %s}}"

    def given(text: str) -> dict[str, str]:
        return options(load(tmp_path, base % text).route("a")[0])

    assert given("key_file: k")["IdentityFile"] == f'"{tmp_path}/k"'
    assert given("key_file: k")["IdentitiesOnly"] == "yes"
    agent = given("agent: true")
    assert (agent["IdentityFile"], agent["IdentitiesOnly"], "IdentityAgent" in agent) == ("none", "no", False)
    default = given("default_keys: true")
    assert ("IdentityFile" in default, default["IdentitiesOnly"], default["IdentityAgent"]) == (False, "yes", "none")


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("machines: {}", 1, "unknown key `machines`: .* nothing else"),
        ("host: {}", 1, "Did you mean `hosts`?"),
        ("hosts: [", 1, "not YAML"),
        ("hosts: []", 1, "`hosts: []` is not a mapping"),
        ("hosts:\n  a b: {kind: local}", 2, "`hosts.a b`: not a host id"),
        ("hosts:\n  a: local", 2, "`hosts.a: local` is not a mapping. Say its `kind`"),
        ("hosts:\n  a: {}", 2, "`hosts.a.kind` is missing. Say `local` or `ssh`"),
        ("hosts:\n  a:\n    kind: shh", 3, "`hosts.a.kind: shh`: .* Say `local` or `ssh`"),
        ("hosts:\n  a: {kind: ssh}", 2, "`hosts.a`: `address` is missing"),
        ("hosts:\n  a: {kind: ssh, address: b}", 2, "no key to offer"),
        ("hosts:\n  a:\n    kind: ssh\n    adress: b", 4, "unknown key `hosts.a.adress: b`. Did you mean `address`?"),
        ("hosts:\n  a: {kind: local, port: 22}", 2, "`port` means nothing for `kind: local`"),
        ("hosts:\n  a:\n    kind: ssh\n    address: -oProxyCommand=x", 4, "`hosts.a.address: -oProxyCommand=x`"),
        ("hosts:\n  a:\n    kind: ssh\n    address: b c", 4, "without blanks"),
        ("hosts:\n  a:\n    kind: ssh\n    address: b\n    user: -l", 5, "`hosts.a.user: -l`"),
        (
            "hosts:\n  a:\n    kind: ssh\n    address: b\n    port: 70000",
            5,
            "`hosts.a.port: 70000`: .* from 1 to 65535",
        ),
        ("hosts:\n  a:\n    kind: local\n    workdir: here", 4, "`hosts.a.workdir: here`: is not an absolute path"),
        ("hosts:\n  a:\n    kind: local\n    workdir: /a:b", 4, "`hosts.a.workdir: /a:b`: a colon"),
        ("hosts:\n  a:\n    kind: local\n    device: tpu", 4, "`hosts.a.device: tpu`: .* cpu, cuda or cuda:N"),
        ("hosts:\n  a:\n    kind: local\n    python: {gpus: x}", 4, "unknown role gpus"),
        ("hosts:\n  a:\n    kind: local\n    wrap: pct exec", 4, "a list of words in quotes"),
        ("hosts:\n  a:\n    kind: local\n    wrap: [pct, 200]", 4, "`hosts.a.wrap.1: 200`: .* words in quotes"),
        ("roles:\n  cook: local", 2, "`roles.cook`: unknown role"),
        ("roles:\n  evel: local", 2, "Did you mean `eval`?"),
        ("hosts: {box: {kind: local}}\nroles:\n  gpu: bx", 3, "`roles.gpu: bx` names no host.* Did you mean `box`?"),
        ("hosts: {a: {kind: local}}\nroles:\n  gpu: [a, local]", 3, "one host plays this role"),
        ("hosts: {a: {kind: local}}\nroles:\n  generate: []", 3, "one host plays this role"),
        ("hosts: {a: {kind: local}}\nroles:\n  generate: [a, b]", 3, "`roles.generate: b` names no host"),
        ("hosts: {a: {kind: ssh, address: b, agent: true}}\nroles: {gpu: a}", 1, "`hosts.a.workdir` is missing"),
        (
            "hosts: {a: {kind: ssh, address: b, agent: true, workdir: /w}}\nroles: {gpu: a}",
            1,
            "`hosts.a.device` is missing: .* Say cpu, cuda",
        ),
        ("hosts: {a: {kind: ssh, address: b, agent: true, jump: [c]}}", 1, "`hosts.a.jump: c` is neither a host"),
        ("hosts: {c: {kind: local}, a: {kind: ssh, address: b, agent: true, jump: [c]}}", 1, "is this machine"),
        ("hosts: {a: {kind: local}}\nnotify: {comand: [x]}", 2, "Did you mean `command`?"),
        ("hosts: {a: {kind: local}, a: {kind: local}}", 1, "given twice"),
    ],
)
def test_a_mistake_is_named_by_line_key_value_and_remedy(tmp_path: Path, text: str, line: int, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    message = caught.value.message()
    assert message.startswith(f"{tmp_path / 'hosts.yaml'}:{line}: "), message
    pattern = ".*".join(re.escape(part) for part in words.split(".*"))
    assert re.search(pattern, message), message
    assert "\n" not in message


def test_jumps_in_a_circle_are_refused(tmp_path: Path) -> None:
    host = "{kind: ssh, address: x, agent: true, jump: [%s]}"
    with pytest.raises(ConfigError, match=r"leads in a circle: a -> b -> a"):
        load(tmp_path, f"hosts: {{a: {host % 'b'}, b: {host % 'a'}}}")


def test_a_file_that_is_not_there_and_a_host_without_a_workdir(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        load_inventory(tmp_path / "nothing.yaml")
    host = load(tmp_path, "hosts: {a: {kind: ssh, address: b, agent: true}}").get("a")
    with pytest.raises(ConfigError, match=r"hosts.a.workdir"):
        _ = host.workdir


def test_a_path_that_ssh_cannot_read_is_refused(tmp_path: Path) -> None:
    host = load(tmp_path, "hosts: {a: {kind: ssh, address: b, key_file: 'a\"b'}}").get("a")
    (tmp_path / 'a"b').touch(mode=0o600)
    with pytest.raises(PermanentError, match="Rename it"):
        host.command(["true"])


@pytest.mark.parametrize(
    ("said", "kind", "words"),
    [
        ("No ED25519 host key is known for 10.0.0.3 and you have requested strict checking.", "permanent", "not known"),
        ("Host key for 10.0.0.3 has changed and you have requested strict checking.", "permanent", "another machine"),
        ("jo@10.0.0.3: Permission denied (publickey).", "permanent", "does not let"),
        ("ssh: connect to host 10.0.0.3 port 22: No route to host", "transient", "No route to host"),
        ("Timeout, server 10.0.0.3 not responding.", "transient", "not responding"),
        (
            "kex_exchange_identification: Connection closed by remote host\nConnection closed by 10.0.0.3",
            "transient",
            "",
        ),
        (
            "channel 0: open failed: connect failed: x\nConnection closed by UNKNOWN port 65535",
            "transient",
            "open failed",
        ),
        ("", "transient", "no reason given"),
    ],
)
def test_what_ssh_says_decides_whether_to_try_again(tmp_path: Path, said: str, kind: str, words: str) -> None:
    host = load(tmp_path, "hosts: {a: {kind: ssh, address: 10.0.0.3, agent: true, user: jo}}").get("a")
    assert isinstance(host, SshHost)
    error = connection_error("a", host.route, said)
    assert error.kind == kind
    assert error.message().startswith("a: ")
    assert words in error.message()


@pytest.mark.parametrize(
    ("file", "option"),
    [("config/hosts.yaml", ""), ("other.yaml", " --hosts other.yaml"), ("a b.yaml", " --hosts 'a b.yaml'")],
)
def test_what_to_do_about_a_host_names_the_hosts_file_unless_it_is_the_one_that_is_read_anyway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, option: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(file).parent.mkdir(exist_ok=True)
    Path(file).write_text(TWO_MACHINES)
    for given in (Path(file), Path(file).absolute()):
        route = load_inventory(given).route("gpu-box")
        told = option.replace(file, str(given)) if option else ""
        look = f"`dflash doctor --host gpu-box{told}`."
        pin = f"`dflash doctor --pin gpu-box{told}`."
        assert unreachable("gpu-box", route[-1], OSError("no route")).remedy.endswith(look)
        lost = connection_error("gpu-box", route, "ssh: connect to host 10.0.0.3 port 2222: Connection refused")
        assert isinstance(lost, TransientError)
        assert lost.remedy.endswith(look)
        for said in ("Host key verification failed.", f"Host key for {route[-1].known_as} has changed and you"):
            assert connection_error("gpu-box", route, said).remedy.endswith(pin)
