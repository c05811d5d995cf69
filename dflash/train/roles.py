"""Who does what: the role of each rank, and which of them works on which batch. No torch, nothing to measure.

Targets come first (ranks 0 to N-1), then drafters (N to N+M-1); the first drafter leads: it decides, and it writes. Batch i
of a step has its features computed by target i mod N and is learnt by drafter i mod M, whatever came before and whoever
is faster.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from dflash.base.errors import ConfigError

Role = Literal["target", "drafter"]


@dataclass(frozen=True)
class Roles:
    """N targets and M drafters."""

    targets: int
    drafters: int

    @property
    def world_size(self) -> int:
        """Processes in all."""
        return self.targets + self.drafters

    @property
    def lead(self) -> int:
        """The rank that decides when to save and to end, and that writes everything."""
        return self.targets

    def role(self, rank: int) -> Role:
        """What a rank does."""
        return "target" if rank < self.targets else "drafter"

    def name(self, rank: int) -> str:
        """A rank as people read it: `rank 3 (drafter 1)`."""
        place = rank if rank < self.targets else rank - self.targets
        return f"rank {rank} ({self.role(rank)} {place})"

    def target_of(self, place: int) -> int:
        """The rank that computes the features of a step's batch `place` (from 0)."""
        return place % self.targets

    def drafter_of(self, place: int) -> int:
        """The rank that learns from it."""
        return self.targets + place % self.drafters

    def places(self, rank: int, batches_per_step: int) -> list[int]:
        """The batches of a step that a rank works on, in order."""
        whose = self.target_of if self.role(rank) == "target" else self.drafter_of
        return [place for place in range(batches_per_step) if whose(place) == rank]

    def partners(self, rank: int, batches_per_step: int) -> list[int]:
        """The ranks of the other role that a rank exchanges features with, ascending."""
        other = self.drafter_of if self.role(rank) == "target" else self.target_of
        return sorted({other(place) for place in self.places(rank, batches_per_step)})

    def refuse_idle(self, batches_per_step: int) -> None:
        """Raises ConfigError when some rank would never have a batch."""
        for role, count in (("targets", self.targets), ("drafters", self.drafters)):
            if count > batches_per_step:
                raise ConfigError(
                    f"{count} {role} share the {batches_per_step} batches of a step; {count - batches_per_step} would idle",
                    where=f"train.topology.{role}",
                    remedy="Use fewer ranks, or raise batching.batches_per_step (a new key).",
                )


def rank_device(device: str, local_rank: int) -> str:
    """The device of a rank: on `cuda` (or `cuda:2`) every rank of a host has a GPU of its own, counted on from there."""
    if not device.startswith("cuda"):
        return device
    return f"cuda:{int(device.partition(':')[2] or 0) + local_rank}"


@dataclass(frozen=True)
class Place:
    """Where a rank stands among the others, as its launcher (ours or torchrun) says in the environment."""

    rank: int
    local_rank: int
    world_size: int

    @classmethod
    def from_environment(cls) -> Place:
        """Reads RANK, LOCAL_RANK and WORLD_SIZE.

        Raises:
            ConfigError: one is missing.
        """
        try:
            rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            return cls(rank, int(os.environ.get("LOCAL_RANK", rank)), world)
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"{error} is not in the environment: a rank of a training with `colocate: false` needs a launcher",
                where="train.topology",
                remedy="Start it with `dflash run`, or with torchrun.",
            ) from error
