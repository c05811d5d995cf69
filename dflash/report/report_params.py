"""Parameters of the `report` stage."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from dflash.base.params import Params, derived, keyed


class ReportParams(Params):
    """`report:`"""

    run: str = derived(description="name of the run")
    steps: list[int] = derived(default_factory=list, description="checkpoints reported, ascending")
    adoptions: list[dict[str, Any]] = derived(
        default_factory=list, description="decisions that concern this run's results"
    )
    title: str | None = Field(None, description="heading of the page; the run's name when left out")
    samples: int = keyed(4, ge=0, unit="samples", description="sample completions shown")
