"""The experiment on forecasting: every model and every window, nothing trained twice, and a memory that is streamed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from titans.cli import main
from titans.experiments import forecasting
from titans.experiments.forecasting import (
    ABLATIONS,
    BUDGET,
    MODELS,
    SETTINGS,
    ForecastingExperiment,
    find_files,
    plan,
    run_forecasting,
)
from titans.experiments.forecasting_report import LABELS, PUBLISHED, error_table, forecasting_sections
from titans.experiments.forecasting_runs import load_data, split_ends, windows_of

OURS = {
    "options": {
        "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "memory_heads": 1, "patch_length": 8,
        "patch_stride": 4,
    },
    "data": {"other": {"options": {"hidden_size": 16}, "fit": {"learning_rate": 0.5}}},
}  # fmt: skip
SMALL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("lmm", "mac", "mag", "mal"), OURS),
    "patchtst": {"options": {"d_model": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "ffn_dim": 8}},
    "itransformer": {"options": {"hidden_size": 8, "n_heads": 2, "e_layers": 1, "d_ff": 8}},
    "dlinear": {},
    "nhits": {"options": {"mlp_units": [[8, 8]] * 3}},
    "last-value": {},
    "last-season": {},
}
ROWS, TEST = 400, 320  # of the file, and where its test part begins
GAP = "date,a\n" + "".join(
    f"2024-01-{1 + row // 24:02} {row % 24:02}:00,{row % 7 if row < TEST else ''}\n" for row in range(ROWS)
)  # whose test part is missing


def write_csv(path: Path, rows: int = ROWS) -> Path:
    path.parent.mkdir(exist_ok=True)
    noise = np.random.default_rng(0).normal(size=(rows, 2)).round(3)
    dates = pd.date_range("2024-01-01", periods=rows, freq="h")
    table = pd.DataFrame({"date": dates, "a": np.sin(np.arange(rows) / 4) + noise[:, 0], "b": noise[:, 1].cumsum()})
    table.to_csv(path, index=False)
    return path


def small(data: Path, **fields: Any) -> ForecastingExperiment:
    usual: dict[str, Any] = {
        "models": ("last-value", "lmm"), "horizons": (4, 8), "seeds": (0,), "look_backs": (24, 32, 48),
        "settings": SMALL, "fit": {"steps": 2, "batch_size": 4, "valid_windows": 4}, "at_a_time": 1,
    }  # fmt: skip
    return ForecastingExperiment(str(data), **usual | fields)


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Both parts with every model: the folder, and the report."""
    folder = tmp_path_factory.mktemp("forecasting")
    write_csv(folder / "data" / "toy.csv")
    parts = {"models": MODELS, "parts": ("table", "look-back"), "horizons": (4,)}
    return folder, run_forecasting(small(folder / "data", **parts), folder / "out")


def test_every_model_has_a_row_with_its_figures(everything: tuple[Path, dict[str, Any]]) -> None:
    folder, report = everything
    text = (folder / "out" / "forecasting.md").read_text()
    for name in MODELS:
        (run,) = [run for run in report["runs"] if (run["model"], run["context"], run["history"]) == (name, 24, 0)]
        assert f"| {LABELS[name]} | {run['parameters']:,} | {run['mse']:.3f} | {run['mae']:.3f} |" in text
        assert bool(run["parameters"]) == bool(run["steps"]) == (not name.startswith("last-"))
    for row in ("look-back 24", "look-back 48, memory off", "look-back 24, all before it streamed, but not read"):
        assert f"| {row} |" in text
    assert (folder / "out" / "report.html").is_file() and (folder / "out" / "forecasting-toy-example.png").is_file()
    assert json.loads((folder / "out" / "forecasting.json").read_text())["runs"] == report["runs"]


def test_a_part_less_of_the_memory_is_a_model_that_forecasts_otherwise(
    everything: tuple[Path, dict[str, Any]],
) -> None:
    found = {run["model"]: run["mse"] for run in everything[1]["runs"] if run["context"] == 24 and not run["history"]}
    assert len({found[name] for name in ("lmm", *ABLATIONS)}) == 5


def test_the_last_value_and_the_last_season_have_the_errors_of_a_loop_over_every_test_window(
    everything: tuple[Path, dict[str, Any]],
) -> None:
    folder, report = everything
    values = pd.read_csv(folder / "data" / "toy.csv").iloc[:, 1:].to_numpy()
    scaled = (values - values[:280].mean(0)) / values[:280].std(0)
    for name, season in (("last-value", 1), ("last-season", 24)):
        off = [
            scaled[t : t + 4] - scaled[t - season : t - season + (4 if season > 1 else 1)]
            for t in range(TEST, ROWS - 3)
        ]
        (run,) = [run for run in report["runs"] if run["model"] == name]
        assert run["windows"] == len(off) == 77
        assert run["mse"] == pytest.approx(np.square(off).mean(), rel=1e-5)
        assert run["mae"] == pytest.approx(np.abs(off).mean(), rel=1e-5)


def test_the_forecast_that_is_drawn_is_in_the_units_of_the_data(everything: tuple[Path, dict[str, Any]]) -> None:
    folder, report = everything
    values = pd.read_csv(folder / "data" / "toy.csv")["b"]
    example = next(run["example"] for run in report["runs"] if run["model"] == "last-value")
    assert example["channel"] == "b" and example["origin"] == TEST + 77 // 2
    assert example["values"] == pytest.approx([values[example["origin"] - 1]] * 4, abs=1e-4)


def test_what_was_trained_is_not_trained_again_unless_a_setting_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def count(run: Any) -> dict[str, Any]:
        done.append(run.name)
        figures = {name: getattr(run, name) for name in ("data", "model", "horizon", "seed", "context", "history")}
        more = {"parameters": 1, "windows": 1, "steps": 0, "mse": 1.0, "mae": 1.0, "settings": run.settings}
        return figures | more

    monkeypatch.setattr(forecasting, "do_run", count)
    file = write_csv(tmp_path / "data" / "toy.csv")
    run_forecasting(small(file, seeds=(0, 1)), tmp_path)
    first = ["toy-last-value-4-0-context24", "toy-last-value-8-0-context24", "toy-lmm-4-0-context24"]
    assert done[:3] == first and done[-2:] == ["toy-lmm-4-1-context24", "toy-lmm-8-1-context24"] and len(done) == 6
    run_forecasting(small(file, seeds=(0, 1)), tmp_path)
    assert len(done) == 6
    run_forecasting(small(file, seeds=(0, 1), settings=SMALL | {"lmm": {"fit": {"learning_rate": 0.1}}}), tmp_path)
    assert len(done) == 10 and all("-lmm-" in name for name in done[6:])
    write_csv(file, ROWS + 1)
    load_data.cache_clear()
    run_forecasting(small(file, seeds=(0, 1)), tmp_path)
    assert len(done) == 16


def test_an_interrupted_experiment_reports_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    do = forecasting.do_run

    def interrupt(run: Any) -> dict[str, Any]:
        if run.horizon == 8:
            raise KeyboardInterrupt
        return do(run)

    monkeypatch.setattr(forecasting, "do_run", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_forecasting(small(write_csv(tmp_path / "toy.csv")), tmp_path / "out")
    assert [run["horizon"] for run in json.loads((tmp_path / "out" / "forecasting.json").read_text())["runs"]] == [4]
    text = (tmp_path / "out" / "forecasting.md").read_text()
    assert "| last value | 0 |" in text and "| - | - | - | - |" in text


def test_a_run_that_fails_is_reported_and_the_others_are_done(tmp_path: Path) -> None:
    settings = SMALL | {"dlinear": {"options": {"moving_avg_window": 2}}, "lmm": {"fit": {"steps": 0}}}
    experiment = small(
        write_csv(tmp_path / "toy.csv"), horizons=(4,), models=("dlinear", "lmm", "last-value"),
        settings=settings, fit={},
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"^2 of 3 runs failed, the first one toy-dlinear-4-0-context24: .*"):
        run_forecasting(experiment, tmp_path / "out")
    text = (tmp_path / "out" / "forecasting.md").read_text()
    assert "| last value | 0 |" in text and "| toy-lmm-4-0-context24 | steps is 0; expected at least 1 " in text
    assert "Traceback" in (tmp_path / "out" / "runs" / "toy-lmm-4-0-context24.log").read_text()


def test_the_smallest_data_comes_first_and_one_seed_of_everything_before_the_next(tmp_path: Path) -> None:
    write_csv(tmp_path / "a" / "big.csv", ROWS + 100)
    write_csv(tmp_path / "b" / "tiny.csv", ROWS)
    runs = plan(small(tmp_path, seeds=(3, 5)))
    order = [(run.data, run.seed, run.model, run.horizon) for run in runs]
    assert order[:6] == [
        ("tiny", 3, "last-value", 4), ("tiny", 3, "last-value", 8), ("tiny", 3, "lmm", 4), ("tiny", 3, "lmm", 8),
        ("tiny", 5, "lmm", 4), ("tiny", 5, "lmm", 8),
    ]  # fmt: skip
    assert [name for name, *_ in order[6:]] == ["big"] * 6


def test_a_data_set_may_have_settings_of_its_own(tmp_path: Path) -> None:
    for name in ("toy", "Other1"):
        write_csv(tmp_path / f"{name}.csv")
    found = {run.data: run for run in plan(small(tmp_path, models=("lmm-linear-memory",), horizons=(4,), fit={}))}
    assert found["toy"].options == OURS["options"] | {"variant": "lmm", "memory_depth": 1}
    assert found["toy"].fit == BUDGET["fit"]
    assert found["Other1"].options["hidden_size"] == 16
    assert found["Other1"].fit == BUDGET["fit"] | {"learning_rate": 0.5}


def test_every_model_has_settings_and_a_label_and_the_settings_can_be_built() -> None:
    assert set(LABELS) == set(MODELS) == {*SETTINGS, *ABLATIONS}
    assert all(set(rows) <= set(SETTINGS) for rows in PUBLISHED.values())


def test_the_parts_are_those_of_all_comparisons() -> None:
    assert split_ends("ETTh1", 17420) == (8640, 11520, 14400)
    assert split_ends("ETTm2", 69680) == (34560, 46080, 57600)
    assert split_ends("weather", 52696) == (36887, 42157, 52696)
    assert split_ends("etth1", 17420) == split_ends("ETTh1", 17420)
    assert split_ends("ettm2", 69680) == split_ends("ETTm2", 69680)


def test_every_window_of_the_training_validation_and_test_parts_is_there(tmp_path: Path) -> None:
    (run, *_) = plan(small(write_csv(tmp_path / "toy.csv"), models=("lmm",)))
    origins = [windows.origins.tolist() for windows in windows_of(run)]
    assert origins == [list(range(24, 277)), list(range(280, 317)), list(range(320, 397))]
    assert windows_of(replace(run, model="last-season", context=8))[2].past == 24


def test_means_are_over_the_horizons_of_each_seed_and_need_all_of_them() -> None:
    def run(seed: int, horizon: int, error: float) -> dict[str, Any]:
        return {"seed": seed, "horizon": horizon, "mse": error, "mae": 2 * error, "parameters": 1000, "windows": 7}

    runs = [run(0, 4, 0.1), run(0, 8, 0.3), run(1, 4, 0.3), run(1, 8, 0.5), run(2, 4, 0.2)]
    table = error_table({"some": runs, "one": runs[:1]}, (4, 8))
    assert table.header[1:4] == ["parameters at 4", "4 MSE", "4 MAE"]
    assert table.rows[0] == [
        "some", "1,000", "0.200 ± 0.100", "0.400 ± 0.200", "0.400 ± 0.141", "0.800 ± 0.283", "0.300 ± 0.141",
        "0.600 ± 0.283",
    ]  # fmt: skip
    assert table.rows[1] == ["one", "1,000", "0.100", "0.200", "-", "-", "-", "-"]


def report_of(models: tuple[str, ...], horizons: tuple[int, ...]) -> dict[str, Any]:
    runs = [
        {
            "data": "ETTh1", "model": model, "horizon": horizon, "seed": 0, "context": 96, "history": 0, "steps": 0,
            "mse": 0.5, "mae": 0.5, "parameters": 1, "windows": 1,
        }
        for model in models
        for horizon in horizons
    ]  # fmt: skip
    experiment = {"models": models, "horizons": horizons, "look_backs": (96,), "parts": ("table",)}
    return {"experiment": experiment, "runs": runs, "failed": {}, "missing": 0}


@pytest.mark.parametrize(
    ("horizons", "apart"), [((720, 96, 192, 336), "+19.0%"), ((96, 192), "-"), ((24, 96, 192, 336, 720), "-")]
)
def test_only_means_over_the_published_horizons_are_set_against_the_published(
    horizons: tuple[int, ...], apart: str
) -> None:
    sections = forecasting_sections(report_of(("lmm",), horizons), {"ETTh1": np.zeros((9, 1))})
    assert sections[0].tables[1].rows[0] == ["LMM", "0.420", "0.421", "0.500", "0.500", apart]


def test_an_lmm_that_is_told_the_level_says_nothing_about_the_memory() -> None:
    sections = forecasting_sections(report_of(("lmm", *ABLATIONS), (96,)), {"ETTh1": np.zeros((9, 1))})
    (added,) = [section for section in sections if section.title == "What the memory adds"]
    labels = ["LMM", "LMM, memory off", "LMM, linear memory", "LMM, no momentum"]
    assert [row[0] for row in added.tables[0].rows] == labels


def test_a_streamed_run_reads_the_file_from_its_first_row(everything: tuple[Path, dict[str, Any]]) -> None:
    (run,) = [run for run in everything[1]["runs"] if run["history"]]
    assert (run["context"], run["history"], run["windows"]) == (24, 24, 77)
    assert run["mse"] != run["without_history"]["mse"]


@pytest.mark.parametrize(
    ("files", "options", "said"),
    [
        ({}, [], "has no CSV file; expected at least one, such as ETTh1.csv"),
        ({"toy": ROWS}, ["--data", "toi"], "data is 'toi': did you mean toy?"),
        ({"toy": ROWS}, ["--models", "lmn"], "models has 'lmn': did you mean lmm?"),
        ({"toy": ROWS}, ["--models", "lmm,lmm"], "models has 'lmm' more than once; expected each once"),
        ({"toy": ROWS}, ["--models", ","], "models is empty; expected at least one"),
        ({"toy": ROWS}, ["--parts", ","], "parts is empty; expected at least one"),
        ({"toy": GAP}, ["--horizons", "24"], "the test part of toy, rows 320 to 400, has no values; expected some"),
        ({"toy": ROWS}, ["--parts", "tables"], "parts has 'tables': did you mean table?"),
        ({"toy": ROWS}, ["--horizons", "50"], "horizon is 50 and the validation part of toy has 40 rows; expected a"),
        ({"toy": ROWS}, ["--horizons", "0"], "horizon is 0; expected at least 1"),
        ({"toy": 120}, [], "the training part of toy has 84 rows; expected at least 192, for a look-back of 96 and a"),
        ({"ETTh1": ROWS}, [], "ETTh1 has 400 rows; expected at least 14400, 20 months"),
        ({"toy": "date,a\n2024-01-01,x\n2024-01-02,1\n"}, [], "a is 'x' in row 1; expected a number"),
        ({"toy": "unique_id,ds,y\na,2024-01-01,1\na,2024-01-02,2\n"}, [], "expected one column per variate"),
    ],
)
def test_bad_input_is_one_sentence_and_nothing_is_written(
    files: dict[str, int | str], options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load_data.cache_clear()
    (tmp_path / "data").mkdir()
    for name, content in files.items():
        path = tmp_path / "data" / f"{name}.csv"
        if isinstance(content, str):
            path.write_text(content)
        else:
            write_csv(path, content)
    with pytest.raises(SystemExit) as end:
        main(["experiment", "forecasting", str(tmp_path / "data"), *options, "--out", str(tmp_path / "out")])
    words = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert end.value.code == 2 and said in words
    assert not (tmp_path / "out").exists()


def test_files_of_one_name_and_a_folder_that_is_not_there_are_one_sentence(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        write_csv(tmp_path / folder / "toy.csv")
    with pytest.raises(ValueError, match=r"toy.csv have the same name; expected each name once$"):
        find_files(str(tmp_path))
    with pytest.raises(ValueError, match=r"nothing is not there.*; expected a folder with CSV files, or one$"):
        find_files(str(tmp_path / "nothing"))
    assert find_files(str(tmp_path / "a" / "toy.csv")) == {"toy": str(tmp_path / "a" / "toy.csv")}


def test_the_command_writes_a_quick_report_and_prints_its_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_csv(tmp_path / "toy.csv", 1200)
    options = ["--models", "last-value,last-season", "--horizons", "96,48", "--at-a-time", "1", "--quick"]
    with pytest.raises(SystemExit) as end:
        main(["experiment", "forecasting", str(file), *options, "--out", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert end.value.code == 0 and "| last season | 0 |" in printed and "Test windows: 16 at 48." in printed
    assert str(tmp_path / "out" / "quick" / "report.html") in printed


@pytest.mark.slow
def test_runs_go_side_by_side_and_go_on_after_a_kill_and_an_interruption(tmp_path: Path) -> None:
    file = write_csv(tmp_path / "toy.csv", 1500)
    command = [
        sys.executable, "-m", "titans", "experiment", "forecasting", str(file), "--out", str(tmp_path / "out"),
        "--models", "last-value,lmm", "--horizons", "24,48,96", "--seeds", "0,1", "--steps", "30",
    ]  # fmt: skip

    def done() -> dict[str, float]:
        return {path.name: path.stat().st_mtime for path in (tmp_path / "out" / "runs").glob("*.json")}

    quiet: dict[str, Any] = {"stderr": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "start_new_session": True}
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # tests may run where Ctrl-C is ignored
    for wanted, how in ((1, signal.SIGKILL), (5, signal.SIGINT)):
        process = subprocess.Popen(command, preexec_fn=heed, **quiet)
        end = time.monotonic() + 300
        while len(done()) < wanted and time.monotonic() < end:
            time.sleep(0.1)
        os.kill(process.pid, how)
        process.wait(120)
    time.sleep(1)
    before = done()
    assert 5 <= len(before) < 9 and (tmp_path / "out" / "forecasting.md").is_file()
    time.sleep(2)
    assert done() == before  # nobody is left who trains
    subprocess.run(command, check=True, timeout=600, stdout=subprocess.DEVNULL)
    assert len(done()) == 9 and done().items() >= before.items()
