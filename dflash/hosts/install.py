"""Makes an environment on the machine that it runs on: a venv with the packages of a lock. What `dflash hosts setup` runs there.

    python3 install.py --folder DIR --lock FILE [--first WORDS] [--also WORDS]

Needs python 3.11's standard library only. The folder holds a finished environment when `ready.json` stands in it and says the
same; that file is written last. Two installers of one folder take turns (flock on a file beside it). Costs minutes and some GB,
once a lock.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import shlex
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

READY = "ready.json"


def main() -> int:
    """Installs; returns the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--lock", type=Path, required=True)
    parser.add_argument("--first", default="")
    parser.add_argument("--also", default="")
    given = parser.parse_args()
    wanted = {
        "lock": hashlib.sha256(given.lock.read_bytes()).hexdigest(),
        "first": given.first,
        "also": given.also,
        "python": ".".join(map(str, sys.version_info[:3])),
    }
    with turn(given.folder):
        if ready(given.folder) == wanted:
            print(f"the environment is there already: {given.folder}", flush=True)
            return 0
        if given.folder.exists():
            print("an environment that is unfinished or other is made anew", flush=True)
            shutil.rmtree(given.folder)
        status = install(given.folder, given.lock, given.first, given.also)
        if status == 0:
            (given.folder / f".{READY}").write_text(json.dumps(wanted, indent=2, sort_keys=True) + "\n")
            (given.folder / f".{READY}").replace(given.folder / READY)
            print(f"the environment is ready: {given.folder}", flush=True)
        return status


@contextlib.contextmanager
def turn(folder: Path) -> Iterator[None]:
    """Waits for another installer of the same folder to end."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("somebody else is making this environment; waiting", flush=True)
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def ready(folder: Path) -> dict[str, Any] | None:
    """What a finished environment was made of; None when there is none."""
    try:
        found = json.loads((folder / READY).read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and (folder / "bin" / "python").exists() else None


def install(folder: Path, lock: Path, first: str, also: str) -> int:
    """Makes the venv and installs, in three steps; returns the status of the first that fails."""
    print(f"python {sys.version.split()[0]}: making {folder}", flush=True)
    venv.create(folder, with_pip=True, symlinks=True)
    steps = [shlex.split(first)] if first else []
    steps.append(["--requirement", str(lock)])
    if also:
        steps.append([*shlex.split(also), "--constraint", str(lock)])
    for step in steps:
        print(f"pip install {shlex.join(step)}", flush=True)
        argv = [str(folder / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
        argv += ["--progress-bar", "off", *step]
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, check=False)
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
