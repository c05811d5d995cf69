"""The probe of a training: is this still the machine, the target and the kernels that the first step was taken with?

`probe.safetensors` in the training's folder is written before the first step: the target's features of a few fixed sequences
(`dflash/model/probe.py` has them and the tolerances), and of the drafter, with its initial weights as the seed draws them, the
logits of up to 1024 tokens of the vocabulary, the loss and the gradient norm. Its metadata hold the digest of the environment,
what of it may move a number, and the kernels that were bound.

Every attempt that goes on from a checkpoint computes it again, the drafter's part from the *recorded* features, so that a fault
is blamed on the side that has it. On a CPU with the same numerics every bit must be the same; otherwise (also where `train.fuse`
or `train.attention` is another) the relative error must stay within `TOLERANCE` (1e-10 in float64, 1e-4 in float32, 2e-2 in
bfloat16). Beyond it training stops before its first step,
unless somebody says why it may go on: then the new values become the probe, the old file stays beside it, and the reason stands
in the probe, in the attempt and in the lineage of every later checkpoint.

Costs one forward of the target and one forward and backward of the drafter over 256 tokens; gradients are left clear.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash.base.errors import PermanentError
from dflash.base.records import Environment
from dflash.model.drafter import Drafter, HiddenToLogits, TokensToHidden
from dflash.model.probe import (
    FILE,
    TOLERANCE,
    Probe,
    changed_fields,
    largest_drift,
    numerics,
    probe_features,
    sequences,
    tokens_as_tensors,
    told_changes,
)
from dflash.model.target import Target
from dflash.train.forward import entropy_kernel
from dflash.train.objective import labels_and_weights, objective
from dflash.train.telemetry import alert
from dflash.train.train_params import TrainParams

VOCABULARY = 1024
"""Logits are kept of so many tokens, spread over the vocabulary."""


@dataclass(frozen=True)
class Subject:
    """What is probed. drafter: with its initial weights, on the device it trains on, without gradients."""

    params: TrainParams
    target: Target
    drafter: Drafter
    device: str

    @property
    def taps(self) -> list[int]:
        return list(self.drafter.config.target_layer_ids)

    def features(self, tokens: Sequence[Sequence[int]], taps: Sequence[int]) -> dict[str, Tensor]:
        """The target's taps of each sequence, `features.<i>` on the CPU."""
        return probe_features(self.target, tokens, taps)

    def drafter_part(self, tokens: Sequence[Sequence[int]], features: Sequence[Tensor]) -> dict[str, Tensor]:
        """What the drafter makes of features: `logits.<i>` [anchors, block size - 1, tokens], `loss`, `gradient_norm`."""
        return drafter_part(
            self.drafter,
            tokens,
            features,
            self.target.embed,
            self.target.lm_head,
            gamma=self.params.gamma,
            attention=self.params.attention,
            entropy=entropy_kernel(self.params),
        )

    def numerics(self, environment: Environment) -> dict[str, str]:
        """What may move a number: of the environment, and the kernels of the drafter where placement asks for others."""
        found = numerics(environment, self.device)
        for name in ("attention", "fuse"):
            if getattr(self.params, name) != TrainParams.model_fields[name].default:
                found[f"train.{name}"] = str(getattr(self.params, name))
        return found

    def probe(self, environment: Environment, accepted: list[dict[str, Any]]) -> Probe:
        """A new probe."""
        tokens = sequences(self.target, self.params.target)
        features = self.features(tokens, self.taps)
        drafted = self.drafter_part(tokens, list(features.values()))
        facts = {
            "taps": self.taps,
            "dtype": self.params.dtype,
            "environment": environment.digest()[:12],
            "numerics": self.numerics(environment),
            "kernels": environment.kernels,
            "accepted": accepted,
        }
        return Probe({**tokens_as_tensors(tokens), **features, **drafted}, facts)


def drafter_part(
    drafter: Drafter,
    tokens: Sequence[Sequence[int]],
    features: Sequence[Tensor],
    embed: TokensToHidden,
    lm_head: HiddenToLogits,
    *,
    gamma: float | None,
    attention: str = "sdpa",
    entropy: Any = None,
) -> dict[str, Tensor]:
    """What a drafter makes of the features of the probe's sequences, and its gradient on them; clears gradients afterwards.

    Args:
        drafter: its parameters have no gradient yet.
        features: [S, K*H] of each sequence, on any device.
        embed, lm_head: the target's.
        gamma: decay of the loss along the block.
        attention, entropy: as the training computes them.

    Returns:
        `logits.<i>` float32 or float64 [anchors, block size - 1, up to 1024 tokens]; `loss`, `gradient_norm` float64 scalars.
    """
    device = drafter.norm.weight.device
    kind = torch.float64 if drafter.norm.weight.dtype == torch.float64 else torch.float32
    vocab_size = drafter.config.vocab_size
    kept = torch.arange(0, vocab_size, max(1, vocab_size // VOCABULARY), device=device)
    found: dict[str, Tensor] = {}
    total = torch.zeros((), dtype=torch.float64)
    weight = torch.zeros((), dtype=torch.float64)
    for number, (sequence, known) in enumerate(zip(tokens, features, strict=True)):
        ids = torch.tensor([list(sequence)], device=device)
        anchors = torch.tensor([sorted({len(sequence) * part // 4 for part in (1, 2, 3)})], device=device)
        # A copy, since what was read from a file lies at any address, and sums on a CPU depend on how numbers are aligned.
        hidden = drafter(known[None].to(device, copy=True), ids, anchors, embed, attention=attention)
        with torch.no_grad():
            found[f"logits.{number}"] = lm_head(hidden[0, :, 1:])[..., kept].to(kind).cpu()
        mask = torch.ones_like(ids, dtype=kind)
        labels, weights = labels_and_weights(ids, mask, anchors, drafter.config.block_size, gamma=gamma)
        sums = objective(hidden, labels, weights, lm_head, entropy=entropy)
        sums.loss_sum.backward()
        total += sums.loss_sum.detach().double().cpu()
        weight += sums.weight_sum.double().cpu()
    norms = []
    for parameter in drafter.parameters():
        if parameter.grad is not None:
            norms.append(torch.linalg.vector_norm(parameter.grad, dtype=torch.float64).cpu())
            parameter.grad = None
    found["loss"] = total / weight
    found["gradient_norm"] = torch.linalg.vector_norm(torch.stack(norms)) / weight
    return found


def attend(
    directory: Path, subject: Subject, environment: Environment, *, resumed: bool, attempt: int, accept: str = ""
) -> list[dict[str, Any]]:
    """Writes the probe of a training that begins, or checks that of one that goes on. Call it before weights are loaded.

    Args:
        directory: the training's folder.
        environment: of this process, with the kernels that are bound.
        resumed: there are checkpoints that this attempt goes on from or adds to.
        attempt: recorded with what is accepted.
        accept: why a drift is accepted; empty to stop.

    Returns:
        What was accepted so far, oldest first: attempt, why, drift, changed fields with both values.

    Raises:
        PermanentError: something has drifted; names it and the fields of the environment that changed.
        CorruptError: the file is damaged.
    """
    path = directory / FILE
    if not resumed or not path.exists():
        if resumed:
            alert(f"there are checkpoints but no {FILE}; whether the machine has changed since cannot be told")
        subject.probe(environment, []).write(path)
        return []
    recorded = Probe.read(path)
    accepted: list[dict[str, Any]] = list(recorded.facts.get("accepted", []))
    changed = changed_fields(recorded.facts["numerics"], subject.numerics(environment))
    exact = not changed and subject.device == "cpu"
    drift = largest_drift(recorded, _again(subject, recorded), 0.0 if exact else TOLERANCE[subject.params.dtype])
    told = told_changes(changed) or "nothing that is recorded"
    if not drift.beyond:
        if changed:
            alert(f"the environment has changed ({told}); {drift.sentence()}, so training goes on")
        return accepted
    if not accept:
        raise PermanentError(
            f"this machine no longer computes what the first step of this training was taken with: {drift.sentence()}; "
            f"changed in the environment: {told}",
            where=str(path),
            remedy='Restore the environment, or run `dflash run --accept-env "why"`, which is recorded.',
        )
    accepted.append({"attempt": attempt, "why": accept, "drift": drift.sentence(), "changed": changed})
    alert(f"accepted ({accept}): {drift.sentence()}; changed in the environment: {told}")
    shutil.copyfile(path, directory / f"probe.before_attempt_{attempt}.safetensors")
    subject.probe(environment, accepted).write(path)
    return accepted


def _again(subject: Subject, recorded: Probe) -> dict[str, Tensor]:
    """The recorded probe computed anew, the drafter's part from the recorded features."""
    tokens = recorded.tokens()
    features = subject.features(tokens, recorded.facts["taps"])
    return {**features, **subject.drafter_part(tokens, recorded.features())}
