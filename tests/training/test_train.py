"""A run gives the same losses however it is cut: by kills, processes of data, accumulation, or checkpoints."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.training.conftest import LENGTH, ROOT, ROWS, command, finish, losses, start, store_of
from titans import TitansForCausalLM
from titans.files import LOCK, RUN
from titans.tasks import IGNORED
from titans.training import run, trainer
from titans.training.build import make_model
from titans.training.callbacks import StopInOrder
from titans.training.config import TrainConfig
from titans.training.run import train
from titans.training.trainer import MemoryTrainer

Make = Callable[..., TrainConfig]
EXACT = 1e-6


def close(one: dict[int, float], other: dict[int, float], tolerance: float = EXACT) -> None:
    assert one.keys() == other.keys()
    assert all(abs(one[step] - other[step]) <= tolerance for step in one), (one, other)


@pytest.mark.parametrize("name", ["mac", "gated-deltanet", "transformer++"])
def test_a_run_leaves_a_model_that_the_auto_classes_load(name: str, tiny: Make) -> None:
    config = tiny(name, steps=3)
    result = train(config, say=lambda words: None)
    assert result.finished and result.steps == 3
    model = AutoModelForCausalLM.from_pretrained(config.output)
    tokenizer = AutoTokenizer.from_pretrained(config.output)
    ids = tokenizer("abc", return_tensors="pt")["input_ids"]
    assert torch.isfinite(model(ids).logits).all()
    assert model.config.eos_token_id == tokenizer.eos_token_id == 256
    card = Path(config.output, "README.md").read_text(encoding="utf-8")
    assert f"{result.metrics['eval_loss']:.4f}" in card and card.startswith("---\nlibrary_name: transformers")
    assert sorted(losses(config.output)) == [1, 2, 3]


def test_the_loss_goes_down(tiny: Make) -> None:
    config = tiny("mag", steps=60, learning_rate=1e-2)
    before = train(tiny("mag", steps=1, learning_rate=1e-9, output="first"), say=lambda words: None)
    after = train(config, say=lambda words: None)
    assert after.metrics["eval_loss"] < before.metrics["eval_loss"] - 1.5


@pytest.mark.slow
@pytest.mark.parametrize("carry", [0, 2])
def test_a_killed_run_goes_on_to_the_same_losses(carry: int, tiny: Make) -> None:
    """SIGKILL at some moment between two checkpoints, with two data workers."""
    whole = tiny("mac", "whole", carry=carry, steps=14)
    train(whole, say=lambda words: None)
    killed = tiny("mac", "killed", carry=carry, steps=14, workers=2)
    process = start(command(killed))
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if Path(killed.output, "metrics.jsonl").is_file() and len(losses(killed.output)) >= 4:
            break
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert run.last_checkpoint(Path(killed.output)) is not None
    assert not Path(killed.output, "result.json").exists()
    train(killed, resume=True, say=lambda words: None)
    close(losses(killed.output), losses(whole.output))


@pytest.mark.parametrize(
    "place",
    [
        pytest.param("_save_optimizer_and_scheduler", marks=pytest.mark.slow),
        pytest.param("_save_rng_state", marks=pytest.mark.slow),
        "_save_lanes",
    ],
)
def test_a_checkpoint_that_was_being_written_never_wins(place: str, tiny: Make, tmp_path: Path) -> None:
    """The process kills itself while it writes its second checkpoint."""
    whole = tiny("mac", "whole", carry=1, steps=10)
    killed = tiny("mac", "killed", carry=1, steps=10)
    script = tmp_path / "killed.py"
    script.write_text(
        f"""
import os, signal
from titans.cli import main
from titans.training.trainer import MemoryTrainer

def die(self, *args):
    if self.state.global_step == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    return old(self, *args)

old = MemoryTrainer.{place}
MemoryTrainer.{place} = die
main()
""",
        encoding="utf-8",
    )
    words = command(killed)
    finish([words[0], str(script), *words[3:]], code=-signal.SIGKILL)
    output = Path(killed.output)
    assert [path.name for path in run.checkpoints(output)] == ["checkpoint-3"]
    assert (output / ".saving" / "checkpoint-6").is_dir()
    train(killed, resume=True, say=lambda words: None)
    assert not (output / ".saving").exists()
    train(whole, say=lambda words: None)
    close(losses(killed.output), losses(whole.output))


def test_a_checkpoint_that_cannot_be_written_is_one_sentence_and_the_last_one_stays(
    tiny: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(steps=8)
    save = torch.save

    def full(*args: Any, **kwargs: Any) -> None:
        if "checkpoint-6" in str(args[1]):
            raise RuntimeError("[enforce fail at inline_container.cc] . PytorchStreamWriter failed writing file data/0")
        save(*args, **kwargs)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(
        OSError, match=r"the checkpoint of step 6 could not be written to .*; what was there before stays"
    ):
        train(config, say=lambda words: None)
    assert run.last_checkpoint(Path(config.output)) == Path(config.output) / "checkpoint-3"


@pytest.mark.slow
def test_sigterm_saves_and_stops_in_order(tiny: Make) -> None:
    config = tiny(steps=400, save_every=1000)
    process = start(command(config))
    while process.poll() is None and not (Path(config.output, "metrics.jsonl").is_file() and losses(config.output)):
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and "--resume goes on" in said
    last = run.last_checkpoint(Path(config.output))
    assert last is not None and int(last.name[11:]) == max(losses(config.output)) < 400


def test_ctrl_c_saves_says_how_to_go_on_and_is_still_an_interrupt(tiny: Make) -> None:
    config = tiny(steps=400, save_every=1000)
    said: list[str] = []

    def press() -> None:
        while not (Path(config.output, "metrics.jsonl").is_file() and losses(config.output)):
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    finger = threading.Thread(target=press)
    finger.start()
    with pytest.raises(KeyboardInterrupt):
        train(config, say=said.append)
    finger.join()
    assert said[-2] == "a checkpoint will be saved after this step; Ctrl-C again stops at once."
    assert re.fullmatch(r"stopped at step \d+ of 400 with a checkpoint; --resume goes on\.", said[-1])
    last = run.last_checkpoint(Path(config.output))
    assert last is not None and int(last.name[11:]) == max(losses(config.output)) < 400
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_stops_at_once() -> None:
    said: list[str] = []
    stop = StopInOrder(said.append)
    stop._note(signal.SIGINT, None)
    with pytest.raises(KeyboardInterrupt):
        stop._note(signal.SIGINT, None)
    assert len(said) == 1


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_reaches_data_workers_too_and_saves(tiny: Make) -> None:
    config = tiny(steps=400, save_every=1000, workers=2)
    process = start(command(config))
    while process.poll() is None and not (Path(config.output, "metrics.jsonl").is_file() and losses(config.output)):
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 130 and said.count("Ctrl-C again") == 1 and said.endswith("titans: interrupted.\n")
    last = run.last_checkpoint(Path(config.output))
    assert last is not None and int(last.name[11:]) == max(losses(config.output)) < 400


def test_two_runs_do_not_write_to_one_folder(tiny: Make) -> None:
    config = tiny(steps=1)
    refused: list[str] = []

    def other(words: str) -> None:
        with pytest.raises(ValueError, match=r"is in use by another process \(titans train, process \d+\)") as error:
            train(config, overwrite=True)
        refused.append(str(error.value))

    assert train(config, say=other).finished and refused
    assert not Path(config.output, LOCK).exists()


class Hub:
    """Stands for the hub's interface: notes what comes, and fails as often as it is told."""

    calls: list[tuple[str, dict[str, Any]]] = []
    failures = 0

    def create_repo(self, name: str, **options: Any) -> None:
        if Hub.failures:
            Hub.failures -= 1
            raise ConnectionError("no\nnetwork")
        Hub.calls.append((name, options))

    def upload_folder(self, **options: Any) -> None:
        Hub.calls.append(("upload", options))


def test_a_push_that_failed_is_tried_again_by_resume_and_then_never_again(
    tiny: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    monkeypatch.setattr(Hub, "calls", [])
    monkeypatch.setattr(Hub, "failures", 1)
    config = tiny(steps=1, push_to_hub="owner/name")
    with pytest.raises(OSError, match=r"complete, but was not pushed to owner/name: no network; --resume tries again"):
        train(config, say=lambda words: None)
    assert Path(config.output, "result.json").is_file() and not Hub.calls
    assert train(config, resume=True, say=lambda words: None).finished
    (name, made), (_, sent) = Hub.calls
    assert name == sent["repo_id"] == "owner/name" and made["private"]
    assert {LOCK, "train.yaml", "eval/*"} <= set(sent["ignore_patterns"])  # nothing that names paths of this machine
    train(config, resume=True, say=lambda words: None)
    assert len(Hub.calls) == 2
    public = tiny(steps=1, push_to_hub="owner/other", hub_private=False)
    train(public, resume=True, say=lambda words: None)
    assert len(Hub.calls) == 4 and not Hub.calls[2][1]["private"]


def test_a_result_never_holds_nan_and_can_be_read_again(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "peak_memory", lambda device: math.nan)
    config = tiny(steps=1)
    train(config, say=lambda words: None)
    assert json.loads(Path(config.output, "result.json").read_text())["peak_memory_gib"] is None
    assert math.isnan(train(config, resume=True, say=lambda words: None).metrics["peak_memory_gib"])


def test_every_validation_says_over_how_many_tokens_it_went(tiny: Make, capsys: pytest.CaptureFixture[str]) -> None:
    result = train(tiny(steps=2, eval_every=2, eval_tokens=LENGTH), say=lambda words: None)
    said = [line for line in capsys.readouterr().err.splitlines() if "validation loss" in line]
    assert [line.split("over ")[1] for line in said] == ["128 tokens", f"{result.metrics['eval_tokens']:,.0f} tokens"]


def test_a_last_validation_like_the_one_at_the_end_is_not_made_twice(
    tiny: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny(steps=2, eval_every=1), say=lambda words: None)
    said = [line.split()[1] for line in capsys.readouterr().err.splitlines() if "validation loss" in line]
    assert said == ["1", "2"]


def test_a_mistyped_folder_of_a_trained_model_is_not_looked_up_on_the_hub(tiny: Make, tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    fields = tiny().to_dict() | {"model": {"pretrained": str(tmp_path / "smal")}}
    with pytest.raises(ValueError, match=r"model.pretrained is .*smal is not there \(did you mean .*small\?\)"):
        train(TrainConfig(**fields))


@pytest.mark.parametrize("carry", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow), 2])
def test_accumulation_and_workers_change_nothing(carry: int, tiny: Make) -> None:
    runs = {
        "whole": {},
        "split": {"micro_batch": 1},
        "workers": {"workers": 2, "micro_batch": 2},
        "checkpointing": {"gradient_checkpointing": True},
    }
    for name, fields in runs.items():
        train(tiny("mag", name, carry=carry, steps=5, write_cost=1.0, **fields), say=lambda words: None)
    whole = losses(tiny(output="whole").output)
    for name in ("split", "workers", "checkpointing"):
        close(losses(tiny(output=name).output), whole, 1e-5)


def test_a_resumed_run_may_use_other_batches_and_keeps_its_lanes(tiny: Make) -> None:
    whole = tiny("mal", "whole", carry=1, steps=6)
    train(whole, say=lambda words: None)
    cut = tiny("mal", "cut", carry=1, steps=6, micro_batch=2)
    train(cut, say=lambda words: None)
    _forget_the_last(cut.output)
    assert len(list(Path(cut.output, "checkpoint-3").glob("memory-*"))) == ROWS // 2
    train(tiny("mal", "cut", carry=1, steps=6, micro_batch=1), resume=True, say=lambda words: None)
    close(losses(cut.output), losses(whole.output), 1e-5)


@pytest.mark.parametrize("change", [{"forget_cost": 0.3}, {"model": {"token_skip": True}}], ids=["setting", "model"])
def test_a_run_from_before_there_was_a_setting_had_its_default(change: dict[str, Any], tiny: Make) -> None:
    config = tiny("mag", steps=2)
    train(config, say=lambda words: None)
    _forget_the_last(config.output)
    file = Path(config.output, RUN)
    file.write_text("".join(line for line in file.read_text().splitlines(True) if "forget_cost" not in line))
    changed = tiny("mag", steps=2, **change)
    if "model" in change:  # what the name stood for has changed, and the file cannot know
        saved = yaml.safe_load(file.read_text())
        file.write_text(yaml.safe_dump(saved | {"model": changed.model}))
    with pytest.raises(
        ValueError, match=r"has (forget_cost 0\.0|token_skip False), this one (0\.3|True); expected the same"
    ):
        train(changed, resume=True, say=lambda words: None)


@pytest.mark.parametrize("sizes", [[4 * LENGTH + 1], [5, 2 * LENGTH, 2, 17, 3 * LENGTH]], ids=["one", "several"])
def test_carried_training_reads_a_document_as_one_call_would(sizes: list[int], tiny: Make) -> None:
    """The loss of documents, read end to end in pieces, is that of each whole document at once."""
    config = tiny("mac", carry=1, learning_rate=1e-12, weight_decay=0.0, steps=4, batch_tokens=LENGTH)
    documents = [[(7 * number + 3 * place) % 256 for place in range(size)] for number, size in enumerate(sizes)]
    data = run.open_data(config)
    rows = run.make_rows(config, run.Data(data.tokenizer, store_of(documents), None, "x"), 4)
    model = make_model(config, 257, 256)
    order = [documents[number] for number in rows.documents[0]]
    each = torch.cat([_token_losses(model, document) for document in order])
    args = run._arguments(config, Path(config.output), 4, 1, 1, validates=False)
    MemoryTrainer(config, model, args, rows, callbacks=[run.MetricsFile(Path(config.output))]).train()
    wanted = {step + 1: float(part.mean()) for step, part in enumerate(each.split(LENGTH)[:4])}
    close(losses(config.output), wanted, 1e-5)


@torch.no_grad()
def _token_losses(model: torch.nn.Module, document: list[int]) -> torch.Tensor:
    """The loss of every token of a document but the first, read by itself."""
    ids = torch.tensor([document])
    return torch.nn.functional.cross_entropy(model.eval()(ids).logits[0, :-1], ids[0, 1:], reduction="none")


def test_separate_documents_are_trained_on_as_if_each_were_alone(tiny: Make) -> None:
    config = tiny("mag", separate_documents=True, learning_rate=1e-12, weight_decay=0.0, steps=1)
    documents = [
        [(7 * number + 3 * place) % 256 for place in range(size)] for number, size in enumerate([5, 9, 50] * 4)
    ]
    rows = run.make_rows(config, run.Data(run.open_data(config).tokenizer, store_of(documents), None, "x"), 1)
    model = make_model(config, 257, 256)
    parts = []
    for row in rows:
        cuts = [0, *(place for place in row["restart"].nonzero().flatten().tolist() if place), LENGTH]
        target = int(row["labels"][-1])
        for first, stop in pairwise(cuts):
            part = row["input_ids"][first:stop].tolist()
            ends_inside = stop < LENGTH or target == IGNORED
            parts.append(_token_losses(model, part if ends_inside else [*part, target]))
    args = run._arguments(config, Path(config.output), 1, ROWS, 1, validates=False)
    MemoryTrainer(config, model, args, rows, callbacks=[run.MetricsFile(Path(config.output))]).train()
    close(losses(config.output), {1: float(torch.cat(parts).mean())}, 1e-5)


@pytest.mark.parametrize("carry", [0, 1])
def test_validation_does_not_depend_on_how_it_is_batched(carry: int, tiny: Make) -> None:
    results = [
        train(tiny("mag", f"run{size}", carry=carry, steps=2, micro_batch=size), say=lambda words: None).metrics
        for size in (1, 4)
    ]
    assert abs(results[0]["eval_loss"] - results[1]["eval_loss"]) < 1e-5
    assert results[0]["eval_tokens"] == results[1]["eval_tokens"] > 100


def test_every_layer_says_what_its_memory_does(tiny: Make) -> None:
    config = tiny("mac", steps=4, memory_stats_every=2, carry=1)
    train(config, say=lambda words: None)
    lines = [json.loads(line) for line in Path(config.output, "metrics.jsonl").read_text().splitlines()]
    looked = [line for line in lines if "memory/layer0/alpha" in line]
    assert [line["step"] for line in looked] == [2, 4]
    for layer in range(2):
        for name in ("theta", "alpha", "eta", "surprise", "norm", "moved"):
            assert looked[0][f"memory/layer{layer}/{name}"] > 0


def test_looking_at_the_memory_changes_no_loss(tiny: Make) -> None:
    for every in (0, 1):
        train(tiny("lmm", f"run{every}", steps=4, memory_stats_every=every, carry=1), say=lambda words: None)
    close(losses(tiny(output="run1").output), losses(tiny(output="run0").output), 0)


@pytest.mark.parametrize(("price", "gate", "less"), [("write_cost", "theta", 0.01), ("forget_cost", "alpha", 1e-4)])
def test_a_memory_that_pays_for_it_does_less(price: str, gate: str, less: float, tiny: Make) -> None:
    found = []
    for cost in (0.0, 30.0):
        config = tiny("lmm", f"cost{cost}", steps=8, memory_stats_every=8, learning_rate=1e-2, **{price: cost})
        train(config, say=lambda words: None)
        lines = [json.loads(line) for line in Path(config.output, "metrics.jsonl").read_text().splitlines()]
        found.append([line[f"memory/layer0/{gate}"] for line in lines if f"memory/layer0/{gate}" in line][-1])
    assert found[1] < found[0] - less


def test_tensorboard_has_the_figures(tiny: Make) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = tiny(steps=3, trackers=["tensorboard"], memory_stats_every=1)
    train(config, say=lambda words: None)
    board = EventAccumulator(str(Path(config.output, "tensorboard")))
    board.Reload()
    names = board.Tags()["scalars"]
    assert {"train/loss", "train/perplexity", "train/tokens_per_second", "eval/loss"} <= set(names)
    assert any("layer0/surprise" in name for name in names)


def test_outer_gradients_of_first_order_are_others_and_reach_the_model(tiny: Make) -> None:
    for order in ("second", "first"):
        config = tiny("lmm", order, steps=4, outer_gradients=order, learning_rate=1e-2)
        train(config, say=lambda words: None)
        model = TitansForCausalLM.from_pretrained(config.output)
        assert model.config.memory_first_order == (order == "first")
    second, first = losses(tiny(output="second").output), losses(tiny(output="first").output)
    assert abs(second[1] - first[1]) < EXACT < abs(second[4] - first[4])


def test_norms_biases_gates_and_the_memorys_start_are_not_decayed(tiny: Make) -> None:
    for name in ("lmm", "mac", "mag", "mal", "transformer++"):
        config = tiny(name)
        model = make_model(config, 257, 256)
        args = run._arguments(config, Path(config.output), 4, 4, 1, validates=False)
        decayed = set(MemoryTrainer(config, model, args, None).get_decay_parameter_names(model))
        for path, parameter in model.named_parameters():
            words = path.rpartition(".")[0] + " " + path
            free = any(word in words for word in ("norm", "bias", "to_gates", "initial", "conv", "persistent", "shift"))
            assert (path in decayed) == (not free), path
            assert parameter.ndim == 2 or path not in decayed


def test_bf16_keeps_the_memory_in_float32(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[torch.dtype] = []
    detach = trainer.TitansCache.detach

    def look(cache: Any) -> Any:
        kept.extend(w.dtype for layer in cache.layers for w in layer.state.memory.weights)
        return detach(cache)

    monkeypatch.setattr(trainer.TitansCache, "detach", look)
    config = tiny("mac", carry=1, precision="bf16", steps=4)
    train(config, say=lambda words: None)
    assert set(kept) == {torch.float32}
    assert all(0 < loss < 10 for loss in losses(config.output).values())
    assert {p.dtype for p in TitansForCausalLM.from_pretrained(config.output).parameters()} == {torch.float32}


def test_where_compiling_fails_the_run_says_so_and_goes_on(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no compiler\nhere")

    monkeypatch.setattr(torch, "compile", fail)
    said: list[str] = []
    result = train(tiny(steps=2, compile=True), say=said.append)
    assert result.finished
    assert [words for words in said if "torch.compile failed, so the model runs without it: no compiler here" in words]


@pytest.fixture
def stream(tmp_path: Path) -> str:
    """A few documents, as a data set that is read from its source while training."""
    folder = tmp_path / "stream"
    folder.mkdir()
    lines = [json.dumps({"text": f"document {n}: " + "abcdefg " * n}) for n in range(12)]
    (folder / "train.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return f"hf://{folder}"


def streamed(tiny: Make, data: str, prepared: Path, **fields: Any) -> TrainConfig:
    return tiny("mag", data=data, tokenizer="bytes", validation=str(prepared), **fields)


def test_a_stream_is_read_again_and_again_and_resumes_to_the_same_losses(
    stream: str, prepared: Path, tiny: Make
) -> None:
    whole = streamed(tiny, stream, prepared, output="whole", steps=10, micro_batch=2)
    train(whole, say=lambda words: None)
    assert len(losses(whole.output)) == 10  # the documents are enough for five
    cut = streamed(tiny, stream, prepared, output="cut", steps=10, micro_batch=2)
    train(cut, say=lambda words: None)
    _forget_the_last(cut.output)
    train(cut, resume=True, say=lambda words: None)
    close(losses(cut.output), losses(whole.output))
    with pytest.raises(ValueError, match="has micro_batch 2, this one 1; expected the same"):
        train(streamed(tiny, stream, prepared, output="cut", steps=10, micro_batch=1), resume=True)


def test_a_run_that_only_was_not_finished_is_finished(stream: str, prepared: Path, tiny: Make) -> None:
    for config in (streamed(tiny, stream, prepared, output="streamed", steps=3), tiny(output="packed", steps=3)):
        first = train(config, say=lambda words: None)
        Path(config.output, "result.json").unlink()
        again = train(config, resume=True, say=lambda words: None)
        assert again.steps == 3 and again.metrics["eval_loss"] == first.metrics["eval_loss"]
        assert again.metrics["seconds"] > first.metrics["seconds"] / 2
        assert sorted(losses(config.output)) == [1, 2, 3]


def test_streams_that_cannot_be_read_are_refused_at_once(stream: str, prepared: Path, tiny: Make) -> None:
    with pytest.raises(ValueError, match=r"text_column is 'txt': did you mean text\?"):
        train(streamed(tiny, stream, prepared, text_column="txt"))
    with pytest.raises(ValueError, match="tokenizer is missing"):
        train(tiny(data=stream))
    with pytest.raises(ValueError, match="data is 'hf:///nowhere/at/all'"):
        train(streamed(tiny, "hf:///nowhere/at/all", prepared))
    assert not Path(tiny().output).exists()


def test_validation_data_of_another_tokenizer_is_refused(tiny: Make, tmp_path: Path) -> None:
    from titans.models.tokenizer import save_tokenizer, train_tokenizer
    from titans.training.prepare import prepare

    (tmp_path / "text.txt").write_text("some words, and some more words. " * 20, encoding="utf-8")
    save_tokenizer(train_tokenizer(["some words, and some more words"], 260), tmp_path / "bpe")
    prepare([str(tmp_path / "text.txt")], tmp_path / "other", str(tmp_path / "bpe"))
    with pytest.raises(ValueError, match="expected data that was prepared with the same tokenizer"):
        train(tiny(validation=str(tmp_path / "other")))
    with pytest.raises(ValueError, match=r"validation: the data has .* tokens; expected more than length = 1,600"):
        train(tiny(length=1600, batch_tokens=1600))


def test_only_a_titans_model_keeps_documents_apart(tiny: Make) -> None:
    with pytest.raises(ValueError, match=r"separate_documents is true and transformer\+\+ is not a Titans model"):
        train(tiny("transformer++", separate_documents=True))


def test_an_epoch_of_carried_rows_reads_every_document(tiny: Make) -> None:
    config = tiny(carry=1, epochs=1.0, steps=None)
    data = run.open_data(config)
    steps = config.total_steps(run._pass_tokens(config, data))
    rows = run.make_rows(config, data, steps)
    assert data.train is not None
    read = {int(document) for documents in rows.documents for document in documents}
    assert len(read) >= 0.9 * data.train.documents  # lanes do not all end with the last step


def test_a_new_run_in_an_old_folder_leaves_nothing_of_the_old_model(tiny: Make) -> None:
    old = Path(train(tiny("mag", steps=2), say=lambda words: None).output)
    (old / "eval").mkdir()
    (old / "eval" / "eval.json").write_text("{}")
    stopped = tiny("mac", steps=2, trackers=["tensorboard"])

    class Stop(Exception):
        pass

    def stop(words: str) -> None:
        raise Stop

    with pytest.raises(Stop):
        train(stopped, overwrite=True, say=stop)
    assert [path.name for path in Path(stopped.output).iterdir()] == ["train.yaml"]


@pytest.mark.slow
def test_a_disk_that_is_full_is_one_sentence(tiny: Make) -> None:
    config = tiny(steps=4, save_every=2)
    words = command(config)
    said = finish(["bash", "-c", 'ulimit -f 150; exec "$@"', "bash", *words], code=2)
    assert "titans: the checkpoint of step 2 could not be written" in said and "Traceback" not in said
    assert run.last_checkpoint(Path(config.output)) is None


def test_a_trained_model_is_a_start_for_another_run(tiny: Make) -> None:
    first = tiny("mag", "first", steps=20, learning_rate=1e-2)
    before = train(first, say=lambda words: None)
    second = tiny("mag", "second", steps=1, learning_rate=1e-9)
    fields = second.to_dict() | {"model": {"pretrained": first.output}}
    after = train(TrainConfig(**fields), say=lambda words: None)
    assert {p.dtype for p in TitansForCausalLM.from_pretrained(second.output).parameters()} == {torch.float32}
    assert abs(before.metrics["eval_loss"] - after.metrics["eval_loss"]) < 1e-4
    third = tiny("mag", "third", steps=1)
    fields = third.to_dict() | {"model": {"pretrained": first.output, "memory_gate_cutoff": 0.5}}
    train(TrainConfig(**fields), say=lambda words: None)
    assert TitansForCausalLM.from_pretrained(third.output).config.memory_gate_cutoff == 0.5
    for wrong, words in (({"name": "mac"}, "pretrained and name"), ({"memory_gat": 1}, "memory_gat is not a field")):
        with pytest.raises(ValueError, match=words):
            fields = tiny("mag", "fourth").to_dict() | {"model": {"pretrained": first.output, **wrong}}
            train(TrainConfig(**fields), say=lambda words: None)


def test_a_gradient_that_is_not_finite_changes_nothing(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    summed, calls = trainer._summed, []

    def overflowing(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return summed(logits, labels) * (torch.inf if len(calls) > 2 else 1)

    monkeypatch.setattr(trainer, "_summed", overflowing)
    config = tiny("mag", steps=4, save_every=2, keep=2)
    train(config, say=lambda words: None)
    before, after = (
        load_file(path / "model.safetensors") for path in (Path(config.output, "checkpoint-2"), Path(config.output))
    )
    assert len(calls) > 2 and before.keys() == after.keys()
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_two_processes_train_as_one(parallel: str, tiny: Make) -> None:
    """Carried memory; the checkpoint of two processes goes on as one, and the other way round."""
    alone = tiny("mac", "alone", carry=1, steps=8)
    train(alone, say=lambda words: None)
    together = tiny("mac", "together", carry=1, steps=8, parallel=parallel, micro_batch=2, memory_stats_every=4)
    finish(command(together, processes=2))
    close(losses(together.output), losses(alone.output), 1e-4)
    _forget_the_last(alone.output, together.output)
    train(together, resume=True, say=lambda words: None)
    back = tiny("mac", "alone", carry=1, steps=8, parallel=parallel, micro_batch=1)
    finish(command(back, "--resume", processes=2))
    close(losses(together.output), losses(alone.output), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("carry", [0, 1])
@pytest.mark.parametrize("name", ["lmm", "mac", "mag", "mal"])
def test_every_variant_trains_alike_in_one_process_two_and_two_sharded(name: str, carry: int, tiny: Make) -> None:
    alone = tiny(name, "alone", carry=carry, steps=20, save_every=10)
    train(alone, say=lambda words: None)
    for parallel in ("ddp", "fsdp2"):
        config = tiny(name, parallel, carry=carry, steps=20, save_every=10, parallel=parallel, micro_batch=2)
        finish(command(config, processes=2))
        close(losses(config.output), losses(alone.output), 1e-4)
    # each goes on from the checkpoint of another
    folders = {kind: Path(tiny(name, kind).output) for kind in ("alone", "ddp", "fsdp2")}
    _forget_the_last(*folders.values())
    held = {kind: (folder / "checkpoint-10").rename(folder / "held") for kind, folder in folders.items()}
    for kind, source in (("alone", "fsdp2"), ("ddp", "alone"), ("fsdp2", "ddp")):
        held[source].rename(folders[kind] / "checkpoint-10")
    expected = losses(alone.output)
    train(alone, resume=True, say=lambda words: None)
    close(losses(alone.output), expected, 1e-4)
    for parallel in ("ddp", "fsdp2"):
        config = tiny(name, parallel, carry=carry, steps=20, save_every=10, parallel=parallel, micro_batch=2)
        finish(command(config, "--resume", processes=2))
        close(losses(config.output), expected, 1e-4)


def _forget_the_last(*outputs: str | Path) -> None:
    """Leaves the first checkpoint only, as if the run had been stopped after it."""
    for output in map(Path, outputs):
        for path in run.checkpoints(output)[1:]:
            path.rename(path.with_name(f"later-{path.name}"))
        (output / "result.json").unlink()


def test_importing_the_package_needs_none_of_this() -> None:
    code = "import sys, titans; print([m for m in ('datasets', 'accelerate', 'yaml') if m in sys.modules])"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"
