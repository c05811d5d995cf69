"""Evidence that was cut, edited, lost or written by a later version is named, never trusted, and never a traceback."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from plan_store import make_folder, plan_of, stand
from report_store import Made, make_run, rewrite_json

from dflash import cli
from dflash.base.errors import PermanentError
from dflash.base.records import SCHEMA_VERSION
from dflash.plan.verify import find_damage

Damage = Callable[[Made], Path]


def cut_receipt(made: Made) -> Path:
    path = made.directory("dataset") / "receipt.json"
    path.write_bytes(path.read_bytes()[:100])
    return path


def later_manifest(made: Made) -> Path:
    rewrite_json(made.manifest_path, lambda document: document | {"schema_version": SCHEMA_VERSION + 1})
    return made.manifest_path


def edited_params(made: Made) -> Path:
    path = made.directory("train") / "params.json"
    rewrite_json(path, lambda document: document | {"params": document["params"] | {"lr": 9.0}})
    return path


def lost_field(made: Made) -> Path:
    path = made.directory("train") / "step_300" / "manifest.json"
    rewrite_json(path, lambda document: {name: value for name, value in document.items() if name != "lineage"})
    return path


def empty_manifest(made: Made) -> Path:
    path = made.directory("train") / "step_300" / "manifest.json"
    path.write_text("")
    return path


def dflash(*words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command line, in this process."""
    out, err = io.StringIO(), io.StringIO()
    argv, sys.argv = sys.argv, ["dflash", *words]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                cli.main()
            except SystemExit as end:
                return int(end.code or 0), out.getvalue(), err.getvalue()
        return 0, out.getvalue(), err.getvalue()
    finally:
        sys.argv = argv


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut_receipt, "not readable JSON"),
        (later_manifest, "is newer than this dflash knows"),
        (edited_params, "edited after they were written"),
        (lost_field, "lineage"),
        (empty_manifest, "not readable JSON"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("options", [[], ["--all"], ["--json"]], ids=["summary", "all", "json"])
def test_inspect_names_what_is_wrong_and_prints_nothing_of_it(
    tmp_path: Path, damage: Damage, words: str, options: list[str]
) -> None:
    path = damage(make_run(tmp_path))
    code, out, err = dflash("inspect", str(path), *options)
    assert code == 1
    assert out == ""
    assert words in err
    assert path.name in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("damage", [later_manifest, empty_manifest, lost_field], ids=lambda value: value.__name__)
def test_compare_and_reproduce_refuse_it_in_one_line(tmp_path: Path, damage: Damage) -> None:
    other = make_run(tmp_path / "other").manifest_path
    path = damage(make_run(tmp_path / "damaged"))
    for command in (["compare", str(other), str(path)], ["reproduce", str(path), "--check"]):
        code, out, err = dflash(*command)
        assert (code, out) == (1, "")
        assert path.name in err
        assert len(err.splitlines()) == 1


def test_compare_names_damage_inside_a_run_among_what_is_not_known(tmp_path: Path) -> None:
    made = make_run(tmp_path / "damaged")
    lost_field(made)
    code, out, _ = dflash("compare", str(make_run(tmp_path / "other").manifest_path), str(made.manifest_path))
    assert code == 0
    assert "B, not known: tensors and placement" in out
    assert "lineage" in out.replace("\n", " ")


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (cut_receipt, "not readable JSON"),
        (edited_params, "the content has key"),
        (
            lambda made: (made.directory("train") / "metrics.jsonl").unlink() or Path("metrics.jsonl"),
            "the file is missing",
        ),
        (lost_field, "bytes, its receipt says"),
    ],
    ids=["cut receipt", "edited params", "missing metrics", "lost field"],
)
def test_the_report_comes_out_all_the_same_and_names_the_file(tmp_path: Path, damage: Damage, why: str) -> None:
    made = make_run(tmp_path)
    path = damage(made)
    html = made.report()
    assert path.name in html
    assert why in html


def test_the_plan_names_a_cut_receipt_and_how_it_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(make_folder(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    node = plan_of().runs[0].nodes["prompts/short"]
    stand(node)
    node.receipt().write_text('{"stage": "pro')
    code, _, err = dflash("plan", "--verify", "--configfile", "config.yaml")
    assert code == 1
    assert "damaged: prompts/short" in err
    assert "not readable JSON" in err
    assert "made again by `dflash run`" in err


def test_two_results_under_one_key_are_never_taken_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(make_folder(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    plan = plan_of()
    node = plan.runs[0].nodes["prompts/short"]
    stand(node)
    other = node.params.model_copy(update={"params": node.params.params | {"limit": 3}})
    other.write(node.directory / "params.json")
    monkeypatch.setattr("dflash.base.records.stage_key", lambda *_: node.key)  # as if sha256 had given both the same
    with pytest.raises(PermanentError, match=f"key collision: another prompts has the key {node.key}"):
        find_damage(plan)


def test_what_nobody_foresaw_is_one_line_and_no_traceback(tmp_path: Path) -> None:
    """In a process of its own: typer puts a hook of its own in place when an app is called."""
    program = "import sys\nfrom dflash import cli\nfrom dflash.report import inspect\ninspect.show = None\ncli.main()\n"
    made = make_run(tmp_path)
    for words, lines in (([], 1), (["--debug"], 3)):
        argv = [sys.executable, "-c", program, *words, "inspect", str(made.manifest_path)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "TypeError" in done.stderr
        assert ("Traceback" in done.stderr) == bool(words)
        assert len(done.stderr.splitlines()) >= lines


@pytest.mark.parametrize("words", [(), ("--check",)])
def test_a_reproduction_that_cannot_begin_leaves_no_folder(
    tmp_path: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    (tmp_path / "manifest.json").write_text("{")
    status, _, said = dflash("reproduce", str(tmp_path / "manifest.json"), *words)
    assert (status, list((tmp_path / "temporary").iterdir())) == (1, []), said
