"""The state as a value: made, moved, picked from, measured, saved and loaded."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from tests.ops.cases import Case, draw, make
from titans.ops import MemoryState, neural_memory_chunked

METADATA = {"format": "titans.MemoryState", "version": "1"}


def open_chunk() -> MemoryState:
    """A state in the middle of a chunk, with everything that a state may hold."""
    state = make(Case(time=11, masked=True, bounded=True))(neural_memory_chunked, 8)[1]
    return replace(state, conv=(draw(2, 3, 4, seed=1),))


def tensors(state: MemoryState) -> dict[str, Tensor]:
    found = {"position": state.positions}
    for name in ("weights", "momentum", "anchor", "conv"):
        found |= {f"{name}.{i}": x for i, x in enumerate(getattr(state, name))}
    return found if state.gram is None else {**found, "gram": state.gram}


def assert_equal(actual: MemoryState, expected: MemoryState) -> None:
    found, want = tensors(actual), tensors(expected)
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], x) and found[name].dtype == x.dtype for name, x in want.items())


def test_a_new_state_stands_at_the_start_of_a_chunk() -> None:
    weights = [draw(3, 2, 5, 4, seed=1), draw(3, 2, 4, 5, seed=2)]
    state = MemoryState.create(weights)
    assert state.batch_size == 3
    assert state.weights == tuple(weights) and state.anchor is state.weights
    assert all(not s.any() and s.shape == w.shape for s, w in zip(state.momentum, weights, strict=True))
    assert torch.equal(state.positions, torch.zeros(3, dtype=torch.int64))
    assert state.gram is None and state.conv == ()


def test_a_state_takes_a_momentum() -> None:
    weight, momentum = draw(1, 1, 2, 3, seed=1), draw(1, 1, 2, 3, seed=2)
    assert torch.equal(MemoryState.create([weight], [momentum]).momentum[0], momentum)


@pytest.mark.parametrize(
    ("weights", "momentum", "message"),
    [
        ([], None, "weights is empty; expected one (batch, heads, out, in) tensor a layer"),
        ([(2, 3, 4)], None, "weights[0] has shape (2, 3, 4); expected (batch, heads, out, in)"),
        (
            [(2, 3, 4, 4), (2, 1, 4, 4)],
            None,
            "weights[1] has batch and heads (2, 1), weights[0] has (2, 3); expected the same",
        ),
        (
            [(2, 3, 4, 4)],
            [(2, 3, 4, 5)],
            "momentum has shapes [(2, 3, 4, 5)]; expected those of the weights, [(2, 3, 4, 4)]",
        ),
        ([(2, 3, 4, 4)], [], "momentum has shapes []; expected those of the weights, [(2, 3, 4, 4)]"),
    ],
)
def test_weights_that_make_no_memory_are_refused(
    weights: list[tuple[int, ...]], momentum: list[tuple[int, ...]] | None, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        MemoryState.create(
            [torch.zeros(s) for s in weights], None if momentum is None else [torch.zeros(s) for s in momentum]
        )


def test_a_detached_state_has_the_same_values_and_no_past() -> None:
    state = open_chunk()
    tracked = state.map(lambda x: x.requires_grad_() * 1 if x.is_floating_point() else x)
    detached = tracked.detach()
    assert all(x.requires_grad for x in tracked.weights)
    assert not any(x.requires_grad for x in tensors(detached).values())
    assert_equal(detached, state)


def test_another_dtype_is_for_what_is_floating() -> None:
    single = open_chunk().to(dtype=torch.float32)
    assert single.positions.dtype == torch.int64
    assert {x.dtype for name, x in tensors(single).items() if name != "position"} == {torch.float32}


def test_a_detached_state_owns_its_tensors_and_a_momentum_of_one_number_stays_one() -> None:
    weight = draw(1, 2, 3, 3, seed=1)
    for batch in (1, 4):
        zero = torch.zeros(()).expand(batch, 2, 3, 3)
        state = MemoryState.create([weight.expand(batch, -1, -1, -1)], [zero])
        detached = state.detach()
        assert detached.weights[0].untyped_storage().data_ptr() != weight.untyped_storage().data_ptr()
        assert detached.momentum[0].untyped_storage().nbytes() == 4


def test_positions_that_agree_are_one_number_on_the_host() -> None:
    call = make(Case(time=11))
    together = call(neural_memory_chunked, 8)[1]
    assert together.position == 3 and together.positions.tolist() == [3, 3]
    assert together.reorder(torch.tensor([1, 1, 0])).position == 3
    apart = open_chunk()
    assert isinstance(apart.position, Tensor) and len(set(apart.position.tolist())) == 2
    both = MemoryState.concatenate([together, replace(apart, conv=())])
    assert both.positions.tolist() == [3, 3, *apart.position.tolist()]
    assert MemoryState.concatenate([together, together]).position == 3
    rows = torch.tensor([True, False])
    assert together.where(rows, together).position == 3
    start = call.start()
    assert together.where(rows, start).positions.tolist() == [3, 0]


@pytest.mark.parametrize("chunk", [8, 5])
def test_a_file_says_which_rule_left_the_state(tmp_path: Path, chunk: int) -> None:
    call = make(Case(time=11))
    call(neural_memory_chunked, 8)[1].save(tmp_path / "state")
    loaded = MemoryState.load(tmp_path / "state")
    assert loaded.rule == "chunk_size=8" and loaded.position == 3
    if chunk == 8:
        call(neural_memory_chunked, chunk, loaded)
    else:
        with pytest.raises(ValueError, match="inside a chunk of a memory with chunk_size=8; expected chunk_size=5"):
            call(neural_memory_chunked, chunk, loaded)


def test_a_file_from_before_states_had_a_rule_is_read(tmp_path: Path) -> None:
    content = {name: x.contiguous() for name, x in tensors(open_chunk()).items()}
    safetensors.torch.save_file(content, tmp_path / "state", metadata=METADATA)
    loaded = MemoryState.load(tmp_path / "state")
    assert loaded.rule is None
    assert_equal(loaded, open_chunk())


def test_a_state_that_starts_a_chunk_still_does_after_a_map() -> None:
    state = MemoryState.create([draw(2, 2, 3, 3, seed=1)]).detach().to("cpu").reorder(torch.tensor([1, 0]))
    assert state.anchor is state.weights


def test_sequences_are_picked_by_number_with_repetition() -> None:
    state = open_chunk()
    picked = state.reorder(torch.tensor([1, 0, 1]))
    assert picked.batch_size == 3
    for name, x in tensors(state).items():
        assert torch.equal(tensors(picked)[name], torch.stack([x[1], x[0], x[1]]))


@pytest.mark.parametrize("indices", [torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2)], ids=["matrix", "floats"])
def test_numbers_of_sequences_are_a_vector_of_whole_numbers(indices: Tensor) -> None:
    with pytest.raises(ValueError, match="expected a vector of int64 sequence numbers"):
        open_chunk().reorder(indices)


def test_norms_are_those_of_each_layer_sequence_and_head() -> None:
    state = open_chunk()
    norms = state.norms()
    for name, norm in norms.items():
        assert norm.shape == (2, 2, 2)
        for layer, w in enumerate(getattr(state, name)):
            torch.testing.assert_close(norm[layer], w.flatten(2).norm(dim=-1).float())


@pytest.mark.parametrize("name", ["state.safetensors", "no_suffix"])
def test_a_saved_state_is_loaded_as_it_was(tmp_path: Path, name: str) -> None:
    state = open_chunk()
    state.save(tmp_path / name)
    assert_equal(MemoryState.load(tmp_path / name), state)
    assert_equal(MemoryState.load(str(tmp_path / name)), state)


def test_a_loaded_state_at_the_start_of_a_chunk_is_one(tmp_path: Path) -> None:
    MemoryState.create([draw(2, 2, 3, 3, seed=1)]).save(tmp_path / "state")
    loaded = MemoryState.load(tmp_path / "state")
    assert loaded.anchor is loaded.weights and loaded.gram is None and loaded.conv == ()


def test_a_state_that_is_part_of_a_graph_or_shares_memory_can_be_saved(tmp_path: Path) -> None:
    weight = draw(1, 2, 3, 3, seed=1).requires_grad_().expand(4, -1, -1, -1).mT
    state = MemoryState.create([weight, weight])
    state.save(tmp_path / "state")
    assert_equal(MemoryState.load(tmp_path / "state"), state.detach())


def test_saving_replaces_what_was_there_and_leaves_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "state"
    MemoryState.create([draw(1, 1, 3, 3, seed=1)]).save(target)
    open_chunk().save(target)
    assert_equal(MemoryState.load(target), open_chunk())
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_saving_into_a_missing_directory_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises((OSError, SafetensorError)):
        open_chunk().save(tmp_path / "missing" / "state")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", ["write", "rename"])
def test_a_failed_save_leaves_the_old_file_alone(tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "state"
    old = MemoryState.create([draw(1, 1, 3, 3, seed=1)])
    old.save(target)

    def half_written(tensors: object, path: Path, **kwargs: object) -> None:
        Path(path).write_bytes(b"half")
        raise OSError("no space left")

    def refused(*paths: object) -> None:
        raise OSError("refused")

    if step == "write":
        monkeypatch.setattr("safetensors.torch.save_file", half_written)
    else:
        monkeypatch.setattr(Path, "replace", refused)
    with pytest.raises(OSError):
        open_chunk().save(target)
    monkeypatch.undo()
    assert_equal(MemoryState.load(target), old)
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_a_missing_file_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"state does not exist; expected a file written by MemoryState.save"):
        MemoryState.load(tmp_path / "state")


def assert_refused(path: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        MemoryState.load(path)
    assert str(path) in str(error.value), "the sentence names the file"


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "state"
    for content in (b"", b"not a state", bytes(range(256)) * 20):
        target.write_bytes(content)
        assert_refused(target, "cannot be read as a memory state")


def test_a_file_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "state"
    open_chunk().save(target)
    whole = target.read_bytes()
    for size in (4, 100, len(whole) // 2, len(whole) - 1):
        target.write_bytes(whole[:size])
        assert_refused(target, "cannot be read as a memory state")


def test_tensors_of_another_program_are_refused(tmp_path: Path) -> None:
    target = tmp_path / "model"
    safetensors.torch.save_file({"weight": torch.zeros(2)}, target)
    assert_refused(target, r"is not a memory state \(its format is None\)")
    safetensors.torch.save_file({"weight": torch.zeros(2)}, target, metadata={"format": "pt"})
    assert_refused(target, r"is not a memory state \(its format is 'pt'\)")


@pytest.mark.parametrize("version", ["2", None])
def test_another_version_is_refused(tmp_path: Path, version: str | None) -> None:
    target = tmp_path / "state"
    metadata = {"format": METADATA["format"], **({"version": version} if version else {})}
    safetensors.torch.save_file({"position": torch.zeros(1, dtype=torch.int64)}, target, metadata=metadata)
    assert_refused(target, f"has memory state version {version!r}; this release reads '1'")


DAMAGE: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "a layer is missing": ({"weights.0": None}, "weights.0 is missing"),
    "all weights are missing": ({"weights.0": None, "weights.1": None}, "weights is empty"),
    "a momentum is missing": ({"momentum.1": None}, "momentum has shapes"),
    "an anchor of another shape": ({"anchor.0": torch.zeros(2, 2, 5, 6)}, "anchor and weights have different shapes"),
    "no position": ({"position": None}, "position is missing or has the wrong shape"),
    "a position of another batch": (
        {"position": torch.zeros(3, dtype=torch.int64)},
        "position is missing or has the wrong shape",
    ),
    "a floating position": ({"position": torch.zeros(2)}, "position is missing or has the wrong shape"),
    "a weight of another rank": ({"weights.0": torch.zeros(2, 2, 5)}, "weights[0] has shape (2, 2, 5)"),
    "a gram of another batch": ({"gram": torch.zeros(3, 2, 5, 5)}, "gram"),
    "a convolution of another batch": ({"conv.0": torch.zeros(3, 3, 4)}, "conv"),
    "a missing convolution": ({"conv.0": None, "conv.1": torch.zeros(2, 3, 4)}, "conv.0 is missing"),
    "a negative position": ({"position": torch.tensor([-1, 0])}, "position"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_state_is_refused(tmp_path: Path, damage: str) -> None:
    changes, message = DAMAGE[damage]
    target = tmp_path / "state"
    content = {name: x.contiguous() for name, x in {**tensors(open_chunk()), **changes}.items() if x is not None}
    safetensors.torch.save_file(content, target, metadata=METADATA)
    assert_refused(target, re.escape(message))


def test_saving_into_a_missing_folder_says_so(tmp_path: Path) -> None:
    state = MemoryState.create([torch.zeros(1, 1, 2, 2)])
    with pytest.raises(
        FileNotFoundError, match=r"missing does not exist; expected a folder to write m.safetensors into"
    ):
        state.save(tmp_path / "missing" / "m.safetensors")
