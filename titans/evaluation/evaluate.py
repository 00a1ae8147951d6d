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

from titans.evaluation import harness, language
from titans.evaluation.score import CONTROLS, score
from titans.files import EVAL, RUN, read_yaml, write_atomically
from titans.models.loading import bytes_for, load_model, read_config
from titans.report.results import FORMAT
from titans.report.statistics import bootstrap
from titans.tasks import TASKS, Task, deal_settings, example, make_task, settings_of
from titans.tasks.language import Lambada
from titans.words import sentence

PERPLEXITY = "perplexity"
ANY = "lm-eval:"  # before the name of any task of lm-eval
ACCURACIES = ("acc", "acc_norm")  # of lm-eval's metrics, those that are shares of right answers
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
        overwrite: measure these tasks anew, and replace what is there of another model, or cannot be read.
        progress: told before each cell.
        command: what the results say they were made with.
    """
    from titans import __version__

    tasks, others = prepare(evaluation)
    model, tokenizer = load_model(evaluation.model, evaluation.device)
    if evaluation.fields:
        model = changed(model, evaluation.fields)
    if tokenizer is None and (others or any(task.vocab_size is None for task in tasks)):
        tokenizer = bytes_for(model, evaluation.model)
    result = _open(evaluation, model, overwrite)
    abouts = {task.name: _about_task(task) for task in tasks}
    abouts |= {name: _about_other(name, settings) for name, settings in others.items()}
    for name, about in abouts.items():
        _enter(name, about, evaluation, result, overwrite)
    versions = {"titans": __version__, "torch": torch.__version__}
    call = {"command": command, "date": time.strftime("%Y-%m-%d"), "seed": evaluation.seed, "versions": versions}
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
            entry |= _measure_other(name, model, tokenizer, others[name])
        else:
            entry["cells"].append(measure(model, task, group, tokenizer, evaluation))
        if call not in entry["made"]:
            entry["made"].append(call)
        entry["seconds"] = round(entry["seconds"] + time.perf_counter() - start, 2)
        save_result(evaluation.out, result)
    if progress is not None:
        progress(len(plan), len(plan), "done")
    return result


def rehearse(evaluation: Evaluation, tokenizer: Any) -> None:
    """Draws a sequence of every cell without a model; a ``ValueError`` says what will not be had."""
    for task in prepare(evaluation)[0]:
        for group in task.groups():
            example(task, "test", evaluation.seed, 0, group, tokenizer)


def prepare(evaluation: Evaluation) -> tuple[list[Task], dict[str, dict[str, Any]]]:
    """The tasks of ours, and the settings of everything else; a ``ValueError`` if there is no such thing."""
    settings = deal_settings({name: known_settings(name) for name in evaluation.tasks}, evaluation.settings)
    others = {name: settings[name] for name in evaluation.tasks if name not in TASKS}
    for name, own in others.items():
        if name != PERPLEXITY:
            harness.check_options(**own)
        elif "data" not in own:
            raise ValueError("perplexity needs text; expected the setting data, a file or a prepared folder")
        else:
            language.check_options(**own)
    return [make_task(name, settings[name]) for name in evaluation.tasks if name in TASKS], others


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


def _measure_other(name: str, model: PreTrainedModel, tokenizer: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """All cells of what is not asked by a task of ours, and what is only known now: metric and better."""
    if name == PERPLEXITY:
        found = language.perplexity(model, tokenizer, **settings)
        whole = {key: found[key] for key in ("loss", "perplexity", "bits_per_byte", "tokens")}
        return {"cells": [cell | {"whole": whole} for cell in found["cells"]]}
    cells = harness.evaluate_with_harness(model, tokenizer, [name.removeprefix(ANY)], **settings)["cells"]
    for cell in cells:
        if "perplexity" in cell["metrics"] and cell["metric"] != "perplexity":
            cell["whole"] = {"perplexity": cell["metrics"]["perplexity"]}
    metrics = {"accuracy" if cell["metric"] in ACCURACIES else cell["metric"] for cell in cells}
    lower = all(cell["better"] == "lower" for cell in cells)
    return {
        "cells": cells,
        "metric": metrics.pop() if len(metrics) == 1 else "score",  # a group of tasks may have several
        "better": "lower" if lower else "higher",
    }


def _about_other(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    about: dict[str, Any] = {"chance": None, "settings": settings, "unit": ""}
    if name == PERPLEXITY:
        named = {"title": "Loss along the text", "source": "the text that is given", "metric": "loss"}
        return about | named | {"unit": "nats per token", "better": "lower", "axes": ["position"], "counted": "tokens"}
    named = {"title": name.removeprefix(ANY), "source": "lm-eval", "metric": "accuracy", "better": "higher"}
    return about | named | {"axes": ["task"], "counted": "examples"}


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
    cell = {
        "group": dict(group),
        "value": None if broken else fmean(values),
        "low": None if broken else low,
        "high": None if broken else high,
        "count": len(values),
        "loss": None if broken else loss,
        "values": [round(value, 6) for value in values],
    }
    if isinstance(task, Lambada) and not broken:  # of a word, as in the papers, and not of a token
        cell["whole"] = {"perplexity": math.exp(min(fmean(losses), 700.0))}
    return cell


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


def _open(evaluation: Evaluation, model: PreTrainedModel, overwrite: bool) -> Result:
    """The results that are there, or none yet; a ``ValueError`` if they are another model's and are to stay."""
    mark = _fingerprint(model)
    path = evaluation.out / EVAL
    if path.is_file():
        old = _read(path)
        if old is not None and old["fingerprint"] == mark:
            return old
        if not overwrite and old is None:
            raise ValueError(f"{path} cannot be read; expected results of `titans eval`, or --overwrite")
        if not overwrite:
            raise ValueError(f"{path} has results of another model; expected another --out, or --overwrite")
    name = Path(evaluation.model).resolve().name if Path(evaluation.model).is_dir() else evaluation.model
    return {
        "format": FORMAT,
        "name": name,
        "fingerprint": mark,
        "model": _about(evaluation.model, model),
        "tasks": {},
    }


def _read(path: Path) -> Result | None:
    try:
        result: Result = json.loads(path.read_text(encoding="utf-8"))
        return result if result["format"] == FORMAT and {"fingerprint", "tasks"} <= result.keys() else None
    except (ValueError, KeyError, TypeError):
        return None


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
        "counted": "sequences",
        "settings": json.loads(json.dumps(task.settings())),
    }


def _enter(name: str, about: dict[str, Any], evaluation: Evaluation, result: Result, overwrite: bool) -> None:
    """The entry of a task, new or as it is, with the lengths and depths of both; a ``ValueError`` if it was made with
    other settings."""
    key = key_of(name, evaluation)
    about |= {
        "samples": evaluation.samples,
        "seed": evaluation.seed,
        "control": evaluation.control,
        "fields": evaluation.fields,
        "trained_at": result["model"]["trained_at"],
        "cells": [],
        "made": [],
        "seconds": 0.0,
    }
    old = result["tasks"].get(key)
    if old is not None and not overwrite:
        for each in ("samples", "seed", "axes"):
            if old[each] != about[each]:
                raise ValueError(_differs(key, evaluation.out, each, old[each], about[each]))
        for each in {**old["settings"], **about["settings"]}:
            before, now = old["settings"].get(each), about["settings"].get(each)
            if _is_axis(each, about["axes"]) and isinstance(before, list) and isinstance(now, list):
                about["settings"][each] = [*before, *(value for value in now if value not in before)]
            elif before != now:
                raise ValueError(_differs(key, evaluation.out, each, before, now))
        about |= {name: old[name] for name in ("metric", "better", "cells", "seconds")}
        about["made"] = old.get("made", [])
    result["tasks"][key] = about


def _is_axis(name: str, axes: Sequence[str]) -> bool:
    return any(name in (axis, f"{axis}s") for axis in axes)


def _differs(key: str, out: Path, name: str, before: Any, now: Any) -> str:
    return f"{key} in {out} was measured with {name} {before!r}, not {now!r}; expected the same, or --overwrite"
