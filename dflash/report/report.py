"""The `report` stage: one self-contained HTML page and one tidy csv for a state of a run, made from files alone.

It never fails for evidence that is missing or damaged: the page says which file and why. Costs 1 s to start (no torch) and a
few seconds for 200 evaluations; the page stays under 1 MB because curves are thinned to 300 points.
"""

from __future__ import annotations

from pathlib import Path

import jinja2

from dflash.base.errors import PermanentError
from dflash.base.files import write_atomically
from dflash.base.records import RunManifest, now
from dflash.base.stage import HostContext, Inputs, Outputs
from dflash.report.evidence import gather
from dflash.report.page import Page, build
from dflash.report.report_params import ReportParams
from dflash.report.tables import csv_text, tau_tables, tidy, tidy_by_tag, verdict

TEMPLATE = "page.html.j2"


def render(page: Page) -> str:
    """The page as HTML. Everything is escaped but the figures, which escape their own texts."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(TEMPLATE).render(page=page)


def run(params: ReportParams, inputs: Inputs, workdir: Path, host_context: HostContext) -> Outputs:
    """The stage: writes `report.html` and `evaluations.csv`, and `evaluations_by_tag.csv` where prompts have tags: the same columns
    and `tag`, in a file of its own, so that no prompt stands twice in one.

    `host_context.placement` holds `manifest`, the path of the run's manifest, and `store`, the root of the store.

    Raises:
        PermanentError: placement names no manifest or no store. CorruptError: the manifest itself cannot be read.
    """
    del inputs  # the manifest names everything that is shown, also what the inputs do not reach
    places = {}
    for name in ("manifest", "store"):
        if not host_context.placement.get(name):
            raise PermanentError(f"placement names no {name!r}", where="report", remedy="Run it through `dflash run`.")
        places[name] = Path(str(host_context.placement[name]))
    manifest = RunManifest.read(places["manifest"])
    evidence = gather(manifest, places["store"], host_context.host)
    frame = tidy(evidence.rows, params.run)
    page = build(evidence, frame, params, created=now())
    write_atomically(workdir / "evaluations.csv", csv_text(frame))
    write_atomically(workdir / "report.html", render(page))
    names = ["report.html", "evaluations.csv"]
    if evidence.tag_rows:
        names.append("evaluations_by_tag.csv")
        write_atomically(workdir / names[-1], csv_text(tidy_by_tag(evidence.tag_rows, params.run)))
    tables = tau_tables(frame)
    results = {
        "checks": {check.name: check.standing for check in page.checks},
        "verdict": [verdict(table).words for table in tables],
    }
    return Outputs(names, results=results)
