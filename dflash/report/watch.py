"""`dflash watch RUN`: how far a run is, from the files it leaves: live in a terminal, plain lines in a pipe, and after the fact.

Nothing is asked of the processes at work: receipts say what is done, the trainer's `status.json` and `metrics.jsonl` how fast it
goes, its lease whether it lives. Of a training on another host these files are read there (`feed.py`); the view never waits for
that host and says how old what it shows is. A terminal is never shown more than it has rows and columns for: what is finished
gives way to what runs and to the newest checkpoints. A look costs a stat a receipt and the last 64 kB of the metrics: 3 ms for
200 checkpoints.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from dflash.base.errors import CorruptError
from dflash.base.files import read_json
from dflash.base.records import Failure, MetricsLine, RunManifest
from dflash.base.store import STEPWISE_RECEIPTS, receipt_path, stage_directory
from dflash.base.words import number_of
from dflash.report.feed import Feed, Heard, age_in_words, age_of
from dflash.report.glance import METRICS, read_training
from dflash.stages import BY_NAME

if TYPE_CHECKING:
    from rich.console import Console

HERE = "here"
MOST_STEPS = 12
"""Checkpoints shown; the rest are counted."""
FEW_STEPS = 3
"""Checkpoints for which finished results lose their names when rows are short."""
STEP_COLUMNS = ("step", "trained", "shipped to", "evaluated", "tau")
LEAST_NEEDED = ("shipped to", "trained", "evaluated")
"""Columns that a narrow terminal goes without, the first one first: tau says that a checkpoint was trained and evaluated."""
GAP = 2
"""Characters between two columns."""
PERIOD = 2.0
FRESH = 10.0
"""Seconds since the last word of another host after which it counts as silent."""
PATIENCE = 20.0
"""Seconds that a pipe or a single look waits for the first word of another host."""


@dataclass(frozen=True)
class Watched:
    """What to look at. results: (name, stage, key) in the order of the road; steps: the scheduled checkpoints. feed: what
    listens to the host that trains, when that is another one."""

    run: str
    store: Path
    results: Sequence[tuple[str, str, str]]
    steps: Sequence[int]
    report: Path
    feed: Feed | None = None

    def directory(self, stage: str) -> Path | None:
        """The folder of the run's result of a stage."""
        return next((stage_directory(self.store, kind, key) for _, kind, key in self.results if kind == stage), None)


@dataclass
class Checkpoint:
    """A scheduled checkpoint. trained, shipped, evaluated: where (hosts; `here` for this one), or nothing. tau: of the chain."""

    step: int
    trained: str = ""
    shipped: str = ""
    evaluated: str = ""
    tau: str = ""


@dataclass
class View:
    """One look. stages: (name, key, done, total). shares: what other hosts have done. silent: why nothing fresh is known of the
    training. waiting: more may be heard of it although nothing shows that it lives."""

    run: str
    stages: list[tuple[str, str, int, int]] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    training: list[str] = field(default_factory=list)
    shares: list[str] = field(default_factory=list)
    silent: str = ""
    waiting: bool = False
    alive: bool = False
    at_work: bool = False
    done: bool = False

    def heading(self) -> str:
        """The state in a word or two."""
        if self.done:
            return "done"
        if self.alive:
            return "training"
        if self.silent and self.waiting:
            return "training when last heard"
        return "at work" if self.at_work else "not at work"

    def goes_on(self) -> bool:
        """Whether a later look may show more."""
        return not self.done and (self.alive or self.at_work or self.waiting)


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
        saved = _add_training(view, train, watched)
        shipped = _shipped(watched.store, train.name)
        for step in watched.steps:
            trained = _host_of(receipt_path(train, "train", step)) or (saved.get(step, ""))
            judged = _host_of(receipt_path(evaluate, "evaluate", step)) if evaluate is not None else ""
            view.checkpoints.append(Checkpoint(step, trained, shipped.get(step, ""), judged))
        first, last = _window(view)
        for item in view.checkpoints[first:last]:
            if item.evaluated and evaluate is not None:
                item.tau = _tau(evaluate / f"step_{item.step}" / "rows.json")
        view.shares = _shares(view.checkpoints) + _failed_shipments(watched.store, train.name)
    view.at_work = run_at_work(watched.store.parent)
    view.done = all(done == total for _, _, done, total in view.stages) and (watched.report / "receipt.json").exists()
    return view


def _host_of(receipt: Path) -> str:
    """The host that a receipt names, `here` for this one; nothing when there is no receipt."""
    try:
        return _host_in(receipt, receipt.stat().st_mtime_ns)
    except OSError:
        return ""


@functools.lru_cache(maxsize=1 << 16)
def _host_in(receipt: Path, _changed: int) -> str:
    """Read once for each state of the file."""
    try:
        document = read_json(receipt)
    except CorruptError:
        return HERE
    host = document.get("host") if isinstance(document, dict) else None
    return str(host) if host not in (None, "local") else HERE


def _shares(checkpoints: Sequence[Checkpoint]) -> list[str]:
    """What other hosts have done of the road, one line a verb."""
    found = []
    for verb in ("trained", "shipped", "evaluated"):
        counts: dict[str, int] = {}
        for item in checkpoints:
            for host in getattr(item, verb).split(", "):
                if host:
                    counts[host] = counts.get(host, 0) + 1
        if set(counts) - {HERE}:
            hosts = ", ".join(f"{host} {count}" for host, count in sorted(counts.items()))
            found.append(f"{verb} {'to' if verb == 'shipped' else 'on'}: {hosts} of {len(checkpoints)}")
    return found


def _failed_shipments(store: Path, key: str) -> list[str]:
    found = []
    for path in sorted(store.glob(f"ship/{key}/*/.*.failure.json")):
        with contextlib.suppress(CorruptError):
            found.append(f"FAILED to ship to {path.parent.name}: {Failure.read(path).message}")
    return found


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


def _add_training(view: View, folder: Path, watched: Watched) -> dict[int, str]:
    """Adds how training stands; returns where checkpoints are whose receipts have not come yet, by step."""
    heard = watched.feed.heard() if watched.feed is not None else None
    training = heard.training if heard is not None else None
    if training is None:
        training = read_training(folder)
    if heard is not None:
        _add_silence(view, heard, age_of(folder / METRICS))
    view.alive = training.holder is not None and not view.silent
    lines = training.lines
    last = max(watched.steps, default=0)
    at = max([line.step for line in lines] + [training.step])
    record = training.holder
    who = f"pid {record.pid}, run {record.run}, since {_moment(record.start)}" if record else "nobody trains"
    view.training.append(f"step {at:,} of {last:,}{f' on {heard.host}' if heard else ''}; {who}")
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
    view.training += [f"ALERT {training.alert}"] if training.alert else []
    view.training += [training.stop] if training.stop else []
    told = f"{heard.host}:" if heard is not None and heard.training is not None else ""
    view.training += [f"FAILED, see {told}{path}" for path in training.failures]
    return dict.fromkeys(training.steps, heard.host) if heard is not None and heard.training is not None else {}


def _add_silence(view: View, heard: Heard, kept: float | None) -> None:
    """Says why what is shown of a training elsewhere is old, and how old. kept: the age of what had come here before."""
    if heard.training is not None and heard.age < FRESH:
        return
    why = f" ({heard.trouble})" if heard.trouble else ""
    before = f"; shown is what had come here {age_in_words(kept)} ago" if kept is not None else ""
    if heard.training is not None:
        view.silent = f"{heard.host} has not been heard for {age_in_words(heard.age)}{why}; shown is what it said then"
        view.waiting = heard.training.holder is not None
    elif heard.trouble:
        view.silent = f"{heard.host} cannot be reached{why}{before}"
    else:
        view.silent = f"asking {heard.host}{before}"
        view.waiting = heard.age < PATIENCE
    view.training.append(view.silent)


def _moment(time: str) -> str:
    return time[:19].replace("T", " ")


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


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def plain(view: View) -> list[str]:
    """The view as lines."""
    lines = [f"run {view.run}: {view.heading()}"]
    lines += [f"  {name:<28} {key}  {done} of {total}" for name, key, done, total in view.stages]
    lines += [f"  training: {text}" for text in view.training]
    lines += [f"  {text}" for text in view.shares]
    lines += [f"  {text}" for text in _checkpoint_lines(view)]
    return lines


def _window(view: View, most: int = MOST_STEPS) -> tuple[int, int]:
    """The checkpoints around which something happens: the last that are done, and the next."""
    reached = sum(1 for item in view.checkpoints if item.trained)
    start = max(0, min(reached - most + min(2, most // 4), len(view.checkpoints) - most))
    return start, min(start + most, len(view.checkpoints))


def _on(where: str) -> str:
    return "" if where == HERE else f" on {where}"


def _cell(where: str) -> str:
    return {"": "-", HERE: "yes"}.get(where, where)


def _checkpoint_lines(view: View) -> list[str]:
    lines = []
    first, last = _window(view)
    for item in view.checkpoints[first:last]:
        parts = [f"{verb}{_on(where)}" for verb, where in (("trained", item.trained),) if where]
        parts += [f"shipped to {item.shipped}"] if item.shipped else []
        parts += [f"evaluated{_on(item.evaluated)}"] if item.evaluated else []
        lines.append(
            f"step {item.step:>7,}: {' -> '.join(parts) or 'to come'}{f', tau {item.tau}' if item.tau else ''}"
        )
    hidden = len(view.checkpoints) - len(lines)
    return [*lines, f"and {number_of(hidden, 'more checkpoint')}"] if hidden > 0 else lines


def table(view: View, console: Console | None = None) -> Any:
    """The view for a terminal.

    Args:
        console: what it must fit on; when left out, or when it is high and wide enough, all is shown.
    """
    whole = _layout(view, console)
    if console is None or _rows(whole, console) < console.height:
        return whole
    for named in (True, False):
        most = console.height - _rows(_layout(view, console, most=1, named=named), console)
        if most >= FEW_STEPS:
            break
    return _layout(view, console, most=min(max(most, 1), MOST_STEPS), named=named)


def _rows(layout: Any, console: Console) -> int:
    return len(console.render_lines(layout, pad=False))


def _layout(view: View, console: Console | None, *, most: int = 0, named: bool = True) -> Any:
    """The view with `most` checkpoints and the finished results in one line, by name or only counted; everything when `most`
    is left out."""
    from rich.console import Group
    from rich.text import Text

    blank = [] if most else [Text()]
    style = "bold green" if view.done else "bold" if view.alive else "bold yellow"
    return Group(
        Text(f"run {view.run}: {view.heading()}", style=style),
        *blank,
        *(_unfinished(view, console, named=named) if most else [_results(view.stages, console)]),
        *blank,
        *(Text(text, style=_style(text, view)) for text in [*view.training, *view.shares]),
        *blank,
        *_newest(view, console, most or MOST_STEPS),
    )


def _results(rows: Sequence[tuple[str, str, int, int]], console: Console | None) -> Any:
    """How much there is of each result."""
    columns = {
        "result": [name for name, _, _, _ in rows],
        "key": [key for _, key, _, _ in rows],
        "done": [f"{done} of {total}" for _, _, done, total in rows],
    }
    styles = ["green" if done == total else "yellow" if done else "dim" for _, _, done, total in rows]
    return _columns(columns, ("key",), console, "left", styles)


def _unfinished(view: View, console: Console | None, *, named: bool) -> list[Any]:
    """The results that do not stand yet, below one line for those that do."""
    from rich.text import Text

    finished = [name for name, _, done, total in view.stages if done == total]
    rows = [row for row in view.stages if row[2] != row[3]]
    names = f" ({', '.join(finished)})" if named else ""
    line = f"done: {len(finished)} of {number_of(len(view.stages), 'result')}{names}"
    return [*([Text(line, style="green")] if finished else []), *([_results(rows, console)] if rows else [])]


def _newest(view: View, console: Console | None, most: int) -> list[Any]:
    """The newest checkpoints, and how many there are before and after them."""
    from rich.text import Text

    first, last = _window(view, most)
    items = view.checkpoints[first:last]
    cells = [
        (f"{item.step:,}", _cell(item.trained), _cell(item.shipped), _cell(item.evaluated), item.tau or "-")
        for item in items
    ]
    columns = {heading: [row[place] for row in cells] for place, heading in enumerate(STEP_COLUMNS)}
    later = len(view.checkpoints) - last
    hidden = ", ".join(f"{count} {where}" for count, where in ((first, "earlier"), (later, "to come")) if count)
    more = [Text(f"+ {hidden}", style="dim")] if hidden else []
    return [_columns(columns, LEAST_NEEDED, console, "right"), *more]


def _columns(
    columns: dict[str, list[str]],
    needless: Sequence[str],
    console: Console | None,
    side: Literal["left", "right"],
    styles: Sequence[str] = (),
) -> Any:
    """A table without the columns that do not fit. needless: those that may go, in that order. styles: of the last column."""
    from rich.table import Table
    from rich.text import Text

    shown = dict(columns)
    for heading in needless:
        wide = sum(max(len(text) for text in [name, *cells]) + GAP for name, cells in shown.items()) - GAP
        if console is not None and wide > console.width:
            del shown[heading]
    made = Table(box=None, pad_edge=False, show_header=True, header_style="bold", padding=(0, GAP, 0, 0))
    for place, heading in enumerate(shown):
        last = place == len(shown) - 1
        made.add_column(heading, justify="right" if last else side, no_wrap=True)
    for place, row in enumerate(zip(*shown.values(), strict=True)):
        style = styles[place] if styles else ""
        made.add_row(*row[:-1], Text(row[-1], style=style))
    return made


def _style(text: str, view: View) -> str:
    if text.startswith(("ALERT", "FAILED")):
        return "red"
    return "yellow" if text == view.silent else ""


def watch(watched: Watched, stream: TextIO = sys.stdout, *, follow: bool = True, period: float = PERIOD) -> None:
    """Shows a run until it is done or nobody trains it; one look when it is not at work. Ctrl-C ends it.

    Args:
        follow: keep looking while somebody trains.
    """
    if stream.isatty():
        _live(watched, stream, follow, period)
        return
    shown: list[str] = []
    if watched.feed is not None:
        watched.feed.wait(PATIENCE)
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
    console = Console(file=stream)
    with Live(table(view, console), console=console, auto_refresh=False) as live:
        while follow and view.goes_on():
            time.sleep(period)
            view = look(watched)
            live.update(table(view, console), refresh=True)
