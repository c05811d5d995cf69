"""The plan that all rules share, and how a rule calls its stage.

Paths: RESULTS/store/<stage>/<key>/ for results, RESULTS/runs/<run>/<key>/ for reports, RESULTS/logs and RESULTS/benchmarks
beside them. Every input is ancient and named by an input function that returns nothing once the job's own receipt stands.
"""

import os
import sys
from pathlib import Path

ROOT = str(Path(workflow.current_basedir).resolve().parents[1])
sys.path.insert(0, ROOT)
sys.setrecursionlimit(
    100000
)  # a chain of some hundred checkpoints would overflow the default

from dflash.plan.links import relink_latest
from dflash.plan.workflow import Targets, load_plan
from dflash.run import require_ready
from dflash.runner import CONTROLLER, INVOCATION, controller_identity

PLAN = load_plan(
    workflow.config_settings.configfiles,
    workflow.config_settings.config,
    require_ready,
)
TARGETS = Targets(PLAN)
RESULTS = str(PLAN.config.results)
STORE = f"{RESULTS}/store"
# Draw the whole graph for `--dag` and `--rulegraph`, fresh results included: `--config full_dag=1`.
FULL = bool(workflow.config_settings.config.get("full_dag"))
# What every stage rule runs. `exec`, so that the stage is the child that Snakemake signals and waits for; stderr goes to
# the terminal and to the log. Ctrl-C counts from where `dflash/__main__.py` begins, so that no interpreter that is just
# starting answers it with a traceback.
DFLASH = f"trap '' INT; exec {sys.executable} -m dflash"
STAGE = f"{DFLASH} stage"
SHIP = f"{DFLASH} ship-result"

os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [ROOT, os.environ.get("PYTHONPATH")])
)
os.environ.setdefault(INVOCATION, controller_identity())
os.environ[CONTROLLER] = controller_identity()


wildcard_constraints:
    key=r"[0-9a-f]{12}",
    step=r"\d+",
    stage=r"[a-z]+",
    host=r"[A-Za-z0-9][A-Za-z0-9_-]*",
    run=r"[A-Za-z0-9][A-Za-z0-9_.-]*",
