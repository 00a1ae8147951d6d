"""Our models in lm-eval, the common way to compare language models, with its data from the hub or from local files.

``python -m titans.evaluation.harness`` is the command ``lm_eval`` with our models known to it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import Any

from transformers import PreTrainedModel

from titans.evaluation.score import score
from titans.models import TitansForCausalLM
from titans.models.tokenizer import quiet_logger
from titans.report.statistics import bootstrap
from titans.tasks import Answer, Example
from titans.tasks.commonsense import CHOICES, SCHEMA, Row, find_files, read_file, read_local
from titans.tasks.language import join_tokens
from titans.words import nearest, require_whole, sentence

# the common-sense tasks of the paper, and which of lm-eval's numbers it reports
TASKS = {
    "lambada_openai": "acc",
    "piqa": "acc",
    "hellaswag": "acc_norm",
    "winogrande": "acc",
    "arc_easy": "acc",
    "arc_challenge": "acc_norm",
    "social_iqa": "acc",
    "boolq": "acc",
}
# where lm-eval defines them: to look through all of its definitions takes many seconds
DEFINITIONS = {
    "lambada_openai": "lambada/lambada_openai.yaml",
    "piqa": "piqa/piqa.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "winogrande": "winogrande/default.yaml",
    "arc_easy": "arc/arc_easy.yaml",
    "arc_challenge": "arc/arc_challenge.yaml",
    "social_iqa": "siqa/siqa.yaml",
    "boolq": "super_glue/boolq/default.yaml",
}
LONGEST = 1 << 15  # tokens of a call; our models have no longest text


def evaluate_with_harness(
    model: PreTrainedModel,
    tokenizer: Any,
    tasks: Sequence[str],
    *,
    data: str | Path | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    max_length: int | None = None,
    num_fewshot: int | None = None,
    include_path: str | Path | None = None,
) -> dict[str, Any]:
    """Runs tasks of lm-eval on a model that is in memory.

    Nothing is cut off in silence: a text that is too long for the model is a ``ValueError``.

    Args:
        tasks: names of lm-eval's tasks, of the files in ``data``, and of the definitions in ``include_path``.
        data: a folder of local files, see :func:`local_tasks`; None: all data come from the hub.
        limit: examples of a task, at most; None: all.
        batch_size: texts that are read side by side.
        max_length: tokens of a text, at most; None: as many as the model can read, 32,768 for ours.
        num_fewshot: examples that are shown before each question; None: as the task says.
        include_path: a folder with definitions of more tasks.

    Returns:
        ``{"cells": [...]}``, a cell for each task: group, metric, better (higher or lower), value, low and high (95%),
        count, values (one for each example) and metrics, all that lm-eval reports of it.
    """
    if not tasks:
        raise ValueError("tasks is empty; expected at least one name")
    check_options(data, limit, batch_size, num_fewshot, include_path)
    with quiet_logger("lm_eval"):
        loaded = _load_tasks(tasks, {} if data is None else local_tasks(data), include_path)
        try:
            found = _module("lm_eval").simple_evaluate(
                model=_language_model(model, tokenizer, batch_size, max_length),
                tasks=list(loaded.values()),
                task_manager=_module("lm_eval.tasks").TaskManager(include_defaults=False),
                num_fewshot=num_fewshot,
                limit=limit,
                bootstrap_iters=0,
                random_seed=None,
                numpy_random_seed=None,
                torch_random_seed=None,
            )
        except AssertionError as error:  # how lm-eval says that an answer would not fit into the model
            raise ValueError(sentence(error)) from None
    return {
        "cells": [
            _cell(name, found["results"][name], found["samples"][name], found["higher_is_better"][name])
            for name in loaded
        ]
    }


def check_options(
    data: Any = None, limit: Any = None, batch_size: Any = 8, num_fewshot: Any = None, include_path: Any = None
) -> None:
    """Raises a ``ValueError`` if these are no options of :func:`evaluate_with_harness`, whatever they are."""
    for name, folder in (("data", data), ("include_path", include_path)):
        if not isinstance(folder, (str, Path, type(None))):
            raise ValueError(f"{name} is {folder!r}; expected the name of a folder")
    require_whole(batch_size=batch_size, **({} if limit is None else {"limit": limit}))
    if num_fewshot is not None:
        require_whole(0, num_fewshot=num_fewshot)


def choice_scores(model: PreTrainedModel, tokenizer: Any, rows: Sequence[Row]) -> dict[str, Any]:
    """Multiple choice as lm-eval judges it, without lm-eval.

    Args:
        rows: each with a query, choices and gold, the number of the right one; or with context_options, a continuation
            that follows one of them, and gold.

    Returns:
        loglikelihoods, those of the choices of each row; acc, the share of rows whose likeliest choice is right;
        acc_norm, the same by likelihood per character, None where the choices are contexts; and values, 0 or 1 a row.
    """
    pairs = [_pairs(row, number) for number, row in enumerate(rows, start=1)]
    if not pairs:
        raise ValueError("rows is empty; expected at least one")
    found = iter(log_likelihoods(model, tokenizer, [pair for row in pairs for pair in row]))
    likelihoods = [[next(found) for _ in row] for row in pairs]
    values = [float(_best(scores) == row["gold"]) for scores, row in zip(likelihoods, rows, strict=True)]
    norm = None
    if all(row.keys() >= CHOICES for row in rows):
        each = [
            [score / len(choice) for score, choice in zip(scores, row["choices"], strict=True)]
            for scores, row in zip(likelihoods, rows, strict=True)
        ]
        norm = fmean(_best(scores) == row["gold"] for scores, row in zip(each, rows, strict=True))
    return {"loglikelihoods": likelihoods, "acc": fmean(values), "acc_norm": norm, "values": values}


def log_likelihoods(model: PreTrainedModel, tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> list[float]:
    """Of each second text after the first one, in nats."""
    examples = []
    for context, continuation in pairs:
        tokens, place = join_tokens(tokenizer, context, continuation)
        examples.append(Example(tokens, (Answer(place, tuple(tokens[place:])),)))
    return [-answer.loss for (answer,) in score(model, examples)]


def _pairs(row: Row, number: int) -> list[tuple[str, str]]:
    if row.keys() >= CHOICES:
        pairs = [(row["query"], f" {choice}") for choice in row["choices"]]
    elif row.keys() >= SCHEMA:
        pairs = [(context, f" {row['continuation']}") for context in row["context_options"]]
    else:
        raise ValueError(
            f"row {number} has {', '.join(row)}; expected query, choices and gold, "
            "or context_options, continuation and gold"
        )
    if row["gold"] not in range(len(pairs)):
        raise ValueError(f"gold is {row['gold']!r} in row {number}; expected a number from 0 to {len(pairs) - 1}")
    return pairs


def _best(scores: Sequence[float]) -> int:
    return max(range(len(scores)), key=scores.__getitem__)


def local_tasks(folder: str | Path) -> dict[str, dict[str, Any]]:
    """Definitions for lm-eval of the tasks whose data are in a folder.

    What a file is, its name or its folder's says: piqa, hellaswag, winogrande, arc_easy, arc_challenge, social_iqa or
    siqa, boolq, lambada; of several sets, the one that lm-eval judges is taken. The rows may have the fields of the
    original data or of the hub, or query, choices and gold. The prompts are lm-eval's. Any other JSONL file with query,
    choices and gold, or context_options, continuation and gold, is a task under its own name, with the query as prompt.
    """
    made = {}
    for name, fields in definitions(Path(folder).expanduser()).items():
        included = fields.pop("include", None)
        common = _module("lm_eval.tasks._yaml_loader").load_yaml(included) if included else {}
        made[name] = common | fields | {"custom_dataset": local_dataset}
    return made


def local_dataset(local_task: str, local_file: str, **other: Any) -> dict[str, Any]:
    """The rows of a file as lm-eval's definition of a task wants them."""
    from datasets import Dataset

    return {"test": Dataset.from_list(read_local(local_task, Path(local_file)))}


def definitions(folder: Path) -> dict[str, dict[str, Any]]:
    """The fields of each task's definition that local data change, by the name of the task."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; expected one with the data of tasks")
    made = {}
    for name, path in find_files(folder).items():
        fields: dict[str, Any] = {
            "task": name,
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"local_task": name, "local_file": str(path.resolve())},
            "training_split": None,
            "validation_split": None,
            "test_split": "test",
        }
        if name in TASKS:
            fields = {"include": str(_definition(name))} | fields
            if name == "hellaswag" and _first_row(path).keys() >= CHOICES:
                fields["process_docs"] = None  # it is done already
        else:
            fields |= _own(_first_row(path))
        made[name] = fields
    return made


def _first_row(path: Path) -> Row:
    rows = read_file(path)
    if not rows:
        raise ValueError(f"{path} is empty; expected the rows of a task")
    return rows[0]


def _own(row: Row) -> dict[str, Any]:
    """How a multiple-choice file of one's own is judged."""
    means = [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]
    if row.keys() >= CHOICES:
        asked = {"doc_to_text": "{{query}}", "doc_to_choice": "{{choices}}", "doc_to_target": "{{gold}}"}
        means.append({"metric": "acc_norm", "aggregation": "mean", "higher_is_better": True})
    else:
        asked = {"doc_to_text": "gold", "doc_to_choice": "{{context_options}}", "doc_to_target": "{{continuation}}"}
    return {"output_type": "multiple_choice", "metric_list": means, "metadata": {"version": 1.0}, **asked}


def _module(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ValueError(f"lm-eval cannot be loaded ({sentence(error)}); expected it to be installed") from error


def _definition(name: str) -> Path:
    """The file that lm-eval defines a task in."""
    path = Path(_module("lm_eval.tasks").__file__).parent / DEFINITIONS[name]
    if path.is_file():
        return path
    return Path(_module("lm_eval.tasks").TaskManager().task_index[name].yaml_path)


def _load_tasks(
    names: Sequence[str], local: Mapping[str, dict[str, Any]], include_path: str | Path | None
) -> dict[str, Any]:
    """lm-eval's tasks with their data, by name; a group of tasks gives several."""
    make = _module("lm_eval.tasks").TaskManager
    known = make(include_defaults=False, include_path=None if include_path is None else str(include_path))
    loaded: dict[str, Any] = {}
    for name in names:
        spec: Any = local.get(name, name)
        if spec is name and name not in known.all_tasks:
            if name in TASKS:
                spec = str(_definition(name))
            else:
                known = make(include_path=None if include_path is None else str(include_path))
                if name not in known.all_tasks:
                    raise ValueError(f"task is {name!r}: {nearest(name, [*local, *known.all_tasks])}")
        try:
            loaded |= known.load([spec])["tasks"]
        except Exception as error:  # each reader of data has its own way to fail
            where = "read" if name in local else "had from the hub, and there is no local file of them"
            raise ValueError(f"the data of {name} cannot be {where}: {sentence(error)}") from error
    return loaded


def _language_model(model: PreTrainedModel, tokenizer: Any, batch_size: int, max_length: int | None) -> Any:
    """The model as lm-eval wants it, but one that refuses what is too long instead of cutting it."""
    base: Any = _module("lm_eval.models.huggingface").HFLM
    if max_length is None and isinstance(model, TitansForCausalLM):
        max_length = LONGEST

    class Model(base):
        def _loglikelihood_tokens(self, requests: Any, **options: Any) -> Any:
            for _, context, continuation in requests:
                _check_length(len(context) + len(continuation) - 1, self.max_length)
            return super()._loglikelihood_tokens(requests, **options)

        def tok_batch_encode(
            self, strings: Any, *args: Any, left_truncate_len: int | None = None, **options: Any
        ) -> Any:
            ids, mask = super().tok_batch_encode(strings, *args, **options)
            if left_truncate_len is not None:
                _check_length(ids.shape[1], left_truncate_len)
            return ids, mask

    return Model(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch_size, max_length=max_length)


def _check_length(length: int, longest: int) -> None:
    if length > longest:
        raise ValueError(f"a text has {length:,} tokens; expected at most {longest:,}, as many as the model can read")


def _cell(
    name: str, results: Mapping[str, Any], samples: Sequence[Mapping[str, Any]], higher: Mapping[str, bool | None]
) -> dict[str, Any]:
    """Of the metric that the paper reports, or else of lm-eval's first, by the first filter that it is reported for."""
    metrics: dict[str, float | None] = {}
    filters: dict[str, str] = {}
    for key, value in results.items():
        metric, comma, by = key.partition(",")
        if comma and not metric.endswith("_stderr") and isinstance(value, (int, float)) and metric not in metrics:
            metrics[metric] = float(value) if math.isfinite(value) else None
            filters[metric] = by
    if not metrics:
        raise ValueError(f"lm-eval reports no number of {name}; expected another task")
    metric = TASKS[name] if TASKS.get(name) in metrics else next(iter(metrics))
    judged = [sample for sample in samples if sample["filter"] == filters[metric]]
    values = [sample[metric] for sample in sorted(judged, key=lambda sample: sample["doc_id"])]
    mean = metrics[metric]
    plain = all(isinstance(value, (int, float)) for value in values)
    # a perplexity, for one, is not the mean of what its examples have
    plain = plain and mean is not None and math.isclose(fmean(values), mean, rel_tol=1e-6, abs_tol=1e-9)
    low, high = bootstrap(values) if plain else (None, None)
    return {
        "group": {"task": name},
        "metric": metric,
        "better": "lower" if higher.get(metric) is False else "higher",
        "value": mean,
        "low": low,
        "high": high,
        "count": len(values),
        "values": [round(float(value), 6) for value in values] if plain else [],
        "metrics": metrics,
    }


def main() -> None:
    """The command ``lm_eval``."""
    _module("lm_eval.__main__").cli_evaluate()


if __name__ == "__main__":
    main()
