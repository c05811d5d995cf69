"""A directory by content: what a root digest stands for, and that any difference is named."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from dflash.base.canonical import digest
from dflash.base.errors import CorruptError
from dflash.base.files import CHUNK
from dflash.ship import artifact


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "folder"
    (root / "deep" / "er").mkdir(parents=True)
    (root / "empty").write_bytes(b"")
    (root / "deep" / "er" / "-odd name\n'\"").write_bytes(b"small")
    (root / "large").write_bytes(b"a" * CHUNK + b"b" * 10)
    return root


def test_the_root_is_the_digest_of_path_size_and_chunks_sorted_by_path(folder: Path) -> None:
    found = artifact.describe(folder)
    chunks = [hashlib.sha256(b"a" * CHUNK).hexdigest(), hashlib.sha256(b"b" * 10).hexdigest()]
    small = [hashlib.sha256(b"small").hexdigest()]
    assert found.root == digest([["deep/er/-odd name\n'\"", 5, small], ["empty", 0, []], ["large", CHUNK + 10, chunks]])


def test_equal_content_has_an_equal_root_wherever_it_lies(folder: Path, tmp_path: Path) -> None:
    moved = folder.rename(tmp_path / "elsewhere")
    (moved / "no file in here").mkdir()
    artifact.verify(moved, artifact.describe(moved))
    assert artifact.describe(moved) == artifact.describe(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda root: (root / "empty").unlink(), "empty: the file is missing"),
        (lambda root: (root / "new").write_bytes(b""), "new: the file is not in the record"),
        (lambda root: (root / "empty").write_bytes(b"x"), "has 1 bytes, 0 are recorded"),
        (lambda root: (root / "large").write_bytes(b"a" * CHUNK + b"b" * 9 + b"c"), f"from offset {CHUNK}"),
        (lambda root: (root / "link").symlink_to("large"), "neither a regular file nor a folder"),
    ],
)
def test_every_kind_of_damage_is_refused_and_named(folder: Path, damage: object, named: str) -> None:
    recorded = artifact.describe(folder)
    damage(folder)  # type: ignore[operator]
    with pytest.raises(CorruptError, match=named):
        artifact.verify(folder, recorded)


def test_a_record_whose_root_does_not_fit_its_files_is_refused(folder: Path) -> None:
    recorded = artifact.describe(folder)
    with pytest.raises(CorruptError, match="root digest"):
        artifact.verify(folder, recorded.model_copy(update={"root": "0" * 64}))
