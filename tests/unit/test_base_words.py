"""Numbers of things read as a person would say them."""

from __future__ import annotations

from dflash.base.words import number_of


def test_one_thing_is_told_as_one_and_many_as_many() -> None:
    assert [number_of(count, "file") for count in (0, 1, 2, 1234)] == ["0 files", "1 file", "2 files", "1,234 files"]
    assert [number_of(count, "copy", "copies") for count in (1, 2)] == ["1 copy", "2 copies"]
