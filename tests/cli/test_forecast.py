from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.cli import commands
from titans.forecasting import read_series, trained

ROOT = Path(__file__).parents[2]
TINY = ["--field", "hidden_size=16", "--field", "num_hidden_layers=1", "--field", "dropout=0.0"]
SMALL = ["--horizon", "6", "--context", "12", *TINY]
DAYS = pd.date_range("2020-01-01", periods=80)

run = partial(commands.run, "forecast")


def wave(rows: int) -> np.ndarray:
    return 20 + 3 * np.sin(2 * np.pi * np.arange(rows) / 12)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with series to read."""
    monkeypatch.chdir(tmp_path)
    wide = pd.DataFrame({"date": DAYS, "a": wave(80), "same": 5.0})
    wide.drop(index=[7, 30]).to_csv("wide.csv", index=False)
    wide[["date", "a"]].rename(columns={"a": "b"}).to_csv("other.csv", index=False)
    wide.iloc[:20].to_csv("few.csv", index=False)
    wide.iloc[:9].to_csv("fewer.csv", index=False)
    wide.assign(a=["x"] * 80).to_csv("words.csv", index=False)
    wide.iloc[[0, 1, 1, *range(2, 80)]].to_csv("twice.csv", index=False)
    wide.iloc[::-1].to_csv("backwards.csv", index=False)
    wide.assign(a=[None] * 40 + [1.0] * 40).to_csv("missing.csv", index=False)
    wide.assign(a=[np.inf] * 80).to_csv("infinite.csv", index=False)
    parts = [
        pd.DataFrame({"unique_id": name, "ds": DAYS[:rows], "y": wave(rows) * unit})
        for name, rows, unit in (("x", 80, 1), ("y", 60, 100))
    ]
    pd.concat(parts).to_csv("long.csv", index=False)
    Path("empty.csv").write_text("")
    return tmp_path


def test_a_wave_is_learned_forecast_and_tested(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--time", "date", "--steps", "60", "--learning-rate", "1e-2", "--season", "12", "--out", "model"]
    assert run("fit", "wide.csv", *SMALL, *arguments) == 0
    said = capsys.readouterr().out
    assert "same never changes, and is forecast to stay as it is." in said
    assert "context 12, horizon 6: 39 training windows, trained and validated until 2020-03-04" in said
    assert "validation loss (quantile) 0.0" in said
    assert sorted(path.name for path in folder.joinpath("model").iterdir()) == [
        "config.json", "forecast.json", "model.safetensors", "titans_model.py",
    ]  # fmt: skip

    assert run("predict", "model", "wide.csv", "--out", "new/next.csv", "--horizon", "8") == 0
    assert "Forecast: new/next.csv and new/next.png, 8 rows after 2020-03-20" in capsys.readouterr().out
    table = pd.read_csv("new/next.csv")
    assert list(table) == ["date", "a", "a_ql0.1", "a_ql0.9", "same", "same_ql0.1", "same_ql0.9"]
    assert table["date"].tolist()[:2] == ["2020-03-21", "2020-03-22"]
    assert np.abs(table["a"] - wave(88)[80:]).max() < 0.3  # a tenth of its height
    assert table["same"].tolist() == [5.0] * 8
    assert Path("new/next.png").read_bytes()[:4] == b"\x89PNG"

    assert run("evaluate", "model", "wide.csv") == 0
    said = capsys.readouterr().out
    assert "last season" in said and "in the 80% interval" in said
    figures = json.loads(Path("model/evaluation/forecast.json").read_text())
    assert figures["windows"] == 16 - 5
    assert figures["overall"]["Titans"]["mse"] < 0.1 * figures["overall"]["last value"]["mse"]
    assert [(row["from"], row["to"]) for row in figures["by_horizon"]] == [(1, 2), (3, 3), (4, 4), (5, 6)]
    page = Path("model/evaluation/report.html").read_text()
    assert "Forecasts of wide.csv" in page and "<img" in page


def test_a_long_file_gives_a_long_forecast(folder: Path) -> None:
    assert run("fit", "long.csv", *SMALL, "--steps", "2", "--loss", "mse", "--variant", "mac") == 0
    assert run("predict", "runs/forecast", "long.csv") == 0
    table = pd.read_csv("forecast.csv")
    assert list(table) == ["unique_id", "ds", "Titans"]
    assert table["unique_id"].tolist() == ["x"] * 6 + ["y"] * 6
    assert table["ds"].iloc[[0, 6]].tolist() == ["2020-03-21", "2020-03-01"]
    assert table["Titans"].iloc[6:].min() > 100
    assert run("evaluate", "runs/forecast", "long.csv", "--out", "tested") == 0
    assert json.loads(Path("tested/forecast.json").read_text())["interval"] == ""


def test_short_series_of_a_long_file_are_skipped(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = [
        pd.DataFrame({"unique_id": name, "ds": range(50, 50 + rows), "y": wave(rows)})
        for name, rows in (("x", 80), ("y", 60), ("short", 15), ("shorter", 9))
    ]
    pd.concat(parts).to_csv("some.csv", index=False)
    assert run("fit", "some.csv", *SMALL, "--steps", "1", "--loss", "mse", "--out", "model") == 0
    said = capsys.readouterr().out
    assert "2 series are too short to learn from." in said
    assert "trained and validated until 113" in said  # not 97, the end of the other
    assert run("predict", "model", "some.csv") == 0
    said = capsys.readouterr().out
    assert "1 series with fewer than 12 rows skipped: shorter\n" in said
    assert "forecast.png, 6 rows for each of 3 series" in said
    assert pd.read_csv("forecast.csv")["unique_id"].unique().tolist() == ["x", "y", "short"]
    assert run("evaluate", "model", "some.csv") == 0
    assert "2 series with fewer than 18 rows skipped: short, shorter\n" in capsys.readouterr().out
    pd.concat(parts[2:]).to_csv("short.csv", index=False)
    assert run("evaluate", "model", "short.csv") == 2
    words = "the series short has 15 rows; expected at least the context and the horizon of the model, 18"
    assert words in capsys.readouterr().err


def test_a_forecaster_that_was_trained_with_a_history_reads_the_whole_past(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("fit", "wide.csv", *SMALL, "--steps", "2", "--history", "12", "--out", "model") == 0
    assert "context 12, history 12, horizon 6: 27 training windows" in capsys.readouterr().out
    assert json.loads(Path("model/forecast.json").read_text())["history"] == 12
    assert run("predict", "model", "wide.csv", "--whole-past") == 0
    forecaster, (series,) = trained.TrainedForecaster.load("model"), read_series("wide.csv")
    table = pd.read_csv("forecast.csv")["a"]
    np.testing.assert_allclose(table, forecaster.forecast(series, whole_past=True)[:, 0, 1], rtol=1e-6)
    assert not np.allclose(table, forecaster.forecast(series)[:, 0, 1], rtol=1e-5, atol=0)
    assert run("evaluate", "model", "wide.csv", "--whole-past") == 0
    assert json.loads(Path("model/evaluation/forecast.json").read_text())["whole_past"] is True
    assert "has read the series from its first row on" in Path("model/evaluation/report.html").read_text()


def test_rows_as_they_come_and_some_columns_are_read_so_again_for_a_forecast(folder: Path) -> None:
    assert run("fit", "twice.csv", *SMALL, "--steps", "1", "--stamps", "rows", "--columns", "a") == 0
    assert run("predict", "runs/forecast", "twice.csv") == 0
    assert list(pd.read_csv("forecast.csv")) == ["date", "a", "a_ql0.1", "a_ql0.9"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A forecaster that has hardly learned anything, and nothing is left to test it on."""
    place = tmp_path_factory.mktemp("models")
    pd.DataFrame({"date": DAYS, "a": wave(80), "same": 5.0}).to_csv(place / "data.csv", index=False)
    assert run("fit", str(place / "data.csv"), *SMALL, "--steps", "1", "--test", "0", "--out", str(place / "m")) == 0
    return place / "m"


FIT = ["--horizon", "6"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fit", "wide.csv"], "Missing option '--horizon'"),
        (["fit", "nowhere.csv", *FIT], "nowhere.csv is not there"),
        (["fit", "empty.csv", *FIT], "empty.csv is empty; expected a header and rows of values"),
        (["fit", "words.csv", *FIT], "words.csv: a is 'x' in row 1; expected a number"),
        (["fit", "twice.csv", *FIT], "in row 3; expected each stamp once"),
        (["fit", "backwards.csv", *FIT], "in row 2; expected rising stamps"),
        (["fit", "missing.csv", *FIT], "missing.csv: a is missing in 50% of 80 rows; expected at most 20%"),
        (["fit", "infinite.csv", *FIT], "infinite.csv: a is 'inf' in row 1; expected a finite number"),
        (["fit", "wide.csv", *FIT, "--time", "day"], "wide.csv has no column 'day': did you mean date?"),
        (["fit", "wide.csv", *FIT, "--columns", "a,c"], "wide.csv has no column 'c'"),
        (["fit", "wide.csv", "--horizon", "100"], "the data has 80 rows; expected at least 301 for a"),
        (["fit", "few.csv", *FIT, "--context", "12"], "the data has 20 rows; expected at least 30 for a context of 12"),
        (["fit", "wide.csv", *FIT, "--variant", "lmn"], "variant is 'lmn'; expected one of lmm, mac, mag, mal"),
        (["fit", "wide.csv", *FIT, "--tokens", "words"], "tokens is 'words'"),
        (["fit", "wide.csv", *FIT, "--loss", "log"], "loss is 'log'"),
        (["fit", "wide.csv", *FIT, "--loss", "mse", "--quantiles", "0.5"], "expected quantiles with the quantile loss"),
        (["fit", "wide.csv", *FIT, "--quantiles", "0.9,0.1"], "rising numbers between 0 and 1"),
        (["fit", "wide.csv", *FIT, "--quantiles", "low"], "--quantiles takes numbers"),
        (["fit", "wide.csv", *FIT, "--field", "dropouts=2"], "dropouts is not a field of the config: did you"),
        (["fit", "wide.csv", *FIT, "--learning-rate", "0"], "learning_rate is 0.0; expected a positive number"),
        (["fit", "wide.csv", *FIT, "--test", "1"], "expected shares that leave something to train on"),
        (["fit", "wide.csv", *FIT, "--device", "tpu9"], "device is 'tpu9'"),
        (["fit", "wide.csv", *FIT, "--out", "empty.csv"], "empty.csv is a file; expected a folder, new or empty"),
        (["predict", "nowhere", "wide.csv"], "forecast.json is not there; expected a folder written by titans"),
        (["predict", "{model}", "other.csv"], "other.csv has no column 'a'"),
        (["predict", "{model}", "fewer.csv"], "the data has 9 rows; expected at least the context of the model, 12"),
        (["predict", "{model}", "wide.csv", "--whole-past"], "expected one fitted with --history"),
        (["evaluate", "{model}", "wide.csv", "--whole-past"], "expected one fitted with --history"),
        (["fit", "wide.csv", *FIT, "--context", "12", "--history", "3"], "history is 3; expected 0, or at least"),
        (["predict", "{model}", "wide.csv", "--horizon", "0"], "'--horizon'"),
        (["predict", "{model}", "wide.csv", "--out", "."], "is a directory"),
        (["evaluate", "{model}", "wide.csv"], "follow those that the model was fitted on and its context"),
        (["evaluate", "{model}", "wide.csv", "--season", "0"], "'--season'"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence_and_nothing_is_written(
    arguments: list[str], words: str, folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [argument.format(model=model) for argument in arguments]
    commands.assert_refused(["forecast", *given], words, folder, capsys)


def test_an_interrupt_leaves_no_half_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(trained, "fit", interrupted)
    before = sorted(folder.rglob("*"))
    assert run("fit", "wide.csv", *SMALL) == 130
    assert sorted(folder.rglob("*")) == before


def test_without_its_packages_the_command_says_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run("fit", "wide.csv", *SMALL) == 2
    assert "titan-memory[forecast]" in capsys.readouterr().err


def test_help_needs_neither_torch_nor_pandas() -> None:
    code = (
        "import sys; from titans.cli import main\n"
        "try: main(['forecast', 'fit', '--help'])\n"
        "except SystemExit: print([name for name in ('torch', 'pandas', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
