from __future__ import annotations

import base64
import io
import json
import re
import struct
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from jinja2 import UndefinedError
from rich.console import Console

from tests.browser import needs_browser, open_page
from tests.report.cases import HOSTILE, PNG, many, result
from titans.report.page import (
    Figure,
    Section,
    Table,
    as_markdown,
    page_as_markdown,
    print_table,
    render,
    render_page,
    write_page,
)
from titans.report.results import result_sections, write_report


class Page(HTMLParser):
    """What a browser would find: elements, attributes that fetch something, pictures, and texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.pictures: list[dict[str, str | None]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attributes if name in ("src", "href", "srcset", "action")]
        if tag == "img":
            self.pictures.append(dict(attributes))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a report of many runs."""
    folder = tmp_path_factory.mktemp("report")
    table, figure = Table(["a", HOSTILE], [["1", HOSTILE]], HOSTILE), Figure("extra", PNG, HOSTILE, HOSTILE)
    extra = Section(f"Why {HOSTILE}", [HOSTILE], [table], [figure])
    sections = result_sections(many(), [extra])
    assert write_page(sections, folder / "new", f"Report {HOSTILE}", HOSTILE) == folder / "new" / "report.html"
    return folder / "new"


def test_the_page_shows_every_text_as_it_is_and_fetches_nothing(written: Path) -> None:
    page = Page((written / "report.html").read_text())
    assert "script" not in page.tags
    assert "iframe" not in page.tags
    assert all(address.startswith(("data:", "#part-")) for address in page.addresses)
    assert page.text.count(HOSTILE) >= 6
    assert page.text.count("{{ title }}") >= 6
    for words in (
        "titans eval mac --seed 2",
        "2026-11-16",
        "2.9.0",
        "digits: 7",
        "In short",
        "Single figures",
        "1,000",
    ):
        assert words in page.text


def test_the_parts_stand_in_order(written: Path) -> None:
    titles = re.findall(r"<h2>(.*?)</h2>", (written / "report.html").read_text())
    begin = [unescape(title)[:9] for title in titles]
    assert begin == ["In short", "Why <scri", "Needle in", "Questions", "Language", "Single fi", "How it wa"]


def test_the_figures_are_in_the_page_and_beside_it(written: Path) -> None:
    page = Page((written / "report.html").read_text())
    files = {path.name: path.read_bytes() for path in written.iterdir() if path.suffix == ".png"}
    hostile = "needle-heat-_script_alert_1_script_frac_1_title_raw_red_31m_.._.._up.png"
    heat = {"needle-heat-mac.png", "needle-heat-transformer.png", hostile}
    assert set(files) == {"extra.png", "needle.png", *heat, "kinds.png", "lm.png"}
    embedded = [base64.b64decode((picture["src"] or "").split(",", 1)[1]) for picture in page.pictures]
    assert sorted(embedded) == sorted(files.values())
    for picture, png in zip(page.pictures, embedded, strict=True):
        assert picture["alt"]
        assert (picture["width"], picture["height"]) == tuple(map(str, struct.unpack(">II", png[16:24])))
    assert {path.name for path in written.iterdir()} == {*files, "report.html"}


def test_figures_of_the_same_name_do_not_overwrite_each_other(tmp_path: Path) -> None:
    figures = [Figure(name, PNG, "a") for name in ("a.png", "A", "a", "../a", "..", "x" * 300)]
    write_page([Section("s", figures=figures)], tmp_path / "out", "t")
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == sorted(["a.png", "A-2.png", "a-3.png", "a-4.png", "figure.png", "x" * 120 + ".png", "report.html"])
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("section", "words"),
    [
        (Section("s", figures=[Figure("a", b"GIF89a", "a")]), "the figure a holds b'GIF89a'; expected a PNG"),
        (Section("s", tables=[Table(["a", "b"], [["1"]])]), "a row has 1 cells"),
    ],
)
def test_a_section_that_cannot_be_shown_leaves_nothing_behind(section: Section, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        write_page([*result_sections([result()]), section], tmp_path / "out", "t")
    assert not (tmp_path / "out").exists()


def test_wide_tables_turn_on_a_narrow_screen_and_numbers_stand_to_the_right() -> None:
    wide, narrow = Table(["model", *"abcdefghi"], [["mac", *["97.0 ±3.0"] * 9]]), Table(["a", "b"], [["x", "1"]])
    text = Table(["a", "b"], [["x", "many words that are long enough to fill a line"]])
    date = Table(["a", "date"], [["x", "2026-11-16"]])
    pages = [
        render_page([Section("s", tables=[table])], "t").split("<main>")[1] for table in (wide, narrow, text, date)
    ]
    assert ['class="turn"' in page for page in pages] == [True, False, True, False]
    assert ['<td class="number"' in page for page in pages] == [True, True, False, False]


@needs_browser
def test_a_browser_shows_the_page_at_both_widths_without_scrolling_sideways(written: Path, tmp_path: Path) -> None:
    single = write_report([result()], tmp_path / "single")
    frames = [(page, width) for page in (written / "report.html", single) for width in (1280, 390)]
    body = "".join(
        f'<iframe src="{page.as_uri()}" style="width:{w}px;height:900px;border:0"></iframe>' for page, w in frames
    )
    script = """
      const boxes = d => [...d.querySelectorAll(".wide")].map(b => b.scrollWidth - b.clientWidth);
      const pictures = d => [...d.images].map(i => [i.alt.length, i.naturalWidth, i.clientWidth, i.clientHeight]);
      const look = f => ({ inner: f.contentWindow.innerWidth, over: boxes(f.contentDocument),
        page: f.contentDocument.documentElement.scrollWidth, pictures: pictures(f.contentDocument),
        ready: f.contentDocument.readyState, sections: f.contentDocument.querySelectorAll("section").length });
      const all = () => JSON.stringify([...document.querySelectorAll("iframe")].map(look));
      onload = () => { document.getElementById("found").textContent = all(); };
    """
    (tmp_path / "frames.html").write_text(f'<!doctype html>{body}<pre id="found"></pre><script>{script}</script>')
    frame_page = tmp_path / "frames.html"
    document = open_page(frame_page, tmp_path / "profile", "--allow-file-access-from-files", milliseconds=10_000)
    found = json.loads(unescape(document.split('<pre id="found">')[1].split("</pre>")[0]))
    assert [frame["sections"] for frame in found] == [7, 7, 3, 3]
    for (_, width), frame in zip(frames, found, strict=True):
        assert frame["ready"] == "complete"
        assert frame["inner"] == width
        assert frame["page"] <= width
        assert frame["over"] == [0] * len(frame["over"])  # no table scrolls inside its box either
        for alt, natural, across, down in frame["pictures"]:
            assert alt > 0 and natural > 0 and down > 0
            assert 330 <= across <= width  # at 330 the smallest letters are 10 pixels high


def test_a_value_that_a_template_lacks_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="'sections' is undefined"):
        render("report/page.html", title="t", facts="")


def test_a_page_is_markdown_too_with_its_pictures_as_links() -> None:
    section = Section(
        "Part", ["Words."], [Table(["a", "b|c"], [["1", "2"]], "A caption.")], [Figure("x y", PNG, "alt")]
    )
    assert page_as_markdown([section], "Title", "facts") == (
        "# Title\n\nfacts\n\n## Part\n\nWords.\n\n"
        "| a | b\\|c |\n| --- | --- |\n| 1 | 2 |\n\nA caption.\n\n![alt](x_y.png)\n"
    )
    assert as_markdown(Table(["a"], [["1"]])) == "| a |\n| --- |\n| 1 |"


def test_a_table_in_a_terminal_breaks_nothing_where_there_is_room() -> None:
    name = "a name of a model that is rather long"
    console = Console(width=80, record=True, file=io.StringIO())
    print_table(console, Table(["model", "speed"], [[name, "12 (10 to 14)"]], "Caption"))
    title, _, header, _, row, *_ = console.export_text().splitlines()
    assert (title, header.split(), row.strip()) == ("Caption", ["model", "speed"], f"{name}   12 (10 to 14)")


def test_numbers_in_parentheses_are_not_broken_and_count_as_one_word() -> None:
    table = Table(["model", "a", "b", "c", "d"], [["mac", *["97.5 (84 to 100)"] * 3, "words (to be broken)"]])
    page = render_page([Section("s", tables=[table])], "t")
    assert page.count("97.5 (84\u00a0to\u00a0100)") == 3 and "(to be broken)" in page
    assert 'class="turn"' in page
