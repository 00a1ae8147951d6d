from __future__ import annotations

import itertools
import math
from dataclasses import replace
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes

from tests.report.cases import legend
from titans.report.plots import (
    Curve,
    Forecast,
    Span,
    plot_bars,
    plot_dots,
    plot_forecasts,
    plot_heat,
    plot_lines,
    plot_sequence,
    short_number,
    thin,
)


@pytest.mark.parametrize(("curves", "runs", "bands"), [(3, 3, 3), (4, 3, 0), (4, 0, 4)])
def test_many_curves_show_their_runs_and_no_bands(curves: int, runs: int, bands: int, drawn: list[Axes]) -> None:
    one = [Curve(str(i), [0.5, 0.6], [0.4, 0.5], [0.6, 0.7], [[0.5, 0.6]] * runs, i) for i in range(curves)]
    plot_lines([1, 2], one, "t", "x", "y")
    assert len(drawn[0].collections) == bands
    assert len(drawn[0].lines) == curves * (1 + runs)


def test_a_line_stops_where_there_is_no_value_but_the_axis_does_not(drawn: list[Axes]) -> None:
    plot_lines([1, 2, 4], [Curve("a", [0.5, 0.6, None])], "t", "x", "y", percent=True)
    assert [math.isnan(y) for y in drawn[0].lines[0].get_ydata()] == [False, False, True]
    assert drawn[0].get_xlim()[1] > 4
    assert legend(drawn[0]) == []  # one line
    assert drawn[0].get_xscale() == "linear"  # 4x is not much


def test_words_are_bars(drawn: list[Axes]) -> None:
    runs = [[0.1, 0.1], [0.1, 0.3]]
    curves = [Curve("a", [0.5, None], [0.4, None], [0.7, None]), Curve("b", [0.1, 0.2], runs=runs, style=1)]
    plot_bars(["one", "two"], curves, "t", "kind", "accuracy (%)", percent=True, chance=0.25)
    axes = drawn[0]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["one", "two"]
    assert [bar.get_width() for bar in axes.patches if not math.isnan(bar.get_width())] == [0.5, 0.1, 0.2]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("accuracy (%)", "kind")
    assert legend(axes) == ["a", "b", "chance"]


def test_no_two_models_look_alike_and_a_name_is_shown_as_it_is(drawn: list[Axes]) -> None:
    names = ["_under", r"$\frac{$", "chance", *(f"model {i}" for i in range(11))]
    plot_lines([1, 2], [Curve(name, [i, i], style=i) for i, name in enumerate(names)], "$t", "x", "y", chance=0.5)
    looks = {(line.get_color(), line.get_linestyle()) for line in drawn[0].lines[:-1]}
    assert len(looks) == 14
    assert legend(drawn[0])[:2] == ["_under", r"$\frac{$"]
    assert len(set(legend(drawn[0]))) == 15


def test_values_that_differ_much_are_drawn_in_powers_unless_they_are_shares(drawn: list[Axes]) -> None:
    plot_lines([1, 2], [Curve("a", [0.001, 1.0])], "t", "x", "y")
    plot_lines([1, 2], [Curve("a", [0.001, 1.0])], "t", "x", "y", percent=True)
    assert [axes.get_yscale() for axes in drawn] == ["log", "linear"]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30, unique=True).map(sorted))
def test_names_on_an_axis_keep_their_distance_and_the_ends_have_one(places: list[float]) -> None:
    kept = thin(places)
    assert kept[0] == 0 and kept[-1] == len(places) - 1
    assert kept == sorted(set(kept))
    if len(kept) > 2:
        gaps = [places[b] - places[a] for a, b in itertools.pairwise(kept)]
        assert min(gaps) >= (places[-1] - places[0]) / 9


def test_a_number_on_an_axis_is_short() -> None:
    numbers = (0.25, 512, 1000, 1024, 16384, 819_200, 2**20, 2_457_600)
    assert list(map(short_number, numbers)) == ["0.25", "512", "1,000", "1k", "16k", "800k", "1M", "2.46M"]


def test_a_map_with_many_columns_has_small_numbers(drawn: list[Axes]) -> None:
    def size(columns: int) -> float:
        names = [str(i) for i in range(columns)]
        plot_heat(names, ["r"], [[0.5] * columns], "t", "x", "y", "v", lambda value: f"{value:.3f}")
        return float(drawn[-1].texts[0].get_fontsize())

    assert size(2) == 12 > size(12)


def test_long_numbers_on_an_axis_do_not_overlap(drawn: list[Axes]) -> None:
    plot_lines([819_200 * step for step in range(1, 21)], [Curve("a", [1.0] * 20)], "t", "tokens", "y")
    axes = drawn[0]
    boxes = [tick.get_window_extent() for tick in axes.get_xticklabels()]
    assert len(boxes) > 3
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))


def test_a_baseline_is_dashed_and_an_eighth_line_differs_from_the_first(drawn: list[Axes]) -> None:
    curves = [Curve("ours", [1, 2]), Curve("theirs", [1, 2], style=1, dashed=True), Curve("eighth", [1, 2], style=7)]
    plot_lines([1, 2], curves, "t", "x", "y")
    solid, dashed, eighth = drawn[0].lines
    assert (solid.get_linestyle(), dashed.get_linestyle()) == ("-", "--")
    assert solid.get_color() == eighth.get_color()
    assert solid.get_marker() != eighth.get_marker() and eighth.get_linestyle() == "-."


def test_a_shaded_stretch_has_its_text_and_its_end_a_name(drawn: list[Axes]) -> None:
    plot_lines([64, 128, 1024], [Curve("a", [1, 0.9, 0.8])], "t", "x", "y", percent=True, span=Span(8, 16, "seen"))
    axes = drawn[0]
    (shade,) = axes.patches
    assert (shade.get_x(), shade.get_x() + shade.get_width()) == (8, 16)
    assert [text.get_text() for text in axes.texts] == ["seen"]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["16", "64", "128", "1k"]
    assert axes.get_xlim()[0] == 8


def test_dots_are_runs_and_a_stroke_is_their_mean(drawn: list[Axes]) -> None:
    curves = [
        Curve("a", [2.0], runs=[[1.0], [3.0]]),
        Curve("b", [None], runs=[[1.5], [None]], style=1),
        Curve("c", [4.0]),
    ]
    plot_dots(curves, "t", "loss")
    axes = drawn[0]
    dots, means = axes.lines[::2], axes.lines[1::2]
    assert [list(line.get_xdata()) for line in dots] == [[1.0, 3.0], [1.5], [4.0]]
    assert [list(line.get_ydata()) for line in dots] == [[0, 0], [1], [2]]
    assert [line.get_xdata()[0] for line in means if not math.isnan(line.get_xdata()[0])] == [2.0, 4.0]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["a", "b", "c"]
    assert axes.get_ylim() == (2.5, -0.5)  # the first on top


def test_a_sequence_has_a_bar_per_token_a_colour_per_kind_and_its_parts_named(drawn: list[Axes]) -> None:
    kinds = ["key", "value", "filler", "key", "value"]
    plot_sequence([1.0, 2.0, 0.5, 3.0, 4.0], kinds, [("first facts", 2), ("rest", 3)], "t", "x", "y")
    axes = drawn[0]
    bars = {round(bar.get_x() + bar.get_width() / 2): bar for bar in axes.patches}
    assert [bars[place].get_height() for place in range(5)] == [1.0, 2.0, 0.5, 3.0, 4.0]
    colours = [bars[place].get_facecolor() for place in range(5)]
    assert colours[0] == colours[3] and colours[1] == colours[4] and len(set(colours)) == 3
    assert legend(axes) == ["key", "value", "filler"]
    assert [text.get_text() for text in axes.texts] == ["first\nfacts", "rest"]
    assert [list(line.get_xdata()) for line in axes.lines] == [[1.5, 1.5]]


def test_the_name_of_an_axis_stays_beside_it(drawn: list[Axes]) -> None:
    plot_heat(["1k", "2k"], ["0", "1"], [[0.5, 0.5]] * 2, "t", "x", "depth (share of the sequence)", "v", str)
    assert drawn[0].yaxis.label.get_window_extent().y1 < drawn[0].figure.texts[0].get_window_extent().y0


def a_forecast(name: str = "OT", start: int = 0, **ends: list[float]) -> Forecast:
    return Forecast(name, list(range(start, start + 5)), [1.0, 2.0, None, 4.0, None], [3.5, 4.5], **ends)


def test_a_forecast_is_drawn_over_the_last_times_with_its_interval(drawn: list[Axes]) -> None:
    plot_forecasts([a_forecast(lows=[3.0, 3.5], highs=[4.0, 5.5])], "t", "day", "80% interval")
    observed, forecast, start = drawn[0].lines
    assert observed.get_xdata().tolist() == [0, 1, 2, 3, 4]
    assert (forecast.get_xdata().tolist(), forecast.get_ydata().tolist()) == ([3, 4], [3.5, 4.5])
    assert list(start.get_xdata()) == [3, 3]
    assert len(drawn[0].collections) == 1
    assert (drawn[0].get_xlabel(), drawn[0].get_ylabel()) == ("day", "OT")
    assert legend(drawn[0]) == ["observed", "forecast", "80% interval"]


@pytest.mark.parametrize(("starts", "shared"), [((0, 0), True), ((0, 90), False)])
def test_several_forecasts_share_an_axis_if_they_share_their_times(
    starts: tuple[int, int], shared: bool, drawn: list[Axes]
) -> None:
    plot_forecasts([a_forecast(str(start), start) for start in starts], "t", "day")
    first, second = drawn[0].figure.axes
    assert (first.get_xlim() == second.get_xlim()) == shared
    assert [axes.get_title(loc="left") for axes in (first, second)] == [str(start) for start in starts]
    assert legend(first) == ["observed", "forecast"]


def test_times_of_a_forecast_may_be_dates(drawn: list[Axes]) -> None:
    dates = [datetime(2020, 1, day) for day in range(1, 6)]
    plot_forecasts([replace(a_forecast(), times=dates)], "t", "date")
    assert drawn[0].xaxis.get_major_formatter().get_offset() == "2020-Jan"
