"""One role of a training alone on one device, on the batches that the training would get, and both in turn.

Work is called with the number of a step and returns its tokens, padding not counted. A target's features go nowhere; a drafter
alone finds features ready in its memory. What a device does is not waited for: who measures does that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from train_store import Training

from dflash.base.stage import HostContext
from dflash.base.store import load_inputs, read_params
from dflash.data.batches import Batch, BatchPlan, Samples, collate, load_train_samples
from dflash.model.drafter import DrafterConfig
from dflash.model.target import Target
from dflash.model.transfer import on_device
from dflash.train.prepare import drafter_config, load_checked_target, load_target_ends
from dflash.train.stream import token_digest
from dflash.train.train_params import TrainParams
from dflash.train.trainer import DTYPES, Learner, StepSums, batch_plan, prepare_process


@dataclass
class Job:
    """A training as its ranks read it."""

    params: TrainParams
    config: DrafterConfig
    plan: BatchPlan
    samples: Samples
    device: torch.device

    @classmethod
    def read(cls, training: Training, device: str, threads: int, **placed: Any) -> Job:
        """From its store; sets up this process as a rank's."""
        params = training.params(**placed)
        prepare_process(params, HostContext(device=device, threads=threads))
        if device.startswith("cuda"):
            torch.cuda.set_device(device)
        inputs = load_inputs(read_params(training.directory), training.store)
        dataset = inputs.one("dataset")
        samples = load_train_samples(dataset.directory)
        plan = batch_plan(samples, dataset, inputs.one("buckets"))
        return cls(params, drafter_config(params), plan, samples, torch.device(device))

    def tensors(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Tokens of a batch on the device, and its attention mask on the host."""
        pad = self.params.target.pad_token_id
        collated = collate(batch, self.samples, 0 if pad is None else pad)
        input_ids = on_device(torch.from_numpy(collated["input_ids"]), self.device)
        return input_ids, torch.from_numpy(collated["attention_mask"]).long()


class TargetWork:
    """Features of a step's batches, as a target's rank computes them, sent nowhere."""

    def __init__(self, job: Job, target: Target | None = None) -> None:
        self.job = job
        self.target = target or load_checked_target(job.params, None, str(job.device))
        self.kernels = self.target.kernels.to_dict()

    def __call__(self, step: int) -> int:
        tokens = 0
        for batch in self.job.plan.step(step):
            input_ids, attention_mask = self.job.tensors(batch)
            self.target.features(input_ids, attention_mask, list(self.job.config.target_layer_ids))
            token_digest(input_ids, attention_mask)
            wait(self.job.device)
            tokens += int(batch.lengths.sum())
        return tokens


class ReadyLearner(Learner):
    """A learner whose features are there already; those of the target while `ready` is None."""

    ready: Tensor | None = None

    def features(self, input_ids: Tensor, attention_mask: Tensor, batch: Batch) -> Tensor:
        """Rows of numbers that were drawn once."""
        if self.ready is None:
            return super().features(input_ids, attention_mask, batch)
        rows, length = input_ids.shape
        mask = on_device(attention_mask.to(self.ready.dtype), self.ready.device)
        return self.ready[: rows * length].view(rows, length, -1) * mask[..., None]


class DrafterWork:
    """Steps of a learner, update included. Give it a whole target to play both roles in turn while `alone` is off."""

    def __init__(self, job: Job, target: Target | None = None) -> None:
        self.job = job
        ends = target or load_target_ends(job.params, None, str(job.device))
        self.learner = ReadyLearner(job.params, ends, job.config, str(job.device))
        self.learner.forward.fix_shapes(job.plan)
        most = int(max(job.plan.batch_sizes * job.plan.longest))
        kind = DTYPES[job.params.dtype]
        self.ready = torch.randn(most, job.config.feature_size, device=job.device, dtype=kind)
        self.alone = True
        self.losses: list[float] = []

    def __call__(self, step: int) -> int:
        self.learner.ready = self.ready if self.alone else None
        sums = StepSums()
        self.learner.clear_gradients()
        for batch in self.job.plan.step(step):
            self.learner.learn(batch, self.job.samples, sums)
        sums.read()
        self.learner.update(self.learner.gradient_norm(sums.weight), step + 1)
        self.losses.append(sums.loss / max(sums.weight, 1e-9))
        wait(self.job.device)
        return sums.tokens


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
