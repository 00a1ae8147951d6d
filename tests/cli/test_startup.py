"""What commands import: nothing slow that they do not need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = """
import json, sys
from titans.cli import main
for command in json.loads(sys.argv[1]):
    try:
        main(command)
    except SystemExit as end:
        assert end.code == 0, command
print(json.dumps(list(sys.modules)))
"""
COMPUTE = {"torch", "tokenizers", "safetensors"}
COMPILER = {"torch._dynamo", "torch._inductor", "sympy"}
LIBRARIES = {"transformers", "sentence_transformers", "huggingface_hub", "datasets", "pandas", "scipy", "sklearn"}
EXTRAS = {"matplotlib", "yaml", "usearch", "openai", "xllamacpp", "psycopg", "lm_eval"}
SLOW = COMPUTE | COMPILER | LIBRARIES | EXTRAS


def imported_by(*commands: Sequence[str], store: Path) -> set[str]:
    """The modules that a process has imported after these commands."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(commands)],
        cwd=ROOT, env=os.environ | {"TITANS_MEMORY": str(store)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_help_imports_nothing_that_computes(tmp_path: Path) -> None:
    commands = ["--version"], ["--help"], ["remember", "--help"], ["memory", "--help"], ["bench", "memory", "--help"]
    assert not imported_by(*commands, store=tmp_path) & (SLOW | {"numpy"})


def test_the_text_memory_encodes_without_transformers_and_is_read_without_torch(tmp_path: Path) -> None:
    store = tmp_path / "store"
    written = imported_by(["remember", "Ann lives in Oslo."], ["recall", "Where does Ann live?"], store=store)
    assert written & SLOW == COMPUTE
    assert not imported_by(["memory", "stats"], ["eval", "--list"], store=store) & SLOW
