"""A network that points at one of a decision's candidates.

Each candidate is scored by itself, from what it leaves behind, the devices that it
takes, the job, the cluster and the stream so far: there may be any number of
candidates, devices and ops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from envs.ramp.graphs import OpGraph
from planner.errors import StrategyError
from policies.encoders import DeviceEncoder, JobEncoder
from policies.scorer import Scorer

__all__ = ["PointerConfig", "PointerNetwork", "Widths"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """How many numbers an observation has of each thing.

    Attributes:
        job: Of the job at the head.
        devices: Of a device.
        candidates: Of a candidate.
        history: Of the stream so far.
    """

    job: int
    devices: int
    candidates: int
    history: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PointerConfig:
    """Sizes of a pointer network.

    Attributes:
        width: Of the graph encoders.
        layers: Of each encoder.
        hidden: Units of each of the two layers that score a candidate, and of those
            that value a state.
        temperature: By which scores are divided to make logits, at the start.
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
    """Logits of candidates, and features to value the state by.

    Args:
        graphs: Op graph of every job, in the order of their numbers.
        device_edges: Neighbours among the devices. Shape [2, edges].
        widths: Of observations.
        config: Sizes.
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
        # Apart from `seen`, so that a scorer's weights have a place of their own.
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
        """Begin as a scorer does: what it does not look at counts for nothing yet.

        Args:
            scorer: Of candidates and history, or of these and the job.

        Raises:
            StrategyError: If the scorer is of other sizes.
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
                # The job comes last of what surrounds a candidate.
                self.context.weight[:, -job:].copy_(first[:, inputs:])

    def forward(self, obs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Look at decisions.

        Args:
            obs: As the environments' ``observation_space`` says, with a leading axis.
        Returns:
            Logits of the candidates, shape [b, a]; features of the states, shape [b,
            hidden].
        """
        candidates, history = obs["candidates"], obs["history"]
        job = self.jobs(obs["job_graph"][:, 0])
        devices = self.devices(obs["devices"])
        taken = obs["candidate_devices"]
        # Turning away takes none; the mean of none is 0.
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
