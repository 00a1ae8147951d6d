from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import PAGES, ROOT

NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
MADE = {"contributing.md", *(f"examples/{path.stem}.md" for path in (ROOT / "examples").glob("*.[pi]*"))}


def test_contributing_draws_the_layers_of_the_contract() -> None:
    contract = (ROOT / "pyproject.toml").read_text(encoding="utf-8").split("layers = [")[1].split("]")[0]
    drawn = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Layers")[1].split("## Rules")[0]
    layers = re.findall(r'"([a-z |]+)"', contract)
    assert re.findall(r"^    ([a-z]+(?: \| [a-z]+)*)  ", drawn, re.MULTILINE) == layers


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert named == pages | MADE


@pytest.mark.parametrize(
    "name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/index.md", "docs/examples/index.md"]
)
def test_links_to_files_lead_somewhere(name: str) -> None:
    page = ROOT / name
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("name", NAMES)
def test_files_that_a_page_names_exist(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    named = re.findall(r"(?<![\w./(-])(?:titans|tests|configs|examples|docs)/[\w/.-]+\.\w+", text)
    assert not [path for path in named if not (ROOT / path).exists()]


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 40
    for page in pages:  # nothing is loaded from elsewhere
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r"<(?:script|img|link)[^>]+(?:src|href)=\"?https?://", text), page.name
