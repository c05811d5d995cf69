"""Tables of a run's evaluations: the tidy `evaluations.csv`, tau by step, and the words that sum it up.

The csv holds one number a row. Reading 200 evaluations of 100 rows takes about 0.2 s and 20 MB.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import pandas as pd

from dflash.base.errors import CorruptError
from dflash.evaluate.metrics import COLUMNS

INTEGERS = ("step", "budget", "block_size", "horizon", "n")
NUMBERS = ("value", "ci_low", "ci_high")
OWN_DRAFTER = "trained"
"""What the `drafter` column says of a checkpoint that the run itself trained."""
UNCLIPPED = "_unclipped"
"""Ending of the conventions that leave out verifications which the end of the text may have cut."""
BASELINES = {"prompt_lookup": "prompt lookup", "ngram": "n-gram"}
METHODS = ("chain", "tree", *BASELINES)
ONLINE = {"online": "chain", "online_tree": "tree"}
"""Real decodes of a few prompts: they stand in a table of their own, since their n is another."""
MOST_TERMINAL_ROWS = 20


@dataclass(frozen=True)
class Cell:
    """A value with its interval (NaN where none was computed) and the number of requests behind it."""

    value: float
    low: float
    high: float
    n: int

    def has_interval(self) -> bool:
        """Whether both ends are known."""
        return not (math.isnan(self.low) or math.isnan(self.high))


@dataclass(frozen=True)
class TauTable:
    """Pooled tau by step for one prompt set and one kernel form.

    columns: headings, drafters' methods first, then the baselines. rows: (step, cells by heading), steps ascending.
    """

    prompt_set: str
    kernel: str
    block_sizes: tuple[int, ...]
    conventions: tuple[str, ...]
    samplings: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[int, Mapping[str, Cell]], ...]

    def requests(self) -> tuple[int, int]:
        """Least and most requests behind a cell."""
        counts = [cell.n for _, cells in self.rows for cell in cells.values()]
        return min(counts), max(counts)


FEW_REQUESTS = 10
"""Below so many requests a bootstrap interval is too narrow: it knows only what those few are like."""
MOST_TAGS = 20


@dataclass(frozen=True)
class TagTable:
    """Pooled tau at one step by tag, for one prompt set and kernel form, tags of most requests first.

    columns: as of a `TauTable`. rows: (tag, cells by heading), `MOST_TAGS` at most. left_out: tags beyond those.
    """

    prompt_set: str
    kernel: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, Mapping[str, Cell]], ...]
    left_out: int


@dataclass(frozen=True)
class Verdict:
    """How the drafter stands to the baselines at the last step. standing: `beats`, `unclear`, `loses` or `unknown`."""

    standing: str
    words: str


def tidy(rows: Iterable[Mapping[str, Any]], run: str) -> pd.DataFrame:
    """Rows of all evaluations as one frame with the columns of the csv: steps ascending, otherwise in their order.

    Raises:
        ValueError: a row has an unknown or a missing column, or a number that is none.
    """
    listed = [dict(row) for row in rows]
    for row in listed:
        row["run"] = run
        if set(row) != set(COLUMNS):
            odd = sorted(set(row) ^ set(COLUMNS))
            raise ValueError(f"an evaluation row has missing or unknown columns: {', '.join(odd)}")
    frame = pd.DataFrame(listed, columns=list(COLUMNS))
    for name in INTEGERS:
        frame[name] = pd.to_numeric(frame[name], errors="raise").astype("Int64")
    for name in NUMBERS:
        frame[name] = pd.to_numeric(frame[name], errors="raise").astype("float64")
    return frame.sort_values("step", kind="stable", ignore_index=True)


def tidy_by_tag(rows: Iterable[Mapping[str, Any]], run: str) -> pd.DataFrame:
    """Rows by tag of all evaluations as one frame: the columns of `tidy`, then `tag`.

    Raises:
        ValueError: as `tidy`.
    """
    listed = sorted((dict(row) for row in rows), key=lambda row: int(row["step"]))  # as `tidy` sorts, stable
    tags = [str(row.pop("tag")) for row in listed]
    return tidy(listed, run).assign(tag=tags)


def csv_text(frame: pd.DataFrame) -> str:
    """The bytes of `evaluations.csv`, or of the rows by tag: a header, `\\n` line ends, floats by `repr` (they read back to the
    same value)."""
    stream = io.StringIO()
    frame.to_csv(stream, index=False, lineterminator="\n")
    return stream.getvalue()


def read_csv(path: Path) -> pd.DataFrame:
    """Reads an `evaluations.csv` back, with the types it was written with.

    Raises:
        CorruptError: missing, or with other columns.
    """
    try:
        frame = pd.read_csv(path, dtype=dict.fromkeys(INTEGERS, "Int64") | dict.fromkeys(NUMBERS, "float64"))
    except (OSError, ValueError) as error:
        raise CorruptError(
            f"not a table of evaluations ({error})", where=str(path), remedy="Run `dflash run`."
        ) from error
    if list(frame.columns) != list(COLUMNS):
        raise CorruptError(
            "the columns are not those of a table of evaluations", where=str(path), remedy="Run `dflash run`."
        )
    return frame


def tau_tables(frame: pd.DataFrame, *, metric: str = "tau_pooled", unclipped: bool = False) -> list[TauTable]:
    """Tau over all lengths, one table for each prompt set and kernel form, in the order of the rows.

    Args:
        metric: `tau_pooled`, or `tau_request_mean`.
        unclipped: only verifications whose whole block fits before the end of the text, in place of all.
    """
    chosen = frame[(frame["metric"] == metric) & (frame["length_bucket"] == "all")]
    chosen = chosen[chosen["convention"].astype(str).str.endswith(UNCLIPPED) == unclipped]
    chosen = chosen[~chosen["method"].isin(list(ONLINE))]
    tables = []
    for (prompt_set, kernel), part in chosen.groupby(["prompt_set", "kernel"], sort=False, dropna=False):
        tables.append(_tau_table(str(prompt_set), str(kernel), part))
    return tables


def _tau_table(prompt_set: str, kernel: str, part: pd.DataFrame) -> TauTable:
    by_step: dict[int, dict[str, Cell]] = {}
    order: dict[str, tuple[bool, str, int, int]] = {}
    for row in part.to_dict("records"):
        method, drafter = str(row["method"]), str(row["drafter"])
        budget = 0 if pd.isna(row["budget"]) else int(row["budget"])
        name = heading(method, budget, drafter)
        place = METHODS.index(method) if method in METHODS else len(METHODS)
        foreign = "" if drafter == OWN_DRAFTER or method in BASELINES else drafter
        order.setdefault(name, (method in BASELINES, foreign, place, budget))
        by_step.setdefault(int(row["step"]), {})[name] = _cell(row)
    return TauTable(
        prompt_set,
        kernel,
        tuple(sorted({int(size) for size in part["block_size"].dropna()})),
        tuple(sorted({str(text) for text in part["convention"].dropna()})),
        tuple(sorted({str(text) for text in part["sampling"].dropna()})),
        tuple(sorted(order, key=lambda name: order[name])),
        tuple((step, by_step[step]) for step in sorted(by_step)),
    )


def tag_tables(frame: pd.DataFrame) -> list[TagTable]:
    """Tau by tag at the last step that has any, one table for each prompt set and kernel form.

    Args:
        frame: as of `tidy_by_tag`.
    """
    chosen = frame[frame["step"] == frame["step"].max()]
    made = []
    for (prompt_set, kernel), part in chosen.groupby(["prompt_set", "kernel"], sort=False):
        found: list[tuple[int, str, TauTable]] = []
        for tag, own in part.groupby("tag", sort=False):
            (table,) = tau_tables(own)
            found.append((-table.requests()[1], str(tag), table))
        found.sort(key=lambda item: item[:2])
        columns = list(dict.fromkeys(name for _, _, table in found for name in table.columns))
        rows = tuple((tag, table.rows[-1][1]) for _, tag, table in found[:MOST_TAGS])
        made.append(TagTable(str(prompt_set), str(kernel), tuple(columns), rows, max(0, len(found) - MOST_TAGS)))
    return made


def heading(method: str, budget: int, drafter: str) -> str:
    """What a column is called: `chain`, `tree-16`, `n-gram`, `chain (other drafter)`."""
    if method in BASELINES:
        return BASELINES[method]
    name = f"tree-{budget}" if method == "tree" else method
    return name if drafter == OWN_DRAFTER else f"{name} ({drafter})"


@dataclass(frozen=True)
class Online:
    """Real decodes of one method on one prompt set. cells: by metric; a metric that was not measured is left out."""

    step: int
    prompt_set: str
    kernel: str
    method: str
    budget: int
    sampling: str
    cells: Mapping[str, Cell]

    @property
    def name(self) -> str:
        """`chain` or `tree-16`."""
        return f"tree-{self.budget}" if self.method == "online_tree" else "chain"


def online_decodes(frame: pd.DataFrame) -> list[Online]:
    """What was decoded for real at the last step that has any, in the order of the rows."""
    chosen = frame[frame["method"].isin(list(ONLINE))]
    chosen = chosen[chosen["step"] == chosen["step"].max()]
    columns = ["step", "prompt_set", "kernel", "method", "budget", "sampling"]
    found = []
    for (step, prompt_set, kernel, method, budget, sampling), part in chosen.groupby(columns, sort=False):
        cells = {str(row["metric"]): _cell(row) for row in part.to_dict("records")}
        found.append(Online(int(step), str(prompt_set), str(kernel), str(method), int(budget), str(sampling), cells))
    return found


def _cell(row: Mapping[Any, Any]) -> Cell:
    count = 0 if pd.isna(row["n"]) else int(row["n"])
    return Cell(float(row["value"]), float(row["ci_low"]), float(row["ci_high"]), count)


def verdict(table: TauTable) -> Verdict:
    """Compares the chain at the last step with each baseline of that step, and says in words how it stands.

    It beats a baseline when its interval lies above the baseline's, is unclear while the two overlap, and loses when its
    value is not above the baseline's.
    """
    step, cells = table.rows[-1]
    ours = cells.get("chain")
    rivals = {name: cells[name] for name in BASELINES.values() if name in cells}
    if ours is None or not rivals:
        missing = "the drafter's chain" if ours is None else "the baselines"
        return Verdict("unknown", f"Step {step:,} has no numbers for {missing}, so nothing is proved.")
    standings = {name: _standing(ours, rival) for name, rival in rivals.items()}
    phrases = {"beats": "beats", "unclear": "is above, but within the intervals of,", "loses": "does not beat"}
    parts = []
    for standing in ("loses", "unclear", "beats"):
        named = [f"{name} ({rivals[name].value:.2f})" for name, found in standings.items() if found == standing]
        if named:
            parts.append(f"{phrases[standing]} {' or '.join(named) if standing == 'loses' else ' and '.join(named)}")
    worst = next(level for level in ("loses", "unclear", "beats") if level in standings.values())
    return Verdict(worst, f"At step {step:,} the drafter (chain, tau {ours.value:.2f}) {'; it '.join(parts)}.")


def _standing(ours: Cell, rival: Cell) -> str:
    if not ours.value > rival.value:
        return "loses"
    if ours.has_interval() and rival.has_interval():
        return "beats" if ours.low > rival.high else "unclear"
    return "beats"


def cell_text(cell: Cell | None) -> str:
    """`2.31 [2.20, 2.41]`, or the value alone where no interval was computed."""
    if cell is None:
        return "-"
    return f"{cell.value:.2f} [{cell.low:.2f}, {cell.high:.2f}]" if cell.has_interval() else f"{cell.value:.2f}"


def shown_steps(count: int, most: int = MOST_TERMINAL_ROWS) -> list[int]:
    """Indices of the rows a terminal shows: all, or `most` spread evenly with the first and the last."""
    if count <= most:
        return list(range(count))
    return sorted({round(index * (count - 1) / (most - 1)) for index in range(most)})


def results_table(frame: pd.DataFrame, report: Path, *, stream: TextIO) -> None:
    """Prints what came of a run: tau by step for every prompt set and kernel form, then the verdict and the report's place.

    Drawn with rich when `stream` is a terminal; aligned plain text otherwise, with no control characters. Long runs are
    thinned to 20 rows, and say so.
    """
    tables = tau_tables(frame)
    for table in tables:
        if stream.isatty():
            _print_rich(table, stream)
        else:
            stream.write(_plain(table))
    words = " ".join([*(_named(table, len(tables) > 1) for table in tables), *map(_decoded, online_decodes(frame))])
    stream.write(f"{words or 'No checkpoint has been evaluated yet.'} Report: {report}\n")


def _decoded(item: Online) -> str:
    """One sentence on real decodes."""
    speedup, lossless = item.cells.get("speedup"), item.cells.get("lossless")
    if speedup is None:
        return ""
    text = "" if lossless is None else f", {lossless.value:.0%} of the texts the target's own"
    return f"Decoded for real with a {item.name} ({item.prompt_set}, n = {speedup.n}): {speedup.value:.2f} times as fast{text}."


def _named(table: TauTable, several: bool) -> str:
    words = verdict(table).words
    return f"[{table.prompt_set}, {table.kernel}] {words}" if several else words


def _caption(table: TauTable) -> str:
    sizes = " and ".join(str(size) for size in table.block_sizes) or "unknown"
    known = {"committed_with_bonus": "the bonus token counted"}
    conventions = "; ".join(known.get(name, name) for name in table.conventions) or "no convention given"
    return (
        f"tau on {table.prompt_set}, {table.kernel} kernels: tokens committed per verification, pooled over n requests, "
        f"with bootstrap intervals. Block size {sizes}; {conventions}."
    )


def _body(table: TauTable) -> tuple[list[str], list[list[str]], str]:
    """Headings, rows of text, and a note on the rows left out."""
    kept = shown_steps(len(table.rows))
    body = []
    for index in kept:
        step, cells = table.rows[index]
        counts = sorted({cell.n for cell in cells.values()})
        n = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]}-{counts[-1]}"
        body.append([f"{step:,}", *(cell_text(cells.get(name)) for name in table.columns), n])
    left_out = len(table.rows) - len(kept)
    note = f"{left_out} more steps stand in evaluations.csv.\n" if left_out else ""
    return ["step", *table.columns, "n"], body, note


def _plain(table: TauTable) -> str:
    headings, body, note = _body(table)
    widths = [max(len(row[column]) for row in [headings, *body]) for column in range(len(headings))]
    lines = ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in [headings, *body]]
    return "\n".join([_caption(table), *lines]) + f"\n{note}\n"


def _print_rich(table: TauTable, stream: TextIO) -> None:
    """Draws the table; in a narrow terminal intervals go below their values, in a narrower one they go,
    and in the narrowest the plain text stands."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    headings, body, note = _body(table)
    console = Console(file=stream)
    if _width([headings, *body]) > console.width:
        headings, body = [_stacked(text) for text in headings], [[_stacked(text) for text in row] for row in body]
    if _width([headings, *body]) > console.width:
        body = [[text.split("\n")[0] for text in row] for row in body]
        note += "Intervals stand in evaluations.csv.\n"
    if _width([headings, *body]) > console.width:
        stream.write(_plain(table))  # wraps, and cuts nothing
        return
    drawn = Table(title=Text(_caption(table)), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        drawn.add_column(Text(heading), justify="right", no_wrap=True)
    for row in body:
        drawn.add_row(*map(Text, row))
    console.print(drawn)
    if note:
        console.print(Text(note.strip()))


def _stacked(text: str) -> str:
    """`2.31 [2.20, 2.41]` as two lines, `2.31` and `2.20-2.41`; a heading of two words as two lines."""
    if text.endswith("]"):
        value, _, interval = text[:-1].partition(" [")
        return f"{value}\n{interval.replace(', ', '-')}"
    return text.replace(" ", "\n", 1)


def _width(rows: list[list[str]]) -> int:
    """Columns of the terminal that a table of these texts takes, its gaps included."""
    columns = zip(*rows, strict=True)
    return sum(max(len(line) for text in column for line in text.split("\n")) + 3 for column in columns)
