"""Every command of the README runs, in its order, on a run called `demo` (the micro config, so that it takes seconds)."""

from __future__ import annotations

import re
import shlex
import shutil

import pytest
import torch
import yaml
from conftest import Workspace  # type: ignore[import-not-found]

from dflash.plan.code import source_root

README = (source_root() / "README.md").read_text()
EXPECTED = {
    # an example of a decision: nothing waits for one here, and the answer says so
    'dflash adopt train OLD_KEY --why "only a log message changed"': 2,
    # there is no such host here
    "dflash gc --host gpu-box --delete": 2,
}
"""Commands that do not end with 0 when nothing is stale, with the code they end with."""


def commands() -> list[str]:
    """The indented lines that a reader would type, without prompt and remark."""
    found = []
    for line in README.splitlines():
        match = re.match(r"    (?:\$ )?((?:dflash|make|cp|snakemake) .*?|dflash)(?:\s{2,}#.*|\s+#.*)?$", line)
        if match and not line.startswith("    dflash/"):
            found.append(match[1].rstrip())
    return found


def test_the_readme_shows_commands() -> None:
    assert len(commands()) >= 10
    assert {"make run", "make test", "dflash run", "dflash run -n"} <= set(commands())


@pytest.mark.parametrize(
    "target", sorted({word.split()[1] for word in commands() if word.startswith("make ")} | {"bench"})
)
def test_make_has_the_targets_that_the_readme_names(target: str) -> None:
    assert re.search(rf"^{target}:", (source_root() / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.timeout(1200)
def test_every_command_of_the_readme_runs(finished: Workspace) -> None:
    finished.write_config(run="demo")
    mine = {**finished.config, "run": "mine", "train": {**finished.config["train"], "lr": 2e-3}}
    (finished.folder / "my.yaml").write_text(yaml.safe_dump(mine))
    key = finished.node("train")["key"]
    elsewhere = finished.folder / "elsewhere"
    elsewhere.mkdir()
    torch.save({"model": {"fc.weight": torch.ones(2)}, "args": {"lr": 6e-4}}, elsewhere / "old.pt")
    (elsewhere / "launch.txt").write_text("torchrun train.py --token-budget 65536")
    for command in commands():
        if command.startswith("make "):
            continue
        typed = command.replace("train/KEY", f"train/{key}").replace("OLD_KEY", key).replace("step_300", "step_6")
        typed = typed.replace("250:300", "4:6")
        words = [word.replace("/tmp", str(finished.folder / "elsewhere")) for word in shlex.split(typed)]
        if words[0] == "cp":
            shutil.copy(finished.folder / words[1], words[2])
        elif words[0] == "snakemake":
            finished.snakemake(*words[1:])
        else:
            finished.call(*words[1:], expect=EXPECTED.get(command, 0))


def test_commands_named_in_passing_exist(finished: Workspace) -> None:
    named = set(re.findall(r"`dflash ([a-z-]+)", README))
    listed = finished.call("--help").stdout
    assert {name for name in named if name not in listed} == set()
