"""`results/runs/<run>/latest`: a link to the state that the present config describes, changed by one rename."""

from __future__ import annotations

import uuid
from pathlib import Path

from dflash.plan.graph import Plan


def relink_latest(plan: Plan) -> None:
    """Points `latest` of every run whose report stands at it."""
    for run in plan.runs:
        if not run.nodes["report"].receipt().exists():
            continue
        link = run.directory.parent / "latest"
        if link.is_symlink() and Path(link).readlink() == Path(run.runkey):
            continue
        temporary = link.with_name(f".latest.{uuid.uuid4().hex[:8]}")
        temporary.symlink_to(run.runkey)
        temporary.replace(link)
