"""The experiments on tasks: what is compared, how it is trained, and what it is asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from titans.evaluation.score import CONTROLS
from titans.experiments.runs import Exam
from titans.experiments.tasks import TaskExperiment
from titans.tasks.babi import KINDS

# Learning to recall begins on a plateau, where a rate that falls early would leave a model for good.
SCHEDULE: dict[str, Any] = {
    "schedule": "stable", "learning_rate": 4e-3, "min_learning_rate": 0.0, "warmup": 50.0, "weight_decay": 0.0,
    "log_every": 20, "eval_every": 100, "save_every": 200, "keep": 1, "trackers": [], "memory_stats_every": 0,
    "micro_batch": 64,
}  # fmt: skip
# Two layers of width 64 whose attention sees 16 tokens: two windows do not reach from a question to its pair.
RECALL: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "num_attention_heads": 4, "segment_size": 16,
    "window_size": 16, "num_persistent_tokens": 4, "memory_heads": 1, "tie_word_embeddings": False,
}  # fmt: skip
LMM: dict[str, Any] = {"name": "lmm", **RECALL}
# For text: twice as wide. A linear memory learns to look things up in the fewest steps.
TEXT: dict[str, Any] = {
    **RECALL, "hidden_size": 128, "intermediate_size": 256, "segment_size": 64, "window_size": 64, "memory_heads": 2,
    "memory_depth": 1, "tie_word_embeddings": True,
}  # fmt: skip
# What Table 5 of the paper takes away from the LMM, one part at a time.
PARTS: dict[str, dict[str, Any]] = {
    "LMM": {},
    "linear memory": {"memory_depth": 1},
    "without convolution": {"memory_conv_kernel": 0},
    "without momentum": {"memory_momentum": False},
    "without forgetting": {"memory_forgetting": False},
    "without persistent memory": {"num_persistent_tokens": 0},
}
# What a memory that was trained token by token is tested with as well.
CHUNKS = [{"memory_mode": "chunked", "memory_chunk_size": size} for size in (4, 16, 64)]
Make = Callable[[Mapping[str, Any]], TaskExperiment]  # settings of the tasks, such as where their texts are


def _tested(settings: Mapping[str, Any], trained_on: str, training: Sequence[str]) -> dict[str, Any]:
    """The settings of a test: without those of a task that is only trained on, and others that are for training."""
    return {
        name: value
        for name, value in settings.items()
        if not name.startswith(f"{trained_on}.") and name not in training
    }


def needle(settings: Mapping[str, Any]) -> TaskExperiment:
    """S-NIAH. What a number is looked up by is learned from short phone books, which ask more often, and kept alive by
    up to four needles a text; a price on writing keeps the rest of a long text out of the memory."""
    tasks = ("needle-noise", "needle-essay")
    names = ("mac", "lmm", "mag", "mal", "gated-deltanet", "sliding-window")
    task = {"phonebook.longest": 256, "needles": 4, **settings}
    asked = _tested(settings, "phonebook", ("needles",))
    train = {
        **SCHEDULE, "data": f"task:{','.join(tasks)},phonebook", "task": task, "tokenizer": "bytes", "length": 1024,
        "shortest": 64, "growth": 0.6, "batch_tokens": 2048, "steps": 1500, "write_cost": 1.0, "eval_tokens": 32768,
        "final_eval_tokens": 65536,
    }  # fmt: skip
    return TaskExperiment(
        "needle",
        "Needle in a haystack",
        "A number is hidden in a text and asked for at its end (S-NIAH-PK: repeated noise; S-NIAH-N: essays). Models "
        "of two layers, with linear memory and attention over 64 tokens, are trained on short sequences, the "
        "shortest of them phone books, the others with up to four needles, with a price on writing, and tested on long "
        "ones with one needle.",
        {name: TEXT | {"name": name} for name in names},
        train,
        [Exam(tasks, asked, samples=4)],
    )


def babilong(settings: Mapping[str, Any]) -> TaskExperiment:
    """One bAbI task in books. Who is where is learned from the bare stories, which ask more often; in books, a text is
    asked all that its facts answer, where that can be told. With a tokenizer that has the words of the stories, a place
    stands four or five tokens after the name it belongs to: a convolution over 8 sees both."""
    names = ("mac", "gated-deltanet", "sliding-window")
    task = settings.get("task", "qa1")
    kind = KINDS.get(str(task))  # of stories that can be asked more than their files do
    more = {"questions": len(kind.asked), "babi.longest": 256} if kind else {}
    asked = _tested(settings, "babi", ("longest", "facts", "questions"))
    train = {
        **SCHEDULE, "data": "task:babilong,babi" if kind else "task:babilong", "task": more | dict(settings),
        "tokenizer": "bytes", "length": 1024, "shortest": 128 if kind else 512, "growth": 0.6,
        "batch_tokens": 2048, "steps": 800, "write_cost": 0.3, "eval_tokens": 32768, "final_eval_tokens": 65536,
    }  # fmt: skip
    return TaskExperiment(
        f"babilong-{task}",
        f"BABILong {task}",
        "Facts of a bAbI story stand far apart in the text of books, and a question about them at the end. Models of "
        "two layers, with linear memory and attention over 64 tokens, are trained on short sequences with several "
        "questions, with a price on writing, and tested on long ones with one.",
        {name: TEXT | {"name": name, "memory_conv_kernel": 8} for name in names},
        train,
        [Exam(("babilong",), asked, samples=25)],
    )


def tracking(task: str) -> Make:
    """A word problem: the state after every token, on sequences longer than those of the training."""

    def make(settings: Mapping[str, Any]) -> TaskExperiment:
        chunked = {"memory_mode": "chunked"}
        rows = {
            "LMM": LMM,
            "linear LMM": LMM | {"memory_depth": 1},
            "LMM in chunks of 4": LMM | chunked | {"memory_chunk_size": 4},
            "LMM in chunks of 16": LMM | chunked | {"memory_chunk_size": 16},
            "gated-deltanet": RECALL | {"name": "gated-deltanet"},
            "sliding-window": RECALL | {"name": "sliding-window", "window_size": 64},
        }
        train = {**SCHEDULE, "data": f"task:{task}", "task": dict(settings), "length": 32, "shortest": 8,
                 "batch_tokens": 512, "steps": 500, "eval_tokens": 2048, "final_eval_tokens": 8192}  # fmt: skip
        return TaskExperiment(
            f"tracking-{task}",
            f"State tracking: {task}",
            "A model says the state after every token. It is trained on short sequences and tested on what it says "
            "last of longer ones. Inside a chunk the chunked rule takes all gradients at one place, so that only a "
            "memory with chunk 1 is non-linear from token to token.",
            rows,
            train,
            [Exam((task,), {"last": True, **settings}, samples=200)],
        )

    return make


def reassigned(settings: Mapping[str, Any]) -> TaskExperiment:
    """Keys that get another value: the latest counts."""
    rows = {label: LMM | part for label, part in PARTS.items()}
    rows |= {name: RECALL | {"name": name} for name in ("gated-deltanet", "deltanet", "linear-attention")}
    train = {**SCHEDULE, "data": "task:reassigned", "task": dict(settings), "length": 128, "shortest": 32,
             "batch_tokens": 1024, "steps": 500, "eval_tokens": 8192, "final_eval_tokens": 32768}  # fmt: skip
    return TaskExperiment(
        "reassigned",
        "Recall of keys that were rewritten",
        "Keys get a value, some of them another one later, and each is asked for at the end: the latest counts.",
        rows,
        train,
        [Exam(("reassigned",), dict(settings), samples=200)],
    )


def recall(settings: Mapping[str, Any]) -> TaskExperiment:
    """Recall at up to 16 times the training length: each model, each part left out, and what must not recall."""
    rows = {label: LMM | part for label, part in PARTS.items()}
    rows |= {name.upper(): RECALL | {"name": name} for name in ("mac", "mag", "mal")}
    rows |= {"memory off": LMM | {"memory_writes": False}, "sliding-window": RECALL | {"name": "sliding-window"}}
    train = {**SCHEDULE, "data": "task:recall", "task": dict(settings), "length": 64, "shortest": 32,
             "batch_tokens": 1024, "steps": 300, "eval_tokens": 4096, "final_eval_tokens": 16384}  # fmt: skip
    return TaskExperiment(
        "recall",
        "Associative recall, part by part",
        "Eight pairs at the start, asked for at the end of ever longer sequences.",
        rows,
        train,
        [Exam(("recall",), dict(settings), samples=64)],
        [
            *(Exam(("recall",), {"lengths": [64, 1024], **settings}, samples=64, control=name) for name in CONTROLS),
            *(Exam(("recall",), {"lengths": [64, 1024], **settings}, samples=64, fields=chunks) for chunks in CHUNKS),
        ],
    )


def pairs(settings: Mapping[str, Any]) -> TaskExperiment:
    """Recall of ever more pairs by models whose states have about the same size: 8,192 numbers a layer."""
    rows = {
        "linear LMM": LMM | {"memory_depth": 1},
        "LMM of depth 2": LMM | {"memory_depth": 2, "memory_head_dim": 45},
        "linear LMM without momentum": LMM | {"memory_depth": 1, "memory_momentum": False, "memory_head_dim": 90},
        "gated-deltanet": RECALL | {"name": "gated-deltanet", "memory_head_dim": 90},
        "linear-attention": RECALL | {"name": "linear-attention", "memory_head_dim": 90},
        "sliding-window": RECALL | {"name": "sliding-window", "window_size": 64},
    }
    task = {"vocabulary": 256, "cells": [[32, 4], [64, 8], [128, 16], [256, 32], [512, 64]], **settings}
    train = {**SCHEDULE, "data": "task:mqar", "task": task, "length": 128, "shortest": 32,
             "batch_tokens": 1024, "steps": 500, "eval_tokens": 8192, "final_eval_tokens": 32768}  # fmt: skip
    return TaskExperiment(
        "pairs",
        "Recall of ever more pairs at equal state",
        "Multi-query associative recall. A layer of each model keeps about 8,192 numbers of what it has read: weights "
        "and momentum of a memory, or keys and values of a window.",
        rows,
        train,
        [Exam(("mqar",), task, samples=64)],
    )


EXPERIMENTS: dict[str, Make] = {
    "needle": needle,
    "babilong": babilong,
    "recall": recall,
    "reassigned": reassigned,
    "pairs": pairs,
    **{f"tracking-{task}": tracking(task) for task in ("parity", "modular-addition", "s3", "s5")},
}
