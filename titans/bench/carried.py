"""Does carried memory let a model use what it read before its training length?

A document has three parts, each as long as a training sequence: facts (each key with its value, twice), others, and
the first ones again, twice. Between a fact and its return lies more than one training length. How to recall can be
learned from the repetitions inside a part; what to recall when a fact returns only a carried memory can know. The same
model is trained on the same documents with memory carried from sequence to sequence, and without. Prints and writes how
many values are predicted in the last part, where a fact returns and where it is repeated.

    python benchmarks/carried.py --out runs/carried
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path

import torch

from titans.files import write_atomically
from titans.models import TitansForCausalLM
from titans.tasks.prepared import TokenStore, load_prepared
from titans.training.config import TrainConfig
from titans.training.prepare import prepare
from titans.training.run import train

KEYS, VALUES = "abcdefgh", "ABCDEFGHIJKLMNOP"
PAIRS, ROUNDS = len(KEYS) // 2, 2
LENGTH, PIECES, ROWS = 2 * PAIRS * ROUNDS, 3, 32
MODEL = {
    "name": "lmm", "hidden_size": 64, "num_hidden_layers": 2, "memory_heads": 1, "num_persistent_tokens": 0,
    "intermediate_size": 128, "memory_depth": 1, "tie_word_embeddings": False,
}  # fmt: skip


def document(draw: random.Random) -> str:
    """Facts, other facts, and the first ones again, each part repeated: only the values are drawn."""
    facts = {key: key + draw.choice(VALUES) for key in KEYS}
    parts = (KEYS[:PAIRS], KEYS[PAIRS:], KEYS[:PAIRS])
    return "".join(facts[key] for part in parts for _ in range(ROUNDS) for key in part)


def make_data(folder: Path, documents: int) -> Path:
    """A prepared set; its validation documents are others than its training documents."""
    for name, seed, count in (("train", 0, documents), ("validation", 1, 512)):
        draw = random.Random(seed)
        lines = [json.dumps({"text": document(draw)}) for _ in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    prepare([str(folder / "train.jsonl")], folder / "set", validation=[str(folder / "validation.jsonl")])
    return folder / "set"


@torch.no_grad()
def recall(model: TitansForCausalLM, store: TokenStore, carry: bool) -> tuple[float, float]:
    """The share of the values that are predicted where a fact returns, and where it is repeated."""
    rows = [store.read(int(a), int(b)) for a, b in zip(store.starts, store.starts[1:], strict=False)]
    ids = torch.tensor(rows)[:, :-1]
    logits, cache = [], None
    for piece in ids.split(LENGTH, dim=1):
        output = model(piece, past_key_values=cache, use_cache=carry)
        cache = output.past_key_values if carry else None
        logits.append(output.logits)
    right = (torch.cat(logits, dim=1).argmax(-1)[:, :-1] == ids[:, 1:])[:, 1 - 2 * PAIRS * ROUNDS :: 2].float()
    return float(right[:, :PAIRS].mean()), float(right[:, -PAIRS:].mean())


def main() -> None:
    """One row a seed and way of training."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/carried"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--documents", type=int, default=20_000)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        data = make_data(Path(temporary), options.documents)
        store = TokenStore(load_prepared(data).open("validation"))
        for seed in options.seeds:
            for carry in (PIECES, 0):
                output = options.out / f"{'carried' if carry else 'fresh'}-{seed}"
                config = TrainConfig(
                    model=MODEL, data=str(data), output=str(output), length=LENGTH, carry=carry,
                    batch_tokens=ROWS * PIECES * LENGTH, micro_batch=ROWS * PIECES, steps=options.steps,
                    learning_rate=4e-3, warmup=50, weight_decay=0.0, seed=seed, log_every=100, eval_every=0,
                    save_every=options.steps, trackers=[], memory_stats_every=0,
                )  # fmt: skip
                if not train(config, overwrite=True).finished:
                    raise SystemExit("stopped")
                model = TitansForCausalLM.from_pretrained(output).eval()
                first, last = recall(model, store, bool(carry))
                rows.append({"carry": carry, "seed": seed, "returning": first, "repeated": last})
                kind = "carried" if carry else "not carried"
                print(f"{kind}, seed {seed}: returning facts {first:.3f}, repeated {last:.3f}", flush=True)
    report = {"chance": 1 / len(VALUES), "steps": options.steps, "rows": rows}
    write_atomically(options.out / "carried.json", json.dumps(report, indent=2).encode())


if __name__ == "__main__":
    main()
