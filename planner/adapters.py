"""Low-rank adapters around a model's layers, from a folder as peft writes it.

``hf:DIR`` whose folder holds an ``adapter_config.json`` is the model that it names as
its base, with adapters: the base's weights are frozen. The base is a folder, beside or
elsewhere; nothing is downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from planner.errors import CaptureError
from planner.reading import parse_json, read_text

__all__ = ["ADAPTER_CONFIG", "Adapter", "adapter_base", "add_adapter_styles"]

#: File in which peft says what is adapted.
ADAPTER_CONFIG = "adapter_config.json"

_MOST_BYTES = 10**6
#: Layers of LoRA that tp splits as it would the layer they adapt: the base with the
#: factor that makes its outputs, or takes its inputs.
_SPLIT = {"colwise": ("base_layer", "lora_B"), "rowwise": ("base_layer", "lora_A")}


def _read(folder: Path) -> dict[str, Any]:
    path = folder / ADAPTER_CONFIG
    text = read_text(path, "adapter's config", most=_MOST_BYTES, error=CaptureError)
    data = parse_json(text, str(path), "adapter's config", error=CaptureError)
    if not isinstance(data, dict) or not isinstance(data.get("peft_type"), str):
        raise CaptureError(f"{path} has no 'peft_type'; give a config that peft wrote")
    return data


def adapter_base(folder: Path) -> Path:
    """Folder of the model that an adapter is for: the adapter's own, or the one named.

    Args:
        folder: With an ``adapter_config.json``.

    Raises:
        CaptureError: If neither holds a ``config.json``.
    """
    named = _read(folder).get("base_model_name_or_path") or ""
    tried = [folder, folder / named, Path(named)] if named else [folder]
    for one in tried:
        if (one / "config.json").is_file():
            return one
    raise CaptureError(
        f"{folder / ADAPTER_CONFIG} has base_model_name_or_path={named!r}, which is no "
        f"folder on this machine that holds a config.json; name one there, or put the "
        f"base's config.json and weights beside {ADAPTER_CONFIG}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """Adapters of one model.

    Attributes:
        config: Of peft, for training.
    """

    config: Any

    @classmethod
    def read(cls, folder: Path) -> Adapter:
        """Read an ``adapter_config.json``.

        Raises:
            CaptureError: If peft is not installed, does not know the config, or the
                method is none that is trained here.
        """
        data = _read(folder)
        where = folder / ADAPTER_CONFIG
        if data["peft_type"] != "LORA" or data.get("use_dora"):
            said = "use_dora" if data.get("use_dora") else data["peft_type"]
            raise CaptureError(
                f"{where} is of {said}; only LORA without use_dora is read, add others "
                f"in code of your own (module:factory)"
            )
        try:
            from peft import LoraConfig
        except ImportError as error:
            raise CaptureError(
                f"{where} needs peft, which is not installed; run "
                f"pip install 'meshwright[lora]'"
            ) from error
        try:
            config = LoraConfig.from_pretrained(str(folder))
        except Exception as error:  # config classes run code of their own
            raise CaptureError(
                f"{where} is none that the installed peft reads: "
                f"{' '.join(str(error).split())[:200]}; correct its fields"
            ) from error
        # As saved it is for inference, with nothing to train.
        config.inference_mode = False
        base = adapter_base(folder)
        if base != folder:
            # What is saved elsewhere finds it, too.
            config.base_model_name_or_path = str(base.resolve())
        return cls(config=config)

    def add(self, model: torch.nn.Module) -> torch.nn.Module:
        """Put adapters into a model, which keeps its class; freeze all else.

        Raises:
            CaptureError: If the model has no such layers.
        """
        from peft import inject_adapter_in_model

        try:
            made: torch.nn.Module = inject_adapter_in_model(self.config, model)
        except ValueError as error:
            raise CaptureError(
                f"{ADAPTER_CONFIG} does not fit {type(model).__name__}: "
                f"{' '.join(str(error).split())[:200]}; correct target_modules="
                f"{json.dumps(sorted(self.config.target_modules or ()))}"
            ) from error
        return made


def add_adapter_styles(
    module: torch.nn.Module, plan: Mapping[str, str]
) -> dict[str, str]:
    """Tensor parallel styles of adapted layers, beside those of the others.

    Of ``y = W x + B A x``, a split of outputs splits W and B, one of inputs W and A.

    Args:
        module: The model.
        plan: Pattern of module names to Hugging Face style.
    """
    if not hasattr(module, "peft_config"):
        return dict(plan)
    found = dict(plan)
    for pattern, style in plan.items():
        for part in _SPLIT.get(style, ()):
            name = f"{pattern}.{part}"
            found[name if part == "base_layer" else f"{name}.default"] = style
    return found
