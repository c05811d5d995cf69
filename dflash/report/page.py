"""Turns evidence into what `page.html.j2` shows: sentences, tables and figures, each with its n, unit and convention.

Nothing here reads a file. Costs about 0.3 s for 200 evaluations.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pandas as pd

from dflash.base.records import Environment, MetricsLine, StageEntry
from dflash.base.words import about, duration, number_of
from dflash.report.checks import Check, all_checks, bound, summary
from dflash.report.evidence import Buckets, Dataset, Evidence, Lengths, Parent, Sample, Shift, Side, Trouble
from dflash.report.figures import Series, bar_chart, line_chart, thin
from dflash.report.report_params import ReportParams
from dflash.report.tables import (
    FEW_REQUESTS,
    Cell,
    TauTable,
    cell_text,
    heading,
    online_decodes,
    shown_steps,
    tag_tables,
    tau_tables,
    tidy_by_tag,
)

SECTIONS = (
    ("trust", "Trust"),
    ("tau", "Tau by step"),
    ("evaluation", "Evaluation"),
    ("data", "Data"),
    ("training", "Training"),
    ("shipments", "Shipments"),
    ("samples", "Samples"),
    ("environments", "Environments"),
    ("config", "Configuration"),
    ("keys", "Keys"),
)
SYMBOLS = {"holds": "✓", "look": "!", "fails": "✗", "unknown": "?"}
MOST_POINTS = 120
ORDER_OF_ROAD = ("prompts", "completions", "dataset", "buckets", "train", "references", "evaluate", "report")


@dataclass(frozen=True)
class Table:
    """A table of texts.

    words: headings of columns that hold words (set left, may wrap). short: headings of columns that never wrap. more: the
    unabridged table.
    """

    name: str
    caption: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: frozenset[str] = frozenset()
    short: frozenset[str] = frozenset()
    more: Table | None = None


@dataclass(frozen=True)
class Figure:
    """Inline SVG (safe markup) and its caption (plain text)."""

    svg: str
    caption: str


@dataclass(frozen=True)
class SampleView:
    """A sample to show. tokens: (element, text): `u` accepted draft, `b` bonus, `s` from the prompt's forward pass."""

    title: str
    words: str
    prompt: str
    tokens: tuple[tuple[str, str], ...]
    accepted: str


@dataclass
class Page:
    """Everything the template reads."""

    title: str
    sentence: str
    footer: str
    checks: list[Check]
    summary: str
    convention: str
    troubles: Mapping[str, list[Trouble]]
    tau_figures: list[Figure] = field(default_factory=list)
    tau_tables: list[Table] = field(default_factory=list)
    slot_figures: list[Figure] = field(default_factory=list)
    evaluation_tables: list[Table] = field(default_factory=list)
    dataset_tables: list[Table] = field(default_factory=list)
    bucket_figures: list[Figure] = field(default_factory=list)
    bucket_tables: list[Table] = field(default_factory=list)
    bucket_words: str = ""
    training_words: str = ""
    rates: str = ""
    shipment_words: str = ""
    shipment_table: Table | None = None
    host_table: Table | None = None
    training_figures: list[Figure] = field(default_factory=list)
    checkpoint_table: Table | None = None
    samples: list[SampleView] = field(default_factory=list)
    environment_table: Table | None = None
    package_table: Table | None = None
    distributions: list[tuple[str, Table]] = field(default_factory=list)
    config: list[tuple[str, Table]] = field(default_factory=list)
    keys: Table | None = None
    sections: tuple[tuple[str, str], ...] = SECTIONS
    symbols: Mapping[str, str] = field(default_factory=lambda: SYMBOLS)

    @property
    def alerts(self) -> list[Check]:
        """What must be read before any number: kernels that differ, and whatever else fails."""
        return [check for check in self.checks if check.standing == "fails"]


def build(evidence: Evidence, frame: pd.DataFrame, params: ReportParams, *, created: str) -> Page:
    """The whole page.

    Args:
        frame: the tidy evaluations (`tables.tidy`).
        created: when, ISO 8601.
    """
    tables = tau_tables(frame)
    checks = all_checks(evidence, tables)
    page = Page(
        title=params.title or params.run,
        sentence=_sentence(evidence),
        footer=(
            f"Run {params.run}, state {evidence.manifest.runkey}, planned {_time(evidence.manifest.created)}; "
            f"page made {_time(created)} (UTC)."
        ),
        checks=checks,
        summary=summary(checks),
        convention=_convention(evidence, tables),
        troubles=evidence.troubles,
        samples=_samples(evidence, params.samples),
    )
    _add_tau(page, tables)
    _add_evaluation(page, frame)
    _add_tags(page, tidy_by_tag(evidence.tag_rows, params.run))
    _add_data(page, evidence)
    _add_training(page, evidence)
    _add_shipments(page, evidence)
    _add_environments(page, evidence)
    _add_config(page, evidence)
    return page


def _sentence(evidence: Evidence) -> str:
    """What this run is: target, drafter, dataset size, steps."""
    train = evidence.params("train")
    steps = evidence.manifest.steps
    if not train:
        return "This run trains no drafter: its manifest names no training."
    size = _parameters(evidence)
    dataset = evidence.dataset
    samples = (
        f"{number_of(dataset.train.samples, 'sample')} that the target wrote"
        if dataset
        else "a dataset that cannot be read"
    )
    layers = train.get("num_draft_layers", "?")
    return (
        f"A DFlash drafter of {layers} {'layer' if layers == 1 else 'layers'}{size} with block size "
        f"{train.get('block_size', '?')}, trained for {number_of(max(steps, default=0), 'step')} on {samples}, "
        f"for {_target(train)}; judged at {number_of(len(steps), 'checkpoint')}."
    )


def _target(train: Mapping[str, Any]) -> str:
    target = train.get("target") or {}
    shape = f"{target.get('num_layers', '?')} layers, hidden size {target.get('hidden_size', '?')}"
    kind = "hybrid" if target.get("hybrid") else "dense"
    if target.get("random"):
        return f"a {kind} target of random weights ({shape})"
    name = target.get("revision") or f"sha256 {str(target.get('digest') or 'unknown')[:12]}"
    return f"the {kind} target {name} ({shape})"


def _parameters(evidence: Evidence) -> str:
    last = max(evidence.checkpoints, default=None)
    if last is None:
        return ""
    count = sum(math.prod(tensor.shape) for tensor in evidence.checkpoints[last].tensors)
    return f" ({_amount(count)} parameters)" if count else ""


def _amount(count: float) -> str:
    for unit, size in (("billion", 1e9), ("million", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:,.0f}"


def _time(stamp: str) -> str:
    """`2026-01-02 03:04:05` of an ISO 8601 time."""
    return stamp[:19].replace("T", " ")


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


# ---- tau


def _convention(evidence: Evidence, tables: Sequence[TauTable]) -> str:
    if not tables:
        return "No checkpoint of this run has been evaluated."
    evaluate = evidence.params("evaluate")
    sizes = sorted({size for table in tables for size in table.block_sizes})
    sampling = ", ".join(sorted({text for table in tables for text in table.samplings}))
    least = min(table.requests()[0] for table in tables)
    most = max(table.requests()[1] for table in tables)
    interval = (
        f"{float(evaluate['confidence']):.0%} bootstrap intervals over requests, {evaluate['bootstrap']:,} resamples"
        if {"confidence", "bootstrap"} <= set(evaluate)
        else "bootstrap intervals over requests"
    )
    return (
        f"tau = tokens committed per verification, the bonus token included (+1), so 1 is no gain and a chain's most is the "
        f"block size, {' or '.join(map(str, sizes))}. Pooled over requests, n = "
        f"{least if least == most else f'{least} to {most}'}; {sampling} sampling; {interval}. tree-k: a draft tree of k nodes "
        "beside its root. The last verification of a text is clipped at its end."
    )


def _about(table: TauTable) -> str:
    return f"prompt set {table.prompt_set}, {table.kernel} kernels"


def _add_tau(page: Page, tables: Sequence[TauTable]) -> None:
    for table in tables:
        series = []
        for name in table.columns:
            cells = [(step, cells[name]) for step, cells in table.rows if name in cells]
            points = [(float(step), cell.value) for step, cell in cells]
            series.append(Series(name, points, [(c.low, c.high) if c.has_interval() else None for _, c in cells]))
        svg = line_chart(
            f"tau by step, {_about(table)}", series, x_label="step", y_label="tau, tokens/verification", low=1.0
        )
        least, most = table.requests()
        n = f"{least}" if least == most else f"{least} to {most}"
        about = f"{_about(table)}; block size {_sizes(table)}; n = {n} requests"
        page.tau_figures.append(Figure(svg, f"{about[0].upper()}{about[1:]}."))
        caption = f"tau by training step, with intervals; {about}."
        page.tau_tables.append(_tau_table(table, caption))


def _sizes(table: TauTable) -> str:
    return " or ".join(map(str, table.block_sizes))


def _tau_table(table: TauTable, caption: str) -> Table:
    headings = ("step", *table.columns, "n")
    rows = []
    for step, cells in table.rows:
        counts = sorted({cell.n for cell in cells.values()})
        n = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
        rows.append((f"{step:,}", *(cell_text(cells.get(name)) for name in table.columns), n))
    kept = shown_steps(len(rows))
    name = f"tau by step, {_about(table)}"
    if len(kept) == len(rows):
        return Table(name, caption, headings, tuple(rows))
    whole = Table(f"{name}, all steps", caption, headings, tuple(rows))
    return Table(
        name, f"{caption} {len(kept)} of {len(rows)} steps.", headings, tuple(rows[index] for index in kept), more=whole
    )


def _add_evaluation(page: Page, frame: pd.DataFrame) -> None:
    """Slot accuracies, and tau by length and in its other conventions, all at the last step."""
    if frame.empty:
        return
    last = int(frame["step"].max())
    now = frame[frame["step"] == last]
    _add_slots(page, now, last)
    _add_kernels(page, now, last)
    _add_online(page, frame)
    _add_conventions(page, now, last)
    _add_lengths(page, now, last)


def _add_kernels(page: Page, now: pd.DataFrame, last: int) -> None:
    """tau under two kernels and its difference, one table for each pair and prompt set."""
    gaps = now[now["metric"] == "tau_difference"]
    for (prompt_set, pair), part in gaps.groupby(["prompt_set", "kernel"], sort=False):
        first, second = str(pair).split("-")
        by_kernel = {table.kernel: table.rows[-1][1] for table in tau_tables(now) if table.prompt_set == prompt_set}
        rows = []
        for row in part.to_dict("records"):
            name = heading(str(row["method"]), int(row["budget"]), str(row["drafter"]))
            gap = Cell(float(row["value"]), float(row["ci_low"]), float(row["ci_high"]), int(row["n"]))
            sides = [cell_text(by_kernel.get(kernel, {}).get(name)) for kernel in (first, second)]
            rows.append((name, *sides, f"{gap.value:+.3f} [{gap.low:+.3f}, {gap.high:+.3f}]", f"{gap.n:,}"))
        same = now[(now["metric"] == "same_continuation") & (now["prompt_set"] == prompt_set) & (now["kernel"] == pair)]
        words = "".join(f" Both continue {value:.1%} of the requests alike." for value in same["value"])
        caption = (
            f"The same checkpoint under two kernels, step {last:,}; prompt set {prompt_set}; the difference is over the same "
            f"requests, so its interval is narrower than those of its sides.{words}"
        )
        headings = ("method", first, second, "difference", "n")
        page.evaluation_tables.append(Table(f"kernels {pair}, {prompt_set}", caption, headings, tuple(rows)))


def _add_online(page: Page, frame: pd.DataFrame) -> None:
    """Real decodes, one row for each method, prompt set and kernel form."""
    decodes = online_decodes(frame)
    if not decodes:
        return
    metrics = ("tau_pooled", "speedup", "lossless", "same_lengths_as_offline")
    rows = tuple(
        (
            f"{item.prompt_set}, {item.kernel}",
            item.name,
            item.sampling,
            *(cell_text(item.cells.get(metric)) for metric in metrics),
            _counts(item.cells.values()),
        )
        for item in decodes
    )
    caption = (
        f"Prompts decoded for real at step {decodes[0].step:,}: tokens a verification commits; seconds of the target alone over "
        "seconds with the drafter, in the same run; share of texts that are the target's own; share of prompts whose every "
        "verification commits what was worked out offline. One request at a time, this implementation."
    )
    headings = ("prompt set, kernels", "method", "sampling", "tau", "speedup", "lossless", "as offline", "n")
    page.evaluation_tables.append(Table("real decodes", caption, headings, rows, frozenset({"sampling"})))


def _add_conventions(page: Page, now: pd.DataFrame, last: int) -> None:
    """tau in all its conventions side by side, one table for each prompt set and kernel form."""
    rows: dict[tuple[str, str], list[tuple[str, TauTable]]] = {}
    for metric, unclipped, words in (
        ("tau_pooled", False, "pooled over requests"),
        ("tau_request_mean", False, "mean over requests"),
        ("tau_pooled", True, "pooled, whole blocks only"),
        ("tau_request_mean", True, "mean, whole blocks only"),
    ):
        for table in tau_tables(now, metric=metric, unclipped=unclipped):
            rows.setdefault((table.prompt_set, table.kernel), []).append((words, table))
    for listed in rows.values():
        first = listed[0][1]
        made = tuple(
            (words, *(cell_text(cells.get(name)) for name in first.columns), _counts(cells.values()))
            for words, table in listed
            for _, cells in table.rows
        )
        caption = (
            f"tau at step {last:,} by convention; {_about(first)}; block size {_sizes(first)}; bonus token included; n = requests. "
            "Whole blocks only: without the verifications whose block the end of the text may have cut."
        )
        page.evaluation_tables.append(
            Table(f"tau by convention, {_about(first)}", caption, ("convention", *first.columns, "n"), made)
        )


def _add_slots(page: Page, now: pd.DataFrame, last: int) -> None:
    chosen = now[(now["length_bucket"] == "all") & now["metric"].str.startswith("slot_accuracy_")]
    for (prompt_set, kernel), part in chosen.groupby(["prompt_set", "kernel"], sort=False, dropna=False):
        series = []
        for prefix, name in (
            ("slot_accuracy_given_prefix_", "given that all slots before are right"),
            ("slot_accuracy_", "over all anchors"),
        ):
            own = part[part["metric"].str.fullmatch(f"{prefix}[0-9]+") & (part["drafter"] == part["drafter"].iloc[0])]
            own = own.drop_duplicates("metric")
            points = sorted(
                (float(metric.rsplit("_", 1)[1]), float(value), (float(low), float(high)))
                for metric, value, low, high in zip(
                    own["metric"], own["value"], own["ci_low"], own["ci_high"], strict=True
                )
            )
            intervals = [None if math.isnan(pair[0]) else pair for _, _, pair in points]
            series.append(Series(name, [(slot, value) for slot, value, _ in points], intervals))
        svg = line_chart(
            f"Accuracy by slot at step {last}, {prompt_set}",
            series,
            x_label="slot",
            y_label="accuracy, share",
            low=0.0,
            high=1.0,
        )
        sizes = " or ".join(str(int(size)) for size in sorted(part["block_size"].dropna().unique()))
        caption = (
            f"Share of anchors at which slot k names the token k after the anchor, step {last:,}; prompt set {prompt_set}, "
            f"{kernel} kernels; block size {sizes}; n = {_range(part['n'])} requests."
        )
        page.slot_figures.append(Figure(svg, caption))


def _range(counts: pd.Series) -> str:
    least, most = int(counts.min()), int(counts.max())
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def _add_lengths(page: Page, now: pd.DataFrame, last: int) -> None:
    """tau by length of context, one table for each prompt set and kernel form."""
    chosen = now[(now["metric"] == "tau_pooled") & (now["length_bucket"] != "all")]
    for (prompt_set, kernel), part in chosen.groupby(["prompt_set", "kernel"], sort=False, dropna=False):
        columns: list[str] = []
        rows: dict[str, dict[str, Cell]] = {}
        for bucket, own in part.groupby("length_bucket", sort=False):
            for table in tau_tables(own.assign(length_bucket="all")):
                rows[str(bucket)] = dict(table.rows[-1][1])
                columns += [name for name in table.columns if name not in columns]
        made = tuple(
            (f"{bucket} tokens", *(cell_text(cells.get(name)) for name in columns), _counts(cells.values()))
            for bucket, cells in rows.items()
        )
        caption = (
            f"tau by length of the context before the anchor, step {last:,}; prompt set {prompt_set}, {kernel} kernels; "
            "pooled, bonus token included; n = requests with a verification there."
        )
        page.evaluation_tables.append(
            Table(
                f"tau by context length, prompt set {prompt_set}, {kernel} kernels",
                caption,
                ("context", *columns, "n"),
                made,
            )
        )


def _add_tags(page: Page, frame: pd.DataFrame) -> None:
    """tau by tag, one table for each prompt set and kernel form."""
    if frame.empty:
        return
    step = int(frame["step"].max())
    for table in tag_tables(frame):
        rows = []
        for tag, cells in table.rows:
            few = " (few)" if min(cell.n for cell in cells.values()) < FEW_REQUESTS else ""
            rows.append(
                (tag, *(cell_text(cells.get(name)) for name in table.columns), f"{_counts(cells.values())}{few}")
            )
        more = f" {table.left_out:,} more tags stand in evaluations_by_tag.csv." if table.left_out else ""
        caption = (
            f"tau by tag of the prompts, step {step:,}; prompt set {table.prompt_set}, {table.kernel} kernels; pooled, bonus token "
            "included; a prompt of several tags counts in each, and a tag that all prompts carry is left out; few: under "
            f"{FEW_REQUESTS} requests, for which an interval is too narrow.{more}"
        )
        name = f"tau by tag, prompt set {table.prompt_set}, {table.kernel} kernels"
        page.evaluation_tables.append(
            Table(name, caption, ("tag", *table.columns, "n"), tuple(rows), frozenset({"tag"}))
        )


def _counts(cells: Iterable[Cell]) -> str:
    counts = sorted({cell.n for cell in cells})
    return f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"


# ---- training


def _add_training(page: Page, evidence: Evidence) -> None:
    lines = evidence.metrics
    if lines:
        _add_curves(page, lines)
        page.training_words = _training_words(lines)
        page.rates = _rates(lines)
    rows = []
    for step, item in sorted(evidence.checkpoints.items()):
        size = sum(file.size for file in item.drafter.files)
        attempts = str(len(item.lineage.attempts)) if item.lineage.attempts else "1"
        rows.append((f"{step:,}", _time(item.created), _bytes(size), str(len(item.tensors)), attempts))
    kept = [rows[index] for index in shown_steps(len(rows))]
    page.checkpoint_table = Table(
        "checkpoints",
        f"Checkpoints: {len(rows)} complete{f', {len(kept)} shown' if len(kept) < len(rows) else ''}. Attempts: how many times "
        "training had been started by then.",
        ("step", "written, UTC", "drafter", "tensors", "attempts"),
        tuple(kept),
    )


def _training_words(lines: Sequence[MetricsLine]) -> str:
    seconds = sum(line.seconds for line in lines)
    tokens = sum(line.tokens for line in lines)
    attempts = sorted({line.attempt for line in lines})
    padding = sum(line.padding_share for line in lines) / len(lines)
    last = lines[-1]
    return (
        f"{number_of(len(lines), 'step')} in {duration(seconds)} of step time; {number_of(tokens, 'token')}; "
        f"{padding:.1%} padding on average; {number_of(len(attempts), 'attempt')}; last loss {last.loss:.4g} at step {last.step:,}."
    )


def _rates(lines: Sequence[MetricsLine]) -> str:
    """Throughput by role, and who waits, for the first screen."""
    told = []
    for role in sorted({role for line in lines for role in line.tokens_per_second}):
        values = sorted(line.tokens_per_second[role] for line in lines if role in line.tokens_per_second)
        told.append(f"{role} {values[len(values) // 2]:,.0f} tokens/s")
    seconds = sum(line.seconds for line in lines)
    waiting = {reason for line in lines for reason in line.stalled_seconds}
    shares = {
        reason: sum(line.stalled_seconds.get(reason, 0.0) for line in lines) / seconds for reason in waiting if seconds
    }
    worst = max(shares, key=lambda reason: shares[reason], default=None)
    starving = f" Most waiting: {worst}, {shares[worst]:.0%} of the time." if worst and shares[worst] >= 0.01 else ""
    return (
        f"Throughput by role, median of {number_of(len(lines), 'step')}: {', '.join(told)}.{starving}" if told else ""
    )


def _curve(name: str, points: Sequence[tuple[float, float]]) -> Series:
    return Series(name, thin(points, MOST_POINTS))


def _averaged(count: int) -> str:
    size = math.ceil(count / MOST_POINTS)
    return f"each point is the mean of {size} steps" if size > 1 else "one point a step"


def _add_curves(page: Page, lines: Sequence[MetricsLine]) -> None:
    note = f"n = {number_of(len(lines), 'step')}; {_averaged(len(lines))}"
    slots = max(len(line.accuracy_by_slot) for line in lines)
    shown = sorted({1, 2, math.ceil(slots / 2), slots} & set(range(1, slots + 1)))
    accuracy = []
    for slot in shown:
        known = [
            (float(line.step), value)
            for line in lines
            if len(line.accuracy_by_slot) >= slot and (value := line.accuracy_by_slot[slot - 1]) is not None
        ]
        accuracy.append(_curve(f"slot {slot}", known))
    roles = sorted({role for line in lines for role in line.tokens_per_second})
    speed = [
        _curve(
            role, [(float(line.step), line.tokens_per_second[role]) for line in lines if role in line.tokens_per_second]
        )
        for role in roles
    ]
    loss = _curve("loss", [(float(line.step), line.loss) for line in lines])
    rate = _curve("learning rate", [(float(line.step), line.learning_rate) for line in lines])
    wanted = (
        ("Loss", [loss], "loss, nats", None, None, f"Training loss: weighted cross entropy, nats a token; {note}."),
        (
            "Accuracy by slot in training",
            accuracy,
            "accuracy, share",
            0.0,
            1.0,
            f"Share of supervised positions whose token is right, by slot of the block of {slots + 1}; {note}.",
        ),
        ("Learning rate", [rate], "learning rate", 0.0, None, f"Learning rate; {note}."),
        ("Throughput by role", speed, "tokens/s", 0.0, None, f"Tokens a second by role; {note}."),
    )
    for title, series, label, low, high, caption in wanted:
        svg = line_chart(title, series, x_label="step", y_label=label, low=low, high=high)
        page.training_figures.append(Figure(svg, caption))


# ---- data


def _add_data(page: Page, evidence: Evidence) -> None:
    if evidence.dataset is not None:
        page.dataset_tables = [_source_table(evidence.dataset), _side_table(evidence.dataset)]
    if evidence.buckets is not None:
        _add_buckets(page, evidence.buckets, evidence.params("buckets"), evidence.parent)
        page.bucket_words += epoch_cost(evidence.buckets, evidence)
        if evidence.buckets.shift is not None:
            _add_shift(page, evidence.buckets.shift, feature_bytes(evidence))


def _source_table(dataset: Dataset) -> Table:
    reasons = sorted({reason for source in dataset.sources.values() for reason in source.skipped})
    rows = [
        (
            name,
            *(f"{count:,}" for count in (source.total, source.train, source.validation)),
            *(f"{source.skipped.get(reason, 0):,}" for reason in reasons),
        )
        for name, source in sorted(dataset.sources.items())
    ]
    caption = (
        "Completions by source, in completions: what became training and validation samples, and what was skipped by reason. "
        f"Content sha256 {dataset.digest[:12]}."
    )
    headings = ("source", "completions", "train", "validation", *(f"skipped: {reason}" for reason in reasons))
    return Table("dataset by source", caption, headings, tuple(rows))


def _side_table(dataset: Dataset) -> Table:
    rows = tuple(_side_row(name, side) for name, side in (("train", dataset.train), ("validation", dataset.validation)))
    headings = ("side", "samples", "tokens", "trainable", "cut at the limit", "mean", "5%", "median", "95%", "longest")
    caption = (
        "The two sides of the split; prompts are on one side only. Lengths are of prompt and completion, in tokens; trainable "
        "tokens are those of completions."
    )
    return Table("sides of the split", caption, headings, rows)


def _side_row(name: str, side: Side) -> tuple[str, ...]:
    counts = (f"{side.samples:,}", f"{side.tokens:,}", f"{side.trainable_tokens:,}")
    cut = f"{side.truncated:,} ({share(side.truncated, side.samples)})"
    if not isinstance(side.length, Lengths):
        return name, *counts, cut, *["-"] * 5
    quantiles = tuple(
        f"{side.length.quantiles[at]:,}" if at in side.length.quantiles else "-" for at in ("0.05", "0.5", "0.95")
    )
    return name, *counts, cut, f"{side.length.mean:,.1f}", *quantiles, f"{side.length.max:,}"


def _add_buckets(page: Page, found: Buckets, batching: Mapping[str, Any], parent: Parent | None) -> None:
    page.bucket_figures.append(_length_figure(found, parent))
    names = [f"{bucket.above + 1}-{bucket.up_to}" for bucket in found.buckets]
    groups = [
        ("samples", [100 * bucket.sample_share for bucket in found.buckets]),
        ("tokens", [100 * bucket.token_share for bucket in found.buckets]),
        ("batches", [100 * bucket.batch_share for bucket in found.buckets]),
    ]
    svg = bar_chart("Shares of buckets", names, groups, x_label="bucket, tokens", y_label="share, %")
    caption = f"Share of samples, tokens and batches by bucket, in percent; n = {number_of(found.samples, 'sample')}."
    page.bucket_figures.append(Figure(svg, caption))
    page.bucket_tables.append(_bucket_table(found, batching))
    page.bucket_words = (
        f"{number_of(found.batches_per_epoch, 'batch', 'batches')} an epoch, {_steps(found.steps_per_epoch)}; "
        f"{found.padding_share:.1%} of what batches hold is padding, and they fill {found.budget_share:.1%} of the token budget. "
        f"{number_of(found.cut_samples, 'sample')} {'was' if found.cut_samples == 1 else 'were'} cut "
        f"to the longest allowed length, losing {number_of(found.cut_tokens, 'token')}."
    )


def _steps(count: float) -> str:
    told = about(count)
    return f"{told} {'step' if told.split()[-1] == '1' else 'steps'}"


def _length_figure(found: Buckets, parent: Parent | None) -> Figure:
    """Samples by length; beside the parent dataset, as shares, when there is one."""
    edges = list(found.histogram.edges)
    own = [float(count) for count in found.histogram.counts]
    others = _on_edges(parent.buckets, edges) if parent is not None else []
    used = max((index for index, count in enumerate(own) if count or (others and others[index] > 0)), default=-1) + 1
    lengths = [f"{low + 1}-{high}" for low, high in pairwise(edges)][:used]
    words = f"Training samples by length of prompt and completion, in tokens; n = {number_of(found.samples, 'sample')}"
    if parent is None:
        svg = bar_chart(
            "Samples by length", lengths, [("samples", own[:used])], x_label="length, tokens", y_label="samples"
        )
        return Figure(svg, f"{words}.")
    groups = [
        ("this run", [100 * value / max(sum(own), 1) for value in own[:used]]),
        ("parent", [100 * value / max(parent.buckets.samples, 1) for value in others[:used]]),
    ]
    svg = bar_chart(
        "Samples by length against the parent dataset", lengths, groups, x_label="length, tokens", y_label="share, %"
    )
    shift = f"mean length {parent.buckets.tokens / max(parent.buckets.samples, 1):,.1f} then, "
    shift += f"{found.tokens / max(found.samples, 1):,.1f} now"
    return Figure(svg, f"{words}, against {parent.what}, n = {parent.buckets.samples:,}; {shift}.")


def _on_edges(found: Buckets, edges: Sequence[int]) -> list[float]:
    """Another dataset's histogram on these edges, its bars spread evenly over their lengths; what lies beyond ends in the last."""
    below = [0.0]
    for count in found.histogram.counts:
        below.append(below[-1] + count)
    theirs = found.histogram.edges

    def up_to(length: float) -> float:
        for index, (low, high) in enumerate(pairwise(theirs)):
            if length <= high:
                share = max(0.0, (length - low) / (high - low)) if high > low else 1.0
                return below[index] + share * found.histogram.counts[index]
        return below[-1]

    counts = [up_to(high) - up_to(low) for low, high in pairwise(edges)]
    if counts:
        counts[-1] += below[-1] - up_to(edges[-1])
    return counts


def _bucket_table(found: Buckets, batching: Mapping[str, Any]) -> Table:
    rows = tuple(
        (
            name,
            f"{bucket.samples:,} ({bucket.sample_share:.1%})",
            f"{bucket.tokens:,} ({bucket.token_share:.1%})",
            f"{bucket.batches:,} ({bucket.batch_share:.1%})",
            f"{bucket.batch_size:,}",
            f"{bucket.padding_share:.1%}",
        )
        for bucket in found.buckets
        for name in [f"{bucket.above + 1:,} to {bucket.up_to:,}"]
    )
    budget, most = batching.get("token_budget", "?"), batching.get("max_batch_size", "?")
    caption = (
        f"Buckets by length in tokens, with shares; token budget {budget} tokens a batch, padding counted, at most {most} samples "
        f"a batch; n = {number_of(found.samples, 'sample')}; padding of the first epoch."
    )
    return Table("buckets", caption, ("bucket", "samples", "tokens", "batches", "samples a batch", "padding"), rows)


def feature_bytes(evidence: Evidence) -> int:
    """Bytes of the target's features a token, by taps, width and two bytes a number; 0 where the params do not say."""
    train = evidence.params("train")
    taps, target = train.get("target_layer_ids"), train.get("target")
    if not isinstance(taps, list) or not isinstance(target, dict) or not isinstance(target.get("hidden_size"), int):
        return 0
    return 2 * len(taps) * int(target["hidden_size"])


def epoch_cost(found: Buckets, evidence: Evidence) -> str:
    """What an epoch would take at the rates this run was measured at, and what its features would weigh."""
    words = []
    if found.packed_padding_share is not None:
        words.append(f"Packed end to end, {found.packed_padding_share:.1%} would be padding.")
    if feature_bytes(evidence):
        words.append(
            f"The features of an epoch are {_bytes(found.tokens * feature_bytes(evidence))} in 16-bit numbers "
            f"({feature_bytes(evidence):,} bytes a token)."
        )
    seconds = sum(line.seconds for line in evidence.metrics)
    if seconds > 0:
        rate = sum(line.tokens for line in evidence.metrics) / seconds
        words.append(f"At the measured {rate:,.0f} tokens/s an epoch takes {duration(found.tokens / rate)}.")
    return "".join(f" {sentence}" for sentence in words)


def _add_shift(page: Page, found: Shift, bytes_a_token: int) -> None:
    """The version before and this one, side by side: which bucket grew, and what that does to batches, steps and memory."""
    names = [f"{bucket.above + 1}-{bucket.up_to}" for bucket in found.buckets]
    groups = [
        ("parent version", [100 * bucket.batch_share_before for bucket in found.buckets]),
        ("this version", [100 * bucket.batch_share_now for bucket in found.buckets]),
    ]
    svg = bar_chart("Batches by bucket, before and now", names, groups, x_label="bucket, tokens", y_label="batches, %")
    caption = (
        "Share of batches by bucket, in percent: the parent version "
        f"(n = {number_of(found.before.batches_per_epoch, 'batch', 'batches')}) "
        f"and this one (n = {number_of(found.now.batches_per_epoch, 'batch', 'batches')}), under the same token budget and buckets."
    )
    page.bucket_figures.append(Figure(svg, caption))
    rows = [
        (
            f"{bucket.above + 1:,} to {bucket.up_to:,}",
            f"{bucket.sample_share_before:.1%} -> {bucket.sample_share_now:.1%}",
            f"{bucket.token_share_before:.1%} -> {bucket.token_share_now:.1%}",
            f"{bucket.batch_share_before:.1%} -> {bucket.batch_share_now:.1%}",
            f"{bucket.batch_share_now - bucket.batch_share_before:+.1%}",
            f"{bucket.batch_size_before:,} -> {bucket.batch_size_now:,}",
        )
        for bucket in found.buckets
    ]
    caption = (
        f"What changed since the parent version ({found.parent_digest[:12]}), by bucket of length in tokens: shares before -> "
        "now; the change of the share of batches in percentage points of all batches."
    )
    headings = ("bucket", "samples", "tokens", "batches", "change", "samples a batch")
    page.bucket_tables.append(Table("shift by bucket", caption, headings, tuple(rows)))
    page.bucket_tables.append(_load_table(found, bytes_a_token))
    for sentence in found.warnings:
        page.bucket_words += f" Warning: since the parent version, {sentence}."


def _load_table(found: Shift, bytes_a_token: int) -> Table:
    pairs = [
        ("samples", found.before.samples, found.now.samples, ",.0f"),
        ("mean length, tokens", found.before.mean_length, found.now.mean_length, ",.1f"),
        ("batches an epoch", found.before.batches_per_epoch, found.now.batches_per_epoch, ",.0f"),
        ("steps an epoch", found.before.steps_per_epoch, found.now.steps_per_epoch, ""),
        ("tokens a step", found.before.tokens_per_step, found.now.tokens_per_step, ",.0f"),
        (
            "tokens a step, padding counted",
            found.before.padded_tokens_per_step,
            found.now.padded_tokens_per_step,
            ",.0f",
        ),
        ("largest batch, tokens", found.before.largest_batch_tokens, found.now.largest_batch_tokens, ",.0f"),
        ("padding share", found.before.padding_share, found.now.padding_share, ".1%"),
    ]
    if bytes_a_token:
        scale = bytes_a_token / 1e6
        before, now = scale * found.before.largest_batch_tokens, scale * found.now.largest_batch_tokens
        pairs.append(("features of the largest batch, MB", before, now, ",.1f"))
    rows = tuple(
        (
            name,
            *(format(value, form) if form else about(value) for value in (before, now)),
            f"{now / before - 1:+.1%}" if before else "-",
        )
        for name, before, now, form in pairs
    )
    caption = (
        "What a step and the largest batch carry, before and now: the time of a step follows its tokens, memory the largest "
        "batch."
    )
    return Table("shift of the load", caption, ("", "parent version", "this version", "change"), rows)


def share(part: float, whole: float) -> str:
    """`12.5%`, or `-` of nothing."""
    return f"{part / whole:.1%}" if whole else "-"


# ---- shipments


def _add_shipments(page: Page, evidence: Evidence) -> None:
    listed = evidence.shipments
    if not listed:
        page.shipment_words = "Nothing was shipped: every result was made where it was needed."
        return
    total = sum(item.shipped.bytes for item in listed)
    seconds = sum(item.shipped.seconds for item in listed)
    verified = sum(item.shipped.verified for item in listed)
    page.shipment_words = (
        f"{number_of(len(listed), 'shipment')}, {_bytes(total)} in {duration(seconds)}, {_bytes(total / (seconds or 1))}/s on "
        f"average; {verified:,} of {len(listed):,} verified byte by byte at the destination."
    )
    rows = tuple(
        (
            item.name + (f" step {item.step:,}" if item.step is not None else ""),
            f"{item.shipped.source_host} to {item.host}",
            _bytes(item.shipped.bytes),
            duration(item.shipped.seconds),
            f"{_bytes(item.shipped.bytes_per_second)}/s",
            "yes" if item.shipped.verified else "NO",
            f"{item.shipped.plane}, {item.shipped.route}",
            str(item.shipped.attempts),
        )
        for item in listed
    )
    kept = tuple(rows[index] for index in shown_steps(len(rows)))
    headings = ("result", "hosts", "size", "time", "rate", "verified", "by", "attempts")
    caption = "What was copied between hosts. Verified: every chunk was hashed at the destination before the copy was put in place"
    whole = Table("all shipments", f"{caption}.", headings, rows) if len(kept) < len(rows) else None
    shown = f"; {len(kept)} of {len(rows)}" if whole is not None else ""
    page.shipment_table = Table("shipments", f"{caption}{shown}.", headings, kept, more=whole)


# ---- samples


def _samples(evidence: Evidence, most: int) -> list[SampleView]:
    """The first samples of each prompt set in turn, under the first kernel form."""
    if not evidence.samples:
        return []
    kernel = evidence.samples[0].kernel
    by_set: dict[str, list[Sample]] = {}
    for sample in evidence.samples:
        if sample.kernel == kernel:
            by_set.setdefault(sample.prompt_set, []).append(sample)
    longest = max(map(len, by_set.values()))
    turns = [listed[turn] for turn in range(longest) for listed in by_set.values() if turn < len(listed)]
    return [_sample_view(sample, evidence.samples_step) for sample in turns[:most]]


def visible(text: str) -> str:
    """The text with control characters written out (`\\x1b`): HTML may not hold them, and nobody would see them."""
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else ascii(letter)[1:-1]
        for letter in text.replace("\r", "␍")
    )


def _sample_view(sample: Sample, step: int | None) -> SampleView:
    elements = {"draft": "u", "bonus": "b", "prefill": "s"}
    tokens = tuple(
        (elements[origin], visible(text).replace("\n", "↵\n"))
        for origin, text in zip(sample.origin, sample.output, strict=True)
        if text
    )
    verifications = len(sample.verifications)
    committed = sum(item.committed for item in sample.verifications)
    rate = f"tau {committed / verifications:.2f}" if verifications else "no verification"
    words = (
        f"Drafted by the chain of step {step:,}, {sample.kernel} kernels: n = {number_of(committed, 'token')} in "
        f"{number_of(verifications, 'verification')}, {rate}, bonus token included."
    )
    most = max((len(item.drafted) for item in sample.verifications), default=0)
    accepted = f"of at most {most}: " + (", ".join(str(item.accepted) for item in sample.verifications) or "none")
    return SampleView(f"{sample.prompt_set}, {sample.id[:12]}", words, visible(sample.prompt), tokens, accepted)


# ---- environments, configuration, keys


def _add_environments(page: Page, evidence: Evidence) -> None:
    named: dict[str, Environment] = dict(evidence.environments)
    known = {item.digest() for item in named.values()}
    for host, item in evidence.manifest.environments.items():
        if item.digest() not in known:
            named[host] = item
            known.add(item.digest())
    if not named:
        return
    page.host_table = _host_table(evidence)
    used: dict[str, set[str]] = {}
    for (name, _), receipt in evidence.receipts.items():
        used.setdefault(receipt.environment, set()).add(f"{name.split('/')[0]} ({receipt.host})")
    facts = {name: environment_facts(item, sorted(used.get(name, ()))) for name, item in named.items()}
    labels = list(dict.fromkeys(label for item in facts.values() for label in item))
    page.environment_table = Table(
        "environments",
        "Where results were made: one column an environment, named by the first 12 digits of its digest.",
        ("fact", *facts),
        tuple((label, *(item.get(label, "-") for item in facts.values())) for label in labels),
    )
    packages = sorted({package for item in named.values() for package in item.distributions})
    unequal = [
        (package, *(item.distributions.get(package, "absent") for item in named.values()))
        for package in packages
        if len({item.distributions.get(package) for item in named.values()}) > 1
    ]
    if unequal:
        caption = "Distributions whose versions differ between environments."
        page.package_table = Table("packages that differ", caption, ("distribution", *named), tuple(unequal))
    _add_distributions(page, named)


def _host_table(evidence: Evidence) -> Table:
    """Which host made what, in which environments."""
    hosts: dict[str, dict[str, set[str]]] = {}
    for (name, _), receipt in evidence.receipts.items():
        stages = hosts.setdefault(receipt.host, {})
        stages.setdefault(receipt.environment, set()).add(name.split("/")[0])
    rows = tuple(
        (host, environment, ", ".join(sorted(stages, key=lambda stage: _place(stage))))
        for host, found in sorted(hosts.items())
        for environment, stages in sorted(found.items())
    )
    caption = "Environments by host: which host made the results of which stages, in which environment."
    return Table(
        "environments by host", caption, ("host", "environment", "stages"), rows, short=frozenset({"environment"})
    )


def _add_distributions(page: Page, named: Mapping[str, Environment]) -> None:
    """Everything installed, once for all environments that have the same."""
    sharing: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, item in named.items():
        sharing.setdefault(tuple(item.distributions.items()), []).append(name)
    for rows, names in sharing.items():
        where = ", ".join(names)
        table = Table(
            f"distributions of {where}",
            "Everything installed.",
            ("distribution", "version"),
            rows,
            short=frozenset({"version"}),
        )
        page.distributions.append((f"{number_of(len(rows), 'distribution')} of {where}", table))


def environment_facts(item: Environment, used_by: Sequence[str]) -> dict[str, str]:
    """An environment as labelled lines."""
    gpus = "; ".join(f"{gpu.get('name')} ({_bytes(float(gpu.get('memory_bytes') or 0))})" for gpu in item.gpus)
    facts = {
        "used by": ", ".join(used_by) or "-",
        "python": item.python,
        "platform": item.platform,
        "processor": f"{item.cpu}, {item.cores} cores, {_bytes(item.memory_bytes)}",
        "GPUs": gpus or "none",
        "commit": f"{str(item.git.get('commit') or '-')[:12]}{' with uncommitted changes' if item.git.get('dirty') else ''}",
    }
    facts.update({f"torch: {name}": _plain(value) for name, value in sorted(item.torch.items())})
    facts.update({f"kernels: {name.removeprefix('functions.')}": value for name, value in bound(item.kernels).items()})
    facts.update({f"variable {name}": value for name, value in sorted(item.variables.items())})
    return facts


def _plain(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested params under dotted names, as `origins` names them; lists stay whole."""
    out: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            out.update(_flatten(value, f"{prefix}{name}."))
        else:
            out[f"{prefix}{name}"] = _plain(value)
    return out


def _origin(origins: Mapping[str, str], name: str) -> str:
    """Where a value came from: its own entry, or that of the nearest part of the config around it."""
    while name:
        if name in origins:
            return origins[name]
        name = name.rpartition(".")[0]
    return "not recorded"


def _add_config(page: Page, evidence: Evidence) -> None:
    manifest = evidence.manifest
    for name in sorted(manifest.config, key=_place):
        origins = manifest.params_files.get(name, {}).get("origins")
        origins = {str(key): str(value) for key, value in origins.items()} if isinstance(origins, Mapping) else {}
        rows = tuple((key, text, _origin(origins, key)) for key, text in _flatten(manifest.config[name]).items())
        chosen = sum(row[2] not in ("default", "derived", "not recorded") for row in rows)
        table = Table(
            f"configuration of {name}",
            f"Resolved parameters of {name}; origin: default, derived by the plan, the file and line, or an override.",
            ("parameter", "value", "origin"),
            rows,
        )
        page.config.append((f"{name}: {number_of(len(rows), 'value')}, {chosen} set for this run", table))
    page.keys = Table(
        "keys",
        f"Keys of the run's results; state {manifest.runkey}. A key is a digest of parameters, upstream keys and code.",
        ("result", "key", "code", "made from", "receipts"),
        tuple(_key_row(evidence, entry) for entry in sorted(manifest.stages, key=lambda entry: _place(entry.name))),
        short=frozenset({"key", "code", "receipts"}),
    )


def _place(name: str) -> tuple[int, str]:
    """Where a result stands on the road, for sorting."""
    stage = name.split("/")[0]
    return (ORDER_OF_ROAD.index(stage) if stage in ORDER_OF_ROAD else len(ORDER_OF_ROAD), name)


def _key_row(evidence: Evidence, entry: StageEntry) -> tuple[str, ...]:
    recorded = evidence.manifest.params_files.get(entry.name, {})
    code = recorded.get("code")
    digest = str(code.get("digest", "-"))[:12] if isinstance(code, Mapping) else "-"
    upstream = recorded.get("upstream")
    made_from = ", ".join(f"{name} {key}" for name, key in upstream.items()) if isinstance(upstream, Mapping) else "-"
    found = sum(name == entry.name for name, _ in evidence.receipts)
    return entry.name, entry.key, digest, made_from or "-", str(found) if entry.stage != "report" else "this page"
