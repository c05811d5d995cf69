"""What a reproduction says of files that are not the recorded ones: nothing counts as equal that was not compared."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dflash.base.environment import collect
from dflash.base.errors import ConfigError, CorruptError, PermanentError
from dflash.base.records import Artifact, CheckpointManifest, Lineage, OutputFile, RunManifest, StageEntry, TensorFact
from dflash.report.reproduce import Verdict, compare_stage, parse_steps, placed_config, read_manifest, require_compared


def judged(tmp_path: Path, names: list[str], recorded: Path | None, host: str = "local") -> Verdict:
    """The verdict under tolerance on files whose recorded digest is another."""
    outputs = {"": [OutputFile(path=name, size=1, sha256="0" * 64) for name in names]}
    entry = StageEntry(name="dataset", stage="dataset", key="a" * 12, receipts={}, outputs=outputs)
    entry.environments[""] = f"{host}/abc"
    verdict = Verdict()
    compare_stage(verdict, entry, tmp_path / "made", recorded, [], "tolerance", {})
    return verdict


@pytest.fixture
def made(tmp_path: Path) -> Path:
    folder = tmp_path / "made"
    folder.mkdir()
    save_file({"w": torch.ones(2)}, folder / "w.safetensors")
    (folder / "rows.json").write_text("[]")
    (folder / "a.parquet").write_text("other")
    return folder


def test_values_without_the_recorded_file_are_no_equal_values(tmp_path: Path, made: Path) -> None:
    verdict = judged(tmp_path, ["w.safetensors", "rows.json"], None)
    assert verdict.compared == 2
    assert verdict.problems[0].count("the recorded file is not here to compare values with") == 2


def test_other_bytes_of_another_type_are_not_compared_and_not_counted(tmp_path: Path, made: Path) -> None:
    verdict = judged(tmp_path, ["w.safetensors", "a.parquet"], made)
    assert verdict.compared == 1
    assert verdict.problems == []
    assert "1 of 1 output within tolerance; 1 of other bytes not compared (a.parquet)" in verdict.lines[0]


def test_a_verdict_on_nothing_is_refused(tmp_path: Path, made: Path) -> None:
    with pytest.raises(PermanentError, match="nothing could be compared"):
        require_compared(judged(tmp_path, ["a.parquet"], made), tmp_path)


@pytest.mark.parametrize("name", ["nosuch.json", "empty"])
def test_a_manifest_that_is_not_there_is_bad_input(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=rf"{name}.*: there is no such file\. Give a run's manifest\.json") as raised:
        read_manifest(tmp_path / name)
    assert raised.value.exit_code == 2


@pytest.mark.parametrize(
    ("environments", "told"),
    [([], "`environments` is empty"), (["local/b"], "`environments` does not hold local/a, where dataset was made")],
)
def test_a_manifest_without_where_a_result_was_made_is_refused_with_file_and_key(
    tmp_path: Path, environments: list[str], told: str
) -> None:
    entry = StageEntry(name="dataset", stage="dataset", key="a" * 12, receipts={})
    if environments:
        entry.environments[""] = "local/a"
    manifest = RunManifest(
        run="demo",
        runkey="b" * 12,
        created="",
        config={},
        source={"run": "demo"},
        params_files={},
        stages=[entry],
        steps=[],
        git={},
        environments=dict.fromkeys(environments, collect()),
        adoptions=[],
        determinism="bitwise",
    )
    manifest.write(tmp_path / "manifest.json")
    with pytest.raises(CorruptError) as raised:
        read_manifest(tmp_path)
    assert raised.value.message().startswith(f"{tmp_path / 'manifest.json'}: {told}.")


def test_other_drafters_and_the_parent_dataset_are_found_where_the_command_was_given(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "parent.json").write_text("{}")
    source = {"dataset": {"parent": "parent.json"}, "evaluate": {"drafters": [{"name": "x", "path": "theirs"}]}}
    placed = placed_config(source, tmp_path / "code", tmp_path, tmp_path / "results")
    assert placed["dataset"]["parent"] == str(tmp_path / "parent.json")
    assert placed["evaluate"]["drafters"][0]["path"] == str(tmp_path / "theirs")


def test_a_file_that_stayed_on_another_host_is_said_to_be_there(tmp_path: Path, made: Path) -> None:
    (problem,) = judged(tmp_path, ["w.safetensors"], None, "trainbox").problems
    assert problem.endswith("to compare values with (it was made on trainbox)")


def far_checkpoint(tmp_path: Path, tensors: dict[str, str]) -> Verdict:
    """The verdict on bits of a checkpoint whose file holds other bytes, and whose manifest alone came back."""
    folder = tmp_path / "made/step_2/drafter"
    folder.mkdir(parents=True)
    save_file({"w": torch.ones(2)}, folder / "model.safetensors")
    recorded = tmp_path / "recorded/step_2"
    recorded.mkdir(parents=True)
    (recorded / "manifest.json").write_text(checkpoint(tensors).model_dump_json())
    output = OutputFile(path="step_2/drafter/model.safetensors", size=1, sha256="0" * 64)
    entry = StageEntry(name="train", stage="train", key="a" * 12, receipts={}, outputs={"2": [output]})
    verdict = Verdict()
    compare_stage(verdict, entry, tmp_path / "made", tmp_path / "recorded", [2], "bitwise", {})
    return verdict


def test_tensors_are_compared_with_the_manifest_though_the_files_have_the_recorded_bytes(tmp_path: Path) -> None:
    folder = tmp_path / "step_2/drafter"
    folder.mkdir(parents=True)
    save_file({"w": torch.ones(2)}, folder / "model.safetensors")
    sha256 = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    output = OutputFile(path="step_2/drafter/model.safetensors", size=1, sha256=sha256)
    entry = StageEntry(name="train", stage="train", key="a" * 12, receipts={}, outputs={"2": [output]})
    ones = hashlib.sha256(torch.ones(2).numpy().tobytes()).hexdigest()
    for digest, problems in ((ones, []), ("0" * 64, ["train step 2: tensors w differ (1 in all)"])):
        verdict = Verdict()
        compare_stage(verdict, entry, tmp_path, None, [2], "bitwise", {"w": digest})
        assert verdict.problems == problems


def checkpoint(tensors: dict[str, str]) -> CheckpointManifest:
    facts: dict[str, Any] = {
        name: {} for name in ("config", "params_files", "placement", "dataset", "buckets", "topology", "kernels")
    }
    return CheckpointManifest(
        key="a" * 12,
        step=2,
        created="",
        environment=collect(),
        lineage=Lineage(attempts=[]),
        tensors=[
            TensorFact(name=name, shape=[2], dtype="float32", bytes=8, sha256=sha) for name, sha in tensors.items()
        ],
        drafter=Artifact(root="", files=[]),
        state=None,
        **facts,
    )


def test_weights_that_stayed_elsewhere_are_compared_tensor_by_tensor_with_what_their_manifest_says(
    tmp_path: Path,
) -> None:
    ones = hashlib.sha256(torch.ones(2).numpy().tobytes()).hexdigest()
    assert far_checkpoint(tmp_path / "same", {"w": ones}).problems == []
    (problem,) = far_checkpoint(tmp_path / "other", {"w": "0" * 64}).problems
    assert "tensors w differ (1 of 1)" in problem


@pytest.mark.parametrize(
    "text", ["", "2", "a:b", ":", "2:", "-1:2", "\N{SUPERSCRIPT TWO}:4", "2:\N{SUPERSCRIPT TWO}", "1:2:3"]
)
def test_a_segment_that_is_not_two_numbers_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not A:B"):
        parse_steps(text)
