"""The code of a run is kept as it lay on the disk, once for each state, and what comes out again is what went in."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from dflash.base.errors import CorruptError
from dflash.plan.kept_code import code_files, keep_code, kept_code, kept_path


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    for name in ("dflash/a.py", "dflash/__pycache__/a.pyc", "workflow/rules/b.smk", "Snakefile", "notes.txt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    return root


def test_what_is_kept_comes_out_again_and_only_code_is_kept(checkout: Path, tmp_path: Path) -> None:
    digest = keep_code(tmp_path / "results", checkout)
    files = kept_code(tmp_path / "results", digest)
    assert files == {name: name.encode() for name in ("dflash/a.py", "workflow/rules/b.smk", "Snakefile")}


def test_each_state_of_the_code_is_kept_once_under_its_own_digest(checkout: Path, tmp_path: Path) -> None:
    results = tmp_path / "results"
    first = keep_code(results, checkout)
    written = kept_path(results, first).stat().st_mtime_ns
    assert keep_code(results, checkout) == first
    assert kept_path(results, first).stat().st_mtime_ns == written
    (checkout / "dflash/a.py").write_text("# a comment\n")
    second = keep_code(results, checkout)
    assert second != first
    assert len(list((results / "code").iterdir())) == 2
    assert (kept_code(results, first) or {})["dflash/a.py"] == b"dflash/a.py"


def test_damaged_and_exchanged_archives_are_named_and_never_taken(checkout: Path, tmp_path: Path) -> None:
    results = tmp_path / "results"
    first = keep_code(results, checkout)
    (checkout / "Snakefile").write_text("other")
    second = keep_code(results, checkout)
    kept_path(results, first).write_bytes(kept_path(results, second).read_bytes())
    with pytest.raises(CorruptError, match="not that of its digest"):
        kept_code(results, first)
    kept_path(results, second).write_bytes(b"\x1f\x8b torn")
    with pytest.raises(CorruptError, match="cannot be read"):
        kept_code(results, second)
    assert kept_code(results, "0" * 64) is None


@pytest.mark.parametrize(
    "content",
    [b"", gzip.compress(b""), gzip.compress(b"no archive"), b"\x1f\x8b torn"],
    ids=["empty", "an empty gzip", "a gzip of no archive", "torn"],  # the bytes hold the time: ids must not
)
def test_what_is_damaged_is_told_in_one_line_and_kept_anew(checkout: Path, tmp_path: Path, content: bytes) -> None:
    results = tmp_path / "results"
    digest = keep_code(results, checkout)
    kept_path(results, digest).write_bytes(content)
    with pytest.raises(CorruptError) as caught:
        kept_code(results, digest)
    assert "\n" not in caught.value.message()
    assert keep_code(results, checkout) == digest
    assert (kept_code(results, digest) or {})["Snakefile"] == b"Snakefile"


def test_the_code_of_this_checkout_holds_the_package_the_rules_and_the_lock() -> None:
    names = set(code_files(Path(__file__).resolve().parents[2]))
    assert {"dflash/cli.py", "dflash/report/page.html.j2", "Snakefile", "requirements.lock"} <= names
    assert any(name.startswith("workflow/rules/") for name in names)
    assert not [name for name in names if "__pycache__" in name or name.startswith("tests/")]
