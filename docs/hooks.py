"""What the site has beyond the pages in docs/: the examples, the notebook with its pictures, and CONTRIBUTING.md."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
# How a page links to a file outside docs/ on GitHub, and where that stands in the site.
OUTSIDE = (
    (re.compile(r"\]\(\.\./\.\./examples/(\w+)\.(py|ipynb)\)"), r"](\1.md)"),
    (re.compile(r"\]\(\.\./examples/(\w+)\.(py|ipynb)\)"), r"](examples/\1.md)"),
    (re.compile(r"\]\(docs/"), "]("),
    (re.compile(r"\]\(\.\./CONTRIBUTING\.md"), "](contributing.md"),
    (re.compile(r"\]\((\.\./)*(README|CHANGELOG)\.md\)"), "](index.md)"),
)


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Adds the pages that are made of files elsewhere."""
    for script in sorted((ROOT / "examples").glob("*.py")):
        page = page_of_script(script.read_text(encoding="utf-8"))
        files.append(File.generated(config, f"examples/{script.stem}.md", content=page))
    notebook = json.loads((ROOT / "examples" / "tour.ipynb").read_text(encoding="utf-8"))
    body, pictures = page_of_notebook(notebook)
    files.append(File.generated(config, "examples/tour.md", content=body))
    for name, picture in pictures.items():
        files.append(File.generated(config, f"examples/{name}", content=picture))
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "contributing.md", content=contributing))
    return files


def page_of_script(script: str) -> str:
    """A script as Markdown: the first sentence of its docstring is the title, the rest stands above the code."""
    _, docstring, code = script.split('"""', 2)
    first, rest = docstring.split("\n", 1)
    title, _, more = first.rstrip(".").partition(": ")
    return f"# {title}\n\n{more[:1].upper()}{more[1:]}.\n{rest}\n```python\n{code.lstrip()}```\n"


def page_of_notebook(notebook: dict[str, Any]) -> tuple[str, dict[str, bytes]]:
    """A notebook's cells and saved outputs as Markdown, and its pictures by name."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            if "text" in output:
                parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
            picture = output.get("data", {}).get("image/png")
            if picture is not None:
                name = f"tour-{len(pictures) + 1}.png"
                pictures[name] = base64.b64decode("".join(picture))
                parts.append(f"![Output of the cell above]({name})")
    return "\n\n".join(parts) + "\n", pictures


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lets links that leave docs/ on GitHub lead to the page in the site."""
    for pattern, target in OUTSIDE:
        markdown = pattern.sub(target, markdown)
    return markdown


class PlainRoles(griffe.Extension):
    """Docstrings say :class:`X`, as Sphinx wants it; Markdown wants `X`."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrites the docstring of an object."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", obj.docstring.value)
