"""`dflash rehearse RUN`: a training tried on its real hosts in minutes, before it is begun.

    gpu host     the ranks of the run's topology on the longest batches, one checkpoint      dflash/train/rehearse.py
    here         the checkpoint's drafter goes to the eval host, verified                    dflash/ship/ship.py
    eval host    a few requests under the run's kernels                                      dflash/evaluate/trial.py

Each host works in a throwaway folder of its store, which is taken away at the end, whatever the end is. A part that fails is
told with what cures it; what comes after it and does not need it is tried all the same. Of what comes before training only
dataset and buckets must stand; what the workflow has not shipped yet is shipped into the throwaway folder.

Costs a start of the training, two steps a length bucket, a copy of a drafter, and loading the target once a kernel.
"""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dflash import bundle
from dflash.base.errors import DflashError, PermanentError, TransientError
from dflash.base.progress import Progress
from dflash.base.records import Artifact, Receipt, ShipmentReceipt
from dflash.base.store import checkpoint_directory, receipt_path, shipped_artifact, shipped_directory, stage_directory
from dflash.base.words import duration
from dflash.hosts import machine
from dflash.hosts.doctor import size
from dflash.hosts.host import Host, LocalHost
from dflash.plan.graph import Node, Plan, PlannedRun
from dflash.plan.places import LOCAL, TARGET, placement, planned_place, shipments
from dflash.remote import STORE, LinkLost, Unreachable, ask, raise_error
from dflash.runner import placement_fields
from dflash.ship.ship import ship
from dflash.shipments import ATTEMPTS, IDLE, small_target
from dflash.there import rehearse_part
from dflash.train.rehearse import PREFIX
from dflash.train.roles import Roles

NEEDED = ("dataset", "buckets")
DONE, FAILED, SKIPPED, NEEDLESS = "done", "FAILED", "not tried", "not needed"
DISK_REMEDY = "Free some, raise train.checkpoint_every, or lower train.keep_states: neither changes a key."
ITEM = {"float32": 4, "float64": 8, "bfloat16": 2}
REACH_TIMEOUT = 30.0


@dataclass
class Site:
    """A place where a part of a rehearsal runs. store: the store there, absolute. name: of the throwaway folder in it. used:
    whether it has answered, and so may hold something of ours."""

    place: str
    host: Host
    store: Path
    name: str
    used: bool = False

    @property
    def scratch(self) -> Path:
        """The throwaway folder."""
        return self.store / self.name

    def do(self, part: str, role: str, request: Mapping[str, Any], files: Mapping[str, bytes]) -> dict[str, Any]:
        """Has a part done there.

        Args:
            files: what must lie in the throwaway folder, by path in it.

        Raises:
            DflashError: as the part, or the way there, failed.
        """
        whole = {**request, "do": "rehearse", "part": part, "scratch": self.name}
        if self.place == LOCAL:
            bundle.place(files, self.scratch)
            return rehearse_part(self.store, whole)
        placed = {str(STORE / self.name / path): content for path, content in files.items()}
        try:
            answer, _ = ask(self.host, role, whole, placed)
        except Unreachable:
            raise
        except LinkLost as lost:
            raise TransientError(lost.what, remedy="Rehearse again; what it was doing there has been ended.") from lost
        raise_error(answer, self.host)
        found: dict[str, Any] = answer["found"]
        return found


@dataclass
class Part:
    """How one part went. said: of what was done, or why it was not."""

    name: str
    where: str
    state: str = SKIPPED
    said: str = ""


@dataclass
class Disk:
    """What a place needs for the whole run and has free, in bytes; `for_what` says what it is made of."""

    where: str
    needed: int
    free: int | None
    for_what: str

    @property
    def fits(self) -> bool | None:
        """None when it is not known what is free."""
        return None if self.free is None else self.needed <= self.free


@dataclass
class Rehearsal:
    """Everything that was seen. `training`, `evaluation`: what the hosts answered; None when that part failed."""

    run: str
    key: str
    parts: list[Part] = field(default_factory=list)
    training: dict[str, Any] | None = None
    shipment: ShipmentReceipt | None = None
    evaluation: dict[str, Any] | None = None
    steps: int = 0
    checkpoints: int = 0
    disks: list[Disk] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        """What failed, each with what cures it."""
        found = [f"{part.name}: {part.said}" for part in self.parts if part.state == FAILED]
        found += [f"memory: {why}" for why in crowded(self)]
        return found + [f"disk: {why}" for disk in self.disks if (why := _too_small(disk))]

    def expected(self) -> Expected | None:
        """What the rates foretell of the whole run; None when training failed."""
        return None if self.training is None else expect(self.training, self.steps, self.checkpoints)


@dataclass(frozen=True)
class Expected:
    """Rates, in tokens per second and seconds.

    buckets: one entry a length bucket: its longest batch (samples, length, tokens), its share of all batches, the rate of one
    target and of one drafter, seconds of a step that is made of it. target, drafter: one rank of each role, over the mix of
    buckets. pipeline: the whole. starving: the side that waits, and its share of the time. seconds: of the whole run.
    """

    buckets: list[dict[str, Any]]
    target: float
    drafter: float
    pipeline: float
    step_seconds: float
    starving: dict[str, float]
    seconds: float


def expect(training: Mapping[str, Any], steps: int, checkpoints: int) -> Expected:
    """Weighs what was measured of each bucket's longest batch by the bucket's share of all batches.

    A step of a real training mixes buckets and is as long as its batches together. Training waits for a checkpoint only where
    writing it takes longer than the steps until the next.
    """
    topology = training["topology"]
    last = {line["buckets"][0]: line for line in training["lines"]}
    buckets = [_measured(facts, last[facts["bucket"]], topology) for facts in training["buckets"]]

    def mean(value: Callable[[dict[str, Any]], float]) -> float:
        return float(sum(one["share"] * value(one) for one in buckets))

    tokens, step_seconds = mean(lambda one: one["tokens"]), mean(lambda one: one["step_seconds"])
    waits: dict[str, float] = {}
    for one in buckets:
        for side, share in one["starving"].items():
            waits[side] = waits.get(side, 0.0) + one["share"] * share * one["step_seconds"]
    between = step_seconds * steps / max(1, checkpoints)
    late = max(0.0, training["checkpoint"]["seconds"] - between)
    return Expected(
        buckets=buckets,
        target=tokens / mean(lambda one: one["tokens"] / one["target"]),
        drafter=tokens / mean(lambda one: one["tokens"] / one["drafter"]),
        pipeline=training["tokens_a_batch"] * training["batches_per_step"] / step_seconds,
        step_seconds=step_seconds,
        starving={side: seconds / step_seconds for side, seconds in waits.items()},
        seconds=training["start_seconds"] + steps * step_seconds + checkpoints * late,
    )


def _measured(facts: Mapping[str, Any], line: Mapping[str, Any], topology: Mapping[str, Any]) -> dict[str, Any]:
    """A bucket with the rates of its last step."""
    rates = line["tokens_per_second"]
    return {
        **facts,
        "target": rates["target"] / topology["targets"],
        "drafter": rates["drafter"] / topology["drafters"],
        "step_seconds": line["seconds"],
        "starving": line["starving"],
    }


# ---------------------------------------------------------------- the rehearsal


def rehearse(plan: Plan, planned: PlannedRun) -> Rehearsal:
    """Rehearses the training of a run. What failed is in `problems` of what comes back.

    Raises:
        PermanentError: what must stand first does not; says what to run.
    """
    train, evaluate = planned.nodes["train"], planned.nodes["evaluate"]
    require_upstream(train)
    name = f"{PREFIX}{uuid.uuid4().hex[:12]}"
    places = planned_place(plan, train), planned_place(plan, evaluate), LOCAL
    sites = {place: site_of(plan, place, name) for place in places}
    found = Rehearsal(planned.name, train.key, steps=train.steps[-1] - first_step(train), checkpoints=len(train.steps))
    gpu, judge, here = (sites[place] for place in places)
    try:
        _rehearse_parts(found, plan, planned, gpu, judge, here)
    finally:
        _clear(sites, found)
    found.disks = disks(plan, planned, found, gpu, judge)
    return found


def first_step(train: Node) -> int:
    """The steps done before a training begins: those of the state that it continues, else 0."""
    source = train.params.params.get("continue_from") or {}
    return int(source["step"]) if source.get("what") == "state" else 0


def require_upstream(train: Node) -> None:
    """Refuses to rehearse what has no dataset or buckets, or nothing left to train.

    Raises:
        PermanentError: names the receipt and the command that makes it.
    """
    if not train.steps:
        raise PermanentError(
            "no checkpoint of this run is scheduled: it was stopped for good before its first",
            where=str(train.directory),
            remedy="`dflash run --resume` trains it.",
        )
    for name in NEEDED:
        receipt = train.inputs[name].receipt()
        if not receipt.exists():
            raise PermanentError(
                f"the {name} that a rehearsal needs is not made yet",
                where=str(receipt),
                remedy=f"Run `snakemake {train.inputs[NEEDED[-1]].receipt()}` with the same --configfile, or `dflash run` "
                "for everything.",
            )


def site_of(plan: Plan, place: str, name: str) -> Site:
    """A place, with its store."""
    if place == LOCAL:
        return Site(LOCAL, LocalHost(), plan.store.resolve(), name)
    host = plan.config.inventory.get(place)
    return Site(place, host, host.workdir / STORE, name)


def _rehearse_parts(found: Rehearsal, plan: Plan, planned: PlannedRun, gpu: Site, judge: Site, here: Site) -> None:
    train, evaluate = planned.nodes["train"], planned.nodes["evaluate"]
    training = Part("training", gpu.place)
    checkpoint = Part("checkpoint", gpu.place)
    way = gpu.place if gpu.place == judge.place else f"{gpu.place} to {judge.place}"
    shipment, evaluation = Part("shipment", way), Part("evaluation", judge.place)
    found.parts = [training, checkpoint, shipment, evaluation]
    with told(training):
        found.training = _train(plan, planned, train, gpu, here)
        training.said = _training_words(found.training)
    if found.training is None:
        for part in found.parts[1:]:
            part.said = "there is no checkpoint"
        return
    checkpoint.state, checkpoint.said = DONE, _checkpoint_words(found.training["checkpoint"])
    drafter = checkpoint_directory(Path("train") / train.key, found.training["checkpoint"]["step"]) / "drafter"
    with told(shipment):
        if gpu.place == judge.place:
            shipment.state, shipment.said = NEEDLESS, "it is judged where it is trained"
        else:
            found.shipment = _ship(found.training, gpu, judge, drafter)
            shipment.said = _shipment_words(found.shipment)
    if shipment.state == FAILED:
        evaluation.said = f"nothing has arrived on {judge.place}"
        return
    with told(evaluation):
        arrived = Path("drafter") if gpu.place != judge.place else drafter
        found.evaluation = _evaluate(
            plan, evaluate, judge, here, arrived, found.training["prompts"], gpu.place != judge.place
        )
        evaluation.said = _evaluation_words(found.evaluation)


@contextlib.contextmanager
def told(part: Part) -> Iterator[None]:
    """Notes how a part went. An error that was raised on purpose is its outcome; others, and Ctrl-C, go on their way."""
    try:
        yield
        part.state = DONE if part.state == SKIPPED else part.state
    except DflashError as error:
        part.state, part.said = FAILED, error.message()


def _train(plan: Plan, planned: PlannedRun, train: Node, gpu: Site, here: Site) -> dict[str, Any]:
    _reach(gpu)
    placed = {**train.placement, **placement(plan, train)}
    values = {name: placed[name] for name in placement_fields(train.stage) if name in placed}
    request = {
        "key": train.key,
        "run": planned.name,
        "placement": {
            "host": str(placed["host"]),
            "device": str(placed["device"]),
            "threads": int(placed.get("threads", 1)),
            "target_path": _target(plan, train, placed, gpu),
            "shipped": list(placed.get("shipped", [])),
            "values": {**values, "tracker": "none"},
        },
    }
    _bring_inputs(plan, train, gpu, here)
    return gpu.do("train", train.stage.role, request, _params_files(train))


def _reach(site: Site) -> None:
    """Sees whether a host answers, before anything is begun that needs it."""
    if site.place != LOCAL:
        site.host.run(["true"], timeout=REACH_TIMEOUT)
    site.used = True


def _params_files(train: Node) -> dict[str, bytes]:
    """`params.json` of a training and of everything before it, and the receipts of its inputs beside where copies of them lie;
    by path in a store."""
    found: dict[str, bytes] = {}
    waiting = [train]
    while waiting:
        node = waiting.pop()
        document = json.dumps(node.params.model_dump(mode="json"), indent=2, sort_keys=True)
        found[str(stage_directory(Path(), node.stage.name, node.key) / "params.json")] = document.encode()
        waiting += node.inputs.values()
    for node in train.inputs.values():
        copy = shipped_directory(Path(), node.stage.name, node.key)
        found[str(receipt_path(copy, node.stage.name))] = node.receipt().read_bytes()
    return found


def _target(plan: Plan, node: Node, placed: Mapping[str, Any], site: Site) -> str | None:
    """The target's folder on a host: where the hosts file says, where the workflow has shipped it, or where we shall."""
    given = placed.get("target_path")
    if given is None:
        return None
    shipment = shipments(plan, node, None if not node.stage.stepwise else node.steps[0]).get(TARGET)
    if shipment is not None and not shipment.path.exists():
        return str(site.scratch / "target")
    return str(Path(given).absolute() if site.place == LOCAL else site.host.workdir / str(given))


def _bring_inputs(plan: Plan, node: Node, site: Site, here: Site, only: Sequence[str] | None = None) -> None:
    """Ships what the workflow has not shipped to a host yet into the throwaway folder there.

    Args:
        only: names of inputs; all when left out.

    Raises:
        PermanentError: it lies on a third host (says what to run first), or is a target that is too large to be shipped.
    """
    for name, item in shipments(plan, node, node.steps[0] if node.stage.stepwise else None).items():
        if item.path.exists() or (only is not None and name not in only):
            continue
        if item.source != LOCAL:
            raise PermanentError(
                f"the {name} that {site.place} needs is on {item.source}",
                where=str(item.path),
                remedy=f"Run `snakemake {item.path}` with the same --configfile first.",
            )
        if name == TARGET:
            assert item.folder is not None
            _copy(small_target(item.folder, site.host), site, site.scratch / "target", "the target")
            continue
        view = _view(node.inputs[name], here)
        _copy(view, site, shipped_artifact(site.scratch, item.stage, item.key), f"the {name}")


def _view(node: Node, here: Site) -> Path:
    """A folder of hard links to a result's outputs, in our own throwaway folder."""
    view = here.scratch / "outputs" / node.stage.name
    for output in Receipt.read(node.receipt()).outputs:
        link = view / output.path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.hardlink_to((node.directory / output.path).resolve())
    return view


def _copy(folder: Path, site: Site, destination: Path, what: str) -> ShipmentReceipt:
    progress = Progress(f"rehearsal: {what} to {site.place}")
    return ship(
        LocalHost(),
        folder,
        site.host,
        destination,
        idle=IDLE,
        attempts=ATTEMPTS,
        progress=lambda done, total: progress.update(done, total, "bytes"),
        tell=progress.say,
    )


def _ship(training: Mapping[str, Any], gpu: Site, judge: Site, drafter: Path) -> ShipmentReceipt:
    """The drafter to the eval host, as the workflow ships one: known by its manifest, verified where it arrives."""
    _reach(judge)
    progress = Progress(f"rehearsal: the drafter to {judge.place}")
    return ship(
        gpu.host,
        gpu.scratch / drafter,
        judge.host,
        judge.scratch / "drafter",
        known=Artifact.model_validate(training["checkpoint"]["artifact"]),
        idle=IDLE,
        attempts=ATTEMPTS,
        progress=lambda done, total: progress.update(done, total, "bytes"),
        tell=progress.say,
    )


def _evaluate(
    plan: Plan, evaluate: Node, judge: Site, here: Site, drafter: Path, prompts: list[list[int]], shipped: bool
) -> dict[str, Any]:
    _reach(judge)
    placed = {**evaluate.placement, **placement(plan, evaluate, evaluate.steps[0])}
    values = {name: placed[name] for name in placement_fields(evaluate.stage) if name in placed}
    target_path = _target(plan, evaluate, placed, judge)
    _bring_inputs(plan, evaluate, judge, here, only=[TARGET])
    Progress("rehearsal").say(f"{len(prompts)} requests are evaluated on {judge.place}")
    references = [node for name, node in evaluate.inputs.items() if name.startswith("references/")]
    request = {
        "drafter": str(drafter),
        "shipped": shipped,
        "params": {**evaluate.params.params, **values},
        "dtypes": {node.params.params["kernels"]: node.params.params["dtype"] for node in references},
        # An evaluation whose features are kept never loads the target; then it fits as its references spread it.
        "devices": {
            node.params.params["kernels"]: placed.get("target_devices") or node.placement.get("target_devices") or []
            for node in references
        },
        "target_path": target_path,
        "device": str(placed["device"]),
        "prompts": prompts,
    }
    return judge.do("evaluate", evaluate.stage.role, request, {})


def _clear(sites: Mapping[str, Site], found: Rehearsal) -> None:
    """Takes the throwaway folders away; one that cannot be is a problem, not an excuse to leave the others. Another Ctrl-C
    or SIGTERM is not heard meanwhile."""
    main = threading.current_thread() is threading.main_thread()
    # Ctrl-C reaches what we start too, so that inherits its being ignored; SIGTERM is for us alone.
    unheard: dict[signal.Signals, Any] = {signal.SIGINT: signal.SIG_IGN, signal.SIGTERM: lambda *_: None}
    before = {number: signal.signal(number, do) for number, do in unheard.items()} if main else {}
    try:
        for site in sites.values():
            if not site.used and site.place != LOCAL:
                continue
            part = Part("clearing up", site.place)
            with told(part):
                site.do("clear", "", {}, {})
            if part.state == FAILED:
                found.parts.append(part)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---------------------------------------------------------------- disk


def disks(plan: Plan, planned: PlannedRun, found: Rehearsal, gpu: Site, judge: Site) -> list[Disk]:
    """What the whole run needs on every host; hosts that are one machine count together."""
    if found.training is None:
        return []
    train = planned.nodes["train"]
    checkpoint = found.training["checkpoint"]
    left = len(set(train.steps) - set(found.training["existing"]))
    states = min(left, int(train.placement.get("keep_states", 2)) + 1)  # one more exists while the next is written
    drafter, state = checkpoint["bytes"]["drafter"], checkpoint["bytes"]["state"]
    lines = found.training["lines"]
    metrics = found.steps * len(json.dumps(lines[-1])) if lines else 0
    wanted: dict[str, list[tuple[int, str]]] = {gpu.place: [], judge.place: [], LOCAL: []}
    wanted[gpu.place].append((left * drafter + states * state, f"{left} drafters and {states} states"))
    if judge.place != gpu.place:
        wanted[judge.place].append((left * drafter, f"{left} drafters"))
    features = features_bytes(planned, found.training["mean_length"])
    if features:
        wanted[judge.place].append((features, "features of the references"))
    wanted[LOCAL].append((metrics + left * checkpoint["manifest_bytes"], "metrics and manifests"))
    free = {gpu.place: found.training["disk_free"], LOCAL: machine.space(plan.store.resolve())["free_bytes"]}
    if judge.place not in free:
        free[judge.place] = found.evaluation["disk_free"] if found.evaluation else None
    return [
        Disk(place, sum(size for size, _ in items), free[place], ", ".join(words for _, words in items))
        for place, items in wanted.items()
    ]


def features_bytes(planned: PlannedRun, mean_length: float) -> int:
    """Bytes of the features that references still to be made will keep, about: those of an average prompt of the training data
    and the longest continuation, for every prompt that can be counted now, within `references.features_cache_gb`."""
    total = 0.0
    for name, node in planned.nodes.items():
        if not name.startswith("references/") or node.receipt().exists():
            continue
        params = node.params.params
        prompts = sum(_prompts_of(node, one) for one in params["prompt_sets"])
        width = len(params["taps"]) * int(params["target"]["hidden_size"]) * ITEM[params["dtype"]]
        cap = float(node.placement.get("features_cache_gb", 8.0)) * 1e9
        total += min(cap, prompts * (mean_length + params["max_new_tokens"]) * width)
    return int(total)


def _prompts_of(node: Node, prompt_set: Mapping[str, Any]) -> int:
    """How many prompts a set has."""
    if prompt_set.get("held_out"):
        count = int((Receipt.read(node.inputs["dataset"].receipt()).results.get("validation") or {}).get("samples", 0))
    else:
        path = Path(node.placement["files"][prompt_set["digest"]])
        count = sum(1 for line in path.read_bytes().splitlines() if line.strip())
    return min(count, prompt_set.get("limit") or count)


def _too_small(disk: Disk) -> str:
    if disk.fits is not False:
        return ""
    assert disk.free is not None
    need = f"{size(disk.needed)} for the whole run ({disk.for_what})"
    return f"{disk.where} needs {need} and has {size(disk.free)} free. {DISK_REMEDY}"


# ---------------------------------------------------------------- for people


def _training_words(training: Mapping[str, Any]) -> str:
    largest = max(training["buckets"], key=lambda one: one["samples"] * one["length"])
    return (
        f"{len(training['lines'])} steps of {training['batches_per_step']} batches, the longest "
        f"{largest['samples']} x {largest['length']:,} tokens; it starts in {duration(training['start_seconds'])}"
    )


def _checkpoint_words(checkpoint: Mapping[str, Any]) -> str:
    parts = checkpoint["bytes"]
    return (
        f"{size(parts['drafter'])} of drafter and {size(parts['state'])} of state written in {checkpoint['seconds']:.1f} s "
        "beside training; verified, and the state loads"
    )


def _shipment_words(receipt: ShipmentReceipt) -> str:
    return f"{size(receipt.bytes)} in {receipt.seconds:.1f} s, {size(int(receipt.bytes_per_second))}/s, verified" + (
        f" at attempt {receipt.attempts}" if receipt.attempts > 1 else ""
    )


def _evaluation_words(evaluation: Mapping[str, Any]) -> str:
    said = [
        f"{kernel}: {one['seconds']:.1f} s a request, tau {one['tau']:.2f}, target loaded in {duration(one['load_seconds'])}"
        for kernel, one in evaluation["kernels"].items()
    ]
    return f"{'; '.join(said)} (the drafter is all but untrained)"


def gpus_in_use(training: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """GPU -> the most bytes that a rank had there, and what it left."""
    found = {}
    for one in training["ranks"]:
        if "gpu_room" in one:
            name = one["device"] if training["topology"]["colocate"] else f"rank {one['rank']}"
            peak = max(line["memory_bytes"].get(name, 0) for line in training["lines"])
            found[one["device"]] = peak, one["gpu_room"] - peak
    return found


def crowded(found: Rehearsal) -> list[str]:
    """Where an evaluation will share a GPU with the training that goes on, and not find the memory that it needs."""
    if found.training is None or found.evaluation is None or found.parts[0].where != found.parts[3].where:
        return []
    device, needed = str(found.evaluation["device"]), int(found.evaluation["peak"])
    _, left = gpus_in_use(found.training).get("cuda:0" if device == "cuda" else device, (0, needed))
    if needed <= left:
        return []
    return [
        f"an evaluation takes {size(needed)} of {device}, and training leaves {size(left)} there. Give roles.eval another host or "
        "device, or lower train.micro_batch: neither changes a key."
    ]


def memory_rows(found: Rehearsal) -> list[list[str]]:
    """Device, who is on it, the most in use, what was left then."""
    rows = []
    if found.training is not None:
        topology = found.training["topology"]
        roles = Roles(topology["targets"], topology["drafters"])
        where, gpus = found.parts[0].where, gpus_in_use(found.training)
        for one in found.training["ranks"]:
            who = "both roles" if topology["colocate"] else roles.name(one["rank"])
            if one["device"] in gpus:
                rows.append([where, one["device"], who, *map(size, gpus[one["device"]])])
            else:
                rows.append([where, one["device"], who, size(one["host_peak"]), ""])
        least = min(one["host_left"] for one in found.training["ranks"])
        rows.append(
            [
                where,
                "host memory",
                "all ranks",
                size(sum(one["host_peak"] for one in found.training["ranks"])),
                size(least),
            ]
        )
    if found.evaluation is not None:
        one = found.evaluation
        rows.append([found.parts[3].where, one["device"], "evaluation", size(one["peak"]), size(one["left"])])
    return rows


def render(found: Rehearsal) -> str:
    """Everything, for people."""
    lines = [f"rehearsal of {found.run} (training {found.key})", ""]
    lines += table(["part", "where", "", ""], [[part.name, part.where, part.state, part.said] for part in found.parts])
    rows = memory_rows(found)
    if rows:
        lines += ["", *table(["memory of", "device", "used by", "most", "left"], rows, right=(3, 4))]
    if found.disks:
        told_disks = [
            [
                disk.where,
                size(disk.needed),
                "unknown" if disk.free is None else size(disk.free),
                {True: "fits", False: "DOES NOT FIT", None: ""}[disk.fits],
                disk.for_what,
            ]
            for disk in found.disks
        ]
        lines += ["", *table(["disk of", "whole run", "free", "", "for"], told_disks, right=(1, 2))]
    expected = found.expected()
    if expected is not None:
        lines += ["", *_rate_lines(found, expected)]
    return "\n".join(lines)


def _rate_lines(found: Rehearsal, expected: Expected) -> list[str]:
    head = ["bucket", "longest batch", "share", "a target", "a drafter", "a step"]
    rows = [
        [
            str(one["bucket"]),
            f"{one['samples']} x {one['length']:,}",
            f"{one['share']:.0%}",
            f"{one['target']:,.0f} tok/s",
            f"{one['drafter']:,.0f} tok/s",
            f"{one['step_seconds']:.2f} s",
        ]
        for one in expected.buckets
    ]
    mix = [
        "all",
        "",
        "100%",
        f"{expected.target:,.0f} tok/s",
        f"{expected.drafter:,.0f} tok/s",
        f"{expected.step_seconds:.2f} s",
    ]
    who = "; ".join(f"the {side}s wait {share:.0%} of it" for side, share in expected.starving.items())
    return [
        *table(head, [*rows, mix], right=(2, 3, 4, 5)),
        "",
        f"whole pipeline: about {expected.pipeline:,.0f} tok/s, {expected.step_seconds:.2f} s a step{f'; {who}' if who else ''}",
        f"whole run: {found.steps:,} steps and {found.checkpoints:,} checkpoints, about {duration(expected.seconds)}",
    ]


def as_json(found: Rehearsal) -> str:
    """Everything, for programs; as it is also a file for `dflash plan --topology --rates`."""
    expected = found.expected()
    document: dict[str, Any] = {
        "run": found.run,
        "key": found.key,
        "parts": [asdict(part) for part in found.parts],
        "problems": found.problems,
        "memory": [
            dict(zip(("where", "device", "who", "most", "left"), row, strict=True)) for row in memory_rows(found)
        ],
        "disk": [{**asdict(disk), "fits": disk.fits} for disk in found.disks],
        "training": {name: value for name, value in found.training.items() if name != "prompts"}
        if found.training
        else None,
        "shipment": found.shipment.model_dump(mode="json") if found.shipment else None,
        "evaluation": found.evaluation,
        "steps": found.steps,
        "checkpoints": found.checkpoints,
        "expected": asdict(expected) if expected else None,
    }
    if expected is not None:
        document |= {"target": expected.target, "drafter": expected.drafter}
    return json.dumps(document, indent=2)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Lines with aligned columns; `right`: columns that are aligned on the right."""
    everything = [head, *rows]
    widths = [max(len(row[column]) for row in everything) for column in range(len(head))]
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in everything
    ]
