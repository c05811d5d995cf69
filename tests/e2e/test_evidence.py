"""What real runs leave behind: no secret, an explanation of every difference, adoptions that stay visible."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from conftest import SECRETS, Workspace, make_workspace  # type: ignore[import-not-found]

from dflash.model.target_params import Kernels
from dflash.plan.code import source_root

pytestmark = pytest.mark.timeout(900)

CU128 = {"version": "2.12.1+cu128", "cuda": "12.8", "cudnn": 91002, "driver": "570.86.15"}
CU130 = {"version": "2.12.1+cu130", "cuda": "13.0", "cudnn": 91300, "driver": "580.65.06"}


def test_an_environment_full_of_tokens_leaves_none_in_any_written_file(finished_run: Workspace) -> None:
    secrets = {part for value in SECRETS.values() for part in (value, value.rpartition("=")[2])}
    secrets |= {"SecretSecret", "correct horse", "5ec2e75ec2e7"}
    seen = 0
    for path in finished_run.folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes()
            seen += 1
            assert [secret for secret in secrets if secret.encode() in content] == [], path
    assert seen > 60
    allowed = [
        json.loads(path.read_text())["variables"] for path in finished_run.results.glob("store/environments/*.json")
    ]
    assert any("TRITON_CACHE_DIR" in item for item in allowed), "an allowed variable is kept, its secret masked"


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[tuple[Workspace, Path, Path]]:
    """Two runs on the demo's target: the second has more data, another token budget and another kernel form in evaluation."""
    space = make_workspace(tmp_path_factory.mktemp("story") / "work", cache)
    demo = source_root() / "config/demo"
    space.config["target"] = {"path": str(demo / "target")}
    space.write_config(run="first", train={"schedule_steps": 4, "checkpoint_every": 4})
    space.call("run", timeout=600)
    more = space.folder / "config/micro/more.jsonl"
    more.write_text("".join((demo / "prompts/records.jsonl").read_text().splitlines(keepends=True)[:9]))
    space.write_config(
        run="second",
        prompts=[*space.config["prompts"], {"name": "more", "path": "config/micro/more.jsonl"}],
        batching={"token_budget": 384},
    )
    if "torch_recurrent" in get_args(Kernels):
        space.write_config(evaluate={"kernels": ["torch_recurrent"]})
    space.call("run", timeout=600)
    runs = space.results / "runs"
    yield space, runs / "first/latest/manifest.json", runs / "second/latest/manifest.json"
    space.kill_trainers()


def placed_on(manifest: Path, build: dict[str, Any], *, convolution: bool, recurrent: bool = False) -> Path:
    """A copy of a run in which every environment is that of a GPU machine with this build of torch."""
    results = manifest.resolve().parents[3]
    copy = results.parent / f"results-{build['cuda']}"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(results, copy, symlinks=True)

    def place(environment: dict[str, Any]) -> None:
        environment["torch"] = {**environment["torch"], **build}
        packages = environment["distributions"] | {"torch": build["version"]}
        packages.pop("causal-conv1d", None)
        environment["distributions"] = packages | ({"causal-conv1d": "1.6.0"} if convolution else {})
        target = environment["kernels"].get("target")
        if recurrent and target and target["linear"] == "torch":
            target["form"] = "recurrent"

    path = copy / manifest.relative_to(results) if manifest.is_relative_to(results) else copy / "missing"
    document = json.loads(path.read_text())
    for environment in document["environments"].values():
        place(environment)
    path.write_text(json.dumps(document))
    for checkpoint in copy.glob("store/train/*/step_*/manifest.json"):
        inner = json.loads(checkpoint.read_text())
        place(inner["environment"])
        checkpoint.write_text(json.dumps(inner))
    return path


def test_compare_names_kernel_path_and_torch_build_first_then_token_budget_then_the_dataset(
    story: tuple[Workspace, Path, Path],
) -> None:
    space = story[0]
    first = placed_on(story[1], CU128, convolution=True)
    second = placed_on(story[2], CU130, convolution=False, recurrent="torch_recurrent" not in get_args(Kernels))
    document = json.loads(space.call("compare", str(first), str(second), "--json").stdout)
    rules = [item["rule"] for item in document["findings"]]
    assert rules[:4] == ["kernels", "torch build", "batching", "dataset"]
    kernels, build, batching, dataset = (item["words"] for item in document["findings"][:4])
    assert "evaluation ran on torch (chunked) in A and on torch (recurrent) in B" in kernels
    assert "causal-conv1d is absent in B" in kernels
    assert "torch cuda 12.8 -> 13.0" in build
    assert "token_budget 256 -> 384" in batching
    assert "sources added: more" in dataset
    assert "mean length " in dataset
    assert "samples" in dataset
    (detail,) = [item for item in document["findings"][2]["details"] if item["name"] == "token_budget"]
    assert "config/config.yaml:" in detail["origin"]
    text = " ".join(space.call("compare", str(first), str(second)).stdout.partition("What differs")[2].split())
    places = [
        text.index(words)
        for words in ("1. ", "causal-conv1d", "torch cuda 12.8 -> 13.0", "token_budget", "mean length")
    ]
    assert places == sorted(places)


def test_the_manifest_alone_copied_elsewhere_tells_the_same_causes(
    story: tuple[Workspace, Path, Path], tmp_path: Path
) -> None:
    alone = [Path(shutil.copy(path, tmp_path / f"{name}.json")) for name, path in zip("ab", story[1:], strict=True)]
    document = json.loads(story[0].call("compare", str(alone[0]), str(alone[1]), "--json").stdout)
    rules = [item["rule"] for item in document["findings"]]
    assert rules.index("batching") < rules.index("dataset")
    assert any("metrics.jsonl is out of reach" in text for text in document["a"]["unknown"])


def test_an_adopted_training_is_told_by_plan_manifest_inspect_and_report(finished: Workspace) -> None:
    old = finished.node("train")["key"]
    finished.edited_code(
        "dflash/train/objective.py", "from __future__ import annotations", "from __future__ import annotations\n\nX = 1"
    )
    finished.call("run", expect=1)
    finished.call("adopt", "train", old, "--why", "a constant that nothing reads")
    finished.call("run")
    latest = finished.results / "runs/micro/latest"
    (adoption,) = json.loads((latest / "manifest.json").read_text())["adoptions"]
    assert (adoption["old_key"], adoption["why"]) == (old, "a constant that nothing reads")
    html = (latest / "report.html").read_text()
    assert "1 older result was kept after a change of code" in html
    assert "a constant that nothing reads" in html
    assert "a constant that nothing reads" in finished.call("inspect", str(latest)).stdout.replace(
        "\n            ", " "
    )
    assert finished.attempts() == 1
    done = finished.call("reproduce", str(latest / "manifest.json"), "--check", expect=1)
    assert "adopted" in done.stderr or "names no commit" in done.stderr


def test_snakemakes_own_report_holds_page_table_and_manifest_with_their_captions(finished: Workspace) -> None:
    finished.snakemake("--report", "report.zip")
    with zipfile.ZipFile(finished.folder / "report.zip") as archive:
        names = {Path(name).name: name for name in archive.namelist()}
        assert {"report.html", "evaluations.csv", "manifest.json"} <= set(names)
        text = "".join(archive.read(name).decode() for name in archive.namelist() if name.endswith("report.html"))
    for words in ("the target model writes its own completions", "one number a row", "from this file alone"):
        assert words in " ".join(text.split())
