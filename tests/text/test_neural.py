"""The neural memory of a scope: its rule, its bits, and what is kept of it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor

from titans.ops import MemoryState, neural_memory_recurrent
from titans.text.neural import MAX_NORM, NeuralConfig, NeuralTextMemory, ScopeMemory

SMALL = NeuralConfig(width=12, dim=8, heads=2, persistent=3)
SETTINGS = {
    "fixed gates": SMALL,
    "gates from the text": replace(SMALL, data_dependent=True),
    "key of the text before": replace(SMALL, associate="previous"),
    "one layer, no bias": replace(SMALL, depth=1, bias=False),
    "as the paper writes it": replace(SMALL, bounded=False, theta=0.02),
}


def vectors(count: int, width: int = 12, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(count, width, generator=generator), dim=-1)


def shaken(config: NeuralConfig, seed: int = 0) -> NeuralTextMemory:
    """A memory whose every parameter counts, as after training."""
    memory = NeuralTextMemory(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in memory.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return memory


def write_in_parts(memory: NeuralTextMemory, texts: Tensor, cuts: Sequence[int]) -> tuple[ScopeMemory, Tensor]:
    scope, surprises = memory.empty(), []
    for part in torch.tensor_split(texts, sorted(cuts)):
        scope, surprise = memory.write(scope, part)
        surprises.append(surprise)
    return scope, torch.cat(surprises)


def define(memory: NeuralTextMemory, texts: Tensor) -> tuple[MemoryState, Tensor]:
    """The state after the texts and the surprise of each: one text after another, nothing in parallel."""
    config = memory.config
    state = memory.create()
    rest = [weight[None, None] for weight in memory.initial]
    surprises = []
    first: Sequence[Tensor] = ()

    def passed(text: Tensor) -> Tensor:
        x = memory.project(text)
        h = memory.network(first, F.normalize(memory.to_query(x), dim=-1)[None, None, None])[0, 0, 0]
        return attended(memory, x, h)

    for t in range(len(texts)):
        if t % config.chunk_size == 0:
            first = state.weights
        source = texts[max(t - 1, 0)] if config.associate == "previous" else texts[t]
        y = passed(texts[t])
        k = F.normalize(memory.to_key(passed(source)), dim=-1)[None, None, None]
        v = F.normalize(memory.to_value(y), dim=-1)[None, None, None]
        surprises.append((memory.network(state.weights, k) - v).square().sum())
        gates = torch.tensor([config.theta, config.eta, config.alpha], dtype=y.dtype)
        if memory.to_gates is not None:
            gates = torch.sigmoid(memory.to_gates(y))
        theta, eta, alpha = (gate.view(1, 1, 1) for gate in gates)
        state = neural_memory_recurrent(
            k, k, v, theta, alpha, eta, state, config.chunk_size, network=memory.network, rest=rest,
            bounded=config.bounded, max_norm=MAX_NORM,
        )[1]  # fmt: skip
    return state, torch.stack(surprises)


def attended(memory: NeuralTextMemory, x: Tensor, h: Tensor) -> Tensor:
    """x + Attn([persistent | h | x]) for one text, head by head."""
    config = memory.config
    tokens = memory.norm(torch.cat([memory.persistent, h[None], x[None]]))
    q, k, v = (tokens @ part.mT for part in memory.attention_in.weight.chunk(3))
    size = config.dim // config.heads
    outputs = []
    for head in range(config.heads):
        here = slice(head * size, (head + 1) * size)
        scores = q[-1, here] @ k[:, here].mT / math.sqrt(size)
        outputs.append(torch.softmax(scores, dim=-1) @ v[:, here])
    return x + memory.attention_out.weight @ torch.cat(outputs)


@pytest.mark.parametrize("name", SETTINGS)
@torch.no_grad()
def test_writing_in_chunks_is_the_definition(name: str) -> None:
    memory = shaken(SETTINGS[name]).double()
    texts = vectors(37).double()
    state, expected = define(memory, texts)
    scope, surprises = memory.write(memory.empty(), texts)
    torch.testing.assert_close(surprises, expected, rtol=1e-9, atol=1e-9)
    for found, wanted in zip(memory.current(scope).weights, state.weights, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", SETTINGS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_no_bit_depends_on_how_the_texts_came(name: str, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 50))
    cuts = data.draw(st.lists(st.integers(0, count), max_size=8))
    memory, texts = shaken(SETTINGS[name]), vectors(count)
    whole, expected = memory.write(memory.empty(), texts)
    parts, surprises = write_in_parts(memory, texts, cuts)
    assert memory.pack(parts) == memory.pack(whole)
    assert torch.equal(surprises, expected)
    for a, b in zip(memory.current(parts).weights, memory.current(whole).weights, strict=True):
        assert torch.equal(a, b)


def test_at_the_full_size_too_with_one_thread_and_with_two(either_way: str) -> None:
    memory, texts = shaken(NeuralConfig()), vectors(40, 384)
    threads = torch.get_num_threads()
    packed, surprises = set(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for cuts in ([], [3, 20, 33], range(1, 40))[: 4 - count]:
                scope, surprise = write_in_parts(memory, texts, cuts)
                packed.add(memory.pack(scope))
                surprises.append(surprise)
    finally:
        torch.set_num_threads(threads)
    assert len(packed) == 1
    assert all(torch.equal(surprise, surprises[0]) for surprise in surprises)


@pytest.mark.parametrize("already", [0, 5, 15, 16, 31])
def test_a_text_that_was_just_told_surprises_less(already: int) -> None:
    memory = NeuralTextMemory.default()
    texts = vectors(already + 1, 384)
    _, surprises = memory.write(memory.empty(), torch.cat([texts, texts[-1:]]))
    assert surprises[-1] < surprises[-2] - 0.005


def test_the_first_text_of_all_surprises_by_one() -> None:
    memory = NeuralTextMemory.default()  # it answers 0 to everything, and values have length 1
    _, surprises = memory.write(memory.empty(), vectors(1, 384))
    torch.testing.assert_close(surprises, torch.ones(1))


def test_the_same_text_a_thousand_times_leaves_a_memory_that_still_works() -> None:
    memory = NeuralTextMemory.default()
    same, other = vectors(2, 384)
    scope, surprises = memory.write(memory.empty(), same.expand(1000, -1))
    assert bool((surprises <= 1 + 1e-6).all()) and surprises[-1] < 0.5
    assert memory.write(scope, other[None])[1] < 2


def test_a_write_leaves_the_memory_before_it_alone() -> None:
    memory = shaken(SMALL)
    scope, _ = memory.write(memory.empty(), vectors(20))
    packed = memory.pack(scope)
    memory.write(scope, vectors(20, seed=1))
    memory.read(scope, vectors(3))
    memory.turn(scope, vectors(3))
    assert memory.pack(scope) == packed


def test_writing_nothing_changes_nothing() -> None:
    memory = shaken(SMALL)
    for count in (0, 5, 16):
        scope, _ = memory.write(memory.empty(), vectors(count))
        after, surprises = memory.write(scope, vectors(0))
        assert memory.pack(after) == memory.pack(scope) and surprises.shape == (0,)


@torch.no_grad()
def test_a_turn_reads_attends_and_gates() -> None:
    memory = shaken(SMALL).double()
    scope, _ = memory.write(memory.empty(), vectors(21).double())
    texts = vectors(4, seed=7).double()
    turn = memory.turn(scope, texts)
    state = memory.current(scope)

    def told(x: Tensor) -> Tensor:
        return memory.network(state.weights, F.normalize(memory.to_query(x), dim=-1)[None, None])[0, 0]

    x = memory.project(texts)
    torch.testing.assert_close(memory.read(scope, texts), told(x))
    torch.testing.assert_close(turn.h, told(x))
    y = torch.stack([attended(memory, a, b) for a, b in zip(x, turn.h, strict=True)])
    torch.testing.assert_close(turn.y, y)
    torch.testing.assert_close(turn.o, F.normalize(y * told(y), dim=-1))


def test_an_untrained_turn_passes_its_input_and_keeps_cosines() -> None:
    memory = NeuralTextMemory.default()
    scope, _ = memory.write(memory.empty(), vectors(10, 384))
    texts = vectors(50, 384, seed=3)
    x = memory.project(texts)
    assert torch.equal(memory.turn(scope, texts).y, x)
    assert float((x @ x.mT - texts @ texts.mT).abs().max()) < 0.4  # 128 of 384 directions are kept
    exact = NeuralTextMemory(replace(SMALL, dim=16))
    y = exact.project(vectors(20))
    torch.testing.assert_close(y @ y.mT, vectors(20) @ vectors(20).mT, rtol=0, atol=1e-5)


def test_gates_start_where_fixed_ones_stand() -> None:
    memory = NeuralTextMemory(replace(SMALL, data_dependent=True))
    theta, alpha, eta = memory.gates(torch.randn(2, 5, 8))
    for gate, value in ((theta, 0.01), (alpha, 0.02), (eta, 0.9)):
        torch.testing.assert_close(gate, torch.full((2, 1, 5), value))


@pytest.mark.parametrize("first_order", [False, True])
def test_every_parameter_gets_a_gradient(first_order: bool) -> None:
    memory = shaken(replace(SMALL, data_dependent=True, first_order=first_order))
    texts = vectors(24).view(4, 6, 12)
    state, surprise = memory.write_chunk(memory.create(4), texts, texts[:, :0])
    (surprise.sum() + memory.take_turn(state, texts).o.sum()).backward()
    for name, parameter in memory.named_parameters():
        assert parameter.grad is not None and float(parameter.grad.abs().sum()) > 0, name


def test_the_scopes_of_a_batch_do_not_meet() -> None:
    memory = shaken(SMALL).double()
    texts = vectors(24).double().view(4, 6, 12)
    state, surprise = memory.write_chunk(memory.create(4), texts, texts[:, :0])
    for row in range(4):
        alone, expected = memory.write_chunk(memory.create(1), texts[row : row + 1], texts[:1, :0])
        torch.testing.assert_close(surprise[row : row + 1], expected)
        torch.testing.assert_close(state.weights[0][row : row + 1], alone.weights[0])


@pytest.mark.parametrize("count", [0, 3, 16, 40])
def test_packed_and_unpacked_is_the_same_memory(count: int) -> None:
    memory = shaken(replace(SMALL, associate="previous"))
    scope, _ = memory.write(memory.empty(), vectors(count))
    again = memory.unpack(memory.pack(scope))
    assert again.count == count and memory.pack(again) == memory.pack(scope)
    more = vectors(20, seed=5)
    assert memory.pack(memory.write(again, more)[0]) == memory.pack(memory.write(scope, more)[0])


def test_bytes_that_are_no_memory_are_refused() -> None:
    memory = NeuralTextMemory(SMALL)
    good = memory.pack(memory.write(memory.empty(), vectors(3))[0])
    with pytest.raises(ValueError, match="the bytes hold no scope's memory"):
        memory.unpack(good[:100])
    with pytest.raises(ValueError, match=r"open of shape \(3, 12\); expected \(3, 13\)"):
        NeuralTextMemory(replace(SMALL, width=13)).unpack(good)
    with pytest.raises(ValueError, match="expected"):
        memory.unpack(save({"open": torch.zeros(3, 12)}))


def test_the_default_is_the_same_everywhere() -> None:
    assert NeuralTextMemory.default().fingerprint == "4db19354fbd8e82f"


def test_the_fingerprint_changes_with_every_parameter_and_every_setting() -> None:
    known = {NeuralTextMemory(SMALL).fingerprint}
    for change in ({"seed": 1}, {"theta": 0.02}, {"associate": "previous"}, {"chunk_size": 8}):
        known.add(NeuralTextMemory(replace(SMALL, **change)).fingerprint)  # type: ignore[arg-type]
    count = 5
    memory = NeuralTextMemory(SMALL)
    for parameter in memory.parameters():
        with torch.no_grad():
            parameter.view(-1)[0] += 1e-6
        known.add(memory.fingerprint)
        count += 1
    assert len(known) == count
    assert NeuralTextMemory(SMALL).fingerprint in known


def test_a_saved_memory_is_loaded_whole(tmp_path: Path) -> None:
    memory = shaken(replace(SMALL, data_dependent=True))
    folder = tmp_path / "some" / "memory"
    memory.save(folder, {"read": 0.5})
    assert NeuralTextMemory.load(folder).fingerprint == memory.fingerprint
    assert json.loads((folder / "figures.json").read_text()) == {"read": 0.5}

    other = shaken(SMALL, seed=1)
    with pytest.raises(ValueError, match="has a text memory in it; expected a new folder, or --overwrite"):
        other.save(folder)
    other.save(folder, overwrite=True)
    assert NeuralTextMemory.load(folder).fingerprint == other.fingerprint
    assert [path.name for path in folder.parent.iterdir()] == ["memory"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(ValueError, match="has other files in it"):
        other.save(tmp_path / "mine", overwrite=True)
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep"


def test_a_save_that_fails_leaves_the_old_memory(tmp_path: Path) -> None:
    memory = NeuralTextMemory(SMALL)
    memory.save(tmp_path / "memory")
    with pytest.raises(TypeError):
        shaken(SMALL).save(tmp_path / "memory", {"not for JSON": object()}, overwrite=True)
    assert NeuralTextMemory.load(tmp_path / "memory").fingerprint == memory.fingerprint
    assert [path.name for path in tmp_path.iterdir()] == ["memory"]


def test_folders_that_hold_no_memory_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "memory"
    with pytest.raises(ValueError, match="is not there; expected a folder written by `titans text train`"):
        NeuralTextMemory.load(folder)
    NeuralTextMemory(SMALL).save(folder)
    for text, words in {
        "{": "cannot be read as JSON",
        "[]": "holds list; expected the fields",
        '{"size": 3}': "'size' is no field of a text memory",
        '{"dim": 16, "width": 12, "heads": 2, "persistent": 3}': "its config expects",
    }.items():
        (folder / "config.json").write_text(text)
        with pytest.raises(ValueError, match=words):
            NeuralTextMemory.load(folder)
    (folder / "config.json").write_text(json.dumps(SMALL.to_dict()))
    (folder / "memory.safetensors").write_bytes(b"torn")
    with pytest.raises(ValueError, match="cannot be read as a text memory"):
        NeuralTextMemory.load(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dim": 0}, "dim is 0; expected a whole number of at least 1"),
        ({"dim": 10, "heads": 4}, "dim is 10 and heads is 4; expected heads to divide dim"),
        ({"theta": 1.5}, r"theta is 1.5; expected a number in \[0, 1\]"),
        ({"theta": 0.0, "data_dependent": True}, "theta is 0.0; expected a number between 0 and 1 for gates"),
        ({"theta": float("nan")}, "theta is nan"),
        ({"associate": "next"}, "associate is 'next'; expected one of self, previous"),
        ({"depth": "2"}, "depth is '2'; expected a value of type int"),
        ({"heads": True}, "heads is True; expected a value of type int"),
    ],
)
def test_a_wrong_setting_is_one_sentence(change: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        NeuralConfig(**change)  # type: ignore[arg-type]


def test_settings_go_to_a_dict_and_back() -> None:
    config = replace(SMALL, associate="previous", theta=0.5)
    assert NeuralConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_wrong_vectors_are_one_sentence() -> None:
    memory = NeuralTextMemory(SMALL)
    with pytest.raises(ValueError, match=r"vectors has shape \(2, 13\); expected \(n, 12\)"):
        memory.write(memory.empty(), torch.zeros(2, 13))
    with pytest.raises(ValueError, match="vectors has values that are NaN or infinite"):
        memory.write(memory.empty(), torch.full((1, 12), torch.nan))
    with pytest.raises(ValueError, match="vectors has 17 texts; expected no more than a chunk of 16"):
        memory.write_chunk(memory.create(), torch.zeros(1, 17, 12), torch.zeros(1, 0, 12))
