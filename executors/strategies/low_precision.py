"""Linear layers that multiply in float8, by torchao.

One scale a tensor, found as the layer runs: operands of the forward and the weight in
e4m3, the gradient of the output in e5m2. Weights, gradients and the optimizer's states
stay as they are, and so do gathers, which carry bfloat16. The model's last unit is left
alone, as its logits need the range, and so are layers whose sizes 16 does not divide,
which the kernels refuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from planner.errors import ExecutionError

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig

__all__ = ["multiply_in_float8"]

#: Sizes of operands that ``torch._scaled_mm`` takes are multiples of this.
_MULTIPLE = 16
#: Compute capability of the first GPUs that multiply in float8.
_CAPABILITY = (8, 9)


def multiply_in_float8(
    model: nn.Module, units: Sequence[str], head: str, device: torch.device
) -> int:
    """Convert the linear layers of a model, or of one stage of it, in place.

    A CPU computes what a GPU would, in float32 on operands rounded to float8.

    Args:
        model: Parameters may be deferred; their names stay.
        units: FQNs of its pipeline units.
        head: FQN of the model's last unit, which is not converted.
        device: Where the model will run.

    Returns:
        Layers that were converted.
    Raises:
        ExecutionError: If torchao is missing, or the GPU has no float8.
    """
    config = _config(device)
    from torchao.float8 import convert_to_float8_training

    converted = 0

    def takes(module: nn.Module, _: str) -> bool:
        nonlocal converted
        fits = isinstance(module, nn.Linear) and not (
            module.in_features % _MULTIPLE or module.out_features % _MULTIPLE
        )
        converted += fits
        return fits

    for unit in units:
        if unit == head:
            continue
        part = model.get_submodule(unit)
        made = convert_to_float8_training(part, module_filter_fn=takes, config=config)
        if made is not part:
            model.set_submodule(unit, made)
    return converted


def _config(device: torch.device) -> Float8LinearConfig:
    """Settings of torchao's layers on a device."""
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < _CAPABILITY:
            have, need = (".".join(map(str, one)) for one in (capability, _CAPABILITY))
            raise ExecutionError(
                f"compute=float8 on {torch.cuda.get_device_name(device)} of compute "
                f"capability {have}, it takes {need}; plan with compute=bfloat16"
            )
    try:
        from torchao.float8 import Float8LinearConfig
    except ImportError as error:
        raise ExecutionError(
            "compute=float8 needs torchao, which is not installed; pip install "
            "'meshwright[float8]', or plan with compute=bfloat16"
        ) from error
    # Tokens that 16 does not divide are padded.
    config = Float8LinearConfig(pad_inner_dim=True)
    return config if device.type == "cuda" else replace(config, emulate=True)
