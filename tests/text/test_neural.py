"""The neural memory of a scope: its rule, its bits, and what is kept of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from titans.ops import MemoryState, neural_memory_recurrent
from titans.text.neural import MAX_NORM, NeuralConfig, NeuralTextMemory, ScopeMemory, add_previous

SMALL = NeuralConfig(width=12, dim=8, depth=2, bias=True, theta=0.01, alpha=0.02)
SETTINGS = {
    "fixed gates": SMALL,
    "gates from the text": replace(SMALL, data_dependent=True),
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
    for t in range(len(texts)):
        x = memory.project(texts[t])
        k = F.normalize(memory.to_key(x), dim=-1)[None, None, None]
        v = F.normalize(memory.to_value(x), dim=-1)[None, None, None]
        surprises.append((memory.network(state.weights, k) - v).square().sum())
        gates = torch.tensor([config.theta, config.eta, config.alpha], dtype=x.dtype)
        if memory.to_gates is not None:
            gates = torch.sigmoid(memory.to_gates(x))
        theta, eta, alpha = (gate.view(1, 1, 1) for gate in gates)
        state = neural_memory_recurrent(
            k, k, v, theta, alpha, eta, state, config.chunk_size, network=memory.network, rest=rest,
            bounded=config.bounded, max_norm=MAX_NORM,
        )[1]  # fmt: skip
    return state, torch.stack(surprises)


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
    memory.unexpected([memory.current(scope)], vectors(3))
    assert memory.pack(scope) == packed


def test_writing_nothing_changes_nothing() -> None:
    memory = shaken(SMALL)
    for count in (0, 5, 16):
        scope, _ = memory.write(memory.empty(), vectors(count))
        after, surprises = memory.write(scope, vectors(0))
        assert memory.pack(after) == memory.pack(scope) and surprises.shape == (0,)


@torch.no_grad()
def test_an_untrained_memory_takes_the_encoders_vectors_as_they_are() -> None:
    texts = vectors(50, 384)
    torch.testing.assert_close(NeuralTextMemory.default().project(texts), texts)
    narrow, wide = (NeuralTextMemory(NeuralConfig(dim=dim)).project(texts) for dim in (128, 400))
    assert float((narrow @ narrow.mT - texts @ texts.mT).abs().max()) < 0.4  # 128 of 384 directions are kept
    torch.testing.assert_close(wide @ wide.mT, texts @ texts.mT, rtol=0, atol=1e-5)


def alike(count: int, seed: int = 0) -> Tensor:
    """Unit vectors with a large part in common."""
    generator = torch.Generator().manual_seed(seed)
    common, own = torch.randn(1, 16, generator=generator), torch.randn(count, 16, generator=generator)
    return F.normalize(2 * F.normalize(common, dim=-1) + F.normalize(own, dim=-1), dim=-1)


PLAIN = NeuralConfig(width=16, theta=0.1, eta=0.0, alpha=0.0)


def learned(memory: NeuralTextMemory, texts: Tensor) -> MemoryState:
    return memory.current(memory.write(memory.empty(), texts)[0])


@torch.no_grad()
def test_a_memory_that_knows_nothing_takes_nothing_from_a_question() -> None:
    memory = NeuralTextMemory(PLAIN)
    asked = alike(3)
    for states in ([], [learned(memory, asked[:0])] * 2):
        torch.testing.assert_close(memory.unexpected(states, asked), memory.project(asked))


@torch.no_grad()
def test_what_all_texts_have_in_common_is_taken_from_a_question_and_the_rest_stays() -> None:
    memory = NeuralTextMemory(PLAIN)
    known = alike(256)
    common, asked = F.normalize(known.mean(0), dim=-1), known[:4]
    left = memory.unexpected([learned(memory, known)], asked)
    assert (asked @ common > 0.8).all()
    assert ((left @ common).abs() < 0.3).all()
    own = F.normalize(asked - (asked @ common)[:, None] * common, dim=-1)
    assert ((left * own).sum(-1) > 0.5).all()


@torch.no_grad()
def test_it_whitens_as_ridge_regression_on_the_texts_themselves_does() -> None:
    memory = NeuralTextMemory(PLAIN)
    known, asked = alike(256), alike(8, seed=1)
    ridge = F.normalize(torch.linalg.solve(known.mT @ known + 10 * torch.eye(16), asked.mT).mT, dim=-1)
    left = memory.unexpected([learned(memory, known)], asked)
    assert float((left * ridge).sum(-1).min()) > 0.99
    assert float((asked * ridge).sum(-1).mean()) < 0.9


@torch.no_grad()
def test_memories_of_several_scopes_leave_what_one_memory_of_all_their_texts_would() -> None:
    memory = NeuralTextMemory(replace(PLAIN, chunk_size=1, bounded=False)).double()
    known, asked = alike(40).double(), alike(8, seed=1).double()
    whole = memory.unexpected([learned(memory, known)], asked)
    parts = [learned(memory, part) for part in known.split([9, 20, 11])]
    torch.testing.assert_close(memory.unexpected(parts[::-1], asked), whole)
    assert float((memory.unexpected(parts, asked) - whole).abs().max()) > 1e-3  # the last written comes first
    torch.testing.assert_close(memory.unexpected(parts[::-1], asked[None])[0], whole)


def test_a_text_gets_a_share_of_the_one_before_and_the_first_stays() -> None:
    x = vectors(5)
    made = add_previous(x, 0.5)
    assert torch.equal(made[0], x[0])
    torch.testing.assert_close(made[1:], x[1:] + 0.5 * x[:-1])
    assert torch.equal(add_previous(x, 0.0), x)


def test_gates_start_where_fixed_ones_stand() -> None:
    memory = NeuralTextMemory(replace(SMALL, data_dependent=True))
    theta, alpha, eta = memory.gates(torch.randn(2, 5, 8))
    for gate, value in ((theta, 0.01), (alpha, 0.02), (eta, 0.9)):
        torch.testing.assert_close(gate, torch.full((2, 1, 5), value))


@pytest.mark.parametrize("first_order", [False, True])
def test_every_parameter_gets_a_gradient(first_order: bool) -> None:
    memory = shaken(replace(SMALL, data_dependent=True, first_order=first_order))
    texts = vectors(24).view(4, 6, 12)
    state, surprise = memory.write_chunk(memory.create(4), texts)
    (surprise.sum() + memory.unexpected([state], texts).sum()).backward()
    for name, parameter in memory.named_parameters():
        assert parameter.grad is not None and float(parameter.grad.abs().sum()) > 0, name


def test_the_scopes_of_a_batch_do_not_meet() -> None:
    memory = shaken(SMALL).double()
    texts = vectors(24).double().view(4, 6, 12)
    state, surprise = memory.write_chunk(memory.create(4), texts)
    for row in range(4):
        alone, expected = memory.write_chunk(memory.create(1), texts[row : row + 1])
        torch.testing.assert_close(surprise[row : row + 1], expected)
        torch.testing.assert_close(state.weights[0][row : row + 1], alone.weights[0])


@pytest.mark.parametrize("count", [0, 3, 16, 40])
def test_packed_and_unpacked_is_the_same_memory(count: int) -> None:
    memory = shaken(SMALL)
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
    assert NeuralTextMemory.default().fingerprint == "7bb60f2364fe126a"


def test_the_fingerprint_changes_with_every_parameter_and_every_setting() -> None:
    known = {NeuralTextMemory(SMALL).fingerprint}
    for change in ({"seed": 1}, {"theta": 0.02}, {"bounded": False}, {"chunk_size": 8}):
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
        '{"dim": 16, "width": 12}': "its config expects",
    }.items():
        (folder / "config.json").write_text(text)
        with pytest.raises(ValueError, match=words):
            NeuralTextMemory.load(folder)
    (folder / "config.json").write_text(json.dumps(SMALL.to_dict()))
    (folder / "memory.safetensors").write_bytes(b"torn")
    with pytest.raises(ValueError, match="cannot be read as a text memory"):
        NeuralTextMemory.load(folder)


def test_a_folder_of_an_earlier_release_is_refused_in_one_sentence(tmp_path: Path) -> None:
    NeuralTextMemory(SMALL).save(tmp_path / "memory")
    (tmp_path / "memory" / "config.json").write_text(json.dumps(SMALL.to_dict() | {"heads": 2, "persistent": 3}))
    weights = tmp_path / "memory" / "memory.safetensors"
    save_file(load_file(weights), weights, {"format": "titans.NeuralTextMemory", "version": "1"})
    with pytest.raises(ValueError, match="has text memory version '1'; this release reads '2'"):
        NeuralTextMemory.load(tmp_path / "memory")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dim": -1}, "dim is -1; expected a whole number of at least 0"),
        ({"theta": 1.5}, r"theta is 1.5; expected a number in \[0, 1\]"),
        ({"theta": 0.0, "data_dependent": True}, "theta is 0.0; expected a number between 0 and 1 for gates"),
        ({"theta": float("nan")}, "theta is nan"),
        ({"depth": "2"}, "depth is '2'; expected a value of type int"),
        ({"width": True}, "width is True; expected a value of type int"),
    ],
)
def test_a_wrong_setting_is_one_sentence(change: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        NeuralConfig(**change)  # type: ignore[arg-type]


def test_settings_go_to_a_dict_and_back() -> None:
    config = replace(SMALL, bounded=False, theta=0.5)
    assert NeuralConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_wrong_vectors_are_one_sentence() -> None:
    memory = NeuralTextMemory(SMALL)
    with pytest.raises(ValueError, match=r"vectors has shape \(2, 13\); expected \(n, 12\)"):
        memory.write(memory.empty(), torch.zeros(2, 13))
    with pytest.raises(ValueError, match="vectors has values that are NaN or infinite"):
        memory.write(memory.empty(), torch.full((1, 12), torch.nan))
    with pytest.raises(ValueError, match="vectors has 17 texts; expected no more than a chunk of 16"):
        memory.write_chunk(memory.create(), torch.zeros(1, 17, 12))
