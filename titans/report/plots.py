"""Everything that is drawn, as PNG in one palette: lines along numbers, bars, dots, heat maps, sequences, forecasts."""

from __future__ import annotations

import io
import itertools
import math
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

# The palette of Okabe and Ito, which colour-blind readers tell apart, without its yellow, which white swallows.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")  # one more than colours, so that the eighth line differs in both
GREY, DARK, GRID, SHADE = "#666666", "#333333", "#e3e3e3", "#f6f0a1"
WIDTH = 5.6  # inches: narrow, so that letters can still be read on a phone
BANDS = 3  # curves whose intervals are drawn when their runs are drawn too: more would hide each other
MARKED = 24  # places; with more of them a line has no markers
LETTER = 0.6  # width of a letter, as a share of its size
SIZES = {"font.size": 13.0, "figure.titlesize": 14.0, "xtick.labelsize": 12.0, "ytick.labelsize": 12.0}
STYLE = {**SIZES, "legend.fontsize": 12.0, "text.parse_math": False}  # a $ in a name is a $

Values = Sequence[float | None]  # None: there is no value


@dataclass(frozen=True)
class Curve:
    """What one model did along an axis.

    Attributes:
        name: for the legend.
        values: one for each place on the axis.
        lows, highs: ends of the interval of each value; empty: none is drawn.
        runs: the values of each run, drawn thin; empty: the values are those of a single run.
        style: chooses colour and marker, the same in every figure of a report.
        trained_at: the place on the axis that it was trained at.
        dashed: sets a line apart from the others, as a baseline from our models.
    """

    name: str
    values: Values
    lows: Values = ()
    highs: Values = ()
    runs: Sequence[Values] = ()
    style: int = 0
    trained_at: float | None = None
    dashed: bool = False

    @property
    def colour(self) -> str:
        return COLOURS[self.style % len(COLOURS)]

    @property
    def line(self) -> dict[str, Any]:
        """Arguments of its line."""
        solid = "-" if self.style < len(COLOURS) else "-."
        dashes = (0, (4, 1.5)) if self.dashed else solid  # longer dashes than those of chance
        return {"color": self.colour, "marker": MARKERS[self.style % len(MARKERS)], "linestyle": dashes}


@dataclass(frozen=True)
class Span:
    """A stretch of a number axis that is shaded, with a text upon it."""

    low: float
    high: float
    text: str


@dataclass(frozen=True)
class Forecast:
    """What was forecast for one series.

    Attributes:
        name: of the series.
        times: dates or numbers, rising.
        observed: the value at each of them, as far as it is known.
        values: the forecast, for the last of the times.
        lows, highs: ends of the interval of each; empty: none is drawn.
    """

    name: str
    times: Sequence[Any]
    observed: Values
    values: Values
    lows: Values = ()
    highs: Values = ()


def has_band(curve: Curve, curves: Sequence[Curve]) -> bool:
    """Whether the intervals of a curve are drawn among others."""
    return bool(curve.lows and curve.highs) and not (curve.runs and len(curves) > BANDS)


def plot_lines(
    places: Sequence[float],
    curves: Sequence[Curve],
    title: str,
    x_label: str,
    y_label: str,
    percent: bool = False,
    chance: float | None = None,
    span: Span | None = None,
) -> bytes:
    """One line per curve over numbers in rising order, as PNG; an axis that spans much is logarithmic.

    Args:
        percent: the values are shares, shown as 0 to 100.
        chance: what guessing gives, a dashed line.
        span: a shaded stretch of the numbers.
    """
    trained = {curve.trained_at for curve in curves if curve.trained_at is not None}
    named = len(curves) + (chance is not None) + bool(trained)
    with _drawing(3.7 + _legend_height([_short(curve.name) for curve in curves], named)) as (axes, buffer):
        handles: dict[str, Any] = {}
        for curve in curves:
            for run in curve.runs:
                axes.plot(places, _gaps(run), color=curve.colour, linewidth=0.8, alpha=0.5)
            if has_band(curve, curves):
                axes.fill_between(places, _gaps(curve.lows), _gaps(curve.highs), color=curve.colour, alpha=0.15, lw=0)
            size = 6 if len(places) <= MARKED else 0
            (line,) = axes.plot(places, _gaps(curve.values), lw=2.4, markersize=size, clip_on=False, **curve.line)
            handles[_legend_name(curve, handles)] = line
        if chance is not None:
            handles["chance"] = axes.axhline(chance, color=GREY, linewidth=1.4, linestyle="--", zorder=1)
        for place in sorted(trained):
            colours = {curve.colour for curve in curves if curve.trained_at == place}
            colour = colours.pop() if len(trained) > 1 and len(colours) == 1 else GREY
            line = axes.axvline(place, color=colour, linewidth=1.6, linestyle=":", zorder=1)
            handles.setdefault("trained here", line)
        _number_axis(axes, places, trained, span)
        _value_axis(axes, "y", curves, percent)
        axes.grid(axis="y", color=GRID)
        _finish_axes(axes, title, x_label, y_label, handles)
    return buffer.getvalue()


def plot_bars(
    words: Sequence[str],
    curves: Sequence[Curve],
    title: str,
    x_label: str,
    y_label: str,
    percent: bool = False,
    chance: float | None = None,
) -> bytes:
    """A group of bars for each word, one bar per curve, as PNG; the bars lie, so that long words can be read.

    The arguments are those of ``plot_lines``; ``x_label`` says what the words are.
    """
    count = len(curves)
    thickness = min(0.22, max(0.11, 6.0 / (count * len(words))))  # inches
    step = count * thickness + 0.14
    named = count + (chance is not None)
    height = 1.3 + step * len(words) + _legend_height([_short(curve.name) for curve in curves], named)
    with _drawing(height) as (axes, buffer):
        handles: dict[str, Any] = {}
        for index, curve in enumerate(curves):
            places = [place + (index - (count - 1) / 2) * thickness / step for place in range(len(words))]
            values = _gaps(curve.values)
            bars = axes.barh(places, values, thickness / step, color=curve.colour, edgecolor="white", linewidth=0.5)
            if curve.style >= len(COLOURS):
                for bar in bars:
                    bar.set_hatch("//")
            if curve.lows and curve.highs:
                ends = zip(curve.values, curve.lows, curve.highs, strict=True)
                sides = [(max(v - a, 0.0), max(b - v, 0.0)) if _all(v, a, b) else (0.0, 0.0) for v, a, b in ends]  # type: ignore[operator]
                axes.errorbar(values, places, xerr=list(zip(*sides, strict=True)), fmt="none", ecolor=DARK, lw=1)
            for run in curve.runs:
                axes.plot(_gaps(run), places, "o", color="white", markeredgecolor=DARK, markersize=3.5, mew=0.8)
            handles[_legend_name(curve, handles)] = bars
        if chance is not None:
            handles["chance"] = axes.axvline(chance, color=GREY, linewidth=1.4, linestyle="--")
        axes.set_yticks(range(len(words)), [_short(word) for word in words])
        axes.set_ylim(len(words) - 0.5, -0.5)
        _value_axis(axes, "x", curves, percent)
        axes.grid(axis="x", color=GRID)
        _finish_axes(axes, title, y_label, x_label, handles)
    return buffer.getvalue()


def plot_dots(curves: Sequence[Curve], title: str, x_label: str) -> bytes:
    """One row per curve, the first on top, as PNG: a dot for the one value of each run, a stroke for their mean."""
    with _drawing(1.3 + 0.36 * len(curves)) as (axes, buffer):
        for place, curve in enumerate(curves):
            runs = [run[0] for run in curve.runs or [curve.values] if run[0] is not None]
            axes.plot(runs, [place] * len(runs), "o", color=curve.colour, markersize=8, alpha=0.6, mew=0)
            axes.plot(_gaps(curve.values[:1]), [place], "|", color=DARK, markersize=18, mew=2)
        axes.set_yticks(range(len(curves)), [_short(curve.name) for curve in curves])
        axes.set_ylim(len(curves) - 0.5, -0.5)
        axes.margins(x=0.08)
        axes.locator_params(axis="x", nbins=5)
        axes.grid(axis="x", color=GRID)
        _finish_axes(axes, title, x_label, "", {})
    return buffer.getvalue()


def plot_sequence(
    values: Sequence[float],
    kinds: Sequence[str],
    parts: Sequence[tuple[str, int]],
    title: str,
    x_label: str,
    y_label: str,
) -> bytes:
    """One bar per token of a sequence, as PNG.

    Args:
        kinds: what each token is; one colour per kind.
        parts: the name and the number of tokens of each part of the sequence, in order.
    """
    with _drawing(3.9) as (axes, buffer):
        handles: dict[str, Any] = {}
        for kind, colour in zip(dict.fromkeys(kinds), itertools.cycle((COLOURS[5], COLOURS[0], "#999999"))):
            places = [place for place, each in enumerate(kinds) if each == kind]
            handles[kind] = axes.bar(places, [values[place] for place in places], 0.85, color=colour)
        start, top = 0, 1.3 * max(values)
        for name, count in parts:
            if start:
                axes.axvline(start - 0.5, color=DARK, linewidth=1)
            axes.text(start + count / 2 - 0.5, top, name.replace(" ", "\n", 1), ha="center", va="top", fontsize=11)
            start += count
        axes.set_xlim(-0.5, len(values) - 0.5)
        axes.set_ylim(0, 1.02 * top)
        axes.grid(axis="y", color=GRID)
        _finish_axes(axes, title, x_label, y_label, handles)
    return buffer.getvalue()


def plot_heat(
    columns: Sequence[str],
    rows: Sequence[str],
    values: Sequence[Values],
    title: str,
    x_label: str,
    y_label: str,
    value_label: str,
    show: Callable[[float], str],
    limits: tuple[float, float] = (0.0, 1.0),
) -> bytes:
    """A coloured cell with its number for each row and column, the first row on top, as PNG.

    Args:
        values: one row of values for each of ``rows``; a cell without a value is grey, with a dash.
        value_label: what the colours mean.
        show: a value as text, in the cells and beside the colours.
        limits: the values at the ends of the colour scale.
    """
    from matplotlib.ticker import FuncFormatter

    texts = [["–" if value is None else show(value) for value in row] for row in values]
    letters = max(len(text) for row in texts for text in row)
    size = min(12.0, 0.85 * 72 * 3.9 / len(columns) / (LETTER * letters))
    with _drawing(1.6 + 0.42 * max(len(rows), 3)) as (axes, buffer):
        image = axes.imshow([_gaps(row) for row in values], "viridis", aspect="auto", vmin=limits[0], vmax=limits[1])
        axes.set_facecolor("#dddddd")
        for y, row in enumerate(values):
            for x, value in enumerate(row):
                dark = value is not None and value < limits[0] + 0.6 * (limits[1] - limits[0])
                colour = "white" if dark else "black"
                axes.text(x, y, texts[y][x], ha="center", va="center", color=colour, fontsize=size)
        kept = set(thin([float(place) for place in range(len(columns))]))
        axes.set_xticks(range(len(columns)), [_short(c) if i in kept else "" for i, c in enumerate(columns)])
        axes.set_yticks(range(len(rows)), [_short(row) for row in rows])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        bar = axes.figure.colorbar(image, ax=axes, format=FuncFormatter(lambda value, _: show(value)))
        bar.set_label(value_label)
        bar.outline.set_visible(False)
        _finish_axes(axes, title, x_label, y_label, {})
    return buffer.getvalue()


def plot_forecasts(forecasts: Sequence[Forecast], title: str, x_label: str, interval: str = "interval") -> bytes:
    """What was observed of each series, and what was forecast with its interval, one series below the other, as PNG.

    Args:
        interval: what it is called in the legend.
    """
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    count = len(forecasts)
    together = all(list(each.times) == list(forecasts[0].times) for each in forecasts)
    height = 4.0 if count == 1 else 1.1 + (1.7 if together else 2.0) * count
    with _drawing(height, count, together) as (axes, buffer):
        handles: dict[str, Any] = {}
        for place, forecast in zip(axes.figure.axes, forecasts, strict=True):
            ahead = forecast.times[-len(forecast.values) :]
            (handles["observed"],) = place.plot(forecast.times, _gaps(forecast.observed), color=DARK, lw=1.6)
            (handles["forecast"],) = place.plot(ahead, _gaps(forecast.values), color=COLOURS[0], lw=2.0)
            if forecast.lows and forecast.highs:
                lows, highs = _gaps(forecast.lows), _gaps(forecast.highs)
                handles[interval] = place.fill_between(ahead, lows, highs, color=COLOURS[0], alpha=0.2, lw=0)
            place.axvline(ahead[0], color=GREY, linewidth=1.4, linestyle=":", zorder=1)
            place.margins(x=0.01)
            place.locator_params(axis="y", nbins=4)
            place.grid(axis="y", color=GRID)
            place.set_axisbelow(True)
            place.spines[["top", "right"]].set_visible(False)
            if count > 1:
                place.set_title(_short(forecast.name), loc="left", fontsize=12, pad=3)
            if isinstance(ahead[0], datetime):
                locator = AutoDateLocator(minticks=3, maxticks=7)
                place.xaxis.set_major_locator(locator)
                place.xaxis.set_major_formatter(ConciseDateFormatter(locator))
            else:
                place.locator_params(axis="x", nbins=6)
        _finish_axes(axes, title, x_label, "" if count > 1 else _short(forecasts[0].name), handles)
    return buffer.getvalue()


def short_number(number: float) -> str:
    """A number for an axis: 0.25, 512, 1,000, 16k for 16384, 1.5M for 1,500,000 and 1M for 2 to the 20th."""
    if number >= 1e6:
        return f"{number / (2**20 if number % 2**20 == 0 else 1e6):,.3g}M"
    if number >= 1024 and number % 1024 == 0:
        return f"{number / 1024:,.0f}k"
    return f"{number:,.0f}" if number == int(number) else f"{number:g}"


def is_wide(places: Sequence[float]) -> bool:
    """Whether an axis spans so much that it is drawn in powers of 2."""
    return min(places) > 0 and max(places) > 8 * min(places)


def thin(places: Sequence[float], least: float = 1 / 9) -> list[int]:
    """The numbers of the places, in rising order, that can be named without overlap: the ends, and what fits between.

    Args:
        least: the distance between two names, as a share of the axis.
    """
    gap = least * (places[-1] - places[0])
    kept = [0]
    for index in range(1, len(places) - 1):
        if places[index] - places[kept[-1]] >= gap and places[-1] - places[index] >= gap:
            kept.append(index)
    return kept if len(places) == 1 else [*kept, len(places) - 1]


@contextmanager
def _drawing(height: float, rows: int = 1, together: bool = True) -> Iterator[tuple[Axes, io.BytesIO]]:
    """Axes to draw on, untouched by a user's settings for other figures; afterwards the buffer holds the PNG.

    Of several rows, with one x-axis for all if they are drawn ``together``, these are the last ones; all are in
    ``axes.figure.axes``.
    """
    from matplotlib import style
    from matplotlib.figure import Figure

    buffer = io.BytesIO()
    with style.context(["default", STYLE]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # of letters that the font lacks
        figure = Figure(figsize=(WIDTH, height), dpi=min(200, 30_000 / height), layout="constrained")
        yield figure.subplots(rows, sharex=together, squeeze=False)[-1, 0], buffer
        figure.savefig(buffer, format="png")


def _finish_axes(axes: Axes, title: str, x_label: str, y_label: str, handles: dict[str, Any]) -> None:
    """Title, labels and, for more than one handle, a legend."""
    lines = textwrap.wrap(title, 46, max_lines=3, placeholder=" …")
    axes.figure.suptitle("\n".join(lines), x=0.01, ha="left")
    axes.set_xlabel("\n".join(textwrap.wrap(x_label, 48)))
    height = axes.figure.bbox.height / axes.figure.dpi
    room = height - _legend_height(list(handles), len(handles)) - 0.7  # inches beside the axes
    axes.set_ylabel("\n".join(textwrap.wrap(y_label, max(12, int(10 * room)))))
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if len(handles) > 1:
        columns = _legend_columns(list(handles), len(handles))
        axes.figure.legend(
            list(handles.values()), list(handles), loc="outside lower center", ncols=columns, frameon=False
        )


def _legend_columns(names: Sequence[str], count: int) -> int:
    longest = max(len(name) for name in [*names, "trained here"])
    return max(1, min(count, 46 // (longest + 5)))


def _legend_height(names: Sequence[str], count: int) -> float:
    """Inches, about."""
    return 0.25 * math.ceil(count / _legend_columns(names, count)) if count > 1 else 0.0


def _legend_name(curve: Curve, taken: dict[str, Any]) -> str:
    name = _short(curve.name)
    while name in taken or name in ("chance", "trained here"):  # two long names may begin alike
        name += "'"
    return name


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 28 else text[:27] + "…"


def _gaps(values: Values) -> list[float]:
    """The values with NaN, which is not drawn, for those that are not there."""
    return [math.nan if value is None else value for value in values]


def _all(*values: float | None) -> bool:
    return all(value is not None for value in values)


def _number_axis(axes: Axes, places: Sequence[float], others: set[float], span: Span | None) -> None:
    """Names the places that were measured and the end of ``span``; the scale has room for ``others`` too."""
    from matplotlib.ticker import NullLocator

    if span is not None:
        axes.axvspan(span.low, span.high, color=SHADE, linewidth=0, zorder=0.8)  # above the grid
        places, others = sorted({*places, span.high}), {*others, span.low}
    scaled: Sequence[float] = places
    low, high = min([*places, *others]), max([*places, *others])
    margin = 0.04 * (high - low)
    limits = (low - margin, high + margin)
    if is_wide(places) and low > 0:
        axes.set_xscale("log", base=2)
        scaled = [math.log2(place) for place in places]
        limits = (low / (high / low) ** 0.04, high * (high / low) ** 0.04)
    if span is not None:
        limits = (span.low if span.low == low else limits[0], limits[1])
        middle = math.sqrt(span.low * span.high) if axes.get_xscale() == "log" else (span.low + span.high) / 2
        across = axes.get_xaxis_transform()
        axes.text(middle, 0.5, span.text, rotation=90, ha="center", va="center", fontsize=12, transform=across)
    if low < high:
        axes.set_xlim(limits)  # all of them, though the last may have no value
    names = [short_number(place) for place in places]
    kept = thin(scaled, max(1 / 9, 0.022 * (1.5 + max(map(len, names)))))
    axes.set_xticks([places[index] for index in kept], [names[index] for index in kept])
    axes.xaxis.set_minor_locator(NullLocator())


def _value_axis(axes: Axes, side: str, curves: Sequence[Curve], percent: bool) -> None:
    """Scale and numbers of the axis of the values, which is ``side``, x or y."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis: Axis = getattr(axes, f"{side}axis")
    values = [value for curve in curves for value in curve.values if value is not None]
    if percent and all(0 <= value <= 1 for value in values):
        axes.set(**{f"{side}lim": (-0.03, 1.03)})
    elif not percent and values and min(values) > 0 and max(values) > 20 * min(values):
        axes.set(**{f"{side}scale": "log"})
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if max(values) < 1000 * min(values) else (1,)))
        axis.set_minor_locator(NullLocator())
    if percent:
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g}"))
    else:
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}" if abs(value) < 1e6 else f"{value:g}"))
