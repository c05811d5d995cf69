"""`dflash compare A B`: a diagnosis of two runs, checkpoints or files: what came out differently, and why, most likely first.

Every difference is put under a rule that says which gap it can explain, throughput or quality, and how readily. The order of the
rules is fixed and told with each finding, so that a reader can disagree with it:

    target > kernels > torch build > hardware > placement > batching > dataset > training > code > tensors > other config > packages

Kernels and builds come first because they have explained a gap of half the speed while every config value and every checksum
agreed. Reads JSON, a csv and headers of safetensors files; under a second and 100 MB for runs of 200 checkpoints.
"""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash.base.environment import NUMERIC_DISTRIBUTIONS
from dflash.base.records import Environment, MetricsLine
from dflash.base.words import number_of
from dflash.report.subject import Subject, flat, load

WIDTH = 118
ABSENT = "absent"
ROLES = {"train": "training", "references": "evaluation", "completions": "completions"}
"""Stages in which a target computes, and what people call them."""
FAST_PACKAGES = ("flash-linear-attention", "fla-core", "causal-conv1d", "triton", "liger-kernel")
BUILD = ("version", "cuda", "cudnn", "nccl", "driver")
HARMLESS_VARIABLES = ("NCCL_DEBUG", "TORCH_LOGS", "TRITON_CACHE_DIR")
"""Where logs and caches go: no number or speed is known to depend on them."""
SAME = 0.05
"""Ratios nearer to one than this count as equal."""
NEAR_EDGE = 0.2
"""Buckets of two runs are compared with each other when their upper edges differ by less than this share."""
WARM_UP = 0.1
"""Share of the first steps that throughput leaves out."""
MOST_DETAILS = 12

RULES: dict[str, tuple[str, str]] = {
    "target": ("quality and throughput", "another target: every number is about another model"),
    "kernels": (
        "throughput and quality",
        "other functions bound for the same layers change speed several times over and every feature a little",
    ),
    "torch build": (
        "throughput and quality",
        "another torch, CUDA, cuDNN, NCCL or driver replaces every kernel at once, without a trace in any config",
    ),
    "hardware": ("throughput", "another processor, GPU, power cap or link"),
    "placement": ("throughput", "who waits for whom, and how much is computed twice; never the weights"),
    "batching": (
        "throughput and quality",
        "tokens and samples a step decide how full the device is, and what a step means",
    ),
    "dataset": ("throughput and quality", "longer text costs more a token, and other text teaches other things"),
    "training": ("quality and throughput", "the recipe of the drafter: what it learns, and how much a step computes"),
    "code": ("quality and throughput", "another program made it; digests of modules, comments and docstrings left out"),
    "tensors": (
        "quality",
        "a drafter with other tensors is another model; bytes that are gone were not trained or not saved",
    ),
    "config": ("quality", "params of other stages"),
    "packages": ("neither, as far as is known", "versions that no number is known to depend on"),
}
"""Rule -> the gap it can explain, and why it stands where it does. In order."""
SECTION_RULES = {"buckets": "batching", "train": "training"}


@dataclass(frozen=True)
class Difference:
    """One fact with both values, and where each came from (config values only)."""

    name: str
    a: str
    b: str
    origin: str = ""

    def words(self) -> str:
        """`token_budget: 2560 -> 4096 (default -> my.yaml:7)`."""
        return f"{self.name}: {self.a} -> {self.b}" + (f"  ({self.origin})" if self.origin else "")


@dataclass(frozen=True)
class Finding:
    """Differences under one rule. words: the finding in a sentence."""

    rule: str
    explains: str
    why: str
    words: str
    details: tuple[Difference, ...]


@dataclass(frozen=True)
class Outcome:
    """What came out: a name, the sentence, and both values where there are some."""

    name: str
    words: str
    a: float | None = None
    b: float | None = None


@dataclass(frozen=True)
class Comparison:
    """The whole diagnosis."""

    a: Subject
    b: Subject
    outcomes: tuple[Outcome, ...]
    findings: tuple[Finding, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        sides = {
            name: {"path": str(side.path), "kind": side.kind, "label": side.label, "unknown": side.unknown}
            for name, side in (("a", self.a), ("b", self.b))
        }
        findings = [{"rank": rank, **asdict(item)} for rank, item in enumerate(self.findings, start=1)]
        return {**sides, "outcomes": [asdict(item) for item in self.outcomes], "findings": findings}


def compare(first: Path, second: Path) -> Comparison:
    """Compares any two of: run manifests or folders, checkpoints, lone safetensors, foreign drafters.

    Raises:
        ConfigError: a path is nothing that can be compared. CorruptError: it is damaged.
    """
    a, b = load(first), load(second)
    found = [
        *_target(a, b),
        *_kernels(a, b),
        *_torch_build(a, b),
        *_hardware(a, b),
        *_placement(a, b),
        *_config(a, b, "batching"),
        *_dataset(a, b),
        *_config(a, b, "training"),
        *_code(a, b),
        *_tensors(a, b),
        *_config(a, b, "config"),
        *_packages(a, b),
    ]
    order = list(RULES)
    return Comparison(a, b, tuple(_outcomes(a, b)), tuple(sorted(found, key=lambda item: order.index(item.rule))))


def _finding(rule: str, words: str, details: Iterable[Difference]) -> Finding:
    explains, why = RULES[rule]
    return Finding(rule, explains, why, words, tuple(details))


# ---------------------------------------------------------------- what came out


def _outcomes(a: Subject, b: Subject) -> list[Outcome]:
    return [*_throughput(a, b), *_stalls(a, b), *_memory(a, b), *_tau(a, b)]


def _measured(subject: Subject) -> list[MetricsLine]:
    """The steps after warming up."""
    return subject.metrics[int(len(subject.metrics) * WARM_UP) :]


def _rates(lines: Iterable[MetricsLine], role: str) -> list[float]:
    return [line.tokens_per_second[role] for line in lines if role in line.tokens_per_second]


def _throughput(a: Subject, b: Subject) -> list[Outcome]:
    found = []
    roles = sorted({role for side in (a, b) for line in side.metrics for role in line.tokens_per_second})
    for role in roles:
        ours, theirs = (_rates(_measured(side), role) for side in (a, b))
        if not ours or not theirs:
            continue
        first, second = statistics.median(ours), statistics.median(theirs)
        ratio = second / first if first else 0.0
        by_bucket = _ratio_by_bucket(a, b, role)
        counts = f"median of {len(ours):,} and {number_of(len(theirs), 'step')}"
        words = f"{role}: {first:,.0f} -> {second:,.0f} tok/s, {counts} ({_percent(ratio)}){_blame(ratio, by_bucket)}"
        found.append(Outcome(f"throughput {role}", words, first, second))
    return found


def _percent(ratio: float) -> str:
    return "the same" if abs(ratio - 1) < SAME else f"{ratio - 1:+.0%}"


def _blame(ratio: float, by_bucket: float | None) -> str:
    """Longer text, or a slower machine? Told from steps whose samples have equal length."""
    if abs(ratio - 1) < SAME:
        return ""
    if by_bucket is None:
        return "; no bucket of equal length to tell longer text from a slower machine"
    told = f"; at equal length {_percent(by_bucket)}"
    if abs(by_bucket - 1) <= 0.35 * abs(ratio - 1):
        return f"{told}: the text explains it, not the machine"
    return f"{told}: the machine or the code explains it, not the text"


def _ratio_by_bucket(a: Subject, b: Subject, role: str) -> float | None:
    """B's median rate over A's in buckets of about the same upper edge, averaged by B's steps; None without such buckets."""
    ours, theirs = (_rates_by_edge(side, role) for side in (a, b))
    total, weight = 0.0, 0
    for edge, rates in theirs.items():
        near = min(ours, key=lambda other: abs(other - edge), default=None)
        if near is None or abs(near - edge) > NEAR_EDGE * edge:
            continue
        total += len(rates) * statistics.median(rates) / statistics.median(ours[near])
        weight += len(rates)
    return total / weight if weight else None


def _rates_by_edge(subject: Subject, role: str) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for line in _measured(subject):
        buckets = set(line.buckets)
        if len(buckets) == 1 and role in line.tokens_per_second and line.tokens_per_second[role] > 0:
            index = buckets.pop()
            if 0 <= index < len(subject.buckets):
                found.setdefault(int(subject.buckets[index]["up_to"]), []).append(line.tokens_per_second[role])
    return found


def _stalls(a: Subject, b: Subject) -> list[Outcome]:
    found = []
    shares = [_stall_shares(side) for side in (a, b)]
    for reason in sorted({*shares[0], *shares[1]}):
        first, second = (side.get(reason, 0.0) for side in shares)
        if max(first, second) >= 0.01:
            words = f"waiting, {reason}: {first:.0%} -> {second:.0%} of the time of a step"
            found.append(Outcome(f"stalled {reason}", words, first, second))
    for name, side, share in (("A", a, shares[0]), ("B", b, shares[1])):
        if share and max(share.values()) >= 0.05:
            worst = max(share, key=lambda reason: share[reason])
            found.append(Outcome(f"starves {name}", f"{name} starves: {worst} waits {share[worst]:.0%} of the time"))
        waiting = [statistics.mean(line.features_waiting) for line in side.metrics if line.features_waiting]
        if waiting:
            words = f"queue in {name}: {statistics.mean(waiting):.1f} features waiting a drafter on average"
            found.append(Outcome(f"queue {name}", words, statistics.mean(waiting)))
    return found


def _stall_shares(subject: Subject) -> dict[str, float]:
    seconds = sum(line.seconds for line in subject.metrics)
    total: dict[str, float] = {}
    for line in subject.metrics:
        for reason, value in line.stalled_seconds.items():
            total[reason] = total.get(reason, 0.0) + value
    return {reason: value / seconds for reason, value in total.items()} if seconds else {}


def _memory(a: Subject, b: Subject) -> list[Outcome]:
    found = []
    peaks = [_peaks(side) for side in (a, b)]
    for name in sorted(set(peaks[0]) & set(peaks[1])):
        first, second = peaks[0][name], peaks[1][name]
        rooms = [_room(side, peak[name]) for side, peak in zip((a, b), peaks, strict=True)]
        words = f"memory of {name}: {_bytes(first)} -> {_bytes(second)} at most; left {rooms[0]} -> {rooms[1]}"
        found.append(Outcome(f"memory {name}", words, float(first), float(second)))
    return found


def _peaks(subject: Subject) -> dict[str, int]:
    found: dict[str, int] = {}
    for line in subject.metrics:
        for name, value in line.memory_bytes.items():
            found[name] = max(found.get(name, 0), value)
    return found


def _room(subject: Subject, peak: int) -> str:
    environment = subject.environments.get("train")
    sizes = [int(gpu.get("memory_bytes") or 0) for gpu in environment.gpus] if environment else []
    least = min(sizes, default=0)
    return _bytes(least - peak) if least else "unknown"


def _tau(a: Subject, b: Subject) -> list[Outcome]:
    found = []
    ours, theirs = (_last_tau(side) for side in (a, b))
    for name in [name for name in theirs if name in ours]:
        one, other = ours[name], theirs[name]
        apart = one["low"] > other["high"] or other["low"] > one["high"]
        sure = "the intervals do not overlap" if apart else "within the intervals"
        words = (
            f"tau of {', '.join(name)}: {one['value']:.2f} (step {one['step']:.0f}) -> {other['value']:.2f} (step "
            f"{other['step']:.0f}); {sure}"
        )
        found.append(Outcome(f"tau {', '.join(name)}", words, one["value"], other["value"]))
    for name in [name for name in {**ours, **theirs} if (name in ours) != (name in theirs)]:
        side = "A" if name in ours else "B"
        value = {**theirs, **ours}[name]["value"]
        found.append(
            Outcome(f"tau {', '.join(name)}", f"tau of {', '.join(name)}: {value:.2f}, measured in {side} only")
        )
    return found


def _last_tau(subject: Subject) -> dict[tuple[str, ...], dict[str, float]]:
    """Pooled tau of the last step by all that it is a quantity of: prompt set, kernel, method with the budget of a tree, block
    size, sampling other than greedy, and drafter other than the run's own."""
    found: dict[tuple[str, ...], dict[str, float]] = {}
    name: tuple[str, ...]
    for row in subject.tau:
        if row.get("convention", "").endswith("unclipped"):
            continue
        method = f"{row['method']}-{row['budget']}" if row["method"] in ("tree", "online_tree") else row["method"]
        try:
            values = {
                "step": float(row["step"]),
                "value": float(row["value"]),
                "low": float(row["ci_low"] or "nan"),
                "high": float(row["ci_high"] or "nan"),
            }
        except ValueError:
            continue
        name = (row["prompt_set"], f"{row['kernel']} kernels", method)
        if row.get("block_size"):
            name = (*name, f"block size {row['block_size']}")
        if row.get("sampling") not in ("greedy", "", None):
            name = (*name, row["sampling"])
        if row.get("drafter") not in ("trained", "", None):
            name = (*name, row["drafter"])
        if name not in found or values["step"] >= found[name]["step"]:
            found[name] = values
    return found


# ---------------------------------------------------------------- why


def _target(a: Subject, b: Subject) -> list[Finding]:
    ours, theirs = (_target_of(side) for side in (a, b))
    details = [
        Difference(f"target.{name}", ours[name], theirs[name])
        for name in sorted(set(ours) & set(theirs))
        if ours[name] != theirs[name]
    ]
    if not details:
        return []
    named = ", ".join(item.name.removeprefix("target.") for item in details)
    return [_finding("target", f"the targets are not the same model: {named}", details)]


def _target_of(subject: Subject) -> dict[str, str]:
    for name in ("train", *subject.config):
        target = subject.config.get(name, {}).get("target")
        if isinstance(target, Mapping):
            return {key: value for key, value in flat(target).items() if value != "None"}
    return {}


def _bound(subject: Subject, stage: str) -> dict[str, dict[str, str]]:
    """What was bound in a stage: one description a result of it, by a name for it."""
    return {name: facts for name, facts in subject.kernels.items() if name.partition("/")[0] == stage and facts}


def _form(facts: Mapping[str, str]) -> str:
    linear = facts.get("linear", "unknown")
    form = facts.get("form", "")
    return f"{linear} ({form})" if form and linear != "none needed" else linear


def _kernels(a: Subject, b: Subject) -> list[Finding]:
    details: list[Difference] = []
    told: list[str] = []
    for stage, words in ROLES.items():
        ours, theirs = _bound(a, stage), _bound(b, stage)
        if not ours or not theirs:
            continue
        forms = [sorted({_form(facts) for facts in side.values()}) for side in (ours, theirs)]
        if forms[0] != forms[1]:
            told.append(f"{words} ran on {', '.join(forms[0])} in A and on {', '.join(forms[1])} in B")
        details += _function_differences(words, ours, theirs)
    for name, side in (("A", a), ("B", b)):
        mixed = _own_mismatch(side)
        if mixed:
            told.append(f"{name} itself trains on {mixed[0]} and is judged on {mixed[1]}")
            details.append(Difference(f"kernels inside {name}", f"training {mixed[0]}", f"evaluation {mixed[1]}"))
    packages = [item for item in _distributions(a, b) if item.name.partition(" ")[0] in FAST_PACKAGES]
    for item in packages:
        package = item.name.partition(" ")[0]
        if ABSENT in (item.a, item.b):
            told.append(f"{package} is {'absent in A' if item.a == ABSENT else 'absent in B'}")
        else:
            told.append(f"{package} {item.a} -> {item.b}")
    details += packages
    if not details:
        return []
    words = (
        "; ".join(dict.fromkeys(told)) or f"other functions are bound: {', '.join(item.name for item in details[:3])}"
    )
    return [_finding("kernels", words, details)]


def _function_differences(
    words: str, ours: Mapping[str, Mapping[str, str]], theirs: Mapping[str, Mapping[str, str]]
) -> list[Difference]:
    found = []
    names = sorted({name for facts in (*ours.values(), *theirs.values()) for name in facts})
    for name in names:
        sides = [", ".join(sorted({facts.get(name, ABSENT) for facts in side.values()})) for side in (ours, theirs)]
        if sides[0] != sides[1]:
            found.append(Difference(f"{words}: {name.removeprefix('functions.')}", sides[0], sides[1]))
    return found


def _own_mismatch(subject: Subject) -> tuple[str, str] | None:
    """The forms that one side trained on and was judged on, when it was judged on none that it trained on."""
    trained = sorted({_form(facts) for facts in _bound(subject, "train").values()})
    judged = sorted({_form(facts) for facts in _bound(subject, "references").values()})
    if not trained or not judged or set(trained) & set(judged):
        return None
    return ", ".join(trained), ", ".join(judged)


def _pairs(a: Subject, b: Subject) -> dict[str, tuple[Environment, Environment]]:
    """Environments of both sides by what was done in them: training, evaluation, completions."""
    found = {}
    for stage, words in ROLES.items():
        sides = [
            next((item for name, item in side.environments.items() if name.partition("/")[0] == stage), None)
            for side in (a, b)
        ]
        if sides[0] is not None and sides[1] is not None:
            found[words] = (sides[0], sides[1])
    return found


def _by_role(values: Mapping[tuple[str, str, str], list[str]], total: int) -> list[Difference]:
    """Differences named once for all roles that share them."""
    return [
        Difference(name if len(roles) == total else f"{name} ({', '.join(roles)})", first, second)
        for (name, first, second), roles in values.items()
    ]


def _distributions(a: Subject, b: Subject) -> list[Difference]:
    pairs = _pairs(a, b)
    found: dict[tuple[str, str, str], list[str]] = {}
    for role, (ours, theirs) in pairs.items():
        for name in sorted({*ours.distributions, *theirs.distributions}):
            first, second = (side.distributions.get(name, ABSENT) for side in (ours, theirs))
            if first != second:
                found.setdefault((name, first, second), []).append(role)
    return _by_role(found, len(pairs))


def _torch_build(a: Subject, b: Subject) -> list[Finding]:
    pairs = _pairs(a, b)
    found: dict[tuple[str, str, str], list[str]] = {}
    for role, (ours, theirs) in pairs.items():
        for name in BUILD:
            first, second = (str(side.torch.get(name) or "none") for side in (ours, theirs))
            if first != second:
                found.setdefault((f"torch {name}", first, second), []).append(role)
    details = _by_role(found, len(pairs))
    details += [item for item in _distributions(a, b) if _of_build(item.name.partition(" ")[0])]
    if not details:
        return []
    head = "; ".join(f"{item.name} {item.a} -> {item.b}" for item in details[:4])
    return [_finding("torch build", head, details)]


def _of_build(package: str) -> bool:
    return package.startswith("nvidia-") or (package in NUMERIC_DISTRIBUTIONS and package not in FAST_PACKAGES)


def _hardware(a: Subject, b: Subject) -> list[Finding]:
    pairs = _pairs(a, b)
    found: dict[tuple[str, str, str], list[str]] = {}
    for role, (ours, theirs) in pairs.items():
        for name, (first, second) in {
            "processor": (ours.cpu, theirs.cpu),
            "cores": (str(ours.cores), str(theirs.cores)),
            "GPUs": (_gpus(ours), _gpus(theirs)),
            "memory": (_bytes(ours.memory_bytes), _bytes(theirs.memory_bytes)),
            "GPU links": (_links(ours), _links(theirs)),
            "torch threads": (str(ours.torch.get("threads")), str(theirs.torch.get("threads"))),
        }.items():
            if first != second:
                found.setdefault((name, first, second), []).append(role)
        for name, first, second in _variables(ours, theirs):
            if name not in HARMLESS_VARIABLES:
                found.setdefault((f"variable {name}", first, second), []).append(role)
    details = _by_role(found, len(pairs))
    return [_finding("hardware", _names(details), details)] if details else []


def _variables(ours: Environment, theirs: Environment) -> list[tuple[str, str, str]]:
    """Environment variables that differ, with both values."""
    names = sorted({*ours.variables, *theirs.variables})
    pairs = [(name, ours.variables.get(name, "unset"), theirs.variables.get(name, "unset")) for name in names]
    return [pair for pair in pairs if pair[1] != pair[2]]


def _gpus(environment: Environment) -> str:
    counted: dict[str, int] = {}
    for gpu in environment.gpus:
        cap = f" capped at {gpu['power_cap_watts']:.0f} W" if gpu.get("power_cap_watts") else ""
        name = f"{gpu.get('name')}{cap}"
        counted[name] = counted.get(name, 0) + 1
    return ", ".join(f"{count} x {name}" for name, count in counted.items()) or "none"


def _links(environment: Environment) -> str:
    kinds = {link for row in (environment.torch.get("topology") or {}).values() for link in row.values()}
    return ", ".join(sorted(kinds)) or "none"


def _placement(a: Subject, b: Subject) -> list[Finding]:
    if not a.placement or not b.placement:
        return []
    ours, theirs = flat(a.placement), flat(b.placement)
    details = [
        Difference(name, ours.get(name, ABSENT), theirs.get(name, ABSENT))
        for name in sorted({*ours, *theirs})
        if ours.get(name) != theirs.get(name)
    ]
    return [_finding("placement", _names(details), details)] if details else []


def _names(details: list[Difference]) -> str:
    shown = "; ".join(f"{item.name} {_cut(item.a)} -> {_cut(item.b)}" for item in details[:4])
    return shown + (f"; and {len(details) - 4} more" if len(details) > 4 else "")


def _cut(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:37]}..."


FIRST_PARAMS = (
    "token_budget",
    "max_batch_size",
    "max_seq_len",
    "batches_per_step",
    "lr",
    "max_anchors",
    "block_size",
    "gamma",
)
"""Params that explain most, told first."""


def _config(a: Subject, b: Subject, rule: str) -> list[Finding]:
    """Differences of resolved params, with origins, of the stages that stand under a rule."""
    found = []
    for name in [name for name in b.config if name in a.config]:
        stage = name.partition("/")[0]
        if SECTION_RULES.get(stage, "config") != rule or stage in ("report", "other"):
            continue
        details = _param_differences(a, b, name)
        if details:
            found.append(_finding(rule, f"{name}: {_names(details)}", details))
    if rule == "config":
        foreign = bool({"foreign", "imported", "safetensors"} & {a.kind, b.kind})
        for side, other, word in ((a, b, "A"), (b, a, "B")):
            only = [
                name for name in side.config if name not in other.config and not foreign and _comparable(a, b, name)
            ]
            if only:
                details = [
                    Difference(name, *(("present", ABSENT) if word == "A" else (ABSENT, "present"))) for name in only
                ]
                found.append(_finding(rule, f"in {word} only: {', '.join(only)}", details))
    return found


def _comparable(a: Subject, b: Subject, name: str) -> bool:
    """Whether a stage that one side lacks says something: a checkpoint has no evaluation by nature."""
    return a.kind == b.kind or name.partition("/")[0] not in ("references", "evaluate", "report")


def _param_differences(a: Subject, b: Subject, name: str) -> list[Difference]:
    """One stage's params that differ. Where a side is foreign, only what it asserts is compared."""
    ours, theirs = (_flat_params(side.config[name]) for side in (a, b))
    names = sorted({*ours, *theirs}, key=lambda item: (_first(item), item))
    if {"foreign", "imported"} & {a.kind, b.kind}:
        names = [item for item in names if item in ours and item in theirs]
    found = []
    for item in names:
        first, second = ours.get(item, ABSENT), theirs.get(item, ABSENT)
        if first != second:
            origins = [side.origins.get(name, {}).get(item.partition(".")[0], "") for side in (a, b)]
            origin = f"{origins[0] or 'not recorded'} -> {origins[1] or 'not recorded'}" if any(origins) else ""
            found.append(Difference(item, first, second, origin))
    return found


def _first(name: str) -> int:
    return FIRST_PARAMS.index(name) if name in FIRST_PARAMS else len(FIRST_PARAMS)


def _flat_params(params: Mapping[str, Any]) -> dict[str, str]:
    return flat({name: value for name, value in params.items() if name != "target"})


def _dataset(a: Subject, b: Subject) -> list[Finding]:
    ours, theirs = a.dataset, b.dataset
    if not ours or not theirs:
        keys = [side.keys.get("dataset", "") for side in (a, b)]
        if not all(keys) or keys[0] == keys[1]:
            return []
        words = "the datasets have other keys; their counts and lengths are not known on both sides"
        return [_finding("dataset", words, [Difference("dataset key", *keys)])]
    if ours["digest"] == theirs["digest"]:
        return []
    details = [
        Difference(name.replace("_", " "), f"{ours[name]:,}", f"{theirs[name]:,}")
        for name in ("samples", "tokens", "trainable_tokens")
        if ours[name] != theirs[name]
    ]
    told = [f"{ours['samples']:,} -> {number_of(theirs['samples'], 'sample')}"]
    if ours["mean"] is not None and theirs["mean"] is not None:
        shift = theirs["mean"] / ours["mean"] - 1 if ours["mean"] else 0.0
        told.append(f"mean length {ours['mean']:,.1f} -> {theirs['mean']:,.1f} tokens ({shift:+.1%})")
        details.append(Difference("mean length", f"{ours['mean']:,.1f}", f"{theirs['mean']:,.1f}"))
    for share in sorted({*ours["quantiles"], *theirs["quantiles"]}, key=float):
        first, second = ours["quantiles"].get(share), theirs["quantiles"].get(share)
        if first != second:
            details.append(Difference(f"length, {float(share):.0%} quantile", str(first), str(second)))
    details += _sources(ours["sources"], theirs["sources"])
    added = sorted(set(theirs["sources"]) - set(ours["sources"]))
    gone = sorted(set(ours["sources"]) - set(theirs["sources"]))
    told += [f"sources added: {', '.join(added)}"] if added else []
    told += [f"sources gone: {', '.join(gone)}"] if gone else []
    details += _bucket_shares(a.buckets, b.buckets)
    return [_finding("dataset", "; ".join(told), details)]


def _sources(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[Difference]:
    def told(side: Mapping[str, Any], name: str) -> str:
        if name not in side:
            return ABSENT
        return "samples not recorded" if side[name] is None else number_of(side[name], "sample")

    names = sorted({*ours, *theirs})
    return [
        Difference(f"source {name}", told(ours, name), told(theirs, name))
        for name in names
        if told(ours, name) != told(theirs, name)
    ]


def _bucket_shares(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> list[Difference]:
    """Upper edge, share of samples and batch size of each bucket, by its place."""
    found = []
    for index in range(max(len(ours), len(theirs))):
        sides = [_bucket(side, index) for side in (ours, theirs)]
        if sides[0] != sides[1]:
            found.append(Difference(f"bucket {index + 1}", *sides))
    return found


def _bucket(buckets: list[dict[str, Any]], index: int) -> str:
    if index >= len(buckets):
        return ABSENT
    total = sum(item["samples"] for item in buckets) or 1
    item = buckets[index]
    return f"up to {item['up_to']} tokens, {item['samples'] / total:.0%} of samples, {item['batch_size']} a batch"


def _code(a: Subject, b: Subject) -> list[Finding]:
    """Modules whose code differs, each named once with the stages that it is part of."""
    stages: dict[tuple[str, str, str], list[str]] = {}
    for name in [name for name in a.code if name in b.code and name != "report"]:
        for module in sorted({*a.code[name], *b.code[name]}):
            first, second = (side.code[name].get(module, ABSENT)[:8] for side in (a, b))
            if first != second:
                found = stages.setdefault((module, first, second), [])
                found.append(name.partition("/")[0])
    details = [
        Difference(f"{module} ({', '.join(dict.fromkeys(names))})", first, second)
        for (module, first, second), names in stages.items()
    ]
    if not details:
        return []
    named = ", ".join(item.name for item in details[:3])
    more = f" and {len(details) - 3} more" if len(details) > 3 else ""
    return [_finding("code", f"other code: {named}{more}", details)]


def _tensors(a: Subject, b: Subject) -> list[Finding]:
    if not a.tensors or not b.tensors:
        return []
    ours, theirs = ({str(item["name"]): item for item in side.tensors} for side in (a, b))
    details, words = [], []
    for name in sorted({*ours, *theirs}):
        first, second = ours.get(name), theirs.get(name)
        if first is None or second is None:
            kept = first or second or {}
            told = f"{kept['dtype']} {kept['shape']}, {_bytes(kept['bytes'])}"
            details.append(Difference(name, told if first else ABSENT, told if second else ABSENT))
        elif (first["shape"], first["dtype"]) != (second["shape"], second["dtype"]):
            sides = [f"{item['dtype']} {item['shape']}, {_bytes(item['bytes'])}" for item in (first, second)]
            details.append(Difference(name, *sides))
    if not details:
        return []
    for side, kept, word in ((ours, theirs, "gone"), (theirs, ours, "new")):
        only = [item for name, item in side.items() if name not in kept]
        if only:
            size = _bytes(sum(item["bytes"] for item in only))
            words.append(f"{size} {'less' if word == 'gone' else 'more'}: {_modules(only)} {_are(only)} {word}")
    resized = [name for name in ours if name in theirs and ours[name]["shape"] != theirs[name]["shape"]]
    retyped = [name for name in ours if name in theirs and ours[name]["dtype"] != theirs[name]["dtype"]]
    words += [f"{len(resized)} resized ({', '.join(resized[:3])})"] if resized else []
    words += [f"{len(retyped)} of another type ({', '.join(retyped[:3])})"] if retyped else []
    total = [sum(item["bytes"] for item in side.values()) for side in (ours, theirs)]
    words.append(f"in all {_bytes(total[0])} -> {_bytes(total[1])}")
    return [_finding("tensors", "; ".join(words), details)]


def _modules(tensors: list[dict[str, Any]]) -> str:
    """The modules that tensors belong to, largest first: `verifier_lm_head` of `verifier_lm_head.weight`."""
    sizes: dict[str, int] = {}
    for item in tensors:
        name = str(item["name"]).removesuffix(".weight").removesuffix(".bias")
        sizes[name] = sizes.get(name, 0) + item["bytes"]
    names = sorted(sizes, key=lambda name: -sizes[name])
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _are(tensors: list[dict[str, Any]]) -> str:
    return "is" if len(tensors) == 1 else "are"


def _packages(a: Subject, b: Subject) -> list[Finding]:
    details = [
        item
        for item in _distributions(a, b)
        if not _of_build(item.name.partition(" ")[0]) and item.name.partition(" ")[0] not in FAST_PACKAGES
    ]
    pairs = _pairs(a, b)
    other: dict[tuple[str, str, str], list[str]] = {}
    for role, (ours, theirs) in pairs.items():
        for name, (first, second) in {
            "python": (ours.python, theirs.python),
            "platform": (ours.platform, theirs.platform),
            "commit": (str(ours.git.get("commit"))[:12], str(theirs.git.get("commit"))[:12]),
        }.items():
            if first != second:
                other.setdefault((name, first, second), []).append(role)
        for name, first, second in _variables(ours, theirs):
            if name in HARMLESS_VARIABLES:
                other.setdefault((f"variable {name}", first, second), []).append(role)
    details = _by_role(other, len(pairs)) + details
    return [_finding("packages", _names(details), details)] if details else []


def _bytes(count: float) -> str:
    sign = "-" if count < 0 else ""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= size:
            return f"{sign}{abs(count) / size:.3g} {unit}"
    return f"{count:.0f} B"


# ---------------------------------------------------------------- for people


def render(found: Comparison) -> str:
    """The diagnosis as text."""
    lines = []
    for name, side in (("A", found.a), ("B", found.b)):
        lines.append(f"{name}  {side.label}  {side.path}")
    lines += ["", "What came out"]
    lines += [line for item in found.outcomes for line in _wrap(item.words, "  ")]
    if not found.outcomes:
        lines.append("  neither throughput nor tau is known on both sides")
    lines += ["", "What differs, most likely explanation first"]
    if not found.findings:
        lines.append("  nothing that both sides record")
    for rank, item in enumerate(found.findings, start=1):
        lines += _wrap(f"{rank}. {item.words}", "  ", "     ")
        lines += _wrap(f"rule: {item.rule}; can explain {item.explains}: {item.why}", "     ")
        for detail in item.details[:MOST_DETAILS]:
            lines += _wrap(detail.words(), "       ", "         ")
        if len(item.details) > MOST_DETAILS:
            lines.append(f"       and {len(item.details) - MOST_DETAILS} more (--json)")
    for name, side in (("A", found.a), ("B", found.b)):
        lines += [line for text in side.unknown for line in _wrap(f"{name}, not known: {text}", "")]
    return "\n".join(lines)


def _wrap(text: str, indent: str, rest: str | None = None) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=rest if rest is not None else indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
