"""The linear recurrence S_t = a_t S_{t-1} + b_t (Eq. 18), as a loop and as a parallel associative scan."""

from typing import Any

from torch import Tensor, cat, stack, zeros_like
from torch.autograd import Function


def combine(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The associative operator (a1, b1) o (a2, b2) = (a1 a2, a2 b1 + b2): `first`, then `second`."""
    (a1, b1), (a2, b2) = first, second
    return a1 * a2, a2 * b1 + b2


def linear_scan_sequential(a: Tensor, b: Tensor, initial: Tensor | None = None, *, dim: int = 2) -> Tensor:
    """All states of S_t = a_t S_{t-1} + b_t, one step after another: the definition of `linear_scan`.

    Same arguments, same result; gradients are autograd's own.
    """
    a, initial, dim = _checked(a, b, initial, dim)
    if b.shape[dim] == 0:
        return b.clone()
    state = zeros_like(b.narrow(dim, 0, 1)) if initial is None else initial
    states = []
    for t in range(b.shape[dim]):
        state = a.narrow(dim, t, 1) * state + b.narrow(dim, t, 1)  # Eq. 18
        states.append(state)
    return cat(states, dim)


def linear_scan(a: Tensor, b: Tensor, initial: Tensor | None = None, *, dim: int = 2) -> Tensor:
    """All states of S_t = a_t S_{t-1} + b_t, in O(time) work and O(log time) depth.

    b        any shape; `dim` is its time dimension, by default the third, as in (batch, heads, time, ...).
    a        aligned with b from the left: its sizes are b's or 1 (in time always b's), and it may end early,
             so that a (batch, heads, time) multiplies whole features of b (batch, heads, time, ...).
    initial  S before the first step, of b's shape without time; None is zero.

    Returns S, of b's shape. Differentiable any number of times in a, b and initial. Only products and sums
    are taken, never a ratio or a logarithm, so a may be 0, 1 or negative; where |a| > 1, a product of many
    can overflow although no state does.
    """
    a, initial, dim = _checked(a, b, initial, dim)
    result: Tensor = _LinearScan.apply(a, b, initial, dim)
    return result


class _LinearScan(Function):
    """Forward is a scan in time; backward is the same scan against time, so it differentiates again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor, initial: Tensor | None, dim: int) -> Tensor:
        if b.shape[dim] == 0:
            return b.clone()
        if initial is not None:
            first = a.narrow(dim, 0, 1) * initial + b.narrow(dim, 0, 1)
            b = cat([first, b.narrow(dim, 1, b.shape[dim] - 1)], dim)
        return _inclusive_scan(a, b, dim) if b.shape[dim] > 1 else b.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None, int], output: Tensor) -> None:
        a, _, initial, ctx.dim = inputs
        ctx.save_for_backward(a, initial, output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor, Tensor | None, None]:
        (grad,), dim = grads, ctx.dim
        a, initial, states = ctx.saved_tensors
        time = states.shape[dim]
        if time == 0:
            return zeros_like(a), grad, None if initial is None else zeros_like(initial), None

        # The adjoint of S_t reaches S_{t-1} through a_t:  lambda_t = grad_t + a_{t+1} lambda_{t+1}.
        next_a = a.roll(-1, dim)  # the last entry multiplies a zero state
        adjoint = _LinearScan.apply(next_a.flip(dim), grad.flip(dim), None, dim).flip(dim)

        before = zeros_like(states.narrow(dim, 0, 1)) if initial is None else initial
        previous = cat([before, states.narrow(dim, 0, time - 1)], dim)
        grad_a = (adjoint * previous).sum_to_size(a.shape) if ctx.needs_input_grad[0] else None
        grad_initial = None if initial is None else a.narrow(dim, 0, 1) * adjoint.narrow(dim, 0, 1)
        return grad_a, adjoint, grad_initial, None


def _inclusive_scan(a: Tensor, b: Tensor, dim: int) -> Tensor:
    """Scan pairs of neighbours, which gives every second state; the states between them are one step away."""
    time = b.shape[dim]
    if time == 1:
        return b
    even, odd = (slice(0, time - 1, 2), slice(1, time, 2))
    seconds = _inclusive_scan(*combine(_take(even, dim, a, b), _take(odd, dim, a, b)), dim)
    a_between, b_between = _take(slice(2, time, 2), dim, a, b)
    between = a_between * seconds.narrow(dim, 0, b_between.shape[dim]) + b_between
    firsts = cat([b.narrow(dim, 0, 1), between], dim)
    pairs = time // 2
    states = stack([firsts.narrow(dim, 0, pairs), seconds], dim + 1).flatten(dim, dim + 1)
    return cat([states, firsts.narrow(dim, pairs, 1)], dim) if time % 2 else states


def _take(steps: slice, dim: int, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    index = (slice(None),) * dim + (steps,)
    return a[index], b[index]


def _checked(a: Tensor, b: Tensor, initial: Tensor | None, dim: int) -> tuple[Tensor, Tensor | None, int]:
    """Refuse arguments that do not fit; return a and initial with b's dimensions, and dim from the front."""
    if not -b.ndim <= dim < b.ndim:
        raise ValueError(f"dim is {dim}; expected one of the {b.ndim} dimensions of b")
    dim %= b.ndim
    for name, tensor in (("a", a), ("b", b), ("initial", initial)):
        if tensor is None:
            continue
        if not tensor.is_floating_point():
            raise ValueError(f"{name} has dtype {tensor.dtype}; expected a floating dtype")
        if tensor.dtype != b.dtype:
            raise ValueError(f"{name} has dtype {tensor.dtype}, b has {b.dtype}; expected the same")
        if tensor.device != b.device:
            raise ValueError(f"{name} is on {tensor.device}, b is on {b.device}; expected the same device")
    if not dim < a.ndim <= b.ndim:
        raise ValueError(
            f"a has shape {tuple(a.shape)}, b has {tuple(b.shape)} with time at {dim}; "
            "expected a to have b's dimensions from the left, time among them"
        )
    if a.shape[dim] != b.shape[dim]:
        raise ValueError(f"a has {a.shape[dim]} time steps, b has {b.shape[dim]}; expected the same")
    if any(size not in (1, of_b) for size, of_b in zip(a.shape, b.shape, strict=False)):
        raise ValueError(f"a has shape {tuple(a.shape)}, b has {tuple(b.shape)}; expected sizes of b, or 1")
    if initial is not None:
        expected = b.shape[:dim] + b.shape[dim + 1 :]
        if initial.shape != expected:
            raise ValueError(f"initial has shape {tuple(initial.shape)}; expected {tuple(expected)}")
        initial = initial.unsqueeze(dim)
    return a.reshape(a.shape + (1,) * (b.ndim - a.ndim)), initial, dim
