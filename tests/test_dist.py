"""The wheel: what is in it, and that it works where nothing of the checkout is in reach."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[1]
LOOPS = """
import torch
from titans import NeuralMemory
from titans.ops.native.library import library

for mode in ("exact", "chunked"):
    memory = NeuralMemory(16, heads=2, depth=2, mode=mode)
    y, state = memory(torch.randn(2, 9, 16))
    y.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in memory.parameters())
assert library(torch.float32) is not None
"""


@cache
def shipped() -> set[str]:
    """The files of the wheel, besides its metadata."""
    return {file.distribution_path for file in WheelBuilder(str(ROOT)).recurse_included_files()}


def tracked(*folders: str) -> set[str]:
    """The files of some folders of the checkout that a user of the package needs, but for caches."""
    return {
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_has_all_of_the_package_and_its_configs_and_nothing_else() -> None:
    assert shipped() == tracked("titans") | {f"titans/{name}" for name in tracked("configs")}


@pytest.mark.parametrize(
    "name",
    [
        "titans/py.typed", "titans/ops/native/exact.c", "titans/ops/native/common.h", "titans/report/base.html",
        "titans/configs/mac-1m.json", "titans/configs/train/cpu-minutes.yaml", "titans/configs/experiments/needle.yaml",
    ],
)  # fmt: skip
def test_the_wheel_has_what_is_not_python(name: str) -> None:
    assert name in shipped()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a virtual environment that has the wheel and, so that nothing is downloaded, our dependencies."""
    folder = tmp_path_factory.mktemp("dist")
    run = subprocess.run
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    run(build, check=True, capture_output=True)
    run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    python = folder / "venv" / "bin" / "python"
    (wheel,) = folder.glob("titan_memory-*.whl")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python), "install", "--quiet"]
    run([*pip, "--no-deps", "--no-index", str(wheel)], check=True)
    # A folder in a .pth file is searched last, and .pth files in it, such as that of an editable install, do not count.
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return folder


def call(folder: Path, program: str, *arguments: str) -> str:
    """What a program of the environment prints; the folder is its working directory and its home."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "XDG_"))}
    environment |= {"HOME": str(folder), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [str(folder / "venv" / "bin" / program), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_what_is_imported_is_the_wheel(folder: Path) -> None:
    file = call(folder, "python", "-c", "import titans, titans.text, titans.models; print(titans.__file__)").strip()
    assert Path(file).is_relative_to(folder / "venv")
    assert call(folder, "titans", "--version") == "titans 0.1.0\n"


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("cc") or shutil.which("gcc")), reason="needs a C compiler")
def test_the_wheel_compiles_its_loops(folder: Path) -> None:
    call(folder, "python", "-W", "error::UserWarning", "-c", LOOPS)
    assert len(list((folder / ".cache" / "titan-memory").glob("native-*.so"))) == 1


@pytest.mark.slow
def test_the_command_lists_its_commands_and_the_recipes_of_the_wheel(folder: Path) -> None:
    assert "train" in call(folder, "titans", "--help")
    listed = call(folder, "titans", "experiment", "--help")
    assert "needle" in listed and "recall" in listed and "text-memory" in listed


@pytest.mark.slow
def test_the_wheel_prepares_trains_and_generates(folder: Path) -> None:
    (folder / "fox.txt").write_text("The quick brown fox jumps over the lazy dog. " * 60)
    call(folder, "titans", "prepare", "fox.txt", "--validation", "0.1", "--out", "data")
    recipe = next((folder / "venv").glob("lib/python*/site-packages/titans/configs/train/cpu-minutes.yaml"))
    fields = "--steps 2 --length 32 --batch-tokens 128 --model.hidden_size 32 --model.num_hidden_layers 1"
    call(folder, "titans", "train", str(recipe), *fields.split(), "--output", "run")
    result = json.loads((folder / "run" / "result.json").read_text())
    assert result["steps"] == 2 and 0 < result["eval_loss"] < 10
    call(folder, "titans", "generate", "run", "The", "--max-new-tokens", "4")
