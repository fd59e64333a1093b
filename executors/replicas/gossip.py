"""Copies that average their weights with a few others in each step.

A step sends what its forward begins with, one all-reduce over the group of the round,
and waits for it after backward. A copy then takes

x ← w x + (1 - w)/(G - 1) Σ_j x_j,

and the optimizer updates that mix by the gradient at the weights before it. All copies
of a group send equal shares of each other, so that mixing keeps the mean of all.

Exchanges are of local shards: ZeRO, tensor and pipeline parallelism inside a copy take
no further messages. Nothing is under way between steps.
Source: Wang et al. 2025, arXiv 2410.11998, section 3.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from executors.mesh import ProcessMesh
from executors.replicas.accumulating_adam import AccumulatingAdam
from executors.replicas.pieces import local_part, pieces
from planner.schema.methods.gossip import Gossip, Round, copies_per_host, rounds_of

if TYPE_CHECKING:
    from executors.trainer import Trainer

__all__ = ["GossipReplicas", "host_name"]


@dataclass(frozen=True, slots=True)
class _Message:
    """Sum of some weights over a group, on its way."""

    weights: Sequence[nn.Parameter]
    values: torch.Tensor
    work: dist.Work | None


class GossipReplicas:
    """Mixes the trained weights of a group of copies in each step.

    Args:
        synchronisation: Its settings.
    """

    rests_every = 1
    lead_in = 0

    def __init__(self, synchronisation: Gossip) -> None:
        self.settings = synchronisation
        (self._phase,) = synchronisation.phases
        self._trained: list[nn.Parameter] = []
        #: Group of this rank in each round; None where it is alone.
        self._groups: list[dist.ProcessGroup | None] = []
        self._under_way: list[_Message] = []

    def attach(self, trainer: Trainer) -> None:
        """Make the groups of all rounds, and Adam with moments that wait."""
        place = trainer.place
        self._trained = [p for p in trainer.all_parameters() if p.requires_grad]
        hosts = _hosts_of_copies(place)
        rounds = rounds_of(self.settings.topology, len(hosts), copies_per_host(hosts))
        self._groups = _groups(place, rounds)
        if self.settings.commit_every > 1:
            spec = trainer.plan.strategy.optimizer
            trainer.optimizer = AccumulatingAdam(
                trainer.optimizer.param_groups,
                spec,
                commit_every=self.settings.commit_every,
            )

    def _group(self, step: int) -> dist.ProcessGroup | None:
        return self._groups[step % len(self._groups)]

    def before_forward(self, step: int) -> None:
        """Send the weights that the step begins with."""
        group = self._group(step)
        if group is None:
            return
        for piece in pieces(self._trained):
            flat = torch.cat([local_part(weight).reshape(-1) for weight in piece])
            work = dist.all_reduce(flat, group=group, async_op=True)
            self._under_way.append(_Message(piece, flat, work))

    def after_backward(self, step: int) -> None:
        """Mix what has come into the weights, before the optimizer's step."""
        group = self._group(step)
        if group is None:
            return
        # Of the sum, in which a copy's own weights are.
        others = (1 - self.settings.self_weight) / (group.size() - 1)
        own = self.settings.self_weight - others
        for message in self._under_way:
            if message.work is not None:
                message.work.wait()
            sizes = [local_part(weight).numel() for weight in message.weights]
            parts = torch.split(message.values, sizes)
            for weight, part in zip(message.weights, parts, strict=True):
                local = local_part(weight)
                local.mul_(own).add_(part.view_as(local), alpha=others)
        self._under_way = []

    def after_update(self, step: int) -> None:
        """Do nothing."""

    def settle(self) -> None:
        """Do nothing: a step ends what it began."""

    def rests(self, done: int) -> bool:
        """Return True: a step ends what it began."""
        return True

    def meets(self, done: int) -> bool:
        """Return True every few steps: a slow copy holds up its neighbours alone."""
        return done % self.settings.LOSS_EVERY == 0

    def in_sync(self, done: int) -> bool:
        """Return False: copies are near each other, but differ."""
        return False

    def state(self) -> Mapping[str, Mapping[nn.Parameter, torch.Tensor]]:
        """Nothing is kept from step to step."""
        return {}

    def restored(self, *, complete: bool) -> None:
        """Do nothing: the number of the step tells the round."""

    def phase(self, step: int) -> str:
        """Name of the one phase that there is."""
        return self._phase

    def force(self, phase: str | None) -> None:
        """Do nothing: every step is of the one phase."""


def host_name() -> str:
    """Name of the machine that this process is on."""
    return socket.gethostname()


def _hosts_of_copies(place: ProcessMesh) -> list[str]:
    """Host of the first rank of each copy; collective over all ranks."""
    ranks = _ranks(place)
    if dist.get_backend() == "fake":
        return [""] * ranks.shape[1]
    hosts = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, host_name())
    return [hosts[rank] for rank in ranks[0, :, 0, 0].tolist()]


def _ranks(place: ProcessMesh) -> NDArray[np.int64]:
    """Ranks of all processes. Shape [pp, replicate, shard, tp]."""
    sizes = [place.size(axis) for axis in ("pp", "replicate", "shard", "tp")]
    return np.arange(dist.get_world_size()).reshape(sizes)


def _groups(
    place: ProcessMesh, rounds: Sequence[Round]
) -> list[dist.ProcessGroup | None]:
    """Groups of this rank, one a round; collective over all ranks."""
    ranks, me = _ranks(place), dist.get_rank()
    mine: dict[tuple[int, ...], dist.ProcessGroup] = {}
    found: list[dist.ProcessGroup | None] = []
    made: set[tuple[int, ...]] = set()
    for groups in rounds:
        found.append(None)
        for copies in groups:
            # Ranks that hold one shard: a row each.
            held = np.moveaxis(ranks[:, list(copies)], 1, -1)
            held = held.reshape(-1, len(copies))
            for row in held.tolist() if len(copies) > 1 else []:
                members = tuple(row)
                if members not in made:
                    made.add(members)
                    # Every rank makes every group, in one order.
                    group = dist.new_group(row)
                    if me in members:
                        mine[members] = group
                if me in members:
                    found[-1] = mine[members]
    return found
