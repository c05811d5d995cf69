"""Parameters of the `report` stage."""

from __future__ import annotations

from pydantic import Field

from dflash.base.params import Params, derived, keyed


class ReportParams(Params):
    """`report:`"""

    run: str = derived(description="name of the run")
    title: str | None = Field(None, description="heading of the page; the run's name when left out")
    samples: int = keyed(4, ge=0, unit="samples", description="sample completions shown")
