"""linear_scan against its definition, the loop: outputs, gradients, and the gates' extremes."""

import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from titans.ops.scan import combine, linear_scan, linear_scan_sequential

LENGTHS = [1, 2, 3, 63, 64, 100, 257]
# The shapes of a that multiply b (2, 3, time, 4, 5).
SHAPES_OF_A = {
    "a as b": lambda time: (2, 3, time, 4, 5),
    "a without features": lambda time: (2, 3, time),
    "a without one feature": lambda time: (2, 3, time, 4),
    "a of size 1": lambda time: (1, 3, time, 1, 5),
}


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def inputs(time: int, shape_of_a: str = "a without features", dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """a in [-1, 1], b (2, 3, time, 4, 5) and an initial state, all asking for gradients."""
    a = draw(*SHAPES_OF_A[shape_of_a](time), seed=time, dtype=dtype).clamp(-1, 1)
    b = draw(2, 3, time, 4, 5, seed=time + 1, dtype=dtype)
    initial = draw(2, 3, 4, 5, seed=time + 2, dtype=dtype)
    return tuple(tensor.requires_grad_() for tensor in (a, b, initial))


def value_and_grads(scan: Callable[..., Tensor], arguments: tuple[Tensor, ...]) -> list[Tensor]:
    states = scan(*arguments)
    weights = draw(*states.shape, seed=7, dtype=states.dtype)
    return [states, *torch.autograd.grad((states * weights).sum(), arguments)]


def assert_equal(actual: list[Tensor], expected: list[Tensor], tolerance: float = 1e-12) -> None:
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape_of_a", SHAPES_OF_A)
@pytest.mark.parametrize("time", LENGTHS)
@pytest.mark.parametrize("with_initial", [True, False], ids=["initial", "no initial"])
def test_scan_equals_the_loop_in_states_and_gradients(time: int, shape_of_a: str, with_initial: bool) -> None:
    arguments = inputs(time, shape_of_a)[: 3 if with_initial else 2]
    assert_equal(value_and_grads(linear_scan, arguments), value_and_grads(linear_scan_sequential, arguments))


def test_the_loop_is_the_recurrence() -> None:
    a, b, initial = (tensor.detach() for tensor in inputs(5))
    states = linear_scan_sequential(a, b, initial)
    before = initial
    for t in range(5):
        expected = a[:, :, t, None, None] * before + b[:, :, t]
        assert torch.equal(states[:, :, t], expected)
        before = expected


@pytest.mark.parametrize("dim", [0, 1, 3, -1, -3])
def test_time_may_be_any_dimension(dim: int) -> None:
    b = draw(3, 5, 7, 2, seed=1)
    a = draw(3, 5, 7, 2, seed=2).clamp(-1, 1)
    expected = linear_scan_sequential(a.movedim(dim, 0), b.movedim(dim, 0), dim=0).movedim(0, dim)
    torch.testing.assert_close(linear_scan(a, b, dim=dim), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scan", [linear_scan, linear_scan_sequential])
@pytest.mark.parametrize("with_initial", [True, False], ids=["initial", "no initial"])
def test_no_steps_give_no_states_and_zero_gradients(scan: Callable[..., Tensor], with_initial: bool) -> None:
    arguments = inputs(0)[: 3 if with_initial else 2]
    states = scan(*arguments)
    assert states.shape == (2, 3, 0, 4, 5)
    gradients = torch.autograd.grad(states.sum(), arguments, allow_unused=True, materialize_grads=True)
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("time", [1, 2, 3, 6])
@pytest.mark.parametrize("gate", [None, 0.0, 1.0, -1.0], ids=["random gates", "zeros", "ones", "minus ones"])
def test_first_and_second_gradients_agree_with_finite_differences(time: int, gate: float | None) -> None:
    a = draw(2, time, seed=3).clamp(-1, 1)
    if gate is not None:
        a.fill_(gate)
    b, initial = draw(2, time, 3, seed=4), draw(2, 3, seed=5)
    arguments = tuple(tensor.requires_grad_() for tensor in (a, b, initial))

    def scan(*tensors: Tensor) -> Tensor:
        return linear_scan(*tensors, dim=1)

    assert torch.autograd.gradcheck(scan, arguments)
    assert torch.autograd.gradgradcheck(scan, arguments)
    assert torch.autograd.gradcheck(scan, arguments[:2])
    assert torch.autograd.gradgradcheck(scan, arguments[:2])


def test_an_all_zero_gate_forgets_everything() -> None:
    b = draw(2, 3, 100, 4, 5, seed=1)
    assert torch.equal(linear_scan(torch.zeros(2, 3, 100, dtype=b.dtype), b, b[:, :, 0]), b)


def test_an_all_one_gate_adds_up() -> None:
    b = draw(2, 3, 100, 4, 5, seed=1)
    states = linear_scan(torch.ones(2, 3, 100, dtype=b.dtype), b)
    torch.testing.assert_close(states, b.cumsum(2), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tiny", [0.0, 1e-200, 1e-310])
def test_gates_of_zero_and_near_zero_among_ones_leave_no_nan(tiny: float) -> None:
    a, b, initial = inputs(100)
    a = torch.where(draw(2, 3, 100, seed=9) > 0.5, tiny, torch.ones_like(a)).requires_grad_()
    actual = value_and_grads(linear_scan, (a, b, initial))
    assert all(tensor.isfinite().all() for tensor in actual)
    assert_equal(actual, value_and_grads(linear_scan_sequential, (a, b, initial)))


@pytest.mark.parametrize("time", [100, 4096])
def test_float32_stays_near_the_float64_loop(time: int) -> None:
    a, b, initial = (tensor.detach() for tensor in inputs(time, dtype=torch.float32))
    a = 1 - a.abs() / 50
    states = linear_scan(a, b, initial)
    assert states.dtype == torch.float32
    expected = linear_scan_sequential(a.double(), b.double(), initial.double())
    torch.testing.assert_close(states.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("changed", [0, 1, 31, 32, 62])
def test_no_state_before_a_changed_step_moves(changed: int) -> None:
    a, b, initial = (tensor.detach() for tensor in inputs(63))
    states = linear_scan(a, b, initial)
    a[:, :, changed], b[:, :, changed] = 0.25, 3.0
    again = linear_scan(a, b, initial)
    assert torch.equal(states[:, :, :changed], again[:, :, :changed])
    assert not torch.equal(states[:, :, changed], again[:, :, changed])


def test_the_inputs_are_left_as_they_were() -> None:
    arguments = tuple(tensor.detach() for tensor in inputs(1))
    for kept in (arguments, arguments[:2]):
        copies = [tensor.clone() for tensor in kept]
        linear_scan(*kept).add_(1)
        assert all(torch.equal(tensor, copy) for tensor, copy in zip(kept, copies, strict=True))


def test_it_maps_and_differentiates_under_torch_func() -> None:
    a, b, _ = (tensor.detach() for tensor in inputs(9))
    mapped = torch.func.vmap(lambda one_a, one_b: linear_scan(one_a, one_b, dim=1))(a, b)
    torch.testing.assert_close(mapped, linear_scan(a, b), rtol=1e-12, atol=1e-12)

    def energy(gates: Tensor) -> Tensor:
        return linear_scan(gates, b[0, 0], dim=0).square().sum()

    hessian = torch.func.jacrev(torch.func.jacrev(energy))(a[0, 0])
    assert hessian.isfinite().all() and torch.allclose(hessian, hessian.mT)


steps = st.tuples(st.integers(-9, 9), st.integers(-9, 9))


@given(steps, steps, steps)
def test_the_operator_is_associative(one: tuple[int, int], two: tuple[int, int], three: tuple[int, int]) -> None:
    first, second, third = ((torch.tensor(float(a)), torch.tensor(float(b))) for a, b in (one, two, three))
    assert combine(combine(first, second), third) == combine(first, combine(second, third))


@given(st.lists(st.tuples(st.integers(-2, 2), st.integers(-9, 9)), min_size=1, max_size=20), st.data())
@settings(max_examples=50, deadline=None)
def test_any_split_gives_the_same_states(steps: list[tuple[int, int]], data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, len(steps)))
    a, b = torch.tensor(steps, dtype=torch.float64).unbind(1)
    head = linear_scan(a[:cut], b[:cut], dim=0)
    tail = linear_scan(a[cut:], b[cut:], head[-1], dim=0)
    assert torch.equal(torch.cat([head, tail]), linear_scan_sequential(a, b, dim=0))


@pytest.mark.parametrize("scan", [linear_scan, linear_scan_sequential])
@pytest.mark.parametrize(
    ("a", "b", "initial", "dim", "message"),
    [
        ((2, 4), (2, 3, 5), None, 1, "a has 4 time steps, b has 3; expected the same"),
        ((2, 4, 3), (2, 3, 3), None, 2, "expected sizes of b, or 1"),
        ((2, 3), (2, 3, 5), None, 2, "expected a to have b's dimensions from the left, time among them"),
        ((2, 3, 5, 1), (2, 3, 5), None, 2, "expected a to have b's dimensions from the left"),
        ((2, 3), (2, 3), None, 2, "dim is 2; expected one of the 2 dimensions of b"),
        ((2, 3, 5), (2, 3, 5), (2, 5), 2, "initial has shape (2, 5); expected (2, 3)"),
    ],
)
def test_a_wrong_shape_is_one_sentence(
    scan: Callable[..., Tensor],
    a: tuple[int, ...],
    b: tuple[int, ...],
    initial: tuple[int, ...] | None,
    dim: int,
    message: str,
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        scan(torch.zeros(a), torch.zeros(b), None if initial is None else torch.zeros(initial), dim=dim)


def test_a_wrong_type_is_one_sentence() -> None:
    b = torch.zeros(2, 3, 5)
    with pytest.raises(ValueError, match=r"a has dtype torch.float64, b has torch.float32; expected the same"):
        linear_scan(b.double(), b)
    with pytest.raises(ValueError, match=r"a has dtype torch.int64; expected a floating dtype"):
        linear_scan(b.long(), b.long())
    with pytest.raises(ValueError, match=r"initial has dtype torch.float16, b has torch.float32"):
        linear_scan(b, b, torch.zeros(2, 3).half())
