"""The model card of a run: what was trained on what, and how well it went."""

from __future__ import annotations

import json
from typing import Any

from titans.models import TitansConfig
from titans.training.config import TrainConfig

CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [titans, neural-memory, test-time-training]
---

# {title}

A {name} language model with {parameters:,} parameters, trained with [titan-memory](https://pypi.org/project/titan-memory/).
{about}

| | |
|---|---|
{rows}

## Use

{use}
or `titans generate {place} "a prompt"`.

## Model

```json
{model}
```

## Training

```json
{training}
```
"""
USE = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{place}"{trust})
tokenizer = AutoTokenizer.from_pretrained("{place}"{trust})
```
"""
USE_OURS = """Install the code of the model with `pip install 'titan-memory[models]'`. Then:

{use}
`trust_remote_code` runs `titans_model.py`, which imports that package and nothing else; after `import titans` it is not
needed. lm-eval takes it as well: `lm_eval --model hf --model_args pretrained={place},trust_remote_code=True`,
"""
ABOUT = {
    "lmm": "Its layers are neural memories that learn while they read (Titans, arXiv 2501.00663).",
    "mac": "Memory as a context (Titans, arXiv 2501.00663): attention over segments, a memory that learns as it reads.",
    "mag": "Memory as a gate (Titans, arXiv 2501.00663): a sliding window beside a memory that learns while it reads.",
    "mal": "Memory as a layer (Titans, arXiv 2501.00663): a memory that learns while it reads, then a sliding window.",
}  # fmt: skip


def model_card(model: Any, config: TrainConfig, metrics: dict[str, float], steps: int) -> str:
    """A README in Markdown, with the metadata that the hub reads."""
    name = str(config.model.get("name") or config.model.get("pretrained"))
    figures = {
        "validation loss (nats per token)": _number(metrics.get("eval_loss"), ".4f"),
        "validation perplexity": _number(metrics.get("eval_perplexity"), ".2f"),
        "validation tokens": _number(metrics.get("eval_tokens"), ",.0f"),
        "training tokens": f"{steps * config.batch_tokens:,}",
        "steps": f"{steps:,}",
        "time": f"{metrics.get('seconds', 0) / 60:.1f} minutes",
        "peak memory of a process": f"{metrics.get('peak_memory_gib', 0):.2f} GiB",
        "seed": str(config.seed),
    }
    place = config.push_to_hub or config.output
    use = USE.format(place=place, trust="")
    if isinstance(model, TitansConfig):
        use = USE_OURS.format(place=place, use=USE.format(place=place, trust=", trust_remote_code=True"))
    return CARD.format(
        title=config.push_to_hub or f"{name}, {metrics['parameters'] / 1e6:.1f}M",
        name=name,
        place=place,
        use=use,
        parameters=int(metrics["parameters"]),
        about=ABOUT.get(name, ""),
        rows="\n".join(f"| {label} | {value} |" for label, value in figures.items() if value),
        model=json.dumps(json.loads(model.to_json_string()), indent=2),
        training=json.dumps({k: v for k, v in config.to_dict().items() if k not in ("output", "data")}, indent=2),
    )


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
