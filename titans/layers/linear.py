"""Linear layers that an adapter, a quantiser or a hook may have taken over: what is not plain is called."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titans.ops.native.library import ORDINARY

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_touched(module: nn.Module) -> bool:
    """Whether somebody listens to the module, or has put something in the place of its code."""
    own = module.__dict__
    return any(own[name] for name in HOOKS) or "forward" in own


def is_plain(module: nn.Module) -> bool:
    """Whether calling the module is a product with its weight and nothing else."""
    return type(module) is nn.Linear and type(module.weight) in ORDINARY and not is_touched(module)


def first_outputs(module: nn.Linear, x: Tensor, count: int) -> Tensor:
    """The first ``count`` channels of ``module(x)``, without the work of the others where that can be."""
    if is_plain(module):
        return F.linear(x, module.weight[:count], None if module.bias is None else module.bias[:count])
    y: Tensor = module(x)
    return y[..., :count]


def call_wide(module: nn.Linear, x: Tensor, dtype: torch.dtype) -> Tensor:
    """``module(x)`` in float32 or wider, whatever autocast says; a module that is not plain gets x in ``dtype``."""
    wide = torch.promote_types(dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        if is_plain(module):
            return F.linear(x.to(wide), module.weight.to(wide), module.bias.to(wide))
        y: Tensor = module(x.to(dtype))
        return y.to(wide)
