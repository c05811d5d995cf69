"""What a configuration asks for: the nodes of the road with their keys, and which of them already stand in the store.

A node is one result: a stage, its key, its folder. Two runs that ask for the same key share the node. The key alone decides
freshness: a result is fresh when its receipt exists. Costs: hashing the package's code once (0.15 s) and a few stats a node;
1,000 checkpoints take about 20 ms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash.base.errors import ConfigError, CorruptError
from dflash.base.params import Params
from dflash.base.records import CodeDigest, ParamsFile, StopMarker, stage_key
from dflash.base.store import checkpoint_directory, receipt_path, stage_directory
from dflash.data.prompts_params import PromptsParams
from dflash.plan.code import code_digest
from dflash.plan.config import Config, RunConfig
from dflash.plan.decisions import Decisions
from dflash.stages import BY_NAME, Stage

PARENT_MUST_SHARE = (
    "block_size",
    "num_draft_layers",
    "target_layer_ids",
    "layer_types",
    "sliding_window",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rope_theta",
    "rms_norm_eps",
    "mask_token_id",
)
"""What makes a drafter the same drafter: a training that continues another keeps these."""


@dataclass
class Node:
    """One result that the plan needs.

    name: its name inside a run (`completions/arithmetic`). steps: the checkpoints it covers, for stages with one receipt a
    step. adopted: the key its current code would have had, when an older key was adopted in its place. inputs: upstream nodes by
    the name this stage knows them under (a source's completions read `prompts`, the dataset reads `completions/<source>`).
    """

    name: str
    stage: Stage
    key: str
    params: ParamsFile
    placement: dict[str, Any]
    directory: Path
    inputs: dict[str, Node]
    runs: list[str]
    steps: list[int] = field(default_factory=list)
    adopted: str | None = None

    def receipts(self) -> list[Path]:
        """All receipts that must stand for this node to be complete."""
        if self.stage.stepwise:
            return [self.receipt(step) for step in self.steps]
        return [self.receipt()]

    def receipt(self, step: int | None = None) -> Path:
        """The receipt of the node, or of one of its steps."""
        return receipt_path(self.directory, self.stage.name, step)

    def missing(self) -> list[Path]:
        """The receipts that do not stand yet."""
        return [path for path in self.receipts() if not path.exists()]

    def has_results(self) -> bool:
        """Whether anything of this key was finished or begun to be kept."""
        return has_results(self.directory, self.stage)


@dataclass
class PlannedRun:
    """One run: its nodes by name, in the order of the road, and the folder of this state of it."""

    name: str
    runkey: str
    directory: Path
    nodes: dict[str, Node]
    steps: list[int]
    config: RunConfig


@dataclass
class Plan:
    """Everything a configuration asks for. `nodes` holds shared nodes once, by (stage, key), in the order of the road."""

    config: Config
    store: Path
    runs: list[PlannedRun]
    nodes: dict[tuple[str, str], Node]
    decisions: Decisions

    def node(self, stage: str, key: str) -> Node:
        """The node of a stage and key."""
        return self.nodes[stage, key]

    def stale(self) -> list[Node]:
        """Nodes with missing receipts, in the order of the road."""
        return [node for node in self.nodes.values() if node.missing()]


def has_results(directory: Path, stage: Stage) -> bool:
    """Whether a result folder holds a receipt, a checkpoint, or the traces of a training that began."""
    if stage.name == "train":
        return any(directory.glob("step_*/manifest.json")) or (directory / "attempts").is_dir()
    if stage.stepwise:
        return any(directory.glob("step_*.json"))
    return (directory / "receipt.json").exists() or (directory / "partial").is_dir()


def build_plan(config: Config, *, code_root: Path | None = None) -> Plan:
    """Resolves a configuration into nodes with keys.

    Raises:
        CorruptError: the decisions file is damaged.
    """
    store = config.results / "store"
    plan = Plan(config, store, [], {}, Decisions.load(config.results))
    codes = {name: code_digest(stage_modules(stage), code_root) for name, stage in BY_NAME.items()}
    for run in config.runs:
        plan.runs.append(_plan_run(plan, run, codes))
    order = list(BY_NAME)
    plan.nodes = dict(sorted(plan.nodes.items(), key=lambda item: order.index(item[0][0])))
    return plan


def stage_modules(stage: Stage) -> tuple[str, ...]:
    """Where a stage's code starts: the module of its entry point."""
    return (stage.entry.partition(":")[0],)


def _plan_run(plan: Plan, run: RunConfig, codes: Mapping[str, CodeDigest]) -> PlannedRun:
    nodes: dict[str, Node] = {}

    def add(
        name: str,
        params: Params,
        section: str,
        upstream: dict[str, str],
        *,
        extra: dict[str, Any] | None = None,
        steps: list[int] | None = None,
        part: int = 0,
    ) -> Node:
        stage = BY_NAME[name.split("/")[0]]
        inputs = {known_as: nodes[item] for known_as, item in upstream.items()}
        values = {**params.keyed_values(), **(extra or {})}
        document = _params_file(
            stage, values, run.origins[section], {known_as: node.key for known_as, node in inputs.items()}, codes
        )
        old_key = plan.decisions.adopted(stage.name, document.key)
        adopted = document.key if old_key is not None else None
        if old_key is not None:
            document = _adopted_document(plan.store, stage, document, old_key)
        node = plan.nodes.get((stage.name, document.key))
        if node is None:
            node = Node(
                name,
                stage,
                document.key,
                document,
                {
                    **params.placement_values(),
                    **_files_placement(stage, values, run),
                    "host": plan.config.inventory.host(stage.role, part),
                    "device": plan.config.inventory.device(stage.role, part),
                    "code": codes[stage.name].digest,
                },
                stage_directory(plan.store, stage.name, document.key),
                inputs,
                [],
                adopted=adopted,
            )
            plan.nodes[stage.name, document.key] = node
        node.runs.append(run.name)
        if steps is not None:
            node.steps = sorted({*node.steps, *steps})
        nodes[name] = node
        return node

    answered = 0  # completions are dealt to the hosts that share the role, across sources and shards
    for source in run.prompts:
        add(f"prompts/{source.name}", source, f"prompts/{source.name}", {})
        for name, shard in answered_parts(source):
            read = {"prompts": f"prompts/{source.name}"}
            add(name, run.completions, "completions", read, extra=shard, part=answered)
            answered += 1
    add("dataset", run.dataset, "dataset", _same(*(name for source in run.prompts for name in sample_nodes(source))))
    add("buckets", run.batching, "batching", _same("dataset"))
    _check_parent(plan.store, run)
    train = add("train", run.train, "train", _same("dataset", "buckets"))
    steps = scheduled_steps(train.directory, run)
    train.steps = sorted({*train.steps, *steps})
    uses_held_out = any(item.held_out for item in run.references.prompt_sets)
    for kernels in run.evaluate.kernels:
        references = run.references.model_copy(update={"kernels": kernels})
        add(f"references/{kernels}", references, "references", _same(*(["dataset"] if uses_held_out else [])))
    add(
        "evaluate",
        run.evaluate,
        "evaluate",
        _same("train", *(f"references/{kernels}" for kernels in run.evaluate.kernels), "dataset"),
        steps=steps,
    )
    return _planned_run(plan, run, nodes, steps, codes)


def answered_parts(source: PromptsParams) -> list[tuple[str, dict[str, Any]]]:
    """The completions of a source: one job a shard, with what of the params is its own; none for ready samples."""
    if source.kind != "prompts":
        return []
    if source.shards == 1:
        return [(f"completions/{source.name}", {})]
    return [
        (f"completions/{source.name}@{number}", {"shard": number, "shards": source.shards})
        for number in range(source.shards)
    ]


def sample_nodes(source: PromptsParams) -> list[str]:
    """Where the dataset finds what a source gives: its completions, or its prompts node when the samples are ready."""
    return [name for name, _ in answered_parts(source)] or [f"prompts/{source.name}"]


def _check_parent(store: Path, run: RunConfig) -> None:
    """A training can only go on from a checkpoint that exists, with the drafter it was trained as."""
    parent = run.train.continue_from
    if parent is None:
        return
    where = run.origins["train"].get("continue_from", "train.continue_from")
    directory = stage_directory(store, "train", parent.key)
    if not (checkpoint_directory(directory, parent.step) / "manifest.json").exists():
        steps = sorted(int(path.parent.name[5:]) for path in directory.glob("step_*/manifest.json"))
        raise ConfigError(
            f"`train.continue_from: {{key: {parent.key}, step: {parent.step}}}` names no checkpoint in {store}",
            where=where,
            remedy=f"Steps of {parent.key}: {', '.join(map(str, steps)) or 'none'}.",
        )
    old = ParamsFile.read(directory / "params.json").params
    for name in PARENT_MUST_SHARE:
        if old[name] != run.train.keyed_values()[name]:
            raise ConfigError(
                f"`train.{name}: {run.train.keyed_values()[name]}` differs from {old[name]}, with which "
                f"{parent.key} was trained",
                where=where,
                remedy=f"A continued training keeps its {name}.",
            )


def _same(*names: str) -> dict[str, str]:
    """Inputs that a stage knows under the names they have in the run."""
    return {name: name for name in names}


def _planned_run(
    plan: Plan, run: RunConfig, nodes: dict[str, Node], steps: list[int], codes: Mapping[str, CodeDigest]
) -> PlannedRun:
    """Adds the report, whose key is the run's: it covers all stage keys, the scheduled steps and the adoptions."""
    stage = BY_NAME["report"]
    in_use = {(node.stage.name, node.adopted) for node in nodes.values() if node.adopted is not None}
    adoptions = [entry for entry in plan.decisions.entries if (entry["stage"], entry["new_key"]) in in_use]
    values = {**run.report.keyed_values(), "steps": steps, "adoptions": adoptions}
    upstream = {name: node.key for name, node in nodes.items()}
    document = _params_file(stage, values, run.origins["report"], upstream, codes)
    directory = plan.config.results / "runs" / run.name / document.key
    node = Node("report", stage, document.key, document, {}, directory, nodes, [run.name])
    plan.nodes["report", document.key] = node
    return PlannedRun(run.name, document.key, directory, {**nodes, "report": node}, steps, run)


def _params_file(
    stage: Stage,
    values: dict[str, Any],
    origins: Mapping[str, str],
    upstream: dict[str, str],
    codes: Mapping[str, CodeDigest],
) -> ParamsFile:
    code = codes[stage.name]
    return ParamsFile(
        stage=stage.name,
        key=stage_key(stage.name, values, upstream, code.digest),
        params=values,
        origins={name: origins.get(name, "derived") for name in values},
        upstream=upstream,
        code=code,
    )


def _adopted_document(store: Path, stage: Stage, document: ParamsFile, adopted: str) -> ParamsFile:
    """The params of the adopted result; they must be those now asked for, in all but the code."""
    old = ParamsFile.read(stage_directory(store, stage.name, adopted) / "params.json")
    if old.params != document.params or old.upstream != document.upstream:
        raise CorruptError(
            f"the adopted {stage.name} {adopted} was made from other params or upstreams",
            where=str(store / stage.name / adopted / "params.json"),
            remedy="Remove the adoption from adoptions.jsonl.",
        )
    return old


def _files_placement(stage: Stage, values: dict[str, Any], run: RunConfig) -> dict[str, Any]:
    """Where this host finds the files and the target that the params name by digest."""
    found: dict[str, Any] = {}
    digests = set(_digests_in(values)) & set(run.files)
    if digests:
        found["files"] = {digest: str(run.files[digest]) for digest in sorted(digests)}
    if "target" in values and run.target_path is not None:
        found["target_path"] = str(run.target_path)
    return found


def _digests_in(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [item for part in value.values() for item in _digests_in(part)]
    if isinstance(value, list):
        return [item for part in value for item in _digests_in(part)]
    return [value] if isinstance(value, str) and len(value) == 64 else []


def scheduled_steps(train_directory: Path, run: RunConfig) -> list[int]:
    """The checkpoints this run asks for; after `dflash stop --finish`, those that exist."""
    wanted = run.train.steps()
    marker = train_directory / "stop.json"
    if marker.exists() and StopMarker.read(marker).finish:
        return [step for step in wanted if (checkpoint_directory(train_directory, step) / "manifest.json").exists()]
    return wanted
