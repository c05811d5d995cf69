"""Trains a drafter: target features -> drafter -> objective -> update, in one process (roles colocated).

With `topology.colocate: false` the roles are processes of their own (`ranks.py`), and the loop below is the drafters'.

A step is `batches_per_step` batches of the plan. Loss and gradient are sums over all of them divided once by the sum of the
weights, so neither depends on how a step is cut. Nothing is drawn from a stream: batches are a function of the step, anchors
of (seed, sample, epoch), so a resumed training does what an undisturbed one would have done, bit for bit on a CPU.

    python -m dflash.train.begin trainer --directory DIR --store STORE --attempt N --parent PID     (started by the launcher)

Checkpoints are written by a thread beside the loop (`snapshot.py`); training waits for the one before, and for the copy.

Costs: target and drafter weights in compute precision, 4 bytes a parameter for masters (when that is bfloat16) and for
gradients, 8 for AdamW's moments; features of one batch (K * H numbers a token); logits of `logit_chunk` rows. On the host
one checkpoint.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash.base.environment import collect, store_environment
from dflash.base.errors import CorruptError, DflashError, PermanentError
from dflash.base.files import locked, write_json
from dflash.base.records import Lineage, MetricsLine, Receipt, now
from dflash.base.stage import HostContext, Inputs, Outputs, Upstream
from dflash.data.batches import Batch, BatchPlan, Samples, collate, load_train_samples
from dflash.data.buckets_params import BucketsParams
from dflash.hosts import lease
from dflash.model.drafter import Drafter, DrafterConfig
from dflash.model.target import Target, check_feature_shape, feature_faults, refuse_faults
from dflash.model.transfer import on_device
from dflash.train import checkpoint, preflight, probe, schedule, trackers
from dflash.train.anchors import batch_anchors
from dflash.train.attempts import EXIT_BY_KIND, Attempt, attempt_path, read_attempts
from dflash.train.child import handed_over, leave_failure
from dflash.train.continuation import load_parent
from dflash.train.forward import DraftForward, parts, require_compiler
from dflash.train.objective import labels_and_weights, objective
from dflash.train.optimizer import Optimizer, learning_rate
from dflash.train.prepare import check_tokens, drafter_config, load_checked_target
from dflash.train.snapshot import Background, HostCopy
from dflash.train.telemetry import Metrics, alert
from dflash.train.train_params import TrainParams

SLOW_DISK = 1.0
"""Seconds that training may wait for the checkpoint before until somebody is told."""
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def run(params: TrainParams, inputs: Inputs, workdir: Path, host_context: HostContext) -> Outputs:
    """Trains up to the last scheduled step, from the newest state that verifies. `workdir` is the training's own folder.

    Args:
        params: resolved, placement included.
        inputs: upstreams `dataset` and `buckets`; `target_path` unless the target is drawn from a seed.
        workdir: `<store>/train/<key>`, with its `params.json`; `schedule.json` is made from `params` when there is none.
        host_context: device, threads and attempt.

    Raises:
        PermanentError: data, target or parent do not fit; too many non-finite steps; the last checkpoint did not fit on disk.
        ConfigError: the drafter cannot be shaped like that.
    """
    return _train(params, inputs, workdir, host_context, threading.Event())


def _train(
    params: TrainParams, inputs: Inputs, workdir: Path, context: HostContext, ending: threading.Event
) -> Outputs:
    if not params.topology.colocate:
        from dflash.train.ranks import run_rank

        return run_rank(params, inputs, workdir, context, ending)
    prepare_process(params, context)
    prepare_folder(params, workdir)
    trainer = Trainer(params, inputs, workdir, context, ending)
    trackers.check_installed(params.tracker)
    trainer.begin()
    trainer.train_and_tell()
    return trainer.outputs()


def prepare_process(params: TrainParams, context: HostContext) -> None:
    """Threads, seed and determinism of this process."""
    torch.set_num_threads(context.threads)
    torch.manual_seed(params.seed)
    if context.device == "cpu":
        torch.use_deterministic_algorithms(True)


def prepare_folder(params: TrainParams, workdir: Path) -> None:
    """A schedule where there is none, and nothing left of a killed trainer."""
    if not schedule.read_schedule(workdir):
        schedule.merge_steps(workdir, params.steps())
    checkpoint.sweep(workdir)


# ---------------------------------------------------------------- one step


class Mark:
    """A moment in the work of a device, without waiting for it: an event on a GPU, the clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self.event is not None:
            self.event.record(torch.cuda.current_stream(device))  # whichever device is the current one
        self.clock = time.perf_counter()

    def until(self, later: Mark) -> float:
        """Seconds to a later mark; both must have passed."""
        if self.event is None or later.event is None:
            return later.clock - self.clock
        return float(self.event.elapsed_time(later.event)) / 1e3


@dataclass
class Unread:
    """What a batch has left on the device: loss, correct slots and faults of its `rows` of features (3 flags each) as one tensor
    of float64, and the moments when features were begun, were there, and had been learned from."""

    batch_id: str
    numbers: Tensor
    slots: int
    rows: int
    marks: tuple[Mark, Mark, Mark]


@dataclass
class StepSums:
    """What the batches of a step add up to. Seconds by role; loss and weight are sums."""

    loss: float = 0.0
    weight: float = 0.0
    anchors: int = 0
    tokens: int = 0
    padded: int = 0
    target_seconds: float = 0.0
    drafter_seconds: float = 0.0
    data_seconds: float = 0.0
    correct: np.ndarray | None = None
    counts: np.ndarray | None = None
    stalled_seconds: dict[str, float] = field(default_factory=dict)
    features_waiting: list[int] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)
    unread: list[Unread] = field(default_factory=list)

    def read(self) -> None:
        """Waits for the device once, and adds what the batches since the last reading have left there.

        Raises:
            PermanentError: features that no healthy target gives; names the batch.
        """
        if not self.unread:
            return
        numbers = torch.cat([item.numbers for item in self.unread]).tolist()
        for item in self.unread:
            mine, numbers = numbers[: len(item.numbers)], numbers[len(item.numbers) :]
            rows, (loss, *correct) = item.rows, mine[: 1 + item.slots]
            if rows:
                flags = mine[1 + item.slots :]
                refuse_faults([flags[start : start + rows] for start in range(0, 3 * rows, rows)], item.batch_id)
            self.loss += loss
            found = np.asarray(correct, dtype=np.int64)
            self.correct = found if self.correct is None else self.correct + found
            ready, drafted, done = item.marks
            self.target_seconds += ready.until(drafted)
            self.drafter_seconds += drafted.until(done)
        self.unread = []

    def tokens_per_second(self) -> dict[str, float]:
        """What each role would do if it never waited: tokens over the seconds it worked."""
        return {
            "target": self.tokens / max(self.target_seconds, 1e-9),
            "drafter": self.tokens / max(self.drafter_seconds, 1e-9),
        }

    def accuracy_by_slot(self, block_size: int) -> list[float | None]:
        """Accuracy of slots 1 to block_size - 1; None where nothing was supervised."""
        if self.counts is None or self.correct is None:
            return [None] * (block_size - 1)
        pairs = zip(self.correct.tolist()[1:], self.counts.tolist()[1:], strict=True)
        return [correct / count if count else None for correct, count in pairs]


class Learner:
    """The drafter with its masters and optimizer: takes batches, adds up gradients, updates once a step.

    Masters are the drafter's own weights unless it computes in bfloat16; then they are float32 copies of them.
    """

    def __init__(self, params: TrainParams, target: Target, config: DrafterConfig, device: str) -> None:
        self.params = params
        self.target = target
        self.config = config
        self.device = torch.device(device)
        self.compute = DTYPES[params.dtype]
        master = torch.float64 if params.dtype == "float64" else torch.float32
        self.drafter = Drafter(config, seed=None).to(device=self.device, dtype=master)
        self.drafter.draw_weights(params.seed)
        self.masters: dict[str, Tensor] = dict(self.drafter.named_parameters())
        if self.compute != master:
            self.masters = {name: weight.detach().clone() for name, weight in self.masters.items()}
            self.drafter.to(self.compute)
        self.weights: dict[str, Tensor] = dict(self.drafter.named_parameters())
        self.forward = DraftForward(params, self.drafter)
        self.optimizer = Optimizer(self.masters, params)

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Takes over weights by name, strictly.

        Raises:
            CorruptError: a name or shape that does not fit.
        """
        wanted = {name: tuple(weight.shape) for name, weight in self.masters.items()}
        found = {name: tuple(weight.shape) for name, weight in weights.items()}
        if wanted != found:
            odd = min(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
            raise CorruptError(f"weight {odd} has shape {found.get(odd)}, this drafter wants {wanted.get(odd)}")
        with torch.no_grad():
            for name, weight in weights.items():
                self.masters[name].copy_(weight)
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Rounds the masters into the weights that compute."""
        for name, weight in self.weights.items():
            if weight is not self.masters[name]:
                weight.copy_(self.masters[name])

    def features(self, input_ids: Tensor, attention_mask: Tensor, batch: Batch) -> Tensor:
        """The target's taps of a batch; `attention_mask` is on the CPU."""
        return self.target.features(input_ids, attention_mask, list(self.config.target_layer_ids))

    def faults(self, features: Tensor, batch: Batch) -> Tensor | None:
        """What is wrong with the features, for `StepSums.read` to refuse; None where that has been looked at."""
        counts, taps = [int(length) for length in batch.lengths], len(self.config.target_layer_ids)
        check_feature_shape(features, counts, batch.batch_id, taps=taps, width=self.config.feature_size)
        return feature_faults(features, counts, taps)

    def add(self, batch: Batch, samples: Samples, sums: StepSums) -> None:
        """`learn`, and reads what it gave."""
        self.learn(batch, samples, sums)
        sums.read()

    def learn(self, batch: Batch, samples: Samples, sums: StepSums) -> None:
        """Forward and backward of one batch; gradients and sums are added to what is there. No anchor is no special case.

        Never waits for the device: what depends on tokens and anchors alone is computed on the host, and what the device finds
        stays there until `sums.read`.
        """
        started = time.perf_counter()
        collated = collate(batch, samples, self.target.facts.pad_id)
        kind = torch.float64 if self.params.dtype == "float64" else torch.float32
        tokens, loss_mask = torch.from_numpy(collated["input_ids"]), torch.from_numpy(collated["loss_mask"]).to(kind)
        kept = torch.from_numpy(collated["attention_mask"]).long()
        at, is_anchor = batch_anchors(
            loss_mask,
            seed=self.params.seed,
            sample_ids=collated["sample_ids"],
            epoch=batch.epoch,
            max_anchors=self.params.max_anchors,
        )
        labels, weights = labels_and_weights(
            tokens, loss_mask, at, self.params.block_size, gamma=self.params.gamma, anchor_valid=is_anchor
        )
        counted = weights.flatten().nonzero().flatten()
        input_ids, attention_mask, anchors, valid = (
            on_device(tensor, self.device) for tensor in (tokens, kept, at, is_anchor)
        )
        ready = Mark(self.device)
        features = self.features(input_ids, kept, batch)
        faults = self.faults(features, batch)
        drafted = Mark(self.device)
        hidden = self.forward(
            features,
            input_ids,
            anchors,
            self.target.embed,
            anchor_valid=valid,
            attention_mask=attention_mask,
            bucket=batch.bucket,
        )
        found = objective(
            hidden,
            on_device(labels, self.device),
            on_device(weights, self.device),
            self.target.lm_head,
            logit_chunk=self.params.logit_chunk,
            counted=on_device(counted, self.device),
            entropy=self.forward.entropy,
        )
        found.loss_sum.backward()
        self._add_gradients()
        left = [found.loss_sum.detach()[None], found.correct, *([] if faults is None else [faults.flatten()])]
        numbers = torch.cat([part.double() for part in left])
        rows = 0 if faults is None else faults.shape[1]
        marks = ready, drafted, Mark(self.device)
        sums.unread.append(Unread(batch.batch_id, numbers, self.params.block_size, rows, marks))
        sums.weight += float(weights.sum())
        counts = (weights > 0).flatten(0, 1).sum(dim=0).numpy()
        sums.counts = counts if sums.counts is None else sums.counts + counts
        sums.anchors += int(is_anchor.sum())
        sums.tokens += int(batch.lengths.sum())
        sums.padded += batch.padded_tokens
        sums.data_seconds += ready.clock - started

    def _add_gradients(self) -> None:
        """Moves gradients in compute precision to the masters, where they add up in theirs."""
        for name, weight in self.weights.items():
            master = self.masters[name]
            if weight is master or weight.grad is None:
                continue
            gradient = weight.grad.to(master.dtype)
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            weight.grad = None

    def gradient_norm(self, weight: float) -> float:
        """Divides the summed gradients by the step's weight and returns their norm; clears nothing."""
        gradients = [master.grad for master in self.masters.values() if master.grad is not None]
        if weight > 0:
            torch._foreach_div_(gradients, weight)
        return float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0

    def update(self, norm: float, step: int) -> None:
        """Clips and updates."""
        if norm > self.params.clip:
            gradients = [master.grad for master in self.masters.values() if master.grad is not None]
            torch._foreach_mul_(gradients, self.params.clip / (norm + 1e-6))
        self.optimizer.step(learning_rate(self.params, step))
        self.publish()

    def clear_gradients(self) -> None:
        """Forgets the gradients of a step."""
        for master in self.masters.values():
            master.grad = None


# ---------------------------------------------------------------- the loop


class Trainer:
    """One attempt: resumes, steps, saves what is scheduled, and ends at the last scheduled step or when asked to."""

    def __init__(
        self, params: TrainParams, inputs: Inputs, workdir: Path, context: HostContext, ending: threading.Event
    ) -> None:
        self.params = params
        self.directory = workdir
        self.context = context
        self.ending = ending
        self.dataset = inputs.one("dataset")
        self.buckets = inputs.one("buckets")
        self.target_path = inputs.target_path
        self.store = Path(str(context.placement.get("store") or self.dataset.directory.parents[1]))
        self.config = drafter_config(params)
        self.step = self.first_step = 0
        self.nonfinite = 0
        self.history: list[dict[str, int]] = []
        self.generators: dict[str, Tensor] = {}
        self.parent: dict[str, Any] | None = None
        self.writes = True  # of several drafters one
        self.saved: list[int] = []
        self.writing: list[int] = []
        self.copy = HostCopy(torch.device(context.device))
        self.background = Background()
        self.checkpoint_seconds = 0.0
        self.alert = ""
        self.accepted: list[dict[str, Any]] = []
        self.kernels: dict[str, Any] = {}
        self._last_due = 0
        self._schedule: tuple[tuple[int, int], list[int]] | None = None

    def _check_disk(self) -> None:
        done = max(schedule.resumable_steps(self.directory), default=0)
        preflight.check_disk(self.params, self.config, self.directory, sum(step > done for step in self.scheduled()))

    def begin(self) -> None:
        """Loads and checks everything, resumes, and writes down what will run. No batch is read before that is on disk."""
        self._check_disk()
        require_compiler(self.params, self.context.device)
        self.samples = load_train_samples(self.dataset.directory)
        check_tokens(self.samples, self.params.target.vocab_size, self.config.mask_token_id)
        self.plan = batch_plan(self.samples, self.dataset, self.buckets)
        target = load_checked_target(self.params, self.target_path, self.context.device)
        self.kernels = target.kernels.to_dict()
        self.learner = Learner(self.params, target, self.config, self.context.device)
        self.learner.forward.fix_shapes(self.plan)
        self.accepted = self._probe()  # while the drafter has the weights that the seed drew
        self._resume()
        preflight.check_memory(
            self.params, self.config, self.plan, target, self.context.device, has_moments=self.step > 0
        )
        self._open()

    def _open(self) -> None:
        """Writes down what will run and opens what is written while it does."""
        self.writer = checkpoint.Writer(
            self.directory,
            self.config,
            checkpoint.collect_params(self.directory, self.store, "train"),
            self._manifest(),
            self.params.keep_states,
        )
        self._write_down()
        self.metrics = Metrics(self.directory / "metrics.jsonl")
        held = lease.holder(schedule.lease_path(self.directory))
        self.lease = (held.pid, held.start) if held is not None else (os.getpid(), "")
        self._tell_status()

    def _probe(self) -> list[dict[str, Any]]:
        subject = probe.Subject(self.params, self.learner.target, self.learner.drafter, self.context.device)
        return probe.attend(self.directory, subject, collect(self.kernels), **self._probing())

    def _probing(self) -> dict[str, Any]:
        return {
            "resumed": bool(schedule.existing_steps(self.directory)),
            "attempt": self.context.attempt,
            "accept": str(self.context.placement.get("accept_env", "")),
        }

    def _resume(self) -> None:
        state = checkpoint.newest_state(self.directory, self.directory.name)
        source = self.params.continue_from
        if source is not None:
            parent = load_parent(source, self.store, self.config)
            self.parent = parent.lineage
            if state is None:
                self.learner.load_weights(parent.weights)
                if parent.state is not None:
                    self.learner.optimizer.load(parent.state.moments)
                    checkpoint.restore_generators(parent.state.generators)
                    self.step = parent.state.next_step
        if state is not None:
            self.learner.load_weights(state.masters)
            self.learner.optimizer.load(state.moments)
            self.generators = state.generators
            checkpoint.restore_generators(state.generators)
            self.step, self.nonfinite, self.history = state.next_step, state.nonfinite, list(state.history)
        self.first_step = self.step
        self.history.append({"attempt": self.context.attempt, "from_step": self.step})

    def _manifest(self) -> dict[str, Any]:
        """The part of every manifest that does not change while this process lives."""
        receipts = {name: upstream.receipt for name, upstream in (("dataset", self.dataset), ("buckets", self.buckets))}
        found = {
            name: {
                "key": upstream.params.key,
                "digest": _content(receipt) if (receipt := receipts[name]) else None,
                "counts": receipt.counts.model_dump(mode="json") if receipt else {},
                "results": receipt.results if receipt else {},
            }
            for name, upstream in (("dataset", self.dataset), ("buckets", self.buckets))
        }
        plan = self.plan
        table = {
            "edges": plan.edges.tolist(),
            "samples": plan.samples.tolist(),
            "batch_sizes": plan.batch_sizes.tolist(),
            "batches": plan.batches.tolist(),
            "steps_per_epoch": plan.steps_per_epoch,
        }
        return {
            "placement": {**self.params.placement_values(), "host": self.context.host, "device": self.context.device},
            "dataset": found["dataset"],
            "buckets": {**found["buckets"], "table": table},
            "topology": self._topology(),
            "kernels": self.kernels,
            "environment": collect(self.kernels),
        }

    def _topology(self) -> dict[str, Any]:
        return {"targets": 1, "drafters": 1, "colocate": True, "world_size": 1}

    def _write_down(self) -> None:
        environment = self.writer.manifest["environment"]
        digest = store_environment(self.store, environment)
        write_json(
            self.directory / "resolved.json",
            {
                "key": self.writer.key,
                "attempt": self.context.attempt,
                "params": self.params.model_dump(mode="json"),
                "drafter": self.config.to_dict(),
                "config": {name: params.params for name, params in self.writer.params_files.items()},
                "kernels": self.kernels,
                "environment": digest,
                "from_step": self.step,
            },
        )

    def scheduled(self) -> list[int]:
        """The schedule, read anew when the file has changed: steps may be added while training runs."""
        stat = (self.directory / "schedule.json").stat()
        mark = (stat.st_ino, stat.st_mtime_ns)
        if self._schedule is None or self._schedule[0] != mark:
            self._schedule = mark, schedule.read_schedule(self.directory)
        return self._schedule[1]

    def train(self) -> None:
        """Steps until the last scheduled step, or until somebody asks to end.

        Raises:
            PermanentError: too many non-finite steps in a row, or the last step could not be saved.
        """
        try:
            while self._more_to_do():
                line = self.one_step(self.step)
                self.step += 1
                self._tell(line)
                self._after_step()
        finally:
            self.background.close()
        if (
            self.alert
            and self.step == max(self.scheduled(), default=0)
            and not schedule.exists(self.directory, self.step)
        ):
            raise PermanentError(self.alert, where=str(self.directory), remedy="Free some space and run again.")

    def train_and_tell(self) -> None:
        """Trains, and tells a tracker what the metrics say while it does."""
        told = {name: document.params for name, document in self.writer.params_files.items()}
        with trackers.following(self.params.tracker, self.directory, told):
            self.train()

    def outputs(self) -> Outputs:
        """What this attempt has saved."""
        files = [f"step_{step}/drafter/{name}" for step in self.saved for name in ("config.json", "model.safetensors")]
        return Outputs(files, results={"step": self.step, "saved": self.saved}, kernels=self.kernels)

    def _tell(self, line: MetricsLine) -> None:
        """A line of metrics, and one for people."""
        self.metrics.write(line)
        progress = self.context.progress
        progress.update(self.step - self.first_step, max(self.scheduled()) - self.first_step, "steps")
        if self.step == self.first_step + 1:
            rate = line.tokens / max(line.seconds, 1e-9)
            progress.say(f"step {self.step}: loss {line.loss:.4f}, {rate:,.0f} tok/s")

    def _more_to_do(self) -> bool:
        # Under the lock of the schedule: whoever adds a step either comes before and is served, or comes after and reads
        # that this trainer is ending.
        while True:
            with locked(schedule.schedule_lock(self.directory)):
                # Who is asked to end after the last step was passed unsaved makes one more, and saves that.
                may_end = self.step == self.first_step or self.step == self._last_due
                more = not (may_end and self.ending.is_set()) and self.step < max(self.scheduled(), default=0)
                if not (more or self.writing):
                    self._tell_status(ending=True)
            if more or not self.writing:
                return more
            self._collect(wait=True)  # meanwhile steps may be added

    def one_step(self, index: int) -> MetricsLine:
        """Trains on the batches of step `index` (from 0) and returns its line of metrics."""
        started = time.perf_counter()
        batches = self.plan.step(index)
        self.learner.clear_gradients()
        sums = self._learn(batches)
        norm = self.learner.gradient_norm(sums.weight)
        loss = sums.loss / sums.weight if sums.weight > 0 else 0.0
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._skip_nonfinite(index + 1, loss, norm, batches)
        else:
            self.nonfinite = 0
            if sums.weight > 0:  # a step without a single anchor teaches nothing
                self.copy.before_update()
                self.learner.update(norm, index + 1)
        seconds = time.perf_counter() - started
        stalled = {**sums.stalled_seconds, "checkpoint": self.checkpoint_seconds}
        self.checkpoint_seconds = 0.0
        return MetricsLine(
            attempt=self.context.attempt,
            step=index + 1,
            time=now(),
            loss=loss,
            accuracy_by_slot=sums.accuracy_by_slot(self.params.block_size),
            learning_rate=learning_rate(self.params, index + 1),
            gradient_norm=norm,
            anchors=sums.anchors,
            tokens=sums.tokens,
            seconds=seconds,
            tokens_per_second=sums.tokens_per_second(),
            stalled_seconds=stalled,
            features_waiting=sums.features_waiting,
            starving=starving(sums.stalled_seconds, seconds),
            padding_share=1.0 - sums.tokens / sums.padded,
            batch_ids=[batch.batch_id for batch in batches],
            buckets=[batch.bucket for batch in batches],
            memory_bytes=sums.memory,
        )

    def _learn(self, batches: Sequence[Batch]) -> StepSums:
        """Adds up the gradients of a step's batches."""
        sums = StepSums()
        with preflight.memory_explained(f"step {self.step + 1}"):
            for part in parts(batches, self.params.micro_batch):
                self.learner.learn(part, self.samples, sums)
            sums.read()
        sums.stalled_seconds = {"data": sums.data_seconds}
        sums.memory = memory_bytes()
        return sums

    def _skip_nonfinite(self, step: int, loss: float, norm: float, batches: Sequence[Batch]) -> None:
        """Leaves the weights as they are; ends training after `max_nonfinite` such steps in a row.

        Raises:
            PermanentError: there were too many; their batches are in `nonfinite.json`.
        """
        self.nonfinite += 1
        names = ", ".join(batch.batch_id for batch in batches)
        if self.writes:
            alert(f"step {step}: loss {loss}, gradient norm {norm}; the update is skipped (batches {names})")
        if self.nonfinite < self.params.max_nonfinite:
            return
        path = self.directory / "nonfinite.json"
        steps = range(step - self.nonfinite + 1, step + 1)
        ids = {str(number): [batch.batch_id for batch in self.plan.step(number - 1)] for number in steps}
        if self.writes:
            write_json(path, {"steps": ids, "loss": repr(loss), "gradient_norm": repr(norm)})
        raise PermanentError(
            f"loss or gradient was not finite for {self.nonfinite} steps in a row, up to step {step}",
            where=str(path),
            remedy="Lower train.lr, or look at the batches named there.",
        )

    def _after_step(self) -> None:
        if self._due():
            self._save()
        elif self.step == self.first_step + 1:
            self._prepare_copy()
        self._collect(wait=False)

    def _due(self) -> bool:
        """Whether this step is to be saved; when not, it has been passed."""
        # Under the lock of the schedule: whoever adds this very step either comes before and is served, or comes after and
        # reads that it has been passed.
        with locked(schedule.schedule_lock(self.directory)):
            schedule.serve_request(self.directory, self.step)
            due = self.step in self.scheduled() or self.ending.is_set()
            if due:
                self.writing.append(self.step)
            self._tell_status()
        if due:
            self._last_due = self.step
        return due

    def _save(self) -> None:
        """Copies the step to host memory and has it written; waits for the checkpoint before it, if that is still written."""
        started = time.perf_counter()
        self._collect(wait=True)
        waited = time.perf_counter() - started
        self._begin_saving()
        self.checkpoint_seconds += time.perf_counter() - started
        if waited > SLOW_DISK:
            alert(f"step {self.step}: training waited {waited:.1f} s until the checkpoint before it was written")

    def _begin_saving(self) -> None:
        self.background.prepared()
        copied = self.copy.begin(self._tensors())
        masters = {name: copied[f"master.{name}"] for name in self.learner.masters}
        state = checkpoint.State(
            masters=masters,
            moments={name.removeprefix("moment."): moment for name, moment in copied.items() if _is_moment(name)},
            next_step=self.step,
            nonfinite=self.nonfinite,
            history=list(self.history),
            generators=self._generators(),
        )
        weights = {name: copied.get(f"weight.{name}", masters[name]) for name in self.learner.weights}
        lineage, step = self._lineage(), self.step

        def write() -> None:
            self.copy.wait()
            self.writer.save(step, weights, state, lineage)

        self.background.submit(step, write)

    def _tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds, as it is now: masters, moments, and weights where they are not the masters."""
        masters, weights = self.learner.masters, self.learner.weights
        found = {f"master.{name}": master for name, master in masters.items()}
        found |= {f"moment.{name}": moment for name, moment in self.learner.optimizer.moments().items()}
        return found | {f"weight.{name}": w for name, w in weights.items() if w is not masters[name]}

    def _prepare_copy(self) -> None:
        """Has the memory of the first checkpoint laid out while training goes on."""
        tensors = self._tensors()
        self.background.prepare(lambda: self.copy.prepare(tensors))

    def _collect(self, *, wait: bool) -> None:
        """Takes note of a checkpoint that was written.

        Raises:
            PermanentError: it could not be. A full disk is an alert only.
        """
        found = self.background.collect(wait=wait)
        if found is None:
            return
        self.writing.remove(found.step)
        if isinstance(found.error, checkpoint.DiskFull):
            self.alert = found.error.what
            alert(found.error.message())
        elif found.error is not None:
            raise found.error
        else:
            self.alert = ""
            self.saved.append(found.step)
            self.context.progress.say(f"step {found.step} is saved; written in {found.seconds:.1f} s beside training")
        with locked(schedule.schedule_lock(self.directory)):
            self._tell_status()

    def _generators(self) -> dict[str, Tensor]:
        return checkpoint.generator_states()

    def _lineage(self) -> Lineage:
        begun = {entry["attempt"]: entry["from_step"] for entry in self.history}
        attempts = [
            {
                "attempt": record.attempt,
                "run": record.run,
                "from_step": begun.get(record.attempt),
                "start": record.start,
                "end": record.end,
                "exit": record.exit,
                "signal": record.signal,
            }
            for record in read_attempts(self.directory)
        ]
        records = read_attempts(self.directory)
        codes = list(dict.fromkeys(record.code for record in records)) or [
            self.writer.params_files["train"].code.digest
        ]
        return Lineage(parent=self.parent, attempts=attempts or self.history, code=codes, accepted=self.accepted)

    def _tell_status(self, *, ending: bool = False) -> None:
        pid, start = self.lease
        status = schedule.Status(
            attempt=self.context.attempt,
            step=self.step,
            lease_pid=pid,
            lease_start=start,
            alert=self.alert,
            ending=ending,
            writing=self.writing,
        )
        schedule.write_status(self.directory, status)


def _is_moment(name: str) -> bool:
    return name.startswith("moment.")


def batch_plan(samples: Samples, dataset: Upstream, buckets: Upstream) -> BatchPlan:
    """The batches of every step, the same on every rank."""
    batching = BucketsParams.model_validate(buckets.params.params)
    return BatchPlan(samples.lengths, samples.ids, batching, dataset.params.key)


def _content(receipt: Receipt) -> str:
    """The digest of a result's content: the stage's own where it gives one (it outlives a new file format)."""
    return str(receipt.results.get("digest", receipt.content_digest()))


def starving(stalled: Mapping[str, float], seconds: float) -> dict[str, float]:
    """The side that waits for the other, `drafter` or `target`, and for which share of `seconds`; nothing below 1%."""
    sides = {"drafter": stalled.get("drafter_features", 0.0), "target": stalled.get("target_credit", 0.0)}
    side = max(sides, key=lambda name: sides[name])
    share = sides[side] / max(seconds, 1e-9)
    return {side: round(share, 4)} if share >= 0.01 else {}


def memory_bytes() -> dict[str, int]:
    """The most memory in use on each GPU since the last call; empty on a CPU."""
    if not torch.cuda.is_initialized():
        return {}
    found = {f"cuda:{index}": torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count())}
    for index in range(torch.cuda.device_count()):
        torch.cuda.reset_peak_memory_stats(index)
    return {name: size for name, size in found.items() if size}


# ---------------------------------------------------------------- the launcher's child


def main(argv: Sequence[str], ending: threading.Event) -> int:
    """What the launcher calls through `begin.py`; `ending` is set when somebody asks to end.

    Exit status: 0 done or ended on request, else `EXIT_BY_KIND`.
    """
    parser = argparse.ArgumentParser(prog="python -m dflash.train.trainer")
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True, help="pid of the launcher; this process ends with it")
    arguments = parser.parse_args(argv)
    attempt = Attempt.read(attempt_path(arguments.directory, arguments.attempt))
    try:
        params, inputs, context = handed_over(arguments.directory, arguments.store, attempt)
        _train(params, inputs, arguments.directory, context, ending)
    except DflashError as error:
        print(f"{now()} {error.kind}: {error.message()}", file=sys.stderr, flush=True)
        if error.kind != "transient":
            leave_failure(arguments.directory, attempt.invocation, error)
        return EXIT_BY_KIND.get(error.kind, 1)
    return 0
