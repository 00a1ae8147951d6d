"""The versions that are declared are the versions that ``make test-versions`` tests."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_the_lowest_versions_that_are_declared_and_the_newest_are_tested() -> None:
    command = ["make", "-n", "-B", "test-versions", f"PYTHON={sys.executable}", "TORCH_ARGS=--some-index"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    declared = (ROOT / "pyproject.toml").read_text()
    for name in ("torch", "transformers"):
        (lowest,) = re.findall(rf'"{name}>=([\d.]+),<', declared)
        assert re.findall(rf"'({name}[^']*)'", said) == [f"{name}=={lowest}", name]
    assert re.search(r"--some-index 'torch==", said) and said.count("tests/ecosystem/test_hub.py") == 2
