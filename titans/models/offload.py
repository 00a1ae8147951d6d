"""Weights that wait on a disk or in main memory, and come back a block at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel


def load_whole_blocks(model: PreTrainedModel) -> None:
    """Lets each block load all of its offloaded weights when it is called; call it after accelerate's ``cpu_offload``,
    ``disk_offload`` or ``dispatch_model``. ``from_pretrained`` does so itself.

    As accelerate dispatches a model, each module loads its own when it is called, but the parts of a block read one
    another's parameters without a call.
    """
    kinds = list(model._no_split_modules or ())
    for name, block in model.named_modules():
        hooks = list(_offloading(block)) if type(block).__name__ in kinds else []
        if not hooks:
            continue
        from accelerate.hooks import attach_align_device_hook, remove_hook_from_submodules

        hook = hooks[0]
        weights = hook.weights_map.dataset  # of the whole model
        waiting = {*weights}
        missing = [key for key, _ in block.named_parameters() if f"{name}.{key}" not in waiting]
        if missing:
            raise ValueError(
                f"device_map offloads a part of {name}, but not its {missing[0]}; expected each block in one place"
            )
        remove_hook_from_submodules(block)
        attach_align_device_hook(
            block,
            execution_device=hook.execution_device,
            offload=True,
            weights_map=weights,
            offload_buffers=hook.offload_buffers,
            module_name=name,
            skip_keys=hook.skip_keys,
            preload_module_classes=kinds,
            tied_params_map=hook.tied_params_map,
        )


def _offloading(block: nn.Module) -> Iterator[Any]:
    """The hooks on the block and below it that load weights."""
    for module in block.modules():
        hook = getattr(module, "_hf_hook", None)
        for each in getattr(hook, "hooks", (hook,)):
            if getattr(each, "offload", False):
                yield each
