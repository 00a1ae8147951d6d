"""The paper's experiments: several models, several seeds, one report."""

from __future__ import annotations

# Those on tasks, which titans.experiments.catalogue describes; the command line shows them without loading anything.
ON_TASKS = {
    "needle": "A number hidden in noise and in essays (S-NIAH): trained at 1,024 tokens, tested at up to 16,384.",
    "babilong": "Facts of a story scattered over books (BABILong): trained at 1,024 tokens, tested at up to 65,536.",
    "recall": "Pairs recalled at up to 16 times the training length, with each part of the memory left out.",
    "reassigned": "Keys that get another value later: the latest counts.",
    "pairs": "Recall of ever more pairs by models with states of the same size.",
    "tracking-parity": "State tracking: is the number of ones odd? Trained at 32 tokens, tested at up to 512.",
    "tracking-modular-addition": "State tracking: the sum so far, modulo 5.",
    "tracking-s3": "State tracking: permutations of three things, multiplied.",
    "tracking-s5": "State tracking: permutations of five things, multiplied, beyond TC0.",
}
