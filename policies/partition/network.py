"""The partitioner's network: reads model and cluster, scores meshes and groups.

One network has two pointers. The first scores meshes (how many ways along each axis);
the second puts groups of devices in order, one after the other, and sees at each step
the links that a group would have in the mesh: to its stage, to the stage before it and
to the replicas beside it. Weights depend on no size.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import pydantic
import torch
from torch import Tensor, nn

from envs.partition.features import (
    FEATURE_VERSION,
    GROUP_FEATURES,
    MESH_FEATURES,
    UNIT_FEATURES,
    WHOLE_FEATURES,
    Observed,
)
from envs.partition.ordering import STEP_FEATURES
from planner.errors import StrategyError
from policies.graph_layers import SAGEConv
from policies.saved import fill, read_weights, shipped_folder, write_weights

__all__ = [
    "Encoded",
    "NetworkConfig",
    "PartitionNetwork",
    "SavedNetwork",
    "load_network",
    "save_network",
]


#: Largest sizes; ten times those of any network that was of use.
_MOST_WIDTH, _MOST_LAYERS = 4096, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkConfig:
    """Sizes of the network.

    Attributes:
        width: Width of the graph encoders.
        layers: Layers of each encoder.
        hidden: Width of the layers that score a candidate.
        graphs: Whether graphs are read; without them, candidates are scored by their
            own features and those of the whole problem alone (an ablation).
    """

    width: int = 48
    layers: int = 2
    hidden: int = 96
    graphs: bool = True

    def __post_init__(self) -> None:
        if min(self.width, self.layers, self.hidden) < 1:
            raise StrategyError(
                f"width={self.width}, layers={self.layers}, hidden={self.hidden} of a "
                f"network are at least 1"
            )
        # A damaged description must not ask for all memory.
        if max(self.width, self.hidden) > _MOST_WIDTH or self.layers > _MOST_LAYERS:
            raise StrategyError(
                f"width={self.width}, layers={self.layers}, hidden={self.hidden} of a "
                f"network are more than {_MOST_WIDTH} wide or {_MOST_LAYERS} layers; "
                f"give less"
            )


@dataclass(frozen=True, eq=False, slots=True)
class Encoded:
    """Encoding of a problem.

    Attributes:
        groups: Shape [groups, width].
        world: Shape [width].
    """

    groups: Tensor
    world: Tensor


class _Graph(nn.Module):
    """Graph encoder: convolutions, each with a residual."""

    def __init__(self, features: int, width: int, layers: int) -> None:
        super().__init__()
        self.first = nn.Linear(features, width)
        self.layers = nn.ModuleList(SAGEConv(width, width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        hidden = torch.relu(self.first(nodes))
        for layer, norm in zip(self.layers, self.norms, strict=True):
            hidden = hidden + torch.relu(norm(layer(hidden, edges)))
        return hidden


def _pooled(nodes: Tensor) -> Tensor:
    return torch.cat([nodes.mean(dim=0), nodes.amax(dim=0)])


class PartitionNetwork(nn.Module):
    """Scores meshes, then groups of devices one after the other.

    Args:
        config: Sizes; the defaults if None.
    """

    def __init__(self, config: NetworkConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or NetworkConfig()
        width, hidden = config.width, config.hidden
        self.units = _Graph(UNIT_FEATURES, width, config.layers)
        self.devices = _Graph(GROUP_FEATURES, width, config.layers)
        # Groups ask the model's units what will run on them.
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.world = nn.Sequential(
            nn.Linear(4 * width + WHOLE_FEATURES, hidden),
            nn.ReLU(),
            nn.Linear(hidden, width),
        )
        self.mesh = nn.Sequential(
            nn.Linear(MESH_FEATURES + width, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 1),
        )
        self.group = nn.Linear(width, hidden)
        self.context = nn.Linear(MESH_FEATURES + width, hidden)
        self.step = nn.Linear(STEP_FEATURES, hidden)
        self.point = nn.Linear(hidden, 1)

    def encode(self, seen: Observed) -> Encoded:
        """Encode both graphs, once for all decisions about a problem."""
        whole = torch.from_numpy(seen.whole)
        units = self.units(
            torch.from_numpy(seen.units), torch.from_numpy(seen.unit_edges)
        )
        groups = self.devices(
            torch.from_numpy(seen.groups), torch.from_numpy(seen.group_edges)
        )
        if not self.config.graphs:
            units, groups = units * 0, groups * 0
        asked = self.query(groups) @ self.key(units).T / self.config.width**0.5
        groups = groups + torch.softmax(asked, dim=1) @ self.value(units)
        if not self.config.graphs:
            groups = groups * 0
        world = self.world(torch.cat([_pooled(units), _pooled(groups), whole]))
        return Encoded(groups, world)

    def mesh_logits(self, seen: Observed, encoded: Encoded) -> Tensor:
        """Return a logit for each mesh. Shape [choices]."""
        meshes = torch.from_numpy(seen.meshes)
        world = encoded.world.expand(len(meshes), -1)
        scored: Tensor = self.mesh(torch.cat([meshes, world], dim=1))
        return scored[:, 0]

    def bases(self, seen: Observed, encoded: Encoded, choice: Tensor) -> Tensor:
        """Part of the group logits that is the same at every step.

        Args:
            seen: The problem.
            encoded: Its encoding.
            choice: Mesh of each order. Shape [n].
        Returns:
            Shape [n, groups, hidden].
        """
        meshes = torch.from_numpy(seen.meshes)[choice]
        world = encoded.world.expand(len(meshes), -1)
        of_mesh = self.context(torch.cat([meshes, world], dim=1))
        made: Tensor = self.group(encoded.groups)[None] + of_mesh[:, None]
        return made

    def step_logits(self, bases: Tensor, steps: Tensor) -> Tensor:
        """Return a logit for each group as the next one. Shape [n, groups].

        Args:
            bases: From :meth:`bases`.
            steps: Shape [n, groups, STEP_FEATURES].
        """
        scored: Tensor = self.point(torch.relu(bases + self.step(steps)))
        return scored[..., 0]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class SavedNetwork:
    """A network with its notes.

    Attributes:
        network: In evaluation mode.
        checkpoint: SHA-256 of its weights, which provenance names.
        notes: Worlds that it was trained and validated on.
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


def save_network(
    network: PartitionNetwork, notes: dict[str, Any], folder: str | Path
) -> None:
    """Write ``policy.safetensors`` and ``config.json``.

    Args:
        network: To be kept.
        notes: Worlds that it was trained and validated on; JSON values.
        folder: Made if it does not exist.
    """
    described = {
        "feature_version": FEATURE_VERSION,
        "network": asdict(network.config),
        "notes": notes,
    }
    write_weights(folder, network.state_dict(), described)
    # Another network may have been read from this folder before.
    load_network.cache_clear()


@lru_cache(maxsize=4)
def load_network(folder: Path | None = None) -> SavedNetwork:
    """Read a network.

    Args:
        folder: Written by :func:`save_network`; by default the weights that ship.

    Raises:
        StrategyError: If files are missing, damaged, or of another feature version.
    """
    source = folder or shipped_folder("partition")
    expected = {"feature_version": FEATURE_VERSION}
    described, tensors, checkpoint = read_weights(source, _Description, expected)
    network = PartitionNetwork(described.network)
    fill(network, tensors, source)
    return SavedNetwork(network=network, checkpoint=checkpoint, notes=described.notes)
