"""`titans report`: results of evaluations side by side, as tables and as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from titans.cli.common import check_output, require


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders that `titans eval` wrote, or their result files.")],
    out: Annotated[Path, typer.Option(help="Write the page and its figures into this folder.")] = Path("report"),
) -> None:
    """Compare evaluations: print their tables, and write one HTML page with plots, which are PNG files too."""
    for package in ("matplotlib", "jinja2"):
        require("report", package, "plot")

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
