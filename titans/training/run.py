"""A training run from its config to a folder with a model: checks first, then trains, saves and describes."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import PreTrainedConfig, PreTrainedModel, TrainingArguments
from transformers.integrations import TensorBoardCallback, get_available_reporting_integrations
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from titans.files import EVAL_FOLDER, LOCK, METRICS, RESULT, RUN, content, locked, sync, write_atomically, write_json
from titans.models.loading import choose_device, peak_memory, quiet
from titans.models.tokenizer import load_tokenizer
from titans.tasks import Task, WrongLengthError, example, make_tasks
from titans.tasks.prepared import TokenStore, load_prepared
from titans.training.build import make_model, shard
from titans.training.callbacks import MetricsFile, ProgressBar, StopInOrder
from titans.training.card import model_card
from titans.training.config import FINGERPRINT, TrainConfig
from titans.training.data import CarriedRows, PackedRows, StreamedRows, TaskRows
from titans.training.growth import Growth
from titans.training.trainer import SAVING, MemoryTrainer, writing
from titans.words import nearest, sentence

TENSORBOARD = "tensorboard"
# what else a finished run has at the top of its folder
MODEL_FILES = (
    "config.json", "titans_model.py", "generation_config.json", "model*.safetensors*", "tokenizer*",
    "special_tokens_map.json", "added_tokens.json", "chat_template*", "README.md", "training_args.bin",
)  # fmt: skip
TASK_VALIDATION = 256  # sequences that a task draws for validation
PUSHED = "pushed_to"  # in the result: the name on the hub
Say = Callable[[str], None]


@dataclass(frozen=True)
class Data:
    """What a run reads.

    Attributes:
        tokenizer: the tokenizer of the data; None if a task draws plain tokens.
        train: the training tokens; None if they are streamed or drawn.
        validation: the validation tokens; None if there are none or they are drawn.
        fingerprint: identifies the training data; it has to be the same when a run is resumed.
        tasks: the tasks that draw the data.
    """

    tokenizer: Any
    train: TokenStore | None
    validation: TokenStore | None
    fingerprint: str
    tasks: tuple[Task, ...] = ()

    @property
    def vocab_size(self) -> int:
        """How many tokens there are."""
        if self.tokenizer is not None:
            return len(self.tokenizer)
        return max(task.vocab_size or 0 for task in self.tasks)

    @property
    def end(self) -> int | None:
        """The token between texts."""
        return None if self.tokenizer is None else self.tokenizer.eos_token_id

    @property
    def validates(self) -> bool:
        """Whether there is anything to validate on."""
        return self.validation is not None or bool(self.tasks)


@dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
        output: the folder of the run.
        steps: how many optimiser steps were taken in all.
        finished: whether these are all steps of the run.
        metrics: the figures of the last validation, the time and the memory; NaN where one is not known.
    """

    output: Path
    steps: int
    finished: bool
    metrics: dict[str, float]


def train(config: TrainConfig, *, resume: bool = False, overwrite: bool = False, say: Say | None = None) -> Result:
    """Trains as ``config`` says; a ``ValueError`` says what is wrong with it before anything is written.

    Args:
        resume: go on from the last checkpoint of the output folder, or from the start if it has none.
        overwrite: replace the run that the output folder holds.
        say: is told what is worth knowing, one sentence at a time; default: printed to standard error.
    """
    if not config.output:
        raise ValueError("output is empty; expected the folder of the run")
    rank = int(os.environ.get("RANK", 0))
    # the first of several processes holds the folder for all of them
    lock = locked(Path(config.output), "titans train") if rank == 0 else nullcontext()
    with quiet(), lock:
        return _train(config, resume, overwrite, say or _to_stderr, rank)


def _train(config: TrainConfig, resume: bool, overwrite: bool, say: Say, rank: int) -> Result:
    processes = int(os.environ.get("WORLD_SIZE", 1))
    if not config.data:
        raise ValueError("data is empty; expected the folder that `titans prepare` wrote, or hf://OWNER/NAME")
    output = Path(config.output)
    choose_device(config.device)  # refused now, before anything is written
    data = open_data(config)
    if rank == 0:  # the others would see what this one writes
        check_output(output, config, data, resume, overwrite)
    if resume and (output / RESULT).is_file():
        if rank == 0:
            say(f"the run in {output} is complete already.")
            push(output, config, say)
        known = _read_result(output)
        figures = {name: math.nan if value is None else value for name, value in known.items() if name != PUSHED}
        return Result(output, int(known["steps"]), True, figures)
    sharded = config.parallel == "fsdp2" and processes > 1
    if sharded and config.carry > 1:
        raise ValueError(f"carry is {config.carry} and parallel is fsdp2; expected carry 1 (or 0), or ddp")
    size, accumulation = config.accumulation(processes)
    steps = config.total_steps(_pass_tokens(config, data))
    rows = make_rows(config, data, steps)
    model = make_model(config, data.vocab_size, data.end)
    validation = make_validation_rows(config, data, size * processes)
    check_trackers(config.trackers)
    if rank == 0:
        _claim(output, config, data, resume, overwrite)
        _introduce(config, data, model, rows, steps, size, accumulation, processes, say)

    args = _arguments(config, output, steps, size, accumulation, validates=data.validates)
    if args.n_gpu > 1:
        args._n_gpu = 1  # the Trainer would give every GPU a batch of its own
        say("one GPU of several is used; torchrun uses them all.")
    model.to(args.device)
    if config.compile:
        _compile(model, config, say)
    if sharded:
        shard(model, args.device)
    bar, file, stop = ProgressBar(), MetricsFile(output), StopInOrder(say if rank == 0 else lambda words: None)
    callbacks: list[Any] = [bar, file, stop]
    if "tensorboard" in config.trackers:
        board = TensorBoardCallback()
        board.logging_dir = str(output / TENSORBOARD)
        callbacks.append(board)
    trainer = MemoryTrainer(config, model, args, rows, validation, data.tokenizer, callbacks, sharded)
    for callback in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(callback)
    checkpoint = last_checkpoint(output) if resume else None
    if checkpoint is not None:
        check_checkpoint(checkpoint, model)
    if resume and rank == 0:
        say("there is no checkpoint yet: starting at step 0." if checkpoint is None else f"going on from {checkpoint}.")
    try:
        if checkpoint is not None and int(checkpoint.name[11:]) >= steps:  # it only was not finished
            trainer._load_from_checkpoint(str(checkpoint))
            trainer.state.global_step = steps
            file.on_train_begin(args, trainer.state, trainer.control)
        else:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    finally:
        bar.close()
        stop.close()
    finished = trainer.state.global_step >= steps
    metrics: dict[str, float] = {}
    if finished:
        if data.validates:
            trainer.at_the_end = True
            metrics = trainer.evaluate()
        metrics |= file.times()
        metrics["parameters"] = sum(p.numel() for p in model.parameters())
        metrics["peak_memory_gib"] = peak_memory(args.device) / 2**30
        _finish(trainer, output, config, metrics, steps)
        if rank == 0:
            push(output, config, say)
    else:
        if rank == 0:
            say(f"stopped at step {trainer.state.global_step:,} of {steps:,} with a checkpoint; --resume goes on.")
        if stop.interrupted:
            raise KeyboardInterrupt
    return Result(output, trainer.state.global_step, finished, metrics)


def open_data(config: TrainConfig) -> Data:
    """Opens what a run reads; a ``ValueError`` says what is missing."""
    if config.tasks:
        return _open_tasks(config)
    validation: TokenStore | None = None
    own: Any = None  # the tokenizer of the validation data, if it comes by itself
    if config.validation is not None:
        extra = load_prepared(config.validation)
        own = load_tokenizer(str(extra.tokenizer_folder))
        validation = TokenStore(extra.open("validation" if "validation" in extra.splits else "train"))
    if config.streamed:
        if config.tokenizer is None:
            raise ValueError("tokenizer is missing; expected one, as streamed data is tokenised while it is read")
        tokenizer = load_tokenizer(config.tokenizer)
        if tokenizer.eos_token_id is None:
            raise ValueError(f"tokenizer is {config.tokenizer!r}; expected one that has an end-of-text token")
        _check_validation(config, validation, own, tokenizer)
        return Data(tokenizer, None, validation, f"{config.data} {config.data_config} {config.data_split}")
    prepared = load_prepared(config.data)
    if config.tokenizer is not None:
        raise ValueError(f"tokenizer is {config.tokenizer!r}; expected none, as prepared data brings its own")
    if validation is None and "validation" in prepared.splits:
        validation = TokenStore(prepared.open("validation"))
    tokenizer = load_tokenizer(str(prepared.tokenizer_folder))
    _check_validation(config, validation, own, tokenizer)
    return Data(tokenizer, TokenStore(prepared.open("train")), validation, prepared.fingerprint)


def _open_tasks(config: TrainConfig) -> Data:
    if config.validation is not None:
        raise ValueError(f"validation is {config.validation!r}; expected none, as a task draws its own")
    tasks = make_tasks(config.tasks, config.task)
    of_text = [task.name for task in tasks if task.vocab_size is None]
    if of_text and len(of_text) < len(tasks):
        raise ValueError(f"data is {config.data!r}; expected tasks of text, or tasks of plain tokens, not both")
    if of_text and config.tokenizer is None:
        raise ValueError(f"tokenizer is missing; expected one, such as bytes, as {of_text[0]} is text")
    if not of_text and config.tokenizer is not None:
        raise ValueError(f"tokenizer is {config.tokenizer!r}; expected none, as {tasks[0].name} draws plain tokens")
    tokenizer = None if config.tokenizer is None else load_tokenizer(config.tokenizer)
    data = Data(tokenizer, None, None, f"{config.data} {sorted(config.task.items())}", tuple(tasks))
    for length in config.lengths:  # a mistake is found here, and not by a data worker
        for task in tasks:
            with suppress(WrongLengthError):
                example(task, "train", config.seed, 0, length, tokenizer)
        TaskRows(tasks, tokenizer, length, "train", config.seed, 1)[0]
    return data


def _check_validation(config: TrainConfig, validation: TokenStore | None, own: Any, tokenizer: Any) -> None:
    """Refuses validation data that would fail after hours of training."""
    if validation is None:
        return
    if own is not None and own.get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"validation is {config.validation!r}; expected data that was prepared with the same tokenizer"
        )
    try:
        if config.carry:
            CarriedRows(validation, config.length, 1, 1)
        else:
            PackedRows(validation, config.length, None)
    except ValueError as error:
        raise ValueError(f"validation: {error}") from None


def _pass_tokens(config: TrainConfig, data: Data) -> int | None:
    """How many tokens one pass over the data takes; None if that is not known."""
    if data.train is None:
        return None
    return int(CarriedRows(data.train, config.row_tokens, 1, 1).sizes.sum()) if config.carry else data.train.tokens


def check_trackers(names: list[str]) -> None:
    """Refuses a tracker that the Trainer does not know, or that is not installed."""
    known = sorted(INTEGRATION_TO_CALLBACK)
    for name in names:
        if name not in known:
            raise ValueError(f"trackers has {name!r}: {nearest(name, known)}")
        if name not in get_available_reporting_integrations():
            raise ValueError(f"trackers has {name}, which is not installed: pip install {name}")


def make_rows(config: TrainConfig, data: Data, steps: int) -> Any:
    """The rows of the whole run."""
    if data.tasks:
        sizes = Growth(config, steps)
        return TaskRows(data.tasks, data.tokenizer, config.length, "train", config.seed, config.rows * steps, sizes)
    if data.train is not None and config.carry:
        return CarriedRows(data.train, config.row_tokens, config.rows, steps, config.seed)
    if data.train is not None:
        return PackedRows(data.train, config.length, config.rows * steps, config.seed, config.separate_documents)
    from datasets import load_dataset

    name = config.data.removeprefix("hf://")
    try:
        texts = load_dataset(name, config.data_config, split=config.data_split, streaming=True)
    except Exception as error:
        raise ValueError(f"data is {config.data!r}: {sentence(error)[:300]}") from None
    first = next(iter(texts), None)
    if first is None:
        raise ValueError(f"data is {config.data!r}, which is empty; expected documents")
    if config.text_column not in first:
        raise ValueError(f"text_column is {config.text_column!r}: {nearest(config.text_column, first)}")
    texts = texts.shuffle(seed=config.seed, buffer_size=10_000)
    return StreamedRows(texts, data.tokenizer, config.length, config.text_column, config.separate_documents)


def make_validation_rows(config: TrainConfig, data: Data, together: int) -> Any:
    """The rows that a run is validated on, ``together`` at a time; None if there are none."""
    if data.tasks:
        return TaskRows(data.tasks, data.tokenizer, config.length, "validation", config.seed, TASK_VALIDATION)
    if data.validation is None:
        return None
    if config.carry:
        return CarriedRows(data.validation, config.length, together, None)
    return PackedRows(data.validation, config.length, None, separate=config.separate_documents)


def check_output(output: Path, config: TrainConfig, data: Data, resume: bool, overwrite: bool) -> None:
    """Refuses a folder that holds something else, or a run other than the one to resume."""
    if resume and overwrite:
        raise ValueError("--resume and --overwrite are both given; expected one of them")
    is_run = (output / RUN).is_file()
    if resume:
        if not is_run:
            raise ValueError(f"{output} holds no run to resume; expected the output folder of one")
        difference = config.other_than(output, data.fingerprint)
        if difference is not None:
            raise ValueError(f"{difference}; expected the same")
    elif content(output):
        if not is_run:
            raise ValueError(f"{output} is not empty and holds no run; expected a new or empty folder")
        if not overwrite:
            raise ValueError(f"{output} holds another run; --resume goes on with it, --overwrite replaces it")


def check_checkpoint(checkpoint: Path, model: PreTrainedModel) -> None:
    """Refuses the checkpoint of another model: what a name stands for may have changed since it was written."""
    if not (checkpoint / "config.json").is_file():
        return
    own = {each.name for each in fields(model.config)} - {each.name for each in fields(PreTrainedConfig)}
    before, now = type(model.config).from_pretrained(checkpoint).to_dict(), model.config.to_dict()
    for name in sorted(own):
        if before.get(name) != now.get(name):
            raise ValueError(
                f"the model in {checkpoint} has {name} {before.get(name)!r}, this one {now.get(name)!r}; expected the "
                f"same: give model.{name}, or a new folder"
            )


def checkpoints(output: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    found = [path for path in output.glob("checkpoint-*") if path.name[11:].isdigit() and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name[11:]))


def last_checkpoint(output: Path) -> Path | None:
    """The newest complete checkpoint."""
    return next(reversed(checkpoints(output)), None)


def _claim(output: Path, config: TrainConfig, data: Data, resume: bool, overwrite: bool) -> None:
    """Makes the folder that of this run."""
    if overwrite:
        for path in [*checkpoints(output), output / SAVING, output / TENSORBOARD, output / EVAL_FOLDER]:
            shutil.rmtree(path, ignore_errors=True)
        for pattern in (METRICS, RESULT, RUN, *MODEL_FILES):
            for path in output.glob(pattern):
                path.unlink(missing_ok=True)
    shutil.rmtree(output / SAVING, ignore_errors=True)
    values = config.to_dict() | {FINGERPRINT: data.fingerprint}
    if not resume:
        write_atomically(output / RUN, yaml.safe_dump(values, sort_keys=False).encode())


def _arguments(
    config: TrainConfig, output: Path, steps: int, size: int, accumulation: int, validates: bool
) -> TrainingArguments:
    on_cpu = choose_device(config.device).type == "cpu"
    periodic = validates and config.eval_every > 0
    return TrainingArguments(
        output_dir=str(output),
        max_steps=steps,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=accumulation,
        learning_rate=config.learning_rate,
        lr_scheduler_type="cosine_with_min_lr" if config.schedule == "cosine" else "warmup_stable_decay",
        lr_scheduler_kwargs=_schedule(config, steps),
        warmup_steps=config.warmup_steps(steps),
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        max_grad_norm=config.clip,
        optim="adamw_torch",
        bf16=config.precision == "bf16",
        gradient_checkpointing=config.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if config.gradient_checkpointing else None,
        logging_strategy="steps",
        logging_steps=config.log_every,
        logging_nan_inf_filter=False,
        eval_strategy="steps" if periodic else "no",
        eval_steps=config.eval_every if periodic else None,
        save_strategy="steps",
        save_steps=config.save_every,
        save_total_limit=config.keep,
        report_to=[name for name in config.trackers if name != "tensorboard"] or "none",
        dataloader_num_workers=config.workers,
        dataloader_drop_last=True,
        dataloader_pin_memory=torch.cuda.is_available(),
        remove_unused_columns=False,
        seed=config.seed,
        use_cpu=on_cpu,
        ddp_backend="gloo" if on_cpu and int(os.environ.get("WORLD_SIZE", 1)) > 1 else None,
        ddp_find_unused_parameters=False,
        disable_tqdm=True,
    )


def _schedule(config: TrainConfig, steps: int) -> dict[str, Any]:
    if config.schedule == "cosine":
        return {"min_lr_rate": config.min_learning_rate}
    falling = min(round(config.decay * steps), steps - config.warmup_steps(steps))
    return {"num_decay_steps": falling, "decay_type": "linear", "min_lr_ratio": config.min_learning_rate}


def _compile(model: PreTrainedModel, config: TrainConfig, say: Say) -> None:
    """Compiles in place if a trial on a few tokens works."""
    trial = torch.zeros(1, config.length, dtype=torch.int64, device=model.device)
    try:
        compiled = torch.compile(model)
        output = compiled(input_ids=trial, use_cache=bool(config.carry))
        if config.carry:
            restart = torch.zeros_like(trial, dtype=torch.bool)
            output = compiled(input_ids=trial, past_key_values=output.past_key_values, use_cache=True, restart=restart)
        output.logits.float().mean().backward()
        model.compile()
    except Exception as error:
        say(f"torch.compile failed, so the model runs without it: {sentence(error)[:200]}")
    finally:
        model.zero_grad()


def _introduce(
    config: TrainConfig,
    data: Data,
    model: Any,
    rows: Any,
    steps: int,
    size: int,
    accumulation: int,
    processes: int,
    say: Say,
) -> None:
    count = sum(p.numel() for p in model.parameters())
    name = config.model.get("name") or config.model.get("pretrained")
    known = "streamed tokens" if data.train is None else f"{data.train.tokens:,} tokens"
    if data.tasks:
        known = f"tokens drawn by {' and '.join(task.name for task in data.tasks)}"
    say(f"{name}, {count:,} parameters; {known}, vocabulary {data.vocab_size:,}.")
    parts = f"{size} sequences of {config.row_tokens:,} x {accumulation} accumulated x {processes} processes"
    say(f"{steps:,} steps of {config.batch_tokens:,} tokens ({parts}).")
    if isinstance(rows, CarriedRows):
        lengths = f"gradients are cut every {config.row_tokens:,} tokens; {rows.filled:.0%} of the positions hold text"
        say(f"the memory is carried through {data.train.documents if data.train else 0:,} documents; {lengths}.")


def _finish(trainer: MemoryTrainer, output: Path, config: TrainConfig, metrics: dict[str, float], steps: int) -> None:
    """Writes the model, its tokenizer and its card into the run's folder: all of them complete, then renamed."""
    temporary = output / SAVING
    shutil.rmtree(temporary, ignore_errors=True) if trainer.args.should_save else None
    trainer._wait()
    with writing("the model", output):
        trainer.save_model(str(temporary), _internal_call=True)
        if trainer.args.should_save:
            card = model_card(trainer.accelerator.unwrap_model(trainer.model).config, config, metrics, steps)
            (temporary / "README.md").write_text(card, encoding="utf-8")
            for path in sorted(temporary.iterdir(), key=lambda path: path.name == "config.json"):  # the last one counts
                sync(path)
                path.replace(output / path.name)
            temporary.rmdir()
            write_json(output / RESULT, metrics | {"steps": steps, "tokens": steps * config.batch_tokens})
    trainer._wait()


def push(folder: Path, config: TrainConfig, say: Say) -> None:
    """Uploads a finished run's model, tokenizer and card to the hub, if that is wanted and was not done yet."""
    name, result = config.push_to_hub, _read_result(folder)
    if name is None or result.get(PUSHED) == name:
        return
    from huggingface_hub import HfApi

    # checkpoints are large, and the config of the run and its evaluations have the paths of this machine
    ignored = ["checkpoint-*/*", *(f"{name}/*" for name in (TENSORBOARD, SAVING, EVAL_FOLDER))]
    ignored += ["training_args.bin", RUN, LOCK]
    try:
        api = HfApi()
        api.create_repo(name, private=config.hub_private, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=str(folder), ignore_patterns=ignored)
    except Exception as error:  # no such owner, no token, no network: each its own class
        raise OSError(
            f"the run in {folder} is complete, but was not pushed to {name}: {sentence(error)}; --resume tries again."
        ) from error
    write_json(folder / RESULT, result | {PUSHED: name})
    say(f"pushed to {name}.")


def _read_result(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / RESULT).read_text(encoding="utf-8")))


def _to_stderr(words: str) -> None:
    print(f"titans: {words}", file=sys.stderr)
