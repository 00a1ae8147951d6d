"""The page that `titans inspect` writes: one HTML file with everything in it, which fetches nothing."""

from __future__ import annotations

import html
import json
import math
import unicodedata
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from titans.inspection.inspect import HIDDEN, REMEMBERED, SEEN, Inspection, MaskPicture, Subject
from titans.models import TitansConfig

NAMES = {
    "lmm": "LMM, memory alone",
    "mac": "MAC, memory as a context",
    "mag": "MAG, memory as a gate",
    "mal": "MAL, memory as a layer",
}
VISIBLE = {"\n": "↵\n", "\t": "⇥\t", "\r": "␍"}
JOINERS = "\u200c\u200d"  # shape the letters around them, and are harmless
CELL = 10  # pixels of a cell of the mask's picture
LETTER = 6  # pixels of a letter beside it


def render_page(inspection: Inspection, subject: Subject, total: int) -> str:
    """The page, for a text that had ``total`` tokens, of which the inspection may hold only the first."""
    config = subject.model.config
    count = len(inspection.tokens)
    title = f"{subject.source} · titans inspect"
    parts = {
        "TITLE": html.escape(title),
        "SOURCE": html.escape(subject.source),
        "FACTS": "".join(f"<li>{html.escape(fact)}</li>" for fact in _facts(subject)),
        "READ": html.escape(f"{count:,} tokens" if count == total else f"the first {count:,} of {total:,} tokens"),
        "FRESH": _FRESH if subject.fresh else "",
        "MASK": draw_mask(inspection.mask),
        "MASK_WORDS": html.escape(_mask_words(config, inspection.mask)),
        "DATA": _embed(to_json(inspection)),
    }
    page = files("titans.inspection").joinpath("page.html").read_text(encoding="utf-8")
    # one pass over the template, so that a text that looks like a placeholder stays a text
    pieces = page.split("{{")
    return pieces[0] + "".join(parts[name] + rest for name, rest in (piece.split("}}", 1) for piece in pieces[1:]))


_FRESH = (
    '<p class="notice"><b>Random weights.</b> This model was made from a config and has never been trained: '
    "the page shows how its memory works, not what a trained one does.</p>"
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


def _embed(data: Any) -> str:
    """JSON that may stand inside a script element: nothing in it can end the element."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


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
    if config.variant != "lmm" and config.use_attention:
        in_segments = config.variant == "mac"
        facts.append(f"segments of {config.segment_size:,}" if in_segments else f"window of {config.window_size:,}")
    facts.append("reads bytes" if subject.tokenizer is None else f"tokenizer of {len(subject.tokenizer):,} tokens")
    return facts


def _mask_words(config: TitansConfig, mask: MaskPicture) -> str:
    if config.variant == "lmm" or not config.use_attention:
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


def draw_mask(mask: MaskPicture) -> str:
    """The picture as SVG: a row for each token, a column for each key."""
    left, top, gap = 2, 22, 14
    kinds = {HIDDEN: "hidden", SEEN: "seen", REMEMBERED: "remembered"}
    boxes: dict[int, list[str]] = {kind: [] for kind in kinds}
    labels = []
    first, x = 0, left
    for name, size in mask.groups:
        labels.append(f'<text x="{x}" y="14">{html.escape(name)}</text>')
        for row, cells in enumerate(mask.cells):
            for place, kind in enumerate(cells[first : first + size]):
                boxes[kind].append(f"M{x + place * CELL} {top + row * CELL}h{CELL - 1}v{CELL - 1}h-{CELL - 1}z")
        first, x = first + size, x + max(size * CELL, LETTER * len(name)) + gap
    width, height = x - gap, top + len(mask.cells) * CELL
    drawn = "".join(f'<path class="{kinds[kind]}" d="{"".join(paths)}"/>' for kind, paths in boxes.items() if paths)
    return (
        f'<svg class="mask" viewBox="0 0 {width} {height}" style="max-width:{1.25 * width:g}px" role="img" '
        f'aria-label="Attention mask: one row a token, one column a key">{"".join(labels)}{drawn}</svg>'
    )
