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

from titans.evaluation import harness
from titans.evaluation.language import perplexity
from titans.evaluation.score import CONTROLS, score
from titans.evaluation.statistics import bootstrap
from titans.files import write_atomically
from titans.models.loading import bytes_for, load_model, read_config, sentence
from titans.tasks import TASKS, Task, deal_settings, example, make_task, settings_of
from titans.training.config import RUN, read_yaml

EVAL = "eval.json"
FORMAT = 1
PERPLEXITY = "perplexity"
ANY = "lm-eval:"  # before the name of any task of lm-eval
Result = dict[str, Any]
Progress = Callable[[int, int, str], None]  # cells done, cells in all, the one that is being measured


@dataclass(frozen=True)
class Evaluation:
    """What to measure.

    Attributes:
        model: a folder written by ``save_pretrained``, or a name on the hub.
        tasks: names of :data:`titans.tasks.TASKS`, perplexity, or tasks of lm-eval; see :func:`known_settings`.
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
        if self.control is not None and any(name not in TASKS for name in self.tasks):
            raise ValueError(f"control is {self.control!r}; expected tasks of {', '.join(TASKS)}")
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
    settings = deal_settings({name: known_settings(name) for name in evaluation.tasks}, evaluation.settings)
    tasks = [make_task(name, settings[name]) for name in evaluation.tasks if name in TASKS]
    others = [name for name in evaluation.tasks if name not in TASKS]
    model, tokenizer = load_model(evaluation.model, evaluation.device)
    if evaluation.fields:
        model = changed(model, evaluation.fields)
    if tokenizer is None and (others or any(task.vocab_size is None for task in tasks)):
        tokenizer = bytes_for(model, evaluation.model)
    result = _open(evaluation, model, overwrite, command)
    abouts = [_about_task(task) for task in tasks] + [_about_other(name, settings[name]) for name in others]
    for name, about in zip([*(task.name for task in tasks), *others], abouts, strict=True):
        _enter(name, about, evaluation, result, overwrite)
    plan: list[tuple[str, Any, Any]] = [(task.name, task, group) for task in tasks for group in task.groups()]
    plan += [(name, None, None) for name in others]
    for number, (name, task, group) in enumerate(plan):
        entry = result["tasks"][key_of(name, evaluation)]
        if any(cell["group"] == group or task is None for cell in entry["cells"]):
            continue
        if progress is not None:
            words = [] if group is None else [f"{key} {value}" for key, value in group.items()]
            progress(number, len(plan), ", ".join([name, *words]))
        start = time.perf_counter()
        if task is None:
            entry["cells"] += _measure_other(name, model, tokenizer, settings[name])
        else:
            entry["cells"].append(measure(model, task, group, tokenizer, evaluation))
        entry["seconds"] = round(entry["seconds"] + time.perf_counter() - start, 2)
        save_result(evaluation.out, result)
    if progress is not None:
        progress(len(plan), len(plan), "done")
    return result


def known_settings(name: str) -> list[str]:
    """The settings of anything that can be measured; a ``ValueError`` lists what there is."""
    if name in TASKS:
        return settings_of(name)
    if name == PERPLEXITY:
        return ["data", "context", "length", "stride", "split", "limit", "batch_size"]
    if name in harness.TASKS or name.startswith(ANY):
        return ["data", "limit", "batch_size", "num_fewshot", "include_path"]
    known = [*TASKS, PERPLEXITY, *harness.TASKS]
    raise ValueError(f"task is {name!r}; expected one of {', '.join(known)}, or {ANY}NAME, any task of lm-eval")


def _measure_other(name: str, model: PreTrainedModel, tokenizer: Any, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """All cells of what is not asked by a task of ours."""
    if name == PERPLEXITY:
        if "data" not in settings:
            raise ValueError("perplexity needs text; expected the setting data, a file or a prepared folder")
        found = perplexity(model, tokenizer, **settings)
        whole = {key: found[key] for key in ("loss", "perplexity", "bits_per_byte", "tokens")}
        return [cell | {"whole": whole} for cell in found["cells"]]
    cells: list[dict[str, Any]] = harness.evaluate_with_harness(model, tokenizer, [name.removeprefix(ANY)], **settings)[
        "cells"
    ]
    return cells


def _about_other(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    about: dict[str, Any] = {"chance": None, "settings": settings, "unit": ""}
    if name == PERPLEXITY:
        named = {"title": "Loss along the text", "source": "the text that is given", "metric": "loss"}
        return about | named | {"unit": "nats per token", "better": "lower", "axes": ["position"]}
    named = {"title": name.removeprefix(ANY), "source": "lm-eval", "metric": "accuracy", "better": "higher"}
    return about | named | {"axes": ["task"]}


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


def _about_task(task: Task) -> dict[str, Any]:
    return {
        "title": task.title,
        "source": task.source,
        "metric": task.metric,
        "unit": "",
        "better": "higher",
        "chance": task.chance,
        "axes": list(task.axes),
        "settings": json.loads(json.dumps(task.settings())),
    }


def _enter(name: str, about: dict[str, Any], evaluation: Evaluation, result: Result, overwrite: bool) -> None:
    """The entry of a task, new or as it is; a ``ValueError`` if it was made with other settings."""
    key = key_of(name, evaluation)
    about |= {
        "samples": evaluation.samples,
        "seed": evaluation.seed,
        "control": evaluation.control,
        "fields": evaluation.fields,
        "trained_at": result["model"]["trained_at"],
        "cells": [],
        "seconds": 0.0,
    }
    old = result["tasks"].get(key)
    if old is not None and not overwrite:
        for each in ("samples", "seed"):
            if old[each] != about[each]:
                raise ValueError(_differs(key, evaluation.out, each, old[each], about[each]))
        for each in {**old["settings"], **about["settings"]}:
            before, now = old["settings"].get(each), about["settings"].get(each)
            if before != now and not _is_axis(each, about["axes"]):  # lengths and depths may be added to
                raise ValueError(_differs(key, evaluation.out, each, before, now))
        about |= {"cells": old["cells"], "seconds": old["seconds"]}
    result["tasks"][key] = about


def _is_axis(name: str, axes: Sequence[str]) -> bool:
    return any(name in (axis, f"{axis}s") for axis in axes)


def _differs(key: str, out: Path, name: str, before: Any, now: Any) -> str:
    return f"{key} in {out} was measured with {name} {before!r}, not {now!r}; expected the same, or --overwrite"
