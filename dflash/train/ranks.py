"""One rank of a training whose roles are processes of their own: N targets compute features, M drafters learn from them.

    python -m dflash.train.ranks --directory DIR --store STORE --attempt N --parent PID           (started by the launcher)
    torchrun ... -m dflash.train.ranks --directory DIR --store STORE --placement FILE --run NAME  (one node or several)

Every drafter adds up the gradients of its own batches, then all of them add up everybody's in the order of ranks, divide by
the weight of the whole step and make the same update; at every checkpoint they compare a digest of their weights. The
first drafter leads: it reads the schedule, decides when to save and when to end, and is the only one that writes. What it
decides goes to the others with the step; targets learn of the end from the credits they wait for.

Costs, beside what `trainer.py` says: a target holds its weights and three batches of features; a drafter the target's
embedding and head, masters, moments and gradients like the single process, and `features_in_flight` tokens.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import hashlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash.base.canonical import short_digest
from dflash.base.errors import ConfigError, DflashError, PermanentError
from dflash.base.files import locked
from dflash.base.progress import Progress
from dflash.base.records import MetricsLine, now
from dflash.base.stage import HostContext, Inputs, Outputs
from dflash.base.store import load_inputs, read_params
from dflash.data.batches import Batch, collate, load_train_samples
from dflash.data.buckets_params import BucketsParams
from dflash.hosts import lease
from dflash.model.target import Target, check_features
from dflash.train import checkpoint, launch, schedule
from dflash.train.attempts import EXIT_BY_KIND, Attempt, Placement, attempt_numbers, attempt_path
from dflash.train.child import end_with_parent, leave_failure, resolved_params
from dflash.train.peers import Peers
from dflash.train.prepare import check_tokens, drafter_config, load_checked_target, load_target_ends
from dflash.train.roles import Place, Roles, rank_device
from dflash.train.stream import Label, Receiver, Sender, largest_batch, own_batches, token_digest, token_limit, warm_up
from dflash.train.train_params import TrainParams
from dflash.train.trainer import DTYPES, Learner, StepSums, Trainer, batch_plan, prepare_folder, prepare_process


def kernel_tag(kernels: Mapping[str, Any], dtype: str) -> str:
    """What a target computes with, in a word that people can read and two processes can compare."""
    return f"{kernels['linear']}, {kernels['attention']}, {dtype}, {short_digest(dict(kernels))}"


# ---------------------------------------------------------------- what all ranks agree on


def agree(
    peers: Peers, common: dict[str, Any], kernels: dict[str, Any] | None, dtype: str
) -> tuple[str, dict[str, Any]]:
    """Compares what every rank has loaded; returns the kernel tag of the targets and their kernels.

    Args:
        common: what must be equal everywhere. kernels: of a target's rank; None from a drafter.

    Raises:
        PermanentError: two ranks differ; names them, the field and both values.
    """
    tag = None if kernels is None else kernel_tag(kernels, dtype)
    found = peers.gather({"common": common, "tag": tag, "kernels": kernels})
    lead = found[peers.roles.lead]["common"]
    for rank, facts in enumerate(found):
        odd = [name for name, value in facts["common"].items() if value != lead[name]]
        if odd:
            _refuse_other(peers.roles, rank, peers.roles.lead, odd[0], facts["common"][odd[0]], lead[odd[0]])
        if rank < peers.roles.targets and facts["tag"] != found[0]["tag"]:
            _refuse_other(peers.roles, rank, 0, "kernels", facts["tag"], found[0]["tag"])
    return found[0]["tag"], found[0]["kernels"]


def _refuse_other(roles: Roles, rank: int, other: int, name: str, theirs: Any, ours: Any) -> None:
    raise PermanentError(
        f"{roles.name(rank)} has {name} {theirs!r}, {roles.name(other)} has {ours!r}",
        where="train.topology",
        remedy="Every rank must run this checkout, on this dataset, target and kernels.",
    )


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """sha256 (16 hex digits) of weights by name; 1.5 GB/s."""
    found = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        found.update(name.encode())
        found.update(weight.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()[:16]


def pack_tensors(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Small uint8 tensors as text (states of generators: 5 kB each)."""
    return {name: base64.b64encode(value.cpu().numpy().tobytes()).decode() for name, value in tensors.items()}


def unpack_tensors(texts: Mapping[str, str]) -> dict[str, Tensor]:
    """What `pack_tensors` packed."""
    return {
        name: torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8) for name, text in texts.items()
    }


def own_generators(states: Mapping[str, str], rank: int) -> dict[str, Tensor]:
    """The generator states that a checkpoint holds of a rank."""
    prefix = f"rank{rank}."
    return unpack_tensors({name.removeprefix(prefix): text for name, text in states.items() if name.startswith(prefix)})


# ---------------------------------------------------------------- a target


class TargetRank:
    """Computes the features of its batches, in order, and sends each to the drafter that learns from it."""

    def __init__(
        self,
        params: TrainParams,
        inputs: Inputs,
        workdir: Path,
        context: HostContext,
        ending: threading.Event,
        peers: Peers,
    ) -> None:
        self.params = params
        self.inputs = inputs
        self.directory = workdir
        self.context = context
        self.ending = ending
        self.peers = peers
        self.taps = list(drafter_config(params).target_layer_ids)
        self.step = 0

    def begin(self) -> None:
        """Loads the target, and hears from the lead where to begin."""
        dataset = self.inputs.one("dataset")
        self.samples = load_train_samples(dataset.directory)
        self.plan = batch_plan(self.samples, dataset, self.inputs.one("buckets"))
        self.target: Target = load_checked_target(self.params, self.inputs.target_path, self.context.device)
        kernels = self.target.kernels.to_dict()
        common = common_facts(self.params, self.directory, self.plan.batch(0))
        self.tag, self.kernels = agree(self.peers, common, kernels, self.params.dtype)
        start = self.peers.from_lead(None)
        self.step = start["step"]
        checkpoint.restore_generators(own_generators(start["generators"], self.peers.rank))
        warm_up(self.peers, self.plan.params.batches_per_step)

    def train(self) -> None:
        """Sends features until no drafter wants more.

        Raises:
            PermanentError: a drafter asks for another batch than is due.
            LostPeer: a drafter is gone.
        """
        per_step = self.plan.params.batches_per_step
        sender = Sender(self.peers, per_step)
        for step, place, number in own_batches(self.peers.roles, self.peers.rank, self.step, per_step):
            if sender.finished:
                break
            self.step = step
            drafter = self.peers.roles.drafter_of(place)
            if drafter in sender.ended:
                continue
            waited = sender.credit_seconds
            batch = self.plan.batch(number)
            features, tokens, seconds = self._features(batch)
            if sender.credit(drafter, batch.batch_id):
                kind = str(features.dtype).removeprefix("torch.")
                label = Label(batch.batch_id, tokens, tuple(self.taps), self.tag, tuple(features.shape), kind)
                note = {
                    "seconds": seconds,
                    "credit_seconds": sender.credit_seconds - waited,
                    "ending": self.ending.is_set(),
                    "generators": pack_tensors(checkpoint.generator_states()),
                }
                sender.send(drafter, label, features, note)
        sender.finish()

    def _features(self, batch: Batch) -> tuple[Tensor, str, float]:
        """Features of a batch, the digest of its tokens, and the seconds they took."""
        started = time.perf_counter()
        collated = collate(batch, self.samples, self.target.facts.pad_id)
        device = torch.device(self.context.device)
        input_ids = torch.from_numpy(collated["input_ids"]).to(device)
        attention_mask = torch.from_numpy(collated["attention_mask"]).to(device=device, dtype=torch.long)
        features = self.target.features(input_ids, attention_mask, self.taps)
        tokens = token_digest(input_ids, attention_mask)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return features, tokens, time.perf_counter() - started

    def outputs(self) -> Outputs:
        """Nothing: the lead writes."""
        return Outputs([], results={"step": self.step}, kernels=self.kernels)


def common_facts(params: TrainParams, directory: Path, first: Batch) -> dict[str, Any]:
    """What no two ranks may have otherwise. The id of the first batch stands for dataset and batching."""
    taps = list(drafter_config(params).target_layer_ids)
    return {"training": directory.name, "first batch": first.batch_id, "taps": taps, "dtype": params.dtype}


# ---------------------------------------------------------------- a drafter


class StreamLearner(Learner):
    """A learner whose features come from another process. `receiver` and `tag` are set when the ranks have agreed."""

    receiver: Receiver
    tag: str
    waited = 0.0

    def features(self, input_ids: Tensor, attention_mask: Tensor, batch: Batch) -> Tensor:
        """The features of a batch, once they have come and are what this rank's own tokens say they must be."""
        shape = (*input_ids.shape, self.config.feature_size)
        expected = Label(
            batch.batch_id,
            token_digest(input_ids, attention_mask),
            tuple(self.config.target_layer_ids),
            self.tag,
            tuple(shape),
            self.params.dtype,
        )
        features = self.receiver.take(batch, expected)
        lengths = [int(length) for length in batch.lengths]
        taps = len(self.config.target_layer_ids)
        check_features(features, lengths, batch.batch_id, taps=taps, width=self.config.feature_size)
        return features

    def whole_gradients(self) -> list[Tensor]:
        """The gradients of all masters in the order of their names, contiguous; zeros where no batch gave any."""
        for name in sorted(self.masters):
            master = self.masters[name]
            master.grad = torch.zeros_like(master) if master.grad is None else master.grad.contiguous()
        return [gradient for name in sorted(self.masters) if (gradient := self.masters[name].grad) is not None]


class DrafterRank(Trainer):
    """The loop of `Trainer`, on each of M drafters; the lead alone reads the schedule and writes."""

    learner: StreamLearner

    def __init__(
        self,
        params: TrainParams,
        inputs: Inputs,
        workdir: Path,
        context: HostContext,
        ending: threading.Event,
        peers: Peers,
    ) -> None:
        super().__init__(params, inputs, workdir, context, ending)
        self.peers = peers
        self.last = 0
        self.ranks_generators: dict[str, Tensor] = {}
        self.balance = Balance()

    def begin(self) -> None:
        """As `Trainer.begin`, on what the ranks agree on and from where the lead resumes."""
        self.samples = load_train_samples(self.dataset.directory)
        if self.peers.leads:
            check_tokens(self.samples, self.params.target.vocab_size, self.config.mask_token_id)
        self.plan = batch_plan(self.samples, self.dataset, self.buckets)
        per_step = self.plan.params.batches_per_step
        largest = largest_batch(self.plan.batch_sizes.tolist(), self.plan.longest.tolist())
        limit = token_limit(self.params.features_in_flight, largest, self.peers.roles)
        ends = load_target_ends(self.params, self.target_path, self.context.device)
        self.learner = StreamLearner(self.params, ends, self.config, self.context.device)
        common = common_facts(self.params, self.directory, self.plan.batch(0))
        self.learner.tag, self.kernels = agree(self.peers, common, None, self.params.dtype)
        if self.peers.leads:
            prepare_folder(self.params, self.directory)
            self._resume()
        self._take_over()
        if self.peers.leads:
            self._open()
        warm_up(self.peers, per_step)
        self.places = self.peers.roles.places(self.peers.rank, per_step)
        self.learner.receiver = self.receiver = Receiver(
            self.peers,
            self.plan,
            per_step,
            first_step=self.step,
            width=self.config.feature_size,
            dtype=DTYPES[self.params.dtype],
            limit=limit,
        )

    def _take_over(self) -> None:
        """Brings every rank to the step, weights, moments and generators that the lead has."""
        moments = self.learner.optimizer.state() if self.peers.leads else {}
        shapes = {name: [list(value.shape), str(value.dtype).removeprefix("torch.")] for name, value in moments.items()}
        start = {
            "step": self.step,
            "nonfinite": self.nonfinite,
            "generators": pack_tensors(self.generators),
            "moments": shapes,
        }
        start = self.peers.from_lead(start)
        self.step = self.first_step = start["step"]
        self.nonfinite = start["nonfinite"]
        if not self.peers.leads:
            checkpoint.restore_generators(own_generators(start["generators"], self.peers.rank))
            moments = {name: torch.empty(shape, dtype=DTYPES[kind]) for name, (shape, kind) in start["moments"].items()}
        masters = [self.learner.masters[name].data for name in sorted(self.learner.masters)]
        self.peers.spread(masters)
        self.peers.spread([moments[name] for name in sorted(moments)])
        if not self.peers.leads:
            self.learner.publish()
            self.learner.optimizer.load(moments)

    def _topology(self) -> dict[str, Any]:
        roles = self.peers.roles
        return {
            "targets": roles.targets,
            "drafters": roles.drafters,
            "colocate": False,
            "world_size": roles.world_size,
        }

    def train(self) -> None:
        """As `Trainer.train`; then ends the stream, and the lead says which side had to wait."""
        super().train()
        self.receiver.end()
        if self.peers.leads:
            self.context.progress.say(self.balance.sentence())

    def _more_to_do(self) -> bool:
        word: Any = None
        if self.peers.leads:
            word = {"more": super()._more_to_do(), "last": max(self.scheduled(), default=0)}
        word = self.peers.from_lead(word, drafters_only=True)
        self.last = word["last"]
        if word["more"]:
            self.receiver.grant(self.last)
        return bool(word["more"])

    def _learn(self, batches: Sequence[Batch]) -> StepSums:
        sums = StepSums()
        waited, waiting = self.receiver.stalled_seconds, self.receiver.waiting
        computing = credit = 0.0
        for place in self.places:
            self.learner.add(batches[place], self.samples, sums)
            note = self.receiver.notes[self.peers.roles.target_of(place)]
            computing += note["seconds"]
            credit += note["credit_seconds"]
            if note["ending"]:
                self.ending.set()
            self.receiver.done()
            self.receiver.grant(self.last)
        started = time.perf_counter()
        self.peers.add_up(self.learner.whole_gradients())
        sums.target_seconds = computing
        seconds = {
            "data": sums.data_seconds,
            "drafter_features": self.receiver.stalled_seconds - waited,
            "drafter_reduce": time.perf_counter() - started,
            "target_credit": credit,
        }
        return self._whole_step(sums, seconds, waiting)

    def _whole_step(self, sums: StepSums, seconds: dict[str, float], waiting: int) -> StepSums:
        """The sums over all drafters; seconds by rank of the role that spent them."""
        size = self.params.block_size
        roles = self.peers.roles
        if sums.correct is None or sums.counts is None:
            sums.correct = sums.counts = np.zeros(size, dtype=np.int64)
        own = [
            sums.loss,
            sums.weight,
            sums.anchors,
            sums.tokens,
            sums.padded,
            sums.target_seconds,
            sums.drafter_seconds,
        ]
        arrived = [float(waiting) if rank == self.peers.rank else 0.0 for rank in range(roles.lead, roles.world_size)]
        vector = torch.tensor(
            [*own, *seconds.values(), float(self.ending.is_set()), *arrived, *sums.correct, *sums.counts],
            dtype=torch.float64,
        )
        self.peers.add_up([vector])
        values = iter(vector.tolist())
        loss, weight, anchors, tokens, padded, computing, learning = (next(values) for _ in own)
        spent = {name: next(values) / roles.drafters for name in seconds}
        spent["target_credit"] *= roles.drafters / roles.targets
        if next(values) > 0:
            self.ending.set()
        return StepSums(
            loss=loss,
            weight=weight,
            anchors=int(anchors),
            tokens=int(tokens),
            padded=int(padded),
            target_seconds=computing / roles.targets,
            drafter_seconds=learning / roles.drafters,
            features_waiting=[int(next(values)) for _ in arrived],
            correct=np.asarray([next(values) for _ in range(size)], dtype=np.int64),
            counts=np.asarray([next(values) for _ in range(size)], dtype=np.int64),
            stalled_seconds=spent,
        )

    def _tell(self, line: MetricsLine) -> None:
        if self.peers.leads:
            self.balance.add(line)
            super()._tell(line)

    def _after_step(self) -> None:
        due = self.peers.from_lead(self._due() if self.peers.leads else None, drafters_only=True)
        if not due:
            return
        self._compare()
        if self.peers.leads:
            self._save()
            with locked(schedule.schedule_lock(self.directory)):
                self._tell_status()

    def _compare(self) -> None:
        """Refuses to save when two drafters have drifted apart; collects every rank's generators for the state.

        Raises:
            PermanentError: their weights differ; names both ranks and digests.
        """
        own = {f"rank{self.peers.rank}.{name}": value for name, value in checkpoint.generator_states().items()}
        found = self.peers.gather(
            {
                "step": self.step,
                "weights": weights_digest(self.learner.masters) if self.peers.roles.drafters > 1 else "",
                "generators": pack_tensors(own) | self._targets_generators(),
            },
            drafters_only=True,
        )
        for index, facts in enumerate(found):
            for name in ("step", "weights"):
                if facts[name] != found[0][name]:
                    lead = self.peers.roles.lead
                    _refuse_other(self.peers.roles, lead + index, lead, name, facts[name], found[0][name])
        self.ranks_generators = {}
        for facts in found:
            self.ranks_generators |= unpack_tensors(facts["generators"])

    def _targets_generators(self) -> dict[str, str]:
        """The generators of the targets as they were when they had computed this step's batches."""
        return {
            f"rank{rank}.{name}": text
            for rank, note in self.receiver.notes.items()
            for name, text in note["generators"].items()
        }

    def _generators(self) -> dict[str, Tensor]:
        """The lead's under plain names, which any topology resumes from, and everybody's under their ranks."""
        return {**self.ranks_generators, **super()._generators()}


class Balance:
    """Which side waits for the other, over all steps of an attempt."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.drafters = 0.0
        self.targets = 0.0

    def add(self, line: MetricsLine) -> None:
        """Adds a step."""
        self.seconds += line.seconds
        self.drafters += line.stalled_seconds["drafter_features"]
        self.targets += line.stalled_seconds["target_credit"]

    def sentence(self) -> str:
        """What a person should know: `the drafters starve: ...`."""
        whole = max(self.seconds, 1e-9)
        drafters, targets = self.drafters / whole, self.targets / whole
        who = "the drafters starve" if drafters > targets else "the targets have to wait"
        return (
            f"{who}: a drafter waited for features {drafters:.0%} of the time ({self.drafters:.1f} s), "
            f"a target for room to send {targets:.0%} ({self.targets:.1f} s), of {self.seconds:.1f} s"
        )


# ---------------------------------------------------------------- the process


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
    peers = Peers(roles, place.rank, context.device, params.rank_timeout)
    kind = TargetRank if roles.role(place.rank) == "target" else DrafterRank
    rank: TargetRank | DrafterRank = kind(params, inputs, workdir, context, ending, peers)
    try:
        rank.begin()
        context.progress.say(f"{roles.name(place.rank)} begins after step {rank.step}, on {context.device}")
        rank.train()
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


def main(argv: Sequence[str] | None = None) -> int:
    """The command line of a rank. Exit status: 0 done or ended on request, else `EXIT_BY_KIND`."""
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
    ending = threading.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: ending.set())
    end_with_parent(arguments.parent or os.getppid())
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
    params_file = read_params(arguments.directory)
    placement = attempt.placement
    params = resolved_params(params_file.params, placement.values)
    target_path = Path(placement.target_path) if placement.target_path else None
    inputs = load_inputs(params_file, arguments.store, target_path=target_path)
    context = HostContext(
        host=placement.host,
        device=placement.device,
        threads=placement.threads,
        attempt=attempt.attempt,
        placement=placement.values,
        progress=Progress("train"),
    )
    run_rank(params, inputs, arguments.directory, context, ending)


def _end_now() -> None:
    """Ends without waiting for threads that still wait for a rank that is gone."""
    try:
        status = main()
    except SystemExit as wanted:
        status = int(wanted.code or 0)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _end_now()
