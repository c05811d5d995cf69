"""One rank of a training whose roles are processes of their own: N targets compute features, M drafters learn from them.

    python -m dflash.train.begin ranks --directory DIR --store STORE --attempt N --parent PID     (started by the launcher)
    torchrun ... -m dflash.train.ranks --directory DIR --store STORE --placement FILE --run NAME  (one node or several)

Here are the process and its command line; what it does is in `target_rank.py` and `drafter_rank.py`. Costs nothing beside.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from dflash.base.errors import ConfigError, DflashError
from dflash.base.records import now
from dflash.base.stage import HostContext, Inputs, Outputs
from dflash.base.store import read_params
from dflash.data.buckets_params import BucketsParams
from dflash.hosts import lease
from dflash.train import launch, schedule
from dflash.train.attempts import EXIT_BY_KIND, Attempt, Placement, attempt_numbers, attempt_path
from dflash.train.child import handed_over, leave_failure, resolved_params
from dflash.train.drafter_rank import DrafterRank
from dflash.train.parent import end_with_parent, hear_requests
from dflash.train.peers import Peers
from dflash.train.pulse import PULSE
from dflash.train.roles import Place, Roles, rank_device
from dflash.train.target_rank import TargetRank
from dflash.train.train_params import TrainParams
from dflash.train.trainer import prepare_process


def run_rank(
    params: TrainParams, inputs: Inputs, workdir: Path, context: HostContext, ending: threading.Event
) -> Outputs:
    """Plays the role that this process's rank has, to the end.

    Raises:
        ConfigError: the launcher started another number of processes than the topology needs; a rank would idle.
        PermanentError: ranks do not agree, or features are not what they should be.
        LostPeer: another rank is gone.
    """
    place = Place.from_environment()
    roles = Roles(params.topology.targets, params.topology.drafters)
    if place.world_size != roles.world_size:
        raise ConfigError(
            f"{place.world_size} processes were started for {roles.targets} targets and {roles.drafters} drafters",
            where="train.topology",
            remedy=f"Start {roles.world_size}.",
        )
    batching = BucketsParams.model_validate(inputs.one("buckets").params.params)
    roles.refuse_idle(batching.batches_per_step)
    context = replace(context, device=rank_device(context.device, place.local_rank))
    prepare_process(params, context)
    # A launcher that watches names the rank that is stuck; the library gives up later, and when nobody watches.
    PULSE.begin(place.rank)
    peers = Peers(roles, place.rank, context.device, params.rank_timeout * (2 if PULSE.watched else 1))
    kind = TargetRank if roles.role(place.rank) == "target" else DrafterRank
    rank: TargetRank | DrafterRank = kind(params, inputs, workdir, context, ending, peers)
    try:
        rank.begin()
        peers.gather("ready")  # so that nobody counts another's start as waiting
        context.progress.say(f"{roles.name(place.rank)} begins after step {rank.step}, on {context.device}")
        rank.train_and_tell()
    except DflashError as error:
        where = f"{roles.name(place.rank)} on {context.host}, step {rank.step + 1}"
        error.where = f"{where}: {error.where}" if error.where else where
        error.args = (error.message(),)
        raise
    peers.leave()
    return rank.outputs()


@contextlib.contextmanager
def own_attempt(arguments: argparse.Namespace, leads: bool) -> Iterator[Attempt]:
    """The attempt of a job that torchrun started: the lead takes the lease and writes the record, as a launcher would.

    Raises:
        LeaseHeld: somebody trains this already. PermanentError: the training was stopped.
    """
    directory = arguments.directory
    code = read_params(directory).code.digest
    attempt = Attempt(
        attempt=max(attempt_numbers(directory), default=0) + 1,
        run=arguments.run,
        invocation=launch.invocation_id(None),
        argv=sys.argv,
        launcher_pid=os.getpid(),
        trainer_pid=os.getpid(),
        start=now(),
        code=code,
        placement=Placement.read(arguments.placement),
    )
    if not leads:
        yield attempt
        return
    record = lease.new_record(f"training {directory.name}", directory.name, arguments.run)
    held = lease.acquire({schedule.lease_path(directory): record.resource}, record)
    launch.refuse_stopped(directory)
    path = attempt_path(directory, attempt.attempt)
    attempt.write(path)
    try:
        yield attempt
        attempt.exit = 0
    except DflashError as error:
        attempt.exit = EXIT_BY_KIND.get(error.kind, 1)
        raise
    finally:
        attempt.end = now()
        attempt.write(path)
        held.release()


def main(argv: Sequence[str] | None = None, ending: threading.Event | None = None) -> int:
    """The command line of a rank; `ending` is set when somebody asks to end (default: by SIGTERM and SIGINT).

    Exit status: 0 done or ended on request, else `EXIT_BY_KIND`.
    """
    parser = argparse.ArgumentParser(prog="python -m dflash.train.ranks")
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--attempt", type=int, help="number of the attempt that the launcher has recorded")
    parser.add_argument("--parent", type=int, help="pid of the launcher; this process ends with it")
    parser.add_argument("--placement", type=Path, help="where and how it runs (JSON), when torchrun is the launcher")
    parser.add_argument("--run", default="torchrun", help="name of the run that asks, when torchrun is the launcher")
    arguments = parser.parse_args(argv)
    if (arguments.attempt is None) == (arguments.placement is None):
        parser.error("give --attempt (our launcher) or --placement (torchrun)")
    ending = ending or hear_requests()
    if arguments.parent is None:  # ours has begun to look already
        end_with_parent(os.getppid())
    invocation = launch.invocation_id(None)
    try:
        with _attempt(arguments) as attempt:
            invocation = attempt.invocation
            _run(arguments, attempt, ending)
    except DflashError as error:
        print(f"{now()} {error.kind}: {error.message()}", file=sys.stderr, flush=True)
        if error.kind != "transient":
            leave_failure(arguments.directory, invocation, error)
        return EXIT_BY_KIND.get(error.kind, 1)
    return 0


def _attempt(arguments: argparse.Namespace) -> contextlib.AbstractContextManager[Attempt]:
    if arguments.attempt is not None:
        return contextlib.nullcontext(Attempt.read(attempt_path(arguments.directory, arguments.attempt)))
    topology = resolved_params(
        read_params(arguments.directory).params, Placement.read(arguments.placement).values
    ).topology
    leads = Place.from_environment().rank == Roles(topology.targets, topology.drafters).lead
    return own_attempt(arguments, leads)


def _run(arguments: argparse.Namespace, attempt: Attempt, ending: threading.Event) -> None:
    params, inputs, context = handed_over(arguments.directory, arguments.store, attempt)
    run_rank(params, inputs, arguments.directory, context, ending)


def end_now(ending: threading.Event | None = None) -> NoReturn:
    """Does all of it, and ends without waiting for threads that still wait for a rank that is gone."""
    try:
        status = main(ending=ending)
    except SystemExit as wanted:
        status = int(wanted.code or 0)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    end_now()
