"""`titans report`: results of evaluations, side by side, as a page to look at."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from titans.cli.common import check_output


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders that `titans eval` wrote, or their result files.")],
    out: Annotated[Path, typer.Option(help="Folder for the page and its figures, made if needed.")] = Path("report"),
) -> None:
    """Compare evaluations: tables here, and one HTML page with plots, each of them a PNG file too."""
    if importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter("report draws with matplotlib: pip install 'titan-memory[plot]'.")

    from rich.console import Console

    from titans.report.page import PAGE
    from titans.report.results import load_results, print_tables, write_report

    check_output(out / PAGE)
    try:
        results = load_results(runs)
        page = write_report(results, out)
    except ValueError as error:
        raise typer.BadParameter(f"{error}.") from error
    print_tables(results, Console())
    typer.echo(f"Report: {page}")
