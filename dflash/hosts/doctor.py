"""`dflash doctor`: what is wrong with the hosts, before a stage finds out.

Looks at each host from here: is it pinned, reachable, is its clock right; and has it say what it is: memory, disk, GPUs,
drivers, which kernels are really bound, and whether they compute what they should. Then compares GPU host and eval host in
everything that decides numbers. Changes nothing but `<workdir>/code`.

Costs, a host: about ten commands, the import of torch and transformers there, and on a GPU the compilation of the kernels
(up to a minute the first time). Hosts are looked at side by side.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash.base.errors import DflashError
from dflash.base.progress import Progress
from dflash.hosts.code import send_code
from dflash.hosts.entry import with_file
from dflash.hosts.host import Finished, Host
from dflash.hosts.inventory import LOCAL, Inventory
from dflash.hosts.pins import pinned_keys
from dflash.hosts.ssh import SshHost

PYTHON = (3, 11)
LARGEST_SKEW = 5.0
"""Seconds. Nothing is decided by a clock, but a person reads times of several hosts side by side."""
LEAST_DISK = 10 << 30
LEAST_SHARED = 1 << 30
COMMAND_TIMEOUT = 60.0
START_TIMEOUT = 300.0
"""Seconds for a python there to start and look around: a host at work reads it from a busy disk, and its driver answers late."""
TEST_TIMEOUT = 600.0
SAY_EVERY = 20.0
"""Seconds between two words on something that takes its time."""
COMPUTING = ("gpu", "eval")
"""Roles whose results depend on kernels."""

WHERE_NUMBERS_DO_NOT_COME_FROM = re.compile(r"torch\.(driver|nccl|threads)$|gpus\.\d+\.")
CLOCK = "import sys, time\nfor line in sys.stdin: print(repr(time.time()), flush=True)"


@dataclass
class Checkup:
    """What is known of a host. `problems` want something done; `notes` are worth knowing.

    facts: `reachable`, `seconds_a_command`, `pinned` (hop -> bool), `clock_skew`, `clock_uncertainty` (seconds), `python`,
        `machine` (see `dflash.hosts.machine`), `numeric` (see `dflash.model.selftest`).
    further: what is known of the interpreter of another computing role, where the hosts file names one of its own.
    """

    host: str
    roles: tuple[str, ...]
    device: str
    facts: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    further: list[Checkup] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "roles": list(self.roles),
            "device": self.device,
            **self.facts,
            "problems": self.problems,
            "notes": self.notes,
            **({"further": {one.roles[0]: one.facts for one in self.further}} if self.further else {}),
        }


def examine_all(inventory: Inventory, hosts: Sequence[str]) -> list[Checkup]:
    """Looks at several hosts side by side.

    Raises:
        ConfigError: one of them is not in the hosts file.
    """
    for host in hosts:
        inventory.get(host)
    with ThreadPoolExecutor(max_workers=max(1, len(hosts))) as pool:
        return list(pool.map(lambda host: examine(inventory, host), hosts))


def hosts_to_examine(inventory: Inventory) -> list[str]:
    """The hosts of the file, and this machine when it plays a role."""
    plays = any(LOCAL in players for players in inventory.roles.values())
    return [host for host in inventory.ids() if host != LOCAL or plays or not inventory.entries]


def examine(inventory: Inventory, host_id: str) -> Checkup:
    """Looks at one host; whatever goes wrong becomes one of its problems."""
    host = inventory.get(host_id)
    roles = tuple(role for role, players in inventory.roles.items() if host_id in players)
    checkup = Checkup(host_id, roles, host.device or (inventory.device(roles[0]) if roles else "cpu"))
    say = Progress(f"doctor: {host_id}").say
    try:
        _reach(checkup, inventory, host)
        if checkup.problems or (host.entry.kind == "ssh" and host.entry.workdir is None):
            return checkup
        with telling(say, "reachable; looking at the machine", START_TIMEOUT):
            code = send_code(host)
            (role, named), *others = _interpreters(checkup, host)
            python = _python(checkup, host, named)
            _machine(checkup, host, code, python)
        if python is not None:
            _clock(checkup, host, python)
            with telling(say, "testing the kernels", TEST_TIMEOUT):
                _numeric(checkup, host, code, python)
        for role, named in others:
            with telling(say, f"testing the kernels of {named}", TEST_TIMEOUT):
                _further(checkup, host, code, role, named)
    except DflashError as error:
        checkup.problems.append(error.message())
    return checkup


@contextlib.contextmanager
def telling(say: Callable[[str], None], doing: str, limit: float) -> Iterator[None]:
    """Says what is being done, and again every now and then how long it has taken and how long it may take."""
    say(doing)
    over = threading.Event()
    began = time.monotonic()

    def tell() -> None:
        while not over.wait(SAY_EVERY):
            say(
                f"still {doing.rpartition('; ')[2]}, {time.monotonic() - began:.0f} s so far; it is given up after {limit:.0f} s"
            )

    teller = threading.Thread(target=tell, daemon=True, name="doctor-tells")
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()


def _interpreters(checkup: Checkup, host: Host) -> list[tuple[str, str]]:
    """The computing roles of a host that have an interpreter of their own, each with it; at least one."""
    found: dict[str, str] = {}
    for role in [role for role in checkup.roles if role in COMPUTING] or [""]:
        found.setdefault(host.python(role), role)
    return [(role, python) for python, role in found.items()]


def _further(checkup: Checkup, host: Host, code: Path, role: str, named: str) -> None:
    """Looks at the interpreter of one more role."""
    part = Checkup(checkup.host, (role,), checkup.device)
    checkup.further.append(part)
    python = _python(part, host, named)
    if python is not None:
        _numeric(part, host, code, python)
    checkup.problems += [f"for {role}: {problem}" for problem in part.problems]
    checkup.notes += [f"for {role}: {note}" for note in part.notes]


def _reach(checkup: Checkup, inventory: Inventory, host: Host) -> None:
    route = inventory.route(host.id)
    checkup.facts["pinned"] = {hop.name: bool(pinned_keys(hop)) for hop in route}
    checkup.facts["reachable"] = False
    started = time.monotonic()
    host.run(["true"], timeout=COMMAND_TIMEOUT)
    checkup.facts["reachable"] = True
    checkup.facts["seconds_a_command"] = round(time.monotonic() - started, 3)


def _setup(host: Host) -> str:
    """The command that makes the environment there."""
    return with_file(f"dflash hosts setup {host.id}", host.file if isinstance(host, SshHost) else None)


def _python(checkup: Checkup, host: Host, python: str) -> str | None:
    """The interpreter, when there is one and it is new enough."""
    checkup.facts["python"] = {"executable": python, "version": None}
    remedy = f"Make the environment with `{_setup(host)}`, or name an interpreter in `python`"
    try:
        done = host.run([python, "-c", "import sys; print(*sys.version_info[:3])"], timeout=START_TIMEOUT)
    except DflashError as error:
        checkup.problems.append(f"{error.what}. {remedy}")
        return None
    version = tuple(int(part) for part in done.stdout.split()) if done.status == 0 else ()
    if not version:
        checkup.problems.append(f"{python} is no working python: {done.last_line()}. {remedy}")
        return None
    checkup.facts["python"]["version"] = ".".join(map(str, version))
    if version < PYTHON:
        checkup.problems.append(f"{python} is python {checkup.facts['python']['version']}; 3.11 is needed. {remedy}")
        return None
    return python


def _machine(checkup: Checkup, host: Host, code: Path, python: str | None) -> None:
    argv = [python or "python3", "-m", "dflash.hosts.machine", "--workdir", str(host.workdir)]
    done = host.run(argv, timeout=START_TIMEOUT, environment={"PYTHONPATH": str(code)})
    facts = _json(done)
    if facts is None:
        checkup.problems.append(f"the machine could not be looked at: {done.last_line()}")
        return
    checkup.facts["machine"] = facts
    judge_machine(checkup, facts)


def judge_machine(checkup: Checkup, facts: Mapping[str, Any]) -> None:
    """Turns facts of `dflash.hosts.machine` into problems and notes."""
    disk, memory, shared, driver = facts["disk"], facts["memory"], facts["shared_memory"], facts["driver"]
    if disk["refused"]:
        checkup.problems.append(f"the workdir cannot be written ({disk['refused']})")
    if disk["free_bytes"] < LEAST_DISK:
        checkup.notes.append(f"only {size(disk['free_bytes'])} are free for the workdir")
    limit = memory["limit_bytes"]
    if limit is not None and limit < memory["total_bytes"] // 2:
        checkup.notes.append(
            f"a control group allows {size(limit)} of the machine's {size(memory['total_bytes'])} memory"
        )
    gpus = facts["gpus"]
    if checkup.device != "cpu":
        if not gpus:
            checkup.problems.append(f"device {checkup.device}, but nvidia-smi shows no GPU")
        if driver["kernel"] and driver["library"] and driver["kernel"] != driver["library"]:
            checkup.problems.append(
                f"the NVIDIA library is {driver['library']}, the kernel module {driver['kernel']}: CUDA needs both equal"
            )
        if len(gpus) > 1 and shared is not None and shared["total_bytes"] < LEAST_SHARED:
            checkup.problems.append(
                f"/dev/shm holds {size(shared['total_bytes'])}; several GPUs need {size(LEAST_SHARED)} for NCCL"
            )
    for gpu in gpus:
        if gpu["held_bytes"] and gpu["memory_bytes"] and gpu["held_bytes"] > gpu["memory_bytes"] // 50:
            who = ", ".join(f"{one['user']}: {one['program']} {one['pid']}" for one in gpu["holders"])
            checkup.notes.append(
                f"GPU {gpu['index']}: {size(gpu['held_bytes'])} are held by others ({who or 'unknown'})"
            )


def _clock(checkup: Checkup, host: Host, python: str) -> None:
    """How far the host's clock is from ours, from the quickest of a few questions over one connection."""
    best = (float("inf"), 0.0)
    argv = host.command([python, "-c", CLOCK])
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(5):
            asked = time.time()
            try:
                process.stdin.write(b"?\n")
                process.stdin.flush()
                answer = float(process.stdout.readline())
            except (OSError, ValueError):
                break
            told = time.time()
            best = min(best, ((told - asked) / 2, answer - (asked + told) / 2))
        process.stdin.close()
        process.stdout.read()
    if best[0] == float("inf"):
        checkup.problems.append("its clock could not be read")
        return
    checkup.facts["clock_uncertainty"], checkup.facts["clock_skew"] = (round(value, 4) for value in best)
    if abs(best[1]) > LARGEST_SKEW + best[0]:
        checkup.problems.append(f"its clock is {best[1]:+.0f} s off ours; set it (NTP)")


def _numeric(checkup: Checkup, host: Host, code: Path, python: str) -> None:
    argv = [python, "-m", "dflash", "doctor-facts", "--device", checkup.device]
    done = host.run(argv, timeout=TEST_TIMEOUT, environment={"PYTHONPATH": str(code)})
    facts = _json(done)
    if facts is None:
        checkup.problems.append(
            f"the kernels could not be tested with {python}: {done.last_line().removeprefix('dflash: ')}. "
            f"If something is missing there, `{_setup(host)}` installs it"
        )
        return
    checkup.facts["numeric"] = facts
    judge_kernels(checkup, facts)


def judge_kernels(checkup: Checkup, facts: Mapping[str, Any]) -> None:
    """Turns facts of `dflash.model.selftest` into problems and notes."""
    for one in facts["self_test"]:
        if not one["right"]:
            off = (
                f"it is off by {one['error']:.1e}" if one["error"] is not None else one["failure"] or "it is not finite"
            )
            checkup.problems.append(
                f"{one['function']} ({one['bound']}) is wrong: {off}; {one['tolerance']:.0e} is allowed"
            )
    if checkup.device != "cpu" and facts["kernels"]["linear"] != "fla":
        checkup.notes.append(
            f"linear attention runs on the torch reference ({facts['kernels']['linear']}), many times slower than fla; "
            "install flash-linear-attention and causal-conv1d"
        )
    if facts["peer_to_peer"]:
        pairs = ", ".join(f"{first}-{second}" for first, second in facts["peer_to_peer"])
        checkup.notes.append(f"no direct access between GPUs {pairs}: their traffic goes through the host's memory")


def _json(done: Finished) -> dict[str, Any] | None:
    """The JSON on the last line of what a command printed; None when it failed."""
    try:
        found = json.loads(done.stdout.splitlines()[-1]) if done.status == 0 else None
    except (ValueError, IndexError):
        return None
    return found if isinstance(found, dict) else None


def numeric_fields(checkup: Checkup) -> dict[str, str] | None:
    """What decides the numbers that a host's device gives; None when it is not known."""
    facts = checkup.facts.get("numeric")
    if facts is None:
        return None
    numerics: dict[str, str] = facts["numerics"]
    found = {name: value for name, value in numerics.items() if not WHERE_NUMBERS_DO_NOT_COME_FROM.match(name)}
    if checkup.device.startswith("cuda"):
        del found["cpu"]
        index = int(checkup.device.partition(":")[2] or 0)
        gpu = facts["gpus"][index] if index < len(facts["gpus"]) else {}
        found |= {f"gpu.{name}": str(gpu.get(name)) for name in ("name", "capability")}
    return found


def _computing(checkups: Sequence[Checkup]) -> dict[str, dict[str, str]]:
    """`numeric_fields` of all that computes, as far as they are known, by host; by `host (role)` of a further interpreter."""
    parts = [(one.host, one) for one in checkups]
    parts += [(f"{part.host} ({part.roles[0]})", part) for one in checkups for part in one.further]
    return {
        name: fields for name, part in parts if (fields := numeric_fields(part)) and set(part.roles) & set(COMPUTING)
    }


def differing_fields(checkups: Sequence[Checkup]) -> dict[str, dict[str, str | None]]:
    """Field -> host -> value of everything that decides numbers and is not the same on the hosts that compute."""
    computing = _computing(checkups)
    names = sorted({name for fields in computing.values() for name in fields})
    found = {name: {host: fields.get(name) for host, fields in computing.items()} for name in names}
    return {name: values for name, values in found.items() if len(set(values.values())) > 1}


def as_json(checkups: Sequence[Checkup]) -> str:
    """Everything, for programs."""
    document = {"hosts": {one.host: one.to_dict() for one in checkups}, "differ": differing_fields(checkups)}
    return json.dumps(document, indent=2, sort_keys=True)


def all_problems(checkups: Sequence[Checkup]) -> list[str]:
    """What wants something done, with the host it is about."""
    found = [_named(one.host, problem) for one in checkups for problem in one.problems]
    differ = differing_fields(checkups)
    if differ:
        found.append(f"the hosts do not compute the same hidden states; they differ in {', '.join(differ)}")
    return found


def _named(host: str, problem: str) -> str:
    return problem if problem.startswith(f"{host}:") else f"{host}: {problem}"


def render(checkups: Sequence[Checkup]) -> str:
    """Everything, for people."""
    lines: list[str] = []
    for one in checkups:
        lines += [*([""] if lines else []), f"{one.host}" + (f" ({', '.join(one.roles)})" if one.roles else "")]
        lines += [f"  {name:<15} {value}" for name, value in _rows(one)]
    differ = differing_fields(checkups)
    for name, values in differ.items():
        lines.append("")
        lines.append(f"differs: {name}")
        lines += [f"  {host:<15} {value or 'absent'}" for host, value in values.items()]
    computing = _computing(checkups)
    if len(computing) > 1 and not differ:
        lines += ["", f"{' and '.join(computing)} would compute the same hidden states"]
    return "\n".join(lines)


def _rows(checkup: Checkup) -> list[tuple[str, str]]:
    facts = checkup.facts
    rows = [("reachable", f"yes, {facts['seconds_a_command']:.2f} s a command" if facts.get("reachable") else "no")]
    if facts.get("pinned"):
        rows.append(
            (
                "host keys",
                ", ".join(f"{hop} {'pinned' if yes else 'NOT pinned'}" for hop, yes in facts["pinned"].items()),
            )
        )
    if "clock_skew" in facts:
        rows.append(("clock", f"{facts['clock_skew']:+.3f} s off ours, ± {facts['clock_uncertainty']:.3f}"))
    if "python" in facts:
        rows.append(("python", f"{facts['python']['version'] or 'none'} ({facts['python']['executable']})"))
    if "machine" in facts:
        rows += _machine_rows(facts["machine"])
    if "numeric" in facts:
        rows += _numeric_rows(facts["numeric"], checkup.device)
    for part in checkup.further:
        python = part.facts["python"]
        rows.append((f"for {part.roles[0]}", f"python {python['version'] or 'none'} ({python['executable']})"))
        rows += _numeric_rows(part.facts["numeric"], part.device) if "numeric" in part.facts else []
    return rows + [("note", note) for note in checkup.notes] + [("PROBLEM", problem) for problem in checkup.problems]


def _machine_rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    memory, shared, disk, driver = facts["memory"], facts["shared_memory"], facts["disk"], facts["driver"]
    limit = f", limited to {size(memory['limit_bytes'])}" if memory["limit_bytes"] is not None else ""
    rows = [
        (
            "memory",
            f"{size(memory['available_bytes'])} of {size(memory['total_bytes'])} available{limit}; {facts['cores']} cores",
        ),
        ("disk", f"{size(disk['free_bytes'])} of {size(disk['total_bytes'])} free"),
        ("/dev/shm", f"{size(shared['free_bytes'])} of {size(shared['total_bytes'])} free" if shared else "absent"),
    ]
    if driver["kernel"] or driver["library"]:
        rows.append(
            ("driver", f"kernel module {driver['kernel'] or 'unknown'}, library {driver['library'] or 'absent'}")
        )
    for gpu in facts["gpus"]:
        rows.append(
            (f"GPU {gpu['index']}", f"{gpu['name']}, {size(gpu['memory_bytes'])}, {size(gpu['held_bytes'])} held")
        )
    return rows


def _numeric_rows(facts: Mapping[str, Any], device: str) -> list[tuple[str, str]]:
    torch = facts["torch"]
    versions = {name: value for name, value in facts["numerics"].items() if name.startswith("distributions.")}
    told = ", ".join(f"{name.partition('.')[2]} {value}" for name, value in versions.items() if "nvidia" not in name)
    rows = [
        ("device", device),
        ("torch", f"{torch['version']}, CUDA {torch['cuda'] or 'none'}, cuDNN {torch['cudnn'] or 'none'}"),
        ("packages", told),
        ("attention", facts["kernels"]["attention"]),
    ]
    if len(facts["gpus"]) > 1:
        pairs = ", ".join(f"{first}-{second}" for first, second in facts["peer_to_peer"])
        rows.append(("peer to peer", f"not between GPUs {pairs}" if pairs else "between all GPUs"))
    for one in facts["self_test"]:
        error = f"off by {one['error']:.1e}" if one["error"] is not None else one["failure"] or "not finite"
        rows.append(("kernel", f"{one['function']} = {one['bound']}: {'right' if one['right'] else 'WRONG'}, {error}"))
    return rows


def size(number: int | None) -> str:
    """Bytes for people: `143.8 GB`."""
    if number is None:
        return "unknown"
    value = float(number)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
