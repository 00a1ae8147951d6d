"""The shipped recipes and launch files can be used as they are."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml

from tests.training.conftest import ROOT
from titans.cli import app
from titans.models import SIZES, TitansConfig, count_parameters
from titans.training.build import model_config
from titans.training.config import load_config

RECIPES = sorted((ROOT / "configs" / "train").glob("*.yaml"))
PAPER = [path for path in RECIPES if not path.stem.startswith("cpu-")]
LAUNCH = sorted((ROOT / "configs" / "launch").iterdir())
BATCH_SCRIPTS = [path for path in LAUNCH if path.suffix == ".sbatch"]
LLAMA_VOCABULARY, BYTES = 32_000, 257


def test_a_shipped_recipe_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config(Path("configs/train/cpu-minutes.yaml")) == load_config(ROOT / "configs/train/cpu-minutes.yaml")
    with pytest.raises(ValueError, match=r"configs/train/nosuch\.yaml does not exist"):
        load_config(Path("configs/train/nosuch.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_describes_a_model_of_its_size(path: Path) -> None:
    config = load_config(path)
    made = model_config(config, LLAMA_VOCABULARY if path in PAPER else BYTES, 2)
    assert isinstance(made, TitansConfig)
    assert abs(count_parameters(made) / SIZES[config.model["size"]].parameters - 1) < 0.06
    if path in PAPER:
        assert path.stem == f"{config.model['size']}-{config.model['name']}"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_how_its_data_and_their_validation_split_are_made(path: Path) -> None:
    comments = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#   ")]
    words = shlex.split(" ".join(line.removeprefix("#").removesuffix("\\") for line in comments))
    assert words[:2] == ["titans", "prepare"]
    with typer.main.get_command(app).make_context("titans", []) as context:
        prepare = typer.main.get_command(app).get_command(context, "prepare")
    given = prepare.make_context("prepare", words[2:]).params
    assert Path(given["out"]) == Path(load_config(path).data) and 0 < float(given["validation"][0]) < 1


def test_there_is_a_recipe_of_the_paper_for_each_of_its_sizes() -> None:
    assert {path.stem for path in PAPER} == {f"{size}-mac" for size in ("170m", "340m", "400m", "760m")}


@pytest.mark.parametrize("path", PAPER, ids=lambda path: path.stem)
def test_a_recipe_of_the_paper_is_the_papers(path: Path) -> None:
    config = load_config(path)
    assert (config.learning_rate, config.batch_tokens, config.length) == (4e-4, 524_288, 4096)
    assert config.tokens == (30e9 if config.model["size"] == "760m" else 15e9)
    assert config.weight_decay == 0.1
    for processes in (1, 8, 64, 128):
        size, times = config.accumulation(processes)
        assert size * times * processes * config.length == config.batch_tokens


@pytest.mark.parametrize("path", BATCH_SCRIPTS, ids=lambda path: path.name)
def test_a_batch_script_is_bash_and_goes_on_with_a_run_that_is_there(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)
    text = path.read_text(encoding="utf-8")
    options = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert text.startswith("#!/bin/bash") and "#SBATCH --signal=TERM@600" in options and "#SBATCH --requeue" in options
    assert "-m titans train" in text and "resume=(--resume)" in text


def test_what_accelerate_is_told_leaves_precision_and_sharding_to_the_run() -> None:
    (path,) = (path for path in LAUNCH if path.suffix == ".yaml")
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert (values["distributed_type"], values["num_processes"], values["mixed_precision"]) == ("MULTI_GPU", 8, "no")


@pytest.mark.slow
def test_a_launcher_can_start_the_package_as_a_module() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "titans"]
    done = subprocess.run([*words, "--version"], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("titans ")
    done = subprocess.run([*words, "train"], env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("titans: Invalid value: output is empty")


@pytest.mark.parametrize("word", ["configs/", "titans/", "tests/", "docs/"])
def test_files_that_the_page_of_training_names_are_there(word: str) -> None:
    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    named = {part.strip("`.,:;()") for part in text.split() if part.strip("`(").startswith(word)}
    for name in named:
        assert (ROOT / name).exists() or list(ROOT.glob(name)), name
