"""A rank of a rehearsal: the rank of a training as it is, but for the batches of its steps (`rehearse.LongestBatches`).

When it has ended well it leaves `rank_<n>.json`: how much memory there was for it, the most that it had of the host's, and the
least that the host had left meanwhile. The lead loads the state that was saved, as a resume would. Costs a look at the memory
five times a second.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from dflash.base.files import write_json
from dflash.base.stage import Upstream
from dflash.base.store import read_params
from dflash.data.batches import BatchPlan, Samples
from dflash.train import checkpoint, drafter_rank, preflight, ranks, schedule, target_rank, trainer
from dflash.train.attempts import Attempt, attempt_path
from dflash.train.child import resolved_params
from dflash.train.rehearse import longest_batches
from dflash.train.roles import Roles, rank_device

LOOK = 0.2
"""Seconds between two looks at the host's memory."""


def end_now(role: str, arguments: Sequence[str], ending: threading.Event) -> NoReturn:
    """Plays a role (`trainer`, `ranks`) to its end, as `begin` would; ends without waiting for threads.

    Args:
        arguments: those of `dflash/train/ranks.py` and `trainer.py`.
    """
    status = 1
    try:
        status = _play(role, arguments, ending)
    except SystemExit as wanted:
        status = int(wanted.code or 0)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _play(role: str, arguments: Sequence[str], ending: threading.Event) -> int:
    directory = Path(arguments[arguments.index("--directory") + 1])
    attempt = Attempt.read(attempt_path(directory, int(arguments[arguments.index("--attempt") + 1])))
    params = resolved_params(read_params(directory).params, attempt.placement.values)

    def plan_of(samples: Samples, dataset: Upstream, buckets: Upstream) -> BatchPlan:
        return longest_batches(samples, dataset.params.key, buckets.params.params, params)

    # The one thing in which a rehearsal is not a training.
    trainer.batch_plan = drafter_rank.batch_plan = target_rank.batch_plan = plan_of
    host = HostMemory()
    host.start()
    status = (ranks.main if role == "ranks" else trainer.main)(arguments, ending)
    if status == 0:
        rank = int(os.environ["RANK"]) if role == "ranks" else 0
        lead = Roles(params.topology.targets, params.topology.drafters).lead if role == "ranks" else 0
        if rank == lead:
            step = max(schedule.existing_steps(directory))
            checkpoint.verified_manifest(directory, step, directory.name)
            checkpoint.load_state(directory, step, directory.name)
        device = rank_device(attempt.placement.device, rank)
        write_json(
            directory / f"rank_{rank}.json", {"rank": rank, "device": device, **host.facts(), **gpu_facts(device)}
        )
    return status


class HostMemory(threading.Thread):
    """Watches the host's memory from now on."""

    def __init__(self) -> None:
        super().__init__(name="host-memory", daemon=True)
        self.least = preflight.host_memory_free()

    def run(self) -> None:
        """Looks again and again."""
        while True:
            self.least = min(self.least, preflight.host_memory_free())
            time.sleep(LOOK)

    def facts(self) -> dict[str, int]:
        """Bytes: the most that this process had, and the least that the host had left."""
        return {"host_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10, "host_left": self.least}


def gpu_facts(device: str) -> dict[str, Any]:
    """Bytes of a GPU that this process may have, its own included; nothing on a CPU."""
    if not device.startswith("cuda"):
        return {}
    free, total = torch.cuda.mem_get_info(device)
    return {"gpu_total": total, "gpu_room": free + torch.cuda.memory_reserved(device)}
