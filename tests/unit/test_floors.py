"""The house stands: lower floors never import higher ones, and what must start fast imports no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from dflash.plan.code import INERT, imported_modules, source_root
from dflash.stages import BY_NAME, STAGES

PACKAGE = source_root() / "dflash"
FLOORS = [{"base"}, {"hosts", "model"}, {"ship", "plan", "data"}, {"train", "evaluate"}, {"report"}]
TORCH_ROOMS = {"model", "data", "train", "evaluate"}


def modules() -> list[str]:
    return sorted(
        ".".join(path.relative_to(source_root()).with_suffix("").parts)
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py"
    )


def floor(module: str) -> int:
    """0 is the ground. `stages` and `*_params` import nothing but the ground floor, so every floor may use them."""
    parts = module.split(".")
    if module == "dflash.stages" or parts[-1].endswith("_params"):
        return 0
    for number, rooms in enumerate(FLOORS):
        if parts[1] in rooms and len(parts) > 2:
            return number
    return len(FLOORS)


def ground_only(module: str) -> bool:
    return all(floor(other) == 0 for other in imported_modules(source_root(), module) if other != "dflash")


@pytest.mark.parametrize("module", modules())
def test_a_lower_floor_never_imports_a_higher_one(module: str) -> None:
    higher = [
        other
        for other in imported_modules(source_root(), module)
        if not other.endswith("__init__")
        and len(other.split(".")) > 1
        and is_file(other)
        and floor(other) > floor(module)
    ]
    assert higher == []


def is_file(module: str) -> bool:
    return source_root().joinpath(*module.split(".")).with_suffix(".py").exists()


@pytest.mark.parametrize("module", [m for m in modules() if m == "dflash.stages" or m.endswith("_params")])
def test_what_every_floor_may_use_imports_the_ground_floor_only(module: str) -> None:
    assert ground_only(module)


@pytest.mark.parametrize("module", modules())
def test_only_the_rooms_that_compute_import_torch(module: str) -> None:
    path = source_root().joinpath(*module.split(".")).with_suffix(".py")
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    if names & {"torch", "transformers"}:
        assert module.split(".")[1] in TORCH_ROOMS
        assert not module.endswith("_params")


def test_init_files_are_empty() -> None:
    assert [str(path) for path in PACKAGE.rglob("__init__.py") if path.read_text().strip()] == []


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_every_stage_has_its_params_module_beside_its_entry_point(stage: object) -> None:
    name = stage.name  # type: ignore[attr-defined]
    module = BY_NAME[name].params.partition(":")[0]
    assert module.endswith(f".{name}_params")
    assert module.split(".")[1] == BY_NAME[name].entry.split(".")[1]


def test_every_inert_module_exists_and_has_a_reason() -> None:
    missing = [module for module in INERT if not is_file(module)]
    assert missing == []
    assert all(len(reason.split()) >= 4 for reason in INERT.values())


@pytest.mark.parametrize(
    "command",
    [
        ["--help"],
        [],
        ["plan", "--configfile", str(source_root() / "config/micro.yaml")],
        ["inspect", str(source_root() / "config/micro.yaml")],
    ],
    ids=["help", "nothing", "plan", "inspect"],
)
def test_commands_that_must_start_fast_import_no_torch(command: list[str]) -> None:
    script = (
        "import sys\nfrom dflash.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'snakemake'} & set(sys.modules)\nsys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *command], capture_output=True, text=True, cwd=source_root(), check=False
    )
    assert done.returncode == 0, done.stderr
    assert Path(PACKAGE).is_dir()
