"""What a reproduction says of files that are not the recorded ones: nothing counts as equal that was not compared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dflash.base.errors import PermanentError
from dflash.base.records import OutputFile, StageEntry
from dflash.report.reproduce import Verdict, compare_stage, placed_config, require_compared


def judged(tmp_path: Path, names: list[str], recorded: Path | None) -> Verdict:
    """The verdict under tolerance on files whose recorded digest is another."""
    outputs = {"": [OutputFile(path=name, size=1, sha256="0" * 64) for name in names]}
    entry = StageEntry(name="dataset", stage="dataset", key="a" * 12, receipts={}, outputs=outputs)
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


def test_other_drafters_and_the_parent_dataset_are_found_where_the_command_was_given(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "parent.json").write_text("{}")
    source = {"dataset": {"parent": "parent.json"}, "evaluate": {"drafters": [{"name": "x", "path": "theirs"}]}}
    placed = placed_config(source, tmp_path / "code", tmp_path, tmp_path / "results")
    assert placed["dataset"]["parent"] == str(tmp_path / "parent.json")
    assert placed["evaluate"]["drafters"][0]["path"] == str(tmp_path / "theirs")
