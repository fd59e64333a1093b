"""Weights of a split policy in files: safetensors beside a JSON that describes them.

Nothing is unpickled: weights from elsewhere cannot run code.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import pydantic
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from planner.errors import StrategyError
from planner.schema import write_atomically
from policies.split.features import FEATURES, PRIORS
from policies.split.network import NetworkConfig, SplitNetwork
from policies.split.standing import STANDING

__all__ = [
    "FORMAT_VERSION",
    "SavedSplitPolicy",
    "load_policy",
    "save_policy",
    "shipped_folder",
]

#: Raised when what the files hold changes: other weights are then refused.
FORMAT_VERSION = 1


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class SavedSplitPolicy:
    """A policy as it is kept.

    Attributes:
        network: That scores groups.
        notes: What it was trained and validated on.
    """

    network: SplitNetwork
    notes: dict[str, Any] = field(default_factory=dict)


class _Description(pydantic.BaseModel):
    """``config.json``."""

    model_config = pydantic.ConfigDict(extra="forbid")

    format_version: int
    network: NetworkConfig
    features: tuple[str, ...]
    priors: tuple[str, ...]
    standing: tuple[str, ...]
    notes: dict[str, Any]


def shipped_folder() -> Path:
    """Of the weights that come with the package."""
    return Path(str(files("policies") / "weights" / "split"))


def save_policy(policy: SavedSplitPolicy, folder: str | Path) -> None:
    """Write ``policy.safetensors`` and ``config.json``.

    Args:
        policy: To be kept.
        folder: Made if it is not there.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: part.detach().contiguous()
        for name, part in policy.network.state_dict().items()
    }
    described = {
        "format_version": FORMAT_VERSION,
        "network": asdict(policy.network.config),
        "features": FEATURES,
        "priors": PRIORS,
        "standing": STANDING,
        "notes": policy.notes,
    }
    # Weights first: a description that is there has its weights beside it.
    write_atomically(target / "policy.safetensors", save(tensors))
    text = json.dumps(described, indent=2) + "\n"
    write_atomically(target / "config.json", text.encode())


def load_policy(folder: str | Path | None = None) -> SavedSplitPolicy:
    """Read a policy.

    Args:
        folder: That :func:`save_policy` wrote; by default the weights that come with
            the package.

    Raises:
        StrategyError: If files are missing, damaged, or of another version.
    """
    source = shipped_folder() if folder is None else Path(folder)
    described = _read_description(source)
    network = SplitNetwork(described.network)
    try:
        network.load_state_dict(_read_tensors(source))
    except RuntimeError as error:
        raise StrategyError(
            f"{source}/policy.safetensors does not go with its config.json "
            f"({' '.join(str(error).split())[:200]}); write both anew"
        ) from error
    return SavedSplitPolicy(network=network.eval(), notes=described.notes)


def _read_description(source: Path) -> _Description:
    path = source / "config.json"
    try:
        described = _Description.model_validate_json(path.read_bytes())
    except OSError as error:
        raise StrategyError(
            f"{path} cannot be read ({error.strerror}); give the folder of a split "
            f"policy, with policy.safetensors and config.json"
        ) from error
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise StrategyError(f"{path}: {where}: {first['msg']}") from error
    if described.format_version != FORMAT_VERSION:
        raise StrategyError(
            f"{path} has format_version={described.format_version}, this Meshwright "
            f"reads {FORMAT_VERSION}; train the policy again, or install the version "
            f"that wrote it"
        )
    for what, theirs, ours in (
        ("features", described.features, FEATURES),
        ("priors", described.priors, PRIORS),
        ("standing", described.standing, STANDING),
    ):
        if theirs != ours:
            other = sorted(set(theirs) ^ set(ours)) or "their order"
            raise StrategyError(
                f"{path} is of a policy with other {what} than this Meshwright's "
                f"({other} differ); train it again"
            )
    return described


def _read_tensors(source: Path) -> dict[str, torch.Tensor]:
    path = source / "policy.safetensors"
    try:
        return load(path.read_bytes())
    except OSError as error:
        raise StrategyError(
            f"{path} cannot be read ({error.strerror}); it belongs to config.json"
        ) from error
    except SafetensorError as error:
        raise StrategyError(
            f"{path} holds no weights ({error}); copy it again"
        ) from error
