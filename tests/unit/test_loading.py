"""Libraries are loaded without the collector, which looks at them no more and at everything else as before."""

from __future__ import annotations

import subprocess
import sys

from dflash.plan.code import source_root

SCRIPT = """
import gc
from dflash.base.loading import loading
from dflash.stages import BY_NAME

class Ring:
    pass

def rings():
    return sum(type(item) is Ring for item in gc.get_objects())

with loading():
    assert not gc.isenabled()
    kept = [[] for _ in range(1000)]
assert gc.isenabled()
assert gc.get_freeze_count() > 1000
before = gc.get_freeze_count()
BY_NAME["buckets"].run()
assert gc.get_freeze_count() > before + 10_000, "a stage is loaded in this way"
ring = Ring()
ring.itself = ring
del ring
gc.collect()
assert rings() == 0, "what comes later is collected"
"""


def test_what_is_loaded_is_frozen_and_what_comes_later_is_collected() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=source_root(), capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
