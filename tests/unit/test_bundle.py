"""A request or an answer arrives whole or is refused, and never writes outside its folder."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from dflash import bundle
from dflash.base.errors import CorruptError

FILES = {"a/b.json": b"{}\n", "empty": b"", "odd name\n-x": bytes(range(256))}


def test_what_is_packed_is_unpacked() -> None:
    document, files = bundle.unpack(io.BytesIO(bundle.pack({"do": "stage"}, FILES)))
    assert document == {"do": "stage"}
    assert files == FILES


def test_a_greeting_of_the_shell_before_it_is_passed_over() -> None:
    stream = io.BytesIO(b"Welcome to the cluster!\nLast login: today\n" + bundle.pack({"n": 1}, {}))
    assert bundle.unpack(stream)[0] == {"n": 1}


@pytest.mark.parametrize("cut", [0, 5, 30, -1])
def test_a_stream_that_ends_early_is_torn(cut: int) -> None:
    with pytest.raises(bundle.Torn):
        bundle.unpack(io.BytesIO(bundle.pack({}, {"a": b"content"})[:cut]))


def test_a_header_that_is_none_is_refused() -> None:
    with pytest.raises(CorruptError):
        bundle.unpack(io.BytesIO(bundle.MARK + b"nonsense\n"))


@pytest.mark.parametrize("path", ["../out", "/etc/passwd", "a/../../out"])
def test_a_path_that_leads_out_is_refused_before_it_is_written(path: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    with pytest.raises(CorruptError, match="leads out"):
        bundle.place({path: b"x"}, root)
    assert list(tmp_path.rglob("out")) == []


def test_files_are_placed_in_order_and_equal_ones_left_alone(tmp_path: Path) -> None:
    bundle.place(FILES, tmp_path)
    before = (tmp_path / "a/b.json").stat().st_ino
    bundle.place({**FILES, "empty": b"changed"}, tmp_path)
    assert (tmp_path / "a/b.json").stat().st_ino == before
    assert (tmp_path / "empty").read_bytes() == b"changed"
    assert bundle.collect(tmp_path, [tmp_path / "empty", tmp_path / "missing"]) == {"empty": b"changed"}


def test_of_a_growing_file_only_the_rest_goes_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert bundle.rest_of(b"1\n2\n", bundle.prefix_of(path)) == (0, b"1\n2\n")
    path.write_bytes(b"1\n")
    assert bundle.rest_of(b"1\n2\n", bundle.prefix_of(path)) == (2, b"2\n")
    assert bundle.rest_of(b"9\n2\n", bundle.prefix_of(path)) == (0, b"9\n2\n"), "another file is sent whole"
    assert bundle.rest_of(b"1", bundle.prefix_of(path)) == (0, b"1")
