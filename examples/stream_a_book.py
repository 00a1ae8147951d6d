"""Stream a book: read a text of any length in constant memory, keep what was read in a file, and ask later.

The book is read from disk piece by piece, and what the model keeps of it has the same size after a page as after a
library. Without a model of your own, a small untrained one shows how it works; its answers are noise.

    python examples/stream_a_book.py [BOOK.txt] [--model FOLDER] [--question TEXT]
"""

import argparse
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch

from titans import TitansConfig, TitansForCausalLM
from titans.models.generation import Sampling, Session

parser = argparse.ArgumentParser(description="Read a book once, then ask.")
parser.add_argument("book", nargs="?", type=Path, help="a text file; default: a part of Python's own manual")
parser.add_argument("--model", help="a folder written by save_pretrained or `titans train`")
parser.add_argument("--question", default="What does it say about generators?")
arguments = parser.parse_args()
work = Path(tempfile.mkdtemp())

if arguments.book is None:
    arguments.book = work / "manual.txt"
    arguments.book.write_text("\n\n".join(topics.values())[:60_000])
if arguments.model is None:
    torch.manual_seed(0)
    arguments.model = str(work / "model")
    config = TitansConfig(
        variant="mag", vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, memory_heads=2,
        window_size=128, num_persistent_tokens=4, memory_mode="chunked", memory_chunk_size=32,
    )  # fmt: skip
    TitansForCausalLM(config).save_pretrained(arguments.model)

session = Session.load(arguments.model)


def show(tokens: int) -> None:
    """Says how much was read, and how little that takes."""
    if tokens % 8192 == 0:
        print(f"{tokens:>9,} tokens read, {session.cache.nbytes / 1024:,.0f} KiB kept")


start = time.perf_counter()
with arguments.book.open(encoding="utf-8", errors="replace") as lines:
    tokens = session.read(lines, on_piece=show)
print(f"{tokens:>9,} tokens read, {tokens / (time.perf_counter() - start):,.0f} per second")
session.cache.save(work / "book.mem")
print(f"The memory file has {(work / 'book.mem').stat().st_size / 1024:,.0f} KiB.")

later = Session.load(arguments.model, memory=work / "book.mem")  # in another process, on another day
answers = [each.answer(each.encode(arguments.question), 60, Sampling(seed=1)).text for each in (session, later)]
print(f"{arguments.question} {answers[1]!r}")
print(f"Asked in place and from the file, the answers are {'equal' if answers[0] == answers[1] else 'different'}.")
