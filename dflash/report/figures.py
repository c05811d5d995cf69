"""Figures as inline SVG: lines with intervals, and bars, drawn for a page that is read on a phone and on paper.

Colours are CSS classes (`s1` to `s6`, `grid`, `axis`), so that the page's light and dark palettes apply; series also differ
by marker and dash, so that colour is never the only cue. Text is text. A figure of 400 points is about 12 kB and takes a
millisecond; curves longer than that are averaged down first, which the caller says beside the figure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 400, 236
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 12, 38
MOST_MARKERS = 40
"""Above this many points markers and bars would touch: a plain line with a few markers and a band is drawn instead."""
FEW_MARKERS = 7
DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 2", "1 3")


@dataclass(frozen=True)
class Series:
    """One line. `points`: (x, y); `intervals`: (low, high) for each point, or None where there is none."""

    name: str
    points: Sequence[tuple[float, float]]
    intervals: Sequence[tuple[float, float] | None] = field(default_factory=tuple)


@dataclass(frozen=True)
class Scale:
    """Maps values to pixels, and says where the ticks are."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)


def thin(points: Sequence[tuple[float, float]], most: int = 300) -> list[tuple[float, float]]:
    """At most `most` points: neighbours are averaged in groups of equal size (the last may be smaller)."""
    size = math.ceil(len(points) / most) if points else 1
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]


def readable(value: float) -> str:
    """A number in words about a figure: 1,500 or 12k, 0.25, 6e-4."""
    size = abs(value)
    if size >= 10_000:
        return f"{value / 1000:,.4g}k"
    if size >= 1_000:
        return f"{value:,.0f}"
    if 0 < size < 0.001:
        return _exponent(value)
    return f"{value:.4g}"


def _exponent(value: float) -> str:
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def tick_texts(ticks: Sequence[float]) -> list[str]:
    """The numbers along one axis, all written the same way."""
    largest = max((abs(tick) for tick in ticks), default=0.0)
    if largest >= 10_000:
        return [f"{tick / 1000:,.4g}k" if tick else "0" for tick in ticks]
    if 0 < largest < 0.01:
        return [_exponent(tick) if tick else "0" for tick in ticks]
    return [f"{tick:,.4g}" if abs(tick) < 1000 else f"{tick:,.0f}" for tick in ticks]


def _scale(low: float, high: float, start: float, end: float, *, counted: bool = False) -> Scale:
    """A linear scale with about five ticks at 1, 2 or 5 times a power of ten.

    counted: values are whole numbers (steps, slots), so ticks are too, and the ends stay at the data.
    """
    if high <= low:
        pad = abs(low) * 0.1 or 0.5
        low, high = low - pad, high + pad
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    if counted:
        step = max(step, 1.0)
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    else:
        low, high = first * step, last * step
    return Scale(low, high, start, end, tuple(index * step for index in range(first, last + 1)))


def _axes(x: Scale | None, y: Scale, x_label: str, y_label: str) -> list[str]:
    parts = []
    for tick, text in zip(y.ticks, tick_texts(y.ticks), strict=True):
        parts.append(f'<path class="grid" d="M{LEFT} {y(tick)}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 5}" y="{y(tick) + 4}" text-anchor="end">{text}</text>')
    if x is not None:
        for tick, text in zip(x.ticks, tick_texts(x.ticks), strict=True):
            parts.append(
                f'<text class="tick" x="{x(tick)}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{text}</text>'
            )
    parts.append(f'<path class="axis" d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>')
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f'<text class="label" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 5}" text-anchor="middle">')
    parts.append(f"{escape(x_label)}</text>")
    parts.append(f'<text class="label" transform="translate(11 {middle}) rotate(-90)" text-anchor="middle">')
    parts.append(f"{escape(y_label)}</text>")
    return parts


def _marker(shape: int, x: float, y: float) -> str:
    size = 3.6
    outlines = (
        f"M{x - size} {y}a{size} {size} 0 1 0 {2 * size} 0a{size} {size} 0 1 0 {-2 * size} 0z",
        f"M{x - 3.2:.1f} {y - 3.2:.1f}h6.4v6.4h-6.4z",
        f"M{x} {y - 4.4:.1f}l4.2 7.6h-8.4z",
        f"M{x} {y - 4.6:.1f}l4.6 4.6l-4.6 4.6l-4.6 -4.6z",
        f"M{x} {y + 4.4:.1f}l4.2 -7.6h-8.4z",
        f"M{x - 3.4:.1f} {y - 3.4:.1f}l6.8 6.8m0 -6.8l-6.8 6.8",
    )
    return f'<path class="mark" d="{outlines[shape % len(outlines)]}"/>'


def _dash(index: int, dense: bool) -> str:
    """The dash of a series; dense curves are solid, since noise and dashes together look frayed."""
    return f' stroke-dasharray="{DASHES[index % len(DASHES)]}"' if index % len(DASHES) and not dense else ""


def _line(series: Series, index: int, x: Scale, y: Scale, *, dense: bool, marked: bool) -> str:
    """One series as a group: interval bars (or a band), the line, and markers where they do not touch."""
    points = [(x(a), y(b)) for a, b in series.points]
    bounds = [
        (at, y(pair[0]), y(pair[1]))
        for (at, _), pair in zip(points, series.intervals, strict=False)
        if pair is not None
    ]
    parts = [f'<g class="s{index % 6 + 1}">']
    if not dense:
        parts += [f'<path class="bar" d="M{a} {low}V{high}m-3 0h6M{a - 3:.1f} {low}h6"/>' for a, low, high in bounds]
    elif len(bounds) > 1:
        around = [f"{a} {high}" for a, _, high in bounds] + [f"{a} {low}" for a, low, _ in reversed(bounds)]
        parts.append(f'<path class="band" d="M{"L".join(around)}z"/>')
    parts.append(f'<path class="line" d="M{"L".join(f"{a} {b}" for a, b in points)}"{_dash(index, dense)}/>')
    every = math.ceil(len(points) / FEW_MARKERS) if dense else 1
    parts += [_marker(index, a, b) for a, b in points[every // 2 :: every] if marked]
    return "".join([*parts, "</g>"])


def _legend(names: Sequence[str], dense: bool) -> str:
    """The legend as a list of HTML: it wraps on a narrow page and is read aloud."""
    if len(names) < 2:
        return ""
    items = []
    for index, name in enumerate(names):
        items.append(
            f'<li><svg class="swatch s{index % 6 + 1}" viewBox="0 0 30 12" aria-hidden="true">'
            f'<path class="line" d="M1 6H29"{_dash(index, dense)}/>{_marker(index, 15, 6)}</svg>{escape(name)}</li>'
        )
    return f'<ul class="legend">{"".join(items)}</ul>'


def _describe(series: Sequence[Series], x_label: str) -> str:
    """What a reader who cannot see the lines should know: where each starts, ends, and its extremes."""
    told = []
    for item in series:
        (first_x, first_y), (last_x, last_y) = item.points[0], item.points[-1]
        values = [value for _, value in item.points]
        told.append(
            f"{item.name}: {readable(first_y)} at {x_label} {readable(first_x)}, {readable(last_y)} at "
            f"{x_label} {readable(last_x)}, between {readable(min(values))} and {readable(max(values))}"
        )
    return "; ".join(told)


def _svg(label: str, parts: Sequence[str]) -> str:
    return (
        f'<svg class="figure" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">'
        f"{''.join(parts)}</svg>"
    )


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    low: float | None = None,
    high: float | None = None,
) -> str:
    """Lines over a common x of whole numbers: SVG with an alternative text, then its legend.

    Args:
        low, high: ends that the y axis must reach, beside the data and the intervals.
    Returns: "" when no series has a point.
    """
    drawn = [item for item in series if item.points]
    if not drawn:
        return ""
    xs = [a for item in drawn for a, _ in item.points]
    ys = [b for item in drawn for _, b in item.points]
    ys += [bound for item in drawn for pair in item.intervals if pair for bound in pair]
    ys += [end for end in (low, high) if end is not None]
    left, right = min(xs), max(xs)
    pad = (right - left) * 0.03
    x = _scale(left - pad, right + pad, LEFT, WIDTH - RIGHT, counted=True)
    y = _scale(min(ys), max(ys), HEIGHT - BOTTOM, TOP)
    if left == right:
        x = Scale(left - 1, right + 1, LEFT, WIDTH - RIGHT, (left,))
    dense = max(len(item.points) for item in drawn) > MOST_MARKERS
    marked = not dense or len(drawn) > 1  # a lone dense curve needs no marker to be told apart
    lines = [_line(item, index, x, y, dense=dense, marked=marked) for index, item in enumerate(drawn)]
    label = f"{title}. {_describe(drawn, x_label)}."
    return _svg(label, [*_axes(x, y, x_label, y_label), *reversed(lines)]) + _legend(
        [item.name for item in drawn], dense
    )


def bar_chart(
    title: str, labels: Sequence[str], groups: Sequence[tuple[str, Sequence[float]]], *, x_label: str, y_label: str
) -> str:
    """Bars by label, side by side for each group (name, one value a label); groups differ by fill, not by colour alone.

    Returns: "" when there are no labels.
    """
    if not labels or not groups:
        return ""
    y = _scale(0.0, max(max(values) for _, values in groups) or 1.0, HEIGHT - BOTTOM, TOP)
    slot = (WIDTH - LEFT - RIGHT) / len(labels)
    width = slot * 0.8 / len(groups)
    parts = _axes(None, y, x_label, y_label)
    every = math.ceil(len(labels) / max(1, int((WIDTH - LEFT - RIGHT) / (8 * max(map(len, labels)) + 4))))
    for column, label in enumerate(labels):
        middle = LEFT + slot * (column + 0.5)
        for index, (_, values) in enumerate(groups):
            left = middle + width * (index - len(groups) / 2)
            top = y(values[column])
            parts.append(
                f'<rect class="s{index + 1} fill{index + 1}" x="{left + 0.5:.1f}" y="{top}" width="{max(width - 1, 0.5):.1f}" '
                f'height="{max(HEIGHT - BOTTOM - top, 0):.1f}"/>'
            )
        if column % every == 0:
            parts.append(f'<text class="tick" x="{middle:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">')
            parts.append(f"{escape(label)}</text>")
    told = "; ".join(
        f"{name}: " + ", ".join(f"{label} {readable(value)}" for label, value in zip(labels, values, strict=True))
        for name, values in groups
    )
    return _svg(f"{title}. {told}.", parts) + _bar_legend([name for name, _ in groups])


def _bar_legend(names: Sequence[str]) -> str:
    if len(names) < 2:
        return ""
    items = [
        f'<li><svg class="swatch" viewBox="0 0 14 12" aria-hidden="true"><rect class="s{index + 1} fill{index + 1}" x="1" y="1" '
        f'width="12" height="10"/></svg>{escape(name)}</li>'
        for index, name in enumerate(names)
    ]
    return f'<ul class="legend">{"".join(items)}</ul>'
