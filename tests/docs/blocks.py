"""The code and shell blocks of a page: which there are, how they run, and whether their commands exist.

A block runs, unless an HTML comment stands before it: `<!-- slow: why -->` runs it with the slow tests only, and
`<!-- not executed: why -->` never; `<!-- no shell block of this page is executed: why -->` speaks for a whole page.
Shell blocks of the quick tests hold `titans` commands only, which run in this process; slow ones get a real shell.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import typer
from sybil import Document, Example
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser

from titans.cli import app, main
from titans.training.config import TrainConfig

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHELLS = ("bash", "sh", "console")
REMARK = re.compile(r"<!-- (slow|not executed): \S[^>]*? -->\s*\Z")
REST = re.compile(r"<!-- no shell block of this page is executed: \S[^>]*? -->")
COMMAND = typer.main.get_command(app)
INLINE = re.compile(r"(?<!`)`(titans [^`\n]+)`(?!`)")


def blocks_of(page: Path) -> list[tuple[Example, str]]:
    """The blocks of a page, each with the remark before it: "slow", "not executed" or none."""
    shells = [CodeBlockParser(language, run_shell) for language in SHELLS]
    document = Document.parse(str(page), PythonCodeBlockParser(), *shells)
    remark_of_page = "not executed" if REST.search(document.text) else ""
    found = []
    for block in document:
        remark = REMARK.search(document.text[: block.start])
        shell = block.region.evaluator is run_shell
        found.append((block, remark[1] if remark else remark_of_page if shell else ""))
    return found


def run_shell(block: Example) -> None:
    """The commands of a block, one after the other; each must succeed."""
    if block.namespace.get("real_shell"):
        script = "set -euo pipefail\n" + "\n".join(lines_of(block.parsed))
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(["bash", "-c", script], env=os.environ | {"PATH": path}, capture_output=True, text=True)
        assert done.returncode == 0, f"{block.path}, line {block.line}:\n{done.stdout}\n{done.stderr}"
        return
    for line in lines_of(block.parsed):
        first, *arguments = shlex.split(line, comments=True)
        assert first == "titans", f"{block.path}, line {block.line}: {line} needs a shell; expected a remark: slow"
        try:
            main(arguments)
        except SystemExit as end:
            assert end.code == 0, f"{block.path}, line {block.line}: {line} ended with {end.code}"


def lines_of(source: str) -> list[str]:
    """The commands of a shell block, continued lines joined; of a console block, those after its prompts."""
    lines = [line for line in source.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]
    asked = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return asked or lines


def commands_of(page: Path) -> Iterator[tuple[int, list[str]]]:
    """The arguments of every `titans` command on a page, in blocks and in running text, with its line."""
    for block, _ in blocks_of(page):
        for line in lines_of(block.parsed) if block.region.evaluator is run_shell else ():
            words = shlex.split(line, comments=True)
            for number, word in enumerate(words):
                if Path(word).name == "titans":
                    rest = words[number + 1 :]
                    end = next((i for i, each in enumerate(rest) if each in ("|", "&&", "<", ">", ";")), len(rest))
                    yield block.line, rest[:end]
    text = page.read_text(encoding="utf-8")
    for found in INLINE.finditer(text):
        yield text.count("\n", 0, found.start()) + 1, shlex.split(found[1])[1:]


def check_command(words: list[str]) -> None:
    """Raises an error unless the command exists and knows all the options that it is given."""
    command: Any = COMMAND
    context = command.context_class(command, info_name="titans")
    while hasattr(command, "commands") and words and not words[0].startswith("-") and not words[0].isupper():
        _, command, words = command.resolve_command(context, words)
        context = command.context_class(command, parent=context, **command.context_settings)
    _, rest, _ = command.make_parser(context).parse_args(args=list(words))
    known = {field.name for field in fields(TrainConfig)}
    for word in rest:
        flag = word.removeprefix("--").partition("=")[0].partition(".")[0].replace("-", "_")
        assert context.allow_extra_args, f"{word} is one argument too many"
        assert not word.startswith("--") or flag in known, f"{word} is not a field of a training"
