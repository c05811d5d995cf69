"""A slice of the soak of shipping: every kind of fault, re-hashed from outside; and a program that does not verify fails it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sshd import why_not

SOAK = Path(__file__).with_name("soak_ship.py")


def soak(require_or_skip: Callable[[str, str], None], *options: str) -> tuple[int, dict[str, Any]]:
    """Exit status and summary of a soak with a seed of its own."""
    if reason := why_not():
        require_or_skip("sshd", reason)
    done = subprocess.run([sys.executable, str(SOAK), *options], capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


def test_no_fault_leaves_a_receipt_over_wrong_bytes(require_or_skip: Callable[[str, str], None]) -> None:
    status, summary = soak(require_or_skip, "--count", "15")
    assert summary["receipts_over_wrong_bytes"] == summary["over_60_s"] == 0
    assert sum(summary["fired_mid_transfer"].values()) > 0
    assert (status, summary["bad"]) == (0, [])


def test_the_soak_fails_a_program_that_does_not_verify(require_or_skip: Callable[[str, str], None]) -> None:
    status, summary = soak(require_or_skip, "--count", "2", "--kinds", "inner_flip", "--break-verification")
    assert status == 1
    assert summary["receipts_over_wrong_bytes"] == 2
