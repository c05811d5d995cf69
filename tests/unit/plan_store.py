"""Plans of `config/micro.yaml` in a folder of their own, and results that only look made: for tests of what planning says."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import yaml

from dflash.base.files import sha256_file
from dflash.base.records import OutputFile, Receipt
from dflash.plan.code import source_root
from dflash.plan.config import load_config
from dflash.plan.graph import Node, Plan, build_plan


def make_folder(folder: Path) -> Path:
    """The prompts of the micro run; the caller makes it the working directory."""
    shutil.copytree(source_root() / "config/micro", folder / "config/micro")
    return folder


def plan_of(**changes: Any) -> Plan:
    """The plan of the micro run with some values of some sections changed."""
    config = yaml.safe_load((source_root() / "config/micro.yaml").read_text())
    for section, values in changes.items():
        old = config.get(section)
        config[section] = {**old, **values} if isinstance(old, dict) else values
    Path("config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    return build_plan(load_config([Path("config.yaml")]))


def stand(node: Node, content: str = "made") -> Path:
    """Puts params, an output and a receipt where the node's result belongs; returns the output."""
    node.params.write(node.directory / "params.json")
    output = node.directory / "output.txt"
    output.write_text(content)
    Receipt(
        stage=node.stage.name,
        key=node.key,
        outputs=[OutputFile(path=output.name, size=len(content), sha256=sha256_file(output))],
        inputs={name: Receipt.read(item.receipt()).content_digest() for name, item in node.inputs.items()},
        host="local",
        started="",
        finished="",
        attempt=1,
        environment="",
    ).write(node.receipt())
    return output


def same_size_and_time(path: Path, content: str) -> None:
    """Damage that only reading the bytes can find: size, inode and modification time stay."""
    before = path.stat()
    assert len(content) == before.st_size
    with path.open("r+") as stream:
        stream.write(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
