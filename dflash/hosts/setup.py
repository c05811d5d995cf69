"""`dflash hosts setup H`: this checkout's code and the environment of its lock on a host, from nothing but a python there.

Runs `dflash/hosts/install.py` there and passes on what it says. Costs minutes the first time (pip installs some GB there), a
second when everything is there.
"""

from __future__ import annotations

import itertools
from collections import deque
from pathlib import Path

from dflash.base.errors import PermanentError
from dflash.base.progress import Progress
from dflash.hosts.code import send_code
from dflash.hosts.environment_path import LOCK, environment_folder, environment_python, lock_file
from dflash.hosts.host import Host, NoProgram, named_python

NEEDED = (3, 11)
COMMAND_TIMEOUT = 60.0
SHOWN = ("the environment", "an environment", "somebody else", "python ", "pip install ", "ERROR")
"""How lines begin that a person wants to see; pip says much more."""
PROBE = "import sys, venv, ensurepip; print(*sys.version_info[:3])"


def set_up(host: Host, *, first: str = "", also: str = "", python: str = "", lock: Path | None = None) -> Path:
    """Makes the environment of the lock in the host's workdir, unless it is there; returns its interpreter.

    Args:
        first: what pip installs before the lock, for instance a CPU build: `torch==2.13.0 --index-url URL`.
        also: what pip installs after it, for instance `flash-linear-attention`; the lock's versions stay.
        python: the interpreter there to make it with; the hosts file's, else `python3`.
        lock: on this machine; this checkout's when left out.

    Raises:
        PermanentError: no python there that will do, or pip failed; ends with what it said. TransientError: the connection
            failed.
    """
    base = python or named_python(host.entry, "gpu") or "python3"
    require_python(host, base)
    progress = Progress(f"setup: {host.id}")
    progress.say("sending the code")
    code = send_code(host)
    lock_there = code / LOCK
    if lock is not None:
        lock_there = host.workdir / "env" / lock.name
        host.put(lock_there, lock.read_bytes())
    folder = environment_folder(host.workdir)
    argv = [base, str(code / "dflash" / "hosts" / "install.py"), "--folder", str(folder), "--lock", str(lock_there)]
    last: deque[str] = deque(maxlen=8)
    packages = sum(line[:1].isalnum() for line in (lock or lock_file()).read_text().splitlines())
    found = itertools.count(1)

    def tell(line: str) -> None:
        last.append(line)
        if line.startswith(("Collecting ", "Processing ")):
            progress.update(min(next(found), packages), packages, "packages found")
        elif line.startswith("Installing collected"):
            progress.say("installing them")
        elif line.startswith(SHOWN):
            progress.say(line)

    done = host.follow([*argv, f"--first={first}", f"--also={also}"], tell)
    if done.status:
        said = next((line for line in reversed(last) if line.startswith("ERROR:")), "") or done.last_line()
        raise PermanentError(
            f"the environment could not be made: {said}",
            where=f"{host.id}:{folder}",
            remedy="Run it again when that is mended; it goes on from nothing.",
        )
    return environment_python(host.workdir)


def require_python(host: Host, python: str) -> None:
    """Checks that an interpreter there can make an environment.

    Raises:
        PermanentError: it is missing, too old, or has no venv module; or the host refuses us. TransientError: the connection
            failed.
    """
    remedy = "Install python 3.11 or later there (Debian: python3 and python3-venv), or name one with --python."
    try:
        done = host.run([python, "-c", PROBE], timeout=COMMAND_TIMEOUT)
    except NoProgram as error:
        if error.program != python:  # what every command begins with there
            raise
        raise PermanentError(error.what, where=host.id, remedy=remedy) from error
    if done.status:
        raise PermanentError(f"{python} will not do: {done.last_line()}", where=host.id, remedy=remedy)
    version = tuple(int(part) for part in done.stdout.split())
    if version < NEEDED:
        raise PermanentError(f"{python} is python {'.'.join(map(str, version))}", where=host.id, remedy=remedy)
