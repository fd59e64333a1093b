"""Weights of a policy in files: safetensors beside a JSON that describes them.

Nothing is unpickled: weights from elsewhere cannot run code.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load, save

from envs.ramp.features import BLOCK_SIZES, OFFSETS
from envs.ramp.graphs import OpGraph
from envs.ramp.history import EDGES
from planner.errors import StrategyError
from planner.schema import write_atomically
from policies.pointer import PointerConfig, PointerNetwork, Widths
from policies.scorer import Scorer, check_scorer

__all__ = [
    "FORMAT_VERSION",
    "SavedPolicy",
    "load_policy",
    "save_policy",
    "shipped_folder",
]

#: Raised when what observations mean changes: other weights are then refused.
FORMAT_VERSION = 1


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class SavedPolicy:
    """A policy as it is kept.

    Attributes:
        network: That decides.
        scorer: That decides in rollouts, where the network would take too long.
        notes: What it was trained and validated on.
    """

    network: PointerNetwork
    scorer: Scorer
    notes: dict[str, Any] = field(default_factory=dict)


class _Description(pydantic.BaseModel):
    """``config.json``."""

    model_config = pydantic.ConfigDict(extra="forbid")

    format_version: int
    widths: dict[str, int]
    network: dict[str, float]
    observation: dict[str, list[float]]
    notes: dict[str, Any]


def _observation() -> dict[str, list[float]]:
    """What the numbers of an observation are counted at."""
    return {
        "offsets": list(OFFSETS),
        "block_sizes": [float(size) for size in BLOCK_SIZES],
        "edges": list(EDGES),
    }


def shipped_folder(world: str = "job_stream") -> Path:
    """Of the weights that come with the package.

    Args:
        world: ``job_stream`` for the replay, ``job_stream_world`` for any cluster.
    """
    return Path(str(files("policies") / "weights" / world))


def save_policy(policy: SavedPolicy, folder: str | Path) -> None:
    """Write ``policy.safetensors`` and ``config.json``.

    Args:
        policy: To be kept.
        folder: Made if it is not there.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"network.{name}": part.detach().contiguous()
        for name, part in policy.network.state_dict().items()
    }
    for name, part in policy.scorer._asdict().items():
        tensors[f"scorer.{name}"] = torch.from_numpy(np.ascontiguousarray(part))
    described = _Description(
        format_version=FORMAT_VERSION,
        widths=asdict(policy.network.widths),
        network=asdict(policy.network.config),
        observation=_observation(),
        notes=policy.notes,
    )
    # Weights first: a description that is there has its weights beside it.
    write_atomically(target / "policy.safetensors", save(tensors))
    text = json.dumps(described.model_dump(), indent=2) + "\n"
    write_atomically(target / "config.json", text.encode())


def load_policy(
    graphs: list[OpGraph] | tuple[OpGraph, ...],
    device_edges: NDArray[np.int64],
    folder: str | Path | None = None,
) -> SavedPolicy:
    """Read a policy, for the jobs and the cluster that it is to decide on.

    Args:
        graphs: Op graph of every job, in the order of their numbers.
        device_edges: Neighbours among the devices. Shape [2, edges].
        folder: That :func:`save_policy` wrote; by default the weights that come with
            the package.
    Raises:
        StrategyError: If files are missing, damaged, or of another version.
    """
    source = shipped_folder() if folder is None else Path(folder)
    described = _read_description(source)
    tensors = _read_tensors(source)
    sizes = described.network
    network = PointerNetwork(
        graphs,
        device_edges,
        Widths(**described.widths),
        PointerConfig(
            width=int(sizes["width"]),
            layers=int(sizes["layers"]),
            hidden=int(sizes["hidden"]),
            temperature=sizes["temperature"],
        ),
    )
    weights = {
        name.removeprefix("network."): part
        for name, part in tensors.items()
        if name.startswith("network.")
    }
    try:
        network.load_state_dict(weights)
        scorer = Scorer(*(tensors[f"scorer.{n}"].numpy() for n in Scorer._fields))
        scorer = check_scorer(scorer, scorer.first.shape[0])
    except (KeyError, RuntimeError) as error:
        raise StrategyError(
            f"{source}/policy.safetensors does not go with its config.json "
            f"({' '.join(str(error).split())[:200]}); write both anew"
        ) from error
    return SavedPolicy(network=network.eval(), scorer=scorer, notes=described.notes)


def _read_description(source: Path) -> _Description:
    path = source / "config.json"
    try:
        described = _Description.model_validate_json(path.read_bytes())
    except OSError as error:
        raise StrategyError(
            f"{path} cannot be read ({error.strerror}); give the folder of a policy, "
            f"with policy.safetensors and config.json"
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
    if described.observation != _observation():
        raise StrategyError(
            f"{path} is of a policy that observes at {described.observation}, here it "
            f"is {_observation()}; train it again"
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
