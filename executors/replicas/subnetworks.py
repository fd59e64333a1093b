"""Copies that train narrower models, and deal out the neurons anew every few steps.

A copy holds its own neurons' weights alone (:mod:`executors.strategies.narrow`), and
trains them by itself. At the end of a round of ``local_steps`` steps all that belongs
to no neuron is averaged, and each neuron's weights go to the copy that has it next: one
``all_to_all_single`` a piece of the weights, from owner to owner. Who has which neuron
is a permutation that every copy draws from the same seed, so that no indices travel.

Layers that are cut along both dimensions lie in equal runs of rows on the copies. From
them each copy gets what it trains at the beginning of a round, where its neurons of
both sides meet, and to them it returns at the end: an all-to-all each way.

Checkpoints hold the whole model: for one, and when one is read, neurons lie in the
model's own order, an equal run of them on each copy.
Source: Yuan et al. 2022, arXiv 1910.02120.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from executors.replicas.pieces import local_part, pieces
from executors.replicas.rounds import Rounds, average
from executors.strategies.narrow import KEPT_ROWS, find_groups
from planner.schema import TensorSharding
from planner.schema.methods.subnetworks import Subnetworks

if TYPE_CHECKING:
    from executors.trainer import Trainer

__all__ = ["SubnetworksReplicas", "deal_neurons"]

Index = NDArray[np.int64]


def deal_neurons(
    neurons: int, copies: int, *, seed: int, turn: int | None, group: int
) -> Index:
    """Neurons of each copy in a round, in ascending order.

    Args:
        neurons: How many there are; a multiple of ``copies``.
        copies: Number of copies.
        seed: Shared by all.
        turn: Number of the round; None for the model's own order.
        group: Number of the group of layers, each of which is dealt out by itself.

    Returns:
        Shape [copies, neurons / copies].
    """
    if turn is None:
        return np.arange(neurons).reshape(copies, -1)
    order = np.random.default_rng([seed, turn, group]).permutation(neurons)
    return np.asarray(np.sort(order.reshape(copies, -1), axis=1))


@dataclass(frozen=True, slots=True)
class _Part:
    """Place of the neurons in what a copy holds of a parameter.

    Attributes:
        dim: Dimension along which they lie.
        group: Number of their group.
        neurons: Of the group, on all copies.
    """

    dim: int
    group: int
    neurons: int


@dataclass(frozen=True, slots=True)
class _Meeting:
    """Place of the neurons of two groups in a weight that is cut both ways.

    Attributes:
        parts: Along rows, and along columns.
        rows: This copy's rows of the whole weight; a buffer.
    """

    parts: tuple[_Part, _Part]
    rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Route:
    """Way of a copy's neurons from one round to another.

    Attributes:
        leave: Rows that it sends, by receiver.
        sent: How many to each copy.
        arrive: Rows that it gets, by sender.
        got: How many from each copy.
    """

    leave: torch.Tensor
    sent: list[int]
    arrive: torch.Tensor
    got: list[int]


@dataclass(frozen=True, slots=True)
class _Crossing:
    """Places in a weight where the neurons that copies have in a round meet.

    Attributes:
        own: Rows of what this copy trains, by the copy that keeps them.
        kept: Rows, of those that this copy keeps, and columns, by the copy that trains
            them.
        shapes: Sizes of the messages, by the copy that trains and the one that keeps.
    """

    own: list[slice]
    kept: list[tuple[torch.Tensor, ...]]
    shapes: list[list[tuple[int, int]]]


class SubnetworksReplicas(Rounds):
    """Trains a share of the neurons on each copy, another one in each round.

    Args:
        synchronisation: Its settings.
    """

    def __init__(self, synchronisation: Subnetworks) -> None:
        super().__init__(synchronisation.local_steps)
        self.settings = synchronisation
        #: Dimension that copies divide of each parameter of which they hold parts.
        self.split: dict[nn.Parameter, int] = {}
        self._parts: dict[nn.Parameter, _Part] = {}
        self._meetings: dict[nn.Parameter, _Meeting] = {}
        self._common: list[nn.Parameter] = []
        self._group: dist.ProcessGroup | None = None
        self._copies, self._index = 1, 0
        #: Round whose neurons this copy has; None for a run of the model's own order.
        self._round: int | None = None

    def attach(self, trainer: Trainer) -> None:
        """Tell parameters with neurons from those that are averaged."""
        place = trainer.place
        self._group = place.group("replicate")
        self._copies, self._index = place.size("replicate"), place.index("replicate")
        self._optimizer = trainer.optimizer
        if self._copies > 1:
            (part,) = trainer.parts.values()
            self._find_parts(part.inner, trainer.plan.strategy.sharding)
        self._common = [
            parameter
            for parameter in trainer.all_parameters()
            if parameter.requires_grad and parameter not in self.split
        ]

    def _find_parts(self, model: nn.Module, sharding: TensorSharding) -> None:
        found: dict[str, list[_Part]] = {}
        groups = find_groups(model, sharding, chains=self.settings.chains)
        for number, group in enumerate(groups):
            for cut in group.parameters:
                part = _Part(cut.dim, number, group.neurons * self._copies)
                found.setdefault(cut.name, []).append(part)
        for name, parts in found.items():
            parameter = model.get_parameter(name)
            if len(parts) == 1:
                self._parts[parameter] = parts[0]
                self.split[parameter] = parts[0].dim
            else:
                layer = model.get_submodule(name.rpartition(".")[0])
                first, second = sorted(parts, key=lambda part: part.dim)
                rows = layer.get_buffer(KEPT_ROWS)
                self._meetings[parameter] = _Meeting((first, second), rows)
                self.split[parameter] = 0

    def before_forward(self, step: int) -> None:
        """Take the neurons of the round if a run begins in it."""
        if self._forced is None:
            self._deal(step // self.settings.local_steps, trained=False)

    def after_backward(self, step: int) -> None:
        """Do nothing."""

    def after_update(self, step: int) -> None:
        """End the round that is over, and begin the next."""
        if self._forced is not None:
            if self._forced == "exchange":
                self._end((self._round or 0) + 1)
        elif (step + 1) % self.settings.local_steps == 0:
            self._end((step + 1) // self.settings.local_steps)

    def _end(self, following: int) -> None:
        # What it kept is of neurons that are elsewhere from now on.
        self._optimizer.state.clear()
        average(self._common, self._group)
        self._deal(following, trained=True)

    def _deal(self, turn: int, *, trained: bool) -> None:
        """Give this copy's neurons away, and take those of another round.

        Args:
            turn: Number of that round.
            trained: Whether weights have changed since neurons were dealt.
        """
        if turn == self._round:
            return
        values = {parameter: local_part(parameter) for parameter in self._parts}
        for parameter, dealt in self._moved(values, self._round, turn):
            values[parameter].copy_(dealt)
        if trained:
            own = {p: local_part(p) for p in self._meetings}
            kept = {p: one.rows for p, one in self._meetings.items()}
            self._return_to_rows(own, kept)
        self._round = turn
        self._take_from_rows()

    def in_order(
        self, values: Mapping[nn.Parameter, torch.Tensor], *, gradients: bool = False
    ) -> dict[nn.Parameter, torch.Tensor]:
        """Values of neurons in the model's own order: a run of them on each copy.

        Collective.

        Args:
            values: What this rank holds for each neuron of some parameters, such as
                their gradients; equal keys on all ranks.
            gradients: Whether they are zero where neurons do not meet in this round.

        Returns:
            For those that have neurons, new tensors.
        """
        own = {p: values[p] for p in self._parts if p in values}
        # Pieces are dropped as they are copied.
        found = {p: v.clone() for p, v in self._moved(own, self._round, None)}
        met = {p: values[p] for p in self._meetings if p in values}
        for parameter in met:
            rows = self._meetings[parameter].rows
            found[parameter] = torch.zeros_like(rows) if gradients else rows.clone()
        self._return_to_rows(met, found)
        return found

    def kept(self, parameter: nn.Parameter) -> torch.Tensor:
        """See :meth:`executors.replicas.SplitReplicas.kept`."""
        if parameter in self._meetings:
            return self._meetings[parameter].rows
        return local_part(parameter)

    def _return_to_rows(
        self,
        values: Mapping[nn.Parameter, torch.Tensor],
        rows: Mapping[nn.Parameter, torch.Tensor],
    ) -> None:
        """Send what copies train to those who keep its rows; collective.

        Args:
            values: What this copy has where its neurons meet.
            rows: What it keeps; changed in place.
        """
        for piece in pieces(values):
            crossings = [self._crossing(parameter) for parameter in piece]
            leaving = [
                [
                    values[parameter][crossing.own[owner]]
                    for parameter, crossing in zip(piece, crossings, strict=True)
                ]
                for owner in range(self._copies)
            ]
            shapes = [
                [crossing.shapes[copy][self._index] for crossing in crossings]
                for copy in range(self._copies)
            ]
            for copy, came in enumerate(_exchanged(leaving, shapes, self._group)):
                for parameter, crossing, new in zip(
                    piece, crossings, came, strict=True
                ):
                    down, across = crossing.kept[copy]
                    rows[parameter][down[:, None], across] = new

    def _take_from_rows(self) -> None:
        """Get what this copy trains in the round from those who keep it; collective."""
        for piece in pieces(self._meetings):
            crossings = [self._crossing(parameter) for parameter in piece]
            leaving = [
                [
                    self._meetings[parameter].rows[
                        crossing.kept[copy][0][:, None], crossing.kept[copy][1]
                    ]
                    for parameter, crossing in zip(piece, crossings, strict=True)
                ]
                for copy in range(self._copies)
            ]
            shapes = [
                [crossing.shapes[self._index][owner] for crossing in crossings]
                for owner in range(self._copies)
            ]
            came = _exchanged(leaving, shapes, self._group)
            for parameter, parts in zip(piece, zip(*came, strict=True), strict=True):
                local_part(parameter).copy_(torch.cat(parts))

    def _crossing(self, parameter: nn.Parameter) -> _Crossing:
        meeting = self._meetings[parameter]
        down, across = (self._dealt(part, self._round) for part in meeting.parts)
        device, first = parameter.device, self._index * len(meeting.rows)
        bounds = np.arange(self._copies + 1) * len(meeting.rows)
        runs = [np.searchsorted(own, bounds) for own in down]
        kept = []
        for own, run, columns in zip(down, runs, across, strict=True):
            mine = own[run[self._index] : run[self._index + 1]] - first
            places = (torch.from_numpy(one).to(device) for one in (mine, columns))
            kept.append(tuple(places))
        return _Crossing(
            own=[slice(*ends) for ends in pairwise(runs[self._index].tolist())],
            kept=kept,
            shapes=[
                [(stop - start, across.shape[1]) for start, stop in pairwise(run)]
                for run in (one.tolist() for one in runs)
            ],
        )

    def _dealt(self, part: _Part, turn: int | None) -> Index:
        return deal_neurons(
            part.neurons,
            self._copies,
            seed=self.settings.seed,
            turn=turn,
            group=part.group,
        )

    def _moved(
        self,
        values: Mapping[nn.Parameter, torch.Tensor],
        before: int | None,
        after: int | None,
    ) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Values of the neurons that this copy has in another round, in pieces."""
        for piece in pieces(values):
            parts = [self._parts[parameter] for parameter in piece]
            routes = [self._route(part, before, after) for part in parts]
            rows = [
                values[parameter].movedim(part.dim, 0).reshape(len(route.leave), -1)
                for parameter, part, route in zip(piece, parts, routes, strict=True)
            ]
            came = self._exchange(rows, routes)
            for parameter, part, new in zip(piece, parts, came, strict=True):
                shape = values[parameter].movedim(part.dim, 0).shape
                yield parameter, new.reshape(shape).movedim(0, part.dim)

    def _route(self, part: _Part, before: int | None, after: int | None) -> _Route:
        old, new = (self._dealt(part, turn) for turn in (before, after))
        leave, sent = _by_copy(old[self._index], new)
        arrive, got = _by_copy(new[self._index], old)
        return _Route(leave=leave, sent=sent, arrive=arrive, got=got)

    def _exchange(
        self, rows: Sequence[torch.Tensor], routes: Sequence[_Route]
    ) -> list[torch.Tensor]:
        """Send rows to their new owners, in one message to each.

        Args:
            rows: One a neuron. Shapes [neurons of a copy, scalars of a neuron].
            routes: Of each.
        """
        widths = [one.shape[1] for one in rows]
        leaving = [
            torch.split(one.index_select(0, route.leave.to(one.device)), route.sent)
            for one, route in zip(rows, routes, strict=True)
        ]
        flat = torch.cat(
            [p.reshape(-1) for by in zip(*leaving, strict=True) for p in by]
        )
        sent = np.array([route.sent for route in routes]).T @ widths
        got = np.array([route.got for route in routes]).T @ widths
        came = torch.empty_like(flat)
        dist.all_to_all_single(
            came, flat, got.tolist(), sent.tolist(), group=self._group
        )
        found = [torch.empty_like(one) for one in rows]
        for source, message in enumerate(torch.split(came, got.tolist())):
            sizes = [
                width * route.got[source]
                for width, route in zip(widths, routes, strict=True)
            ]
            for new, route, values in zip(
                found, routes, torch.split(message, sizes), strict=True
            ):
                first = sum(route.got[:source])
                places = route.arrive[first : first + route.got[source]].to(new.device)
                new[places] = values.view(len(places), new.shape[1])
        return found

    def restored(self, *, complete: bool) -> None:
        """Begin with neurons in the model's own order, and a new optimizer."""
        self._round = None
        for parameter, meeting in self._meetings.items():
            columns = meeting.rows.chunk(self._copies, dim=1)[self._index]
            local_part(parameter).copy_(columns)
        self._optimizer.state.clear()


def _by_copy(mine: Index, theirs: Index) -> tuple[torch.Tensor, list[int]]:
    """Places of some neurons, ordered by the copy that has them, and their numbers.

    Args:
        mine: Neurons of one copy. Shape [k].
        theirs: Neurons of all copies. Shape [copies, k].
    """
    owner = np.empty(theirs.size, dtype=np.int64)
    owner[theirs] = np.arange(len(theirs))[:, None]
    order = np.argsort(owner[mine], kind="stable")
    counts = np.bincount(owner[mine], minlength=len(theirs))
    return torch.from_numpy(order), counts.tolist()


def _exchanged(
    leaving: Sequence[Sequence[torch.Tensor]],
    shapes: Sequence[Sequence[tuple[int, int]]],
    group: dist.ProcessGroup | None,
) -> list[list[torch.Tensor]]:
    """Send tensors to each copy, in one message, and return what has come from each.

    Args:
        leaving: By copy, equally many to each.
        shapes: Of those that come, by copy.
        group: The copies.
    """
    sizes = [[rows * columns for rows, columns in each] for each in shapes]
    flat = torch.cat([one.reshape(-1) for each in leaving for one in each])
    came = flat.new_empty(sum(map(sum, sizes)))
    sent = [sum(one.numel() for one in each) for each in leaving]
    dist.all_to_all_single(came, flat, [*map(sum, sizes)], sent, group=group)
    parts = iter(torch.split(came, [size for each in sizes for size in each]))
    return [[next(parts).view(shape) for shape in each] for each in shapes]
