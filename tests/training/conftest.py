"""What the tests of training share: small data, small models, and a run of either."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, Features, List, Value

from titans.tasks.prepared import TokenStore
from titans.training.config import TrainConfig
from titans.training.prepare import prepare

LENGTH, ROWS = 32, 4
TINY: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "memory_heads": 2,
    "segment_size": 16,
    "window_size": 16,
    "num_persistent_tokens": 2,
    "intermediate_size": 48,
}
BASELINES: dict[str, dict[str, Any]] = {
    "transformer++": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48},
}
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of different lengths, with a validation split, as bytes."""
    folder = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)
    words = ["".join(random.choice(list("abcdefgh"), size=random.integers(2, 6))) for _ in range(30)]
    lines = [" ".join(random.choice(words, size=random.integers(4, 60))) for _ in range(80)]
    source = folder / "text.jsonl"
    source.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines), encoding="utf-8")
    prepare([str(source)], folder / "set", validation=0.1, workers=1)
    return folder / "set"


@pytest.fixture
def tiny(prepared: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    """A config of a run that takes seconds; fields may be changed, those of the model through ``model``."""

    def make(name: str = "mac", output: str = "run", **fields: Any) -> TrainConfig:
        model = {"name": name, **(BASELINES.get(name, TINY)), **fields.pop("model", {})}
        carry = fields.get("carry", 0)
        values: dict[str, Any] = {
            "model": model,
            "data": str(prepared),
            "output": str(tmp_path / output),
            "length": LENGTH,
            "batch_tokens": LENGTH * ROWS * max(1, carry),
            "micro_batch": ROWS,
            "steps": 8,
            "learning_rate": 1e-3,
            "warmup": 2,
            "log_every": 1,
            "eval_every": 0,
            "save_every": 3,
            "memory_stats_every": 0,
            "trackers": [],
        }
        return TrainConfig(**{**values, **fields})

    return make


def store_of(documents: Sequence[Sequence[int]]) -> TokenStore:
    """Documents as they would be read from a prepared set."""
    features = Features({"input_ids": List(Value("int32"))})
    return TokenStore(Dataset.from_dict({"input_ids": [list(each) for each in documents]}, features=features))


def losses(folder: str | Path) -> dict[int, float]:
    """The training loss of every step that a run's folder has."""
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def command(config: TrainConfig, *flags: str, processes: int = 1) -> list[str]:
    """How a user would start the run: by its YAML file."""
    import yaml

    file = Path(config.output).with_suffix(".yaml")
    file.write_text(yaml.safe_dump(config.to_dict()), encoding="utf-8")
    titans = ["-c", "from titans.cli import main; main()"]
    if processes > 1:
        script = file.with_name("titans_main.py")
        script.write_text("from titans.cli import main\n\nmain()\n", encoding="utf-8")
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        titans = [*launch, str(script)]
    return [sys.executable, *titans, "train", str(file), *flags]


def start(words: Sequence[str]) -> subprocess.Popen[str]:
    """Starts a command with one thread, in a process group of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(list(words), env=environment, start_new_session=True, **pipes)


def finish(words: Sequence[str], code: int = 0) -> str:
    """Runs a command to its end and returns what it said."""
    process = start(words)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == code, said
    return said
