"""The files of an experiment's results: NAME.json with everything, NAME.md for a reader, and the page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titans.evaluation.report import Section, Table, write_report
from titans.files import write_atomically


def write_results(report: dict[str, Any], text: str, out: Path) -> None:
    """Writes ``report`` and ``text`` into ``out``, under the name that the report has."""
    write_atomically(out / f"{report['name']}.json", json.dumps(report, indent=1, allow_nan=False).encode())
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
