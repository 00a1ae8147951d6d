from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from titans.forecasting.data import Series, read_series, season_of


def write(path: Path, text: str, encoding: str = "utf-8") -> Path:
    path.write_text(text, encoding=encoding)
    return path


def wide(path: Path, times: pd.DatetimeIndex | list[str]) -> Path:
    """A file with a date and the number of its row."""
    pd.DataFrame({"date": times, "a": range(len(times))}).to_csv(path, index=False)
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "data.csv"


def read_one(path: Path, **options: object) -> Series:
    (series,) = read_series(path, **options)  # type: ignore[arg-type]
    return series


def test_a_wide_file_is_one_series_of_all_columns_but_the_dates(file: Path) -> None:
    series = read_one(write(file, "date,a,b\n2020-01-01,1,2.5\n2020-01-02,,-1e3\n2020-01-03,3,4\n"), missing=0.4)
    assert series.name == "" and series.names == ("a", "b") and series.freq == "D"
    np.testing.assert_equal(series.values, [[1, 2.5], [np.nan, -1000], [3, 4]])
    assert list(series.times) == list(pd.date_range("2020-01-01", periods=3))
    following = series.following(2)
    assert following.name == "date" and list(following) == list(pd.date_range("2020-01-04", periods=2))


def test_a_long_file_is_one_series_per_id_in_any_order_of_rows(file: Path) -> None:
    rows = ["007,2020-01-01,1", "b,2020-01-05,5", "007,2020-01-02,2", "b,2020-01-06,6", "b,2020-01-07,7"]
    first, second = read_series(write(file, "\n".join(["unique_id,ds,y", *rows])))
    assert (first.name, second.name) == ("007", "b")
    assert first.names == ("y",)
    assert first.values.tolist() == [[1], [2]] and second.values.tolist() == [[5], [6], [7]]


def test_columns_of_a_long_file_may_have_other_names_and_others_are_left_out(file: Path) -> None:
    write(file, "shop,weather,day,sold\nx,sunny,1,4\nx,rainy,2,5\n")
    series = read_one(file, id="shop", time="day", target="sold")
    assert series.names == ("sold",) and series.times.tolist() == [1, 2]


def test_variates_can_be_chosen(file: Path) -> None:
    write(file, "date,city,a,b\n2020-01-01,Rome,1,2\n2020-01-02,Rome,3,4\n")
    assert read_one(file, columns=["b"]).values.tolist() == [[2], [4]]


def test_without_dates_rows_are_counted_and_a_column_of_whole_numbers_is_time_if_named(file: Path) -> None:
    write(file, "year,a\n1990,5\n1992,6\n1994,7\n")
    assert read_one(file).names == ("year", "a")
    series = read_one(file, time="year")
    assert series.names == ("a",) and series.freq == "2" and series.following(2).tolist() == [1996, 1998]


@pytest.mark.parametrize("freq", ["15min", "h", "D", "B", "7D", "MS", "ME", "3MS", "12MS"])
def test_rows_that_were_left_out_are_missing_values(freq: str, file: Path) -> None:
    times = pd.date_range("2019-02-01" if "M" in freq else "2019-02-04", periods=60, freq=freq)
    series = read_one(wide(file, times.delete([7, 30, 31])))
    assert series.freq == freq
    assert list(series.times) == list(times)
    assert np.flatnonzero(np.isnan(series.values[:, 0])).tolist() == [7, 30, 31]
    assert list(series.following(3)) == list(pd.date_range(times[-1], periods=4, freq=freq)[1:])


@pytest.mark.parametrize(
    ("times", "first"),
    [
        (["13.01.2020", "14.01.2020"], "2020-01-13"),
        (["11/02/2020", "12/02/2020", "13/02/2020"], "2020-02-11"),  # the third says which number is the day
        (["01/31/2020", "02/01/2020"], "2020-01-31"),
        ([f"{day:02}/02/2020" for day in range(3, 13)], "2020-02-03"),  # even steps only if the day comes first
        ([f"{month}/1/{year}" for year in (2019, 2020) for month in range(1, 13)], "2019-01-01"),  # of months
        ([f"01/{month:02}/{year}" for year in (2019, 2020) for month in range(1, 13)], "2019-01-01"),
        (["2020-01-01", "2020-01-01 12:00:00", "2020-01-02"], "2020-01-01"),
        (["2020-03-29 01:00:00+01:00", "2020-03-29 03:00:00+02:00"], "2020-03-29 00:00:00+00:00"),  # summer time
    ],
)
def test_dates_are_read_however_they_are_written(times: list[str], first: str, file: Path) -> None:
    series = read_one(wide(file, times))
    assert series.times[0] == pd.Timestamp(first)
    assert len(series) == len(times)


def test_a_year_first_is_followed_by_the_month(file: Path) -> None:
    times = [f"2020-{month:02}-02" for month in range(1, 13)]
    assert read_one(wide(file, times), stamps="rows").times[1] == pd.Timestamp("2020-02-02")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1"])
@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_letters_beyond_ascii_and_other_separators_are_read(encoding: str, separator: str, file: Path) -> None:
    rows = [["date", "µmol/m²"], ["2020-01-01", "1"], ["2020-01-02", "2"]]
    write(file, "\n".join(separator.join(row) for row in rows), encoding)
    assert read_one(file).names == ("µmol/m²",)


def test_rows_can_be_taken_as_they_come(file: Path) -> None:
    series = read_one(wide(file, ["2020-01-01", "2020-01-02", "2020-01-02", "2020-01-09", "2020-01-10"]), stamps="rows")
    assert series.values[:, 0].tolist() == [0, 1, 2, 3, 4]
    assert series.freq == "D" and series.following(1)[0] == pd.Timestamp("2020-01-11")


@pytest.mark.parametrize(
    ("freq", "season"),
    [("h", 24), ("15min", 96), ("D", 7), ("B", 5), ("7D", 52), ("MS", 12), ("3ME", 4), ("12MS", None), ("7h", None),
     ("2D", None), ("1", None)],
)  # fmt: skip
def test_a_season_is_a_day_a_week_or_a_year(freq: str, season: int | None) -> None:
    assert season_of(freq) == season


DATES = [f"2020-01-{day:02}" for day in range(1, 11)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "data.csv is empty; expected a header and rows"),
        ("date,a\n", "data.csv has 0 rows below its header; expected at least 2"),
        ("date,a\n2020-01-01,1\n", "data.csv has 1 rows below"),
        ("date\n2020-01-01\n2020-01-02\n", "no column besides date; expected at least one variate"),
        ("date,a\n2020-01-01,1\n2020-01-02,one\n", "data.csv: a is 'one' in row 2; expected a number"),
        ("date,a\n2020-01-01,1\n2020-01-02,1;5\n", "a is '1;5' in row 2"),
        ("date,a\n2020-01-01,-inf\n2020-01-02,1\n", "a is '-inf' in row 1; expected a finite number"),
        ("date,a\n2020-01-01,1\n2020-02-30,1\n", "date is '2020-02-30' in row 2; expected a date"),
        ("date,a\n2020-01-01,1\n,1\n2020-01-03,1\n", "date is missing in row 2; expected a date"),
        ("date,a\n2020-01-01,1,2\n2020-01-02,1\n", "not a CSV file with one value per column"),
        ("date,a\n2020-01-01,1\n2020-01-02,1,2\n", "not a CSV file with one value per column"),
        ("date,a\n2020-01-01,1\n2020-01-02,1\n2020-01-02,2\n",
         "date goes from 2020-01-02 00:00:00 to 2020-01-02 00:00:00 in row 3; expected each stamp once"),
        ("date,a\n2020-01-02,1\n2020-01-01,1\n", "to 2020-01-01 00:00:00 in row 2; expected rising stamps"),
        ("date,a\n" + "".join(f"{day},1\n" for day in (*DATES, "2021-01-01")),
         "to 2021-01-01 00:00:00 in row 11; expected even steps such as D, at most 20% of them left out"),
        ("date,a\n" + "".join(f"{day} 00:0{i * i % 7}:00,1\n" for i, day in enumerate(DATES)), "expected even steps"),
        ("date,a,b\n" + "".join(f"{day},1,\n" for day in DATES), "b is missing in 100% of 10 rows; expected at most"),
        ("unique_id,a\nx,1\ny,2\n", "data.csv has no column 'ds': expected one of unique_id, a"),
        ("unique_id,ds,y\nx,2020-01-01,1\n,2020-01-01,2\n", "unique_id is missing in row 2; expected the name"),
        ("unique_id,ds,y\nx,2020-01-01,1\nx,2020-01-02,1\ny,2020-01-01,2\n", "data.csv, y has 1 row; expected"),
        ("unique_id,ds,y\nx,2,1\ny,1,1\nx,2,1\ny,2,1\n", "data.csv, x: ds goes from 2 to 2 in row 3; expected each"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_one_sentence(text: str, words: str, file: Path) -> None:
    with pytest.raises(ValueError) as error:
        read_series(write(file, text))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"time": "dat"}, "has no column 'dat': did you mean date?"),
        ({"columns": ["b"]}, "has no column 'b'"),
        ({"id": "name"}, "has no column 'name'"),
        ({"stamps": "row"}, "stamps is 'row': did you mean rows?"),
        ({"missing": 1.0}, r"missing is 1.0; expected a share in [0, 1)"),
        ({"time": "a"}, "a is '0.5' in row 1; expected a date or a whole number"),
    ],
)
def test_a_wrong_option_is_one_sentence(options: dict[str, object], words: str, file: Path) -> None:
    write(file, "date,a\n2020-01-01,0.5\n2020-01-02,2\n")
    with pytest.raises(ValueError) as error:
        read_one(file, **options)
    assert words in str(error.value)


def test_a_file_that_is_not_there_and_a_folder_are_refused(file: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.csv is not there"):
        read_series(file)
    with pytest.raises(ValueError, match="is a folder; expected a CSV file"):
        read_series(file.parent)
