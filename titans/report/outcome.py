"""What an experiment or a benchmark leaves behind: NAME.json with everything, NAME.md for a reader, and the page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titans.files import write_atomically, write_json
from titans.report.page import Section, page_as_markdown, write_page


def read_figures(path: Path) -> dict[str, Any]:
    """The figures of a JSON file; None where one is not a number, as of a run that diverged."""
    figures: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda name: None)
    return figures


def read_kept(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The results in a file that were made with the same settings; empty if there are none."""
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return report if report["settings"] == json.loads(json.dumps(settings)) else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def write_figures(report: dict[str, Any], out: Path) -> None:
    """Write NAME.json alone, as far as the report has come; NAME is ``report["name"]``."""
    write_json(out / f"{report['name']}.json", report)


def write_outcome(report: dict[str, Any], title: str, sections: Sequence[Section], out: Path) -> Path:
    """Write NAME.json, NAME.md, report.html and its figures as PNG files; returns the path of the page.

    Args:
        report: everything, as plain data; its ``name`` is that of the files, and its ``command`` and ``date``, where
            it has them, stand below the title.
        sections: what a reader sees.
        out: the folder, made if needed.
    """
    facts = ", ".join(str(report[key]) for key in ("command", "date") if report.get(key))
    page = write_page(sections, out, title, facts)
    write_atomically(out / f"{report['name']}.md", page_as_markdown(sections, title, facts).encode("utf-8", "replace"))
    write_figures(report, out)
    return page
