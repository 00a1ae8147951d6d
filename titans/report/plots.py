"""Figures of results as PNG: lines along a number, bars for words, and heat maps."""

from __future__ import annotations

import io
import math
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

# The palette of Okabe and Ito, which colour-blind readers tell apart, without its yellow, which white swallows.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
GREY = "#666666"
WIDTH = 5.6  # inches: narrow, so that letters can still be read on a telephone
BANDS = 3  # curves whose intervals are drawn when their runs are, too: more hide each other
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
        lows, highs: ends of the interval of each value; empty: none is drawn, nor with many curves of several runs.
        runs: the values of each run, drawn thin; empty: the values are those of a single run.
        style: chooses colour and marker, the same in every figure of a report.
        trained_at: the place on the axis that it was trained at.
    """

    name: str
    values: Values
    lows: Values = ()
    highs: Values = ()
    runs: Sequence[Values] = ()
    style: int = 0
    trained_at: float | None = None

    @property
    def colour(self) -> str:
        return COLOURS[self.style % len(COLOURS)]

    @property
    def line(self) -> dict[str, Any]:
        """Arguments of its line; dashes and dots are taken."""
        dashes = "-" if self.style < len(COLOURS) else "-."
        return {"color": self.colour, "marker": MARKERS[self.style % len(MARKERS)], "linestyle": dashes}


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
) -> bytes:
    """A line a curve over numbers in rising order, as PNG.

    Args:
        percent: the values are shares, shown as 0 to 100.
        chance: what guessing gives, a dashed line.
    """
    trained = {curve.trained_at for curve in curves if curve.trained_at is not None}
    named = len(curves) + (chance is not None) + bool(trained)
    with drawing(3.7 + _legend_height([_short(curve.name) for curve in curves], named)) as (axes, buffer):
        handles: dict[str, Any] = {}
        for curve in curves:
            for run in curve.runs:
                axes.plot(places, _gaps(run), color=curve.colour, linewidth=0.8, alpha=0.5)
            if has_band(curve, curves):
                axes.fill_between(places, _gaps(curve.lows), _gaps(curve.highs), color=curve.colour, alpha=0.15, lw=0)
            (line,) = axes.plot(places, _gaps(curve.values), linewidth=2.4, markersize=6, clip_on=False, **curve.line)
            handles[_legend_name(curve, handles)] = line
        if chance is not None:
            handles["chance"] = axes.axhline(chance, color=GREY, linewidth=1.4, linestyle="--", zorder=1)
        for place in sorted(trained):
            colours = {curve.colour for curve in curves if curve.trained_at == place}
            colour = colours.pop() if len(trained) > 1 and len(colours) == 1 else GREY
            line = axes.axvline(place, color=colour, linewidth=1.6, linestyle=":", zorder=1)
            handles.setdefault("trained here", line)
        _number_axis(axes, places, trained)
        _value_axis(axes, "y", curves, percent)
        axes.grid(axis="y", color="#e3e3e3")
        finish_axes(axes, title, x_label, y_label, handles)
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
    """A group of bars for each word, a bar a curve, as PNG; the bars lie, so that words of any length can be read.

    The arguments are those of ``plot_lines``; ``x_label`` says what the words are.
    """
    count = len(curves)
    thickness = min(0.22, max(0.11, 6.0 / (count * len(words))))  # inches
    step = count * thickness + 0.14
    named = count + (chance is not None)
    height = 1.3 + step * len(words) + _legend_height([_short(curve.name) for curve in curves], named)
    with drawing(height) as (axes, buffer):
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
                axes.errorbar(values, places, xerr=list(zip(*sides, strict=True)), fmt="none", ecolor="#333333", lw=1)
            for run in curve.runs:
                axes.plot(_gaps(run), places, "o", color="white", markeredgecolor="#333333", markersize=3.5, mew=0.8)
            handles[_legend_name(curve, handles)] = bars
        if chance is not None:
            handles["chance"] = axes.axvline(chance, color=GREY, linewidth=1.4, linestyle="--")
        axes.set_yticks(range(len(words)), [_short(word) for word in words])
        axes.set_ylim(len(words) - 0.5, -0.5)
        _value_axis(axes, "x", curves, percent)
        axes.grid(axis="x", color="#e3e3e3")
        finish_axes(axes, title, y_label, x_label, handles)
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
        values: a row of values for each of ``rows``; a cell without one is grey, with a dash.
        value_label: what the colours mean.
        show: a value as text, in the cells and beside the colours.
        limits: the values of the ends of the scale of colours.
    """
    from matplotlib.ticker import FuncFormatter

    texts = [["–" if value is None else show(value) for value in row] for row in values]
    letters = max(len(text) for row in texts for text in row)
    size = min(12.0, 0.85 * 72 * 3.9 / len(columns) / (LETTER * letters))
    with drawing(1.6 + 0.42 * max(len(rows), 3)) as (axes, buffer):
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
        finish_axes(axes, title, x_label, y_label, {})
    return buffer.getvalue()


def short_number(number: float) -> str:
    """A number for an axis: 512, 1,000, 16k for 16384, 0.25."""
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
def drawing(height: float) -> Iterator[tuple[Axes, io.BytesIO]]:
    """Axes to draw on, whatever settings a user has for other figures; the PNG is in the buffer afterwards."""
    from matplotlib import style
    from matplotlib.figure import Figure

    buffer = io.BytesIO()
    with style.context(["default", STYLE]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # of letters that the font lacks
        figure = Figure(figsize=(WIDTH, height), dpi=min(200, 30_000 / height), layout="constrained")
        yield figure.subplots(), buffer
        figure.savefig(buffer, format="png")


def finish_axes(axes: Axes, title: str, x_label: str, y_label: str, handles: dict[str, Any]) -> None:
    """Title, labels and, for more than one handle, a legend."""
    lines = textwrap.wrap(title, 46, max_lines=3, placeholder=" …")
    axes.figure.suptitle("\n".join(lines), x=0.01, ha="left")
    axes.set_xlabel("\n".join(textwrap.wrap(x_label, 48)))
    axes.set_ylabel("\n".join(textwrap.wrap(y_label, 30)))
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


def _number_axis(axes: Axes, places: Sequence[float], others: set[float]) -> None:
    """Names the places that were measured; the scale has room for ``others`` too."""
    from matplotlib.ticker import NullLocator

    scaled: Sequence[float] = places
    low, high = min([*places, *others]), max([*places, *others])
    margin = 0.04 * (high - low)
    limits = (low - margin, high + margin)
    if is_wide(places) and low > 0:
        axes.set_xscale("log", base=2)
        scaled = [math.log2(place) for place in places]
        limits = (low / (high / low) ** 0.04, high * (high / low) ** 0.04)
    if low < high:
        axes.set_xlim(limits)  # all of them, though the last may have no value
    kept = thin(scaled)
    axes.set_xticks([places[index] for index in kept], [short_number(places[index]) for index in kept])
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
