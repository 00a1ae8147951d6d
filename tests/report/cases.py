"""What the tests of the reports share: results of all kinds, and texts that would do harm."""

from __future__ import annotations

import base64
import math
from typing import Any

from matplotlib.axes import Axes

HOSTILE = "<script>alert(1)</script> \"'& $\\frac{1} {{ title }} {% raw %} [/red] \x1b[31m ../../up"
PNG = base64.b64decode(  # one white dot
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGP4DwABAQEAsTj2FAAAAABJRU5ErkJggg=="
)
LENGTHS, DEPTHS = (1024, 2048, 4096, 8192, 16384, 32768), (0.0, 0.5, 1.0)


def cell(value: float | None, half: float | None = 0.03, **group: Any) -> dict[str, Any]:
    """A mean over 50 sequences with its interval; without ``half``, nobody knows how sure it is."""
    low, high = (None, None) if value is None or half is None else (value - half, value + half)
    return {"group": group, "value": value, "low": low, "high": high, "count": None if half is None else 50}


def entry(*cells: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """What a run says of a task; its axes are the keys of the first cell's group."""
    said = {"title": "Needle", "source": "a paper", "metric": "accuracy", "unit": "", "better": "higher", "chance": 0.1}
    said |= {"axes": list(cells[0]["group"]), "settings": {"digits": 7}, "trained_at": None, "seconds": 2.5}
    return {**said, "control": None, "cells": list(cells), **fields}


def result(model: str = "mac", seed: int = 0, parameters: int | None = 1000, **tasks: dict[str, Any]) -> dict[str, Any]:
    return {
        "format": 1,
        "name": f"{model}-{seed}",
        "model": {"name": model, "parameters": parameters, "fields": {}},
        "date": "2026-11-16",
        "command": f"titans eval {model} --seed {seed}",
        "versions": {"torch": "2.9.0"},
        "seed": seed,
        "tasks": tasks or {"needle": entry(*(cell(0.9, length=n) for n in LENGTHS))},
    }


def many() -> list[dict[str, Any]]:
    """Runs of all kinds: several seeds, values that are missing, words, one figure, a name that does harm."""
    results = []
    for model, seed in [("mac", 0), ("mac", 1), ("mac", 2), ("transformer", 0), (HOSTILE, 0)]:
        shift = 0.05 * seed
        needle = [
            cell(0.8 + shift - 0.02 * math.log2(n / 1024) * d if model != "transformer" or n <= 8192 else None,
                 length=n, depth=d)
            for n in LENGTHS for d in DEPTHS
        ]  # fmt: skip
        kinds = [cell(0.5 + shift, kind=kind) for kind in ("yes or no", "counting things in a long story", HOSTILE)]
        losses = [cell(3.0 - shift - 0.1 * i, None, distance=64 * 2**i) for i in range(7)]
        results.append(
            result(
                model,
                seed,
                needle=entry(*needle, trained_at=2048, title="Needle in noise"),
                kinds=entry(*kinds, title=f"Questions {HOSTILE}", source=HOSTILE),
                lm=entry(*losses, metric="loss", unit="nats", better="lower", chance=None, title="Language"),
                copy=entry(cell(0.7, length=512), title="Copying"),
            )
        )
    return results


def legend(axes: Axes) -> list[str]:
    return [text.get_text() for box in axes.figure.legends for text in box.get_texts()]
