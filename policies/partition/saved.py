"""Weights of the partitioner in files: safetensors beside a JSON that describes them.

Nothing is unpickled: weights from elsewhere cannot run code.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import pydantic
from safetensors import SafetensorError
from safetensors.torch import load, save

from envs.partition.features import FEATURE_VERSION
from planner.errors import StrategyError
from planner.schema import write_atomically
from policies.partition.network import NetworkConfig, PartitionNetwork

__all__ = ["SavedNetwork", "load_network", "save_network", "shipped_folder"]

_WEIGHTS, _CONFIG = "policy.safetensors", "config.json"


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class SavedNetwork:
    """A network as it is kept.

    Attributes:
        network: In evaluation mode.
        checkpoint: SHA-256 of its weights, which provenance names.
        notes: What it was trained and validated on.
    """

    network: PartitionNetwork
    checkpoint: str
    notes: dict[str, Any] = field(default_factory=dict)


class _Description(pydantic.BaseModel):
    """``config.json``."""

    model_config = pydantic.ConfigDict(extra="forbid")

    feature_version: int
    network: NetworkConfig
    notes: dict[str, Any]


def shipped_folder() -> Path:
    """Of the weights that come with the package."""
    return Path(str(files("policies") / "weights" / "partition"))


def save_network(
    network: PartitionNetwork, notes: dict[str, Any], folder: str | Path
) -> None:
    """Write ``policy.safetensors`` and ``config.json``.

    Args:
        network: To be kept.
        notes: What it was trained and validated on; JSON values.
        folder: Made if it is not there.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: part.detach().contiguous() for name, part in network.state_dict().items()
    }
    described = {
        "feature_version": FEATURE_VERSION,
        "network": asdict(network.config),
        "notes": notes,
    }
    # Weights first: a description that is there has its weights beside it.
    write_atomically(target / _WEIGHTS, save(tensors))
    text = json.dumps(described, indent=2) + "\n"
    write_atomically(target / _CONFIG, text.encode())
    # Another network may have been read from this folder before.
    load_network.cache_clear()


@lru_cache(maxsize=4)
def load_network(folder: Path | None = None) -> SavedNetwork:
    """Read a network.

    Args:
        folder: That :func:`save_network` wrote; by default the weights that come with
            the package.
    Raises:
        StrategyError: If files are missing, damaged, or of another feature version.
    """
    source = folder or shipped_folder()
    described = _read_description(source / _CONFIG)
    path = source / _WEIGHTS
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
    network = PartitionNetwork(described.network)
    try:
        network.load_state_dict(tensors)
    except RuntimeError as error:
        raise StrategyError(
            f"{path} does not go with its {_CONFIG} "
            f"({' '.join(str(error).split())[:200]}); write both anew"
        ) from error
    return SavedNetwork(
        network=network.eval(),
        checkpoint=hashlib.sha256(raw).hexdigest(),
        notes=described.notes,
    )


def _read_description(path: Path) -> _Description:
    try:
        described = _Description.model_validate_json(path.read_bytes())
    except OSError as error:
        raise StrategyError(
            f"{path} cannot be read ({error.strerror}); give the folder of a network, "
            f"with {_WEIGHTS} and {_CONFIG}"
        ) from error
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise StrategyError(f"{path}: {where}: {first['msg']}") from error
    if described.feature_version != FEATURE_VERSION:
        raise StrategyError(
            f"{path} has feature_version={described.feature_version}, this Meshwright "
            f"sees features of version {FEATURE_VERSION}; train the network again "
            f"(meshwright train partition), or install the version that wrote it"
        )
    return described
