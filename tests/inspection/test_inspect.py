from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from tokenizers.decoders import ByteLevel
from transformers import PreTrainedTokenizerFast

from tests.browser import needs_browser, open_page
from tests.models.cases import KINDS, VARIANTS, config, model, tokens
from titans import TitansForCausalLM
from titans.inspection.inspect import (
    HIDDEN,
    PIECE,
    REMEMBERED,
    SEEN,
    Inspection,
    Subject,
    Token,
    inspect_tokens,
    load_subject,
    picture_mask,
    record_memory,
    tokenize,
    tokenize_bytes,
)
from titans.inspection.page import render_page, to_json, visible

NASTY = (
    'a <b>&amp;</b>\n\t"q" </script><script>alert(1)</script> {{ data }} {% endblock %} é日🙂 \x00\x07\u202e\u2028 end'
)
WITH_MEMORY = [kind for kind in KINDS if "no memory" not in kind]


def read(kind: str, time: int = 30, piece: int | None = None, **fields: Any) -> tuple[TitansForCausalLM, Inspection]:
    made = model(kind, **fields)
    return made, inspect_tokens(made, [Token(i, "x") for i in tokens(time, 1)[0].tolist()], piece)


def numbers(inspection: Inspection) -> dict[str, torch.Tensor]:
    """Everything that is noted for each token, by name."""
    series = {"prediction": inspection.prediction[1:]}
    for index, layer in enumerate(inspection.layers):
        series |= {f"{index} norm": layer.gradient_norm, f"{index} loss": layer.loss}
        for name, gate in layer.gates.items():
            series |= {f"{index} {name} {part}": getattr(gate, part) for part in ("mean", "low", "high")}
    return {name: torch.tensor(values) for name, values in series.items()}


@pytest.mark.parametrize("kind", WITH_MEMORY)
def test_every_layer_and_token_is_noted_whatever_the_pieces(kind: str) -> None:
    _, whole = read(kind, piece=30)
    made, pieces = read(kind, piece=7)
    assert whole.stations == [30]
    assert pieces.stations == [7, 14, 21, 28, 30]
    assert len(whole.layers) == made.config.num_hidden_layers
    expected = numbers(whole)
    for name, values in numbers(pieces).items():
        assert len(values) == 30 - (name == "prediction")
        torch.testing.assert_close(values, expected[name], atol=1e-4, rtol=1e-4, msg=name)
    for one, other in zip(whole.layers, pieces.layers, strict=True):
        assert one.weights[-1] == pytest.approx(other.weights[-1], rel=1e-4)


def test_surprise_and_gates_are_the_memory_s_own() -> None:
    made, inspection = read("lmm", num_hidden_layers=1, num_persistent_tokens=3)
    block = made.model.layers[0]
    with torch.no_grad():
        x = made.model.embed_norm(made.model.embed_tokens(tokens(30, 1)))
        x = block.memory_norm(torch.cat([block.persistent.unsqueeze(0), x], dim=1))
        _, state, surprise = block.memory(x, return_surprise=True)
        gates = dict(zip(("theta", "alpha", "eta"), block.memory._gate(x), strict=True))
    [layer] = inspection.layers
    torch.testing.assert_close(
        torch.tensor(layer.gradient_norm), surprise.gradient_norm[0, :, 3:].square().sum(0).sqrt().float()
    )
    torch.testing.assert_close(torch.tensor(layer.loss), surprise.loss[0, :, 3:].sum(0).float())
    for name, values in gates.items():
        torch.testing.assert_close(torch.tensor(layer.gates[name].mean), values[0, :, 3:].mean(0).float())
        torch.testing.assert_close(torch.tensor(layer.gates[name].high), values[0, :, 3:].amax(0).float())
        torch.testing.assert_close(torch.tensor(layer.gates[name].low), values[0, :, 3:].amin(0).float())
    norms = {name: float(values.square().sum().sqrt()) for name, values in state.norms().items()}
    assert layer.weights[-1] == pytest.approx(norms["weights"], rel=1e-5)
    assert layer.momentum is not None
    assert layer.momentum[-1] == pytest.approx(norms["momentum"], rel=1e-5)


def test_prediction_is_the_loss_of_each_token() -> None:
    made, inspection = read("mac", piece=4)
    ids = tokens(30, 1)
    with torch.no_grad():
        logits = made(ids).logits[0, :-1].float()
    expected = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
    assert inspection.prediction[0] is None
    torch.testing.assert_close(torch.tensor(inspection.prediction[1:]), expected, atol=1e-4, rtol=1e-4)


def test_what_a_memory_does_not_have_is_not_shown() -> None:
    _, inspection = read("linear-attention")
    for layer in inspection.layers:
        assert list(layer.gates) == ["theta"]
        assert layer.momentum is None
    _, off = read("mac", memory_writes=False)
    assert "alpha" not in off.layers[0].gates
    assert max(off.layers[0].moved) == 0


@pytest.mark.parametrize("kind", VARIANTS)
@torch.no_grad()
def test_recording_changes_nothing_and_leaves_nothing_behind(kind: str) -> None:
    made, ids = model(kind), tokens(600, 1)
    expected = made(ids).logits
    with record_memory(made) as records:
        assert torch.equal(made(ids).logits, expected)
    assert all(record.state is not None for record in records)
    with pytest.raises(RuntimeError, match="stop"), record_memory(made):
        raise RuntimeError("stop")
    assert all(getattr(module, "observer", None) is None for module in made.modules())


def test_a_long_text_is_read_in_pieces_that_do_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"num_hidden_layers": 1, "memory_depth": 1}
    _, short = read("mag", 240, **fields)
    assert short.stations == list(range(2, 241, 2))
    monkeypatch.setattr("titans.inspection.inspect.POINTS", 1)
    _, long = read("mag", 2 * PIECE + 5, **fields)
    assert long.stations == [PIECE, 2 * PIECE, 2 * PIECE + 5]


def test_the_model_is_left_in_the_mode_it_was_in() -> None:
    made = model("mal").train()
    inspect_tokens(made, [Token(1, "x")])
    assert made.training


@pytest.mark.parametrize(
    ("kind", "arguments", "words"),
    [
        ("mac", ([], None), "the text is empty"),
        ("mac", ([Token(1, "x")], 0), "piece is 0"),
        ("mac", ([Token(99, "x")], None), "input_ids has the token 99"),
        ("mac, no memory", ([Token(1, "x")], None), "the model has no memory"),
    ],
)
def test_wrong_input_is_one_sentence(kind: str, arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        inspect_tokens(model(kind), *arguments)


@pytest.mark.parametrize("kind", KINDS)
def test_in_the_picture_nobody_sees_the_future_and_memory_reaches_all_of_the_past(kind: str) -> None:
    settings = config(kind, window_size=2048, segment_size=1024)
    mask = picture_mask(settings)
    cells = torch.tensor(mask.cells)
    time = len(cells)
    assert sum(size for _, size in mask.groups) == cells.shape[1]
    assert mask.groups[-1] == ("tokens", time)
    own = cells[:, -time:]
    assert bool((own.triu(1) == HIDDEN).all())
    assert bool((own.diagonal() != HIDDEN).all())
    past = own[torch.ones_like(own).tril(-1).bool()]
    assert bool((past != HIDDEN).all()) == settings.use_memory
    attends = settings.use_attention and settings.variant != "lmm"
    assert bool((cells == SEEN).any()) == attends
    assert bool((cells == REMEMBERED).any()) == settings.use_memory
    assert ("instead of" in mask.note) == attends


def test_the_pictures_are_those_of_the_window_and_of_the_segments() -> None:
    window = torch.tensor(picture_mask(config("mag", window_size=3, num_persistent_tokens=2)).cells)
    assert window[5].tolist() == [SEEN] * 2 + [REMEMBERED] * 3 + [SEEN] * 3 + [HIDDEN] * 18
    segments = picture_mask(config("mac", segment_size=3, num_persistent_tokens=1))
    assert segments.groups == [("persistent", 1), ("h, read from the memory", 24), ("tokens", 24)]
    h, own = torch.tensor(segments.cells)[4, 1:].split(24)
    assert h.tolist() == [HIDDEN] * 3 + [SEEN] * 2 + [HIDDEN] * 19
    assert own.tolist() == [REMEMBERED] * 3 + [SEEN] * 2 + [HIDDEN] * 19


@given(st.binary(max_size=40) | st.text(max_size=20).map(lambda text: text.encode("utf-8", "ignore")))
def test_bytes_are_tokens_and_all_of_them_can_be_seen(data: bytes) -> None:
    made = tokenize_bytes(data)
    assert bytes(token.id for token in made) == data
    for token in made:
        shown = visible(token.text).replace("\n", "").replace("\t", "")
        assert shown.isprintable() or re.fullmatch(r"[^\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]+", shown)
    if "\\x" not in "".join(token.text for token in made):
        assert "".join(token.text for token in made).encode() == data


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and a special one before everything."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(["<s>", *alphabet])}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = ByteLevel()
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>")


def test_a_tokenizer_s_tokens_make_up_the_text() -> None:
    made = tokenize(byte_tokenizer(), NASTY.encode())
    assert made[0] == Token(0, "<s>", "special")
    assert "".join(token.text for token in made[1:]) == NASTY
    with pytest.raises(ValueError, match="not UTF-8 at byte 1"):
        tokenize(byte_tokenizer(), b"a\xff")


def test_a_saved_model_comes_with_its_tokenizer_or_reads_bytes(tmp_path: Path) -> None:
    made = model("mag", torch.float32, vocab_size=300)
    made.save_pretrained(tmp_path / "model")
    plain = load_subject(str(tmp_path / "model"))
    assert plain.tokenizer is None
    assert not plain.fresh
    assert torch.equal(plain.model(tokens(9)).logits, made(tokens(9)).logits)
    assert [token.id for token in plain.tokenize(b"hi\xff")] == [104, 105, 255]
    byte_tokenizer().save_pretrained(tmp_path / "model")
    assert load_subject(str(tmp_path / "model")).tokenize(b"hi")[0].text == "<s>"


def test_a_fresh_model_is_the_same_for_a_seed_and_says_that_it_is_fresh(tmp_path: Path) -> None:
    config("mal", vocab_size=256).to_json_file(tmp_path / "mal.json")
    one, same, other = (load_subject(str(tmp_path / "mal.json"), seed) for seed in (1, 1, 2))
    assert one.fresh
    assert torch.equal(one.model.lm_head.weight, same.model.lm_head.weight)
    assert not torch.equal(one.model.lm_head.weight, other.model.lm_head.weight)
    assert "Random weights" in render_page(inspect_tokens(one.model, one.tokenize(b"hello")), one, 5)


class Scripts(HTMLParser):
    """Counts script elements, and keeps what the one of id "data" holds."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.data = ""
        self.inside = False

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.count += tag == "script"
        self.inside = tag == "script" and ("id", "data") in attributes

    def handle_data(self, data: str) -> None:
        self.data += data if self.inside else ""

    def handle_endtag(self, tag: str) -> None:
        self.inside = False


def nasty_page(kind: str = "mac", text: str = NASTY) -> tuple[Inspection, str]:
    made = model(kind, torch.float32, vocab_size=256)
    subject = Subject(made, None, "<i>a & b</i>", fresh=False)
    whole = Token(0, "</script><script>alert(2)</script><!--", "<!--")
    inspection = inspect_tokens(made, [*subject.tokenize(text.encode()), whole])
    return inspection, render_page(inspection, subject, len(inspection.tokens))


def test_the_page_holds_the_data_and_no_text_gets_out_of_it() -> None:
    inspection, page = nasty_page()
    found = Scripts()
    found.feed(page)
    assert found.count == 2
    assert json.loads(found.data) == to_json(inspection)
    assert "&lt;i&gt;a &amp; b&lt;/i&gt;" in page
    assert "<i>a" not in page
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page)
    assert "Random weights" not in page


def test_numbers_that_are_not_finite_are_left_out() -> None:
    inspection, _ = nasty_page(text="ab")
    inspection.layers[0].loss[0] = float("nan")
    assert to_json(inspection)["layers"][0]["loss"][0] is None


@needs_browser
@pytest.mark.parametrize("kind", ["mac", "linear-attention"])
def test_a_browser_shows_every_token_and_has_nothing_to_complain_of(kind: str, tmp_path: Path) -> None:
    inspection, page = nasty_page(kind)
    click = "<script>document.querySelector('[data-layer=\"1\"]').click();"
    for index in range(3):
        click += f"document.querySelector('#measure').value = {index};"
        click += "document.querySelector('#measure').dispatchEvent(new Event('change'));"
    point = "document.querySelector('#tokens span').dispatchEvent(new PointerEvent('pointerover', {bubbles: true}));"
    path = tmp_path / "page.html"
    path.write_text(page.replace("</body>", f"{click}{point}</script></body>"), encoding="utf-8")
    shown_page = open_page(path, tmp_path / "profile")
    assert 'data-ready="true"' in shown_page
    shown = re.findall(r'<span data-i="(\d+)"[^>]*style="background: rgb[^>]*>', shown_page)
    assert shown == [str(index) for index in range(len(inspection.tokens))][-len(shown) :]
    assert len(shown) >= len(inspection.tokens) - 1  # of the first, no prediction was made
    assert shown_page.count("<figure>") == 9
    assert "token 1, id 97, layer 2" in shown_page


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "config.json is not there"),
        ({"config.json": "{"}, "cannot be read as JSON"),
        ({"config.json": "[]"}, "has model_type None"),
        ({"config.json": '{"model_type": "llama"}'}, "has model_type 'llama'"),
        ({"config.json": config("mac").to_json_string()}, "cannot be loaded"),
        ({"config.json": config("mac").to_json_string(), "model.safetensors": "x"}, "cannot be loaded"),
    ],
)
def test_a_folder_without_a_model_is_one_sentence(files: dict[str, str], words: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        load_subject(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_damaged_tokenizer_is_one_sentence(tmp_path: Path) -> None:
    model("mac", torch.float32).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"the tokenizer in .* cannot be loaded"):
        load_subject(str(tmp_path))
