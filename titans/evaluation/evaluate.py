"""Tasks on a saved model: a file of results that grows cell by cell, so that nothing measured is ever lost."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import PreTrainedModel

from titans.evaluation.score import CONTROLS, score
from titans.evaluation.statistics import bootstrap
from titans.files import write_atomically
from titans.models.loading import bytes_for, load_model, read_config, sentence
from titans.tasks import Task, example, make_tasks
from titans.training.config import RUN, read_yaml

EVAL = "eval.json"
FORMAT = 1
Result = dict[str, Any]
Progress = Callable[[int, int, str], None]  # cells done, cells in all, the one that is being measured


@dataclass(frozen=True)
class Evaluation:
    """What to measure.

    Attributes:
        model: a folder written by ``save_pretrained``, or a name on the hub.
        tasks: names of :data:`titans.tasks.TASKS`.
        out: folder of the results.
        settings: of the tasks; see :func:`titans.tasks.make_tasks`.
        samples: sequences of a cell, at most.
        seed: of the sequences.
        control: a key of :data:`titans.evaluation.score.CONTROLS`; None: the memory is left alone.
        fields: fields of the model's config that are changed, such as ``memory_chunk_size``.
        device: where it runs.
    """

    model: str
    tasks: tuple[str, ...]
    out: Path
    settings: dict[str, Any] = field(default_factory=dict)
    samples: int = 50
    seed: int = 0
    control: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"samples is {self.samples}; expected at least 1")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; expected at least 0")
        if self.control is not None and self.control not in CONTROLS:
            raise ValueError(f"control is {self.control!r}; expected one of {', '.join(CONTROLS)}")
        if not self.tasks:
            raise ValueError("tasks is empty; expected at least one")


def evaluate(
    evaluation: Evaluation, overwrite: bool = False, progress: Progress | None = None, command: str = ""
) -> Result:
    """Measures what is not measured yet and returns all results, which ``eval.json`` in ``out`` holds, too.

    Args:
        overwrite: replace results that were made otherwise.
        progress: told before each cell.
        command: what the results say they were made with.
    """
    tasks = make_tasks(evaluation.tasks, evaluation.settings)
    model, tokenizer = load_model(evaluation.model, evaluation.device)
    if evaluation.fields:
        model = changed(model, evaluation.fields)
    if tokenizer is None and any(task.vocab_size is None for task in tasks):
        tokenizer = bytes_for(model, evaluation.model)
    result = _open(evaluation, model, overwrite, command)
    plan = [(task, group) for task in tasks for group in task.groups()]
    for task in tasks:
        _describe(task, evaluation, result, overwrite)
    for number, (task, group) in enumerate(plan):
        entry = result["tasks"][key_of(task.name, evaluation)]
        if any(cell["group"] == group for cell in entry["cells"]):
            continue
        if progress is not None:
            words = ", ".join(f"{name} {value}" for name, value in group.items())
            progress(number, len(plan), f"{task.name}: {words}")
        start = time.perf_counter()
        entry["cells"].append(measure(model, task, group, tokenizer, evaluation))
        entry["seconds"] = round(entry["seconds"] + time.perf_counter() - start, 2)
        save_result(evaluation.out, result)
    if progress is not None:
        progress(len(plan), len(plan), "done")
    return result


def key_of(task: str, evaluation: Evaluation) -> str:
    """What a task's results are called: with the control, and with what was changed of the model."""
    changes = [f"{name}={value}" for name, value in sorted(evaluation.fields.items())]
    return " ".join([task, *([evaluation.control] if evaluation.control else []), *changes])


def measure(
    model: PreTrainedModel, task: Task, group: dict[str, Any], tokenizer: Any, evaluation: Evaluation
) -> dict[str, Any]:
    """One cell: the mean over its sequences with its interval, and the loss of a token of the answers."""
    count = task.count(group)
    samples = evaluation.samples if count is None else min(count, evaluation.samples)
    examples = [example(task, "test", evaluation.seed, number, group, tokenizer) for number in range(samples)]
    scores = score(model, examples, evaluation.control)
    values = [fmean(answer.right for answer in answers) for answers in scores]
    losses = [answer.loss for answers in scores for answer in answers]
    loss = sum(losses) / sum(answer.tokens for answers in scores for answer in answers)
    low, high = bootstrap(values, evaluation.seed)
    broken = not math.isfinite(loss)
    return {
        "group": dict(group),
        "value": None if broken else fmean(values),
        "low": None if broken else low,
        "high": None if broken else high,
        "count": len(values),
        "loss": None if broken else loss,
        "values": [round(value, 6) for value in values],
    }


def changed(model: PreTrainedModel, fields: dict[str, Any]) -> PreTrainedModel:
    """The same weights under a config with other fields."""
    from transformers import AutoConfig, AutoModelForCausalLM

    known = model.config.to_dict()
    for name in fields:
        if name not in known:
            raise ValueError(f"{name} is not a field of the model's config")
    try:
        config = AutoConfig.for_model(**(known | fields))
        other = AutoModelForCausalLM.from_config(config)
        other.load_state_dict(model.state_dict())
    except Exception as error:  # each config and module has its own way to refuse a value
        raise ValueError(f"the model cannot be had with {fields}: {sentence(error)}") from None
    return other.to(model.device, model.dtype).eval()


def save_result(folder: Path, result: Result) -> None:
    """Writes ``eval.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / EVAL, json.dumps(result, indent=1, allow_nan=False).encode() + b"\n")


def _open(evaluation: Evaluation, model: PreTrainedModel, overwrite: bool, command: str) -> Result:
    """The results that are there, or none yet; a ``ValueError`` if they are another model's."""
    from titans import __version__

    mark = _fingerprint(model)
    path = evaluation.out / EVAL
    if path.is_file() and not overwrite:
        try:
            result: Result = json.loads(path.read_text(encoding="utf-8"))
            same = result["format"] == FORMAT and result["fingerprint"] == mark
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path} cannot be read; expected results of `titans eval`, or --overwrite") from None
        if not same:
            raise ValueError(f"{path} has results of another model; expected another --out, or --overwrite")
        return result
    name = Path(evaluation.model).resolve().name if Path(evaluation.model).is_dir() else evaluation.model
    return {
        "format": FORMAT,
        "name": name,
        "fingerprint": mark,
        "model": _about(evaluation.model, model),
        "date": time.strftime("%Y-%m-%d"),
        "command": command,
        "versions": {"titans": __version__, "torch": torch.__version__},
        "seed": evaluation.seed,
        "tasks": {},
    }


def _about(name: str, model: PreTrainedModel) -> dict[str, Any]:
    """What kind of model it is, and how it was trained, if its folder tells."""
    folder = Path(name)
    fields = read_config(folder / "config.json") if folder.is_dir() else model.config.to_dict()
    run = read_yaml(folder / RUN) if (folder / RUN).is_file() else {}
    kind = run.get("model", {}).get("name") or fields.get("preset") or fields.get("variant") or fields.get("model_type")
    return {
        "name": kind,
        "parameters": sum(p.numel() for p in model.parameters()),
        "fields": fields,
        "trained_at": run.get("length"),
        "trained_on": run.get("data"),
        "seed": run.get("seed"),
    }


def _fingerprint(model: PreTrainedModel) -> str:
    """Of the weights, whatever the config says of how they are used."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _describe(task: Task, evaluation: Evaluation, result: Result, overwrite: bool) -> None:
    """The entry of a task, new or as it is; a ``ValueError`` if it was made with other settings."""
    key = key_of(task.name, evaluation)
    about = {
        "title": task.title,
        "source": task.source,
        "metric": task.metric,
        "unit": "",
        "better": "higher",
        "chance": task.chance,
        "axes": list(task.axes),
        "settings": json.loads(json.dumps(task.settings())),
        "samples": evaluation.samples,
        "seed": evaluation.seed,
        "control": evaluation.control,
        "fields": evaluation.fields,
        "trained_at": result["model"]["trained_at"],
    }
    old = result["tasks"].get(key)
    if old is not None and not overwrite:
        # lengths and depths may be added to
        fixed = [name for name in about["settings"] if not _is_axis(name, task.axes)]
        for name in ("samples", "seed"):
            if old[name] != about[name]:
                raise ValueError(_differs(key, evaluation.out, name, old[name], about[name]))
        for name in fixed:
            before = old["settings"].get(name)
            if before != about["settings"][name]:
                raise ValueError(_differs(key, evaluation.out, name, before, about["settings"][name]))
        about |= {"cells": old["cells"], "seconds": old["seconds"]}
    else:
        about |= {"cells": [], "seconds": 0.0}
    result["tasks"][key] = about


def _is_axis(name: str, axes: Sequence[str]) -> bool:
    return any(name in (axis, f"{axis}s") for axis in axes)


def _differs(key: str, out: Path, name: str, before: Any, now: Any) -> str:
    return f"{key} in {out} was measured with {name} {before!r}, not {now!r}; expected the same, or --overwrite"
