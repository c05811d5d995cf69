"""The report shows the shift of the lengths as a person needs it: which bucket grew, and what that does to steps and memory."""

from __future__ import annotations

import dataclasses

from test_data_buckets import two_versions

from dflash.report.evidence import Shift
from dflash.report.page import Page, _add_shift


def empty_page() -> Page:
    """A page with nothing on it but what a field needs."""
    given = {
        item.name: ""
        for item in dataclasses.fields(Page)
        if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
    }
    return Page(**given)  # type: ignore[arg-type]


def test_the_report_of_the_second_version_says_what_grew_and_what_it_costs() -> None:
    found, _ = two_versions()
    page = empty_page()
    _add_shift(page, Shift.model_validate(found), bytes_a_token=2 * 5 * 5120)
    shares, load = page.bucket_tables
    *_, longest = shares.rows
    assert longest[0] == "3,296 to 8,193"
    before, now = longest[3].split(" -> ")
    assert now.startswith("46.")
    assert float(now.rstrip("%")) > float(before.rstrip("%")) + 3
    rows = {row[0]: row[1:] for row in load.rows}
    assert rows["mean length, tokens"][2] == "+6.5%"
    assert rows["tokens a step"][2].startswith("+")
    largest = found["now"]["largest_batch_tokens"]
    assert rows["features of the largest batch, MB"][1] == f"{largest * 51_200 / 1e6:,.1f}"
    assert "Warning: since the parent version, the mean length went from 2,068 to 2,202 (+6.5%)." in page.bucket_words
    (figure,) = page.bucket_figures
    assert "parent version" in figure.svg
    assert "this version" in figure.svg
