"""Recipes: those that are shipped are what they were, one's own work as well, and what is wrong is one sentence."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.packages import install
from titans.cli import main as command
from titans.experiments.catalogue import find_experiment
from titans.experiments.recipes import PROGRAMS, known_experiments, read_recipe, shipped_recipes
from titans.experiments.tasks import TaskExperiment
from titans.models.tokenizer import byte_tokenizer
from titans.tasks import example
from titans.tasks.phonebook import Phonebook

ROOT = Path(__file__).parents[2]
SHIPPED = [name for name in shipped_recipes() if not name.startswith("_")]
# What each trains on and for how many steps, at which lengths, its number of models, and its tests and controls.
SUMMARY: dict[str, tuple[Any, ...]] = {
    "babilong": ("task:babilong,babi", 800, 128, 1024, 7, 1, 4),
    "caching": ("task:needle-noise,needle-essay,phonebook", 1500, 64, 4096, 13, 1, 3),
    "needle": ("task:needle-noise,needle-essay,phonebook", 1500, 64, 4096, 7, 1, 3),
    "needle-word": ("task:needle-word,phonebook", 1500, 64, 4096, 7, 1, 3),
    "pairs": ("task:mqar", 500, 32, 128, 6, 1, 0),
    "reassigned": ("task:reassigned", 500, 32, 128, 9, 1, 0),
    "recall": ("task:recall", 800, 32, 64, 11, 1, 6),
    "tracking-modular-addition": ("task:modular-addition", 500, 8, 32, 6, 1, 0),
    "tracking-parity": ("task:parity", 500, 8, 32, 6, 1, 0),
    "tracking-s3": ("task:s3", 500, 8, 32, 6, 1, 0),
    "tracking-s5": ("task:s5", 500, 8, 32, 6, 1, 0),
}
OWN = """
extends: recall
title: Mine
train: {steps: 7, task: {pairs: 4}}
models: {big: {name: lmm, hidden_size: 128}}
tests:
  - {tasks: recall, settings: {lengths: [32]}, samples: 3}
controls: []
seeds: [5]
"""


def summary(experiment: TaskExperiment) -> tuple[Any, ...]:
    train = experiment.train
    return (
        train["data"], train["steps"], train["shortest"], train["length"], len(experiment.models),
        len(experiment.tests), len(experiment.controls),
    )  # fmt: skip


def test_every_shipped_recipe_is_the_experiment_that_it_was() -> None:
    assert {name: summary(find_experiment(name)) for name in SHIPPED} == SUMMARY
    for name in SHIPPED:
        experiment = find_experiment(name)
        assert experiment.seeds == (0, 1, 2)
        for job in replace(experiment, seeds=(0,)).only([*experiment.models][:1]).jobs(Path("out")):
            assert job.config.learning_rate == 4e-3 and job.config.schedule == "stable" and job.config.micro_batch == 64
    recall = find_experiment("recall")
    linear = {
        "name": "lmm", "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "num_attention_heads": 4,
        "segment_size": 16, "window_size": 16, "num_persistent_tokens": 4, "memory_heads": 1,
        "tie_word_embeddings": False, "memory_depth": 1,
    }  # fmt: skip
    assert recall.models["linear memory"] == linear
    assert find_experiment("needle").models["mac"] == linear | {
        "name": "mac", "hidden_size": 128, "intermediate_size": 256, "segment_size": 64, "window_size": 64,
        "memory_heads": 2, "memory_local_heads": 0, "memory_gate_cutoff": 0.02, "tie_word_embeddings": True,
    }  # fmt: skip
    tampered = [(test.control, test.fields.get("memory_chunk_size")) for test in recall.controls]
    assert tampered == [("no-writes", None), ("reset", None), ("swap", None), (None, 4), (None, 16), (None, 64)]


def test_settings_go_to_the_training_and_to_the_tests_that_have_them() -> None:
    given = {"haystack": "essays", "needles": 2, "phonebook.digits": 3}
    needle = find_experiment("needle", given)
    assert needle.train["task"] == {"phonebook.longest": 256} | given
    assert needle.tests[0].settings == {"repeat": True, "haystack": "essays"}
    longer = find_experiment("needle", given | {"lengths": [131072], "needle-essay.depths": [0.5]})
    assert longer.train == needle.train and longer.tests[0].settings["lengths"] == [131072]
    assert [test.settings for test in longer.controls] == [longer.tests[0].settings] * 3
    pairs = find_experiment("pairs", {"vocabulary": 512})
    assert pairs.train["task"]["vocabulary"] == pairs.tests[0].settings["vocabulary"] == 512
    with pytest.raises(ValueError, match="haystak is not a setting of needle-noise or needle-essay or phonebook"):
        find_experiment("needle", {"haystak": "essays"})


def test_babilong_asks_more_of_stories_that_follow_rules() -> None:
    ruled, other = find_experiment("babilong", {"task": "qa2"}), find_experiment("babilong", {"task": "qa4"})
    assert (ruled.name, ruled.title) == ("babilong-qa2", "BABILong qa2")
    asked = {"questions": 10, "also": ["qa1", "who"], "babi.ask": "end"}
    assert ruled.train["task"] == {"babi.longest": 256, "task": "qa2"} | asked
    assert ruled.train["forget_cost"] == 1.0 and "forget_cost" not in other.train
    assert ruled.models["mac"]["num_hidden_layers"] == 4 and ruled.train["steps"] == 1600
    assert ruled.train["grow_below"] == 0.35 and "grow_below" not in other.train
    assert (ruled.models["lmm"]["memory_heads"], ruled.models["lmm"]["memory_head_dim"]) == (4, 64)
    assert not ruled.models["lmm"]["memory_forgetting"] and "memory_forgetting" not in ruled.models["mac"]
    assert ruled.models["lmm"]["memory_conv_start"] == "mean" and "memory_conv_start" not in ruled.models["mac"]
    assert "memory_conv_start" not in find_experiment("babilong").models["lmm"]
    fewer = find_experiment("babilong", {"task": "qa2", "also": ["who"]}).train["task"]
    assert (fewer["also"], fewer["questions"]) == (["who"], 6)
    assert find_experiment("babilong", {"task": "who"}).train["data"] == "task:babilong"  # which refuses it
    assert (other.train["data"], other.train["shortest"], other.train["task"]) == (
        "task:babilong",
        512,
        {"task": "qa4"},
    )
    assert ruled.tests[0].settings == {"repeat": True, "task": "qa2"}
    assert ruled.models["mamba2"]["hidden_size"] == 128 and "memory_heads" not in ruled.models["mamba2"]


def test_a_recipe_of_ones_own_extends_another(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(OWN)
    mine = find_experiment(str(tmp_path / "mine.yaml"))
    assert (mine.name, mine.title, mine.seeds, mine.controls) == ("mine", "Mine", (5,), [])
    assert mine.train["steps"] == 7 and mine.train["data"] == "task:recall" and mine.train["task"] == {"pairs": 4}
    assert (
        mine.models["big"]["hidden_size"] == 128 and mine.models["big"]["segment_size"] == 16 and "LMM" in mine.models
    )
    assert (mine.tests[0].tasks, mine.tests[0].samples) == (("recall",), 3)
    (tmp_path / "more.yml").write_text("extends: mine\nseeds: [6]")
    assert find_experiment(str(tmp_path / "more.yml")).seeds == (6,)


def test_a_recipe_with_the_name_of_a_shipped_one_extends_that_one(tmp_path: Path) -> None:
    (tmp_path / "recall.yaml").write_text("extends: recall\nseeds: [7]")
    mine = find_experiment(str(tmp_path / "recall.yaml"))
    assert mine.seeds == (7,) and mine.models == find_experiment("recall").models


def test_recipes_that_extend_each_other_by_other_paths_are_refused(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "a.yaml").write_text("extends: ../r/b")
    (tmp_path / "r" / "b.yaml").write_text("extends: ../r/a.yaml")
    with pytest.raises(ValueError, match=r"a.yaml extends itself; expected another recipe$"):
        read_recipe(tmp_path / "r" / "a.yaml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("modles: {}", "has 'modles': did you mean models?"),
        ("extends: needel", "extends in .* is 'needel': did you mean needle?"),
        ("extends: ../r/wrong.yaml", "wrong.yaml extends itself; expected another recipe"),
        ("extends: wrong", "wrong.yaml extends itself; expected another recipe"),
        ("extends: recall\nseeds: 3", "seeds in .* is 3; expected a list"),
        ("extends: recall\nseeds: [0, 0]", "seeds has 0 more than once; expected each once"),
        ("extends: recall\ntrain: {step: 3}", "train has 'step': did you mean steps?"),
        ("extends: recall\ntrain: {data: 'task:recal'}", "task is 'recal': did you mean recall?"),
        ("extends: recall\nmodels: {LMM: lmm}", "LMM in models is 'lmm'; expected fields, such as name"),
        ("extends: recall\nmodels: {LMM: {name: [lmm]}}", r"wrong.yaml: the name of LMM is \['lmm'\]: "),
        ("extends: recall\nmodels: {LMM: {name: lmn}}", "the name of LMM is 'lmn': did you mean lmm?"),
        ("extends: recall\ntests: [{tasks: [reacll]}]", "task is 'reacll': did you mean recall?"),
        ("extends: recall\ntests: [{tasks: [recall], sample: 3}]", "a test has 'sample': did you mean samples?"),
        ("extends: recall\ntests: [recall]", "a test is 'recall'; expected fields, tasks among them"),
        ("extends: recall\ntests: [{tasks: [3]}]", "wrong.yaml: tasks has 3; expected names"),
        ("extends: recall\ntests: [{tasks: recall, settings: [1]}]", r"wrong.yaml: settings is \[1\]; expected fields"),
        ("extends: recall\ntests: [{tasks: recall, fields: 3}]", "wrong.yaml: fields is 3; expected fields"),
        ("extends: recall\ntests: [{tasks: recall, control: [1]}]", r"wrong.yaml: control is \[1\]; expected one of"),
        (
            "extends: recall\ntests: [{tasks: recall, settings: {lengthz: 8}}]",
            "wrong.yaml: lengthz is not a setting of recall",
        ),
        (
            "extends: recall\ntests: [{tasks: recall, fields: {window_siz: 8}}]",
            "wrong.yaml: window_siz is not a field of the model's config: did you mean window_size?",
        ),
        ("extends: recall\ntrain: {task: {pairz: 3}}", "wrong.yaml: pairz is not a setting of recall"),
        ("extends: recall\ntrain: {task: {3: 3}}", "wrong.yaml: 3 is not a setting of recall"),
        ("extends: recall\ntrain: {task: 3}", "wrong.yaml: task in train is 3; expected fields"),
        ("extends: recall\nmodel: {hiden_size: 8}", "wrong.yaml: model.hiden_size is not a field of"),
        ("extends: recall\nmodels: {3: {name: lmm}}", "wrong.yaml: models has 3; expected a name"),
        ("extends: recall\nseeds: [a]", "wrong.yaml: seed is 'a'; expected a whole number"),
        ("extends: recall\ntests: []", "tests is missing; expected it in a recipe"),
        ("title: [", "is not YAML: "),
        ("3", "holds no fields"),
    ],
)
def test_what_is_wrong_with_a_recipe_is_one_sentence(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "wrong.yaml").write_text(text)
    with pytest.raises(SystemExit) as end:
        command(["experiment", str(tmp_path / "r" / "wrong.yaml"), "--out", str(tmp_path / "out")])
    words = capsys.readouterr().err
    assert end.value.code == 2 and words.count("\n") == 1
    assert re.search(said.replace("?", r"\?"), words), words
    assert not (tmp_path / "out").exists()


def test_a_recipe_that_is_not_there_and_an_unknown_name_are_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for name, said in (
        ("nowhere.yaml", "nowhere.yaml does not exist"),
        ("recal", "experiment is 'recal': did you mean recall?"),
        ("zzz", "experiment is 'zzz': expected one of lm, shapes,"),
    ):
        with pytest.raises(SystemExit) as end:
            command(["experiment", name])
        words = capsys.readouterr().err
        assert end.value.code == 2 and said in words and words.count("\n") == 1 and "Did you mean" not in words
    with pytest.raises(ValueError, match=r"^experiment is 'recal': did you mean recall\?$"):
        find_experiment("recal")


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (["lm", "data"], "train"),
        (["ablation", "data"], "train"),
        (["depth", "data"], "train"),
        (["forecasting", "data"], "forecast,plot"),
        (["memory"], "models,plot"),
        (["surprise"], "text,plot"),
        (["text-memory", "talks.json"], "text,plot"),
        (["throughput"], "models,plot"),
        (["mine.yaml"], "train"),
    ],
)
def test_an_experiment_whose_packages_are_missing_names_the_extra(
    words: list[str], extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for module in ("lm", "ablation", "depth", "memory", "surprise", "text_memory", "throughput", "catalogue", "tasks"):
        monkeypatch.setitem(sys.modules, f"titans.experiments.{module}", None)  # importing it fails
    with pytest.raises(SystemExit) as end:
        command(["experiment", *words])
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.count("\n") == 1
    assert f"experiment {words[0]} needs transformers: pip install 'titan-memory[{extra}]'" in said
    assert not list(tmp_path.iterdir())


def test_the_registry_has_one_sentence_for_each_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    known = known_experiments()
    assert set(known) >= {*PROGRAMS, *SHIPPED}
    for name, about in known.items():
        assert about.endswith(".") and "\n" not in about, name
    with pytest.raises(SystemExit):
        command(["experiment", "--help"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in known)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with packages that add experiments, one of which cannot be imported."""
    module = f"""
        from pathlib import Path
        from titans.experiments.catalogue import find_experiment
        from dataclasses import replace
        file = {str(tmp_path / "theirs.yaml")!r}
        path = Path(file)
        def made(settings):
            return replace(find_experiment("recall", settings), name="made")
        ready = find_experiment("tracking-parity")
        wrong = 3
        missing = "no_such_recipe.yaml"
        def no_argument():
            return ready
        def other(settings):
            return 3
    """
    (tmp_path / "theirs.yaml").write_text(OWN)
    points = {"theirs": "theirs_lab:file", "path": "theirs_lab:path", "made": "theirs_lab:made",
              "ready": "theirs_lab:ready", "wrong": "theirs_lab:wrong", "missing": "theirs_lab:missing",
              "no-argument": "theirs_lab:no_argument", "other": "theirs_lab:other",
              "recall": "theirs_lab:made"}  # fmt: skip
    install(tmp_path, monkeypatch, "theirs-lab", {"titans.experiments": points}, module)
    install(
        tmp_path, monkeypatch, "broken-lab", {"titans.experiments": {"broken": "broken_lab:x"}}, "import nothing_of"
    )
    return tmp_path


def test_another_package_adds_experiments(packages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert known_experiments()["theirs"] == "From the package theirs-lab."
    assert find_experiment("theirs").title == find_experiment("path").title == "Mine"
    assert find_experiment("made", {"pairs": 3}).train["task"] == {"pairs": 3}
    assert find_experiment("ready").train["data"] == "task:parity"
    assert find_experiment("recall").name == "recall"  # ours
    said = capsys.readouterr().err
    assert (
        said.count("\n") == 1 and "recall = theirs_lab:made of theirs-lab is left out: there is another recall" in said
    )
    for name, words in (
        ("broken", r"broken = broken_lab:x of broken-lab cannot be imported: ModuleNotFoundError: No module named"),
        ("wrong", "^the entry point wrong = theirs_lab:wrong of theirs-lab is 3; expected the path of a recipe"),
        ("other", "^the entry point other = theirs_lab:other of theirs-lab made 3; expected a TaskExperiment$"),
        ("missing", "^the entry point missing = theirs_lab:missing of theirs-lab: no_such_recipe.yaml does not exist"),
        ("no-argument", "theirs_lab:no_argument of theirs-lab: TypeError: no_argument.. takes 0 positional arguments"),
    ):
        with pytest.raises(ValueError, match=words):
            find_experiment(name)
    with pytest.raises(ValueError, match="ready has no settings; expected none, got pairs"):
        find_experiment("ready", {"pairs": 3})


def test_the_list_of_experiments_imports_no_package_that_adds_some(packages: Path) -> None:
    code = (
        "import sys, json\nfrom titans.cli import main\ntry: main(['experiment', '--help'])\n"
        "except SystemExit: print(json.dumps([m for m in ('torch', 'theirs_lab', 'broken_lab') if m in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT,
        env={"PYTHONPATH": str(packages), "PATH": ""},
    )  # fmt: skip
    assert json.loads(done.stdout.splitlines()[-1]) == [] and "theirs" in done.stdout


def test_a_recipe_says_what_it_is(tmp_path: Path) -> None:
    for name in SHIPPED:
        assert {"help", "title", "about", "models", "train", "tests"} <= read_recipe(shipped_recipes()[name]).keys()


def test_no_window_of_mal_sees_the_answer_to_a_question_of_a_phone_book_that_teaches_it_needles() -> None:
    recipe = read_recipe(shipped_recipes()["needle"])
    window = (recipe["model"] | recipe["models"]["mal"])["window_size"]
    tokenizer = byte_tokenizer()
    for number in range(50):
        book = example(Phonebook(), "train", 0, number, recipe["train"]["shortest"], tokenizer)
        text = bytes(book.tokens)
        for answer in book.answers:
            assert answer.place - text.index(bytes(answer.wanted)) > window
