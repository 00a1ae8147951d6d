"""Does carried memory let a model use what it read before its training length?

    titans bench carried --out runs/bench-carried

A document has three parts, each as long as a training sequence: facts (each key with its value, twice), others, and
the first ones again, twice. Between a fact and its return lies more than one training length. How to recall can be
learned from the repetitions inside a part; what to recall when a fact returns only a carried memory can know. The same
model is trained on the same documents with memory carried from sequence to sequence, and without. Measured is how many
values are predicted in the last part, where a fact returns and where it is repeated.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from titans.bench.settings import CarriedBenchmarkSettings
from titans.bench.timing import about, answer_of, new_report, work_folder
from titans.files import RUN
from titans.models import TitansForCausalLM
from titans.report.page import Figure, Section, Table
from titans.report.plots import Curve, plot_bars
from titans.report.progress import Progress, silent
from titans.tasks.prepared import DESCRIPTION, TokenStore, load_prepared
from titans.training.config import TrainConfig
from titans.training.prepare import prepare
from titans.training.run import train

KEYS, VALUES = "abcdefgh", "ABCDEFGHIJKLMNOP"
PAIRS, ROUNDS = len(KEYS) // 2, 2
LENGTH, PIECES, ROWS = 2 * PAIRS * ROUNDS, 3, 32
VALIDATION = 512  # documents
WAYS = {"carried": PIECES, "not carried": 0}  # how memory goes from sequence to sequence: TrainConfig.carry
MODEL = {
    "name": "lmm", "hidden_size": 64, "num_hidden_layers": 2, "memory_heads": 1, "num_persistent_tokens": 0,
    "intermediate_size": 128, "memory_depth": 1, "tie_word_embeddings": False,
}  # fmt: skip
QUICK: dict[str, Any] = {"seeds": (0,), "steps": 4, "documents": 200}


def document(draw: random.Random) -> str:
    """Facts, other facts, and the first ones again, each part repeated: only the values are drawn."""
    facts = {key: key + draw.choice(VALUES) for key in KEYS}
    parts = (KEYS[:PAIRS], KEYS[PAIRS:], KEYS[:PAIRS])
    return "".join(facts[key] for part in parts for _ in range(ROUNDS) for key in part)


def make_data(folder: Path, documents: int) -> Path:
    """A prepared set, made if it is not there yet; its validation documents differ from its training documents."""
    data = folder / f"data-{documents}"
    if (data / DESCRIPTION).is_file():
        return data
    with tempfile.TemporaryDirectory() as texts:
        files = {name: f"{texts}/{name}.jsonl" for name in ("train", "validation")}
        for seed, (file, count) in enumerate(zip(files.values(), (documents, VALIDATION), strict=True)):
            draw = random.Random(seed)
            lines = [json.dumps({"text": document(draw)}) for _ in range(count)]
            Path(file).write_text("\n".join(lines), encoding="utf-8")
        prepare([files["train"]], data, validation=[files["validation"]], overwrite=data.is_dir())
    return data


@torch.no_grad()
def recall(model: TitansForCausalLM, store: TokenStore, carry: bool) -> tuple[float, float]:
    """The share of the values that are predicted where a fact returns, and where it is repeated."""
    rows = [store.read(int(a), int(b)) for a, b in zip(store.starts, store.starts[1:], strict=False)]
    ids = torch.from_numpy(np.stack(rows).astype(np.int64))[:, :-1]
    logits, cache = [], None
    for piece in ids.split(LENGTH, dim=1):
        output = model(piece, past_key_values=cache, use_cache=carry)
        cache = output.past_key_values if carry else None
        logits.append(output.logits)
    right = (torch.cat(logits, dim=1).argmax(-1)[:, :-1] == ids[:, 1:])[:, 1 - 2 * PAIRS * ROUNDS :: 2].float()
    return float(right[:, :PAIRS].mean()), float(right[:, -PAIRS:].mean())


def _train_and_recall(job: dict[str, Any]) -> dict[str, Any]:
    """One run, in this process; an interrupted one goes on."""
    torch.set_num_threads(job["threads"])
    output, carry, steps = Path(job["output"]), job["carry"], job["steps"]
    config = TrainConfig(
        model=MODEL, data=job["data"], output=str(output), length=LENGTH, carry=carry,
        batch_tokens=ROWS * PIECES * LENGTH, micro_batch=ROWS * PIECES, steps=steps, learning_rate=4e-3,
        warmup=min(50, steps), weight_decay=0.0, seed=job["seed"], log_every=100, eval_every=0, save_every=steps,
        trackers=[], memory_stats_every=0,
    )  # fmt: skip
    train(config, resume=(output / RUN).is_file())
    model = TitansForCausalLM.from_pretrained(output).eval()
    store = TokenStore(load_prepared(config.data).open("validation"))
    returning, repeated = recall(model, store, bool(carry))
    return {"returning": returning, "repeated": repeated}


def run_carried_benchmark(
    settings: CarriedBenchmarkSettings, progress: Progress = silent, out: Path | None = None
) -> dict[str, Any]:
    """Train with memory carried and without; returns the report, a dict that is ready for JSON.

    Args:
        out: folder where data and runs are kept: what is finished is not trained again; None: they are not.
    """
    report = new_report("carried", settings, settings.threads)
    runs = [(way, carry, seed) for seed in settings.seeds for way, carry in WAYS.items()]
    rows = []
    with work_folder(out) as folder:
        data = make_data(folder, settings.documents)
        for index, (way, carry, seed) in enumerate(runs):
            progress(index, len(runs), f"training, memory {way}, seed {seed}")
            job = {
                "data": str(data), "output": str(folder / "runs" / f"{way.replace(' ', '-')}-{seed}"), "carry": carry,
                "seed": seed, "steps": settings.steps, "threads": settings.threads,
            }  # fmt: skip
            rows.append({"memory": way, "seed": seed, **answer_of(_train_and_recall, job, settings.threads)})
    progress(len(runs), len(runs), "done")
    return report | {"chance": 1 / len(VALUES), "rows": rows}


def sections(report: dict[str, Any]) -> list[Section]:
    """The share of values predicted by each run, as text and tables."""
    rows = [
        [f"{row['memory']}, seed {row['seed']}", f"{row['returning']:.1%}", f"{row['repeated']:.1%}"]
        for row in report["rows"]
    ]
    words = (
        "A fact returns after more than one training length, so only a carried memory can know its value; it is "
        f"repeated inside a training length. Guessing gives {report['chance']:.1%}."
    )
    header = ["memory", "returning facts", "repeated facts"]
    return [Section("Values predicted", [words], [Table(header, rows)]), about(report)]


def figures(report: dict[str, Any]) -> dict[str, list[Figure]]:
    """Mean and single seeds of both ways of training, by the title of the section."""
    kinds = {"returning facts": "returning", "repeated facts": "repeated"}
    bars = []
    for style, way in enumerate(WAYS):
        runs = [[row[kind] for kind in kinds.values()] for row in report["rows"] if row["memory"] == way]
        means = [statistics.fmean(values) for values in zip(*runs, strict=True)]
        bars.append(Curve(f"memory {way}", means, runs=runs if len(runs) > 1 else (), style=style))
    title = "Values predicted in the last part of a document"
    png = plot_bars(list(kinds), bars, title, "", "values predicted (%)", percent=True, chance=report["chance"])
    return {"Values predicted": [Figure("carried", png, title)]}
