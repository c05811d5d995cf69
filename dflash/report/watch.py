"""`dflash watch RUN`: how far a run is, from the files it leaves: live in a terminal, plain lines in a pipe, and after the fact.

Nothing is asked of the processes at work: receipts say what is done, the trainer's `status.json` and `metrics.jsonl` how fast it
goes, its lease whether it lives. A look costs a stat a receipt and the last 64 kB of the metrics: 3 ms for 200 checkpoints.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from dflash.base.errors import CorruptError
from dflash.base.files import read_json
from dflash.base.records import MetricsLine, RunManifest, StopMarker
from dflash.base.store import STEPWISE_RECEIPTS, receipt_path, stage_directory
from dflash.base.words import number_of
from dflash.hosts.lease import holder
from dflash.stages import BY_NAME
from dflash.train import schedule

TAIL = 64 << 10
"""Bytes of the metrics that a look reads."""
RECENT = 20
"""Steps over which rates are averaged."""
MOST_STEPS = 12
"""Checkpoints shown; the rest are counted."""
PERIOD = 2.0


@dataclass(frozen=True)
class Watched:
    """What to look at. results: (name, stage, key) in the order of the road; steps: the scheduled checkpoints."""

    run: str
    store: Path
    results: Sequence[tuple[str, str, str]]
    steps: Sequence[int]
    report: Path

    def directory(self, stage: str) -> Path | None:
        """The folder of the run's result of a stage."""
        return next((stage_directory(self.store, kind, key) for _, kind, key in self.results if kind == stage), None)


@dataclass
class View:
    """One look. stages: (name, key, done, total). checkpoints: (step, trained, shipped, evaluated, tau)."""

    run: str
    stages: list[tuple[str, str, int, int]] = field(default_factory=list)
    checkpoints: list[tuple[int, bool, str, bool, str]] = field(default_factory=list)
    training: list[str] = field(default_factory=list)
    alive: bool = False
    at_work: bool = False
    done: bool = False

    def heading(self) -> str:
        """The state in a word or two."""
        if self.done:
            return "done"
        return "training" if self.alive else "at work" if self.at_work else "not at work"

    def goes_on(self) -> bool:
        """Whether a later look may show more."""
        return not self.done and (self.alive or self.at_work)


def of_manifest(path: Path) -> Watched:
    """What a run's manifest names: for a run whose config or code has changed since, or is not at hand.

    Raises:
        CorruptError: the manifest cannot be read.
    """
    manifest = RunManifest.read(path)
    order = {name: place for place, name in enumerate(BY_NAME)}
    stages = sorted(manifest.stages, key=lambda entry: (order.get(entry.stage, len(order)), entry.name))
    results = [(entry.name, entry.stage, entry.key) for entry in stages]
    return Watched(manifest.run, path.parents[3] / "store", results, manifest.steps, path.parent)


def look(watched: Watched) -> View:
    """Reads the state of a run. Never raises for files that are missing or damaged: it says so in the view."""
    view = View(watched.run)
    for name, stage, key in watched.results:
        folder = stage_directory(watched.store, stage, key)
        steps: Sequence[int | None] = list(watched.steps) if stage in STEPWISE_RECEIPTS else [None]
        done = sum(receipt_path(folder, stage, step).exists() for step in steps)
        view.stages.append((name, key, done, len(steps)))
    train, evaluate = watched.directory("train"), watched.directory("evaluate")
    if train is not None:
        _add_training(view, train, watched)
        shipped = _shipped(watched.store, train.name)
        for step in watched.steps:
            trained = receipt_path(train, "train", step).exists()
            judged = evaluate is not None and receipt_path(evaluate, "evaluate", step).exists()
            view.checkpoints.append((step, trained, shipped.get(step, ""), judged, ""))
        first, last = _window(view)
        for place, (step, trained, hosts, judged, _) in enumerate(view.checkpoints[first:last], start=first):
            if judged and evaluate is not None:
                tau = _tau(evaluate / f"step_{step}" / "rows.json")
                view.checkpoints[place] = (step, trained, hosts, judged, tau)
    view.at_work = run_at_work(watched.store.parent)
    view.done = all(done == total for _, _, done, total in view.stages) and (watched.report / "receipt.json").exists()
    return view


def run_at_work(results: Path) -> bool:
    """Whether a `dflash run` holds the lock of a results folder. Read from the kernel's list: taking the lock, even for a moment,
    could turn a run away that starts just then."""
    try:
        inode = str((results / ".run.lock").stat().st_ino)
        locks = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return False
    return any(
        "FLOCK" in line and line.split()[5].rpartition(":")[2] == inode for line in locks if len(line.split()) > 5
    )


def _shipped(store: Path, key: str) -> dict[int, str]:
    """Hosts that each step was shipped to, from the receipts of shipments."""
    found: dict[int, list[str]] = {}
    for path in sorted(store.glob(f"ship/{key}/*/step_*.json")):
        number = path.stem.removeprefix("step_")
        if number.isdigit():
            found.setdefault(int(number), []).append(path.parent.name)
    return {step: ", ".join(hosts) for step, hosts in found.items()}


def _tau(path: Path) -> str:
    """Pooled tau of the chain, the first that the rows of an evaluation give."""
    try:
        rows = read_json(path)
    except CorruptError:
        return "?"
    for row in rows if isinstance(rows, list) else []:
        if not isinstance(row, dict):
            return "?"
        if row.get("method") == "chain" and row.get("metric") == "tau_pooled" and row.get("length_bucket") == "all":
            value = row.get("value")
            return f"{value:.2f}" if isinstance(value, int | float) else "?"
    return ""


def _add_training(view: View, folder: Path, watched: Watched) -> None:
    record = holder(schedule.lease_path(folder))
    status = schedule.read_status(folder)
    lines = _recent(folder / "metrics.jsonl")
    view.alive = record is not None
    last = max(watched.steps, default=0)
    at = max([line.step for line in lines] + ([status.step] if status is not None else []), default=0)
    who = (
        f"pid {record.pid}, run {record.run}, since {record.start[:19].replace('T', ' ')}"
        if record
        else "nobody trains"
    )
    view.training.append(f"step {at:,} of {last:,}; {who}")
    if lines:
        roles = sorted({role for line in lines for role in line.tokens_per_second})
        rates = ", ".join(f"{role} {_mean(lines, role):,.0f}" for role in roles)
        waiting = [value for line in lines for value in line.features_waiting]
        queue = f"; features waiting a drafter: {statistics.mean(waiting):.1f}" if waiting else ""
        view.training.append(f"tok/s over the last {number_of(len(lines), 'step')}: {rates}{queue}")
        seconds = statistics.median(line.seconds for line in lines)
        stalled = _stalled(lines)
        view.training.append(f"loss {lines[-1].loss:.4g}, {seconds:.3g} s a step{stalled}")
        if view.alive and at < last:
            view.training.append(f"training ends in about {_duration((last - at) * seconds)}")
    if status is not None and status.alert:
        view.training.append(f"ALERT {status.alert}")
    marker = folder / "stop.json"
    if marker.exists():
        try:
            stop = StopMarker.read(marker)
            view.training.append(
                f"stopped by {stop.by} at {stop.at[:19].replace('T', ' ')}; `dflash run --resume` goes on"
            )
        except CorruptError as error:
            view.training.append(f"stop.json: {error.what}")
    for path in sorted(folder.glob("failure*.json")):
        view.training.append(f"FAILED, see {path}")


def _mean(lines: Sequence[MetricsLine], role: str) -> float:
    found = [line.tokens_per_second[role] for line in lines if role in line.tokens_per_second]
    return statistics.mean(found) if found else 0.0


def _stalled(lines: Sequence[MetricsLine]) -> str:
    seconds = sum(line.seconds for line in lines)
    reasons = sorted({reason for line in lines for reason in line.stalled_seconds})
    told = []
    for reason in reasons:
        share = sum(line.stalled_seconds.get(reason, 0.0) for line in lines) / seconds if seconds else 0.0
        if share >= 0.01:
            told.append(f"{reason} {share:.0%}")
    return f"; waiting: {', '.join(told)}" if told else ""


def _recent(path: Path) -> list[MetricsLine]:
    """The last lines of the metrics that can be read."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - TAIL))
            texts = stream.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    found: list[MetricsLine] = []
    for text in reversed(texts):
        try:
            found.append(MetricsLine.model_validate(json.loads(text)))
        except ValueError:
            continue  # torn by a kill, or cut by where the tail begins
        if len(found) == RECENT:
            break
    return found[::-1]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def plain(view: View) -> list[str]:
    """The view as lines."""
    lines = [f"run {view.run}: {view.heading()}"]
    lines += [f"  {name:<28} {key}  {done} of {total}" for name, key, done, total in view.stages]
    lines += [f"  training: {text}" for text in view.training]
    lines += [f"  {text}" for text in _checkpoint_lines(view)]
    return lines


def _window(view: View) -> tuple[int, int]:
    """The checkpoints around which something happens: the last that are done, and the next."""
    reached = sum(1 for _, trained, _, _, _ in view.checkpoints if trained)
    start = max(0, min(reached - MOST_STEPS + 2, len(view.checkpoints) - MOST_STEPS))
    return start, start + MOST_STEPS


def _shown(view: View) -> list[tuple[int, bool, str, bool, str]]:
    first, last = _window(view)
    return view.checkpoints[first:last]


def _checkpoint_lines(view: View) -> list[str]:
    lines = []
    for step, trained, shipped, judged, tau in _shown(view):
        parts = [word for word, holds in (("trained", trained), (f"shipped to {shipped}", bool(shipped))) if holds]
        parts += ["evaluated"] if judged else []
        lines.append(f"step {step:>7,}: {' -> '.join(parts) or 'to come'}{f', tau {tau}' if tau else ''}")
    hidden = len(view.checkpoints) - len(lines)
    return [*lines, f"and {number_of(hidden, 'more checkpoint')}"] if hidden > 0 else lines


def table(view: View) -> Any:
    """The view for a terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    stages = Table(box=None, pad_edge=False, show_header=True, header_style="bold")
    stages.add_column("result", no_wrap=True)
    stages.add_column("key", no_wrap=True)
    stages.add_column("done", justify="right", no_wrap=True)
    for name, key, done, total in view.stages:
        style = "green" if done == total else "yellow" if done else "dim"
        stages.add_row(name, key, Text(f"{done} of {total}", style=style))
    steps = Table(box=None, pad_edge=False, show_header=True, header_style="bold")
    for heading in ("step", "trained", "shipped to", "evaluated", "tau"):
        steps.add_column(heading, justify="right", no_wrap=True)
    for step, trained, shipped, judged, tau in _shown(view):
        steps.add_row(f"{step:,}", "yes" if trained else "-", shipped or "-", "yes" if judged else "-", tau or "-")
    hidden = len(view.checkpoints) - min(MOST_STEPS, len(view.checkpoints))
    more = [Text(f"and {number_of(hidden, 'more checkpoint')}", style="dim")] if hidden > 0 else []
    style = "bold green" if view.done else "bold" if view.alive else "bold yellow"
    return Group(
        Text(f"run {view.run}: {view.heading()}", style=style),
        Text(),
        stages,
        Text(),
        *(Text(text, style="red" if text.startswith(("ALERT", "FAILED")) else "") for text in view.training),
        Text(),
        steps,
        *more,
    )


def watch(watched: Watched, stream: TextIO = sys.stdout, *, follow: bool = True, period: float = PERIOD) -> None:
    """Shows a run until it is done or nobody trains it; one look when it is not at work. Ctrl-C ends it.

    Args:
        follow: keep looking while somebody trains.
    """
    if stream.isatty():
        _live(watched, stream, follow, period)
        return
    shown: list[str] = []
    while True:
        view = look(watched)
        for line in [line for line in plain(view) if line not in shown] if shown else plain(view):
            print(line, file=stream, flush=True)
        shown = plain(view)
        if not view.goes_on() or not follow:
            return
        time.sleep(period)


def _live(watched: Watched, stream: TextIO, follow: bool, period: float) -> None:
    from rich.console import Console
    from rich.live import Live

    view = look(watched)
    with Live(table(view), console=Console(file=stream), auto_refresh=False) as live:
        while follow and view.goes_on():
            time.sleep(period)
            view = look(watched)
            live.update(table(view), refresh=True)
