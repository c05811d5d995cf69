"""A rank that learns: the loop of `Trainer` on each of M drafters, with features from elsewhere and gradients added up.

Every drafter adds up the gradients of its own batches, then all of them add up everybody's in the order of ranks, divide by
the weight of the whole step and make the same update; at every checkpoint they compare a digest of their weights. The
first drafter leads: it reads the schedule, decides when to save and when to end, and is the only one that writes. What it
decides goes to the others with the step; targets learn of the end from the credits they wait for.

Costs the target's embedding and head, masters, moments and gradients like the single process, `features_in_flight` tokens
of features, and the buffers of `peers.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash.base.environment import collect
from dflash.base.records import MetricsLine
from dflash.base.stage import HostContext, Inputs
from dflash.data.batches import Batch, Samples, load_train_samples
from dflash.model.target import check_features
from dflash.train import checkpoint, preflight, probe, rank_probe, trackers
from dflash.train.agreement import (
    agree,
    common_facts,
    own_generators,
    pack_tensors,
    refuse_other,
    unpack_tensors,
    weights_digest,
)
from dflash.train.forward import parts, require_compiler
from dflash.train.peers import Peers
from dflash.train.prepare import check_tokens, load_target_ends
from dflash.train.pulse import PULSE
from dflash.train.rank_probe import RanksSubject
from dflash.train.stream import Label, Receiver, batch_tokens, largest_batch, token_limit, warm_up
from dflash.train.train_params import TrainParams
from dflash.train.trainer import (
    DTYPES,
    Learner,
    StepSums,
    Trainer,
    batch_plan,
    memory_bytes,
    prepare_folder,
    starving,
)

BALANCE_EVERY = 60.0
"""Seconds between two words on which side waits."""


class StreamLearner(Learner):
    """A learner whose features come from another process. `receiver` and `tag` are set when the ranks have agreed."""

    receiver: Receiver
    tag: str
    whole: Tensor
    row = 0

    def take(self, batch: Batch, samples: Samples) -> None:
        """Waits for the features of a batch, which must be what this rank's own tokens say; `add` then learns from them."""
        shape = (len(batch.lengths), int(batch.lengths.max()), self.config.feature_size)
        expected = Label(
            batch.batch_id,
            batch_tokens(batch, samples, self.target.facts.pad_id),
            tuple(self.config.target_layer_ids),
            self.tag,
            shape,
            self.params.dtype,
        )
        self.whole, self.row = self.receiver.take(batch, expected), 0
        lengths = [int(length) for length in batch.lengths]
        taps = len(self.config.target_layer_ids)
        check_features(self.whole, lengths, batch.batch_id, taps=taps, width=self.config.feature_size)

    def features(self, input_ids: Tensor, attention_mask: Tensor, batch: Batch) -> Tensor:
        """The features of the next samples of the batch that was taken, all of them unless it is cut."""
        rows, length = input_ids.shape
        found = self.whole[self.row : self.row + rows, :length].contiguous()
        self.row += rows
        return found

    def faults(self, features: Tensor, batch: Batch) -> Tensor | None:
        """None: `take` has looked at the whole batch."""
        return None

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
        self.writes = peers.leads
        self.last = 0
        self.ranks_generators: dict[str, Tensor] = {}
        self.balance = Balance()

    def begin(self) -> None:
        """As `Trainer.begin`, on what the ranks agree on and from where the lead resumes."""
        if self.peers.leads:
            trackers.check_installed(self.params.tracker)
            prepare_folder(self.params, self.directory)
            self._check_disk()
        require_compiler(self.params, self.context.device)
        self.samples = load_train_samples(self.dataset.directory)
        if self.peers.leads:
            check_tokens(self.samples, self.params.target.vocab_size, self.config.mask_token_id)
        self.plan = batch_plan(self.samples, self.dataset, self.buckets)
        per_step = self.plan.params.batches_per_step
        largest = largest_batch(self.plan.batch_sizes.tolist(), self.plan.longest.tolist())
        limit = token_limit(self.params.features_in_flight, largest, self.peers.roles)
        ends = load_target_ends(self.params, self.target_path, self.context.device)
        self.learner = StreamLearner(self.params, ends, self.config, self.context.device)
        self.learner.forward.fix_shapes(self.plan)
        common = common_facts(self.params, self.directory, self.plan.batch(0))
        self.learner.tag, self.kernels = agree(self.peers, common, None, self.params.dtype)
        self._probe_ranks()  # while the drafters have the weights that the seed drew
        if self.peers.leads:
            self._resume()
        self._take_over()
        self._check_memory(limit)
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

    def _probe_ranks(self) -> None:
        arguments = self.params, self.learner.target, self.learner.drafter, self.context.device
        if self.peers.leads:
            subject = RanksSubject(*arguments, self.peers)
            self.accepted = rank_probe.attend(self.directory, subject, collect(self.kernels), **self._probing())
        else:
            rank_probe.answer_lead(self.peers, None)
        rank_probe.compare_drafters(self.peers, probe.Subject(*arguments), self.directory)

    def _check_memory(self, limit: int) -> None:
        drafters = self.peers.roles.drafters
        need = preflight.drafter_need(self.params, self.config, self.plan, limit, drafters, has_moments=self.step > 0)
        copies = sum(preflight.checkpoint_bytes(self.params, self.config)) if self.peers.leads else 0
        preflight.refuse_ranks(self.peers, need, self.context.device, copies)

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

    def train_and_tell(self) -> None:
        """As `Trainer.train_and_tell`: the lead tells the tracker."""
        if self.peers.leads:
            super().train_and_tell()
        else:
            self.train()

    def train(self) -> None:
        """As `Trainer.train`; then ends the stream, and the lead says which side had to wait."""
        self.balance.begin()
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
        PULSE.works("learning", self.step + 1)
        sums = StepSums()
        waited, waiting = self.receiver.stalled_seconds, self.receiver.waiting
        computing = credit = 0.0
        for place in self.places:
            self.learner.take(batches[place], self.samples)
            with preflight.memory_explained(f"step {self.step + 1}"):
                for part in parts([batches[place]], self.params.micro_batch):
                    self.learner.add(part, self.samples, sums)
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
        memory = self._own_memory()
        vector = torch.tensor(
            [*own, *seconds.values(), float(self.ending.is_set()), *arrived, *memory, *sums.correct, *sums.counts],
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
            memory={f"rank {rank}": most for rank in range(roles.world_size) if (most := int(next(values)))},
            correct=np.asarray([next(values) for _ in range(size)], dtype=np.int64),
            counts=np.asarray([next(values) for _ in range(size)], dtype=np.int64),
            stalled_seconds=spent,
        )

    def _own_memory(self) -> list[float]:
        """The most GPU memory in use since the last step, by rank: this one's, and of targets whose first partner it is."""
        roles, per_step = self.peers.roles, self.plan.params.batches_per_step
        found = [0.0] * roles.world_size
        found[self.peers.rank] = float(sum(memory_bytes().values()))
        for rank, note in self.receiver.notes.items():
            if roles.partners(rank, per_step)[0] == self.peers.rank:
                found[rank] = float(note["memory"])
        return found

    def _tell(self, line: MetricsLine) -> None:
        if not self.peers.leads:
            return
        self.balance.add(line)
        super()._tell(line)
        if self.balance.due():
            self.context.progress.say(self.balance.sentence())

    def _after_step(self) -> None:
        due = self.peers.from_lead(self._due() if self.peers.leads else None, drafters_only=True)
        if due:
            self._compare()
        if not self.peers.leads:
            return
        if due:
            self._save()
        elif self.step == self.first_step + 1:
            self._prepare_copy()
        self._collect(wait=False)

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
                    refuse_other(self.peers.roles, lead + index, lead, name, facts[name], found[0][name])
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
    """Which side waits for the other, over the whole of an attempt, checkpoints included."""

    def __init__(self) -> None:
        self.started = self.told = 0.0
        self.drafters = 0.0
        self.targets = 0.0

    def begin(self) -> None:
        """Time counts from here on."""
        self.started = self.told = time.perf_counter()

    def add(self, line: MetricsLine) -> None:
        """Adds a step."""
        self.drafters += line.stalled_seconds["drafter_features"]
        self.targets += line.stalled_seconds["target_credit"]

    def due(self) -> bool:
        """Whether people have heard nothing of it for `BALANCE_EVERY` seconds."""
        if time.perf_counter() - self.told < BALANCE_EVERY:
            return False
        self.told = time.perf_counter()
        return True

    def sentence(self) -> str:
        """What a person should know: `the drafters starve by 31%: ...`."""
        seconds = max(time.perf_counter() - self.started, 1e-9)
        found = starving({"drafter_features": self.drafters, "target_credit": self.targets}, seconds)
        names = {"drafter": "the drafters starve by", "target": "the targets have to wait, by"}
        who = "".join(f"{names[side]} {share:.0%}" for side, share in found.items()) or "neither side waits"
        return (
            f"{who}: a drafter waited for features {self.drafters / seconds:.0%} of the time ({self.drafters:.1f} s), "
            f"a target for room to send {self.targets / seconds:.0%} ({self.targets:.1f} s), of {seconds:.1f} s"
        )
