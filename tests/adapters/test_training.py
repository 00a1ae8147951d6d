"""Calibrating, teaching, saving and asking an adapted model."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from tests.tasks.test_quote import book
from titans.adapters.calibrate import probe, read_texts, start, whiten
from titans.adapters.evaluate import MODES, ask, language
from titans.adapters.fit import CHECKPOINT, STATES, FitSettings, add_gradients, fit, record_texts
from titans.adapters.model import AdaptedModel, adapt
from titans.adapters.saving import SETTINGS, WEIGHTS, fingerprint, load_adapter, save_adapter
from titans.adapters.states import Reading, head, record
from titans.cli import app
from titans.models.tokenizer import byte_tokenizer
from titans.tasks import Answer, make_task

WINDOW, SINKS = 48, 2


def backbone(seed: int = 0, width: int = 32) -> Any:
    """A small Llama that reads bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=257, hidden_size=width, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=None, eos_token_id=256, pad_token_id=256, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def small(**options: Any) -> AdaptedModel:
    return adapt(backbone(), **({"window": WINDOW, "sinks": SINKS} | options)).eval()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a backbone with its tokenizer."""
    folder = tmp_path_factory.mktemp("backbone")
    backbone().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def some_text(time: int = 200, seed: int = 0) -> torch.Tensor:
    return torch.randint(97, 123, (time,), generator=torch.Generator().manual_seed(seed))


def test_what_is_recorded_is_what_the_model_sees() -> None:
    model, ids = small(), some_text()
    reading = record(model, ids, [1, 2])
    with torch.no_grad():
        logits = model(ids[None], use_memory=False).logits[0]
        hidden = model.decoder(ids[None, :WINDOW], output_hidden_states=True).hidden_states
    torch.testing.assert_close(head(model, reading.last.float()), logits, rtol=0, atol=2e-2)
    for layer in (1, 2):
        torch.testing.assert_close(reading.states[layer][:WINDOW].float(), hidden[layer][0], rtol=1e-2, atol=1e-2)


def test_a_memory_says_the_same_to_recorded_states_as_in_the_model() -> None:
    model, ids = small(taps=[0, 2]), some_text()
    readings = [record(model, ids, [2])]
    start(model, readings)
    with torch.no_grad():
        in_model = model(ids[None]).logits[0]
        said = model.memory_logits(0, *read_texts(model, 0, readings))[0]
    torch.testing.assert_close(head(model, readings[0].last.float()) + said, in_model, rtol=0, atol=5e-2)
    assert said.abs().max() > 0.1


def test_a_memory_in_the_middle_adds_to_the_states_there() -> None:
    model, ids = small(taps=[1], inject=2), some_text()
    (memory,) = model.memories
    silent = model(ids[None]).logits
    torch.testing.assert_close(silent, model(ids[None], use_memory=False).logits, rtol=0, atol=0)
    torch.nn.init.normal_(memory.to_out.weight)
    torch.nn.init.normal_(memory.to_value.weight)
    with torch.no_grad():
        whole = model(ids[None]).logits
        first = model(ids[None, :77])
        rest = model(ids[None, 77:], past_key_values=first.past_key_values)
    torch.testing.assert_close(torch.cat([first.logits, rest.logits], dim=1), whole, rtol=0, atol=1e-4)
    assert (whole - silent).abs().max() > 0.1
    with pytest.raises(ValueError, match="inject is 2; expected head: only there a memory can be started"):
        start(model, [record(model, ids, [1])])


def test_a_reading_survives_its_file_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    model = small()
    reading = record(model, some_text(60), [1], [Answer(50, (97, 98))])
    path = tmp_path / "a.safetensors"
    reading.save(path)
    loaded = Reading.load(path)
    assert loaded.answers == reading.answers and loaded.window == WINDOW
    assert torch.equal(loaded.ids, reading.ids) and torch.equal(loaded.states[1], reading.states[1])
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="is damaged: delete it, and it is recorded again"):
        Reading.load(path)


def test_whitening_gives_every_direction_about_the_same_variance() -> None:
    x = torch.randn(4000, 8, generator=torch.Generator().manual_seed(0)) * torch.logspace(1.0, -0.2, 8)
    y = x @ whiten(x).T
    spread = y.std(0)
    assert spread.max() / spread.min() < 8 < (x.std(0).max() / x.std(0).min())


def test_the_probe_finds_the_layer_whose_states_know_what_comes_next() -> None:
    """States that are the next token find it; states of noise do not."""
    ids = torch.randint(60, 90, (400,), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    codes = torch.randn(100, 64)
    knowing = codes[torch.roll(ids, -1)] + 0.1 * torch.randn(400, 64)
    reading = Reading(ids, {1: torch.randn(400, 64), 2: knowing}, torch.zeros(400, 64), window=50)
    found = probe([reading], 50)
    assert found[2] > 0.95 > 0.3 > found[1]


def test_a_started_memory_recalls_what_followed_a_state() -> None:
    """Before any training: after the same words, the memory speaks for what came after them the first time."""
    model = adapt(backbone(width=128), taps=[0, 1], window=8, sinks=2).eval()
    start(model, [record(model, torch.randint(0, 256, (300,)), [1]) for _ in range(3)])
    hits = []
    for seed in range(10):
        words = torch.randperm(256, generator=torch.Generator().manual_seed(seed))[:36]
        ids = torch.cat([words, words[10:15]])  # the first five of six words come again
        with torch.no_grad():
            scores = model.memory_logits(0, *read_texts(model, 0, [record(model, ids, [1])]))[0, -1]
        hits.append(int(scores.argmax()) == int(words[15]))
    assert sum(hits) >= 8


def test_an_answer_below_the_floor_says_nothing_and_one_that_is_a_value_names_its_token() -> None:
    model = small(taps=[0, 1])
    start(model, [record(model, some_text(200), [1])])
    (memory,) = model.memories
    embedding = model.get_input_embeddings().weight
    with torch.no_grad():
        x = torch.cat([(embedding[99] - memory.mean[0]) * memory.scale[0], torch.zeros(32)])
        value = memory.to_value(x)
        value = value / value.norm()
        like = memory.likeness(torch.stack([value, 0.1 * value])[None], embedding)[0]
        said = memory.logits(torch.stack([value, 0.1 * value])[None, None], torch.zeros(1, 2, 1), embedding)[0]
    assert like[0].argmax() == 99 and like[0, 99] == pytest.approx(1, abs=1e-4)
    assert said[0].argmax() == 99 and said[1].max() < 0.01 * said[0].max()


def test_training_lowers_the_loss_of_answers_and_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    task = make_task("phonebook", {})
    settings = FitSettings(steps=12, texts=3, lengths=(96,), places=8, seed=1, rate=3e-3)

    def prepared() -> tuple[AdaptedModel, Any]:
        model = small(taps=[0, 2])
        plans = record_texts(model, byte_tokenizer(), [task], None, settings, tmp_path / STATES)
        start(model, [Reading.load(tmp_path / STATES / plan.name) for plan in plans])
        return model, plans

    model, plans = prepared()
    lines: list[str] = []
    fit(model, plans, tmp_path / STATES, settings, say=lines.append)
    assert lines and lines[-1].startswith("step 12 of 12  recall ")

    class Stop(Exception):
        pass

    def interrupt(done: int, total: int, what: str) -> None:
        if done == 7:
            raise Stop

    import titans.adapters.fit as module

    again, plans = prepared()
    before, module.SAVE_EVERY = module.SAVE_EVERY, 5
    try:
        with pytest.raises(Stop):
            fit(again, plans, tmp_path / STATES, settings, tmp_path / CHECKPOINT, interrupt)
        resumed, plans = prepared()
        fit(resumed, plans, tmp_path / STATES, settings, tmp_path / CHECKPOINT)
    finally:
        module.SAVE_EVERY = before
    for name, weight in model.memories.state_dict().items():
        torch.testing.assert_close(resumed.memories.state_dict()[name], weight, rtol=0, atol=0, msg=name)
    other = FitSettings(steps=13, texts=3, lengths=(96,), places=8, seed=1)
    with pytest.raises(ValueError, match="is of a training with other settings"):
        fit(resumed, plans, tmp_path / STATES, other, tmp_path / CHECKPOINT)
    with pytest.raises(ValueError, match="has states of another model, window or text"):
        record_texts(small(taps=[0, 1]), byte_tokenizer(), [task], None, settings, tmp_path / STATES)


def test_a_training_that_is_stopped_leaves_no_price_on_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = small(taps=[0, 2]), []
    settings = FitSettings(steps=4, texts=1, lengths=(96,), write_cost=0.5)
    plans = record_texts(model, byte_tokenizer(), [], None, settings, tmp_path)

    def stop_at_the_third(*arguments: Any) -> tuple[float, float]:
        seen.extend(float(memory.prices["theta"]) for memory in model.memories)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return add_gradients(*arguments)

    monkeypatch.setattr("titans.adapters.fit.add_gradients", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        fit(model, plans, tmp_path, settings)
    assert seen == pytest.approx([0, 0.25 / 96, 0.5 / 96])
    assert [memory.prices for memory in model.memories] == [{}]


def test_a_step_has_the_mean_loss_of_its_answers_and_what_language_costs() -> None:
    """With a silent memory language costs nothing, and answers what they cost the model."""
    model, asked = small(taps=[0, 1]), [[Answer(80, (97, 98)), Answer(90, (99,))], [Answer(95, (100,))], []]
    texts = [some_text(100, seed) for seed in range(3)]
    costs = []
    for ids, answers in zip(texts, asked, strict=True):
        logits = model(ids[None]).logits[0].detach()
        for answer in answers:
            places = torch.arange(answer.place - 1, answer.place - 1 + len(answer.wanted))
            costs.append(float(torch.nn.functional.cross_entropy(logits[places], ids[places + 1])))
    readings = [record(model, ids, [1], answers) for ids, answers in zip(texts, asked, strict=True)]
    recall, language = add_gradients(model, readings, FitSettings(), random.Random(0))
    assert recall == pytest.approx(2 / 3 * sum(costs) / 3, abs=1e-3) and language == pytest.approx(0, abs=1e-6)
    assert any(p.grad is not None and p.grad.any() for p in model.memories.parameters())


def test_only_what_is_said_at_the_head_is_learned_from_recorded_states(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"inject is \[2\]; expected head"):
        fit(small(taps=[0], inject=2), [], tmp_path, FitSettings())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"steps": 0}, "steps is 0; expected a whole number of at least 1"),
        ({"rate": 0.0}, "rate is 0.0; expected a positive number"),
        ({"lengths": (4,)}, r"lengths is \[4\]; expected numbers of tokens, 16 or more"),
        ({"narrow": 2.0}, "narrow is 2.0; expected a share from 0 to 1"),
        ({"write_cost": -1.0}, "write_cost is -1.0; expected 0 or more"),
    ],
)
def test_settings_that_make_no_sense_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FitSettings(**fields)


def logits_of_another_process(folder: Path, ids: Tensor) -> Tensor:
    """What the adapter that is saved in a folder says to ids (tokens,) where it is loaded anew; leaves files there."""
    program = (
        "import sys, torch; from titans.adapters import load_adapter; "
        "model, _ = load_adapter(sys.argv[1], device='cpu'); "
        "torch.save(model(torch.load(sys.argv[2])).logits, sys.argv[3])"
    )
    torch.save(ids[None], folder / "ids.pt")
    arguments = [str(folder), str(folder / "ids.pt"), str(folder / "logits.pt")]
    subprocess.run([sys.executable, "-c", program, *arguments], check=True)
    found: Tensor = torch.load(folder / "logits.pt")
    return found


def test_an_adapter_says_the_same_in_another_process(tmp_path: Path, saved: Path) -> None:
    model, ids = small(taps=[0, 2]), some_text(90)
    start(model, [record(model, some_text(150, seed=4), [2])])
    model.source = str(saved)
    save_adapter(model, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [SETTINGS, WEIGHTS]
    with torch.no_grad():
        expected = model(ids[None]).logits
    torch.testing.assert_close(logits_of_another_process(tmp_path, ids), expected, rtol=0, atol=1e-5)


def test_a_model_that_was_loaded_is_saved_with_its_name(tmp_path: Path, saved: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = adapt(AutoModelForCausalLM.from_pretrained(saved), window=WINDOW).eval()
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(some_text(90)[None]).logits
        torch.testing.assert_close(AdaptedModel.from_pretrained(tmp_path)(some_text(90)[None]).logits, expected)


def test_an_adapter_of_other_weights_is_refused(tmp_path: Path) -> None:
    model = small()
    with pytest.raises(ValueError, match="source is empty; expected where the model comes from"):
        save_adapter(model, tmp_path)
    model.source = "somewhere"
    save_adapter(model, tmp_path)
    with pytest.raises(ValueError, match="belongs to other weights than those of this model; expected somewhere"):
        load_adapter(tmp_path, backbone(seed=1))
    assert fingerprint(backbone()) == fingerprint(backbone()) != fingerprint(backbone(seed=1))
    (tmp_path / WEIGHTS).write_bytes(b"nothing")
    with pytest.raises(ValueError, match="is damaged"):
        load_adapter(tmp_path, backbone())
    settings = json.loads((tmp_path / SETTINGS).read_text())
    (tmp_path / SETTINGS).write_text(json.dumps({name: settings[name] for name in settings if name != "taps"}))
    with pytest.raises(ValueError, match="is damaged: it lacks taps"):
        load_adapter(tmp_path, backbone())
    (tmp_path / SETTINGS).write_text(json.dumps(settings | {"version": 99}))
    with pytest.raises(ValueError, match="has version 99; expected 2"):
        load_adapter(tmp_path, backbone())


def test_controls_tamper_with_the_memory_and_nothing_else() -> None:
    tokenizer = byte_tokenizer()
    task = make_task("needle-essay", {"lengths": [520], "depths": [0.2], "digits": 2})
    group = {"length": 520, "depth": 0.2}
    silent = small(taps=[0, 1])
    found = ask(silent, tokenizer, task, group, samples=2)
    assert {mode: len(hits) for mode, hits in found.items()} == dict.fromkeys(MODES, 2)
    losses = language(silent, tokenizer, None, 120, 2)
    assert losses["memory"] == pytest.approx(losses["window"]), "a silent memory changes nothing"
    assert losses["full"] != losses["window"]

    seen: dict[str, list[torch.Tensor]] = {}
    model = small(taps=[0, 1])
    start(model, [record(model, some_text(200), [1])])
    for mode in MODES:
        kept = seen.setdefault(mode, [])
        hook = model.register_forward_hook(lambda module, args, out, kept=kept: kept.append(out.logits[0, -1]))
        ask(model, tokenizer, task, group, samples=1, modes=[mode])
        hook.remove()
    answers = {mode: kept[-1] for mode, kept in seen.items()}
    for one, other in (("memory", "reset"), ("memory", "swapped"), ("reset", "swapped"), ("memory", "window")):
        assert not torch.allclose(answers[one], answers[other]), (one, other)


def test_the_commands_from_a_backbone_to_figures(tmp_path: Path, saved: Path) -> None:
    run = CliRunner()
    first, second = tmp_path / "first", tmp_path / "second"

    def titans(*arguments: str) -> str:
        result = run.invoke(app, ["adapt", *arguments])
        assert result.exit_code == 0, result.output
        return result.output

    calibrating = ["calibrate", str(saved), "--window", "48", "--samples", "2", "--length", "200"]
    said = titans(*calibrating, "--out", str(first), "--taps", "probe")
    assert "layer   1:" in said and said.count("Keys from layers") == 2
    said = titans(*calibrating, "--out", str(tmp_path / "default"))
    assert "Keys from layers 1 of 3:" in said and "Keys from layers 2 of 3:" in said and "layer   1:" not in said
    fitting = ["fit", str(first), "--out", str(second), "--steps", "3", "--samples", "2", "--lengths", "520"]
    assert "step 3 of 3" in titans(*fitting, "--set", "digits=2")
    said = titans("eval", str(second), "--samples", "1", "--depths", "0.3", "--lengths", "520", "--plain", "1")
    assert "needle-essay" in said and "language" in said
    titans("eval", str(second), "--samples", "1", "--depths", "0.3", "--lengths", "520", "--plain", "0", "--seed", "1")
    first_time, again = json.loads((second / "results.json").read_text())["evaluations"]
    assert {figure["task"] for figure in first_time["figures"]} == {"needle-essay", "language"}
    assert [figure["task"] for figure in again["figures"]] == ["needle-essay"]
    books, both = tmp_path / "books.txt", ["--tasks", "needle-essay,book-quote", "--texts", str(tmp_path / "books.txt")]
    books.write_text(book(1500))
    fitting = ["fit", str(first), "--out", str(tmp_path / "names"), "--steps", "2", "--samples", "1"]
    assert "step 2 of 2" in titans(*fitting, "--lengths", "600", *both)
    said = titans("eval", str(tmp_path / "names"), "--samples", "1", "--depths", "0.3", "--lengths", "600", *both)
    assert "needle-essay" in said and "book-quote" in said
    (tmp_path / "other.json").write_text("[]")
    for arguments, message in (
        (["eval", str(tmp_path / "nowhere")], "is not there; expected a folder written by titans adapt"),
        (["eval", str(second), "--modes", "magic"], "modes has magic; expected some of memory, reset"),
        (["fit", str(first), "--out", str(second)], "has an adapter already; expected a new folder"),
        (["calibrate", str(saved), "--out", str(second)], "expected a folder that is new or empty"),
        (["calibrate", str(saved), "--out", str(tmp_path / "x"), "--taps", "9"], "taps is [0, 9]; expected numbers"),
        (["eval", str(second), "--out", str(tmp_path)], "is a directory, a file name is needed"),
        (["eval", str(second), "--out", str(tmp_path / "other.json")], "has no results of titans adapt eval; expected"),
        (["eval", str(second), "--tasks", "book-quote"], "haystack is None; expected a file, or a folder with .txt"),
        (["eval", str(second), "--tasks", "parity"], "tasks has parity, which has tokens of its own"),
        (
            ["calibrate", str(saved), "--out", str(tmp_path / "x"), "--field", "features=0"],
            "features is 0; expected a whole number",
        ),
        (
            [*calibrating, "--out", str(tmp_path / "y"), "--length", "64", "--window", "64", "--taps", "probe"],
            "expected longer",
        ),
        (["calibrate", str(tmp_path / "none.gguf"), "--out", str(tmp_path / "x")], "is not there; expected a GGUF"),
        (["calibrate", str(saved), "--out", str(tmp_path / "x"), "--window", "3"], "expected a window above the sinks"),
    ):
        result = run.invoke(app, ["adapt", *arguments], terminal_width=1000)
        flat = " ".join(result.output.replace("│", " ").split())
        assert result.exit_code == 2 and message in flat, flat
