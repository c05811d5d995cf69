"""A rank that computes features: it walks through its batches in order and sends each to the drafter that learns from it.

It decides nothing and writes nothing; it ends when no drafter wants more. Costs the target's weights and three batches of
features: one computed ahead of its credit, two on their way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash.base.stage import HostContext, Inputs, Outputs
from dflash.data.batches import Batch, collate, load_train_samples
from dflash.model.target import Target
from dflash.train import checkpoint, preflight
from dflash.train.agreement import agree, common_facts, own_generators, pack_tensors
from dflash.train.forward import parts
from dflash.train.peers import Peers
from dflash.train.prepare import drafter_config, load_checked_target
from dflash.train.pulse import PULSE
from dflash.train.rank_probe import answer_lead
from dflash.train.stream import Label, Sender, batch_tokens, own_batches, warm_up
from dflash.train.train_params import TrainParams
from dflash.train.trainer import batch_plan, memory_bytes


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
        answer_lead(self.peers, self.target)
        start = self.peers.from_lead(None)
        self.step = start["step"]
        checkpoint.restore_generators(own_generators(start["generators"], self.peers.rank))
        need = preflight.target_need(self.params, drafter_config(self.params), self.plan, self.target)
        preflight.refuse_ranks(self.peers, need, self.context.device)
        warm_up(self.peers, self.plan.params.batches_per_step)

    def train_and_tell(self) -> None:
        """Sends features until no drafter wants more.

        Raises:
            PermanentError: a drafter asks for another batch than is due.
            LostPeer: a drafter is gone.
        """
        per_step = self.plan.params.batches_per_step
        sender = Sender(self.peers, per_step)
        for step, place in own_batches(self.peers.roles, self.peers.rank, self.step, per_step):
            if sender.finished:
                break
            self.step = step
            PULSE.works("computing features", step + 1)
            drafter = self.peers.roles.drafter_of(place)
            if drafter in sender.ended:
                continue
            waited = sender.credit_seconds
            batch = self.plan.step(step)[place]
            features, tokens, seconds = self._features(batch)
            if sender.credit(drafter, batch.batch_id):
                kind = str(features.dtype).removeprefix("torch.")
                label = Label(batch.batch_id, tokens, tuple(self.taps), self.tag, tuple(features.shape), kind)
                note = {
                    "seconds": seconds,
                    "credit_seconds": sender.credit_seconds - waited,
                    "memory": sum(memory_bytes().values()),
                    "ending": self.ending.is_set(),
                    "generators": pack_tensors(checkpoint.generator_states()),
                }
                sender.send(drafter, label, features, note)
        sender.finish()

    def _features(self, batch: Batch) -> tuple[Tensor, str, float]:
        """Features of a batch, the digest of its tokens, and the seconds they took."""
        started = time.perf_counter()
        found = [self._part(part) for part in parts([batch], self.params.micro_batch)]
        features = found[0] if len(found) == 1 else _stacked(found)
        tokens = batch_tokens(batch, self.samples, self.target.facts.pad_id)
        if features.is_cuda:
            torch.cuda.synchronize(features.device)
        return features, tokens, time.perf_counter() - started

    def _part(self, batch: Batch) -> Tensor:
        """Features of the samples of a part, [b, S, K*H]."""
        collated = collate(batch, self.samples, self.target.facts.pad_id)
        device = torch.device(self.context.device)
        input_ids = torch.from_numpy(collated["input_ids"]).to(device)
        attention_mask = torch.from_numpy(
            collated["attention_mask"]
        ).long()  # on the host, where the target looks at it
        with preflight.memory_explained(f"step {self.step + 1}, target features"):
            return self.target.features(input_ids, attention_mask, self.taps)

    def outputs(self) -> Outputs:
        """Nothing: the lead writes."""
        return Outputs([], results={"step": self.step}, kernels=self.kernels)


def _stacked(found: Sequence[Tensor]) -> Tensor:
    """The features of the parts of a batch, one after the other, with zeros behind the shorter ones."""
    longest = max(part.shape[1] for part in found)
    return torch.cat([F.pad(part, (0, 0, 0, longest - part.shape[1])) for part in found])
