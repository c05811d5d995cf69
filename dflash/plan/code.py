"""Which code makes a result: the digest of the modules a stage imports, source text without comments and docstrings.

The import closure is read from the source (`ast`), so that it needs no import and no torch. Text is compared, not
`ast.dump`, whose form differs between Python versions. Modules that cannot change a result are inert, each with its reason.
Costs about 0.15 s for the whole package, once a process.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from dflash.base.records import CodeDigest

PACKAGE = "dflash"

INERT: dict[str, str] = {
    "dflash.base.environment": "describes the machine beside a result; enters no result",
    "dflash.base.errors": "how failures are worded and numbered",
    "dflash.base.files": "writes bytes whole or not at all; does not choose them",
    "dflash.base.params": "its effect is in the key already, as resolved values",
    "dflash.base.progress": "prints how far the work is",
    "dflash.base.records": "the form of what is said about a result; its schema version is in every key",
    "dflash.base.stage": "the signature of stages; holds no computation",
    "dflash.base.store": "finds files; does not make them",
    "dflash.data.preflight": "refuses what will not fit; changes no sample",
    "dflash.hosts.host": "runs commands and moves small files; computes nothing",
    "dflash.hosts.lease": "who may use a GPU, and when",
    "dflash.ship.artifact": "digests files that are already written",
    "dflash.train.attempts": "records when and how trainers were started",
    "dflash.train.children": "starts, watches and ends the ranks of a training",
    "dflash.train.launch": "starts, watches and stops the trainer",
    "dflash.train.preflight": "refuses what will not fit; changes no weight",
    "dflash.train.probe": "compares this machine with that of the first step; changes no weight",
    "dflash.train.schedule": "which steps are saved: placement",
    "dflash.train.telemetry": "writes down how fast training goes",
    "dflash.train.trackers": "tells others what the metrics say",
}
"""Modules left out of code digests, each with the reason why a change in it cannot change a result. Modules whose name ends
in `_params` are left out too: what they decide stands in the key as resolved values."""


def is_inert(module: str) -> bool:
    """Whether a change in `module` cannot change a result."""
    return module in INERT or module.endswith("_params")


def source_root() -> Path:
    """The folder that holds the `dflash` package being run."""
    return Path(__file__).resolve().parents[2]


_STRING_OR_COMMENT = re.compile(
    r'"""(?:[^\\]|\\.)*?"""|' r"'''(?:[^\\]|\\.)*?'''|" r'"(?:[^"\\\n]|\\.)*"|' r"'(?:[^'\\\n]|\\.)*'|(#[^\n]*)",
    re.DOTALL,
)


_F_PREFIX = re.compile(r"[fF][rR]?\Z|[rR][fF]\Z")
_LOST_BLANKS = re.compile(r"[ \t]+$|^$", re.MULTILINE)
"""What would go with blank lines and trailing blanks, though within a string it is part of the value."""


def _without_comments(text: str) -> str:
    """Source text whose comments are gone. A pattern finds them, ten times as fast as `tokenize`: it steps over strings, in
    which Python 3.11 allows no comment and no quote of the same kind. Python 3.12 allows the quote in an f-string: such a text
    keeps all its comments, since a key too many costs less than one too few."""
    strings = [found for found in _STRING_OR_COMMENT.finditer(text) if not found[1]]
    if any(_ends_in_braces(text, found) for found in strings):
        return text
    return _STRING_OR_COMMENT.sub(lambda found: "" if found[1] else found[0], text)


def _ends_in_braces(text: str, found: re.Match[str]) -> bool:
    """Whether an f-string seems to end between its braces: at a quote that is another string's."""
    if not _F_PREFIX.search(text, max(0, found.start() - 2), found.start()):
        return False
    bare = found[0].replace("{{", "")
    return bare.count("{") > bare.count("}")


def _with_blanks_of_strings(text: str) -> str:
    """Text in which blank lines and trailing blanks within strings are marked, so that they are not taken for layout."""
    return _STRING_OR_COMMENT.sub(
        lambda found: _LOST_BLANKS.sub(r"\g<0>\0", found[0]) if "\n" in found[0] else found[0], text
    )


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """The module and all statements in it, at any depth; no expressions, which are most of a tree."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        children = ast.iter_child_nodes(node)
        waiting += [child for child in children if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case)]


def bare_source(text: str) -> str:
    """Source text without comments, docstrings, blank lines and trailing blanks: what a change must touch to count."""
    return _bare(text, ast.parse(text))


def _bare(text: str, tree: ast.Module) -> str:
    lines = _with_blanks_of_strings(_without_comments(text)).split("\n")  # as `ast` counts them
    for node in _statements(tree):
        body = getattr(node, "body", None)
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or not body:
            continue
        first = body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            _blank(lines, first)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _blank(lines: list[str], node: ast.stmt) -> None:
    end_line, end_column = node.end_lineno or node.lineno, node.end_col_offset or 0
    tail = lines[end_line - 1].encode()[end_column:].decode()
    head = lines[node.lineno - 1].encode()[: node.col_offset].decode()
    for row in range(node.lineno - 1, end_line):
        lines[row] = ""
    lines[node.lineno - 1] = head + tail


def _module_path(root: Path, module: str) -> Path | None:
    base = root.joinpath(*module.split("."))
    for candidate in (base.with_suffix(".py"), base / "__init__.py"):
        if candidate.exists():
            return candidate
    return None


def imported_modules(root: Path, module: str) -> set[str]:
    """Modules of this package that `module` imports, anywhere in its source (imports inside functions count).

    `from package import name` counts as the submodule `name` when there is one.
    """
    return set(_scan(root, module)[1])


@functools.cache
def _scan(root: Path, module: str) -> tuple[str, frozenset[str]]:
    path = _module_path(root, module)
    if path is None:
        return "", frozenset()
    text = path.read_text()
    found: set[str] = set()
    tree = ast.parse(text)
    for node in _statements(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    inside = {name for name in found if name.split(".")[0] == PACKAGE and _module_path(root, name) is not None}
    data = [other for other in sorted(path.parent.iterdir()) if other.suffix not in {".py", ""} and other.name in text]
    content = _bare(text, tree) + "".join(f"\n#{other.name}\n{other.read_text()}" for other in data)
    return hashlib.sha256(content.encode()).hexdigest()[:16], frozenset(inside)


def closure(root: Path, modules: tuple[str, ...]) -> list[str]:
    """All modules reachable by imports from `modules`, inert ones left out (and what only they import)."""
    seen: set[str] = set()
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        if module in seen or is_inert(module):
            continue
        seen.add(module)
        waiting += _scan(root, module)[1]
    return sorted(seen)


def code_digest(modules: tuple[str, ...], root: Path | None = None) -> CodeDigest:
    """The digest of everything that `modules` import inside this package, with one digest for each module.

    A data file beside a module that the module names (a page template, say) counts as part of it.
    """
    base = root or source_root()
    digests = {module: _scan(base, module)[0] for module in closure(base, modules)}
    total = hashlib.sha256("\n".join(f"{name} {value}" for name, value in sorted(digests.items())).encode())
    return CodeDigest(digest=total.hexdigest()[:16], modules=digests)
