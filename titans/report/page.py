"""Pages: sections of text, tables and figures as one HTML file that fetches nothing, as Markdown, and in a terminal."""

from __future__ import annotations

import base64
import json
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titans.files import write_atomically

if TYPE_CHECKING:
    from jinja2 import Environment
    from rich.console import Console

PAGE = "report.html"
LONG = 30  # letters of a cell that takes a line of its own on a narrow screen
ROOM = 40  # letters side by side on a narrow screen
NAME = 24  # letters of a row's name in a terminal where not everything fits


@dataclass(frozen=True)
class Table:
    """A table of texts: a header, rows of as many cells, and a caption."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(frozen=True)
class Figure:
    """A picture.

    Attributes:
        name: of the file beside the page that it is written to; .png is added if it is missing.
        png: the picture.
        alt: what it shows, for those who cannot see it.
        caption: stands below it.
    """

    name: str
    png: bytes
    alt: str
    caption: str = ""


@dataclass(frozen=True)
class Section:
    """A part of a page; all of its texts are plain text."""

    title: str
    paragraphs: Sequence[str] = ()
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()


def show(figure: float | None, form: str = ".3f") -> str:
    """A number for a table; "NaN" for one that is missing, as of a run that diverged."""
    return "NaN" if figure is None else format(figure, form)


def write_page(sections: Sequence[Section], out: str | Path, title: str, facts: str = "") -> Path:
    """Write ``report.html`` and its figures as PNG files into a folder; nothing if something is wrong.

    Args:
        sections: at least one.
        out: the folder, made if needed.
        title: of the page.
        facts: a line below the title.

    Returns the path of the page.
    """
    out = Path(out)
    if out.exists() and not out.is_dir():
        raise ValueError(f"out is the file {out}; expected a folder")
    page = render_page(sections, title, facts)
    for name, figure in zip(figure_files(sections), _figures(sections), strict=True):
        write_atomically(out / name, figure.png)
    write_atomically(out / PAGE, page.encode("utf-8", "replace"))
    return out / PAGE


def render_page(sections: Sequence[Section], title: str, facts: str = "") -> str:
    """The page as HTML: everything is in it, and every text of the sections is shown as it is."""
    if not sections:
        raise ValueError("there are no sections; expected at least one")
    for table in (table for section in sections for table in section.tables):
        _check_table(table)
    for figure in _figures(sections):
        _check_figure(figure)
    return render("report/page.html", sections=sections, title=title, facts=facts)


def render(template: str, **values: Any) -> str:
    """An HTML template of this package, named by its path below ``titans``, with its values; texts are escaped."""
    return _environment().get_template(template).render(values)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("titans", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.filters |= {"kinds": column_kinds, "turns": turns, "unbroken": unbroken}
    environment.filters |= {"size": png_size, "base64": _base64}
    return environment


def _figures(sections: Iterable[Section]) -> list[Figure]:
    return [figure for section in sections for figure in section.figures]


def figure_files(sections: Iterable[Section]) -> list[str]:
    """A file name for each figure; all differ even where case does not count."""
    names: list[str] = []
    for figure in _figures(sections):
        stem = re.sub(r"[^\w.+-]+", "_", figure.name.removesuffix(".png"), flags=re.ASCII)
        stem = stem.lstrip("._")[:120] or "figure"
        name, number = f"{stem}.png", 2
        while name.lower() in (other.lower() for other in names):
            name, number = f"{stem}-{number}.png", number + 1
        names.append(name)
    return names


def _check_table(table: Table) -> None:
    for row in table.rows:
        if len(row) != len(table.header):
            shown = json.dumps(list(row), default=repr)[:40]
            raise ValueError(f"a row has {len(row)} cells, {shown}; expected {len(table.header)}")


def _check_figure(figure: Figure) -> None:
    if figure.png[:8] != b"\x89PNG\r\n\x1a\n" or len(figure.png) < 24:
        raise ValueError(f"the figure {figure.name} holds {figure.png[:8]!r}; expected a PNG")


def png_size(png: bytes) -> tuple[int, int]:
    """Width and height in pixels."""
    width, height = struct.unpack(">II", png[16:24])
    return width, height


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _columns(table: Table) -> list[tuple[str, ...]]:
    return list(zip(table.header, *table.rows, strict=True))


def column_kinds(table: Table) -> list[str]:
    """How each column is set: numbers to the right, long texts across a narrow screen."""
    return [_column_kind(column) for column in _columns(table)]


def _column_kind(column: Sequence[str]) -> str:
    if all(re.fullmatch(r"[-+–]?(?:[\d.,%*()e+± ]|\bto\b)*", cell) for cell in column[1:]):
        return "number"
    return "long" if any(len(cell) > LONG for cell in column[1:]) else "text"


def turns(table: Table) -> bool:
    """Whether the rows of a table become blocks on a narrow screen, which has no room for the columns."""
    return "long" in column_kinds(table) or sum(map(_least_width, _columns(table))) > ROOM


def _least_width(column: Sequence[str]) -> int:
    """Letters that a column takes if it is broken between words, its margins included."""
    return 2 + min(LONG, max(len(word) for cell in column for word in unbroken(cell).split(" ")))


def unbroken(cell: str) -> str:
    """The text of a cell in which numbers in parentheses, as in "97.5 (84 to 100)", stay on one line."""
    return re.sub(r"\((?:[-+\d.,% ]|to){1,24}\)", lambda found: found[0].replace(" ", "\u00a0"), cell)


def as_markdown(table: Table) -> str:
    """A table as Markdown, its caption below."""
    lines = [table.header, ["---"] * len(table.header), *table.rows]
    drawn = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    return "\n".join([*drawn, *(["", table.caption] if table.caption else [])])


def page_as_markdown(sections: Sequence[Section], title: str, facts: str = "") -> str:
    """The page as Markdown; its pictures are the files that ``write_page`` puts beside it."""
    files = iter(figure_files(sections))
    parts = [f"# {title}", *([facts] if facts else [])]
    for section in sections:
        parts += [f"## {section.title}", *section.paragraphs, *map(as_markdown, section.tables)]
        parts += [f"![{figure.alt}]({next(files)})" for figure in section.figures]
    return "\n\n".join(parts) + "\n"


def print_table(console: Console, table: Table, title: str = "") -> None:
    """Print a table below its title, or else its caption; columns that do not fit beside each other follow below."""
    from rich import table as rich_table
    from rich.box import SIMPLE_HEAD
    from rich.text import Text

    if title or table.caption:
        console.print(Text(title or table.caption, "bold"))
    for columns in _fit([table.header, *table.rows], console.width):
        drawn = rich_table.Table(box=SIMPLE_HEAD)
        for index, (column, width) in enumerate(columns):
            drawn.add_column(Text(column[0]), justify="right" if index else "left", overflow="fold", width=width)
        for row in zip(*(column[1:] for column, _ in columns), strict=True):
            drawn.add_row(*map(Text, row))
        console.print(drawn)


def _fit(rows: Sequence[Sequence[str]], width: int) -> list[list[tuple[list[str], int]]]:
    """The columns of a table and their widths, in parts that fit beside each other, each with the first column."""
    from rich.cells import cell_len

    columns = [list(column) for column in zip(*rows, strict=True)]
    widths = [max(map(cell_len, column)) for column in columns]
    if sum(widths) + 3 * len(widths) < width:
        return [list(zip(columns, widths, strict=True))]
    names = (columns[0], min(widths[0], NAME))
    parts, left = [[names]], 0
    for column in columns[1:]:
        broken = [cell.replace(" (", "\n(").replace(" ±", "\n±") for cell in column]
        least = min(max(cell_len(line) for cell in broken for line in cell.split("\n")), NAME)
        left -= least + 3
        if left < 0:
            parts.append([names])
            left = width - names[1] - 7 - least
        parts[-1].append((broken, least))
    return parts[1:]
