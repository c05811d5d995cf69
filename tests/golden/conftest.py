"""Golden values: `DFLASH_GOLDEN=DIR pytest tests/golden` runs the same tests on any folder in the format of its
README."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

GOLDEN_DIR = Path(os.environ.get("DFLASH_GOLDEN") or Path(__file__).parent / "data")


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    """The folder with the golden files."""
    return GOLDEN_DIR


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for `golden_drafter` runs once for every drafter file in the folder."""
    if "golden_drafter" in metafunc.fixturenames:
        files = sorted(GOLDEN_DIR.glob("drafter_*.safetensors"))
        metafunc.parametrize("golden_drafter", files or [None], ids=[file.stem for file in files] or ["no file"])
