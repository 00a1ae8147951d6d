"""Measures on a saved model: a file of results that grows cell by cell, so that nothing measured is ever lost."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from titans.evaluation.kinds import make_measures
from titans.evaluation.measure import Cell, Cells, Evaluation, Measure
from titans.files import EVAL, EVAL_FOLDER, RUN, locked, read_yaml, write_atomically
from titans.models.loading import bytes_for, changed, load_model, peak_memory, read_config
from titans.report.progress import Progress, silent
from titans.report.results import FORMAT
from titans.report.statistics import as_number

WAIT = 60.0  # seconds to wait for another process that is writing results
Result = dict[str, Any]  # what eval.json holds
Entry = dict[str, Any]  # one of its tasks


def evaluate(
    model: str,
    evaluation: Evaluation | Sequence[Evaluation],
    out: Path | None = None,
    *,
    device: str = "auto",
    overwrite: bool = False,
    progress: Progress = silent,
    command: str = "",
) -> Result:
    """Measures what is not measured yet and returns all results, which are also in ``eval.json`` in ``out``.

    Several processes may evaluate the same model at once: each adds what it has measured to what is there.

    Args:
        model: a folder written by ``save_pretrained``, or a name on the hub.
        evaluation: what to measure; or several that differ in their control alone, which share the reading.
        out: folder of the results; None: :func:`results_folder`.
        device: see :func:`titans.models.loading.choose_device`.
        overwrite: measure these tasks anew, and replace results of another model, or what cannot be read.
        progress: called before each group.
        command: what the results say they were made with.
    """
    from titans import __version__

    out = out or results_folder(model)
    asked = [evaluation] if isinstance(evaluation, Evaluation) else list(evaluation)
    evaluation = asked[0]
    if any(replace(each, control=evaluation.control) != evaluation for each in asked):
        raise ValueError("the evaluations differ in more than their control; expected one call for each")
    measures = make_measures(evaluation)
    loaded, tokenizer = load_model(model, device)
    if evaluation.fields:
        loaded = changed(loaded, evaluation.fields)
    if tokenizer is None and any(measure.reads_text for measure in measures):
        tokenizer = bytes_for(loaded, model)
    for measure in measures:
        for each in asked:
            measure.check(each, tokenizer)
    empty = _empty(model, loaded)
    keys = {(m.name, each.control): key_of(m.name, each) for m in measures for each in asked}
    anew = set(keys.values()) if overwrite else set()

    def merged(result: Result, measure: Measure, each: Evaluation, cells: Sequence[Cell] = ()) -> Entry:
        key = keys[measure.name, each.control]
        old = None if key in anew else result["tasks"].get(key)
        return _merge(old, cells, measure, each, f"{key} in {out}") | {"trained_at": empty["model"]["trained_at"]}

    with locked(out, "titans eval", WAIT):
        result = _read(out, empty, overwrite)
    plan: list[tuple[Measure, dict[str, Any], Cells]] = []
    # refuses other settings before any work
    entries = {(m.name, each.control): merged(result, m, each) for m in measures for each in asked}
    for measure in measures:
        for group in measure.groups():
            before = {each.control: entries[measure.name, each.control]["cells"] for each in asked}
            left: Cells = {c: [cell for cell in cells if cell["group"] == group] for c, cells in before.items()}
            left = {control: cells for control, cells in left.items() if not _has(before[control], group)}
            plan += [(measure, group, left)] if left else []
    versions = {"titans": __version__, "torch": torch.__version__}
    call = {"command": command, "date": time.strftime("%Y-%m-%d"), "seed": evaluation.seed, "versions": versions}
    for number, (measure, group, unfinished) in enumerate(plan):
        words = (f"{key} {value}" for key, value in group.items())
        progress(number, len(plan), ", ".join([measure.name, *words]))
        start = time.perf_counter()
        for grown in measure.measure(loaded, tokenizer, group, evaluation, list(unfinished), unfinished):
            seconds, start = time.perf_counter() - start, time.perf_counter()
            cost = {"group": group, "seconds": round(seconds, 2), "peak_memory": as_number(peak_memory(loaded.device))}
            with locked(out, "titans eval", WAIT):  # another process may have added to the file
                result = _read(out, empty, overwrite)
                for each in asked:
                    if each.control not in grown:
                        continue
                    entry = merged(result, measure, each, grown[each.control])
                    entry["seconds"] = round(entry["seconds"] + seconds / len(grown), 2)
                    entry["reading"] = _add_cost(entry["reading"], cost)
                    entry["made"] += [call] if call not in entry["made"] else []
                    key = keys[measure.name, each.control]
                    result["tasks"][key] = entry
                    anew.discard(key)
                write_atomically(out / EVAL, json.dumps(result, indent=1, allow_nan=False).encode() + b"\n")
    progress(len(plan), len(plan), "done")
    return result


def results_folder(model: str | Path) -> Path:
    """Where the results of a model go by default: into its folder, or into ``eval`` for a model of the hub."""
    return Path(model) / EVAL_FOLDER if Path(model).is_dir() else Path(EVAL_FOLDER) / Path(model).name


def key_of(task: str, evaluation: Evaluation) -> str:
    """The key of a task's results, with the control and the changed fields of the model."""
    changes = [f"{name}={value}" for name, value in sorted(evaluation.fields.items())]
    return " ".join([task, *([evaluation.control] if evaluation.control else []), *changes])


def _merge(old: Entry | None, cells: Sequence[Cell], measure: Measure, evaluation: Evaluation, where: str) -> Entry:
    """An entry with more cells, and with the lengths and depths of both; a ``ValueError`` if the settings differ."""
    before = old or {"cells": [], "seconds": 0.0}
    more = [cell for cell in cells if not _has(before["cells"], cell["group"])]
    grown = [cell["group"] for cell in more]
    kept = [cell for cell in before["cells"] if not ("missing" in cell and cell["group"] in grown)]
    entry = measure.describe([*kept, *more])
    entry |= {
        "samples": evaluation.samples,
        "seed": evaluation.seed,
        "control": evaluation.control,
        "fields": evaluation.fields,
        "cells": [*kept, *more],
        "made": [*before.get("made", [])],
        "reading": [*before.get("reading", [])],
        "seconds": before["seconds"],
    }
    if old is not None:
        for name in ("samples", "seed", "axes"):
            _require_same(where, name, old[name], entry[name])
        settings, defaults = entry["settings"], measure.defaults()
        for name in {**old["settings"], **settings}:
            # a setting that the task did not have yet was at what is its default now
            then, now = old["settings"].get(name, _plain(defaults.get(name))), settings.get(name)
            if _is_axis(name, entry["axes"]) and isinstance(then, list) and isinstance(now, list):
                settings[name] = [*then, *(value for value in now if value not in then)]
            else:
                _require_same(where, name, then, now)
    return entry


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _has(cells: Sequence[Cell], group: Mapping[str, Any]) -> bool:
    """Whether a group was measured, to its end."""
    return any(group.items() <= cell["group"].items() and "missing" not in cell for cell in cells)


def _add_cost(costs: Sequence[Mapping[str, Any]], more: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What each group has cost: the seconds, of all controls that share the reading, and the most memory so far."""
    same = [cost for cost in costs if cost["group"] == more["group"]]
    seconds = round(sum(cost["seconds"] for cost in (*same, more)), 2)
    return [*(cost for cost in costs if cost not in same), {**more, "seconds": seconds}]


def _is_axis(name: str, axes: Sequence[str]) -> bool:
    return any(name in (axis, f"{axis}s") for axis in axes)


def _require_same(where: str, name: str, then: Any, now: Any) -> None:
    if then != now:
        raise ValueError(f"{where} was measured with {name} {then!r}, not {now!r}; expected the same, or --overwrite")


def _read(out: Path, empty: Result, overwrite: bool) -> Result:
    """The results in the folder, or none yet; a ``ValueError`` if they are another model's and must stay."""
    path = out / EVAL
    if not path.is_file():
        return json.loads(json.dumps(empty))
    try:
        result: Result = json.loads(path.read_text(encoding="utf-8"))
        readable = result["format"] == FORMAT and {"fingerprint", "tasks"} <= result.keys()
    except (ValueError, KeyError, TypeError):
        readable = False
    if readable and result["fingerprint"] == empty["fingerprint"]:
        return result
    if overwrite:
        return json.loads(json.dumps(empty))
    if not readable:
        raise ValueError(f"{path} cannot be read; expected results of `titans eval`, or --overwrite")
    raise ValueError(f"{path} has results of another model; expected another --out, or --overwrite")


def _empty(name: str, model: PreTrainedModel) -> Result:
    """Results without tasks: what kind of model it is, and how it was trained, as far as its folder tells."""
    folder = Path(name)
    fields = read_config(folder / "config.json") if folder.is_dir() else model.config.to_dict()
    run = read_yaml(folder / RUN) if (folder / RUN).is_file() else {}
    kind = run.get("model", {}).get("name") or fields.get("preset") or fields.get("variant") or fields.get("model_type")
    about = {
        "name": kind,
        "parameters": sum(p.numel() for p in model.parameters()),
        "fields": fields,
        "trained_at": run.get("length"),
        "trained_on": run.get("data"),
        "seed": run.get("seed"),
    }
    return {
        "format": FORMAT,
        "name": folder.resolve().name if folder.is_dir() else name,
        "fingerprint": _fingerprint(model),
        "model": about,
        "tasks": {},
    }


def _fingerprint(model: PreTrainedModel) -> str:
    """A hash of the weights alone: fields of the config may change."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
