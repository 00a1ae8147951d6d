"""The page that `titans inspect` writes: one HTML file that fetches nothing."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from titans.inspection.inspect import HIDDEN, REMEMBERED, SEEN, Inspection, MaskPicture, Subject
from titans.models import TitansConfig
from titans.report.page import render

NAMES = {
    "lmm": "LMM, memory alone",
    "mac": "MAC, memory as a context",
    "mag": "MAG, memory as a gate",
    "mal": "MAL, memory as a layer",
}
VISIBLE = {"\n": "↵\n", "\t": "⇥\t", "\r": "␍"}
JOINERS = "\u200c\u200d"  # they shape the letters around them, and are harmless
CELL = 10  # width of a cell in the mask's picture
LETTER = 6  # width of a letter there


def render_page(inspection: Inspection, subject: Subject, total: int) -> str:
    """The page, for a text of ``total`` tokens, of which the inspection may hold only the first."""
    count = len(inspection.tokens)
    return render(
        "inspection/page.html",
        title=f"{subject.source} · titans inspect",
        source=subject.source,
        read=f"{count:,} tokens" if count == total else f"the first {count:,} of {total:,} tokens",
        facts=_facts(subject),
        fresh=subject.fresh,
        mask=draw_mask(inspection.mask),
        mask_words=_mask_words(subject.model.config, inspection.mask),
        data=to_json(inspection),
    )


def to_json(inspection: Inspection) -> dict[str, Any]:
    """The inspection as plain data: four significant digits, None for what is not a finite number."""
    data = asdict(inspection)
    del data["mask"]
    data["tokens"] = [[visible(token.text) or "·", token.id, token.name] for token in inspection.tokens]
    return dict(_round(data))


def visible(text: str) -> str:
    """A text in which everything can be seen: line ends, tabs, control characters and marks that turn text around."""
    return "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    if character in VISIBLE:
        return VISIBLE[character]
    kind = unicodedata.category(character)
    if kind in ("Cc", "Cf", "Cs", "Zl", "Zp") and character not in JOINERS:
        return f"\\x{ord(character):02x}" if ord(character) < 256 else f"\\u{ord(character):04x}"
    return character


def _round(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _round(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_round(item) for item in value]
    return value


def _facts(subject: Subject) -> Sequence[str]:
    config = subject.model.config
    memory = "linear" if config.memory_depth == 1 else f"{config.memory_depth} layers deep"
    parameters = sum(parameter.numel() for parameter in subject.model.parameters())
    facts = [
        f"preset {config.preset}" if config.preset else NAMES[config.variant],
        f"{config.num_hidden_layers} layers of width {config.hidden_size}",
        f"{parameters / 1e6:,.2f}M parameters" if parameters < 1e8 else f"{parameters / 1e6:,.0f}M parameters",
        f"memory: {config.memory_heads} head{'s' if config.memory_heads > 1 else ''}, {memory}, {config.memory_mode}",
    ]
    if config.attending:
        seen = (
            f"segments of {config.segment_size:,}" if config.variant == "mac" else f"window of {config.window_size:,}"
        )
        all_of_them, some_of_them = config.num_hidden_layers, len(config.attending)
        some = f" in {some_of_them} of {all_of_them} layers" if some_of_them < all_of_them else ""
        facts.append(seen + some)
    facts.append("reads bytes" if subject.tokenizer is None else f"tokenizer of {len(subject.tokenizer):,} tokens")
    return facts


def _mask_words(config: TitansConfig, mask: MaskPicture) -> str:
    if not config.attending:
        words = "There is no attention: whatever a token knows of those before it, it knows through the memory."
    elif config.variant == "mac":
        words = (
            "A token attends to the persistent tokens, and inside its segment to itself, to those before it, and to "
            "what the memory said to them (h). Segments before it reach it only through the memory."
        )
    else:
        words = (
            "A token attends to the persistent tokens and to a window that ends with itself. "
            "What lies further back reaches it only through the memory."
        )
    return f"{words} Drawn with {mask.note}." if mask.note else words


def draw_mask(mask: MaskPicture) -> dict[str, Any]:
    """What an SVG of the mask is made of, one row per token and one column per key: sizes, labels and paths."""
    left, top, gap = 2, 22, 14
    kinds = {HIDDEN: "hidden", SEEN: "seen", REMEMBERED: "remembered"}
    paths = dict.fromkeys(kinds.values(), "")
    labels = []
    first, x = 0, left
    for name, size in mask.groups:
        labels.append((x, name))
        for row, cells in enumerate(mask.cells):
            for place, kind in enumerate(cells[first : first + size]):
                paths[kinds[kind]] += f"M{x + place * CELL} {top + row * CELL}h{CELL - 1}v{CELL - 1}h-{CELL - 1}z"
        first, x = first + size, x + max(size * CELL, LETTER * len(name)) + gap
    return {"width": x - gap, "height": top + len(mask.cells) * CELL, "labels": labels, "paths": paths}
