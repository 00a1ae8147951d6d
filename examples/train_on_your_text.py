"""Train a small model on your text and let it go on: prepare, train, generate, from Python.

The commands `titans prepare`, `titans train` and `titans generate` do the same. The default takes well under a minute,
enough to learn how words look; more steps and a larger model make more of it. See docs/training.md.

    python examples/train_on_your_text.py [TEXT.txt] [--steps N] [--out FOLDER]
"""

import argparse
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

from titans.models.generation import Sampling, Session
from titans.training.config import TrainConfig
from titans.training.prepare import prepare
from titans.training.run import train

parser = argparse.ArgumentParser(description="Train a small model on a text.")
parser.add_argument("text", nargs="?", type=Path, help="a text file; default: a part of Python's own manual")
parser.add_argument("--steps", type=int, default=120)
parser.add_argument("--out", type=Path, help="where data and run go; default: a temporary folder")
arguments = parser.parse_args()
out = arguments.out or Path(tempfile.mkdtemp())

if arguments.text is None:
    arguments.text = out / "manual.txt"
    out.mkdir(parents=True, exist_ok=True)
    arguments.text.write_text("\n\n".join(topics.values()))

splits = prepare(str(arguments.text), out / "data", tokenizer="bytes", validation=0.05).prepared.splits
print(f"{splits['train'].tokens:,} tokens to train on, {splits['validation'].tokens:,} held out")

config = TrainConfig(
    model={
        "name": "mag", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "memory_heads": 2,
        "window_size": 32, "num_persistent_tokens": 4, "memory_mode": "chunked", "memory_chunk_size": 32,
    },
    data=str(out / "data"), output=str(out / "run"), length=128, batch_tokens=1024, steps=arguments.steps,
    learning_rate=0.01, warmup=0.1, eval_every=0, final_eval_tokens=20_000, trackers=[],
)  # fmt: skip
result = train(config, overwrite=True)
print(f"validation loss {result.metrics['eval_loss']:.2f} nats per byte; knowing nothing is 5.55")

session = Session.load(str(result.output))
answer = session.answer(session.encode("The "), 150, Sampling(temperature=0.6, seed=1))
print("The " + answer.text)
