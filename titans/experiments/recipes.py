"""Recipes of experiments, YAML files that say what is trained on what and tested with what; and all names there are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from titans import plugins
from titans.files import configs_folder, read_yaml
from titans.words import nearest

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

# Experiments that are programs, each with its command in titans.cli.experiment.
PROGRAMS = {
    "lm": "Train our models and their baselines at equal parameters on equal tokens, and compare their losses.",
    "shapes": "Find each model's best layers, widths, heads and learning rate at one size, with as many runs for each.",
    "ablation": "Leave out one part of the memory after the other, on text and on recall: the paper's Table 5.",
    "linear": "Is it secretly linear attention? The tests of arXiv 2602.21204 on recall, state tracking and language.",
    "depth": "Train memories of one to four layers and see how the loss falls along the text: the paper's Figure 7.",
    "forecasting": "Train our forecasters and others on the same windows of time series: the paper's Table 3.",
    "genomics": "Classify DNA with our models and others at equal size: the paper's Table 4.",
    "memory": "How many pairs an untrained memory holds, by depth and width, for how long, and what surprises it.",
    "memory-benchmarks": "How much of the evidence a text memory finds in LoCoMo, LongMemEval and BEAM, and its cost.",
    "surprise": "Which part of a text memory's surprise tells a contradiction from ordinary talk.",
    "text-memory": "What the neural memory adds to the search of a text memory, and tests where a memory should win.",
    "throughput": "Training speed against length, and against the memory's depth: the paper's Figures 8 and 9.",
}
ENTRY_POINTS = "titans.experiments"  # a package adds an experiment by an entry point of this group
SUFFIXES = (".yaml", ".yml")
# The fields of a recipe, and what each may be.
FIELDS: dict[str, type] = {
    "extends": str,  # another recipe, whose fields this one takes over: mappings are merged, all else is replaced
    "help": str,  # one sentence for the command line
    "title": str,  # of the report
    "about": str,  # what is asked, in a few sentences
    "model": dict,  # config fields of all models
    "models": dict,  # by label: name, and config fields of one model
    "train": dict,  # fields of TrainConfig
    "training_only": list,  # settings that --set gives to the training and not to the tests
    "tests": list,  # evaluations of each trained model
    "controls": list,  # evaluations of those of our models that write into a memory
    "seeds": list,  # one run of every model for each
}

KINDS = {"str": "text", "dict": "fields", "list": "a list"}


def shipped_recipes() -> dict[str, Path]:
    """The recipes that come with the package, by name; a name that begins with _ is only there to be extended."""
    return {path.stem: path for path in sorted((configs_folder() / "experiments").glob("*.yaml"))}


def added_experiments() -> dict[str, EntryPoint]:
    """The experiments of other packages, not loaded yet."""
    return plugins.added(ENTRY_POINTS, {*PROGRAMS, *shipped_recipes()})


def known_experiments() -> dict[str, str]:
    """All experiments, by name, each with one sentence for the command line."""
    known = dict(PROGRAMS)
    known |= {name: read_recipe(path)["help"] for name, path in shipped_recipes().items() if not name.startswith("_")}
    for name, entry in added_experiments().items():
        known[name] = f"From the package {entry.dist.name if entry.dist else 'that defines it'}."
    return known


def read_recipe(path: Path) -> dict[str, Any]:
    """The fields of a recipe, with those of the recipe that it extends; a ``ValueError`` says what is wrong with it."""
    return _read(path, ())


def _read(path: Path, before: tuple[Path, ...]) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path} does not exist; expected the recipe of an experiment, a YAML file")
    if path.resolve() in before:
        raise ValueError(f"{path} extends itself; expected another recipe")
    recipe = read_yaml(path)
    for name, value in recipe.items():
        if name not in FIELDS:
            raise ValueError(f"{path} has {name!r}: {nearest(name, FIELDS)}")
        if not isinstance(value, FIELDS[name]):
            raise ValueError(f"{name} in {path} is {value!r}; expected {KINDS[FIELDS[name].__name__]}")
    base = recipe.pop("extends", None)
    return recipe if base is None else _merged(_read(_find(base, path), (*before, path.resolve())), recipe)


def _find(name: str, beside: Path) -> Path:
    """A recipe by its name or file: one that stands beside another recipe, or else a shipped one; not that recipe."""
    shipped = shipped_recipes()
    near = [path for path in (beside.parent / name, beside.parent / f"{name}.yaml") if path.suffix in SUFFIXES]
    found = [path for path in (*near, *([shipped[name]] if name in shipped else [])) if path.is_file()]
    if not found:
        raise ValueError(f"extends in {beside} is {name!r}: {nearest(name, shipped)}")
    return next((path for path in found if not path.samefile(beside)), beside)


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    made = dict(base)
    for name, value in over.items():
        both = isinstance(value, dict) and isinstance(made.get(name), dict)
        made[name] = _merged(made[name], value) if both else value
    return made
