"""The feature stream with fake work of known duration: what the stream itself costs, and whether it holds memory.

    {"name": ..., "ratio": whole time / the slower side's nominal work, "over_measured_work": ..., "ms_a_batch": ...}  200 batches
    {"name": ..., "mib_at": {step: resident MiB of the drafter}, ...}                                    2,000 steps

`over_measured_work` divides by what the slower rank really worked, since a busy machine oversleeps; `ms_a_batch` is what the
stream adds to a batch of that rank. What is above 1 is the first batch on its way (the drafters have nothing to do meanwhile),
the last one, and 0.5 to 1 ms a batch of messages: 2% of a batch of 40 ms here, nothing of one of 300 ms at 27B.

On a machine that is busy with other things, waking up late is most of it: `chrt -f 10` in front of the command leaves that out.

Work is sleep, so that two cores can play five ranks. Each rank is a forked process that talks over gloo.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rank_store import fork_ranks

from dflash.data.batches import Batch
from dflash.train.peers import Peers
from dflash.train.roles import Roles
from dflash.train.stream import Label, Receiver, Sender, own_batches

TOKENS, WIDTH = 256, 512
"""Of a fake batch: 0.5 MB of float32."""


class FakePlan:
    """Batches that only have a name and a size."""

    def __init__(self, per_step: int) -> None:
        self.per_step = per_step

    def step(self, step: int) -> list[Batch]:
        numbers = range(step * self.per_step, (step + 1) * self.per_step)
        return [Batch(f"{number:012d}", 0, number, 0, np.arange(1), np.asarray([TOKENS])) for number in numbers]


def label(batch: Batch) -> Label:
    return Label(batch.batch_id, "0" * 16, (1,), "fake", (1, TOKENS, WIDTH), "float32")


def target(peers: Peers, per_step: int, work: float, steps: int) -> dict[str, float]:
    """Sleeps, then sends, until no drafter wants more. What it sleeps for steps that nobody wants does not count."""
    slept = 0.0
    sender = Sender(peers, per_step)
    features = torch.ones(1, TOKENS, WIDTH)
    plan = FakePlan(per_step)
    for step, place in own_batches(peers.roles, peers.rank, 0, per_step):
        if sender.finished:
            break
        drafter = peers.roles.drafter_of(place)
        if drafter in sender.ended:
            continue
        seconds = sleep(work)
        slept += seconds if step < steps else 0.0
        batch = plan.step(step)[place]
        if sender.credit(drafter, batch.batch_id):
            sender.send(drafter, label(batch), features.clone(), {})
    sender.finish()
    return {"slept": slept}


def sleep(work: float) -> float:
    """Sleeps and returns how long it took."""
    started = time.perf_counter()
    time.sleep(work)
    return time.perf_counter() - started


def drafter(peers: Peers, per_step: int, work: float, steps: int, marks: set[int]) -> dict[str, object]:
    """Takes, sleeps, and adds up a small gradient with the other drafters at the end of each step."""
    limit = 2 * TOKENS * -(-peers.roles.targets // peers.roles.drafters)
    plan = FakePlan(per_step)
    receiver = Receiver(peers, plan, per_step, first_step=0, width=WIDTH, dtype=torch.float32, limit=limit)
    places = peers.roles.places(peers.rank, per_step)
    memory = {}
    slept = 0.0
    started = time.perf_counter()
    for step in range(steps):
        receiver.grant(steps)
        for place in places:
            batch = plan.step(step)[place]
            receiver.take(batch, label(batch))
            slept += sleep(work)
            receiver.done()
            receiver.grant(steps)
        peers.add_up([torch.ones(1000)])
        if step + 1 in marks:
            memory[step + 1] = resident_mib()
    seconds = time.perf_counter() - started
    receiver.end()
    return {"slept": slept, "seconds": seconds, "memory": memory, "most": receiver.most_in_flight, "limit": limit}


def resident_mib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return round(int(line.split()[1]) / 1024, 1)
    return 0.0


def run(
    targets: int, drafters: int, *, steps: int, per_step: int, work: tuple[float, float], marks: set[int] | None = None
) -> list[dict[str, object]]:
    """What each rank measured."""
    roles = Roles(targets, drafters)

    def body(rank: int) -> None:
        torch.set_num_threads(1)
        peers = Peers(roles, rank, "cpu", 60)
        peers.gather("begin")
        if roles.role(rank) == "target":
            print(json.dumps(target(peers, per_step, work[0], steps)), flush=True)
        else:
            print(json.dumps(drafter(peers, per_step, work[1], steps, marks or set())), flush=True)
        peers.leave()

    with tempfile.TemporaryDirectory() as scratch:
        ran = fork_ranks(roles.world_size, body, Path(scratch), timeout=300)
    if not ran.ok:
        raise SystemExit("\n".join(ran.said))
    return [json.loads(said.splitlines()[-1]) for said in ran.said]


def main() -> None:
    """Prints a line for each topology and side that is slower, and one for memory."""
    steps, per_step = 25, 8
    for targets, drafters in ((1, 1), (2, 1), (3, 2)):
        of_target = len(Roles(targets, drafters).places(0, per_step)) * steps
        of_drafter = len(Roles(targets, drafters).places(targets, per_step)) * steps
        for slower in ("target", "drafter"):
            whole = 8.0
            shares = (1.0, 0.6) if slower == "target" else (0.6, 1.0)
            work = (whole * shares[0] / of_target, whole * shares[1] / of_drafter)
            found = run(targets, drafters, steps=steps, per_step=per_step, work=work)
            seconds = max(float(str(one["seconds"])) for one in found[targets:])
            slept = max(float(str(one["slept"])) for one in found)
            name = f"stream {targets}:{drafters}, {steps * per_step} batches, {slower}s slower, over their own work"
            line = {
                "name": name,
                "ratio": round(seconds / whole, 3),
                "unit": "s",
                "n": 1,
            }
            line["over_measured_work"] = round(seconds / slept, 3)
            line["ms_a_batch"] = round(1e3 * (seconds - slept) / (of_target if slower == "target" else of_drafter), 2)
            print(json.dumps({**line, "min": seconds, "median": seconds, "max": seconds}), flush=True)
    marks = {100, 500, 1000, 1500, 2000}
    *_, found = run(2, 1, steps=2000, per_step=2, work=(0.0005, 0.0005), marks=marks)
    memory = found["memory"]
    assert isinstance(memory, dict)
    print(
        json.dumps(
            {
                "name": "memory of the drafter after 2,000 steps over after 100",
                "ratio": round(memory["2000"] / memory["100"], 3),
                "unit": "MiB",
                "mib_at": memory,
                "most_tokens_in_flight": found["most"],
                "limit": found["limit"],
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
