from __future__ import annotations

import random
import re
import shutil
from pathlib import Path

import pytest
import torch

from tests.docs.blocks import PAGES, ROOT, blocks_of, check_command, commands_of, run_shell
from titans import TitansConfig, TitansForCausalLM
from titans.experiments.catalogue import find_experiment

NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
every_page = pytest.mark.parametrize("name", NAMES)
TEXT = "Call me Ishmael. Some years ago, having little money in my purse, I thought I would sail about a little.\n"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the pages take for granted: texts, a small model, a run, and the recipes."""
    folder = tmp_path_factory.mktemp("inputs")
    for name, times in {"input.txt": 200, "book.txt": 20, "sequel.txt": 10, "question.txt": 1, "notes.txt": 2}.items():
        words = (TEXT * times).split(" ")
        random.Random(name).shuffle(words)
        (folder / name).write_text(" ".join(words), encoding="utf-8")
    torch.manual_seed(0)
    config = TitansConfig(
        variant="mac", vocab_size=257, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, memory_heads=1,
        memory_depth=1, segment_size=32, num_persistent_tokens=2,
        eos_token_id=list(range(257)),  # it has said enough after one token, whichever that is
    )  # fmt: skip
    for name in ("my-titans", "runs/small", "runs/other"):
        TitansForCausalLM(config).save_pretrained(folder / name)
    (folder / "configs").symlink_to(ROOT / "configs")
    return folder


@pytest.fixture
def here(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a reader, who has done nothing yet."""
    folder = tmp_path / "reader"
    shutil.copytree(inputs, folder, symlinks=True)
    monkeypatch.chdir(folder)
    for variable in ("TITANS_MEMORY", "OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return folder


@every_page
def test_the_blocks_of_a_page_run_in_order(name: str, here: Path) -> None:
    for block, remark in blocks_of(ROOT / name):
        if not remark:
            block.evaluate()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in NAMES if any(remark == "slow" for _, remark in blocks_of(ROOT / name))]
)
def test_the_slow_blocks_of_a_page_run_in_order_with_the_others(name: str, here: Path) -> None:
    if "titans train configs/train/cpu-minutes.yaml" in (ROOT / name).read_text(encoding="utf-8"):
        shutil.rmtree(here / "runs/small")  # the page makes it
    for block, remark in blocks_of(ROOT / name):
        block.namespace["real_shell"] = remark == "slow"
        if remark != "not executed":
            block.evaluate()


@every_page
def test_every_command_on_a_page_exists_with_all_its_options(name: str) -> None:
    for line, words in commands_of(ROOT / name):
        try:
            check_command(words)
        except Exception as error:
            pytest.fail(f"{name}, line {line}: titans {' '.join(words)}: {error}")


@every_page
def test_commands_stand_in_blocks_that_are_checked(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    outside = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.MULTILINE | re.DOTALL)
    assert not re.findall(r"^ {4,}.*\btitans [a-z]+ .*$", outside, flags=re.MULTILINE)


def test_the_recipe_in_the_guide_is_one(here: Path) -> None:
    (recipe,) = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs/evaluation.md").read_text("utf-8"), re.DOTALL | re.M)
    (here / "my.yaml").write_text(recipe, encoding="utf-8")
    experiment = find_experiment("my.yaml")
    assert experiment.train["steps"] == 400
    assert [model["window_size"] for model in experiment.models.values()] == [16, 64]


def test_a_block_that_fails_is_found_and_a_remark_keeps_it_from_running(tmp_path: Path, here: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- not executed: wrong -->\n```bash\ntitans report nowhere\n```\n\n```bash\ntitans report nowhere\n```\n"
    )
    (first, remark), (second, none) = blocks_of(page)
    assert (remark, none) == ("not executed", "")
    assert first.region.evaluator is run_shell
    with pytest.raises(AssertionError, match="line 6: titans report nowhere ended with 2"):
        second.evaluate()


@pytest.mark.parametrize(
    "words",
    [
        ["evaluate", "runs/small"],
        ["eval", "runs/small", "--taks", "recall"],
        ["train", "run.yaml", "--learning-rat", "1e-3"],
        ["report", "--out"],
        ["tokenizer", "a.txt", "--vocab-size", "300", "--nonsense"],
    ],
    ids=" ".join,
)
def test_a_command_or_option_that_does_not_exist_is_found(words: list[str]) -> None:
    with pytest.raises(Exception, match=r"(?i)no such|requires an argument|not a field"):
        check_command(words)
