"""lm-eval's own command, which knows nothing of ours: it loads a saved model, and cuts no text."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.models.huggingface import HFLM

from tests.models.cases import model
from titans import TitansForCausalLM
from titans.models.configuration import NO_LIMIT
from titans.models.tokenizer import byte_tokenizer

ROOT = Path(__file__).parents[2]
LONG = 5000
LOGLIKELIHOOD = {
    "output_type": "loglikelihood",
    "metric_list": [{"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}],
}
ROLLING = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "metric_list": [{"metric": "byte_perplexity"}]}
GENERATE = {
    "output_type": "generate_until",
    "generation_kwargs": {"max_gen_toks": 2, "until": [], "do_sample": False},
    "metric_list": [{"metric": "exact_match"}],
}


def reads_bytes() -> TitansForCausalLM:
    """A tiny model of bytes whose predictions depend on all that it has read."""
    return model("lmm", torch.float32, vocab_size=257, num_hidden_layers=1)


def likelihood(made: TitansForCausalLM, prompt: str, answer: str) -> float:
    """The logarithm of the probability of an answer, by the definition."""
    ids = byte_tokenizer()(prompt + answer, return_tensors="pt").input_ids
    with torch.no_grad():
        logs = made(ids).logits[0, :-1].log_softmax(-1)
    return float(logs.gather(-1, ids[0, 1:, None])[-len(answer) :].sum())


def run(folder: Path, rows: list[dict[str, str]], task: dict[str, Any], *options: str) -> dict[str, Any]:
    """What ``lm_eval`` reports of a saved model on a task of local rows."""
    (folder / "tasks").mkdir()
    (folder / "tasks" / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = {"test": str(folder / "tasks" / "rows.jsonl")}
    fields = {"task": "local", "dataset_path": "json", "dataset_kwargs": {"data_files": files}, "test_split": "test"}
    fields |= {"doc_to_text": "{{prompt}}", "doc_to_target": "{{answer}}", "target_delimiter": "", "num_fewshot": 0}
    (folder / "tasks" / "local.yaml").write_text(json.dumps(fields | task))  # JSON is YAML
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--device", "cpu", "--tasks", "local"]
    command += ["--model_args", f"pretrained={folder / 'model'},trust_remote_code=True,dtype=float32"]
    command += ["--include_path", str(folder / "tasks"), "--output_path", str(folder / "out"), *options]
    environment = os.environ | {"HF_HOME": str(folder / "home"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    (path,) = (folder / "out").rglob("results_*.json")
    found: dict[str, Any] = json.loads(path.read_text())["results"]["local"]
    return found


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with a saved model and its tokenizer in ``model``."""
    reads_bytes().save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("batch", ["1", "auto"])
def test_the_command_reads_a_long_text_whole(batch: str, saved: Path) -> None:
    rows = [{"prompt": "far" + "x" * LONG, "answer": " dog"}, {"prompt": "near" + "x" * LONG, "answer": " cat"}]
    found = run(saved, rows, LOGLIKELIHOOD, "--batch_size", batch)
    logs = [likelihood(reads_bytes(), row["prompt"], row["answer"]) for row in rows]
    assert found["perplexity,none"] == pytest.approx(math.exp(-sum(logs) / 2), rel=1e-4)
    cut = [likelihood(reads_bytes(), row["prompt"][-2048:], row["answer"]) for row in rows]
    assert found["perplexity,none"] != pytest.approx(math.exp(-sum(cut) / 2), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("task", [ROLLING, GENERATE], ids=["rolling", "generate"])
def test_the_command_finds_a_batch_size_where_no_length_is_the_longest(task: dict[str, Any], saved: Path) -> None:
    rows = [{"prompt": "x" * 30, "answer": "fox" * 10}]
    assert run(saved, rows, task, "--batch_size", "auto")


def test_lm_eval_takes_the_length_of_a_text_from_the_config() -> None:
    made = reads_bytes()
    harness = HFLM(pretrained=made, tokenizer=byte_tokenizer(), backend="causal", device="cpu", batch_size=1)
    assert harness.max_length == NO_LIMIT
    made.config.max_position_embeddings = 16
    assert harness.max_length == 16


def test_a_declared_length_changes_neither_the_model_nor_what_its_caches_fit() -> None:
    made = reads_bytes()
    short = reads_bytes()
    short.config.max_position_embeddings = 4
    ids = torch.arange(20)[None]
    assert torch.equal(made(ids).logits, short(ids).logits)
    assert made.config.fingerprint() == short.config.fingerprint()
    assert made.generate(ids, max_new_tokens=2, do_sample=False).shape == (1, 22)
