"""The code digest changes with what code does, and with nothing else."""

from __future__ import annotations

import io
import shutil
import tokenize
from pathlib import Path

import pytest

from dflash.base.errors import PermanentError
from dflash.cli import _refuse_other_code
from dflash.plan.code import _scan, _without_comments, bare_source, closure, code_digest, source_root
from dflash.plan.graph import stage_modules
from dflash.stages import BY_NAME, STAGES


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(source_root() / "dflash", tmp_path / "dflash")
    return tmp_path


def digests(root: Path) -> dict[str, str]:
    """The code digest of every stage, read from the files as they are now."""
    _scan.cache_clear()
    return {stage.name: code_digest(stage_modules(stage), root).digest for stage in STAGES}


def edit(root: Path, file: str, old: str, new: str) -> None:
    path = root / "dflash" / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_comments_docstrings_and_blank_lines_do_not_count() -> None:
    before = 'def f(x):\n    """Old words."""\n    return x + 1  # why\n'
    after = 'def f(x):\n    """New\n    words, two lines."""\n\n    # another reason\n    return x + 1\n'
    assert bare_source(before) == bare_source(after) == "def f(x):\n    return x + 1"


def test_text_that_looks_like_a_comment_inside_a_string_counts() -> None:
    assert bare_source('x = "# not a comment"\n') == 'x = "# not a comment"'
    assert bare_source('x = "a"\n') != bare_source('x = "b"\n')


def test_a_string_that_is_no_docstring_counts() -> None:
    assert bare_source('x = 1\n"""text"""\n') == 'x = 1\n"""text"""'


@pytest.mark.parametrize("other", ["one\ntwo", "one\n \ntwo", "one \n\ntwo"])
def test_blanks_within_a_string_that_is_no_docstring_count(other: str) -> None:
    assert bare_source(f'x = """{other}"""\n') != bare_source('x = """one\n\ntwo"""\n')
    assert bare_source('def f():\n    """one \n\n    two"""\n    return 1\n') == "def f():\n    return 1"


def test_lines_are_counted_as_the_parser_counts_them() -> None:
    before = 'x = "\u2028\x0c"\ndef f(y):\n    """words"""\n    return y\n'
    assert bare_source(before) == 'x = "\u2028\x0c"\ndef f(y):\n    return y'


@pytest.mark.parametrize("text", ['f"{names["#"]} {a}"', "rf'{names['#']} {a}'", 'f"{{{", ".join(names)}} # {a}"'])
def test_no_string_is_cut_where_python_3_12_lets_an_f_string_nest_its_own_quotes(text: str) -> None:
    assert text in _without_comments(f"x = {text}\n")


def test_comments_are_found_where_the_tokenizer_finds_them() -> None:
    for path in [*source_root().glob("dflash/**/*.py"), *source_root().glob("tests/**/*.py")]:
        lines = path.read_text().split("\n")
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            if token.type == tokenize.COMMENT:
                row, column = token.start
                lines[row - 1] = lines[row - 1][:column]
        assert _without_comments(path.read_text()) == "\n".join(lines), path


def test_a_comment_in_a_module_changes_no_digest(copy: Path) -> None:
    before = digests(copy)
    for path in (copy / "dflash").rglob("*.py"):
        if path.name != "__init__.py":
            path.write_text(path.read_text() + "\n# a remark\n")
    assert digests(copy) == before


@pytest.mark.parametrize(
    ("file", "changed"),
    [
        ("train/objective.py", {"train"}),
        ("evaluate/tree.py", {"evaluate"}),
        ("data/buckets.py", {"buckets"}),
        ("base/progress.py", set()),
        ("train/launch.py", set()),
        ("train/train_params.py", set()),
    ],
)
def test_an_edit_changes_the_digests_of_the_stages_that_import_it(copy: Path, file: str, changed: set[str]) -> None:
    before = digests(copy)
    path = copy / "dflash" / file
    path.write_text(path.read_text() + "\nADDED = 1\n")
    after = digests(copy)
    assert {name for name in before if before[name] != after[name]} == changed


def test_a_page_template_counts_as_code_of_the_module_that_names_it(copy: Path) -> None:
    before = digests(copy)["report"]
    template = next((copy / "dflash/report").glob("*.j2"))
    template.write_text(template.read_text() + "<!-- more -->")
    assert digests(copy)["report"] != before


def test_imports_inside_functions_count(tmp_path: Path) -> None:
    package = tmp_path / "dflash"
    package.mkdir()
    (package / "a.py").write_text("def f():\n    from dflash.b import g\n    return g\n")
    (package / "b.py").write_text("g = 1\n")
    _scan.cache_clear()
    assert closure(tmp_path, ("dflash.a",)) == ["dflash.a", "dflash.b"]


def test_the_train_digest_covers_model_and_objective() -> None:
    covered = set(code_digest(stage_modules(BY_NAME["train"])).modules)
    assert {"dflash.train.objective", "dflash.train.anchors", "dflash.model.drafter", "dflash.data.batches"} <= covered


def test_stage_code_imports_nothing_dynamically() -> None:
    for stage in STAGES:
        for module in code_digest(stage_modules(stage)).modules:
            path = source_root().joinpath(*module.split(".")).with_suffix(".py")
            text = path.read_text() if path.exists() else ""
            assert "import_module" not in text, module
            assert "__import__" not in text, module
            assert "exec(" not in text.replace("model.eval(", ""), module


def test_a_job_of_code_that_was_edited_after_the_plan_is_refused() -> None:
    digest = code_digest(stage_modules(BY_NAME["buckets"])).digest
    _refuse_other_code("buckets", digest)
    _refuse_other_code("buckets", None)
    with pytest.raises(PermanentError, match="changed since the plan was made"):
        _refuse_other_code("buckets", digest[::-1])
