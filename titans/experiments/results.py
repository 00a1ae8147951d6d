"""The files of an experiment's results: NAME.json with everything, NAME.md for a reader, and the page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titans.files import write_atomically
from titans.report.results import Section, Table, write_report


def read_figures(path: Path) -> dict[str, Any]:
    """The figures of a JSON file; None where one is no number, as of a run that diverged."""
    figures: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda name: None)
    return figures


def show(figure: float | None, form: str = ".3f") -> str:
    """A figure of a table."""
    return "NaN" if figure is None else format(figure, form)


def read_kept(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The results in a file that were made with the same settings; nothing, if there are none."""
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return report if report["settings"] == json.loads(json.dumps(settings)) else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def write_figures(report: dict[str, Any], out: Path) -> None:
    """Writes ``report`` alone, as far as it is."""
    write_atomically(out / f"{report['name']}.json", json.dumps(report, indent=1, allow_nan=False).encode())


def write_results(report: dict[str, Any], text: str, out: Path) -> None:
    """Writes ``report`` and ``text`` into ``out``, under the name that the report has."""
    write_figures(report, out)
    write_atomically(out / f"{report['name']}.md", text.encode())


def write_sections(report: dict[str, Any], title: str, sections: Sequence[Section], out: Path) -> None:
    """The same for results that are sections of a page, and the page."""
    words = [f"# {part.title}\n\n{part.paragraphs[0]}\n\n{as_markdown(part.tables[0])}\n" for part in sections]
    write_results(report, "\n".join(words), out)
    write_report([], out, title, sections)


def as_markdown(table: Table) -> str:
    """A table of the page as one of Markdown."""
    lines = [table.header, ["---"] * len(table.header), *table.rows]
    drawn = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    return "\n".join([*drawn, *(["", table.caption] if table.caption else [])])
