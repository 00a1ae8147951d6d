"""`titans forecast`: train a forecaster on series in a CSV file, forecast what follows them, and test it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from titans.cli.common import Device, bar, check_output, names, one_sentence, pairs, require, this_command

app = typer.Typer(help="Forecast time series from CSV files.")

Data = Annotated[
    Path,
    typer.Argument(help="A CSV file with one column per variate, or a long one with the columns unique_id, ds and y."),
]
Model = Annotated[Path, typer.Argument(help="The folder of a forecaster, written by titans forecast fit.")]
WholePast = Annotated[
    bool,
    typer.Option(
        "--whole-past",
        help="Read all rows with the memory, not only those of the context; needs a forecaster fitted with --history.",
    ),
]
QUANTILES = "0.1,0.5,0.9"


@app.callback(invoke_without_command=True)
def _forecast(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command("fit")
def fit(
    data: Data,
    horizon: Annotated[int, typer.Option(min=1, help="How many values to forecast.")],
    out: Annotated[Path, typer.Option(help="The folder for the forecaster, new or empty.")] = Path("runs/forecast"),
    time: Annotated[
        str | None,
        typer.Option(
            help="The column of dates or whole numbers; by default ds, or the first column if it holds dates."
        ),
    ] = None,
    columns: Annotated[
        str | None, typer.Option(help="Only these variates, with commas between them; by default all columns.")
    ] = None,
    id: Annotated[str, typer.Option(help="The column of a long file with the name of a series.")] = "unique_id",
    target: Annotated[str, typer.Option(help="The column of a long file with the values.")] = "y",
    stamps: Annotated[
        str,
        typer.Option(help="check: stamps must rise in even steps, some may be left out; rows: rows as they come."),
    ] = "check",
    missing: Annotated[float, typer.Option(help="The largest share of a variate's values that may be missing.")] = 0.2,
    context: Annotated[
        int | None,
        typer.Option(min=1, help="How many values to look back on; by default 96, the horizon or a season."),
    ] = None,
    history: Annotated[
        int,
        typer.Option(min=0, help="How many values before these the memory reads in training, for --whole-past later."),
    ] = 0,
    season: Annotated[
        int | None, typer.Option(min=1, help="How many values make a season; by default a day, a week or a year.")
    ] = None,
    variant: Annotated[str, typer.Option(help="The model: lmm, mac, mag or mal.")] = "lmm",
    tokens: Annotated[
        str,
        typer.Option(help="patches: each variate is a sequence of its own; variates: each forecast depends on all."),
    ] = "patches",
    loss: Annotated[str, typer.Option(help="What training minimises: mse, mae, huber or quantile.")] = "quantile",
    quantiles: Annotated[
        str | None, typer.Option(help=f"The quantiles of --loss quantile; by default {QUANTILES}.")
    ] = None,
    field: Annotated[
        list[str], typer.Option(help="Change a field of the model's config, NAME=VALUE. May be repeated.")
    ] = [],  # noqa: B006
    valid: Annotated[float, typer.Option(help="The share of the rows that chooses the best weights.")] = 0.1,
    test: Annotated[float, typer.Option(help="The share of the rows, the last ones, that is left for a test.")] = 0.2,
    steps: Annotated[int, typer.Option(min=1, help="How many updates to make at most.")] = 1000,
    batch: Annotated[int, typer.Option(min=1, help="Windows per update.")] = 32,
    learning_rate: Annotated[float, typer.Option(help="The highest learning rate.")] = 1e-3,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the weights and of the order of the windows.")] = 0,
    device: Device = "auto",
) -> None:
    """Train a forecaster on the first 70% of the rows, choose the best weights on the next 10%, and save it.

    The last 20% are left for `titans forecast evaluate`; with --test 0 the forecaster learns from all rows.
    """
    _require("fit")

    from titans.forecasting.data import read_series
    from titans.forecasting.trained import constant_channels, fit_series
    from titans.forecasting.training import FitSettings
    from titans.models.tokenizer import check_new_folder

    reading: dict[str, Any] = {"time": time, "id": id, "target": target, "stamps": stamps, "missing": missing}
    with one_sentence((ValueError, TypeError)):
        check_new_folder(out)
        series = read_series(data, columns=names(columns), **reading)
        reading |= {"time": series[0].times.name, "columns": [] if series[0].name else list(series[0].names)}
        fields: dict[str, Any] = {"variant": variant, "tokens": tokens, "loss": loss}
        if quantiles is not None or loss == "quantile":
            fields["quantiles"] = _levels(quantiles or QUANTILES)
        settings = FitSettings(
            steps=steps,
            batch_size=batch,
            learning_rate=learning_rate,
            seed=seed,
            evaluate_every=max(1, min(100, steps // 5)),
        )
        with bar("training", steps) as move:
            trained = fit_series(
                series,
                horizon,
                context,
                history,
                valid,
                test,
                season,
                fields | pairs(field, "--field"),
                settings,
                device,
                reading,
                move,
            )
        trained.save(out)
    fitted, seen = trained.about.fitted, trained.about.seen
    for name in constant_channels(series):
        typer.echo(f"{name} never changes, and is forecast to stay as it is.")
    if fitted["series"][0] < fitted["series"][1]:
        short = fitted["series"][1] - fitted["series"][0]
        typer.echo(f"{short} series {'is' if short == 1 else 'are'} too short to learn from.")
    typer.echo(
        f"{variant}, {fitted['parameters']:,} parameters, context {trained.model.config.context_length}, "
        f"{f'history {history}, ' if history else ''}horizon {horizon}: {fitted['windows'][0]:,} training windows, "
        f"trained and validated until {max(seen.values())}"
    )
    typer.echo(
        f"validation loss ({loss}) {fitted['valid']:.4f} on {fitted['windows'][1]:,} windows, step {fitted['steps']:,}"
    )
    typer.echo(f"Forecaster: {out}")


@app.command("predict")
def predict(
    model: Model,
    data: Data,
    out: Annotated[Path, typer.Option(help="Write the forecasts to this CSV file, and a plot beside it.")] = Path(
        "forecast.csv"
    ),
    horizon: Annotated[
        int | None,
        typer.Option(min=1, help="How many values to forecast; more than in training by going on from forecasts."),
    ] = None,
    whole_past: WholePast = False,
    device: Device = "auto",
) -> None:
    """Forecast what follows the last row, in the units and the layout of the data."""
    _require("predict")
    picture = check_output(out).with_suffix(".png")
    check_output(picture)

    from titans.files import write_atomically
    from titans.forecasting.trained import as_table, draw_forecasts, long_enough

    with one_sentence():
        trained, series = _load(model, data, device)
        context = trained.model.config.context_length
        series, skipped = long_enough(series, context, "the context of the model")
        forecasts = []
        with bar("forecasting", len(series)) as move:
            for done, one in enumerate(series):
                move(done, len(series), one.name)
                forecasts.append(trained.forecast(one, horizon, whole_past))
        table = as_table(trained, series, forecasts)
        last = "the last row of each series" if len(series) > 1 else series[0].times[-1]
        png = draw_forecasts(trained, series, forecasts, f"What follows {last}")
    write_atomically(out, table.to_csv(index=False, float_format="%.8g").encode())
    write_atomically(picture, png)
    _say_skipped(skipped, context)
    where = f"for each of {len(series)} series" if len(series) > 1 else f"after {last}"
    rows = len(forecasts[0])
    typer.echo(f"Forecast: {out} and {picture}, {rows} row{'' if rows == 1 else 's'} {where}")


@app.command("evaluate")
def evaluate(
    model: Model,
    data: Data,
    out: Annotated[
        Path | None, typer.Option(help="The folder for the report; by default evaluation in that of the forecaster.")
    ] = None,
    season: Annotated[int | None, typer.Option(min=1, help="How many values make a season.")] = None,
    whole_past: WholePast = False,
    device: Device = "auto",
) -> None:
    """Test a forecaster on every window of rows that it has not seen, beside the last value and the last season."""
    _require("evaluate")

    import time

    from rich.console import Console

    from titans.files import locked
    from titans.forecasting.testing import evaluate_series, evaluation_sections
    from titans.report.outcome import write_outcome
    from titans.report.page import print_table

    out = out or model / "evaluation"
    with one_sentence():
        trained, series = _load(model, data, device)
        with bar("testing") as move:
            figures = evaluate_series(trained, series, season, whole_past, move)
        report = {"name": "forecast", "command": this_command(), "date": time.strftime("%Y-%m-%d"), **figures}
        sections = evaluation_sections(trained, series, report)
        with locked(out, "titans forecast evaluate"):
            page = write_outcome(report, f"Forecasts of {data.name}", sections, out)
    console = Console()
    for section in sections[:2]:
        for table in section.tables:
            print_table(console, table)
    _say_skipped(figures["skipped"], figures["context"] + figures["horizon"])
    typer.echo(f"Report: {page}, {out / 'forecast.json'} and .md")


def _require(verb: str) -> None:
    for package in ("transformers", "pandas", "matplotlib", "jinja2"):
        require(f"forecast {verb}", package, "forecast")


def _load(model: Path, data: Path, device: str) -> Any:
    """A forecaster, and series read as those that it was fitted on."""
    from titans.forecasting.data import read_series
    from titans.forecasting.trained import TrainedForecaster

    trained = TrainedForecaster.load(model, device)
    return trained, read_series(data, **trained.about.reading)


def _say_skipped(names: list[str], rows: int) -> None:
    if names:
        some = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        typer.echo(f"{len(names)} series with fewer than {rows} rows skipped: {some}")


def _levels(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--quantiles takes numbers with commas between them, got '{text}'.") from None
