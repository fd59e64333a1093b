"""Weights in files: ``policy.safetensors`` and a ``config.json`` that describes them.

Nothing is unpickled: weights from elsewhere cannot run code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import pydantic
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import nn

from planner.errors import StrategyError
from planner.schema import write_atomically

__all__ = ["Weights", "fill", "read_weights", "shipped_folder", "write_weights"]

_WEIGHTS, _CONFIG = "policy.safetensors", "config.json"

Description = TypeVar("Description", bound=pydantic.BaseModel)


class Weights(NamedTuple, Generic[Description]):
    """The contents of a folder of weights.

    Attributes:
        described: Contents of ``config.json``.
        tensors: Weights by name.
        checkpoint: SHA-256 of the weights' file.
    """

    described: Description
    tensors: dict[str, torch.Tensor]
    checkpoint: str


def shipped_folder(name: str) -> Path:
    """Return a folder of weights that comes with the package.

    Args:
        name: ``partition``; ``elastic`` for elastic jobs; ``job_stream`` for the
            replay, ``job_stream_world`` for any cluster.
    """
    return Path(str(files("policies") / "weights" / name))


def write_weights(
    folder: str | Path, tensors: Mapping[str, torch.Tensor], described: Any
) -> None:
    """Write ``policy.safetensors`` and ``config.json``.

    Args:
        folder: Made if it does not exist.
        tensors: Weights by name.
        described: Contents of ``config.json``, JSON values.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    whole = {name: part.detach().contiguous() for name, part in tensors.items()}
    # Weights first: a description in a folder always has its weights beside it.
    write_atomically(target / _WEIGHTS, save(whole))
    text = json.dumps(described, indent=2) + "\n"
    write_atomically(target / _CONFIG, text.encode())


def read_weights(
    folder: Path, shape: type[Description], expected: Mapping[str, Any]
) -> Weights[Description]:
    """Read a folder that :func:`write_weights` wrote.

    Args:
        folder: With both files.
        shape: Fields of ``config.json``.
        expected: Values that some of them must have, such as a version.

    Raises:
        StrategyError: If a file is missing or damaged, or a value is another one.
    """
    path = folder / _CONFIG
    try:
        described = shape.model_validate_json(path.read_bytes())
    except OSError as error:
        raise StrategyError(
            f"{path} cannot be read ({error.strerror}); give a folder with {_WEIGHTS} "
            f"and {_CONFIG}"
        ) from error
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise StrategyError(f"{path}: {where}: {first['msg']}") from error
    for name, ours in expected.items():
        theirs = getattr(described, name)
        if theirs != ours:
            raise StrategyError(
                f"{path} has {name}={theirs}, this Meshwright reads {ours}; train the "
                f"policy again, or install the version that wrote it"
            )
    path = folder / _WEIGHTS
    try:
        raw = path.read_bytes()
        tensors = load(raw)
    except OSError as error:
        raise StrategyError(
            f"{path} cannot be read ({error.strerror}); it belongs to {_CONFIG}"
        ) from error
    except SafetensorError as error:
        raise StrategyError(
            f"{path} holds no weights ({error}); copy it again"
        ) from error
    return Weights(described, tensors, hashlib.sha256(raw).hexdigest())


def fill(network: nn.Module, tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Give a network its weights, and put it into evaluation mode.

    Raises:
        StrategyError: If they are not the weights of such a network.
    """
    try:
        network.load_state_dict(tensors)
    except RuntimeError as error:
        raise StrategyError(
            f"{folder / _WEIGHTS} does not go with its {_CONFIG} "
            f"({' '.join(str(error).split())[:200]}); write both anew"
        ) from error
    broken = [name for name, part in tensors.items() if not part.isfinite().all()]
    if broken:
        raise StrategyError(
            f"{folder / _WEIGHTS}: {broken[0]} has numbers that are not finite; copy "
            f"the file again, or train the policy anew"
        )
    network.eval()
