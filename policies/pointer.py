"""A graph network that points at one of a decision's candidates, and its weights.

Each candidate is scored by itself: by the state that it leaves behind, the devices that
it takes, the job, the cluster and the stream so far. Graph encoders read the job's ops
and the cluster's devices; no weight depends on the number of candidates, devices or
ops. Layers are those of GraphSAGE with means.

Source: Hamilton, Ying and Leskovec 2017, "Inductive representation learning on large
graphs".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor, nn

from envs.ramp.features import BLOCK_SIZES, OFFSETS
from envs.ramp.graphs import NUM_OP_FEATURES, OpGraph
from envs.ramp.history import EDGES
from planner.errors import StrategyError
from policies.graph_layers import SAGEConv, max_pool, mean_pool
from policies.saved import fill, read_weights, shipped_folder, write_weights
from policies.scorer import Scorer, check_scorer

__all__ = [
    "FORMAT_VERSION",
    "DeviceEncoder",
    "JobEncoder",
    "PointerConfig",
    "PointerNetwork",
    "SavedPolicy",
    "Widths",
    "check_widths",
    "load_policy",
    "save_policy",
    "widths_of",
]

#: Raised when the meaning of observations changes: other weights are then refused.
FORMAT_VERSION = 1

_PARTS = ("job_graph", "job", "devices", "candidates", "candidate_devices", "history")


class JobEncoder(nn.Module):
    """Encodes jobs by the numbers of their graphs.

    Observations carry numbers, not graphs: each distinct job is encoded once a batch,
    however many of its decisions are about that job.

    Args:
        graphs: Op graph of every job, in the order of their numbers.
        width: Width of the layers and of the encoding.
        layers: Number of layers.

    Raises:
        StrategyError: If there are no graphs.
    """

    nodes: Tensor
    edge_index: Tensor
    owner: Tensor

    def __init__(
        self, graphs: Sequence[OpGraph], width: int = 32, layers: int = 2
    ) -> None:
        super().__init__()
        if not graphs:
            raise StrategyError("there are no op graphs; give one of each job")
        sizes = [NUM_OP_FEATURES] + [width] * layers
        self.convolutions = nn.ModuleList(
            SAGEConv(size, width) for size in sizes[:layers]
        )
        self.pooled = nn.Linear(2 * width, width)
        self.set_graphs(graphs)

    def set_graphs(self, graphs: Sequence[OpGraph]) -> None:
        """Replace the jobs, with the same weights."""
        first = np.cumsum([0] + [len(graph.nodes) for graph in graphs])
        edges = [
            graph.edge_index + start
            for graph, start in zip(graphs, first[:-1], strict=True)
        ]
        owner = np.repeat(np.arange(len(graphs)), np.diff(first))
        device = self.pooled.weight.device
        for name, part in (
            ("nodes", np.concatenate([graph.nodes for graph in graphs])),
            ("edge_index", np.concatenate(edges, axis=1)),
            ("owner", owner),
        ):
            # Not among the weights: they belong to the world.
            held = torch.from_numpy(np.ascontiguousarray(part)).to(device)
            self.register_buffer(name, held, persistent=False)

    def forward(self, numbers: Tensor) -> Tensor:
        """Encode jobs.

        Args:
            numbers: Numbers of their graphs. Shape [b].
        Returns:
            Shape [b, width].
        """
        wanted, where = torch.unique(numbers.long(), return_inverse=True)
        hidden, edges, owner = self.nodes, self.edge_index, self.owner
        for layer in self.convolutions:
            hidden = layer(hidden, edges).relu()
        count = int(owner.max()) + 1
        pooled = [pool(hidden, owner, count) for pool in (mean_pool, max_pool)]
        encoded: Tensor = self.pooled(torch.cat(pooled, dim=1)[wanted])
        return encoded.relu()[where]


class DeviceEncoder(nn.Module):
    """Encodes the devices of a cluster, in many states at once.

    Args:
        edge_index: Neighbours among the devices. Shape [2, edges].
        features: Number of features of a device.
        width: Width of the layers and of the encoding.
        layers: Number of layers.
    """

    edge_index: Tensor

    def __init__(
        self,
        edge_index: NDArray[np.int64],
        features: int,
        width: int = 32,
        layers: int = 2,
    ) -> None:
        super().__init__()
        sizes = [features] + [width] * layers
        self.convolutions = nn.ModuleList(
            SAGEConv(size, width) for size in sizes[:layers]
        )
        self.set_edges(edge_index)

    def set_edges(self, edge_index: NDArray[np.int64]) -> None:
        """Replace the cluster, with the same weights."""
        held = torch.from_numpy(np.ascontiguousarray(edge_index, dtype=np.int64))
        device = next(self.convolutions.parameters()).device
        self.register_buffer("edge_index", held.to(device), persistent=False)

    def forward(self, devices: Tensor) -> Tensor:
        """Encode states.

        Args:
            devices: Features. Shape [b, n, features].
        Returns:
            Shape [b, n, width].
        """
        # One graph for all states: layers take nodes on the axis before the last.
        hidden = devices
        for layer in self.convolutions:
            hidden = layer(hidden, self.edge_index).relu()
        return hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """Numbers of features in an observation.

    Attributes:
        job: Features of the job at the head.
        devices: Features of a device.
        candidates: Features of a candidate.
        history: Features of the stream so far.
    """

    job: int
    devices: int
    candidates: int
    history: int


def widths_of(space: spaces.Space[Any]) -> Widths:
    """Return the widths of an environment's observations.

    Raises:
        StrategyError: If they are not observations of a job stream.
    """
    if not isinstance(space, spaces.Dict) or not set(_PARTS) <= set(space.spaces):
        raise StrategyError(
            f"observations of a job stream have {', '.join(_PARTS)}; these are {space} "
            f"(an environment made with observe=False leaves most of them out)"
        )
    sizes = {name: (space[name].shape or (0,))[-1] for name in _PARTS}
    return Widths(
        job=sizes["job"],
        devices=sizes["devices"],
        candidates=sizes["candidates"],
        history=sizes["history"],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PointerConfig:
    """Sizes of a pointer network.

    Attributes:
        width: Width of the graph encoders.
        layers: Layers of each encoder.
        hidden: Units of each of the two layers that score a candidate, and of the two
            that value a state.
        temperature: Divisor that turns scores into logits, at the start.
    """

    width: int = 32
    layers: int = 2
    hidden: int = 32
    temperature: float = 0.05

    def __post_init__(self) -> None:
        if min(self.width, self.layers, self.hidden) < 1 or not self.temperature > 0:
            raise StrategyError(
                f"width={self.width}, layers={self.layers}, hidden={self.hidden} of a "
                f"network are at least 1, temperature={self.temperature} is positive"
            )


class PointerNetwork(nn.Module):
    """Computes logits of candidates, and features to value the state by.

    Args:
        graphs: Op graph of every job, in the order of their numbers.
        device_edges: Neighbours among the devices. Shape [2, edges].
        widths: Widths of observations.
        config: Sizes of the network.
    """

    def __init__(
        self,
        graphs: Sequence[OpGraph],
        device_edges: NDArray[np.int64],
        widths: Widths,
        config: PointerConfig,
    ) -> None:
        super().__init__()
        self.widths, self.config = widths, config
        width, hidden = config.width, config.hidden
        self.jobs = JobEncoder(graphs, width, config.layers)
        self.devices = DeviceEncoder(device_edges, widths.devices, width, config.layers)
        # Separate from `seen`, which takes over the weights of a scorer.
        self.seen = nn.Linear(widths.candidates + widths.history, hidden)
        self.context = nn.Linear(3 * width + widths.job, hidden, bias=False)
        self.second = nn.Linear(hidden, hidden)
        self.last = nn.Linear(hidden, 1, bias=False)
        self.log_temperature = nn.Parameter(torch.tensor(np.log(config.temperature)))
        self.state = nn.Sequential(
            nn.Linear(2 * width + widths.job + widths.history, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
        )

    def start_from(self, scorer: Scorer) -> None:
        """Set the weights to decide as a scorer does; other inputs get weight 0.

        Args:
            scorer: Over candidates and history, or over these and the job.

        Raises:
            StrategyError: If the scorer has other sizes.
        """
        hidden, inputs = self.seen.weight.shape
        job = self.widths.job
        fits = scorer.first.shape in ((inputs, hidden), (inputs + job, hidden))
        if not fits or scorer.second.shape != (hidden, hidden):
            raise StrategyError(
                f"a scorer of the shapes {scorer.first.shape} and "
                f"{scorer.second.shape} for a network of {(inputs, hidden)} and "
                f"{(hidden, hidden)}"
            )
        first = torch.from_numpy(scorer.first.T)
        with torch.no_grad():
            self.seen.weight.copy_(first[:, :inputs])
            self.seen.bias.copy_(torch.from_numpy(scorer.first_bias))
            self.second.weight.copy_(torch.from_numpy(scorer.second.T))
            self.second.bias.copy_(torch.from_numpy(scorer.second_bias))
            self.last.weight.copy_(torch.from_numpy(scorer.last[None]))
            self.context.weight.zero_()
            if first.shape[1] > inputs:
                # The job is the last part of the context.
                self.context.weight[:, -job:].copy_(first[:, inputs:])

    def forward(self, obs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Compute logits and features of decisions.

        Args:
            obs: Observations of an environment, batched.
        Returns:
            Logits of the candidates, shape [b, a]; features of the states, shape [b,
            hidden].
        """
        candidates, history = obs["candidates"], obs["history"]
        job = self.jobs(obs["job_graph"][:, 0])
        devices = self.devices(obs["devices"])
        taken = obs["candidate_devices"]
        # Turning the job away takes no devices; their mean is then 0.
        count = taken.sum(dim=2, keepdim=True).clamp(min=1.0)
        held = taken @ devices / count
        cluster = devices.mean(dim=1)
        shared = torch.cat([job, cluster, obs["job"]], dim=1)
        every = (-1, candidates.shape[1], -1)
        seen = torch.cat([candidates, history[:, None].expand(*every)], dim=2)
        around = torch.cat([held, shared[:, None].expand(*every)], dim=2)
        hidden = (self.seen(seen) + self.context(around)).relu()
        scores = self.last(self.second(hidden).relu()).squeeze(2)
        logits: Tensor = -scores / self.log_temperature.exp()
        return logits, self.state(torch.cat([shared, history], dim=1))


def check_widths(
    network: PointerNetwork, space: spaces.Space[Any], folder: str | Path
) -> None:
    """Refuse weights that were trained on observations of other sizes.

    Args:
        network: Read from the folder.
        space: Observations of the environment to decide in.
        folder: Named in the error.

    Raises:
        StrategyError: If the sizes differ.
    """
    wanted = widths_of(space)
    if network.widths != wanted:
        raise StrategyError(
            f"{folder} is of a policy for observations of {network.widths}, here they "
            f"are {wanted}; give weights that were trained in this world"
        )


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class SavedPolicy:
    """A policy of the job stream with its notes.

    Attributes:
        network: The network that decides.
        scorer: Decides in rollouts, where the network would take too long.
        notes: Worlds that it was trained and validated on.
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


def _expected() -> dict[str, Any]:
    """Fields of a description that say how observations are made."""
    return {
        "format_version": FORMAT_VERSION,
        "observation": {
            "offsets": list(OFFSETS),
            "block_sizes": [float(size) for size in BLOCK_SIZES],
            "edges": list(EDGES),
        },
    }


def save_policy(policy: SavedPolicy, folder: str | Path) -> None:
    """Write ``policy.safetensors`` and ``config.json``.

    Args:
        policy: To be kept.
        folder: Made if it does not exist.
    """
    network, scorer = policy.network, policy.scorer._asdict()
    tensors = {f"network.{name}": part for name, part in network.state_dict().items()}
    for name, part in scorer.items():
        tensors[f"scorer.{name}"] = torch.from_numpy(np.ascontiguousarray(part))
    described = _Description(
        widths=asdict(network.widths),
        network=asdict(network.config),
        notes=policy.notes,
        **_expected(),
    )
    write_weights(folder, tensors, described.model_dump())


def load_policy(
    graphs: Sequence[OpGraph],
    device_edges: NDArray[np.int64],
    folder: str | Path | None = None,
) -> SavedPolicy:
    """Read a policy, for the jobs and the cluster that it is to decide on.

    Args:
        graphs: Op graph of every job, in the order of their numbers.
        device_edges: Neighbours among the devices. Shape [2, edges].
        folder: Written by :func:`save_policy`; by default the weights that ship.

    Raises:
        StrategyError: If files are missing, damaged, or of another version.
    """
    source = shipped_folder("job_stream") if folder is None else Path(folder)
    described, tensors, _ = read_weights(source, _Description, _expected())
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
    of_network, of_scorer = (
        {
            name.removeprefix(prefix): part
            for name, part in tensors.items()
            if name.startswith(prefix)
        }
        for prefix in ("network.", "scorer.")
    )
    fill(network, of_network, source)
    missing = sorted(set(Scorer._fields) - set(of_scorer))
    if missing:
        raise StrategyError(
            f"{source} has no scorer.{missing[0]} among its weights; copy it again"
        )
    scorer = Scorer(*(of_scorer[name].numpy() for name in Scorer._fields))
    return SavedPolicy(
        network=network,
        scorer=check_scorer(scorer, scorer.first.shape[0]),
        notes=described.notes,
    )
