"""The page of the experiment on DNA: accuracies with their spread, what the memory adds, and what is confused."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from titans.experiments.workers import mean_and_spread, missing_section
from titans.models.configuration import VARIANTS
from titans.report.page import Figure, Section, Table
from titans.report.plots import Curve, plot_dots, plot_heat

LABELS = {
    "lmm": "Titans LMM",
    "mac": "Titans MAC",
    "mag": "Titans MAG",
    "mal": "Titans MAL",
    "mamba2": "Mamba2",
    "llama": "Llama",
    "cnn": "CNN",
    "cnn-strands": "CNN, both strands",
    "word-counts": "Counts of 4-letter words",
    "lmm-memory-off": "LMM, memory off",
    "lmm-linear": "LMM, linear memory",
    "lmm-no-momentum": "LMM, no momentum",
    "lmm-pretrained": "LMM, pre-trained",
    "lmm-shuffled": "LMM, shuffled labels",
}
ADDED = ("lmm-memory-off", "lmm-linear", "lmm-no-momentum", "lmm-pretrained")
# Table 4 of the paper, in percent: models that were pre-trained on much DNA, then trained on all of the train split.
PUBLISHED = {
    "enhancers_cohn": {"lmm": 75.2, "mamba2": 73.0, "llama": 73.4, "cnn": 69.5},
    "enhancers_ensembl": {"lmm": 89.6, "llama": 89.5, "cnn": 68.9},
    "ensembl_regulatory": {"lmm": 89.3, "llama": 89.9, "cnn": 93.3},
    "nontata_promoters": {"lmm": 96.6, "mamba2": 96.6, "llama": 94.4, "cnn": 84.6},
    "ocr_ensembl": {"lmm": 79.9, "llama": 79.5, "cnn": 68.0},
}
ABOUT = (
    "Every sequence model reads the same tokens, each the mean of the embeddings of {stride} words of {word} letters, "
    "has about as many parameters in two layers (MAC, MAG and MAL, whose layers have memory and attention, in one), "
    "and is trained alike: on a random strand of each sequence, and tested by the mean of both strands' logits. The "
    "CNN is that of the Genomic Benchmarks paper, trained as there, but with cross-entropy; once more with both "
    "strands. Counts of words are a logistic regression, which knows no order."
)

# Data sets that the settings were chosen on, by parts of their names.
TUNED_ON = ("enhancers_cohn", "nontata_promoters")
TUNED = (
    "The settings were chosen on validation parts inside the training folds of fold 0, whose sequences are test data "
    "of the other folds: fold 0 alone is untouched by the choice, and has a column of its own."
)


def genomics_sections(report: Mapping[str, Any]) -> list[Section]:
    """A section for each data set, and one on what the memory adds."""
    rows = report["summary"]
    sections = [
        _data_section(name, about, [row for row in rows if row["data"] == name], report["experiment"])
        for name, about in report["data"].items()
        if any(row["data"] == name for row in rows)
    ]
    added = _added_table(rows)
    if added.rows:
        text = (
            "The accuracy of the LMM minus that of the LMM with one thing changed, in points, in the same folds: above "
            "0, the memory, its depth or its momentum helps, or pre-training hurts."
        )
        sections.append(Section("What the memory adds", [text], [added]))
    return [*sections, *missing_section(report)]


def _data_section(
    name: str, about: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], experiment: Mapping[str, Any]
) -> Section:
    copies = "" if about["copies"] is None else f", of which {about['copies']:,} have a near copy in the same fold"
    facts = (
        f"{about['sequences']:,} sequences of up to {about['longest']:,} nucleotides{copies}. Protocol: "
        f"{about['protocol']}. The largest class has {about['majority']:.1%} of them."
    )
    published = next((figures for part, figures in PUBLISHED.items() if part in name), {})
    tuned = about["folds"] > 1 and any(part in name for part in TUNED_ON)
    header = ["model", "accuracy (%)", *(["fold 0 (%)"] if tuned else []), "one strand (%)", "MCC", "published (%)"]
    header += ["runs", "tested", "parameters", "seconds"]
    lines = []
    for row in rows:
        first = [value for key, value in row["accuracies"].items() if key.startswith("0/")]
        shares = [list(row["accuracies"].values()), *([first] if tuned else []), row["one_strand"]]
        lines.append([
            LABELS[row["model"]], *(mean_and_spread([100 * value for value in each], ".1f") for each in shares),
            mean_and_spread(row["mcc"]), f"{published[row['model']]:.1f}" if row["model"] in published else "-",
            f"{row['runs']}", f"{row['test']:,}", f"{row['parameters']:,}", f"{row['seconds']:.0f}",
        ])  # fmt: skip
    caption = (
        "Means ± standard deviations over folds; MCC is Matthews' correlation coefficient, seconds are CPU time per "
        "run. Published: the paper's Table 4, of larger models that were pre-trained on other DNA and trained on the "
        "whole train split (Mamba beside Mamba2, Transformer++ beside Llama)."
    )
    tables = [Table(header, lines, caption)]
    curves = [
        Curve(
            LABELS[row["model"]], [100 * statistics.fmean(row["accuracies"].values())],
            runs=[[100 * value] for value in row["accuracies"].values()],
            style=int(not row["model"].startswith(VARIANTS)),
        )
        for row in rows
        if row["model"] != "lmm-shuffled"
    ]  # fmt: skip
    figures = []
    if curves:
        png = plot_dots(curves, f"{name}: accuracy of each fold", "accuracy (%)")
        figures.append(Figure(f"genomics-{name}", png, "A dot for each fold of every model"))
    ours = [row for row in rows if row["model"] in VARIANTS]
    for row in ours[:1]:
        tables.append(_confusion_table(row, about["classes"]))
        figures.append(_confusion_figure(name, row, about["classes"]))
    return Section(name, [facts, ABOUT.format(**experiment), *([TUNED] if tuned else [])], tables, figures)


def _confusion_table(row: Mapping[str, Any], classes: Sequence[str]) -> Table:
    lines = [[name, *(f"{cell:,}" for cell in cells)] for name, cells in zip(classes, row["confusion"], strict=True)]
    header = ["true class", *(f"said {name}" for name in classes)]
    return Table(header, lines, f"What {LABELS[row['model']]} said of {row['test']:,} test sequences, all folds added.")


def _confusion_figure(name: str, row: Mapping[str, Any], classes: Sequence[str]) -> Figure:
    shares = [[cell / max(1, sum(cells)) for cell in cells] for cells in row["confusion"]]
    png = plot_heat(
        classes, classes, shares, f"{name}: {LABELS[row['model']]}", "what it said", "true class", "share of the class",
        lambda value: f"{value:.1%}",
    )  # fmt: skip
    return Figure(f"genomics-{name}-confusion", png, "The confusion matrix as shares of the true class")


def _added_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    sets = list(dict.fromkeys(row["data"] for row in rows))
    by_name = {(row["data"], row["model"]): row["accuracies"] for row in rows}
    lines = []
    for model in ADDED:
        cells = []
        for name in sets:
            whole, less = by_name.get((name, "lmm"), {}), by_name.get((name, model), {})
            gaps = [100 * (whole[key] - less[key]) for key in whole if key in less]
            cells.append(f"{mean_and_spread(gaps, '+.1f')} ({len(gaps)})" if gaps else "-")
        if any(cell != "-" for cell in cells):
            lines.append([LABELS[model], *cells])
    return Table(["against", *sets], lines, "Means ± standard deviations over folds; in brackets how many.")
