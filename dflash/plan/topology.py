"""How many targets and how many drafters: what each split of the GPUs would give, from the rates of one rank of each role.

The slower side sets the pace: N targets of t tokens per second feed M drafters of d, so a split gives min(N * t, M * d), and the
other side waits for the rest of its time. When the batches of a step do not divide among the ranks of a role, the busiest rank
has more than its share, and N or M counts as batches / ceil(batches / ranks). Nothing else is modelled: what a run reaches of it
is measured by `tests/bench/gpu/topology.py`, and stands beside the prediction where a rates file has it.

Rates come from a file (`{"target": 8900, "drafter": 6800, "gpus": 8}`, tokens per second of one rank) or from the metrics of the
run itself. Costs a read of either.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from dflash.base.errors import ConfigError, CorruptError, PermanentError
from dflash.base.files import read_json
from dflash.base.records import last_attempts

WARM_UP = 2
"""Steps of every attempt whose rates do not count, where there are more."""


class Measured(BaseModel):
    """What a split has reached."""

    targets: int = Field(ge=1)
    drafters: int = Field(ge=1)
    tokens_per_second: float = Field(gt=0)


class Rates(BaseModel):
    """Tokens per second of one rank of each role, padding not counted.

    gpus: of the machine they were measured on. measured: splits that were run there. source: for people.
    """

    target: float = Field(gt=0)
    drafter: float = Field(gt=0)
    gpus: int | None = Field(None, ge=1)
    measured: list[Measured] = Field(default_factory=list)
    source: str = ""


@dataclass(frozen=True)
class Prediction:
    """A split of the GPUs. Rates in tokens per second; the shares are of the time that a rank of that role has to wait."""

    targets: int
    drafters: int
    target_side: float
    drafter_side: float
    tokens_per_second: float
    targets_wait: float
    drafters_starve: float
    measured: float | None

    def verdict(self) -> str:
        """Which side waits, and how much."""
        if self.drafters_starve > self.targets_wait:
            return f"drafters starve {self.drafters_starve:.0%}"
        return f"targets wait {self.targets_wait:.0%}" if self.targets_wait > 0 else "balanced"


def read_rates(path: Path) -> Rates:
    """Rates from a file.

    Raises:
        ConfigError: there is none, or it is not one; names the field.
    """
    try:
        return Rates.model_validate({"source": str(path), **read_json(path)})
    except (CorruptError, OSError, TypeError, ValidationError) as error:
        raise ConfigError(
            f"no rates: {str(error).splitlines()[0]}",
            where=str(path),
            remedy='It holds {"target": T, "drafter": D}, tokens per second of one rank of each role.',
        ) from error


def rates_of_run(directory: Path, name: str) -> Rates:
    """Rates from the metrics of a training: the median over its steps, a rank of each role.

    Raises:
        PermanentError: it has not trained yet; says how to measure.
    """
    path = directory / "metrics.jsonl"
    lines = last_attempts(path) if path.exists() else []
    firsts = {attempt: min(line.step for line in lines if line.attempt == attempt) for attempt in _attempts(lines)}
    warm = [line for line in lines if line.step - firsts[line.attempt] >= WARM_UP] or lines
    found: dict[str, list[float]] = {"target": [], "drafter": []}
    for line in warm:
        ranks = _ranks(directory, line.attempt)
        for role, values in found.items():
            if line.tokens_per_second.get(role, 0.0) > 0:
                values.append(line.tokens_per_second[role] / ranks[role])
    if not all(found.values()):
        raise PermanentError(
            f"run {name} has not trained yet, so nothing is known of its rates",
            where=str(path),
            remedy=f"`dflash rehearse {name} --json > rates.json` measures both roles in minutes; then add `--rates rates.json`.",
        )
    medians = {role: statistics.median(values) for role, values in found.items()}
    return Rates(**medians, source=f"{path} ({len(warm)} steps)")


def _attempts(lines: Sequence[Any]) -> set[int]:
    return {line.attempt for line in lines}


def _ranks(directory: Path, attempt: int) -> dict[str, int]:
    """How many ranks of each role an attempt had; one of each where its record is gone."""
    path = directory / "attempts" / f"{attempt}.json"
    placed = read_json(path).get("placement", {}).get("values", {}) if path.exists() else {}
    topology = placed.get("topology") or {}
    return {"target": int(topology.get("targets", 1)), "drafter": int(topology.get("drafters", 1))}


def busy(ranks: int, batches: int | None) -> float:
    """How many ranks' work a role does, when the busiest of them sets the pace: 12 batches over 5 ranks count as 4."""
    return float(ranks) if batches is None else batches / -(-batches // ranks)


def predict(rates: Rates, gpus: int, batches_per_step: int | None = None) -> list[Prediction]:
    """All splits of `gpus` GPUs among the two roles, most targets last. A role has no more ranks than a step has batches.

    Raises:
        ConfigError: fewer than two GPUs.
    """
    if gpus < 2:
        raise ConfigError(f"{gpus} GPU cannot be split", where="--gpus", remedy="One GPU: train with `colocate: true`.")
    known = {(run.targets, run.drafters): run.tokens_per_second for run in rates.measured}
    found = []
    for targets in range(1, gpus):
        drafters = gpus - targets
        if batches_per_step is not None and max(targets, drafters) > batches_per_step:
            continue
        sides = busy(targets, batches_per_step) * rates.target, busy(drafters, batches_per_step) * rates.drafter
        pace = min(sides)
        found.append(
            Prediction(
                targets,
                drafters,
                *sides,
                pace,
                targets_wait=1.0 - pace / sides[0],
                drafters_starve=1.0 - pace / sides[1],
                measured=known.get((targets, drafters)),
            )
        )
    return found


def best(predictions: Sequence[Prediction]) -> Prediction:
    """The fastest split; of several the one whose other side is smaller, since it wastes less.

    Raises:
        ConfigError: there is none.
    """
    if not predictions:
        raise ConfigError(
            "no split gives every rank a batch",
            where="batching.batches_per_step",
            remedy="Raise it, or use fewer GPUs.",
        )
    return max(predictions, key=lambda one: (one.tokens_per_second, -max(one.target_side, one.drafter_side)))


def as_json(rates: Rates, gpus: int, batches_per_step: int | None, predictions: Sequence[Prediction]) -> str:
    """Everything, for programs."""
    chosen = best(predictions)
    return json.dumps(
        {
            "rates": rates.model_dump(exclude={"measured"}),
            "gpus": gpus,
            "batches_per_step": batches_per_step,
            "colocated_tokens_per_second": colocated(rates),
            "splits": [asdict(one) for one in predictions],
            "best": {"targets": chosen.targets, "drafters": chosen.drafters},
        },
        indent=2,
    )


def colocated(rates: Rates) -> float:
    """What one GPU gives that plays both roles in turn."""
    return 1.0 / (1.0 / rates.target + 1.0 / rates.drafter)


def render(rates: Rates, gpus: int, batches_per_step: int | None, predictions: Sequence[Prediction]) -> str:
    """The table, with its arithmetic, for people."""
    chosen = best(predictions)
    lines = [
        f"one target {rates.target:,.0f} tok/s, one drafter {rates.drafter:,.0f} tok/s ({rates.source or 'as given'})",
        f"one GPU for both roles: 1 / (1/{rates.target:,.0f} + 1/{rates.drafter:,.0f}) = {colocated(rates):,.0f} tok/s",
        f"{gpus} GPUs, N targets and M drafters: min(N * {rates.target:,.0f}, M * {rates.drafter:,.0f})",
    ]
    if batches_per_step is not None:
        lines.append(
            f"a step has {batches_per_step} batches: N and M count as {batches_per_step} / batches of the busiest rank"
        )
    lines.append("")
    for one in predictions:
        counted = [busy(ranks, batches_per_step) for ranks in (one.targets, one.drafters)]
        arithmetic = f"min({counted[0]:g} * {rates.target:,.0f}, {counted[1]:g} * {rates.drafter:,.0f})"
        reached = (
            f"; measured {one.measured:,.0f} ({one.measured / one.tokens_per_second:.2f} of it)" if one.measured else ""
        )
        mark = "  <- best" if one == chosen else ""
        lines.append(
            f"  {one.targets}:{one.drafters}  {arithmetic} = {one.tokens_per_second:,.0f} tok/s, {one.verdict()}{reached}{mark}"
        )
    return "\n".join(lines)
