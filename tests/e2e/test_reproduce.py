"""`dflash reproduce`: a run made again by its own code, from a clone that has moved on, equal tensor by tensor; or why not."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from conftest import CODE, Workspace, make_workspace  # type: ignore[import-not-found]

from dflash.plan.code import source_root


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=tester", "-c", "user.email=tester@example.org"]
    done = subprocess.run(["git", "-C", str(folder), *identity, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Workspace:
    """A clone with a finished micro run, in which a later commit has changed how trees are built."""
    folder = tmp_path_factory.mktemp("clone") / "work"
    space = make_workspace(folder, cache)
    for name in CODE:
        source = source_root() / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, folder / name)
    space.code = folder
    space.write_config(train={"checkpoint_every": 2})
    (folder / ".gitignore").write_text("results/\n.snakemake/\n__pycache__/\n")
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "first")
    space.call("run")
    tree = folder / "dflash/evaluate/tree.py"
    tree.write_text(tree.read_text() + "\nLATER = 1\n")
    config = yaml.safe_load((folder / "config/config.yaml").read_text())
    config["train"]["lr"] = 5e-3
    (folder / "config/config.yaml").write_text(yaml.safe_dump(config))
    git(folder, "commit", "-qam", "later")
    return space


@pytest.fixture
def moved(clone: Workspace) -> Iterator[Workspace]:
    yield clone
    clone.kill_trainers()


pytestmark = pytest.mark.timeout(900)


def manifest_of(space: Workspace) -> Path:
    return space.results / "runs/micro/latest/manifest.json"


def edited(space: Workspace, tmp_path: Path, **changes: object) -> Path:
    """A copy of the manifest with other values, beside the store so that it is found."""
    document = json.loads(manifest_of(space).read_text())
    folder = space.results / "runs/micro" / f"edited-{tmp_path.name}"
    folder.mkdir(exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps(document | changes))
    return folder / "manifest.json"


def test_the_recorded_code_and_config_give_the_same_bits_at_a_later_commit(moved: Workspace) -> None:
    recorded = json.loads(manifest_of(moved).read_text())
    assert recorded["git"]["commit"] != git(moved.folder, "rev-parse", "HEAD")
    done = moved.call("reproduce", str(manifest_of(moved)), "--check", timeout=600)
    assert f"code {recorded['git']['commit'][:12]}" in done.stdout
    count = len(recorded["tensors"])
    assert f"step 6: {count} of {count} tensors equal" in done.stdout
    for name in ("completions/short", "dataset", "buckets", "references/torch", "evaluate"):
        (line,) = [line for line in done.stdout.splitlines() if line.startswith(f"  {name} ")]
        assert re.search("outputs? equal", line)
    assert done.stdout.splitlines()[-1].startswith("reproduced: ")


def test_one_segment_of_the_training_alone_is_equal_too(moved: Workspace) -> None:
    done = moved.call("reproduce", str(manifest_of(moved)), "--check", "--steps", "4:6")
    assert "step 6" in done.stdout
    assert "tensors equal" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("reproduced: ")


def test_a_segment_whose_state_is_gone_names_the_states_that_are_kept(moved: Workspace) -> None:
    done = moved.call("reproduce", str(manifest_of(moved)), "--check", "--steps", "2:6", expect=2)
    assert "the state of step 2 is not kept" in done.stderr
    assert "States are kept of 4, 6" in done.stderr


def test_a_digest_that_is_not_the_recorded_one_fails_and_names_the_tensor(moved: Workspace, tmp_path: Path) -> None:
    document = json.loads(manifest_of(moved).read_text())
    document["tensors"][0]["sha256"] = "0" * 64
    path = edited(moved, tmp_path, tensors=document["tensors"])
    done = moved.call("reproduce", str(path), "--check", "--steps", "4:6", expect=1)
    assert f"tensors {document['tensors'][0]['name']} differ" in done.stderr


def test_the_kept_code_stands_in_for_a_commit_that_is_missing(moved: Workspace, tmp_path: Path) -> None:
    document = json.loads(manifest_of(moved).read_text())
    assert (moved.results / f"code/{document['code'][:16]}.tar.gz").is_file()
    path = edited(moved, tmp_path, git=document["git"] | {"commit": "0" * 40})
    done = moved.call("reproduce", str(path), "--check", "--steps", "4:6")
    assert f"kept as {document['code'][:16]}; commit {'0' * 12} is in no clone here" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("reproduced: ")


def test_kept_code_that_is_damaged_gives_way_to_git_and_is_named(moved: Workspace, tmp_path: Path) -> None:
    document = json.loads(manifest_of(moved).read_text())
    kept = moved.results / f"code/{document['code'][:16]}.tar.gz"
    whole = kept.read_bytes()
    kept.write_bytes(whole[: len(whole) // 2])
    try:
        done = moved.call("reproduce", str(manifest_of(moved)), "--check", "--steps", "4:6")
    finally:
        kept.write_bytes(whole)
    assert f"code {document['git']['commit'][:12]} from" in done.stdout
    assert f"{kept.name}: the kept code cannot be read" in done.stdout


@pytest.mark.parametrize("code", ["", "f" * 64])
def test_a_commit_that_is_missing_is_said_with_exit_one(moved: Workspace, tmp_path: Path, code: str) -> None:
    document = json.loads(manifest_of(moved).read_text())
    path = edited(moved, tmp_path, git=document["git"] | {"commit": "0" * 40}, code=code)
    done = moved.call("reproduce", str(path), "--check", expect=1)
    assert f"the recorded commit {'0' * 40} is not in" in done.stderr
    assert "Traceback" not in done.stderr


def test_another_package_version_is_refused_by_name_with_the_class_and_a_lock(moved: Workspace, tmp_path: Path) -> None:
    document = json.loads(manifest_of(moved).read_text())
    for environment in document["environments"].values():
        environment["distributions"]["torch"] = "2.11.0"
    path = edited(moved, tmp_path, environments=document["environments"])
    done = moved.call("reproduce", str(path), "--check", expect=1)
    assert "torch 2.11.0 -> 2." in done.stderr
    assert "the class here is tolerance, not bitwise" in done.stderr
    moved.call("reproduce", str(path), "--lock", str(tmp_path / "lock.txt"))
    assert "torch==2.11.0" in (tmp_path / "lock.txt").read_text()
    done = moved.call("reproduce", str(path), "--check", "--steps", "4:6", "--tolerance")
    assert "class tolerance" in done.stdout


def test_uncommitted_changes_are_kept_and_put_on_top(clone: Workspace, tmp_path: Path) -> None:
    document = json.loads(manifest_of(clone).read_text())
    diff = "--- a/Snakefile\n+++ b/Snakefile\n@@ -1 +1,2 @@\n+# changed\n"
    first = (clone.folder / "Snakefile").read_text().splitlines()[0]
    git_facts = document["git"] | {"dirty": True, "changed": ["Snakefile"], "diff": f"{diff} {first}\n"}
    path = edited(clone, tmp_path, git=git_facts)
    script = (
        "import sys; from pathlib import Path; from dflash.report.reproduce import *;"
        "m = read_manifest(Path(sys.argv[1])); take_code(m, Path(sys.argv[2]), Path(sys.argv[3]))"
    )
    words = [sys.executable, "-c", script, str(path), str(clone.folder), str(tmp_path / "code")]
    subprocess.run(words, check=True, env=clone.environment())
    assert (tmp_path / "code/Snakefile").read_text().startswith("# changed\n")
    lost = edited(clone, tmp_path, git=git_facts | {"diff": ""}, code="")
    done = clone.call("reproduce", str(lost), "--check", expect=1)
    assert "uncommitted changes of Snakefile, which its manifest does not hold" in done.stderr
