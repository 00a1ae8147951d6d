"""What learns: recall for each of the memory's rules, each of its parts left out, and each model, several seeds each.

    python benchmarks/learning.py --out runs/learning
    python benchmarks/learning.py --out runs/learning --rows exact-depth-1 memory-off --seeds 0 1 2 3 4

Every finished run is one JSON file in the output folder, and is not run again. The table is printed at the end and
written to `table.md` beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

# One thread a process: set before torch is loaded, here and in the worker processes, which load this file too.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from titans.evaluation.recall import RecallConfig, run_recall
from titans.files import write_atomically

LENGTHS = (64, 512, 1024)
CHUNK = 16

ROWS: dict[str, dict[str, Any]] = {
    "exact-depth-1": {"mode": "exact", "depth": 1},
    "exact-depth-2": {},  # the default of NeuralMemory; the rows from no-momentum on change one thing in it
    "chunked-depth-1-bounded": {"mode": "chunked", "depth": 1, "chunk_size": CHUNK, "bounded": True},
    "chunked-depth-1-unbounded": {"mode": "chunked", "depth": 1, "chunk_size": CHUNK, "bounded": False},
    "chunked-depth-2-bounded": {"mode": "chunked", "depth": 2, "chunk_size": CHUNK, "bounded": True},
    "chunked-depth-2-unbounded": {"mode": "chunked", "depth": 2, "chunk_size": CHUNK, "bounded": False},
    "no-momentum": {"momentum": False},
    "no-forgetting": {"forgetting": False},
    "no-convolution": {"conv_kernel": 0},
    "memory-off": {"writes": False},
    # the models, with attention that sees 16 tokens
    "lmm": {"persistent": 4},
    "mac": {"variant": "mac", "persistent": 4},
    "mag": {"variant": "mag", "persistent": 4},
    "mal": {"variant": "mal", "persistent": 4},
    "lmm-off": {"persistent": 4, "writes": False},
    "mac-off": {"variant": "mac", "persistent": 4, "writes": False},
    "mag-off": {"variant": "mag", "persistent": 4, "writes": False},
    "mal-off": {"variant": "mal", "persistent": 4, "writes": False},
}


def run_to_file(path: Path, config: RecallConfig, seed: int) -> dict[str, Any]:
    """Train and test once, in this process, and leave the outcome at `path`."""
    torch.set_num_threads(1)
    result = run_recall(config, seed, LENGTHS)
    write_atomically(path, json.dumps(result, indent=2, allow_nan=False).encode() + b"\n")
    return result


def load_run(path: Path, config: RecallConfig) -> dict[str, Any] | None:
    """The finished run at `path`; none if there is no such file, or if it is of another configuration."""
    if not path.is_file():
        return None
    result: dict[str, Any] = json.loads(path.read_text())
    return result if result["config"] == asdict(config) else None


def table(rows: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown: mean over the seeds, then each seed's figure in brackets; a run that diverged is NaN."""
    lines = [
        "| memory | " + " | ".join(f"recall at {length}" for length in LENGTHS) + " | steps | seconds a run |",
        "|---|" + "---|" * len(LENGTHS) + "---|---|",
    ]
    for name, runs in rows.items():
        cells = [name]
        for length in LENGTHS:
            figures = [run["recall"][str(length)] for run in runs]
            figures = [float("nan") if figure is None else figure for figure in figures]
            shown = ", ".join(_figure(figure) for figure in figures)
            cells.append(f"{_figure(fmean(figures))} ({shown})")
        cells.append(", ".join(dict.fromkeys(str(run["steps"]) for run in runs)))
        cells.append(f"{fmean(run['seconds'] for run in runs):.0f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _figure(value: float) -> str:
    return "NaN" if value != value else f"{value:.3f}"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; a wrong one ends with a sentence and exit code 2."""
    parser = argparse.ArgumentParser(description="Recall for each of the memory's rules, several seeds each.")
    parser.add_argument("--steps", type=int, default=RecallConfig.steps, help="training steps of every run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of every row")
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS, metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--out", type=Path, default=Path("runs/learning"), help="folder for the finished runs")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time, one thread each")
    chosen = parser.parse_args(arguments)
    if chosen.steps < 1:
        parser.error(f"--steps must be at least 1, got {chosen.steps}")
    if min(chosen.seeds) < 0 or len(set(chosen.seeds)) < len(chosen.seeds):
        parser.error(f"--seeds must be different numbers from 0 up, got {chosen.seeds}")
    if chosen.workers < 1:
        parser.error(f"--workers must be at least 1, got {chosen.workers}")
    return chosen


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, then print the table."""
    chosen = parse_arguments(arguments)
    chosen.out.mkdir(parents=True, exist_ok=True)
    configs = {name: RecallConfig(steps=chosen.steps, **ROWS[name]) for name in chosen.rows}
    done: dict[tuple[str, int], dict[str, Any]] = {}
    missing: list[tuple[str, int]] = []
    for seed in chosen.seeds:  # seed by seed: a stopped benchmark has as many rows as possible
        for name, config in configs.items():
            finished = load_run(_path(chosen.out, name, seed), config)
            if finished is None:
                missing.append((name, seed))
            else:
                done[name, seed] = finished
    print(f"{len(done)} runs are there, {len(missing)} to go", file=sys.stderr, flush=True)

    start = time.perf_counter()
    with ProcessPoolExecutor(chosen.workers, get_context("spawn")) as pool:
        futures = {
            pool.submit(run_to_file, _path(chosen.out, name, seed), configs[name], seed): (name, seed)
            for name, seed in missing
        }
        for future in as_completed(futures):
            name, seed = futures[future]
            done[name, seed] = result = future.result()
            shown = "  ".join(f"{length}: {recall}" for length, recall in result["recall"].items())
            seconds = time.perf_counter() - start
            print(f"{seconds:6.0f} s  {name}, seed {seed}  {shown}", file=sys.stderr, flush=True)

    text = table({name: [done[name, seed] for seed in chosen.seeds] for name in configs})
    write_atomically(chosen.out / "table.md", text.encode() + b"\n")
    print(text)


def _path(out: Path, name: str, seed: int) -> Path:
    return out / f"{name}-seed{seed}.json"


if __name__ == "__main__":
    main()
