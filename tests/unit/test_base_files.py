"""A file is whole or absent, whatever happens while it is written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dflash.base.errors import PermanentError
from dflash.base.files import write_atomically


def test_a_write_that_fails_half_way_leaves_the_old_content_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "receipt.json"
    write_atomically(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PermanentError, match="No space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_who_reads_while_a_file_is_written_anew_reads_the_old_content_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "receipt.json"
    write_atomically(path, "old")
    with path.open() as reader:
        write_atomically(path, "new")
        assert reader.read() == "old"
    assert path.read_text() == "new"
