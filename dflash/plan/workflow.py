"""What the Snakefile asks of the plan: targets, inputs, parameters. Reads only; parsing a Snakefile never writes.

Errors end the parse with the exit code of their kind and one line on stderr, without a traceback.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from dflash.base.errors import ConfigError, DflashError
from dflash.base.records import ParamsFile
from dflash.plan import places
from dflash.plan.config import load_config, resolved_source
from dflash.plan.costly import require_decisions
from dflash.plan.graph import Node, Plan, build_plan

DEFAULT_CONFIG = Path("config/config.yaml")
ACCEPT_ENV = "DFLASH_ACCEPT_ENV"
"""Why trainings may go on in another environment: how `dflash run --accept-env` tells the jobs of its workflow."""


def load_plan(
    config_files: Sequence[Path],
    overrides: Mapping[str, Any] | None = None,
    check: Callable[[Plan], None] | None = None,
) -> Plan:
    """The plan of a configuration, for the Snakefile; ends the process on an error a user can mend.

    Args:
        config_files: files given with `--configfile`; the default config when there are none.
        overrides: what `--config` set, which is refused: it gives strings and cannot name nested keys.
        check: a further check of the plan, from a higher floor; raises a `DflashError`.
    """
    try:
        if set(overrides or {}) - {"full_dag"}:
            raise ConfigError(
                f"`--config {' '.join(f'{key}={value}' for key, value in (overrides or {}).items())}` is not supported",
                remedy="Put overrides in a file and add it with --configfile.",
            )
        plan = build_plan(load_config([_relative(Path(file)) for file in config_files] or [DEFAULT_CONFIG]))
        require_decisions(plan)
        if check is not None:
            check(plan)
        return plan
    except DflashError as error:
        _end(error)


def _relative(path: Path) -> Path:
    """Snakemake makes paths absolute; messages and origins read better relative to the working directory."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _end(error: DflashError) -> NoReturn:
    print(f"dflash: {error.message()}", file=sys.stderr, flush=True)
    # Snakemake turns an exception (SystemExit too) into a traceback; a user error deserves one line and its own code.
    sys.stdout.flush()
    os._exit(error.exit_code)


class Targets:
    """Paths that rules name, from a plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def all(self) -> list[str]:
        """Everything the runs need: params and receipts in the order of the road, steps ascending, then the manifests."""
        found = []
        for node in self.plan.nodes.values():
            found.append(str(node.directory / "params.json"))
            found += [str(path) for path in node.receipts()]
        found += [str(run.directory / "manifest.json") for run in self.plan.runs]
        return found

    def node(self, stage: str, wildcards: Any) -> Node:
        """The node a job is about.

        Raises:
            ConfigError: the plan has no such result (the config changed since the job was submitted).
        """
        try:
            return self.plan.node(stage, wildcards.key)
        except KeyError:
            raise ConfigError(f"no run of this config needs {stage} {wildcards.key}") from None

    def upstream(self, stage: str, full: bool) -> Any:
        """An input function: the receipts of all upstream results; nothing once the job's own receipt stands.

        A missing input, even an ancient one, would rerun a job whose own result is whole, hence "nothing".
        """

        def find(wildcards: Any) -> list[str]:
            node = self.node(stage, wildcards)
            step = int(wildcards.step) if node.stage.stepwise else None
            if node.receipt(step).exists() and not full:
                return []
            found = []
            for upstream in node.inputs.values():
                if not upstream.stage.stepwise:
                    found.append(upstream.receipt())
                elif step is not None:
                    found.append(upstream.receipt(step))
                else:
                    found += [upstream.receipt(number) for number in node.params.params["steps"]]
            found += [item.path for item in places.shipments(self.plan, node, step).values()]
            if node.stage.name == "train" and step is not None:
                found += [node.receipt(number) for number in node.steps if number < step][-1:]
            return [str(path) for path in found]

        return find

    def manifest_upstream(self, wildcards: Any) -> list[str]:
        """The receipts that a manifest describes; nothing once the manifest stands."""
        node = self.node("report", wildcards)
        if (node.directory / "manifest.json").exists():
            return []
        steps = node.params.params["steps"]
        found = []
        for item in node.inputs.values():
            found += [item.receipt(step) for step in steps] if item.stage.stepwise else [item.receipt()]
        return [str(path) for path in found]

    def report_manifest(self, wildcards: Any) -> list[str]:
        """The manifest that a report reads; nothing once the report's receipt stands."""
        node = self.node("report", wildcards)
        return [] if node.receipt().exists() else [str(node.directory / "manifest.json")]

    def params_document(self, stage: str, wildcards: Any) -> str:
        """The content of `params.json`."""
        document: ParamsFile = self.node(stage, wildcards).params
        return document.model_dump_json()

    def placement(self, stage: str, wildcards: Any) -> str:
        """JSON of what enters no key: paths, device, chunk sizes, scheduled steps."""
        node = self.node(stage, wildcards)
        step = int(wildcards.step) if node.stage.stepwise else None
        placed: dict[str, Any] = {
            **node.placement,
            **places.placement(self.plan, node, step),
            "node": node.name,
        }
        if node.stage.stepwise:
            placed["steps"] = node.steps
            placed["accept_env"] = os.environ.get(ACCEPT_ENV, "")
        if stage == "report":
            placed["manifest"] = str(node.directory / "manifest.json")
        return json.dumps(placed, sort_keys=True)

    def shipment(self, wildcards: Any) -> str:
        """JSON of a shipment: what, from where, to where."""
        return places.shipment_json(self._shipment(wildcards), self.plan.config.inventory.file)

    def shipment_upstream(self, wildcards: Any) -> list[str]:
        """The receipt of what is shipped; nothing once the shipment's record stands, or for a target."""
        shipment = self._shipment(wildcards)
        if shipment.path.exists() or shipment.stage == places.TARGET:
            return []
        return [str(self.plan.node(shipment.stage, shipment.key).receipt(shipment.step))]

    def _shipment(self, wildcards: Any) -> places.Shipment:
        step = int(wildcards.step) if "step" in wildcards.keys() else None  # noqa: SIM118 (not a mapping)
        found = places.find_shipment(self.plan, wildcards.key, wildcards.host, step)
        if found is None:
            raise ConfigError(f"no result of this config needs {wildcards.key} on {wildcards.host}")
        return found

    def source(self, wildcards: Any) -> str:
        """JSON of a run's configuration with every default filled in, for its manifest."""
        runs = {item.runkey: item.config for item in self.plan.runs}
        return json.dumps(resolved_source(runs[wildcards.key]), sort_keys=True)

    def run_name(self, stage: str, wildcards: Any) -> str:
        """The runs that asked for the result, as one word."""
        return "+".join(self.node(stage, wildcards).runs)
