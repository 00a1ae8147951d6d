"""Experiments on tasks by their name: from a recipe that is shipped or one's own, or from another package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from titans import plugins
from titans.evaluation.kinds import find_kind
from titans.evaluation.measure import Evaluation
from titans.experiments.recipes import SUFFIXES, added_experiments, known_experiments, read_recipe, shipped_recipes
from titans.experiments.runs import check_model
from titans.experiments.tasks import TaskExperiment
from titans.models.baselines import config_class
from titans.models.configuration import TitansConfig
from titans.tasks import deal_settings
from titans.tasks.babi import ALSO, FACTS, count_questions
from titans.training.config import TASK
from titans.words import nearest, sentence

Recipe = dict[str, Any]
TESTED = ("lengths", "depths")  # settings of the tests alone: training draws lengths and depths of its own


def find_experiment(name: str, settings: Mapping[str, Any] | None = None) -> TaskExperiment:
    """An experiment on tasks; a ``ValueError`` says what there is instead.

    Args:
        name: of a recipe that is shipped, of an entry point of another package, or a YAML file.
        settings: of its tasks, such as where their texts are; ``TASK.SETTING`` for one of them.
    """
    settings = dict(settings or {})
    shipped, added = shipped_recipes(), added_experiments()
    if name.endswith(SUFFIXES):
        return _from_file(Path(name), Path(name).stem, settings)
    if name in shipped:
        return _from_file(shipped[name], name, settings)
    if name not in added:
        raise ValueError(f"experiment is {name!r}: {nearest(name, known_experiments())}")
    found, where = plugins.load(added[name]), plugins.where(added[name])
    try:
        if isinstance(found, str | Path):
            return _from_file(Path(found), name, settings)
        made = found(settings) if callable(found) else found
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    except Exception as error:  # the package may raise anything
        raise ValueError(f"{where}: {type(error).__name__}: {sentence(error)}") from error
    if not isinstance(made, TaskExperiment):
        expected = "the path of a recipe, a TaskExperiment or what makes one" if made is found else "a TaskExperiment"
        raise ValueError(f"{where} {'is' if made is found else 'made'} {made!r}; expected {expected}")
    if settings and made is found:
        raise ValueError(f"{name} has no settings; expected none, got {', '.join(settings)}")
    return made


def _from_file(path: Path, name: str, settings: dict[str, Any]) -> TaskExperiment:
    recipe = read_recipe(path)
    hook = HOOKS.get(name) if path == shipped_recipes().get(name) else None
    try:
        made = make_experiment(hook(recipe, settings) if hook else recipe, name, settings)
        for job in made.jobs(Path()):
            check_model(job, 1)
        return made
    except ValueError as error:
        raise ValueError(str(error) if path in shipped_recipes().values() else f"{path}: {error}") from None


def make_experiment(recipe: Recipe, name: str, settings: Mapping[str, Any]) -> TaskExperiment:
    """The experiment of a recipe, with settings for the tasks that it trains on and tests with."""
    for needed in ("models", "train", "tests"):
        if not recipe.get(needed):
            raise ValueError(f"{needed} is missing; expected it in a recipe")
    for label, model in recipe["models"].items():
        if not isinstance(model, dict):
            raise ValueError(f"{label} in models is {model!r}; expected fields, such as name")
    train = dict(recipe["train"])
    if not isinstance(train.get("task", {}), dict):
        raise ValueError(f"task in train is {train['task']!r}; expected fields, NAME: VALUE")
    data = str(train.get("data", ""))
    trained_on = [each.strip() for each in data.removeprefix(TASK).split(",")] if data.startswith(TASK) else []
    tests, controls = ([_evaluation(test) for test in recipe.get(which) or ()] for which in ("tests", "controls"))
    tasks = dict.fromkeys([*trained_on, *(task for test in tests for task in test.tasks)])
    deal_settings(_settings_of(list(tasks)), settings)  # says which of them none of the tasks has
    for test in (*tests, *controls):
        deal_settings(_settings_of(test.tasks), test.settings)
    if trained_on:
        given = {key: value for key, value in settings.items() if key.rpartition(".")[2] not in TESTED}
        train["task"] = {**train.get("task", {}), **_known(given, trained_on)}
        deal_settings(_settings_of(trained_on), train["task"])
    for_tests = {key: value for key, value in settings.items() if key not in recipe.get("training_only", ())}

    def with_settings(test: Evaluation) -> Evaluation:
        return Evaluation(**vars(test) | {"settings": {**test.settings, **_known(for_tests, test.tasks)}})

    return TaskExperiment(
        name=recipe.get("name", name),
        title=recipe.get("title", name),
        about=recipe.get("about", ""),
        models={label: {**_shared(recipe, model), **model} for label, model in recipe["models"].items()},
        train=train,
        tests=[with_settings(test) for test in tests],
        controls=[with_settings(test) for test in controls],
        seeds=tuple(recipe.get("seeds", (0, 1, 2))),
    )


def _shared(recipe: Recipe, model: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of all models, as far as one that is not ours has them."""
    kind, shared = config_class(str(model.get("name"))), recipe.get("model", {})
    known = shared if kind is TitansConfig else {each.name for each in fields(kind)}
    return {name: value for name, value in shared.items() if name in known}


def _evaluation(test: Any) -> Evaluation:
    known = [each.name for each in fields(Evaluation)]
    if not isinstance(test, dict) or "tasks" not in test:
        raise ValueError(f"a test is {test!r}; expected fields, tasks among them")
    for name in test:
        if name not in known:
            raise ValueError(f"a test has {name!r}: {nearest(name, known)}")
    tasks = test["tasks"]
    return Evaluation(**test | {"tasks": tuple(tasks) if isinstance(tasks, list) else (tasks,)})


def _settings_of(tasks: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    return {kind.name: kind.settings for kind in map(find_kind, tasks)}


def _known(settings: Mapping[str, Any], tasks: Sequence[str]) -> dict[str, Any]:
    """Those of the settings that one of the tasks has."""
    known = _settings_of(tasks)
    return {
        key: value
        for key, value in settings.items()
        if key.partition(".")[0] in known or any(key in own for own in known.values())
    }


def _babilong(recipe: Recipe, settings: Mapping[str, Any]) -> Recipe:
    """What depends on the task: stories whose questions follow from rules can be asked more than their files do."""
    task = str(settings.get("task", "qa1"))
    train, model, models = dict(recipe["train"]), dict(recipe["model"]), dict(recipe["models"])
    if task in FACTS:
        train |= {"data": f"{train['data']},babi", "shortest": 128}
        train["task"] = {"questions": count_questions(task), "babi.longest": 256}
    if task == "qa2":  # where a thing is follows from who has it and where people are
        # Wider inside, and no longer texts before the shorter ones are learned: seeds stayed on a plateau without. With
        # a tokenizer of words, `--train shortest=32` has no plateau at all.
        model |= {"num_hidden_layers": 4, "memory_heads": 4, "memory_head_dim": 64}
        train["grow_below"] = 0.35
        models["mamba2"] = models["mamba2"] | {"num_hidden_layers": 10}  # of about as many parameters
        # "Mary got the milk" says its value before its key, "Mary went to the garden" after it: convolutions that start
        # with all of a sentence take both. MAC does not learn from there. What is told again replaces what was told
        # before: forgetting besides only loses facts.
        models["lmm"] = models["lmm"] | {"memory_conv_start": "mean", "memory_forgetting": False}
        train["steps"] *= 2
        also = settings.get("also", ALSO)
        asked = count_questions(task, *(also if isinstance(also, (list, tuple)) else ()))
        train["task"] |= {"also": list(ALSO), "questions": asked, "babi.ask": "end"}
        train["forget_cost"] = 1.0  # of the others: a little at every token of 1,024 is most of a fact at 8,192
    name, title = f"babilong-{task}", f"{recipe['title']} {task}"
    return recipe | {"name": name, "title": title, "model": model, "models": models, "train": train}


HOOKS = {"babilong": _babilong}
