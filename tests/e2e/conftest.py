"""Real Snakemake on `config/micro.yaml`: one finished run a session, copied for every scenario.

A scenario counts reruns by receipts: which receipts are new or other files than before, and how many attempts a training
has had. Logs are never asked.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from sshd import Sshd, why_not

from dflash.base.files import locked
from dflash.hosts.lease import holder
from dflash.plan.code import source_root

SECRETS = {
    "HF_TOKEN": "hf_SecretSecretSecretSecretSecret01",
    "WANDB_API_KEY": "5ec2e75ec2e75ec2e75ec2e75ec2e75ec2e75ec2",
    "AWS_SECRET_ACCESS_KEY": "SecretSecret/SecretSecret+SecretSecret02",
    "GITHUB_TOKEN": "ghp_SecretSecretSecretSecretSecret03",
    "OPENAI_API_KEY": "sk-proj-SecretSecretSecretSecret04",
    "SSH_PASSPHRASE": "correct horse battery staple 05",
    "PIP_INDEX_URL": "https://someone:SecretSecret06@packages.example.org/simple",
    "TRITON_CACHE_DIR": "/tmp/cache?token=SecretSecretSecretSecretSecret07",
}
"""What a careless environment holds: every command of these tests runs in it, and no file may."""
PATIENCE = float(os.environ.get("DFLASH_TEST_PATIENCE", "1"))
"""What every limit of time is multiplied by, for a machine that has other things to do."""
CODE = ("dflash", "workflow", "profiles", "Snakefile", "requirements.lock")


@dataclass
class Workspace:
    """A working directory with a config, and the code that works on it (the tree's own, or an edited copy)."""

    folder: Path
    cache: Path
    code: Path = field(default_factory=source_root)
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def results(self) -> Path:
        return self.folder / "results"

    def write_config(self, **sections: Any) -> None:
        """Merges sections into the config file (one level deep, as a user would edit it)."""
        for name, value in sections.items():
            old = self.config.get(name)
            self.config[name] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
        (self.folder / "config/config.yaml").write_text(yaml.safe_dump(self.config, sort_keys=False))

    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("DFLASH_", "PYTHONPATH"))}
        return {
            **kept,
            **SECRETS,
            "PYTHONPATH": str(self.code),
            "XDG_CACHE_HOME": str(self.cache),
            "DFLASH_LEASES": str(self.cache / "leases"),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def call(self, *arguments: str, expect: int | None = 0, timeout: float = 600) -> subprocess.CompletedProcess[str]:
        """`dflash ...`; fails the test with all output when the exit code is not the expected one."""
        return self._run([sys.executable, "-m", "dflash", *arguments], expect, timeout)

    def snakemake(self, *arguments: str, expect: int | None = 0) -> subprocess.CompletedProcess[str]:
        """Plain `snakemake`, with the profile that loads by itself in a clone."""
        profile = ["--workflow-profile", str(self.code / "profiles/default")]
        command = [sys.executable, "-m", "snakemake", "-s", str(self.code / "Snakefile"), *profile, *arguments]
        return self._run(command, expect, 600)

    def _run(self, command: list[str], expect: int | None, timeout: float) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=timeout * PATIENCE,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        if expect is not None and done.returncode != expect:
            pytest.fail(f"{command[2:]} ended with {done.returncode}\n--- out\n{done.stdout}\n--- err\n{done.stderr}")
        return done

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """`dflash ...` in the background, in a process group of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "dflash", *arguments],
            cwd=self.folder,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            process_group=0,
        )

    def receipts(self) -> dict[str, tuple[int, str]]:
        """Every receipt: path -> (inode, time it was finished)."""
        found = {}
        patterns = ("store/*/*/receipt.json", "store/train/*/receipts/step_*.json", "store/evaluate/*/step_*.json")
        for pattern in (*patterns, "runs/*/*/receipt.json"):
            for path in self.results.glob(pattern):
                if not path.parent.is_symlink():
                    document = json.loads(path.read_text())
                    found[str(path.relative_to(self.results))] = (path.stat().st_ino, document["finished"])
        return found

    def reruns(self, *arguments: str) -> list[str]:
        """Runs `dflash run` and says which receipts it made, as `stage` or `stage:step`, sorted."""
        before = self.receipts()
        self.call("run", *arguments)
        return self.made_since(before)

    def made_since(self, before: dict[str, tuple[int, str]]) -> list[str]:
        made = []
        for path, identity in self.receipts().items():
            if before.get(path) != identity:
                parts = path.split("/")
                stage = "report" if parts[0] == "runs" else parts[1]
                step = Path(path).stem.removeprefix("step_")
                made.append(f"{stage}:{step}" if step.isdigit() else stage)
        return sorted(made)

    def attempts(self) -> int:
        """Starts of trainers, over all trainings."""
        return len(list(self.results.glob("store/train/*/attempts/*.json")))

    def train_directory(self) -> Path:
        (found,) = self.results.glob("store/train/*")
        return found

    def node(self, name: str) -> dict[str, Any]:
        """What `dflash plan --json` says of a node."""
        document = json.loads(self.call("plan", "--json", expect=None).stdout)
        (found,) = [node for node in document["nodes"] if node["name"] == name]
        return found

    def edited_code(self, file: str, old: str, new: str) -> None:
        """Goes on with a copy of the code in which one thing is changed."""
        if self.code == source_root():
            self.code = self.folder / "code"
            self.code.mkdir()
            for name in CODE:
                source = source_root() / name
                shutil.copytree(source, self.code / name) if source.is_dir() else shutil.copy2(source, self.code / name)
        path = self.code / file
        text = path.read_text()
        assert old in text, f"{file} no longer contains {old!r}"
        path.write_text(text.replace(old, new, 1))

    def kill_trainers(self) -> None:
        for lease in self.results.glob("store/train/*/lease.json"):
            record = holder(lease)
            if record is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(record.pid, signal.SIGKILL)


def make_workspace(folder: Path, cache: Path) -> Workspace:
    (folder / "config").mkdir(parents=True)
    shutil.copytree(source_root() / "config/micro", folder / "config/micro")
    space = Workspace(folder, cache)
    space.config = yaml.safe_load((source_root() / "config/micro.yaml").read_text())
    space.write_config()
    return space


def wait_until(condition: Any, seconds: float = 90, what: str = "") -> Any:
    """Polls until `condition()` is true; fails the test after `seconds`."""
    deadline = time.monotonic() + seconds * PATIENCE
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.05)
    pytest.fail(f"not within {seconds} s: {what}")


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Workspace:
    """The micro run, finished once, by whichever worker of the session comes first; scenarios work on copies."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent / "finished" if "PYTEST_XDIST_WORKER" in os.environ else base / "finished"
    shared.mkdir(exist_ok=True)
    with locked(shared / "lock"):
        if not (shared / "ready").exists():
            shutil.rmtree(shared / "work", ignore_errors=True)
            make_workspace(shared / "work", cache).call("run")
            (shared / "ready").touch()
    return Workspace(shared / "work", cache, config=yaml.safe_load((shared / "work/config/config.yaml").read_text()))


def copy_upstream(source: Workspace, space: Workspace) -> None:
    """Lets everything before training stand in a workspace."""
    for stage in ("prompts", "completions", "dataset", "buckets", "references", "environments"):
        shutil.copytree(source.results / "store" / stage, space.results / "store" / stage)


@pytest.fixture
def begun(fresh: Workspace, finished_run: Workspace) -> Workspace:
    """A workspace in which everything before training stands, and no training."""
    copy_upstream(finished_run, fresh)
    return fresh


@pytest.fixture
def fresh(tmp_path: Path, cache: Path) -> Iterator[Workspace]:
    """A workspace in which nothing has run."""
    space = make_workspace(tmp_path / "work", cache)
    yield space
    space.kill_trainers()


@pytest.fixture
def finished(tmp_path: Path, finished_run: Workspace) -> Iterator[Workspace]:
    """A copy of the finished run (modification times kept)."""
    folder = tmp_path / "work"
    shutil.copytree(finished_run.folder, folder, symlinks=True)
    space = Workspace(folder, finished_run.cache, config=yaml.safe_load((folder / "config/config.yaml").read_text()))
    yield space
    space.kill_trainers()


@pytest.fixture(scope="session")
def servers(
    tmp_path_factory: pytest.TempPathFactory, cache: Path, require_or_skip: Callable[[str, str], None]
) -> Iterator[dict[str, Sshd]]:
    """Three real sshd on loopback that play `trainbox`, `judge` and `spare`."""
    from spread import start_servers

    if reason := why_not():
        require_or_skip("sshd", reason)
    found = start_servers(tmp_path_factory.mktemp("sshd"), cache)
    yield found
    for server in found.values():
        server.stop()
