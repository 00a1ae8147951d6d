"""The Trainer of transformers, with memory carried across batches, and checkpoints that any launch can resume."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import rotate_checkpoints

from titans.files import sync
from titans.layers.memory import priced
from titans.layers.record import memories_of, record_memory, summarise
from titans.models import TitansCache
from titans.tasks import IGNORED
from titans.training.config import TrainConfig
from titans.training.data import TaskRows, collate
from titans.training.growth import Growth
from titans.words import sentence

OPTIMIZER, SCHEDULER, WEIGHTS = "optimizer.pt", "scheduler.pt", "model.safetensors"
SAVING = ".saving"  # where a checkpoint stands until it is complete
LANES = "memory-{:06d}.safetensors"  # carried memory, by the first of its lanes
UNDECAYED = ("to_gates",)  # linear layers without weight decay
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


class MemoryTrainer(Trainer):
    """Trains a language model on rows of :mod:`titans.training.data`.

    A batch may have ``restart``, which says where documents begin in its rows. If the memory is carried, a row goes on
    from where the same lane stopped one step before. Checkpoints are written beside and renamed when complete; they
    hold whole tensors by name, so that one process, several, and sharded ones read each other's.

    Args:
        config: the settings of the run.
        model: the model to train, sharded already if ``sharded``.
        args: the settings of the Trainer.
        rows: the rows to train on.
        validation: the rows to validate on, in order; None: there is no validation.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module,
        args: TrainingArguments,
        rows: Any,
        validation: Sequence[Any] | None = None,
        tokenizer: Any = None,
        callbacks: Sequence[TrainerCallback] = (),
        sharded: bool = False,
    ) -> None:
        super().__init__(
            model=model,
            args=args,
            train_dataset=rows,
            eval_dataset=validation,
            data_collator=collate,
            processing_class=tokenizer,
            callbacks=list(callbacks),
        )
        self.config, self.validation, self.sharded = config, validation, sharded
        # the loss is computed here, as a sum over the tokens of the whole batch
        self.loss_is_scaled_for_ga = self.model_accepts_loss_kwargs = True
        self._loss_shifts_labels = False
        self.is_distributed_loading_by_transformers = sharded
        self.lanes: dict[int, TitansCache] = {}  # carried memory of each accumulation step
        self._micro = 0
        self._stats: dict[str, float] = {}
        sizes = rows.size if isinstance(rows, TaskRows) else None
        self.growth = sizes if isinstance(sizes, Growth) and sizes.by_loss else None
        self._loss = torch.zeros((), device=args.device)  # of the accumulation steps so far
        self._saving = False
        self.at_the_end = False  # whether this is the last validation
        self._clock = _Clock()

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler | None:
        return SequentialSampler(train_dataset if train_dataset is not None else self.train_dataset)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """The weights of linear layers and embeddings, except those of gates."""
        names = []
        for path, module in model.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)) and path.rpartition(".")[2] not in UNDECAYED:
                names.append(f"{path}.weight")
        return names

    # the loss

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """One forward and backward pass of one accumulation step."""
        with self._priced_gates():
            loss = super().training_step(model, inputs, num_items_in_batch)
        self._micro = (self._micro + 1) % self.args.gradient_accumulation_steps
        self._clock.tokens += int(inputs["input_ids"].numel()) * self.args.world_size
        return loss

    def _priced_gates(self) -> contextlib.AbstractContextManager[None]:
        """While open, what a memory writes and forgets has its price, also where checkpointing computes it again."""
        costs = {"theta": self.config.write_cost, "alpha": self.config.forget_cost}
        memories = memories_of(self.model) if any(costs.values()) else []
        grown = (self.state.global_step / max(1, self.state.max_steps)) ** 2
        gates = max(1, self.config.batch_tokens * sum(memory.heads for memory in memories))
        # the processes' gradients are averaged, not summed
        scale = grown / gates * self.accelerator.num_processes
        prices = {name: torch.tensor(cost * scale, device=self.args.device) for name, cost in costs.items() if cost}
        return priced(memories, prices)

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The mean over the tokens of the whole batch, of which these rows are a part."""
        if self._wants_stats():
            self._look_at_memory(inputs)
        parts, cache = self._read(model, inputs, self.lanes.get(self._micro))
        if cache is not None:
            self.lanes[self._micro] = cache.detach()
        total = torch.stack([_summed(logits, labels) for logits, labels in parts]).sum()
        # the processes' gradients are averaged, not summed
        loss = total / num_items_in_batch * self.accelerator.num_processes
        if self.growth is not None:
            self._watch(loss.detach(), self.growth)
        return loss

    def _watch(self, loss: Tensor, growth: Growth) -> None:
        """Adds up the loss of a step, which decides when sequences grow."""
        self._loss = self._loss + loss
        if self._micro + 1 < self.args.gradient_accumulation_steps:
            return
        if self.args.world_size > 1:
            dist.all_reduce(self._loss)
        growth.see(self.state.global_step, float(self._loss) / self.args.world_size)
        self._loss = torch.zeros_like(loss)

    def _read(
        self, model: nn.Module, inputs: Any, cache: TitansCache | None
    ) -> tuple[list[tuple[Tensor, Tensor]], TitansCache | None]:
        """The logits and labels of every piece of the rows, and the memory after them; None if nothing is carried."""
        if not self.config.carry:
            read = {name: inputs[name] for name in ("input_ids", "restart") if name in inputs}
            return [(model(**read, use_cache=False).logits, inputs["labels"])], None
        parts: list[tuple[Tensor, Tensor]] = []
        names = ("input_ids", "labels", "restart")
        for ids, labels, restart in zip(*(inputs[name].split(self.config.length, 1) for name in names), strict=True):
            # the first piece is always told: every parameter then takes part
            told = restart if not parts or bool(restart.any()) else None
            output = model(input_ids=ids, past_key_values=cache, use_cache=True, restart=told)
            cache = output.past_key_values
            parts.append((output.logits, labels))
        return parts, cache

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """The norm of the gradients before they are clipped. Where it is not finite they are dropped: a text that the
        memory overflows with does not cost the weights."""
        norm = super()._clip_grad_norm(model)
        if not math.isfinite(norm):
            model.zero_grad()  # parameters without a gradient stay as they are
        return norm

    # watching

    def _wants_stats(self) -> bool:
        every = self.config.memory_stats_every
        return bool(every) and self._micro == 0 and (self.state.global_step + 1) % every == 0

    @torch.no_grad()
    def _look_at_memory(self, inputs: Any) -> None:
        """Reads the start of the first row once more, to the end of a document at most, and notes what each layer's
        memory does."""
        model = self.accelerator.unwrap_model(self.model)
        memories = memories_of(model)
        if not memories:
            return
        options: dict[str, Any] = {"use_cache": False}
        cache, stop = self.lanes.get(self._micro), self.config.length
        if "restart" in inputs:
            restart = inputs["restart"][0]
            stop = next((place for place in restart[:stop].nonzero().flatten().tolist() if place), stop)
            if cache is not None and not restart[0]:
                cache = cache.copy()
                cache.batch_select_indices(torch.zeros(1, dtype=torch.int64))
                options["past_key_values"] = cache
        with record_memory(model) as records:
            model(input_ids=inputs["input_ids"][:1, :stop], **options)
        self._stats = {}
        for index, (memory, record) in enumerate(zip(memories, records, strict=True)):
            for name, value in summarise(memory, record).items():
                self._stats[f"memory/layer{index}/{name}"] = value

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds perplexity, speed and what was seen of the memory."""
        if "loss" in logs:
            logs["perplexity"] = _perplexity(logs["loss"])
            logs["tokens"] = self.state.global_step * self.config.batch_tokens
            logs["tokens_per_second"] = self._clock.lap()
            if self.growth is not None:
                logs["length"] = self.growth.length(self.state.global_step - 1)
            logs |= self._stats
            self._stats = {}
        super().log(logs, None)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Loss and perplexity on the validation data, read in order; carried if the training carries."""
        last = self.state.global_step >= self.state.max_steps and not self.at_the_end
        if last and self._validation_rows(at_the_end=True) == self._validation_rows(at_the_end=False):
            return {}  # the validation at the end, which follows, is the same
        with self._clock.paused():
            total, right, count = self._validate()
        loss = total / max(1.0, count)
        metrics = {
            f"{metric_key_prefix}_loss": loss,
            f"{metric_key_prefix}_perplexity": _perplexity(loss),
            f"{metric_key_prefix}_accuracy": right / max(1.0, count),
            f"{metric_key_prefix}_tokens": count,
        }
        self.log(dict(metrics))
        self.control: Any = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    @torch.no_grad()
    def _validate(self) -> tuple[float, float, float]:
        """The summed loss, how many tokens were the likeliest, and how many there were."""
        model = self.model if self.sharded else self.accelerator.unwrap_model(self.model)
        model.eval()
        sums = torch.zeros(3, dtype=torch.float64)
        try:
            cache: TitansCache | None = None
            for batch in self._validation_batches():
                parts, cache = self._read(model, self._prepare_inputs(batch), cache)
                for logits, labels in parts:
                    asked = labels.ne(IGNORED)
                    right = (logits.argmax(-1).eq(labels) & asked).sum()
                    sums += torch.tensor([float(_summed(logits, labels)), int(right), int(asked.sum())])
        finally:
            model.train()
        if self.args.world_size > 1:
            sums = sums.to(self.args.device)
            dist.all_reduce(sums)
        return float(sums[0]), float(sums[1]), float(sums[2])

    def _validation_batches(self) -> Iterator[dict[str, Tensor]]:
        """This process's share: as many batches as every other process has, filled up with empty rows."""
        rows = self.validation
        assert rows is not None
        size = self.args.per_device_train_batch_size
        together, count = size * self.args.world_size, self._validation_rows(self.at_the_end)
        for first in range(0, count, together):
            mine = range(first + size * self.args.process_index, first + size * (self.args.process_index + 1))
            batch = [rows[index] if index < count else _emptied(rows[0]) for index in mine]
            yield collate(batch)

    def _validation_rows(self, at_the_end: bool) -> int:
        """How many rows a validation reads: whole batches, as many as its limit allows."""
        assert self.validation is not None
        count, together = len(self.validation), self.args.per_device_train_batch_size * self.args.world_size
        limit = self.config.final_eval_tokens if at_the_end else self.config.eval_tokens
        if limit is not None:
            count = min(count, max(together, limit // self.config.length // together * together))
        return count

    # checkpoints

    def _get_output_dir(self, trial: Any) -> str:
        folder = Path(super()._get_output_dir(trial))
        return str(folder / SAVING if self._saving else folder)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Writes everything to a folder of another name, which is renamed once it is complete."""
        name = f"checkpoint-{self.state.global_step}"
        output = Path(self.args.output_dir)
        temporary, target = output / SAVING / name, output / name
        with self._clock.paused():
            if self.args.should_save:
                shutil.rmtree(output / SAVING, ignore_errors=True)
            self._wait()
            self._saving = True
            try:
                with writing(f"the checkpoint of step {self.state.global_step}", output):
                    super()._save_checkpoint(model, trial)
                    self._save_lanes(temporary)
                    if self.growth is not None and self.args.should_save:
                        self.growth.save(temporary)
            finally:
                self._saving = False
            self._wait()
            if self.args.should_save:
                for path in [*temporary.rglob("*"), temporary]:  # on disk before its name says that it is complete
                    sync(path)
                if target.exists():  # a run that went back to an older checkpoint comes here again
                    os.replace(target, output / SAVING / "older")
                os.replace(temporary, target)
                sync(output)
                shutil.rmtree(output / SAVING, ignore_errors=True)
                rotate_checkpoints(output_dir=str(output), save_total_limit=self.args.save_total_limit)
            self._wait()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the model as ``from_pretrained`` reads it."""
        if not self.sharded:
            super().save_model(output_dir, _internal_call)
            return
        state = get_model_state_dict(self.model, options=FULL)
        if self.args.should_save:
            if self.accelerator.unwrap_model(self.model).config.tie_word_embeddings:
                state.pop("lm_head.weight", None)
            self._save(output_dir, state_dict=state)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state = get_optimizer_state_dict(self.model, self._plain_optimizer(), options=FULL)
        if self.args.should_save:
            torch.save(state, os.path.join(output_dir, OPTIMIZER))
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        state = torch.load(os.path.join(checkpoint, OPTIMIZER), map_location="cpu", weights_only=True)
        options = StateDictOptions(full_state_dict=True)
        set_optimizer_state_dict(self.model, self._plain_optimizer(), state, options=options)
        schedule = torch.load(os.path.join(checkpoint, SCHEDULER), weights_only=True)
        self.lr_scheduler.load_state_dict(schedule)
        self._load_lanes(Path(checkpoint))
        if self.growth is not None:
            self.growth.load(Path(checkpoint))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not self.sharded:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        from safetensors.torch import load_file

        state: dict[str, Any] = load_file(os.path.join(resume_from_checkpoint, WEIGHTS), device="cpu")
        if "lm_head.weight" not in state:
            embeddings = self.model.get_input_embeddings()
            name = next(path for path, module in self.model.named_modules() if module is embeddings)
            state["lm_head.weight"] = state[f"{name}.weight"]
        set_model_state_dict(self.model, state, options=StateDictOptions(full_state_dict=True))

    def _plain_optimizer(self) -> torch.optim.Optimizer:
        optimizer: Any = self.optimizer
        return getattr(optimizer, "optimizer", optimizer)

    def _first_lane(self, micro: int) -> int:
        """The first of the lanes of this process in accumulation step ``micro``."""
        return (micro * self.args.world_size + self.args.process_index) * self.args.per_device_train_batch_size

    def _save_lanes(self, folder: Path) -> None:
        for micro, cache in self.lanes.items():
            cache.save(folder / LANES.format(self._first_lane(micro)))

    def _load_lanes(self, folder: Path) -> None:
        self.lanes, self._micro = {}, 0
        files = sorted(folder.glob(LANES.replace("{:06d}", "*")))
        if not files:
            return
        caches = TitansCache.concatenate([TitansCache.load(file) for file in files])
        size = self.args.per_device_train_batch_size
        for micro in range(self.args.gradient_accumulation_steps):
            first = self._first_lane(micro)
            part = caches.copy()
            part.batch_select_indices(torch.arange(first, first + size))
            for layer in part.layers:
                layer._map(lambda x: x.to(self.args.device))
            self.lanes[micro] = part

    def _wait(self) -> None:
        if self.args.world_size > 1:
            dist.barrier()


class _Clock:
    """Tokens per second since the last lap, without the time of validations and checkpoints."""

    def __init__(self) -> None:
        self.tokens, self.start = 0, time.perf_counter()

    def lap(self) -> float:
        """The speed since the last lap."""
        now = time.perf_counter()
        speed = self.tokens / max(1e-9, now - self.start)
        self.tokens, self.start = 0, now
        return speed

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves out what happens meanwhile."""
        before = time.perf_counter()
        try:
            yield
        finally:
            self.start += time.perf_counter() - before


def _summed(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss, summed over all tokens that have a target."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def _perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


def _emptied(row: dict[str, Tensor]) -> dict[str, Tensor]:
    return row | {"labels": torch.full_like(row["labels"], IGNORED)}


@contextlib.contextmanager
def writing(what: str, folder: Path) -> Iterator[None]:
    """Whatever the libraries raise when they cannot write becomes an ``OSError`` of one sentence."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        words = ("write", "writing", "PytorchStreamWriter", "No space", "I/O", "too large")
        if isinstance(error, RuntimeError) and not any(word in str(error) for word in words):
            raise
        raise OSError(
            f"{what} could not be written to {folder}: {sentence(error)}; what was there before stays"
        ) from error
