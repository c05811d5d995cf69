"""The launcher's view of its ranks: who is to blame when several end."""

from __future__ import annotations

import os
import sys

import pytest

from dflash.train.attempts import EXIT_BY_KIND
from dflash.train.children import Children, Ended
from dflash.train.roles import Roles

LOST = EXIT_BY_KIND["transient"]


def ended(*ranks: str) -> Ended:
    """How a job of these ranks, each a line of Python, ends."""
    code = "import os, signal, sys, time; exec(sys.argv[1 + int(os.environ['RANK'])])"
    roles = Roles(targets=1, drafters=len(ranks) - 1)
    return Children([sys.executable, "-c", code, *ranks], roles, os.environ, (), "here", 60.0).wait()


@pytest.mark.parametrize("late", ["0", "2.5"])
def test_a_rank_that_was_killed_is_to_blame_however_long_its_death_takes(late: str) -> None:
    killed = f"time.sleep({late}); os.kill(os.getpid(), signal.SIGKILL)"
    found = ended(f"sys.exit({LOST})", killed, f"sys.exit({LOST})")
    assert found.status == -9
    assert found.cause.startswith("rank 1 (drafter 0) on here was killed by SIGKILL")


def test_who_does_not_end_is_ended_soon_after_the_one_to_blame_is_known() -> None:
    found = ended("print('no memory', flush=True); sys.exit(1)", "time.sleep(60)")
    assert (found.status, found.cause) == (
        1,
        "rank 0 (target 0) on here ended with exit status 1; it last said: no memory",
    )


def test_a_job_whose_ranks_end_well_has_nobody_to_blame() -> None:
    assert ended("pass", "time.sleep(0.3)") == Ended(0)
