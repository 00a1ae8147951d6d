"""Language modelling at equal parameters and equal tokens: our models beside those they are compared with."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from titans.evaluation.measure import Evaluation
from titans.experiments.runs import Job, check_jobs, fields_of, require_each_once, run_folder, run_jobs
from titans.files import METRICS, RESULT
from titans.models.baselines import NAMES, SIZES, best
from titans.models.configuration import VARIANTS
from titans.report.outcome import read_figures, write_outcome
from titans.report.page import Figure, Section, Table, show
from titans.report.plots import Curve, plot_dots, plot_lines
from titans.report.progress import Progress, silent
from titans.tasks.prepared import load_prepared
from titans.training.callbacks import read_metrics
from titans.training.config import TrainConfig
from titans.words import nearest

MODELS = ("lmm", "mac", "mag", "mal", "transformer++", "mamba2", "gated-deltanet", "sliding-window")
TITLE = "Language modelling at equal parameters and tokens"
QUICK_STEPS = 4
JUDGED = 131_072  # tokens of the only validation of a run whose curve is not drawn
# Table 1 of the paper, 400M parameters and 15B tokens: perplexity on WikiText.
PAPER = {
    "mag": 23.59, "mal": 23.93, "lmm": 25.03, "gated-deltanet": 25.47, "mac": 25.61, "mamba2": 26.34,
    "transformer++": 30.63,
}  # fmt: skip


@dataclass(frozen=True)
class LMExperiment:
    """What to compare, and how.

    Attributes:
        data: a prepared folder with a validation split.
        out: folder of the experiment.
        models: names of :data:`titans.models.baselines.NAMES`, or labels of ``rows``.
        rows: models that a name does not describe: fields of ``TrainConfig.model`` by label.
        size: name of :data:`titans.models.baselines.SIZES`: all models get its number of parameters.
        seeds: one run of every model for each.
        tokens: per run.
        budgets: tokens per run of single models.
        length, batch_tokens, warmup, weight_decay: as in a training config, the same for all models.
        learning_rate: of all models; None: of each the best that is known.
        rates: learning rates of single models.
        fields: fields of our four models' configs, such as ``memory_mode``; or, as ``MODEL.FIELD``, of one model's.
        tests: what each trained model is tested with.
        evaluations: how many validations there are along a run.
        eval_tokens: tokens per validation along a run, at most.
        final_eval_tokens: tokens of the one at its end; None: all.
        device: as in a training config.
        at_a_time: how many runs go on side by side, with one thread each.
    """

    data: str
    out: str
    models: tuple[str, ...] = MODELS
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    size: str = "1.5m"
    seeds: tuple[int, ...] = (0, 1, 2)
    tokens: int = 1_500_000
    budgets: dict[str, int] = field(default_factory=dict)
    length: int = 256
    batch_tokens: int = 1024
    learning_rate: float | None = None
    warmup: float = 0.05
    weight_decay: float = 0.1
    rates: dict[str, float] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)
    tests: tuple[Evaluation, ...] = ()
    evaluations: int = 4
    eval_tokens: int = 16_384
    final_eval_tokens: int | None = None
    device: str = "auto"
    at_a_time: int = 2

    def __post_init__(self) -> None:
        for name in self.models:
            if name not in NAMES and name not in self.rows:
                raise ValueError(f"models has {name!r}: {nearest(name, NAMES)}")
        if self.size not in SIZES:
            raise ValueError(f"size is {self.size!r}: {nearest(self.size, SIZES)}")
        if not self.models or not self.seeds:
            raise ValueError("there is nothing to run; expected at least one model and one seed")
        require_each_once(models=self.models, seeds=self.seeds)
        for name in ("tokens", "length", "batch_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")

    def quick(self) -> LMExperiment:
        """A few steps of one seed: shows that it works, not that it learns."""
        return replace(
            self,
            seeds=self.seeds[:1],
            tokens=min(self.tokens, QUICK_STEPS * self.batch_tokens),
            evaluations=1,
            eval_tokens=self.batch_tokens,
            final_eval_tokens=self.batch_tokens,
        )

    def judged_at_the_end(self) -> LMExperiment:
        """One validation, at the end, of :data:`JUDGED` tokens at most: for comparisons that draw no curves."""
        return replace(self, evaluations=1, final_eval_tokens=min(JUDGED, self.final_eval_tokens or JUDGED))

    def config(self, model: str, seed: int) -> TrainConfig:
        """The training run of a model and a seed."""
        steps = max(1, self.budgets.get(model, self.tokens) // self.batch_tokens)
        every = max(1, steps // max(1, self.evaluations))
        described = {"name": model, "size": self.size} | self.rows.get(model, {})
        rate = self.learning_rate
        if rate is None:
            rate = best(described["name"], described["size"], _vocabulary(self.data)).rate
        return TrainConfig(
            model=fields_of(self.fields, model, described["name"]) | described,
            data=self.data,
            output=str(run_folder(Path(self.out), model, seed)),
            length=self.length,
            batch_tokens=self.batch_tokens,
            micro_batch=max(1, self.batch_tokens // self.length),
            steps=steps,
            learning_rate=self.rates.get(model, rate),
            warmup=self.warmup,
            weight_decay=self.weight_decay,
            seed=seed,
            log_every=max(1, min(20, every)),
            memory_stats_every=every,
            eval_every=every,
            eval_tokens=self.eval_tokens,
            final_eval_tokens=self.final_eval_tokens,
            save_every=max(1, steps // 4),
            keep=1,
            trackers=[],
            device=self.device,
        )


def _vocabulary(data: str) -> int | None:
    """How many different tokens prepared data has; None where it cannot be read, which whoever trains on it is told."""
    try:
        return load_prepared(data).vocab_size
    except ValueError:
        return None


def run_experiment(
    experiment: LMExperiment, progress: Progress = silent, command: str = "", equal_time: bool = False
) -> dict[str, Any]:
    """Trains what is not trained yet; writes lm.json, lm.md, the page and its figures into the experiment's folder.

    Runs that were interrupted go on; those that are complete, and were made with the same settings, are kept. A
    ``ValueError`` says what is wrong before anything is trained.

    Args:
        equal_time: train every model once more, on as many tokens as take it the CPU time of the median model above.
    """
    report = train_models(experiment, progress) | {"command": command}
    sections = [lm_section(report)]
    if equal_time:
        report["equal_time"] = _train_equally_long(experiment, report["table"], progress)
        sections.append(equal_time_section(report["equal_time"]))
    write_outcome(report, TITLE, sections, Path(experiment.out))
    return report


def _train_equally_long(
    experiment: LMExperiment, table: Sequence[dict[str, Any]], progress: Progress
) -> dict[str, Any]:
    """The runs of every model on as many tokens as the median CPU time of ``table`` allows it."""
    budgets = equal_budgets(experiment, table)
    out = str(Path(experiment.out) / "equal-time")
    return train_models(replace(experiment, budgets=budgets, out=out), progress) | {"budgets": budgets}


def equal_budgets(experiment: LMExperiment, table: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Tokens by model, whole batches, that take every model the median CPU time of ``table``."""
    minutes = statistics.median(row["cpu_minutes"] for row in table)
    batch = experiment.batch_tokens
    return {
        row["model"]: max(1, round(experiment.tokens * minutes / row["cpu_minutes"] / batch)) * batch for row in table
    }


def train_models(experiment: LMExperiment, progress: Progress = silent) -> dict[str, Any]:
    """Trains what is not trained yet; returns every run's figures and their summary."""
    prepared = load_prepared(experiment.data)
    if "validation" not in prepared.splits:
        raise ValueError(f"{experiment.data} has no validation split; expected one: titans prepare --validation")
    runs = [(model, seed) for seed in experiment.seeds for model in experiment.models]
    configs = {run: experiment.config(*run) for run in runs}
    jobs = [Job(config, experiment.tests) for config in configs.values()]
    check_jobs(jobs)
    run_jobs(jobs, experiment.at_a_time, progress)
    report: dict[str, Any] = {
        "name": "lm",
        "experiment": asdict(experiment),
        "data": {"vocabulary": prepared.vocab_size, "splits": asdict(prepared)["splits"]},
        "date": time.strftime("%Y-%m-%d"),
        "runs": [_read_run(model, seed, configs[model, seed]) for model, seed in runs],
    }
    report["table"] = summarise_runs(report["runs"])
    return report


def _read_run(model: str, seed: int, config: TrainConfig) -> dict[str, Any]:
    """The figures of a finished run."""
    folder = Path(config.output)
    result = read_figures(folder / RESULT)
    points: dict[int, float | None] = {}
    for line in read_metrics(folder / METRICS):
        if loss := line.get("eval_loss"):  # the validation at the end reads more than those before
            points.setdefault(line["step"], loss if math.isfinite(loss) else None)
    curve = [(step * config.batch_tokens, loss) for step, loss in points.items()]
    return {"model": model, "seed": seed, "curve": curve, "learning_rate": config.learning_rate, **result}


def summarise_runs(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and spread of every model over its seeds, the best first; None for one that diverged with any of them."""
    rows = []
    for model in dict.fromkeys(run["model"] for run in runs):
        mine = [run for run in runs if run["model"] == model]
        losses = [run["eval_loss"] for run in mine]
        mean = None if None in losses else statistics.fmean(losses)
        rows.append(
            {
                "model": model,
                "parameters": int(mine[0]["parameters"]),
                "loss": mean,
                "spread": statistics.stdev(losses) if len(losses) > 1 and mean is not None else None,
                "losses": losses,
                "perplexity": None if mean is None else math.exp(min(mean, 700.0)),  # more overflows
                "learning_rate": mine[0]["learning_rate"],
                "cpu_minutes": statistics.fmean(run["cpu_seconds"] for run in mine) / 60,
                "paper": PAPER.get(model),
            }
        )
    return sorted(rows, key=lambda row: math.inf if row["loss"] is None else row["loss"])


def lm_section(report: dict[str, Any]) -> Section:
    """The final losses as a table and with every seed as a dot, and the losses along the training."""
    experiment, runs = report["experiment"], report["runs"]
    seeds = f"seed{'s' if len(experiment['seeds']) > 1 else ''} {', '.join(map(str, experiment['seeds']))}"
    about = (
        f"Validation loss in nats per token after {int(runs[0]['tokens']):,} training tokens, length "
        f"{experiment['length']}, batches of {experiment['batch_tokens']:,} tokens, a vocabulary of "
        f"{report['data']['vocabulary']:,}, {seeds}."
    )
    header = ["model", "parameters", "loss", "±", "each seed", "perplexity", "learning rate", "CPU minutes per run"]
    rows = [
        [
            row["model"],
            f"{row['parameters']:,}",
            show(row["loss"]),
            "" if row["spread"] is None else f"{row['spread']:.3f}",
            ", ".join(map(show, row["losses"])),
            show(row["perplexity"], ".2f"),
            f"{row['learning_rate']:g}",
            f"{row['cpu_minutes']:.1f}",
            "" if row["paper"] is None else f"{row['paper']:.2f}",
        ]
        for row in report["table"]
    ]
    caption = "Best first; ± is the standard deviation over the seeds."
    table = Table([*header, "paper's perplexity at 400M"], rows, caption)
    names = [row["model"] for row in report["table"]]
    tokens = sorted({count for run in runs for count, _ in run["curve"]})
    lines = [
        Curve(name, _mean_curve(runs, name, tokens), style=index, dashed=name not in VARIANTS)
        for index, name in enumerate(names)
    ]
    dots = [
        Curve(row["model"], [row["loss"]], runs=[[loss] for loss in row["losses"]], style=index)
        for index, row in enumerate(report["table"])
    ]
    loss = "validation loss (nats per token)"
    figures = [
        Figure(
            "lm-training",
            plot_lines(tokens, lines, "Loss along the training", "training tokens", loss),
            "Validation loss against training tokens, one line per model",
            "Means over the seeds.",
        ),
        Figure(
            "lm-final",
            plot_dots(dots, "Loss at the end", loss),
            "Final validation loss, one row per model, one dot per seed",
            "Dots are seeds, strokes their mean.",
        ),
    ]
    return Section("Validation loss", [about], [table], figures)


def equal_time_section(report: dict[str, Any]) -> Section:
    """The final losses of runs that took about as long."""
    about = "The same models, each on as many tokens as the median of the CPU times above allows it."
    rows = [
        [
            row["model"],
            f"{report['budgets'][row['model']]:,}",
            show(row["loss"]),
            "" if row["spread"] is None else f"{row['spread']:.3f}",
            ", ".join(map(show, row["losses"])),
            f"{row['cpu_minutes']:.1f}",
        ]
        for row in report["table"]
    ]
    header = ["model", "training tokens", "loss", "±", "each seed", "CPU minutes per run"]
    return Section("Equal CPU time", [about], [Table(header, rows, "Best first.")])


def _mean_curve(runs: Sequence[dict[str, Any]], model: str, tokens: Sequence[int]) -> list[float | None]:
    """The mean loss of a model's runs after each number of tokens; None where a run has none."""
    curves = [dict(run["curve"]) for run in runs if run["model"] == model]
    found = [[loss for curve in curves if (loss := curve.get(count)) is not None] for count in tokens]
    return [statistics.fmean(losses) if len(losses) == len(curves) else None for losses in found]
