"""Numbers of things read as a person would say them."""

from __future__ import annotations

import pytest

from dflash.base.words import about, duration, number_of


def test_one_thing_is_told_as_one_and_many_as_many() -> None:
    assert [number_of(count, "file") for count in (0, 1, 2, 1234)] == ["0 files", "1 file", "2 files", "1,234 files"]
    assert [number_of(count, "copy", "copies") for count in (1, 2)] == ["1 copy", "2 copies"]


@pytest.mark.parametrize(
    ("count", "words"), [(44.0, "44"), (1234.0, "1,234"), (44.25, "about 44"), (0.25, "less than 1"), (0.0, "0")]
)
def test_a_mean_number_of_things_is_told_as_a_whole_number(count: float, words: str) -> None:
    assert about(count) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0, "0 s"),
        (0.003, "less than 0.01 s"),
        (0.25, "0.25 s"),
        (3.21, "3.2 s"),
        (57.6, "58 s"),
        (750.0, "12.5 min"),
        (111_600.0, "31.0 h"),
        (7_200_000.0, "2,000.0 h"),
    ],
)
def test_a_time_is_told_in_the_unit_that_fits_it(seconds: float, words: str) -> None:
    assert duration(seconds) == words
