"""Names of an adapted model's tensors: in the base's files, and in those of peft."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from planner.errors import ExecutionError

__all__ = ["ADAPTER_WEIGHTS", "AdapterNames"]

#: File of peft's format.
ADAPTER_WEIGHTS = "adapter_model.safetensors"

#: Prefix of names there: of the modules of peft around the model.
_PREFIX = "base_model.model."
#: Modules that peft puts around those of the base, and copies of them.
_AROUND = re.compile(r"\.(base_layer|original_module|modules_to_save\.default)(?=\.)")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterNames:
    """Names of an adapted model's tensors.

    Attributes:
        base: Name in the base model, by FQN, of tensors that it has.
        stored: Name in peft's file, by FQN, of tensors that are saved.
    """

    base: dict[str, str]
    stored: dict[str, str]
    _config: Any

    @classmethod
    def of(cls, model: nn.Module) -> AdapterNames | None:
        """Names of a model with adapters of peft; None for one without.

        Raises:
            ExecutionError: If it has several sets of adapters.
        """
        configs = getattr(model, "peft_config", None)
        if not configs:
            return None
        if list(configs) != ["default"]:
            raise ExecutionError(
                f"the model has adapters {', '.join(configs)}; weights are read and "
                f"saved of one set named default"
            )
        from peft import get_peft_model_state_dict

        # Of each, the name alone is wanted.
        state = {
            name: torch.empty(tuple(tensor.shape), device="meta")
            for name, tensor in model.state_dict().items()
            if isinstance(tensor, torch.Tensor)
        }
        saved = get_peft_model_state_dict(
            model, state_dict=state, save_embedding_layers=False
        )
        names = {id(tensor): name for name, tensor in state.items()}
        stored = {names[id(value)]: f"{_PREFIX}{key}" for key, value in saved.items()}
        around = {name: _AROUND.sub("", name) for name in state}
        base = {
            name: inner
            for name, inner in around.items()
            if name not in stored or inner != name
        }
        return cls(base=base, stored=stored, _config=configs["default"])

    def save_config(self, folder: Path) -> None:
        """Write ``adapter_config.json``, as peft does: for inference."""
        training = self._config.inference_mode
        try:
            self._config.inference_mode = True
            self._config.save_pretrained(str(folder))
        finally:
            self._config.inference_mode = training
