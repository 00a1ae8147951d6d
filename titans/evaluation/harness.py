"""lm-eval, the common way to compare language models, on our models, with data from the hub or from local files.

``python -m titans.evaluation.harness`` is the command ``lm_eval`` that also knows our models.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar

from titans.evaluation.measure import Cell, Cells, Evaluation, changed_settings, default_settings, refuse_controls
from titans.report.statistics import bootstrap
from titans.tasks import Group
from titans.tasks.commonsense import CHOICES, Row, find_files, read_file, read_local
from titans.words import nearest, require_whole, sentence

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# the paper's common-sense tasks: which of lm-eval's metrics it reports, and where lm-eval defines them, as a search
# through all of its definitions takes many seconds
TASKS = {
    "lambada_openai": ("acc", "lambada/lambada_openai.yaml"),
    "piqa": ("acc", "piqa/piqa.yaml"),
    "hellaswag": ("acc_norm", "hellaswag/hellaswag.yaml"),
    "winogrande": ("acc", "winogrande/default.yaml"),
    "arc_easy": ("acc", "arc/arc_easy.yaml"),
    "arc_challenge": ("acc_norm", "arc/arc_challenge.yaml"),
    "social_iqa": ("acc", "siqa/siqa.yaml"),
    "boolq": ("acc", "super_glue/boolq/default.yaml"),
}
PREFIX = "lm-eval:"  # before the name of any other task of lm-eval
ACCURACIES = ("acc", "acc_norm")  # of lm-eval's metrics, those that are shares of right answers
LONGEST = 1 << 15  # tokens of a text; our models have no limit of their own


@dataclass(frozen=True)
class LmEval:
    """A task of lm-eval, or a group of them.

    Attributes:
        name: of the task as lm-eval knows it, of a file in ``data``, or of a definition in ``include_path``; it may
            have :data:`PREFIX` before it.
        data: a folder of local files, see :func:`local_tasks`; None: all data come from the hub.
        limit: examples per task, at most; None: all.
        batch_size: texts that are read side by side.
        num_fewshot: examples that are shown before each question; None: as the task says.
        include_path: a folder with definitions of more tasks.
    """

    reads_text: ClassVar[bool] = True
    name: str
    data: str | None = None
    limit: int | None = None
    batch_size: int = 8
    num_fewshot: int | None = None
    include_path: str | None = None

    def __post_init__(self) -> None:
        for name in ("data", "include_path"):
            if not isinstance(getattr(self, name), (str, type(None))):
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected the name of a folder")
        require_whole(batch_size=self.batch_size, **({} if self.limit is None else {"limit": self.limit}))
        if self.num_fewshot is not None:
            require_whole(0, num_fewshot=self.num_fewshot)

    def describe(self, cells: Sequence[Cell]) -> dict[str, Any]:
        """What a report says of it; the metric is only known from the cells."""
        metrics = {"accuracy" if cell["metric"] in ACCURACIES else cell["metric"] for cell in cells} or {"accuracy"}
        lower = bool(cells) and all(cell["better"] == "lower" for cell in cells)
        return {
            "title": self.name.removeprefix(PREFIX),
            "source": "lm-eval",
            "metric": metrics.pop() if len(metrics) == 1 else "score",  # a group of tasks may have several
            "unit": "",
            "better": "lower" if lower else "higher",
            "chance": None,
            "axes": ["task"],
            "counted": "examples",
            "settings": changed_settings(self),
        }

    def defaults(self) -> dict[str, Any]:
        """Those of its fields."""
        return default_settings(self)

    def groups(self) -> list[dict[str, Any]]:
        """Everything that the name stands for, at once."""
        return [{}]

    def check(self, evaluation: Evaluation, tokenizer: Any) -> None:
        """Refuses controls."""
        refuse_controls(self.name, evaluation)

    def measure(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        group: Group,
        evaluation: Evaluation,
        controls: Sequence[str | None],
        before: Cells,
    ) -> Iterable[Cells]:
        """One cell per task."""
        cells = run_harness(model, tokenizer, [self.name.removeprefix(PREFIX)], **changed_settings(self))
        for cell in cells:
            if "perplexity" in cell["metrics"] and cell["metric"] != "perplexity":
                cell["whole"] = {"perplexity": cell["metrics"]["perplexity"]}
        return [{None: cells}]


def run_harness(
    model: PreTrainedModel,
    tokenizer: Any,
    tasks: Sequence[str],
    data: str | Path | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    num_fewshot: int | None = None,
    include_path: str | Path | None = None,
) -> list[Cell]:
    """Runs tasks of lm-eval on a model that is in memory, with the settings of :class:`LmEval`.

    Nothing is cut off in silence: a text that is too long for the model is a ``ValueError``.

    Returns:
        one cell per task: group, metric, better (higher or lower), value, low and high (95%), count, values (one per
        example) and metrics, all that lm-eval reports of it.
    """
    from titans.models.tokenizer import quiet_logger  # here, so that the tasks can be listed without transformers

    with quiet_logger("lm_eval"):
        loaded = _load_tasks(tasks, {} if data is None else local_tasks(data), include_path)
        try:
            found = _module("lm_eval").simple_evaluate(
                model=_language_model(model, tokenizer, batch_size),
                tasks=list(loaded.values()),
                task_manager=_module("lm_eval.tasks").TaskManager(include_defaults=False),
                num_fewshot=num_fewshot,
                limit=limit,
                bootstrap_iters=0,
                random_seed=None,
                numpy_random_seed=None,
                torch_random_seed=None,
            )
        except AssertionError as error:  # lm-eval's way to say that an answer would not fit into the model
            raise ValueError(sentence(error)) from None
    return [
        _cell(name, found["results"][name], found["samples"][name], found["higher_is_better"][name]) for name in loaded
    ]


def local_tasks(folder: str | Path) -> dict[str, dict[str, Any]]:
    """lm-eval's definitions of the tasks whose data are in a folder.

    The name of a file or of its folder says which task it is: piqa, hellaswag, winogrande, arc_easy, arc_challenge,
    social_iqa or siqa, boolq, lambada; of several sets, the one that lm-eval judges is taken. The rows may have the
    fields of the original data or of the hub, or query, choices and gold. The prompts are lm-eval's. Any other JSONL
    file with query, choices and gold, or context_options, continuation and gold, is a task under its own name, with
    the query as prompt.
    """
    made = {}
    for name, fields in definitions(Path(folder).expanduser()).items():
        included = fields.pop("include", None)
        common = _module("lm_eval.tasks._yaml_loader").load_yaml(included) if included else {}
        made[name] = common | fields | {"custom_dataset": local_dataset}
    return made


def local_dataset(local_task: str, local_file: str, **other: Any) -> dict[str, Any]:
    """The rows of a file as lm-eval's definition of the task expects them."""
    from datasets import Dataset

    return {"test": Dataset.from_list(read_local(local_task, Path(local_file)))}


def definitions(folder: Path) -> dict[str, dict[str, Any]]:
    """For each task, the fields of its definition that local data change."""
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
                fields["process_docs"] = None  # the rows are processed already
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
    """The definition of a multiple-choice file that is none of lm-eval's tasks."""
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
    path = Path(_module("lm_eval.tasks").__file__).parent / TASKS[name][1]
    if path.is_file():
        return path
    return Path(_module("lm_eval.tasks").TaskManager().task_index[name].yaml_path)


def _load_tasks(
    names: Sequence[str], local: Mapping[str, dict[str, Any]], include_path: str | Path | None
) -> dict[str, Any]:
    """lm-eval's tasks with their data, by name; a group gives several tasks."""
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


def _language_model(model: PreTrainedModel, tokenizer: Any, batch_size: int) -> Any:
    """The model as lm-eval expects it, except that it refuses text that is too long instead of cutting it."""
    from titans.models import TitansForCausalLM

    base: Any = _module("lm_eval.models.huggingface").HFLM
    max_length = LONGEST if isinstance(model, TitansForCausalLM) else None

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
) -> Cell:
    """The cell of the metric that the paper reports, or else of lm-eval's first metric, by its first filter."""
    metrics: dict[str, float | None] = {}
    filters: dict[str, str] = {}
    for key, value in results.items():
        metric, comma, by = key.partition(",")
        if comma and not metric.endswith("_stderr") and isinstance(value, (int, float)) and metric not in metrics:
            metrics[metric] = float(value) if math.isfinite(value) else None
            filters[metric] = by
    if not metrics:
        raise ValueError(f"lm-eval reports no number of {name}; expected another task")
    wanted, _ = TASKS.get(name, (None, None))
    metric = wanted if wanted in metrics else next(iter(metrics))
    judged = [sample for sample in samples if sample["filter"] == filters[metric]]
    values = [sample[metric] for sample in sorted(judged, key=lambda sample: sample["doc_id"])]
    mean = metrics[metric]
    plain = all(isinstance(value, (int, float)) for value in values)
    # a perplexity, for one, is not the mean over its examples
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
