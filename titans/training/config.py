"""``TrainConfig``: every setting of a training run, read from YAML and the command line, and checked at once."""

from __future__ import annotations

import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from titans.files import HUB_NAME, RUN, configs_folder, read_yaml
from titans.words import nearest

PRECISIONS = ("float32", "bf16")
GRADIENTS = ("second", "first")
PARALLEL = ("ddp", "fsdp2")
SCHEDULES = ("cosine", "stable")
DEVICES = ("auto", "cpu", "cuda", "mps")
FINGERPRINT = "data_fingerprint"  # what a run's own file has besides the fields
TASK = "task:"  # begins the name of data that tasks draw
# What may change when a run is resumed: where and how it runs, not what it computes.
FREE = frozenset(
    (
        "data", "output", "micro_batch", "workers", "log_every", "memory_stats_every", "eval_every", "eval_tokens",
        "final_eval_tokens", "save_every", "keep", "trackers", "push_to_hub", "hub_private", "parallel",
        "compile", "gradient_checkpointing", "device",
    )
)  # fmt: skip


STREAM = frozenset(("data", "workers", "micro_batch"))  # what the rows of a stream depend on as well


@dataclass(frozen=True)
class TrainConfig:
    """What ``titans train`` is told: every field is a line of its YAML file, and a flag."""

    # what
    model: dict[str, Any] = field(default_factory=lambda: {"name": "mac", "size": "1m"})
    """The model: name (a variant, preset or baseline), size, and any field of its config; or pretrained, a folder or
    a name on the hub, and any field of its config to change."""
    data: str = ""
    """The training data: a folder that ``titans prepare`` wrote; hf://OWNER/NAME, streamed from the hub; or task:NAME,
    drawn by a task of ``titans eval`` (several with commas between), where only answers count for the loss."""
    task: dict[str, Any] = field(default_factory=dict)
    """For task data: the settings of the task; with several tasks, TASK.SETTING sets that of one."""
    data_config: str | None = None
    """For streamed data: the configuration of the data set."""
    data_split: str = "train"
    """For streamed data: the split."""
    text_column: str = "text"
    """For streamed data: the column that holds the text."""
    validation: str | None = None
    """A prepared folder whose validation split, or else train split, is the validation data. By default, the data's own
    validation split is."""
    tokenizer: str | None = None
    """For streamed data and tasks of text: bytes, a folder, or a name on the hub. Prepared data brings its own."""
    output: str = ""
    """The folder of the run, which is made if it is missing."""

    # how much
    length: int = 4096
    """Tokens per training sequence."""
    batch_tokens: int = 524_288
    """Tokens per batch, all processes and accumulation steps together."""
    micro_batch: int = 8
    """The most sequences that a process works on at a time; the rest of a batch is accumulated."""
    tokens: int | None = None
    """Tokens of the whole run. Give one of tokens, steps and epochs."""
    steps: int | None = None
    """Optimiser steps of the whole run."""
    epochs: float | None = None
    """Passes over the data."""

    shortest: int | None = None
    """For task data: sequences begin with this many tokens and double until they have ``length``, while a batch always
    has the same number of tokens. By default, they all have ``length``."""
    growth: float = 0.5
    """The share of the steps after which sequences have their full length."""
    grow_below: float | None = None
    """For task data that begins with ``shortest``: sequences double whenever the mean loss of the last 20 steps falls
    below this, so that none are longer before the shorter ones are learned; when ``growth`` is over, they have their
    full length at once. By default, they double at fixed steps."""

    # documents
    separate_documents: bool = False
    """Whether each document inside a sequence is read as if it were alone: a fresh memory, no attention and no target
    across its borders. With carry, it always is."""
    carry: int = 0
    """With 0, every sequence starts with a fresh memory. With n, documents are read in consecutive sequences of n
    pieces of ``length`` tokens, the memory is carried on, and gradients are cut after n pieces."""

    # optimiser
    learning_rate: float = 4e-4
    """The highest learning rate."""
    schedule: str = "cosine"
    """cosine: the rate falls from the end of the warm-up on; stable: it stays, and falls linearly at the end."""
    decay: float = 0.33
    """For the stable schedule: the share of the steps over which the rate falls."""
    min_learning_rate: float = 0.1
    """Where the rate ends, as a share of the learning rate."""
    warmup: float = 0.02
    """The share of the steps over which the rate rises; from 1 on, their number."""
    weight_decay: float = 0.1
    """The decay of the weights of linear layers and embeddings; norms, biases, the memory's start, and its gates of
    step, forgetting and momentum have none."""
    beta1: float = 0.9
    """AdamW's decay of the mean gradient."""
    beta2: float = 0.95
    """AdamW's decay of the mean squared gradient."""
    clip: float = 1.0
    """The largest norm of the gradient."""
    write_cost: float = 0.0
    """What writing costs: this times the mean of theta over tokens and heads is added to what is minimised (not to the
    loss that is shown), growing from nothing with the square of the steps. On texts much longer than those of the
    training, a memory that writes less keeps what it has for longer."""
    forget_cost: float = 0.0
    """What forgetting costs: the same with alpha. What is forgotten at every token shows only on longer texts."""
    outer_gradients: str = "second"
    """second: gradients go through the memory's own gradients; first: these are constants, which is cheaper."""
    seed: int = 0
    """The seed of the first weights and of the order of the data."""

    # how
    precision: str = "float32"
    """float32, or bf16: autocast, while parameters, memory states and their coefficients stay float32."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them."""
    compile: bool = False
    """Use torch.compile; where it fails, the run says so and goes on without."""
    parallel: str = "ddp"
    """What several processes do: ddp, or fsdp2, which shards parameters, gradients and optimiser."""
    device: str = "auto"
    """Where to run: auto (CUDA if there is any, else MPS, else the CPU), cpu, cuda or mps."""
    workers: int = 0
    """How many processes read data ahead."""

    # watching and keeping
    log_every: int = 10
    """Steps between two lines of figures."""
    memory_stats_every: int = 50
    """Steps between two looks at every layer's gates, surprise and memory norm; 0 means never."""
    eval_every: int = 500
    """Steps between two validations; with 0, there is only the one at the end, which there always is."""
    eval_tokens: int | None = 1_000_000
    """The most tokens of a validation along the way; null means all."""
    final_eval_tokens: int | None = None
    """The most tokens of the validation at the end; null means all."""
    save_every: int = 500
    """Steps between two checkpoints; there is always one at the end."""
    keep: int = 2
    """How many checkpoints are kept."""
    trackers: list[str] = field(default_factory=lambda: ["tensorboard"])
    """Where figures go besides the run's folder: any names that the Trainer knows."""
    push_to_hub: str | None = None
    """OWNER/NAME on the hub that the finished model is pushed to."""
    hub_private: bool = True
    """Whether a repository that is made on the hub is private."""

    def __post_init__(self) -> None:
        for each in fields(self):
            _check_type(each.name, getattr(self, each.name), _hints()[each.name])
        least = {
            "length": 1, "batch_tokens": 1, "micro_batch": 1, "tokens": 1, "steps": 1, "carry": 0, "workers": 0,
            "log_every": 1, "memory_stats_every": 0, "eval_every": 0, "eval_tokens": 1, "final_eval_tokens": 1,
            "save_every": 1, "keep": 1, "seed": 0, "shortest": 1,
        }  # fmt: skip
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise ValueError(f"{name} is {value}; expected a whole number of at least {bound}")
        for name in ("learning_rate", "epochs", "clip", "grow_below"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}; expected a positive number")
        for name in ("min_learning_rate", "beta1", "beta2", "growth", "decay"):
            if not 0 <= getattr(self, name) <= 1 or (name.startswith("beta") and getattr(self, name) == 1):
                raise ValueError(f"{name} is {getattr(self, name)}; expected a number from 0 to 1")
        for name in ("warmup", "weight_decay", "write_cost", "forget_cost"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a number of at least 0")
        choices = {
            "precision": PRECISIONS, "outer_gradients": GRADIENTS, "parallel": PARALLEL, "schedule": SCHEDULES,
            "device": DEVICES,
        }  # fmt: skip
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected {' or '.join(known)}")
        if self.push_to_hub is not None and not re.fullmatch(HUB_NAME, self.push_to_hub):
            raise ValueError(f"push_to_hub is {self.push_to_hub!r}; expected OWNER/NAME")
        given = [name for name in ("tokens", "steps", "epochs") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are given; expected one of tokens, steps and epochs")
        if self.batch_tokens % self.row_tokens:
            raise ValueError(
                f"batch_tokens is {self.batch_tokens:,}; expected a multiple of {self.row_tokens:,}, "
                f"the tokens of one sequence{' (carry x length)' if self.carry > 1 else ''}"
            )
        if self.streamed:
            if self.carry:
                raise ValueError("carry is for prepared data; data is streamed: run `titans prepare` on it first")
            if self.epochs is not None:
                raise ValueError("epochs is for prepared data, whose size is known; data is streamed: expected tokens")
        if self.tasks:
            if self.carry:
                raise ValueError("carry is for prepared data; data is drawn by a task: expected carry 0")
            if self.separate_documents:
                raise ValueError("separate_documents is for text; data is drawn by a task: expected false")
            if self.epochs is not None:
                raise ValueError("epochs is for prepared data; a task has no end: expected steps or tokens")
            rest = self.length / (self.shortest or self.length)
            if rest < 1 or not math.log2(rest).is_integer():
                raise ValueError(
                    f"shortest is {self.shortest} and length is {self.length}; expected a length that is shortest "
                    "doubled some times"
                )
        elif self.task or self.shortest is not None:
            name = "task" if self.task else "shortest"
            raise ValueError(f"{name} is given and data is not drawn by a task; expected data: task:NAME")
        if self.grow_below is not None and (self.shortest is None or self.workers):
            wrong = "shortest is None" if self.shortest is None else f"workers is {self.workers}"
            expected = "a length to begin with" if self.shortest is None else "0, as workers read ahead"
            raise ValueError(f"grow_below is {self.grow_below} and {wrong}; expected {expected}")
        for name in ("name", "size"):
            if "pretrained" in self.model and name in self.model:
                raise ValueError(f"model has pretrained and {name}; expected one of them")

    @property
    def streamed(self) -> bool:
        """Whether the data comes from the hub as the run goes on."""
        return self.data.startswith("hf://")

    @property
    def tasks(self) -> list[str]:
        """The names of the tasks that draw the data; none if it is text."""
        if not self.data.startswith(TASK):
            return []
        return [name.strip() for name in self.data.removeprefix(TASK).split(",")]

    def sequence_length(self, step: int, steps: int) -> int:
        """How many tokens a sequence has that a task draws for step ``step`` of ``steps``."""
        if self.shortest is None or step >= self.growth * steps:
            return self.length
        doublings = round(math.log2(self.length / self.shortest))
        return self.shortest << int(step / (self.growth * steps) * doublings)

    @property
    def lengths(self) -> list[int]:
        """All lengths that a task draws sequences of."""
        shortest = self.shortest or self.length
        return [shortest << doublings for doublings in range(round(math.log2(self.length / shortest)) + 1)]

    @property
    def row_tokens(self) -> int:
        """Tokens per sequence and optimiser step."""
        return self.length * max(1, self.carry)

    @property
    def rows(self) -> int:
        """Sequences per batch, all processes and accumulation steps together."""
        return self.batch_tokens // self.row_tokens

    def accumulation(self, processes: int) -> tuple[int, int]:
        """How many sequences a process takes at a time, and how many times these are accumulated for a batch."""
        share, rest = divmod(self.rows, processes)
        if rest or not share:
            raise ValueError(
                f"a batch has {self.rows} sequences (batch_tokens {self.batch_tokens:,} / {self.row_tokens:,}) "
                f"and there are {processes} processes; expected a multiple"
            )
        size = max(n for n in range(1, min(share, self.micro_batch) + 1) if share % n == 0)
        return size, share // size

    def total_steps(self, data_tokens: int | None) -> int:
        """Optimiser steps of the run; one pass over the data takes ``data_tokens``, padding included."""
        if self.steps is not None:
            return self.steps
        tokens = self.tokens
        if tokens is None:
            if data_tokens is None:
                raise ValueError("neither tokens nor steps is given; expected one of them, as the data is streamed")
            tokens = int((self.epochs or 1.0) * data_tokens)
        return max(1, round(tokens / self.batch_tokens))

    def warmup_steps(self, steps: int) -> int:
        """Steps over which the learning rate rises."""
        return int(self.warmup) if self.warmup >= 1 else round(self.warmup * steps)

    def to_dict(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)

    def what_changed(self, saved: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
        """The first field by which this run differs from the saved one, with both values; None if there is none.

        A run from before there was a field has its default.
        """
        before = {**TrainConfig().to_dict(), **saved}
        for name, value in self.to_dict().items():
            if name in FREE and not (self.streamed and name in STREAM):
                continue
            if name in ("model", "task"):
                for key in {**value, **before[name]}:
                    if value.get(key) != before[name].get(key):
                        return f"{name}.{key}", before[name].get(key), value.get(key)
            elif value != before[name]:
                return name, before[name], value
        return None

    def other_than(self, folder: Path, fingerprint: str) -> str | None:
        """How the run in a folder differs from this one on data with this fingerprint; None if it does not."""
        saved = read_yaml(folder / RUN)
        if saved.get(FINGERPRINT) != fingerprint:
            return f"the run in {folder} was trained on other data than {self.data}"
        change = self.what_changed(saved)
        if change is None:
            return None
        name, before, now = change
        return f"the run in {folder} has {name} {before!r}, this one {now!r}"


def load_config(path: Path | None, flags: Sequence[str] = ()) -> TrainConfig:
    """The config of a YAML file, with flags (``--learning-rate 1e-3``, ``--model.size=10m``) over its fields.

    A shipped recipe, ``configs/train/NAME.yaml``, is found wherever one is.
    """
    values: dict[str, Any] = {}
    if path is not None:
        shipped = configs_folder().parent / path
        values = read_yaml(shipped if path.parts[0] == "configs" and not path.exists() and shipped.exists() else path)
        values.pop(FINGERPRINT, None)
    for name, text in sorted(_pairs(flags), key=lambda pair: pair[0] != "model.pretrained"):  # which drops other fields
        _set(values, name, text)
    _check_names(values)
    return TrainConfig(**{name: _convert(name, value) for name, value in values.items()})


def describe_fields() -> str:
    """Every field with its default and what it is for."""
    import ast
    import inspect

    body = ast.parse(inspect.getsource(TrainConfig)).body[0]
    assert isinstance(body, ast.ClassDef)
    words: dict[str, str] = {}
    name = ""
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
            words[name] = ""
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and name:
            words[name] = " ".join(str(node.value.value).split())
    defaults = TrainConfig().to_dict()
    return "\n".join(f"{name}: {defaults[name]!r}  {words[name]}".rstrip() for name in words)


def _check_names(values: Mapping[str, Any]) -> None:
    known = [each.name for each in fields(TrainConfig)]
    for name in values:
        if name not in known:
            raise ValueError(f"{name} is not a field of a training run: {nearest(name, known)}")


def _pairs(flags: Sequence[str]) -> list[tuple[str, str]]:
    pairs = []
    rest = list(flags)
    switches = {each.name for each in fields(TrainConfig) if _hints()[each.name] is bool}
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("--") or len(flag) < 3:
            raise ValueError(f"{flag!r} is not a flag; expected --FIELD VALUE")
        name, given, text = flag[2:].partition("=")
        name = name.replace("-", "_")
        if not given:
            if name in switches and (not rest or rest[0].startswith("--")):
                text = "true"
            elif name.startswith("no_") and name[3:] in switches:
                name, text = name[3:], "false"
            elif rest:
                text = rest.pop(0)
            else:
                raise ValueError(f"--{name.replace('_', '-')} has no value")
        pairs.append((name, text))
    return pairs


def _set(values: dict[str, Any], name: str, text: str) -> None:
    """Puts a flag's value where its dotted name says."""
    import yaml

    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    head, dot, key = name.partition(".")
    if not dot:
        kind = _hints().get(head)
        values[head] = text if kind is str else value
        return
    if head == "task":
        values["task"] = dict(values.get("task") or {}) | {key: value}
        return
    if head != "model":
        raise ValueError(f"{name} is not a field of a training run: {nearest(name, ['model.name', 'model.size'])}")
    model = dict(values.get("model") or {"name": "mac", "size": "1m"})
    if key == "pretrained":
        model = {}
    model[key] = value
    values["model"] = model


@cache
def _hints() -> dict[str, Any]:
    return typing.get_type_hints(TrainConfig)


def _convert(name: str, value: Any) -> Any:
    """Converts numbers that YAML reads as text (1e-3), and whole numbers written with a point or an exponent (5e5)."""
    kinds = typing.get_args(_hints()[name]) or (_hints()[name],)
    if isinstance(value, str) and str not in kinds:
        try:
            value = float(value)
        except ValueError:
            return value
    if isinstance(value, float) and int in kinds and float not in kinds and value.is_integer():
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool) and float in kinds and int not in kinds:
        return float(value)
    return value


def _check_type(name: str, value: Any, hint: Any) -> None:
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    plain = tuple(typing.get_origin(kind) or kind for kind in kinds)
    allowed = (*plain, int) if float in plain else plain
    if (isinstance(value, bool) and bool not in plain) or not isinstance(value, allowed):
        words = {int: "a whole number", float: "a number", str: "a name", bool: "true or false", dict: "fields",
                 list: "a list", types.NoneType: "nothing"}  # fmt: skip
        raise ValueError(f"{name} is {value!r}; expected {' or '.join(words[kind] for kind in plain)}")
