"""What a window with a memory costs beside full attention: speed, peak memory and state of a causal model by length.

    titans bench adapter --model FOLDER --out runs/bench-adapter

Every figure is of a process of its own, and the three take turns: full attention, a window, a window with a memory.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from titans.adapters import adapt, load_backbone
from titans.bench.settings import AdapterBenchmarkSettings
from titans.bench.timing import about, answer_of, mebibytes_text, new_report, peak_growth, speed_figure
from titans.report.page import Figure, Section, Table
from titans.report.progress import Progress, silent

WAYS = ("full attention", "window", "window and memory")
DECODED = 16  # tokens that are written after the text
QUICK: dict[str, Any] = {"lengths": (64, 128), "window": 32}
SMALL = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


def _backbone(name: str) -> Any:
    if name != "random":
        return load_backbone(name, "cpu")[0]
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL)).eval()


@torch.no_grad()
def _measure(job: dict[str, Any]) -> dict[str, Any]:
    """Reads a text of random tokens and writes some, in this process."""
    torch.set_num_threads(job["threads"])
    model = adapt(_backbone(job["model"]), window=job["window"], sinks=job["sinks"]).eval()
    if job["way"] == "full attention":
        model.window = model.widest
    use_memory = job["way"] == "window and memory"
    size = model.get_input_embeddings().num_embeddings
    ids = torch.randint(size, (1, job["length"]), generator=torch.Generator().manual_seed(0))
    model(ids[:, :32], use_memory=use_memory, logits_to_keep=1)
    found: dict[str, Any] = {}

    def read() -> None:
        begun = time.process_time()
        output = model(ids, use_memory=use_memory, logits_to_keep=1)
        found["read"] = job["length"] / (time.process_time() - begun)
        found["cache"] = output.past_key_values

    found["peak"], _ = peak_growth(read)
    cache = found.pop("cache")
    found["state"] = cache.nbytes
    begun = time.process_time()
    for _ in range(DECODED):
        model(ids[:, :1], past_key_values=cache, use_memory=use_memory)
    return found | {"write": DECODED / (time.process_time() - begun)}


def run_adapter_benchmark(settings: AdapterBenchmarkSettings, progress: Progress = silent) -> dict[str, Any]:
    """Measure the three in turns; returns the report, a dict that is ready for JSON."""
    report = new_report("adapter", settings, settings.threads)
    rows: list[dict[str, Any]] = []
    total = len(settings.lengths) * len(WAYS)
    for length in settings.lengths:
        for way in WAYS:
            progress(len(rows), total, f"{way}, {length:,} tokens")
            job = report["settings"] | {"length": length, "way": way}
            rows.append({"way": way, "length": length} | answer_of(_measure, job, settings.threads))
    progress(total, total, "done")
    return report | {"rows": rows}


def sections(report: dict[str, Any]) -> list[Section]:
    """All figures as one table."""
    rows = [
        [
            f"{row['length']:,}", row["way"], f"{row['read']:,.0f}", f"{row['write']:,.1f}",
            mebibytes_text(row["peak"]), mebibytes_text(row["state"]),
        ]
        for row in report["rows"]
    ]  # fmt: skip
    header = ["tokens", "attention", "read, tokens/s", "write, tokens/s", "peak growth", "state"]
    words = "Tokens per CPU second while a text is read and while an answer is written; growth of the process."
    return [Section("Cost", [words], [Table(header, rows)]), about(report)]


def figures(report: dict[str, Any]) -> dict[str, list[Figure]]:
    """Speed of reading by length, by the title of the section."""
    lengths = sorted({row["length"] for row in report["rows"]})
    speeds = {way: {row["length"]: row["read"] for row in report["rows"] if row["way"] == way} for way in WAYS}
    return {"Cost": [speed_figure("adapter", "Reading a text", speeds, lengths, "tokens of the text")]}
