"""`titans adapt`: a window of attention and a memory for a causal model that somebody else trained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from titans.cli.common import Device, bar, check_output, names, numbers, one_sentence, pairs, require, this_command

app = typer.Typer(help="Give a causal model of transformers a window of attention, and a memory of what left it.")

Texts = Annotated[
    Path | None,
    typer.Option(
        help="A text file, or a folder of .txt files: the first eight tenths to learn from, the last to test with. "
        "Default: a short text of our own."
    ),
]
Adapter = Annotated[Path, typer.Argument(help="A folder written by titans adapt calibrate or fit.")]
Tasks = Annotated[
    str,
    typer.Option(
        help="Tasks that ask for what stands far back, with commas between them; titans eval --list shows all."
    ),
]
Setting = Annotated[
    list[str],
    typer.Option("--set", help="Change a setting of the tasks, NAME=VALUE or TASK.NAME=VALUE. May be repeated."),
]
TASKS = "needle-essay"
RESULTS = "results.json"
PROBE = "probe"


@app.callback(invoke_without_command=True)
def _adapt(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command("calibrate")
def calibrate(
    model: Annotated[
        str,
        typer.Argument(
            help="A folder, a name on the hub, a GGUF file, or local: SmolLM2-135M, which comes as a package."
        ),
    ],
    texts: Texts = None,
    out: Annotated[Path, typer.Option(help="The folder for the adapter, new or empty.")] = Path("runs/adapter"),
    window: Annotated[int, typer.Option(min=1, help="How many tokens attention sees.")] = 256,
    sinks: Annotated[int, typer.Option(min=0, help="How many of the first tokens it sees besides.")] = 4,
    taps: Annotated[
        str | None,
        typer.Option(
            help="Layers whose states are a memory's keys, joined by +; commas between several memories, such as "
            "6+12,15+21. Default: two memories, at 20% and 40% of the layers, and at 50% and 70%. probe: the second "
            "listens at the layer that a probe on the texts finds best."
        ),
    ] = None,
    field: Annotated[
        list[str],
        typer.Option(help="Change a setting of the memory, NAME=VALUE, such as features=1024. May be repeated."),
    ] = [],  # noqa: B006
    samples: Annotated[int, typer.Option(min=1, help="How many texts to look at.")] = 8,
    length: Annotated[int, typer.Option(min=16, help="Tokens of a text.")] = 1024,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the texts.")] = 0,
    device: Device = "auto",
) -> None:
    """Choose where the memory listens, and start it in closed form, from plain text."""
    _require("calibrate")

    import torch

    from titans.adapters.calibrate import probe, start
    from titans.adapters.fit import LANGUAGE, draw
    from titans.adapters.model import MEANING, adapt, taps_at
    from titans.adapters.saving import load_backbone, save_adapter
    from titans.adapters.states import record
    from titans.models.tokenizer import check_new_folder

    with one_sentence((ValueError, TypeError)):
        check_new_folder(out)
        backbone, tokenizer = load_backbone(model, device)
        given = () if taps == PROBE else names(taps)
        chosen = [[0, *numbers(each.replace("+", ","), "--taps")] for each in given]
        adapted = adapt(backbone, taps=chosen or None, window=window, sinks=sinks, **pairs(field, "--field")).eval()
        count = len(adapted.decoder.layers)
        if not chosen and taps != PROBE and taps_at(MEANING, count) not in adapted.taps:
            adapted.add_memory(taps_at(MEANING, count))
        probed = list(range(max(1, count // 3), count, max(1, count // 10))) if taps == PROBE else []
        layers = sorted({*probed, *(tap for each in adapted.taps for tap in each)} - {0})
        readings = []
        with bar("reading", samples) as move:
            for number in range(samples):
                move(number, samples, "texts")
                ids, _ = draw(LANGUAGE, {}, _path(texts), tokenizer, length, "train", f"{seed} {number}")
                readings.append(record(adapted, torch.tensor(ids), layers))
        found = {layer: share for layer, share in probe(readings, window).items() if layer in probed} if probed else {}
        for layer, share in found.items():
            typer.echo(f"layer {layer:3}: {share:.1%} of what comes again is found by the most similar state")
        if found:
            adapted.add_memory([0, max(found, key=lambda layer: found[layer])])
        opened_first = start(adapted, readings)
        adapted.notes = {"command": this_command(), "probe": {str(layer): share for layer, share in found.items()}}
        save_adapter(adapted, out)
    for each, (opened, floor) in zip(adapted.taps, opened_first, strict=True):
        keys = " and ".join(map(str, each[1:]))
        typer.echo(f"Keys from layers {keys} of {count}: {opened:.0%} open at first, with a floor of {floor}.")
    typer.echo(f"Adapter: {out}")


@app.command("fit")
def fit(
    adapter: Adapter,
    texts: Texts = None,
    tasks: Tasks = TASKS,
    setting: Setting = [],  # noqa: B006
    out: Annotated[Path, typer.Option(help="The folder for the trained adapter.")] = Path("runs/adapter-fit"),
    steps: Annotated[int, typer.Option(help="How many updates to make.")] = 100,
    samples: Annotated[int, typer.Option(help="How many texts of each kind to record.")] = 44,
    lengths: Annotated[str, typer.Option(help="Tokens of a text, with commas between them.")] = "1024",
    batch: Annotated[int, typer.Option(help="Texts of tasks per update; half as many of plain text besides.")] = 2,
    rate: Annotated[float, typer.Option(help="The highest learning rate.")] = 1e-4,
    gate_rate: Annotated[float, typer.Option(help="The highest learning rate of the gates.")] = 1e-2,
    write_cost: Annotated[float, typer.Option(help="The price of a write by every token of a text.")] = 0.0,
    narrow: Annotated[float, typer.Option(help="The share of texts read with a quarter of the window.")] = 0.0,
    lora: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Train low-rank updates of the model's attention too, of this rank; the model then runs in every "
            "update. Default: those of the adapter, if it has any.",
        ),
    ] = None,
    lora_rate: Annotated[
        float | None, typer.Option(help="The highest learning rate of the low-rank updates. Default: 0.0005.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the texts and of their order.")] = 0,
    device: Device = "auto",
) -> None:
    """Teach the memory language and recall together, on states of the model that are recorded once.

    With --lora the model learns, too, and runs in every update. The same command goes on where it was stopped.
    """
    _require("fit")
    if lora is not None:
        require("adapt fit --lora", "peft", "adapt")

    from titans.adapters.fit import CHECKPOINT, STATES, FitSettings, record_texts
    from titans.adapters.fit import fit as train
    from titans.adapters.saving import SETTINGS, load_adapter, read_settings, save_adapter
    from titans.files import locked

    with one_sentence((ValueError, TypeError)):
        chosen = FitSettings(
            steps=steps, texts=samples, lengths=numbers(lengths, "--lengths"), batch=batch, rate=rate,
            gate_rate=gate_rate, write_cost=write_cost, narrow=narrow, seed=seed,
            lora_rate=FitSettings.lora_rate if lora_rate is None else lora_rate,
        )  # fmt: skip
        asked = _tasks(tasks, setting, texts)
        kept = read_settings(adapter)
        if lora_rate is not None and lora is None and kept.get("lora") is None:
            raise ValueError(f"lora_rate is {lora_rate}; expected --lora besides, as {adapter} has no low-rank updates")
        with locked(out, "titans adapt fit"):
            if (out / SETTINGS).is_file():
                raise ValueError(f"{out} has an adapter already; expected a new folder")
            model, tokenizer = load_adapter(adapter, device=device)
            if lora is not None and model.lora is None:
                model.add_lora(lora)
            elif lora not in (None, model.lora):
                raise ValueError(f"lora is {lora}; expected {model.lora}, the rank of what {adapter} has already")
            with bar("recording") as move:
                plans = record_texts(model, tokenizer, asked, _path(texts), chosen, out / STATES, move)
            with bar("training", steps) as move:
                train(model, plans, out / STATES, chosen, out / CHECKPOINT, move, typer.echo)
            model.notes = model.notes | {"fit": this_command()}
            save_adapter(model, out)
    typer.echo(f"Adapter: {out}")


@app.command("eval")
def evaluate(
    adapter: Adapter,
    texts: Texts = None,
    tasks: Tasks = TASKS,
    setting: Setting = [],  # noqa: B006
    lengths: Annotated[str, typer.Option(help="Tokens of a text, with commas between them.")] = "1024",
    depths: Annotated[str, typer.Option(help="Where needles stand, from 0, the start, to 1.")] = "0,0.2,0.4,0.6",
    samples: Annotated[int, typer.Option(min=1, help="Questions per length and depth.")] = 10,
    plain: Annotated[int, typer.Option(min=0, help="Texts of plain language per length.")] = 10,
    modes: Annotated[str, typer.Option(help="What to compare, with commas between them.")] = (
        "memory,reset,swapped,window,full"
    ),
    split: Annotated[str, typer.Option(help="Which part of the texts: test or validation.")] = "test",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the texts.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="A JSON file to add the figures to. Default: in the adapter.")
    ] = None,
    device: Device = "auto",
) -> None:
    """Ask for what stands far back, with the memory as it is, reset, swapped and off, and with full attention."""
    _require("eval")

    from statistics import mean

    from rich.console import Console

    from titans.adapters.evaluate import MODES, ask, language
    from titans.adapters.saving import load_adapter, read_settings
    from titans.evaluation.evaluate import WAIT
    from titans.files import locked, write_json
    from titans.report.page import Table, print_table

    with one_sentence((ValueError, TypeError)):
        wanted = names(modes)
        unknown = [mode for mode in wanted if mode not in MODES]
        if unknown or not wanted:
            raise ValueError(f"modes has {unknown[0] if unknown else 'nothing'}; expected some of {', '.join(MODES)}")
        if split not in ("test", "validation"):
            raise ValueError(f"split is {split!r}; expected test or validation")
        asked = _tasks(tasks, setting, texts, {"lengths": lengths, "depths": depths})
        results = check_output(out or adapter / RESULTS)
        _evaluations(results)  # refuses another file before the work, not after it
        read_settings(adapter)
        model, tokenizer = load_adapter(adapter, device=device)
        rows, figures = [], []
        with bar("asking") as move:
            for task in asked:
                for length in numbers(lengths, "--lengths"):
                    hits: dict[str, list[bool]] = {mode: [] for mode in wanted}
                    for group in task.groups():
                        if group.get("length") == length:
                            answers = ask(model, tokenizer, task, group, samples, wanted, split, seed, move)
                            for mode, found in answers.items():
                                hits[mode] += found
                    figures.append({"task": task.name, "length": length, "hits": hits})
                    rows.append((task.name, f"{length:,}", *(_share(hits[mode]) for mode in wanted)))
            told = [mode for mode in wanted if mode in ("memory", "window", "full")]
            for length in numbers(lengths, "--lengths") if plain and told else ():
                losses = language(model, tokenizer, _path(texts), length, plain, split, seed, told, move)
                figures.append({"task": "language", "length": length, "losses": losses})
                shown = [f"{mean(losses[mode]):.4f}" if mode in losses else "" for mode in wanted]
                rows.append(("language, nats per token", f"{length:,}", *shown))
        mine = {"command": this_command(), "split": split, "figures": figures}
        with locked(results.parent, "titans adapt eval", WAIT):  # another process may have added to the file
            write_json(results, {"evaluations": [*_evaluations(results), mine]})
    print_table(Console(), Table(("task", "tokens", *wanted), rows))
    typer.echo(f"Results: {results}")


def _evaluations(results: Path) -> list[dict[str, Any]]:
    """What a file of results has so far, the oldest first; none if it is not there."""
    import json

    if not results.exists():
        return []
    try:
        found = json.loads(results.read_text(encoding="utf-8"))
        return list(found["evaluations"])
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{results} has no results of titans adapt eval; expected another file for --out") from None


def _share(hits: list[bool]) -> str:
    from titans.report.statistics import wilson

    if not hits:
        return ""
    low, high = wilson(sum(hits) / len(hits), len(hits))
    return f"{100 * sum(hits) / len(hits):.0f}% ({100 * low:.0f} to {100 * high:.0f}), n={len(hits)}"


def _tasks(tasks: str, setting: list[str], texts: Path | None, measured: dict[str, str] | None = None) -> list[Any]:
    """The tasks, with the texts as their haystack or background where they have one.

    Args:
        measured: lengths and depths, for tasks that are measured and not learned.
    """
    from titans.cli.common import read_yaml_value
    from titans.tasks import make_tasks, settings_of

    chosen = names(tasks)
    given = pairs(setting, "--set")
    known = {name: settings_of(name) for name in chosen}
    for name, settings in known.items():
        for place in ("haystack", "background"):
            if texts is not None and place in settings and place not in given:
                given.setdefault(f"{name}.{place}", str(texts))
        if measured and "lengths" not in settings:
            raise ValueError(f"tasks has {name}, which has no lengths; expected tasks of long texts, such as {TASKS}")
        for option, value in (measured or {}).items():
            if option in settings:
                given[f"{name}.{option}"] = read_yaml_value(value)
    made = make_tasks(chosen, given)
    for task in made:
        if getattr(task, "vocab_size", None) is not None:
            raise ValueError(f"tasks has {task.name}, which has tokens of its own; expected tasks of text")
    return made


def _path(texts: Path | None) -> str | None:
    return None if texts is None else str(texts)


def _require(verb: str) -> None:
    for package in ("transformers", "yaml"):
        require(f"adapt {verb}", package, "adapt")
