"""Series from CSV files: one column per variate, or one row per series and time as neuralforecast has them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from titans.files import not_there
from titans.words import nearest

Values = NDArray[np.float64]

STAMPS = ("check", "rows")
DAY = pd.Timedelta(days=1)
OFFSET = re.compile(r":\d\d.*(?:Z|[+-]\d\d:?\d\d)$")  # at the end of a time of day: from Greenwich


@dataclass(frozen=True)
class Series:
    """A series of one or more channels at evenly spaced times.

    Attributes:
        name: its id in a long file; empty for the one series of a wide file.
        values: (time, channels), NaN where a value is missing.
        names: of the channels.
        times: stamps or whole numbers; their ``name`` is that of the column, None where there is none.
        freq: from one time to the next, as pandas writes it, such as ``"15min"``; of whole numbers, their distance.
    """

    name: str
    values: Values
    names: tuple[str, ...]
    times: pd.Index
    freq: str

    def __len__(self) -> int:
        return len(self.values)

    def following(self, count: int) -> pd.Index:
        """The ``count`` times after the last."""
        last = self.times[-1]
        if isinstance(self.times, pd.DatetimeIndex):
            return pd.date_range(last, periods=count + 1, freq=self.freq, name=self.times.name)[1:]
        return pd.Index(last + int(self.freq) * np.arange(1, count + 1), name=self.times.name)


def read_series(
    path: str | Path,
    time: str | None = None,
    columns: Sequence[str] = (),
    id: str = "unique_id",
    target: str = "y",
    stamps: str = "check",
    missing: float = 0.2,
) -> list[Series]:
    """The series of a CSV file: one with all columns of a wide file, one per id of a long file.

    A file with a column ``id`` is long; of its other columns only ``time`` and ``target`` are read. A ``ValueError``
    says in one sentence what is wrong with a file, naming the first row at fault; the row after the header is row 1.

    Args:
        time: the column of stamps, dates or whole numbers. By default ``ds`` in a long file; in a wide one the first
            column if it holds dates, and otherwise the rows are counted.
        columns: the variates of a wide file; all but ``time`` by default.
        id, target: the columns of a long file with the name of a series and its values.
        stamps: ``"check"`` expects rising stamps in even steps; where some are left out, their values are missing.
            ``"rows"`` takes the rows as they come, whatever their stamps say.
        missing: the largest share of a variate's values that may be missing.
    """
    path = Path(path)
    if stamps not in STAMPS:
        raise ValueError(f"stamps is {stamps!r}: {nearest(stamps, STAMPS)}")
    if not 0 <= missing < 1:
        raise ValueError(f"missing is {missing}; expected a share in [0, 1)")
    table = _read_table(path, id)
    if id in table:
        return _read_long(path, table, time or "ds", id, target, stamps, missing)
    if id != "unique_id":
        raise _no_column(path, id, table)
    if time is None and _holds_dates(table.iloc[:, 0]):
        time = str(table.columns[0])
    names = tuple(columns) or tuple(name for name in table if name != time)
    for name in (*names, *([time] if time is not None else [])):
        if name not in table:
            raise _no_column(path, name, table)
    if not names:
        raise ValueError(f"{path} has no column besides {time}; expected at least one variate")
    stamped = pd.RangeIndex(len(table)) if time is None else _read_times(path, table[time])
    values = np.stack([_read_numbers(path, table[name]) for name in names], axis=1)
    return [_on_grid(str(path), Series("", values, names, stamped, ""), table.index, stamps, missing)]


def _read_long(
    path: Path, table: pd.DataFrame, time: str, id: str, target: str, stamps: str, missing: float
) -> list[Series]:
    for name in (time, target):
        if name not in table:
            raise _no_column(path, name, table)
    nameless = np.flatnonzero(table[id].isna())
    if len(nameless):
        raise ValueError(f"{path}: {id} is missing in row {nameless[0] + 1}; expected the name of a series")
    stamped, values = _read_times(path, table[time]), _read_numbers(path, table[target])[:, None]
    found = []
    for name, rows in table.groupby(id, sort=False).indices.items():
        one = Series(name, values[rows], (target,), stamped[rows], "")
        found.append(_on_grid(f"{path}, {name}", one, rows, stamps, missing))
    return found


def season_of(freq: str) -> int | None:
    """How many values make a season at this distance: a day, a week of days, or a year; None where none is known."""
    if freq.isdecimal():
        return None
    offset = pd.tseries.frequencies.to_offset(freq)
    if offset.rule_code == "B":
        return 5
    if offset.rule_code in ("MS", "ME"):
        return 12 // offset.n if offset.n < 12 and 12 % offset.n == 0 else None
    step = pd.Timedelta(offset)
    if step < DAY:
        return int(DAY / step) if DAY % step == pd.Timedelta(0) else None
    return {DAY: 7, 7 * DAY: 52}.get(step)


def _read_table(path: Path, id: str) -> pd.DataFrame:
    if not path.is_file():
        raise ValueError(f"{path} is a folder; expected a CSV file" if path.is_dir() else not_there(str(path)))
    encoding = "utf-8-sig"
    try:
        path.read_bytes().decode(encoding)
    except UnicodeDecodeError:
        encoding = "latin-1"
    with path.open(encoding=encoding) as file:
        header = file.readline()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # rows longer than the header
            table = pd.read_csv(
                path, sep=max(",;\t", key=header.count), encoding=encoding, dtype={id: str}, index_col=False,
                low_memory=False, skipinitialspace=True,
            )  # fmt: skip
    except pd.errors.EmptyDataError:
        raise ValueError(f"{path} is empty; expected a header and rows of values") from None
    except (pd.errors.ParserError, pd.errors.ParserWarning) as error:
        raise ValueError(f"{path} is not a CSV file with one value per column: {str(error).strip()}") from error
    if len(table) < 2:
        raise ValueError(f"{path} has {len(table)} rows below its header; expected at least 2")
    return table.rename(columns=str)


def _no_column(path: Path, name: str, table: pd.DataFrame) -> ValueError:
    return ValueError(f"{path} has no column {name!r}: {nearest(name, map(str, table.columns))}")


def _read_numbers(path: Path, column: pd.Series) -> Values:
    numbers = pd.to_numeric(column, errors="coerce").to_numpy(np.float64, na_value=np.nan)
    for wrong, expected in (
        (np.isnan(numbers) & column.notna().to_numpy(), "a number, or the variates named without this column"),
        (np.isinf(numbers), "a finite number"),
    ):
        if wrong.any():
            row, found = int(wrong.argmax()), str(column.iloc[int(wrong.argmax())])
            raise ValueError(f"{path}: {column.name} is {found!r} in row {row + 1}; expected {expected}")
    return numbers


def _holds_dates(column: pd.Series) -> bool:
    """Whether the first value of a column of texts is a date."""
    return not pd.api.types.is_numeric_dtype(column) and bool(_parse_dates(column.iloc[:1]).notna().all())


def _read_times(path: Path, column: pd.Series) -> pd.Index:
    """Dates, or whole numbers if all are."""
    if pd.api.types.is_numeric_dtype(column):
        wrong, expected = (column % 1 != 0).to_numpy(), "a date or a whole number"  # NaN is no whole number either
        parsed = column
    else:
        parsed = _parse_dates(column)
        wrong, expected = parsed.isna().to_numpy(), "a date"
    if wrong.any():
        row = int(wrong.argmax())
        found = "missing" if pd.isna(column.iloc[row]) else repr(str(column.iloc[row]))
        raise ValueError(f"{path}: {column.name} is {found} in row {row + 1}; expected {expected}")
    if pd.api.types.is_numeric_dtype(column):
        return pd.Index(parsed.astype(np.int64), name=column.name)
    return pd.DatetimeIndex(parsed, name=column.name)


def _parse_dates(column: pd.Series) -> pd.Series:
    """Dates in the one way of writing that fits most rows, and of several the most evenly; NaT for the others."""
    utc = bool(column.astype(str).str.contains(OFFSET).any())  # or summer time would make an hour twice
    found = []
    for way in ({"format": "ISO8601"}, {}, {"dayfirst": True}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that it guesses
            found.append(pd.to_datetime(column, errors="coerce", utc=utc, **way))
    iso, *guessed = found  # pandas reads even 2020-02-01 with the day first, if told so
    best = min(guessed, key=lambda parsed: (parsed.isna().sum(), _distinct_steps(parsed)))
    return iso if iso.isna().sum() <= best.isna().sum() else best


def _distinct_steps(times: pd.Series) -> int:
    """How many different steps there are from one row to the next; those between first days of months are all alike."""
    if times.dt.is_month_start.all() and times.dt.time.nunique() == 1:
        times = 12 * times.dt.year + times.dt.month
    return int(times.diff().nunique())


def _on_grid(where: str, series: Series, rows: NDArray[np.int64] | pd.Index, stamps: str, missing: float) -> Series:
    """The series with even steps: rows that were left out are missing values. ``rows`` are those of the file."""
    times, values = series.times, series.values
    if len(times) < 2:
        raise ValueError(f"{where} has 1 row; expected at least 2")
    steps = np.diff(times.asi8 if isinstance(times, pd.DatetimeIndex) else times.to_numpy(np.int64))
    usual = int(pd.Series(steps).mode()[0])
    column = times.name or "row"

    def refuse(at: NDArray[np.bool_], expected: str) -> ValueError:
        place = int(at.argmax())
        return ValueError(
            f"{where}: {column} goes from {times[place]} to {times[place + 1]} in row {rows[place + 1] + 1}; expected "
            f"{expected} (stamps=rows takes rows as they come)"
        )

    if stamps == "rows":
        freq = _fixed(times, max(usual, 1))
    else:
        for wrong, expected in ((steps == 0, "each stamp once"), (steps < 0, "rising stamps")):
            if wrong.any():
                raise refuse(wrong, expected)
        freq, count = _frequency(times, steps)
        if len(times) < (1 - missing) * count:
            even = f"even steps such as {_fixed(times, usual)}, at most {missing:.0%} of them left out"
            raise refuse(steps != usual, even)
        if len(times) < count:
            grid = _grid(times, freq)
            values = np.full((len(grid), values.shape[1]), np.nan)
            values[grid.get_indexer(times)] = series.values
            times = grid
    shares = np.isnan(values).mean(axis=0)
    if (shares > missing).any():
        channel = int(shares.argmax())
        raise ValueError(
            f"{where}: {series.names[channel]} is missing in {shares[channel]:.0%} of {len(values)} rows; "
            f"expected at most {missing:.0%}"
        )
    return Series(series.name, values, series.names, times, freq)


def _fixed(times: pd.Index, step: int) -> str:
    """The name of a step of that many units of ``times``."""
    if not isinstance(times, pd.DatetimeIndex):
        return str(step)
    wide = pd.Timedelta(step, unit=times.unit)
    if wide % DAY == pd.Timedelta(0):  # which pandas writes as 24h
        return "D" if wide == DAY else f"{wide // DAY}D"
    name: str = pd.tseries.frequencies.to_offset(wide).freqstr
    return name


def _frequency(times: pd.Index, steps: NDArray[np.int64]) -> tuple[str, int]:
    """The widest even steps that lead to all of the rising times, and how many times lie on them in all."""
    step = int(np.gcd.reduce(steps))
    freq, count = _fixed(times, step), int(steps.sum()) // step + 1
    if not isinstance(times, pd.DatetimeIndex) or len(set(times.time)) > 1:
        return freq, count
    for rule, days in (("MS", times.is_month_start), ("ME", times.is_month_end)):
        if days.all():
            months = np.diff(12 * times.year + times.month)
            every = int(np.gcd.reduce(months))
            return rule if every == 1 else f"{every}{rule}", int(months.sum()) // every + 1
    if freq == "D" and (times.day_of_week < 5).all() and len(workdays := _grid(times, "B")) < count:
        return "B", len(workdays)
    return freq, count


def _grid(times: pd.Index, freq: str) -> pd.Index:
    if isinstance(times, pd.DatetimeIndex):
        return pd.date_range(times[0], times[-1], freq=freq, name=times.name)
    return pd.Index(np.arange(times[0], times[-1] + 1, int(freq)), name=times.name)
