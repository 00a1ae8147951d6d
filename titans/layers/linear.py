"""Layers that an adapter, a quantiser or a hook may have taken over: what is not plain is called."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from titans.ops.native.library import ORDINARY


def are_all_touched() -> bool:
    """Whether somebody listens to every module there is."""
    return bool(_has_any_global_hook())


def is_touched(module: nn.Module) -> bool:
    """Whether somebody listens to the module, or has put something in the place of its code."""
    own = module.__dict__
    forward, backward = own["_forward_hooks"] or own["_forward_pre_hooks"], own["_backward_hooks"]
    return bool(forward or backward or own["_backward_pre_hooks"] or "forward" in own)


def is_plain(module: nn.Module, kind: type[nn.Module] = nn.Linear) -> bool:
    """Whether calling the module is what its class does with its weight and nothing else."""
    return _is_own(module, kind) and not are_all_touched()


def _is_own(module: nn.Module, kind: type[nn.Module]) -> bool:
    return type(module) is kind and type(module.weight) in ORDINARY and not is_touched(module)


def first_outputs(module: nn.Linear, x: Tensor, count: int) -> Tensor:
    """The first ``count`` channels of ``module(x)``, without the work of the others where that can be.

    Whoever listens to all modules, as a counter of operations does, is not to change what is computed.
    """
    if _is_own(module, nn.Linear):
        return F.linear(x, module.weight[:count], None if module.bias is None else module.bias[:count])
    y: Tensor = module(x)
    return y[..., :count]


def floating_dtype(module: nn.Module, default: torch.dtype) -> torch.dtype:
    """What the module computes in: weights that are stored as integers do not say."""
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), default)


def call_wide(module: nn.Linear, x: Tensor, dtype: torch.dtype) -> Tensor:
    """``module(x)`` in ``dtype``, whatever autocast says; a module that is not plain computes in its own."""
    with torch.autocast(x.device.type, enabled=False):
        if is_plain(module):
            return F.linear(x.to(dtype), module.weight.to(dtype), module.bias.to(dtype))
        y: Tensor = module(x.to(floating_dtype(module, x.dtype)))
        return y.to(dtype)
