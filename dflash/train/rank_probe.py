"""The probe of a training whose roles are processes: every target computes the features, every drafter its part.

The lead keeps the file and judges it as the single process does (`probe.py`), with the features of the first target. The
other targets must have the same features, and the other drafters the same logits, loss and gradient: every bit on a CPU, else
within `TOLERANCE`. So one rank with another kernel, driver or weight file stops the job by name, at its start.

Costs what the probe costs, and 13 MB a rank over the wire at 5 taps of 5120.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash.base.errors import PermanentError
from dflash.base.records import Environment
from dflash.model.probe import FILE, TOLERANCE, Drift, Probe, largest_drift, probe_features, tokens_as_tensors
from dflash.model.target import Target
from dflash.train import probe
from dflash.train.peers import Peers

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def answer_lead(peers: Peers, target: Target | None) -> None:
    """What every rank but the lead does: computes features as often as the lead asks (a target), or listens (a drafter)."""
    while (asked := peers.from_lead(None)) is not None:
        if target is not None:
            for features in probe_features(target, asked["tokens"], asked["taps"]).values():
                peers.send(features, peers.roles.lead)


@dataclass(frozen=True)
class RanksSubject(probe.Subject):
    """What the lead probes: its own drafter, and the targets of other ranks; `target` is embedding and head."""

    peers: Peers

    def features(self, tokens: Sequence[Sequence[int]], taps: Sequence[int]) -> dict[str, Tensor]:
        """The first target's, once every other target has the same."""
        self.peers.from_lead({"tokens": [list(sequence) for sequence in tokens], "taps": list(taps)})
        width = len(taps) * self.drafter.config.hidden_size
        found = [
            {
                f"features.{number}": self.peers.receive((len(sequence), width), DTYPES[self.params.dtype], rank)
                for number, sequence in enumerate(tokens)
            }
            for rank in range(self.peers.roles.targets)
        ]
        first = Probe(found[0], {"taps": list(taps)})
        for rank, features in enumerate(found):
            drift = largest_drift(first, features, rank_tolerance(self.device, self.params.dtype))
            if drift.beyond:
                raise _other(self.peers.roles.name(rank), self.peers.roles.name(0), drift)
        return found[0]


def rank_tolerance(device: str, dtype: str) -> float:
    """How far two ranks of one job may be apart, relatively."""
    return 0.0 if device == "cpu" else TOLERANCE[dtype]


def attend(
    directory: Path, subject: RanksSubject, environment: Environment, *, resumed: bool, attempt: int, accept: str
) -> list[dict[str, Any]]:
    """`probe.attend` on the lead; the other ranks are in `answer_lead` meanwhile."""
    accepted = probe.attend(directory, subject, environment, resumed=resumed, attempt=attempt, accept=accept)
    subject.peers.from_lead(None)
    return accepted


def compare_drafters(peers: Peers, subject: probe.Subject, directory: Path) -> None:
    """Every drafter computes its part of the probe from the recorded features.

    Raises:
        PermanentError: on all of them, when one has other numbers than the lead; names it and the number.
    """
    if peers.roles.drafters == 1:
        return
    given: dict[str, Tensor] = {}
    if peers.leads:
        recorded = Probe.read(directory / FILE)
        tokens, features = recorded.tokens(), recorded.features()
        given = tokens_as_tensors(tokens) | {f"features.{number}": value for number, value in enumerate(features)}
        given |= subject.drafter_part(tokens, features)
    reference = Probe(peers.hand_out(given), {"taps": subject.taps})
    drift = largest_drift(
        reference,
        subject.drafter_part(reference.tokens(), reference.features()),
        rank_tolerance(subject.device, subject.params.dtype),
    )
    for place, found in enumerate(peers.gather(vars(drift), drafters_only=True)):
        if Drift(**found).beyond:
            lead = peers.roles.lead
            raise _other(peers.roles.name(lead + place), peers.roles.name(lead), Drift(**found))


def _other(rank: str, reference: str, drift: Drift) -> PermanentError:
    return PermanentError(
        f"{rank} computes something else than {reference}: {drift.sentence()}",
        where="train.topology",
        remedy="Compare kernels, driver and weight files of the two hosts.",
    )
