"""Low-rank updates of an adapted model, by PEFT: nothing at first, trained with the memory, saved beside it."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.adapters.test_training import WINDOW, backbone, logits_of_another_process, some_text
from tests.adapters.test_training import small as small_reader
from tests.adapters.test_window import FAMILIES, adapted, logits_in_pieces, small, some_ids
from titans.adapters import fit as fitting
from titans.adapters.calibrate import start
from titans.adapters.fit import CHECKPOINT, STATES, FitSettings, add_gradients, clip_gradients, fit, record_texts
from titans.adapters.model import AdaptedModel, adapt
from titans.adapters.saving import LORA, SETTINGS, WEIGHTS, fingerprint, load_adapter, save_adapter
from titans.adapters.states import Reading, record, window_of
from titans.cli import app
from titans.models.tokenizer import byte_tokenizer
from titans.tasks import Answer, make_task

peft = pytest.importorskip("peft", reason="peft is not installed; make test-tools installs it")

RANK = 3


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a backbone with its tokenizer."""
    folder = tmp_path_factory.mktemp("backbone")
    backbone().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def shaken(model: AdaptedModel) -> AdaptedModel:
    """The same model, with updates that are not zero."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.updates.values():
            weight += 0.2 * torch.randn(weight.shape, generator=generator).to(weight.dtype)
    return model


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_at_first_updates_change_nothing_and_later_they_do(family: str) -> None:
    ids, expected = some_ids(), adapted(family)(some_ids()).logits
    model = adapted(family, lora=RANK)
    torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=1e-6)
    assert (shaken(model)(ids).logits - expected).abs().max() > 1e-3


def test_every_projection_of_attention_has_an_update_and_nothing_else() -> None:
    whole = small("llama")
    whole.tower = torch.nn.ModuleDict({"self_attn": torch.nn.ModuleDict({"q_proj": torch.nn.Linear(4, 4)})})
    model = adapt(whole, window=8, sinks=2, lora=RANK)
    assert isinstance(whole.tower["self_attn"]["q_proj"], torch.nn.Linear)
    names = {name.split(".lora_")[0] for name in model.updates}
    assert names == {f"model.layers.{i}.self_attn.{part}_proj" for i in range(3) for part in "qkvo"}
    shapes = {tuple(w.shape) for name, w in model.updates.items() if "q_proj" in name}
    assert shapes == {(RANK, 32), (32, RANK)}


def test_updates_are_the_same_ones_every_time_and_random_numbers_go_on() -> None:
    first, second = (adapt(small("llama"), window=8, sinks=2) for _ in range(2))
    torch.manual_seed(5)
    first.add_lora(RANK)
    after = torch.rand(1)
    second.add_lora(RANK)
    for name, weight in first.updates.items():
        assert torch.equal(weight, second.updates[name]), name
    torch.manual_seed(5)
    assert torch.equal(torch.rand(1), after)


@pytest.mark.parametrize("sizes", [[1] * 60, [13, 1, 30, 16]], ids=["one by one", "pieces"])
@torch.no_grad()
def test_any_split_gives_the_same_logits(sizes: list[int]) -> None:
    model, ids = shaken(adapted(lora=RANK)), some_ids()
    torch.testing.assert_close(logits_in_pieces(model, ids, sizes), model(ids).logits, rtol=0, atol=1e-9)


@torch.no_grad()
def test_rows_of_different_lengths_are_each_as_if_alone() -> None:
    model, ids = shaken(adapted(lora=RANK)), some_ids(2, 40)
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, :17] = 0
    found = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(found[:1], model(ids[:1]).logits, rtol=0, atol=1e-9)
    torch.testing.assert_close(found[1:, 17:], model(ids[1:, 17:]).logits, rtol=0, atol=1e-9)


@pytest.mark.parametrize("beams", [1, 3])
@torch.no_grad()
def test_generation_with_a_cache_or_padding_equals_generation_without(beams: int) -> None:
    model, ids = shaken(adapted(lora=RANK)), some_ids(2, 20)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "num_beams": beams, "eos_token_id": None}
    mask, pad = torch.ones_like(ids), torch.zeros(2, 5, dtype=torch.long)
    cached = model.generate(ids, attention_mask=mask, **options)
    torch.testing.assert_close(model.generate(ids, attention_mask=mask, use_cache=False, **options), cached)
    padded = model.generate(torch.cat([pad, ids], 1), attention_mask=torch.cat([pad, mask], 1), **options)
    torch.testing.assert_close(padded[:, 5:], cached)


def test_updates_and_memory_learn_and_the_model_does_not() -> None:
    model, ids = shaken(adapted(lora=RANK)), some_ids()
    model.train()(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        if name.startswith("memories.") or ".lora_" in name:
            assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
        else:
            assert parameter.grad is None, name


def test_updates_of_a_model_in_half_precision_are_in_float32() -> None:
    model = shaken(adapt(backbone().to(torch.bfloat16), window=WINDOW, lora=RANK)).eval()
    assert {weight.dtype for weight in model.updates.values()} == {torch.float32}
    output = model(some_text(80)[None], labels=some_text(80)[None])
    output.loss.backward()
    assert output.logits.isfinite().all()
    assert all(w.grad is not None and w.grad.any() for w in model.updates.values())


def test_a_model_with_layers_of_peft_is_refused() -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    model = peft.inject_adapter_in_model(config, small("llama"))
    with pytest.raises(ValueError, match=r"^model has layers of peft already; expected one without"):
        adapt(model, lora=RANK)
    with pytest.raises(ValueError, match=r"^model has layers of peft already"):
        adapted(lora=RANK).add_lora(RANK)
    with pytest.raises(ValueError, match=r"^model is a PeftModel; expected a causal language model of transformers"):
        adapt(peft.get_peft_model(small("llama"), config), lora=RANK)


def test_the_fingerprint_is_that_of_the_frozen_weights() -> None:
    plain, model = fingerprint(backbone()), shaken(adapt(backbone(), window=WINDOW, lora=RANK))
    assert fingerprint(model.backbone, model.updates) == plain
    with torch.no_grad():
        model.decoder.layers[1].self_attn.q_proj.base_layer.weight[0, 0] += 1
    assert fingerprint(model.backbone, model.updates) != plain


def test_an_adapter_of_peft_that_somebody_else_called_titans_is_a_part_of_the_model(tmp_path: Path) -> None:
    def foreign(value: float) -> Any:
        model = peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["q_proj"]), backbone(), "titans")
        with torch.no_grad():
            model.model.layers[0].self_attn.q_proj.lora_B["titans"].weight.fill_(value)
        return model

    model = adapt(foreign(1.0), window=WINDOW)
    assert not model.updates and not any(weight.requires_grad for weight in model.backbone.parameters())
    model.source = "somewhere"
    save_adapter(model, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [SETTINGS, WEIGHTS]
    assert load_adapter(tmp_path, foreign(1.0))[0].lora is None
    with pytest.raises(ValueError, match="belongs to other weights than those of this model"):
        load_adapter(tmp_path, foreign(2.0))


def test_a_folder_says_by_its_version_whether_it_has_updates_and_keeps_none_of_before(tmp_path: Path) -> None:
    for rank, version, files in ((RANK, 3, [SETTINGS, WEIGHTS, LORA]), (None, 2, [SETTINGS, WEIGHTS])):
        model = small_reader(lora=rank)
        model.source = "somewhere"
        save_adapter(model, tmp_path)
        assert json.loads((tmp_path / SETTINGS).read_text())["version"] == version
        assert sorted(file.name for file in tmp_path.iterdir()) == files
        assert load_adapter(tmp_path, backbone())[0].lora == rank


def test_updates_with_large_gradients_do_not_shorten_those_of_the_memory() -> None:
    memory, update = (torch.nn.Parameter(torch.zeros(4)) for _ in range(2))
    memory.grad, update.grad = torch.full((4,), 0.25), torch.full((4,), 50.0)
    assert clip_gradients([[memory], [update]])
    torch.testing.assert_close(memory.grad, torch.full((4,), 0.25), rtol=0, atol=0)
    torch.testing.assert_close(update.grad, torch.full((4,), 0.5))
    update.grad = torch.full((4,), torch.inf)
    assert not clip_gradients([[memory], [update]])


def test_an_adapter_with_updates_says_the_same_in_another_process(tmp_path: Path, saved: Path) -> None:
    model, ids = small_reader(taps=[0, 2], lora=RANK), some_text(90)
    start(model, [record(model, some_text(150, seed=4), [2])])
    shaken(model).source = str(saved)
    save_adapter(model, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [SETTINGS, WEIGHTS, LORA]
    with torch.no_grad():
        expected = model(ids[None]).logits
    torch.testing.assert_close(logits_of_another_process(tmp_path, ids), expected, rtol=0, atol=1e-5)


def test_damaged_updates_and_other_weights_are_refused(tmp_path: Path) -> None:
    model = small_reader(lora=RANK)
    model.source = "somewhere"
    save_adapter(model, tmp_path)
    with pytest.raises(ValueError, match="belongs to other weights than those of this model"):
        load_adapter(tmp_path, backbone(seed=1))
    whole = (tmp_path / LORA).read_bytes()
    other = small_reader(lora=RANK + 1)
    other.source = "somewhere"
    save_adapter(other, tmp_path / "other")
    for content in (whole[: len(whole) // 2], (tmp_path / "other" / LORA).read_bytes(), None):
        (tmp_path / LORA).unlink() if content is None else (tmp_path / LORA).write_bytes(content)
        with pytest.raises(ValueError, match="is damaged: "):
            load_adapter(tmp_path, backbone())
    (tmp_path / LORA).write_bytes((tmp_path / WEIGHTS).read_bytes())
    with pytest.raises(ValueError, match=r"is damaged: .* is among the low-rank updates of the model or of the file"):
        load_adapter(tmp_path, backbone())


def test_at_first_a_step_on_the_model_is_a_step_on_recorded_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same losses and gradients of the memory, text by text, with a window and questions of their own."""
    monkeypatch.setattr("titans.adapters.states.STORED", torch.float32)
    plain, model = small_reader(taps=[[0, 2], [0, 1]]), small_reader(taps=[[0, 2], [0, 1]], lora=RANK)
    asked = [[Answer(180, (97, 98, 99)), Answer(190, (100,))], [Answer(30, (97,))], []]
    readings = [record(plain, some_text(200, seed), [1, 2], answers) for seed, answers in enumerate(asked)]
    with window_of(plain, WINDOW // 4):
        readings.append(record(plain, some_text(200, 7), [1, 2], [Answer(195, (99, 98))]))
    start(plain, readings)
    model.memories.load_state_dict(plain.memories.state_dict())
    expected = add_gradients(plain, readings, FitSettings(), random.Random(3))
    found = add_gradients(model, readings, FitSettings(), random.Random(3))
    assert found == pytest.approx(expected, abs=1e-5) and abs(expected[1]) > 1e-3
    for (name, one), other in zip(plain.memories.named_parameters(), model.memories.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None and other.grad is not None:
            torch.testing.assert_close(other.grad, one.grad, rtol=1e-3, atol=1e-3 * float(one.grad.abs().max()))
    assert all(w.grad.any() for name, w in model.updates.items() if "lora_B" in name)


def test_a_fit_trains_both_leaves_the_model_and_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = make_task("phonebook", {})
    settings = FitSettings(steps=8, texts=3, lengths=(96,), places=8, seed=1, lora_rate=1e-2)

    def prepared(rank: int | None = RANK) -> tuple[AdaptedModel, Any]:
        model = small_reader(taps=[0, 2])
        start(model, [record(model, some_text(150, seed), [2]) for seed in range(2)])
        if rank:
            model.add_lora(rank)
        return model, record_texts(model, byte_tokenizer(), [task], None, settings, tmp_path / STATES)

    model, plans = prepared()
    assert not Reading.load(tmp_path / STATES / plans[0].name).states
    lines: list[str] = []
    fit(model, plans, tmp_path / STATES, settings, say=lines.append)
    recalls = [float(line.split("recall ")[1].split()[0]) for line in lines]
    assert len(recalls) == 2 and recalls[1] < recalls[0]
    assert fingerprint(model.backbone, model.updates) == fingerprint(backbone())
    begun = prepared()[0]
    for name, weight in model.updates.items():
        assert not torch.equal(weight, begun.updates[name]), name

    class Stop(Exception):
        pass

    def interrupt(done: int, total: int, what: str) -> None:
        if done == 5:
            raise Stop

    monkeypatch.setattr(fitting, "SAVE_EVERY_WITH_LORA", 3)
    again, plans = prepared()
    with pytest.raises(Stop):
        fit(again, plans, tmp_path / STATES, settings, tmp_path / CHECKPOINT, interrupt)
    resumed, plans = prepared()
    steps: list[int] = []
    fit(resumed, plans, tmp_path / STATES, settings, tmp_path / CHECKPOINT, lambda done, *_: steps.append(done))
    assert steps[0] == 3
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], weight, rtol=0, atol=0, msg=name)
    for rank in (None, RANK + 1):
        with pytest.raises(ValueError, match="has states of a model with other low-rank updates; expected a"):
            prepared(rank)
    with pytest.raises(ValueError, match="is of a training with other settings"):
        fit(shaken(prepared()[0]), plans, tmp_path / STATES, settings, tmp_path / CHECKPOINT)


def test_the_commands_with_lora(tmp_path: Path, saved: Path) -> None:
    run = CliRunner()
    first, second, third = (str(tmp_path / name) for name in ("first", "second", "third"))

    def titans(*arguments: str, code: int = 0) -> str:
        result = run.invoke(app, ["adapt", *arguments], terminal_width=1000)
        assert result.exit_code == code, result.output
        return " ".join(result.output.replace("│", " ").split())

    titans("calibrate", str(saved), "--window", "48", "--samples", "2", "--length", "200", "--out", first)
    few = ["--steps", "2", "--samples", "1", "--lengths", "520", "--set", "digits=2"]
    assert "step 2 of 2" in titans("fit", first, "--out", second, "--lora", "2", *few)
    assert load_adapter(second)[0].lora == 2 and load_adapter(first)[0].lora is None
    said = titans("eval", second, "--samples", "1", "--depths", "0.3", "--lengths", "520", "--plain", "1")
    assert "needle-essay" in said and "language" in said
    said = titans("fit", second, "--out", third, "--lora", "3", *few, code=2)
    assert f"lora is 3; expected 2, the rank of what {second} has already" in said
    titans("fit", second, "--out", third, *few)
    assert load_adapter(third)[0].lora == 2
    for rank, message in (("0", "greater than or equal to 1"), ("few", "valid integer")):
        said = titans("fit", first, "--out", third, "--lora", rank, code=2)
        assert "'--lora'" in said and message in said
    said = titans("fit", first, "--out", str(tmp_path / "x"), "--lora", "2", "--lora-rate", "0", code=2)
    assert "lora_rate is 0.0; expected a positive number" in said
    said = titans("fit", first, "--out", str(tmp_path / "x"), "--lora-rate", "0.001", code=2)
    assert f"lora_rate is 0.001; expected --lora besides, as {first} has no low-rank updates" in said


def test_importing_the_package_does_not_import_peft() -> None:
    program = "import sys, titans, titans.cli; sys.exit('peft' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
    program = "import sys; sys.modules['peft'] = None; import titans.adapters; titans.adapt"
    subprocess.run([sys.executable, "-c", program], check=True)
