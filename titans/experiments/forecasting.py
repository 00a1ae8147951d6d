"""The paper's Table 3: forecasters trained on the same windows of the same files, and tested on every window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from titans.experiments.forecasting_report import forecasting_sections
from titans.experiments.forecasting_runs import LOOK_BACKS, Run, check_run, do_run, is_called, load_data
from titans.experiments.runs import require_each_once
from titans.experiments.workers import do_and_report, require_some
from titans.files import not_there
from titans.forecasting.training import FitSettings
from titans.models.configuration import VARIANTS
from titans.report.outcome import write_outcome
from titans.report.progress import Progress, silent
from titans.words import nearest, require_whole

# What every model is trained with: fields of FitSettings, and those that differ for data sets whose names begin so.
BUDGET: dict[str, Any] = {
    "fit": {"steps": 500, "valid_windows": 400},
    "data": {"weather": {"fit": {"batch_size": 16}}},  # 21 series in every window
}
# What is built, and fields of FitSettings. The others have the best of three learning rates on validation windows of
# ETTh1 at horizon 336, and the sizes of their authors for the data set; ours have the best of some sixty settings on
# validation windows (docs/log.md).
TITANS: dict[str, Any] = {
    "fit": {"learning_rate": 3e-3},
    "data": {"ETTm": {"options": {"hidden_size": 128, "memory_heads": 8, "patch_stride": 8}}},
}
SETTINGS: dict[str, dict[str, Any]] = {
    **{variant: TITANS for variant in VARIANTS},
    "patchtst": {
        "fit": {"learning_rate": 3e-3},
        "data": {
            "ETTh": {
                "options": {
                    "d_model": 16, "num_attention_heads": 4, "ffn_dim": 128, "ff_dropout": 0.3,
                    "positional_dropout": 0.3,
                }
            },
            "weather": {"fit": {"learning_rate": 1e-3}},
        },
    },
    "itransformer": {
        "fit": {"learning_rate": 5e-4},
        "data": {
            "ETTm": {"options": {"hidden_size": 128, "d_ff": 128}},
            "weather": {"options": {"hidden_size": 512, "d_ff": 512, "e_layers": 3}},
        },
    },
    "dlinear": {"fit": {"learning_rate": 3e-3}},
    "nhits": {"fit": {"learning_rate": 1e-3}},
    "last-value": {},
    "last-season": {},
}  # fmt: skip
# The LMM with one part less, or told the level of its series: the options that differ.
MEMORY_OFF = "lmm-memory-off"
ABLATIONS: dict[str, dict[str, Any]] = {
    MEMORY_OFF: {"memory_writes": False},
    "lmm-linear-memory": {"memory_depth": 1},
    "lmm-no-momentum": {"memory_momentum": False},
    "lmm-with-level": {"use_level": True},
}
MODELS = (*VARIANTS, *ABLATIONS, *(name for name in SETTINGS if name not in VARIANTS))
PARTS = ("table", "look-back")
QUICK = {"steps": 2, "batch_size": 4, "evaluate_every": 2, "valid_windows": 8}
QUICK_WINDOWS = 16


@dataclass(frozen=True)
class ForecastingExperiment:
    """What is trained and tested.

    Attributes:
        data: a folder with CSV files, in folders of their own or not, or one such file.
        names: of the data sets, which are the files' names without their ending; empty: all.
        models: some of ``MODELS``.
        horizons: values that are forecast.
        seeds: one run of every model for each.
        parts: some of ``PARTS``.
        look_backs: values that a forecast looks back on. The table has the first; the part ``look-back`` compares all,
            and the first with a memory that has read everything before it.
        settings: as ``SETTINGS``.
        fit: fields of FitSettings that differ for all models.
        test_windows: how many windows are tested on at most; None: all.
        at_a_time: how many runs go on side by side, with one thread each.
    """

    data: str
    names: tuple[str, ...] = ()
    models: tuple[str, ...] = MODELS
    horizons: tuple[int, ...] = (96, 192, 336, 720)
    seeds: tuple[int, ...] = (0, 1, 2)
    parts: tuple[str, ...] = ("table",)
    look_backs: tuple[int, ...] = LOOK_BACKS
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: SETTINGS)
    fit: Mapping[str, Any] = field(default_factory=dict)
    test_windows: int | None = None
    at_a_time: int = 2

    def __post_init__(self) -> None:
        lists = {name: getattr(self, name) for name in ("models", "horizons", "seeds", "parts", "look_backs")}
        require_some({"models": MODELS, "parts": PARTS}, **lists)
        require_each_once(names=self.names, **lists)
        for horizon in self.horizons:
            require_whole(horizon=horizon)
        require_whole(at_a_time=self.at_a_time)
        FitSettings(**self.fit).check()

    def quick(self) -> ForecastingExperiment:
        """A few steps of one seed on the shortest horizon."""
        return replace(
            self, seeds=self.seeds[:1], horizons=(min(self.horizons),), fit=QUICK, test_windows=QUICK_WINDOWS
        )


def run_forecasting(
    experiment: ForecastingExperiment, out: Path, progress: Progress = silent, command: str = ""
) -> dict[str, Any]:
    """Trains what is not trained yet; writes forecasting.json, forecasting.md, the page and its figures into ``out``.

    Runs that are done, and were made with the same settings, are kept. A ``ValueError`` says what is wrong before
    anything is trained, or, when all else is done and reported, which runs failed.
    """
    runs = plan(experiment)
    values = {run.data: load_data(run.path).values for run in runs}
    return do_and_report(
        runs,
        do_run,
        out,
        experiment.at_a_time,
        progress,
        {"name": "forecasting", "command": command, "experiment": asdict(experiment)},
        lambda report: write_outcome(report, "Forecasting", forecasting_sections(report, values), out),
    )


def plan(experiment: ForecastingExperiment) -> list[Run]:
    """All runs: the smallest data set first, and one seed of everything before the next.

    A ``ValueError`` says what cannot be run.
    """
    found = sorted(find_files(experiment.data, experiment.names).values(), key=lambda path: load_data(path).values.size)
    context, longest = experiment.look_backs[0], experiment.look_backs[-1]
    kinds = [(model, context, 0) for model in experiment.models if "table" in experiment.parts]
    if "look-back" in experiment.parts:
        kinds += [(model, each, 0) for each in experiment.look_backs for model in ("lmm", MEMORY_OFF)]
        kinds.append(("lmm", context, longest - context))
    runs = [
        _described(experiment, path, model, horizon, seed, context, history)
        for path in found
        for seed in experiment.seeds
        for model, context, history in dict.fromkeys(kinds)
        for horizon in experiment.horizons
        if seed == experiment.seeds[0] or not model.startswith("last-")  # which have nothing random
    ]
    for run in runs:
        check_run(run)
    return runs


def _described(
    experiment: ForecastingExperiment, path: str, model: str, horizon: int, seed: int, context: int, history: int
) -> Run:
    base = "lmm" if model in ABLATIONS else model
    layers = [
        each
        for given in (BUDGET, experiment.settings[base])
        for each in (given, *(x for start, x in given.get("data", {}).items() if is_called(Path(path).stem, start)))
    ]
    options, trained = ({k: v for each in layers for k, v in each.get(part, {}).items()} for part in ("options", "fit"))
    if base in VARIANTS:
        options |= {"variant": base, **ABLATIONS.get(model, {})}
    trained |= experiment.fit
    return Run(path, model, horizon, seed, context, history, options, trained, experiment.test_windows)


def find_files(path: str, names: Sequence[str] = ()) -> dict[str, str]:
    """CSV files by the name of their data set: a file, or those in a folder and in the folders below."""
    place = Path(path)
    if not place.exists():
        raise ValueError(f"{not_there(path)}; expected a folder with CSV files, or one")
    files = sorted(place.rglob("*.csv")) if place.is_dir() else [place]
    if not files:
        raise ValueError(f"{path} has no CSV file; expected at least one, such as ETTh1.csv")
    for name in names:
        if name not in (known := [file.stem for file in files]):
            raise ValueError(f"data is {name!r}: {nearest(name, known)}")
    chosen = [file for file in files if not names or file.stem in names]
    for file in chosen:
        same = [other for other in chosen if other.stem == file.stem]
        if len(same) > 1:
            raise ValueError(f"{same[0]} and {same[1]} have the same name; expected each name once")
    return {file.stem: str(file) for file in chosen}
